"""Methods that the server solves over sampled rows: what they send, and who learns it.

Per table, with n sampled rows of d features (Notation of :mod:`tp_flower.explain.cost`)
one epoch of two rounds sends the rows up, 4 n d, or instead of them the local centres,
8 k d per shard, and each row's, 4 n; then the parameters down, 8 p per shard, and the
scores of the rows that take part up, 4 m d_c.
"""

from collections.abc import Collection, Sequence

from tp_flower.explain.cost import (
    INDEX_BYTES,
    PARAMETER_BYTES,
    SCORE_BYTES,
    TableSize,
    Traffic,
)
from tp_flower.explain.explanation import Release
from tp_flower.privacy.plan import SAMPLED_ROWS
from tp_flower.protocol import Action


def solved_epoch(tables: Sequence[TableSize], sends: str) -> Traffic:
    """Return what solving sends.

    Args:
        tables: of the training problem.
        sends: "rows", or "centres" of local clusters.
    """
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    for table in tables:
        vector = PARAMETER_BYTES * table.parameters * len(table.shards)
        rows = SCORE_BYTES * table.trained * table.features
        if sends != SAMPLED_ROWS:
            # a centre per output; of a shard with fewer rows there are fewer
            rows = vector + INDEX_BYTES * table.trained
        up[table.name] = rows + SCORE_BYTES * table.total * table.outputs
        down[table.name] = vector
    return Traffic(2, up, down)


def solved_releases(
    tables: Collection[str], sends: str, scored: str, nothing: str
) -> list[Release]:
    """Return who learns what when the server solves.

    Args:
        tables: in several shards; their sites learn the same parameters.
        sends: "rows", or "centres" of local clusters.
        scored: what a score per row tells.
        nothing: what is said where nothing covers a release.
    """
    rows = "the encoded features of every own row in the sample, as they are"
    centres = (
        "per shard the centres of its sampled rows' features, and each row's nearest"
    )
    shared = f", the same for all shards of {', '.join(tables)}" if tables else ""
    told = [
        (Action.ROWS, "sites", "that the sampled rows are asked for"),
        (Action.ROWS, "server", rows if sends == SAMPLED_ROWS else centres),
        (Action.CONSENSUS, "sites", f"the parameters of the own table's model{shared}"),
        (Action.CONSENSUS, "server", scored),
    ]
    return [Release(str(action), to, carries, nothing) for action, to, carries in told]
