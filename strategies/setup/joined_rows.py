"""The joined rows: which rows of the sites' tables are behind each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part
from strategies.setup.extract import Extracted
from strategies.setup.labels import Labels
from strategies.setup.problem import Weighting
from strategies.setup.row_layout import LayOut, Layouts
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.joins.joining import JoinStep
from tp_flower.joins.mapping import RowWeights, TableMapping
from tp_flower.learning.losses import Loss
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings


def encoder_choices(bound: BoundQuery, settings: Settings) -> dict[str, TableChoice]:
    """Return the encoders that each table's features are to have."""
    features = {
        table: [feature.name for feature in bound.fragments_of(table)[0].features]
        for table in bound.tables
    }
    return choose_encoders(settings.encoders, features, settings.max_categories)


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of the query's tables, and which of the label table are held out.

    Attributes:
        held_out: (rows of the label table,), those for testing.
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
            table: " + ".join(dict.fromkeys(fragment.name for fragment in fragments))
            for table in self.bound.tables
            if (fragments := self.bound.fragments_of(table))
        }


@dataclass(frozen=True, kw_only=True)
class JoinedRows(SplitRows):
    """The joined rows, as far as the server knows them.

    Attributes:
        mapping: of all joined rows, over all rows of the tables.
        is_test: (joined rows,).
        train: mapping of the training rows, over the tables' rows that take part.
        test: mapping of the held-out rows, None without any.
        values: (joined rows,), labels.
    """

    labels: Labels
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    is_test: BoolArray
    train: TableMapping
    test: TableMapping | None
    layouts: Layouts
    values: FloatArray
    loss: Loss

    @property
    def parts(self) -> list[Part]:
        """The parts of all tables."""
        return [part for layout in self.layouts.values() for part in layout.parts]

    @property
    def train_labels(self) -> FloatArray:
        """Labels of the training rows."""
        return self.values[~self.is_test]

    @property
    def test_labels(self) -> FloatArray:
        """Labels of the held-out rows."""
        return self.values[self.is_test]

    def trained_rows(self, table: str) -> npt.NDArray[np.int64]:
        """Return G of each row of a table that is trained on, (n_trained,)."""
        counts = self.train.tables[table].multiplicity
        return counts[counts > 0]

    def laid_out(self, lay_out: LayOut, weights: FloatArray | None) -> "JoinedRows":
        """Return the joined rows over rows of the tables that are laid out anew."""
        (train, test), layouts = lay_out(
            self.mapping, self.is_test, self.extracted.parts, self.extracted.rows
        )
        rows = replace(self, train=train, test=test, layouts=layouts)
        return rows.with_weights(weights)

    def with_weights(self, weights: FloatArray | None) -> "JoinedRows":
        """Return the joined rows with weights of the training rows, (N,)."""
        if weights is None:
            return replace(self, weighting=replace(self.weighting, train=None))
        row_weights = RowWeights.of(weights, self.train)
        layouts = {
            name: layout.weighted(row_weights.masses[name])
            for name, layout in self.layouts.items()
        }
        weighting = replace(self.weighting, train=row_weights)
        return replace(self, layouts=layouts, weighting=weighting)
