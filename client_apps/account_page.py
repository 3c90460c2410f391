"""The page of a site's ledger for its owner: every request, and its releases."""

from collections.abc import Iterable, Sequence

from client_apps.data.ledger import ANSWER, CHARGE, NOTE, REFUSE, RESERVE, SETTLE
from client_apps.data.score_counts import SCORES, share_columns
from tp_flower.events import SHOWN_DIGITS
from tp_flower.protocol.messages import ACTIONS
from tp_flower.reports import blocks
from tp_flower.reports.console import format_bytes, format_count
from tp_flower.terms.fragment_text import printable

MOST_LINES = 1000  # lines of a table, the latest; ``account --export`` prints all
_DIGEST_LENGTH = len("sha256:") + SHOWN_DIGITS


def account_page(
    lines: Sequence[blocks.Record],
    budgets: blocks.Table,
    queries_of_day: blocks.Table | None = None,
    sites: Sequence[str] = (),
) -> str:
    """Return the page of a ledger whose chain is intact, as HTML without scripts.

    ``sites`` are the names of those whose tables it is about.
    """
    answers = [item for item in reversed(lines) if item.text("event") == ANSWER]
    refusals = [item for item in reversed(lines) if item.text("event") == REFUSE]
    queries = [*refusals[:MOST_LINES], *answers[:MOST_LINES]]
    texts = {item.text("digest"): item.text("query") for item in queries}
    contents: dict[str, blocks.Blocks] = {
        "Budgets": [budgets, queries_of_day, _score_vectors(lines)],
        "Refused": [_latest_items(refusals, REFUSALS)],
        "Answered": [_latest_items(answers, ANSWERS)],
        "Queries": [
            blocks.Code(key, text.split("\n")) for key, text in texts.items() if text
        ],
        "Released": [_latest_items(_releases(lines), RELEASES)],
        "Keys": [_latest_items(_keys(lines), RECIPIENTS)],
    }
    # lines about keys lack the site in the run's name
    runs = {item.text("run")[:SHOWN_DIGITS] for item in lines}
    last = lines[-1].text("checksum") if lines else "-"
    counts = {"refused": refusals, "answered": answers, "runs": runs, "lines": lines}
    head = {
        "label": "",
        "subject": f"Account of {printable(', '.join(sites)) or 'a site'}",
        "result": "Every query of its tables, and what left them.",
        "failure": "",
        "about": lines[-1].text("time") if lines else "",
        "facts": [
            (name, format_count(len(entries)), "") for name, entries in counts.items()
        ],
    }
    footer = f"Made of the ledger, whose chain is intact and ends with checksum {last}."
    return blocks.render_page(head, contents, footer)


def _latest_items(
    items: Sequence[blocks.Record], columns: Sequence[blocks.Column]
) -> blocks.Table:
    """Return a table of the latest items."""
    left_out = format_count(len(items) - MOST_LINES)
    note = ""
    if len(items) > MOST_LINES:
        note = f"{left_out} earlier ones left out."
    return blocks.tabulate("The latest first", items[:MOST_LINES], columns, note)


def _releases(lines: Iterable[blocks.Record]) -> list[blocks.Record]:
    """Return the releases, the latest first: reserved uses until they are settled."""
    releases: dict[tuple[object, ...], blocks.Record] = {}
    for item in lines:
        event = item.text("event")
        release = item.at("release")
        key: tuple[object, ...] = (item.get("seq"),)
        if event in (RESERVE, SETTLE):
            key = (item.text("run"), release.get("part"), release.text("what"))
        if event in (RESERVE, SETTLE, CHARGE, NOTE):
            used = item.get("limit") if event == RESERVE else item.get("times")
            times = {"used": used, "run": item.text("run"), "time": item.text("time")}
            releases[key] = blocks.Record({**release.content, **times})
    return list(releases.values())[::-1]


def _score_vectors(lines: Sequence[blocks.Record]) -> blocks.Table:
    """Return how many score vectors have left, of those that a policy allows.

    They count for all columns that some query reads with them, as the ledger counts.
    """
    places = {item.text("source"): _place(item) for item in lines if item.get("table")}
    counted = [item for item in lines if item.text("event") == SCORES]
    latest = {
        (item.text("source"), tuple(item.texts("columns"))): item for item in counted
    }
    rows = []
    for (source, columns), last in latest.items():
        used = sum(
            item.amount("times")
            for item in counted
            if item.text("source") == source
            and share_columns(item.texts("columns"), columns)
        )
        of_columns = {"table": places.get(source, "-"), "columns": columns}
        rows.append(blocks.Record({**last.content, **of_columns, "used": used}))
    return blocks.tabulate("Score vectors, over all runs", rows, VECTORS)


def _reader(release: blocks.Record) -> str:
    """Return who learns a release, as its message declares; "-" for another version."""
    name = release.text("action")
    kind = release.text("what")
    readers = (
        item.reader or action.reply.reader
        for action in ACTIONS.values()
        for item in action.reply.discloses
        if str(action) == name and kind in item.kinds
    )
    return next(readers, "-")


def _keys(lines: Sequence[blocks.Record]) -> list[blocks.Record]:
    """Return who has each secret that masks or hashes: fingerprints of public keys."""
    return [
        blocks.Record({**item.content, "group": group, "to": to, "used": len(to)})
        for item in reversed(lines)
        for group, to in item.at("groups").content.items()
    ]


def _place(item: blocks.Record) -> str:
    return " at ".join(filter(None, (item.text("table"), item.text("site"))))


def _reason(item: blocks.Record) -> str:
    # a query's text, which may follow, is shown elsewhere
    return printable(item.text("reason").partition("\n")[0])


def _digest(head: str, key: str) -> blocks.Column:
    """Return a column of shortened digests."""

    def cell(item: blocks.Record) -> str:
        text = item.text(key)
        return text[: _DIGEST_LENGTH if ":" in text else SHOWN_DIGITS] or "-"

    return blocks.Column(head, cell, is_text=True)


QUERY = _digest("query", "digest")
WHOLE = _digest("whole run", "proposal")
PLACE = [
    blocks.text_column("time", "time"),
    blocks.Column("table", _place, is_text=True),
]
ORIGIN = [
    blocks.Column("run", lambda item: item.text("run")[:SHOWN_DIGITS], is_text=True),
    blocks.Column("Flower's run", lambda item: str(item.get("flower-run") or "-")),
    _digest("policy", "policy"),
    _digest("app", "app"),
]
REFUSALS = [
    *PLACE,
    blocks.Column("reason", _reason, is_text=True),
    QUERY,
    WHOLE,
    *ORIGIN,
]
ANSWERS = [
    *PLACE,
    QUERY,
    WHOLE,
    blocks.count_column("rows", "rows"),
    blocks.Column("bytes", lambda item: format_bytes(item.amount("bytes"))),
    *ORIGIN,
]
RECIPIENTS = [
    PLACE[0],
    blocks.text_column("secret of", "group"),
    blocks.count_column("sites that have it", "used"),
    blocks.text_column("their keys' fingerprints", "to"),
    ORIGIN[0],
]
VECTORS = [
    blocks.text_column("table", "table"),
    blocks.text_column("columns that are read", "columns"),
    blocks.count_column("left the site", "used"),
    blocks.count_column("allowed", "allowed"),
]
RELEASES = [
    *PLACE,
    blocks.text_column("release", "what"),
    blocks.Column("to whom", _reader, is_text=True),
    blocks.Column("mechanism", blocks.mechanism_text, is_text=True),
    blocks.count_column("times", "used"),
    blocks.text_column("what is assumed", "scope"),
    ORIGIN[0],
]
