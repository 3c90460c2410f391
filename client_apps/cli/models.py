"""List, show and delete the parts of models that a site keeps.

    python -m client_apps.cli.models list [--state-dir DIR]
    python -m client_apps.cli.models show NAME[@VERSION] [--state-dir DIR]
    python -m client_apps.cli.models delete NAME@VERSION [--state-dir DIR]

Run it as the user of the SuperNode. A model that is deleted here can no longer be
predicted with: the server knows its digests, not its parameters.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from client_apps.data.saved_models import SavedModel, parts_of
from tp_flower.errors import ModelError
from tp_flower.model_names import (
    ModelVersion,
    delete_version,
    find_version,
    versions_in,
)
from tp_flower.node_config import STATE_DIR, state_dir
from tp_flower.reports.console import format_bytes, format_count

CONSOLE_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Carry out one command; exit with 1 where there is no such model."""
    parser = _parser()
    given = parser.parse_args(arguments)
    root = Path(state_dir({STATE_DIR: given.state_dir}))
    try:
        shown = run(given.command, root, given.model)
    except ModelError as error:
        parser.exit(1, f"{error}\n")
    Console(width=CONSOLE_WIDTH, highlight=False).print(shown)


def run(command: str, root: Path, model: str) -> RenderableType:
    """Carry out a command and return what it shows.

    Args:
        command: "list", "show" or "delete".
        root: the state folder.
        model: ``name@version``, or a name.

    Raises:
        ModelError: there is no such model, or it cannot be used.
    """
    if command == "list":
        return _list(root)
    if command == "show":
        return _show(root, find_version(root, model))
    return Text(f"deleted {delete_version(root, model)}")


def _list(root: Path) -> RenderableType:
    models = versions_in(root)
    if not models:
        return Text("no models")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("model", overflow="fold")
    table.add_column("tables", overflow="fold")
    table.add_column("parts", justify="right")
    table.add_column("size", justify="right")
    for model in models:
        folders = parts_of(root, model).values()
        size = sum(f.stat().st_size for own in folders for f in own.iterdir())
        names = dict.fromkeys(_table_of(folder) for folder in folders)
        parts = format_count(len(folders))
        listed = Text(", ".join(names))
        table.add_row(Text(str(model)), listed, parts, format_bytes(size))
    return table


def _table_of(folder: Path) -> str:
    """Return a part's table; one that cannot be read must not hide the others."""
    try:
        return SavedModel.load(folder).fragment.name
    except ModelError:
        return "(damaged)"


def _show(root: Path, model: ModelVersion) -> RenderableType:
    parts = sorted(parts_of(root, model).items())
    return Group(*(_part_view(model, number, folder) for number, folder in parts))


def _part_view(model: ModelVersion, number: int, folder: Path) -> Table:
    saved = SavedModel.load(folder)
    fragment, encoder = saved.fragment, saved.encoder.encoder
    title = f"{model}, part {number}: table {fragment.name} as {saved.table}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    versions = ", ".join(f"{name} {text}" for name, text in saved.versions.items())
    for name, value in {
        "model": saved.spec.kind,
        "parameters": format_count(len(saved.parameters)),
        "features": ", ".join(f"{own.name} = {own.sql}" for own in fragment.features),
        "encoded features": ", ".join(encoder.feature_names),
        "label": fragment.label or "another table's",
        "filters": " AND ".join(fragment.filters) or "none",
        "software": versions,
        "folder": str(folder),
    }.items():
        table.add_row(name, Text(value))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m client_apps.cli.models",
        description="The parts of models that this site keeps.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--state-dir",
        default="",
        help="what the SuperNode's node config has as state-dir (default: its default)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", parents=[common], help="list all models")
    listed.set_defaults(model="")
    for name, metavar, text in (
        ("show", "NAME[@VERSION]", "show what is kept of one model"),
        ("delete", "NAME@VERSION", "delete what is kept of one version"),
    ):
        command = commands.add_parser(name, parents=[common], help=text)
        command.add_argument("model", metavar=metavar)
    return parser


if __name__ == "__main__":
    main()
