"""How many queries of a table a site answers, and how many refusals it writes down.

Counted are the ledger's lines about a source within 24 hours: answers, and refusals
after rows were read, because an error may tell of them; beyond the quota none is sent.
Of other refusals ``MOST_REFUSALS`` are written, so that no server fills the disk.
"""

import calendar
import time
from collections.abc import Mapping
from sqlite3 import Connection
from typing import Any, Final

from tp_flower.errors import NEXT_QUERY, PolicyError

Quotas = Mapping[str, int]
"""By source, the most queries in 24 hours; one that is not listed has no limit."""

MOST_REFUSALS: Final = 100
DAY_SECONDS: Final = 86_400
TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
"""The format of the ledger's times, UTC."""

EARLIER_QUERY: Final = """
SELECT json_extract(line, '$.time') FROM ledger
WHERE source IS ? AND event IN ('answer', 'refuse') ORDER BY seq DESC LIMIT 1 OFFSET ?
"""
"""The time of a source's query, counted from the latest."""
COUNT_QUERY: Final = """
SELECT event, count(*), sum(json_extract(line, '$.time') > ?) FROM ledger
WHERE source IS ? AND event IN ('answer', 'refuse') GROUP BY event
"""
"""By event the queries of a source, and how many of them are later than a time."""


def is_recorded(
    connection: Connection, query: Mapping[str, Any], quotas: Quotas
) -> bool:
    """Return whether a query is written down; PolicyError if it exceeds its quota."""
    source = query.get("source")
    if source is None:
        return not _free_at(connection, None, MOST_REFUSALS)
    check_quota(connection, query["table"], source, quotas)
    return True


def check_quota(
    connection: Connection, table: str, source: str, quotas: Quotas
) -> None:
    """Raise PolicyError if a source's queries of the last 24 hours meet its quota."""
    quota = quotas.get(source)
    if quota and (free_at := _free_at(connection, source, quota)):
        raise PolicyError(
            f"the table's policy (queries-per-day) refuses: {quota} queries have read "
            f"table {table} within 24 hours; {NEXT_QUERY}{free_at}"
        )


def count_queries(connection: Connection, source: str) -> dict[str, tuple[int, int]]:
    """Return by event a source's queries: all, and those that count for its quota."""
    since = time.strftime(TIME, time.gmtime(time.time() - DAY_SECONDS))
    rows = connection.execute(COUNT_QUERY, (since, source))
    return {event: (count, of_day) for event, count, of_day in rows}


def _free_at(connection: Connection, source: str | None, quota: int) -> str:
    """Return the time from which a source may be queried again; "" if it may now."""
    earlier = connection.execute(EARLIER_QUERY, (source, quota - 1)).fetchone()
    if earlier is None:
        return ""
    free_time = calendar.timegm(time.strptime(earlier[0], TIME)) + DAY_SECONDS
    if free_time <= time.time():
        return ""
    return time.strftime(TIME, time.gmtime(free_time))
