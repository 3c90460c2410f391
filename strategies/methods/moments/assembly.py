"""Second moments at the server: matrices from the padded sums of all sites."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from strategies.methods.moments.join_counts import JoinCounts
from strategies.run.exchange import Replies
from strategies.run.replies import refuse
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.methods.moments.exchange import Assembly
from tp_flower.methods.moments.messages import PaddedPart
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.words import public_bits

PADS: Final = (
    "one-time pads by join key (AES-256) that the sites of a join share: an honest "
    "server reads these sums alone"
)
ALTERED: Final = (
    "the sites' sums are not the moments of the joined rows: a site was told other "
    "counts than the others, or words were altered on their way"
)
MAGNITUDE: Final = 3
"""Of encoded columns, as a power of two: standardised ones have a mean square of 1."""
SPARE_BITS: Final = 2


def common_bits(
    counts: JoinCounts, layout: ColumnLayout, table: str, magnitude: int = 0
) -> IntArray:
    """Return the bits of the columns of a table in several shards, (d,).

    ``magnitude`` is that of the label.
    """
    magnitudes = np.full(layout.columns[table], MAGNITUDE)
    if table == layout.label_table:
        outputs = layout.outputs
        magnitudes[-1 - outputs :] = 0
        magnitudes[-1 - outputs : -1] = magnitude
    # one shard may have most of the largest rows
    magnitudes += SPARE_BITS
    return public_bits(counts.mass, magnitudes)


def matrices(
    counts: JoinCounts,
    replies: Replies,
    layout: ColumnLayout,
    bits: Mapping[str, IntArray],
) -> dict[int, FloatArray]:
    """Return the moments of every pass, (D, D), from the sites' padded sums.

    ``bits`` are those of every table's columns.
    """
    by_pass = {}
    for position, number in enumerate(counts.row_passes):
        contributions = {
            table: counts.read(table, replies, position, layout.columns)
            for table in layout.columns
        }
        assembly = Assembly(counts.tree, counts.of_pass(position), contributions)
        by_pass[number] = layout.matrix(assembly.blocks(), bits)
    return by_pass


def column_bits(
    counts: JoinCounts, replies: Replies, layout: ColumnLayout
) -> dict[str, IntArray]:
    """Return the bits of every table's columns, on which its shards agree."""
    bits: dict[str, IntArray] = {}
    for part in counts.joined.parts:
        of_part = replies.body(part, PaddedPart).bits
        if of_part is None:
            raise refuse(part, "no bits of its columns")
        if of_part.shape != (layout.columns[part.table],):
            raise refuse(part, f"bits of {len(of_part)} columns")
        if not np.array_equal(bits.setdefault(part.table, of_part), of_part):
            raise refuse(part, "other bits than its table's other shards")
    return bits
