"""Sums over pairs of rows of a cluster are those of the built join."""

import numpy as np
import pytest

from tests.support.tables.random_joins import PASSES, Joined, added_up, aligned
from tp_flower.methods.moments.clusters import (
    ClusteredShard,
    ClusterRows,
    Members,
    NumberedRows,
    bridge_of,
    bridged_rows,
    copied_rows,
    copy_of,
    doubled,
    number_clusters,
)
from tp_flower.methods.moments.exchange import (
    Assembly,
    Contribution,
    PassRows,
    SummedShard,
)
from tp_flower.methods.moments.pads import SharedKeys

SECRET = b"c" * 32
LABELS = "t0"


def expected(joined: Joined, number: int, edge: int, slopes: np.ndarray) -> dict:
    """The sums of the built join, cluster by cluster."""
    rows = joined.rows_of_join()
    taken = np.append(joined.subset, 0)[rows[joined.split_table]] == number
    of_label = rows[LABELS][taken]
    keys = joined.keys[LABELS, edge]
    # a row without a key is alone
    clusters = np.where(keys < 0, 100 + np.arange(len(keys)), keys)[of_label]
    blocks = {}
    scores = {}
    for table, block in joined.values.items():
        padded = np.vstack([block, np.zeros_like(block[:1])])[rows[table][taken]]
        weighed = slopes[of_label].astype(np.uint64)[:, None] * padded
        scores[table] = [weighed[clusters == g].sum(axis=0) for g in set(clusters)]
    for first, second in joined.tree.pairs:
        blocks[first, copy_of(second)] = np.zeros(
            (joined.values[first].shape[1], joined.values[second].shape[1]), np.uint64
        ) + sum(
            np.outer(left, right)
            for left, right in zip(scores[first], scores[second], strict=True)
        )
    return blocks


class Sums:
    """The exchange of a joined table's sums over pairs of rows, in one pass."""

    def __init__(self, joined: Joined, number: int, edge: int, slopes: np.ndarray):
        self.joined, self.number, self.edge, self.slopes = joined, number, edge, slopes
        self.rows = joined.count()
        self.edges = len(joined.tree.edges)
        self.in_pass = self.rows[LABELS].in_pass(number)
        codes = joined.keys[LABELS, edge][self.in_pass]
        self.clusters, _ = number_clusters(codes)

    def blocks(self, shards: dict | None) -> dict:
        contributions = {}
        for table, in_exchange in self.joined.summed(self.rows, shards).items():
            sent, start = [], 0
            for shard in in_exchange:
                span = slice(start, start + shard.rows.weights.shape[1])
                sent.append(self.of_shard(table, shard, span))
                start = span.stop
            contributions[table] = added_up(sent)
            copied = Contribution(contributions[table].sums, {})
            contributions[copy_of(table)] = copied
        tree = doubled(self.joined.tree, LABELS)
        return Assembly(tree, self.of_pass(), contributions).blocks()

    def of_pass(self) -> dict[str, PassRows]:
        bridge = bridge_of(self.joined.tree)
        found = {}
        for table, counted in self.rows.items():
            plain = PassRows.of(
                counted.select(counted.in_pass(self.number)), self.number
            )
            halves = [plain, copied_rows(plain, self.edges)]
            if table == LABELS:
                members = self.members_of(self.in_pass)
                halves = [bridged_rows(h, bridge, members) for h in halves]
            found[table], found[copy_of(table)] = halves
        return found

    def of_shard(self, table: str, shard: SummedShard, span: slice) -> Contribution:
        """What a shard sends, by the keys of the whole table."""
        clusters = self.clusters_of(span) if table == LABELS else None
        found = ClusteredShard(shard, LABELS, clusters).contribution(
            self.number, PASSES[self.number]
        )
        sums = {}
        for (edge, source), block in found.sums.items():
            if edge == bridge_of(self.joined.tree):
                count = self.members_of(self.in_pass).count
                total = np.zeros((count, block.shape[1]))
                sums[edge, source] = total.astype(np.uint64)
                sums[edge, source][self.clusters_in(span)] = block
                continue
            place = (edge % self.edges, source)
            alone = Contribution({place: block}, {})
            lined_up = aligned(alone, shard.rows, self.rows[table], self.number)
            sums[edge, source] = lined_up.sums[place]
        return Contribution(sums, found.products)

    def members_of(self, positions: np.ndarray) -> Members:
        """Of the rows of the label's table that take part, a mask (n,)."""
        return Members.once(self.clusters, self.slopes[positions])

    def clusters_of(self, span: slice) -> ClusterRows:
        """What a shard of the label's table knows."""
        return ClusterRows(self.edge, SECRET, self.slopes[span])

    def clusters_in(self, span: slice) -> np.ndarray:
        """The clusters of a shard's rows, as these come first."""
        before = int(self.in_pass[: span.start].sum())
        numbers = self.clusters[before : before + int(self.in_pass[span].sum())]
        return numbers[number_clusters(numbers)[1]]


class Numbered(Sums):
    """The exchange of sums over pairs of rows in clusters by numbers, in the pass 0."""

    def __init__(self, joined: Joined, rng: np.random.Generator):
        rows = len(joined.values[LABELS])
        count = 6
        members = 3 * rows
        self.members = Members(
            rng.integers(rows, size=members),
            rng.integers(count, size=members),
            rng.integers(-(1 << 10), 1 << 10, size=members),
            count,
        )
        edge = joined.tree.edges_of(LABELS)[0]
        super().__init__(joined, 0, edge, np.ones(rows, np.int64))

    def expected(self) -> dict:
        """The sums of the built join, cluster by cluster."""
        joined = self.joined
        rows = joined.rows_of_join()
        rows = {
            table: of[np.append(joined.subset, 0)[rows[joined.split_table]] == 0]
            for table, of in rows.items()
        }
        scores = {}
        for table, block in joined.values.items():
            padded = np.vstack([block, np.zeros_like(block[:1])])[rows[table]]
            sums = np.zeros((self.members.count, block.shape[1]), np.uint64)
            for row, number, slope in zip(
                self.members.rows,
                self.members.numbers,
                self.members.slopes.astype(np.uint64),
                strict=True,
            ):
                sums[number] += slope * padded[rows[LABELS] == row].sum(axis=0)
            scores[table] = sums
        return {
            (first, copy_of(second)): scores[first].T @ scores[second]
            for first, second in joined.tree.pairs
        }

    def members_of(self, positions: np.ndarray) -> Members:
        rows = len(self.joined.values[LABELS])
        return self.members.among(np.flatnonzero(positions), rows)

    def clusters_of(self, span: slice) -> NumberedRows:
        rows = np.zeros(len(self.slopes), bool)
        rows[span] = True
        return NumberedRows(SECRET, self.members_of(rows))

    def clusters_in(self, _: slice) -> np.ndarray:
        return np.arange(self.members.count)


@pytest.mark.cases("0")
@pytest.mark.parametrize("seed", range(3))
def test_the_blocks_are_those_of_pairs_of_rows(seed):
    rng = np.random.default_rng(seed)
    for _ in range(5):
        joined = Joined.draw(rng, most_tables=5)
        edge = int(rng.choice(joined.tree.edges_of(LABELS)))
        slopes = rng.integers(-(1 << 12), 1 << 12, size=len(joined.values[LABELS]))
        for number in range(len(PASSES)):
            blocks = expected(joined, number, edge, slopes)
            exchange = Sums(joined, number, edge, slopes)
            for shards in (None, joined.cut(rng)):
                found = exchange.blocks(shards)
                assert found.keys() == blocks.keys()
                for pair, block in blocks.items():
                    np.testing.assert_array_equal(
                        found[pair], block, err_msg=str((pair, shards))
                    )


def test_numbered_clusters_are_those_of_the_built_join():
    """A row is in several, or in none; a shard may have no row of one."""
    rng = np.random.default_rng(5)
    for _ in range(5):
        joined = Joined.draw(rng, most_tables=4)
        exchange = Numbered(joined, rng)
        blocks = exchange.expected()
        for shards in (None, joined.cut(rng)):
            found = exchange.blocks(shards)
            for pair, block in blocks.items():
                np.testing.assert_array_equal(found[pair], block, err_msg=str(pair))


def test_squares_of_columns_are_within_the_largest_of_a_rows_clusters():
    rng = np.random.default_rng(6)
    for _ in range(20):
        rows, numbers = rng.integers(0, (8, 5), size=(30, 2)).T
        members = Members(rows, numbers, rng.integers(-9, 10, size=30), 5)
        column = rng.normal(size=8)
        sums = np.zeros(5)
        np.add.at(sums, numbers, members.slopes * column[rows])
        assert np.sum(sums**2) <= members.largest * np.sum(column**2) + 1e-9
        places = rng.permutation(8)[:4]
        some = members.among(places, 8)
        is_in = np.isin(rows, places)
        np.testing.assert_array_equal(places[some.rows], rows[is_in])
        np.testing.assert_array_equal(some.slopes, members.slopes[is_in])
    alone = Members(np.zeros(2, np.int64), np.arange(2), np.array([3, 4]), 2)
    assert alone.largest == 25


def test_no_word_covers_two_sums(monkeypatch):
    """Not of a join and its copy either, whose pads are made of the same keys."""
    words: dict[tuple, list[int]] = {}
    of_shard, of_block = SharedKeys.of_shard, SharedKeys.of_block

    def kept_shard(self, side, shard, source):
        pads = of_shard(self, side, shard, source)
        # both ends of a join make them
        for tag, pad in zip(self.tags.tolist(), pads, strict=True):
            words[self.sides, *tag, side, source] = pad.tolist()
        return pads

    def kept_block(self, side, shard, pair):
        pads = of_block(self, side, shard, pair)
        if side == self.sides[0] and pads.any():
            words[self.sides, pair] = pads.ravel().tolist()
        return pads

    monkeypatch.setattr(SharedKeys, "of_shard", kept_shard)
    monkeypatch.setattr(SharedKeys, "of_block", kept_block)
    joined = Joined.draw(np.random.default_rng(0), most_tables=4)
    slopes = np.ones(len(joined.values[LABELS]), np.int64)
    edge = joined.tree.edges_of(LABELS)[0]
    Sums(joined, 0, edge, slopes).blocks(None)
    every = [word for of_place in words.values() for word in of_place]
    assert {len(place) for place in words} == {2, 5}
    assert len(set(every)) == len(every) > 50
