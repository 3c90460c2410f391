"""Sums over pairs of rows of a cluster are those of the built join."""

import numpy as np
import pytest

from tests.support.tables.random_joins import PASSES, Joined, added_up, aligned
from tp_flower.methods.moments.clusters import (
    ClusteredShard,
    ClusterRows,
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
                slopes = self.slopes[self.in_pass]
                halves = [
                    bridged_rows(h, bridge, self.clusters, slopes) for h in halves
                ]
            found[table], found[copy_of(table)] = halves
        return found

    def of_shard(self, table: str, shard: SummedShard, span: slice) -> Contribution:
        """What a shard sends, by the keys of the whole table."""
        of_labels = ClusterRows(self.edge, SECRET, self.slopes[span])
        clusters = of_labels if table == LABELS else None
        found = ClusteredShard(shard, LABELS, clusters).contribution(
            self.number, PASSES[self.number]
        )
        sums = {}
        for (edge, source), block in found.sums.items():
            if edge == bridge_of(self.joined.tree):
                total = np.zeros((self.clusters.max(initial=-1) + 1, block.shape[1]))
                sums[edge, source] = total.astype(np.uint64)
                sums[edge, source][self.clusters_in(span)] = block
                continue
            place = (edge % self.edges, source)
            alone = Contribution({place: block}, {})
            lined_up = aligned(alone, shard.rows, self.rows[table], self.number)
            sums[edge, source] = lined_up.sums[place]
        return Contribution(sums, found.products)

    def clusters_in(self, span: slice) -> np.ndarray:
        """The clusters of a shard's rows, as these come first."""
        before = int(self.in_pass[: span.start].sum())
        numbers = self.clusters[before : before + int(self.in_pass[span].sum())]
        return numbers[number_clusters(numbers)[1]]


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
