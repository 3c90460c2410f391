"""What a round of boosting costs in bytes."""

from collections.abc import Collection, Sequence
from typing import Final

from strategies.training.traffic import TableSize, Tally, Traffic, shards_of
from tp_flower.methods.boost.messages import BoostStep, BoostUpdate, Growth
from tp_flower.methods.boost.pooling import MOST_INTERVALS
from tp_flower.privacy.shard_seals import LEAST_BYTES

# of a tree that shards show each other; sets of categories come on top
LEAF_BYTES: Final = 36
NUMBER_BYTES: Final = 9  # of a sum


def epoch_traffic(
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
    for table, shard in shards_of(tables):
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
