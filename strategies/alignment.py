"""Alignment: which rows of the sites' tables are behind each joined row.

From what the sites tell of their rows (:mod:`strategies.extraction`) the server makes
the table mapping, splits the label table's rows and chooses the loss.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.compact import TableLayout, compact_tables, weighted_tables
from strategies.exchange import Replies, Request
from strategies.extraction import Extracted, extract
from strategies.feature_ranges import check_ranges
from strategies.inventory import Inventory
from strategies.labels import Labels, choose_loss, gather_labels
from strategies.row_weights import (
    Weighting,
    asked_weighting,
    weigh,
    without_weightless,
)
from tp_flower.encoding.choice import TableChoice, choose_encoders
from tp_flower.errors import SettingsError
from tp_flower.experiment import Settings
from tp_flower.joins.mapping import JoinStep, TableMapping, build_mapping, split_rows
from tp_flower.learning.losses import FloatArray, Loss
from tp_flower.query import BoundQuery, Query
from tp_flower.randomness import Stream, generator

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Alignment:
    """The joined rows, as far as the server knows them.

    Attributes:
        bound: the query over the sites' columns.
        choices: the encoders that each table's features are to have.
        extracted: what the sites sent.
        labels: of the label table.
        mapping: of all joined rows, over all rows of the tables.
        steps: of the join.
        held_out: (rows of the label table,), those for testing.
        is_test: (joined rows,).
        train: mapping of the training rows, over the tables' rows that take part.
        test: mapping of the held-out rows, None without any.
        compact: the rows of each table that take part.
        values: (joined rows,), labels.
        loss: chosen by the labels and the settings.
        weighting: what the joined rows weigh.
    """

    bound: BoundQuery
    choices: Mapping[str, TableChoice]
    extracted: Extracted
    labels: Labels
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    held_out: BoolArray
    is_test: BoolArray
    train: TableMapping
    test: TableMapping | None
    compact: Mapping[str, TableLayout]
    values: FloatArray
    loss: Loss
    weighting: Weighting

    @property
    def names(self) -> dict[str, str]:
        """Name of every table at the sites."""
        return {
            table: " + ".join(dict.fromkeys(own.name for own in fragments))
            for table in self.bound.tables
            if (fragments := self.bound.fragments_of(table))
        }

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
) -> Generator[Request, Replies, Alignment]:
    """Extract and return the joined rows.

    Raises:
        TPFlowerError: any of its kinds, if the query does not fit the tables or the
            label does not fit the task.
    """
    schemas = inventory.schemas()
    bound = query.bind(schemas)
    _check_models(settings, bound)
    asked = asked_weighting(bound, settings)
    choices = choose_encoders(
        settings.encoders,
        {
            table: [feature.name for feature in bound.fragments_of(table)[0].features]
            for table in bound.tables
        },
        settings.max_categories,
    )
    check_ranges(bound, schemas, choices, settings.privacy)
    extracted = yield from extract(bound, settings, inventory)
    rows = extracted.table_rows
    labels = gather_labels(
        extracted.replies, extracted.parts[bound.label_table], extracted.rows, settings
    )
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
    held_out = split_rows(rows[bound.label_table], settings.test_fraction, rng)
    label_rows = mapping.tables[bound.label_table]
    is_test = held_out[label_rows.row_of]
    train, test, compact = compact_tables(
        mapping, is_test, extracted.parts, extracted.rows
    )
    weighting = weigh(asked, weights, is_test, train, test)
    if weighting.masses is not None:
        compact = weighted_tables(compact, weighting.masses)
    values = labels.values[label_rows.row_of]
    return Alignment(
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


def _check_models(settings: Settings, bound: BoundQuery) -> None:
    known = {table.lower() for table in bound.tables}
    for alias, _ in settings.models:
        if alias.lower() not in known:
            raise SettingsError(
                f"models names table {alias!r}; the query has {', '.join(bound.tables)}"
            )
