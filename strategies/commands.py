"""Commands to run queries, here or through Flower, and to handle what runs have left.

``tp_flower.command_line`` calls them. Only the manifest of a model is deleted here; the
sites' owners delete their parts.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from logging import CRITICAL
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

from flwr.clientapp import ClientApp
from flwr.common.logger import console_handler, update_console_handler
from rich.console import Group, RenderableType
from rich.text import Text

from strategies import STRATEGIES
from strategies.app import choose_sql, page_line
from strategies.inference.manifest import (
    Manifest,
    metrics_of_test,
    metrics_text,
    read_manifest,
    resolve,
)
from strategies.report_page.page import explanation_view, read_report, result_view
from strategies.run.grid import InProcessGrid
from strategies.run.session import Session
from strategies.setup.absent_columns import check_absent, check_present
from strategies.setup.columns import bind_columns
from strategies.setup.declared_types import check_types
from strategies.setup.joined_rows import encoder_choices
from tp_flower.errors import ModelError, SettingsError
from tp_flower.model_names import ModelVersion, delete_version, versions_in
from tp_flower.node_config import NUM_PARTITIONS, PARTITION_ID, STATE_DIR, state_dir
from tp_flower.reports.console import format_count, format_value, name_table, text_table
from tp_flower.reports.records import COMPLETED, REPORT_LINE, write_whole
from tp_flower.settings import Settings
from tp_flower.settings.run import EXPLAIN, TRAIN
from tp_flower.settings.run_config import changed_settings, run_config_text
from tp_flower.sources.shards import (
    MEMORY_PREFIX,
    Frames,
    hosted_shards,
    register_frames,
    release,
)

NamedSites: TypeAlias = Mapping[str, Frames | str | PathLike[str]]
"""By site its tables, or the path of its tables file."""

ROOT: Final = Path(__file__).resolve().parents[1]
# beside the interpreter, without resolving links: in an environment it is a link
FLWR: Final = Path(sys.executable).with_name("flwr")
STARTED_LINE: Final = "Successfully started run "
INSTALLED: Final = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"


def site_count(settings: Settings) -> int:
    """Return the number of organisations that the tables of a run are at."""
    everything = {PARTITION_ID: 0, NUM_PARTITIONS: 1}
    return len(
        {shard.site for shard in hosted_shards(everything, {"tables": settings.tables})}
    )


def in_process_grid(settings: Settings, client_app: ClientApp) -> InProcessGrid:
    """Return all sites of the setting `tables` in this process."""
    return InProcessGrid(client_app, site_count(settings), {"tables": settings.tables})


@contextmanager
def silence_log() -> Iterator[None]:
    """Keep the log of Flower and of the sites off the console inside the context."""
    level = console_handler.level
    update_console_handler(level=CRITICAL)
    try:
        yield
    finally:
        console_handler.setLevel(level)


@contextmanager
def simulate(
    client_app: ClientApp, settings: Settings, sites: NamedSites | None
) -> Iterator[InProcessGrid]:
    """Yield sites in this process, with one state folder, that of simulations.

    ``sites`` None are those of the setting `tables`.
    """
    if sites is None:
        grid = in_process_grid(settings, client_app)
        paths = {}
    else:
        paths = {name: _table_location(name, tables) for name, tables in sites.items()}
        grid = InProcessGrid(client_app, paths)
    for context in grid.contexts.values():
        context.node_config[STATE_DIR] = state_dir({})
    try:
        with silence_log(), closing(grid):
            yield grid
    finally:
        for path in paths.values():
            release(path)


def _table_location(site: str, tables: Frames | str | PathLike[str]) -> str:
    """Return the path of a site's tables file, or the name of its tables in memory."""
    if isinstance(tables, str | PathLike):
        return str(tables)
    return MEMORY_PREFIX + register_frames(tables, site)


def run_through_flower(
    settings: Settings, superlink: str, announce: Callable[[str], None]
) -> Path | None:
    """Run the app by `flwr run`, and announce the lines that it prints.

    Return where its report is, at the SuperLink; None if the run has failed, which
    Flower does not report. Without a SuperLink of Flower's configuration the local one
    simulates the sites.
    """
    if not (ROOT / "pyproject.toml").is_file():
        raise SettingsError(
            f"--flower sends a copy of the repository, which {ROOT} is not"
        )
    nodes = f"num-supernodes={site_count(settings)} client-resources-num-cpus=1"
    federation = [superlink] if superlink else ["--federation-config", nodes]
    report_file = None
    number = ""
    with tempfile.TemporaryDirectory(prefix="tp-flower-") as folder:
        changed = run_config_text(changed_settings(settings.to_dict()))
        config = write_whole(Path(folder, "run.toml"), changed)
        with subprocess.Popen(
            [FLWR, "run", ROOT, *federation, "--stream", "-c", config],
            env={**os.environ, INSTALLED: "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            try:
                for text in process.stdout or ():
                    line = text.removesuffix("\n")
                    announce(line)
                    if line.startswith(REPORT_LINE):
                        report_file = Path(line.removeprefix(REPORT_LINE))
                    elif line.startswith(STARTED_LINE):
                        number = line.split()[3]
            except KeyboardInterrupt as error:
                subprocess.run(
                    [FLWR, "stop", number, *federation[: bool(superlink)]], check=False
                )
                way_on = ""
                if settings.mode == TRAIN:
                    way_on = ". To go on: --set resume=FOLDER of its results"
                error.add_note(f"Flower stops the run{way_on}")
                raise
    return report_file


def check(settings: Settings, client_app: ClientApp) -> str:
    """Check that settings, query and tables fit together; return a line about them."""
    strategy = STRATEGIES[settings.method_name]
    query = strategy.method_type.parse(choose_sql(settings), settings)
    with silence_log(), closing(in_process_grid(settings, client_app)) as grid:
        session = Session.begin(grid, query, settings.with_fields(output_dir=""))
        session.abandon()
    inventory = session.inventory
    bound, columns = bind_columns(strategy(query, settings).bind, inventory)
    check_absent(bound, inventory)
    check_present(bound, inventory)
    encoder_choices(bound, settings)
    check_types(bound, inventory, columns, settings)
    tables = ", ".join(inventory.tables)
    return f"Settings, query and tables ({tables}) fit together; no row was read."


def report(folder: Path, is_full: bool) -> RenderableType:
    """Write the page of a run that has ended, and return its result for the console."""
    content = read_report(folder)
    if content["status"] != COMPLETED:
        view: RenderableType = Text(str(content["status"]))
    elif content.get("mode") == EXPLAIN:
        view = explanation_view(content, is_full)
    else:
        view = result_view(content)
    return Group(view, Text(page_line(folder)))


def models(task: str, root: Path, model: str) -> RenderableType:
    """List, show or delete the models that runs have trained."""
    if task == "list":
        return models_table(
            {version: _read(root, version) for version in versions_in(root)}
        )
    if task == "show":
        return model_view(resolve(root, model))
    return Text(f"deleted {delete_version(root, model)}")


def models_table(models: Mapping[ModelVersion, Manifest | str]) -> RenderableType:
    """Return a line per model; a text instead of a manifest says why it is missing."""
    if not models:
        return Text("no models")
    rows: list[tuple[str, ...]] = []
    for model, manifest in models.items():
        if isinstance(manifest, str):
            rows.append((str(model), manifest))
            continue
        row = (
            str(model),
            manifest.created.removesuffix("+00:00").replace("T", " "),
            str(manifest.settings.get("strategy", "")),
            ", ".join(dict.fromkeys(table.name for table in manifest.tables)),
            metrics_of_test(manifest),
        )
        rows.append(row)
    head = ("model", "created, UTC", "strategy", "tables", "test metrics")
    table = text_table(head, rows, words=range(len(head)))
    # users copy a name into their next command
    table.columns[0].no_wrap = True
    return table


def model_view(manifest: Manifest) -> RenderableType:
    """Return the description, the tables and the sites of one model."""
    properties = {
        "created": manifest.created,
        "status": manifest.status,
        "strategy": str(manifest.settings.get("strategy", "")),
        **({"starts from": manifest.start} if manifest.start else {}),
        "query": manifest.query,
        "label": f"{manifest.label} of {manifest.label_table}",
        **({"offset": manifest.offset} if manifest.offset else {}),
        "loss": manifest.loss,
        "classes": ", ".join(manifest.classes) or "none",
        "base score": ", ".join(map(format_value, manifest.base_score)),
        "joined rows": format_count(manifest.joined_rows),
        "train": metrics_text(manifest.train),
        "test": metrics_of_test(manifest),
        "software": ", ".join(
            f"{name} {version}" for name, version in manifest.versions.items()
        ),
    }
    rows = [
        (
            name_table(table.table, table.name),
            table.kind,
            format_count(table.encoded.width),
            format_value(table.share),
            ", ".join(map(format_value, table.mean_score)),
            ", ".join(
                f"{p.site} ({p.digest[:8] or 'kept nothing'})" for p in table.parts
            ),
        )
        for table in manifest.tables
    ]
    head = (
        "table",
        "model",
        "encoded features",
        "share of variance",
        "mean score",
        "kept at",
    )
    return Group(
        text_table(
            ("", ""), properties.items(), words=(0, 1), title=str(manifest.model)
        ),
        text_table(head, rows, words=(0, 1, 5), title="Tables"),
    )


def _read(home: Path, model: ModelVersion) -> Manifest | str:
    """Return a manifest, or why it is damaged: the other models are still listed."""
    try:
        return read_manifest(home, model)
    except ModelError as error:
        return str(error)
