"""List, show, compare and delete the models that the operator's runs have trained.

    python -m strategies.cli.models list [--home DIR]
    python -m strategies.cli.models show NAME[@VERSION]
    python -m strategies.cli.models compare NAME[@VERSION] NAME[@VERSION] ...
    python -m strategies.cli.models delete NAME@VERSION

A name alone is its latest version. What is deleted is the manifest; the sites' owners
delete their parts (``python -m client_apps.cli.models``).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from strategies.cli.model_views import comparison, model_view, models_table
from strategies.inference.manifest import Manifest, read_manifest, resolve
from tp_flower.errors import ModelError
from tp_flower.home import home_folder
from tp_flower.model_names import ModelVersion, delete_version, versions_in

CONSOLE_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> None:
    """Carry out one command; exit with 1 where there is no such model."""
    parser = _parser()
    given = parser.parse_args(arguments)
    home = Path(given.home).expanduser() if given.home else home_folder()
    try:
        shown = run(given.command, home, given.models)
    except ModelError as error:
        parser.exit(1, f"{error}\n")
    Console(width=CONSOLE_WIDTH, highlight=False).print(shown)


def run(command: str, home: Path, models: Sequence[str]) -> RenderableType:
    """Carry out a command and return what it shows.

    Raises:
        ModelError: there is no such model, or it cannot be used.
    """
    if command == "list":
        return models_table({own: _read(home, own) for own in versions_in(home)})
    if command == "show":
        return model_view(resolve(home, models[0]))
    if command == "compare":
        return comparison([resolve(home, model) for model in models])
    return Text(f"deleted {delete_version(home, models[0])}")


def _read(home: Path, model: ModelVersion) -> Manifest | str:
    """Return a manifest; of one that is damaged, why: the others are listed still."""
    try:
        return read_manifest(home, model)
    except ModelError as error:
        return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strategies.cli.models", description="The models of your runs."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--home",
        default="",
        help="folder of your runs (default: TP_FLOWER_HOME, else ~/.tp_flower)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", parents=[common], help="list all models")
    listed.set_defaults(models=())
    for name, count, text in (
        ("show", 1, "show one model"),
        ("compare", "+", "metrics, contributions and settings side by side"),
        ("delete", 1, "delete one version: name@version"),
    ):
        command = commands.add_parser(name, parents=[common], help=text)
        metavar = "NAME@VERSION" if name == "delete" else "NAME[@VERSION]"
        command.add_argument("models", nargs=count, metavar=metavar)
    return parser


if __name__ == "__main__":
    main()
