"""Reading CSV files so that nothing depends on a sample of their rows.

DuckDB guesses a column's type from the first 20,000 rows. The type would then depend on
the order of the rows, and one shard could be numeric where another is text. Here the
whole file is looked at once, and everything found is spelled out when it is read.

The first line names the columns. DuckDB would also guess that, and skip the lines that
do not fit its guess without a word.
"""

from collections.abc import Mapping
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb

from tp_flower.sql_text import quote_text


def csv_types(path: str, nulls: tuple[str, ...]) -> dict[str, str]:
    """Return the DuckDB type of each column of a CSV file."""
    return {
        column["name"]: column["type"] for column in _sniffed(path, nulls)["Columns"]
    }


def csv_call(path: str, nulls: tuple[str, ...], types: Mapping[str, str]) -> str:
    """Return the ``read_csv(...)`` that reads a file with these column types.

    Args:
        path: the file.
        nulls: the strings that stand for NULL.
        types: the type of every column, in the file's order.
    """
    sniffed = _sniffed(path, nulls)
    columns = ", ".join(
        f"{quote_text(name)}: {quote_text(kind)}" for name, kind in types.items()
    )
    options = {
        "delim": quote_text(_character(sniffed["Delimiter"])),
        "quote": quote_text(_character(sniffed["Quote"])),
        "escape": quote_text(_character(sniffed["Escape"])),
        "comment": quote_text(_character(sniffed["Comment"])),
        "new_line": quote_text(sniffed["NewLineDelimiter"]),
        "skip": "0",
        "header": "true",
        "columns": f"{{{columns}}}",
        "nullstr": _list(nulls),
    }
    for option in ("DateFormat", "TimestampFormat"):
        if isinstance(sniffed[option], str):
            options[option.lower()] = quote_text(sniffed[option])
    settings = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f"read_csv({quote_text(path)}, auto_detect = false, {settings})"


def _sniffed(path: str, nulls: tuple[str, ...]) -> Mapping[str, Any]:
    status = Path(path).stat()
    return _sniff(path, nulls, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _sniff(
    path: str, nulls: tuple[str, ...], _modified_ns: int, _size: int
) -> Mapping[str, Any]:
    """Detect dialect and types; kept per process, as it reads the whole file."""
    with closing(duckdb.connect()) as connection:
        frame = connection.execute(
            f"SELECT * FROM sniff_csv({quote_text(path)}, sample_size = -1, "
            f"header = true, skip = 0, nullstr = {_list(nulls)})"
        ).df()
    return {str(key): value for key, value in frame.iloc[0].items()}


def _character(sniffed: str) -> str:
    return "" if sniffed == "(empty)" else sniffed


def _list(texts: tuple[str, ...]) -> str:
    return f"[{', '.join(map(quote_text, texts))}]"
