"""A run as curves: what its test metric had cost by the end of every epoch.

Costs are counted from the start of the run, set-up included. Communication is modelled
as in the papers (section 6.3): latency per round plus bytes over bandwidth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from strategies.report_page.costs import US_UK, US_US, Network
from tp_flower.reports.records import RoundReport

TOLERANCE = 0.01
FINE_TOLERANCE = 0.001
HIGHER_IS_BETTER = frozenset({"auc", "accuracy", "r2"})

SET_UP = 0

PAPER_NETWORKS = (
    US_UK,
    US_US,
    Network("US-East, US-West", 0.063, 8 * 60.0e6),
    Network("US-West, EU", 0.153, 8 * 26.2e6),
    Network("US-East, EU", 0.110, 8 * 33.8e6),
)
"""The last three are what the paper measured between AWS regions (Table 8)."""


@dataclass(frozen=True)
class Cost:
    """What some rounds took.

    Attributes:
        rounds: how many.
        bytes: all that travelled, both ways, headers included.
        server_seconds: computing at the server.
        client_seconds: computing at the slowest site of each round.
    """

    rounds: int = 0
    bytes: int = 0
    server_seconds: float = 0.0
    client_seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        """Return the cost of both."""
        return Cost(
            self.rounds + other.rounds,
            self.bytes + other.bytes,
            self.server_seconds + other.server_seconds,
            self.client_seconds + other.client_seconds,
        )

    @property
    def compute_seconds(self) -> float:
        """Seconds that someone computed while all others waited."""
        return self.server_seconds + self.client_seconds

    def communication_seconds(self, network: Network) -> float:
        """Return the modelled seconds on a network.

        >>> Cost(rounds=2, bytes=125).communication_seconds(Network("n", 0.1, 1e4))
        0.3
        """
        return network.seconds(self.rounds, self.bytes)


@dataclass(frozen=True)
class Curve:
    """The epochs of a run.

    Attributes:
        metric: the test metric after every epoch; NaN where it was not computed.
        costs: from the start of the run to the end of every epoch.
        set_up: the part of them before the first epoch.
    """

    metric: tuple[float, ...]
    costs: tuple[Cost, ...]
    set_up: Cost

    @property
    def per_epoch(self) -> Cost:
        """The cost of an epoch, on average (rounds and bytes to whole numbers)."""
        epochs, last = len(self.costs), self.costs[-1]
        return Cost(
            round((last.rounds - self.set_up.rounds) / epochs),
            round((last.bytes - self.set_up.bytes) / epochs),
            (last.server_seconds - self.set_up.server_seconds) / epochs,
            (last.client_seconds - self.set_up.client_seconds) / epochs,
        )

    def reached(self, metric: str, reference: float, tolerance: float) -> int:
        """Return the first epoch, from 1, that `is_within`; 0 if none is."""
        for epoch, value in enumerate(self.metric, start=1):
            if is_within(value, metric, reference, tolerance):
                return epoch
        return 0

    def to_json(self) -> dict[str, object]:
        """Return lists by name."""
        return {
            "metric": list(self.metric),
            "rounds": [cost.rounds for cost in self.costs],
            "bytes": [cost.bytes for cost in self.costs],
            "server-seconds": [cost.server_seconds for cost in self.costs],
            "client-seconds": [cost.client_seconds for cost in self.costs],
            "set-up": list(vars(self.set_up).values()),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Curve":
        """Return the curve that was written."""
        names = ("rounds", "bytes", "server-seconds", "client-seconds")
        costs = zip(*(content[name] for name in names), strict=True)
        metric = (math.nan if value is None else value for value in content["metric"])
        return cls(
            tuple(metric),
            tuple(Cost(*values) for values in costs),
            Cost(*content["set-up"]),
        )


def is_within(
    value: float, metric: str, reference: float, tolerance: float = TOLERANCE
) -> bool:
    """Whether a test metric is within a relative tolerance of a reference.

    At tolerance 0.01, an RMSE or a loss of at most 1.01 times the reference is, and so
    is an AUC, an accuracy or an R2 of at least 0.99 times it. What is better than the
    reference always is; NaN never is.

    >>> is_within(1.009, "rmse", 1.0), is_within(0.692, "auc", 0.7)
    (True, False)
    """
    if metric in HIGHER_IS_BETTER:
        return value >= (1.0 - tolerance) * reference
    return value <= (1.0 + tolerance) * reference


def curve_of(history: Sequence[RoundReport], metric: str) -> Curve:
    """Return the curve of a finished run.

    Rounds after the last epoch, which only end the run, do not count.
    """
    epochs = max(item.epoch for item in history)
    costs = {epoch: Cost() for epoch in range(epochs + 1)}
    values = dict.fromkeys(range(1, epochs + 1), math.nan)
    for item in history:
        if item.epoch == SET_UP and costs[1].rounds:
            continue
        costs[item.epoch] += round_cost(item)
        if metric in item.test:
            values[item.epoch] = float(item.test[metric])
    sums = tuple(accumulate(costs.values()))
    return Curve(tuple(values.values()), sums[1:], sums[0])


def round_cost(item: RoundReport) -> Cost:
    """Return the cost of one round."""
    sent = sum(item.bytes_up.values()) + sum(item.bytes_down.values())
    return Cost(1, sent + item.overhead_bytes, item.server_seconds, item.client_seconds)


def phase_seconds(history: Sequence[RoundReport]) -> dict[str, list[float]]:
    """Return seconds at the server, at the slowest site, and of waiting, by phase.

    Phases of set-up go by their names; all rounds of training are ``"epochs"``.
    """
    phases: dict[str, list[float]] = {}
    for item in history:
        spent = (item.server_seconds, item.client_seconds, item.wait_seconds)
        total = phases.setdefault("epochs" if item.epoch else item.phase, [0.0] * 3)
        for place, seconds in enumerate(spent):
            total[place] += seconds
    return phases
