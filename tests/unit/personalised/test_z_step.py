"""The Z-step against a generic convex solver, and in both limits."""

import cvxpy as cp
import numpy as np
import pytest

from tp_flower.personalised import z_step
from tp_flower.personalised.graph import SimilarityGraph, row_weights
from tp_flower.personalised.z_step import (
    EdgeNorm,
    ZStep,
    edge_norms,
    factorise,
    project_dual,
)

ORDERS = {EdgeNorm.ONE: 1, EdgeNorm.TWO: 2, EdgeNorm.MAX: "inf"}
EXACT_STEP = {"tolerance": 1e-10, "most_iterations": 50_000}
each_norm = pytest.mark.parametrize("norm", EdgeNorm)
EXACT = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}


def random_graph(sites: int, edges: int, seed: int) -> SimilarityGraph:
    rng = np.random.default_rng(seed)
    names = [f"s{number}" for number in range(sites)]
    return SimilarityGraph.from_pairs(names, rng.integers(0, sites, (edges, 2)))


def ring(sites: int) -> SimilarityGraph:
    places = np.arange(sites)
    pairs = np.column_stack([places, np.roll(places, 1)])
    return SimilarityGraph.from_pairs([str(place) for place in places], pairs)


def generic(graph, targets, penalty, norm, weights=None):
    """Solve the problem as it is written, by an interior point method."""
    models = cp.Variable(targets.shape)
    distances = [cp.norm(models[i] - models[j], ORDERS[norm]) for i, j in graph.edges]
    factors = np.ones(len(distances)) if weights is None else weights
    total = cp.hstack(distances) @ factors
    cost = 0.5 * cp.sum_squares(models - targets) + penalty * total
    cp.Problem(cp.Minimize(cost)).solve(solver="CLARABEL", **EXACT)
    return models.value


def objective(graph, models, targets, penalty, norm):
    distances = edge_norms(graph.incidence @ models, norm).sum()
    return 0.5 * np.sum((models - targets) ** 2) + penalty * distances


@each_norm
def test_the_prox_shrinks_to_exactly_zero_within_the_dual_ball(norm):
    rows = np.array([[0.2, -0.1], [0.0, 0.0], [0.25, 0.25]])
    assert project_dual(rows, 0.5, norm).tolist() == rows.tolist()
    assert not project_dual(rows, 0.0, norm).any()


@each_norm
@pytest.mark.parametrize("penalty", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_z_step_is_what_a_convex_solver_finds(norm, penalty, seed):
    graph = random_graph(9, 14, seed)
    targets = np.random.default_rng(10 + seed).normal(size=(9, 3))
    actual = ZStep(graph, norm, **EXACT_STEP).solve(targets, penalty)
    assert actual.is_converged
    expected = generic(graph, targets, penalty, norm)
    assert np.abs(actual.models - expected).max() < 1e-6
    gap = objective(graph, actual.models, targets, penalty, norm)
    gap -= objective(graph, expected, targets, penalty, norm)
    assert gap < 1e-8


@each_norm
def test_edges_count_what_they_weigh(norm):
    graph = random_graph(9, 14, 2)
    targets = np.random.default_rng(12).normal(size=(9, 3))
    weights = row_weights(graph, np.array([1, 5, 20, 400, 0, 9, 9, 70, 3000]))
    actual = ZStep(graph, norm, weights, **EXACT_STEP).solve(targets, 0.2)
    expected = generic(graph, targets, 0.2, norm, weights)
    assert np.abs(actual.models - expected).max() < 1e-6
    assert weights.mean() == pytest.approx(1.0)
    # the weights matter, and equal ones do not
    ones = np.ones(len(graph.edges))
    plain, equal = (
        ZStep(graph, norm, each, **EXACT_STEP).solve(targets, 0.2).models
        for each in (None, ones)
    )
    assert np.abs(actual.models - plain).max() > 1e-2
    assert (equal == plain).all()
    # an edge weighs as the error of its two sites
    graph = SimilarityGraph.from_pairs("abc", np.array([[0, 1], [1, 2]]))
    errors = np.sqrt([1 + 1 / 4, 1 / 4 + 1 / 4])
    weights = row_weights(graph, np.array([1, 4, 4]))
    np.testing.assert_allclose(weights, errors / errors.mean())


@each_norm
def test_the_pull_proves_that_the_models_are_optimal(norm):
    """The gap between the problem and its dual, a bound of the error squared."""
    graph = random_graph(40, 120, 3)
    targets = np.random.default_rng(4).normal(size=(40, 6))
    penalty = 0.1
    actual = ZStep(graph, norm, tolerance=1e-8).solve(targets, penalty)
    back = graph.incidence.T @ actual.pull
    dual_norm = {"1": EdgeNorm.MAX, "2": EdgeNorm.TWO, "inf": EdgeNorm.ONE}[norm]
    assert edge_norms(actual.pull, dual_norm).max() <= penalty * (1 + 1e-12)
    dual = 0.5 * np.sum(targets**2) - 0.5 * np.sum((targets - back) ** 2)
    primal = objective(graph, actual.models, targets, penalty, norm)
    assert 0 <= primal - dual < 1e-6 * primal
    assert actual.models == pytest.approx(targets - back, abs=1e-6)


@each_norm
def test_a_large_penalty_on_a_connected_graph_makes_one_model(norm):
    graph = ring(7)
    targets = np.random.default_rng(6).normal(size=(7, 3))
    mean = targets.mean(axis=0)
    # a flow along the ring's edges that carries all differences to the mean
    flow = np.linalg.pinv(graph.incidence.T.toarray()) @ (targets - mean)
    enough = edge_norms(flow, EdgeNorm.ONE).max()
    actual = ZStep(graph, norm).solve(targets, enough)
    assert actual.fused.all()
    assert actual.models == pytest.approx(np.tile(mean, (7, 1)), abs=1e-14)
    assert (actual.models == actual.models[0]).all()


def test_sites_that_agree_stay_and_no_edge_changes_nothing():
    same = np.full((4, 2), 3.25)
    actual = ZStep(ring(4), EdgeNorm.TWO).solve(same, 1.0)
    assert (actual.models == same).all()
    assert actual.fused.all()
    alone = SimilarityGraph.from_pairs("ab", np.empty((0, 2), np.int64))
    targets = np.array([[1.0], [2.0]])
    assert ZStep(alone, EdgeNorm.ONE).solve(targets, 1.0).models is targets


def test_a_warm_start_takes_a_fraction_of_the_iterations():
    graph = random_graph(60, 150, 7)
    rng = np.random.default_rng(8)
    targets = rng.normal(size=(60, 4))
    step = ZStep(graph, EdgeNorm.TWO)
    first = step.solve(targets, 0.2)
    again = step.solve(targets, 0.2, first.pull)
    assert again.iterations <= first.iterations // 4
    moved = targets + 1e-4 * rng.normal(size=targets.shape)
    warm, cold = step.solve(moved, 0.2, first.pull), step.solve(moved, 0.2)
    assert warm.iterations < cold.iterations
    assert warm.models == pytest.approx(cold.models, abs=1e-4)


def test_factors_are_made_once(monkeypatch):
    made = []

    def counted(graph, kappa):
        made.append(kappa)
        return factorise(graph, kappa)

    monkeypatch.setattr(z_step, "factorise", counted)
    step = ZStep(ring(6), EdgeNorm.TWO)
    targets = np.random.default_rng(9).normal(size=(6, 2))
    for scale in (1.0, 2.0, 1e-3, 1e5):
        # another step size: targets that differ, and penalties, scale alike
        step.solve(scale * targets, 0.3 * scale)
    assert len(made) == 1


def test_sparse_factors_are_the_inverse(monkeypatch):
    graph = random_graph(50, 120, 11)
    right = np.random.default_rng(12).normal(size=(50, 3))
    dense = factorise(graph, 0.4)(right)
    monkeypatch.setattr(z_step, "DENSE_SITES", 10)
    assert factorise(graph, 0.4)(right) == pytest.approx(dense, abs=1e-12)


def test_too_few_iterations_are_told():
    graph = random_graph(30, 60, 13)
    targets = np.random.default_rng(14).normal(size=(30, 3))
    actual = ZStep(graph, EdgeNorm.TWO, most_iterations=2).solve(targets, 0.3)
    assert actual.iterations == 2
    assert not actual.is_converged
    assert max(actual.primal_residual, actual.dual_residual) > 1e-6
