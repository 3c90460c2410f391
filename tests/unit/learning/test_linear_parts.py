"""Linear models before trees, against ridge regression on the joined rows."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose
from scipy.sparse import csr_matrix
from sklearn.linear_model import Ridge

from tp_flower.arrays import MISSING
from tp_flower.errors import ModelError
from tp_flower.features.sparse import SparseRows
from tp_flower.methods.boost import linear
from tp_flower.methods.boost.linear import LinearPart, RidgeFit, fit_linear, is_linear
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.trees import TreeModel, fit_before_trees, grow

ROWS, TRAINED = 240, 200
CODES = (2,)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Solve to the end: a run leaves what is left to the next epoch."""
    monkeypatch.setattr(linear, "PRECISION", 1e-12)
    monkeypatch.setattr(linear, "ITERATIONS", 1_000)


def table():
    """Rows of two numbers, one of them missing at times, and a code of 7 categories."""
    rng = default_rng(4)
    rows = np.column_stack(
        [
            rng.normal(50.0, 9.0, ROWS),
            rng.normal(size=ROWS),
            rng.integers(0, 7, ROWS),
            np.full(ROWS, 3.0),
        ]
    )
    rows[rng.random(ROWS) < 0.2, 1] = np.nan
    counts = rng.integers(1, 5, TRAINED).astype(float)
    labels = (
        0.1 * rows[:TRAINED, 0]
        + np.nan_to_num(rows[:TRAINED, 1], nan=4.0)
        + np.array([3, -2, 0, 1, 5, -4, 2])[rows[:TRAINED, 2].astype(int)]
        + rng.normal(size=TRAINED)
    )
    labels -= np.average(labels, weights=counts)
    return rows.astype(np.float32), labels, counts


def expected_design(rows, counts):
    """Numbers centred and scaled by joined rows, indicators, categories."""
    columns = []
    for column in (0, 1):
        known = ~np.isnan(rows[:TRAINED, column])
        values = rows[:, column].astype(float)
        mean = np.average(values[:TRAINED][known], weights=counts[known])
        centred = np.nan_to_num(values - mean)
        scale = np.sqrt(np.average(centred[:TRAINED] ** 2, weights=counts))
        columns.append(centred / scale)
    columns.append(np.isnan(rows[:, 1]).astype(float))
    columns += [(rows[:, 2] == code).astype(float) for code in range(7)]
    return np.column_stack(columns)


def test_it_is_the_ridge_regression_of_the_joined_rows():
    rows, labels, counts = table()
    # G and H of a squared loss at scores 0
    gradient, hessian = -(counts * labels)[:, None], counts[:, None]
    text, values = fit_linear(rows, gradient, hessian, counts, CODES, RidgeFit(1))
    design = expected_design(rows, counts)
    again = np.repeat(np.arange(TRAINED), counts.astype(int))
    penalty = max(linear.PENALTY * counts.sum(), counts.mean())
    ridge = Ridge(alpha=penalty, fit_intercept=False, solver="cholesky")
    ridge.fit(design[again], labels[again])
    assert_allclose(values[:, 0], design @ ridge.coef_, atol=1e-6)
    part = LinearPart.of(text.tobytes().decode())
    # what the rows have of a constant column is nothing
    assert sorted(set(part.columns.of_weights)) == [0, 1, 2]
    assert_allclose(part.values(rows), values, atol=1e-9)


def test_gains_are_what_a_column_alone_lowers_as_of_a_split():
    rows, labels, counts = table()
    few = rows[:, :1]
    gradient, hessian = -(counts * labels)[:, None], counts[:, None]
    text, values = fit_linear(few, gradient, hessian, counts, (), RidgeFit(1))
    part = LinearPart.of(text.tobytes().decode())
    fall = counts @ labels**2 - counts @ (labels - values[:TRAINED, 0]) ** 2
    # but for the penalty
    assert part.gains == [pytest.approx(fall, rel=0.02)]
    model = TreeModel(1)
    model.parameters = model.forest.bytes()
    model.add(0.5, text)
    assert model.gains(1, 1.0)[0, 0] == pytest.approx(0.5 * part.gains[0])


def test_the_rows_choose_the_penalty_by_generalised_cross_validation():
    rows, labels, counts = table()
    # noise beside what there is to learn
    labels = labels + 12.0 * default_rng(5).normal(size=TRAINED)
    gradient, hessian = -(counts * labels)[:, None], counts[:, None]
    _, values = fit_linear(rows, gradient, hessian, counts, CODES, RidgeFit(1, True))
    design = expected_design(rows, counts)
    trained, root = design[:TRAINED], np.sqrt(counts)[:, None]
    expected, least = None, np.inf
    for penalty in linear.PENALTIES * counts.sum():
        scaled = root * trained
        gram = scaled.T @ scaled + penalty * np.eye(trained.shape[1])
        hat = scaled @ np.linalg.solve(gram, scaled.T)
        left = root[:, 0] * labels - hat @ (root[:, 0] * labels)
        score = left @ left / (TRAINED - np.trace(hat)) ** 2
        if score < least:
            weights = np.linalg.solve(gram, scaled.T @ (root[:, 0] * labels))
            expected, least, chosen = design @ weights, score, penalty
    # the columns are in single precision
    assert_allclose(values[:, 0], expected, atol=1e-6)
    assert linear.PENALTIES[0] < chosen / counts.sum() < linear.PENALTIES[-1]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_shrunk_fit_leaves_columns_of_noise(is_sparse):
    rng = default_rng(6)
    rows = rng.normal(size=(TRAINED, 60)).astype(np.float32)
    noise = rng.normal(size=(TRAINED, 1))
    ones = np.ones((TRAINED, 1))
    given = csr_matrix(rows) if is_sparse else rows
    explained = []
    for is_shrunk in (False, True):
        fit = RidgeFit(1, is_shrunk)
        _, values = fit_linear(given, -noise, ones, ones[:, 0], (), fit)
        explained.append(1.0 - ((noise - values) ** 2).sum() / (noise**2).sum())
    full, shrunk = explained
    assert full > 0.2
    assert shrunk < 0.02


def test_columns_that_fit_every_row_take_the_least_penalty():
    rng = default_rng(7)
    rows = rng.normal(size=(20, 30)).astype(np.float32)
    ones, noise = np.ones((20, 1)), rng.normal(size=(20, 1))
    one, other = (
        fit_linear(rows, noise, ones, ones[:, 0], (), RidgeFit(1, is_shrunk))[1]
        for is_shrunk in (False, True)
    )
    assert_allclose(one, other, atol=1e-9)


def test_an_output_after_the_other_is_fitted():
    rows, labels, counts = table()
    gradient = np.column_stack([-counts * labels, counts * labels / 2, counts])
    hessian = np.column_stack([counts, counts / 4, counts / 9])
    _, values = fit_linear(rows, gradient, hessian, counts, CODES, RidgeFit(1))
    for output in range(3):
        one, of_one = fit_linear(
            rows,
            gradient[:, [output]],
            hessian[:, [output]],
            counts,
            CODES,
            RidgeFit(1),
        )
        assert len(one)
        # numbers are centred by the outputs' mean curvature: almost the same
        assert np.corrcoef(of_one[:, 0], values[:, output])[0, 1] > 0.999


def test_rows_that_are_stored_sparsely_are_scaled_and_stay_sparse():
    rng = default_rng(8)
    rows = csr_matrix(
        np.where(rng.random((300, 40)) < 0.1, rng.normal(size=(300, 40)), 0)
    )
    counts = rng.integers(1, 5, 300).astype(float)
    labels = rows.toarray()[:, :3].sum(axis=1) + 0.1 * rng.normal(size=300)
    gradient, hessian = -(counts * labels)[:, None], counts[:, None]
    text, values = fit_linear(
        rows.astype(np.float32), gradient, hessian, counts, (), RidgeFit(1)
    )
    part = LinearPart.of(text.tobytes().decode())
    assert part.columns.design(rows.astype(np.float32)).dense is None
    scale = np.sqrt(np.average(rows.toarray() ** 2, weights=counts, axis=0))
    again = np.repeat(np.arange(300), counts.astype(int))
    penalty = max(linear.PENALTY * counts.sum(), counts.mean())
    ridge = Ridge(alpha=penalty, fit_intercept=False, solver="cholesky")
    ridge.fit((rows.toarray() / scale)[again], labels[again])
    assert_allclose(values[:, 0], rows.toarray() / scale @ ridge.coef_, atol=1e-5)


def test_no_weight_is_of_one_joined_row_nor_an_indicator_of_fewer_than_a_leaf():
    rows = np.array([[0.0], [0.0], [1.0], [2.0], [np.nan]], np.float32)
    counts = np.array([3, 2, 1, 2, 4])
    gradient = np.array([[1.0], [1.0], [-9.0], [3.0], [2.0]])
    for codes in ((0,), ()):
        text, values = fit_linear(
            rows, gradient, np.ones((5, 1)), counts, codes, RidgeFit(5)
        )
        part = LinearPart.of(text.tobytes().decode())
        assert part.columns.categories == ({0: [0, 2]} if codes else {})
        # the missing value is in four joined rows
        assert part.columns.missing == []
        assert values[4] == 0.0
        assert values[3] != 0.0
        assert not codes or values[2] == 0.0


def test_numbers_far_from_all_others_are_cut():
    rng = default_rng(9)
    rows = rng.normal(size=(1_000, 1)).astype(np.float32)
    gradient, ones = -rows.astype(float), np.ones((1_000, 1))
    text, _ = fit_linear(rows, gradient, ones, ones[:, 0], (), RidgeFit(1))
    part = LinearPart.of(text.tobytes().decode())
    far, near = part.values(np.array([[1e7], [5.0]], np.float32))[:, 0]
    assert near < far < 1.3 * linear.FARTHEST


def test_new_rows_add_nothing_for_what_training_has_not_seen():
    rows, labels, counts = table()
    gradient, hessian = -(counts * labels)[:, None], counts[:, None]
    text, _ = fit_linear(rows, gradient, hessian, counts, CODES, RidgeFit(1))
    part = LinearPart.of(text.tobytes().decode())
    new = np.array(
        [[50.0, 1.0, 6.0, 3.0], [50.0, 1.0, 99.0, 3.0], [50.0, 1.0, np.nan, 3]]
    )
    known, unknown, missing = part.values(new.astype(np.float32))[:, 0]
    assert unknown == missing
    assert known - unknown == pytest.approx(part.weights[-1][0])


def test_a_forest_adds_linear_models_and_trees():
    rows, labels, counts = table()
    gradient, hessian = -(counts * labels)[:, None], counts[:, None]
    model = TreeModel(1)
    model.start(CODES)
    encoded = np.where(np.isnan(rows), np.float32(MISSING), rows)
    before, of_linear = fit_before_trees(
        model, encoded, gradient, hessian, counts, RidgeFit(1)
    )
    model.add(0.7, before)
    growth = Growth(trees=3, leaves=5, rate=0.3, least_rows=5)
    after, of_trees = grow(model, encoded, gradient, hessian, counts.sum(), growth)
    model.add(1.0, after)
    assert_allclose(model.scores(encoded), 0.7 * of_linear + of_trees, atol=1e-5)
    assert [is_linear(text) for _, text in model.forest.rounds] == [True, False]


@pytest.mark.parametrize("trained", [0, TRAINED])
def test_nothing_comes_of_no_rows_or_no_columns(trained):
    rows = np.zeros((ROWS, 0 if trained else 2), np.float32)
    text, values = fit_linear(
        rows,
        np.zeros((trained, 1)),
        np.ones((trained, 1)),
        np.ones(trained),
        (),
        RidgeFit(1),
    )
    assert not len(text)
    assert values.shape == (ROWS, 1)
    assert not values.any()


def test_a_text_of_anything_else_is_refused():
    with pytest.raises(ModelError, match="malformed linear part of trees"):
        LinearPart.of("{}")


def test_wide_rows_that_are_stored_sparsely_are_read():
    columns = np.array([[3], [700], [3], [8]], np.int32)
    rows = SparseRows(np.ones((4, 1), np.float32), columns, 900)
    model = TreeModel(1)
    model.start(())
    gradient = -np.array([[2.0], [-1.0], [2.0], [0.0]])
    ones = np.ones((4, 1))
    _, values = fit_before_trees(model, rows, gradient, ones, ones[:, 0], RidgeFit(1))
    assert values[0] == values[2] > 0.5 > 0 > values[1]
