"""Plots of the benchmark: curves of methods, and a value per epoch."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from scripts.bench.curves import HIGHER_IS_BETTER, PAPER_NETWORKS, TOLERANCE, Curve
from strategies.report_page.costs import US_UK, Network

MEGABYTE = 1e6
DOTS_PER_INCH = 110
SHOWN_EPOCHS = 12
# Okabe and Ito's colours, which the colour-blind tell apart; markers tell them in grey
STYLES: Mapping[str, tuple[str, str, str]] = {
    "gd": ("#767676", "D", "-."),
    "vfl-admm": ("#56B4E9", "s", "--"),
    "vfl-sgd": ("#E69F00", "s", "--"),
    "ucq-admm": ("#004C78", "^", ":"),
    "ucq-sgd": ("#8F3F00", "^", ":"),
    "admm": ("#0072B2", "o", "-"),
    "sgd": ("#D55E00", "o", "-"),
}
"""In the order of drawing: twins lie on each other, the wider one beneath."""
WIDE = ("vfl-admm", "vfl-sgd")
METRIC_NAMES = {"auc": "test AUC", "rmse": "test RMSE"}

Found = Mapping[str, Any]
Costs = Callable[[Curve], Sequence[float]]


@dataclass(frozen=True)
class Panel:
    """One diagram of a figure.

    Attributes:
        title: what is on the x-axis.
        costs: x of every epoch.
        is_log: whether x is on a log scale.
    """

    title: str
    costs: Costs
    is_log: bool = True


def communication(network: Network) -> Panel:
    """Return the panel of modelled communication on a network."""
    milliseconds = 1000 * network.round_seconds
    speed = network.bits_per_second
    return Panel(
        f"modelled communication, s\n({network.name}: {milliseconds:.0f} ms, "
        f"{speed / 1e9:.3g} Gb/s)",
        lambda curve: [cost.communication_seconds(network) for cost in curve.costs],
    )


EPOCHS = Panel("epoch", lambda curve: range(1, len(curve.costs) + 1), is_log=False)
ROUNDS = Panel("rounds", lambda curve: [cost.rounds for cost in curve.costs])
BYTES = Panel(
    "megabytes sent", lambda curve: [cost.bytes / MEGABYTE for cost in curve.costs]
)
COMPUTE = Panel(
    "computing, s (server + slowest site)",
    lambda curve: [cost.compute_seconds for cost in curve.costs],
)
MAIN_PANELS = (EPOCHS, communication(US_UK), BYTES, COMPUTE)
MORE_PANELS = (ROUNDS, *(communication(network) for network in PAPER_NETWORKS))


def plot_dataset(dataset: Found, panels: Sequence[Panel], columns: int = 2) -> Figure:
    """Return the test metric of all methods against what it cost."""
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.9 * columns, 3.1 * rows + 0.9), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    curves = {
        name: Curve.from_json(run["curve"]) for name, run in dataset["methods"].items()
    }
    limits = metric_limits(dataset, curves)
    for axes, panel in zip(all_axes, panels, strict=True):
        for name, (colour, marker, line) in STYLES.items():
            if name not in curves:
                continue
            curve, wide = curves[name], name in WIDE
            axes.plot(
                *(panel.costs(curve), curve.metric),
                label=dataset["methods"][name]["title"],
                color=colour,
                marker=marker,
                linestyle=line,
                markersize=7.0 if wide else 4.0,
                linewidth=3.0 if wide else 1.5,
            )
        _decorate(axes, panel, dataset, limits)
    for axes in all_axes[::columns]:
        axes.set_ylabel(METRIC_NAMES.get(dataset["metric"], dataset["metric"]))
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(dataset["title"], fontsize=13, fontweight="bold")
    return figure


def metric_limits(dataset: Found, curves: Mapping[str, Curve]) -> tuple[float, float]:
    """Return the range of the metric that is worth showing.

    From a little beyond the best value to a guess that knows no feature; where epochs
    are worse than that, they leave the diagram.
    """
    reference, guess = dataset["reference"], dataset["guess"]
    sign = -1.0 if dataset["metric"] in HIGHER_IS_BETTER else 1.0
    # lower is better from here on
    shown = [sign * value for curve in curves.values() for value in curve.metric]
    shown = [value for value in shown if not math.isnan(value)]
    best = min([sign * reference, *shown])
    worst = min(max([sign * reference, *shown]), sign * guess)
    margin = 0.06 * (worst - best) or 0.01 * abs(best)
    low, high = sorted((sign * (best - margin), sign * (worst + margin)))
    return low, high


def _decorate(
    axes: Axes, panel: Panel, dataset: Found, limits: tuple[float, float]
) -> None:
    reference = dataset["reference"]
    sign = -1.0 if dataset["metric"] in HIGHER_IS_BETTER else 1.0
    axes.axhline(reference, color="black", linewidth=0.9, label="centralised optimum")
    steps = dataset["baselines"].get("SGD", {}).get("metric", [])
    if panel is EPOCHS:
        epochs = range(1, len(steps) + 1)
        label = "centralised SGD"
        axes.plot(epochs, steps, color="black", linestyle=(0, (1, 2)), label=label)
    edge = (1.0 + sign * TOLERANCE) * reference
    axes.axhspan(
        *sorted((reference, edge)), color="#009E73", alpha=0.13, label="within 1 %"
    )
    axes.set_ylim(*limits)
    if panel.is_log:
        _use_log(axes)
    else:
        axes.set_xlim(0.6, SHOWN_EPOCHS + 0.4)
        axes.set_xticks(range(1, SHOWN_EPOCHS + 1))
    axes.set_xlabel(panel.title)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _use_log(axes: Axes) -> None:
    """Put x on a log scale, with numbers that can be read at a glance."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    decades = math.log10(high / low)
    between = (1.0, 2.0, 3.0, 5.0) if decades < 1.5 else (1.0, 3.0)
    axes.xaxis.set_major_locator(LogLocator(subs=between, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def plot_values(title: str, curves: Mapping[str, Sequence[float | None]]) -> Figure:
    """Return a value per epoch for every method; log where it is a distance."""
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = [STYLES[name][0] for name in ("admm", "sgd", "vfl-admm", "vfl-sgd", "gd")]
    for number, (method, values) in enumerate(curves.items()):
        numbers = [float("nan") if value is None else value for value in values]
        axes.plot(
            *(range(1, len(numbers) + 1), numbers),
            label=method,
            color=colours[number % len(colours)],
            marker="os^Dv"[number % 5],
            markersize=4.5,
        )
    if "above" in title:
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def figures_of(results: Found) -> dict[str, tuple[str, Figure]]:
    """Return every plot with its title, by the name of its file without suffix."""
    figures: dict[str, tuple[str, Figure]] = {}
    suites: Mapping[str, Found] = results["suites"]
    for name, dataset in suites.get("methods", {"facts": {}})["facts"].items():
        title = dataset["title"]
        figures[f"methods-{name}"] = (title, plot_dataset(dataset, MAIN_PANELS))
        figures[f"methods-{name}-networks"] = (
            f"{title}: rounds, and communication on all networks",
            plot_dataset(dataset, MORE_PANELS),
        )
    for name, suite in suites.items():
        for title, curves in suite["curves"].items():
            file_name = f"{name}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"
            figures[file_name] = (title, plot_values(title, curves))
    return figures
