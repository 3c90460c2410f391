"""JoinedRows: which rows of the sites' tables are behind each joined row.

From what the sites tell of their rows (:mod:`strategies.setup.extract`) the server
makes the table mapping, splits the label table's rows and chooses the loss.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part, Replies, Request
from strategies.run.sites import Inventory
from strategies.setup.extract import Extracted, extract
from strategies.setup.labels import Labels, choose_loss, gather_labels, no_labels
from strategies.setup.problem import (
    PartRows,
    TableLayout,
    compact_tables,
    weighted_tables,
)
from strategies.setup.row_weights import (
    Weighting,
    asked_weighting,
    weigh,
    without_weightless,
)
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.joins.mapping import (
    JoinStep,
    RowWeights,
    TableMapping,
    TableRows,
    build_mapping,
    split_rows,
)
from tp_flower.joins.table_rows import NO_ROW
from tp_flower.learning.losses import Loss
from tp_flower.query import BoundQuery, Query
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings

Schema = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of the query's tables, and which of the label table are held out.

    Attributes:
        bound: the query over the sites' columns.
        choices: the encoders that each table's features are to have.
        extracted: the sites' replies.
        held_out: (rows of the label table,), those for testing.
        weighting: what the joined rows weigh.
    """

    bound: BoundQuery
    choices: Mapping[str, TableChoice]
    extracted: Extracted
    held_out: BoolArray
    weighting: Weighting = field(default_factory=Weighting)

    @property
    def names(self) -> dict[str, str]:
        """Name of every table at the sites."""
        return {
            table: " + ".join(dict.fromkeys(own.name for own in fragments))
            for table in self.bound.tables
            if (fragments := self.bound.fragments_of(table))
        }


@dataclass(frozen=True, kw_only=True)
class JoinedRows(SplitRows):
    """The joined rows, as far as the server knows them.

    Attributes:
        labels: of the label table.
        mapping: of all joined rows, over all rows of the tables.
        steps: of the join.
        is_test: (joined rows,).
        train: mapping of the training rows, over the tables' rows that take part.
        test: mapping of the held-out rows, None without any.
        compact: the rows of each table that take part.
        values: (joined rows,), labels.
        loss: chosen by the labels and the settings.
    """

    labels: Labels
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    is_test: BoolArray
    train: TableMapping
    test: TableMapping | None
    compact: Mapping[str, TableLayout]
    values: FloatArray
    loss: Loss

    @property
    def train_labels(self) -> FloatArray:
        """Labels of the training rows."""
        return self.values[~self.is_test]

    @property
    def test_labels(self) -> FloatArray:
        """Labels of the held-out rows."""
        return self.values[self.is_test]


def align(
    query: Query, settings: Settings, inventory: Inventory
) -> Generator[Request, Replies, JoinedRows]:
    """Extract and return the joined rows.

    Raises:
        TPFlowerError: any of its kinds, if the query does not fit the tables or the
            label does not fit the task.
    """
    schemas = inventory.schemas()
    bound = bind(query, schemas, settings)
    _check_models(settings, bound)
    asked = asked_weighting(bound, settings)
    choices = encoder_choices(bound, settings)
    extracted = yield from extract(bound, settings, inventory)
    rows = extracted.table_rows
    labels = _labels(extracted, bound, settings)
    mapping, steps = build_mapping(
        bound.joins,
        extracted.keys,
        rows,
        bound.label_table,
        bound.outer,
        settings.max_joined_rows,
    )
    mapping, weights, asked = without_weightless(
        mapping, extracted.weights, asked, bound.weight_table or ""
    )
    rng = generator(settings.seed, Stream.SPLIT)
    # a clustering has no label to hold rows out for
    share = 0.0 if settings.method.is_clustering else settings.test_fraction
    held_out = split_rows(rows[bound.label_table], share, rng)
    label_rows = mapping.tables[bound.label_table]
    is_test = held_out[label_rows.row_of]
    train, test, compact = compact_tables(
        mapping, is_test, extracted.parts, extracted.rows
    )
    weighting = weigh(asked, weights, is_test, train, test)
    if weighting.masses is not None:
        compact = weighted_tables(compact, weighting.masses)
    values = labels.values[label_rows.row_of]
    return JoinedRows(
        bound=bound,
        choices=choices,
        extracted=extracted,
        labels=labels,
        mapping=mapping,
        steps=steps,
        held_out=held_out,
        is_test=is_test,
        train=train,
        test=test,
        compact=compact,
        values=values,
        loss=choose_loss(labels, values[~is_test], settings),
        weighting=weighting,
    )


def encoder_choices(bound: BoundQuery, settings: Settings) -> dict[str, TableChoice]:
    """Return the encoders that each table's features are to have."""
    features = {
        table: [feature.name for feature in bound.fragments_of(table)[0].features]
        for table in bound.tables
    }
    return choose_encoders(settings.encoders, features, settings.max_categories)


def bind(query: Query, schemas: Mapping[str, Schema], settings: Settings) -> BoundQuery:
    """Return the query over the sites' columns, as the strategy reads it.

    Raises:
        QueryError: it does not fit the columns; or rows are to be clustered that may
            lack a part, which has no distance to a centre.
    """
    if not settings.method.is_clustering:
        return query.bind(schemas)
    bound = query.bind_unlabelled(schemas)
    if bound.outer:
        raise QueryError(
            f"strategy {settings.strategy!r} clusters whole rows, but the query LEFT "
            f"JOINs {', '.join(sorted(bound.outer))}: join it with JOIN"
        )
    return bound


def _labels(extracted: Extracted, bound: BoundQuery, settings: Settings) -> Labels:
    """Return the labels of the label table; zeros, where nothing reads them."""
    if settings.method.is_clustering:
        rows = extracted.table_rows[bound.label_table]
        return no_labels(rows, settings.clusters)
    parts = extracted.parts[bound.label_table]
    return gather_labels(extracted.replies, parts, extracted.rows, settings)


def _check_models(settings: Settings, bound: BoundQuery) -> None:
    known = {table.lower() for table in bound.tables}
    for alias, _ in settings.models:
        if alias.lower() not in known:
            raise SettingsError(
                f"models names table {alias!r}; the query has {', '.join(bound.tables)}"
            )


IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ExpandedTable(TableLayout):
    """One table's rows, repeated.

    Attributes:
        trained: per part, the row of the shard behind each of its joined training rows.
        tested: the same of joined rows that are held out.
        sizes: rows of each part's shard.
    """

    trained: tuple[IntArray, ...]
    tested: tuple[IntArray, ...]
    sizes: tuple[int, ...]

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part's shard."""
        return self.sizes

    def set_up_arrays(self) -> dict[int, dict[str, Any]]:
        """Return what ``prepare`` sends to each part: its list of rows."""
        return {
            part.number: {
                "expanded_trained": self.trained[k],
                "expanded_tested": self.tested[k],
                **({} if self.masses is None else {"masses": self.masses[k]}),
            }
            for k, part in enumerate(self.parts)
        }


def expand(joined: JoinedRows) -> JoinedRows:
    """Return the same joined rows over rows of the tables that are repeated."""
    train = joined.mapping.select(~joined.is_test)
    test = joined.mapping.select(joined.is_test)
    train_rows: dict[str, TableRows] = {}
    test_rows: dict[str, TableRows] = {}
    tables: dict[str, ExpandedTable] = {}
    for name, parts in joined.extracted.parts.items():
        sizes = tuple(joined.extracted.rows[part.number] for part in parts)
        row_of = train.tables[name].row_of, test.tables[name].row_of
        table, numbers = _expand(name, parts, sizes, row_of)
        tables[name] = table
        total = sum(rows.total for rows in table.rows)
        train_rows[name] = TableRows(numbers[0], total)
        test_rows[name] = TableRows(numbers[1], total)
    expanded, weighting = TableMapping(train_rows), joined.weighting
    if weighting.train is not None:
        own = RowWeights.of(weighting.train.rows, expanded)
        weighting = replace(weighting, train=own)
        tables = weighted_tables(tables, own.masses)
    return replace(
        joined,
        train=expanded,
        test=None if joined.test is None else TableMapping(test_rows),
        compact=tables,
        weighting=weighting,
    )


def _expand(
    name: str,
    parts: tuple[Part, ...],
    sizes: tuple[int, ...],
    row_of: tuple[IntArray, IntArray],
) -> tuple[ExpandedTable, tuple[IntArray, IntArray]]:
    """Return the repeated table, and its row behind each joined row.

    Args:
        name: of the table.
        parts: its shards.
        sizes: their rows.
        row_of: the row of the table behind each joined row to train on, and held out.
    """
    trained, tested = (np.full(len(rows), NO_ROW, np.int32) for rows in row_of)
    layout: list[PartRows] = []
    behind: tuple[list[IntArray], list[IntArray]] = [], []
    start = offset = 0
    for size in sizes:
        to_train, to_test = (
            np.flatnonzero((rows >= offset) & (rows < offset + size)) for rows in row_of
        )
        middle = start + len(to_train)
        stop = middle + len(to_test)
        trained[to_train] = np.arange(start, middle, dtype=np.int32)
        tested[to_test] = np.arange(middle, stop, dtype=np.int32)
        behind[0].append(row_of[0][to_train] - np.int32(offset))
        behind[1].append(row_of[1][to_test] - np.int32(offset))
        is_tested = np.arange(start, stop) >= middle
        layout.append(PartRows(start, len(to_train), stop - start, is_tested))
        start, offset = stop, offset + size
    table = ExpandedTable(
        name, parts, tuple(layout), tuple(behind[0]), tuple(behind[1]), sizes
    )
    return table, (trained, tested)
