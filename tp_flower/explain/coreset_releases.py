"""Who learns what where a coreset is drawn by the sensitivities of the rows."""

from typing import Final

from tp_flower.explain.explanation import NOTHING, SERVER, SITES, Release
from tp_flower.protocol import Action

MASKED: Final = "masked pairwise (ChaCha20): an honest server sees the sum alone"


def coreset_releases(sharded: str, counted: str) -> list[Release]:
    """Return what the three rounds tell whom.

    Args:
        sharded: the tables in several shards, listed; "" for none.
        counted: what sites are told of their rows, besides which are joined.
    """
    moments = (
        f"second moments of each shard of {sharded}, the label's too, or the cost of "
        "its clusters"
    )
    shards = [
        (Action.MEASURE, SERVER, moments),
        (Action.DRAW, SITES, f"the sum of those over the shards of {sharded}"),
    ]
    total = "what the sensitivities of a table's rows sum to"
    summed = "per joined row of the sample the sum of the tables' sensitivities"
    told = [
        (Action.MEASURE, SITES, f"which own rows are joined, and {counted}"),
        (Action.MEASURE, SERVER, total),
        *(shards if sharded else []),
        (Action.DRAW, SITES, "how many rows to draw"),
        (Action.DRAW, SERVER, "which rows were drawn, the sensitive ones more often"),
        (Action.WEIGH, SITES, "which own rows are in the sample"),
    ]
    return [
        *(Release(str(action), to, carries, NOTHING) for action, to, carries in told),
        Release(str(Action.WEIGH), SERVER, summed, MASKED),
    ]
