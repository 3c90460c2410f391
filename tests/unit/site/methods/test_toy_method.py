"""A method from elsewhere at a site: its room is registered, no file of it is edited.

The toy adds a length to all parameters, as often as it is asked. The server's half of
it does not exist: a run of ADMM is the toy's at the sites, and a request of the toy
takes the place of the run's first one in training.
"""

from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import pytest
from flwr.app import Message

from client_apps.app import make_app
from client_apps.methods import registry
from client_apps.methods.site_method import Beginning, JoinMethod, prepared_part
from client_apps.rounds.site import Site
from strategies.run.grid import InProcessGrid
from tests.support.peers import hostile
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.method import METHODS
from tp_flower.protocol import fields
from tp_flower.protocol.codec import add_envelope, encode, read_envelope
from tp_flower.protocol.messages import Action, RequestEnvelope
from tp_flower.protocol.packet import pack, unpack

TOY = "toy"


class ToyStep(fields.PartBody, frozen=True):
    """How far all parameters are to move."""

    length: fields.Finite


class ToyRequest(fields.Request, frozen=True):
    """Move the models."""

    parts: dict[int, ToyStep]

    schedule = ("length",)


class ToyUpdate(fields.PartBody, frozen=True):
    """How often the model has moved."""

    steps: fields.Count


class ToyReply(fields.Reply, frozen=True):
    """The models have moved."""

    parts: dict[int, ToyUpdate]

    schedule = ("steps",)


class ToyAction(StrEnum):
    """The toy's message."""

    def __new__(cls, name, request, reply):
        action = str.__new__(cls, name)
        action._value_ = name
        action.request, action.reply = request, reply
        return action

    MOVE = "train.toy", ToyRequest, ToyReply


@dataclass
class ToyState:
    """How often the model has moved, and by how much in all."""

    steps: int = 0
    moved: np.ndarray | None = None


class ToyMethod(JoinMethod[ToyState]):
    """The site half of the toy."""

    state = ToyState
    carriers = (Action.PREPARE,)

    def clear_releases(self, outline, update):  # noqa: ARG002
        """Nothing leaves of a model."""
        return ()

    def begin(self, part, columns):  # noqa: ARG002
        """Begin; no curvature leaves."""
        return Beginning(prepared_part(part, mean_curvature=0.0), ToyState())


def move(site, request):
    """Move the models."""
    updates = {}
    for part in site.parts(ToyState):
        length, state = request.parts[part.number].length, part.state
        before = np.zeros_like(part.model.parameters)
        state.moved = (before if state.moved is None else state.moved) + length
        state.steps += 1
        part.model.parameters = part.model.parameters + length
        updates[part.number] = ToyUpdate(state.steps)
        site.save(part)
    return ToyReply(updates)


ROOM = registry.Room(
    method=f"{__name__}:ToyMethod", answers={ToyAction.MOVE: f"{__name__}:move"}
)


class ToyGrid(InProcessGrid):
    """Sends the toy's request in place of those of ADMM, and says what is answered."""

    def __init__(self, app):
        # with customers of one site alone: ADMM would have shards sum Gram matrices
        tables = hostile.tables()
        super().__init__(app, {site: tables[site] for site in ("shop", "us")})
        self.answers = []

    def _deliver(self, message):
        if message.metadata.message_type != TRAIN_ADMM:
            return super()._deliver(message)
        refused = unpack(super()._deliver(message).content)
        node = message.metadata.dst_node_id
        numbers = {n for n, _ in Site(self.contexts[node], self.run_name).round.arrays}
        request = ToyRequest({number: ToyStep(0.5) for number in numbers})
        envelope = read_envelope(RequestEnvelope, unpack(message.content))
        content = pack(add_envelope(encode(request), envelope))
        toy = Message(content, node, ToyAction.MOVE)
        replies = [unpack(super(ToyGrid, self)._deliver(toy).content) for _ in range(2)]
        parts = list(Site(self.contexts[node], self.run_name).parts(ToyState))
        self.answers.append((refused, replies, parts))
        raise hostile.StoppedError


@pytest.fixture
def app(monkeypatch):
    """The ClientApp of a site that has the toy."""
    monkeypatch.setattr(registry, "ROOMS", dict(registry.ROOMS))
    registry.register(TOY, ROOM)
    of_toy = replace(METHODS["admm"], family=TOY)
    monkeypatch.setitem(METHODS, "admm", of_toy)
    return make_app()


def test_a_method_from_elsewhere_begins_and_answers_its_messages(app):
    with closing(ToyGrid(app)) as grid:
        with pytest.raises(hostile.StoppedError):
            hostile.train(grid)
        ((refused, replies, parts),) = grid.answers
    assert "'train.admm' is no message of a run by 'toy'" in refused.header["error"]
    assert not refused.arrays
    # the same message again gets the same reply, and moves nothing
    first, again = replies
    assert first.header["parts"] == [{"id": 0, "steps": 1}]
    assert again.header["parts"] == first.header["parts"]
    (part,) = parts
    assert part.state.steps == 1
    np.testing.assert_array_equal(part.state.moved, np.full_like(part.state.moved, 0.5))
    np.testing.assert_array_equal(part.model.parameters, part.state.moved)


@pytest.mark.usefixtures("app")
def test_a_family_has_one_room():
    with pytest.raises(ValueError, match="'toy' is registered: choose another name"):
        registry.register(TOY, replace(ROOM, answers={}))
