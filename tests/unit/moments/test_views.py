"""What leaves of the exchange tells the moments, and nothing else of the rows.

In the ring of two elements all pads can be enumerated: databases with equal moments
give the server equally many of each view.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest

from tp_flower.methods.moments.counts import count_joins
from tp_flower.methods.moments.exchange import (
    Assembly,
    EdgeSecret,
    PassRows,
    SummedShard,
    ToldCounts,
)
from tp_flower.methods.moments.pads import SharedKeys
from tp_flower.methods.moments.tree import Edge, JoinTree

PAIR = JoinTree(("a", "b"), [Edge("a", "b", 0, 0)])
LEFT = JoinTree(("a", "b"), [Edge("a", "b", 0, 0)], frozenset({"b"}))
CHAIN = JoinTree(("a", "b", "c"), [Edge("a", "b", 0, 0), Edge("b", "c", 1, 0)])

# by tree: the keys of the rows of each table at each edge
ROWS = {
    "one row a key": (PAIR, {(0, "a"): [0, 1], (0, "b"): [0, 1]}),
    "several rows a key": (PAIR, {(0, "a"): [0, 0, 1], (0, "b"): [0, 1]}),
    "no partner": (LEFT, {(0, "a"): [0, 1, -1], (0, "b"): [0]}),
    "a chain": (
        CHAIN,
        {(0, "a"): [0], (0, "b"): [0, 0], (1, "b"): [0, 0], (1, "c"): [0]},
    ),
}


class EnumeratedPads:
    """Pads in place of the pseudo-random ones: one bit for each, in order of use."""

    def __init__(self, bits: np.ndarray | None = None) -> None:
        self.bits = bits
        self.places: dict[tuple, int] = {}

    def take(self, name: tuple, shape: tuple[int, int]) -> np.ndarray:
        places = [
            self.places.setdefault((*name, place), len(self.places))
            for place in range(shape[0] * shape[1])
        ]
        bits = [0 if self.bits is None else self.bits[place] for place in places]
        return np.array(bits, np.uint64).reshape(shape)


class EnumeratedReader:
    """The pads of the label's site, enumerated likewise."""

    def __init__(self, pads: EnumeratedPads) -> None:
        self.pads = pads

    def of_block(self, _, pair, shape):
        return self.pads.take(("reader", *pair), shape)


def numbers_of_rows(tree, keys):
    return {
        table: len(next(rows for (_, name), rows in keys.items() if name == table))
        for table in tree.tables
    }


def count(tree, keys):
    """Count the joined rows behind each row: its values do not matter."""
    codes = {place: np.array(rows) for place, rows in keys.items()}
    weights = {
        table: np.ones((1, rows), np.int64)
        for table, rows in numbers_of_rows(tree, keys).items()
    }
    unmatched = {
        (edge, table): np.array([int(tree.is_left_joined(edge, table))])
        for edge, table in keys
    }
    return count_joins(tree, codes, weights, unmatched)


def sent(tree, counted, values, pads, monkeypatch, *, to_label_site=False):
    """All that the tables send, in one pass; the first is the label's."""

    def of_shard(self, side, shard, source):
        return pads.take((self.key, side, shard, source), (len(self.tags), 1))

    def of_block(self, side, shard, pair):
        block = pads.take((self.key, shard, *pair), (1, 1))
        return block if side == self.sides[0] else -block

    monkeypatch.setattr(SharedKeys, "of_shard", of_shard)
    monkeypatch.setattr(SharedKeys, "of_block", of_block)
    columns = dict.fromkeys(tree.tables, 1)
    contributions = {}
    for table, rows in counted.items():
        secrets = {
            edge: EdgeSecret(bytes([edge]), np.zeros((rows.edges[edge].keys, 2), "u8"))
            for edge in rows.edges
        }
        words = np.array(values[table], np.uint64)[:, None]
        told = {
            edge: ToldCounts(
                of_edge.incoming[..., None], rows.outgoing[edge][..., None]
            )
            for edge, of_edge in rows.edges.items()
        }
        is_reader = to_label_site and table == tree.tables[0]
        reader = EnumeratedReader(pads) if is_reader else None
        summed = SummedShard(
            table, tree, rows, words, columns, told, secrets, reader=reader
        )
        contributions[table] = summed.in_pass(0, "training").contribution()
    return contributions


def view(contributions) -> int:
    """What the server sees, in the ring of two elements: a bit for each word."""
    blocks = [
        block
        for contribution in contributions.values()
        for named in (contribution.sums, contribution.products)
        for block in named.values()
    ]
    bits = np.concatenate([block.ravel() for block in blocks]) & np.uint64(1)
    return int(bits @ (1 << np.arange(len(bits), dtype=np.uint64)))


def counted_views(see: Callable[[np.ndarray], int], number_of_pads: int) -> np.ndarray:
    """How often each view occurs over all pads.

    What is sent adds pads and multiplies them by pairs: each bit of a view is a
    polynomial of degree two in the bits of the pads. Its coefficients follow from the
    views of no pad, one, and two; its values at random pads are compared with the
    views there.
    """
    none, one = np.zeros(number_of_pads, np.uint8), np.eye(number_of_pads, dtype="u1")
    constant = see(none)
    linear = [see(pad) ^ constant for pad in one]
    quadratic = {
        (i, j): see(one[i] ^ one[j]) ^ constant ^ linear[i] ^ linear[j]
        for i, j in combinations(range(number_of_pads), 2)
    }

    def views_of(pads: np.ndarray) -> np.ndarray:
        views = np.full(pads.shape[0], constant, np.uint32)
        for i, coefficients in enumerate(linear):
            views ^= pads[:, i] * np.uint32(coefficients)
        for (i, j), coefficients in quadratic.items():
            if coefficients:
                views ^= (pads[:, i] & pads[:, j]) * np.uint32(coefficients)
        return views

    some = np.random.default_rng(0).integers(0, 2, (64, number_of_pads), np.uint8)
    assert views_of(some).tolist() == [see(pads) for pads in some]
    numbers = np.arange(2**number_of_pads, dtype=np.uint32)
    every = (numbers[:, None] >> np.arange(number_of_pads) & 1).astype(np.uint8)
    return np.bincount(views_of(every))


def databases(tree, keys):
    """Every database of bits, by table."""
    sizes = numbers_of_rows(tree, keys)
    for bits in product((0, 1), repeat=sum(sizes.values())):
        bits_left = iter(bits)
        yield {table: [next(bits_left) for _ in range(n)] for table, n in sizes.items()}


def moments_of(tree, counted, contributions) -> tuple:
    rows = {table: PassRows.of(each, 0) for table, each in counted.items()}
    blocks = Assembly(tree, rows, contributions).blocks()
    return tuple(int(block[0, 0]) & 1 for block in blocks.values())


@pytest.mark.cases("no partner", "a chain")
@pytest.mark.parametrize("name", ROWS)
def test_databases_of_equal_moments_give_equal_views(name, monkeypatch):
    tree, keys = ROWS[name]
    counted = count(tree, keys)
    groups = defaultdict(list)
    for values in databases(tree, keys):
        pads = EnumeratedPads()
        contributions = sent(tree, counted, values, pads, monkeypatch)
        groups[moments_of(tree, counted, contributions)].append(values)
    compared = 0
    for group in groups.values():
        views = []
        for values in group:

            def see(bits, values=values):
                padded = EnumeratedPads(bits)
                return view(sent(tree, counted, values, padded, monkeypatch))

            views.append(counted_views(see, len(pads.places)))
        assert all(np.array_equal(seen, views[0]) for seen in views)
        compared += len(views) - 1
    assert compared


@pytest.mark.cases("several rows a key")
@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        pytest.param(PAIR, {(0, "a"): [0, 0], (0, "b"): [0]}, id="several rows a key"),
        pytest.param(LEFT, {(0, "a"): [0, -1], (0, "b"): [0]}, id="no partner"),
    ],
)
def test_all_databases_give_one_view_where_the_label_s_site_reads(
    tree, keys, monkeypatch
):
    counted = count(tree, keys)
    views = []
    moments = set()
    for values in databases(tree, keys):
        pads = EnumeratedPads()
        contributions = sent(tree, counted, values, pads, monkeypatch)
        moments.add(moments_of(tree, counted, contributions))
        sent(tree, counted, values, pads, monkeypatch, to_label_site=True)

        def see(bits, values=values):
            padded = EnumeratedPads(bits)
            return view(
                sent(tree, counted, values, padded, monkeypatch, to_label_site=True)
            )

        views.append(counted_views(see, len(pads.places)))
    assert len(moments) > 1
    assert all(np.array_equal(seen, views[0]) for seen in views)
