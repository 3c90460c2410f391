"""The Flower ServerApp: run config -> settings -> strategy -> report.

``mode = "explain"`` takes the set-up's rounds only, and reports what training would do;
"predict" and "evaluate" use the model that a run has saved
(:mod:`strategies.inference.predict`).
"""

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console, Group, RenderableType
from rich.text import Text

from strategies import STRATEGIES, Explain
from strategies.inference.manifest import write_manifest
from strategies.inference.predict import use_model
from strategies.report_page.page import (
    ReportError,
    explanation_view,
    page_lines,
    read_report,
    result_view,
)
from strategies.run import failures
from strategies.run.channel import open_channel
from strategies.run.journal import FOLDER
from strategies.run.resume import resumed
from strategies.run.strategy import RoundListener
from strategies.trackers import Tracking
from strategies.training.saving import make_manifest
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.query import Query
from tp_flower.reports.console import epoch_line
from tp_flower.reports.records import (
    REPORT_FILE,
    RoundReport,
    report_dict,
    report_line,
    write_json,
)
from tp_flower.settings import Settings
from tp_flower.settings.run import EVALUATE, EXPLAIN, PREDICT
from tp_flower.sources.flights import FLIGHTS_REGRESSION_SQL, FLIGHTS_SQL

CONSOLE_WIDTH = 100

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out a run for Flower, which then prints the reason of a failure."""
    failures.FLOWER_LOGGER.addFilter(failures.reason_instead_of_trace)
    carry_out(grid, Settings.from_run_config(context.run_config), context.run_id)


def carry_out(
    grid: Grid, settings: Settings, run_id: int, is_full: bool = False
) -> None:
    """Train, explain, predict or evaluate, as the run's mode says; write the report.

    Of an explanation, which does not fit a screen, the console has all if it
    ``is_full``.
    """
    console = Console(width=CONSOLE_WIDTH, highlight=False)
    if settings.resume:
        settings = resumed(settings)
    folder = output_folder(settings, run_id)
    console.print(f"Results will be in {folder}", soft_wrap=True)
    settings = replace(settings, output_dir=str(folder))
    with Tracking(settings, folder) as tracking:
        progress = _ProgressLines(console, settings)

        def on_round(report: RoundReport) -> None:
            progress(report)
            tracking(report)

        channel = open_channel(grid, settings.channel, settings.session_seconds)
        try:
            with failures.recorded(settings, folder), channel as connected:
                view = act(settings, on_round, connected, folder, is_full)
        finally:
            page = page_line(folder)
    console.print(view)
    console.print(page, soft_wrap=True, markup=False)
    console.print(report_line(folder / REPORT_FILE), soft_wrap=True, markup=False)


def act(
    settings: Settings,
    on_round: RoundListener,
    grid: Grid,
    folder: Path,
    is_full: bool = False,
) -> RenderableType:
    """Carry out the run's mode and return its view for the console."""
    if settings.mode in (PREDICT, EVALUATE):
        return use_model(settings, on_round, grid, folder)
    has_label = STRATEGIES[settings.method_name].has_label
    query = Query.from_sql(choose_sql(settings), needs_label=has_label)
    if settings.mode == EXPLAIN:
        return explanation_view(
            explain(query, settings, on_round, grid, folder), is_full
        )
    return train(query, settings, on_round, grid, folder)


def explain(
    query: Query, settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> dict[str, object]:
    """Write an explanation of the training, and return its content for the console."""
    strategy = Explain(query, settings, on_round)
    strategy.start(grid)
    content = strategy.explanation
    write_json(content, folder)
    # of the messages that explaining sends, only labels have a cost
    totals = content["privacy"]["totals"] if settings.privacy.covers_labels else []
    return {
        **content,
        "privacy": {"totals": totals, "readings": content["privacy"]["readings"]},
    }


def train(
    query: Query, settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> RenderableType:
    """Train and write the report, even if the run fails midway."""
    strategy = STRATEGIES[settings.method_name](query, settings, on_round)
    try:
        strategy.start(grid)
    except (Exception, KeyboardInterrupt) as error:
        if strategy.training_problem is not None:
            failed = replace(strategy.report, status=failures.status_of(error))
            write_json(report_dict(failed), folder)
        if strategy.can_be_resumed:
            error.add_note(failures.how_to_resume(settings, folder))
        raise
    report = strategy.report
    write_json(report_dict(report), folder)
    manifest = make_manifest(strategy)
    write_manifest(home_folder(), manifest)
    strategy.session.end()
    return Group(result_view(report_dict(report)), Text(f"Model: {manifest.model}"))


def page_line(folder: Path) -> str:
    """Write `report.html` beside `report.json`; return the lines about it.

    They are commands, and a line that says where the page is.

    The run does not fail if the page cannot be written.
    """
    try:
        return page_lines(folder)
    except (OSError, ReportError) as error:
        return f"report.html could not be written: {error}"


def choose_sql(settings: Settings) -> str:
    """Return the run's query: the user's, or the built-in query of the task."""
    if settings.sql.strip():
        return settings.sql
    if settings.tables:
        raise SettingsError(
            "tables is set, but sql is empty: write the query whose result to train on"
        )
    has_numbers = settings.task == "regression" or bool(settings.method.solvers)
    return FLIGHTS_REGRESSION_SQL if has_numbers else FLIGHTS_SQL


def output_folder(settings: Settings, run_id: int) -> Path:
    """Return the absolute folder of the run's results, created if missing."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    default = home_folder() / "runs" / f"{stamp}-{run_id % 0x10000:04x}"
    folder = Path(settings.output_dir).expanduser() if settings.output_dir else default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"output-dir {str(folder)!r} cannot be made: {error.strerror}"
        ) from error
    _check_free(folder, settings)
    return folder.resolve()


def _check_free(folder: Path, settings: Settings) -> None:
    """Refuse a folder with a report.

    Allowed is one whose run is resumed, or has failed without a checkpoint.
    """
    if not (folder / REPORT_FILE).exists():
        return
    way_on = (
        f", or resume its run: resume={folder}" if (folder / FOLDER).is_dir() else ""
    )
    has_failed = str(read_report(folder)["status"]).startswith("failed")
    if not settings.resume and (way_on or not has_failed):
        raise SettingsError(
            f"output-dir {str(folder)!r} has the report of a run, which is not "
            f"overwritten: choose another folder{way_on}"
        )
    (folder / REPORT_FILE).unlink()


class _ProgressLines:
    """Print a line per round of set-up, and one per epoch with the remaining time."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console, self._settings = console, settings
        self._rounds: list[RoundReport] = []
        self._started = time.perf_counter()

    def __call__(self, report: RoundReport) -> None:
        if not self._settings.progress:
            return
        if report.epoch == 0:
            self._console.print(f"{report.phase} done", markup=False)
            self._started = time.perf_counter()
            return
        self._rounds.append(report)
        if report.train:
            line = epoch_line(
                self._rounds,
                self._settings.epochs,
                time.perf_counter() - self._started,
                self._settings.split_name,
            )
            self._console.print(line, soft_wrap=True, markup=False)
            self._rounds = []
