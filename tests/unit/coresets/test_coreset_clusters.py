"""k-means scores over joins, and the clusterings that solvers take."""

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from tests.support.examples.coresets import kmeans_cost
from tp_flower.coresets.importance import (
    ALPHA,
    ShardClusters,
    cluster_shard,
    kmeans_scores,
    kmeans_total,
)
from tp_flower.coresets.solvers import distdim, nearest, weighted_kmeans

ROWS = 80


def generator(seed=0):
    return np.random.default_rng(seed)


def rows_and_masses(seed=0):
    rng = generator(seed)
    return rng.normal(size=(ROWS, 3)).astype(np.float32), rng.integers(0, 4, ROWS)


def algorithm_3(points, labels, centres):
    """The paper's scores of joined rows, line 12, one by one."""
    squares = np.array(
        [((x - centres[k]) ** 2).sum() for x, k in zip(points, labels, strict=True)]
    )
    cost, scores = squares.sum(), []
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
    clusters = cluster_shard(rows, copies, 5, generator())
    joined = np.repeat(np.arange(ROWS), copies)
    slow = algorithm_3(
        rows[joined].astype(float), clusters.labels[joined], clusters.centres
    )
    scores = kmeans_scores(clusters, clusters.cost)
    np.testing.assert_allclose(scores[joined], slow, rtol=1e-6)
    assert not scores[copies == 0].any()
    total = kmeans_total(clusters.cost, clusters.cost, clusters.used)
    assert total == pytest.approx(2 * ALPHA * (1 + clusters.used))
    assert scores @ copies == pytest.approx(total)


def test_whole_masses_cluster_as_repeated_rows():
    rows, copies = rows_and_masses()
    joined = rows[np.repeat(np.arange(ROWS), copies)]
    ones = np.ones(len(joined))
    weighted = kmeans_cost(rows, weighted_kmeans(rows, copies, 4, generator()), copies)
    repeated = kmeans_cost(joined, weighted_kmeans(joined, ones, 4, generator()))
    assert weighted == pytest.approx(repeated, rel=0.02)


def test_shards_are_scored_as_one_table_with_all_their_centres():
    rows, copies = rows_and_masses()
    parts = (slice(30), slice(30, None))
    shards = [cluster_shard(rows[p], copies[p], 3, generator()) for p in parts]
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
        np.testing.assert_allclose(actual, whole[part], rtol=1e-12)
        total = kmeans_total(shard.cost, cost, shard.used)
        assert actual @ copies[part] == pytest.approx(total)


def test_more_clusters_than_distinct_rows_that_count():
    points = np.array([[0.1, 0.7], [0.1, 0.7], [0.3, 0.2]], np.float32)
    clusters = cluster_shard(points, np.array([1, 2, 3]), 10, generator())
    assert (clusters.used, clusters.cost) == (2, 0.0)
    # each of the three joined rows of a cluster scores 2 alpha / 3
    scores = kmeans_scores(clusters, clusters.cost).tolist()
    assert scores == pytest.approx([2 * ALPHA / 3] * 3)
    assert len(weighted_kmeans(points, np.ones(3), 2, generator())) == 2
    # a row that counts nothing has no cluster of its own
    points = np.array([[0.0], [1.0], [1000.0]])
    clusters = cluster_shard(points, np.array([1.0, 2.0, 0.0]), 3, generator())
    assert clusters.centres.ravel().tolist() == [0.0, 1.0]
    assert clusters.cost == 0.0
    assert kmeans_scores(clusters, clusters.cost)[2] == 0.0
    # and a shard without others none at all
    clusters = cluster_shard(np.ones((2, 3)), np.zeros(2), 4, generator())
    assert (clusters.used, clusters.cost) == (0, 0.0)
    assert kmeans_scores(clusters, 5.0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="nothing to cluster"):
        weighted_kmeans(np.ones((2, 1)), np.zeros(2), 1, generator())


def test_nearest_is_brute_force_and_exact_near_a_centre():
    rng = generator(3)
    points, centres = rng.normal(size=(500, 4)), rng.normal(size=(7, 4))
    labels, distances = nearest(points, centres)
    slow = cdist(points, centres, "sqeuclidean")
    np.testing.assert_array_equal(labels, slow.argmin(axis=1))
    np.testing.assert_allclose(distances, slow.min(axis=1), rtol=1e-12)
    far = np.full((1, 3), 1e6)
    assert nearest(far + 1e-4, far)[1] == pytest.approx(3e-8, rel=1e-5)


def test_clustering_is_a_stationary_point_and_finds_separated_groups():
    rng = generator(1)
    middle = np.array([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = np.repeat(middle, 40, axis=0) + rng.normal(size=(120, 2))
    weights = rng.uniform(0.5, 2.0, 120)
    centres = weighted_kmeans(points, weights, 3, rng)
    labels, _ = nearest(points, centres)
    for place in range(3):
        members = labels == place
        mean = weights[members] @ points[members] / weights[members].sum()
        np.testing.assert_allclose(centres[place], mean, atol=1e-6)
    order = np.lexsort(np.round(centres / 9).T)
    np.testing.assert_allclose(centres[order], middle, atol=0.6)


def test_distdim_clusters_the_combinations_of_local_centres():
    rng = generator(2)
    local = [np.array([[0.0], [10.0]]), np.array([[0.0, 0.0], [0.0, 20.0]])]
    labels = rng.integers(0, 2, size=(200, 2))
    weights = rng.uniform(0.1, 1.0, 200)
    # as many clusters as combinations: the grid itself
    actual = np.sort(distdim(labels, local, weights, 4, rng), axis=0)
    grid = [[0, 0, 0], [0, 0, 20], [10, 0, 0], [10, 0, 20]]
    np.testing.assert_allclose(actual, np.sort(grid, axis=0), atol=1e-9)
    # fewer: the clustering of every point's combination
    points = np.column_stack([local[i][labels[:, i]] for i in (0, 1)])
    actual, whole = (
        kmeans_cost(points, centres, weights)
        for centres in (
            distdim(labels, local, weights, 2, rng),
            weighted_kmeans(points, weights, 2, rng),
        )
    )
    assert actual == pytest.approx(whole)
    # one party and its own clusters: local k-means
    rows, copies = rows_and_masses()
    one = cluster_shard(rows, copies, 5, generator())
    actual = distdim(one.labels[:, None], [one.centres], copies, 5, generator())
    np.testing.assert_allclose(actual, one.centres, rtol=1e-6)


def test_a_clustering_begins_where_the_generator_says():
    points, ones = generator().normal(size=(200, 3)), np.ones(200)
    costs = [
        kmeans_cost(points, weighted_kmeans(points, ones, 8, generator(seed), starts=1))
        for seed in (0, 1, 2, 0)
    ]
    assert costs[3] == costs[0]
    assert len(set(costs)) > 1
