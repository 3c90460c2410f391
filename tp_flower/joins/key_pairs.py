"""Pairs of two tables' keys: which of them joined rows have, each pair once.

What is a function of a joined row's two keys is the same in all joined rows of a pair,
and what is summed over the rows of a key may first be summed over those of its pairs.

Notation:
    K, L  keys of the first and the second table
    P     distinct pairs (k, l) that some joined row has
"""

from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import IntArray
from tp_flower.joins.mapping import NO_ROW, TableRows


@dataclass(frozen=True)
class KeyPairs:
    """The pairs of two keys, by the first key and then by the second.

    Attributes:
        rows: the pair of each joined row, with those of a pair as the rows of a table;
            none where a joined row lacks one of the two keys.
        keys: the first and the second key of each pair, (P,) each.
        sizes: (K, L).
    """

    rows: TableRows
    keys: tuple[IntArray, IntArray]
    sizes: tuple[int, int]

    @property
    def count(self) -> int:
        """The number of pairs, P."""
        return self.rows.rows


def pair_keys(first: TableRows, second: TableRows) -> KeyPairs:
    """Return the pairs of two keys that the same joined rows have.

    Args:
        first: the key of each of N joined rows, of one table.
        second: the key of the same joined rows, of another.
    """
    has_both = ~(first.is_absent | second.is_absent)
    codes = first.row_of[has_both].astype(np.int64) * second.rows
    codes += second.row_of[has_both]
    distinct, numbers = np.unique(codes, return_inverse=True)
    pair_of_row = np.full(len(first.row_of), NO_ROW, np.int32)
    pair_of_row[has_both] = numbers
    return KeyPairs(
        TableRows(pair_of_row, len(distinct)),
        (distinct // max(second.rows, 1), distinct % max(second.rows, 1)),
        (first.rows, second.rows),
    )
