"""Counts of joined rows are whole numbers, not numbers modulo 2^64."""

import numpy as np
import pytest

from tp_flower.errors import SiteError
from tp_flower.methods.moments.counts import (
    MOST_TUPLES,
    CountedRows,
    EdgeRows,
    sums_of_keys,
)

INNER = np.zeros(1, np.int64)


def row_with(*incoming: int) -> CountedRows:
    """A row whose key of every edge so many tuples behind it have."""
    edges = {
        number: EdgeRows(np.zeros(1, np.int64), np.array([[count]]), INNER)
        for number, count in enumerate(incoming)
    }
    return CountedRows(edges, np.ones((1, 1), np.int64))


@pytest.mark.parametrize("incoming", [(274177, 67280421310721), (1 << 32, 1 << 32)])
def test_a_multiplicity_that_wraps_around_is_refused(incoming):
    """274177 * 67280421310721 = 2^64 + 1: noise would be for a row that is in one."""
    with pytest.raises(SiteError, match="joined rows of a row"):
        _ = row_with(*incoming).multiplicity


def test_sums_of_counts_that_wrap_around_are_refused():
    rows = 1 << 12
    with pytest.raises(SiteError, match="joined rows of a key"):
        sums_of_keys(np.zeros(rows, np.int64), np.full((1, rows), MOST_TUPLES), 1)


def test_large_counts_are_exact():
    assert row_with(1 << 26, 1 << 26).multiplicity.tolist() == [[MOST_TUPLES]]
    # what one row could not have, none has to have
    edges = {
        number: EdgeRows(np.arange(2), np.array([counts]), INNER)
        for number, counts in enumerate(([1 << 40, 1], [1, 1 << 40]))
    }
    counted = CountedRows(edges, np.ones((1, 2), np.int64))
    assert counted.multiplicity.tolist() == [[1 << 40, 1 << 40]]
