"""Folders of data to train on: Parquet tables, the tables file, files of runs.

The scripts that make or prepare data share how official files are opened and checked,
how tables are written, and what is printed of them.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tp_flower.duckdb_engine import quote_text
from tp_flower.errors import SourceError
from tp_flower.extraction.select_plan import kind_of
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import column_types

ROOT = Path(__file__).resolve().parents[2]
TABLES_FILE = "tables.toml"
RUN_FILE = "my-run.toml"
COUNTS = {
    "text": f"least(count(DISTINCT {{}}), {Settings().max_categories})",
    "vector": "max(len({}))",
}
"""By kind, SQL for the features of a column under the default encoders; else 1."""

Shards = Mapping[str, Sequence[tuple[str, str]]]
"""By table, the file and the site of each of its shards."""


Options = Mapping[str, tuple[type, Any, str]]


class DataError(Exception):
    """The official files are not what they should be."""


def write_dataset(
    folder: Path,
    title: str,
    question: str,
    sql: str,
    settings: Mapping[str, str | float],
    tables: Sequence[str],
) -> None:
    """Write how to train on a folder's Parquet tables, and print how large they are.

    Args:
        folder: has ``<table>.parquet`` of every table; each is a site of its own.
        title: of the data, for people.
        question: that the label answers.
        sql: the query.
        settings: run-config keys beside ``sql`` and ``tables``.
        tables: their names.
    """
    write_tables(folder, {table: [(f"{table}.parquet", table)] for table in tables})
    run = write_run(folder / RUN_FILE, question, sql, settings)
    with duckdb.connect() as connection:
        for table in tables:
            path = quote_text(str(folder / f"{table}.parquet"))
            connection.execute(f"CREATE VIEW {table} AS FROM read_parquet({path})")
        schemas = {table: column_types(connection, f"FROM {table}") for table in tables}
        for fragment in Query.from_sql(sql).bind(schemas).fragments:
            names = [f"c{k}" for k in range(len(fragment.features))]
            columns = zip(fragment.features, names, strict=True)
            items = ", ".join(["0 AS _", *(f"{f.sql} AS {n}" for f, n in columns)])
            select = f"SELECT {items} FROM {fragment.name}"
            kinds = column_types(connection, select)
            counts = [COUNTS.get(kind_of(kinds[n]) or "", "1").format(n) for n in names]
            rows, features = one_row(
                connection,
                f"SELECT count(*), {' + '.join(['0', *counts])} FROM ({select})",
            )
            print(f"  {fragment.name}: {rows:,} rows, {features} features")
        (joined,) = one_row(connection, f"SELECT count(*) FROM ({sql})")
    print(f"  joined: {joined:,} rows")
    print_commands(title, folder, [run])


def write_tables(folder: Path, shards: Shards) -> Path:
    """Write the tables file of a folder; return its path."""
    lines = ["# Where the tables are. Paths are relative to this file; a site is an"]
    lines += ["# organisation."]
    for table, parts in shards.items():
        name = f"[tables.{table}]" if len(parts) == 1 else f"[[tables.{table}.shards]]"
        for file, site in parts:
            lines += [name, f"path = {_toml(file)}", f"site = {_toml(site)}", ""]
    path = folder / TABLES_FILE
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def let_rows_leave(path: Path, tables: Sequence[str]) -> None:
    """Allow in a tables file that drawn rows leave, which the default forbids."""
    with path.open("a", encoding="utf-8") as file:
        for table in tables:
            file.write(f'\n[tables.{table}.policy]\nreleases = {{ rows = "clear" }}\n')


def write_run(
    path: Path, question: str, sql: str, settings: Mapping[str, str | float]
) -> Path:
    """Write the file of a run over the folder's tables; return its path."""
    values = {**settings, "tables": str(path.parent / TABLES_FILE)}
    lines = [
        "# Settings of a run; all others take their defaults, see pyproject.toml.",
        f"# {question}",
        f'sql = """\n{sql.strip()}\n"""',
        *(f"{key} = {_toml(value)}" for key, value in values.items()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def print_commands(title: str, folder: Path, runs: Sequence[Path]) -> None:
    """Say where the data are, and how to train on them."""
    print(f"{title} is in {folder}. To train on it, in {ROOT}:")
    for run in runs:
        print(f"  flwr run . --stream -c {shlex.quote(str(run))}")


def write_batches(path: Path, batches: Iterable[pa.RecordBatch], nothing: str) -> None:
    """Write a Parquet file as a stream.

    Raises:
        DataError: there is no batch; ``nothing`` says why.
    """
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise DataError(nothing)
    with pq.ParquetWriter(path, first.schema) as writer:
        for batch in chain([first], stream):
            writer.write_batch(batch)


def check_columns(path: Path, columns: Sequence[str], needed: Iterable[str]) -> None:
    """Raise DataError unless a file has the columns that are needed."""
    if missing := [column for column in needed if column not in columns]:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; it has {', '.join(columns)}"
        )


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


def run_script(
    doc: str | None,
    write: Callable[[argparse.Namespace], None],
    arguments: Sequence[str],
    folder: str = "",
    options: Options = MappingProxyType({}),
) -> int:
    """Parse the command line, make OUTPUT and write to it; return the exit status.

    Args:
        doc: of the script; its first line says what it does.
        write: is given ``output`` and, with ``folder``, ``folder``.
        arguments: of the command line.
        folder: the help of FOLDER, where the script has one.
        options: by name, the type, the default and the help.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    paths = {"folder": folder, "output": "folder to write to"}
    for name, text in paths.items():
        if text:
            parser.add_argument(name, type=Path, metavar=name.upper(), help=text)
    for name, (kind, default, text) in options.items():
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=help_text)
    parsed = parser.parse_args(arguments)
    parsed.output = parsed.output.resolve()
    try:
        make_folder(parsed.output)
        write(parsed)
    except (DataError, SourceError, ValueError, OSError, duckdb.Error) as error:
        # DuckDB's remedies are none here; the file comes after them
        problem, _, rest = str(error).partition("\nPossible ")
        file = re.search("file = (.*)", rest)
        if file:
            problem = f"{file[1]}: {problem.partition(': ')[2]}"
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def columns_of(definition: str) -> dict[str, str]:
    """Return the types of columns by name.

    >>> columns_of("a INTEGER, b VARCHAR")
    {'a': 'INTEGER', 'b': 'VARCHAR'}
    """
    return dict(column.split() for column in definition.split(","))


def _toml(value: str | float) -> str:
    """Return a TOML value; JSON writes texts and numbers alike."""
    return json.dumps(value, ensure_ascii=False)
