"""Solvers on a sample, clusterings and their scores, and the paper's assumptions."""

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from tests.support.examples.coresets import kmeans_cost
from tp_flower.methods.coreset.importance import (
    ALPHA,
    ShardClusters,
    cluster_shard,
    gamma,
    kmeans_scores,
    kmeans_total,
)
from tp_flower.methods.coreset.solvers import distdim, nearest, solve, weighted_kmeans

ROWS = 80


def problem(rows=200):
    rng = default_rng(6)
    design = rng.normal(size=(rows, 4)) * [1.0, 2.0, 0.5, 1.0]
    targets = design @ [1.0, -2.0, 0.0, 3.0] + 5.0 + rng.normal(size=rows)
    return design, targets, rng.gamma(1.0, size=rows) * 40


def objective(theta, design, targets, weights, l2, l1=0.0):
    residuals = design @ theta[:-1] + theta[-1] - targets
    slopes = theta[:-1]
    fit = 0.5 * weights @ residuals**2 / weights.sum()
    return fit + 0.5 * l2 * slopes @ slopes + l1 * np.abs(slopes).sum()


@pytest.mark.parametrize("l2", [0.0, 1e-3, 0.5])
def test_ridge_is_the_weighted_normal_equations(l2):
    design, targets, weights = problem()
    full = np.column_stack([design, np.ones(len(design))])
    shares = weights / weights.sum()
    penalty = l2 * np.diag([1.0] * 4 + [0.0])
    exact = np.linalg.solve(
        full.T * shares @ full + penalty, full.T @ (shares * targets)
    )
    assert_allclose(solve(design, targets, weights, l2=l2), exact, rtol=1e-8)
    saga = solve(design, targets, weights, l2=l2, solver="saga")
    assert_allclose(saga, exact, atol=2e-3)


def test_the_unit_of_the_weights_and_whole_weights():
    design, targets, _ = problem()
    copies = np.arange(len(design)) % 3
    again = np.repeat(np.arange(len(design)), copies)
    actual = solve(design, targets, 70.0 * copies, l2=0.1)
    repeated = solve(design[again], targets[again], np.ones(len(again)), l2=0.1)
    assert_allclose(actual, repeated, rtol=1e-9)


@pytest.mark.parametrize("l2", [0.0, 0.3], ids=["lasso", "elastic net"])
def test_l1_reaches_the_minimum_of_the_house_objective(l2):
    design, targets, weights = problem()
    l1 = 0.4
    actual = solve(design, targets, weights, l2=l2, l1=l1)
    assert actual[2] == 0.0  # its coefficient is 0 in truth
    # theta = positive - negative part: smooth under bounds

    def split(z):
        theta = np.append(z[:4] - z[4:8], z[8])
        return objective(theta, design, targets, weights, l2) + l1 * z[:8].sum()

    exact = minimize(
        split, np.ones(9), bounds=[(0, None)] * 8 + [(None, None)], tol=1e-12
    ).fun
    assert objective(actual, design, targets, weights, l2, l1) == pytest.approx(
        exact, rel=1e-5
    )


def test_units_and_copies_of_columns_do_not_matter_without_a_penalty():
    design, targets, weights = problem()
    units = np.array([1e-8, 1.0, 1e8, 1e4])
    plain = solve(design, targets, weights, l2=0.0)
    actual = solve(design * units, targets, weights, l2=0.0)
    assert_allclose(actual[:4] * units, plain[:4], rtol=1e-8)
    constant = np.column_stack([design, np.full(len(design), 3.0)])
    actual = solve(constant, targets, weights, l2=0.0)
    assert_allclose(actual[[0, 1, 2, 3, 5]], plain, rtol=1e-8)
    # copies: the solution of least norm
    twice = solve(np.column_stack([design, design]), targets, weights, l2=0.0)
    assert_allclose(twice[:8], np.tile(plain[:4], 2) / 2, rtol=1e-8)


def test_saga_converges_where_some_rows_outweigh_the_others():
    design, targets, _ = problem(60)
    weights = np.where(np.arange(60) % 12 == 0, 20.0, 0.2)
    actual = solve(design, targets, weights, l2=0.01, solver="saga")
    assert_allclose(actual, solve(design, targets, weights, l2=0.01), atol=1e-3)
    with pytest.raises(ValueError, match="l1 must be 0"):
        solve(*problem(), l2=0.1, l1=0.1, solver="saga")


def test_gamma_is_the_least_singular_value_of_the_bases():
    rng = default_rng(0)
    shared = rng.normal(size=(300, 1))
    tables = [
        np.column_stack([rng.normal(size=(300, 2)), shared]),
        shared + 0.3 * rng.normal(size=(300, 2)),
    ]
    weights = rng.gamma(1.0, size=300)
    bases = [np.linalg.qr(np.sqrt(weights)[:, None] * table)[0] for table in tables]
    exact = np.linalg.svd(np.hstack(bases), compute_uv=False)[-1]
    assert 0.05 < exact < 0.5
    assert gamma(tables, weights) == pytest.approx(exact, rel=1e-9)
    # of the space, whatever its columns
    mixed = [tables[0] @ rng.normal(size=(3, 3)), np.hstack([tables[1], tables[1]])]
    assert gamma(mixed, weights) == pytest.approx(exact, rel=1e-6)
    assert gamma([*tables, tables[0][:, :1]], weights) == 0.0


def rows_and_masses():
    rng = default_rng(0)
    return rng.normal(size=(ROWS, 3)).astype(np.float32), rng.integers(0, 4, ROWS)


def algorithm_3(points, labels, centres):
    """The paper's scores of joined rows, line 12, one by one."""
    squares = ((points - centres[labels]) ** 2).sum(axis=1)
    cost = squares.sum()
    scores = []
    for square, label in zip(squares, labels, strict=True):
        members = squares[labels == label]
        scores.append(
            ALPHA * square / cost
            + ALPHA * members.sum() / (len(members) * cost)
            + 2 * ALPHA / len(members)
        )
    return np.array(scores)


def test_scores_over_a_join_are_those_of_the_materialised_join():
    rows, copies = rows_and_masses()
    clusters = cluster_shard(rows, copies, 5, default_rng(0))
    joined = np.repeat(np.arange(ROWS), copies)
    slow = algorithm_3(
        rows[joined].astype(float), clusters.labels[joined], clusters.centres
    )
    scores = kmeans_scores(clusters, clusters.cost)
    assert_allclose(scores[joined], slow, rtol=1e-6)
    assert not scores[copies == 0].any()
    total = kmeans_total(clusters.cost, clusters.cost, clusters.used)
    assert total == pytest.approx(2 * ALPHA * (1 + clusters.used))
    assert scores @ copies == pytest.approx(total)


def test_whole_masses_cluster_as_repeated_rows():
    rows, copies = rows_and_masses()
    joined = rows[np.repeat(np.arange(ROWS), copies)]
    ones = np.ones(len(joined))
    weighted = kmeans_cost(
        rows, weighted_kmeans(rows, copies, 4, default_rng(0)), copies
    )
    repeated = kmeans_cost(joined, weighted_kmeans(joined, ones, 4, default_rng(0)))
    assert weighted == pytest.approx(repeated, rel=0.02)


def test_shards_are_scored_as_one_table_with_all_their_centres():
    rows, copies = rows_and_masses()
    parts = (slice(30), slice(30, None))
    shards = [cluster_shard(rows[p], copies[p], 3, default_rng(0)) for p in parts]
    cost = shards[0].cost + shards[1].cost
    table = ShardClusters(
        labels=np.concatenate([shards[0].labels, shards[1].labels + shards[0].used]),
        distances=np.concatenate([shard.distances for shard in shards]),
        multiplicity=copies.astype(float),
        centres=np.concatenate([shard.centres for shard in shards]),
    )
    whole = kmeans_scores(table, table.cost)
    for shard, part in zip(shards, parts, strict=True):
        actual = kmeans_scores(shard, cost)
        assert_allclose(actual, whole[part], rtol=1e-12)
        assert actual @ copies[part] == pytest.approx(
            kmeans_total(shard.cost, cost, shard.used)
        )


def test_more_clusters_than_distinct_rows_that_count():
    points = np.array([[0.1, 0.7], [0.1, 0.7], [0.3, 0.2]], np.float32)
    clusters = cluster_shard(points, np.array([1, 2, 3]), 10, default_rng(0))
    assert clusters.used == 2
    assert clusters.cost == 0.0
    # each of the three joined rows of a cluster scores 2 alpha / 3
    assert kmeans_scores(clusters, clusters.cost).tolist() == pytest.approx(
        [2 * ALPHA / 3] * 3
    )
    assert len(weighted_kmeans(points, np.ones(3), 2, default_rng(0))) == 2
    # a row that counts nothing has no cluster of its own
    points = np.array([[0.0], [1.0], [1000.0]])
    clusters = cluster_shard(points, np.array([1.0, 2.0, 0.0]), 3, default_rng(0))
    assert clusters.centres.ravel().tolist() == [0.0, 1.0]
    assert clusters.cost == 0.0
    assert kmeans_scores(clusters, clusters.cost)[2] == 0.0
    # and a shard without others none at all
    clusters = cluster_shard(np.ones((2, 3)), np.zeros(2), 4, default_rng(0))
    assert clusters.used == 0
    assert clusters.cost == 0.0
    assert kmeans_scores(clusters, 5.0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="nothing to cluster"):
        weighted_kmeans(np.ones((2, 1)), np.zeros(2), 1, default_rng(0))


def test_nearest_is_brute_force_and_exact_near_a_centre():
    rng = default_rng(3)
    points = rng.normal(size=(500, 4))
    centres = rng.normal(size=(7, 4))
    labels, distances = nearest(points, centres)
    slow = cdist(points, centres, "sqeuclidean")
    assert_array_equal(labels, slow.argmin(axis=1))
    assert_allclose(distances, slow.min(axis=1), rtol=1e-12)
    far = np.full((1, 3), 1e6)
    assert nearest(far + 1e-4, far)[1] == pytest.approx(3e-8, rel=1e-5)


def test_clustering_is_a_stationary_point_and_finds_separated_groups():
    rng = default_rng(1)
    middle = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = np.repeat(middle, 40, axis=0) + rng.normal(size=(120, 2))
    weights = rng.uniform(0.5, 2.0, 120)
    centres = weighted_kmeans(points, weights, 3, rng)
    labels, _ = nearest(points, centres)
    for place in range(3):
        members = labels == place
        mean = weights[members] @ points[members] / weights[members].sum()
        assert_allclose(centres[place], mean, atol=1e-6)
    assert_allclose(centres[np.lexsort(np.round(centres / 9).T)], middle, atol=0.6)


def test_distdim_clusters_the_combinations_of_local_centres():
    rng = default_rng(2)
    local = [np.array([[0.0], [10.0]]), np.array([[0.0, 0.0], [0.0, 20.0]])]
    labels = rng.integers(0, 2, size=(200, 2))
    weights = rng.uniform(0.1, 1.0, 200)
    # as many clusters as combinations: the grid itself
    actual = np.sort(distdim(labels, local, weights, 4, rng), axis=0)
    grid = [[0, 0, 0], [0, 0, 20], [10, 0, 0], [10, 0, 20]]
    assert_allclose(actual, np.sort(grid, axis=0), atol=1e-9)
    # fewer: the clustering of every point's combination
    points = np.column_stack([local[i][labels[:, i]] for i in (0, 1)])
    actual = kmeans_cost(points, distdim(labels, local, weights, 2, rng), weights)
    whole = kmeans_cost(points, weighted_kmeans(points, weights, 2, rng), weights)
    assert actual == pytest.approx(whole)
    # one party and its own clusters: local k-means
    rows, copies = rows_and_masses()
    one = cluster_shard(rows, copies, 5, default_rng(0))
    actual = distdim(one.labels[:, None], [one.centres], copies, 5, default_rng(0))
    assert_allclose(actual, one.centres, rtol=1e-6)


def test_a_clustering_begins_where_the_generator_says():
    points = default_rng(0).normal(size=(200, 3))
    ones = np.ones(200)
    costs = [
        kmeans_cost(
            points, weighted_kmeans(points, ones, 8, default_rng(seed), starts=1)
        )
        for seed in (0, 1, 2, 0)
    ]
    assert costs[3] == costs[0]
    assert len(set(costs)) > 1
