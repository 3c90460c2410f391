"""What the lines of a ledger add up to."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Self

from client_apps.data.ledger_journal import Content
from tp_flower.privacy.mechanisms import (
    Mechanism,
    Name,
    Planned,
    Release,
    mechanism_from_json,
    mechanism_to_json,
)

Costs = Counter[Mechanism]
"""How often mechanisms are used; each of them has count 1."""

RESERVE: Final = "reserve"
SPEND: Final = "spend"
CHARGE: Final = "charge"
NOTE: Final = "note"
CLOSE: Final = "close"


def costs_of(mechanism: Mechanism | None, times: int = 1) -> Costs:
    """Return what using a mechanism costs.

    Raises:
        ValueError: there is none.
    """
    if mechanism is None:
        raise ValueError("a release without a mechanism cannot be paid for")
    return Counter({replace(mechanism, count=1): times * mechanism.count})


def mechanisms_of(costs: Costs) -> list[Mechanism]:
    """Return costs as mechanisms, each kind once."""
    return [replace(each, count=count) for each, count in costs.items()]


@dataclass
class Reservation:
    """A planned release of an open run, and how often each key was used."""

    planned: Planned
    uses: Counter[int] = field(default_factory=Counter)

    def cost(self, times: int) -> Costs:
        """Return what using the most used key that often costs."""
        return costs_of(self.planned.release.mechanism, times)

    def to_json(self) -> Content:
        """Return plain JSON types."""
        return {**self.planned.to_json(), "uses": list(self.uses.items())}

    @classmethod
    def from_json(cls, data: Content) -> Self:
        """Return the reservation that ``to_json`` wrote."""
        return cls(Planned.from_json(data), Counter(dict(data["uses"])))


@dataclass
class OpenRun:
    """What a run has reserved and noted, by part and what.

    Attributes:
        done: event and ident of the calls that are not to be carried out again.
    """

    reserved: dict[Name, Reservation] = field(default_factory=dict)
    noted: set[Name] = field(default_factory=set)
    done: set[tuple[str, str]] = field(default_factory=set)

    def has_done(self, event: str, ident: str) -> bool:
        """Return whether a call that has a name was carried out."""
        return bool(ident) and (event, ident) in self.done

    def to_json(self) -> Content:
        """Return plain JSON types."""
        return {
            "reserved": [each.to_json() for each in self.reserved.values()],
            "noted": sorted(self.noted),
            "done": sorted(self.done),
        }

    @classmethod
    def from_json(cls, data: Content) -> Self:
        """Return the run that ``to_json`` wrote."""
        found = [Reservation.from_json(each) for each in data["reserved"]]
        return cls(
            {each.planned.release.name: each for each in found},
            {(part, what) for part, what in data["noted"]},
            # those of an earlier version had no names
            {(event, ident) for event, ident in data.get("done", ())},
        )


class LedgerState:
    """All lines up to some place, folded.

    Attributes:
        settled: what closed runs and charges have cost, by source.
        paid: source and ident of the charges that have one.
    """

    def __init__(self) -> None:
        self.settled: dict[str, Costs] = {}
        self.paid: set[tuple[str, str]] = set()
        self._runs: dict[str, OpenRun] = {}

    def run(self, name: str) -> OpenRun:
        """Return what is known of an open run; empty if there is none."""
        return self._runs.get(name, OpenRun())

    def is_open(self, name: str) -> bool:
        """Return whether there is anything of a run that is not closed."""
        return name in self._runs

    def spent(self, source: str) -> Costs:
        """Return what a source has spent, open reservations in full."""
        costs = Counter(self.settled.get(source, Counter()))
        for run in self._runs.values():
            for each in run.reserved.values():
                if each.planned.release.source == source:
                    costs.update(each.cost(each.planned.limit))
        return costs

    def apply(self, line: Content) -> None:
        """Take over a line.

        Raises:
            KeyError, TypeError, ValueError: it is none of a ledger.
        """
        event, run = line["event"], line["run"]
        if event == RESERVE:
            planned = [Planned.from_json(each) for each in line["planned"]]
            found = {each.release.name: Reservation(each) for each in planned}
            own = self._runs.setdefault(run, OpenRun())
            own.reserved.update(found)
            own.done.add((event, line.get("ident", "")))
        elif event == SPEND:
            own = self._runs[run]
            for part, what, key in line["uses"]:
                own.reserved[part, what].uses[key] += 1
            own.done.add((event, line.get("ident", "")))
        elif event == CHARGE:
            release = Release.from_json(line["release"])
            self._settle(release.source, costs_of(release.mechanism))
            if ident := line["ident"]:
                self.paid.add((release.source, ident))
                self._runs.setdefault(run, OpenRun()).done.add((event, ident))
        elif event == NOTE:
            release = Release.from_json(line["release"])
            self._runs.setdefault(run, OpenRun()).noted.add(release.name)
        elif event == CLOSE:
            self._close(run)
        else:
            raise ValueError(f"{event!r} is no event")

    def to_json(self) -> Content:
        """Return plain JSON types."""
        settled = {
            source: [mechanism_to_json(each) for each in mechanisms_of(costs)]
            for source, costs in self.settled.items()
        }
        return {
            "settled": settled,
            "paid": sorted(self.paid),
            "runs": {name: run.to_json() for name, run in self._runs.items()},
        }

    @classmethod
    def from_json(cls, data: Content) -> Self:
        """Return the state that ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        state = cls()
        for source, mechanisms in data["settled"].items():
            for each in mechanisms:
                state._settle(source, costs_of(mechanism_from_json(each)))
        state.paid = {(source, ident) for source, ident in data["paid"]}
        state._runs = {
            name: OpenRun.from_json(run) for name, run in data["runs"].items()
        }
        return state

    def _close(self, run: str) -> None:
        for each in self._runs.pop(run).reserved.values():
            if each.uses:
                source = each.planned.release.source
                self._settle(source, each.cost(max(each.uses.values())))

    def _settle(self, source: str, costs: Costs) -> None:
        self.settled.setdefault(source, Counter()).update(costs)


def summary(lines: Iterable[Content]) -> list[Content]:
    """Return one object for each release of a run's lines, with how it was used."""
    found: list[Content] = []
    uses: dict[Name, Counter[int]] = {}
    latest: dict[Name, Content] = {}
    for line in lines:
        # a line's number would tell how much else the site has released
        stamp = {key: line[key] for key in ("event", "time")}
        if line["event"] == RESERVE:
            for planned in line["planned"]:
                name = planned["release"]["part"], planned["release"]["what"]
                uses[name] = Counter()
                latest[name] = {**stamp, **planned, "used": 0}
                found.append(latest[name])
        elif line["event"] == SPEND:
            for part, what, key in line["uses"]:
                uses[part, what][key] += 1
                latest[part, what]["used"] = max(uses[part, what].values())
        elif line["event"] in {CHARGE, NOTE}:
            found.append({**stamp, "release": line["release"]})
    return found
