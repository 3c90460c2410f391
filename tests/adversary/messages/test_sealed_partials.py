"""A server, or a partner, that would have more of shards than they seal for others.

The payments are in two shards, at two banks, which have customers in common.
"""

from dataclasses import replace

import numpy as np
import pytest

from client_apps.privacy import sealed_partials as sealing
from tests.support import federated
from tests.support.federated import WatchedGrid, on_requests
from tests.support.peers.hostile import like
from tests.support.tables.looking_back import GRID, SQL, shop
from tp_flower.errors import QueryError, SiteError
from tp_flower.protocol.packet import Packet, pack, unpack

SHOP, FIRST, SECOND = 2, 3, 4
W_FIRST, W_SECOND = 1, 2
HOW = {"num_epochs": 1, "device": "cpu", "cutoff_grid": GRID, "sealed_partials": True}


def sites():
    """Of customers 0 to 6 payments in both shards, of 7 to 12 in one."""
    tables = shop(60, 300)
    paid = tables["payments"]
    is_first = np.arange(len(paid)) % 2 == 0
    is_known = paid["customer"] < 7
    shards = [paid[is_first | ~is_known], paid[~is_first & is_known]]
    banks = {f"bank-{n}": {"payments": [own]} for n, own in enumerate(shards)}
    return {"shop": {"orders": [tables["orders"]]}, **banks}


def run(change=None, **how):
    with WatchedGrid(sites(), change) as grid:
        federated.train(grid, SQL, "cg", **{**HOW, **how})
    return grid


def refused(match, change, action, node):
    @on_requests(action)
    def changed(seen):
        if node == seen.node:
            change(seen)

    raised = pytest.raises((SiteError, QueryError), match=match)
    with WatchedGrid(sites(), changed) as grid, raised:
        federated.train(grid, SQL, "cg", **HOW)
    return grid


def test_the_server_is_shown_bytes_and_no_key_of_them():
    grid = run()
    (keys,) = grid.arrays("query.cutoffs", replies=True).items()
    (answers,) = grid.arrays("query.partials", replies=True).items()
    assert keys[0] == (W_FIRST, "sealed-keys/1-2")
    assert answers[0] == (W_SECOND, "sealed-partials/1-2")
    arrived = grid.arrays("query.extract")
    assert np.array_equal(arrived[W_SECOND, "sealed-keys/1-2"], keys[1])
    assert np.array_equal(arrived[W_FIRST, "sealed-partials/1-2"], answers[1])
    # each site of a shard is sent what is sealed for it, and the shop nothing
    assert {seen.node for seen in grid.sent("query.partials")} == {SECOND}
    assert {seen.node for seen in grid.sent("query.cutoffs")} == {FIRST}


@pytest.mark.cases("answers")
@pytest.mark.parametrize(
    ("action", "node", "place"),
    [
        ("query.partials", SECOND, (W_SECOND, "sealed-keys/1-2")),
        ("query.extract", SECOND, (W_SECOND, "sealed-keys/1-2")),
        ("query.extract", FIRST, (W_FIRST, "sealed-partials/1-2")),
    ],
    ids=["keys", "keys again", "answers"],
)
def test_what_is_sealed_in_another_run_is_not_opened(action, node, place):
    old = run().arrays(action)[place]

    def replay(seen):
        assert place in seen.arrays
        seen.arrays[place] = old

    match = "cannot be opened: site 'bank-[01]' has not sealed them for this site"
    grid = refused(match, replay, action, node)
    assert not grid.arrays("query.statistics", replies=True)


@pytest.mark.cases("answers-left out")
@pytest.mark.parametrize("change", ["left out", "once more"])
@pytest.mark.parametrize(
    ("action", "node", "place"),
    [
        ("query.partials", SECOND, (W_SECOND, "sealed-keys/1-2")),
        ("query.extract", FIRST, (W_FIRST, "sealed-partials/1-2")),
    ],
    ids=["keys", "answers"],
)
def test_a_shard_is_sent_all_that_is_sealed_for_it_and_no_more(
    action, node, place, change
):
    def changed(seen):
        if change == "left out":
            del seen.arrays[place]
        else:
            number, name = place
            other = name.replace("1-2", "0-2")
            seen.arrays[number, other] = seen.arrays[place]

    what = place[1].split("/")[0].replace("-", " ")
    match = rf"'{what}': the run was proposed with \['1-2'\]"
    refused(match, changed, action, node)


def test_a_shard_that_seals_first_is_sent_nothing_sealed():
    def change(seen):
        seen.arrays[W_FIRST, "sealed-partials/1-2"] = np.zeros(9, np.uint8)

    match = r"'cutoffs': the run was proposed with \[\], and the request says"
    grid = refused(match, change, "query.cutoffs", FIRST)
    assert not grid.arrays("query.cutoffs", replies=True)


def other_proposal(seen):
    seen.header["proposal"]["query"] += " "


def other_fragment(seen):
    seen.header["parts"][0]["fragment"]["subquery"]["filters"] = ['"amount" > 99']


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (other_proposal, "cannot be opened"),
        (other_fragment, "'fragment': the run was proposed with"),
    ],
)
def test_partial_answers_are_of_the_run_that_was_proposed(change, match):
    grid = refused(match, change, "query.partials", SECOND)
    assert not grid.arrays("query.partials", replies=True)


class AskingGrid(WatchedGrid):
    """Asks a bank for partial answers once its rows have been extracted."""

    def __init__(self, at, node):
        super().__init__(at)
        self._asked = ("query.extract", node)
        self.answer = Packet({}, {})

    def _deliver(self, message):
        reply = super()._deliver(message)
        metadata = message.metadata
        if (metadata.message_type, metadata.dst_node_id) == self._asked:
            header = unpack(message.content).header
            packet = Packet({**header, "round": header["round"] + 1}, {})
            asked = like(message, pack(packet), "query.partials")
            self.answer = unpack(super()._deliver(asked).content)
        return reply


@pytest.mark.cases("once")
@pytest.mark.parametrize(
    ("node", "match"),
    [
        (SECOND, "another request has already sealed this run's partials"),
        (FIRST, "partial answers are sealed before the rows of a run are extracted"),
    ],
    ids=["once", "before rows"],
)
def test_partial_answers_are_sealed_once_and_before_rows(node, match):
    with AskingGrid(sites(), node) as grid:
        federated.train(grid, SQL, "cg", **HOW)
    assert match in grid.answer.header["error"]
    assert not grid.answer.arrays


def lying(monkeypatch, change):
    """Let the second bank seal other partial answers than its own."""
    honest = sealing.hash_partials
    monkeypatch.setattr(sealing, "hash_partials", lambda *args: change(honest(*args)))


def of_pairs(**changes):
    return lambda keyed: replace(
        keyed,
        pairs=replace(
            keyed.pairs, **{n: make(keyed.pairs) for n, make in changes.items()}
        ),
    )


def other_columns(keyed):
    return replace(keyed, types=keyed.types[1:])


def other_type(keyed):
    return replace(keyed, types=("INTERVAL", *keyed.types[1:]))


def other_kind(keyed):
    texts = replace(keyed, types=("VARCHAR", *keyed.types[1:]), texts=("a",))
    return replace(texts, words=np.zeros_like(keyed.words))


def no_text(keyed):
    return replace(keyed, types=("VARCHAR", *keyed.types[1:]))


@pytest.mark.cases("keys", "text", "kind")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (of_pairs(hashes=lambda p: p.hashes + np.uint64(1)), "about other keys than"),
        (of_pairs(hashes=lambda p: p.hashes[::-1]), "not distinct, or not sorted"),
        (of_pairs(type=lambda _: "VARCHAR"), "their cutoffs are of type VARCHAR"),
        (other_columns, "they have other columns than the [0-9] of the query"),
        (other_type, "a column is of type INTERVAL"),
        (no_text, "a text is none of those beside it"),
        (other_kind, "in one shard and VARCHAR in another: CAST it in the query"),
    ],
    ids=["keys", "order", "cutoffs", "columns", "type", "text", "kind"],
)
def test_a_partner_seals_what_shards_make(monkeypatch, change, match):
    lying(monkeypatch, change)
    with pytest.raises((SiteError, QueryError), match=match):
        run()


def test_a_partner_that_guesses_keys_is_told_of_none_that_a_shard_lacks(monkeypatch):
    """The answers about its keys are of those that both have, and of no other."""
    sealed = {}
    honest = sealing.hash_partials

    def seen(partials, *args):
        sealed["customers"] = set(partials.rows["(key 0)"].to_pylist())
        return honest(partials, *args)

    monkeypatch.setattr(sealing, "hash_partials", seen)
    run()
    assert sealed["customers"] == set(range(7))
