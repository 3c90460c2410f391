"""What scripts that make data write beside it: the tables file and files of runs."""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import duckdb

from tp_flower.extraction.canonical_keys import kind_of
from tp_flower.query import Fragment, Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import column_types

ROOT = Path(__file__).resolve().parents[2]
TABLES_FILE = "tables.toml"
RUN_FILE = "my-run.toml"
MAX_CATEGORIES = Settings().max_categories

Shards = Mapping[str, Sequence[tuple[str, str]]]
"""By table, the file and the site of each of its shards."""


class DataError(Exception):
    """The files given are not what they should be."""


def write_tables(folder: Path, shards: Shards) -> Path:
    """Write the tables file of a folder; return its path."""
    lines = ["# Where the tables are. Paths are relative to this file; a site is an"]
    lines += ["# organisation."]
    for table, parts in shards.items():
        header = (
            f"[tables.{table}]" if len(parts) == 1 else f"[[tables.{table}.shards]]"
        )
        for file, site in parts:
            texts = f"path = {toml_string(file)}", f"site = {toml_string(site)}"
            lines += [header, *texts, ""]
    path = folder / TABLES_FILE
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def let_rows_leave(path: Path, tables: Sequence[str]) -> None:
    """Allow in a tables file that drawn rows leave, which the default forbids."""
    policies = [
        f'[tables.{table}.policy]\nreleases = {{ rows = "clear" }}\n'
        for table in tables
    ]
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join([text, *policies]), encoding="utf-8")


def write_run(
    path: Path, question: str, sql: str, settings: Mapping[str, str | float]
) -> Path:
    """Write the file of a run over the folder's tables; return its path."""
    given = {**settings, "tables": str(path.parent / TABLES_FILE)}
    lines = [
        "# Settings of a run; all others take their defaults, see pyproject.toml.",
        f"# {question}",
        f'sql = """\n{sql.strip()}\n"""',
        *(f"{key} = {_toml_value(value)}" for key, value in given.items()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def print_commands(what: str, folder: Path, runs: Sequence[Path]) -> None:
    """Say where the data are, and how to train on them."""
    print(f"{what} is in {folder}. To train on it, in {ROOT}:")
    for run in runs:
        print(f"  flwr run . --stream -c {shlex.quote(str(run))}")


def print_sizes(folder: Path, tables: Sequence[str], sql: str) -> None:
    """Print rows and features of Parquet tables, and the rows that the query joins."""
    with duckdb.connect() as connection:
        for table in tables:
            path = text_literal(folder / f"{table}.parquet")
            connection.execute(f"CREATE VIEW {table} AS FROM read_parquet({path})")
        schemas = {table: column_types(connection, f"FROM {table}") for table in tables}
        for fragment in Query.from_sql(sql).bind(schemas).fragments:
            (rows,) = one_row(connection, f"SELECT count(*) FROM {fragment.name}")
            features = _count_features(connection, fragment)
            print(f"  {fragment.name}: {rows:,} rows, {features} features")
        (joined,) = one_row(connection, f"SELECT count(*) FROM ({sql})")
    print(f"  joined: {joined:,} rows")


def _count_features(connection: duckdb.DuckDBPyConnection, fragment: Fragment) -> int:
    """Return the encoded features of a table, by the default encoders."""
    if not fragment.features:
        return 0
    items = ", ".join(f"{item.sql} AS c{k}" for k, item in enumerate(fragment.features))
    select = f"SELECT {items} FROM {fragment.name}"
    total, counts = 0, []
    for name, kind in column_types(connection, select).items():
        if kind_of(kind) == "text":
            counts.append(f"least(count(DISTINCT {name}), {MAX_CATEGORIES})")
        elif kind_of(kind) == "vector":
            total += one_row(connection, f"SELECT len({name}) FROM ({select} LIMIT 1)")[
                0
            ]
        else:
            total += 1
    if counts:
        total += sum(one_row(connection, f"SELECT {', '.join(counts)} FROM ({select})"))
    return total


def one_row(connection: duckdb.DuckDBPyConnection, sql: str) -> tuple[int, ...]:
    """Return the only row of a query for numbers."""
    (row,) = connection.execute(sql).fetchall()
    return tuple(int(value or 0) for value in row)


def make_folder(folder: Path) -> None:
    """Make a folder for data, if it is not there.

    Raises:
        DataError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "is a file" if folder.is_file() else str(error.strerror)
        raise DataError(f"no folder can be made at {folder}: {why}") from error


def files_parser(doc: str | None, folder: str) -> argparse.ArgumentParser:
    """Return a parser of FOLDER and OUTPUT.

    Args:
        doc: of the script; its first line says what it does.
        folder: what FOLDER is.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument(
        "output", type=Path, metavar="OUTPUT", help="folder to write to"
    )
    return parser


def run_script(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    prepare: Callable[[argparse.Namespace], None],
) -> int:
    """Parse, make the folder OUTPUT, prepare; return the exit status."""
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    try:
        make_folder(options.output)
        prepare(options)
    except (DataError, OSError, duckdb.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def text_literal(value: object) -> str:
    """Return a text literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def toml_string(text: str) -> str:
    r"""Return the text as a TOML string.

    >>> print(toml_string(r'C:\a "b"'))
    "C:\\a \"b\""
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _toml_value(value: str | float) -> str:
    return toml_string(value) if isinstance(value, str) else repr(value)
