"""A run as curves: the metrics of every epoch over the costs up to then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strategies.report_page import plots
from strategies.report_page.costs import TIMES
from tp_flower.protocol.fields import CLEAR
from tp_flower.reports.blocks import NOTES, Blocks, Record
from tp_flower.reports.console import format_value, value_format

METRIC_NAMES = {
    "auc": "AUC",
    "concordance": "concordance",
    "deviance": "deviance",
    "pinball": "pinball loss",
    "rmse": "RMSE",
    "mae": "MAE",
    "rms_distance": "RMS distance",
    "accuracy": "accuracy",
    "r2": "R²",
    "d2": "D²",
    "coverage": "share of labels up to the score",
    "log_loss": "log loss",
    "log_likelihood": "log partial likelihood",
    "integrated_brier": "integrated Brier score",
    "loss": "loss",
}
"""The metrics' names for people, the most telling first."""

KINDS = {
    ("loss", "squared"): " (1/2 squared error)",
    ("loss", "cox"): " (negative log partial likelihood, over the rows)",
    ("auc", "softmax"): " (macro, one class against all)",
}
"""The kind of a metric, to stand behind its name, by the loss."""
NO_REPORT = Record({})

TRAIN = "train"
TEST = "test"

EPOCHS = plots.Axis("epoch", plots.whole_number_axis, "{:.0f}".format)
MEGABYTES = plots.Axis(
    "megabytes sent, both ways", plots.axis_from_zero, "{:,.3f}".format
)
SECONDS = plots.Axis("seconds in rounds", plots.axis_from_zero, "{:,.3f}".format)
RESIDUALS = plots.Axis("relative residual (log scale)", plots.log_axis, "{:.2e}".format)


@dataclass(frozen=True)
class Epoch:
    """The end of one epoch, with the costs since the start of the run.

    Bytes are in both directions, with headers; seconds are those of the rounds.
    """

    number: int
    metrics: dict[str, dict[str, float]]
    residuals: dict[str, float]
    bytes: float
    seconds: float


def convergence(report: Record) -> Blocks:
    """Yield the plots of the metrics and residuals."""
    epochs = read_epochs(report)
    if choice := main_metric(report):
        yield from _metrics(report, epochs, *choice)
    lines = []
    for name in dict.fromkeys(name for epoch in epochs for name in epoch.residuals):
        points = [
            (float(epoch.number), epoch.residuals[name])
            for epoch in epochs
            if epoch.residuals.get(name, 0.0) > 0
        ]
        lines.append(
            plots.Series(name, points, f"{points[-1][1]:.1e}" if points else "")
        )
    yield plots.line_figure(
        "Residuals by epoch", EPOCHS, RESIDUALS, lines, NOTES["residuals"]
    )


def _metrics(report: Record, epochs: list[Epoch], part: str, metric: str) -> Blocks:
    """Yield a metric and the loss by epoch, megabytes sent and time."""
    for name in dict.fromkeys((metric, "loss")):
        lines = [
            _line(epochs, rows, name, lambda epoch: epoch.number)
            for rows in (TEST, TRAIN)
        ]
        title = f"{_capitalise(metric_name(name, report))} by epoch"
        yield plots.line_figure(title, EPOCHS, _axis(report, name, lines), lines)
    title = _capitalise(f"{part} {metric_name(metric, report)}")
    lines = [_line(epochs, part, metric, lambda epoch: epoch.bytes / 1e6)]
    axis = _axis(report, metric, lines)
    yield plots.line_figure(
        f"{title} by megabytes sent", MEGABYTES, axis, lines, NOTES["cost"]
    )
    lines = [_line(epochs, part, metric, lambda epoch: epoch.seconds)]
    yield plots.line_figure(f"{title} by time", SECONDS, axis, lines, NOTES["cost"])


def _line(
    epochs: list[Epoch], part: str, metric: str, position_of: Callable[[Epoch], float]
) -> plots.Series:
    """Return a part's metric over an axis, labelled with its last value."""
    points = [
        (position_of(epoch), epoch.metrics[part][metric])
        for epoch in epochs
        if metric in epoch.metrics[part]
    ]
    return plots.Series(
        f"{part} rows", points, format_value(points[-1][1]) if points else ""
    )


def _axis(report: Record, metric: str, lines: Sequence[plots.Series]) -> plots.Axis:
    unit = " (in the label's unit)" if metric == "rmse" else ""
    show = value_format(value for line in lines for _, value in line.points)
    return plots.Axis(f"{metric_name(metric, report)}{unit}", plots.linear_axis, show)


def _capitalise(words: str) -> str:
    return words[:1].upper() + words[1:]


def read_epochs(report: Record) -> list[Epoch]:
    """Return the epochs that have metrics or residuals."""
    epochs: list[Epoch] = []
    bytes_sent = 0.0
    seconds = 0.0
    for item in report.records("history"):
        bytes_sent += sum(item.at("bytes-up").numbers().values())
        bytes_sent += sum(item.at("bytes-down").numbers().values())
        bytes_sent += item.amount("overhead-bytes")
        seconds += sum(map(item.amount, TIMES))
        number = int(item.amount("epoch"))
        metrics = {part: item.at(part).numbers() for part in (TRAIN, TEST)}
        residuals = item.at("residuals").numbers()
        if number and (residuals or any(metrics.values())):
            epochs.append(Epoch(number, metrics, residuals, bytes_sent, seconds))
    return epochs


def final_metrics(report: Record, part: str) -> dict[str, float]:
    """Return the metrics of the final model, or of the last epoch that has some."""
    final = report.at("final").at(part).numbers()
    if part == TEST:
        # `evaluate` has metrics of all its rows
        final = final or report.at("metrics").numbers()
    ended = [epoch.metrics[part] for epoch in read_epochs(report)]
    return final or next(filter(None, reversed(ended)), {})


def main_metric(report: Record) -> tuple[str, str] | None:
    """Return the part of the rows and the metric that say most about the run."""
    choices = (
        (part, name)
        for part in (TEST, TRAIN)
        for name in METRIC_NAMES
        if name in final_metrics(report, part)
    )
    return next(choices, None)


def loss_of(report: Record) -> str:
    """Return the name of a run's loss: a saved model's, or the one that was chosen."""
    losses = (
        part.text("loss") for part in (report.at("model"), report.at("chosen"), report)
    )
    return next(filter(None, losses), "")


def metric_name(metric: str, report: Record = NO_REPORT) -> str:
    """Return a metric's name for people, with its kind where a report tells it.

    >>> metric_name("auc"), metric_name("loss", Record({"loss": "squared"}))
    ('AUC', 'loss (1/2 squared error)')
    """
    name = METRIC_NAMES.get(metric, metric.replace("_", " "))
    settings = report.at("settings")
    name += KINDS.get((metric, loss_of(report)), "")
    is_noisy = settings.text("privacy.labels") not in ("", CLEAR)
    is_corrected = is_noisy and settings.get("privacy.label-correction") is not False
    return name + ", corrected for label noise" * is_corrected
