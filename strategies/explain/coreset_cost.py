"""What the three rounds that draw a coreset send, as training sends it before epochs.

Per shard: which rows are trained goes down as a bit each, what their joined rows weigh
as 0, 1 or 4 bytes each, and comes up as one number, or from one of several shards as a
matrix of 8 p^2, whose sum goes down again. Drawn rows come up, 4 each; the sample's k
joined rows go down, 4 each, and their masked scores come up, 8 each.

How many rows a table draws, and how many of them are distinct, is known when they are
drawn: here tables draw by their columns, and rows are drawn alike.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strategies.explain.cost import TableSize, Traffic
from tp_flower.protocol import (
    DrawnPart,
    MeasuredPart,
    MeasurePart,
    WeighedPart,
    WeighPart,
    field_bytes,
)


@dataclass(frozen=True)
class CoresetSize:
    """A coreset before it is drawn.

    Attributes:
        size: m, rows that are drawn.
        joined_rows: N, of which they are drawn.
        label_columns: of the label in the scores of its table.
        has_moments: whether shards send second moments, not what their clusters cost.
        mass_bytes: by table, of what the joined rows of its trained rows weigh.
    """

    size: int
    joined_rows: int
    label_columns: int
    has_moments: bool
    mass_bytes: Mapping[str, int]

    @property
    def distinct(self) -> float:
        """Of m of N rows, drawn alike and with replacement: N (1 - (1 - 1/N)^m)."""
        absent: float = (1.0 - 1.0 / self.joined_rows) ** self.size
        return self.joined_rows * (1.0 - absent)

    def columns(self, table: TableSize) -> int:
        """Return the columns that a table's scores are of, p."""
        own = 1 + self.label_columns if table.has_intercept else 0
        return table.features + own


def coreset_rounds(tables: Sequence[TableSize], coreset: CoresetSize) -> Traffic:
    """Return what the rounds send.

    Args:
        tables: of the training problem, with all joined rows.
        coreset: that is to be drawn.
    """
    up: defaultdict[str, float] = defaultdict(float)
    down: defaultdict[str, float] = defaultdict(float)
    total = len(tables) + sum(map(coreset.columns, tables))
    for table in tables:
        columns = coreset.columns(table)
        sizes = {"columns": columns, "sample": coreset.distinct}
        # of the table's shards together
        sizes["drawn"] = coreset.size * columns / total
        down[table.name] += coreset.mass_bytes[table.name]
        up[table.name] += field_bytes(DrawnPart, "drawn", sizes)
        for shard in table.shards:
            of_shard = {**table.sizes(shard), **sizes}
            down[table.name] += field_bytes(MeasurePart, "trained", of_shard)
            if len(table.shards) > 1 and coreset.has_moments:
                moments = field_bytes(MeasuredPart, "gram", of_shard)
                up[table.name] += moments
                down[table.name] += moments
            up[table.name] += field_bytes(WeighedPart, "masked", of_shard)
            down[table.name] += field_bytes(WeighPart, "rows", of_shard)
    return Traffic(3, up, down)
