"""Turn a local RelBench folder into tables and a run, ready to train on.

    python scripts/data/prepare_relbench.py FOLDER OUTPUT [--task NAME] [--without A,B]
        [--windows 1,3,10,all] [--owners a=orders,items;b=visits]

A label joins the row of its entity and the rows that this one refers to, directly or
through others, and what is known at its cutoff of the entity's events: how many, sums
and means of numbers in windows of some steps, the last one. The run holds out
RelBench's rows. Every table is an organisation, unless ``--owners`` groups them; tables
of one owner are joined to reach events of two joins. What is left out is printed.

FOLDER has ``db/`` and ``tasks/NAME/`` with train, val and test. Keys, times and targets
are in a ``manifest.yaml`` of both, or, as the package ``relbench`` keeps its downloads,
in the metadata of the Parquet files.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from scripts.data import look_back, run_files
from scripts.data.look_back import Events, Grid, Windows
from scripts.data.run_files import DataError
from tp_flower.duckdb_engine import quote_name, quote_text

Manifest = Mapping[str, Any]
MANIFEST: Final = "manifest.yaml"
METADATA: Final = {
    "pkey": b"pkey_col",
    "time_col": b"time_col",
    "fkeys": b"fkey_col_to_pkey_table",
}
LABELS: Final = "task_labels"
SPLIT, SPLITS = "split_", ("train", "val", "test")
KINDS: Final = ("regression", "binary_classification", "multiclass_classification")


class Step(NamedTuple):
    """A table joined to a label: ``left``'s ``key`` is its row of the ``table``."""

    alias: str
    table: str
    left: str
    key: str


def read_manifest(folder: Path) -> Manifest:
    """Return the content of a folder's manifest.yaml."""
    path = run_files.find_file(folder, MANIFEST)
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def read_tables(folder: Path) -> Manifest:
    """Return keys and times of the tables, by name."""
    files = sorted(folder.glob("db/*.parquet"))
    if (folder / MANIFEST).exists() or not files:
        return dict(read_manifest(folder)["tables"])
    return {path.stem: table_of(path) for path in files}


def table_of(path: Path) -> Manifest:
    """Return key, time and foreign keys of a table that ``relbench`` has saved."""
    metadata = pq.read_schema(path).metadata or {}
    try:
        values = {key: json.loads(metadata[name]) for key, name in METADATA.items()}
    except KeyError as error:
        raise DataError(
            f"{path} has no {error.args[0].decode()} in its metadata, and there is no "
            f"{MANIFEST}"
        ) from None
    return {key: value for key, value in values.items() if value}


def read_task(folder: Path) -> Manifest:
    """Return entity, time and target of a task, and of which kind it is."""
    if (folder / MANIFEST).exists():
        return read_manifest(folder)
    path = folder / "train.parquet"
    table = table_of(path)
    (key, entity), *others = table.get("fkeys", {}).items() or [("", "")]
    schema = pq.read_schema(path)
    targets = [n for n in schema.names if n not in (key, table.get("time_col"))]
    if others or not key or len(targets) != 1:
        raise DataError(
            f"{path}: supported are tasks of one entity, a time and a target; it has "
            f"{', '.join(schema.names)}"
        )
    return {
        "task_type": _kind_of(path, targets[0]),
        "entity_table": entity,
        "entity_col": key,
        "target_col": targets[0],
        "time_col": table.get("time_col"),
    }


def _kind_of(path: Path, target: str) -> str:
    """Return what a target asks for: yes or no (1 or 0), a number, or a name."""
    values = pq.read_table(path, columns=[target])[target].unique().to_pylist()
    if {*values} <= {0, 1, None}:
        return "binary_classification"
    are_numbers = all(isinstance(value, int | float | None) for value in values)
    return "regression" if are_numbers else "multiclass_classification"


def choose_task(folder: Path, name: str) -> tuple[Path, Manifest]:
    """Return the folder and manifest of the task; without a name, of the only one."""
    files = [*folder.glob(f"tasks/*/{MANIFEST}"), *folder.glob("tasks/*/train.parquet")]
    names = sorted({path.parent.name for path in files})
    name = name or (names[0] if len(names) == 1 else "")
    if name not in names:
        raise DataError(
            f"--task {name or 'is missing'}: {folder} has {', '.join(names) or 'none'}"
        )
    task = read_task(folder / "tasks" / name)
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
            raise DataError(
                f"{step.table}: {late} labels are older than their row's {column}, and "
                "a row that is joined by its key is what it became later; leave out "
                f"these labels, or --without {step.table} if it is not the entity"
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


def columns_of(
    engine: duckdb.DuckDBPyConnection,
    table: Manifest,
    name: str,
    hidden: set[tuple[str, ...]],
) -> dict[str, bool]:
    """Return the columns that a label may see, but keys; whether each is a time."""
    keys = {table["pkey"], *table.get("fkeys", {})}
    described = engine.sql(f"DESCRIBE {quote_name(name)}").fetchall()
    return {
        column: kind.startswith(("DATE", "TIMESTAMP"))
        for column, kind, *_ in described
        if column not in keys and (name, column) not in hidden
    }


def events_of(
    tables: Manifest, task: Manifest, without: set[str], owners: Mapping[str, str]
) -> tuple[list[Events], dict[str, str]]:
    """Return the event tables of a label's entity; those left out, with the reason."""
    of_task = {name: table for name, table in tables.items() if name not in without}
    reached = list(look_back.events_of(of_task, task["entity_table"], owners))
    events = [item for item in reached if isinstance(item, Events)]
    if events and not task.get("time_col"):
        names = ", ".join(item.table for item in events)
        raise DataError(
            f"{names}: many rows for a label, and the task has no time_col to look "
            f"back from; --without {names.replace(' ', '')}"
        )
    refused = [item for item in reached if not isinstance(item, Events)]
    return events, dict(refused)


def looked_back(
    engine: duckdb.DuckDBPyConnection,
    events: list[Events],
    windows: Windows,
    hidden: set[tuple[str, ...]],
) -> Iterator[tuple[list[str], str]]:
    """Yield features of the events before the labels, with the join they need.

    ``engine`` has the labels and the tables.
    """
    for each in events:
        if each.select:
            engine.execute(f"CREATE VIEW {quote_name(each.name)} AS {each.select}")
        yield from look_back.sub_queries(engine, each, windows, hidden)


def grid_of(engine: duckdb.DuckDBPyConnection, task: Manifest) -> Grid:
    """Return the grid of the labels' cutoffs."""
    column = f"CAST({quote_name(task['time_col'])} AS TIMESTAMP)"
    select = f"SELECT DISTINCT {column} FROM {LABELS} WHERE {column} NOTNULL ORDER BY 1"
    return look_back.grid_of([cutoff for (cutoff,) in engine.sql(select).fetchall()])


def print_left_out(names: Sequence[str], reasons: Mapping[str, str]) -> None:
    """Say which tables the run does not read, and why."""
    for name in names:
        reason = reasons.get(name, "by --without, or more than two joins away")
        print(f"  left out: {name}: {reason}")


def write_files(
    output: Path,
    files: Mapping[str, str],
    events: list[Events],
    owners: Mapping[str, str],
) -> None:
    """Write the tables file: the files and the derived tables, with their owners."""
    shards: dict[str, list[tuple[str | Mapping[str, str], str]]] = {
        name: [(files[name], owners.get(name, name))] for name in sorted(files)
    }
    for each in events:
        if each.select:
            shards[each.name] = [({"sql": each.select}, owners[each.table])]
    run_files.write_tables(output, shards)


def prepare(options: argparse.Namespace) -> None:
    """Read the folder and write OUTPUT."""
    folder, output = options.folder.resolve(), options.output
    without = set(options.without.split(","))
    tables = read_tables(folder)
    task_folder, task = choose_task(folder, options.task)
    owners = look_back.owners_of(tables, options.owners)
    events, reasons = events_of(tables, task, without, owners)
    steps = list(steps_of(tables, task, without))
    used = {step.table for step in steps}.union(*(each.tables for each in events))
    files = {name: str(folder / "db" / f"{name}.parquet") for name in used}
    sizes = write_labels(output / f"{LABELS}.parquet", task_folder, task)
    files[LABELS] = f"{LABELS}.parquet"
    settings = settings_of(task, sizes)
    with closing(duckdb.connect()) as engine:
        for name, path in files.items():
            file = quote_text(str(output / path))
            engine.execute(f"CREATE VIEW {quote_name(name)} AS FROM {file}")
        grid = grid_of(engine, task) if events else None
        windows = windows_of(options, task, grid) if grid else None
        sql = query_of(engine, (tables, task), steps, events, windows)
    if grid:
        settings["cutoff-grid"] = grid.setting
        print(f"  cutoffs: {grid.points} points, {grid.setting}")
    write_files(output, files, events, owners)
    print_left_out([name for name in tables if name not in used], reasons)
    question = f"What is {task['target_col']}?"
    run = run_files.write_run(output / run_files.RUN_FILE, question, sql, settings)
    run_files.print_commands(task_folder.name, output, [run])


def windows_of(options: argparse.Namespace, task: Manifest, grid: Grid) -> Windows:
    """Return how far the run looks back."""
    entity, time = (quote_name(task[name]) for name in ("entity_col", "time_col"))
    spans = look_back.steps_back(options.windows)
    return Windows(f"t.{entity}", f"t.{time}", grid.hours, *spans)


def query_of(
    engine: duckdb.DuckDBPyConnection,
    manifests: tuple[Manifest, Manifest],
    steps: list[Step],
    events: list[Events],
    windows: Windows | None,
) -> str:
    """Return the SQL of a run on the tables and the task of two manifests.

    ``engine`` has the labels and the tables.
    """
    tables, task = manifests
    entity = task["entity_table"]
    hidden = {tuple(pair) for pair in task.get("remove_columns", [])}
    hidden.add((entity, task["target_col"]))
    items = [f"t.{quote_name(task['target_col'])} AS label"]
    lines = [joins(engine, tables, steps, task.get("time_col", ""))]
    times: list[str] = []
    for step in steps:
        for name, is_time in columns_of(
            engine, tables[step.table], step.table, hidden
        ).items():
            if windows and is_time and step is steps[0]:
                times.append(name)
            else:
                items.append(f"{quote_name(step.alias)}.{quote_name(name)}")
    if windows:
        # an entity's date is of use as its age
        ages = look_back.ages(entity, tables[entity]["pkey"], times, windows)
        for names, line in (*ages, *looked_back(engine, events, windows, hidden)):
            items += names
            lines.append(line)
    return f"SELECT {', '.join(items)}\n" + "\n".join(lines)


def settings_of(task: Manifest, sizes: list[int]) -> dict[str, Any]:
    """Return the settings of a run that holds out the rows of the last split."""
    train, validation, test = sizes
    return {
        "task": task["task_type"].rpartition("_")[2],
        "test-split": f"time(t.{SPLIT})",
        "test-fraction": test / (train + validation + test),
        "validation-fraction": validation / (train + validation),
    }


OPTIONS = {
    "task": (str, "", "folder of tasks/"),
    "without": (str, "", "tables to leave out"),
    "windows": (str, "1,3,10,all", "how many steps of the task to look back"),
    "owners": (str, "", "owner=table,table;...: others are their own"),
}
main = run_files.script(__doc__, prepare, "with db/ and tasks/", OPTIONS)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
