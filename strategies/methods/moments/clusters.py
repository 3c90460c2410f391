"""The meat of clustered errors at the server: slopes down, sums over pairs up.

The server knows the slope of the loss at every joined row, and tells the label's table
those of its rows, as whole numbers. How fine these are, and how fine the columns' words
remain, share the 62 bits of a sum: slopes get as many bits as a standardised column.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np

from strategies.methods.moments.assembly import MAGNITUDE, SPARE_BITS
from strategies.methods.moments.join_counts import JoinCounts, block_of
from strategies.run.exchange import Part, Replies
from strategies.setup.joined_rows import JoinedTables
from tp_flower.arrays import (
    AnyArray,
    BoolArray,
    FloatArray,
    IndexArray,
    IntArray,
)
from tp_flower.errors import QueryError
from tp_flower.methods.moments.clusters import (
    Members,
    bridge_of,
    bridged_rows,
    copied_rows,
    copy_of,
    doubled,
    number_clusters,
)
from tp_flower.methods.moments.exchange import Assembly, Contribution, PassRows
from tp_flower.methods.moments.messages import LARGEST_SLOPE, PaddedPart
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.settings import ErrorSettings
from tp_flower.methods.moments.terms import cluster_edge
from tp_flower.methods.moments.tree import JoinTree
from tp_flower.methods.moments.words import WordArray
from tp_flower.objectives.objective import RowClusters
from tp_flower.query.fragment import Fragment
from tp_flower.settings import Settings

LEAST_CLUSTERS: Final = 10
FEW_CLUSTERS: Final = 50
"""Below it, intervals by clustered errors hold the truth less often than they say
(Cameron and Miller 2015, section VI)."""
_PRODUCT_BITS: Final = 62


def check_clusters(joined: JoinedTables, tree: JoinTree, settings: Settings) -> None:
    """Refuse clusters that are none of the label's table, or too few.

    Raises:
        QueryError: with what to do instead.
    """
    table = joined.bound.label_table
    named = settings.of(ErrorSettings).cluster
    edge = cluster_edge(tree, table, named)
    other = tree.edges[edge].other(table)
    parts = joined.extracted.proposal.shards_of(other).values()
    subqueries = [Fragment.from_json(part.fragment).subquery for part in parts]
    looks_back = any(subquery and subquery.cutoffs for subquery in subqueries)
    if looks_back or edge in joined.extracted.answering:
        why = "has one row for all keys that it lacks, which would be one cluster"
        if looks_back:
            why = "looks back from each row's own time, by which no two rows are alike"
        raise QueryError(
            f"cluster: {named!r} {why}: set cluster to a table that is joined by a key "
            "alone"
        )
    rows = joined.mapping.tables[table].any_of(~joined.is_test)
    numbers, _ = number_clusters(joined.key_codes(edge)[table][rows])
    clusters = int(numbers.max(initial=-1)) + 1
    if clusters < LEAST_CLUSTERS:
        raise QueryError(
            f"cluster: the training rows are of {clusters} clusters by {named!r}; "
            f"clustered errors are for {LEAST_CLUSTERS} or more, and good for "
            f"{FEW_CLUSTERS}: set cluster to a table of more keys, or make its key a "
            "category among the features, with standard-errors = 'robust'"
        )


def clusters_of_join(
    joined: JoinedTables, edge: int, is_trained: BoolArray, slopes: FloatArray
) -> RowClusters:
    """Return the trained rows of the label's table by a join's keys.

    ``slopes`` are of the rows that train, (m,).
    """
    codes = joined.key_codes(edge)[joined.bound.label_table][is_trained]
    numbers, _ = number_clusters(codes)
    count = int(numbers.max(initial=-1)) + 1
    return RowClusters(np.arange(len(numbers)), numbers, slopes, count)


@dataclass(frozen=True, eq=False)
class ClusteredSlopes:
    """The slopes of the label's rows as whole numbers, and their clusters.

    Attributes:
        is_trained: which rows of the label's table train, (n,).
        members: of the clusters, by place among those rows.
        unit: of a slope.
        is_of_join: whether clusters are by the keys of a join, which sites know.
    """

    is_trained: BoolArray
    members: Members
    unit: float
    is_of_join: bool

    @classmethod
    def of(
        cls,
        joined: JoinedTables,
        is_trained: BoolArray,
        clusters: RowClusters,
        chances: FloatArray,
        *,
        is_of_join: bool,
    ) -> Self:
        """Return slopes that are rounded up by the chances that make them right.

        The clusters' rows are by place among those that train; ``chances`` (r,), of
        their members, are uniform.
        """
        exact = clusters.slopes
        squares = exact**2
        mean = squares.mean()
        by_cluster = np.bincount(clusters.numbers, squares)
        by_row = np.bincount(clusters.rows, by_cluster[clusters.numbers])
        pairs = np.count_nonzero(is_trained) * by_row.max() / mean
        is_sharded = any(len(of) > 1 for of in joined.extracted.parts.values())
        spare = MAGNITUDE + SPARE_BITS if is_sharded else 0
        # nearly as many for the root mean square as a column of squares of 1 has
        bits = np.floor((_PRODUCT_BITS - 2 * spare - np.log2(pairs)) / 4.0 - 1.0)
        unit = max(
            np.sqrt(mean) * 2.0**-bits, np.abs(exact).max() / (LARGEST_SLOPE - 1)
        )
        slopes = np.floor(exact / unit + chances).astype(np.int64)
        members = Members(clusters.rows, clusters.numbers, slopes, clusters.count)
        return cls(is_trained, members, float(unit), is_of_join)

    def told(self, span: slice) -> dict[str, AnyArray]:
        """Return the fields about the rows of a shard that train."""
        of_shard = self.in_shard(span)
        fields: dict[str, AnyArray] = {"slopes": of_shard.slopes.astype(np.int32)}
        if not self.is_of_join:
            fields["members"] = of_shard.rows.astype(np.int32)
            fields["clusters"] = of_shard.numbers.astype(np.int32)
        return fields

    def in_shard(self, span: slice) -> Members:
        """Return the members among the rows of a shard that train."""
        before = int(np.count_nonzero(self.is_trained[: span.start]))
        count = int(np.count_nonzero(self.is_trained[span]))
        positions = np.arange(before, before + count)
        return self.members.among(positions, int(np.count_nonzero(self.is_trained)))

    @cached_property
    def largest(self) -> int:
        """The largest sum of squares of a row's clusters."""
        return self.members.largest

    @property
    def clusters(self) -> int:
        """How many there are, G."""
        return self.members.count

    @property
    def total(self) -> int:
        """The sum over the clusters of the squared sums of their slopes."""
        sums = np.zeros(self.clusters, np.int64)
        np.add.at(sums, self.members.numbers, self.members.slopes)
        return sum(each * each for each in sums.tolist())


@dataclass(frozen=True, eq=False)
class MeatSums:
    """The sums over pairs of rows of a cluster, from what the sites send.

    Attributes:
        counts: of joined rows, which count once each in the last weighting.
    """

    counts: JoinCounts
    slopes: ClusteredSlopes
    layout: ColumnLayout

    @cached_property
    def _tree(self) -> JoinTree:
        return doubled(self.counts.tree, self.layout.label_table)

    @cached_property
    def _columns(self) -> dict[str, int]:
        columns = dict(self.layout.columns)
        return columns | {copy_of(table): width for table, width in columns.items()}

    @property
    def _position(self) -> int:
        return len(self.counts.passes) - 1

    @property
    def _edges(self) -> int:
        return len(self.counts.tree.edges)

    def matrix(self, replies: Replies, bits: Mapping[str, IntArray]) -> FloatArray:
        """Return the meat without its factor, (D, D), in units of squared slopes.

        ``bits`` are those of columns in sums over rows.
        """
        bits = {name: each - self.counts.coarser for name, each in bits.items()}
        tables = self.counts.tree.tables
        contributions = {}
        for table in tables:
            contributions[table] = self._read(table, replies)
            contributions[copy_of(table)] = Contribution(contributions[table].sums, {})
        assembly = Assembly(self._tree, self._rows(), contributions)
        blocks = {
            (first, tables[self._tree.tables.index(second) - len(tables)]): block
            for (first, second), block in assembly.blocks().items()
        }
        return self.layout.matrix(blocks, bits)

    def _rows(self) -> dict[str, PassRows]:
        """Return the rows of every table, and of every copy."""
        rows: dict[str, PassRows] = {}
        of_pass = self.counts.of_pass(self._position)
        for table, plain in of_pass.items():
            rows[table], rows[copy_of(table)] = plain, copied_rows(plain, self._edges)
        for name in (self.layout.label_table, copy_of(self.layout.label_table)):
            bridge = bridge_of(self.counts.tree)
            rows[name] = bridged_rows(rows[name], bridge, self.slopes.members)
        return rows

    def _read(self, table: str, replies: Replies) -> Contribution:
        """Return the sum of what a table's shards send, by the server's keys."""
        sums: dict[tuple[int, str], WordArray] = {}
        products: dict[tuple[str, str], WordArray] = {}
        for part in self.counts.joined.extracted.parts[table]:
            body = replies.body(part, PaddedPart)
            for end, words in self._sums(part, body):
                sums[end] = sums[end] + words if end in sums else words
            for pair in self._tree.pairs:
                shape = (self._columns[pair[0]], self._columns[pair[1]])
                numbers = "-".join(str(self._tree.tables.index(name)) for name in pair)
                name = f"{self.counts.passes[-1]}-{numbers}"
                words = block_of(part, body.products, name, shape)
                products[pair] = products[pair] + words if pair in products else words
        return Contribution(sums, products)

    def _sums(
        self, part: Part, body: PaddedPart
    ) -> Iterator[tuple[tuple[int, str], WordArray]]:
        """Yield a part's padded sums, and its copy's, by the server's keys."""
        for name in (part.table, copy_of(part.table)):
            for edge, source in self._tree.sums_of(name):
                order, keys = self._order(part, edge)
                words = block_of(
                    part,
                    body.sums,
                    f"{self.counts.passes[-1]}-{edge}-{self._tree.tables.index(source)}",
                    (len(order), self._columns[source]),
                )
                aligned = np.zeros((keys, words.shape[1]), np.uint64)
                aligned[order] = words
                yield (edge, source), aligned

    def _order(self, part: Part, edge: int) -> tuple[IndexArray, int]:
        """Return where a part's keys of an edge are among the server's, of how many."""
        if edge < bridge_of(self.counts.tree):
            return self.counts.order(part, edge % self._edges, self._position)
        if not self.slopes.is_of_join:
            return np.arange(self.slopes.clusters), self.slopes.clusters
        span = dict(self.counts.joined.extracted.shards_of(part.table))[part]
        numbers = self.slopes.in_shard(span).numbers
        _, first = number_clusters(numbers)
        return numbers[first], self.slopes.clusters
