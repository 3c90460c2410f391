"""The ledger of a site: the cost of every release, recorded before it leaves.

The budget belongs to a *source* (a shard of a table, over all runs ever). A run
reserves what it plans, spends from the reservation with each message, and closes it:
from then on only what was used counts. An open reservation counts in full, so that a
crash can only make the account too high.

Lines of the table ``ledger``, JSON (a release is an object with the fields of
``Release``), each after ``seq``, which counts from 1, and ``time``, and before
``salt``, random digits: servers see checksums, and shall not try out what a line may
say::

    "event": "reserve", "run", "release", "limit", "ident"
    "event": "spend",   "run", "part", "what", "key", "times", "ident"
    "event": "charge",  "run", "release", "times", "ident"
    "event": "note",    "run", "release"
    "event": "fit",     "run", "fit", "candidate", "ident"     of a search: notes anew
    "event": "scores",  "run", "source", "part", "columns", "times", "allowed", "ident"
    "event": "settle",  "run", "release", "times"        final cost of a reservation
    "event": "close",   "run"
    "event": "keys",    "run", "groups"     who has its secrets, by group (fingerprints)
    "event": "answer",  "run", "source", "rows", "bytes", "ident", ...
    "event": "refuse",  "run", "source", "reason", ...   source: if rows were read

``transaction.py`` says what an answer or a refusal has besides.

*Chain.* A line's checksum is BLAKE2b (16 bytes) of the previous line's checksum (32
zeros before the first) followed by the line, so that no line can be changed, removed or
moved without breaking the chain; the table ``counter`` and a file beside the database
(``counter.py``) hold the last checksum, so that no line can be cut off the end. It is
not a signature: whoever can write the files can forge them. A process checks the whole
chain before it first adds up what a source has spent, and only new lines after that; to
spend from a reservation it checks the end.

*Once.* A call with an ``ident`` takes effect once: repeated by a process that does not
know whether the first call succeeded, it changes nothing.

*Guarantee.* When a call returns, its lines are on disk, or will be with the commit of
the enclosing transaction. If a call raises, nothing may be released. So the total is
never below what has left, wherever the process was killed (tested by killing it).
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Final, ParamSpec

import msgspec
from msgspec.structs import replace

from client_apps.data import counter
from client_apps.data.database import FILE, LABELS, START, Changes, open_database
from client_apps.data.query_quota import (
    TIME,
    Quotas,
    check_quota,
    count_queries,
    find_accounts,
    recorded,
)
from client_apps.data.score_counts import SCORES, ScoreLimit
from tp_flower.errors import BudgetError, LedgerError
from tp_flower.node_config import IN_MEMORY
from tp_flower.privacy import mechanisms
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.epsilons import Released

P = ParamSpec("P")
Line = dict[str, Any]
# by source; a source that is not listed has no limit
Budgets = Mapping[str, mechanisms.Budget]
# how often each mechanism, which has count 1, is used
Costs = Counter[mechanisms.Mechanism]

RESERVE = "reserve"
SPEND = "spend"
CHARGE = "charge"
NOTE = "note"
SETTLE = "settle"
CLOSE = "close"
KEYS = "keys"
ANSWER = "answer"
REFUSE = "refuse"
FIT = "fit"

_CHECKSUM_BYTES: Final = len(START) // 2
_SALT_BYTES: Final = 8

# a sum of many floating-point numbers may slightly exceed a budget that it meets
_ROUNDING: Final = 1e-9

_SINCE_CLOSE: Final = (
    "seq > (SELECT coalesce(max(seq), 0) FROM ledger WHERE run = :run AND event = "
    "'close')"
)
_SINCE_FIT: Final = (
    "seq > (SELECT coalesce(max(seq), 0) FROM ledger WHERE run = :run AND event = "
    "'fit')"
)
_RUN_CONDITION: Final = f"run = :run AND {_SINCE_CLOSE}"
_MOST_USED: Final = f"""
WITH used AS (
    SELECT part, what, sum(times) AS times FROM ledger
    WHERE {_RUN_CONDITION} AND event = 'spend' GROUP BY part, what, key
)
SELECT json_extract(line, '$.release'), max(used.times)
FROM ledger JOIN used USING (part, what)
WHERE {_RUN_CONDITION} AND event = 'reserve' GROUP BY seq ORDER BY seq
"""
"""The reservations of an open run, and the uses of the most used key."""

_SPENT: Final = """
SELECT json_extract(line, '$.release.mechanism'),
    sum(coalesce(times, json_extract(line, '$.limit')))
FROM ledger AS own
WHERE source = :source AND (:run IS NULL OR own.run = :run)
    AND (event IN ('charge', 'settle') OR event = 'reserve'
    AND NOT EXISTS (SELECT 1 FROM ledger AS later WHERE later.run = own.run
        AND later.event = 'close' AND later.seq > own.seq))
GROUP BY 1 ORDER BY min(seq)
"""
"""The spending of a source in a run, or in all runs (NULL), by mechanism."""

_RELEASED: Final = """
SELECT what, coalesce(json_extract(line, '$.release.scope'), ''),
    json_extract(line, '$.release.mechanism'),
    sum(coalesce(times, json_extract(line, '$.limit'), 1))
FROM ledger AS own
WHERE source = :source
    AND (event IN ('charge', 'settle', 'note') OR event = 'reserve'
    AND NOT EXISTS (SELECT 1 FROM ledger AS later WHERE later.run = own.run
        AND later.event = 'close' AND later.seq > own.seq))
GROUP BY 1, 2, 3 ORDER BY min(seq)
"""
"""All that has left of a source, by kind, scope and mechanism."""

_PER: Final = """
SELECT DISTINCT coalesce(json_extract(line, '$.release.per'), 'row') FROM ledger
WHERE source = :source AND event IN ('charge', 'settle', 'reserve')
"""
"""What the spending of a source counts per."""


class Ledger:
    """The costs of one site's releases.

    Every method raises ``LedgerError`` if the ledger is damaged, ``SiteError`` if it
    cannot be read or written. Processes and threads may call it at the same time.

    >>> from tp_flower.privacy.mechanisms import Budget, PureDp, Release, Reservation
    >>> unit = ("a row of flights", "the row with any other label", "server")
    >>> labels = Release("flights", "F", 1, "extract", "labels", *unit, PureDp(0.5))
    >>> ledger = Ledger(":memory:")
    >>> ledger.reserve("run", [Reservation(labels, limit=3)], {"F": Budget(2.0, 0.0)})
    >>> ledger.spend("run", [(1, "labels", 0)])
    >>> ledger.total("F", delta=0.0)
    1.5
    >>> ledger.close("run")
    >>> ledger.total("F", delta=0.0)
    0.5
    """

    def __init__(self, root: str) -> None:
        self._root = root
        # seq and checksum of the last line: committed, and within a transaction
        self._seen = self.end = (0, START)
        self._is_checked = False
        self._checked_in = -1

    def reserve(
        self,
        run: str,
        planned: Sequence[mechanisms.Reservation],
        budgets: Budgets,
        ident: str = "",
    ) -> None:
        """Reserve a run's planned spending, all of it or nothing.

        BudgetError if a budget does not suffice or the release is already reserved.
        """
        with self._transaction(is_whole=True) as connection:
            if _has_done(connection, run, RESERVE, ident):
                return
            reserved_names = _reserved_names(connection, run)
            totals: dict[str, Costs] = {}
            for item in planned:
                if item.release.name in reserved_names:
                    raise BudgetError(
                        f"{_words(run, item.release.name)} are reserved already"
                    )
                reserved_names.add(item.release.name)
                costs = costs_of(item.release.mechanism, item.limit)
                totals.setdefault(item.release.source, Counter()).update(costs)
            payers = {item.release.source: item.release for item in planned}
            for source, costs in totals.items():
                _check_budget(connection, run, payers[source], costs, budgets)
            common = {"event": RESERVE, "run": run, "ident": ident}
            self._append(
                connection, [common | msgspec.to_builtins(item) for item in planned]
            )

    def spend(
        self, run: str, uses: Sequence[mechanisms.Spend], ident: str = ""
    ) -> None:
        """Spend from the run's reservations, once for each of ``uses``.

        Raises BudgetError beyond the reservations; then nothing is written.
        """
        with self._transaction() as connection:
            if _has_done(connection, run, SPEND, ident):
                return
            lines: list[Line] = []
            for (part, kind, key), count in Counter(uses).items():
                name = _words(run, (part, kind))
                limit, used = _limit_and_used(connection, run, (part, kind, key))
                if limit is None:
                    raise BudgetError(f"{name} are not reserved")
                if used + count > limit:
                    raise BudgetError(
                        f"{name} are used up: of key {key}, {limit} were planned "
                        f"and {used} are used; requested: {count} more"
                    )
                use = {"part": part, "what": kind, "key": key, "times": count}
                lines.append({"event": SPEND, "run": run, "ident": ident, **use})
            self._append(connection, lines)

    def charge(
        self, run: str, release: mechanisms.Release, budgets: Budgets, ident: str = ""
    ) -> None:
        """Spend without a reservation; note releases that another run has paid for.

        A repeated ``ident`` of the same source costs nothing. Raises BudgetError if the
        budget does not suffice; then nothing is written.
        """
        costs = costs_of(release.mechanism)
        with self._transaction(is_whole=True) as connection:
            query = (
                "SELECT 1 FROM ledger WHERE ident = ? AND event = 'charge' AND +source "
                "= ?"
            )
            paid = connection.execute(query, (ident, release.source)).fetchone()
            if ident and paid is not None:
                if not _has_done(connection, run, CHARGE, ident):
                    self.note(run, [release])
                return
            _check_budget(connection, run, release, costs, budgets)
            line = {
                "event": CHARGE,
                "run": run,
                "release": msgspec.to_builtins(release),
            }
            self._append(connection, [{**line, "times": 1, "ident": ident}])

    def count_fit(self, run: str, fit: int, candidate: int, ident: str) -> None:
        """Begin a fit of a search: what leaves in it is noted anew."""
        with self._transaction() as connection:
            if not _has_done(connection, run, FIT, ident):
                line = {"event": FIT, "run": run, "fit": fit, "candidate": candidate}
                self._append(connection, [{**line, "ident": ident}])

    def note(self, run: str, releases: Sequence[mechanisms.Release]) -> None:
        """Record releases that no mechanism covers: one line each, once per run.

        In a search they are recorded once per fit.
        """
        with self._transaction() as connection:
            new = {
                item.name: item
                for item in releases
                if not _is_noted(connection, run, item.name)
            }
            line = {"event": NOTE, "run": run}
            lines = [
                {**line, "release": msgspec.to_builtins(item)} for item in new.values()
            ]
            self._append(connection, lines)

    def count_scores(
        self, run: str, counted: Mapping[tuple[int, ScoreLimit], int], ident: str = ""
    ) -> None:
        """Count score vectors without noise, by part and limit.

        PolicyError beyond a limit; then nothing is written.
        """
        with self._transaction(is_whole=True) as connection:
            if _has_done(connection, run, SCORES, ident):
                return
            common = {"event": SCORES, "run": run, "ident": ident}
            for (part, limit), vectors in counted.items():
                line = limit.line(connection, vectors)
                self._append(connection, [{**common, "part": part, **line}])

    def scores_used(self, limit: ScoreLimit) -> int:
        """Return how many score vectors have left of those that a limit allows."""
        with self._transaction(is_whole=True) as connection:
            return limit.used(connection)

    def record_keys(self, run: str, groups: Mapping[str, Sequence[str]]) -> None:
        """Record the fingerprints of the public keys that secrets were sealed to."""
        with self._transaction() as connection:
            self._append(
                connection, [{"event": KEYS, "run": run, "groups": dict(groups)}]
            )

    def close(self, run: str) -> None:
        """End a run and free its unused reservations."""
        with self._transaction() as connection:
            query = f"SELECT 1 FROM ledger WHERE {_RUN_CONDITION} AND event <> 'refuse'"
            if connection.execute(query, {"run": run}).fetchone() is None:
                return
            line = {"event": SETTLE, "run": run}
            lines = [
                {**line, "release": json.loads(release), "times": times}
                for release, times in connection.execute(_MOST_USED, {"run": run})
            ]
            self._append(connection, [*lines, {"event": CLOSE, "run": run}])

    def record(
        self, run: str, event: str, queries: Sequence[Line], quotas: Quotas
    ) -> None:
        """Record queries of tables that were answered, once, or refused.

        PolicyError beyond the quota of a source whose rows were read; then nothing is
        written, and nothing that depends on the rows may be sent.
        """
        with self._transaction() as connection:
            if _has_done(connection, run, event, queries[0].get("ident", "")):
                return
            for query in queries:
                if (line := recorded(connection, query, quotas)) is not None:
                    self._append(connection, [{"event": event, "run": run, **line}])

    def check_quota(self, table: str, source: str, quotas: Quotas) -> None:
        """Raise PolicyError if no query of a source may be answered now."""
        with self._transaction() as connection:
            check_quota(connection, table, source, quotas)

    def queries(self, source: str) -> dict[str, tuple[int, int]]:
        """Return by event a source's queries: all, and those that count for quotas."""
        with self._transaction() as connection:
            return count_queries(connection, source)

    def accounts(self, table: str, site: str, after: str = "") -> list[str]:
        """Return a table's accounts that begin after another's last query, in order."""
        with self._transaction() as connection:
            return find_accounts(connection, table, site, after)

    def spent(self, source: str) -> list[mechanisms.Mechanism]:
        """Return the mechanisms that a source has used, open reservations in full."""
        with self._transaction(is_whole=True) as connection:
            return mechanisms_of(_sum_spent(connection, source))

    def total(self, source: str, delta: float) -> float:
        """Return the epsilon that a source has spent, at a delta."""
        return epsilon(self.spent(source), delta)

    def released(self, source: str) -> list[Released]:
        """Return all that has left of a source, open reservations in full."""
        with self._transaction(is_whole=True) as connection:
            rows = connection.execute(_RELEASED, {"source": source}).fetchall()
        return [
            Released(kind, scope, mechanism and _mechanism(mechanism), times)
            for kind, scope, mechanism, times in rows
        ]

    def lines(self, run: str) -> list[Line]:
        """Return an object for each release of a run, in order, for the run's report.

        It has the line's ``event``, ``time`` and ``release``, and for a reservation
        also its ``limit`` and ``used``, the uses of the most used key.
        """
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT line FROM ledger WHERE run = ? ORDER BY seq", (run,)
            )
            return summary(json.loads(line) for (line,) in rows)

    def export(self) -> Iterator[str]:
        """Yield all lines with their checksums as JSON, without checking the chain."""
        with open_database(self._root).reading() as connection:
            rows = connection.execute("SELECT line, checksum FROM ledger ORDER BY seq")
            for line, checksum in rows.fetchall():
                yield f'{line.removesuffix("}")},"checksum":"{checksum}"}}'

    def begin_anew(self) -> None:
        """Delete all lines, damaged or not, and thus the record of epsilon spent.

        The runs in flight end: if the lines are lost, so is what their masks have
        hidden.
        """
        with open_database(self._root).transaction() as connection:
            connection.execute("DELETE FROM ledger")
            connection.execute("DELETE FROM masked")
            connection.execute("DELETE FROM entries WHERE run <> ?", (LABELS,))
            mark = counter.set_back(self._root, connection)
        counter.overwrite(self._root, mark)
        self._seen = self.end = (0, START)
        self._is_checked = False

    def confirm(self, end: tuple[int, str]) -> None:
        """Note that the lines up to ``end`` are committed and must stay."""
        self._seen = max(self._seen, end)

    @contextmanager
    def _transaction(self, *, is_whole: bool = False) -> Iterator[Connection]:
        """Lock out other writers, after checking the end of the chain or all of it."""
        database = open_database(self._root)
        last_transaction = database.transaction_number
        with database.transaction() as connection:
            # within one transaction only this process can have changed the lines
            is_first = self._checked_in != database.transaction_number
            if is_first or (is_whole and not self._is_checked):
                self.end = self._check(connection, is_whole=is_whole)
                self._checked_in = database.transaction_number
                self._is_checked = self._is_checked or is_whole
                # invariant: lines that may be rolled back do not count as seen
                self._seen = self.end if is_first else self._seen
            yield connection
            end = self.end
        if database.transaction_number != last_transaction:
            self.confirm(end)

    def _append(self, connection: Connection, contents: Sequence[Line]) -> None:
        """Add lines to the chain; TypeError if one is not of plain JSON types."""
        seq, checksum = self.end
        now = time.strftime(TIME, time.gmtime())
        rows = []
        for content in contents:
            seq += 1
            salt = secrets.token_hex(_SALT_BYTES)
            entry = {"seq": seq, "time": now, **content, "salt": salt}
            line = json.dumps(entry, separators=(",", ":"), allow_nan=False)
            if json.loads(line) != entry:
                # an unreadable line would count as damage from then on
                raise TypeError(f"not plain JSON types: {content}")
            checksum = checksum_of(line, checksum)
            rows.append((seq, checksum, line))
        if rows:
            connection.executemany(
                "INSERT INTO ledger (seq, checksum, line) VALUES (?, ?, ?)", rows
            )
            connection.execute(
                "UPDATE counter SET seq = ?, checksum = ?", (seq, checksum)
            )
            self.end = seq, checksum

    def _check(self, connection: Connection, *, is_whole: bool) -> tuple[int, str]:
        """Return seq and checksum of the last line, after checking the chain."""
        seq, checksum = self._seen
        if counter.checksum_at(connection, seq) != checksum:
            raise self._damage_error("earlier lines are missing")
        counter.check(self._root, connection)
        _, *end = counter.Mark.read(connection)
        if is_whole and not self._is_checked:
            # the sums use the indices
            ((answer,), *_) = connection.execute("PRAGMA integrity_check(ledger)")
            if answer != "ok":
                raise self._damage_error(str(answer))
            seq = 0
            checksum = START
        elif not self._is_checked:
            # invariant: a line is added only to an intact chain
            (last_seq,) = connection.execute("SELECT coalesce(max(seq), 0) FROM ledger")
            seq = max(last_seq[0] - 1, 0)
            checksum = counter.checksum_at(connection, seq)
        rows = connection.execute(
            "SELECT seq, line, checksum FROM ledger WHERE seq > ? ORDER BY seq", (seq,)
        )
        for number, line, stored in rows:
            seq = seq + 1
            checksum = checksum_of(line, checksum)
            if (number, stored) != (seq, checksum):
                raise self._damage_error(f"the checksum of line {seq} does not match")
        if end != [seq, checksum]:
            raise self._damage_error("its last lines are missing")
        return seq, checksum

    def _damage_error(self, reason: str) -> LedgerError:
        """Return the error about a damaged ledger."""
        location = ""
        if self._root != IN_MEMORY:
            location = f" in {Path(self._root) / FILE}"
        return LedgerError(
            f"the privacy ledger{location} is damaged: {reason}; nothing is released "
            "until the site's owner has restored it"
        )


class RoundLedger:
    """The ledger as a round writes it: together with the round's other changes.

    The methods are those of ``Ledger``; the commit of the round raises refusals.
    """

    def __init__(self, ledger: Ledger, changes: Changes) -> None:
        self._ledger = ledger
        self._changes = changes
        self.reserve = self._write_with_round(ledger.reserve)
        self.spend = self._write_with_round(ledger.spend)
        self.charge = self._write_with_round(ledger.charge)
        self.count_fit = self._write_with_round(ledger.count_fit)
        self.note = self._write_with_round(ledger.note)
        self.count_scores = self._write_with_round(ledger.count_scores)
        self.record_keys = self._write_with_round(ledger.record_keys)
        self.close = self._write_with_round(ledger.close)
        self.record = self._write_with_round(ledger.record)
        self.check_quota = ledger.check_quota
        self.queries = ledger.queries
        self.accounts = ledger.accounts
        self.scores_used = ledger.scores_used

    def lines(self, run: str) -> list[Line]:
        """Return the lines of the run, with those that the round has added."""
        self._changes.write_now()
        return self._ledger.lines(run)

    def _write_with_round(self, write: Callable[P, None]) -> Callable[P, None]:
        """Return a method of the ledger that writes with the round's commit."""

        def add(*args: P.args, **kwargs: P.kwargs) -> None:
            ends = []

            def write_lines() -> None:
                write(*args, **kwargs)
                ends.append(self._ledger.end)

            self._changes.add(
                write_lines, lambda: self._ledger.confirm(ends[-1]), is_durable=True
            )

        return add


@cache
def open_ledger(root: str) -> Ledger:
    """Return the ledger of a state folder; a process checks its chain once."""
    return Ledger(root)


def costs_of(mechanism: mechanisms.Mechanism | None, times: int = 1) -> Costs:
    """Return the cost of using a mechanism; ValueError for None."""
    if mechanism is None:
        raise ValueError("a release without a mechanism cannot be paid for")
    return Counter({replace(mechanism, count=1): times * mechanism.count})


def mechanisms_of(costs: Costs) -> list[mechanisms.Mechanism]:
    """Return costs as mechanisms, each kind once."""
    return [replace(mechanism, count=count) for mechanism, count in costs.items()]


def summary(lines: Iterable[Line]) -> list[Line]:
    """Return one object for each release of a run's lines, with how it was used.

    Notes of several fits of a search are one, with their number as ``used``.
    """
    releases: list[Line] = []
    noted: dict[tuple[Any, ...], Line] = {}
    uses: dict[mechanisms.Name, Counter[int]] = {}
    latest: dict[mechanisms.Name, Line] = {}
    for line in lines:
        # a line's number would reveal how much else the site has released
        stamp = {key: line[key] for key in ("event", "time")}
        if line["event"] == RESERVE:
            release = line["release"]
            name = release["part"], release["what"]
            uses[name] = Counter()
            latest[name] = stamp | {
                "release": release,
                "limit": line["limit"],
                "used": 0,
            }
            releases.append(latest[name])
        elif line["event"] == SPEND:
            name = line["part"], line["what"]
            uses[name][line["key"]] += line["times"]
            latest[name]["used"] = max(uses[name].values())
        elif line["event"] == CHARGE:
            releases.append({**stamp, "release": line["release"]})
        elif line["event"] == NOTE:
            release = line["release"]
            note = release["part"], release["what"], release["scope"]
            if note in noted:
                noted[note]["used"] = noted[note].get("used", 1) + 1
            else:
                noted[note] = stamp | {"release": release}
                releases.append(noted[note])
    return releases


def checksum_of(line: str, previous: str) -> str:
    """Return the hexadecimal checksum of a line chained to the previous one's."""
    return blake2b((previous + line).encode(), digest_size=_CHECKSUM_BYTES).hexdigest()


def _has_done(connection: Connection, run: str, event: str, ident: str) -> bool:
    """Return whether an open run has carried out the call of this name."""
    query = (
        "SELECT 1 FROM ledger WHERE ident = :ident AND event = :event AND run = :run "
        f"AND {_SINCE_CLOSE}"
    )
    values = {"ident": ident, "event": event, "run": run}
    return bool(ident) and connection.execute(query, values).fetchone() is not None


def _reserved_names(connection: Connection, run: str) -> set[mechanisms.Name]:
    query = (
        f"SELECT part, what FROM ledger WHERE {_RUN_CONDITION} AND event = '{RESERVE}' "
        f"AND {_SINCE_FIT}"
    )
    return set(connection.execute(query, {"run": run}))


def _is_noted(connection: Connection, run: str, name: mechanisms.Name) -> bool:
    """Return whether an open run, or fit, has noted a release.

    A site notes those of each of its shards: to read all names for each would take the
    square of their number.
    """
    query = (
        f"SELECT 1 FROM ledger WHERE {_RUN_CONDITION} AND event = '{NOTE}' AND "
        f"part = :part AND what = :what AND {_SINCE_FIT}"
    )
    part, kind = name
    values = {"run": run, "part": part, "what": kind}
    return connection.execute(query, values).fetchone() is not None


def _limit_and_used(
    connection: Connection, run: str, use: mechanisms.Spend
) -> tuple[int | None, int]:
    """Return an open run's limit for a key, None without one, and its uses so far."""
    of_release = f"FROM ledger WHERE {_RUN_CONDITION} AND part = :part AND what = :what"
    limit, used = connection.execute(
        f"SELECT (SELECT max(json_extract(line, '$.limit')) {of_release} AND event = "
        f"'reserve'), (SELECT coalesce(sum(times), 0) {of_release} AND event = "
        "'spend' AND key = :key)",
        {"run": run, **dict(zip(("part", "what", "key"), use, strict=True))},
    ).fetchone()
    return limit, used


def _sum_spent(connection: Connection, source: str, run: str | None = None) -> Costs:
    costs: Costs = Counter()
    for mechanism, times in connection.execute(_SPENT, {"source": source, "run": run}):
        costs.update(costs_of(_mechanism(mechanism), times))
    return costs


def _mechanism(text: str) -> mechanisms.Mechanism:
    return msgspec.json.decode(text, type=mechanisms.Mechanism)  # type: ignore[no-any-return]


def _check_budget(
    connection: Connection,
    run: str,
    payer: mechanisms.Release,
    costs: Costs,
    budgets: Budgets,
) -> None:
    """Raise BudgetError if costs exceed the rest of a source's or a run's budget."""
    budget = budgets.get(payer.source)
    if budget is None:
        return
    for (per,) in connection.execute(_PER, {"source": payer.source}):
        if per != payer.per:
            raise BudgetError(
                f"table {payer.table} has spent epsilon per {per}, and its policy "
                f"counts per {payer.per}: the two cannot be added up. Give the rows a "
                "new 'budget-name', or begin the account anew"
            )

    def epsilon_of(costs: Costs) -> float:
        return epsilon(mechanisms_of(costs), budget.delta)

    for when, spender, limit in (
        ("", None, budget.epsilon),
        (" in this run", run, budget.per_run),
    ):
        spent = _sum_spent(connection, payer.source, spender)
        together = epsilon_of(spent + costs)
        if together > limit * (1 + _ROUNDING):
            raise BudgetError(
                f"table {payer.table} has spent epsilon {epsilon_of(spent):.4g} of "
                f"{limit:.4g}{when} (delta {budget.delta:g}) in covered releases; "
                f"requested: {epsilon_of(costs):.4g}, in total {together:.4g}"
            )


def _words(run: str, name: mechanisms.Name) -> str:
    part, kind = name
    return f"{kind} of part {part} in run {run}"
