"""An objective beside an offset is its family's at shifted scores."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from tp_flower.objectives import (
    FAMILIES,
    Objective,
    OffsetObjective,
    Target,
    family_named,
    make_objective,
    with_offset,
)

ROWS = 40
MEANS = ("poisson", "gamma", "tweedie(1.3)", "negative-binomial(0.7)")
SMOOTH = (*MEANS, "squared", "logistic")
LOSSES = (*SMOOTH, "huber(0.8)", "quantile(0.3)")
ONE_SCORE = [name for name, kind in FAMILIES.items() if kind.takes_label]


def example(loss: str, seed: int = 0):
    """An objective, an offset of its rows, and scores."""
    rng = np.random.default_rng(seed)
    classes = () if 0 in family_named(loss).class_counts else ("no", "yes")
    labels = rng.integers(0, 2, ROWS) if classes else rng.poisson(2.0, ROWS)
    target = Target.of(labels + 0.5 * (loss == "gamma"), classes)
    weights = rng.uniform(0.3, 2.0, ROWS)
    objective = make_objective(loss, target, weights / weights.mean())
    return objective, rng.normal(size=ROWS), rng.normal(size=(ROWS, 1))


@pytest.mark.parametrize("loss", LOSSES)
def test_formulas_are_those_of_shifted_scores(loss):
    plain, offset, scores = example(loss)
    beside = with_offset(plain, offset)
    shifted = scores + offset[:, None]
    for name in ("row_values", "gradient", "comparable", "value", "total"):
        expected = getattr(plain, name)(shifted)
        np.testing.assert_allclose(getattr(beside, name)(scores), expected, atol=1e-12)
    direction = np.linspace(-1.0, 1.0, ROWS)[:, None]
    slope = plain.slope(shifted, direction)
    assert beside.slope(scores, direction) == pytest.approx(slope)
    if loss != "quantile(0.3)":
        # a quantile's is that of a parabola as wide as what is left to explain
        for name in ("hessian", "tree_hessian"):
            expected = getattr(plain, name)(shifted)
            np.testing.assert_allclose(getattr(beside, name)(scores), expected)
    for rho in (0.05, 1.0, 30.0):
        z = plain.prox(shifted, rho)
        actual = beside.prox(scores, rho, start=scores - 0.1)
        np.testing.assert_allclose(actual + offset[:, None], z, atol=1e-7)
        multiplier = beside.prox_gradient(actual, scores, rho)
        np.testing.assert_allclose(multiplier, rho * (scores - actual), atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_base_score_is_the_best_constant_beside_the_offset(loss):
    plain, offset, _ = example(loss, seed=3)
    beside = with_offset(plain, offset)

    def value(base: float) -> float:
        return plain.value((base + offset)[:, None])

    (base,) = beside.base_score
    best = minimize_scalar(value, bounds=(-9.0, 9.0), options={"xatol": 1e-9})
    assert value(base) <= best.fun + 1e-12
    if loss in SMOOTH:
        scores = np.full((ROWS, 1), base)
        assert beside.slope(scores, np.ones((ROWS, 1))) == pytest.approx(0, abs=1e-10)
        weights = plain.weights
        curvature = weights @ beside.hessian(scores)[:, 0] / weights.sum()
        assert beside.curvature(beside.base_score) == pytest.approx(curvature)


def test_base_scores_of_exposures_are_those_of_rates():
    plain, offset, _ = example("poisson")
    exposed = plain.weights * np.exp(offset)
    claims = plain.weights @ plain.target.numbers
    rate = np.log(claims / exposed.sum())
    np.testing.assert_allclose(with_offset(plain, offset).base_score, rate)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_constant_offset_moves_the_base_score_alone(loss):
    plain, offset, scores = example(loss)
    for added in (0.0, -1.75):
        moved = with_offset(plain, np.full(ROWS, added))
        np.testing.assert_allclose(moved.base_score, plain.base_score - added)
        again = moved.metrics(scores - added)
        assert again == pytest.approx(plain.metrics(scores), rel=1e-9)
        for name in ("score_unit", "gradient_scale"):
            # of labels without weights it is their deviation
            expected = getattr(plain.weighted(None), name)(1.0)
            unweighted = getattr(moved.weighted(None), name)(1.0)
            assert unweighted == pytest.approx(expected)
        assert moved.output_scale == pytest.approx(plain.output_scale)
        curvature = plain.curvature(plain.base_score)
        assert moved.curvature(moved.base_score) == pytest.approx(curvature)
    constant = with_offset(plain, offset)
    assert constant.constant_metrics(constant.base_score)["loss"] <= plain.value(
        scores + offset[:, None]
    )


@pytest.mark.parametrize("loss", [*MEANS, "quantile(0.3)"])
def test_what_is_explained_is_of_the_offset_and_a_constant(loss):
    plain, offset, scores = example(loss)
    beside = with_offset(plain, offset)
    constant = beside.constant_metrics(beside.base_score)
    assert constant["d2"] == pytest.approx(0.0, abs=1e-9)
    explained = 1.0 - beside.value(scores) / constant["loss"]
    assert beside.metrics(scores)["d2"] == pytest.approx(explained)


@pytest.mark.parametrize("loss", ["squared", "huber(0.8)"])
def test_losses_of_residuals_are_those_of_the_difference(loss):
    plain, offset, scores = example(loss)
    beside = with_offset(plain, offset)
    left = Target.of(plain.target.numbers - offset)
    difference = make_objective(loss, left, plain.weights)
    assert beside.metrics(scores) == pytest.approx(difference.metrics(scores))
    assert beside.gradient_scale(2.0) == difference.gradient_scale(2.0)
    assert beside.score_unit(3) == difference.score_unit(3)
    np.testing.assert_array_equal(beside.base_score, difference.base_score)
    # the label itself stays what it is
    np.testing.assert_array_equal(beside.target.numbers, plain.target.numbers)


@pytest.mark.parametrize("loss", LOSSES)
def test_of_some_rows_it_is_the_same_there(loss):
    plain, offset, scores = example(loss)
    beside = with_offset(plain, offset)
    for rows in (slice(5, 20), np.arange(ROWS) % 3 == 0, np.array([7, 1])):
        blocks = {name: values[rows] for name, values in beside.vectors.items()}
        for part in (beside.select(rows), beside.on(blocks)):
            expected = beside.hessian(scores)[rows]
            np.testing.assert_allclose(part.hessian(scores[rows]), expected)
            expected = beside.row_values(scores)[rows]
            np.testing.assert_allclose(part.row_values(scores[rows]), expected)
    assert beside.weighted(None).weights is None
    np.testing.assert_array_equal(beside.weighted(None).offset, offset)


@pytest.mark.parametrize("loss", ["poisson", "logistic"])
def test_far_offsets_have_a_base_score(loss):
    plain, _, _ = example(loss)
    far = with_offset(plain, np.where(np.arange(ROWS) % 2, 1e3, -1e3))
    assert np.isfinite(far.base_score).all()
    assert np.isfinite(far.value(np.zeros((ROWS, 1))))


@pytest.mark.parametrize("loss", ONE_SCORE)
def test_no_formula_of_a_family_is_left_without_the_offset(loss):
    """A family's members that are not of the class are its own, on shifted scores."""
    members = {
        name
        for kind in family_named(loss).__mro__
        if kind not in (Objective, object) and issubclass(kind, Objective)
        for name, value in vars(kind).items()
        if hasattr(Objective, name)
        and not name.startswith("_")
        and not isinstance(value, classmethod)
    }
    attributes = {name for name in members if not callable(getattr(Objective, name))}
    attributes = {
        name for name in attributes if not isinstance(vars(Objective)[name], property)
    }
    assert members - attributes <= vars(OffsetObjective).keys()


def test_an_offset_needs_a_label_and_one_score():
    classes = Target.of([0.0, 1.0, 2.0], ("a", "b", "c"))
    clusters = Target.without_label(3, ("0",))
    for objective in (
        make_objective("softmax", classes),
        make_objective("kmeans", clusters),
    ):
        with pytest.raises(ValueError, match=f"{objective.name!r} has no score that"):
            with_offset(objective, np.zeros(3))
