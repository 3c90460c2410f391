"""What left the sites, what covers it, and what it cost."""

from collections.abc import Mapping
from typing import Any

from tp_flower.console import format_value
from tp_flower.report_page.bar_plot import Bar, Measure, bar_figure
from tp_flower.report_page.blocks import Block, Prose, Section, Table
from tp_flower.report_page.reading import (
    Report,
    amount,
    items,
    mapping,
    number,
    records,
    text,
    texts,
)

COVERED_NOTE = (
    "Epsilon of a row of the table against the server, who sees every message: all "
    "covered releases of the run composed. It says nothing of what is not covered."
)
NOTHING_NOTE = (
    "No mechanism covers what this run released: rows and their columns stayed at "
    "their sites, but what the messages below carry was sent as it is."
)


def privacy(report: Report) -> Section:
    """Return the totals, the messages and the ledger."""
    found = mapping(report.get("privacy"))
    totals = sorted(
        records(found.get("totals")),
        key=lambda own: (text(own.get("table")), text(own.get("site"))),
    )
    messages = records(found.get("messages")) or records(report.get("releases"))
    blocks = [
        *_spent(totals),
        _messages(messages),
        _ledger(mapping(found.get("ledger"))),
    ]
    return Section("privacy", "Privacy", [own for own in blocks if own])


def _spent(totals: list[Mapping[str, Any]]) -> list[Block | None]:
    if not totals:
        return []
    covered = [own for own in totals if amount(own.get("epsilon"))]
    bars = [Bar(_where(own), (amount(own.get("epsilon")),)) for own in covered]
    figure = bar_figure(
        "Epsilon spent, by table and site",
        Measure("epsilon; less is more private", ("epsilon",), format_value),
        bars,
    )
    rows = [
        (
            _where(own),
            _epsilon(own),
            _plain(number(own.get("delta"))),
            ", ".join(texts(own.get("uncovered"))) or "nothing",
        )
        for own in totals
    ]
    table = Table(
        "What a row has spent, and what is not covered",
        ("table at site", "epsilon", "delta", "not covered"),
        rows,
        words=frozenset({0, 3}),
    )
    return [Prose(COVERED_NOTE if covered else NOTHING_NOTE), figure, table]


def _where(total: Mapping[str, Any]) -> str:
    return f"{text(total.get('table'))} at {text(total.get('site'))}"


def _epsilon(total: Mapping[str, Any]) -> str:
    """Return an epsilon; 0 is that of nothing covered, null that of no bound."""
    found = number(total.get("epsilon"))
    if found is None:
        return "no bound"
    return format_value(found) if found else "none"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _messages(messages: list[Mapping[str, Any]]) -> Block | None:
    if not messages:
        return None
    keys = ("message", "to", "carries", "protection")
    rows = [tuple(text(own.get(key)) for key in keys) for own in messages]
    head = ("message", "to", "carries", "covered by")
    words = frozenset(range(len(head)))
    return Table(
        "Every message, and who learns what", head, rows, words, is_folded=True
    )


def _ledger(ledger: Mapping[str, Any]) -> Block | None:
    """Return the accounts of all sites, a line for what differs in the uses only."""
    lines: dict[tuple[str, ...], None] = {}
    for node in sorted(ledger):
        for account in items(ledger[node]):
            lines[_account(str(node), mapping(account))] = None
    if not lines:
        return None
    head = ("site", "table", "release", "mechanism", "uses", "unit", "what is assumed")
    words = frozenset({0, 1, 2, 3, 5, 6})
    rows = list(lines)
    return Table("The sites' ledgers of this run", head, rows, words, is_folded=True)


def _account(node: str, account: Mapping[str, Any]) -> tuple[str, ...]:
    release = mapping(account.get("release"))
    used, limit = number(account.get("used")), number(account.get("limit"))
    uses = f"{used or 0:.0f} of {limit:.0f}" if limit is not None else ""
    return (
        text(release.get("site")) or node,
        text(release.get("table")),
        text(release.get("what")),
        _mechanism(mapping(release.get("mechanism"))),
        uses,
        text(release.get("unit")),
        text(release.get("scope")),
    )


def _mechanism(mechanism: Mapping[str, Any]) -> str:
    """Return a mechanism with its figures.

    >>> _mechanism({"kind": "gaussian", "noise_multiplier": 4.0, "count": 1})
    'gaussian, noise multiplier 4'
    >>> _mechanism({})
    'not covered'
    """
    if not mechanism:
        return "not covered"
    figures = [
        f"{str(key).replace('_', ' ')} {value:.4g}"
        for key, value in mechanism.items()
        if isinstance(value, int | float)
        and not (key in {"count", "sample_rate"} and value == 1)
    ]
    return ", ".join([text(mechanism.get("kind")), *figures])
