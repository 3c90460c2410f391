"""CSV files, read with types that fit every row.

DuckDB guesses the types of columns from the first 20,000 rows. The types would then depend on the
order of the rows, and one shard could be numeric and another text. Here its sniffer reads the whole
file, once per process and state of the file, and its result is spelled out wherever the file is
read. It takes values such as '007' or '+7' for texts: a column of them has keys, not numbers.

The first line names the columns. DuckDB would guess that, too, and silently skip lines
that do not fit its guess.
"""

from collections.abc import Callable, Collection, Mapping, Set
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, NamedTuple

import duckdb

from tp_flower.duckdb_engine import new_engine, quote_name, quote_path, quote_text
from tp_flower.sources.text_values import DETECTED, TextFormat

WHOLE: Final = -1  # sample size of DuckDB's sniffer: every row
EARLY_ROWS: Final = 2048  # that show what texts could be
MEMORY: Final = "160MB"  # to read a file; a gzipped one is unpacked in memory
MOST_STRAY: Final = 0.1  # share of other texts in a column taken for numbers or dates
_KEY: Final = r"^(\+|[-+]?0\d+([.,]\d*)?$)"  # such as "007", which is not a stray text
Nulls = tuple[str, ...]


class TextHint(NamedTuple):
    """A type that ``read`` of the ``values`` of a column of texts could have.

    ``option`` is needed for it; ``row`` is the first without it, 1 for that below the names.
    """

    kind: str
    option: str
    values: int
    read: int
    row: int | None


@dataclass(frozen=True)
class CsvFormat:
    """How a CSV file is written, as options of ``read_csv``, and its columns' types."""

    dialect: Mapping[str, str]
    types: Mapping[str, str]
    hints: Mapping[str, TextHint]


def csv_format(path: str, nulls: Nulls, text_format: TextFormat = DETECTED) -> CsvFormat:
    """Return the format of a file, found in all of its rows."""
    status = Path(path).stat()
    state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return _format(path, nulls, text_format, state)


@lru_cache(maxsize=256)
def _format(path: str, nulls: Nulls, text_format: TextFormat, _state: tuple[int, ...]) -> CsvFormat:
    options = text_format.csv_options
    with closing(new_engine()) as connection:
        if not path.endswith(".gz"):
            # otherwise the sniffer holds as much of the file as fits into memory
            connection.execute(f"SET memory_limit = '{MEMORY}'")
            connection.execute("SET threads = 2")
        settings = "".join(f", {name} = {value}" for name, value in options.items())
        frame = connection.execute(
            f"SELECT * FROM sniff_csv({quote_path(path)}, sample_size = {WHOLE}, "
            f"header = true, skip = 0, nullstr = {_list(nulls)}{settings})"
        ).df()
        sniffed = frame.iloc[0]
        dialect = {**_dialect(sniffed), **options}
        types = {column["name"]: column["type"] for column in sniffed["Columns"]}
        texts = csv_call(path, nulls, dialect, dict.fromkeys(types, "VARCHAR"))
        names = {name: kind for name, kind in types.items() if kind == "VARCHAR"}.keys()
        return CsvFormat(dialect, types, _hints(connection, texts, names, text_format))


def _hints(
    connection: duckdb.DuckDBPyConnection, texts: str, names: Set[str], text_format: TextFormat
) -> dict[str, TextHint]:
    hints: dict[str, TextHint] = {}
    connection.execute(f"CREATE TEMP TABLE early AS SELECT * FROM {texts} LIMIT {EARLY_ROWS}")
    for kind, option, tried in text_format.alternatives():
        read = partial(tried.read, kind=kind)
        likely = _mostly_read(connection, "early", names - hints.keys(), read)
        # few files have such a column: only for these all rows are read again
        for name, counts in _mostly_read(connection, texts, likely.keys(), read).items():
            hints[name] = TextHint(kind, option, *counts)
    return hints


def _mostly_read(
    connection: duckdb.DuckDBPyConnection,
    relation: str,
    names: Collection[str],
    read: Callable[[str], str],
) -> dict[str, tuple[int, int, int | None]]:
    """Return the columns of texts of which nearly all can be read, with the counts of hints."""
    if not names:
        return {}
    counts = ", ".join(
        f"count({column}), count({read(column)}), "
        f'min("(row)") FILTER ({column} IS NOT NULL AND {read(column)} IS NULL), '
        f"count(*) FILTER (regexp_matches({column}, '{_KEY}'))"
        for column in map(quote_name, names)
    )
    numbered = f'(SELECT *, row_number() OVER () AS "(row)" FROM {relation})'
    (row,) = connection.execute(f"SELECT {counts} FROM {numbered}").fetchall()
    return {
        name: (values, numbers, first)
        for name, values, numbers, first, keys in zip(
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
