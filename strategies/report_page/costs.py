"""The costs of a run: seconds by phase and site, bytes by table; and their forecast."""

from collections import Counter, defaultdict

from strategies.report_page.blocks import Block, Blocks, Prose, Table
from strategies.report_page.plots import bar_figure
from strategies.report_page.reading import Record, counted, table_titles
from tp_flower.reports.console import format_bytes, format_seconds

TIMES = ("server-seconds", "client-seconds", "wait-seconds")
TIME_PARTS = ("server", "slowest site", "transfer and waiting")
DIRECTIONS = ("up, to the server", "down, to the sites")

FORECASTS = {"set-up": "set-up", "epoch": "one epoch", "run": "the whole run"}


def costs(report: Record) -> Blocks:
    """Yield the plots of time and bytes, and what `explain` forecasts."""
    yield _forecast(report.at("cost"))
    rounds = report.records("history")
    yield _phases(rounds)
    yield _sites(rounds)
    yield _bytes(report, rounds)
    whole = report.number("seconds")
    inside = sum(item.amount(name) for item in rounds for name in TIMES)
    if whole is not None and 0 < inside <= whole:
        yield Prose(
            f"The run took {format_seconds(whole)}: {format_seconds(inside)} in its "
            f"rounds, {format_seconds(whole - inside)} outside of them, such as "
            "waiting for the sites to be online."
        )


def _forecast(cost: Record) -> Block | None:
    """Return the rounds and bytes that training would take."""
    if not cost:
        return None
    rows = []
    for key, title in FORECASTS.items():
        traffic = cost.at(key)
        sent = (traffic.at(f"bytes-{way}").numbers().values() for way in ("up", "down"))
        rows.append(
            (title, traffic.count("rounds"), *map(format_bytes, map(sum, sent)))
        )
    title = f"Training by {cost.text('strategy')}, epochs: {cost.count('epochs')}"
    return Table(title, ("", "rounds", *DIRECTIONS), rows)


def _phases(history: list[Record]) -> Block | None:
    phases: defaultdict[tuple[bool, str], list[float]] = defaultdict(lambda: [0.0] * 3)
    rounds: Counter[tuple[bool, str]] = Counter()
    for item in history:
        key = item.amount("epoch") > 0, item.text("phase") or "round"
        rounds[key] += 1
        for n, name in enumerate(TIMES):
            phases[key][n] += item.amount(name)
    return bar_figure(
        "Time by phase, in the order of the run",
        [(_phase(*key, rounds[key]), seconds) for key, seconds in phases.items()],
        format_seconds,
        TIME_PARTS,
        "Sites work at the same time: a round takes as long as its slowest one.",
    )


def _phase(is_training: bool, name: str, rounds: int) -> str:
    """Return a phase in words.

    >>> _phase(True, "admm", 12), _phase(False, "seal", 1)
    ('training: admm, 12 rounds', 'seal, 1 round')
    """
    return f"{'training: ' if is_training else ''}{name}, {counted(rounds, 'round')}"


def _sites(history: list[Record]) -> Block | None:
    """Return computing by site, where the rounds tell of it."""
    sites: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in history:
        is_training = item.amount("epoch") > 0
        for site, seconds in item.at("site-seconds").numbers().items():
            sites[site][is_training] += max(seconds, 0.0)
    parts = ("set-up and end", "training")
    return bar_figure("Computing by site", sorted(sites.items()), format_seconds, parts)


def _bytes(report: Record, history: list[Record]) -> Block | None:
    tables: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    overhead = 0.0
    for item in history:
        overhead += item.amount("overhead-bytes")
        for n, way in enumerate(("bytes-up", "bytes-down")):
            for alias, sent in item.at(way).numbers().items():
                tables[alias][n] += max(sent, 0.0)
    bars = [
        (title, tables[alias]) for alias, title in table_titles(report, tables).items()
    ]
    note = f"Besides: {format_bytes(overhead)} of headers, both ways."
    title = "Bytes by table and direction"
    return bar_figure(title, bars, format_bytes, DIRECTIONS, note if overhead else "")
