"""The effective rank of encoded rows, compared with ranks that follow from how they
were made.
"""

from itertools import pairwise

import numpy as np
import pytest
from numpy.random import default_rng

from tp_flower.features import ranks
from tp_flower.features.ranks import effective_rank
from tp_flower.features.sparse import SparseRows

ROWS = 400


def columns_by_name(**widths):
    """The encoded columns of raw columns that stand beside each other."""
    starts = np.cumsum([0, *widths.values()])
    spans = zip(widths, pairwise(starts), strict=True)
    return {name: np.arange(*span) for name, span in spans}


def numbers(count, seed=0):
    return default_rng(seed).normal(size=(ROWS, count)).astype(np.float32)


def one_hot(categories):
    codes = default_rng(1).integers(0, categories, ROWS)
    return np.eye(categories, dtype=np.float32)[codes]


def together(*blocks):
    return np.hstack(blocks).astype(np.float32)


def each(width):
    return columns_by_name(**{f"x{place}": 1 for place in range(width)})


@pytest.mark.parametrize("width", [0, 1, 2, 4, 9])
def test_independent_numbers_count_one_each(width):
    # one column counts as many as all others, of which there are none
    assert effective_rank(numbers(width), each(width)) == (width if width > 1 else 0)


def test_constants_copies_and_sums_count_nothing():
    x = numbers(5)
    constants = np.full((ROWS, 3), 1e6)
    assert effective_rank(together(x, constants), each(8)) == 5
    assert effective_rank(together(x, 3.0 * x, -x[:, :1]), each(11)) == 5
    assert effective_rank(together(x, x @ numbers(4)[:5]), each(9)) == 5
    # a copy that differs in its last digits, or a constant by a range far too wide
    noisy = x + 0.01 * numbers(5, seed=3)
    assert effective_rank(together(x, noisy), each(10)) == 5
    assert effective_rank(together(x, 1e-3 * numbers(4, seed=4)), each(9)) == 5
    assert effective_rank(together(x, 0.1 * numbers(4, seed=4)), each(9)) == 9


def test_a_column_counts_at_most_as_many_as_all_others():
    """Else one score vector of a secret of 50 categories beside constants tells who has
    which.
    """
    secret = one_hot(50)
    x = numbers(3)
    widths = columns_by_name(secret=50, a=1, b=1, c=1)
    assert effective_rank(together(secret, np.ones((ROWS, 3))), widths) == 0
    assert effective_rank(together(secret, x), widths) == 6
    # what a secret determines is not beside it: the attributes of a customer
    attributes = together(secret @ np.arange(50.0)[:, None] ** [1, 2, 0.5])
    scaled = attributes / attributes.std(axis=0)
    assert effective_rank(together(secret, scaled), widths) == 0


def test_what_reads_one_column_is_one_column():
    """Powers, hashes and bins of a column, under as many names as an encoder likes."""
    x = numbers(1)
    many = together(x, x**2, x**3, np.sin(9 * x), one_hot(9))
    assert effective_rank(many, {"amount": np.arange(13)}) == 0
    # each of four expressions reads the secret, beside a truth value of its own
    flags = (numbers(4, seed=5) > 0).astype(np.float32)
    reading = {"amount": np.arange(4), **{f"flag{k}": np.array([k]) for k in range(4)}}
    assert effective_rank(x + flags, reading) == 0
    # what reads no column does not count
    assert effective_rank(numbers(5), {"a": np.array([0]), "b": np.array([1])}) == 2


def test_values_of_few_rows_count_nothing():
    """Else a rank would tell whether any row is beyond the end of a range that the
    server names.
    """
    x = numbers(4)
    reading = each(5)

    def with_outliers(rows):
        column = np.zeros((ROWS, 1))
        column[:rows] = 1e3
        # far smaller than what few rows have, if any has
        return together(1e-3 * x, column)

    assert effective_rank(with_outliers(0), reading) == 4
    assert effective_rank(with_outliers(1), reading) == 0
    for rows, rank in ((0, 4), (1, 4), (9, 4), (10, 0)):
        assert effective_rank(with_outliers(rows), reading, rare=9) == rank
    assert effective_rank(numbers(4)[:9], each(4), rare=9) == 0


def test_rows_that_are_few_and_how_often_they_count():
    for rows, rank in ((5, 4), (1, 0), (0, 0)):
        assert effective_rank(numbers(9)[:rows], each(9)) == rank


@pytest.mark.parametrize("is_sparse", [False, True])
def test_of_wide_tables_the_rank_is_a_lower_bound(monkeypatch, is_sparse):
    """Columns of a wide raw column do not count; what it determines of the others
    neither.
    """
    codes = default_rng(7).integers(0, 80, ROWS)
    x = numbers(4)
    widths = columns_by_name(wide=80, a=1, b=1, c=1, d=1)
    attributes = numbers(4, seed=8)[codes]

    def encoded(beside):
        places = np.column_stack([codes, *[np.full(ROWS, 80 + k) for k in range(4)]])
        values = np.column_stack([np.ones(ROWS), beside])
        rows = SparseRows(values.astype(np.float32), places.astype(np.int32), 84)
        return rows if is_sparse else rows.dense()

    for most_columns, expected in ((ranks.MOST_COLUMNS, 8), (20, 4)):
        monkeypatch.setattr(ranks, "MOST_COLUMNS", most_columns)
        assert effective_rank(encoded(x), widths) == expected
        assert effective_rank(encoded(attributes), widths) == 0
