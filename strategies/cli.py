"""List, show and delete the models that the operator's runs have trained.

    python -m strategies.cli list [--home DIR]
    python -m strategies.cli show NAME[@VERSION]
    python -m strategies.cli delete NAME@VERSION

A name without a version means its latest version. Only the manifest is deleted here;
the sites' owners delete their parts (``python -m client_apps.cli models``).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from strategies.inference.manifest import Manifest, read_manifest, resolve
from tp_flower.errors import ModelError
from tp_flower.files import home_folder
from tp_flower.model_names import ModelVersion, delete_version, versions_in
from tp_flower.reports.console import format_count, format_value, name_table, text_table
from tp_flower.splits import RANDOM, SplitRule


def models_table(models: Mapping[ModelVersion, Manifest | str]) -> RenderableType:
    """Return a line per model; a text instead of a manifest says why it is missing."""
    if not models:
        return Text("no models")
    rows = [
        (str(model), manifest)
        if isinstance(manifest, str)
        else (
            str(model),
            manifest.created.removesuffix("+00:00").replace("T", " "),
            str(manifest.settings.get("strategy", "")),
            ", ".join(dict.fromkeys(table.name for table in manifest.tables)),
            _test_metrics(manifest),
        )
        for model, manifest in models.items()
    ]
    head = ("model", "created, UTC", "strategy", "tables", "test metrics")
    table = text_table(head, rows, words=range(len(head)))
    # users copy a name into their next command
    table.columns[0].no_wrap = True
    return table


def model_view(manifest: Manifest) -> RenderableType:
    """Return the description, the tables and the sites of one model."""
    versions = manifest.versions.items()
    facts = {
        "created": manifest.created,
        "status": manifest.status,
        "strategy": str(manifest.settings.get("strategy", "")),
        **({"boosted from": manifest.start} if manifest.start else {}),
        "query": manifest.query,
        "label": f"{manifest.label} of {manifest.label_table}",
        "loss": manifest.loss,
        "classes": ", ".join(manifest.classes) or "none",
        "base score": ", ".join(map(format_value, manifest.base_score)),
        "joined rows": format_count(manifest.joined_rows),
        "train": _metrics(manifest.train),
        "test": _test_metrics(manifest),
        "software": ", ".join(f"{name} {version}" for name, version in versions),
    }
    rows = [
        (
            name_table(table.table, table.name),
            table.kind,
            format_count(table.encoded.width),
            format_value(table.share),
            ", ".join(map(format_value, table.mean_score)),
            ", ".join(f"{p.site} ({p.digest[:8] or 'kept nothing'})" for p in table.parts),
        )
        for table in manifest.tables
    ]
    numbers = ("encoded features", "share of variance", "mean score")
    head = ("table", "model", *numbers, "kept at")
    return Group(
        text_table(("", ""), facts.items(), words=(0, 1), title=str(manifest.model)),
        text_table(head, rows, words=(0, 1, 5), title="Tables"),
    )


def _metrics(metrics: Mapping[str, float]) -> str:
    texts = (f"{name} {format_value(value)}" for name, value in metrics.items())
    return ", ".join(texts) or "-"


def _test_metrics(manifest: Manifest) -> str:
    """Return the metrics of held-out rows, and which rows those were."""
    split = SplitRule.read(str(manifest.settings.get("test-split", RANDOM)))
    share = float(str(manifest.settings["test-fraction"]))
    sample = float(str(manifest.settings.get("sample", 1.0)))
    return f"{_metrics(manifest.test)} ({split.describe(share, sample)})"


CONSOLE_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> None:
    """Carry out one command; exit with 1 if there is no such model."""
    parser = _parser()
    options = parser.parse_args(arguments)
    home = Path(options.home).expanduser() if options.home else home_folder()
    try:
        view = run(options.command, home, options.models)
    except ModelError as error:
        parser.exit(1, f"{error}\n")
    Console(width=CONSOLE_WIDTH, highlight=False).print(view)


def run(command: str, home: Path, models: Sequence[str]) -> RenderableType:
    """Carry out a command and return its view for the console."""
    if command == "list":
        return models_table({model: _read(home, model) for model in versions_in(home)})
    if command == "show":
        return model_view(resolve(home, models[0]))
    return Text(f"deleted {delete_version(home, models[0])}")


def _read(home: Path, model: ModelVersion) -> Manifest | str:
    """Return a manifest, or why it is damaged: the other models are still listed."""
    try:
        return read_manifest(home, model)
    except ModelError as error:
        return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m strategies.cli", description="The models of your runs."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--home",
        default="",
        help="folder of your runs (default: TP_FLOWER_HOME, else ~/.tp_flower)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    list_models = commands.add_parser("list", parents=[common], help="list all models")
    list_models.set_defaults(models=())
    for name, count, text in (
        ("show", 1, "show one model"),
        ("delete", 1, "delete one version: name@version"),
    ):
        command = commands.add_parser(name, parents=[common], help=text)
        metavar = "NAME@VERSION" if name == "delete" else "NAME[@VERSION]"
        command.add_argument("models", nargs=count, metavar=metavar)
    return parser


if __name__ == "__main__":
    main()
