"""The Z-step against a convex solver; graphs of similar sites and their summaries."""

from unittest.mock import Mock

import cvxpy as cp
import networkx as nx
import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose
from sklearn.metrics.pairwise import rbf_kernel

from tests.support.files import case_table
from tp_flower.errors import SettingsError
from tp_flower.methods.personalised import z_step
from tp_flower.methods.personalised.graph import (
    SimilarityGraph,
    nearest_neighbours,
    parse_edges,
)
from tp_flower.methods.personalised.sites import (
    EMBEDDING_BOUND,
    RandomFeatures,
    covariances,
    mean_moments,
    moments_bound,
    noisy_mean,
    pairwise_distances,
)
from tp_flower.methods.personalised.z_step import ZStep, inverse_of, project_onto_ball
from tp_flower.randomness import NoiseSource

CASES = case_table(__file__)
EXACT_STEP = {"tolerance": 1e-10, "most_iterations": 50_000}
EXACT = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}
CHAIN = SimilarityGraph.from_pairs("abcde", np.array([[0, 1], [1, 2], [3, 4]]))


def drawn(seed: int, *shape: int) -> np.ndarray:
    return default_rng(seed).normal(size=shape)


def random_graph(sites: int, edges: int, seed: int) -> SimilarityGraph:
    rng = default_rng(seed)
    names = [f"s{number}" for number in range(sites)]
    return SimilarityGraph.from_pairs(names, rng.integers(0, sites, (edges, 2)))


def ring(sites: int) -> SimilarityGraph:
    places = np.arange(sites)
    pairs = np.column_stack([places, np.roll(places, 1)])
    return SimilarityGraph.from_pairs([str(place) for place in places], pairs)


def generic(graph, targets, penalty):
    """Solve the problem as it is written, by an interior point method."""
    models = cp.Variable(targets.shape)
    distances = [cp.norm(models[i] - models[j]) for i, j in graph.edges]
    cost = 0.5 * cp.sum_squares(models - targets) + penalty * cp.sum(distances)
    cp.Problem(cp.Minimize(cost)).solve(solver="CLARABEL", **EXACT)
    return models.value


def objective(graph, models, targets, penalty):
    distances = np.linalg.norm(graph.incidence @ models, axis=1).sum()
    return 0.5 * np.sum((models - targets) ** 2) + penalty * distances


def test_the_prox_shrinks_to_exactly_zero_within_the_ball():
    rows = np.array([[0.2, -0.1], [0.0, 0.0], [0.25, 0.25]])
    assert project_onto_ball(rows, 0.5).tolist() == rows.tolist()
    assert not project_onto_ball(rows, 0.0).any()


@pytest.mark.parametrize("penalty", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_z_step_is_what_a_convex_solver_finds(penalty, seed):
    graph = random_graph(9, 14, seed)
    targets = drawn(10 + seed, 9, 3)
    actual = ZStep(graph, **EXACT_STEP).solve(targets, penalty)
    assert max(actual.primal_residual, actual.dual_residual) <= EXACT_STEP["tolerance"]
    expected = generic(graph, targets, penalty)
    assert np.abs(actual.models - expected).max() < 1e-6
    gap = objective(graph, actual.models, targets, penalty)
    gap -= objective(graph, expected, targets, penalty)
    assert gap < 1e-8


def test_the_pull_proves_that_the_models_are_optimal():
    """The gap between the problem and its dual, a bound of the error squared."""
    graph = random_graph(40, 120, 3)
    targets = drawn(4, 40, 6)
    penalty = 0.1
    actual = ZStep(graph, tolerance=1e-8).solve(targets, penalty)
    back = graph.incidence.T @ actual.pull
    assert np.linalg.norm(actual.pull, axis=1).max() <= penalty * (1 + 1e-12)
    dual = 0.5 * np.sum(targets**2) - 0.5 * np.sum((targets - back) ** 2)
    primal = objective(graph, actual.models, targets, penalty)
    # weak duality, but for the rounding of two sums
    assert -1e-14 * primal <= primal - dual < 1e-6 * primal
    assert actual.models == pytest.approx(targets - back, abs=1e-6)


def test_a_large_penalty_on_a_connected_graph_makes_one_model():
    graph = ring(7)
    targets = drawn(6, 7, 3)
    mean = targets.mean(axis=0)
    # a flow along the ring's edges that carries all differences to the mean
    flow = np.linalg.pinv(graph.incidence.T.toarray()) @ (targets - mean)
    actual = ZStep(graph).solve(targets, np.linalg.norm(flow, axis=1).max())
    assert actual.models == pytest.approx(np.tile(mean, (7, 1)), abs=1e-14)
    assert (actual.models == actual.models[0]).all()


def test_sites_that_agree_stay_and_no_edge_changes_nothing():
    same = np.full((4, 2), 3.25)
    assert (ZStep(ring(4)).solve(same, 1.0).models == same).all()
    alone = SimilarityGraph.from_pairs("ab", np.empty((0, 2), np.int64))
    targets = np.array([[1.0], [2.0]])
    assert ZStep(alone).solve(targets, 1.0).models is targets


def test_a_warm_start_takes_a_fraction_of_the_iterations():
    graph = random_graph(60, 150, 7)
    rng = default_rng(8)
    targets = rng.normal(size=(60, 4))
    step = ZStep(graph)
    first = step.solve(targets, 0.2)
    assert step.solve(targets, 0.2, first.pull).iterations <= first.iterations // 4
    moved = targets + 1e-4 * rng.normal(size=targets.shape)
    warm = step.solve(moved, 0.2, first.pull)
    cold = step.solve(moved, 0.2)
    assert warm.iterations < cold.iterations
    assert warm.models == pytest.approx(cold.models, abs=1e-4)


def test_inverses_are_made_once(monkeypatch):
    spy = Mock(wraps=inverse_of)
    monkeypatch.setattr(z_step, "inverse_of", spy)
    step = ZStep(ring(6))
    targets = drawn(9, 6, 2)
    for scale in (1.0, 2.0, 1e-3, 1e5):
        # another step size: targets that differ, and penalties, scale alike
        step.solve(scale * targets, 0.3 * scale)
    assert spy.call_count == 1


def test_too_few_iterations_are_told():
    graph = random_graph(30, 60, 13)
    targets = drawn(14, 30, 3)
    actual = ZStep(graph, most_iterations=2).solve(targets, 0.3)
    assert actual.iterations == 2
    assert max(actual.primal_residual, actual.dual_residual) > 1e-6


def test_incidence_takes_differences_along_the_edges():
    models = np.arange(10.0).reshape(5, 2) ** 2
    expected = [models[i] - models[j] for i, j in CHAIN.edges]
    assert (CHAIN.incidence @ models).tolist() == np.array(expected).tolist()


def test_edges_are_kept_once_and_none_leads_to_itself():
    pairs = np.array([[2, 1], [1, 2], [0, 0], [3, 1]])
    assert SimilarityGraph.from_pairs("abcd", pairs).edges.tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize("seed", range(3))
def test_components_are_those_of_networkx(seed):
    rng = default_rng(seed)
    graph = SimilarityGraph.from_pairs(range(30), rng.integers(0, 30, (20, 2)))
    other = nx.Graph(graph.edges.tolist())
    other.add_nodes_from(range(30))
    expected = sorted(nx.connected_components(other), key=min)
    labels = graph.components
    actual = [set(np.flatnonzero(labels == label)) for label in range(labels.max() + 1)]
    assert actual == expected


def test_groups_follow_the_chosen_edges_only():
    assert CHAIN.groups(np.array([False, True, True])).tolist() == [0, 1, 1, 2, 2]
    assert CHAIN.components.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("neighbours", [1, 2, 3, 9])
def test_an_edge_is_where_either_site_is_among_the_others_nearest(neighbours):
    points = drawn(0, 7, 2)
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    expected = set()
    for site, others in enumerate(distances.argsort(axis=1).tolist()):
        others.remove(site)
        expected |= {tuple(sorted((site, other))) for other in others[:neighbours]}
    graph = nearest_neighbours("abcdefg", distances, neighbours)
    assert {tuple(edge) for edge in graph.edges.tolist()} == expected


def test_equal_distances_are_broken_by_the_order_of_the_sites():
    graph = nearest_neighbours("abcd", np.zeros((4, 4)), 1)
    assert graph.edges.tolist() == [[0, 1], [0, 2], [0, 3]]
    # one site has no neighbour
    assert nearest_neighbours("a", np.zeros((1, 1)), 5).edges.shape == (0, 2)
    assert SimilarityGraph.from_pairs("a", np.empty((0, 2))).components.tolist() == [0]


def test_edges_as_people_write_them():
    text = "# who is near\nny-north - ny-south, a-ny-north;\n\n b - a "
    graph = parse_edges(text, ["a", "b", "ny-north", "ny-south"])
    assert graph.edges.tolist() == [[0, 1], [0, 2], [2, 3]]


@CASES.each("edges", "text", "message")
def test_edges_that_cannot_be_read(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_edges(text, ["a", "b", "d", "a-b", "b-d"])


def kernel(left, right, bandwidth):
    return rbf_kernel(left, right, 1 / (2 * bandwidth**2))


def test_embeddings_have_the_gaussian_kernel_and_norm_one():
    rng = default_rng(0)
    rows = rng.normal(size=(30, 4))
    embedded = RandomFeatures(rng.standard_normal((20_000, 4)) / 1.5).embed(rows)
    assert np.linalg.norm(embedded, axis=1) == pytest.approx(EMBEDDING_BOUND)
    # a mean of 20,000 cosines, each of deviation below 1
    assert embedded @ embedded.T == pytest.approx(kernel(rows, rows, 1.5), abs=0.03)


def test_distances_of_embeddings_are_the_kernel_two_sample_statistic():
    rng = default_rng(1)
    sites = [rng.normal(size=(200, 3)), rng.normal(0.7, 1.0, size=(150, 3))]
    features = RandomFeatures.draw(3, 10_000, rng)
    means = np.array([features.mean(rows) for rows in sites])
    first, other = sites
    width = np.sqrt(3.0)
    signed = ((first, first, 1), (other, other, 1), (first, other, -2))
    squared = sum(sign * kernel(a, b, width).mean() for a, b, sign in signed)
    assert pairwise_distances(means)[0, 1] == pytest.approx(np.sqrt(squared), rel=0.05)


def test_a_mean_over_blocks_is_the_mean(monkeypatch):
    rng = default_rng(2)
    rows = rng.normal(size=(10, 3)).astype(np.float32)
    features = RandomFeatures.draw(3, 7, rng)
    whole = features.mean(rows), mean_moments(rows)
    monkeypatch.setattr("tp_flower.methods.personalised.sites.BLOCK_ROWS", 3)
    assert features.mean(rows) == pytest.approx(whole[0], rel=1e-14)
    assert whole[0] == pytest.approx(features.embed(rows).mean(axis=0), rel=1e-14)
    assert mean_moments(rows) == pytest.approx(whole[1], rel=1e-14)


def test_distances_of_moments_are_those_of_covariance_matrices():
    rng = default_rng(3)
    sites = [rng.normal(size=(40, 4)) @ rng.normal(size=(4, 4)) for _ in range(3)]
    answers = np.array([mean_moments(rows) for rows in sites])
    matrices = np.array([np.cov(rows.T, bias=True) for rows in sites])
    expected = np.linalg.norm(matrices[:, None] - matrices, axis=(2, 3))
    assert_allclose(pairwise_distances(covariances(answers)), expected, atol=1e-9)


@pytest.mark.parametrize("clip", [0.5, 3.0])
def test_no_row_moves_the_mean_by_more_than_its_bound(clip):
    rng = default_rng(4)
    rows = rng.normal(size=(20, 3)) * rng.uniform(0, 50, (20, 1))
    rows[0] = 0.0
    whole = mean_moments(rows, clip)
    shares = [mean_moments(rows[[place]], clip) / 20 for place in range(20)]
    assert sum(shares) == pytest.approx(whole)
    lengths = np.linalg.norm(shares, axis=1)
    assert lengths.max() <= moments_bound(clip) / 20 * (1 + 1e-12)
    assert lengths.max() == pytest.approx(moments_bound(clip) / 20)


def test_sites_of_one_kind_are_neighbours_even_with_noise():
    rng = default_rng(5)
    noise = NoiseSource(bytes(32))
    features = RandomFeatures.draw(4, 50, rng)
    kind = np.repeat([0, 1, 2], 5)
    answers = []
    for site in range(15):
        mean = features.mean(rng.normal(1.5 * kind[site], 1.0, size=(400, 4)))
        answers.append(noisy_mean(mean, EMBEDDING_BOUND, 400, 4.0, noise))
    graph = nearest_neighbours(range(15), pairwise_distances(np.array(answers)), 3)
    assert (kind[graph.edges[:, 0]] == kind[graph.edges[:, 1]]).all()


def test_noise_has_the_deviation_of_the_mechanism():
    mean = np.full(200_000, 0.25)
    noisy = noisy_mean(mean, 2.0, 50, 1.5, NoiseSource(bytes(range(32))))
    assert (noisy - mean).std() == pytest.approx(1.5 * 2.0 / 50, rel=0.01)
    assert noisy_mean(mean, 2.0, 50, 0.0, NoiseSource()) is mean
    # a site without rows tells zeros, with noise as if there were one row
    noisy = noisy_mean(np.zeros(200_000), 1.0, 0, 2.0, NoiseSource(bytes(32)))
    assert noisy.std() == pytest.approx(2.0, rel=0.02)
    features = RandomFeatures.draw(2, 3, default_rng(6))
    assert not features.mean(np.empty((0, 2))).any()
    assert not mean_moments(np.empty((0, 2))).any()
