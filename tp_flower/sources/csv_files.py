"""CSV files, read with types that fit every row.

DuckDB guesses the types of columns from the first 20,000 rows. The types would then
depend on the order of the rows, and one shard could be numeric and another text. Here
its sniffer reads the whole file, once per process and state of the file, and its result
is spelled out wherever the file is read. It takes values such as '007' or '+7' for
texts: a column of them has keys, not numbers. Times and truth values are found by
:mod:`tp_flower.sources.csv_columns`.

The first line names the columns. DuckDB would guess that, too, and silently skip lines
that do not fit its guess.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final

import duckdb

from tp_flower.duckdb_engine import new_engine, quote_path, quote_text
from tp_flower.protocol.text_readings import TEXT, TextColumn
from tp_flower.sources.csv_columns import (
    EARLY_ROWS,
    TextHint,
    find_columns,
    find_hints,
    find_merging,
)
from tp_flower.sources.text_values import DETECTED, TextFormat

WHOLE: Final = -1  # sample size of DuckDB's sniffer: every row
MOST_FORMATS: Final = 4096  # of files that a process keeps, a few kB each
SMALL: Final = 1 << 14  # bytes of a file that are read to recognise it
MEMORY: Final = "160MB"  # to read a file; a gzipped one is unpacked in memory
Nulls = tuple[str, ...]


@dataclass(frozen=True)
class CsvFormat:
    """The options of ``read_csv`` for a CSV file, and the content of its columns."""

    dialect: Mapping[str, str]
    columns: Mapping[str, TextColumn]
    hints: Mapping[str, TextHint]


_FORMATS: Final[dict[tuple[bytes, str, Nulls, TextFormat], CsvFormat]] = {}
"""Formats of small files, by what they follow from."""


def csv_format(
    path: str, nulls: Nulls, text_format: TextFormat = DETECTED
) -> CsvFormat:
    """Return the format of a file, found in all of its rows."""
    status = Path(path).stat()
    state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _format(path, nulls, text_format, state)


@lru_cache(maxsize=MOST_FORMATS)
def _format(
    path: str, nulls: Nulls, text_format: TextFormat, state: tuple[int, ...]
) -> CsvFormat:
    """Return the format of a CSV file, by its content if that is soon read.

    A small file that is written again, or a copy of it, often has the same content.
    """
    size, *_ = state
    if size > SMALL:
        return _find_format(path, nulls, text_format)
    content = _digest(path)
    key = content, Path(path).suffix, nulls, text_format
    if (remembered := _FORMATS.get(key)) is not None:
        return remembered
    csv_format = _find_format(path, nulls, text_format)
    # invariant: a file that changes meanwhile is no example of either content
    if _digest(path) == content:
        if len(_FORMATS) >= MOST_FORMATS:
            _FORMATS.clear()
        _FORMATS[key] = csv_format
    return csv_format


def _digest(path: str) -> bytes:
    return sha256(Path(path).read_bytes()).digest()


def _find_format(path: str, nulls: Nulls, text_format: TextFormat) -> CsvFormat:
    """Return the format of a CSV file, from all of its lines."""
    options = text_format.csv_options
    with _engine(path) as connection:
        settings = "".join(f", {name} = {value}" for name, value in options.items())
        answer = connection.execute(
            f"SELECT * FROM sniff_csv({quote_path(path)}, sample_size = {WHOLE}, "
            f"header = true, skip = 0, nullstr = {_list(nulls)}{settings})"
        )
        # a data frame would import pandas, half a second of every site's start
        names = [column[0] for column in answer.description]
        sniffed = dict(zip(names, answer.fetchall()[0], strict=True))
        dialect = {**_dialect(sniffed), **options}
        types = {column["name"]: column["type"] for column in sniffed["Columns"]}
        _create_texts(connection, path, nulls, dialect, types)
        connection.execute(
            f"CREATE TEMP TABLE early AS SELECT * FROM texts LIMIT {EARLY_ROWS}"
        )
        columns = find_columns(connection, types, text_format)
        others = [name for name, column in columns.items() if not column.readings]
        return CsvFormat(dialect, columns, find_hints(connection, others, text_format))


def merging_columns(
    path: str, nulls: Nulls, text_format: TextFormat, names: Collection[str]
) -> list[str]:
    """Return which of some columns have texts that differ, but are equal values."""
    file = csv_format(path, nulls, text_format)
    readings = {name: file.columns[name].best for name in names}
    with _engine(path) as connection:
        _create_texts(connection, path, nulls, file.dialect, file.columns)
        return find_merging(connection, readings, text_format)


@contextmanager
def _engine(path: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection to an engine whose memory for plain files is bounded.

    The engine is the process's, as it is slow to start: what is created is temporary,
    and ends with the connection.
    """
    with closing(_shared_engine(path.endswith(".gz")).cursor()) as connection:
        yield connection


@lru_cache(maxsize=2)
def _shared_engine(is_packed: bool) -> duckdb.DuckDBPyConnection:
    """Return the engine that reads the lines of packed files, or of plain ones."""
    connection = new_engine()
    if not is_packed:
        # otherwise the sniffer holds as much of the file as fits into memory
        connection.execute(f"SET memory_limit = '{MEMORY}'")
        connection.execute("SET threads = 2")
    return connection


def _create_texts(
    connection: duckdb.DuckDBPyConnection,
    path: str,
    nulls: Nulls,
    dialect: Mapping[str, str],
    names: Iterable[str],
) -> None:
    """Create the view ``texts`` of a file, all of whose columns are texts."""
    relation = csv_call(path, nulls, dialect, dict.fromkeys(names, TEXT))
    connection.execute(f"CREATE TEMP VIEW texts AS SELECT * FROM {relation}")


def _dialect(sniffed: Mapping[str, str]) -> dict[str, str]:
    options = {"new_line": quote_text(sniffed["NewLineDelimiter"])}
    names = {"delim": "Delimiter", "quote": "Quote", "escape": "Escape"}
    for option, name in {**names, "comment": "Comment"}.items():
        options[option] = quote_text(sniffed[name].replace("(empty)", ""))
    return options


def csv_call(
    path: str, nulls: Nulls, dialect: Mapping[str, str], types: Mapping[str, str]
) -> str:
    """Return the ``read_csv(...)`` that reads a file with all its columns' types."""
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


def _list(texts: Nulls) -> str:
    return f"[{', '.join(map(quote_text, texts))}]"
