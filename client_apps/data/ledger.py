"""What a site's releases have cost, written down before they leave.

The budget belongs to a *source* (a shard of a table, over all runs ever). A run
reserves what it plans, spends from the reservation before each message, and closes it:
then it has cost what it used. An open reservation counts in full, so that a crash can
only count too much.

Lines of ``<state-dir>/privacy/ledger.jsonl``, in the form that ``journal`` describes
(a release is an object with the fields of ``Release``)::

    {..., "event": "reserve", "run", "planned": [{"release": {...}, "limit": 12}, ...],
     "ident"}
    {..., "event": "spend", "run", "uses": [[part, what, key], ...], "ident"}
    {..., "event": "charge", "run", "release": {...}, "ident"}
    {..., "event": "note", "run", "release": {...}}
    {..., "event": "close", "run"}

*Once.* What is written with an ``ident`` is written once: the same call again, of a
process that does not know what became of the one before it, changes nothing.

*Guarantee.* Whatever a call has returned for is on the disk. If a call raises, nothing
may be released. So the total is never below what has left the site, wherever the
process was killed (tested by killing it).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from client_apps.data import ledger_snapshot
from client_apps.data.ledger_journal import (
    Content,
    FileJournal,
    Journal,
    ProcessJournal,
)
from client_apps.data.ledger_state import (
    CHARGE,
    CLOSE,
    NOTE,
    RESERVE,
    SPEND,
    Costs,
    LedgerState,
    costs_of,
    mechanisms_of,
    summary,
)
from tp_flower.errors import BudgetError, LedgerError
from tp_flower.methods import RDP
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Budget, Mechanism, Name, Planned, Release, Use

__all__ = ["FILE", "Budget", "Ledger", "Planned", "Release", "Use", "open_ledger"]

FILE: Final = Path("privacy") / "ledger.jsonl"
"""Of the ledger, within a site's state folder."""

# sums of many floating-point numbers may miss a budget that they meet exactly
_ROUNDING: Final = 1e-9


class Ledger:
    """The costs of one site's releases.

    Every method raises ``LedgerError`` if the file cannot be read or written, or is
    damaged. Processes and threads may call it at the same time.

    Args:
        path: of the file; None: in this process only.

    >>> from tp_flower.privacy.mechanisms import PureDp
    >>> unit = ("a row of flights", "the row with any other label", "server")
    >>> labels = Release("flights", "F", 1, "extract", "labels", *unit, PureDp(0.5))
    >>> ledger = Ledger(None)
    >>> ledger.reserve("run", [Planned(labels, limit=3)], {"F": Budget(2.0, 0.0)})
    >>> ledger.spend("run", [(1, "labels", 0)])
    >>> ledger.total("F", delta=0.0)
    1.5
    >>> ledger.close("run")
    >>> ledger.total("F", delta=0.0)
    0.5
    """

    def __init__(self, path: Path | None) -> None:
        self._snapshot: Path | None = None
        self._kept = 0
        if path is None:
            self._state = LedgerState()
            self._journal: Journal = ProcessJournal(self._apply)
        else:
            self._snapshot = path.with_suffix(".snapshot")
            self._state, position = ledger_snapshot.load(self._snapshot)
            self._journal = FileJournal(path, self._apply, position)
            self._kept = position.seq

    def reserve(
        self,
        run: str,
        planned: Sequence[Planned],
        budgets: Mapping[str, Budget],
        ident: str = "",
    ) -> None:
        """Set aside what a run plans to spend: all of it or nothing.

        Args:
            run: names the run.
            planned: one for each part and what.
            budgets: by source; a source that is not there has no limit.
            ident: names the call in the run; none if empty.

        Raises:
            BudgetError: a budget does not suffice, or the run has an open reservation
                of the same.
        """
        with self._turn():
            if self._state.run(run).has_done(RESERVE, ident):
                return
            taken = set(self._state.run(run).reserved)
            asked: dict[str, Costs] = {}
            for each in planned:
                if each.release.name in taken:
                    raise BudgetError(
                        f"{_words(run, each.release.name)} are reserved already"
                    )
                taken.add(each.release.name)
                costs = costs_of(each.release.mechanism, each.limit)
                asked.setdefault(each.release.source, Counter()).update(costs)
            tables = {each.release.source: each.release.table for each in planned}
            for source, costs in asked.items():
                self._check(source, tables[source], costs, budgets)
            if planned:
                lines = [each.to_json() for each in planned]
                self._append(RESERVE, run, planned=lines, ident=ident)

    def spend(self, run: str, uses: Sequence[Use], ident: str = "") -> None:
        """Use what the run has reserved, once for each of ``uses``.

        Args:
            run: names the run.
            uses: of what it has reserved.
            ident: names the call in the run; none if empty.

        Raises:
            BudgetError: it is not reserved, or would be used more often than planned;
                nothing is written.
        """
        with self._turn():
            if self._state.run(run).has_done(SPEND, ident):
                return
            reserved = self._state.run(run).reserved
            for (part, what, key), count in Counter(uses).items():
                name = _words(run, (part, what))
                reservation = reserved.get((part, what))
                if reservation is None:
                    raise BudgetError(f"{name} are not reserved")
                used, limit = reservation.uses[key], reservation.planned.limit
                if used + count > limit:
                    raise BudgetError(
                        f"{name} are used up: {limit} were planned of key {key}, "
                        f"{used} are used, asked for is {count} more"
                    )
            if uses:
                listed = [list(use) for use in uses]
                self._append(SPEND, run, uses=listed, ident=ident)

    def charge(
        self,
        run: str,
        release: Release,
        budgets: Mapping[str, Budget],
        ident: str = "",
    ) -> bool:
        """Spend without a reservation; return whether it is this run that pays.

        Args:
            run: names the run.
            release: has a mechanism.
            budgets: by source; a source that is not there has no limit.
            ident: names what is released; the same again, of the same source, is paid.

        Raises:
            BudgetError: the budget does not suffice; nothing is written.
            ValueError: the release has no mechanism.
        """
        costs = costs_of(release.mechanism)
        with self._turn():
            is_new = (release.source, ident) not in self._state.paid
            if is_new:
                self._check(release.source, release.table, costs, budgets)
                self._append(CHARGE, run, release=release.to_json(), ident=ident)
            return is_new or self._state.run(run).has_done(CHARGE, ident)

    def note(self, run: str, releases: Sequence[Release]) -> None:
        """Write down releases that nothing covers: one line each, once in a run."""
        with self._turn():
            known = self._state.run(run).noted
            fresh = {each.name: each for each in releases if each.name not in known}
            self._journal.append(
                [
                    {"event": NOTE, "run": run, "release": each.to_json()}
                    for each in fresh.values()
                ]
            )

    def close(self, run: str) -> None:
        """End a run: what it has reserved and not used is free again."""
        with self._turn():
            if self._state.is_open(run):
                self._append(CLOSE, run)

    def spent(self, source: str) -> list[Mechanism]:
        """Return what a source has spent, open reservations in full."""
        with self._turn():
            return mechanisms_of(self._state.spent(source))

    def total(self, source: str, delta: float, accountant: str = RDP) -> float:
        """Return the epsilon of what a source has spent, at a delta."""
        return epsilon(self.spent(source), delta, accountant)

    def lines(self, run: str) -> list[Content]:
        """Return what a run has done, for its report.

        One object for each release, in order: the line's ``event``, ``seq``, ``time``
        and ``release``; of a reservation, also its ``limit`` and how often the most
        used key was ``used``.
        """
        with self._turn():
            lines = self._journal.contents(run)
        return summary(line for line in lines if line["run"] == run)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._journal.turn():
            yield
            position = self._journal.position
            if self._snapshot and position.seq - self._kept >= ledger_snapshot.EVERY:
                ledger_snapshot.save(self._snapshot, self._state, position)
                self._kept = position.seq

    def _append(self, event: str, run: str, **content: Any) -> None:
        self._journal.append([{"event": event, "run": run, **content}])

    def _check(
        self, source: str, table: str, asked: Costs, budgets: Mapping[str, Budget]
    ) -> None:
        budget = budgets.get(source)
        if budget is None:
            return
        spent = self._state.spent(source)

        def epsilon_of(costs: Costs) -> float:
            mechanisms = mechanisms_of(costs)
            return epsilon(mechanisms, budget.delta, budget.accountant)

        together = epsilon_of(spent + asked)
        if together > budget.epsilon * (1 + _ROUNDING):
            raise BudgetError(
                f"table {table} has spent epsilon {epsilon_of(spent):.4g} of "
                f"{budget.epsilon:.4g} (delta {budget.delta:g}); asked for is "
                f"{epsilon_of(asked):.4g}, together {together:.4g}"
            )

    def _apply(self, line: Content) -> None:
        try:
            self._state.apply(line)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"line {line.get('seq')} of the privacy ledger is not understood "
                f"({type(error).__name__}: {error}); nothing is released "
                "(was it written by another version?)"
            ) from error


@cache
def open_ledger(path: Path | None) -> Ledger:
    """Return the ledger of a file, which a process reads once.

    None: the one that is gone with the process.
    """
    return Ledger(path)


def _words(run: str, name: Name) -> str:
    part, what = name
    return f"{what} of part {part} in run {run}"
