"""Several runs beside each other: what differs, what came of it, what it cost."""

from collections.abc import Sequence
from pathlib import PurePath

from tp_flower.console import format_bytes, format_count, format_seconds, format_value
from tp_flower.explain.cost import US_UK
from tp_flower.report import COMPLETED
from tp_flower.report_page.blocks import Block, Figure, Section, Table
from tp_flower.report_page.convergence import (
    EPOCHS,
    MEGABYTE,
    MEGABYTES,
    MODEL_NOTE,
    SECONDS,
    metric_axis,
    name_network,
)
from tp_flower.report_page.curves import (
    METRIC_NAMES,
    TEST,
    Epoch,
    final_metrics,
    main_metric,
    metric_name,
    metric_points,
    read_epochs,
)
from tp_flower.report_page.line_plot import Axis, Line, line_figure
from tp_flower.report_page.reading import Report, amount, mapping, text
from tp_flower.report_page.settings_table import say_value

MOST_CHARACTERS = 40
"""Of a setting; a run's own page has the whole."""

NOT_COMPARED = frozenset({"output-dir", "progress", "sql", "track"})
"""Settings that say nothing of the result."""


def comparison(report: Report, others: Sequence[Report]) -> Section:
    """Return the runs in one table, and their curves in common plots."""
    if not others:
        return Section("comparison", "", [])
    runs = [report, *others]
    names = [f"{n}: {run_name(own)}" for n, own in enumerate(runs, start=1)]
    blocks: list[Block | None] = [_table(runs, names), *_plots(runs, names)]
    title = "Compared with other runs"
    return Section("comparison", title, [own for own in blocks if own])


def run_name(report: Report) -> str:
    """Return what a run is called: its folder, or when it started.

    >>> run_name({"output-dir": "/runs/a"}), run_name({"started": "2026-11-20"})
    ('a', '2026-11-20')
    """
    folder = PurePath(text(report.get("output-dir"))).name
    return folder or text(report.get("started")) or "run"


def differing_settings(runs: Sequence[Report]) -> dict[str, list[str]]:
    """Return the settings that the runs do not share, with the value of each run.

    >>> differing_settings([{"settings": {"seed": 0, "l2": 1}},
    ...                     {"settings": {"seed": 1, "l2": 1}}])
    {'seed': ['0', '1']}
    """
    found = [mapping(own.get("settings")) for own in runs]
    differing = {}
    for key in dict.fromkeys(key for own in found for key in own):
        # a run of another version may lack the setting
        values = {say_value(own[key]) for own in found if key in own}
        if len(values) > 1 and key not in NOT_COMPARED:
            differing[key] = [_short(say_value(own.get(key))) for own in found]
    return differing


def _short(value: str) -> str:
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}…"


def _table(runs: list[Report], names: list[str]) -> Table:
    differing = differing_settings(runs)
    metrics = [final_metrics(own, TEST) for own in runs]
    shown = [name for name in METRIC_NAMES if any(name in own for own in metrics)]
    rows = [
        (
            name,
            *(format_value(metrics[n].get(metric)) for metric in shown),
            *_cost(run),
            *(values[n] for values in differing.values()),
        )
        for n, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    results = (f"test {metric_name(metric)}" for metric in shown)
    costs = ("epochs", "rounds", "sent", "time", "status")
    results_and_costs = ("run", *results, *costs)
    head = (*results_and_costs, *differing)
    # the status, and the settings after it
    words = frozenset({0, *range(len(results_and_costs) - 1, len(head))})
    queries = {text(own.get("query")) for own in runs}
    note = "The runs have different queries." if len(queries) > 1 else ""
    return Table(
        "Results, costs, and the settings that differ", head, rows, words, note
    )


def _cost(run: Report) -> tuple[str, ...]:
    sent = amount(run.get("bytes_up")) + amount(run.get("bytes_down"))
    status = text(run.get("status")) or "unknown"
    return (
        format_count(int(amount(run.get("epochs")))),
        format_count(int(amount(run.get("rounds")))),
        format_bytes(sent),
        format_seconds(amount(run.get("seconds"))),
        status if status == COMPLETED else status.split(":")[0],
    )


def _plots(runs: list[Report], names: list[str]) -> list[Figure | None]:
    found = next(filter(None, map(main_metric, runs)), None)
    if found is None:
        return []
    part, metric = found
    curves = [read_epochs(own) for own in runs]
    title = f"{part.capitalize()} {metric_name(metric)}"

    def plot(title: str, axis: Axis, place: object, note: str = "") -> Figure | None:
        lines = [
            Line(name, metric_points(epochs, part, metric, place), str(n))  # type: ignore[arg-type]
            for n, (name, epochs) in enumerate(zip(names, curves, strict=True), start=1)
        ]
        return line_figure(title, axis, metric_axis(metric), lines, note)

    def seconds(own: Epoch) -> float:
        return own.seconds(US_UK)

    network = f"{name_network(US_UK)}. {MODEL_NOTE}"
    return [
        plot(f"{title} by epoch, all runs", EPOCHS, lambda own: own.number),
        plot(
            f"{title} by megabytes, all runs",
            MEGABYTES,
            lambda own: own.bytes / MEGABYTE,
        ),
        plot(f"{title} by modelled time, all runs", SECONDS, seconds, network),
    ]
