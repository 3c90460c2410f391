"""Bins of encoded rows: what a number means, and how many rows it has at least."""

import numpy as np
import pytest
from numpy.random import default_rng

from tp_flower.arrays import MISSING, NO_BIN
from tp_flower.features.bins import bin_columns, categorical, fit_binning
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.encodings import (
    BinEncoding,
    CategoryEncoding,
    CodeEncoding,
    MissingEncoding,
    NumberEncoding,
)
from tp_flower.features.sparse import SparseRows

ROWS = 700
CATEGORIES = 40


def hashes(count: int) -> tuple[str, ...]:
    return tuple(f"{number:032x}" for number in range(count))


ENCODER = TableEncoder(
    "t",
    (
        NumberEncoding("x", 0.0, 1.0, None),
        NumberEncoding("declared", 0.0, 1.0, 0.0, limit=1.0),
        MissingEncoding("declared"),
        CodeEncoding("code", hashes(CATEGORIES - 1), None, True),
        CategoryEncoding("hot", hashes(5), None, False),
        BinEncoding("days", (1.0, 2.0, 3.0), None),
    ),
)
ORDERED = (0, 1, 2, 5)
HOT = ((4, 5), (9, 4))
"""The first encoded column of one-hot encodings, and how many they have."""


def encoded(seed: int, rows: int = ROWS) -> tuple[np.ndarray, SparseRows]:
    """Rows with ties, outliers, missing values and rare categories, in both layouts."""
    rng = default_rng(seed)
    x = np.where(rng.random(rows) < 0.4, 0.0, rng.standard_cauchy(rows))
    x[rng.random(rows) < 0.1] = MISSING
    code = rng.zipf(1.5, rows) % CATEGORIES
    values = np.zeros((rows, 13), np.float32)
    values[:, 0] = x
    values[:, 1] = rng.uniform(-1, 1, rows)
    values[:, 2] = rng.random(rows) < 3 / rows
    values[:, 3] = np.where(rng.random(rows) < 0.05, MISSING, code)
    stored = np.zeros((rows, 6), np.float32)
    columns = np.zeros((rows, 6), np.int32)
    stored[:, :4], columns[:, :4] = values[:, :4], np.arange(4)
    for slot, (first, size) in enumerate(HOT, 4):
        place = rng.choice(size + 1, rows, p=np.append(np.full(size, 0.9 / size), 0.1))
        has_value = place < size
        values[np.flatnonzero(has_value), first + place[has_value]] = 1.0
        stored[:, slot] = has_value
        columns[:, slot] = first + np.where(has_value, place, 0)
    return values, SparseRows(stored, columns, 13)


@pytest.mark.parametrize("is_shard", [False, True], ids=["whole", "shard"])
@pytest.mark.parametrize("most", [2, 16, 255])
def test_each_number_has_rows_enough_and_numbers_keep_the_order(most, is_shard):
    rows, sparse = encoded(most)
    least = 12
    binning = fit_binning(ENCODER, rows, most, least, is_shard=is_shard)
    bins = binning.apply(ENCODER, rows)
    np.testing.assert_array_equal(binning.apply(ENCODER, sparse), bins)
    assert bins.shape == (ROWS, len(bin_columns(ENCODER)))
    assert categorical(ENCODER) == [3, 4]
    assert binning.most <= most
    for numbers in bins.T:
        _, counts = np.unique(numbers, return_counts=True)
        assert counts.min() >= least
    for column in ORDERED[:3]:
        known = rows[:, column] > MISSING
        order = np.argsort(rows[known, column], kind="stable")
        assert (np.diff(bins[known, column][order].astype(int)) >= 0).all()
    assert ((bins[:, 0] == NO_BIN) == (rows[:, 0] <= MISSING)).all()
    # few rows have it: nobody can tell which
    assert len(np.unique(bins[:, 2])) == 1
    # of few rows there is nothing to tell
    few = fit_binning(ENCODER, rows[:5], most, least, is_shard=is_shard)
    assert (few.apply(ENCODER, rows[:5]) == few.apply(ENCODER, rows[:1])).all()


def test_bins_have_about_equally_many_rows_and_frequent_values_one_of_their_own():
    rows, _ = encoded(3)
    bins = fit_binning(ENCODER, rows, 16, 5).apply(ENCODER, rows)[:, 0]
    known = rows[:, 0] > MISSING
    zeros = rows[:, 0] == 0
    assert len(np.unique(bins[zeros])) == 1
    assert not np.isin(bins[known & ~zeros], bins[zeros]).any()
    counts = np.bincount(bins[known & ~zeros])
    assert counts[counts > 0].min() > 0.5 * counts.max()


def test_shards_mean_the_same_by_a_number():
    rows, _ = encoded(4, 4_000)
    shards = rows[:2_500], rows[2_500:]
    binnings = [fit_binning(ENCODER, own, 32, 5, is_shard=True) for own in shards]
    first, second = (binning.apply(ENCODER, rows) for binning in binnings)
    # but for the rows of rare bins, which each shard counts for itself
    assert (first == second).mean() > 0.97
    close = np.abs(first.astype(int) - second)[:, ORDERED[0]]
    assert close.max() <= 3


def test_arrays_are_all_that_a_site_keeps():
    rows, _ = encoded(5)
    binning = fit_binning(ENCODER, rows, 32)
    again = type(binning).read(binning.arrays)
    fresh, _ = encoded(6)
    np.testing.assert_array_equal(
        again.apply(ENCODER, fresh), binning.apply(ENCODER, fresh)
    )
