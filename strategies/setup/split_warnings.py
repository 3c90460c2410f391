"""Warnings about joined rows and a split: they say less, or more, than they seem to."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from strategies.setup.joined_rows import JoinedTables
from strategies.setup.splitting import split_by_table
from tp_flower.arrays import FloatArray
from tp_flower.joins.joining import JoinStep, why_unmatched
from tp_flower.joins.mapping import TableRows
from tp_flower.objectives import EVENT
from tp_flower.query.lateral_tables import features_of_no_row
from tp_flower.settings import Settings
from tp_flower.splits import GROUP, RANDOM, TEST, TRAIN, VALIDATION, SubsetArray

MOST_NAMES, FEW_ROWS = 20, 50  # classes in a warning, rows that validate
ODDS = 2.0
LEAST_ROWS = 5.0
"""Held-out rows are far from their share by this ratio of odds, and so many rows."""


def split_warnings(joined: JoinedTables, settings: Settings) -> Iterator[str]:
    """Yield warnings about the rows that train, test or validate."""
    yield from _lost_rows(joined)
    yield from _without_partners(joined)
    yield from _repeated_keys(joined)
    yield from _unmatched(joined)
    yield from _filled(joined)
    if settings.method.holds_out:
        yield from _share(joined, settings)
        yield from _few_validate(joined)
    # the others compare labels, which may be none or stay at their sites
    if not joined.target.has_label:
        return
    yield from _without_events(joined)
    if untrained := _untrained_classes(joined, joined.subset):
        yield (
            f"no training row has {len(untrained)} of the label's classes "
            f"({', '.join(untrained[:MOST_NAMES])}; {settings.split_name}): the model "
            f"cannot predict them{_finer_split(joined, settings, len(untrained))}"
        )
    if (
        settings.split.kind == RANDOM
        and not settings.split.table
        and joined.test is not None
    ):
        yield from _constant_labels(joined)


def _without_events(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning of rows that test or validate, of which none has an event."""
    events = joined.target.column(EVENT)
    if events is None:
        return
    for subset, verb in ((TEST, "tests"), (VALIDATION, "validates")):
        rows = joined.subset == subset
        if rows.any() and not events[rows].any():
            yield (
                f"no row that {verb} has an event: their loss is 0 and their "
                "concordance none, whatever the model"
            )


def _lost_rows(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning where fewer than half of the label's rows join."""
    rows = joined.steps[0].rows
    lost = sum(step.lost_label_rows for step in joined.steps)
    if 2 * lost > rows:
        worst = max(joined.steps, key=lambda step: step.lost_label_rows)
        yield (
            f"only {rows - lost} of {rows} label rows are joined: "
            f"{worst.lost_label_rows} have no match in {worst.table} on "
            f"{worst.on}{_reason(joined, worst)}"
        )


def _without_partners(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning per LEFT JOIN that finds a row for fewer than half."""
    looked_back = {
        fragment.table
        for fragment in joined.bound.fragments
        if fragment.subquery and fragment.subquery.cutoffs
    }
    for step in joined.steps:
        if not step.is_outer or step.table in looked_back:
            continue
        if 2 * step.unmatched_before > step.rows_before:
            yield (
                f"{step.unmatched_before} of {step.rows_before} rows have no match in "
                f"{step.table} on {step.on}, and nothing from it{_reason(joined, step)}"
            )


def _reason(joined: JoinedTables, step: JoinStep) -> str:
    """Return why keys of a step may not match; else ""."""
    extracted = joined.extracted
    return why_unmatched(step, joined.bound.joins, extracted.keys, extracted.filters)


def _unmatched(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning per table without a row where SQL has a value, or without any."""
    answering = joined.extracted.answering.values()
    for fragment in joined.bound.fragments:
        rows = joined.mapping.tables[fragment.table]
        is_answering = fragment.table in answering
        is_empty = rows.is_absent | (rows.is_last & is_answering)
        cutoffs = fragment.subquery and fragment.subquery.cutoffs
        if cutoffs and is_empty.all():
            yield (
                f"no joined row has a row of LATERAL sub-query {fragment.table!r}, "
                f"with cutoffs {cutoffs}: its features say nothing"
            )
        names = [] if is_answering else features_of_no_row(fragment)
        if names and rows.has_missing:
            yield (
                f"{', '.join(names[:MOST_NAMES])} of {joined.names[fragment.table]}: "
                f"{np.count_nonzero(rows.is_absent)} of {len(is_empty)} joined rows "
                "have a key without rows, for which SQL has a value, 0 of a COUNT; "
                "here they have no match, which adds nothing to their score"
            )


def _filled(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning per table with features that SQL has a value of without a row."""
    answering = {*joined.extracted.answering.values()}
    for table, names in joined.bound.filled.items():
        rows = joined.mapping.tables[table]
        fragments = joined.bound.fragments_of(table)
        is_said = table in answering or any(map(features_of_no_row, fragments))
        if not names or is_said or not rows.has_missing:
            continue
        yield (
            f"{', '.join(names[:MOST_NAMES])} of {joined.names[table]}: "
            f"{np.count_nonzero(rows.is_absent)} of {len(rows.is_absent)} joined rows "
            "have no match, for which SQL has a value, as of COALESCE; here they have "
            "none, which adds nothing to their score. A value of the SELECT list is "
            "answered for them, too: COALESCE((SELECT MAX(t.x) FROM t WHERE t.key = "
            "o.key), 0)"
        )


def _repeated_keys(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning per table with a few repeated keys.

    These name several rows each, and the other keys one each.
    """
    for step in joined.steps:
        for keys in step.repeated_keys:
            verb = "occurs" if keys.repeated == 1 else "occur"
            times = "twice"
            if keys.most != 2:
                times = f"up to {keys.most:,} times"
            yield (
                f"{keys.repeated:,} of {keys.keys:,} keys of "
                f"{joined.names[keys.table]} {verb} {times} ({step.on}): "
                f"{keys.more_rows:,} rows more. If a key should name one row, "
                f"aggregate {keys.table} in a sub-query (GROUP BY its join key)"
            )


def _share(joined: JoinedTables, settings: Settings) -> Iterator[str]:
    """Warn of a share of held-out joined rows that is far from the settings'."""
    requested = (
        settings.test_fraction
        + (1.0 - settings.test_fraction) * settings.validation_share
    )
    share = float(joined.is_test.mean())
    odds = share * (1.0 - requested), requested * (1.0 - share)
    if (
        max(odds) > ODDS * min(odds)
        and abs(share - requested) * len(joined.subset) >= LEAST_ROWS
    ):
        reason = "some are joined many times as often as others"
        if settings.split.kind == GROUP:
            columns = ", ".join(settings.split.columns)
            reason = (
                f"a hash of {columns} holds out whole groups of rows, and these are "
                "few, or of unequal sizes"
            )
        yield (
            f"{share:.1%} of the joined rows are held out ({settings.split_name}), the "
            f"settings ask for {requested:.1%}: {reason}"
        )


def _few_validate(joined: JoinedTables) -> Iterator[str]:
    """Warn of few rows that validate."""
    if 0 < (validating := int(joined.validates.sum())) < FEW_ROWS:
        yield (
            f"{validating} joined rows validate: with so few, chance decides which "
            "model is the best; raise validation-fraction, or set it to 0"
        )


def _untrained_classes(joined: JoinedTables, subset: SubsetArray) -> list[str]:
    """Return the label's classes that no training row of the split has."""
    trained = np.unique(joined.target.select(subset == TRAIN).stored[:, 0]).tolist()
    return [
        name for code, name in enumerate(joined.labels.classes) if code not in trained
    ]


def _finer_split(joined: JoinedTables, settings: Settings, untrained: int) -> str:
    """Return the split by rows of the finest table if it trains on more classes."""
    rows = {name: int(r.is_joined.sum()) for name, r in joined.mapping.tables.items()}
    finest = max(rows, key=lambda name: rows[name])
    if settings.split.kind != RANDOM or finest == joined.bound.label_table:
        return ""
    remaining = len(
        _untrained_classes(joined, split_by_table(joined.mapping, finest, settings))
    )
    advice = (
        f'. With test-split = "random({finest})" it is {remaining or "none"} of them'
    )
    return advice if remaining < untrained else ""


def _constant_labels(joined: JoinedTables) -> Iterator[str]:
    """Yield a warning per table whose rows have one label each in all joined rows.

    Rows of the label table are held out at random: if several belong to one row of such
    a table, some of them tell the label of the others.
    """
    label_rows = joined.mapping.tables[joined.bound.label_table]
    labelled = label_rows.expand(np.arange(label_rows.rows, dtype=np.int32))
    for name, rows in joined.mapping.tables.items():
        if name == joined.bound.label_table:
            continue
        is_shared = _spread(rows, labelled) > 0
        if (
            2 * is_shared.sum() > len(is_shared)
            and not _spread(rows, joined.target.numbers).any()
        ):
            yield (
                f"the label is the same in all joined rows of a row of {name}, and "
                "random rows hold out some of them: test metrics flatter. Hold out "
                f'whole rows of it, with test-split = "random({name})", or let '
                f'each count once, with row-weight = "entity({name})"'
            )


def _spread(
    rows: TableRows, values: FloatArray | npt.NDArray[np.integer]
) -> FloatArray:
    """Return max - min of values (N,) over the joined rows of each row that has any."""
    low, high = rows.extremes(values)
    spread: FloatArray = (high - low)[np.isfinite(low)]
    return spread
