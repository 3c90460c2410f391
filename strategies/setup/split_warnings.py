"""Warnings about a split: rows it holds out say less, or more, than they seem to."""

from collections.abc import Iterator

import numpy as np

from strategies.setup.joined_rows import JoinedRows
from tp_flower.arrays import FloatArray
from tp_flower.joins.mapping import TableRows
from tp_flower.settings import Settings
from tp_flower.splits import RANDOM


def split_warnings(joined: JoinedRows, settings: Settings) -> Iterator[str]:
    """Yield what a user should know about the rows that test or validate."""
    if joined.test is None:
        return
    if unseen := _unseen_classes(joined):
        yield (
            f"no training row has the label's {unseen}, which held-out rows have "
            f"({settings.split_name}): the model cannot predict them"
        )
    if settings.split.kind == RANDOM:
        yield from _constant_labels(joined)
    elif whole := _held_out_whole(joined):
        yield (
            f"held out whole ({settings.split_name}): {', '.join(whole)}: no training row has them"
        )


def _unseen_classes(joined: JoinedRows) -> str:
    """Return the classes of held-out rows that no training row has, in words."""
    names = joined.labels.classes
    if not names or joined.values.ndim > 1:
        return ""
    unseen = np.setdiff1d(joined.test_labels, joined.train_labels).astype(int)
    words = "class" if len(unseen) == 1 else "classes"
    return f"{words} {', '.join(names[code] for code in unseen)}" * bool(len(unseen))


def _constant_labels(joined: JoinedRows) -> Iterator[str]:
    """Yield a warning per table whose rows have one label each in all joined rows.

    Rows of the label table are held out at random: if several belong to one row of such
    a table, some of them tell the label of the others.
    """
    labelled = joined.mapping.tables[joined.bound.label_table].row_of
    for name, rows in joined.mapping.tables.items():
        if name == joined.bound.label_table or joined.values.ndim > 1:
            continue
        is_shared = _spread(rows, labelled.astype(np.float64)) > 0
        if 2 * is_shared.sum() > len(is_shared) and not _spread(rows, joined.values).any():
            yield (
                f"the label is the same in all joined rows of a row of {name}, and "
                "random rows hold out some of them: test metrics flatter. Hold out "
                f'whole rows of it, with test-split = "group({name}.<key>)", or let '
                f'each count once, with row-weight = "entity({name})"'
            )


def _spread(rows: TableRows, values: FloatArray) -> FloatArray:
    """Return max - min of values (N,) over the joined rows of each row that has any."""
    is_matched = rows.row_of >= 0
    row_of, values = rows.row_of[is_matched], values[is_matched]
    low, high = np.full(rows.rows, np.inf), np.full(rows.rows, -np.inf)
    np.minimum.at(low, row_of, values)
    np.maximum.at(high, row_of, values)
    spread: FloatArray = (high - low)[np.isfinite(low)]
    return spread


def _held_out_whole(joined: JoinedRows) -> list[str]:
    """Return, by table in words, how many of its joined rows are never trained on."""
    lines = []
    for name, layout in joined.layouts.items():
        total = sum(rows.total for rows in layout.rows)
        untrained = total - sum(rows.trained for rows in layout.rows)
        if untrained and name != joined.bound.label_table:
            lines.append(f"{untrained} of {total} rows of {name}")
    return lines
