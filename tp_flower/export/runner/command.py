"""The command line of an archive, ``python MODEL.zip``."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from tp_flower.export.runner.model import Model, read_arrays
from tp_flower.export.runner.rows import Array, ExportError, quote_text


def write_table(columns: Mapping[str, Array], path: str) -> None:
    """Write columns to a CSV file, or to a Parquet file by its suffix."""
    kind = (
        "FORMAT PARQUET" if path.endswith((".parquet", ".pq")) else "FORMAT CSV, HEADER"
    )
    with duckdb.connect() as connection:
        connection.register("columns", dict(columns))
        rows = "(SELECT * FROM columns)"
        connection.execute(f"COPY {rows} TO {quote_text(path)} ({kind})")


def write_arrays(arrays: Mapping[str, Array], path: str) -> None:
    """Write arrays to an npz file of exactly this name."""
    content: Any = dict(arrays)
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **content)


def show(model: Model) -> str:
    """Return what a model has, and what its parts read."""
    lines = [f"model {model.about.get('model', '(parts alone)')}"]
    if query := model.about.get("query"):
        lines.append(f"query {query}")
    for name, part in model.parts.items():
        columns = ", ".join(f"{c} {kind}" for c, (kind, _) in part["columns"].items())
        lines.append(f"part {name}: table {part['name']}, reads {columns}")
    return "\n".join(lines)


def main(archive: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command on an archive; return the exit status."""
    parser = argparse.ArgumentParser(prog="python MODEL.zip")
    parser.add_argument("task", choices=["show", "predict", "score", "combine"])
    parser.add_argument("inputs", nargs="*", help="ALIAS=FILE, or files of `score`")
    parser.add_argument("--out", default="", help="CSV or Parquet; of `score` npz")
    parser.add_argument("--keep", default="", help="columns of the label's table")
    options = parser.parse_args(arguments)
    try:
        _run(Model(archive), options)
    except (ExportError, duckdb.Error, OSError) as error:
        sys.stderr.write(f"FAILED: {error}\n")
        return 1
    return 0


def _run(model: Model, options: argparse.Namespace) -> None:
    """Carry out a task of the command line."""
    if options.task == "show":
        sys.stdout.write(f"{show(model)}\n")
        return
    if not options.out:
        raise ExportError(f"{options.task} needs --out FILE")
    keep = [name.strip() for name in options.keep.split(",") if name.strip()]
    if options.task == "combine":
        partials = {}
        for file in options.inputs:
            arrays = read_arrays(Path(file).read_bytes())
            partials[model.name_of(int(arrays.pop("number")))] = arrays
        write_table(model.combine(partials), options.out)
        return
    tables = dict(map(_named, options.inputs))
    if options.task == "predict":
        write_table(model.predict(tables, keep), options.out)
        return
    if len(tables) != 1:
        raise ExportError("score takes one PART=FILE")
    ((name, source),) = tables.items()
    partial = model.score(name, source, keep)
    number = np.array(model.parts[name]["number"])
    write_arrays({"number": number, **partial}, options.out)


def _named(text: str) -> tuple[str, str]:
    name, is_named, file = text.partition("=")
    if not is_named:
        raise ExportError(f"{text!r} is not ALIAS=FILE")
    return name, file
