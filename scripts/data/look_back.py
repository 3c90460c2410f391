"""Windows over event tables up to a cutoff: of RelBench's entity tasks, the SQL.

An event table has a time and the key of its entity, or reaches it through one more
table of the same owner: then the owner's derived table has the key. For each label, of
the entity's events before the cutoff: how many, sums and means of numbers in windows of
some steps, days since the last one, and the last one itself.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple

import duckdb

from scripts.data.run_files import DataError
from tp_flower.duckdb_engine import quote_name, quote_text
from tp_flower.query.cutoffs import MOST_POINTS

Tables = Mapping[str, Mapping[str, Any]]
"""The tables of a manifest: pkey, and perhaps time_col and fkeys."""

ALL: Final = "all"
MOST_CATEGORIES: Final = 50
"""Distinct values up to which a text or a foreign key of the last event is a feature:
beyond them it is rather a name than a category."""
MOST_COUNTED: Final = 5
"""Distinct values up to which the rows of each are counted in every window."""

_HOUR: Final = timedelta(hours=1)
_NUMBERS: Final = ("TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL")


class Events(NamedTuple):
    """Rows with a time and an entity.

    ``select`` is the SELECT over ``tables`` of one owner that attaches the entity's
    key; "" where the table has it. ``foreign`` are keys of other tables, ``without``
    the columns that say which row it is, of whom and when.
    """

    name: str
    table: str
    key: str
    time: str
    tables: tuple[str, ...]
    foreign: tuple[str, ...]
    without: tuple[str | None, ...]
    select: str = ""


class Grid(NamedTuple):
    """The setting ``cutoff-grid``, its points, and the task's step in hours."""

    setting: str
    points: int
    hours: int


def owners_of(tables: Collection[str], text: str) -> dict[str, str]:
    """Return the owner of each table: its own name, or the one in ``a=t1,t2;b=t3``.

    >>> owners_of(["results", "races", "drivers"], "fia=results,races")
    {'results': 'fia', 'races': 'fia', 'drivers': 'drivers'}
    """
    owners = {name: name for name in tables}
    for group in filter(None, text.split(";")):
        owner, _, members = group.partition("=")
        for table in members.split(","):
            if table not in owners or not owner:
                raise DataError(
                    f"--owners has {group!r}; write owner=table,table;owner=table with "
                    f"tables among {', '.join(owners)}"
                )
            owners[table] = owner
    return owners


def steps_back(text: str) -> tuple[list[int], bool]:
    """Return the windows in steps, and whether there is one of all time.

    >>> steps_back("1,3,all")
    ([1, 3], True)
    """
    names = text.split(",")
    counts = [int(name) for name in names if name != ALL and name.isdecimal()]
    if not all(counts) or len(counts) + names.count(ALL) < len(names):
        raise DataError(
            f"--windows is {text!r}; write numbers of steps and {ALL!r}, such as "
            "1,3,all"
        )
    return sorted(counts), ALL in names


def grid_of(cutoffs: Sequence[datetime]) -> Grid:
    """Return the coarsest grid on which all cutoffs lie, which are distinct and sorted.

    >>> days = [datetime(2020, 1, 1), datetime(2020, 1, 31), datetime(2020, 3, 31)]
    >>> grid_of(days)
    Grid(setting='30 day from 2020-01-01 to 2020-03-31', points=4, hours=720)
    >>> grid_of([datetime(year, 1, 1) for year in range(2018, 2022)])
    Grid(setting='12 month from 2018-01-01 to 2021-01-01', points=4, hours=8760)
    """
    if len(cutoffs) < 2:
        raise DataError("a task that looks back has two cutoffs at least")
    start, end = (datetime.combine(cutoffs[n], datetime.min.time()) for n in (0, -1))
    if odd := [time for time in cutoffs if (time - start) % _HOUR]:
        raise DataError(
            f"the cutoff {odd[0]} is not on the hour, and a cutoff-grid has steps of "
            "hours, days or months: round the times of the task's tables down"
        )
    lengths, unit = [(time - start) // _HOUR for time in cutoffs], "hour"
    if all(time.day == 1 and time.hour == 0 for time in cutoffs):
        # months and years differ in hours
        lengths, unit = [12 * time.year + time.month for time in cutoffs], "month"
        lengths = [length - lengths[0] for length in lengths]
    step = math.gcd(*lengths)
    points = lengths[-1] // step + 1
    if points > MOST_POINTS:
        raise DataError(
            f"the coarsest grid of all cutoffs has a step of {step} {unit}s and "
            f"{points} points; at most {MOST_POINTS} are allowed: leave out the "
            "earliest labels"
        )
    if unit == "hour" and step % 24 == 0:
        step, unit = step // 24, "day"
    # of the grid's last day the midnight counts
    end += timedelta(days=1) * (cutoffs[-1] > end)
    distances = Counter(later - time for time, later in pairwise(cutoffs))
    usual = distances.most_common(1)[0][0]
    setting = f"{step} {unit} from {start.date()} to {end.date()}"
    return Grid(setting, points, max(usual // _HOUR, 1))


def events_of(
    tables: Tables, entity: str, owners: Mapping[str, str]
) -> Iterator[Events | tuple[str, str]]:
    """Yield the event tables one and two joins away from an entity.

    Those that have to be left out come as their name and the reason.
    """
    for name, table in tables.items():
        for key, target in table.get("fkeys", {}).items():
            if target == entity:
                yield _direct(tables, name, key)
            elif name != entity:
                yield from _through(tables, entity, owners, (name, key, target))


def _direct(tables: Tables, name: str, key: str) -> Events | tuple[str, str]:
    table = tables[name]
    if not table.get("time_col"):
        return name, "has no time_col"
    time, keys = table["time_col"], tuple(table["fkeys"])
    return Events(name, name, key, time, (name,), keys, (table.get("pkey"), key, time))


def _through(
    tables: Tables, entity: str, owners: Mapping[str, str], link: tuple[str, str, str]
) -> Iterator[Events | tuple[str, str]]:
    """Yield the rows of a table that has the key of one with a join to the entity.

    Either the other table has the entity's key, or the entity has the key of the other.
    """
    name, key, middle = link
    for other, target in tables[middle].get("fkeys", {}).items():
        if target == entity and middle != name:
            on = f"e.{quote_name(key)} = m.{quote_name(tables[middle]['pkey'])}"
            yield _attached(tables, owners, (name, middle, other), on, entity)
    for other, target in tables[entity].get("fkeys", {}).items():
        if target == middle:
            on = f"e.{quote_name(key)} = m.{quote_name(other)}"
            attach = (name, entity, tables[entity]["pkey"])
            yield _attached(tables, owners, attach, on, entity)


def _attached(
    tables: Tables,
    owners: Mapping[str, str],
    attach: tuple[str, str, str],
    on: str,
    entity: str,
) -> Events | tuple[str, str]:
    """Return a table's rows with the entity's key, ``key`` of the ``middle`` table."""
    name, middle, key = attach
    if owners[name] != owners[middle]:
        return name, (
            f"is two joins away, by {middle}: --owners together={name},{middle}"
        )
    # what a row refers to may be later than the row
    pairs = (("e", name), ("m", middle if middle != entity else ""))
    times = [
        f"{alias}.{quote_name(tables[table]['time_col'])}"
        for alias, table in pairs
        if table and tables[table].get("time_col")
    ]
    if not times:
        return name, "has no time_col"
    select = (
        f"SELECT e.*, m.{quote_name(key)} AS entity_, GREATEST({', '.join(times)}) AS "
        f"time_ FROM {quote_name(name)} e JOIN {quote_name(middle)} m ON {on}"
    )
    table = tables[name]
    without = ("entity_", "time_", table.get("pkey"), table.get("time_col"))
    alias, of = f"{name}_by_{middle}_{key}", (name, middle)
    foreign = tuple(table["fkeys"])
    return Events(alias, name, "entity_", "time_", of, foreign, without, select)


class Windows(NamedTuple):
    """Of which labels, and how far back: what all sub-queries of a run have alike.

    ``entity`` and ``cutoff`` are columns of the label's table, with its alias.
    """

    entity: str
    cutoff: str
    hours: int
    steps: Sequence[int]
    has_all: bool

    @property
    def spans(self) -> list[tuple[str, int | None]]:
        """The windows' suffixes and hours, the widest last; of all time None."""
        spans = [(f"_{count}", count * self.hours) for count in self.steps]
        return [*spans, *([(f"_{ALL}", None)] if self.has_all else [])]

    def since(self, time: str, hours: int | None) -> str:
        """Return the condition that a time is at most some hours before the cutoff."""
        if hours is None:
            return "TRUE"
        length = f"{hours // 24} DAY" if hours % 24 == 0 else f"{hours} HOUR"
        return f"{time} >= {self.cutoff} - INTERVAL {length}"

    def days_since(self, time: str) -> str:
        """Return the days from the last of some times to the cutoff."""
        return f"(EPOCH({self.cutoff}) - EPOCH(MAX({time}))) / 86400"


def sub_queries(
    engine: duckdb.DuckDBPyConnection,
    events: Events,
    windows: Windows,
    hidden: Collection[tuple[str, ...]],
) -> Iterator[tuple[list[str], str]]:
    """Yield, of the events before a label's cutoff, features with the join they need.

    ``engine`` has the events under their name.
    """
    hidden_here = {name for table, name in hidden if table == events.table}
    numbers, texts = _columns(engine, events, hidden_here)
    time, name = f"p.{quote_name(events.time)}", quote_name(events.name)
    rows = (
        f"FROM {name} p WHERE p.{quote_name(events.key)} = {windows.entity} AND "
        f"{time} < {windows.cutoff}"
    )
    widest = windows.since(time, windows.spans[-1][1])
    past = rows if windows.has_all else f"{rows} AND {widest}"
    yield _join(f"{events.name}_past", _aggregates(numbers, windows, time), past)
    if last := {**numbers, **texts}:
        # of events at one time the same is the last, however they are read
        order = ", ".join(f"{value} DESC" for value in (time, *last.values()))
        order = f"ORDER BY {order} LIMIT 1"
        yield _join(f"{events.name}_last", last, f"{past} {order}")


def ages(
    table: str, key: str, times: Sequence[str], windows: Windows
) -> Iterator[tuple[list[str], str]]:
    """Yield, for the times of the entity's row, how many days before the cutoff it is.

    A year of birth says little of those born later than all that are trained on.
    """
    for name in times:
        time = f"p.{quote_name(name)}"
        rows = (
            f"FROM {quote_name(table)} p WHERE p.{quote_name(key)} = {windows.entity} "
            f"AND {time} < {windows.cutoff}"
        )
        items = {f"days_since_{name}": windows.days_since(time)}
        yield _join(f"{table}_{name}", items, rows)


def _join(alias: str, items: Mapping[str, str], rows: str) -> tuple[list[str], str]:
    listed = ", ".join(f"{sql} AS {quote_name(name)}" for name, sql in items.items())
    quoted = quote_name(alias)
    text = f"LEFT JOIN LATERAL (SELECT {listed} {rows}) AS {quoted} ON TRUE"
    return [f"{quoted}.{quote_name(name)}" for name in items], text


def _columns(
    engine: duckdb.DuckDBPyConnection, events: Events, hidden: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the SQL of numbers, and of texts and foreign keys of few values."""
    numbers, texts = {}, {}
    for name, kind, *_ in engine.sql(f"DESCRIBE {quote_name(events.name)}").fetchall():
        column, is_key = f"p.{quote_name(name)}", name in events.foreign
        if name in hidden or name in events.without:
            continue
        if kind == "BOOLEAN":
            numbers[name] = f"CAST({column} AS INTEGER)"
        elif not is_key and kind.lstrip("U").startswith(_NUMBERS):
            numbers[name] = column
        elif is_key or kind == "VARCHAR":
            values = _values(engine, events.name, name)
            if len(values) <= MOST_CATEGORIES:
                texts[name] = f"CAST({column} AS VARCHAR)"
            if not is_key and len(values) <= MOST_COUNTED:
                numbers |= {
                    f"{name}={value}": f"CAST({column} = {quote_text(value)} AS INT)"
                    for value in values
                }
    return numbers, texts


def _values(engine: duckdb.DuckDBPyConnection, table: str, column: str) -> list[Any]:
    """Return the distinct values of a column, one more than are used at most."""
    name = quote_name(column)
    select = f"SELECT DISTINCT {name} FROM {quote_name(table)} WHERE {name} NOTNULL"
    rows = engine.sql(f"{select} ORDER BY 1 LIMIT {MOST_CATEGORIES + 1}").fetchall()
    return [value for (value,) in rows]


def _aggregates(
    numbers: Mapping[str, str], windows: Windows, time: str
) -> dict[str, str]:
    """Return counts, sums and means by window, and days since the last event."""
    items = {}
    for suffix, hours in windows.spans:
        is_widest = suffix == windows.spans[-1][0]
        rows = "" if is_widest else f" FILTER (WHERE {windows.since(time, hours)})"
        items[f"rows{suffix}"] = f"COUNT(*){rows}"
        for name, value in numbers.items():
            items[f"{name}_sum{suffix}"] = f"SUM({value}){rows}"
            items[f"{name}_mean{suffix}"] = f"AVG({value}){rows}"
    items["days_since"] = windows.days_since(time)
    return items
