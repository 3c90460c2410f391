"""The similarity graph: an undirected graph with a node per site.

Notation: N sites, M edges; the draft's Q is the transpose of
`SimilarityGraph.incidence` (M, N), whose row of an edge (i, j), i < j, is 1 at i and
-1 at j.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import SettingsError


@dataclass(frozen=True)
class SimilarityGraph:
    """An undirected graph of the sites; it may be disconnected.

    ``edges`` are (M, 2), each with the lower position first, sorted and distinct.
    """

    names: tuple[str, ...]
    edges: IntArray

    @classmethod
    def from_pairs(
        cls, names: Sequence[str], pairs: npt.NDArray[np.int64]
    ) -> "SimilarityGraph":
        """Make the graph of (M, 2) pairs of positions, in any order, possibly repeated.

        >>> SimilarityGraph.from_pairs("abc", np.array([[2, 0], [0, 2]])).edges
        array([[0, 2]])
        """
        distinct = np.unique(
            np.sort(np.asarray(pairs, np.int64).reshape(-1, 2), axis=1), axis=0
        )
        return cls(tuple(names), distinct[distinct[:, 0] != distinct[:, 1]])

    def __len__(self) -> int:
        """Return the number of sites."""
        return len(self.names)

    @cached_property
    def incidence(self) -> Any:
        """Q^T of the draft, a sparse (M, N); times Z (N, d) it is the differences."""
        from scipy.sparse import csr_array

        edges = len(self.edges)
        signs = np.tile([1.0, -1.0], edges)
        starts = np.arange(0, 2 * edges + 1, 2)
        return csr_array((signs, self.edges.ravel(), starts), (edges, len(self)))

    @cached_property
    def components(self) -> IntArray:
        """The connected group of every site, (N,), numbered by their first sites."""
        return self.groups(np.ones(len(self.edges), np.bool_))

    def groups(self, joined: npt.NDArray[np.bool_]) -> IntArray:
        """Return the groups that some of the edges (M,) connect, as `components`."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        left, right = self.edges[joined].T
        links = csr_array((np.ones(len(left)), (left, right)), (len(self), len(self)))
        groups: IntArray = connected_components(links, directed=False)[1]
        return groups


def nearest_neighbours(
    names: Sequence[str], distances: FloatArray, neighbours: int
) -> SimilarityGraph:
    """Return the graph of each site's k nearest; an edge needs only one direction.

    The diagonal of the distances, (N, N) and symmetric, is not read; ties are broken by
    the order of the sites.
    """
    sites = len(names)
    others = np.array(distances, np.float64)
    np.fill_diagonal(others, np.inf)
    nearest = np.argsort(others, axis=1, kind="stable")[:, : min(neighbours, sites - 1)]
    pairs = np.column_stack(
        [np.repeat(np.arange(sites), nearest.shape[1]), nearest.ravel()]
    )
    return SimilarityGraph.from_pairs(names, pairs)


def parse_edges(text: str, names: Sequence[str]) -> SimilarityGraph:
    """Return the graph that a user wrote: "a-b, b-c", or one edge per line.

    A name may itself contain a hyphen if only one reading names two sites. Lines that
    begin with # are ignored.

    >>> parse_edges("b-a, x-y-a", ["a", "b", "x-y"]).edges.tolist()
    [[0, 1], [0, 2]]
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    edge_texts = re.split(r"[,;\n]", "\n".join(lines))
    positions = {name: position for position, name in enumerate(names)}
    pairs = [_edge(part.strip(), positions) for part in edge_texts if part.strip()]
    return SimilarityGraph.from_pairs(names, np.array(pairs, np.int64))


def _edge(written: str, positions: dict[str, int]) -> tuple[int, int]:
    """Return the two sites that an edge names, in the only way to read it."""
    edges = []
    for hyphen in re.finditer("-", written):
        left = written[: hyphen.start()].strip()
        right = written[hyphen.end() :].strip()
        if left in positions and right in positions and left != right:
            edges.append((positions[left], positions[right]))
    if len(edges) == 1:
        return edges[0]
    problem = "names no two sites"
    if edges:
        problem = "can be read in more than one way"
    raise SettingsError(
        f'graph: {written!r} {problem}; write "a-b" with two of the sites '
        f"{', '.join(sorted(positions))}"
    )
