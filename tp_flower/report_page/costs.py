"""What a run cost: seconds by phase and site, bytes by table."""

from collections import defaultdict

from tp_flower.console import format_bytes, format_seconds
from tp_flower.report_page.bar_plot import Bar, Measure, bar_figure
from tp_flower.report_page.blocks import Block, Figure, Prose, Section
from tp_flower.report_page.reading import (
    Report,
    amount,
    mapping,
    number,
    numbers,
    records,
    text,
)

TIMES = ("server-seconds", "client-seconds", "wait-seconds")
TIME_PARTS = ("server", "slowest site", "transfer and waiting")


def costs(report: Report) -> Section:
    """Return the plots of time and bytes."""
    blocks: list[Block | None] = [
        _phases(report),
        _sites(report),
        _bytes(report),
        _outside(report),
    ]
    return Section("costs", "Time and bytes", [own for own in blocks if own])


def _seconds(parts: tuple[str, ...], largest: float) -> Measure:
    unit, name = (1.0, "seconds") if largest >= 1 else (1e-3, "milliseconds")
    if largest >= 600:
        unit, name = 60.0, "minutes"
    return Measure(name, parts, format_seconds, unit)


def _phases(report: Report) -> Figure | None:
    phases: defaultdict[tuple[bool, str], list[float]] = defaultdict(lambda: [0.0] * 3)
    rounds: defaultdict[tuple[bool, str], int] = defaultdict(int)
    for item in records(report.get("history")):
        key = amount(item.get("epoch")) > 0, text(item.get("phase")) or "round"
        rounds[key] += 1
        for n, name in enumerate(TIMES):
            phases[key][n] += amount(item.get(name))
    bars = [Bar(_phase(*key, rounds[key]), tuple(own)) for key, own in phases.items()]
    largest = max((sum(bar.values) for bar in bars), default=0.0)
    return bar_figure(
        "Time by phase, in the order of the run",
        _seconds(TIME_PARTS, largest),
        bars,
        "Sites work at the same time: a round takes as long as its slowest one.",
    )


def _phase(is_training: bool, name: str, rounds: int) -> str:
    """Return a phase in words.

    >>> _phase(True, "admm", 12), _phase(False, "seal", 1)
    ('training: admm, 12 rounds', 'seal, 1 round')
    """
    times = "1 round" if rounds == 1 else f"{rounds:,} rounds"
    return f"{'training: ' if is_training else ''}{name}, {times}"


def _sites(report: Report) -> Figure | None:
    """Return computing by site, where the rounds tell of it."""
    sites: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in records(report.get("history")):
        part = 1 if amount(item.get("epoch")) > 0 else 0
        for site, seconds in numbers(item.get("site-seconds")):
            sites[site][part] += max(seconds, 0.0)
    bars = [Bar(site, tuple(own)) for site, own in sorted(sites.items())]
    largest = max((sum(bar.values) for bar in bars), default=0.0)
    return bar_figure(
        "Computing by site", _seconds(("set-up and end", "training"), largest), bars
    )


def _bytes(report: Report) -> Figure | None:
    totals = mapping(report.get("totals")) or _totals(report)
    up, down = (dict(numbers(totals.get(f"bytes-{way}"))) for way in ("up", "down"))
    bars = [
        Bar(
            title_of(report, table),
            (max(up.get(table, 0.0), 0.0), max(down.get(table, 0.0), 0.0)),
        )
        for table in table_names(report, [*up, *down])
    ]
    other = amount(totals.get("overhead-bytes"))
    note = f"Besides: {format_bytes(other)} of headers, both ways." if other else ""
    largest = max((sum(bar.values) for bar in bars), default=0.0)
    unit, name = next(
        (unit, name)
        for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
        if largest >= unit or unit == 1.0
    )
    measure = Measure(
        name, ("up, to the server", "down, to the sites"), format_bytes, unit
    )
    return bar_figure("Bytes by table and direction", measure, bars, note)


def _totals(report: Report) -> dict[str, dict[str, float]]:
    """Return the bytes of a report that has no totals of its own."""
    found: dict[str, defaultdict[str, float]] = {
        way: defaultdict(float) for way in ("bytes-up", "bytes-down")
    }
    for item in records(report.get("history")):
        for way, own in found.items():
            for table, count in numbers(item.get(way)):
                own[table] += count
    return {way: dict(own) for way, own in found.items()}


def _outside(report: Report) -> Prose | None:
    """Say how long the run took besides its rounds."""
    whole = number(report.get("seconds"))
    inside = sum(
        amount(item.get(name))
        for item in records(report.get("history"))
        for name in TIMES
    )
    if whole is None or not inside or whole < inside:
        return None
    return Prose(
        f"The run took {format_seconds(whole)}: {format_seconds(inside)} in its "
        f"rounds, {format_seconds(whole - inside)} outside of them, such as waiting "
        "for the sites to be online."
    )


def title_of(report: Report, alias: str) -> str:
    """Return an alias with the name of its table, where that is another.

    >>> title_of({"tables": [{"table": "f", "name": "flights"}]}, "f")
    'f (flights)'
    """
    for item in records(report.get("tables")):
        name = text(item.get("name"))
        if text(item.get("table")) == alias and name not in {"", alias}:
            return f"{alias} ({name})"
    return alias


def table_names(report: Report, known: list[str]) -> list[str]:
    """Return these aliases, in the order of the query's tables."""
    order = [text(item.get("table")) for item in records(report.get("tables"))]
    present = [name for name in order if name in known]
    return list(dict.fromkeys([*present, *sorted(known)]))
