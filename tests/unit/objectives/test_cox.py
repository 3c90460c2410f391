"""The partial likelihood against loops over pairs, a slow Newton, and R's coxph."""

import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize

from tests.support.reference import survival as slow
from tests.support.reference.survival import MEAN_WEIGHT, Rows, rows_of_r
from tp_flower.joins import rows as joins
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.rows import JoinedRows
from tp_flower.methods.boost.boosting import Boosting
from tp_flower.methods.cg.conjugate_gradients import Descent
from tp_flower.objectives import Target, make_objective, with_offset
from tp_flower.objectives.objective import RowInformation
from tp_flower.objectives.survival import Baseline, stretches
from tp_flower.objectives.survival.concordance import rank_sums

HAS = ("entry", "strata", "weights")
R = tomllib.loads(Path(__file__).with_name("survival.toml").read_text())
R_COLUMNS = {
    "ties": [],
    "weights": ["weights"],
    "strata": ["strata"],
    "entry": ["entry"],
    "all": ["entry", "strata", "weights"],
}
CASES = [
    (ties, tuple(name for name, is_on in zip(HAS, on, strict=True) if is_on))
    for ties in (0, 6)
    for on in product((False, True), repeat=3)
]
each = pytest.mark.parametrize(("ties", "names"), CASES, ids=str)
STEP = 1e-3


def drawn(ties: int, names: tuple[str, ...], rows: int = 50) -> Rows:
    return Rows.drawn(1, rows, ties=ties, **dict.fromkeys(names, True))


def slopes(function, scores: np.ndarray) -> np.ndarray:
    """The derivative of a function of scores (n,) by each: central, of fourth order."""
    steps = STEP * np.eye(len(scores))

    def across(times: float) -> np.ndarray:
        ends = [
            function(scores + times * s) - function(scores - times * s) for s in steps
        ]
        return np.array(ends) / (2 * STEP)

    return (8 * across(1) - across(2)) / 6


@each
@pytest.mark.parametrize("size", [1.0, 500.0])
def test_value_is_efrons_by_a_loop_over_times(ties, names, size):
    rows = drawn(ties, names)
    objective = rows.objective(*names)
    scores = default_rng(2).uniform(-size, size, len(rows.time))
    expected = -slow.log_likelihood(rows, scores)
    assert objective.total(scores[:, None]) == pytest.approx(expected, rel=1e-12)
    assert objective.value(scores[:, None]) == pytest.approx(
        expected / rows.weights.sum(), rel=1e-12
    )


@each
def test_gradient_and_hessian_are_the_slopes_of_the_loop(ties, names):
    rows = drawn(ties, names, rows=18)
    objective = rows.objective(*names)
    scores = default_rng(3).normal(size=18)
    gradient = objective.weigh(objective.gradient(scores[:, None]))
    expected = slopes(lambda s: -slow.log_likelihood(rows, s), scores)
    assert_allclose(gradient[:, 0], expected, atol=1e-9)
    # a constant moves nothing
    assert gradient.sum() == pytest.approx(0.0, abs=1e-12)

    def own_slope(s):
        return objective.weigh(objective.gradient(s[:, None]))[:, 0]

    hessian = objective.weigh(objective.hessian(scores[:, None]))
    assert_allclose(hessian[:, 0], np.diag(slopes(own_slope, scores)), atol=1e-9)


@each
def test_derivatives_at_extreme_scores_are_those_of_moved_ones(ties, names):
    """Scores of +-500, whose exponentials are no numbers: a law in place of a loop."""
    rows = drawn(ties, names)
    objective = rows.objective(*names)
    scores = default_rng(4).normal(size=(len(rows.time), 1))
    far = 500.0 * np.sign(default_rng(5).normal(size=scores.shape))
    with np.errstate(all="raise", under="ignore"):
        for moved in (scores + 500.0, scores - 500.0):
            assert_allclose(objective.gradient(moved), objective.gradient(scores))
            assert_allclose(
                objective.hessian(moved), objective.hessian(scores), atol=1e-10
            )
        gradient = objective.weigh(objective.gradient(far))
        hessian = objective.hessian(far)
    assert gradient.sum() == pytest.approx(0.0, abs=1e-9)
    assert np.isfinite(hessian).all()
    assert hessian.min() >= 0.0


@each
def test_concordance_is_the_share_of_pairs(ties, names):
    rows = drawn(ties, names)
    objective = rows.objective(*names)
    # some scores are equal
    scores = default_rng(6).normal(size=len(rows.time)).round(1)
    found = objective.metrics(scores[:, None])["concordance"]
    assert found == pytest.approx(slow.concordance(rows, scores), rel=1e-12)
    constant = objective.constant_metrics(objective.base_score)
    assert constant["concordance"] == pytest.approx(0.5)


def test_a_weight_of_two_is_a_row_that_is_there_twice_without_ties():
    rows = drawn(0, ("entry",))
    doubled = np.arange(len(rows.time)) % 2 == 0
    target = rows.objective("entry").target
    weights = np.where(doubled, 2.0, 1.0)
    scores = default_rng(7).normal(size=(len(rows.time), 1))
    repeats = np.repeat(np.arange(len(weights)), weights.astype(int))
    # Breslow's ties are those of copies: without any event of a doubled row, both are
    columns = target.columns.copy()
    columns[doubled, 1] = 0.0
    weighted = make_objective("cox", target.with_columns(columns), weights)
    repeated = make_objective("cox", target.with_columns(columns[repeats]))
    copies = scores[repeats]
    found, expected = weighted.metrics(scores), repeated.metrics(copies)
    assert found["concordance"] == pytest.approx(expected["concordance"])
    assert_allclose(weighted.gradient(scores)[repeats], repeated.gradient(copies))


def test_weights_of_another_mean_are_the_same_loss():
    rows = drawn(6, HAS)
    objective = rows.objective(*HAS)
    scores = default_rng(15).normal(size=(len(rows.time), 1))
    triple = objective.weighted(3.0 * rows.weights)
    assert triple.value(scores) == pytest.approx(objective.value(scores))
    assert_allclose(triple.gradient(scores), objective.gradient(scores))
    assert_allclose(triple.hessian(scores), objective.hessian(scores), atol=1e-12)


def test_strata_are_objectives_that_add_up():
    names = ("entry", "strata")
    rows = drawn(6, names, rows=80)
    whole = rows.objective(*names)
    scores = default_rng(8).normal(size=(80, 1))
    parts = [np.flatnonzero(rows.stratum == code) for code in range(3)]
    totals = [whole.select(part).total(scores[part]) for part in parts]
    assert whole.total(scores) == pytest.approx(sum(totals), rel=1e-12)
    for part in parts:
        gradient = whole.select(part).gradient(scores[part])
        assert_allclose(whole.gradient(scores)[part], gradient, atol=1e-12)


def test_rows_that_enter_before_all_events_are_as_those_without_an_entry():
    rows = drawn(6, ())
    scores = default_rng(9).normal(size=(len(rows.time), 1))
    plain, entered = rows.objective(), rows.objective("entry")
    assert entered.total(scores) == pytest.approx(plain.total(scores), rel=1e-13)
    assert_allclose(entered.gradient(scores), plain.gradient(scores), atol=1e-12)
    assert_allclose(entered.hessian(scores), plain.hessian(scores), atol=1e-12)
    assert entered.metrics(scores) == pytest.approx(plain.metrics(scores))


def test_rows_in_another_order_are_the_same_rows():
    rows = drawn(6, HAS)
    objective = rows.objective(*HAS)
    scores = default_rng(10).normal(size=(len(rows.time), 1))
    order = default_rng(11).permutation(len(scores))
    shuffled = objective.select(order)
    assert_allclose(shuffled.gradient(scores[order]), objective.gradient(scores)[order])
    assert shuffled.metrics(scores[order]) == pytest.approx(objective.metrics(scores))


def test_rows_without_an_event_tell_nothing():
    columns = np.array([[3.0, 0.0], [4.0, 0.0]])
    objective = make_objective("cox", Target(columns, names=("time", "event")))
    scores = np.array([[1.0], [2.0]])
    assert objective.value(scores) == 0.0
    assert_array_equal(objective.gradient(scores), np.zeros((2, 1)))
    assert_array_equal(objective.hessian(scores), np.zeros((2, 1)))
    assert np.isnan(objective.metrics(scores)["concordance"])


def test_no_rows_have_no_loss():
    none = drawn(6, HAS).objective(*HAS).select(np.zeros(0, np.intp))
    scores = np.zeros((0, 1))
    assert none.total(scores) == 0.0
    for values in (none.row_values(scores), none.gradient(scores)):
        assert len(values) == 0


@pytest.mark.parametrize("name", R)
def test_the_optimum_is_that_of_coxph_and_of_the_loop(name):
    """R's numbers are those of survival.R, which stands beside this."""
    rows, features = rows_of_r()
    names, expected = R_COLUMNS[name], R[name]
    objective = rows.objective(*names)
    scores = features @ expected["coefficients"]
    gradient = objective.weigh(objective.gradient(scores[:, None]))[:, 0]
    # where R's own steps have ended
    assert_allclose(features.T @ gradient, 0.0, atol=1e-6)
    metrics = objective.metrics(scores[:, None])
    null = objective.constant_metrics(np.zeros(1))
    logs = np.array([null["log_likelihood"], metrics["log_likelihood"]])
    if "weights" in names:
        # R's weights have another mean
        logs = MEAN_WEIGHT * (logs - np.log(MEAN_WEIGHT) * rows.weights @ rows.event)
    assert_allclose(logs, expected["log_likelihood"], rtol=1e-12)
    assert metrics["concordance"] == pytest.approx(expected["concordance"], rel=1e-12)
    if "weights" not in names:
        rows = replace(rows, weights=np.ones(120))
    if "strata" not in names:
        rows = replace(rows, stratum=np.zeros(120))
    if "entry" not in names:
        rows = replace(rows, entry=np.full(120, -1.0))
    least = minimize(lambda b: -slow.log_likelihood(rows, features @ b), np.zeros(2))
    assert_allclose(least.x, expected["coefficients"], atol=1e-5)


def test_sums_that_methods_send_are_of_all_rows_at_once(monkeypatch):
    """Those of `cg` and `boost`, of rows that would be several parts."""
    monkeypatch.setattr(joins, "PART_ROWS", 6)
    monkeypatch.setattr(joins, "BLOCK_ROWS", 4)
    rows = drawn(6, HAS)
    objective = rows.objective(*HAS)
    table = TableRows(default_rng(12).integers(0, 7, len(rows.time)), 7)
    joined = JoinedRows(TableMapping({"p": table}), objective.vectors, is_one_part=True)
    scores = default_rng(13).normal(size=(len(rows.time), 1))
    joined.fill("scores", scores)
    gradient = table.segment_sum(objective.weigh(objective.gradient(scores)))
    hessian = table.segment_sum(objective.weigh(objective.tree_hessian(scores)))
    descent = Descent(joined, objective, np.zeros(1))
    assert_allclose(descent.derivatives()["p"], gradient, atol=1e-12)
    found = Boosting(joined, objective).derivatives(["p"])["p"]
    assert_allclose(found, [gradient, hessian], atol=1e-9)
    # one that is divided asks other risk sets
    divided = replace(joined, is_one_part=False)
    wrong = Descent(divided, objective, np.zeros(1)).derivatives()["p"]
    assert np.abs(wrong - gradient).max() > 0.1


@pytest.mark.parametrize("name", R)
def test_the_baseline_is_that_of_basehaz(name):
    rows, features = rows_of_r()
    expected = R[name]
    scores = (features @ expected["coefficients"])[:, None]
    found = rows.objective(*R_COLUMNS[name]).baselines(scores)
    times = np.array(expected["times"])
    hazards = np.array(expected["hazards"])
    for code, baseline in enumerate(found):
        is_here = np.array(expected["strata"]) == code
        values = [baseline.hazard(time) for time in times[is_here]]
        assert_allclose(values, hazards[is_here], rtol=1e-9)
        assert baseline.stratum == (code if "strata" in R_COLUMNS[name] else None)
        assert baseline.hazard(0.5) == 0.0


def test_a_thinned_baseline_is_off_by_a_share_at_most():
    times = np.arange(1.0, 1001.0)
    hazards = np.cumsum(default_rng(14).exponential(size=1000))
    whole = Baseline(tuple(times), tuple(hazards))
    thin = whole.thinned(40, kept=(123.0,))
    assert len(thin.times) <= 41
    for time in (*thin.times, 123.0, 0.0, 1e9):
        assert thin.hazard(time) == pytest.approx(whole.hazard(time))
    gaps = [abs(whole.hazard(time) - thin.hazard(time)) for time in times]
    assert max(gaps) <= hazards[-1] / 40
    assert whole.thinned(1000) is whole


def test_an_offset_is_added_to_the_scores_that_are_compared():
    rows = drawn(6, HAS)
    objective = rows.objective(*HAS)
    rng = default_rng(16)
    scores, offset = rng.normal(size=(2, len(rows.time), 1))
    beside = with_offset(objective, offset[:, 0])
    moved = scores + offset
    assert not beside.is_separable
    assert beside.metrics(scores) == pytest.approx(objective.metrics(moved))
    assert_allclose(beside.gradient(scores), objective.gradient(moved))
    assert_allclose(beside.tree_hessian(scores), objective.hessian(moved))
    assert beside.fit_response(scores) == objective.fit_response(moved)
    # the risk sets are those of all rows, whatever a kernel is given
    assert beside.on(beside.vectors).without is beside.without


@pytest.mark.parametrize("largest", [1, 6, 7, 8, 40])
def test_rank_sums_are_those_of_a_loop(largest):
    rng = default_rng(largest)
    ranks = rng.integers(0, largest + 1, 60)
    weights = rng.uniform(size=60)
    start, stop = np.sort(rng.integers(0, 61, (2, 90)), axis=0)
    # none of the ranks asked for may be as high as those there are
    for most in (largest // 2, largest + 1):
        below = rng.integers(0, most + 1, 90)
        found = rank_sums(ranks, weights, start, stop, below)
        expected = [
            weights[a:b][ranks[a:b] < limit].sum()
            for a, b, limit in zip(start, stop, below, strict=True)
        ]
        assert_allclose(found, expected, atol=1e-12)


def added_up(found: RowInformation, features: np.ndarray) -> np.ndarray:
    """The information about coefficients (d, d) that rows of some features give."""
    sums = found.beside.T @ features
    clusters = found.clusters
    of_clusters = np.zeros((clusters.count, features.shape[1]))
    members = clusters.slopes[:, None] * features[clusters.rows]
    np.add.at(of_clusters, clusters.numbers, members)
    whole = (features.T * found.weights) @ features
    return whole + (sums.T * found.scales) @ sums - of_clusters.T @ of_clusters


@pytest.mark.parametrize(("least", "share"), [(1, 10**6), (50, 16), (10**6, 1)])
@each
def test_information_is_exact(ties, names, least, share, monkeypatch):
    """Of stretches of one event time each, of some, and of one in each stratum."""
    monkeypatch.setattr(stretches, "LEAST_ROWS", least)
    monkeypatch.setattr(stretches, "SHARE", share)
    count = 300
    rows = drawn(10 * ties, names, rows=count)
    features = default_rng(5).normal(size=(count, 3))
    features[:, 2] = features[:, 2] > 0.5
    scores = features @ [0.5, -0.7, 0.4]
    found = rows.objective(*names).information_by_rows(scores[:, None])
    expected = slow.information(rows, scores, features)
    assert_allclose(added_up(found, features), expected, rtol=1e-9, atol=1e-9)
    # what all rows have alike is not known
    constant = added_up(found, np.ones((count, 1)))
    assert abs(constant.item()) < 1e-9 * found.weights.sum()
    # each is a share of a row's weight
    assert np.all(found.beside <= found.weights[:, None] * (1.0 + 1e-9))


@each
def test_many_rows_leave_between_two_stretches(ties, names):
    """Means of the rows at risk then differ by many rows, in the same stratum."""
    rows = drawn(10 * ties, names, rows=1500)
    objective = rows.objective(*names)
    sets, of_time = objective.risk_sets, objective.stretches.of_time
    beside = objective.information_by_rows(np.zeros((1500, 1))).beside
    is_there = beside > 0.0
    assert is_there.sum(axis=0).min() == objective.stretches.fewest >= 50
    first = np.searchsorted(of_time, np.arange(len(objective.stretches)))
    for stretch in range(len(first) - 1):
        if sets.strata[first[stretch]] == sets.strata[first[stretch + 1]]:
            gone = is_there[:, stretch] & ~is_there[:, stretch + 1]
            assert np.count_nonzero(gone) >= stretches.LEAST_ROWS
