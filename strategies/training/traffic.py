"""The rounds and array bytes of an epoch, from sizes that set-up knows.

This module says which messages an epoch takes, and which fields they carry; the size of
a field follows from its declaration (:mod:`tp_flower.protocol`). The counted bytes are
those that a report counts as ``bytes-up`` and ``bytes-down`` (headers, layouts and
padding are ``overhead-bytes`` there, and are not counted here).

The communication of Table 6 (paper, section 5) with its constants, per table, epoch and
in both directions, without held-out rows and with every table in one shard::

    method     the paper   here            rounds
    TP-ADMM    O(n)        8 n d_c         1
    TP-SGD     O(alpha)    8 alpha d_c     N/B
    GD                     8 n d_c         1

alpha is the number of distinct rows of every batch, n <= alpha <= N. For held-out rows,
ADMM sends 4 d_c more for each that is not trained on, and SGD 4 d_c for each. A table
in Q shards adds 8 Q (d [+ 1]) d_c up and 8 Q p down (ADMM, statistics), 8 Q p each way
(ADMM, consensus), or 8 Q p each way per batch (SGD): the paper's O(T' Q) with T' = 1,
and O(Q N/B).

Notation:
    n       ``trained`` rows of one shard
    d_c     ``outputs``     d  ``features``     p  ``parameters``
    N, B    joined training rows and rows of a batch
    Q       shards of a table
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tp_flower.privacy.sealed_sums import gram_size
from tp_flower.protocol import training_messages
from tp_flower.protocol.fields import PartBody, field_bytes

Sizes = Mapping[str, float]
"""One shard's sizes, by the names in the shapes of messages."""


@dataclass(frozen=True)
class ShardSize:
    """The rows of one shard; ``total`` take part, trained or tested.

    ``batch_rows`` are the distinct rows of each batch, summed over an epoch.
    """

    rows: int
    trained: int
    tested: int
    total: int
    batch_rows: float = 0.0


@dataclass(frozen=True)
class TableSize:
    """One table of the training problem.

    See the module's notation.
    """

    name: str
    shards: tuple[ShardSize, ...]
    update: training_messages.Update
    outputs: int
    features: int
    parameters: int
    has_intercept: bool
    starts_at_zero: bool
    has_hessian: bool = False
    joined_rows: int = 0

    def sizes(self, shard: ShardSize) -> dict[str, float]:
        """Return one shard's `Sizes`."""
        return {
            "rows": shard.rows,
            "trained": shard.trained,
            "tested": shard.tested,
            "total": shard.total,
            "outputs": self.outputs,
            "features": self.features,
            "parameters": self.parameters,
            "width": self.features + self.has_intercept,
            "summed": self.parameters + 1,
            "summed_gram": gram_size(self.features + self.has_intercept) + 1,
        }


@dataclass(frozen=True)
class Traffic:
    """The rounds of an epoch, and its bytes up to the server and down to the sites."""

    rounds: int
    up: float
    down: float


class Tally:
    """The bytes of the fields that some rounds carry."""

    def __init__(self) -> None:
        self.up = self.down = 0.0

    def add_up(
        self, sizes: Sizes, kind: type[PartBody], *fields: str, times: int = 1
    ) -> None:
        """Count the fields of one shard's reply, given the sizes in their shapes."""
        self.up += times * sum(field_bytes(kind, name, sizes) for name in fields)

    def add_down(
        self, sizes: Sizes, kind: type[PartBody], *fields: str, times: int = 1
    ) -> None:
        """Count the fields of one shard's request."""
        self.down += times * sum(field_bytes(kind, name, sizes) for name in fields)

    def traffic(self, rounds: int) -> Traffic:
        """Return the counted bytes as the traffic of ``rounds`` rounds."""
        return Traffic(rounds, self.up, self.down)


class StepMessages(NamedTuple):
    """A method's parts of messages with steps of scores, and with scores.

    A sharded table's ``update`` has a share of a sum, and ``summed`` the sum.
    """

    step: type[PartBody]
    update: type[PartBody]
    summed: type[PartBody]


def shards_of(
    tables: Sequence[TableSize],
) -> Iterator[tuple[TableSize, ShardSize]]:
    """Return every shard of the tables, with its table."""
    return ((table, shard) for table in tables for shard in table.shards)


def steps_epoch(
    tables: Sequence[TableSize], messages: StepMessages, *, is_tested: bool
) -> Traffic:
    """Return the traffic of an epoch of steps of scores.

    Steps go down, 4 n d_c. Scores come up, 4 m d_c, or 4 n d_c where held-out rows
    are not scored: at once from a table in one shard, and after one round more from a
    sharded one. Its shards first send the share of a sum that comes down, 8 (p + 1)
    each: moments, or a proposal.
    """
    tally = Tally()
    rounds = 1
    for table, shard in shards_of(tables):
        sizes = {
            **table.sizes(shard),
            "scored": shard.total if is_tested else shard.trained,
        }
        tally.add_down(sizes, messages.step, "step")
        tally.add_up(sizes, messages.update, "scores")
        if table.update is not training_messages.Update.LOCAL:
            tally.add_up(sizes, messages.update, "share")
            tally.add_down(sizes, messages.summed, "sum")
            rounds = 2
    return tally.traffic(rounds)
