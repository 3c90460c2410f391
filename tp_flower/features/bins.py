"""Bins: a table's encoded rows as small numbers, for owners who let them leave.

Trees split a column between values, so of a row they need to know only in which of some
intervals each column's value lies. A *binning* has, by column of the bins, intervals of
numbers or groups of categories, and gives each a number. Its edges stay at the site.

The columns of the bins are the encoded ones, but for those of a one-hot encoding, which
are one column, of categories.

Notation
    n   rows of the shard
    c   columns of the bins
    N   ``most``: numbers of a column, from 0 to N - 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import (
    FEWEST_BINS,
    MISSING,
    MOST_BINS,
    NO_BIN,
    AnyArray,
    FloatArray,
    IntArray,
)
from tp_flower.errors import MessageError
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.encodings import (
    CategoryEncoding,
    CodeEncoding,
    HashEncoding,
    ListedEncoding,
    NumberEncoding,
)
from tp_flower.features.sparse import EncodedRows, SparseRows

BinArray = npt.NDArray[np.uint8]

LEAST_ROWS: Final = 5
"""Rows of a number, at least: else it is joined with others, or a value that few rows
have would be seen to be one."""


class BinColumn(NamedTuple):
    """A column of the bins, and the encoded columns that it is made of.

    Attributes:
        first: encoded column; of rows that are stored sparsely, ``slot`` is the stored
            value.
        size: intervals or categories besides a missing one, if the encoding knows them;
            0 for numbers, whose intervals are chosen.
        is_hot: whether it is the position among ``size`` encoded columns.
        is_category: whether its numbers have no order.
        limit: of a number's declared range, in the encoded scale; 0 if it has none.
    """

    first: int
    slot: int
    size: int = 0
    is_hot: bool = False
    is_category: bool = False
    limit: float = 0.0


def bin_columns(encoder: TableEncoder) -> list[BinColumn]:
    """Return the columns of the bins of a table's encoded rows."""
    columns = []
    first = slot = 0
    for item in encoder.encodings:
        width = len(item.feature_names)
        is_category = isinstance(item, CategoryEncoding | HashEncoding | ListedEncoding)
        if item.is_one_hot:
            columns.append(BinColumn(first, slot, width, True, is_category))
            slot += 1
        elif isinstance(item, CodeEncoding):
            categories = len(item.hashes) + int(item.has_other)
            columns.append(BinColumn(first, slot, categories, is_category=True))
            slot += 1
        else:
            limit = 0.0
            if isinstance(item, NumberEncoding) and item.limit < -MISSING:
                limit = item.limit
            columns += [
                BinColumn(first + offset, slot + offset, limit=limit)
                for offset in range(width)
            ]
            slot += width
        first += width
    return columns


def categorical(encoder: TableEncoder) -> list[int]:
    """Return the columns of the bins whose numbers have no order."""
    columns = enumerate(bin_columns(encoder))
    return [number for number, column in columns if column.is_category]


@dataclass(frozen=True)
class Binning:
    """How a shard's encoded rows become bins; all that a site keeps of it is arrays.

    Attributes:
        edges: float64, of all columns one after the other, ascending in each.
        edge_starts: (c + 1,), where each column's begin.
        numbers: uint8, of each column's intervals or categories, then of missing ones.
        number_starts: (c + 1,).
    """

    edges: FloatArray
    edge_starts: IntArray
    numbers: BinArray
    number_starts: IntArray

    @property
    def columns(self) -> int:
        """The number of columns, c."""
        return len(self.edge_starts) - 1

    @property
    def most(self) -> int:
        """One above the highest number, N at most."""
        numbers = self.numbers[self.numbers != NO_BIN].astype(np.int64)
        return int(numbers.max(initial=-1)) + 1

    def apply(self, encoder: TableEncoder, rows: EncodedRows) -> BinArray:
        """Return the bins of encoded rows, (n, c)."""
        columns = bin_columns(encoder)
        bins = np.empty((len(rows), len(columns)), np.uint8)
        for number, column in enumerate(columns):
            edges = self.edges[self._span(self.edge_starts, number)]
            numbers = self.numbers[self._span(self.number_starts, number)]
            bins[:, number] = numbers[_cells(column, rows, edges)]
        return bins

    def _span(self, starts: IntArray, column: int) -> slice:
        return slice(int(starts[column]), int(starts[column + 1]))

    @property
    def arrays(self) -> dict[str, AnyArray]:
        """The arrays that :meth:`read` reads."""
        return {f"{_PREFIX}{name}": array for name, array in vars(self).items()}

    @classmethod
    def read(cls, arrays: Mapping[str, Any]) -> Self:
        """Return the binning that has these arrays."""
        names = cls.__dataclass_fields__
        return cls(**{name: arrays[f"{_PREFIX}{name}"] for name in names})


_PREFIX: Final = "bins-"


def fit_binning(
    encoder: TableEncoder,
    rows: EncodedRows,
    most: int,
    least_rows: int = LEAST_ROWS,
    *,
    is_shard: bool = False,
) -> Binning:
    """Return the binning of a shard's rows into at most N numbers a column.

    Every number but that of missing values, unless some are, is of ``least_rows`` rows
    or more, or of all there are. The shards of one table must mean the same by a
    number: then a number has fixed intervals of its standardised or declared scale, and
    the categories of one number are alike in the encoder, which shards agree on. Else
    intervals have about equally many rows, and frequent categories a number each.

    Args:
        encoder: of the table.
        rows: (n, d), encoded.
        most: N.
        least_rows: of a number; 1 for any.
        is_shard: whether the table has other shards.
    """
    if not FEWEST_BINS <= most <= MOST_BINS:
        raise MessageError(f"'bins' must be from {FEWEST_BINS} to {MOST_BINS}")
    all_edges, all_numbers = [], []
    for column in bin_columns(encoder):
        edges = np.zeros(0)
        if not (column.size or column.is_hot):
            edges = _edges(column, rows, most, is_shard=is_shard)
        cells = _cells(column, rows, edges)
        size = column.size or len(edges) + 1
        counts = np.bincount(cells, minlength=size + 1)
        if column.is_category:
            numbers = _group(counts, most, least_rows, is_shard=is_shard)
        else:
            numbers = _merge(counts, most, least_rows)
        all_edges.append(edges)
        all_numbers.append(numbers)
    return Binning(
        np.concatenate([np.zeros(0), *all_edges]),
        _starts(all_edges),
        np.concatenate([np.zeros(0, np.uint8), *all_numbers]),
        _starts(all_numbers),
    )


def _starts(arrays: Sequence[AnyArray]) -> IntArray:
    return np.cumsum([0, *map(len, arrays)], dtype=np.int64)


def _cells(column: BinColumn, rows: EncodedRows, edges: FloatArray) -> IntArray:
    """Return the interval or category of each row (n,); the last one if missing."""
    values, places = _stored(column, rows)
    if column.is_hot:
        cells = np.where(values == 0, column.size, places)
    elif column.size:
        codes = np.clip(values, 0, column.size - 1)
        cells = np.where(values <= MISSING, column.size, codes)
    else:
        cells = np.searchsorted(edges, values, side="right")
        cells[values <= MISSING] = len(edges) + 1
    return cells.astype(np.int64)


def _stored(column: BinColumn, rows: EncodedRows) -> tuple[AnyArray, AnyArray | int]:
    """Return a column's values (n,), and of a one-hot one the positions of values."""
    if isinstance(rows, SparseRows):
        values = np.asarray(rows.values[:, column.slot])
        return values, np.asarray(rows.columns[:, column.slot]) - column.first
    if not column.is_hot:
        return np.asarray(rows[:, column.first]), 0
    block = np.asarray(rows[:, column.first : column.first + column.size])
    places = np.abs(block).argmax(axis=1)
    return np.take_along_axis(block, places[:, None], axis=1)[:, 0], places


def _edges(
    column: BinColumn, rows: EncodedRows, most: int, *, is_shard: bool
) -> FloatArray:
    """Return the edges of a number's intervals, N - 1 at most."""
    shares = np.arange(1, most) / most
    if is_shard and column.limit:
        return column.limit * (2.0 * shares - 1.0)
    if is_shard:
        quantile = NormalDist().inv_cdf
        return np.array([quantile(share) for share in shares])
    values, _ = _stored(column, rows)
    values_there = values[values > MISSING].astype(np.float64)
    distinct, counts = np.unique(values_there, return_counts=True)
    last = np.flatnonzero(_ends_interval(counts, most))
    return np.asarray(0.5 * (distinct[last] + distinct[last + 1]), np.float64)


def _ends_interval(counts: IntArray, most: int) -> npt.NDArray[np.bool_]:
    """Return after which of ascending values (k,) an interval ends, (k - 1,).

    A value of many rows has an interval of its own; others have about equally many.
    """
    if len(counts) <= most:
        return np.ones(max(len(counts) - 1, 0), np.bool_)
    is_frequent = counts > counts.sum() / most
    # each may cut an interval of others in two
    others = most - 2 * int(is_frequent.sum())
    if others < 1:
        is_frequent[:] = False
        others = most
    rows = np.where(is_frequent, 0, np.minimum(counts, counts.sum() / most))
    middle = np.cumsum(rows) - 0.5 * rows
    interval = np.floor(middle / rows.sum() * others)
    is_beside = is_frequent[1:] | is_frequent[:-1]
    return np.asarray((np.diff(interval) > 0) | is_beside)


def _merge(counts: IntArray, most: int, least_rows: int) -> BinArray:
    """Return the number of each interval (k,), and of the missing, from their rows.

    Neighbours are merged until each has rows enough.
    """
    counted, missing = counts[:-1], int(counts[-1])
    least = max(least_rows, 1)
    # of an encoding that has more intervals, neighbours share a number
    scale = max(len(counted), most)
    numbers = np.zeros(len(counted), np.int64)
    start = 0
    for end in _run_ends(counted, least):
        # named like its largest interval, which is about the same in all shards
        largest = start + int(counted[start:end].argmax())
        numbers[start:end] = largest * most // scale
        start = end
    of_missing = NO_BIN
    if 0 < missing < least_rows and counted.sum():
        of_missing = int(numbers[counted.argmax()])
    return np.append(numbers, of_missing).astype(np.uint8)


def _run_ends(counts: IntArray, least: int) -> list[int]:
    """Return the ends of runs of intervals that each have the least rows."""
    ends = []
    total = 0
    for end, count in enumerate(counts.tolist(), 1):
        total += count
        if total >= least:
            ends.append(end)
            total = 0
    # what is left belongs to the last one
    return [*ends[:-1], len(counts)]


def _group(counts: IntArray, most: int, least_rows: int, *, is_shard: bool) -> BinArray:
    """Return the number of each category (k + 1,), the missing one included.

    The last number is of all that are rare; in shards categories share numbers in the
    order of the encoder's codes, which is random.
    """
    others = most - 1
    numbers = np.arange(len(counts))
    if not is_shard and len(counts) > others:
        numbers[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        numbers = np.minimum(numbers, others)
    elif len(counts) > others:
        numbers %= others
    rows = np.bincount(numbers, counts, minlength=most)
    is_rare = (rows < least_rows) & (np.arange(most) < others)
    left = rows[is_rare].sum() + rows[others]
    while 0 < left < least_rows and not is_rare[:others].all():
        smallest = np.where(is_rare[:others], np.inf, rows[:others]).argmin()
        is_rare[smallest] = True
        left += rows[smallest]
    return np.where(is_rare[numbers], others, numbers).astype(np.uint8)
