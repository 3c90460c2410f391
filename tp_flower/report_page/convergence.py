"""How a run converged: by epoch, by byte, by modelled time; and its residuals."""

from tp_flower.console import format_seconds, format_value
from tp_flower.explain.cost import NETWORKS, PAPER_NETWORKS, Network
from tp_flower.report_page.blocks import Block, Figure, Section, Table
from tp_flower.report_page.curves import (
    TEST,
    TRAIN,
    Epoch,
    main_metric,
    metric_name,
    metric_points,
    read_epochs,
)
from tp_flower.report_page.line_plot import Axis, Line, line_figure
from tp_flower.report_page.reading import Report
from tp_flower.report_page.scales import from_zero, linear, logarithmic, whole

MEGABYTE = 1e6

EPOCHS = Axis("epoch", whole, lambda value: f"{value:.0f}")
MEGABYTES = Axis("megabytes sent, both ways", from_zero, lambda value: f"{value:,.3f}")
SECONDS = Axis("modelled seconds (log scale)", logarithmic, format_seconds)

MODEL_NOTE = (
    "Measured computing, plus the latency of every round, plus all bytes over the "
    "bandwidth; set-up included."
)


def convergence(report: Report) -> Section:
    """Return the plots of the metrics and residuals."""
    epochs = read_epochs(report)
    found = main_metric(report)
    blocks: list[Block | None] = []
    if found:
        part, metric = found
        blocks += [_by_epoch(epochs, name) for name in dict.fromkeys((metric, "loss"))]
        blocks += [
            _by_bytes(epochs, part, metric),
            _by_time(epochs, part, metric),
        ]
    blocks += [_residuals(epochs), _networks(epochs)]
    return Section("convergence", "Convergence", [own for own in blocks if own])


def metric_axis(metric: str) -> Axis:
    """Return the axis of a metric."""
    name = metric_name(metric)
    unit = " (in the label's unit)" if metric == "rmse" else ""
    return Axis(f"{name}{unit}", linear, format_value)


def _by_epoch(epochs: list[Epoch], metric: str) -> Figure | None:
    lines = []
    for part in (TEST, TRAIN):
        points = metric_points(epochs, part, metric, lambda own: own.number)
        end = format_value(points[-1][1]) if points else ""
        lines.append(Line(f"{part} rows", points, end))
    title = f"{_capital(metric_name(metric))} by epoch"
    return line_figure(title, EPOCHS, metric_axis(metric), lines)


def _by_bytes(epochs: list[Epoch], part: str, metric: str) -> Figure | None:
    points = metric_points(epochs, part, metric, lambda own: own.bytes / MEGABYTE)
    end = format_value(points[-1][1]) if points else ""
    return line_figure(
        f"{_capital(part)} {metric_name(metric)} by megabytes sent",
        MEGABYTES,
        metric_axis(metric),
        [Line(f"{part} rows", points, end)],
        "One point per epoch; the first includes set-up.",
    )


def _by_time(epochs: list[Epoch], part: str, metric: str) -> Figure | None:
    lines = [
        Line(name_network(network), _timed(epochs, part, metric, network))
        for network in NETWORKS
    ]
    return line_figure(
        f"{_capital(part)} {metric_name(metric)} by modelled time",
        SECONDS,
        metric_axis(metric),
        lines,
        MODEL_NOTE,
    )


def _timed(
    epochs: list[Epoch], part: str, metric: str, network: Network
) -> tuple[tuple[float, float], ...]:
    return metric_points(epochs, part, metric, lambda own: own.seconds(network))


def name_network(network: Network) -> str:
    """Return a network with what it is made of.

    >>> name_network(NETWORKS[0])
    'US-UK: 136 ms a round, 420 Mbit/s'
    """
    latency = format_seconds(network.round_seconds)
    return (
        f"{network.name}: {latency} a round, {network.bits_per_second / 1e6:g} Mbit/s"
    )


def _residuals(epochs: list[Epoch]) -> Figure | None:
    lines = []
    for name in ("primal", "dual"):
        points = tuple(
            (float(own.number), own.residuals[name])
            for own in epochs
            if own.residuals.get(name, 0.0) > 0
        )
        end = f"{points[-1][1]:.1e}" if points else ""
        lines.append(Line(name, points, end))
    return line_figure(
        "ADMM's residuals by epoch",
        EPOCHS,
        Axis("relative residual (log scale)", logarithmic, lambda own: f"{own:.2e}"),
        lines,
        "Primal: how far scores are from what they should agree on. Dual: how far that "
        "moved in the epoch.",
    )


def _networks(epochs: list[Epoch]) -> Table | None:
    if not epochs:
        return None
    last = epochs[-1]
    rows = [
        (
            network.name,
            format_seconds(network.round_seconds),
            f"{network.bits_per_second / 1e6:,.0f}",
            format_seconds(epochs[0].seconds(network)),
            format_seconds(last.seconds(network)),
        )
        for network in dict.fromkeys((*NETWORKS, *PAPER_NETWORKS))
    ]
    head = (
        "network",
        "a round",
        "Mbit/s",
        "first epoch ends",
        f"epoch {last.number} ends",
    )
    return Table("Modelled time on networks", head, rows, is_folded=True)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
