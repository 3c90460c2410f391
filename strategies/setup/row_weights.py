"""What each joined row weighs: the setting `row-weight`, the query's weight, or both.

A joined row of weight 0 takes no part: it is left out of the mapping before the split,
as if the query had filtered it away. Of the others the training rows' weights are
scaled to mean 1; an entity's rows are counted among the training rows for training, and
among the held-out ones for testing, so that it counts once there and once here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tp_flower.arrays import BoolArray, FloatArray, effective_rows
from tp_flower.errors import QueryError, SettingsError
from tp_flower.joins.mapping import RowWeights, TableMapping, entity_weights
from tp_flower.query import BoundQuery
from tp_flower.query.reads import Role, reads
from tp_flower.settings import Settings, entity_named, weight_problems

LEAST_WEIGHT, LARGEST_WEIGHT = 1e-12, 1e12
"""Sums of weights, over the mean weight, travel as float32."""


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

    def facts(self, joined_rows: int) -> dict[str, object] | None:
        """Return what a report says of the weights; None where nothing is asked.

        Args:
            joined_rows: N.
        """
        if not (self.column or self.entity):
            return None
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


def asked_weighting(bound: BoundQuery, settings: Settings) -> Weighting:
    """Return which column and which entity weigh the joined rows, before any is known.

    Raises:
        QueryError: the weight would tell of private labels.
        SettingsError: `row-weight` names no table that it could; or the query has a
            weight where models or scores are protected.
    """
    entity, table = entity_table(bound, settings), bound.weight_table
    if table is None:
        return Weighting(entity=entity)
    column = f"{table}: {bound.fragments_of(table)[0].weight}"
    if problems := weight_problems(f"AS weight ({column})", settings.privacy):
        raise SettingsError("; ".join(problems))
    _check_private_label(bound, settings)
    return Weighting(column=column, entity=entity)


def _check_private_label(bound: BoundQuery, settings: Settings) -> None:
    """Refuse a weight that reads what a label is made of that leaves with noise only.

    A site's policy keeps a server from asking; this keeps an operator from a mistake.
    """
    if not settings.privacy.covers_labels:
        return
    read: dict[Role, set[tuple[str, str]]] = {Role.LABEL: set(), Role.WEIGHT: set()}
    for fragment in bound.fragments:
        for own in reads(fragment):
            if own.role in read:
                read[own.role].add((fragment.name, own.column))
    if both := sorted(read[Role.LABEL] & read[Role.WEIGHT]):
        table, column = both[0]
        raise QueryError(
            f"privacy.labels is {settings.privacy.labels!r}, and the weight, which "
            f"leaves as it is, reads column {column!r} of {table!r}, which the label "
            "is made of"
        )


def query_weights(parts: Sequence[FloatArray], column: str) -> FloatArray:
    """Return what the query says that each row of the weight's table weighs, (n,).

    Args:
        parts: what each shard sent, in their order; NaN where it is NULL.
        column: table and expression, for messages.

    Raises:
        QueryError: a weight is NULL, negative, or of no usable size.
    """
    weights = np.concatenate(parts)
    least, most = LEAST_WEIGHT, LARGEST_WEIGHT
    is_odd = (weights > 0.0) & ((weights < least) | (weights > most))
    for is_wrong, what, advice in (
        (np.isnan(weights), "NULL", "write COALESCE(..., 0), or add a filter"),
        (weights < 0.0, "negative", "it must be 0 or more"),
        (is_odd, f"beyond {least:g} .. {most:g}", "scale it in the query"),
    ):
        if count := int(np.count_nonzero(is_wrong)):
            raise QueryError(
                f"the weight ({column}) is {what} in {count} of {len(weights)} rows: "
                f"{advice}"
            )
    return weights


def without_weightless(
    mapping: TableMapping, weights: FloatArray | None, asked: Weighting, table: str
) -> tuple[TableMapping, FloatArray | None, Weighting]:
    """Return the joined rows that weigh something, what they do, and the number left.

    Args:
        mapping: of all joined rows.
        weights: of the rows of the weight's table, (n,); None without a weight.
        asked: column and entity.
        table: alias of the weight's table.

    Raises:
        QueryError: all weigh nothing.
    """
    if weights is None:
        return mapping, None, asked
    joined = weights[mapping.tables[table].row_of]
    if not joined.any():
        raise QueryError(
            f"the weight ({asked.column}) is 0 in all {len(joined)} joined rows: there "
            "is nothing to train on"
        )
    if joined.all():
        return mapping, joined, asked
    left_out = len(joined) - int(np.count_nonzero(joined))
    return (
        mapping.select(joined > 0.0),
        joined[joined > 0.0],
        replace(asked, left_out=left_out),
    )


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
    own = row_weights(asked, given, train, ~is_test)
    return replace(
        asked,
        train=None if own is None else RowWeights.of(own, train),
        test=None if test is None else row_weights(asked, given, test, is_test),
    )


def row_weights(
    asked: Weighting,
    given: FloatArray | None,
    mapping: TableMapping,
    chosen: BoolArray | None = None,
) -> FloatArray | None:
    """Return what some joined rows weigh, (n,); None where all weigh alike.

    Args:
        asked: column and entity.
        given: the query's weights of the joined rows that take part; None without.
        mapping: of those that are chosen.
        chosen: which of them; None for all.
    """
    if given is None and not asked.entity:
        return None
    own = given if given is None or chosen is None else given[chosen]
    weights = np.ones(mapping.joined_rows) if own is None else own
    if asked.entity:
        weights = weights * entity_weights(mapping.tables[asked.entity])
    # equal weights are none: such a run is the same to the bit
    return None if np.all(weights[:1] == weights) else weights
