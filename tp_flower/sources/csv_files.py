"""CSV files, read with types that fit every row.

DuckDB guesses the types of columns from the first 20,000 rows. The types would then
depend on the order of the rows, and one shard could be numeric and another text. Here
its sniffer reads the whole file, once per process and state of the file, and its result
is spelled out wherever the file is read. It takes values such as '007' or '+7' for
texts: a column of them has keys, not numbers.

The first line names the columns. DuckDB would guess that, too, and silently skip lines
that do not fit its guess.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import duckdb

from tp_flower.duckdb_engine import new_engine, quote_name, quote_path, quote_text

WHOLE: Final = -1  # sample size of DuckDB's sniffer: every row
EARLY_ROWS: Final = 20_480  # that show whether texts could be numbers
MEMORY: Final = "160MB"  # to read a file; a gzipped one is unpacked in memory
MOST_STRAY: Final = 0.1  # share of texts in a column taken for numbers
_KEY: Final = "^[-+]?0[0-9]"  # such as '007', which is not a stray text
Nulls = tuple[str, ...]


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV file is written, as options of ``read_csv``, and its columns' types.

    ``stray_rows`` has, for each column that is text only because of a few values among
    numbers, the first row with such a value; the row below the names is row 1.
    """

    dialect: Mapping[str, str]
    types: Mapping[str, str]
    stray_rows: Mapping[str, int]


def csv_format(path: str, nulls: Nulls) -> CsvFormat:
    """Return the format of a file, found in all of its rows."""
    status = Path(path).stat()
    state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _format(path, nulls, state)


@lru_cache(maxsize=256)
def _format(path: str, nulls: Nulls, _state: tuple[int, ...]) -> CsvFormat:
    with closing(new_engine()) as connection:
        if not path.endswith(".gz"):
            # otherwise the sniffer holds as much of the file as fits into memory
            connection.execute(f"SET memory_limit = '{MEMORY}'")
            connection.execute("SET threads = 2")
        frame = connection.execute(
            f"SELECT * FROM sniff_csv({quote_path(path)}, sample_size = {WHOLE}, "
            f"header = true, skip = 0, nullstr = {_list(nulls)})"
        ).df()
        sniffed = frame.iloc[0]
        dialect = _dialect(sniffed)
        types = {column["name"]: column["type"] for column in sniffed["Columns"]}
        texts = csv_call(path, nulls, dialect, dict.fromkeys(types, "VARCHAR"))
        names = [name for name, kind in types.items() if kind == "VARCHAR"]
        return CsvFormat(dialect, types, _stray_rows(connection, texts, names))


def _stray_rows(
    connection: duckdb.DuckDBPyConnection, texts: str, names: Sequence[str]
) -> dict[str, int]:
    early = f"(SELECT * FROM {texts} LIMIT {EARLY_ROWS})"
    likely = _mostly_numbers(connection, early, names)
    # few files have such a column: only for these all rows are read again
    strays = _mostly_numbers(connection, texts, list(likely))
    return {name: row for name, row in strays.items() if row is not None}


def _mostly_numbers(
    connection: duckdb.DuckDBPyConnection, relation: str, names: Sequence[str]
) -> dict[str, int | None]:
    """Return the columns of texts in which nearly all values are numbers.

    With each column comes the first row of a value that is none; the first row is 1.
    """
    if not names:
        return {}
    counts = ", ".join(
        f"count({column}), count(TRY_CAST({column} AS DOUBLE)), "
        f"count(*) FILTER (regexp_matches({column}, '{_KEY}')), "
        f'min("(row)") FILTER ({column} IS NOT NULL '
        f"AND TRY_CAST({column} AS DOUBLE) IS NULL)"
        for column in map(quote_name, names)
    )
    numbered = f'(SELECT *, row_number() OVER () AS "(row)" FROM {relation})'
    (row,) = connection.execute(f"SELECT {counts} FROM {numbered}").fetchall()
    return {
        name: first
        for name, values, numbers, keys, first in zip(
            names, row[::4], row[1::4], row[2::4], row[3::4], strict=True
        )
        if not keys and numbers > 0 and values - numbers <= MOST_STRAY * values
    }


def _dialect(sniffed: Mapping[str, str]) -> dict[str, str]:
    options = {"new_line": quote_text(sniffed["NewLineDelimiter"])}
    names = {"delim": "Delimiter", "quote": "Quote", "escape": "Escape"}
    for option, name in {**names, "comment": "Comment"}.items():
        options[option] = quote_text(sniffed[name].replace("(empty)", ""))
    for option in ("DateFormat", "TimestampFormat"):
        if isinstance(sniffed[option], str):
            options[option.lower()] = quote_text(sniffed[option])
    return options


def csv_call(path: str, nulls: Nulls, dialect: Mapping[str, str], types: Mapping[str, str]) -> str:
    """Return the ``read_csv(...)`` that reads a file with all its columns' types."""
    columns = ", ".join(f"{quote_text(name)}: {quote_text(kind)}" for name, kind in types.items())
    options = {
        **dialect,
        "skip": "0",
        "header": "true",
        "columns": f"{{{columns}}}",
        "nullstr": _list(nulls),
    }
    settings = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f"read_csv({quote_path(path)}, auto_detect = false, {settings})"


def _list(texts: Nulls) -> str:
    return f"[{', '.join(map(quote_text, texts))}]"
