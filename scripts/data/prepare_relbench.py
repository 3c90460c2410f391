"""Turn a local RelBench folder into tables and a run, ready to train on.

    python scripts/data/prepare_relbench.py FOLDER OUTPUT [--task NAME] [--without A,B]

A label joins the row of its entity and the rows that this one refers to, directly or
through others; every table is an organisation. The run holds out RelBench's rows.
A table with many rows for a label, or a later one than the label, would be joined at a
cutoff time, which no query can say yet: it is refused by name unless it is left out.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from scripts.data import run_files
from scripts.data.run_files import DataError
from tp_flower.duckdb_engine import quote_name, quote_text

Manifest = Mapping[str, Any]
LABELS: Final = "task_labels"
SPLIT, SPLITS = "split_", ("train", "val", "test")
KINDS: Final = ("regression", "binary_classification", "multiclass_classification")
CUTOFF: Final = "a join at a cutoff time, which is not supported yet; --without"


class Step(NamedTuple):
    """A table joined to a label: ``left``'s ``key`` is its row of the ``table``."""

    alias: str
    table: str
    left: str
    key: str


def read_manifest(folder: Path) -> Manifest:
    """Return the content of a folder's manifest.yaml."""
    path = run_files.find_file(folder, "manifest.yaml")
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def choose_task(folder: Path, name: str) -> tuple[Path, Manifest]:
    """Return the folder and manifest of the task; without a name, of the only one."""
    names = sorted(path.parent.name for path in folder.glob("tasks/*/manifest.yaml"))
    name = name or (names[0] if len(names) == 1 else "")
    if name not in names:
        raise DataError(
            f"--task {name or 'is missing'}: {folder} has {', '.join(names) or 'none'}"
        )
    task = read_manifest(folder / "tasks" / name)
    if task["task_type"] not in KINDS:
        raise DataError(
            f"task {name} is {task['task_type']}; supported are {', '.join(KINDS)}"
        )
    return folder / "tasks" / name, task


def steps_of(tables: Manifest, task: Manifest, without: set[str]) -> Iterator[Step]:
    """Yield the joins from a label to its entity, and on to what this refers to."""
    entity = task["entity_table"]
    queue = [(Step(entity, entity, "t", task["entity_col"]), {*without, entity})]
    aliases = {entity}
    for step, path in queue:
        yield step
        for key, table in tables[step.table].get("fkeys", {}).items():
            if table not in path:  # one that refers to itself is followed once
                alias = f"{table}_{len(aliases)}" if table in aliases else table
                aliases.add(alias)
                queue.append((Step(alias, table, step.alias, key), {*path, table}))


def joins(
    engine: duckdb.DuckDBPyConnection, tables: Manifest, steps: list[Step], time: str
) -> str:
    """Return the FROM clause; DataError where a label is older than a row behind it."""
    source = f"FROM {LABELS} AS t"
    for step in steps:
        alias, pkey = quote_name(step.alias), quote_name(tables[step.table]["pkey"])
        key = f"{quote_name(step.left)}.{quote_name(step.key)}"
        text = f"JOIN {quote_name(step.table)} AS {alias} ON {key} = {alias}.{pkey}"
        column, is_late = tables[step.table].get("time_col"), "NULL"
        if column and time:
            is_late = f"{alias}.{quote_name(column)} > t.{quote_name(time)}"
        counts = f"COUNT(*) - COUNT({alias}.{pkey}), COUNT_IF({is_late})"
        ((lost, late),) = engine.sql(f"SELECT {counts} {source} LEFT {text}").fetchall()
        if late:
            reason = f"{late} labels are older than their row's {column}"
            raise DataError(
                f"{step.table}: {reason}, which needs {CUTOFF} {step.table}"
            )
        source = f"{source}\n{'LEFT ' if lost else ''}{text}"
    return source


def write_labels(path: Path, folder: Path, task: Manifest) -> list[int]:
    """Write the labels of all splits, with the split's number; return the sizes."""
    names = [
        task["entity_col"],
        task["target_col"],
        *filter(None, [task.get("time_col")]),
    ]
    parts = [
        pq.read_table(folder / f"{split}.parquet", columns=names) for split in SPLITS
    ]
    for number, part in enumerate(parts):
        parts[number] = part.append_column(
            SPLIT, pa.array([number] * len(part), pa.int8())
        )
    pq.write_table(pa.concat_tables(parts, promote_options="permissive"), path)
    return [len(part) for part in parts]


def features(
    file: str, table: Manifest, step: Step, hidden: set[tuple[str, ...]]
) -> list[str]:
    """Return the columns of a table that a label may see, but keys."""
    keys = {table["pkey"], *table.get("fkeys", {})}
    names = (name for name in pq.read_schema(file).names if name not in keys)
    visible = (name for name in names if (step.table, name) not in hidden)
    return [f"{quote_name(step.alias)}.{quote_name(name)}" for name in visible]


def prepare(options: argparse.Namespace) -> None:
    """Read the folder and write OUTPUT."""
    folder, output, without = (
        options.folder.resolve(),
        options.output,
        options.without.split(","),
    )
    tables, (task_folder, task) = (
        read_manifest(folder)["tables"],
        choose_task(folder, options.task),
    )
    steps = list(steps_of(tables, task, set(without)))
    joined = {step.table for step in steps}
    others = [name for name in tables if name not in joined.union(without)]
    if many := [
        n for n in others if joined.intersection(tables[n].get("fkeys", {}).values())
    ]:
        raise DataError(
            f"{', '.join(many)}: many rows for a label need {CUTOFF} {','.join(many)}"
        )
    train, validation, test = write_labels(
        output / f"{LABELS}.parquet", task_folder, task
    )
    files = {name: str(folder / "db" / f"{name}.parquet") for name in joined}
    hidden = {tuple(pair) for pair in task.get("remove_columns", [])}
    hidden.add((task["entity_table"], task["target_col"]))
    items = [f"t.{quote_name(task['target_col'])} AS label"]
    for step in steps:
        items += features(files[step.table], tables[step.table], step, hidden)
    files[LABELS] = f"{LABELS}.parquet"
    with closing(duckdb.connect()) as engine:
        for name, path in files.items():
            file = quote_text(str(output / path))
            engine.execute(f"CREATE VIEW {quote_name(name)} AS FROM {file}")
        source = joins(engine, tables, steps, task.get("time_col", ""))
    run_files.write_tables(
        output, {name: [(files[name], name)] for name in sorted(files)}
    )
    settings = {
        "task": task["task_type"].rpartition("_")[2],
        "test-split": f"time(t.{SPLIT})",
        "test-fraction": test / (train + validation + test),
        "validation-fraction": validation / (train + validation),
    }
    sql, question = (
        f"SELECT {', '.join(items)}\n{source}",
        f"What is {task['target_col']}?",
    )
    run = run_files.write_run(output / run_files.RUN_FILE, question, sql, settings)
    run_files.print_commands(task_folder.name, output, [run])


OPTIONS = {
    "task": (str, "", "folder of tasks/"),
    "without": (str, "", "tables to leave out"),
}
main = run_files.script(__doc__, prepare, "with manifest.yaml, db/ and tasks/", OPTIONS)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
