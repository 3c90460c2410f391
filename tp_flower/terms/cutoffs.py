"""The pairs of keys and cutoffs of a proposed run that sites seal for each other.

They are those of LATERAL sub-queries whose table is at another site than the table
around them. The server and every site read from the proposal which there are.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tp_flower.errors import ProposalError
from tp_flower.extraction.empty_answers import answered_key, answers_nulls
from tp_flower.protocol.proposal import Proposal, ProposedJoin
from tp_flower.query import Fragment, Join
from tp_flower.query.cutoffs import CUTOFF
from tp_flower.query.lateral_tables import pair_names
from tp_flower.settings.privacy import PrivacySettings
from tp_flower.terms.groups import compared_keys


class SealedPairs(NamedTuple):
    """The pairs that a part's rows have, of one of its join keys.

    Sub-queries that compare the same columns take the same pairs.

    Attributes:
        part: of the table around the sub-queries.
        key: position of the join key.
        cutoff: position of the cutoff among the key's expressions.
    """

    part: int
    key: int
    cutoff: int

    @property
    def name(self) -> str:
        """Their name in messages.

        >>> SealedPairs(part=3, key=0, cutoff=1).name
        '3-0-1'
        """
        return "-".join(map(str, self))

    @classmethod
    def named(cls, name: str) -> "SealedPairs":
        """Return the pairs with a name.

        >>> SealedPairs.named("3-0-1")
        SealedPairs(part=3, key=0, cutoff=1)
        """
        return cls(*map(int, name.split("-")))

    def name_for(self, node: str) -> str:
        """Return their name among all that the part seals, for one node."""
        return f"{node}-{self.key}-{self.cutoff}"


def sealed_pairs(
    proposal: Proposal, fragments: Mapping[int, Fragment]
) -> dict[int, tuple[SealedPairs, ...]]:
    """Return the sealed pairs that each part of a LATERAL sub-query takes.

    Raises:
        ProposalError: a sub-query is not joined with the table around it, by as many
            expressions.
        QueryError: the join compares anything else than its keys and its cutoff.
    """
    taken = {}
    for number, fragment in fragments.items():
        subquery = fragment.subquery
        if subquery is None or subquery.cutoffs is None or not subquery.cutoffs.sealed:
            continue
        around = subquery.cutoffs.table
        key, around_key = compared_keys(proposal, fragment.table, around)
        cutoff = pair_names(fragment, key).index(CUTOFF)
        parts = len(fragment.keys[key])
        for part in proposal.shards_of(around):
            outer = fragments[part].keys[around_key : around_key + 1]
            if [len(columns) for columns in outer] != [parts]:
                raise ProposalError(
                    f"table {fragment.table!r} takes the cutoffs of table {around!r}, "
                    "whose key has not as many parts"
                )
        taken[number] = tuple(
            SealedPairs(part, around_key, cutoff) for part in proposal.shards_of(around)
        )
    return taken


def answering_tables(
    proposal: Proposal, fragments: Mapping[int, Fragment], privacy: PrivacySettings
) -> dict[int, str]:
    """Return by join the table whose last row answers for all keys that it lacks.

    Under noise there is none: it would be one more row, of nobody.
    """
    if privacy.covers_features or privacy.covers_predictions:
        return {}
    # of a table without sites there are no rows
    of_tables = {fragment.table: fragment for fragment in fragments.values()}
    return answering_joins(proposal.joins, proposal.outer, of_tables)


def answering_joins(
    joins: Sequence[Join | ProposedJoin],
    outer: Collection[str],
    fragments: Mapping[str, Fragment],
) -> dict[int, str]:
    """Return by join the table, LEFT JOINed, that has an answer about no rows.

    ``fragments`` are one of each table, by name.
    """
    keys = {table: answered_key(fragment) for table, fragment in fragments.items()}
    return {
        number: table
        for number, join in enumerate(joins)
        for table, key in ((join.left, join.left_key), (join.right, join.right_key))
        if table in outer and keys.get(table) == key
    }


def answered_nulls(
    joins: Sequence[Join | ProposedJoin],
    answering: Mapping[int, str],
    fragments: Mapping[str, Fragment],
) -> dict[str, frozenset[int]]:
    """Return by table its join keys of which NULL is a key without rows.

    A key may be compared with several tables that answer.
    """
    answers: dict[str, dict[int, list[bool]]] = {}
    for number, table in answering.items():
        join = joins[number]
        other, key = join.left, join.left_key
        if table == join.left:
            other, key = join.right, join.right_key
        subquery = fragments[table].subquery
        of_key = answers.setdefault(other, {}).setdefault(key, [])
        of_key.append(subquery is not None and answers_nulls(subquery))
    return {
        table: frozenset(key for key, each in keys.items() if all(each))
        for table, keys in answers.items()
    }


def recipients(
    proposal: Proposal, taken: Mapping[int, tuple[SealedPairs, ...]]
) -> dict[SealedPairs, tuple[str, ...]]:
    """Return the nodes that each sealed pairs are for, sorted."""
    nodes: dict[SealedPairs, set[str]] = {}
    for number, listed in taken.items():
        for pairs in listed:
            nodes.setdefault(pairs, set()).add(proposal.parts[number].node)
    return {pairs: tuple(sorted(nodes[pairs])) for pairs in sorted(nodes)}
