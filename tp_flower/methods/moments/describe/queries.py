"""The query whose joined rows are described, made of the run's.

Everything that it selects is a feature, the label and the times of events too. The
moments need a label all the same: a 0 of the first table, which reads no column.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tp_flower.errors import QueryError
from tp_flower.methods.moments.describe.settings import KAPLAN_MEIER, DescribeSettings
from tp_flower.query import BoundQuery, Feature, Query, Unlabelled
from tp_flower.query.expressions import parse_expression, render
from tp_flower.query.parsing import (
    BESIDE_LABEL,
    EVENT,
    LABEL,
    TIME,
    Item,
    SelectItem,
    item_name,
    mark_of,
)

OUTCOME: Final = "outcome"
"""The name of a feature that was the label."""
INTERVAL: Final = "interval"
INTERVAL_OF_EVENT: Final = "interval_of_event"
"""Features in which a row's time is, by number from 1, and so for a row with an event
alone; others have a 0 there."""
INVALID: Final = -1
_LABEL: Final = "0"


class NamedColumn(NamedTuple):
    """A feature of the query: its table's alias, and its name."""

    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.table}.{self.name}"


def bind_described(
    query: Query, schemas: Mapping[str, Mapping[str, str]], values: DescribeSettings
) -> BoundQuery:
    """Return the query that is described, over the sites' columns.

    Raises:
        QueryError: it weighs rows; it has no times of events for curves of them, or
            rows that enter late; `group-by` names no column, or several.
    """
    items = query.statement.items
    _check_numbers(items)
    if values.describe == KAPLAN_MEIER and _names_event(items):
        # refuses a time and an event of two tables
        query.bind(schemas)
    features = list(map(_as_feature, items))
    if values.describe == KAPLAN_MEIER:
        features = [
            *_intervals(items, values.curve_times),
            *(item for item in items if _is_called(item, _name_in(values.group_by))),
        ]
    bound = _bind(query, features, schemas)
    if values.group_by and not _columns_named(bound, values.group_by):
        features.append(SelectItem(None, _group_sql(values.group_by)))
        bound = _bind(query, features, schemas)
    group_column(bound, values.group_by)
    fragments = tuple(
        replace(fragment, label=_LABEL)
        if fragment.table == bound.label_table
        else fragment
        for fragment in bound.fragments
    )
    return replace(bound, fragments=fragments, label_sql=_LABEL)


def _bind(
    query: Query, features: Sequence[Item], schemas: Mapping[str, Mapping[str, str]]
) -> BoundQuery:
    """Return the query of these features alone."""
    statement = replace(query.statement, items=tuple(features))
    return replace(query, statement=statement).bind(schemas, Unlabelled())


def group_column(bound: BoundQuery, group_by: str) -> NamedColumn | None:
    """Return the feature whose categories are the groups; None without groups."""
    if not group_by:
        return None
    columns = _columns_named(bound, group_by)
    if len(columns) != 1:
        several = " and ".join(map(str, columns))
        raise QueryError(
            f"group-by: {group_by!r} is {several or 'no column of the query'}: write "
            "one column with the alias of its table, such as c.segment"
        )
    return columns[0]


def _group_sql(group_by: str) -> str:
    """Return the column that `group-by` names, as an item of SELECT."""
    tree = parse_expression(group_by, "group-by")
    return render(tree)


def _columns_named(bound: BoundQuery, group_by: str) -> list[NamedColumn]:
    """Return the features that `group-by` names: by their names, else as columns."""
    features = [
        (NamedColumn(fragment.table, feature.name), feature)
        for fragment in bound.fragments
        for feature in fragment.features
        if _is_of(fragment.table, group_by)
    ]
    name = _name_in(group_by)
    by_name = [column for column, each in features if each.name.lower() == name]
    by_sql = [column for column, each in features if _column(each).lower() == name]
    return list(dict.fromkeys(by_name or by_sql))


def _name_in(group_by: str) -> str:
    """Return the name of the column that `group-by` names, in lower case."""
    return group_by.rpartition(".")[2].strip().strip('"').lower()


def _is_called(item: Item, name: str) -> bool:
    """Return whether an item of SELECT is a feature of that name."""
    if not isinstance(item, SelectItem) or mark_of(item):
        return False
    return bool(name) and (item_name(item) or "").lower() == name


def _is_of(table: str, group_by: str) -> bool:
    """Return whether `group-by` names a column of a table, or of any."""
    alias = group_by.rpartition(".")[0].strip().strip('"').lower()
    return alias in ("", table.lower())


def _column(feature: Feature) -> str:
    return feature.sql.strip('"')


def _check_numbers(items: Sequence[Item]) -> None:
    marked = {mark_of(item) for item in items if isinstance(item, SelectItem)}
    if named := marked & {*BESIDE_LABEL}:
        raise QueryError(
            f"descriptive statistics count every joined row once: leave 'AS "
            f"{min(named)}' out, or give the column another name"
        )


def _names_event(items: Sequence[Item]) -> bool:
    """Return whether a query names times of events."""
    return any(isinstance(i, SelectItem) and mark_of(i) == EVENT for i in items)


def _as_feature(item: Item) -> Item:
    """Return an item as a feature: the label by another name."""
    if not isinstance(item, SelectItem) or not mark_of(item):
        return item
    name = item_name(item) or ""
    if name.lower() == LABEL:
        name = OUTCOME
    return SelectItem(name, item.sql)


def _intervals(items: Sequence[Item], times: Sequence[float]) -> Iterator[Item]:
    """Yield the two features that curves of survival are made of.

    A row without a time or an event has neither. Of a negative time, or an event that
    is neither 0 nor 1, the interval is `INVALID`.
    """
    marks = {mark_of(item): item for item in items if isinstance(item, SelectItem)}
    time = marks.get(LABEL)
    event = marks.get(EVENT)
    if time is None or event is None or (item_name(time) or "").lower() != TIME:
        raise QueryError(
            "kaplan-meier needs when a row has its event or was last seen, AS time, "
            "and whether it has one, AS event"
        )
    for mark, instead in (
        ("entry", "rows are at risk from 0 on"),
        ("strata", "write group-by"),
    ):
        if mark in marks:
            raise QueryError(f"kaplan-meier takes no 'AS {mark}': {instead}")
    code = f"CAST({event.sql} AS DOUBLE)"
    bounds = " ".join(
        f"WHEN {time.sql} <= {bound!r} THEN {number}"
        for number, bound in enumerate(times, 1)
    )
    unless_missing = (
        f"CASE WHEN {time.sql} IS NULL OR {code} IS NULL THEN NULL "
        f"WHEN {time.sql} < 0 OR {code} NOT IN (0, 1) THEN {INVALID}"
    )
    interval = f"{unless_missing} {bounds} ELSE {len(times) + 1} END"
    of_event = (
        f"{unless_missing} WHEN {code} = 0 THEN 0 {bounds} ELSE {len(times) + 1} END"
    )
    for name, sql in ((INTERVAL, interval), (INTERVAL_OF_EVENT, of_event)):
        yield SelectItem(name, render(parse_expression(sql, name)))


def interval_categories(times: Sequence[float]) -> str:
    """Return the encoder of the two features of intervals.

    >>> interval_categories((30.0, 60.0))
    'categories(-1, 1, 2, 3)'
    """
    numbers = ", ".join(map(str, (INVALID, *range(1, len(times) + 2))))
    return f"categories({numbers})"
