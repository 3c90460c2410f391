"""Arrays of messages are checked by whoever receives them: the server, and a site."""

from types import SimpleNamespace

import numpy as np
import pytest

from client_apps.handlers.training_rows import read_batches
from strategies.run.exchange import Part, Requests
from strategies.run.replies import array_of, collect_replies, read_key
from tests.support.examples.site_examples import body
from tp_flower.errors import MessageError, RangeError, ReplyError
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import Packet, pack

PART = Part(0, "orders", "us", 3, 0)
GOOD = np.array([[1.0], [2.0]], np.float32)


def with_value(value):
    return np.array([[1.0], [value]], np.float32)


RANGE = r"has numbers that are not finite or out of range; .* from -1e\+30 to 1e\+30"
BAD = [
    *((with_value(value), RANGE) for value in (np.nan, np.inf, -np.inf, 2e30, -2e30)),
    (GOOD[:1], "of shape"),
    (GOOD.T, "of shape"),
    (GOOD[:, 0], r"float32 of shape \(2,\); allowed: float32 of shape \w+ x outputs"),
    (GOOD.astype(np.int64), "is int64 .*; allowed: float32 of shape"),
    (GOOD.astype(np.float64), "is float64 .*; allowed: float32 of shape"),
]


def replied(action=Action.ADMM, facts=None, **arrays):
    """The replies of a round in which one site has sent arrays."""
    header = {"round": 1, "seconds": 0.0}
    header |= {} if facts is None else {"parts": [{"id": 0, **facts}]}
    named = {(0, name.replace("_", "-")): array for name, array in arrays.items()}
    packets, parts = {PART.node: Packet()}, {PART.number: PART}
    request = Requests(action, packets, action.request, parts)
    # one of Flower's own needs a running app
    content = pack(Packet(header, named))
    message = SimpleNamespace(content=content, has_error=lambda: False)
    answers = [(PART.node, message)]
    return collect_replies(request, answers, {PART.node: "us"}).complete()


def scores_of(array):
    """The scores in a reply, as the server takes them of a table with two rows."""
    return array_of(replied(scores=array), PART, "scores", (2, 1))


@pytest.mark.parametrize(("array", "match"), BAD)
def test_the_server_takes_moderate_numbers_of_the_right_shape_and_type(array, match):
    np.testing.assert_array_equal(scores_of(GOOD), GOOD)
    match = rf"site 'us' \(table 'orders'\) .*'scores' .*{match}"
    with pytest.raises(ReplyError, match=match):
        scores_of(array)


def test_the_server_does_without_no_array_that_it_asked_for():
    with pytest.raises(ReplyError, match=r"site 'us' .*sent no 'scores'"):
        array_of(replied(), PART, "scores", (2, 1))


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (-2, "array 'codes/0' has numbers that are .* out of range; allowed: from -1"),
        (1, "codes of join key 0 beyond its hashes"),
    ],
)
def test_the_server_takes_codes_that_have_a_hash(code, match):
    facts = {"rows": 2, "keys": ["number"], "engine": "pandas", "pushed": []}

    def key_of(*codes):
        codes, hashes = np.array(codes, np.int32), np.ones((1, 2), np.uint64)
        arrays = {"codes/0": codes, "hashes/0": hashes}
        return read_key(replied(Action.EXTRACT, facts, **arrays), PART, 0, 2)

    assert key_of(-1, 0).codes.tolist() == [-1, 0]
    with pytest.raises(ReplyError, match=f"site 'us' .*{match}"):
        key_of(code, 0)


def batches_of(*rows):
    start, numbers = np.array([0, len(rows)], np.int32), np.array(rows, np.int32)
    arrays = {"batch-start": start, "batch-rows": numbers}
    return read_batches(body(5, arrays), 3)


@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (-1, RangeError, "'batch-rows' has numbers that are .*allowed: from 0 to"),
        (3, MessageError, "'batch-rows' must hold numbers from 0 to 2"),
    ],
)
def test_a_site_takes_whole_numbers_of_a_range(number, error, match):
    assert batches_of(0, 2).rows.tolist() == [0, 2]
    with pytest.raises(error, match=match):
        batches_of(0, number)
