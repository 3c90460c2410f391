"""The joins of a run by moments as the server counts them, and what sites send.

The server knows the hashed keys of all rows. It counts how many tuples of every shard
have a key, tells each site those of its own keys, and reads the sites' padded sums in
one order of the keys.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any, Final

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.replies import refuse
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.methods.moments.counts import (
    CountedRows,
    count_joins,
    sums_by_shard,
    whole_weights,
)
from tp_flower.methods.moments.exchange import Contribution, PassRows
from tp_flower.methods.moments.messages import CountedPart, InformationPart, PaddedPart
from tp_flower.methods.moments.terms import label_width, passes_without_partner
from tp_flower.methods.moments.tree import JoinTree
from tp_flower.methods.moments.words import WordArray
from tp_flower.settings import Settings
from tp_flower.splits import RANDOM

NOWHERE: Final = -1
"""The place of a key that its table's rows have, and the other side lacks."""


@dataclass(frozen=True, eq=False)
class JoinCounts:
    """The joins of a run as the server counts them.

    Attributes:
        splitting: the table by whose rows joined rows are held out.
        passes: the numbers of the run's subsets of joined rows, or of its weightings.
        label_weights: in each weighting, of the rows of the label's table, (p, n); a
            joined row that is left out weighs 0. None for subsets, in which rows count
            as the run weighs them.
        shares: columns of the label's table beside its features, in place of a label.
        largest_cluster: the largest sum of squared slopes of a row's clusters, if the
            sums of the last weighting are over pairs of rows; 0 for those of rows.
    """

    joined: JoinedTables
    tree: JoinTree
    splitting: str
    passes: tuple[int, ...]
    label_weights: IntArray | None = None
    shares: int = 0
    largest_cluster: int = 0

    @classmethod
    def of(cls, joined: JoinedTables, splitting: str, tree: JoinTree) -> "JoinCounts":
        """Return the counts of the joined rows."""
        passes = tuple(np.unique(joined.subset).tolist())
        return cls(joined, tree, splitting, passes)

    @classmethod
    def weighed(
        cls,
        joined: JoinedTables,
        tree: JoinTree,
        label_weights: IntArray,
        *,
        shares: int,
        largest_cluster: int = 0,
    ) -> "JoinCounts":
        """Return what joined rows weigh, each as its row of the label's table."""
        passes = tuple(range(len(label_weights)))
        table = joined.bound.label_table
        return cls(joined, tree, table, passes, label_weights, shares, largest_cluster)

    @property
    def outputs(self) -> int:
        """The number of the label's columns, or of shares where rows are weighed."""
        if self.label_weights is not None:
            return self.shares
        return label_width(len(self.joined.labels.classes))

    def columns(self, features: Mapping[str, int]) -> dict[str, int]:
        """Return by table its columns: of features, and of the label with a 1."""
        label_table = self.joined.bound.label_table
        return {
            table: width + (table == label_table) * (1 + self.outputs)
            for table, width in features.items()
        }

    @cached_property
    def _codes(self) -> dict[tuple[int, str], AnyArray]:
        """By join and table, the number of each row's key, (n,)."""
        return {
            (number, table): codes
            for number in range(len(self.joined.bound.joins))
            for table, codes in self.joined.key_codes(number).items()
        }

    @cached_property
    def rows(self) -> dict[str, CountedRows]:
        """The rows of every table, with their counts."""
        unmatched = {
            edge_end: passes_without_partner(
                self.tree, *edge_end, self.splitting, self.passes
            )
            for edge_end in self._codes
        }
        weights = {table: self._weights(table) for table in self.tree.tables}
        return count_joins(self.tree, self._codes, weights, unmatched)

    def _weights(self, table: str) -> IntArray:
        """Return the weights of a table's rows in every pass, (p, n)."""
        joined = self.joined
        if self.label_weights is not None:
            if table == joined.bound.label_table:
                return self.label_weights
            shape = (len(self.passes), joined.extracted.table_rows[table])
            return np.ones(shape, np.int64)
        if table == joined.weighting.entity:
            return self._equal_weights(table)
        weights = np.ones(joined.extracted.table_rows[table], np.int64)
        if table == joined.bound.weight_table:
            weights = whole_weights(self._query_weights, self.largest_weight)
        bits = self.bits[table]
        if bits is None:
            return np.repeat(weights[None, :], len(self.passes), axis=0)
        return np.stack([(bits >> number & 1) * weights for number in self.passes])

    def _equal_weights(self, table: str) -> IntArray:
        """Return the weights of rows of a table that all weigh alike, (p, n)."""
        joined = self.joined
        counts = [
            joined.mapping.select(joined.subset == number).tables[table].multiplicity
            for number in self.passes
        ]
        of_passes = np.stack(counts).astype(np.int64)
        return CountedRows({}, of_passes).of_equal_weight().weights

    @property
    def _query_weights(self) -> FloatArray:
        """The query's weights of the rows of their table, (n,)."""
        weights = self.joined.extracted.weights
        return np.ones(1) if weights is None else weights

    @property
    def largest_weight(self) -> float:
        """The largest of them."""
        return float(self._query_weights.max())

    @cached_property
    def totals(self) -> IntArray:
        """The weight of all joined rows of every pass, (p,): N without weights."""
        label_table = self.joined.bound.label_table
        total: IntArray = self.rows[label_table].multiplicity.sum(axis=1)
        return total

    @property
    def row_passes(self) -> tuple[int, ...]:
        """The numbers of the passes whose sums are over joined rows, not pairs."""
        return self.passes[:-1] if self.largest_cluster else self.passes

    @property
    def mass(self) -> int:
        """The largest sum of squares, over all passes, of a column of ones."""
        return self._row_mass + (self._pair_mass >> 2 * self.coarser)

    @property
    def coarser(self) -> int:
        """The bits that columns have less in sums over pairs of rows, for slopes."""
        ratio = -(-self._pair_mass // self._row_mass)
        # half of the logarithm, rounded up
        return (max(ratio - 1, 0).bit_length() + 1) // 2

    @property
    def _row_mass(self) -> int:
        """The largest sum of squares of a column of ones over rows."""
        return int(self.totals[: len(self.row_passes)].sum())

    @property
    def _pair_mass(self) -> int:
        """The largest one over pairs of rows."""
        return int(self.totals[-1]) * self.largest_cluster

    @cached_property
    def bits(self) -> dict[str, AnyArray | None]:
        """By table, a bit for every pass that a row takes part in, (n,), uint8.

        None stands for all rows in all passes.
        """
        return {table: self._bits(table) for table in self.tree.tables}

    def split_rows(self, settings: Settings) -> list[int]:
        """Return the rows in joined rows of each shard that a random split draws from.

        [] where these are all of one site's, or the label's: every site knows more.
        """
        named = settings.split.kind == RANDOM and bool(settings.split.table)
        shards = self.joined.extracted.shards_of(self.splitting)
        spans = [span for _, span in shards]
        if not named or len(spans) == 1:
            return []
        is_joined = self.joined.mapping.tables[self.splitting].is_joined
        return [int(np.count_nonzero(is_joined[span])) for span in spans]

    def _bits(self, table: str) -> AnyArray | None:
        joined = self.joined
        rows = joined.mapping.tables[table]
        if table == self.splitting:
            bits = np.zeros(rows.rows, np.uint8)
            for number in self.passes:
                is_in_pass = rows.any_of(joined.subset == number)
                bits |= is_in_pass.astype(np.uint8) << number
            return bits
        # rows that are not sampled are in no joined row
        is_joined = rows.is_joined
        if table != joined.bound.label_table or is_joined.all():
            return None
        every = sum(1 << number for number in self.passes)
        return np.where(is_joined, np.uint8(every), np.uint8(0))

    def part(
        self, part: Part, encoding: TableEncoding, bits: IntArray | None
    ) -> CountedPart:
        """Return what a part is told; ``bits`` are common to its table's shards."""
        passes = self.bits[part.table]
        return CountedPart(
            encoder=encoding.sealed,
            passes=None if passes is None else passes[self._rows_of(part)],
            **self._told(part, bits),
        )

    def weighed_part(
        self,
        part: Part,
        bits: IntArray | None,
        of_rows: Mapping[str, AnyArray],
    ) -> InformationPart:
        """Return what a part is told of joined rows that are weighed.

        ``of_rows`` are the fields about each trained row of the label's table.
        """
        fields: dict[str, Any] = {**of_rows, **self._told(part, bits)}
        return InformationPart(**fields)

    def _told(self, part: Part, bits: IntArray | None) -> dict[str, Any]:
        """Return the fields about the tuples behind each join, and of the columns."""
        table = part.table
        incoming = {}
        beside = {}
        for number in self.tree.edges_of(table):
            places = self.places[number, part]
            other = self.tree.edges[number].other(table)
            incoming[str(number)] = _at(self._by_shard[number, other], places)
            beside[str(number)] = _at(self._by_shard[number, table], places)
        is_sharded = len(self.joined.extracted.parts[table]) > 1
        return {
            "incoming": incoming,
            "beside": beside if is_sharded else {},
            "bits": bits if is_sharded else None,
        }

    def told_shards(self, number: int, table: str) -> int:
        """Return of how many shards' counts those of a table are told, of a join."""
        parts = self.joined.extracted.parts
        across = len(parts[self.tree.edges[number].other(table)])
        beside = len(parts[table])
        return across + (beside if beside > 1 else 0)

    @cached_property
    def _by_shard(self) -> dict[tuple[int, str], IntArray]:
        """By join and table, the outgoing counts of its shards, (p, keys, shards)."""
        return {edge_end: self._outgoing(*edge_end) for edge_end in self._codes}

    def _outgoing(self, number: int, table: str) -> IntArray:
        rows = self.rows[table]
        shards = [span for _, span in self.joined.extracted.shards_of(table)]
        if len(shards) == 1:
            return rows.outgoing[number][:, :, None]
        edge = rows.edges[number]
        return sums_by_shard(edge.codes, rows.counts(number), edge.keys, shards)

    def _rows_of(self, part: Part) -> slice:
        """Return the rows of a part within its table."""
        return dict(self.joined.extracted.shards_of(part.table))[part]

    @cached_property
    def places(self) -> dict[tuple[int, Part], AnyArray]:
        """By join and part, the number of each of its distinct keys, (k,).

        If the other side answers for keys that it lacks, the last is its answer's.
        """
        return {
            (number, part): self._places(number, part)
            for number, table in self._codes
            for part in self.joined.extracted.parts[table]
        }

    def _places(self, number: int, part: Part) -> AnyArray:
        table = part.table
        edge = self.tree.edges[number]
        position = self.joined.extracted.parts[table].index(part)
        column = self.joined.extracted.keys[table, edge.key(table)][position]
        codes = self._codes[number, table][self._rows_of(part)]
        places = np.zeros(len(column.hashes), np.int64)
        has_key = column.codes >= 0
        places[column.codes[has_key]] = codes[has_key]
        answering = self.joined.extracted.answering.get(number, table)
        if answering == table:
            return places
        # the site has the answer's key as its last one, and its rows at that
        answer = self._codes[number, answering][-1]
        return np.append(np.where(places == answer, NOWHERE, places), answer)

    def read(
        self, table: str, replies: Replies, position: int, columns: Mapping[str, int]
    ) -> Contribution:
        """Return the sum of a table's contributions to a pass, by the server's keys."""
        sums: dict[tuple[int, str], WordArray] = {}
        products: dict[tuple[str, str], WordArray] = {}
        for part in self.joined.extracted.parts[table]:
            body = replies.body(part, PaddedPart)
            for end, block in self._sums(part, body, position, columns):
                sums[end] = sums[end] + block if end in sums else block
            for pair, block in self._products(part, body, position, columns):
                products[pair] = products[pair] + block if pair in products else block
        return Contribution(sums, products)

    def _sums(
        self, part: Part, body: PaddedPart, position: int, columns: Mapping[str, int]
    ) -> Iterator[tuple[tuple[int, str], WordArray]]:
        """Yield a part's padded sums, by the keys of its table's joined rows."""
        tables = self.tree.tables
        for edge in self.tree.edges_of(part.table):
            order, keys = self.order(part, edge, position)
            for name in (part.table, *self.tree.beyond(edge, part.table)):
                block = block_of(
                    part,
                    body.sums,
                    f"{self.passes[position]}-{edge}-{tables.index(name)}",
                    (len(order), columns[name]),
                )
                aligned = np.zeros((keys, columns[name]), np.uint64)
                aligned[order] = block
                yield (edge, name), aligned

    def order(self, part: Part, edge: int, position: int) -> tuple[IntArray, int]:
        """Return where the keys of a part's sums are among the server's.

        And how many of the join's keys joined rows of the pass have.
        """
        is_joined = self.rows[part.table].is_joined(edge)[position]
        shard = self.joined.extracted.parts[part.table].index(part)
        has_tuples = self._by_shard[edge, part.table][position, :, shard] > 0
        places = self.places[edge, part]
        places = places[_at((is_joined & has_tuples)[None], places)[0]]
        return (np.cumsum(is_joined) - 1)[places], int(is_joined.sum())

    def _products(
        self, part: Part, body: PaddedPart, position: int, columns: Mapping[str, int]
    ) -> Iterator[tuple[tuple[str, str], WordArray]]:
        """Yield what a part sends of every block."""
        tables = self.tree.tables
        for first, second in combinations_with_replacement(tables, 2):
            pair = f"{tables.index(first)}-{tables.index(second)}"
            shape = (columns[first], columns[second])
            name = f"{self.passes[position]}-{pair}"
            yield (first, second), block_of(part, body.products, name, shape)

    def of_pass(self, position: int) -> dict[str, PassRows]:
        """Return the rows of every table in a pass."""
        return {
            table: PassRows.of(rows.select(rows.in_pass(position)), position)
            for table, rows in self.rows.items()
        }


def _at(counts: AnyArray, places: AnyArray) -> AnyArray:
    """Return counts (p, keys, ...) at some places, (p, k, ...); nowhere they are 0."""
    nothing = np.zeros_like(counts[:, :1])
    return np.concatenate([counts, nothing], axis=1)[:, places]


def block_of(
    part: Part, blocks: Mapping[str, AnyArray], name: str, shape: tuple[int, int]
) -> AnyArray:
    """Return a block of words that a part has sent, of a shape."""
    block = blocks.get(name)
    if block is None or block.shape != shape:
        raise refuse(part, f"no block {name!r} of {shape[0]} x {shape[1]} words")
    return block
