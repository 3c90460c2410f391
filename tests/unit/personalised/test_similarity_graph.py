"""Graphs of similar sites: nearest neighbours, what users write, groups, newcomers."""

import networkx as nx
import numpy as np
import pytest

from tp_flower.errors import SettingsError
from tp_flower.personalised.graph import (
    SimilarityGraph,
    nearest_neighbours,
    parse_edges,
)

CHAIN = SimilarityGraph.from_pairs("abcde", np.array([[0, 1], [1, 2], [3, 4]]))


def test_incidence_takes_differences_along_the_edges():
    models = np.arange(10.0).reshape(5, 2) ** 2
    expected = [models[i] - models[j] for i, j in CHAIN.edges]
    assert (CHAIN.incidence @ models).tolist() == np.array(expected).tolist()


def test_edges_are_kept_once_and_none_leads_to_itself():
    pairs = np.array([[2, 1], [1, 2], [0, 0], [3, 1]])
    graph = SimilarityGraph.from_pairs("abcd", pairs)
    assert graph.edges.tolist() == [[1, 2], [1, 3]]
    assert graph.degrees.tolist() == [0, 2, 1, 1]
    assert graph.neighbours(1).tolist() == [2, 3]
    assert graph.neighbours(0).tolist() == []


@pytest.mark.parametrize("seed", range(3))
def test_components_are_those_of_networkx(seed):
    rng = np.random.default_rng(seed)
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
    points = np.random.default_rng(0).normal(size=(7, 2))
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a-c", "graph: 'a-c' names no two sites; .* of the sites a, a-b, b, b-d, d"),
        ("a-a", "'a-a' names no two sites"),
        ("a", "'a' names no two sites"),
        ("a-b, a-b-d", "'a-b-d' can be read in more than one way"),
    ],
)
def test_edges_that_cannot_be_read(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_edges(text, ["a", "b", "d", "a-b", "b-d"])


def test_a_newcomer_begins_with_its_known_neighbours_mean():
    models = np.array([[1.0], [np.nan], [5.0], [np.nan], [np.nan]])
    exact = np.array([True, False, True, False, False])
    assert CHAIN.neighbours_mean(models, 1, exact).tolist() == [3.0]
    # no known neighbour: all known sites
    assert CHAIN.neighbours_mean(models, 3, exact).tolist() == [3.0]
    assert CHAIN.neighbours_mean(models, 3, np.zeros(5, bool)).tolist() == [0.0]
    only_first = np.array([True, False, False, False, False])
    assert CHAIN.neighbours_mean(models, 1, only_first).tolist() == [1.0]
