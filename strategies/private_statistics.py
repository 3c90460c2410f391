"""Private statistics at the server: what encoders are fitted to, from noisy sums."""

import numpy as np

from strategies.alignment import Alignment
from strategies.exchange import Part, Replies
from strategies.received import fact_of, refuse
from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.noisy_statistics import (
    NoisyShard,
    estimate_table,
    noisy_from_wire,
)
from tp_flower.encoding.ranges import choose_ranges
from tp_flower.encoding.row_sums import Ranges
from tp_flower.encoding.statistics import ColumnStatistics
from tp_flower.errors import SchemaError
from tp_flower.settings import PrivacySettings


def estimated_statistics(
    replies: Replies, aligned: Alignment, privacy: PrivacySettings
) -> dict[str, dict[str, ColumnStatistics]]:
    """Return what encoders are fitted to, by table and feature.

    Args:
        replies: of every part, with noisy sums.
        aligned: the joined rows.
        privacy: of the run.

    Raises:
        ReplyError: a part's statistics are none of its features.
        SchemaError: a feature is of another kind in one shard than in another.
        SettingsError: a feature has no range of the kind that it needs.
    """
    choices = aligned.choices
    ranges = choose_ranges(
        privacy.ranges, {table: list(own.choices) for table, own in choices.items()}
    )
    return {
        table: estimate_table(
            [
                _shard(replies, part, choices[table], ranges[table], rows)
                for part, rows in zip(parts, _rows_of(aligned, table), strict=True)
            ]
        )
        for table, parts in aligned.extracted.parts.items()
    }


def _rows_of(aligned: Alignment, table: str) -> list[int]:
    """How many rows the statistics of each shard are of."""
    rows = [aligned.extracted.rows[p.number] for p in aligned.extracted.parts[table]]
    if table != aligned.bound.label_table:
        return rows
    ends = np.cumsum(rows)[:-1]
    return [int(np.count_nonzero(~own)) for own in np.split(aligned.held_out, ends)]


def _shard(
    replies: Replies, part: Part, choice: TableChoice, ranges: Ranges, rows: int
) -> NoisyShard:
    facts = replies.facts()
    arrays = {
        name: array
        for (number, name), array in replies.arrays.items()
        if number == part.number
    }
    reported = fact_of(facts, part, "statistics", list)
    try:
        plans, features = noisy_from_wire(reported, arrays, choice, ranges)
    except SchemaError as error:
        raise refuse(part, str(error)) from None
    return NoisyShard(plans, features, rows, fact_of(facts, part, "deviation", float))
