"""The rounds ``statistics`` and ``fit``: the sites fit the encoders of the tables.

A table in one shard fits its encoder at once. The shards of another seal statistics for
each other, which their leading shard merges; the server passes on what it cannot open,
and learns how many columns each feature is encoded as.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import msgspec

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import array_of, refuse
from strategies.setup.extract import Extracted, table_group
from strategies.setup.joined_rows import SplitRows
from tp_flower.arrays import AnyArray
from tp_flower.protocol import setup_messages
from tp_flower.protocol.packet import pack_bits


@dataclass(frozen=True)
class TableEncoding:
    """A table's encoder as far as the server has it; ``sealed`` for several shards."""

    columns: setup_messages.EncodedColumns
    sealed: AnyArray | None = None


def fit_encoders(joined: SplitRows) -> Generator[Requests, Replies, dict[str, TableEncoding]]:
    """Let the sites fit the encoders; the label table's to its training rows alone."""
    extracted, label_table = joined.extracted, joined.bound.label_table
    trained = {
        part.number: pack_bits(~joined.held_out[rows])
        for part, rows in extracted.shards_of(label_table)
    }
    bodies = {}
    for number, (table, parts) in enumerate(extracted.parts.items()):
        shards = setup_messages.TableShards(table_group(number), [part.number for part in parts])
        for part in parts:
            bodies[part.number] = setup_messages.StatisticsPart(
                encoders=msgspec.to_builtins(joined.choices[table]),
                shards=shards if len(parts) > 1 else None,
                rows=trained.get(part.number),
            )
    replies = yield ask(setup_messages.StatisticsRequest(bodies), extracted.all_parts)
    sharded = [parts for parts in extracted.parts.values() if len(parts) > 1]
    if sharded:
        fits = {s[0].number: _to_merge(extracted, s, replies) for s in sharded}
        leading = [parts[0] for parts in sharded]
        replies = replies.then((yield ask(setup_messages.FitRequest(fits), leading)))
    return {table: _encoding(joined, parts[0], replies) for table, parts in extracted.parts.items()}


def fitted_tables(encoders: Mapping[str, TableEncoding]) -> list[str]:
    """Return the tables whose shards told each other statistics of their rows."""
    return [
        table
        for table, encoding in encoders.items()
        if encoding.columns.is_fitted and encoding.sealed is not None
    ]


def _to_merge(
    extracted: Extracted, parts: tuple[Part, ...], replies: Replies
) -> setup_messages.FitPart:
    return setup_messages.FitPart(
        shards={
            str(part.number): setup_messages.OtherShard(part.site, extracted.rows[part.number])
            for part in parts
        },
        statistics={str(part.number): array_of(replies, part, "sealed", (None,)) for part in parts},
    )


def _encoding(joined: SplitRows, part: Part, replies: Replies) -> TableEncoding:
    body = replies.body(part, setup_messages.FittedPart)
    if body.columns is None:
        raise refuse(part, "no columns of its encoder")
    if list(body.columns.features) != list(joined.choices[part.table].specs):
        raise refuse(part, "the columns of other features")
    if len(joined.extracted.parts[part.table]) == 1:
        return TableEncoding(body.columns)
    return TableEncoding(body.columns, array_of(replies, part, "sealed", (None,)))
