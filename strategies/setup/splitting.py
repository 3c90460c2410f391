"""Splitting the joined rows: at random, or by the columns of a table, at its sites.

The server draws random rows, and the sample of the label table's rows to train on.

Of a group split a site tells which of its rows are held out, as the keyed hash of their
values decides; of a split by time the order of its rows, whose last share the server
holds out. The table mapping carries both to the joined rows; one that has no row of the
table, or no value there, is trained on.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.replies import array_of
from tp_flower import splits
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.folds import NO_FOLD, FoldArray, fold_subset, time_subset
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.protocol.setup_messages import ExtractedPart
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings
from tp_flower.terms.extraction import (
    random_folds,
    random_subset,
    sampled_rows,
    split_shares,
)


class Split(NamedTuple):
    """The subset of joined rows, (N,), and the label table's rows held out, (n,)."""

    subset: splits.SubsetArray
    held_out: BoolArray


def split_joined(
    bound: BoundQuery,
    parts: Sequence[Part],
    replies: Replies,
    mapping: TableMapping,
    settings: Settings,
) -> Split:
    """Return the split of the joined rows; ``parts`` hold its columns."""
    labelled = mapping.tables[bound.label_table]
    if settings.split.kind == splits.RANDOM:
        if not settings.split.table:
            of_rows = random_subset(sampled_rows(labelled.rows, settings), settings)
            return Split(labelled.expand(of_rows), of_rows != splits.TRAIN)
        table = table_named(bound, settings.split.table, "test-split")
        subset = split_by_table(mapping, table, settings)
    else:
        subset = _split_by_columns(
            parts, replies, mapping.tables[bound.split_table], settings
        )
    if settings.folds and not (settings.test_fraction or settings.validation_share):
        # all rows are in folds
        return Split(subset, np.zeros(labelled.rows, np.bool_))
    if not subset.any():
        raise QueryError(
            f"test-split {settings.test_split!r} holds out none of the {len(subset)} "
            f"joined rows: raise test-fraction ({settings.test_fraction:g}), name "
            "columns with more values, or take another seed"
        )
    if (subset != splits.TRAIN).all() and _training_rows_left(settings, len(subset)):
        raise QueryError(_explain_no_rows(settings, len(subset)))
    return _split_of(subset, labelled)


def split_fold(
    bound: BoundQuery,
    parts: Sequence[Part],
    replies: Replies,
    mapping: TableMapping,
    settings: Settings,
    fold: int,
) -> Split:
    """Return the split where a fold of a search is tested on; other rows may be OUT."""
    labelled = mapping.tables[bound.label_table]
    subset = split_joined(bound, parts, replies, mapping, settings).subset
    if settings.split.kind == splits.TIME:
        times = _told(parts, replies, mapping.tables[bound.split_table], "times")
        share = settings.validation_share
        subset = time_subset(subset, times, settings.folds, fold, share)
    else:
        folds = _folds(bound, parts, replies, mapping, settings)
        subset = fold_subset(subset, folds, fold)
    if not ((subset == splits.TRAIN).any() and (subset == splits.TEST).any()):
        raise QueryError(
            f"folds: {settings.folds} folds by test-split {settings.test_split!r} leave"
            f" no rows to train on, or to hold out, in fold {fold + 1}: take fewer "
            "folds, or a split with more values"
        )
    return _split_of(subset, labelled)


def _split_of(subset: splits.SubsetArray, labelled: TableRows) -> Split:
    """Return the split of joined rows, with the label rows that only hold out."""
    is_train = subset == splits.TRAIN
    return Split(subset, labelled.any_of(~is_train) & ~labelled.any_of(is_train))


def _folds(
    bound: BoundQuery,
    parts: Sequence[Part],
    replies: Replies,
    mapping: TableMapping,
    settings: Settings,
) -> FoldArray:
    """Return the fold of each joined row, (N,), of a split at random or by groups."""
    if settings.split.kind == splits.GROUP:
        folds = _told(parts, replies, mapping.tables[bound.split_table], "folds")
        return folds.astype(np.uint8)
    labelled = mapping.tables[bound.label_table]
    rows, taking_part = labelled, sampled_rows(labelled.rows, settings)
    if settings.split.table:
        table = table_named(bound, settings.split.table, "test-split")
        rows = mapping.tables[table]
        taking_part = rows.is_joined
    is_tested = random_subset(taking_part, settings) == splits.TEST
    folds = random_folds(taking_part & ~is_tested, settings)
    return rows.expand(folds, absent=NO_FOLD)


def _training_rows_left(settings: Settings, rows: int) -> int:
    """Return how many of the rows the settings leave to train on."""
    shares = split_shares(settings)
    remaining = rows - round(rows * shares.test)
    return remaining - round(remaining * shares.validation)


def _explain_no_rows(settings: Settings, rows: int) -> str:
    """Return why a split leaves no joined row to train on."""
    if settings.split.kind == splits.TIME:
        (column,) = settings.split.columns
        reason = (
            f"rows at one time stay together, and {column} has too few different times"
        )
    elif settings.split.kind == splits.GROUP:
        reason = f"{', '.join(settings.split.columns)} have too few different values"
    else:
        reason = f"{settings.split.table} has too few rows"
    return (
        f"test-split {settings.test_split!r} holds out all {rows} joined rows: "
        f"{reason}; name "
        'another, or set test-split = "random"'
    )


def table_named(bound: BoundQuery, alias: str, setting: str) -> str:
    """Return the table that a setting names, ignoring case as DuckDB does."""
    for table in bound.tables:
        if table.lower() == alias.lower():
            return table
    raise SettingsError(
        f"{setting} names table {alias!r}; the query has {', '.join(bound.tables)}"
    )


def check_aliases(bound: BoundQuery, settings: Settings) -> None:
    """Refuse a setting that names a table which the query has not."""
    named = [(alias, "models") for alias, _ in settings.models]
    named += [(alias, "effects") for alias in settings.effect_tables]
    named += [(alias, "factors") for alias in settings.factor_tables]
    if settings.split.table:
        named.append((settings.split.table, "test-split"))
    for alias, setting in named:
        table_named(bound, alias, setting)


def split_by_table(
    mapping: TableMapping, table: str, settings: Settings
) -> splits.SubsetArray:
    """Return the subset of each joined row, (N,), holding out whole rows of a table."""
    rows = mapping.tables[table]
    of_rows = random_subset(rows.is_joined, settings)
    return rows.expand(of_rows, absent=splits.TRAIN)


def _split_by_columns(
    parts: Sequence[Part], replies: Replies, rows: TableRows, settings: Settings
) -> splits.SubsetArray:
    """Return the subset of each joined row, (N,), from the columns' sites."""
    bodies = [replies.body(part, ExtractedPart) for part in parts]
    kinds = {body.keys[-1] for body in bodies if body.rows and body.keys}
    if len(kinds) > 1:
        raise QueryError(
            f"test-split {settings.test_split!r}: the columns differ in type between "
            f"the shards: {', '.join(sorted(kinds))}"
        )
    if settings.split.kind == splits.GROUP:
        return _told(parts, replies, rows, "subset").astype(np.uint8)
    return splits.split_by_order(
        _told(parts, replies, rows, "times"), split_shares(settings)
    )


_ABSENT: Final = {"subset": splits.TRAIN, "folds": NO_FOLD, "times": np.nan}
"""By what the sites of a split's columns tell: that of joined rows without a row."""


def _told(
    parts: Sequence[Part], replies: Replies, rows: TableRows, name: str
) -> AnyArray:
    """Return what the sites of a split's columns tell of each joined row, (N,)."""
    of_rows = [
        array_of(replies, part, name, (replies.body(part, ExtractedPart).rows,))
        for part in parts
    ]
    return rows.expand(np.concatenate(of_rows), absent=_ABSENT[name])
