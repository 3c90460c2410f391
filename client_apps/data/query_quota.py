"""How many queries of a table a site answers, and how many refusals it writes down.

Counted are the ledger's lines about a source within 24 hours: answers, and refusals
after rows were read, because an error may tell of them; beyond the quota none is sent.
Of other refusals ``MOST_REFUSALS`` are written within 24 hours, so that no server fills
the disk. Those beyond them are counted: the 1st, 10th, 100th and so on have a line with
their number, and so has the next refusal that is one of ``MOST_REFUSALS`` again.
"""

import calendar
import time
from collections.abc import Mapping
from sqlite3 import Connection
from typing import Any, Final

from client_apps.data.database import LABELS
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
FIND_ACCOUNTS: Final = """
WITH queries AS (
    SELECT * FROM ledger WHERE source IS NOT NULL AND event IN ('answer', 'refuse')
), accounts AS (SELECT source, min(seq) AS first FROM queries GROUP BY source)
SELECT source FROM accounts
WHERE first > (SELECT coalesce(max(seq), 0) FROM queries WHERE source = :after)
AND NOT EXISTS (
    SELECT 1 FROM ledger AS start JOIN queries AS other ON other.run = start.run
    WHERE start.seq = first AND other.source = :after
)
AND EXISTS (
    SELECT 1 FROM queries WHERE queries.source = accounts.source
    AND json_extract(line, '$.table') = :table AND json_extract(line, '$.site') = :site
) ORDER BY first
"""
"""The sources of a table's queries that begin in runs after the last of a source."""
BEYOND: Final = "beyond"
"""In a line: how many refusals there had been by then beyond ``MOST_REFUSALS``."""
_COUNT: Final = "refusals beyond the limit"
READ_COUNT: Final = (
    "SELECT CAST(meta AS INTEGER) FROM entries WHERE run = ? AND name = ?"
)
WRITE_COUNT: Final = """
INSERT INTO entries (run, name, meta, touched, layout, checksum, data)
VALUES (?, ?, ?, 0, '[]', 0, x'')
ON CONFLICT (run, name) DO UPDATE SET meta = excluded.meta
"""
"""The number of refusals, which is kept over all runs."""


def recorded(
    connection: Connection, query: Mapping[str, Any], quotas: Quotas
) -> dict[str, Any] | None:
    """Return the line of a query, None for a refusal that is only counted.

    PolicyError if it exceeds its quota.
    """
    source = query.get("source")
    if source is not None:
        check_quota(connection, query["table"], source, quotas)
        return dict(query)
    row = connection.execute(READ_COUNT, (LABELS, _COUNT)).fetchone()
    beyond = 0 if row is None else int(row[0])
    is_beyond = bool(_free_at(connection, None, MOST_REFUSALS))
    if not (is_beyond or beyond):
        return dict(query)
    beyond += is_beyond
    count = beyond if is_beyond else 0
    connection.execute(WRITE_COUNT, (LABELS, _COUNT, str(count)))
    if is_beyond and not _is_power_of_ten(beyond):
        return None
    return {**query, BEYOND: beyond}


def _is_power_of_ten(number: int) -> bool:
    return str(number).rstrip("0") == "1"


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


def find_accounts(
    connection: Connection, table: str, site: str, after: str
) -> list[str]:
    """Return the sources of a table's queries, in the order in which they begin.

    Only those that begin in a run after the last query of the source ``after``, if it
    has any: shards of one run begin together.
    """
    values = {"table": table, "site": site, "after": after}
    return [source for (source,) in connection.execute(FIND_ACCOUNTS, values)]


def _free_at(connection: Connection, source: str | None, quota: int) -> str:
    """Return the time from which a source may be queried again; "" if it may now."""
    earlier = connection.execute(EARLIER_QUERY, (source, quota - 1)).fetchone()
    if earlier is None:
        return ""
    free_time = calendar.timegm(time.strptime(earlier[0], TIME)) + DAY_SECONDS
    if free_time <= time.time():
        return ""
    return time.strftime(TIME, time.gmtime(free_time))
