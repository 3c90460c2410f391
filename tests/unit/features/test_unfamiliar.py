"""Values unlike those of the fit are named; those of the fit itself never are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples.encoding_example import (
    categorical,
    encoder_of,
    numeric,
)
from tp_flower.features.unfamiliar import FAR, unfamiliar_features

AGES = np.arange(100.0)
KINDS = ["a", "b", None, "c"] * 25


def found(spec, fitted, new, rows=None):
    encoder = encoder_of({"x": fitted}, x=spec)
    rows = np.arange(new.rows) if rows is None else np.array(rows)
    return [*unfamiliar_features(encoder, {"x": new}.__getitem__, rows)]


@pytest.mark.parametrize(
    ("spec", "is_told"),
    [("standard squared", 1), ("min-max", 1), ("none", 0), ("range(0, 99)", 0)],
)
def test_numbers_far_from_those_of_the_fit_are_counted(spec, is_told):
    """By encoders whose scale is that of rows; a date of 9999 is as far."""
    near = AGES.mean() + (FAR - 1.0) * AGES.std()
    assert found(spec, numeric(*AGES), numeric(near, *AGES)) == []
    new = numeric(1e300, None, -1e6, *AGES)
    text = "column 'x': 2 of 103 rows have a number far outside of those that its enc"
    assert [line[: len(text)] for line in found(spec, numeric(*AGES), new)] == (
        [text] * is_told
    )
    # rows that are not scored do not count
    assert found(spec, numeric(*AGES), new, rows=[1, 3, 4]) == []


@given(st.integers(1, 4), st.integers(800, 4000))
def test_numbers_of_the_fit_are_never_far(ones, zeros):
    """By Chebyshev's inequality, though one of them may be as far as 60 deviations."""
    column = numeric(*[1.0] * ones, *[0.0] * zeros)
    assert found("standard", column, column) == []
    # without the others they are
    alone = found("standard", column, column, rows=range(ones))
    assert len(alone) == (zeros > FAR**2 * ones)


@pytest.mark.parametrize(("spec", "is_told"), [("one-hot", 1), ("one-hot(2)", 0)])
@pytest.mark.parametrize("new", [1, 20])
def test_categories_that_the_fit_lacked_are_counted(spec, is_told, new):
    """From one in twenty on, and unless a column is of all others."""
    fitted = categorical(*KINDS)
    assert found(spec, fitted, fitted) == []
    lines = found(spec, fitted, categorical(*KINDS, *["z"] * new))
    text = "column 'x': 20 of 120 rows have a category that is none of those that its"
    assert [line[: len(text)] for line in lines] == [text] * (is_told and new > 1)


def test_numbers_besides_their_categories_need_not_be_listed():
    """A new month is one, and a number."""
    months = numeric(*np.arange(9.0).repeat(200))
    encoder = encoder_of({"x": months}, x="levels(16)")
    assert len(encoder.encoder.encodings) == 2
    assert found("levels(16)", months, numeric(*[11.0] * 50)) == []
