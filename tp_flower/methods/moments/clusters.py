"""Sums over the pairs of rows of a cluster: the meat of clustered standard errors.

With e_j the derivative of the loss at row j of the label's table, the meat is

    B_ik = sum_g s_i(g) s_k(g)^T,   s_i(g) = sum over rows j of cluster g of e_j x_i(j)

for all pairs of tables i and k. It is no second moment of the joined rows, but one of
their pairs: B_ik is the sum of e_j e_l x_i(j) x_k(l)^T over the pairs (j, l) of rows of
a cluster. So it is the block (i, k*) of a *doubled* tree: every table t with a copy t*,
every join with one of the copies, and a join of the label's table with its own copy by
the cluster, the *bridge*. The exchange of padded sums
(:mod:`tp_flower.methods.moments.exchange`) adds up its blocks (i, k*) and no others.

- A path from i to k* crosses the bridge, and no count on it is one of tuples beyond it:
  e stands at the label's table, in what it adds up and carries to the bridge and back.
  Other tables count tuples without weights, and are told nothing of e.
- Each site plays a table and its copy. Pads of the copies, and those of the bridge, are
  of passes of other names: no word covers two sums. Pads of the bridge are known to the
  shards of the label's table alone. A site sends the corrections of both, added up.
- Rows without a key of the cluster are each a cluster of their own.
- Of times to an event clusters are of no join, and a row is in several
  (:mod:`tp_flower.objectives.survival.levels`): it stands at the bridge once for each.

By Cauchy and Schwarz sum_g |s(g)|^2 is at most L sum_j x(j)^2, with L the largest sum
of e^2 of a row's clusters, all together: so columns whose squares add up to 2^62 / L do
not wrap around.

Notation:
    e  ``slopes``, whole numbers of either sign      G  clusters

Source: Liang and Zeger 1986, "Longitudinal data analysis using generalized linear
models"; Cameron and Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference".
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from tp_flower.arrays import IntArray
from tp_flower.keyed_hash import HashArray
from tp_flower.methods.moments.counts import Codes
from tp_flower.methods.moments.exchange import (
    Contribution,
    PaddedShard,
    PassRows,
    RowWords,
    ShardMasks,
    SummedShard,
)
from tp_flower.methods.moments.pads import SharedKeys
from tp_flower.methods.moments.tree import Edge, JoinTree
from tp_flower.methods.moments.words import WordArray

_NO_KEY = np.uint64((1 << 64) - 1)


def copy_of(table: str) -> str:
    """Return the name of a table's copy, which is no name of SQL."""
    return f"{table}*"


def bridge_of(tree: JoinTree) -> int:
    """Return the number of the bridge in the doubled tree of one."""
    return 2 * len(tree.edges)


def doubled(tree: JoinTree, label_table: str) -> JoinTree:
    """Return a tree and its copy, joined at the label's table.

    >>> from tp_flower.methods.moments.tree import Edge, JoinTree
    >>> two = doubled(JoinTree(("a", "b"), [Edge("a", "b", 0, 0)]), "a")
    >>> two.tables, two.path("b", "b*"), two.pairs
    (('a', 'b', 'a*', 'b*'), [0, 2, 1], (('a', 'a*'), ('a', 'b*'), ('b', 'b*')))
    """
    copies = [
        edge._replace(left=copy_of(edge.left), right=copy_of(edge.right))
        for edge in tree.edges
    ]
    bridge = Edge(label_table, copy_of(label_table), -1, -1)
    return JoinTree(
        (*tree.tables, *map(copy_of, tree.tables)),
        [*tree.edges, *copies, bridge],
        chosen=tuple((first, copy_of(second)) for first, second in tree.pairs),
    )


def number_clusters(codes: Codes) -> tuple[IntArray, IntArray]:
    """Return the cluster of each row (n,), and the first row of each cluster (G,).

    Clusters are numbered as rows of theirs come first, so that whoever has the rows
    numbers them alike, whatever the codes are; -1 is a row without a key.

    >>> numbers, first = number_clusters(np.array([7, -1, 3, 7, -1]))
    >>> numbers.tolist(), first.tolist()
    ([0, 1, 2, 0, 3], [0, 1, 2, 4])
    """
    apart = np.where(codes < 0, -1 - np.arange(len(codes)), codes)
    _, first, inverse = np.unique(apart, return_index=True, return_inverse=True)
    order = np.argsort(first)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[inverse], first[order]


@dataclass(frozen=True, eq=False)
class Members:
    """Which rows are in which clusters, and by how much; a row may be in several.

    Attributes:
        rows: positions, (r,).
        numbers: of their clusters, (r,).
        slopes: e, whole numbers, (r,).
        count: of the clusters, G.
    """

    rows: IntArray
    numbers: IntArray
    slopes: IntArray
    count: int

    @classmethod
    def once(cls, numbers: IntArray, slopes: IntArray) -> Self:
        """Return rows (n,) that are in one cluster each."""
        count = int(numbers.max(initial=-1)) + 1
        return cls(np.arange(len(numbers)), numbers, slopes, count)

    @property
    def largest(self) -> int:
        """L: of any row the squared slopes of its clusters, added up."""
        squares = np.zeros(self.count, np.int64)
        np.add.at(squares, self.numbers, self.slopes.astype(np.int64) ** 2)
        of_rows = np.zeros(int(self.rows.max(initial=-1)) + 1, np.int64)
        np.add.at(of_rows, self.rows, squares[self.numbers])
        return int(of_rows.max(initial=0))

    def among(self, positions: IntArray, rows: int) -> Self:
        """Return the members among some positions of so many rows, by place in them."""
        places = np.full(rows, -1)
        places[positions] = np.arange(len(positions))
        found = places[self.rows]
        is_in = found >= 0
        return replace(
            self,
            rows=found[is_in],
            numbers=self.numbers[is_in],
            slopes=self.slopes[is_in],
        )


def copied_rows(rows: PassRows, edges: int) -> PassRows:
    """Return the rows of a table's copy, whose edges come after those of the tree."""
    return PassRows(
        {number + edges: codes for number, codes in rows.codes.items()},
        {number + edges: keys for number, keys in rows.keys.items()},
        {number + edges: counts for number, counts in rows.counts.items()},
        {
            frozenset(number + edges for number in pair): counts
            for pair, counts in rows.carried.items()
        },
        rows.multiplicity,
    )


def bridged_rows(rows: PassRows, bridge: int, members: Members) -> PassRows:
    """Return the rows of the label's table, or its copy, with the bridge.

    Each stands there as often as it is a member of a cluster, and counts its slope.
    """
    chosen = members.rows
    return PassRows(
        {
            **{number: codes[chosen] for number, codes in rows.codes.items()},
            bridge: members.numbers,
        },
        {**rows.keys, bridge: members.count},
        {bridge: members.slopes * rows.multiplicity[chosen]},
        {
            frozenset((number, bridge)): members.slopes * counts[chosen]
            for number, counts in rows.counts.items()
        },
        rows.multiplicity[chosen],
    )


class Bridge(NamedTuple):
    """What a shard knows of the bridge in a pass.

    Attributes:
        members: of the rows that take part.
        tags: of the clusters, (G, 2).
        counts: by which the shards have a pad of each cluster, (G, J).
    """

    members: Members
    tags: HashArray
    counts: IntArray


@dataclass(frozen=True, eq=False)
class ClusterRows:
    """What a shard of the label's table knows of its rows' clusters, by a join's keys.

    Attributes:
        edge: of the join whose keys are the clusters.
        secret: shared with the other shards of the table, and with nobody else.
        slopes: of all rows of the shard in the exchange, (n,).
    """

    edge: int
    secret: bytes = field(repr=False)
    slopes: IntArray

    def bridge(self, summed: SummedShard, number: int, positions: IntArray) -> Bridge:
        """Return the bridge in the pass of a number, of rows that take part in it."""
        codes = summed.rows.edges[self.edge].codes[positions]
        numbers, first = number_clusters(codes)
        return Bridge(
            Members.once(numbers, self.slopes[positions]),
            self._tags(summed, codes[first], first),
            self._counts(summed, number, numbers, codes[first]),
        )

    def _counts(
        self, summed: SummedShard, number: int, numbers: IntArray, codes: Codes
    ) -> IntArray:
        """Return the rows of every shard of the table in each cluster, (G, J)."""
        beside = summed.told[self.edge].beside[number]
        # the last one is of rows without a key, which no other shard has
        counts = np.vstack([beside, np.zeros_like(beside, shape=(1, beside.shape[1]))])
        counts = counts[codes]
        counts[:, summed.masks.shard] = np.bincount(numbers, minlength=len(codes))
        return counts

    def _tags(self, summed: SummedShard, codes: Codes, first: IntArray) -> HashArray:
        """Return the tags of the clusters' keys, or of their only row, (G, 2)."""
        tags = summed.secrets[self.edge].tags
        alone = np.column_stack(
            [first.astype(np.uint64), np.full(len(first), _NO_KEY, np.uint64)]
        )
        none = np.zeros((1, 2), np.uint64)
        return np.where((codes < 0)[:, None], alone, np.vstack([tags, none])[codes])


@dataclass(frozen=True, eq=False)
class NumberedRows:
    """What a shard of the label's table knows of its rows' clusters, by numbers.

    All shards have a sum of every cluster, if only of no rows.

    Attributes:
        secret: shared with the other shards of the table, and with nobody else.
        members: of all rows of the shard in the exchange.
    """

    secret: bytes = field(repr=False)
    members: Members

    def bridge(self, summed: SummedShard, _: int, positions: IntArray) -> Bridge:
        """Return the bridge of rows that take part."""
        numbers = np.arange(self.members.count, dtype=np.uint64)
        return Bridge(
            self.members.among(positions, summed.rows.weights.shape[1]),
            np.column_stack([numbers, np.zeros_like(numbers)]),
            np.ones((len(numbers), summed.masks.shards), np.int64),
        )


@dataclass(frozen=True, eq=False)
class CoarserWords:
    """The words of columns with so many bits less after the point.

    >>> words = np.array([[5], [6], [-5]]).view(np.uint64)
    >>> CoarserWords(words, 2)[np.arange(3)].view(np.int64).ravel().tolist()
    [1, 2, -1]
    """

    words: RowWords
    bits: int

    def __getitem__(self, rows: IntArray) -> WordArray:
        """Return the words of some rows, (m, d)."""
        finer = self.words[rows].view(np.int64)
        half = (1 << self.bits) >> 1
        coarser: WordArray = ((finer + half) >> self.bits).view(np.uint64)
        return coarser


@dataclass(frozen=True, eq=False)
class ClusteredShard:
    """A shard in the exchange of the sums over pairs of rows of a cluster.

    Attributes:
        summed: the shard in the exchange of second moments.
        label_table: the name of it.
        clusters: of the label's table; None of others.
        coarser: bits that columns have less than in sums over rows: slopes have some.
    """

    summed: SummedShard
    label_table: str
    clusters: ClusterRows | NumberedRows | None
    coarser: int = 0

    def contribution(self, number: int, pass_name: str) -> Contribution:
        """Return what the shard sends of both trees, by the counts of a pass.

        In the pass joined rows count once each.
        """
        tree = self.summed.tree
        words = CoarserWords(self.summed.values, self.coarser)
        summed = replace(self.summed, values=words)
        plain = summed.in_pass(number, pass_name)
        copied = summed.in_pass(number, f"{pass_name} copy")
        edges = len(tree.edges)
        columns = self._columns
        first = replace(
            plain,
            tree=doubled(tree, self.label_table),
            columns=columns,
            keys={
                edge: replace(keys, columns=columns)
                for edge, keys in plain.keys.items()
            },
        )
        second = replace(
            first,
            table=copy_of(plain.table),
            rows=copied_rows(copied.rows, edges),
            keys={
                edge + edges: replace(
                    keys,
                    columns=columns,
                    sides=(copy_of(keys.sides[0]), copy_of(keys.sides[1])),
                )
                for edge, keys in copied.keys.items()
            },
            # those of the first are of the sum of both
            masks=ShardMasks(shard=plain.masks.shard),
        )
        halves = [first, second]
        if self.clusters is not None:
            halves = self._bridged(halves, self.clusters, number, pass_name)
        sent = [half.contribution() for half in halves]
        return Contribution(
            {**sent[0].sums, **sent[1].sums},
            {
                pair: block + sent[1].products[pair]
                for pair, block in sent[0].products.items()
            },
        )

    @property
    def _columns(self) -> dict[str, int]:
        """The columns of every table, and of every copy."""
        columns = dict(self.summed.columns)
        return columns | {copy_of(table): width for table, width in columns.items()}

    def _bridged(
        self,
        halves: list[PaddedShard],
        clusters: ClusterRows | NumberedRows,
        number: int,
        pass_name: str,
    ) -> list[PaddedShard]:
        """Return the label's table, and its copy, with the bridge between them."""
        bridge = bridge_of(self.summed.tree)
        positions = halves[0].positions
        members, tags, counts = clusters.bridge(self.summed, number, positions)
        keys = SharedKeys(
            clusters.secret,
            tags,
            (self.label_table, copy_of(self.label_table)),
            (counts, counts),
            self._columns,
            f"{pass_name} bridge",
        )
        return [
            replace(
                half,
                rows=bridged_rows(half.rows, bridge, members),
                positions=positions[members.rows],
                keys={**half.keys, bridge: keys},
            )
            for half in halves
        ]
