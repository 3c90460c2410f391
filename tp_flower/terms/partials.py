"""Which shards of a LATERAL sub-query's table make one answer of their partial ones.

A shard tells each later one which keys it has. A key's answer is made by the first
shard that has the key; the others seal what their own rows add to it for that one, and
have no answer about it. The server and every site read from the proposal which shards
these are.
"""

from collections import Counter
from typing import NamedTuple

from tp_flower.protocol.proposal import Proposal
from tp_flower.query import Fragment
from tp_flower.settings import Settings
from tp_flower.terms.groups import grouped_parts


class Overlap(NamedTuple):
    """Two shards that may have rows of one key, by their parts.

    >>> Overlap(2, 5).name
    '2-5'
    """

    earlier: int
    later: int

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.earlier}-{self.later}"

    @classmethod
    def named(cls, name: str) -> "Overlap":
        """Return the overlap with a name.

        >>> Overlap.named("2-5")
        Overlap(earlier=2, later=5)
        """
        return cls(*map(int, name.split("-")))


def sharing_parts(proposal: Proposal, settings: Settings) -> list[list[int]]:
    """Return the groups of parts that make one answer of partial ones.

    They are the shards of a sub-query that does not take all cutoffs of its own site,
    each at a site of its own.
    """
    if not settings.sealed_partials:
        return []
    return [
        numbers
        for numbers in grouped_parts(proposal)
        if _are_apart(proposal, numbers)
        and makes_partials(
            Fragment.from_json(proposal.parts[numbers[0]].fragment), settings
        )
    ]


def overlaps(proposal: Proposal, settings: Settings) -> tuple[Overlap, ...]:
    """Return all pairs of such parts."""
    return tuple(
        Overlap(earlier, later)
        for numbers in sharing_parts(proposal, settings)
        for position, earlier in enumerate(numbers)
        for later in numbers[position + 1 :]
    )


def parts_with_groups(proposal: Proposal, settings: Settings) -> list[list[int]]:
    """Return the groups of participants none of whose groups may be in two of them."""
    sharing = sharing_parts(proposal, settings)
    return [numbers for numbers in grouped_parts(proposal) if numbers not in sharing]


def makes_partials(fragment: Fragment, settings: Settings) -> bool:
    """Return whether a table's shards make one answer of partial ones, if several."""
    subquery = fragment.subquery
    return (
        settings.sealed_partials
        and subquery is not None
        and subquery.cutoffs is not None
        and subquery.cutoffs.makes_pairs
    )


def _are_apart(proposal: Proposal, numbers: list[int]) -> bool:
    nodes = Counter(proposal.parts[number].node for number in numbers)
    return max(nodes.values()) == 1
