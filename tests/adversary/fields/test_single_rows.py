"""A server makes an aggregate of one row, or searches for a row's number by what is
refused.
"""

import pytest

from tests.support.peers import hostile
from tests.support.peers.hostile import ORDERS, SHOP, UK, HostileGrid, train
from tp_flower.protocol.packet import Packet

STRICT = {
    "orders": hostile.POLICIES["orders"],
    "customers": (
        "min-rows = 3\nreleases = { scores = 'masked', statistics = 'moments' }"
    ),
}
HEAVY = 1 << 20


class BisectingGrid(HostileGrid):
    """Sends train.descent again and again with another unit of the scores, then as it
    is.

    ``answers`` say whether the site's largest score was in range; nothing is put back
    in between.
    """

    def __init__(self, folder, questions, change):
        super().__init__(folder, policies=STRICT)
        self._questions = questions
        self._change = change
        self.said = []

    def _deliver(self, message):
        action = message.metadata.message_type
        node = message.metadata.dst_node_id
        if (action, node) == ("train.direction", UK) and self._questions:
            packet = hostile.unpack(message.content)
            for _ in range(self._questions):
                reply = self._send(
                    message, self._change(packet, len(self.said)), action
                )
                self.said.append(reply.header.get("error", ""))
            self._questions = 0
        return super()._deliver(message)


def with_unit(name):
    """Ask in a unit that is a 1000th, a 999th ... of nothing that scores or products
    reach.
    """

    def change(packet, question):
        terms = {**packet.header["terms"], name: 1e-9 * (1 + question)}
        return Packet({**packet.header, "terms": terms}, packet.arrays)

    return change


@pytest.mark.parametrize("unit", ["score-unit", "product-unit"])
def test_a_refusal_for_the_rows_is_the_last_answer_of_a_run(tmp_path, unit):
    """With many of them a server finds the largest score by bisection, past all
    masks.
    """
    grid = BisectingGrid(tmp_path, 5, with_unit(unit))
    with pytest.raises(Exception, match=r"because of its rows|out of range"):
        train(grid, "cg", num_epochs=2)
    assert "out of range" in grid.said[0]
    assert all("because of its rows" in text for text in grid.said[1:])


def test_a_refused_sum_does_not_say_how_large_it_was(tmp_path):
    """The server states the unit: it would read the number."""
    grid = BisectingGrid(tmp_path, 1, with_unit("product-unit"))
    with pytest.raises(Exception, match=r"out of range|because of its rows"):
        train(grid, "cg", num_epochs=2)
    (text,) = grid.said
    assert "a number to be summed blindly is out of range; sealed sums allow up" in text


class KeptReplies(HostileGrid):
    """Keeps what the shop says of its curvature and of the sums of its scores."""

    def _send(self, message, packet, action):
        reply = super()._send(message, packet, action)
        if message.metadata.dst_node_id == SHOP and "error" not in reply.header:
            for part in reply.header.get("parts", ()):
                self.curvature = part.get("mean-curvature", self.curvature)
            self.sums = reply.arrays.get((ORDERS, "score-sums"))
        return reply

    curvature = 0.0
    sums = None


def weighing_one_row(weight):
    """A server that says of the shop's first row that it is in so many joined rows."""

    def instead(action, node, packet):
        if (action, node) != ("train.prepare", SHOP):
            return packet
        counts = packet.arrays[ORDERS, "multiplicity"].copy()
        counts[0] = weight
        header = {**packet.header["parts"][0], "joined-rows": int(counts.sum())}
        arrays = {**packet.arrays, (ORDERS, "multiplicity"): counts}
        return Packet({**packet.header, "parts": [header]}, arrays)

    return instead


@pytest.mark.parametrize("least", [1, 3])
def test_what_is_one_rows_own_does_not_leave_as_a_sum(tmp_path, least):
    """Where a policy has min-rows = 1, curvature and sums are that row's: the attack is
    sound.
    """
    rules = hostile.POLICIES["orders"].replace("min-rows = 3", f"min-rows = {least}")
    instead = weighing_one_row(HEAVY)
    grid = KeptReplies(tmp_path, policies={"orders": rules}, instead=instead)
    train(grid, "cg", num_epochs=1)
    # of columns that are standardised it would be 1
    if least == 1:
        (total,), (squares,) = grid.sums / HEAVY
        # the score of one row, and its square
        assert squares == pytest.approx(total**2, rel=1e-3)
        assert abs(grid.curvature - 1.0) > 0.01
    else:
        assert grid.sums is None
        assert grid.curvature == pytest.approx(1.0)
