"""The rounds ``statistics`` and ``fit``: the sites fit the encoders of the tables.

A table's rows count as often as they are joined, so that what is encoded has the scale
and the most frequent categories of the joined training rows.

A table in one shard fits its encoder at once. The shards of another seal statistics for
each other, which their leading shard merges; the server passes on what it cannot open,
and learns how many columns each feature is encoded as.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import array_of, refuse
from strategies.run.strategy import RoundStrategy
from strategies.setup.extract import Extracted
from strategies.setup.joined_rows import JoinedTables, SplitRows
from tp_flower.arrays import AnyArray
from tp_flower.duckdb_engine import quote_name
from tp_flower.protocol import setup_messages
from tp_flower.protocol.fields import Document
from tp_flower.terms.groups import table_group

MANY_CATEGORIES: Final = 0.5
"""Categories per joined row above which a column is taken for an identifier."""
FEW_CATEGORIES: Final = 20
ALL_MISSING: Final = 100
"""Percent of the joined rows, rounded."""
MOST_LOST: Final = 1
"""Percent of the joined rows that may share the column of rare categories, unsaid."""


@dataclass(frozen=True)
class TableEncoding:
    """A table's encoder as far as the server has it; ``sealed`` for several shards."""

    columns: setup_messages.EncodedColumns
    sealed: AnyArray | None = None
    features: Sequence[setup_messages.FeatureSummary] = ()

    def rows(self) -> list[Document]:
        """Return the report's row of each feature; None where a policy hides it."""
        summaries = {
            item.column: msgspec.structs.asdict(item) for item in self.features
        }
        rows: list[Document] = []
        for name, count in self.columns.features.items():
            row: Document = dict.fromkeys(
                setup_messages.FeatureSummary.__struct_fields__
            )
            row |= {"column": name, **summaries.get(name, {}), "columns": count}
            row["kept"] = row.pop("listed")
            del row["nearly_numbers"]
            rows.append(row)
        return rows


def encoding_warnings(
    encoders: Mapping[str, TableEncoding], joined_rows: int
) -> Generator[str]:
    """Yield warnings about features, as their encoders read them."""
    features = [
        (table, item)
        for table, encoding in encoders.items()
        for item in encoding.features
    ]
    for table, item in features:
        name = f"{table}.{item.column}"
        count = item.categories or 0
        listed = item.listed or 0
        if item.nearly_numbers:
            column = f"{table}.{quote_name(item.column)}"
            yield (
                f"{name}: most texts are numbers or dates, yet it is read as text: in "
                "the tables file `nulls` lists the others, and `types` has its type, "
                '`decimal = ","` reads 0,5 and `dates` a form of dates; or write '
                f"TRY_CAST({column} AS DOUBLE), of dates AS DATE"
            )
        elif item.missing is not None and item.missing >= ALL_MISSING:
            yield (
                f"{name}: no value in all joined rows, or almost all: leave it out, or "
                "look at a cast, which makes texts missing that it cannot read (0,5)"
            )
        elif count > max(joined_rows * MANY_CATEGORIES, FEW_CATEGORIES):
            yield (
                f"{name}: {count} categories in {joined_rows} joined rows, as of an "
                "identifier: leave it out, or encode it with hash(k) or length"
            )
        elif count > listed and (item.other or 0) > MOST_LOST:
            yield (
                f"{name}: {listed} of {count} categories kept, {item.other} % of the "
                "joined rows in (other); max-categories keeps more"
            )


def fit_encoders(
    joined: SplitRows, strategy: RoundStrategy | None = None
) -> Generator[Requests, Replies, dict[str, TableEncoding]]:
    """Let the sites fit the encoders to the training rows.

    Warn of the information that a ``strategy`` loses.
    """
    # under privacy.features nothing about rows leaves without noise for the report
    # alone
    describes = strategy is not None and not strategy.settings.privacy.covers_features
    extracted = joined.extracted
    fitted_rows = joined.fitted_rows()
    bodies = {}
    for table, parts in extracted.parts.items():
        group = table_group(extracted.proposal, table)
        numbers = [part.number for part in parts]
        shards = setup_messages.TableShards(group, numbers)
        for part in parts:
            bodies[part.number] = setup_messages.StatisticsPart(
                encoders=msgspec.to_builtins(joined.choices[table]),
                shards=shards if len(parts) > 1 else None,
                describes=describes,
                **fitted_rows.get(part.number, {}),
            )
    replies = yield ask(setup_messages.StatisticsRequest(bodies), extracted.all_parts)
    if sharded := [parts for parts in extracted.parts.values() if len(parts) > 1]:
        fits = {
            s[0].number: _merge_request(bodies, extracted, s, replies) for s in sharded
        }
        leading = [parts[0] for parts in sharded]
        replies = replies.then((yield ask(setup_messages.FitRequest(fits), leading)))
    encoders = {
        table: _encoding(joined, parts[0], replies)
        for table, parts in extracted.parts.items()
    }
    if strategy is not None and isinstance(joined, JoinedTables):
        # of a table without joined rows the step that has lost them is warned of
        used = {n: e for n, e in encoders.items() if joined.layouts[n].is_trained}
        for warning in encoding_warnings(used, joined.train.joined_rows):
            strategy.warn(warning)
    return encoders


def fitted_tables(encoders: Mapping[str, TableEncoding]) -> list[str]:
    """Return the tables whose shards told each other statistics of their rows."""
    return [
        table
        for table, encoding in encoders.items()
        if encoding.columns.is_fitted and encoding.sealed is not None
    ]


def _merge_request(
    bodies: Mapping[int, setup_messages.StatisticsPart],
    extracted: Extracted,
    parts: tuple[Part, ...],
    replies: Replies,
) -> setup_messages.FitPart:
    """Return a request to merge the statistics of a table's shards."""
    return setup_messages.FitPart(
        shards={
            str(part.number): setup_messages.OtherShard(
                part.site,
                _joined_rows(bodies[part.number], extracted.rows[part.number]),
            )
            for part in parts
        },
        statistics={
            str(part.number): array_of(replies, part, "sealed", (None,))
            for part in parts
        },
    )


def _joined_rows(body: setup_messages.StatisticsPart, rows: int) -> int:
    """Return how many joined rows a shard's rows are in, as its statistics count."""
    if body.multiplicity is None:
        return rows
    return int(body.multiplicity.sum())


def _encoding(joined: SplitRows, part: Part, replies: Replies) -> TableEncoding:
    """Return a part's encoding, from its site's reply."""
    body = replies.body(part, setup_messages.FittedPart)
    if body.columns is None:
        raise refuse(part, "no columns of its encoder")
    if list(body.columns.features) != list(joined.choices[part.table].specs):
        raise refuse(part, "the columns of other features")
    is_sealed = len(joined.extracted.parts[part.table]) > 1
    sealed = None
    if is_sealed:
        sealed = array_of(replies, part, "sealed", (None,))
    return TableEncoding(body.columns, sealed, tuple(body.features))
