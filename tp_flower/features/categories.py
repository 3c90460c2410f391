"""How often each category of a feature occurs, by keyed hash and not by name.

Notation
    k   categories listed
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tp_flower.errors import SchemaError
from tp_flower.features.columns import CategoricalColumn
from tp_flower.keyed_hash import HashArray, KeyedHasher

CountArray = npt.NDArray[np.int64]
PositionArray = npt.NDArray[np.intp]

MOST_CATEGORIES: Final = 100_000
"""Categories that one shard lists at most: 2.4 MB on the wire."""


@dataclass(frozen=True, eq=False)
class CategoryStatistics:
    """The categories of a feature and their rows.

    A shard leaves out what has fewer than its min_count rows: that never leaves it, and
    is "other". It also lists no more than ``MOST_CATEGORIES``: all that have more than
    ``tail`` rows, and says what ``tail`` is. Which categories are the most frequent is
    then still known exactly, or known to be unknown.

    Attributes:
        hashes: uint64 (k, 2), in ascending order: 128 bits of the keyed hash.
        counts: int64 (k,), rows that are known to be of the category.
        most: int64 (k,), rows that may be: shards whose lists were cut short may have
            some that they did not list.
        tail: rows that a category may have which no shard lists; 0 if no list was cut.
    """

    hashes: HashArray
    counts: CountArray
    most: CountArray
    tail: int

    def most_frequent(self, number: int) -> PositionArray:
        """Return the positions of the most frequent categories; ties: smallest hash.

        Raises:
            SchemaError: lists were cut too short to tell.
        """
        ranked = np.argsort(-self.counts, kind="stable")
        chosen, others = ranked[:number], ranked[number:]
        if self.tail:
            least = self.counts[chosen].min(initial=np.iinfo(np.int64).max)
            if len(chosen) < number or least <= max(
                self.tail, self.most[others].max(initial=0)
            ):
                raise SchemaError(
                    f"it has more than {MOST_CATEGORIES} different values in a shard, "
                    "and which are the most frequent cannot be told: encode it with "
                    "hash(k) or length, keep fewer categories with one-hot(k), or "
                    "leave it out"
                )
        return chosen


def count_categories(
    column: CategoricalColumn, hasher: KeyedHasher, min_count: int = 1
) -> CategoryStatistics:
    """Return the categories of a shard's rows that may leave it.

    Args:
        column: n rows.
        hasher: of the feature.
        min_count: the fewest rows that a listed category has.
    """
    present = column.codes[~column.is_missing]
    counts = np.bincount(present, minlength=len(column.texts))
    listed = np.flatnonzero(counts >= max(1, min_count))
    tail = 0
    if len(listed) > MOST_CATEGORIES:
        place = len(listed) - 1 - MOST_CATEGORIES
        tail = int(np.partition(counts[listed], place)[place])
        listed = listed[counts[listed] > tail]
    hashes = short_hashes(column.texts.take(pa.array(listed)), hasher)
    # in the order of the hashes: theirs says nothing about that of the texts
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    found = counts[listed][order].astype(np.int64)
    return CategoryStatistics(hashes[order], found, found, tail)


def short_hashes(texts: pa.Array, hasher: KeyedHasher) -> HashArray:
    """Return 128 bits of the keyed hash of each text, uint64 (k, 2)."""
    return hasher.hash_texts(texts)[:, :2]


def merge_categories(parts: Sequence[CategoryStatistics]) -> CategoryStatistics:
    """Return the statistics of the union of the shards' rows, in any order."""
    hashes = np.concatenate([part.hashes for part in parts])
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    hashes = hashes[order]
    is_first = np.ones(len(hashes), dtype=np.bool_)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    group = np.empty(len(hashes), dtype=np.intp)
    group[order] = np.cumsum(is_first) - 1
    tail = sum(part.tail for part in parts)
    counts = np.zeros(int(is_first.sum()), dtype=np.int64)
    # a shard that does not list a category may have as many rows of it as its tail
    most = np.full(len(counts), tail, dtype=np.int64)
    np.add.at(counts, group, np.concatenate([part.counts for part in parts]))
    np.add.at(most, group, np.concatenate([part.most - part.tail for part in parts]))
    return CategoryStatistics(hashes[is_first], counts, most, tail)


def category_purpose(table: str, feature: str) -> str:
    """Return the purpose of the key that a feature's categories are hashed with.

    Args:
        table: its alias in the query, which all sites of a run know.
        feature: its name in the query.
    """
    return f"category/{len(table)}/{table}/{feature}"
