"""The Brier score of survival against loops over rows, R's weights, and its laws."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.support.reference import survival as slow
from tests.support.reference.survival import Rows, rows_of_r
from tp_flower.objectives import with_offset
from tp_flower.objectives.survival import Baseline, Survival, SurvivalResponse
from tp_flower.objectives.survival.brier import (
    MOST_TIMES,
    brier_scores,
    event_grid,
    integrated_brier,
)

OF_R = tomllib.loads(Path(__file__).with_name("survival.toml").read_text("utf-8"))
TIMES = np.array([0.0, 0.5, 1.0, 3.0, 3.5, 6.0, 8.0])


def drawn(seed: int, ties: int, *names: str, rows: int = 60) -> Rows:
    return Rows.drawn(seed, rows, ties=ties, **dict.fromkeys(names, True))


def predicted(rows: Rows) -> tuple[np.ndarray, Survival, Baseline]:
    """Scores, times, and a baseline with steps at other times than the rows'."""
    rng = np.random.default_rng(8)
    hazards = np.cumsum(rng.exponential(0.1, size=20))
    baseline = Baseline(tuple(np.linspace(0.3, 9.1, 20)), tuple(hazards))
    scores = rng.normal(size=len(rows.time))
    return scores, Survival(rows.time, rows.event), baseline


@pytest.mark.parametrize("names", [(), ("weights",)], ids=str)
@pytest.mark.parametrize("ties", [0, 6])
def test_it_is_grafs_row_by_row(ties, names):
    rows = drawn(2, ties, *names)
    scores, survival, baseline = predicted(rows)
    found = brier_scores(scores, survival, baseline, TIMES, rows.weights)
    expected = [
        slow.brier(rows, baseline.survival(scores, time), time) for time in TIMES
    ]
    assert_allclose(found, expected, rtol=1e-12)


def test_rows_of_strata_are_judged_by_their_own_baselines():
    rows = drawn(2, 6, "strata", "weights")
    objective = rows.objective("strata", "weights")
    scores = np.random.default_rng(8).normal(size=(60, 1))
    response = objective.fit_response(scores)
    by_stratum = {baseline.stratum: baseline for baseline in response.baselines}
    assert len(by_stratum) == 3
    last = min(baseline.times[-1] for baseline in response.baselines)
    times = np.unique([0.0, *rows.time[rows.event & (rows.time < last)], last])
    values = []
    for time in times:
        alive = np.array(
            [
                by_stratum[stratum].survival(score, time)[0]
                for stratum, score in zip(rows.stratum, scores, strict=True)
            ]
        )
        values.append(slow.brier(rows, alive, time))
    found = objective.fitted_metrics(scores, response)["integrated_brier"]
    assert found == pytest.approx(np.trapezoid(values, times) / last, rel=1e-12)
    # a stratum that training has not had
    others = replace(response, baselines=response.baselines[1:])
    assert objective.fitted_metrics(scores, others) == {}


@pytest.mark.parametrize("name", ["ties", "weights"])
def test_it_is_that_of_rs_redistribution_to_the_right(name):
    rows, features = rows_of_r()
    weights = rows.weights if name == "weights" else np.ones(len(rows.time))
    scores = features @ OF_R[name]["coefficients"]
    baseline = Baseline(tuple(OF_R[name]["times"]), tuple(OF_R[name]["hazards"]))
    survival = Survival(rows.time, rows.event)
    times = np.array([3.0, 10.5, 17.0, 25.0])
    found = brier_scores(scores, survival, baseline, times, weights)
    assert_allclose(found, OF_R[name]["brier"], rtol=1e-9)


@pytest.mark.parametrize("ties", [0, 6])
def test_a_half_is_a_quarter_off(ties):
    """The rows' weights add up to all rows, whoever was censored."""
    rows = drawn(3, ties, "weights")
    half = Baseline((0.1,), (np.log(2.0),))
    survival = Survival(rows.time, rows.event)
    scores = np.zeros(len(rows.time))
    times = np.unique(rows.time)
    found = brier_scores(scores, survival, half, times, rows.weights)
    assert_allclose(found, 0.25, rtol=1e-12)


@pytest.mark.parametrize("ties", [0, 6])
def test_without_censoring_it_is_the_mean_square_of_the_curves(ties):
    rows = replace(drawn(4, ties), event=np.ones(60, bool))
    scores, survival, baseline = predicted(rows)
    last = min(rows.time.max(), baseline.times[-1])
    times = np.unique([0.0, *rows.time[rows.time < last], last])
    squares = [
        np.mean(((rows.time > time) - baseline.survival(scores, time)) ** 2)
        for time in times
    ]
    expected = np.trapezoid(squares, times) / last
    assert integrated_brier(scores, survival, baseline) == pytest.approx(expected)


def test_many_events_are_judged_at_some_of_their_times():
    rows = drawn(5, 0, rows=3000)
    scores, survival, baseline = predicted(rows)
    found = integrated_brier(scores, survival, baseline)
    grid = event_grid(survival, baseline.times[-1])
    assert len(grid) == MOST_TIMES + 1
    assert grid[-1] == baseline.times[-1]
    is_judged = rows.event & (rows.time < grid[-1])
    times = np.unique([0.0, *rows.time[is_judged], grid[-1]])
    values = brier_scores(scores, survival, baseline, times)
    assert found == pytest.approx(np.trapezoid(values, times) / times[-1], rel=5e-3)


def test_rows_of_which_there_is_none():
    rows = drawn(6, 6, "entry", "strata")
    scores = np.zeros((60, 1))
    response = SurvivalResponse("cox", baselines=(Baseline((3.0,), (0.5,)),))
    assert rows.objective().fitted_metrics(scores, response)
    assert rows.objective("entry").fitted_metrics(scores, response) == {}
    assert rows.objective("strata").fitted_metrics(scores, response) == {}
    censored = replace(rows, event=np.zeros(60, bool))
    assert censored.objective().fitted_metrics(scores, response) == {}


def test_an_offset_is_part_of_the_score():
    rows = drawn(7, 6, "weights")
    objective = rows.objective("weights")
    scores, offset = np.random.default_rng(9).normal(size=(2, 60, 1))
    beside = with_offset(objective, offset[:, 0])
    response = objective.fit_response(scores + offset)
    assert beside.fit_response(scores) == response
    assert beside.fitted_metrics(scores, response) == pytest.approx(
        objective.fitted_metrics(scores + offset, response)
    )
