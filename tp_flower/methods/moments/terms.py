"""What a run by second moments is, as server and sites derive it from its proposal."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import ProposalError, QueryError, SettingsError
from tp_flower.methods.moments.noise import Norms
from tp_flower.methods.moments.settings import MomentsSettings, covers_values
from tp_flower.methods.moments.tree import Edge, JoinTree
from tp_flower.protocol.proposal import Proposal
from tp_flower.query.fragment import Fragment
from tp_flower.settings import Settings
from tp_flower.settings.run import entity_named
from tp_flower.splits import TEST, TRAIN, VALIDATION

PASS_NAMES: Final = {TRAIN: "training", VALIDATION: "validation", TEST: "test"}
TRAINED: Final = TRAIN
MOST_OF_ONE_COLUMN: Final = 2  # classes, of which one column says all


def tree_of(proposal: Proposal) -> JoinTree:
    """Return the tree of a proposed run's joins.

    Raises:
        QueryError: they make a cycle.
        ProposalError: a joined row needs a row of a LEFT JOINed table.
    """
    edges = [
        Edge(join.left, join.right, join.left_key, join.right_key)
        for join in proposal.joins
    ]
    outer = frozenset(proposal.outer)
    # queries bind so: whoever proposes otherwise is no server of ours
    unmatched = [edge for edge in edges if edge.left in outer]
    if proposal.label_table in outer or any(e.right not in outer for e in unmatched):
        raise ProposalError(
            "the run's proposal needs a row of a table that it LEFT JOINs"
        )
    return JoinTree(tuple(proposal.tables), edges, outer)


def cluster_edge(tree: JoinTree, label_table: str, cluster: str) -> int:
    """Return the number of the join of the label's table whose keys are clusters.

    Raises:
        QueryError: the label's table is joined with no table of that alias.
    """
    others = {
        number: tree.edges[number].other(label_table)
        for number in tree.edges_of(label_table)
    }
    for number, other in others.items():
        if other.lower() == cluster.lower():
            return number
    raise QueryError(
        f"cluster: {cluster!r} is no table that the label's, {label_table}, is joined "
        f"with. To cluster by a column of {label_table}, join its values, JOIN (SELECT "
        f"column, COUNT(*) AS n FROM table GROUP BY column) k ON {label_table}.column "
        f"= k.column, and set cluster = 'k'. {label_table} is joined with: "
        f"{', '.join(others.values()) or 'no table'}"
    )


def private_tables(proposal: Proposal, settings: Settings) -> frozenset[str]:
    """Return the tables of a query whose values noise covers.

    Raises:
        SettingsError: one of those named is no table of the query.
    """
    if not settings.privacy.covers_features:
        return frozenset()
    names = {table.lower() for table in proposal.tables}
    named = settings.of(MomentsSettings).private_tables
    if unknown := [name for name in named if name.lower() not in names]:
        raise SettingsError(
            f"private-tables: {unknown[0]!r} is no table of the query, whose tables "
            f"are {', '.join(proposal.tables)}"
        )
    return frozenset(
        table for table in proposal.tables if covers_values(settings, table)
    )


def norms_of(proposal: Proposal, settings: Settings) -> Norms:
    """Return the norms that the rows of every table are clipped to."""
    features = {
        part.table: len(Fragment.from_json(part.fragment).features)
        for part in proposal.parts.values()
    }
    return Norms.of(features, proposal.label_table, settings.privacy.clip)


def entity_table(proposal: Proposal, settings: Settings) -> str:
    """Return the table whose rows weigh alike, by `row-weight`; "" for none."""
    named = entity_named(settings.row_weight)
    if named is None:
        return ""
    names = {table.lower(): table for table in proposal.tables}
    return names.get(named.lower(), "") if named else proposal.label_table


def splitting_table(proposal: Proposal, settings: Settings) -> str:
    """Return the table by whose rows joined rows are held out."""
    named = settings.split.table.lower()
    for table in proposal.tables:
        if table.lower() == named:
            return table
    return proposal.split_table or proposal.label_table


def passes_without_partner(
    tree: JoinTree, number: int, table: str, splitting: str, passes: Sequence[int]
) -> IntArray:
    """Return by pass how often a row of a table without a partner in a join counts.

    Without a row of the table that holds rows out, a joined row is trained on.
    """
    if not tree.is_left_joined(number, table):
        return np.zeros(len(passes), np.int64)
    if splitting not in tree.behind(number, table):
        return np.ones(len(passes), np.int64)
    return np.array([int(a_pass == TRAINED) for a_pass in passes])


def label_columns(labels: FloatArray, classes: int) -> FloatArray:
    """Return labels (n,) as columns (n, k): numbers, or an indicator for each class.

    Of two classes one indicator says all, that of the second.

    >>> label_columns(np.array([0.0, 2.0]), 3).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if not classes:
        return labels[:, None]
    first = 1 if classes == MOST_OF_ONE_COLUMN else 0
    columns: FloatArray = (labels[:, None] == np.arange(first, classes)).astype(
        np.float64
    )
    return columns


def label_width(classes: int) -> int:
    """Return the number of columns of a label with some classes, 0 for numbers."""
    return 1 if classes <= MOST_OF_ONE_COLUMN else classes
