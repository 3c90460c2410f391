"""The command line `tp-flower`, for whoever runs queries and for owners of sites.

Commands import what they need when they run, so that a mistyped setting is answered at
once. The two sides never import each other; this module, like Flower, loads from both
by name.

Exit status: 0 done, 1 failed, 2 an option or a setting was refused.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup

from tp_flower.errors import SettingsError, TPFlowerError, failure_text
from tp_flower.files import home_folder
from tp_flower.model_names import SOFTWARE_VERSION
from tp_flower.node_config import STATE_DIR, state_dir

SERVER: Final = "strategies.commands"
SCORER: Final = "strategies.serving.scorer"
SCORER_SERVER: Final = "strategies.serving.http_server"
SITE: Final = "client_apps.commands"
RUN_METRICS: Final = "strategies.report_page.run_metrics"
CLIENT_APP: Final = "client_apps.app:app"
CONSOLE_WIDTH: Final = 120
RELEASES: Final = (
    "This trains by strategy moments: every site's ledger will have its second moments."
)
DESCRIBES: Final = (
    "No model is trained: every site's ledger will have its second moments."
)
ALL_ROWS: Final[Mapping[str, object]] = {
    "test-fraction": 0.0,
    "test-split": "random",
    "validation-fraction": 0.0,
}
MODES: Final[Mapping[str, str]] = {
    "explain": (
        "Say how the query would be joined, what training would cost, and who learns "
        "what."
    ),
    "train": "Train on the result of the query.",
    "predict": "Predict the rows of a query with a saved model.",
    "evaluate": "Measure a saved model on the rows of a query.",
}

File = Annotated[
    Path | None,
    typer.Argument(help="TOML file of settings. [default: the built-in flights]"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting; it wins over the file's."
    ),
]
StateDir = Annotated[
    str,
    typer.Option(
        f"--{STATE_DIR}",
        metavar="DIR",
        help="What the SuperNode's node config has as state-dir.",
    ),
]
GroupBy = Annotated[
    str,
    typer.Option("--by", metavar="COLUMN", help="The column of groups, c.segment."),
]
Full = Annotated[bool, typer.Option("--full", help="Print all of an explanation.")]
SiteTables = Annotated[
    str, typer.Option("--tables", metavar="FILE", help="The tables file.")
]


class Commands(TyperGroup):
    """The group of all commands: a failure ends in its reason and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; print the reason if it fails."""
        try:
            return super().invoke(ctx)
        except (TPFlowerError, KeyboardInterrupt) as error:
            sys.stdout.flush()
            typer.echo(failure_text(error), err=True)
            raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from None


app = typer.Typer(
    name="tp-flower",
    cls=Commands,
    help=(
        "Train on the result of a SQL query whose tables live at different "
        "organisations."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"tp-flower {SOFTWARE_VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Read the options that precede a command."""


def load(reference: str) -> Any:
    """Return the named object of the server's or a site's side, as Flower does."""
    return resolve_name(reference)


def show(view: RenderableType) -> None:
    """Print the result of a command."""
    Console(width=CONSOLE_WIDTH, highlight=False).print(view)


def read_settings(file: Path | None, overrides: list[str] | None, **fixed: Any) -> Any:
    """Return the settings of a file and of single overrides, checked."""
    from tp_flower.settings import Settings
    from tp_flower.settings.run_config import read_run_config

    return Settings.from_run_config(read_run_config(file, overrides or ()) | fixed)


def _add_mode(mode: str, text: str) -> None:
    """Add the command that runs the settings in a mode."""

    @app.command(mode, help=text)
    def carry_out(
        file: File = None,
        overrides: Overrides = None,
        flower: Annotated[
            bool, typer.Option("--flower", help="Run through Flower.")
        ] = False,
        superlink: Annotated[
            str, typer.Option(help="The one for --flower, if not local.")
        ] = "",
        full: Full = False,
    ) -> None:
        from tp_flower import api

        settings = read_settings(file, overrides, mode=mode)
        if not flower:
            api.run(settings, announce=api.print_line).show(full=full)
        elif not load(api.RUN_THROUGH_FLOWER)(settings, superlink, api.print_line):
            raise typer.Exit(1)


for _mode, _text in MODES.items():
    _add_mode(_mode, _text)


@app.command()
def moments(file: File = None, overrides: Overrides = None) -> None:
    """Print correlations, what each join is worth, and more, by one training.

    By strategy moments, whatever the settings name: the second moments of the joined
    rows leave the sites, which their ledgers note.
    """
    from tp_flower import api
    from tp_flower.reports.moments import METHOD, JoinAnswers
    from tp_flower.reports.records import REPORT_FILE, report_line
    from tp_flower.settings.run import TRAIN

    settings = read_settings(file, overrides, mode=TRAIN, strategy=METHOD)
    typer.echo(RELEASES)
    model = api.run(settings, announce=api.print_line)
    show(JoinAnswers(model).view())
    typer.echo(report_line(model.folder / REPORT_FILE))


@app.command()
def tune(
    file: File = None,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE; ...",
            help="Settings and their values, or log(a, b), uniform(a, b), int(a, b) "
            "with --random. Given twice, all candidates of each grid.",
        ),
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds of the rows.")] = 5,
    random: Annotated[
        int, typer.Option(metavar="N", help="Try N random candidates.")
    ] = 0,
) -> None:
    """Try settings on folds of the rows, and train the model by the best of them.

    In one run: rows are extracted and joined once. Every site's ledger counts each fit.
    """
    from tp_flower import api
    from tp_flower.reports.records import REPORT_FILE, report_line
    from tp_flower.settings.run import TRAIN
    from tp_flower.tuning.candidates import read_candidates
    from tp_flower.tuning.search import SearchResult

    settings = read_settings(file, overrides, mode=TRAIN)
    tried = read_candidates(grid or (), random, settings.seed)
    settings = settings.with_fields(
        folds=folds, candidates=tried or settings.candidates
    )
    search_result = SearchResult(api.run(settings, announce=api.print_line))
    show(search_result.view())
    typer.echo(f"Model: {search_result.model.name}")
    typer.echo(report_line(search_result.model.folder / REPORT_FILE))


def _describe(
    file: Path | None, overrides: list[str] | None, fixed: Mapping[str, str]
) -> None:
    """Run settings that describe the joined rows, and print what they describe."""
    from tp_flower import api
    from tp_flower.reports.moments import METHOD, JoinAnswers
    from tp_flower.reports.records import REPORT_FILE, report_line
    from tp_flower.settings.run import TRAIN

    # what a file holds out for training is described, too
    named = {text.partition("=")[0].strip() for text in overrides or ()}
    all_rows = {key: value for key, value in ALL_ROWS.items() if key not in named}
    settings = read_settings(
        file, overrides, mode=TRAIN, strategy=METHOD, **all_rows, **fixed
    )
    typer.echo(DESCRIBES)
    result = api.run(settings, announce=api.print_line)
    show(JoinAnswers(result).view())
    typer.echo(report_line(result.folder / REPORT_FILE))


@app.command("table-one")
def table_one(file: File = None, overrides: Overrides = None, by: GroupBy = "") -> None:
    """Print means, deviations and shares of the query's columns, by group.

    From the second moments of all joined rows, which leave the sites, as their ledgers
    note. The query needs no label; with AS time and AS event there are rates.
    """
    _describe(file, overrides, {"describe": "table-one"} | _by(by))


@app.command("kaplan-meier")
def kaplan_meier(
    file: File = None,
    overrides: Overrides = None,
    by: GroupBy = "",
    times: Annotated[
        str, typer.Option(metavar="TIMES", help="The grid of times, '30, 60, 90'.")
    ] = "",
) -> None:
    """Print survival curves by group on a grid of times, and the log-rank test.

    The query has AS time and AS event. The second moments of all joined rows leave the
    sites, which their ledgers note.
    """
    grid = {"curve-times": times} if times else {}
    _describe(file, overrides, {"describe": "kaplan-meier"} | grid | _by(by))


def _by(column: str) -> dict[str, str]:
    """Return the setting of groups, if the option is given."""
    return {"group-by": column} if column else {}


@app.command()
def serve(  # noqa: PLR0913 - where it listens, for whom, and the run's settings
    model: Annotated[str, typer.Argument(metavar="NAME[@VERSION]")],
    file: File = None,
    overrides: Overrides = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to listen. [default: 127.0.0.1:8700]"
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The token. [default: TP_FLOWER_TOKEN]"),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM of a certificate and its key, for TLS."),
    ] = None,
    refresh: Annotated[
        float, typer.Option(metavar="SECONDS", help="Read the rows anew; 0 = never.")
    ] = 0.0,
    superlink: Annotated[
        str,
        typer.Option(
            help="Serve there, by the sites of a deployment; its operator's file says "
            "where it listens, and for whom."
        ),
    ] = "",
) -> None:
    """Stay, and predict over HTTP with a saved model, by sites in this process.

    Or by those of a deployment: with --superlink.
    """
    from tp_flower import api

    settings = read_settings(file, overrides, mode="serve", **{"model-name": model})
    if superlink:
        if listen or token_file or certificate or refresh:
            raise typer.BadParameter(
                "--listen, --token-file, --certificate and --refresh are in the "
                "operator's file with --superlink (superlink.sh --scorer FILE)"
            )
        if not load(api.RUN_THROUGH_FLOWER)(settings, superlink, api.print_line):
            raise typer.Exit(1)
        return
    if refresh < 0.0:
        raise typer.BadParameter(f"--refresh {refresh:g}: it must be 0 or more")
    address = load(f"{SCORER_SERVER}:Address").read(listen, token_file, certificate)
    load(f"{SCORER}:serve_here")(
        settings, load(CLIENT_APP), address, refresh, api.print_line
    )


@app.command()
def check(file: File = None, overrides: Overrides = None) -> None:
    """Check settings, SQL and tables, also against each other, without reading rows."""
    typer.echo(
        load(f"{SERVER}:check")(read_settings(file, overrides), load(CLIENT_APP))
    )


@app.command()
def report(
    folder: Path,
    full: Full = False,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics", help="Print rounds and bytes for Prometheus instead."
        ),
    ] = False,
) -> None:
    """Write the page of a run that has ended, and print its result."""
    if metrics:
        typer.echo(load(f"{RUN_METRICS}:run_metrics")(folder), nl=False)
        return
    show(load(f"{SERVER}:report")(folder, full))


@app.command()
def models(
    task: Annotated[Literal["list", "show", "delete"], typer.Argument()] = "list",
    model: Annotated[str, typer.Argument(metavar="[NAME[@VERSION]]")] = "",
    state_dir: StateDir = "",
) -> None:
    """List, show or delete models.

    With --state-dir: the parts of models that a site stores.
    """
    root = Path(_state_of(state_dir)) if state_dir else home_folder()
    show(load(f"{SITE if state_dir else SERVER}:models")(task, root, model))


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="NAME[@VERSION]")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.zip", help="[default: NAME.zip, in this folder]"),
    ] = None,
    tables: SiteTables = "",
    state_dir: StateDir = "",
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Add an ONNX graph of each table's model.")
    ] = False,
) -> None:
    """Write a model to one zip file, which predicts without this package.

    With --state-dir and --tables: the parts of the model that a site stores.
    """
    from tp_flower.export.model import export_model, export_parts

    if bool(tables) != bool(state_dir):
        raise typer.BadParameter("a site's parts need --state-dir and --tables")
    path = out or Path(f"{model.partition('@')[0]}.zip")
    if tables:
        root = Path(_state_of(state_dir))
        export_parts(root, model, path, tables, with_onnx=onnx)
    else:
        root = Path(_state_of(""))
        export_model(home_folder(), model, path, root, with_onnx=onnx)
    typer.echo(f"The export is in {path}: python {path} show")


@app.command()
def policy(tables: SiteTables, table: str = "") -> None:
    """Print a first policy, in TOML, for tables without one: it allows nothing.

    With --table, only the policy of that table.
    """
    typer.echo(load(f"{SITE}:policy")(tables, table), nl=False)


@app.command()
def account(
    tables: SiteTables = "",
    page: Annotated[
        str, typer.Option(help="Also write a page about every query.")
    ] = "",
    export: Annotated[
        bool, typer.Option("--export", help="Print the ledger's lines.")
    ] = False,
    begin_anew: Annotated[
        str, typer.Option(help="Move the ledger to a new file.")
    ] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print it for Prometheus.")
    ] = False,
    state_dir: StateDir = "",
) -> None:
    """Print each table's epsilons of features, models and labels, and its budget."""
    tasks = [bool(tables), export, bool(begin_anew)].count(True)
    has_lone_option = (bool(page) or metrics) and not tables
    if tasks != 1 or has_lone_option or (page and metrics):
        raise typer.BadParameter(
            "use one of --tables FILE [--page FILE or --metrics], --export, "
            "--begin-anew"
        )
    root = _state_of(state_dir)
    if metrics:
        typer.echo(load(f"{SITE}:account_metrics")(root, tables), nl=False)
    elif tables:
        show(load(f"{SITE}:show_account")(root, tables, page))
    elif begin_anew:
        load(f"{SITE}:begin_anew")(root, Path(begin_anew))
    else:
        for line in load("client_apps.data.ledger:open_ledger")(root).export():
            typer.echo(line)


@app.command()
def approve(
    tables: SiteTables,
    proposal: Annotated[
        Path | None,
        typer.Argument(
            help="proposal.json of a run. [default: the runs that were refused]"
        ),
    ] = None,
    state_dir: StateDir = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Approve PROPOSAL without a question.")
    ] = False,
) -> None:
    """Show what whole runs request, and add those you approve to approved-runs."""
    if yes and proposal is None:
        raise typer.BadParameter(
            "--yes approves the run of a file: name its proposal.json"
        )
    runs = list(load(f"{SITE}:runs_to_approve")(_state_of(state_dir), tables, proposal))
    for run in runs:
        typer.echo(run.text)
        if run.tables and (yes or typer.confirm("Approve this run?")):
            typer.echo(run.approve())
    if not runs:
        typer.echo("No run waits for an approval.")


@app.command("site-key")
def site_key(state_dir: StateDir = "") -> None:
    """Print the site's public key, for the allowed-keys of other sites."""
    if state_dir and not Path(state_dir).expanduser().is_absolute():
        raise typer.BadParameter(
            f"{state_dir!r} is not an absolute path, as a SuperNode's must be"
        )
    typer.echo(
        load("client_apps.data.key_files:site_key")(_state_of(state_dir)).public.hex()
    )


def _state_of(folder: str) -> str:
    return state_dir({STATE_DIR: folder})


if __name__ == "__main__":
    app()
