"""The cross-check of the alignment: real runs agree, and planted faults are found."""

import numpy as np
import pandas as pd
import pytest

from strategies import Explain
from tests.support.examples.explained import SMALL, SMALL_SQL
from tests.support.federated import WatchedGrid, train
from tp_flower.errors import MappingError, ReplyError, SiteError

KEYS = 8
SQL = "SELECT o.y AS label, o.x, i.z FROM orders o JOIN items i ON o.item = i.item"


def sites():
    """Orders of items 0..7 in a random order; all keys are matched, on both sides."""
    rng = np.random.default_rng(0)
    item = np.repeat(np.arange(KEYS), 3)
    rng.shuffle(item)
    orders = pd.DataFrame({"item": item, "y": rng.normal(size=len(item))})
    orders["x"] = rng.normal(size=len(item))
    items = pd.DataFrame({"item": rng.permutation(KEYS), "z": rng.normal(size=KEYS)})
    return {
        "shop": {"orders": [orders.iloc[:9], orders.iloc[9:]]},
        "maker": {"items": items.iloc[:5]},
        "second": {"items": items.iloc[5:]},
    }


def faulty(action, change, *, is_reply, node=None):
    """A grid on which one kind of message is changed on its way, at one place."""

    def fault(seen):
        is_meant = (seen.action, seen.is_reply) == (action, is_reply)
        if is_meant and node in (None, seen.node):
            grid.hits += change(seen.header, seen.arrays) or 0

    grid = WatchedGrid(sites(), fault)
    grid.hits = 0
    return grid


def explain(grid, sql=SQL):
    return train(grid, sql, Explain, test_fraction=0.0, mode="explain")


def named(arrays, start):
    return [key for key in arrays if key[1].startswith(start)]


def shifted_codes(header, arrays):  # noqa: ARG001
    """Every row of a shard gets the key of the row before it."""
    for key in named(arrays, "codes/"):
        arrays[key] = np.roll(arrays[key], 1)
    return 1


def swapped_hashes(header, arrays):  # noqa: ARG001
    """Two keys of a shard change places."""
    for key in named(arrays, "hashes/"):
        arrays[key][[0, 1]] = arrays[key][[1, 0]]
    return 1


def other_rows(header, arrays):  # noqa: ARG001
    """The site looks at the row after the one that it is asked about."""
    keys = named(arrays, "rows/")
    for key in keys:
        arrays[key] = arrays[key][::-1].copy()
    return len(keys)


def changed_digest(header, arrays):  # noqa: ARG001
    for key in named(arrays, "digest/"):
        arrays[key][1] += 1
    return 1


FAULTS = [
    ("query.extract", shifted_codes, True),
    ("query.extract", swapped_hashes, True),
    ("query.check", other_rows, False),
    ("query.check", changed_digest, True),
]


@pytest.mark.parametrize("node", [2, 3, 4])
@pytest.mark.parametrize(("action", "change", "is_reply"), FAULTS)
def test_planted_faults_are_found(action, change, is_reply, node):
    grid = faulty(action, change, is_reply=is_reply, node=node)
    with pytest.raises(
        MappingError,
        match=r"sides of the join o\.item = i\.item do not hold the same keys: of 8 ",
    ):
        explain(grid)
    assert grid.hits


def test_every_matched_key_is_asked_once_on_each_side_and_told_alike():
    grid = WatchedGrid(sites())
    (join,) = explain(grid).explanation["joins"]
    asked = grid.arrays("query.check")
    assert join["checked-keys"] == KEYS
    # parts 0 and 1 are the orders, 2 and 3 the items
    for name in ("rows/0", "weights/0"):
        sizes = [len(asked[part, name]) for part in range(4)]
        assert sum(sizes[:2]) == sum(sizes[2:]) == KEYS
    left, right = (
        sorted([*asked[one, "weights/0"], *asked[other, "weights/0"]])
        for one, other in ((0, 1), (2, 3))
    )
    assert left == right
    assert len(set(left)) == KEYS


def test_left_joins_and_null_keys_are_checked_where_they_match():
    found = explain(SMALL, SMALL_SQL).explanation
    assert [join["checked-keys"] for join in found["joins"]] == [2, 2]


def test_a_query_over_one_table_has_nothing_to_check():
    strategy = explain(sites(), "SELECT y AS label, x FROM orders")
    assert strategy.explanation["joins"] == []
    assert "check" not in [item.phase for item in strategy.history]


def test_rows_that_a_shard_does_not_have_are_refused_by_the_site():
    def beyond(header, arrays):  # noqa: ARG001
        for key in named(arrays, "rows/"):
            arrays[key][:1] = 99

    with pytest.raises(SiteError, match=r"must hold numbers from 0 to"):
        explain(faulty("query.check", beyond, is_reply=False, node=2))


def test_a_reply_without_a_count_is_refused():
    def uncounted(header, arrays):  # noqa: ARG001
        for facts in header["parts"]:
            facts["counts"] = {"0": -1}

    with pytest.raises(ReplyError, match=r"'maker' .*'counts' is {'0': -1}; .*>= 0"):
        explain(faulty("query.check", uncounted, is_reply=True, node=3))
