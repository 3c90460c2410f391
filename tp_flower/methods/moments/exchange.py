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

   differs from S_ik by terms that each one party can work out, and sends with a pad B
   of either edge beside it, which telescopes:

       T_i   = (A_i + R(e_1, i, i))^T R(e_1, t_1, k) + B(e_1)
       T_t_j = -delta(e_(j+1), i)^T R(e_(j+1), t_(j+1), k) - B(e_j) + B(e_(j+1))
       T_k   = R(e_L, t_(L-1), i)^T A_k - B(e_L)

   S_ik = P - T_i - sum_j T_t_j - T_k. Without B a correction is an equation in A_i.
4. Own blocks leave as S_tt + B', with -B' from the neighbour at t's first edge.

All words are modulo 2^64. What the server gets is uniform given S.

Notation:
    k  keys of an edge that joined rows have        d_t  columns of table t

Source: sums of products over joins factorise as in AC/DC (Abo Khamis et al. 2018,
arXiv 1803.07480) and F-IVM; the pads and corrections are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Final

import numpy as np
from scipy import sparse

from tp_flower.arrays import IntArray
from tp_flower.keyed_hash import HashArray
from tp_flower.methods.moments.counts import Codes, CountedRows
from tp_flower.methods.moments.pads import EdgePads, edge_digest
from tp_flower.methods.moments.tree import JoinTree
from tp_flower.methods.moments.words import WordArray, inner

NO_KEY: Final = -1
Source = tuple[int, str]  # an edge, and a table whose sums by its keys are meant
Pair = tuple[str, str]  # two tables in the order of the query


def sums_by_key(
    codes: Codes, counts: IntArray, keys: int, values: WordArray
) -> WordArray:
    """Return sum over rows with each key of count times value, (keys, d).

    Codes (n,) are -1 for rows that have no such key, or take no part.
    """
    has_key = codes >= 0
    places = (codes[has_key], np.flatnonzero(has_key))
    shape = (keys, len(codes))
    matrix = sparse.csr_array((counts[has_key].astype(np.uint64), places), shape=shape)
    total: WordArray = matrix @ values
    return total


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
        start_codes = self.codes[start]
        end_codes = self.codes[end]
        takes_part = (start_codes >= 0) & (end_codes >= 0)
        places = (end_codes[takes_part], start_codes[takes_part])
        counts = self.carried[frozenset((start, end))][takes_part].astype(np.uint64)
        shape = (self.keys[end], self.keys[start])
        # equal places are added up
        matrix = sparse.coo_array((counts, places), shape=shape).tocsr()
        total: WordArray = matrix @ sums
        return total


@dataclass(frozen=True)
class Contribution:
    """All that one table sends in one pass.

    Attributes:
        sums: by edge and source, (k, d): U of its own columns, delta of others'.
        products: by pair, (d_i, d_k): corrections T, or the padded own block, or what
            takes the pad of a neighbour's own block off.
    """

    sums: Mapping[Source, WordArray]
    products: Mapping[Pair, WordArray]


@dataclass(frozen=True, eq=False)
class PaddingTable:
    """A table in the exchange of one pass: it makes its contribution.

    Attributes:
        values: (n, d), its rows' columns as words.
        columns: of every table, d.
        pads: by edge.
    """

    name: str
    tree: JoinTree
    rows: PassRows
    values: WordArray
    columns: Mapping[str, int]
    pads: Mapping[int, EdgePads]

    def contribution(self) -> Contribution:
        """Return what the table sends: padded sums, and corrections."""
        sums: dict[Source, WordArray] = {}
        for number in self.tree.edges_of(self.name):
            sums[number, self.name] = self._own[number] + self._pad(number, self.name)
            for source, delta in self._deltas[number].items():
                sums[number, source] = delta
        products: dict[Pair, WordArray] = {}
        for pair in combinations(self.tree.tables, 2):
            if self.name in pair or self.name in self.tree.middles(*pair):
                products[pair] = self._correction(*pair)
        products[self.name, self.name] = self._own_block()
        for number in self.tree.edges_of(self.name):
            other = self.tree.edges[number].other(self.name)
            if self.tree.edges_of(other)[0] == number:
                products[other, other] = -self._block_pad(number, other, other)
        return Contribution(sums, products)

    @cached_property
    def _own(self) -> dict[int, WordArray]:
        """A of the table's own columns, by edge, (k, d)."""
        rows = self.rows
        return {
            number: sums_by_key(
                codes, rows.counts[number], rows.keys[number], self.values
            )
            for number, codes in rows.codes.items()
        }

    @cached_property
    def _deltas(self) -> dict[int, dict[str, WordArray]]:
        """By edge, the delta of each table behind another edge, (k, d_s)."""
        deltas: dict[int, dict[str, WordArray]] = {}
        edges = self.tree.edges_of(self.name)
        for end in edges:
            deltas[end] = {}
            for start in edges:
                if start == end:
                    continue
                other = self.tree.edges[start].other(self.name)
                for source in self.tree.behind(start, self.name):
                    pad = self._pad(start, source, side=other)
                    carried = self.rows.carry(start, end, pad)
                    deltas[end][source] = carried - self._pad(end, source)
        return deltas

    def _pad(self, number: int, source: str, side: str = "") -> WordArray:
        """Return R(e, side, source), (k, d); the side is the table's own by default."""
        return self.pads[number].of_sums(
            side or self.name, source, self.columns[source]
        )

    def _block_pad(self, number: int, first: str, second: str) -> WordArray:
        """Return B(e) of a pair of tables, (d_i, d_k)."""
        shape = (self.columns[first], self.columns[second])
        return self.pads[number].of_products(first, second, shape)

    def _own_block(self) -> WordArray:
        """Return S_tt + B', without a pad if the table is not joined."""
        weighted = self.rows.multiplicity.astype(np.uint64)[:, None] * self.values
        block = inner(weighted, self.values)
        edges = self.tree.edges_of(self.name)
        if edges:
            block += self._block_pad(edges[0], self.name, self.name)
        return block

    def _correction(self, first: str, second: str) -> WordArray:
        """Return T of a pair of tables, one of which this is, or lies between."""
        path = self.tree.path(first, second)
        tables = [first, *self.tree.middles(first, second), second]
        position = tables.index(self.name)
        if position == 0:
            edge = path[0]
            padded = self._own[edge] + self._pad(edge, first)
            pad = self._pad(edge, second, side=tables[1])
            return inner(padded, pad) + self._block_pad(edge, first, second)
        before = path[position - 1]
        if position == len(path):
            pad = self._pad(before, first, side=tables[-2])
            product = inner(pad, self._own[before])
            return product - self._block_pad(before, first, second)
        after = path[position]
        pad = self._pad(after, second, side=tables[position + 1])
        product = inner(self._deltas[after][first], pad)
        block_pads = self._block_pad(after, first, second) - self._block_pad(
            before, first, second
        )
        return block_pads - product


@dataclass(frozen=True)
class EdgeSecret:
    """What the sites of a join's two sides share, and the server does not have.

    Attributes:
        key: K_e.
        tags: uint64 (k, 2), keyed hashes of the distinct keys, by a table's positions.
    """

    key: bytes = field(repr=False)
    tags: HashArray = field(repr=False)


@dataclass(frozen=True, eq=False)
class SummedTable:
    """A table whose second moments with others are wanted, at its site.

    Attributes:
        values: (n, d), its rows' columns as words.
        columns: of every table, d.
        secrets: by edge, shared with the other end.
    """

    name: str
    tree: JoinTree
    rows: CountedRows
    values: WordArray
    columns: Mapping[str, int]
    secrets: Mapping[int, EdgeSecret]

    def in_pass(self, number: int, pass_name: str) -> PaddingTable:
        """Return the table in the pass of a number and a name, with its pads.

        Both ends of an edge get one digest only if they hold the same counts of both
        its directions.
        """
        pads = {}
        for edge_number, edge in self.rows.edges.items():
            is_joined = self.rows.is_joined(edge_number)[number]
            outgoing = self.rows.outgoing[edge_number][number][is_joined]
            incoming = edge.incoming[number][is_joined]
            is_left = self.tree.edges[edge_number].left == self.name
            counts = (outgoing, incoming) if is_left else (incoming, outgoing)
            secret = self.secrets[edge_number]
            tags = secret.tags[is_joined]
            digest = edge_digest(tags, counts, self.columns, pass_name)
            pads[edge_number] = EdgePads(secret.key, digest, tags)
        rows = PassRows.of(self.rows, number)
        return PaddingTable(self.name, self.tree, rows, self.values, self.columns, pads)


@dataclass(frozen=True, eq=False)
class Assembly:
    """The server's half: the moments of one pass from all tables' contributions.

    Sums by the keys of an edge are in one order at both of its ends.
    """

    tree: JoinTree
    rows: Mapping[str, PassRows]
    contributions: Mapping[str, Contribution]
    _padded: dict[tuple[int, str, str], WordArray] = field(
        default_factory=dict, repr=False
    )

    def blocks(self) -> dict[Pair, WordArray]:
        """Return S by pair of tables, (d_i, d_k), of i before or at k."""
        tables = self.tree.tables
        blocks = {
            pair: self._product(*pair) - self._sent(pair)
            for pair in combinations(tables, 2)
        }
        return blocks | {(table, table): self._sent((table, table)) for table in tables}

    def _sent(self, pair: Pair) -> WordArray:
        """Return the sum of what the tables have sent of a pair."""
        parts = [
            contribution.products[pair]
            for contribution in self.contributions.values()
            if pair in contribution.products
        ]
        total: WordArray = np.sum(parts, axis=0, dtype=np.uint64)
        return total

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
        place = (number, side, source)
        if place not in self._padded:
            sent = self.contributions[side].sums[number, source]
            if source == side:
                self._padded[place] = sent
            else:
                start = self.tree.path(side, source)[0]
                other = self.tree.edges[start].other(side)
                padded = self._padded_sums(start, other, source)
                carried = self.rows[side].carry(start, number, padded)
                self._padded[place] = carried - sent
        return self._padded[place]
