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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from strategies.run.strategy import ends_early, tests_every_epoch
from tp_flower.methods.admm.messages import AdmmStep, AdmmUpdate
from tp_flower.methods.boost.messages import BoostStep, BoostUpdate, Growth
from tp_flower.methods.boost.pooling import MOST_INTERVALS
from tp_flower.methods.cg.messages import DescentUpdate
from tp_flower.methods.coreset.messages import SampledRows
from tp_flower.methods.sgd.messages import BatchMessages, BatchUpdate, MeanGradient
from tp_flower.privacy.plan import SAMPLED_ROWS
from tp_flower.privacy.sealed_sums import gram_size
from tp_flower.privacy.shard_seals import LEAST_BYTES
from tp_flower.protocol import training_messages
from tp_flower.protocol.fields import PartBody, field_bytes
from tp_flower.settings import Settings

Sizes = Mapping[str, float]
"""One shard's sizes, by the names in the shapes of messages."""

# of a tree that shards show each other; sets of categories come on top
LEAF_BYTES: Final = 36
NUMBER_BYTES: Final = 9  # of a sum


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


def _shards(tables: Sequence[TableSize]) -> Iterator[tuple[TableSize, ShardSize]]:
    return ((table, shard) for table in tables for shard in table.shards)


def admm_epoch(tables: Sequence[TableSize], *, is_tested: bool) -> Traffic:
    """Return the traffic of one epoch of ADMM.

    Steps go down, 4 n d_c. Scores come up, 4 m d_c, or 4 n d_c where held-out rows
    are not scored: at once from a table in one shard, and after one round more from a
    sharded one. Its shards first send the share of a sum that comes down, 8 (p + 1)
    each: moments, or a proposal.
    """
    tally, rounds = Tally(), 1
    for table, shard in _shards(tables):
        sizes = {
            **table.sizes(shard),
            "scored": shard.total if is_tested else shard.trained,
        }
        tally.add_down(sizes, AdmmStep, "step")
        tally.add_up(sizes, AdmmUpdate, "scores")
        if table.update is not training_messages.Update.LOCAL:
            tally.add_up(sizes, AdmmUpdate, "share")
            tally.add_down(sizes, training_messages.CommonParameters, "sum")
            rounds = 2
    return tally.traffic(rounds)


def cg_epoch(tables: Sequence[TableSize]) -> Traffic:
    """Return the traffic of one epoch of conjugate gradients.

    It is that of ADMM by statistics, and four products of a table, 8 bytes each.
    """
    tally = Tally()
    for table in tables:
        tally.add_up(table.sizes(table.shards[0]), DescentUpdate, "products")
    admm = admm_epoch(tables, is_tested=True)
    return replace(admm, up=admm.up + tally.up)


def boost_epoch(
    tables: Sequence[TableSize],
    growth: Growth,
    bagged: Collection[str],
    pooled: Collection[str],
) -> Traffic:
    """Return the traffic of one epoch of boosting.

    One derivative goes down, 4 n d_c, or two of a loss that is not squared, and what
    the new trees add comes up, 4 m d_c. Where shards average their trees, or pool sums
    by column, those of each go to all, at most, and what the shards' trees add comes up
    as well.
    """
    tally = Tally()
    for table, shard in _shards(tables):
        sizes = {**table.sizes(shard), "scored": shard.total}
        fields = ("gradient", "hessian") if table.has_hessian else ("gradient",)
        tally.add_down(sizes, BoostStep, *fields)
        tally.add_up(sizes, BoostUpdate, "scores", times=1 + bool(bagged))
        if table.name in bagged:
            trees = table.outputs * growth.of_shards(len(table.shards)).trees
            sealed = LEAST_BYTES + LEAF_BYTES * growth.leaves * trees
            if table.name in pooled:
                # a mean, an edge, and two lists of sums; categories come on top
                numbers = 2 + 2 * (table.outputs + 1)
                sealed = (
                    LEAST_BYTES
                    + NUMBER_BYTES * numbers * MOST_INTERVALS * table.features
                )
            tally.up += sealed
            tally.down += sealed * len(table.shards)
    return tally.traffic(rounds=1 + bool(bagged))


def sgd_epoch(tables: Sequence[TableSize], batches: int, settings: Settings) -> Traffic:
    """Return the traffic of an epoch of SGD that is not the last one.

    Per batch Y goes down and the scores of the next batch come up, 4 k d_c each; with
    several shards also a gradient goes up and the mean gradient down, 8 (p + 1) each.
    The last batch also brings scores of held-out rows, or of all if a tolerance is set.
    """
    tally = Tally()
    scores_all, is_tested = ends_early(settings), tests_every_epoch(settings)
    for table, shard in _shards(tables):
        tested = shard.tested if is_tested else 0
        sizes = {
            **table.sizes(shard),
            "batch_rows": shard.batch_rows,
            "next_rows": shard.batch_rows,
            "total": shard.total if scores_all else tested,
        }
        tally.add_down(sizes, BatchMessages, "messages")
        tally.add_up(sizes, BatchUpdate, "batch_scores", "scores")
        if table.update is training_messages.Update.SUM:
            tally.add_up(sizes, BatchUpdate, "share", times=batches)
            tally.add_down(sizes, MeanGradient, "sum", times=batches)
    is_sharded = any(table.update is training_messages.Update.SUM for table in tables)
    return tally.traffic(2 * batches if is_sharded else batches)


def solved_epoch(tables: Sequence[TableSize], sends: str) -> Traffic:
    """Return the traffic of solving on sampled "rows", or "centres" of clusters."""
    tally = Tally()
    fields = ("rows",) if sends == SAMPLED_ROWS else ("centres", "nearest")
    for table, shard in _shards(tables):
        # a centre per output; a shard with fewer rows has fewer
        sizes = table.sizes(shard) | {"clusters": table.outputs, "scored": shard.total}
        tally.add_up(sizes, SampledRows, *fields)
        tally.add_up(sizes, AdmmUpdate, "scores")
        tally.add_down(sizes, training_messages.CommonParameters, "parameters")
    return tally.traffic(rounds=2)
