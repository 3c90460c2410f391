"""Types of the columns of a CSV file: the readings that fit all of their texts.

The functions here need a connection with the file as the view ``texts``, all of whose
columns are texts, and its first rows as the table ``early``: most columns are no times,
and an early row shows it. DuckDB's sniffer knows numbers; it has one format of dates
for a whole file, does not say that another would fit as well, and takes yes and no for
truth values.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import duckdb

from tp_flower.duckdb_engine import quote_name
from tp_flower.protocol.text_readings import (
    BOOLEAN,
    TextColumn,
    TextReading,
    is_time,
    time_readings,
)
from tp_flower.sources.text_sql import LIKE_A_DAY, read_text, text_fits
from tp_flower.sources.text_values import TextFormat

EARLY_ROWS: Final = 2048  # that show what a column may hold
MOST_STRAY: Final = 0.1  # share of other texts in a column taken for numbers or dates
_KEY: Final = r"^(\+|[-+]?0\d+([.,]\d*)?$)"  # such as "007", which is not a stray text
# that the sniffer is right about
_SNIFFED: Final = ("BIGINT", "DOUBLE", "HUGEINT", "TIME")
_EXACT_DIGITS: Final = 15  # of a DOUBLE: texts of more digits may be one number

Aggregates = Mapping[str, Sequence[str]]
"""The SQL of some aggregates, by the name of the column that they are about."""


class TextHint(NamedTuple):
    """A type that ``read`` of the ``values`` of a column of texts could have.

    ``option`` is needed for it; ``row`` is the first without it, 1 for that below the
    names.
    """

    kind: str
    option: str
    values: int
    read: int
    row: int | None


def find_columns(
    connection: duckdb.DuckDBPyConnection,
    sniffed: Mapping[str, str],
    text_format: TextFormat,
) -> dict[str, TextColumn]:
    """Return what the columns hold, of which the sniffer has found these types."""
    readings = {
        name: [TextReading(kind)] if kind in _SNIFFED else []
        for name, kind in sniffed.items()
    }
    others = [name for name, listed in readings.items() if not listed]
    readings |= _truth_values(connection, others)
    others = [name for name, listed in readings.items() if not listed]
    readings |= _times(connection, others, text_format)
    ambiguous = _ambiguous(connection, readings)
    return {
        name: TextColumn(listed, are_ambiguous=name in ambiguous)
        for name, listed in readings.items()
    }


def _truth_values(
    connection: duckdb.DuckDBPyConnection, names: Collection[str]
) -> dict[str, list[TextReading]]:
    reading = TextReading(BOOLEAN)
    likely = _fitting_columns(connection, "early", {name: [reading] for name in names})
    return _fitting_columns(connection, "texts", likely)


def _times(
    connection: duckdb.DuckDBPyConnection, names: Iterable[str], text_format: TextFormat
) -> dict[str, list[TextReading]]:
    """Return the readings as times; of those with one format of days, the best."""
    formats = [text_format.dates] if text_format.dates else []
    is_day = f"count(*) FILTER (regexp_full_match({{}}, '{LIKE_A_DAY}'))"
    early = _measure(
        connection, "early", {name: ["count({})", is_day] for name in names}
    )
    # a format of the owner's may have names of months
    likely = [
        name for name, (values, days) in early.items() if days == values or formats
    ]
    tried = list(time_readings(formats))
    candidates = _fitting_columns(connection, "early", dict.fromkeys(likely, tried))
    readings = _fitting_columns(connection, "texts", candidates)
    return {
        name: _one_per_day_format(listed, formats) for name, listed in readings.items()
    }


def _one_per_day_format(
    readings: Sequence[TextReading], formats: Collection[str]
) -> list[TextReading]:
    """Return the best reading with each format of days.

    If formats of the owner fit, the others do not count.
    """
    owner_readings = [reading for reading in readings if reading.format in formats]
    best: dict[str, TextReading] = {}
    for reading in owner_readings or readings:
        best.setdefault(reading.day_format, reading)
    return list(best.values())


def _fitting_columns(
    connection: duckdb.DuckDBPyConnection,
    relation: str,
    readings: Mapping[str, Sequence[TextReading]],
) -> dict[str, list[TextReading]]:
    """Return the columns and readings that fit all texts of a relation.

    A column without texts has all readings among the early rows, and none in the whole
    file.
    """
    aggregates = {}
    for name, listed in readings.items():
        fitting_texts = [
            f"count(*) FILTER ({text_fits('{}', item)})" for item in listed
        ]
        aggregates[name] = ["count({})", *fitting_texts]
    counts = _measure(connection, relation, aggregates)
    fitting: dict[str, list[TextReading]] = {}
    for name, (values, *read) in counts.items():
        is_empty = not values and relation == "texts"
        pairs = zip(readings[name], read, strict=True)
        fits = [reading for reading, count in pairs if count == values and not is_empty]
        if fits:
            fitting[name] = fits
    return fitting


def _ambiguous(
    connection: duckdb.DuckDBPyConnection, readings: Mapping[str, Sequence[TextReading]]
) -> set[str]:
    """Return the columns of which two readings are different times in some row."""
    aggregates = {}
    for name, listed in readings.items():
        times = [f"CAST({read_text('{}', reading)} AS TIMESTAMP)" for reading in listed]
        if len(times) > 1:
            spread = f"least({', '.join(times)}) <> greatest({', '.join(times)})"
            aggregates[name] = [f"count(*) FILTER ({spread})"]
    return {
        name
        for name, (rows,) in _measure(connection, "texts", aggregates).items()
        if rows
    }


def find_merging(
    connection: duckdb.DuckDBPyConnection,
    columns: Mapping[str, TextReading],
    text_format: TextFormat,
) -> list[str]:
    """Return the columns whose different texts have equal values, as 1.1 and 1.10.

    Of truth values that is no fault. Texts that are all written alike, say with two
    decimals, differ as their values do: only of the others distinct texts are counted.
    """
    values = {}
    varying = {}
    for name, reading in columns.items():
        if reading.type == "DOUBLE":
            values[name] = text_format.read("{}", "DOUBLE")
            varying[name] = [_numbers_vary(values[name], text_format.decimal)]
        elif is_time(reading.type):
            values[name] = read_text("{}", reading)
            varying[name] = [_TIMES_VARY]
    merging = []
    for name, (is_varying,) in _measure(connection, "texts", varying).items():
        if is_varying:
            # one column at a time: each takes memory for all of its distinct texts
            distinct = {name: ["count(DISTINCT {})", f"count(DISTINCT {values[name]})"]}
            ((texts, numbers),) = _measure(connection, "texts", distinct).values()
            if texts > numbers:
                merging.append(name)
    return merging


def _numbers_vary(value: str, decimal: str) -> str:
    """Return the SQL of whether two texts of a column may be one number.

    It has exponents; or some texts have more decimals than others, and zeros at their
    ends; or texts of more digits than a DOUBLE has are not the shortest of their
    number.
    """
    mark = re.escape(decimal)
    decimals = (
        f"CASE WHEN contains({{}}, '{decimal}') "
        f"THEN length({{}}) - strpos({{}}, '{decimal}') ELSE 0 END"
    )
    return (
        f"bool_or(regexp_matches({{}}, '[eE]|{mark}$')) "
        f"OR (min({decimals}) <> max({decimals}) AND bool_or(regexp_matches({{}}, "
        f"'{mark}.*0$'))) OR bool_or(CASE WHEN length({{}}) > {_EXACT_DIGITS} THEN "
        f"replace(CAST({value} AS VARCHAR), '.', '{decimal}') <> trim({{}}) END)"
    )


_TIMES_VARY: Final = (
    "min(length({})) <> max(length({})) "
    "OR bool_or(contains({}, '-')) AND bool_or(contains({}, '/')) "
    "OR bool_or(contains({}, 'T')) AND bool_or(contains({}, ' '))"
)


def find_hints(
    connection: duckdb.DuckDBPyConnection,
    names: Collection[str],
    text_format: TextFormat,
) -> dict[str, TextHint]:
    """Return what nearly all texts of some columns could be."""
    hints: dict[str, TextHint] = {}
    for kind, option, tried in text_format.alternatives():
        read = partial(tried.read, kind=kind)
        rest = [name for name in names if name not in hints]
        likely = _mostly_read(connection, "early", rest, read)
        # few files have such a column: only for these all rows are read again
        for name, counts in _mostly_read(
            connection, "texts", likely.keys(), read
        ).items():
            hints[name] = TextHint(kind, option, *counts)
    return hints


def _mostly_read(
    connection: duckdb.DuckDBPyConnection,
    relation: str,
    names: Collection[str],
    read: Callable[[str], str],
) -> dict[str, tuple[int, int, int | None]]:
    """Return the columns of texts nearly all of which can be read.

    Each has the counts of its hint.
    """
    value = read("{}")
    aggregates = [
        "count({})",
        f"count({value})",
        f'min("(row)") FILTER ({{}} IS NOT NULL AND {value} IS NULL)',
        f"count(*) FILTER (regexp_matches({{}}, '{_KEY}'))",
    ]
    numbered = f'(SELECT *, row_number() OVER () AS "(row)" FROM {relation})'
    counts = _measure(connection, numbered, dict.fromkeys(names, aggregates))
    return {
        name: (values, numbers, first)
        for name, (values, numbers, first, keys) in counts.items()
        if not keys and numbers > 0 and values - numbers <= MOST_STRAY * values
    }


def _measure(
    connection: duckdb.DuckDBPyConnection, relation: str, aggregates: Aggregates
) -> dict[str, tuple[Any, ...]]:
    """Return the columns' aggregates over a relation, in one pass.

    {} in an aggregate stands for the column.
    """
    items = [
        sql.replace("{}", quote_name(name))
        for name, listed in aggregates.items()
        for sql in listed
    ]
    if not items:
        return {}
    (row,) = connection.execute(f"SELECT {', '.join(items)} FROM {relation}").fetchall()
    values = iter(row)
    return {
        name: tuple(next(values) for _ in listed) for name, listed in aggregates.items()
    }
