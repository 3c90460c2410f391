"""A method of a test's folder: it is registered on all sides, and no file is edited.

The toy is gradient descent on linear models: steps of the scores go down, and the
scores of the models that have taken a step come up.

    theta_i <- theta_i - rate * grad_i,    grad_i = sum_j D_j x_i(j) / N + l2 theta_i
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

import client_apps.app
import strategies.registry
from client_apps.methods import registry as site_registry
from client_apps.methods.exact import step_of
from client_apps.methods.site_method import Beginning, JoinMethod, prepared_part
from client_apps.rounds.site import Site
from strategies import STRATEGIES
from strategies.run.exchange import ask
from strategies.run.grid import InProcessGrid
from strategies.run.strategy import EpochResult
from strategies.setup.problem import SCORES
from strategies.training import join_method
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import StepMessages, steps_epoch
from tp_flower import api
from tp_flower.arrays import AnyArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods import method
from tp_flower.methods.moments.messages import TRAIN_SOLUTION, SolutionRequest
from tp_flower.protocol import fields
from tp_flower.protocol import training_messages as messages
from tp_flower.protocol.codec import add_envelope, encode, read_envelope
from tp_flower.protocol.messages import ACTIONS, Action, RequestEnvelope, declare_action
from tp_flower.protocol.packet import pack, unpack
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.settings.rules import Rules
from tp_flower.settings.training import FITTED

TOY = "toy"
EPOCHS = 400
SQL = """SELECT o.qty AS label, o.day, i.price FROM orders o
JOIN items i ON o.item = i.item"""
HOW = {"strategy": TOY, "num_epochs": EPOCHS, "test_fraction": 0.0, "l2": 0.1}


class ToyRequest(fields.Request, frozen=True, kw_only=True):
    """Take a gradient step."""

    rate: fields.Positive
    scores_number: fields.Count
    parts: dict[int, messages.ScoreSteps]

    discloses = messages.STEPS_DISCLOSED
    schedule = ("rate", "scores_number", "deviation")


class ToyUpdate(fields.PartBody, frozen=True):
    """The scores of the model that has taken the step."""

    scores: Annotated[AnyArray, fields.score_words("scored", "outputs")]


class ToyReply(fields.Reply, frozen=True):
    """The scores of every participant."""

    parts: dict[int, ToyUpdate]

    discloses = (messages.SCORES_DISCLOSED._replace(when=""),)


TRAIN_TOY = declare_action("train.toy", ToyRequest, ToyReply)
# other tests of the process list the messages of the methods that there are
del ACTIONS[ToyRequest]
DECLARATION = method.Method(
    name=TOY,
    family=TOY,
    actions=(TRAIN_TOY,),
    epochs=EPOCHS,
    rules=f"{__name__}:RULES",
    only_model=LINEAR,
)
RULES = Rules(reads=FITTED | {"l2"})


@dataclass
class ToyState:
    """How many steps a model has taken, and along which gradient the last one."""

    steps: int = 0
    gradient: np.ndarray | None = None


class SiteHalf(JoinMethod[ToyState]):
    """The toy at a site."""

    state = ToyState
    carriers = TRAIN_TOY, Action.PREPARE

    def clear_releases(self, outline, update):  # noqa: ARG002
        """Nothing of a model leaves but its scores."""
        return ()

    def begin(self, part, columns):  # noqa: ARG002
        """Begin; of the rows, no curvature leaves."""
        return Beginning(prepared_part(part, mean_curvature=0.0), ToyState())


def take_step(site, request):
    """Take the gradient step, and reply with scores."""
    updates = {}
    for part in site.parts(ToyState):
        data = part.data
        model = part.model
        moments = part.moments(step_of(site, part, request.parts), 1.0)
        penalty = data.l2 * np.where(model.penalised, model.parameters, 0.0)
        gradient = penalty - moments.ravel() / data.joined_rows
        model.parameters = model.parameters - request.rate * gradient
        part.state.steps += 1
        part.state.gradient = gradient
        part.begin_scores(request.scores_number)
        updates[part.number] = ToyUpdate(part.release_rows(is_tested=True))
        site.save(part)
    return ToyReply(updates)


class ServerHalf(join_method.JoinMethod):
    """The toy at the server."""

    messages = (Action.PREPARE, TRAIN_TOY)

    def choose_update(self, table, shards, *, is_linear):  # noqa: ARG002
        """Train tables in one shard: the declaration has no `updates` for several."""
        return messages.Update.LOCAL

    def epoch_traffic(self, tables, batches):  # noqa: ARG002
        """Steps down, scores up."""
        parts = StepMessages(messages.ScoreSteps, ToyUpdate, messages.CommonParameters)
        return steps_epoch(tables, parts, is_tested=True)

    def epochs(self, problem):
        """Descend, for a number of epochs."""

        def slope(vectors, _):
            rows = problem.objective.on(vectors)
            return {"slope": rows.weigh(rows.gradient(vectors[SCORES]))}, ()

        # no eigenvalue exceeds the trace, which standardised columns count
        rate = 1.0 / sum(table.width for table in problem.tables.values())
        problem.gather(problem.initial_scores)
        for epoch in range(1, self.run.most_epochs + 1):
            _, sums = problem.rows.run(slope, sums_of="slope")
            steps = problem.scatter_steps(sums, 1.0)
            parts = {
                number: messages.ScoreSteps(step=rows)
                for name, block in steps.items()
                for number, rows in problem.tables[name].scatter_rows(block).items()
            }
            request = ToyRequest(rate=rate, scores_number=epoch, parts=parts)
            replies = yield self.run.request(ask(request, problem.parts))
            scores = {
                name: table.gather_scores(replies)
                for name, table in problem.tables.items()
            }
            problem.gather(scores)
            held_out = problem.held_out_metrics(scores)
            train = problem.train_metrics()
            self.run.finish_epoch(EpochResult(epoch, train, **held_out._asdict()))


class Toy(TrainingStrategy):
    """Train linear models by gradient descent."""

    name = TOY
    method_type = ServerHalf


@pytest.fixture(autouse=True)
def toy(monkeypatch) -> Iterator[None]:
    """Register the toy on all sides."""
    monkeypatch.setitem(ACTIONS, ToyRequest, TRAIN_TOY)
    for registered in (method.METHODS, site_registry.ROOMS, strategies.registry.ROOMS):
        monkeypatch.setitem(registered, TOY, None)
        del registered[TOY]
    method.register(DECLARATION)
    strategies.registry.register(
        TOY, strategies.registry.ServerRoom(f"{__name__}:Toy", title="a toy")
    )
    room = site_registry.Room(
        method=f"{__name__}:SiteHalf", answers={TRAIN_TOY: f"{__name__}:take_step"}
    )
    site_registry.register(TOY, room)
    monkeypatch.setattr(client_apps.app, "app", client_apps.app.make_app())


def tables() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(3)
    items = pd.DataFrame({"item": range(6), "price": rng.normal(size=6)})
    orders = pd.DataFrame({"item": rng.integers(6, size=40), "day": range(40)})
    price = items["price"].to_numpy()[orders["item"]]
    orders["qty"] = 2.0 * price - 0.1 * orders["day"] + rng.normal(size=40)
    return {"orders": orders, "items": items}


def sites() -> dict[str, dict[str, pd.DataFrame]]:
    frames = tables()
    return {f"at {name}": {name: frames[name]} for name in frames}


def ridge() -> tuple[np.ndarray, np.ndarray]:
    """The coefficients of ridge regression on the joined table, and its predictions."""
    joined = tables()["orders"].merge(tables()["items"], on="item")
    rows = joined[["day", "price"]].to_numpy(float)
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    label = joined["qty"].to_numpy()
    gram = rows.T @ rows / len(rows) + HOW["l2"] * np.eye(2)
    theta = np.linalg.solve(gram, rows.T @ (label - label.mean()) / len(rows))
    return theta, label.mean() + rows @ theta


def test_it_trains_predicts_and_is_saved_and_loaded(tmp_path):
    model = api.fit(SQL, sites(), **HOW)
    theta, predictions = ridge()
    found = model.coefficients.set_index(["table", "column"])["coefficient"]
    expected = [found["o", "day"], found["i", "price"]]
    np.testing.assert_allclose(expected, theta, atol=1e-4)
    model.save(tmp_path / "saved")
    for each in (model, api.load(tmp_path / "saved")):
        rows = each.predict(sites()).frame["prediction"]
        np.testing.assert_allclose(np.sort(rows), np.sort(predictions), atol=1e-3)
    page = (tmp_path / "saved" / "report.html").read_text()
    assert "a toy" in page


def test_it_is_explained_and_booked_as_it_trains():
    few = {**HOW, "num_epochs": 3}
    explanation = api.explain(SQL, sites(), **few).report
    report = api.fit(SQL, sites(), **few).report
    cost = explanation["cost"]
    history = report["history"]
    assert cost["strategy"] == TOY
    assert cost["rounds"]["run"] == len(history)
    for way in ("up", "down"):
        sent = [sum(each[f"bytes-{way}"].values()) for each in history]
        assert sent[-2] == pytest.approx(cost["bytes"][way], rel=0.02)
    told = [each for each in explanation["releases"] if each["message"] == TRAIN_TOY]
    assert [each["to"] for each in told] == ["sites", "server"]
    assert report["privacy"]["messages"] == explanation["releases"]
    for lines in report["privacy"]["ledger"].values():
        (scores,) = (line for line in lines if line["release"]["what"] == "scores")
        assert scores["release"]["action"] == TRAIN_TOY
    readings = [item["privacy"]["readings"] for item in (explanation, report)]
    assert readings[0] == readings[1]
    assert len(readings[0]) == 2


@pytest.mark.parametrize("asked", [api.fit, api.explain])
def test_a_table_in_several_shards_is_refused_as_nothing_says_how_they_train(asked):
    """Each would descend on its own rows, towards no optimum of all."""
    orders = sites()["at orders"]["orders"]
    halves = {"east": {"orders": orders[:20]}, "west": {"orders": orders[20:]}}
    sharded = {"at items": sites()["at items"], **halves}
    with pytest.raises(
        QueryError, match=r"table 'o' is in 2 shards, and strategy 'toy' .* use admm"
    ):
        asked(SQL, sharded, **HOW)
    few = {"num_epochs": 1, "test_fraction": 0.0, "strategy": "admm"}
    asked(SQL, sharded, **few)


def test_noise_that_it_does_not_plan_is_refused_before_any_site_is_asked():
    privacy = PrivacySettings(features="statistics", epsilon=1.0)
    with pytest.raises(SettingsError, match="'toy' plans no noise for what its sites"):
        Settings(strategy=TOY, privacy=privacy)


class RepeatingGrid(InProcessGrid):
    """Sends another method's message, then the toy's first one twice; and stops."""

    def _deliver(self, message):
        if message.metadata.message_type != TRAIN_TOY:
            return super()._deliver(message)
        node = message.metadata.dst_node_id
        packet = unpack(message.content)
        self.rate = packet.header["rate"]
        envelope = read_envelope(RequestEnvelope, packet)
        solution = add_envelope(encode(SolutionRequest(parts={})), envelope)
        as_moments = Message(pack(solution), node, TRAIN_SOLUTION)
        self.refusal = unpack(super()._deliver(as_moments).content)
        self.replies = []
        for _ in range(2):
            again = Message(message.content, node, TRAIN_TOY)
            self.replies.append(unpack(super()._deliver(again).content))
        (self.part,) = Site(self.contexts[node], self.run_name).parts(ToyState)
        raise KeyboardInterrupt


def test_its_message_moves_a_model_once_and_no_other_method_does():
    strategy = STRATEGIES[TOY](
        Query.from_sql(SQL), num_epochs=2, test_fraction=0.0, l2=0.1
    )
    with closing(RepeatingGrid(client_apps.app.app, sites())) as grid:
        with pytest.raises(KeyboardInterrupt):
            strategy.start(grid)
        refusal = grid.refusal.header["error"]
        assert "'train.solution' is no message of a run by 'toy'" in refusal
        assert not grid.refusal.arrays
        first, again = grid.replies
        assert "error" not in first.header
        assert again.arrays.keys() == first.arrays.keys()
        for name, scores in first.arrays.items():
            np.testing.assert_array_equal(again.arrays[name], scores)
        state = grid.part.state
        assert state.steps == 1
        moved = -grid.rate * state.gradient
        assert moved.any()
        np.testing.assert_allclose(grid.part.model.parameters, moved)


def test_it_goes_on_where_it_was_stopped(tmp_path):
    def stop(report):
        if report.epoch == 5:
            raise KeyboardInterrupt

    how = {**HOW, "num_epochs": 9}
    del how["strategy"]

    def run(grid, **options):
        strategy = STRATEGIES[TOY](Query.from_sql(SQL), **how, **options)
        strategy.start(grid)
        return strategy.losses

    with closing(InProcessGrid(client_apps.app.app, sites())) as grid:
        losses = run(grid)
    with closing(InProcessGrid(client_apps.app.app, sites())) as grid:
        folder = str(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run(grid, on_round=stop, output_dir=folder)
        assert run(grid, output_dir=folder, resume=folder) == losses


def test_a_strategy_has_one_room():
    room = strategies.registry.ServerRoom(f"{__name__}:Toy")
    with pytest.raises(ValueError, match="'toy' is registered: choose another name"):
        strategies.registry.register(TOY, room)


def test_a_family_has_one_room():
    room = site_registry.Room(method=f"{__name__}:SiteHalf", answers={})
    with pytest.raises(ValueError, match="'toy' is registered: choose another name"):
        site_registry.register(TOY, room)
