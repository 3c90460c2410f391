"""Folds of the rows that a search trains and validates its candidates on.

Each of k folds is held out once, while models are trained on the others. The rows that
a run holds out for its test are in none: they measure the model that is trained in the
end. Folds follow the rule of the setting `test-split`: random rows of a table, whole
values of some columns, or the blocks of a time, of which a model is trained on those
before the one that it is measured on.

*Notation*, with N the joined rows:

    subset    (N,) uint8: TRAIN, VALIDATION or TEST, of a run without folds
    folds     (N,) uint8: 0 .. k - 1, or NO_FOLD; of a time the blocks 0 .. k
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.keyed_hash import HashArray
from tp_flower.splits import TEST, Shares, SubsetArray, split_by_order

FoldArray = npt.NDArray[np.uint8]

MOST_FOLDS: Final = 20
NO_FOLD: Final = MOST_FOLDS
"""Of rows that are never held out, such as those without a row of the split's table."""
OUT: Final = 3
"""The subset of rows that take no part in a fold."""


def folds_at_random(
    taking_part: BoolArray, folds: int, rng: np.random.Generator
) -> FoldArray:
    """Return the fold of each row, (n,), whose sizes differ by one row at most.

    >>> rows = np.array([True, True, False, True, True])
    >>> np.bincount(folds_at_random(rows, 2, np.random.default_rng(0))[rows]).tolist()
    [2, 2]
    """
    numbers = np.full(len(taking_part), NO_FOLD, np.uint8)
    rows = rng.permutation(np.flatnonzero(taking_part))
    numbers[rows] = np.arange(len(rows)) % folds
    return numbers


def folds_by_hash(hashes: HashArray, folds: int) -> FoldArray:
    """Return the fold of each value, (k,), by the second word of its keyed hash.

    The first word decides which values are tested on (`split_by_hash`), and tells
    nothing of the second.
    """
    fractions = hashes[:, 1] * 2.0**-64
    numbers: FoldArray = np.minimum(fractions * folds, folds - 1).astype(np.uint8)
    return numbers


def blocks_by_order(times: FloatArray, blocks: int) -> FoldArray:
    """Return the block of each row in time, (n,), the earliest first.

    Rows at one time are in one block, so that blocks are only about as large. Rows
    without a time (NaN) are in the first, which is trained on in every fold.

    >>> blocks_by_order(np.array([5.0, 1.0, 1.0, 2.0, np.nan, 3.0]), 2).tolist()
    [1, 0, 0, 0, 0, 1]
    """
    numbers = np.zeros(len(times), np.uint8)
    has_time = ~np.isnan(times)
    _, order, counts = np.unique(
        times[has_time], return_inverse=True, return_counts=True
    )
    starts = np.cumsum(counts) - counts
    total = max(int(counts.sum()), 1)
    numbers[has_time] = (starts * blocks // total)[order]
    return numbers


def fold_subset(subset: SubsetArray, folds: FoldArray, fold: int) -> SubsetArray:
    """Return the subset of each row, (N,), where a fold is held out.

    The fold is tested on, rows for testing are OUT, and the others are as they were.

    >>> subset = np.array([0, 0, 1, TEST], np.uint8)
    >>> fold_subset(subset, np.array([0, 1, 1, 1], np.uint8), 0).tolist()
    [2, 0, 1, 3]
    """
    in_fold = subset.copy()
    in_fold[subset == TEST] = OUT
    in_fold[(folds == fold) & (subset != TEST)] = TEST
    return in_fold


def time_subset(
    subset: SubsetArray, times: FloatArray, folds: int, fold: int, validation: float
) -> SubsetArray:
    """Return the subset of each row, (N,), where a block in time is held out.

    Of k + 1 blocks of the rows that are not for testing, those up to ``fold`` are
    trained on, the last ``validation`` share of them validates, the next block is
    tested on, and later ones are OUT.

    >>> early = np.zeros(6, np.uint8)
    >>> time_subset(early, np.arange(6.0), 2, 0, 0.5).tolist()
    [0, 1, 2, 2, 3, 3]
    """
    in_fold = np.full(len(subset), OUT, np.uint8)
    rows = np.flatnonzero(subset != TEST)
    blocks = blocks_by_order(times[rows], folds + 1)
    earlier = rows[blocks <= fold]
    shares = Shares(0.0, validation)
    in_fold[earlier] = split_by_order(times[earlier], shares)
    in_fold[rows[blocks == fold + 1]] = TEST
    return in_fold
