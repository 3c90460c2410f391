"""What left the sites, what covers it, and what it cost."""

from dataclasses import replace

from strategies.report_page.blocks import Blocks, Column, Prose, tabulate
from strategies.report_page.reading import Record, text_column
from tp_flower.reports.console import format_value

COVERED_NOTE = (
    "Epsilon of a row of the table against the server, who sees every message: all "
    "covered releases of the run composed. It says nothing of what is not covered."
)
NOTHING_NOTE = (
    "No mechanism covers what this run released: rows and their columns stayed at "
    "their sites, but what the messages below carry was sent as it is."
)


def privacy(report: Record) -> Blocks:
    """Yield the totals, the messages and the ledger."""
    privacy = report.at("privacy")
    if totals := privacy.records("totals"):
        is_covered = any(total.amount("epsilon") for total in totals)
        yield Prose(COVERED_NOTE if is_covered else NOTHING_NOTE)
        title = "What a row has spent, and what is not covered"
        yield tabulate(title, sorted(totals, key=_place), TOTALS)
    messages = privacy.records("messages") or report.records("releases")
    title = "Every message, and who learns what"
    yield tabulate(title, messages, MESSAGES, is_folded=True)
    ledger = privacy.at("ledger")
    accounts = [
        _account(node, Record.of(account))
        for node in sorted(ledger.content)
        for account in ledger.items(node)
    ]
    title = "The sites' ledgers of this run"
    if table := tabulate(title, accounts, LEDGER, is_folded=True):
        # releases that differ in nothing are listed once
        yield replace(table, rows=list(dict.fromkeys(table.rows)))


def _place(total: Record) -> str:
    return f"{total.text('table')} at {total.text('site')}"


def _epsilon(total: Record) -> str:
    """Return an epsilon; 0 is that of nothing covered, null that of no bound."""
    epsilon = total.number("epsilon")
    if epsilon is None:
        return "no bound"
    return format_value(epsilon) if epsilon else "none"


def _account(node: str, account: Record) -> Record:
    """Return an account's release with where it is from and how much of it is used."""
    release, limit = account.at("release"), account.number("limit")
    uses = "" if limit is None else f"{account.amount('used'):.0f} of {limit:.0f}"
    site = release.text("site") or node
    return Record({**release.content, "site": site, "uses": uses})


def _mechanism(release: Record) -> str:
    """Return a mechanism with its figures.

    >>> content = {"kind": "gaussian", "noise_multiplier": 4.0, "count": 1}
    >>> _mechanism(Record({"mechanism": content})), _mechanism(Record({}))
    ('gaussian, noise multiplier 4', 'not covered')
    """
    mechanism = release.at("mechanism")
    if not mechanism:
        return "not covered"
    figures = [
        f"{key.replace('_', ' ')} {value:.4g}"
        for key, value in mechanism.numbers().items()
        if not (key in {"count", "sample_rate"} and value == 1)
    ]
    return ", ".join([mechanism.text("kind"), *figures])


TOTALS = [
    Column("table at site", _place, is_text=True),
    Column("epsilon", _epsilon),
    Column("delta", lambda total: f"{total.amount('delta'):g}"),
    text_column("not covered", "uncovered", empty="nothing"),
]
MESSAGES = [
    text_column("message", "message"),
    text_column("to", "to"),
    text_column("carries", "carries"),
    text_column("covered by", "protection"),
]
LEDGER = [
    text_column("site", "site"),
    text_column("table", "table"),
    text_column("release", "what"),
    Column("mechanism", _mechanism, is_text=True),
    Column("uses", lambda account: account.text("uses")),
    text_column("unit", "unit"),
    text_column("what is assumed", "scope"),
]
