"""A server that tells sites different counts of a join reads uniform words."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.support.tables.random_joins import Joined
from tp_flower.methods.moments.counts import CountedRows
from tp_flower.methods.moments.pads import SharedKeys
from tp_flower.methods.moments.tree import Edge, JoinTree
from tp_flower.methods.moments.words import inner


@pytest.mark.parametrize("seed", range(5))
def test_counts_that_one_end_alone_is_told_leave_uniform_words(seed):
    """A server that weighs a table's rows as it likes reads nothing of them."""
    tree = JoinTree(("a", "b"), [Edge("a", "b", 0, 0)])
    rng = np.random.default_rng(seed)
    keys = {("a", 0): np.array([0, 1, 2]), ("b", 0): np.array([0, 1, 1, 2])}
    values = {
        table: rng.integers(0, 1 << 20, size=(len(rows), 2)).astype(np.uint64)
        for (table, _), rows in keys.items()
    }
    joined = Joined(tree, keys, values, "a", np.zeros(3, np.int64))
    honest = joined.exchanged(0)
    told = joined.count()
    edge = told["b"].edges[0]
    # the first row of b alone counts twice
    lied = replace(edge, incoming=edge.incoming + np.array([[1, 0, 0], [0, 0, 0]]))
    told["b"] = CountedRows({0: lied}, told["b"].weights)
    weighted = told["b"].multiplicity[0].astype(np.uint64)[:, None] * values["b"]
    read = joined.exchanged(0, told)
    assert not np.any(read["b", "b"] == inner(weighted, values["b"]))
    for pair, block in honest.items():
        assert not np.any(read[pair] == block)


def test_a_lie_about_one_join_that_is_consistent_at_others_leaves_uniform_words():
    """A server that leaves all but one row of c out reads no sums over its partners."""
    tree = JoinTree(("a", "b", "c"), [Edge("a", "b", 0, 0), Edge("b", "c", 1, 0)])
    rng = np.random.default_rng(1)
    keys = {
        ("a", 0): np.array([0, 1]),
        ("b", 0): np.array([0, 0, 1, 1]),
        ("b", 1): np.array([0, 1, 2, 1]),
        ("c", 1): np.array([0, 1, 2]),
    }
    values = {
        table: rng.integers(0, 1 << 20, size=(len(rows), 2)).astype(np.uint64)
        for (table, _), rows in keys.items()
    }
    joined = Joined(tree, keys, values, "b", np.zeros(4, np.int64))
    told = joined.count()
    only_first = replace(told["b"].edges[1], incoming=np.array([[1, 0, 0], [0, 0, 0]]))
    told["b"] = CountedRows({0: told["b"].edges[0], 1: only_first}, told["b"].weights)
    consistent = replace(told["a"].edges[0], incoming=told["b"].outgoing[0])
    told["a"] = CountedRows({0: consistent}, told["a"].weights)
    sent = joined.sent(0, told)
    for table in "ab":
        weights = told[table].multiplicity[0].astype(np.uint64)[:, None]
        wanted = inner(weights * values[table], values[table])
        assert wanted.any()
        blocks = [each.products[table, table] for each in sent.values()]
        assert not np.any(np.sum(blocks, axis=0) == wanted)
    # the sums of both ends of the honest join fit together
    product = inner(sent["a"].sums[0, "a"], sent["b"].sums[0, "b"])
    read = product - np.sum([each.products["a", "b"] for each in sent.values()], axis=0)
    assert not np.any(read == inner(values["a"][:1], values["b"][:1]))


def test_no_two_sums_have_a_pad_in_common():
    """Of two sums under one pad the server would read the difference."""
    tags = np.arange(14, dtype=np.uint64).reshape(7, 2)
    counts = np.ones((7, 2), np.int64)
    pads = []
    of_shards = ((5, 5), (4, 6))
    told = ((b"one", b"other"), ("training", "test"), "01", of_shards, of_shards)
    for key, pass_name, more, label_rows, split_rows in product(*told):
        keys = SharedKeys(
            key,
            tags,
            ("a", "b"),
            (counts, counts + int(more)),
            {"a": 3, "b": 2, "c": 5},
            pass_name,
            label_rows=label_rows,
            split_rows=split_rows,
        )
        pads += [
            keys.of_shard(side, shard, source).ravel()
            for side, shard, source in product("ab", (0, 1), "abc")
        ]
    words = np.concatenate(pads)
    assert len(np.unique(words)) == len(words)
