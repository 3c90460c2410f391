"""Number of directions that rows vary in: the bound on how often scores may leave.

A score vector is one equation for each row's features. As long as fewer have left than
the rows have directions, the features do not follow from the scores by linear algebra,
even for who knows the models. The *effective rank* is the number of directions that
counts for this:

    R_eff = min(R, 2 min over raw columns c of (R - R_c))

R is the rank of the encoded columns over the rows that take part, R_c that of the
encoded columns that read the raw column c, so that a column counts at most as many as
all others together: if a category of 500 values stands beside constants, one score
vector tells it, though R is 499.

**Guarantee.** Constants, copies, sums of other columns and a column under several names
or encoders add nothing, however the server declares their encoders: a direction counts
where the rows vary by at least ``TOLERANCE`` of the variance of the widest encoded
column, without its rarest values, of which no rank is to tell. How often rows are
joined does not count. For wide tables R_eff is a lower bound. It counts equations, and
bounds nothing else: rows of equal features have equal scores, so that the first vector
already tells which rows are alike, and one of few values may be read from it; nor does
it know which columns a reader of the scores knows from elsewhere, such as a join key
that is a feature, too.

Notation
    n   rows that take part
    d   encoded columns
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, IntArray, blocks
from tp_flower.features.sparse import EncodedRows, SparseRows, columns_of, dense

LEAST_RANK: Final = 4
"""Rows that vary in fewer directions release no scores, and cover no other table's."""
TOLERANCE: Final = 1e-3
"""Least variance along a direction that counts, in parts of that of the widest column.
"""
MOST_COLUMNS: Final = 1024
"""Encoded columns whose covariance is factorised; columns of wider raw columns do not
count."""
_BLOCK_VALUES: Final = 1 << 21
_SEED: Final = 0x5EED


def effective_rank(
    rows: EncodedRows, reading: Mapping[str, IntArray], rare: int = 0
) -> int:
    """Return R_eff of encoded rows (n, d).

    ``reading`` has, by raw column, the encoded columns that read it; others do not
    count. The ``rare`` rows farthest from a column's median count as if they were no
    farther than the next.

    >>> one, both = np.array([0]), np.array([0, 1])
    >>> rows = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 0.0], [3.0, 0.0]], np.float32)
    >>> effective_rank(rows, {"a": one, "b": both[1:]})
    2
    >>> effective_rank(rows, {"a": both})
    0
    """
    narrow, wide = _counted_columns(rows.shape[1], reading)
    if len(rows) <= rare or not len(narrow):
        return 0
    low, high = _bounds(rows, narrow, rare)
    covariance = _covariance(rows, narrow, low, high)
    least = TOLERANCE * float(np.diag(covariance).max(initial=0.0))
    rank = _rank(covariance, least)
    position = {column: i for i, column in enumerate(narrow.tolist())}
    beside = rank
    for name, columns in reading.items():
        if name in wide:
            left = _rank(
                _covariance(rows, narrow, low, high, _groups(rows, columns)), least
            )
        else:
            inside = [
                position[column] for column in columns.tolist() if column in position
            ]
            left = rank - _rank(covariance[np.ix_(inside, inside)], least)
        beside = min(beside, left)
    return min(rank, 2 * beside)


def _counted_columns(
    width: int, reading: Mapping[str, IntArray]
) -> tuple[IntArray, set[str]]:
    """Return the encoded columns that count, and the raw columns too wide to count."""
    counts = np.zeros(width, np.bool_)
    wide = set()
    for columns in reading.values():
        counts[columns] = True
    for name, columns in sorted(reading.items(), key=lambda item: -len(item[1])):
        if np.count_nonzero(counts) <= MOST_COLUMNS:
            break
        wide.add(name)
        counts[columns] = False
    return np.flatnonzero(counts), wide


def _bounds(
    rows: EncodedRows, columns: IntArray, rare: int
) -> tuple[FloatArray, FloatArray]:
    """Return the range of columns, (k,) each, without the ``rare`` farthest rows."""
    low = np.zeros(len(columns))
    high = np.zeros(len(columns))
    last = len(rows) - 1 - rare
    for block in blocks(len(columns), max(_BLOCK_VALUES // len(rows), 1)):
        values = dense(columns_of(rows, columns[block])).astype(np.float64)
        median = np.median(values, axis=0)
        reach = np.partition(np.abs(values - median), last, axis=0)[last]
        low[block], high[block] = median - reach, median + reach
    return low, high


def _covariance(
    rows: EncodedRows,
    columns: IntArray,
    low: FloatArray,
    high: FloatArray,
    groups: IntArray | None = None,
) -> FloatArray:
    """Return the covariance (k, k) of some columns within bounds.

    With ``groups`` (n,) of rows, return the covariance within the groups.
    """
    count = len(rows)
    width = len(columns)
    gram = np.zeros((width, width))
    sizes = np.array([count]) if groups is None else np.bincount(groups)
    sums = np.zeros((len(sizes), width))
    for block in blocks(count, max(_BLOCK_VALUES // width, 1)):
        # shifted: a constant column varies by 0 exactly
        values = np.clip(
            dense(columns_of(rows[block], columns)).astype(np.float64), low, high
        )
        values -= low
        gram += values.T @ values
        if groups is None:
            sums += values.sum(axis=0)
        else:
            np.add.at(sums, groups[block], values)
    return (gram - sums.T @ (sums / sizes[:, None])) / count


def _groups(rows: EncodedRows, columns: IntArray) -> IntArray:
    """Return a number per row (n,), equal for rows with equal values in ``columns``."""
    # a random sum tells unequal values apart, without sorting rows of many columns
    weights = np.random.Generator(np.random.PCG64(_SEED)).random(len(columns))
    values = columns_of(rows, columns)
    if isinstance(values, SparseRows):
        sums = values.matrix() @ weights
    else:
        sums = values @ weights
    numbers: IntArray = np.unique(sums, return_inverse=True)[1]
    return numbers


def _rank(covariance: FloatArray, least: float) -> int:
    if not (len(covariance) and least > 0.0):
        return 0
    return int(np.count_nonzero(np.linalg.eigvalsh(covariance) >= least))
