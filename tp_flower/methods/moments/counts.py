"""How many tuples of the join are behind a row, by the counts that tables pass on.

The rows of a table t with key q of an edge e, each as often as tuples of the tables on
t's side of e contain it, are its *outgoing* count:

    out(e, t)[q] = sum over rows r of t with key q of c(r, e)
    c(r, e) = w(r) prod over the other edges f of t of in(f, t)[key_f(r)]

and in(f, t) = out(f, u), u the table at the other end of f. So in(f, t)[key_f(r)] is
how many tuples of the tables behind f join row r, and G(r), the product over all edges,
how many joined rows r is in. An outgoing count is a function of a table's rows and its
incoming counts: two ends of an edge that hold equal counts of both directions, at every
edge of a tree, hold the true ones.

A *pass* is a subset of the joined rows (those that train, validate or test): a row of
the table by which rows are held out has w = 1 in at most one of them. A row that a LEFT
JOIN finds no partner for counts once in every pass, but only in that of the training
rows if the table by which rows are held out lies behind the join.

Notation:
    n  rows of the table      k  distinct keys of an edge      p  passes
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray, IntArray
from tp_flower.errors import SiteError
from tp_flower.methods.moments.tree import JoinTree

Codes = npt.NDArray[np.integer]

MOST_TUPLES: Final = 1 << 52
"""Of a row or a key: numbers up to here are whole in floating point, too."""


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """A table's rows at one of its edges.

    Attributes:
        codes: (n,), the position of each row's key; -1 where it is NULL.
        incoming: (p, k), the tuples behind the edge that have the key.
        unmatched: (p,), the count of a row without a partner: 0 for JOIN, 1 for a LEFT
            JOIN, but 0 in passes of held-out rows where a table behind the edge decides
            which these are.
    """

    codes: Codes
    incoming: IntArray
    unmatched: IntArray

    @property
    def keys(self) -> int:
        """The number of distinct keys, k."""
        return int(self.incoming.shape[1])

    @cached_property
    def partners(self) -> IntArray:
        """How many tuples behind the edge join each row, (p, n)."""
        is_answered = self.incoming.any(axis=0)
        counts = np.where(is_answered, self.incoming, self.unmatched[:, None])
        # the last one is of rows without a key
        return np.concatenate([counts, self.unmatched[:, None]], axis=1)[:, self.codes]


WEIGHT_BITS: Final = 24
"""Of weights of rows, which are whole numbers: the largest is 2^24."""


def whole_weights(weights: FloatArray, largest: float) -> IntArray:
    """Return weights (n,) of rows as whole numbers; those that are missing count 0.

    >>> whole_weights(np.array([3.0, 1.5, 0.0]), 3.0).tolist()
    [16777216, 8388608, 0]
    """
    share = np.clip(np.nan_to_num(weights) / largest, 0.0, 1.0)
    return np.rint(np.ldexp(share, WEIGHT_BITS)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class CountedRows:
    """A table's rows with what they are joined to.

    Attributes:
        edges: by number.
        weights: (p, n), w: 0 or 1, or of one table whole weights.
    """

    edges: Mapping[int, EdgeRows]
    weights: IntArray

    def select(self, chosen: IntArray | BoolArray) -> "CountedRows":
        """Return some of the rows, by positions or a mask (n,)."""
        edges = {
            number: EdgeRows(edge.codes[chosen], edge.incoming, edge.unmatched)
            for number, edge in self.edges.items()
        }
        return CountedRows(edges, self.weights[:, chosen])

    def of_equal_weight(self) -> "CountedRows":
        """Return the rows, all of whose joined rows together weigh the same.

        That is a row's weight 1 / G in each pass, whatever weights joined rows have.
        """
        counts = self.multiplicity
        shares = np.divide(1.0, counts, out=np.zeros(counts.shape), where=counts > 0)
        weights = whole_weights(shares, 1.0)
        # a row in very many joined rows counts as little as there is
        weights[(weights == 0) & (counts > 0)] = 1
        return CountedRows(self.edges, weights)

    def in_pass(self, number: int) -> BoolArray:
        """Return which rows joined rows of a pass have, (n,).

        Rows that have none add nothing to a sum by a key that joined rows have.
        """
        is_in_pass: BoolArray = self.multiplicity[number] > 0
        return is_in_pass

    def counts(self, *without: int) -> IntArray:
        """Return w times the partners at all edges but some, (p, n).

        Without one edge it is c, without any G.

        Raises:
            SiteError: a count is beyond ``MOST_TUPLES``, where products wrap around.
        """
        product = self.weights.copy()
        for number, edge in self.edges.items():
            if number in without:
                continue
            partners = edge.partners
            if np.any(product.astype(np.float64) * partners > MOST_TUPLES):
                raise SiteError(
                    f"the joined rows of a row are more than {MOST_TUPLES}, the most "
                    "that second moments are of"
                )
            product *= partners
        return product

    @cached_property
    def outgoing(self) -> dict[int, IntArray]:
        """The outgoing counts of every edge, (p, k)."""
        return {
            number: sums_of_keys(edge.codes, self.counts(number), edge.keys)
            for number, edge in self.edges.items()
        }

    def is_joined(self, number: int) -> BoolArray:
        """Return by pass which keys of an edge joined rows have, (p, k)."""
        incoming = self.edges[number].incoming
        is_joined: BoolArray = (self.outgoing[number] > 0) & (incoming > 0)
        return is_joined

    @cached_property
    def multiplicity(self) -> IntArray:
        """G by pass, (p, n)."""
        return self.counts()


def count_joins(
    tree: JoinTree,
    codes: Mapping[tuple[int, str], Codes],
    weights: Mapping[str, IntArray],
    unmatched: Mapping[tuple[int, str], IntArray],
) -> dict[str, CountedRows]:
    """Return the rows of all tables with their counts, as passed along the joins.

    Args:
        tree: of the joins.
        codes: by edge and table, (n,), the number of each row's key, one numbering for
            both ends; -1 for NULL.
        weights: by table, (p, n), w.
        unmatched: by edge and table, (p,), the count of a row without a partner.
    """
    keys = {number: 0 for number, _ in enumerate(tree.edges)}
    for (number, _), of_rows in codes.items():
        keys[number] = max(keys[number], int(of_rows.max(initial=-1)) + 1)
    outgoing: dict[tuple[int, str], IntArray] = {}

    def edge_rows(number: int, table: str) -> EdgeRows:
        other = tree.edges[number].other(table)
        end = (number, other)
        if end not in outgoing:
            further = {
                edge: edge_rows(edge, other)
                for edge in tree.edges_of(other)
                if edge != number
            }
            counts = CountedRows(further, weights[other]).counts()
            outgoing[end] = sums_of_keys(codes[end], counts, keys[number])
        return EdgeRows(codes[number, table], outgoing[end], unmatched[number, table])

    return {
        table: CountedRows(
            {number: edge_rows(number, table) for number in tree.edges_of(table)},
            weights[table],
        )
        for table in tree.tables
    }


def sums_of_keys(codes: Codes, counts: IntArray, keys: int) -> IntArray:
    """Return the sums of counts (p, n) of the rows with each key, (p, keys).

    Raises:
        SiteError: a sum is beyond ``MOST_TUPLES``.

    >>> sums_of_keys(np.array([1, -1, 1]), np.array([[3, 5, 4]]), 2).tolist()
    [[0, 7]]
    """
    total = np.zeros((len(counts), keys), np.int64)
    has_key = codes >= 0
    # of rows that have the key: sums of all rows are beyond it much sooner
    largest = float(counts.max(initial=0)) * len(codes)
    if largest > MOST_TUPLES:
        largest = max(
            np.bincount(codes[has_key], row_counts[has_key]).max(initial=0.0)
            for row_counts in counts
        )
    if largest > MOST_TUPLES:
        raise SiteError(
            f"the joined rows of a key are more than {MOST_TUPLES}, the most that "
            "second moments are of"
        )
    for row_counts, key_counts in zip(counts, total, strict=True):
        np.add.at(key_counts, codes[has_key], row_counts[has_key])
    return total


def sums_by_shard(
    codes: Codes, counts: IntArray, keys: int, shards: Sequence[slice]
) -> IntArray:
    """Return :func:`sums_of_keys` of the rows of every shard, (p, keys, shards)."""
    return np.stack(
        [sums_of_keys(codes[rows], counts[:, rows], keys) for rows in shards], axis=-1
    )
