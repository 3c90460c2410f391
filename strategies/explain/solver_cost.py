"""Methods that the server solves over sampled rows: what they send.

Per table, with n sampled rows of d features (Notation of
:mod:`strategies.explain.cost`) one epoch of two rounds sends the rows up, 4 n d, or
instead of them the local centres, 8 k d per shard, and each row's, 4 n; then the
parameters down, 8 p per shard, and the scores of the rows that take part up, 4 m d_c.
"""

from collections import defaultdict
from collections.abc import Sequence

from strategies.explain.cost import TableSize, Traffic
from tp_flower.privacy.plan import SAMPLED_ROWS
from tp_flower.protocol import (
    CommonParameters,
    ConsensusUpdate,
    SampledRows,
    field_bytes,
)


def solved_epoch(tables: Sequence[TableSize], sends: str) -> Traffic:
    """Return what solving sends.

    Args:
        tables: of the training problem.
        sends: "rows", or "centres" of local clusters.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    for table in tables:
        for shard in table.shards:
            # a centre per output; of a shard with fewer rows there are fewer
            sizes = {**table.sizes(shard), "clusters": table.outputs}
            sizes["scored"] = shard.total
            fields = ("rows",) if sends == SAMPLED_ROWS else ("centres", "nearest")
            for name in fields:
                up[table.name] += field_bytes(SampledRows, name, sizes)
            up[table.name] += field_bytes(ConsensusUpdate, "scores", sizes)
            down[table.name] += field_bytes(CommonParameters, "parameters", sizes)
    return Traffic(2, up, down)
