"""Joins of a proposed run: the keys compared, who shares which secret, and masks.

The server and every site read them from the proposal by these functions, so that a site
need not be told them, and can tell a request that says otherwise.
"""

import json
from collections import Counter
from typing import NamedTuple

from tp_flower.errors import ProposalError
from tp_flower.keyed_hash import RUN_GROUP
from tp_flower.protocol.proposal import Proposal


class JoinSide(NamedTuple):
    """A table's side of a join equality, for the masks of its scores.

    Attributes:
        group: that has the key of the masks.
        key: position among the fragment's join keys.
        is_positive: whether the masks are added; at the other side they are subtracted.
        other: the table at the other side.
    """

    group: str
    key: int
    is_positive: bool
    other: str


def join_group(number: int) -> str:
    """Return the name of the group of sites of a join."""
    return f"join-{number}"


def join_sides(proposal: Proposal, table: str) -> list[JoinSide]:
    """Return a table's sides of all joins.

    The left side adds the masks, the right side subtracts them.

    >>> from tp_flower.protocol.proposal import ProposedJoin
    >>> join = ProposedJoin(left="a", left_key=0, right="b", right_key=1)
    >>> run = Proposal(query="", parts={}, joins=[join], outer=[], settings={})
    >>> [join_sides(run, table) for table in "abc"] == [
    ...     [JoinSide("join-0", 0, True, "b")], [JoinSide("join-0", 1, False, "a")], []]
    True
    """
    sides = []
    for number, join in enumerate(proposal.joins):
        group = join_group(number)
        if join.left == table:
            sides.append(JoinSide(group, join.left_key, True, join.right))
        if join.right == table:
            sides.append(JoinSide(group, join.right_key, False, join.left))
    return sides


def compared_keys(proposal: Proposal, table: str, other: str) -> tuple[int, int]:
    """Return the positions of the keys by which a table is joined with another.

    The first is that of ``table``. ProposalError if there is no such join.

    >>> from tp_flower.protocol.proposal import ProposedJoin
    >>> join = ProposedJoin(left="a", left_key=0, right="b", right_key=1)
    >>> run = Proposal(query="", parts={}, joins=[join], outer=[], settings={})
    >>> compared_keys(run, "b", "a")
    (1, 0)
    """
    for join in proposal.joins:
        if (join.left, join.right) == (table, other):
            return join.left_key, join.right_key
        if (join.left, join.right) == (other, table):
            return join.right_key, join.left_key
    raise ProposalError(
        f"the run's proposal has no join of {table!r} with {other!r}, from which its "
        "cutoffs are taken"
    )


def key_groups(proposal: Proposal) -> dict[str, list[str]]:
    """Return, by table, the group of each of its keys that joins compare.

    Keys are in one group if joins connect them: the groups are the connected components
    of the graph whose edges are the joins.
    """
    tables = proposal.tables
    joined = {
        (table, side.key) for table in tables for side in join_sides(proposal, table)
    }
    keys = sorted(joined, key=lambda key: (tables.index(key[0]), key[1]))
    group = {key: number for number, key in enumerate(keys)}
    for join in proposal.joins:
        ends = {group[join.left, join.left_key], group[join.right, join.right_key]}
        group = {
            key: min(ends) if joined_group in ends else joined_group
            for key, joined_group in group.items()
        }
    groups: dict[str, list[str]] = {table: [] for table in tables}
    for (table, _), joined_group in group.items():
        groups[table].append(f"group-{joined_group}")
    return groups


def table_group(proposal: Proposal, table: str) -> str:
    """Return the name of the group of the shards of a table."""
    return f"table-{proposal.tables.index(table)}"


def label_group(proposal: Proposal, table: str) -> str:
    """Return the name of the group of the sites of a table and of the label's."""
    return f"label-{proposal.tables.index(table)}"


def members_of_groups(
    proposal: Proposal, *, has_join_secrets: bool, has_label_secrets: bool = False
) -> dict[str, set[str]]:
    """Return the nodes that share the secret of each group.

    All nodes share that of the run. With secrets of joins the nodes of a join's two
    sides share that of the join, and nobody else; with those of the label the nodes of
    each table share one with those of the label's. The nodes of a table in several
    shards share the table's; a table in one shard has nothing to share.
    """
    nodes = {
        table: {part.node for part in proposal.shards_of(table).values()}
        for table in proposal.tables
    }
    groups = {RUN_GROUP: set().union(*nodes.values())}
    for table in proposal.tables:
        if len(proposal.shards_of(table)) > 1:
            groups[table_group(proposal, table)] = nodes[table]
        if has_label_secrets:
            reader = nodes[proposal.label_table]
            groups[label_group(proposal, table)] = nodes[table] | reader
    if not has_join_secrets:
        return groups
    for number, join in enumerate(proposal.joins):
        # both may be at sites that a prediction does without
        if members := nodes[join.left] | nodes[join.right]:
            groups[join_group(number)] = members
    return groups


def grouped_parts(proposal: Proposal) -> list[list[int]]:
    """Return the groups of participants that share a sub-query with GROUP BY.

    A group has two participants or more. UNION ALL may name one table twice: each
    branch groups on its own.
    """
    together: dict[tuple[str, int], list[int]] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for number, part in sorted(proposal.parts.items()):
        if part.fragment.get("subquery") is None:
            continue
        fragment = json.dumps(part.fragment, sort_keys=True)
        key = (fragment, part.node, part.shard)
        together.setdefault((fragment, seen[key]), []).append(number)
        seen[key] += 1
    return [numbers for numbers in together.values() if len(numbers) > 1]
