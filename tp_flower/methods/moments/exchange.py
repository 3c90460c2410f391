"""The second moments of the joined rows, from padded sums by join key.

Wanted is S_ik = sum_j x_i(j) x_k(j)^T for all pairs of tables. On a tree of joins

    S_ik = sum_q A_i(e)[q] A_k(e)[q]^T,   A_i(e)[q] = sum over tuples with key q of x_i

at any edge e of the path between i and k. A table's own sums by key it can add up; for
the tables behind its other edges M_t maps sums by the keys of one edge to sums by those
of another. No table shows sums, nor sees another's:

1. Table t sends, of each edge e, U = A_t(e) + R(e, t, t), and for each table s behind
   another edge f of its own delta(e, s) = M_t^T R(f, o, s) - R(e, t, s), o the table at
   the other end of f. The pads R(e, side, source) are known to the two ends of e.
2. The server re-pads: F(e, t, t) = U and F(e, t, s) = M_t^T F(f, o, s) - delta(e, s).
   F is A + R at every edge, of every table on either side.
3. On the path e_1 .. e_L between tables i and k, with t_1 .. t_(L-1) between them,

       P = F(e_1, i, i)^T F(e_1, t_1, k)
           - sum_j delta(e_(j+1), i)^T F(e_(j+1), t_(j+1), k)

   differs from S_ik by terms that each one party can work out, the *corrections*:

       T_i   = (A_i + R(e_1, i, i))^T R(e_1, t_1, k)
       T_t_j = -delta(e_(j+1), i)^T R(e_(j+1), t_(j+1), k)
       T_k   = R(e_L, t_(L-1), i)^T A_k
       S_ik  = P - T_i - sum_j T_t_j - T_k

4. Of every block (i, k) each table sends its correction, or its own block S_tt, or
   nothing, plus a pad B(e) of each of its edges, that the table at the other end takes
   off: without it a correction is an equation in A_i.

A table in several shards sends the sums and corrections of its rows, shard by shard:
all of them are linear in the rows. A shard pads its sums by itself, and who takes a pad
off adds those of all shards that have the key; what the shards of a table send of a
block besides has masks that cancel among them.

All words are modulo 2^64. What the server gets is uniform given S; where the label's
site reads S in its place, it is uniform
(:mod:`tp_flower.methods.moments.reading.label_site`).

Notation:
    k  keys of an edge that joined rows have        d_t  columns of table t

Source: sums of products over joins factorise as in AC/DC (Abo Khamis et al. 2018,
arXiv 1803.07480) and F-IVM; the pads and corrections are ours.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from tp_flower.arrays import IntArray
from tp_flower.keyed_hash import HashArray
from tp_flower.methods.moments.counts import Codes, CountedRows
from tp_flower.methods.moments.pads import SharedKeys
from tp_flower.methods.moments.reading.label_site import (
    ReaderPads,
    block_with_checks,
    with_check,
)
from tp_flower.methods.moments.tree import JoinTree, Pair, Source
from tp_flower.methods.moments.words import WordArray, inner
from tp_flower.privacy.key_agreement import ring_masks

if TYPE_CHECKING:
    from scipy.sparse import csr_array

NO_KEY: Final = -1
_BLOCK_WORDS: Final = 1 << 19
"""Of a table's columns at once: memory that is new takes longer than the products."""


class RowWords(Protocol):
    """The columns of rows as words, which are made where they are asked for."""

    def __getitem__(self, rows: IntArray, /) -> WordArray:
        """Return those of rows (m,), (m, d)."""


def add_by_key(
    sums: WordArray, codes: Codes, counts: IntArray, values: WordArray
) -> None:
    """Add count times value of the rows with each key to sums (keys, d).

    Codes (n,) are -1 for rows that have no such key, or take no part.
    """
    # most runs add nothing up so, and scipy takes a sixth of a second to import
    from scipy.sparse import csc_array

    has_key = codes >= 0
    places = codes[has_key]
    # a column of the matrix is a row of the table, which has one key at most
    starts = np.concatenate([[0], np.cumsum(has_key)])
    weights = counts[has_key].astype(np.uint64)
    if len(sums) <= len(codes):
        shape = (len(sums), len(codes))
        sums += csc_array((weights, places, starts), shape=shape) @ values
        return
    keys, places = np.unique(places, return_inverse=True)
    shape = (len(keys), len(codes))
    sums[keys] += csc_array((weights, places, starts), shape=shape) @ values


@dataclass(frozen=True, eq=False)
class PassRows:
    """A table's rows in one pass.

    Attributes:
        codes: by edge, (n,), the position of a row's key among those that joined rows
            have; -1 for none.
        keys: by edge, how many such keys there are.
        counts: by edge, (n,), the tuples of the other edges that a row is in, c.
        carried: by pair of edges, (n,), those of all edges but the two.
        multiplicity: (n,), G.
    """

    codes: Mapping[int, Codes]
    keys: Mapping[int, int]
    counts: Mapping[int, IntArray]
    carried: Mapping[frozenset[int], IntArray]
    multiplicity: IntArray
    _maps: "dict[tuple[int, int], csr_array]" = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, rows: CountedRows, number: int) -> "PassRows":
        """Return the rows in the pass of a number."""
        codes = {}
        keys = {}
        for edge_number, edge in rows.edges.items():
            is_joined = rows.is_joined(edge_number)[number]
            # the last one is of rows without a key
            positions = np.where(is_joined, np.cumsum(is_joined) - 1, NO_KEY)
            codes[edge_number] = np.append(positions, NO_KEY)[edge.codes]
            keys[edge_number] = int(np.count_nonzero(is_joined))
        return cls(
            codes,
            keys,
            {edge: rows.counts(edge)[number] for edge in rows.edges},
            {
                frozenset(pair): rows.counts(*pair)[number]
                for pair in combinations(rows.edges, 2)
            },
            rows.multiplicity[number],
        )

    def carry(self, start: int, end: int, sums: WordArray) -> WordArray:
        """Return M^T sums: sums (k, d) by the keys of one edge, by those of another."""
        if (start, end) not in self._maps:
            self._maps[start, end] = self._map(start, end)
        total: WordArray = self._maps[start, end] @ sums
        return total

    def _map(self, start: int, end: int) -> "csr_array":
        """Return M^T of two edges, (keys of the second, keys of the first)."""
        from scipy.sparse import coo_array

        start_codes = self.codes[start]
        end_codes = self.codes[end]
        takes_part = (start_codes >= 0) & (end_codes >= 0)
        places = (end_codes[takes_part], start_codes[takes_part])
        counts = self.carried[frozenset((start, end))][takes_part].astype(np.uint64)
        shape = (self.keys[end], self.keys[start])
        # equal places are added up
        return coo_array((counts, places), shape=shape).tocsr()


@dataclass(frozen=True)
class Contribution:
    """All that a shard sends in one pass, or all shards of a table together.

    Attributes:
        sums: by edge and source, (k, d): U of the table's columns, delta of others'.
        products: by pair of tables, (d_i, d_k).
    """

    sums: Mapping[Source, WordArray]
    products: Mapping[Pair, WordArray]


@dataclass(frozen=True)
class ShardMasks:
    """What the shards of a table share, for masks that cancel among them.

    Attributes:
        key: of the table's group; b"" where the table has one shard.
        shard: the number of this one, of ``shards``.
    """

    key: bytes = field(default=b"", repr=False)
    shard: int = 0
    shards: int = 1

    def of_block(self, pass_name: str, pair: Pair, block: WordArray) -> WordArray:
        """Return the mask of a block, (d_i, d_k)."""
        if self.shards == 1:
            return np.zeros_like(block)
        name = json.dumps(["moments", pass_name, *pair]).encode()
        masks = ring_masks(self.key, self.shard, self.shards, block.size, name)
        return masks.reshape(block.shape)


@dataclass(frozen=True, eq=False)
class PaddedShard:
    """A shard in the exchange of one pass.

    Attributes:
        values: the columns of all of the shard's rows.
        positions: (n,), of those that take part.
        columns: of every table, with its check where there are some.
        keys: by edge, what the shard shares with those on the other side.
        check: the weights of its check, (d,); None without.
        reader: the pads of the label's table, where its site reads the moments.
    """

    table: str
    tree: JoinTree
    rows: PassRows
    values: RowWords
    positions: IntArray
    columns: Mapping[str, int]
    keys: Mapping[int, SharedKeys]
    masks: ShardMasks
    pass_name: str
    check: WordArray | None = None
    reader: ReaderPads | None = None
    _pads_across: dict[Source, WordArray] = field(
        default_factory=dict, init=False, repr=False
    )
    _deltas: dict[Source, WordArray] = field(
        default_factory=dict, init=False, repr=False
    )

    def contribution(self) -> Contribution:
        """Return what the shard sends: padded sums, and padded corrections."""
        sums = {
            (number, source): self._padded[number]
            if source == self.table
            else self._delta(number, source)
            for number, source in self._sent
        }
        blocks = {pair: self._padded_block(pair) for pair in self.tree.pairs}
        return Contribution(sums, blocks)

    @cached_property
    def _sent(self) -> list[Source]:
        return self.tree.sums_of(self.table)

    @cached_property
    def _own(self) -> tuple[dict[int, WordArray], WordArray]:
        """A of the table's own columns, by edge, (k, d), and X^T diag(G) X, (d, d)."""
        sums, product = self._added_up
        if self.check is None:
            return sums, product
        checked = {
            edge: with_check(of_edge, self.check) for edge, of_edge in sums.items()
        }
        return checked, block_with_checks(product, self.check)

    @cached_property
    def _added_up(self) -> tuple[dict[int, WordArray], WordArray]:
        """What is in ``_own``, without a check."""
        rows = self.rows
        width = self.columns[self.table] - (self.check is not None)
        sums = {
            number: np.zeros((rows.keys[number], width), np.uint64)
            for number, source in self._sent
            if source == self.table
        }
        product = np.zeros((width, width), np.uint64)
        has_product = (self.table, self.table) in self.tree.pairs
        block_rows = max(_BLOCK_WORDS // max(width, 1), 1)
        for start in range(0, len(self.positions), block_rows):
            block = slice(start, start + block_rows)
            words = self.values[self.positions[block]]
            for number, total in sums.items():
                counts = rows.counts[number][block]
                add_by_key(total, rows.codes[number][block], counts, words)
            if has_product:
                weights = rows.multiplicity[block].astype(np.uint64)
                product += inner(weights[:, None] * words, words)
        return sums, product

    @cached_property
    def _padded(self) -> dict[int, WordArray]:
        """U, by edge, (k, d)."""
        sums, _ = self._own
        return {
            number: of_edge + self._pad(number, self.table)
            for number, of_edge in sums.items()
        }

    def _across(self, number: int, source: str) -> WordArray:
        """Return the pads of what the other side of an edge sends, (k, d_s)."""
        edge_source = (number, source)
        if edge_source not in self._pads_across:
            other = self.tree.edges[number].other(self.table)
            self._pads_across[edge_source] = self.keys[number].total(other, source)
        return self._pads_across[edge_source]

    def _delta(self, end: int, source: str) -> WordArray:
        """Return delta by an edge's keys, (k, d_s), of a table behind another edge."""
        end_source = (end, source)
        if end_source not in self._deltas:
            start = self.tree.path(self.table, source)[0]
            carried = self.rows.carry(start, end, self._across(start, source))
            carried -= self._pad(end, source)
            self._deltas[end_source] = carried
        return self._deltas[end_source]

    def _pad(self, number: int, source: str) -> WordArray:
        """Return the shard's own R(e, t, source), (k, d)."""
        return self.keys[number].of_shard(self.table, self.masks.shard, source)

    def _padded_block(self, pair: Pair) -> WordArray:
        """Return what the shard sends of a block, uniform words without the others'."""
        block = self._block(*pair)
        block += self.masks.of_block(self.pass_name, pair, block)
        for number in self.tree.edges_of(self.table):
            block += self.keys[number].of_block(self.table, self.masks.shard, pair)
        if self.reader is not None:
            block += self.reader.of_block(self.pass_name, pair, block.shape)
        return block

    def _block(self, first: str, second: str) -> WordArray:
        """Return the shard's own block, or its correction T; 0 if it has none."""
        sums, product = self._own
        if first == second == self.table:
            return product.copy()
        tables = [first, *self.tree.middles(first, second), second]
        if first == second or self.table not in tables:
            return np.zeros((self.columns[first], self.columns[second]), np.uint64)
        path = self.tree.path(first, second)
        position = tables.index(self.table)
        if position == 0:
            return inner(self._padded[path[0]], self._across(path[0], second))
        if position == len(path):
            return inner(self._across(path[-1], first), sums[path[-1]])
        edge = path[position]
        return -inner(self._delta(edge, first), self._across(edge, second))


@dataclass(frozen=True)
class EdgeSecret:
    """What the sites of a join's two sides share, and the server does not have.

    Attributes:
        key: K_e.
        tags: uint64 (k, 2), keyed hashes of the distinct keys, by a shard's positions.
    """

    key: bytes = field(repr=False)
    tags: HashArray = field(repr=False)


@dataclass(frozen=True)
class ToldCounts:
    """The counts of an edge's keys as a shard is told them, for every pass.

    Attributes:
        incoming: (p, k, L), the tuples of every shard on the other side.
        beside: (p, k, J), those of the shards on its own side; what it says of the
            shard itself is not read.
    """

    incoming: IntArray
    beside: IntArray


@dataclass(frozen=True, eq=False)
class SummedShard:
    """A shard of a table whose second moments with others are wanted, at its site.

    Attributes:
        values: of its rows.
        columns: of every table, d.
        told: by edge, the counts of all shards on both sides.
        secrets: by edge, shared with the other side.
        bits: after the point of every table's columns, where all sites know them.
        label_rows: of each shard of the label's table, as the sites are told.
        split_rows: of each shard of another table that is held out at random.
        check: the weights of its check, (d,); None without.
        reader: the pads of the label's table, where its site reads the moments.
    """

    table: str
    tree: JoinTree
    rows: CountedRows
    values: RowWords
    columns: Mapping[str, int]
    told: Mapping[int, ToldCounts]
    secrets: Mapping[int, EdgeSecret]
    masks: ShardMasks = field(default_factory=ShardMasks)
    bits: Mapping[str, int] = field(default_factory=dict)
    label_rows: Sequence[int] = ()
    split_rows: Sequence[int] = ()
    check: WordArray | None = None
    reader: ReaderPads | None = None

    def in_pass(self, number: int, pass_name: str) -> PaddedShard:
        """Return the shard in the pass of a number and a name."""
        keys = {
            edge: self._shared_keys(edge, number, pass_name) for edge in self.rows.edges
        }
        takes_part = self.rows.in_pass(number)
        return PaddedShard(
            self.table,
            self.tree,
            PassRows.of(self.rows.select(takes_part), number),
            self.values,
            np.flatnonzero(takes_part),
            self.columns,
            keys,
            self.masks,
            pass_name,
            self.check,
            self.reader,
        )

    def _shared_keys(self, edge: int, number: int, pass_name: str) -> SharedKeys:
        """Return the keys that joined rows of the shard have, with their counts."""
        is_joined = self.rows.is_joined(edge)[number]
        beside = self.told[edge].beside[number][is_joined].copy()
        # its own it works out itself
        beside[:, self.masks.shard] = self.rows.outgoing[edge][number][is_joined]
        incoming = self.told[edge].incoming[number][is_joined]
        sides = self.tree.edges[edge][:2]
        is_left = sides[0] == self.table
        return SharedKeys(
            self.secrets[edge].key,
            self.secrets[edge].tags[is_joined],
            sides,
            (beside, incoming) if is_left else (incoming, beside),
            self.columns,
            pass_name,
            self.bits,
            self.label_rows,
            self.split_rows,
        )


@dataclass(frozen=True, eq=False)
class Assembly:
    """The server's half: the moments of one pass from all tables' contributions.

    Those of a table's shards are added up; sums by the keys of an edge are in one order
    at both of its ends.
    """

    tree: JoinTree
    rows: Mapping[str, PassRows]
    contributions: Mapping[str, Contribution]
    _padded: dict[tuple[int, str, str], WordArray] = field(
        default_factory=dict, repr=False
    )

    def blocks(self) -> dict[Pair, WordArray]:
        """Return S by pair of tables, (d_i, d_k), of i before or at k."""
        blocks: dict[Pair, WordArray] = {}
        for pair in self.tree.pairs:
            sent: WordArray = np.sum(
                [
                    each.products[pair]
                    for each in self.contributions.values()
                    if pair in each.products
                ],
                axis=0,
                dtype=np.uint64,
            )
            is_own = pair[0] == pair[1]
            blocks[pair] = sent if is_own else self._product(*pair) - sent
        return blocks

    def _product(self, first: str, second: str) -> WordArray:
        """Return P of two tables."""
        path = self.tree.path(first, second)
        tables = [first, *self.tree.middles(first, second), second]
        total = inner(
            self._padded_sums(path[0], first, first),
            self._padded_sums(path[0], tables[1], second),
        )
        for position, edge in enumerate(path[1:], 1):
            delta = self.contributions[tables[position]].sums[edge, first]
            total -= inner(delta, self._padded_sums(edge, tables[position + 1], second))
        return total

    def _padded_sums(self, number: int, side: str, source: str) -> WordArray:
        """Return F(e, side, source), (k, d)."""
        end_source = (number, side, source)
        if end_source not in self._padded:
            sent = self.contributions[side].sums[number, source]
            if source == side:
                self._padded[end_source] = sent
            else:
                start = self.tree.path(side, source)[0]
                other = self.tree.edges[start].other(side)
                padded = self._padded_sums(start, other, source)
                carried = self.rows[side].carry(start, number, padded)
                self._padded[end_source] = carried - sent
        return self._padded[end_source]
