"""The costs of a run: seconds by phase and site, bytes by table, privacy."""

from collections import defaultdict
from dataclasses import replace

from strategies.report_page.plots import bar_figure
from strategies.report_page.readings import readings
from tp_flower.privacy.mechanisms import BASE_ROW_SCOPE
from tp_flower.reports import blocks
from tp_flower.reports.console import format_bytes, format_seconds
from tp_flower.reports.records import waiting_seconds

TIMES = ("server-seconds", "client-seconds", "wait-seconds")
TIME_PARTS = ("server", "slowest site", "transfer and waiting")
DIRECTIONS = ("up, to the server", "down, to the sites")

MOST_SITES = 3
ESTIMATES = {"set-up": "set-up", "epoch": "one epoch", "run": "the whole run"}


def costs(report: blocks.Record) -> blocks.Blocks:
    """Yield the plots of time and bytes, and the cost estimate of `explain`."""
    yield estimate(report.at("cost"))
    yield memory(report.at("memory"))
    rounds = report.records("history")
    yield _phases(rounds)
    yield _sites(rounds)
    yield _bytes(report, rounds)
    total = report.number("seconds")
    inside = sum(item.amount(name) for item in rounds for name in TIMES)
    if total is not None and 0 < inside <= total:
        yield blocks.Prose(
            f"The run took {format_seconds(total)}: {format_seconds(inside)} in its "
            f"rounds, {format_seconds(total - inside)} outside of them, such as "
            "waiting for the sites to be online."
        )
    if rounds:
        yield blocks.Prose(_waiting_times(_count_rounds(rounds)))


def estimate(cost: blocks.Record) -> blocks.Block | None:
    """Return the estimate of rounds and bytes, if there is one."""
    if not cost:
        return None
    rounds = cost.at("rounds")
    epoch_bytes = cost.at("bytes")
    of_epoch = [format_bytes(epoch_bytes.amount(way)) for way in ("up", "down")]
    rows = [
        (title, rounds.count(key), *(of_epoch if key == "epoch" else ("", "")))
        for key, title in ESTIMATES.items()
    ]
    title = (
        f"Training by {cost.text('strategy')}, at most {cost.count('epochs')} epochs"
    )
    note = _waiting_times(int(rounds.amount("run")))
    if beside := cost.at("beside"):
        note += (
            f" It sends as much as {beside.amount('epochs'):.2g} epochs of "
            f"{beside.text('strategy')}, which usually takes about "
            f"{beside.count('usual-epochs')} to come to 0.1 % of its optimum."
        )
    return blocks.Table(title, ("", "rounds", *DIRECTIONS), rows, note=note)


def memory(forecast: blocks.Record) -> blocks.Block | None:
    """Return the forecast of memory, by site and for the server, if there is one."""
    if not forecast:
        return None
    rows = [
        (site, format_bytes(peak))
        for site, peak in forecast.at("sites").numbers().items()
    ]
    rows.append(("the server", format_bytes(forecast.amount("server"))))
    if files := forecast.amount("server-files"):
        rows.append(("files of joined rows, at the server", format_bytes(files)))
    note = (
        "Besides some 300 MB of libraries in each process, as much again for torch's; "
        "not a GPU's memory. In simulation all of it is in one process."
    )
    return blocks.Table(
        "Memory of training, about, at its peak", ("", "memory"), rows, note=note
    )


def memory_line(forecast: blocks.Record) -> blocks.Block | None:
    """Return a line with the memory forecast of the server and of the largest sites."""
    if not forecast:
        return None
    peaks = sorted(forecast.at("sites").numbers().items(), key=lambda item: -item[1])
    parts = [f"{site} {format_bytes(peak)}" for site, peak in peaks[:MOST_SITES]]
    if others := peaks[MOST_SITES:]:
        parts.append(f"{blocks.count_text(len(others), 'other site')} less each")
    parts.append(f"the server {format_bytes(forecast.amount('server'))}")
    if files := forecast.amount("server-files"):
        parts[-1] += f" and {format_bytes(files)} in files"
    return blocks.Prose(
        f"Memory, about: {', '.join(parts)}, besides some 300 MB of libraries each."
    )


def _waiting_times(rounds: int) -> str:
    """Return how long the rounds would wait in a deployment, by channel."""
    seconds = waiting_seconds(rounds).items()
    parts = (f"{format_seconds(value)} ({channel})" for channel, value in seconds)
    return (
        f"In a deployment, {blocks.count_text(rounds, 'round')} would wait, besides "
        f"computing and a round trip of the network each: {' or '.join(parts)}."
    )


def _phases(history: list[blocks.Record]) -> blocks.Block | None:
    """Return the time of each phase of the run."""
    phases: defaultdict[str, list[blocks.Record]] = defaultdict(list)
    for item in history:
        prefix = "training: " if item.amount("epoch") > 0 else ""
        phases[f"{prefix}{item.text('phase') or 'round'}"].append(item)
    return bar_figure(
        "Time by phase, in the order of the run",
        [
            (
                f"{name}, {blocks.count_text(_count_rounds(rounds), 'round')}",
                [sum(item.amount(key) for item in rounds) for key in TIMES],
            )
            for name, rounds in phases.items()
        ],
        format_seconds,
        TIME_PARTS,
        "Sites work at the same time: a round takes as long as its slowest one.",
    )


def _count_rounds(history: list[blocks.Record]) -> int:
    """Return the number of rounds; a record without a number counts as one."""
    return sum(int(item.amount("rounds")) or 1 for item in history)


def _sites(history: list[blocks.Record]) -> blocks.Block | None:
    """Return the computing time by site, if the rounds report it."""
    sites: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for item in history:
        is_training = item.amount("epoch") > 0
        for site, seconds in item.at("site-seconds").numbers().items():
            sites[site][is_training] += max(seconds, 0.0)
    parts = ("set-up and end", "training")
    return bar_figure("Computing by site", sorted(sites.items()), format_seconds, parts)


def _bytes(report: blocks.Record, history: list[blocks.Record]) -> blocks.Block | None:
    """Return the bytes sent by table and direction."""
    tables: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    overhead = 0.0
    for item in history:
        overhead += item.amount("overhead-bytes")
        for n, way in enumerate(("bytes-up", "bytes-down")):
            for alias, bytes_sent in item.at(way).numbers().items():
                tables[alias][n] += max(bytes_sent, 0.0)
    bars = [
        (title, tables[alias])
        for alias, title in blocks.table_titles(report, tables).items()
    ]
    note = f"Besides: {format_bytes(overhead)} of headers, both ways."
    title = "Bytes by table and direction"
    return bar_figure(title, bars, format_bytes, DIRECTIONS, note if overhead else "")


def privacy(report: blocks.Record) -> blocks.Blocks:
    """Yield what left, the score readings, the messages and the ledgers."""
    privacy = report.at("privacy")
    yield privacy_totals(privacy)
    yield readings(privacy)
    messages = privacy.records("messages") or report.records("releases")
    yield blocks.tabulate(
        "Every message, and who learns what", messages, MESSAGES, is_folded=True
    )
    table = blocks.tabulate(
        "The sites' ledgers of this run", _accounts(privacy), LEDGER, is_folded=True
    )
    # identical releases are listed once
    yield replace(table, rows=list(dict.fromkeys(table.rows)))


def privacy_totals(privacy: blocks.Record) -> blocks.Table:
    """Return the epsilons of each site's rows, and the releases that have none.

    Where nothing has noise, in place of epsilons: how each release left.
    """
    # nodes are numbered differently in every run
    totals = sorted(privacy.records("totals"), key=_place)
    accounts = _accounts(privacy)
    has_epsilons = any(
        blocks.has_epsilon(total, kind) for total in totals for kind in blocks.EPSILONS
    )
    # beside a release without noise, one with noise may leave no epsilon
    if not (has_epsilons or any(account.at("mechanism") for account in accounts)):
        note = " ".join([NOTHING, *blocks.why_no_epsilon(totals)])
        return _releases(accounts, note)
    per = " or ".join(dict.fromkeys(total.text("per") or "row" for total in totals))
    title = f"Epsilon per {per}, and what is not covered"
    table = blocks.epsilon_table(title, totals, PLACE, UNCOVERED)
    grouped = dict.fromkeys(
        account.text("table")
        for account in accounts
        if BASE_ROW_SCOPE in account.text("scope")
    )
    if not grouped:
        return table
    why = (
        f"Of {', '.join(grouped)}, {BASE_ROW_SCOPE}: so the epsilon is above "
        "privacy.epsilon."
    )
    return replace(table, note=f"{table.note} {why}")


def _releases(accounts: list[blocks.Record], note: str) -> blocks.Table:
    """Return what left the tables of each site, as it is or not."""
    by_place: defaultdict[str, tuple[dict[str, None], dict[str, None]]]
    by_place = defaultdict(lambda: ({}, {}))
    for account in accounts:
        scope = account.text("scope")
        is_hidden = scope.startswith(HIDDEN) or SEALED in scope
        kind = account.text("what")
        by_place[_place(account)][is_hidden][RELEASES.get(kind, kind)] = None
    rows = [
        (holder, *(", ".join(kinds) or "nothing" for kinds in by_place[holder]))
        for holder in sorted(by_place)
    ]
    head = ("table at site", "as it is", "masked, sealed or hashed")
    return blocks.Table(
        "What left the sites, without noise", head, rows, frozenset(range(3)), note
    )


def _place(total: blocks.Record) -> str:
    return f"{total.text('table')} at {total.text('site')}"


def _accounts(privacy: blocks.Record) -> list[blocks.Record]:
    """Return the lines of the table of ledgers."""
    ledger = privacy.at("ledger")
    return [
        _account(node, blocks.Record.of(account))
        for node in sorted(ledger.content)
        for account in ledger.items(node)
    ]


def _account(node: str, account: blocks.Record) -> blocks.Record:
    """Return one line of the table of ledgers."""
    release = account.at("release")
    limit = account.number("limit")
    uses = ""
    if limit is not None:
        uses = f"{account.amount('used'):.0f} of {limit:.0f}"
    return blocks.Record(
        {**release.content, "site": release.text("site") or node, "uses": uses}
    )


PLACE = [blocks.Column("table at site", _place, is_text=True)]
UNCOVERED = [
    blocks.text_column("per", "per", empty="row"),
    blocks.Column("delta", lambda total: f"{total.amount('delta'):g}"),
    blocks.text_column("not covered", "uncovered", empty="nothing"),
]
NOTHING = blocks.NOTES["nothing"]
HIDDEN = ("masked", "sealed", "keyed hashes")
"""What the scopes of releases begin with that do not leave as they are."""
SEALED = "sealed to the table's other shards"
RELEASES = {
    "counts": "numbers of rows and columns",
    "features": "shares of missing values",
    "keys": "join keys",
    "scores": "a score of each row",
}
"""Words for kinds of releases whose names say less."""
MESSAGES = [
    blocks.text_column("message", "message"),
    blocks.text_column("to", "to"),
    blocks.text_column("carries", "carries"),
    blocks.text_column("covered by", "protection"),
]
LEDGER = [
    blocks.text_column("site", "site"),
    blocks.text_column("table", "table"),
    blocks.text_column("release", "what"),
    blocks.Column("mechanism", blocks.mechanism_text, is_text=True),
    blocks.Column("uses", lambda account: account.text("uses")),
    blocks.text_column("unit", "unit"),
    blocks.text_column("what is assumed", "scope"),
]
