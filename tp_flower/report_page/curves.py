"""A run as curves: what every epoch reached, and what it had cost by then."""

from collections.abc import Callable
from dataclasses import dataclass

from tp_flower.explain.cost import Network, Traffic
from tp_flower.report_page.reading import (
    Report,
    amount,
    mapping,
    number,
    numbers,
    records,
    total,
)

METRIC_NAMES = {
    "auc": "AUC",
    "rmse": "RMSE",
    "rms_distance": "RMS distance",
    "accuracy": "accuracy",
    "r2": "R²",
    "log_loss": "log loss",
    "loss": "loss",
}
"""The metrics for people, the one that tells most first."""

TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class Epoch:
    """The end of one epoch; costs are counted from the start of the run.

    Attributes:
        number: from 1.
        metrics: by "train" and "test", the metrics that were computed.
        residuals: by "primal" and "dual", ADMM's.
        rounds: so far, set-up included.
        bytes: so far, both ways, headers included.
        compute_seconds: so far, at the server and at the slowest site of each round.
    """

    number: int
    metrics: dict[str, dict[str, float]]
    residuals: dict[str, float]
    rounds: int
    bytes: float
    compute_seconds: float

    def seconds(self, network: Network) -> float:
        """Return the computing, and the messages as the network would take them."""
        sent = Traffic(self.rounds, up={"": self.bytes})
        return self.compute_seconds + sent.seconds(network)


def read_epochs(report: Report) -> list[Epoch]:
    """Return the epochs that have metrics or residuals."""
    epochs: list[Epoch] = []
    sent, computed = 0.0, 0.0
    for rounds, item in enumerate(records(report.get("history")), start=1):
        sent += total(item.get("bytes-up")) + total(item.get("bytes-down"))
        sent += amount(item.get("overhead-bytes"))
        computed += amount(item.get("server-seconds"))
        computed += amount(item.get("client-seconds"))
        epoch = int(amount(item.get("epoch")))
        metrics = {part: dict(numbers(item.get(part))) for part in (TRAIN, TEST)}
        residuals = {
            name: value
            for name in ("primal", "dual")
            if (value := number(item.get(f"{name}-residual"))) is not None
        }
        if epoch and (any(metrics.values()) or residuals):
            epochs.append(Epoch(epoch, metrics, residuals, rounds, sent, computed))
    return epochs


def metric_points(
    epochs: list[Epoch], part: str, metric: str, place: Callable[[Epoch], float]
) -> tuple[tuple[float, float], ...]:
    """Return where the epochs lie on an axis, and what their metric was there."""
    return tuple(
        (place(epoch), epoch.metrics[part][metric])
        for epoch in epochs
        if metric in epoch.metrics[part]
    )


def final_metrics(report: Report, part: str) -> dict[str, float]:
    """Return the metrics of the final model, or of the last epoch that has some."""
    final = dict(numbers(mapping(report.get("final")).get(part)))
    if part == TEST:
        # `evaluate` has metrics of all its rows
        final = final or dict(numbers(report.get("metrics")))
    if final:
        return final
    ended = [own.metrics[part] for own in read_epochs(report) if own.metrics[part]]
    return ended[-1] if ended else {}


def main_metric(report: Report) -> tuple[str, str] | None:
    """Return the part of the rows and the metric that tell most of the run."""
    for part in (TEST, TRAIN):
        found = final_metrics(report, part)
        for name in METRIC_NAMES:
            if name in found:
                return part, name
    return None


def metric_name(metric: str) -> str:
    """Return a metric's name for people.

    >>> metric_name("auc"), metric_name("mean_error")
    ('AUC', 'mean error')
    """
    return METRIC_NAMES.get(metric, metric.replace("_", " "))
