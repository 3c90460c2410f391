"""Experiment trackers: TensorBoard and MLflow follow a run.

Per epoch: metrics, residuals, and what the run has sent and computed so far. At the
end: the final metrics, the settings, `report.json` and `report.html`.

A tracker that is not installed or cannot be reached is refused before anything else
happens. One that fails later is dropped with a warning, and the run continues.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol, Self

from flwr.common.logger import log

from strategies.inference.manifest import finite_metrics
from strategies.report_page.page import PAGE_FILE, ReportError, read_report
from tp_flower.errors import SettingsError, install_hint
from tp_flower.reports.records import REPORT_FILE, RoundReport
from tp_flower.settings import Settings
from tp_flower.settings.declare import items_of

EXPERIMENT = "tp_flower"
PARAMETER_CHARACTERS = 500  # the length that MLflow accepts in every version
Values = Mapping[str, float]


class Tracker(Protocol):
    """A place where a run is logged: figures by epoch, the final ones, and files."""

    def log(self, values: Values, epoch: int) -> None:
        """Log figures at the end of an epoch."""

    def finish(self, values: Values, files: Sequence[Path], *, is_ok: bool) -> None:
        """Log the final figures and the report's files, and close."""


class TensorBoard:
    """Event files in `tensorboard/` in the run's folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        cells = {k: text.replace("|", "\\|") for k, text in _texts(settings).items()}
        lines = (f"| {key} | {' '.join(text.split())} |" for key, text in cells.items())
        self._writer.add_text(
            "settings", "\n".join(("| setting | value |", "|---|---|", *lines))
        )

    def log(self, values: Values, epoch: int) -> None:
        """Add a point to every curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def finish(self, values: Values, files: Sequence[Path], *, is_ok: bool) -> None:
        """Add the final metrics, and the report's location."""
        self.log({f"final/{name}": value for name, value in values.items()}, 0)
        lines = ["completed" if is_ok else "failed", *map(str, files)]
        self._writer.add_text("report", "\n\n".join(lines))
        self._writer.close()


class Mlflow:
    """A run at MLFLOW_TRACKING_URI, or else in `mlflow.db` of the run's folder."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        # otherwise it would report usage to its makers
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Callable[..., object] = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        artefacts = None if uri else (folder / "mlflow").as_uri()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            number = experiment.experiment_id
        else:
            number = self._client.create_experiment(name, artifact_location=artefacts)
        self._run = self._client.create_run(number, run_name=folder.name).info.run_id
        parameters = [
            Param(key, text[:PARAMETER_CHARACTERS])
            for key, text in _texts(settings).items()
        ]
        self._client.log_batch(self._run, params=parameters)

    def log(self, values: Values, epoch: int) -> None:
        """Log all figures in one request."""
        now = round(1000 * time.time())
        points = [self._metric(name, v, now, epoch) for name, v in values.items()]
        self._client.log_batch(self._run, metrics=points)

    def finish(self, values: Values, files: Sequence[Path], *, is_ok: bool) -> None:
        """Log the final metrics and the files, and set the status."""
        self.log({f"final/{name}": value for name, value in values.items()}, 0)
        for file in files:
            self._client.log_artifact(self._run, str(file))
        self._client.set_terminated(self._run, "FINISHED" if is_ok else "FAILED")


TRACKERS: Mapping[str, Callable[[Settings, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
}


def open_trackers(settings: Settings, folder: Path) -> list[Tracker]:
    """Return the trackers that the settings name, ready to log to."""
    trackers = []
    for name in items_of(settings.track):
        try:
            trackers.append(TRACKERS[name](settings, folder))
        except ImportError as error:
            raise SettingsError(
                f"track = {name!r}: {error.name} {install_hint(name)}"
            ) from error
        except Exception as error:
            # each library has its own errors
            raise SettingsError(f"track = {name!r} cannot be used: {error}") from error
    return trackers


class Tracking:
    """Logs the rounds of one run; a context manager that logs the run's end on exit.

    The costs of a resumed run before it stopped are in its report, not in these sums.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._folder = folder
        self._trackers = open_trackers(settings, folder)
        self._so_far: Counter[str] = Counter()
        # files left by an earlier run in the same folder do not count
        self._started = time.time() - 1.0

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __call__(self, report: RoundReport) -> None:
        """Count a round, and log the epoch that it completes."""
        self._so_far["so-far/rounds"] += 1
        for name in ("bytes_up", "bytes_down"):
            self._so_far[f"so-far/{name.replace('_', '-')}"] += sum(
                getattr(report, name).values()
            )
        for name in ("server", "client", "wait"):
            self._so_far[f"so-far/{name}-seconds"] += getattr(report, f"{name}_seconds")
        if not report.epoch or not report.train:
            return
        parts = {"train": report.train, "test": report.test}
        parts |= {"validation": report.validation, "residual": report.residuals}
        values = {**_flatten(parts), **self._so_far}
        self._call(lambda tracker: tracker.log(finite_metrics(values), report.epoch))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Log how the run ended, from its report."""
        paths = [self._folder / name for name in (REPORT_FILE, PAGE_FILE)]
        files = [p for p in paths if p.exists() and p.stat().st_mtime >= self._started]
        values = finite_metrics(_final(self._folder)) if files else {}
        self._call(lambda tracker: tracker.finish(values, files, is_ok=kind is None))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        """Call every tracker; one that fails is left out from then on."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - the run matters more
                log(
                    WARNING,
                    "%s is left out from here on: %s",
                    type(tracker).__name__,
                    error,
                )
                self._trackers.remove(tracker)


def _final(folder: Path) -> dict[str, float]:
    try:
        return _flatten(read_report(folder).get("final") or {})
    except ReportError:
        return {}


def _flatten(parts: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Return metrics by "part/name", without those that are None."""
    return {
        f"{part}/{name}": value
        for part, metrics in parts.items()
        for name, value in metrics.items()
        if value is not None
    }


def _texts(settings: Settings) -> dict[str, str]:
    """Return the settings as texts; settings hold no secrets."""
    return {key: str(value) for key, value in settings.to_dict().items()}
