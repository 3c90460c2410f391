"""The audit of a site: a line in its ledger for each query of a table.

``flower-run`` is Flower's number of the run, by which the SuperLink's operator finds
its account: Flower tells an app no more. ``app`` is the SHA-256 of the app's bundle,
``query`` the text of the fragment, ``digest`` the text's and ``policy`` the rules'.
"""

from logging import ERROR
from typing import TYPE_CHECKING, Final

from client_apps.data.ledger import ANSWER, REFUSE, Line
from client_apps.rounds.site import Site
from tp_flower.errors import BudgetError, PolicyError, TPFlowerError
from tp_flower.events import log_event
from tp_flower.node_config import app_sha256
from tp_flower.protocol.packet import Packet

if TYPE_CHECKING:
    from client_apps.rounds.transaction import IncomingRequest

MOST_CHARACTERS: Final = 20_000  # of a text in the line of a refusal


def record_answers(site: Site, request: "IncomingRequest", packet: Packet) -> None:
    """Record the queries that a reply answers, with the round's commit."""
    sent = packet.payload_bytes()
    common = {**_common(site, request), "ident": request.digest}
    lines = [
        {**common, **query, "bytes": sent.get(part, 0)}
        for part, query in site.queries.items()
    ]
    site.ledger.record(site.store.run, ANSWER, lines, site.quotas)


def record_refusal(
    site: Site, request: "IncomingRequest", error: Exception, reason: str
) -> Exception:
    """Record a refused query or what a policy refuses; return the error that may leave.

    An error may tell of rows that were read. So if its line cannot be written, or is
    beyond the quota, this is the error that leaves, and says nothing of the other.
    """
    queries = list(site.queries.values())
    if not queries:
        if not isinstance(error, PolicyError | BudgetError):
            return error
        # the table is that of the part in the run's earlier lines
        queries = [{"part": site.changes.part}]
    common = {**_common(site, request), "reason": reason[:MOST_CHARACTERS]}
    lines = [
        {**common, **query, "query": query.get("query", "")[:MOST_CHARACTERS]}
        for query in queries
    ]
    try:
        site.ledger.record(site.store.run, REFUSE, lines, site.quotas)
    except TPFlowerError as failure:
        log_event(ERROR, "unrecorded", run=site.run, reason=str(failure))
        if not any("source" in query for query in queries):
            return error
        site.changes.part = None
        for query in queries:
            query.pop("source", None)
        return record_refusal(site, request, failure, str(failure))
    return error


def _common(site: Site, request: "IncomingRequest") -> Line:
    return {
        "action": str(request.action),
        "round": request.number,
        "flower-run": site.context.run_id,
        "app": app_sha256(site.context.node_config),
    }
