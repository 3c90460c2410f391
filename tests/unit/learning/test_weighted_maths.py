"""Weights of joined rows in formulas: against scikit-learn, and rows repeated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import softmax
from sklearn import metrics as known
from sklearn.linear_model import LogisticRegression

from tests.support.reference.families import Family
from tests.support.reference.joins import segment_sum
from tests.support.tables.mappings import table_rows
from tp_flower.arrays import effective_rows
from tp_flower.errors import SettingsError
from tp_flower.joins.mapping import RowWeights, TableMapping, score_steps
from tp_flower.joins.rows import JoinedRows
from tp_flower.learning.models.local_model import FitProblem
from tp_flower.learning.solvers import RidgeSolver, gram
from tp_flower.methods.admm.iterations import advance
from tp_flower.objectives import ClassNoise, NumberNoise, comparison
from tp_flower.objectives.metrics import auc
from tp_flower.settings import Settings

LOSSES = [
    Family("squared"),
    Family("logistic", 2),
    Family("softmax", 3),
    Family("squared", 0, NumberNoise(0.3)),
    Family("logistic", 2, ClassNoise(2, 0.8)),
    Family("softmax", 3, ClassNoise(3, 0.7)),
]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=str)
COPIES = np.array([1, 3, 2, 1, 4, 2, 1, 2, 5, 3])
ROWS = len(COPIES)


def problem(loss):
    """Scores (10, d_c), labels (10,) and positive weights."""
    rng = default_rng(3)
    labels = rng.normal(size=ROWS)
    if loss.classes:
        labels = np.arange(ROWS) % loss.classes * 1.0
    return 2 * rng.normal(size=(ROWS, loss.outputs)), labels


@each_loss
def test_whole_weights_repeat_rows(loss):
    scores, labels = problem(loss)
    weights = 0.7 * COPIES
    again = np.repeat(np.arange(ROWS), COPIES)
    weighted = loss.on(labels, weights)
    repeated = loss.on(labels[again])
    value = weighted.value(scores)
    assert value == pytest.approx(repeated.value(scores[again]), rel=1e-12)
    expected = repeated.metrics(scores[again])
    assert weighted.metrics(scores) == pytest.approx(expected, rel=1e-9, nan_ok=True)
    direction = scores[::-1]
    slope = 0.7 * repeated.slope(scores[again], direction[again])
    assert weighted.slope(scores, direction) == pytest.approx(slope, rel=1e-9)
    is_noisy_class = loss.classes and loss.noise
    if not is_noisy_class:  # whose least rate is by how sure the rows are
        assert_allclose(weighted.base_score, repeated.base_score, rtol=1e-9)


@each_loss
def test_partial_sums_of_disjoint_rows_add_up(loss):
    scores, labels = problem(loss)
    objective = loss.on(labels, 0.7 * COPIES)
    direction = scores[::-1]
    rows = [np.arange(ROWS) % 3 == k for k in range(3)]
    parts = [(objective.select(each), scores[each], direction[each]) for each in rows]
    assert sum(part.mass for part, *_ in parts) == pytest.approx(objective.mass)
    total = sum(part.total(h) for part, h, _ in parts)
    assert total / objective.mass == pytest.approx(objective.value(scores))
    slope = sum(part.slope(h, d) for part, h, d in parts)
    assert slope == pytest.approx(objective.slope(scores, direction))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_metrics_of_a_regression_are_scikit_learns(is_weighted):
    rng = default_rng(0)
    labels = rng.normal(size=80)
    scores = rng.normal(size=(80, 1))
    weights = rng.gamma(0.7, size=80) if is_weighted else None
    measures = known.mean_squared_error, known.mean_absolute_error, known.r2_score
    squares, distances, r2 = (
        measure(labels, scores[:, 0], sample_weight=weights) for measure in measures
    )
    expected = {"loss": squares / 2, "rmse": squares**0.5, "mae": distances, "r2": r2}
    actual = Family("squared").on(labels, weights).metrics(scores)
    assert actual == pytest.approx(expected, rel=1e-12)


def test_calibration_is_a_logistic_regression_of_labels_on_scores():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=400)
    labels = (rng.random(400) < 1 / (1 + np.exp(0.3 - 0.6 * scores))).astype(float)
    weights = rng.uniform(0.5, 2.0, 400)
    found = comparison.calibration(scores, labels, weights)
    model = LogisticRegression(C=np.inf, tol=1e-12)
    model.fit(scores[:, None], labels, sample_weight=weights)
    assert found["slope"] == pytest.approx(model.coef_[0, 0], abs=1e-5)
    assert found["intercept"] == pytest.approx(model.intercept_[0], abs=1e-5)


@pytest.mark.parametrize("labels", [np.ones(6), (np.arange(6) > 2) * 1.0])
def test_labels_that_no_line_fits_have_no_calibration(labels):
    """All alike, or told exactly by the scores."""
    assert comparison.calibration(np.arange(6.0), labels) == {}


@given(classes=st.integers(2, 40), rows=st.integers(1, 300), seed=st.integers(0, 99))
def test_a_confusion_matrix_of_many_classes_merges_the_rarest(classes, rows, seed):
    labels, predicted = default_rng(seed).integers(0, classes, (2, rows))
    table = comparison.confusion(
        [str(k) for k in range(classes)], predicted * 1.0, labels * 1.0
    )
    matrix = known.confusion_matrix(labels, predicted, labels=range(classes))
    listed = [int(name) for name in table if name != comparison.OTHERS]
    assert len(listed) == min(classes, comparison.MOST_CLASSES)
    cells = [[table[str(k)][str(guess)] for guess in listed] for k in listed]
    assert cells == matrix[np.ix_(listed, listed)].tolist()
    assert sum(sum(row.values()) for row in table.values()) == rows
    others = np.delete(matrix.sum(axis=1), listed)
    assert max(others, default=0) <= min(matrix.sum(axis=1)[listed])


@given(rows=st.integers(0, 250), is_weighted=st.booleans(), seed=st.integers(0, 99))
def test_means_by_tenth_are_of_no_few_rows_whatever_their_order(
    rows, is_weighted, seed
):
    rng = default_rng(seed)
    predicted, labels, weights = rng.gamma(1.0, size=(3, rows))
    weights = weights if is_weighted else np.ones(rows)
    ranked = comparison.RankedRows.of(predicted, labels, weights)
    groups = comparison.means_by_tenth(ranked)
    assert len(groups) == min(rows // comparison.LEAST_GROUP, 10)
    assert all(group["rows"] >= comparison.LEAST_GROUP for group in groups)
    again = rng.permutation(rows)
    moved = comparison.means_by_tenth(
        comparison.RankedRows.of(
            *(values[again] for values in (predicted, labels, weights))
        )
    )
    assert moved == [pytest.approx(group) for group in groups]


def test_metrics_of_classes_are_scikit_learns():
    rng = default_rng(0)
    weights = rng.gamma(0.7, size=80)
    sample = {"sample_weight": weights}
    classes = rng.integers(0, 3, 80)
    scores = rng.normal(size=(80, 3))
    actual = Family("softmax", 3).on(classes, weights).metrics(scores)
    rates = softmax(scores, axis=1)
    guess = scores.argmax(axis=1)
    areas = [known.roc_auc_score(classes == k, rates[:, k], **sample) for k in range(3)]
    expected = {
        "log_loss": known.log_loss(classes, rates, **sample),
        "accuracy": known.accuracy_score(classes, guess, **sample),
        "auc": np.mean(areas),
    }
    assert {name: actual[name] for name in expected} == pytest.approx(expected)
    scores, is_late = scores.round(1)[:, :1], classes > 0  # ties
    two = Family("logistic", 2).on(is_late, weights).metrics(scores)
    assert two["auc"] == pytest.approx(
        known.roc_auc_score(is_late, scores[:, 0], **sample)
    )
    unweighted = known.roc_auc_score(is_late, scores[:, 0])
    assert auc(scores[:, 0], is_late) == pytest.approx(unweighted)


@pytest.mark.parametrize("is_weighted", [False, True])
@given(
    row_of=st.lists(st.integers(-1, 3), min_size=1, max_size=12),
    outputs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_score_steps_row_by_row(is_weighted, row_of, outputs, seed):
    rng = default_rng(seed)
    rows = table_rows(row_of, 4)
    drawn = rng.gamma(1.0, size=len(row_of)) + 0.01
    weights = RowWeights.of(drawn, TableMapping({"t": rows}))
    assert weights.rows.mean() == pytest.approx(1.0)
    column = [[w] for w in weights.rows]
    expected = np.array(segment_sum(row_of, 4, column), np.float32)[:, 0]
    masses = weights.multiplicity["t"]
    assert_allclose(masses, expected, rtol=1e-6)
    # what the site multiplies by is what the server has divided by
    assert (masses.astype(np.float32) == masses).all()
    message = rng.normal(size=(len(row_of), outputs))
    if is_weighted:
        message = weights.rows[:, None] * message
        inverse = weights.inverse_multiplicity["t"]
    else:
        masses = rows.multiplicity
        inverse = rows.inverse_multiplicity
    actual = score_steps(rows.segment_sum(message), inverse, 0.7)
    for row in range(4):
        mine = [message[j] for j, r in enumerate(row_of) if r == row]
        moved = sum(mine) / (0.7 * masses[row]) if mine else 0.0
        assert_allclose(actual[row], -moved, atol=1e-12)


def test_weighted_residuals_are_those_of_rows_repeated():
    """Whole runs of weighted rows, are in tests/runs."""
    z, duals, scores, before = default_rng(1).normal(size=(4, ROWS, 1))
    again = np.repeat(np.arange(ROWS), COPIES)

    def gap(chosen, weights=None):
        objective = Family("squared").on(np.zeros(len(chosen)), weights)
        vectors = {"z": z, "duals": duals, "scores": before}
        rows = JoinedRows(
            TableMapping({"t": table_rows(chosen, ROWS)}),
            objective.vectors | {name: each[chosen] for name, each in vectors.items()},
        )
        base = np.zeros(1)
        return advance(rows, objective, 0.6, base, np.asarray, {"t": scores})[0]

    one = gap(np.arange(ROWS), COPIES / COPIES.mean())
    other = gap(again)
    assert one.primal == pytest.approx(other.primal)
    assert one.dual == pytest.approx(other.dual)


def test_fits_take_weights_for_counts():
    features = default_rng(2).normal(size=(ROWS, 2)).astype(np.float32)
    again = np.repeat(np.arange(ROWS), COPIES)
    one = gram(features, COPIES * 1.0, intercept=True)
    two = gram(features[again], np.ones(len(again), np.int64), intercept=True)
    assert_allclose(one, two)
    assert RidgeSolver.from_gram(one, 7, intercept=True).weight == pytest.approx(24 / 7)
    how = {
        "kappa": 0.3,
        "joined_rows": 24,
        "strength": 0.1,
        "centre": np.zeros(2),
        "target": np.zeros((1, 1)),
        "penalised": np.ones(2, bool),
    }
    fits = [FitProblem(features, own, **how) for own in (COPIES, COPIES * 1.0)]
    assert_array_equal(fits[0].weights, fits[1].weights)
    assert_array_equal(fits[0].relative_penalty, fits[1].relative_penalty)


def test_entity_counts_once():
    rows = table_rows([2, 0, 2, 2, 0, 3], 5)
    weights = rows.inverse_multiplicity[rows.row_of]
    assert_allclose(np.bincount(rows.row_of, weights, 5), [1, 0, 1, 1, 0])
    assert effective_rows(np.ones(9)) == 9.0
    assert np.isnan(auc(np.zeros(2), np.array([True, True]), np.ones(2)))


def test_refused_row_weights():
    allowed = r'row-weight: .* not one of "joined", "entity", "entity\(ALIAS\)"'
    for text in ("", "Entity", "entity()", "entity(a)(b)", "rows"):
        with pytest.raises(SettingsError, match=allowed):
            Settings(row_weight=text)
    # private models are of unweighted rows
    for private in ({"privacy.features": "dp-sgd"}, {"privacy.predictions": 1.0}):
        config = {"row-weight": "entity", **private}
        with pytest.raises(SettingsError, match="'entity' does not go with pri"):
            Settings.from_run_config(config)
        assert Settings.from_run_config({**config, "row-weight": "joined"})
