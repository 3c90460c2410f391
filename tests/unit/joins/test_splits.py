"""Splits of joined rows: the shares that are held out, and rules in words."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tp_flower.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    Shares,
    SplitRule,
    split_at_random,
    split_by_hash,
    split_by_order,
)

SHARES = Shares(0.2, 0.25)


def counts(subset: np.ndarray) -> list[int]:
    return np.bincount(subset, minlength=3).tolist()


def test_random_rows_are_those_without_validation_and_some_of_the_others():
    both = split_at_random(np.ones(50, bool), SHARES, default_rng(3))
    test_only = split_at_random(np.ones(50, bool), Shares(0.2), default_rng(3))
    assert counts(both) == [30, 10, 10]
    assert_array_equal(both == TEST, test_only == TEST)


def test_a_hash_is_read_as_a_fraction_of_2_to_the_64():
    limits = np.array([0.0, 0.19, 0.21, 0.39, 0.41, 0.99]) * 2.0**64
    hashes = np.column_stack([limits.astype(np.uint64), np.zeros(6, np.uint64)])
    expected = [TEST, TEST, VALIDATION, VALIDATION, TRAIN, TRAIN]
    assert split_by_hash(hashes, SHARES).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_the_last_rows_by_time_are_held_out_whole(seed):
    rng = default_rng(seed)
    times = rng.integers(0, 12, 100).astype(float)
    times[rng.random(100) < 0.1] = np.nan
    subset = split_by_order(times, SHARES)
    ordered = sorted(times[~np.isnan(times)])
    first = ordered[-round(len(ordered) * SHARES.test)]
    expected = [time >= first for time in times]  # NaN is after nothing
    assert_array_equal(subset == TEST, expected)
    left = [time for time in ordered if time < first]
    before = left[-round(len(left) * SHARES.validation)]
    expected = [before <= time < first for time in times]
    assert_array_equal(subset == VALIDATION, expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("group", "not one of"),
        ("group()", "not one of"),
        ("days(f.day)", "not one of"),
        ("group(day)", "'day' is not a column"),
        ("group(f.day; f.hour)", "is not a column"),
        ("time(f.day, f.hour)", "names 2 columns; time takes one"),
    ],
)
def test_refused_rules(text, problem):
    with pytest.raises(ValueError, match=problem):
        SplitRule.read(text)
