"""DuckDB: restricted connections, quoting, and safe errors.

Errors about values quote them: "Could not convert string 'secret' to INT32". So a text
that leaves a site is put together from pieces that cannot be data: the kind of error,
and phrases from a closed list. Errors about names and types are left as they are.
"""

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import duckdb

# raised before any value is read: they contain only names, types, files and syntax
_HARMLESS: Final = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.IOException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
_WORDY: Final = re.compile(
    r"Candidate functions:|Candidates:|The search space used was|LINE \d+:"
)
_ENUM: Final = re.compile(r"ENUM\(.*\)", re.DOTALL)
_TYPE: Final = re.compile(
    r" to (?:the destination type |type )?'?"
    r"(U?INT(?:8|16|32|64|128)|U?(?:TINY|SMALL|BIG|HUGE)?INT|U?INTEGER|BOOL(?:EAN)?"
    r"|FLOAT|DOUBLE|DECIMAL\(\d+, ?\d+\)|DATE|TIME|TIMESTAMP(?: WITH TIME ZONE|_\w+)?"
    r"|INTERVAL|UUID|JSON|VARCHAR|BLOB)(?!\w)"
)
_PHRASES: Final = (
    re.compile(r"^(?:Conversion|Invalid Input) Error: (CSV Error on Line: \d+)$"),
    re.compile(r"^(Error when converting column \"[^\"]*\")\. Could not"),
    re.compile(r"^(Expected Number of Columns: \d+ Found: \d+)$"),
    re.compile(r"^(Value with unterminated quote found)\.?$"),
    re.compile(r"^Invalid unicode .*(This file is not utf-8 encoded)\.$"),
    re.compile(r"^(Maximum line size of \d+ bytes exceeded)"),
    re.compile(r"^(It was not possible to automatically detect the CSV parsing)"),
    # files in a folder that differ; up to the end of a type, because a value follows
    re.compile(
        r"^Conversion Error: Error while reading (file \"[^\"]*\": failed to cast "
        r"column \"[^\"]*\" from type [A-Z]\w*)"
    ),
    re.compile(
        r"^Invalid Input Error: Failed to read file \"[^\"]*\": schema mismatch in "
        r"glob: (column \"[^\"]*\" was read from the original file \"[^\"]*\", but "
        r"could not be found in file \"[^\"]*\")"
    ),
    re.compile(r"(too small to be a Parquet file)$"),
    re.compile(r"(No magic bytes found at (?:the )?end of file)"),
    re.compile(r"Error: (Overflow in \w+)"),
    re.compile(r"(out of range)"),
)


def new_engine() -> duckdb.DuckDBPyConnection:
    """Return a separate DuckDB engine in UTC, not locked yet."""
    connection = duckdb.connect(
        config={
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "temp_directory": _spill_folder(),
        }
    )
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return connection


def lock(connection: duckdb.DuckDBPyConnection, paths: Sequence[str] = ()) -> None:
    """Restrict the engine to reading these files, and lock its configuration."""
    # a reader opens the pattern that matches the file, and then the file
    allowed = ", ".join(sorted({*map(quote_text, paths), *map(quote_path, paths)}))
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def shared_cursor() -> duckdb.DuckDBPyConnection:
    """Return a connection to the locked in-memory engine, which is slow to start."""
    return _shared_engine().cursor()


@lru_cache(maxsize=1)
def _shared_engine() -> duckdb.DuckDBPyConnection:
    connection = new_engine()
    lock(connection)
    return connection


def file_cursor(
    paths: Sequence[str], *, is_serial: bool = False
) -> duckdb.DuckDBPyConnection:
    """Return a connection to a locked engine that may read these files and no other.

    Views and tables must be temporary: those of one connection are not of another. An
    engine that ``is_serial`` adds up numbers in the same order every time.
    """
    return _file_engine(tuple(paths), is_serial).cursor()


@lru_cache(maxsize=16)
def _file_engine(paths: tuple[str, ...], is_serial: bool) -> duckdb.DuckDBPyConnection:
    """Return the engine of some files, which a run reads more than once."""
    connection = new_engine()
    if is_serial:
        serialise(connection)
    lock(connection, paths)
    return connection


def serialise(connection: duckdb.DuckDBPyConnection) -> None:
    """Let an engine have one thread, so that equal input has equal results.

    Threads divide rows as they come, and sums of floats depend on the order.
    """
    connection.execute("SET threads = 1")


@lru_cache(maxsize=1)
def _spill_folder() -> str:
    """The folder for rows that do not fit into memory, readable by nobody else."""
    folder = tempfile.mkdtemp(prefix="tp_flower-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def quote_name(name: str) -> str:
    """Quote an identifier for DuckDB.

    >>> quote_name('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Quote a string literal for DuckDB.

    >>> quote_text("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def quote_path(path: str) -> str:
    """Quote the path of one file, whose characters a reader would take for a pattern.

    >>> quote_path("a[1]*.csv")
    "'a[[]1][*].csv'"
    """
    return quote_text(re.sub(r"[*?\[]", r"[\g<0>]", path))


def safe_message(error: duckdb.Error) -> str:
    """Return an error in one line, without any value of the data.

    >>> text = "Conversion Error: Could not convert string 'secret' to INT32"
    >>> safe_message(duckdb.ConversionException(text))
    'Conversion Error (to INT32)'
    """
    text = str(error).strip()
    if isinstance(error, _HARMLESS):
        # an enumeration type lists values
        text = _ENUM.sub("ENUM(...)", _WORDY.split(text, maxsplit=1)[0])
        return " ".join(text.split())
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__)
    details = list(dict.fromkeys(_details(text)))
    suffix = f" ({'; '.join(details)})" if details else ""
    return f"{kind.replace('Exception', 'Error')}{suffix}"


def _details(text: str) -> Iterator[str]:
    """Yield the phrases of an error's text that hold no value of a row."""
    for line in text.splitlines():
        for phrase in _PHRASES:
            if match := phrase.search(line):
                yield match[1]
    if types := _TYPE.findall(text):
        yield f"to {types[-1]}"
