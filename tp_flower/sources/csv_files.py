"""Reading CSV files so that nothing depends on a sample of their rows.

DuckDB guesses columns' types from the first 20,000 rows. The type would then depend on
the order of the rows, and one shard could be numeric where another is text. Here every
row has a say: what is found is what DuckDB's ``sniff_csv`` finds when it looks at the
whole file, and it is spelled out when the file is read.

Having it look at the whole file costs more than reading the file, in time and memory.
So it looks at the beginning, and every other row is checked against what it found:
:func:`csv_facts`. The types are tried from the most special to the most general, and
one that a value rules out is never returned to; so a type that was found for the
beginning, and that no later value rules out, is what the whole file has. Only where the
check fails is the whole file sniffed.

The first line names the columns. DuckDB would also guess that, and skip the lines that
do not fit its guess without a word.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import duckdb

from tp_flower.sources.csv_bytes import has_odd_numbers
from tp_flower.sources.csv_checks import converted, is_read_strictly, is_suspect
from tp_flower.sources.engine import new_engine
from tp_flower.sources.sql_text import quote_name, quote_path, quote_text

SAMPLE_ROWS: Final = 20_480
"""Rows that DuckDB looks at."""
SEEN_ROWS: Final = 8_192
"""Rows that it has looked at for certain."""
WHOLE: Final = -1

Nulls = tuple[str, ...]
Sniffed = Mapping[str, Any]


@dataclass(frozen=True)
class CsvFacts:
    """What a look at every row of a file found.

    Attributes:
        dialect: the options of ``read_csv`` that tell how the file is written.
        types: DuckDB type of each column, in the file's order.
        rows: number of rows.
        all_null: the columns without a single value.
    """

    dialect: Mapping[str, str]
    types: Mapping[str, str]
    rows: int
    all_null: tuple[str, ...]


def csv_types(path: str, nulls: Nulls) -> dict[str, str]:
    """Return the DuckDB type of each column of a CSV file."""
    return dict(csv_facts(path, nulls).types)


def csv_call(path: str, nulls: Nulls, types: Mapping[str, str]) -> str:
    """Return the ``read_csv(...)`` that reads a file with these column types.

    Args:
        path: the file.
        nulls: the strings that stand for NULL.
        types: the type of every column, in the file's order.
    """
    return _call(path, nulls, csv_facts(path, nulls).dialect, types)


def csv_facts(path: str, nulls: Nulls) -> CsvFacts:
    """Look at every row of a file, once per process and state of the file.

    Raises:
        duckdb.Error: the file is no CSV file, or cannot be read.
    """
    status = Path(path).stat()
    state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _facts(path, nulls, state)


@lru_cache(maxsize=256)
def _facts(path: str, nulls: Nulls, _state: tuple[int, ...]) -> CsvFacts:
    with closing(new_engine()) as connection:
        file = _File(connection, path, nulls)
        sniffed = file.sniff(SAMPLE_ROWS)
        late = file.columns_that_begin_late(sniffed)
        if late:
            # the row where the last of them begins belongs to what is sniffed
            sniffed = file.sniff(SAMPLE_ROWS + file.last_beginning(sniffed, late))
        return file.checked(sniffed) or file.counted(file.sniff(WHOLE))


@dataclass(frozen=True)
class _File:
    """A CSV file that is looked at."""

    connection: duckdb.DuckDBPyConnection
    path: str
    nulls: Nulls

    def sniff(self, rows: int) -> Sniffed:
        """Return what DuckDB detects in the first rows."""
        frame = self.connection.execute(
            f"SELECT * FROM sniff_csv({quote_path(self.path)}, sample_size = {rows}, "
            f"header = true, skip = 0, nullstr = {_list(self.nulls)})"
        ).df()
        return {str(key): value for key, value in frame.iloc[0].items()}

    def columns_that_begin_late(self, sniffed: Sniffed) -> list[str]:
        """Return the columns without a value in the first rows."""
        names = list(_types(sniffed))
        counts = ", ".join(f"count({quote_name(name)})" for name in names)
        first = f"SELECT * FROM {self._texts(sniffed)} LIMIT {SEEN_ROWS}"
        try:
            found = self._row(f"SELECT {counts} FROM ({first})")
        except duckdb.Error:
            return []  # the check will fail as well
        return [name for name, count in zip(names, found, strict=True) if not count]

    def last_beginning(self, sniffed: Sniffed, columns: list[str]) -> int:
        """Return the row in which the last of the columns has its first value.

        Columns without any value do not count.
        """
        firsts = ", ".join(
            f"min(r) FILTER (WHERE {quote_name(name)} IS NOT NULL)" for name in columns
        )
        listed = ", ".join(map(quote_name, columns))
        numbered = f"SELECT {listed}, row_number() OVER () AS r"
        try:
            found = self._row(
                f"SELECT {firsts} FROM ({numbered} FROM {self._texts(sniffed)})"
            )
        except duckdb.Error:
            return 0
        return max((row for row in found if row is not None), default=0)

    def checked(self, sniffed: Sniffed) -> CsvFacts | None:
        """Return the facts if all rows are as the first ones, else None.

        Columns that are read strictly are read with their type, which fails at a value
        that does not fit; the others as texts, which are checked.
        """
        given, types = _dialect(sniffed), _types(sniffed)
        strict = {"DOUBLE"}
        if "DOUBLE" in types.values():
            delimiter = _character(sniffed["Delimiter"])
            strict = set() if has_odd_numbers(self.path, delimiter) else strict
        texts = {
            name: kind
            for name, kind in types.items()
            if kind not in strict and not is_read_strictly(kind, given)
        }
        pairs = [(quote_name(name), kind) for name, kind in texts.items()]
        more = [f"count({converted(column, kind)})" for column, kind in pairs]
        suspects = [f"({is_suspect(column, kind, given)})" for column, kind in pairs]
        more.append(f"count(*) FILTER (WHERE {' OR '.join(suspects) or 'false'})")
        read = {**types, **dict.fromkeys(texts, "VARCHAR")}
        try:
            facts, present, (*fitting, suspect) = self._count(sniffed, read, more)
        except duckdb.Error:
            return None
        fit = all(
            present[name] == count for name, count in zip(texts, fitting, strict=True)
        )
        return facts if fit and not suspect else None

    def counted(self, sniffed: Sniffed) -> CsvFacts:
        """Return the facts of a file of which every row was sniffed."""
        texts = dict.fromkeys(_types(sniffed), "VARCHAR")
        return self._count(sniffed, texts, [])[0]

    def _count(
        self, sniffed: Sniffed, read: Mapping[str, str], more: list[str]
    ) -> tuple[CsvFacts, Mapping[str, int], tuple[int, ...]]:
        """The facts, the number of values of each column, and what is asked besides."""
        types, dialect = _types(sniffed), _dialect(sniffed)
        counts = [f"count({quote_name(name)})" for name in types]
        rows, *found = self._row(
            f"SELECT {', '.join(['count(*)', *counts, *more])} "
            f"FROM {_call(self.path, self.nulls, dialect, read)}"
        )
        present = dict(zip(types, found, strict=False))
        all_null = tuple(name for name, count in present.items() if not count)
        facts = CsvFacts(dialect, types, int(rows), all_null)
        return facts, present, tuple(found[len(types) :])

    def _texts(self, sniffed: Sniffed) -> str:
        """The file with every column as it is written."""
        types = dict.fromkeys(_types(sniffed), "VARCHAR")
        return _call(self.path, self.nulls, _dialect(sniffed), types)

    def _row(self, sql: str) -> tuple[Any, ...]:
        (row,) = self.connection.execute(sql).fetchall()
        return tuple(row)


def _types(sniffed: Sniffed) -> dict[str, str]:
    return {column["name"]: column["type"] for column in sniffed["Columns"]}


def _dialect(sniffed: Sniffed) -> dict[str, str]:
    """The options of ``read_csv``, written in SQL."""
    options = {
        "delim": quote_text(_character(sniffed["Delimiter"])),
        "quote": quote_text(_character(sniffed["Quote"])),
        "escape": quote_text(_character(sniffed["Escape"])),
        "comment": quote_text(_character(sniffed["Comment"])),
        "new_line": quote_text(sniffed["NewLineDelimiter"]),
    }
    for option in ("DateFormat", "TimestampFormat"):
        if isinstance(sniffed[option], str):
            options[option.lower()] = quote_text(sniffed[option])
    return options


def _call(
    path: str, nulls: Nulls, dialect: Mapping[str, str], types: Mapping[str, str]
) -> str:
    columns = ", ".join(
        f"{quote_text(name)}: {quote_text(kind)}" for name, kind in types.items()
    )
    options = {
        **dialect,
        "skip": "0",
        "header": "true",
        "columns": f"{{{columns}}}",
        "nullstr": _list(nulls),
    }
    settings = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f"read_csv({quote_path(path)}, auto_detect = false, {settings})"


def _character(sniffed: str) -> str:
    return "" if sniffed == "(empty)" else sniffed


def _list(texts: Nulls) -> str:
    return f"[{', '.join(map(quote_text, texts))}]"
