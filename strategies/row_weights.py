"""What each joined row weighs: the setting `row-weight`, the query's weight, or both.

A joined row of weight 0 takes no part: it is left out of the mapping before the split,
as if the query had filtered it away. Of the others the training rows' weights are
scaled to mean 1; an entity's rows are counted among the training rows for training, and
among the held-out ones for testing, so that it counts once there and once here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tp_flower.errors import SettingsError
from tp_flower.experiment import Settings
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.row_weights import RowWeights, entity_named, entity_weights
from tp_flower.learning.means import FloatArray, effective_rows
from tp_flower.query import BoundQuery

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Weighting:
    """The weights of the joined rows.

    Attributes:
        train: of the training rows; None where all weigh alike.
        test: (held-out rows,), > 0; None where all weigh alike.
        column: table and expression of the query's weight; "" without one.
        entity: alias of the table whose rows count once; "" for none.
        left_out: joined rows of weight 0.
    """

    train: RowWeights | None = None
    test: FloatArray | None = None
    column: str = ""
    entity: str = ""
    left_out: int = 0

    @property
    def train_rows(self) -> FloatArray | None:
        """The training rows' weights, (N,), mean 1; None where all weigh alike."""
        return None if self.train is None else self.train.rows

    @property
    def masses(self) -> Mapping[str, FloatArray] | None:
        """By table what the training rows of each of its rows weigh, (n_i,)."""
        return None if self.train is None else self.train.masses

    @property
    def is_asked(self) -> bool:
        """Whether query or settings say something of weights."""
        return bool(self.column or self.entity)

    def facts(self, joined_rows: int) -> dict[str, object]:
        """Return what a report says of the weights.

        Args:
            joined_rows: N.
        """
        rows = np.ones(joined_rows) if self.train is None else self.train.rows
        return {
            "column": self.column,
            "entity": self.entity,
            "min": float(rows.min()),
            "max": float(rows.max()),
            "effective-rows": effective_rows(rows),
            "left-out": self.left_out,
        }


def entity_table(bound: BoundQuery, settings: Settings) -> str:
    """Return the alias of the entity that `row-weight` names; "" for none.

    Raises:
        SettingsError: the query has no such table, or LEFT JOINs it.
    """
    named = entity_named(settings.row_weight)
    if named is None:
        return ""
    if not named:
        return bound.label_table
    found = [table for table in bound.tables if table.lower() == named.lower()]
    if not found:
        raise SettingsError(
            f"row-weight names table {named!r}; the query has {', '.join(bound.tables)}"
        )
    if found[0] in bound.outer:
        raise SettingsError(
            f"row-weight is {settings.row_weight!r}, but {found[0]} is LEFT JOINed: "
            f"joined rows without a match are rows of no entity; join {found[0]} with "
            "JOIN, or name another table"
        )
    return found[0]


def weigh(
    asked: Weighting,
    given: FloatArray | None,
    is_test: BoolArray,
    train: TableMapping,
    test: TableMapping | None,
) -> Weighting:
    """Return what is asked with the weights of the training and the held-out rows.

    Args:
        asked: column and entity.
        given: the query's weights of the joined rows that take part, > 0; None without.
        is_test: of the same rows, those held out.
        train: mapping of the training rows.
        test: mapping of the held-out rows, None without any.
    """

    def weights_of(mapping: TableMapping, chosen: BoolArray) -> FloatArray | None:
        weights = np.ones(mapping.joined_rows) if given is None else given[chosen]
        if asked.entity:
            weights = weights * entity_weights(mapping.tables[asked.entity])
        # equal weights are none: such a run is the same to the bit
        return None if np.all(weights == weights[0]) else weights

    own = weights_of(train, ~is_test)
    return replace(
        asked,
        train=None if own is None else RowWeights.of(own, train),
        test=None if test is None else weights_of(test, is_test),
    )
