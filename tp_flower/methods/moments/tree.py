"""The tree of a query's joins: which tables lie behind an edge, and paths between two.

Sums over joined rows factorise along the joins if these make a tree: the rows behind
one edge of a table and those behind another depend on each other through the table's
row alone. In a cycle they do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, pairwise
from typing import NamedTuple

from tp_flower.errors import QueryError

Source = tuple[int, str]  # an edge, and a table whose sums by its keys are meant
Pair = tuple[str, str]  # two tables in the order of the tree


class Edge(NamedTuple):
    """A join equality: two tables, and the position of the key of each."""

    left: str
    right: str
    left_key: int
    right_key: int

    def other(self, table: str) -> str:
        """Return the table at the other end."""
        return self.right if table == self.left else self.left

    def key(self, table: str) -> int:
        """Return the position of a table's key of the join."""
        return self.left_key if table == self.left else self.right_key


@dataclass(frozen=True)
class JoinTree:
    """The tables of a query and its joins, which connect all of them without a cycle.

    Attributes:
        edges: numbered as the query's joins.
        outer: the LEFT JOINed tables.
        chosen: the pairs of tables whose products are wanted; all where there are none.

    Raises:
        QueryError: the joins make a cycle.

    >>> chain = [Edge("a", "b", 0, 0), Edge("b", "c", 1, 0)]
    >>> tree = JoinTree(("a", "b", "c"), chain)
    >>> tree.path("a", "c"), tree.behind(0, "a"), tree.edges_of("b")
    ([0, 1], ['b', 'c'], [0, 1])
    """

    tables: tuple[str, ...]
    edges: Sequence[Edge]
    outer: frozenset[str] = frozenset()
    chosen: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        if len(self.edges) >= len(self.tables):
            raise QueryError(
                f"the joins of {', '.join(self._cycle())} make a cycle: each is joined "
                "to two of the others. Sums over joined rows do not factorise there: "
                "remove a predicate, or use strategy = 'cg'"
            )

    def _cycle(self) -> list[str]:
        """Return the tables that remain without those that only one edge reaches."""
        remaining = set(self.tables)
        while True:
            edges = [edge for edge in self.edges if {*edge[:2]} <= remaining]
            degrees = {
                table: sum(table in edge[:2] for edge in edges) for table in remaining
            }
            leaves = {table for table, degree in degrees.items() if degree < 2}
            if not leaves:
                return [table for table in self.tables if table in remaining]
            remaining -= leaves

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs of tables whose products are wanted."""
        return self.chosen or tuple(combinations_with_replacement(self.tables, 2))

    def sums_of(self, table: str) -> list[Source]:
        """Return of which tables one sends sums, and by the keys of which of its edges.

        On the path of a pair it passes the sums of either end on to the other.

        >>> chain = [Edge("a", "b", 0, 0), Edge("b", "c", 1, 0)]
        >>> JoinTree(("a", "b", "c"), chain).sums_of("b")
        [(0, 'b'), (0, 'c'), (1, 'a'), (1, 'b')]
        """
        return self._sums[table]

    @cached_property
    def _sums(self) -> dict[str, list[Source]]:
        # a dictionary, as a set has no order
        sent: dict[str, dict[Source, None]] = {table: {} for table in self.tables}
        for first, second in self.pairs:
            if first == second:
                continue
            path = self.path(first, second)
            tables = [first, *self.middles(first, second), second]
            for edge, (near, far) in zip(path, pairwise(tables), strict=True):
                sent[near][edge, first] = None
                sent[far][edge, second] = None
        return {table: list(sources) for table, sources in sent.items()}

    def edges_of(self, table: str) -> list[int]:
        """Return the numbers of the edges at a table."""
        return [n for n, edge in enumerate(self.edges) if table in edge[:2]]

    def behind(self, number: int, table: str) -> list[str]:
        """Return the tables on the other side of an edge, seen from one of its ends."""
        other = self.edges[number].other(table)
        return [other, *self.beyond(number, other)]

    def beyond(self, number: int, table: str) -> list[str]:
        """Return the tables behind a table's other edges than one."""
        return [
            name
            for other in self.edges_of(table)
            if other != number
            for name in self.behind(other, table)
        ]

    def path(self, start: str, end: str) -> list[int]:
        """Return the numbers of the edges from one table to another, in order."""
        for number in self.edges_of(start):
            if end in self.behind(number, start):
                other = self.edges[number].other(start)
                return [number, *(self.path(other, end) if other != end else [])]
        return []

    def middles(self, start: str, end: str) -> list[str]:
        """Return the tables between two, in order."""
        tables = []
        table = start
        for number in self.path(start, end)[:-1]:
            table = self.edges[number].other(table)
            tables.append(table)
        return tables

    def is_left_joined(self, number: int, table: str) -> bool:
        """Return whether rows of a table need no partner along an edge."""
        edge = self.edges[number]
        return table == edge.left and edge.right in self.outer
