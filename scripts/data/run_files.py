"""Folders of data to train on: Parquet tables, the tables file, files of runs.

The scripts that make or prepare data share how official files are opened and checked,
how tables are written, and what is printed of them.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb

from tp_flower.errors import SourceError

ROOT = Path(__file__).resolve().parents[2]
TABLES_FILE = "tables.toml"
RUN_FILE = "my-run.toml"

Shards = Mapping[str, Sequence[tuple[str | Mapping[str, str], str]]]
"""By table, the file of each of its shards, or keys that say where it is; its site."""


class DataError(Exception):
    """The official files are not what they should be."""


def write_dataset(
    folder: Path,
    title: str,
    question: str,
    sql: str,
    settings: Mapping[str, Any],
    tables: Sequence[str],
) -> None:
    """Write how to train on a folder's tables, and print how large they are.

    Each is ``<table>.parquet``, at a site of its own; the label answers ``question``.
    """
    write_tables(folder, {table: [(f"{table}.parquet", table)] for table in tables})
    run = write_run(folder / RUN_FILE, question, sql, settings)
    with duckdb.connect() as connection:
        for table in tables:
            rows = connection.read_parquet(str(folder / f"{table}.parquet"))
            rows.create_view(table)
            print(f"  {table}: {len(rows):,} rows")
        print(f"  joined: {len(connection.sql(sql)):,} rows")
    print_commands(title, folder, [run])


def write_tables(folder: Path, shards: Shards, policy: str = "") -> Path:
    """Write the tables file of a folder; return its path.

    A simulation needs no policy, and where there is none lets also rows leave.
    """
    lines = ["# Where the tables are. Paths are relative to this file; a site is an"]
    lines += ["# organisation."]
    for table, parts in shards.items():
        name = f"[tables.{table}]" if len(parts) == 1 else f"[[tables.{table}.shards]]"
        for place, site in parts:
            keys = {"path": place} if isinstance(place, str) else place
            values = {**keys, "site": site, **({"policy": policy} if policy else {})}
            lines += [
                name,
                *(f"{key} = {_toml(value)}" for key, value in values.items()),
                "",
            ]
    path = folder / TABLES_FILE
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_run(path: Path, question: str, sql: str, settings: Mapping[str, Any]) -> Path:
    """Write the file of a run over the folder's tables; return its path."""
    values = {**settings, "tables": str(path.parent / TABLES_FILE)}
    lines = [
        (
            "# Settings of a run; all others take their defaults, see "
            "docs/reference/settings.md."
        ),
        f"# {question}",
        f'sql = """\n{sql.strip()}\n"""',
        *(f"{key} = {_toml(value)}" for key, value in values.items()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _toml(value: str | float) -> str:
    """Return a TOML value; JSON writes texts and numbers alike."""
    return json.dumps(value, ensure_ascii=False)


def print_commands(title: str, folder: Path, runs: Sequence[Path]) -> None:
    """Say where the data are, and how to train on them."""
    print(f"{title} is in {folder}. To train on it, in {ROOT}:")
    for run in runs:
        print(f"  tp-flower train {shlex.quote(str(run))}")


def find_file(folder: Path, *names: str) -> Path:
    """Return the first file of these names that a folder has."""
    path = next(filter(Path.is_file, (folder / name for name in names)), None)
    if path is None:
        raise DataError(f"{folder} has no {' or '.join(names)}")
    return path


def script(
    doc: str | None,
    write: Callable[[argparse.Namespace], None],
    folder: str = "",
    options: Mapping[str, tuple[type, Any, str]] = MappingProxyType({}),
) -> Callable[[Sequence[str]], int]:
    """Return the main function of a script that writes to a folder OUTPUT.

    ``write`` is given ``output`` and, with ``folder``, the help of FOLDER, ``folder``;
    ``options`` have a type, a default and a help each.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, text in (("folder", folder), ("output", "folder to write to")):
        if text:
            parser.add_argument(name, type=Path, metavar=name.upper(), help=text)
    for name, (kind, default, text) in options.items():
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=help_text)

    def main(arguments: Sequence[str]) -> int:
        parsed = parser.parse_args(arguments)
        parsed.output = parsed.output.resolve()
        try:
            parsed.output.mkdir(parents=True, exist_ok=True)
            write(parsed)
        except (DataError, SourceError, ValueError, OSError, duckdb.Error) as error:
            # DuckDB's remedies are none here; the file comes after them
            problem, _, rest = str(error).partition("\nPossible ")
            if file := re.search("file = (.*)", rest):
                problem = f"{file[1]}: {problem.partition(': ')[2]}"
            print(f"error: {problem}", file=sys.stderr)
            return 2
        return 0

    return main
