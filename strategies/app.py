"""The Flower ServerApp: run config -> settings -> strategy -> report.

It runs as everything does, by :mod:`tp_flower.api`, which calls :func:`carry_out`.
``mode = "explain"`` takes the set-up's rounds only, and reports what training would do;
"predict" and "evaluate" use the model that a run has saved
(:mod:`strategies.inference.predict`).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from strategies import STRATEGIES, Explain
from strategies.inference.manifest import write_manifest
from strategies.inference.predict import use_model
from strategies.report_page.page import ReportError, page_lines, read_report
from strategies.run import failures
from strategies.run.channel import open_channel
from strategies.run.journal import FOLDER
from strategies.run.resume import resume_settings
from strategies.run.strategy import RoundListener
from strategies.search.run import Search
from strategies.trackers import Tracking
from strategies.training.saving import make_manifest
from strategies.training.strategy import TrainingStrategy
from tp_flower import api
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.query import Query
from tp_flower.reports.console import epoch_line
from tp_flower.reports.records import (
    REPORT_FILE,
    CompletedRun,
    RoundReport,
    report_dict,
    write_json,
)
from tp_flower.settings import Settings
from tp_flower.settings.run import EVALUATE, EXPLAIN, PREDICT, SERVE
from tp_flower.sources.flights import FLIGHTS_REGRESSION_SQL, FLIGHTS_SQL

app = ServerApp()

Announce = Callable[[str], None]


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out a run for Flower, which then prints the reason of a failure."""
    failures.FLOWER_LOGGER.addFilter(failures.reason_instead_of_trace)
    settings = Settings.from_run_config(context.run_config)
    api.run(settings, grid, announce=api.print_line).show()


def carry_out(grid: Grid, settings: Settings, announce: Announce) -> CompletedRun:
    """Train, explain, predict or evaluate by the run's mode; write the report.

    ``announce`` is called with every line about the progress.
    """
    if settings.resume:
        settings = resume_settings(settings)
    folder = output_folder(settings, grid.run.run_id)
    announce(f"Results will be in {folder}")
    settings = replace(settings, output_dir=str(folder))
    with Tracking(settings, folder) as tracking:
        progress = _ProgressLines(announce, settings)

        def on_round(report: RoundReport) -> None:
            progress(report)
            tracking(report)

        channel = open_channel(
            grid,
            settings.channel,
            settings.session_seconds,
            stays=settings.mode == SERVE,
        )
        try:
            with failures.record_log(settings, folder), channel as connected:
                completed = act(settings, on_round, connected, folder, announce)
        finally:
            next_steps = page_line(folder)
    return replace(completed, next_steps=next_steps)


def act(
    settings: Settings,
    on_round: RoundListener,
    grid: Grid,
    folder: Path,
    announce: Announce | None = None,
) -> CompletedRun:
    """Carry out the run's mode and return its results."""
    if settings.mode in (PREDICT, EVALUATE):
        report, predictions = use_model(settings, on_round, grid, folder)
        return CompletedRun(report, folder, predictions=predictions)
    if settings.mode == SERVE:
        # no other run listens
        from strategies.serving.deployed import serve_run

        report = serve_run(settings, grid, folder, announce or api.print_line)
        return CompletedRun(report, folder)
    method = STRATEGIES[settings.method_name].method_type
    query = method.parse(choose_sql(settings), settings)
    if settings.mode == EXPLAIN:
        return explain(query, settings, on_round, grid, folder)
    if settings.folds:
        strategy = Search(query, settings, announce if settings.progress else None)
        return complete(strategy, grid, folder)
    return train(query, settings, on_round, grid, folder)


def explain(
    query: Query, settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> CompletedRun:
    """Write an explanation of the training."""
    strategy = Explain(query, settings, on_round)
    strategy.start(grid)
    content = strategy.explanation
    write_json(content, folder)
    return CompletedRun(content, folder)


def train(
    query: Query, settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> CompletedRun:
    """Train and write the report, even if the run fails midway."""
    strategy = STRATEGIES[settings.method_name](query, settings, on_round)
    return complete(strategy, grid, folder)


def complete(
    strategy: Search | TrainingStrategy, grid: Grid, folder: Path
) -> CompletedRun:
    """Run a strategy that trains; write the report, even if the run fails midway."""
    settings = strategy.settings
    try:
        strategy.start(grid)
    except (Exception, KeyboardInterrupt) as error:
        if strategy.trainer.training_problem is not None:
            failed = replace(strategy.report, status=failures.status_of(error))
            write_json(report_dict(failed), folder)
        if strategy.can_be_resumed:
            error.add_note(failures.resume_commands(settings, folder))
        raise
    content = report_dict(strategy.report)
    write_json(content, folder)
    model = ""
    if strategy.trainer.method.saves_model:
        manifest = make_manifest(strategy.trainer)
        write_manifest(home_folder(), manifest)
        model = str(manifest.model)
    strategy.session.end()
    return CompletedRun(content, folder, model=model)


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
    folder = Path(settings.output_dir).expanduser()
    if not settings.output_dir:
        folder = _free_folder(run_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"output-dir {str(folder)!r} cannot be made: {error.strerror}"
        ) from error
    _check_free(folder, settings)
    return folder.resolve()


def _free_folder(run_id: int) -> Path:
    """Return a folder for a run's results that is not there yet."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = home_folder() / "runs" / stamp
    # a search over settings begins several runs in a second
    folders = (Path(f"{name}-{number % 0x10000:04x}") for number in count(run_id))
    return next(folder for folder in folders if not folder.exists())


def _check_free(folder: Path, settings: Settings) -> None:
    """Refuse a folder with a report.

    Allowed is one whose run is resumed, or has failed without a checkpoint.
    """
    if not (folder / REPORT_FILE).exists():
        return
    way_on = ""
    if (folder / FOLDER).is_dir():
        way_on = f", or resume its run: resume={folder}"
    has_failed = str(read_report(folder)["status"]).startswith("failed")
    if not settings.resume and (way_on or not has_failed):
        raise SettingsError(
            f"output-dir {str(folder)!r} has the report of a run, which is not "
            f"overwritten: choose another folder{way_on}"
        )
    (folder / REPORT_FILE).unlink()


class _ProgressLines:
    """Announce a line per round of set-up and per epoch, with the remaining time."""

    def __init__(self, announce: Announce, settings: Settings) -> None:
        self._announce = announce
        self._settings = settings
        self._rounds: list[RoundReport] = []
        self._started = time.perf_counter()

    def __call__(self, report: RoundReport) -> None:
        """Announce a phase of the set-up when it is done, and every epoch."""
        if not self._settings.progress:
            return
        if report.epoch == 0:
            self._announce(f"{report.phase} done")
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
            self._announce(line)
            self._rounds = []
