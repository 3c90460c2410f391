"""Curves of thresholds and calibration, against scikit-learn and SciPy."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy.stats import binomtest
from sklearn import metrics as known

from tests.support.reference.families import Family
from tp_flower.errors import ModelError
from tp_flower.objectives.comparison import (
    LEAST_GROUP,
    RankedRows,
    means_by_tenth,
    shares_by_tenth,
    threshold_curve,
    wilson_interval,
)
from tp_flower.reports.records import CompletedRun
from tp_flower.reports.results import Compared

MOST_THRESHOLDS = 50


def problem(rows, decimals, is_weighted, seed=1):
    """Probabilities, with ties of few decimals; labels, and weights or None."""
    rng = default_rng(seed)
    probabilities = rng.beta(0.7, 1.4, rows).round(decimals)
    labels = (rng.random(rows) < probabilities) * 1.0
    return probabilities, labels, rng.gamma(0.7, size=rows) if is_weighted else None


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("decimals", [9, 1])
@pytest.mark.parametrize("rows", [43, 700])
def test_a_curve_is_scikit_learns_at_its_points(rows, decimals, is_weighted):
    probabilities, labels, weights = problem(rows, decimals, is_weighted)
    points = threshold_curve(RankedRows.of(probabilities, labels, weights))
    assert 4 <= len(points) <= MOST_THRESHOLDS
    curve = {name: np.array([point[name] for point in points]) for name in points[0]}
    false_alarms, recall, levels = known.roc_curve(
        labels, probabilities, sample_weight=weights, drop_intermediate=False
    )
    # where a point parts a tie, it is on the line between the ends of the tie
    taken = (probabilities >= levels[:, None]).sum(axis=1)
    for name, values in (("recall", recall), ("false_alarms", false_alarms)):
        assert_allclose(
            curve[name], np.interp(curve["rows"], taken, values), atol=1e-12
        )
    rate = np.average(labels, weights=weights)
    found = curve["recall"] * rate
    others = curve["false_alarms"] * (1.0 - rate)
    assert_allclose(curve["share"], found + others)
    assert_allclose(curve["precision"], found / (found + others))
    precision, _, levels = known.precision_recall_curve(
        labels, probabilities, sample_weight=weights
    )
    taken = (probabilities >= levels[:, None]).sum(axis=1)
    ends, at, of = np.intersect1d(curve["rows"], taken, return_indices=True)
    assert_allclose(curve["precision"][at], precision[of])
    assert len(ends) == len(points) or decimals == 1


@settings(max_examples=30)
@given(rows=st.integers(0, 700), decimals=st.integers(1, 9), seed=st.integers(0, 99))
def test_steps_divide_tenths_and_are_of_no_few_rows(rows, decimals, seed):
    """So that a curve beside the tenths tells no more of few rows than either."""
    probabilities, labels, weights = problem(rows, decimals, seed % 2, seed)
    points = threshold_curve(RankedRows.of(probabilities, labels, weights))
    has_both = 0 < labels.sum() < rows
    assert bool(points) == (has_both and rows >= LEAST_GROUP)
    steps = np.diff([0, *(point["rows"] for point in points)])
    assert steps.min(initial=LEAST_GROUP) >= LEAST_GROUP
    tenths = shares_by_tenth(RankedRows.of(probabilities, labels, weights))[::-1]
    ends = np.cumsum([tenth["rows"] for tenth in tenths])
    if points:
        assert {*ends.tolist()} <= {point["rows"] for point in points}
        assert points[-1]["rows"] == rows
        if weights is None:
            recall = np.cumsum([tenth["rows"] * tenth["actual"] for tenth in tenths])
            at = {point["rows"]: point["recall"] for point in points}
            assert_allclose([at[end] for end in ends], recall / recall[-1])


def test_rows_of_equal_predictions_count_alike_in_any_order():
    values = problem(200, 1, is_weighted=True)
    again = default_rng(0).permutation(200)
    moved = [column[again] for column in values]
    for measure in (means_by_tenth, shares_by_tenth, threshold_curve):
        expected = measure(RankedRows.of(*values))
        assert measure(RankedRows.of(*moved)) == [
            pytest.approx(entry) for entry in expected
        ]
    # sorted by label, too, a tie has the label's mean on both sides of a cut
    labels = np.repeat([0.0, 1.0], 20)
    assert [
        each["actual"] for each in means_by_tenth(RankedRows.of(np.ones(40), labels))
    ] == [0.5] * 4


def test_shares_have_wilsons_intervals():
    probabilities, labels, _ = problem(300, 9, is_weighted=False)
    for tenth in shares_by_tenth(RankedRows.of(probabilities, labels)):
        test = binomtest(round(tenth["rows"] * tenth["actual"]), tenth["rows"])
        low, high = test.proportion_ci(method="wilson")
        assert (tenth["low"], tenth["high"]) == pytest.approx((low, high))
    # weights that are alike change nothing, and others widen
    alike = shares_by_tenth(RankedRows.of(probabilities, labels, np.full(300, 0.3)))
    assert alike == [
        pytest.approx(t) for t in shares_by_tenth(RankedRows.of(probabilities, labels))
    ]
    tenth = shares_by_tenth(
        RankedRows.of(probabilities[:10], labels[:10], np.arange(1.0, 11.0))
    )[0]
    size = 55.0**2 / 385.0
    ends = wilson_interval(np.array([tenth["actual"] * size]), np.array([size]))
    assert (tenth["low"], tenth["high"]) == pytest.approx((*ends[0], *ends[1]))


def test_a_report_of_two_classes_has_the_brier_score_and_the_curve():
    rng = default_rng(4)
    labels = (np.arange(80) % 3 == 0) * 1.0
    scores = rng.normal(size=(80, 1))
    weights = rng.gamma(0.7, size=80)
    objective = Family("logistic", 2).on(labels, weights)
    entries = objective.response.compare(
        objective.comparable(scores), labels, objective.weights
    )
    probabilities = 1.0 / (1.0 + np.exp(-scores[:, 0]))
    brier = known.brier_score_loss(labels, probabilities, sample_weight=weights)
    assert entries["calibration"]["brier"] == pytest.approx(brier)
    expected = threshold_curve(RankedRows.of(probabilities, labels, weights))
    assert entries["curve"] == [pytest.approx(point) for point in expected]


def test_the_curve_in_python_is_that_of_the_report_or_refused():
    points = threshold_curve(RankedRows.of(*problem(60, 9, is_weighted=False)))
    done = CompletedRun(report={"curve": points}, folder=Path())
    assert Compared(done, None).curve.to_dict("records") == points
    without = Compared(CompletedRun(report={"curve": []}, folder=Path()), None)
    with pytest.raises(ModelError, match="no curve of thresholds: it is of two"):
        without.curve  # noqa: B018
