"""Weights of joined rows: the setting `row-weight`, the query's weight, or both.

The query's offset, the other number of rows that leaves, is checked here as well.

A joined row of weight 0 takes no part: it is removed from the mapping before the split,
as if the query had filtered it out. The training rows' weights are scaled to mean 1. An
entity's rows are counted separately among the training rows and among the held-out
rows, so that the entity counts once in each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from strategies.run.exchange import Part
from strategies.run.replies import refuse
from strategies.setup.problem import Weighting
from strategies.setup.splitting import table_named
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.extraction.extracted import LabelColumn, check_no_null
from tp_flower.joins.mapping import TableMapping
from tp_flower.objectives import LARGEST_LABEL
from tp_flower.query import BoundQuery
from tp_flower.query.fragment import Role
from tp_flower.query.reads import reads
from tp_flower.settings import Settings
from tp_flower.settings.rules import general_methods
from tp_flower.settings.run import entity_named
from tp_flower.settings.settings import weight_problems

LEAST_WEIGHT = 1e-12
LARGEST_WEIGHT = 1e12
"""Sums of weights, divided by the mean weight, travel as float32."""


def entity_table(bound: BoundQuery, settings: Settings) -> str:
    """Return the alias of the entity that `row-weight` names, or ""."""
    name = entity_named(settings.row_weight)
    if name is None:
        return ""
    if not name:
        return bound.label_table
    table = table_named(bound, name, "row-weight")
    if table in bound.outer:
        raise SettingsError(
            f"row-weight is {settings.row_weight!r}, but {table} is LEFT JOINed: "
            f"joined rows without a match have no entity; join {table} "
            "with JOIN, or name another table"
        )
    return table


def declared_weighting(bound: BoundQuery, settings: Settings) -> Weighting:
    """Return which column and entity weight the joined rows, without the values."""
    entity = entity_table(bound, settings)
    table = bound.weight_table
    if table is None:
        return Weighting(entity=entity)
    column = f"{table}: {bound.fragments_of(table)[0].weight}"
    if problems := weight_problems(f"AS weight ({column})", settings.privacy):
        raise SettingsError("; ".join(problems))
    if settings.privacy.covers_labels:
        _check_private_label(bound, settings.privacy.labels, Role.WEIGHT)
    return Weighting(column=column, entity=entity)


def _check_private_label(bound: BoundQuery, labels: str, role: Role) -> None:
    """Refuse a number that reads the columns of a label that leaves only with noise.

    A site's policy stops a server from doing so; this stops an operator's mistake.
    """
    columns: dict[Role, set[tuple[str, str]]] = {Role.LABEL: set(), role: set()}
    for fragment in bound.fragments:
        for read in reads(fragment):
            if read.role in columns:
                columns[read.role].add((fragment.name, read.column))
    if shared := sorted(columns[Role.LABEL] & columns[role]):
        table, column = shared[0]
        raise QueryError(
            f"privacy.labels is {labels!r}, but the {role}, which leaves without "
            f"noise, reads column {column!r} of {table!r}, as the label does"
        )


def check_offset(bound: BoundQuery, settings: Settings) -> None:
    """Refuse an offset where the server has no scores of all rows to add it to."""
    if not bound.offset_sql:
        return
    method = settings.method
    if method.keeps_labels or settings.training_sample:
        reason = "draws rows by their labels"
        if method.keeps_labels:
            reason = "adds up labels at their sites"
        difference = ""
        if bound.label_sql:
            difference = (
                f", and write ({bound.label_sql}) - ({bound.offset_sql}) AS label for "
                f"the squared loss; for others use {general_methods()} on all rows"
            )
        raise QueryError(
            f"strategy {settings.method_name!r} {reason}, where no offset is added to "
            f"scores: leave 'AS offset' out{difference}"
        )
    if settings.privacy.covers_labels:
        _check_private_label(bound, settings.privacy.labels, Role.OFFSET)


def query_offsets(parts: Mapping[Part, FloatArray], sql: str) -> FloatArray:
    """Return the offsets of the label table's rows, (n,), from its shards'."""
    for part, offset in parts.items():
        if not np.isfinite(offset).all():
            raise refuse(part, "an offset that is no number")
        largest = float(np.abs(offset).max(initial=0.0))
        if largest > LARGEST_LABEL:
            raise QueryError(
                f"the offset {sql} reaches {largest:.3g}, beyond {LARGEST_LABEL:g}: "
                "divide it in the query"
            )
    return np.concatenate(list(parts.values()))


def query_survival(
    parts: Mapping[Part, FloatArray], role: Role, sql: str
) -> FloatArray:
    """Return a number of rows beside times of events, (n,), from the shards'.

    The label's table writes it as ``sql``.
    """
    columns = [LabelColumn("number", values) for values in parts.values()]
    check_no_null(columns, sql, role)
    return np.concatenate(list(parts.values()))


def query_weights(parts: Sequence[FloatArray], column: str) -> FloatArray:
    """Return the weights of the rows of a table, (n,), from its shards' (NaN: NULL)."""
    weights = np.concatenate(parts)
    lower = LEAST_WEIGHT
    upper = LARGEST_WEIGHT
    is_odd = (weights > 0.0) & ((weights < lower) | (weights > upper))
    for is_wrong, fault, advice in (
        (np.isnan(weights), "NULL", "write COALESCE(..., 0), or add a filter"),
        (weights < 0.0, "negative", "it must be 0 or more"),
        (is_odd, f"beyond {lower:g} .. {upper:g}", "scale it in the query"),
    ):
        if count := int(np.count_nonzero(is_wrong)):
            raise QueryError(
                f"the weight ({column}) is {fault} in {count} of {len(weights)} rows: "
                f"{advice}"
            )
    return weights


def drop_weightless(
    mapping: TableMapping, weights: FloatArray | None, declared: Weighting, table: str
) -> tuple[TableMapping, FloatArray | None, Weighting]:
    """Return the joined rows of weight above 0, their weights, and how many are out."""
    if weights is None:
        return mapping, None, declared
    joined = mapping.tables[table].expand(weights)
    if not joined.any():
        raise QueryError(
            f"the weight ({declared.column}) is 0 in all {len(joined)} joined rows: "
            "there is nothing to train on"
        )
    if joined.all():
        return mapping, joined, declared
    taking_part = joined > 0.0
    declared = replace(declared, left_out=int(np.count_nonzero(~taking_part)))
    return mapping.select(taking_part), joined[taking_part], declared


def row_weights(
    declared: Weighting,
    weights: FloatArray | None,
    mapping: TableMapping,
    rows: BoolArray | None = None,
) -> FloatArray | None:
    """Return the weights of some or all joined rows, (n,); None if all are equal."""
    if weights is None and not declared.entity:
        return None
    if rows is not None:
        mapping = mapping.select(rows)
        weights = None if weights is None else weights[rows]
    if declared.entity:
        # each joined row has a row of the entity's table
        entity = mapping.tables[declared.entity]
        by_entity = entity.expand(entity.inverse_multiplicity)
        weights = by_entity if weights is None else weights * by_entity
    # a run with equal weights must equal an unweighted one to the bit
    if weights is None or np.all(weights[:1] == weights):
        return None
    return weights
