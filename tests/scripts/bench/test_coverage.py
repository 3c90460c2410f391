"""The suite knows the truth of its joins, and reads the right intervals."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from scripts.bench.suites.coverage import (
    CELLS,
    EFFECTS,
    INTERCEPT,
    SQL,
    Coverage,
    covered,
    intervals,
    make_tables,
    scores,
)
from tests.support.reference.joins import engine_of

BY_NAME = {cell.name: cell for cell in CELLS}
RUN = 7


def joined(cell, generator):
    """The design (n, 6) of the join, by DuckDB, and its labels."""
    frames = {}
    for tables in make_tables(generator, cell).values():
        frames |= tables
    with engine_of(frames) as engine:
        rows = engine.execute(SQL.format(offset="")).fetchdf()
    design = np.column_stack(
        [
            rows["x"],
            rows["kind"] == "q",
            rows["kind"] == "r",
            rows["age"],
            rows["segment"] == "b",
            rows["density"].fillna(0.0),
        ]
    ).astype(np.float64)
    return design, rows["label"].to_numpy(np.float64)


def test_labels_follow_the_effects_of_the_join():
    exact = replace(BY_NAME["squared"], draw=lambda *drawn: drawn[1])
    design, label = joined(exact, np.random.default_rng(0))
    expected = INTERCEPT + design @ np.array(list(EFFECTS.values()))
    np.testing.assert_allclose(label, expected, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in BY_NAME if "alike" in name])
def test_visits_of_a_person_share_an_effect_that_is_in_no_table(name):
    cell = replace(BY_NAME[name], draw=lambda *drawn: drawn[1])
    frames = {}
    for tables in make_tables(np.random.default_rng(0), cell).values():
        frames |= tables
    visits = frames["visits"]
    shared = visits["y"] - scores(visits, frames["people"], frames["regions"])
    by_person = shared.groupby(visits["pid"])
    np.testing.assert_allclose(by_person.max(), by_person.min(), atol=1e-12)
    assert by_person.mean().std() > 0.4


@pytest.mark.parametrize("name", ["squared", "squared by moments"])
def test_intervals_are_those_of_least_squares_on_the_join(name):
    cell = BY_NAME[name]
    design, label = joined(cell, cell.generator(RUN))
    columns = np.column_stack([design, np.ones(len(label))])
    inverse = np.linalg.inv(columns.T @ columns)
    estimates = inverse @ columns.T @ label
    freedom = len(label) - columns.shape[1]
    square = np.sum((label - columns @ estimates) ** 2) / freedom
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(square * np.diag(inverse))
    found = intervals(cell, RUN)
    assert list(found) == list(EFFECTS)
    expected = np.column_stack([estimates - reach, estimates + reach])[:-1]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-3, atol=1e-4)


def test_a_run_without_intervals_counts_as_one_that_misses():
    around = {name: (value - 0.1, value + 0.1) for name, value in EFFECTS.items()}
    beside = {**around, "x": (0.0, 0.1)}
    record = covered(iter([around, beside, {}, around])).record()
    assert record == {
        "runs": 4,
        "share": (0.5 + 5 * 0.75) / 6,
        **dict.fromkeys(EFFECTS, 0.75),
        "x": 0.5,
        "without": 1,
    }
    assert Coverage(3).held == dict.fromkeys(EFFECTS, 0)


def test_a_noisy_run_has_intervals():
    found = intervals(BY_NAME["squared by moments, epsilon 1"], 0)
    assert all(low < high for low, high in found.values())
