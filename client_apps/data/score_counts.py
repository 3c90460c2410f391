"""Count the score vectors of a source's rows that have left without noise.

The count is over all runs and queries.

Counted are the ledger's lines of event ``scores``, of every query that reads one of the
columns of the query at hand: columns that no query reads together are separate
unknowns, and have separate counts. So of any set of columns, no more score vectors
leave that read nothing else than the rule allows the sum of the ranks of some of its
disjoint parts (by induction over the vectors: the last one's columns are such a part,
and all vectors that share one with it were counted when it left). Columns that
determine each other are one unknown under two names, which is for the owner to know.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any, Final

from tp_flower.errors import PolicyError

SCORES: Final = "scores"
ANY_COLUMN: Final = "(any)"
"""In a query's columns: it may have read any other under another name."""

_COUNTED: Final = (
    "SELECT json_extract(line, '$.columns'), sum(times) FROM ledger "
    "WHERE source = ? AND event = 'scores' GROUP BY 1"
)


def share_columns(one: Collection[str], other: Collection[str]) -> bool:
    """Return whether two queries read a column in common, or may have done so."""
    return ANY_COLUMN in (*one, *other) or not set(one).isdisjoint(other)


@dataclass(frozen=True)
class ScoreLimit:
    """The limit on how many score vectors of a source may leave.

    It is for the source's columns that the features of a query read.

    Attributes:
        table: alias in the query, for messages.
        columns: the raw columns that the features read, in lower case; among them
            ``ANY_COLUMN``, where a derived table has the same rows.
        rule: ``scores-per-rank`` of the policy.
        rank: the effective rank of the encoded columns, see
            :mod:`tp_flower.features.ranks`.
        allowed: over all runs.
    """

    source: str
    table: str
    columns: tuple[str, ...]
    rule: float
    rank: int
    allowed: int

    def used(self, connection: Connection) -> int:
        """Return how many score vectors have left that read one of the columns."""
        used = 0
        for listed, times in connection.execute(_COUNTED, (self.source,)):
            if share_columns(json.loads(listed), self.columns):
                used += times
        return used

    def line(self, connection: Connection, vectors: int) -> dict[str, Any]:
        """Return the ledger's line of more score vectors.

        PolicyError if they would exceed the limit.
        """
        used = self.used(connection)
        if used + vectors > self.allowed:
            raise PolicyError(self.refusal(vectors, used))
        columns = {"source": self.source, "columns": list(self.columns)}
        return {**columns, "times": vectors, "allowed": self.allowed}

    def refusal(self, vectors: int, used: int) -> str:
        """Return the message that refuses a release beyond the limit."""
        return (
            f"the table's policy (scores-per-rank = {self.rule:g}) refuses: the run "
            f"asks for {vectors} more score vectors of table {self.table!r}, and of "
            f"{self.allowed} that its columns allow over all runs {used} have left: "
            "train for fewer epochs, or read more columns that vary; the owner may "
            "raise the rule"
        )
