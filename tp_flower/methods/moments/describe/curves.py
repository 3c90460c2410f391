"""Kaplan-Meier curves and the log-rank test, from counts on a grid of times.

A time counts as the next time of the grid: everything is that of the joined rows with
such times, and exact where times of events are on the grid. Later times are at risk at
all of it.

Notation:
    g  groups        m  times of the grid
    n  rows at risk  d  events
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy import special

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.methods.moments.describe.figures import Test
from tp_flower.objectives.comparison import CONFIDENCE


@dataclass(frozen=True, eq=False)
class GridCounts:
    """Rows and events by group and time, (g, m + 1); the last are beyond the grid."""

    rows: IntArray
    events: IntArray

    @property
    def at_risk(self) -> IntArray:
        """The rows whose time is not before that of the grid, (g, m)."""
        behind: IntArray = np.cumsum(self.rows[:, ::-1], axis=1)[:, ::-1]
        return behind[:, :-1]

    @property
    def deaths(self) -> IntArray:
        """The events at each time of the grid, (g, m)."""
        return self.events[:, :-1]


class Curve(NamedTuple):
    """A group's survival at the times of the grid, with Greenwood's interval, (m,).

    The interval of 95 % is symmetric in the logarithm of survival; NaN where nobody
    survives.
    """

    survival: FloatArray
    errors: FloatArray
    low: FloatArray
    high: FloatArray


def kaplan_meier(at_risk: IntArray, deaths: IntArray) -> Curve:
    """Return the product-limit estimate of a group.

    Source: Kaplan and Meier 1958; Greenwood 1926; the interval as R's `survfit` by
    default, ``conf.type = "log"``.

    >>> kaplan_meier(np.array([10, 6]), np.array([2, 3])).survival.round(2).tolist()
    [0.8, 0.4]
    """
    n: FloatArray = at_risk.astype(np.float64)
    hazards = np.divide(deaths, n, out=np.zeros(len(n)), where=n > 0.0)
    terms = np.divide(deaths, n * (n - deaths), out=np.zeros(len(n)), where=n > deaths)
    survival: FloatArray = np.cumprod(1.0 - hazards, dtype=np.float64)
    relative: FloatArray = np.sqrt(np.cumsum(terms))
    reach = special.ndtri(0.5 + 0.5 * CONFIDENCE) * relative
    low: FloatArray = survival * np.exp(-reach)
    high: FloatArray = survival * np.exp(reach)
    np.minimum(high, 1.0, out=high)
    errors: FloatArray = survival * relative
    is_over = survival <= 0.0
    for values in (low, high, errors):
        values[is_over] = np.nan
    return Curve(survival, errors, low, high)


class LogRank(NamedTuple):
    """The log-rank test: events of every group, observed and expected, (g,)."""

    test: Test | None
    observed: IntArray
    expected: FloatArray


def log_rank(counts: GridCounts) -> LogRank:
    """Return the test of equal hazards; without a test if there is one group.

    Groups without rows do not count.

    Source: Mantel 1966; as R's `survdiff`.
    """
    at_risk, deaths = counts.at_risk, counts.deaths
    total, events = at_risk.sum(axis=0), deaths.sum(axis=0)
    shares = np.divide(
        at_risk, total, out=np.zeros(at_risk.shape), where=total[None, :] > 0
    )
    expected: FloatArray = shares @ events
    observed: IntArray = deaths.sum(axis=1)
    scale = events * (total - events) / np.maximum(total - 1, 1)
    variance = np.diag(shares @ scale) - (shares * scale) @ shares.T
    compared = np.flatnonzero(expected > 0.0)
    test = None
    if len(compared) > 1:
        # the groups' differences add up to 0: one of them follows
        chosen = compared[:-1]
        difference = (observed - expected)[chosen]
        spread = variance[np.ix_(chosen, chosen)]
        solved = scipy.linalg.lstsq(spread, difference)[0]
        statistic = float(difference @ solved)
        freedom = len(chosen)
        p = float(special.chdtrc(freedom, statistic))
        test = Test("log-rank", statistic, (freedom,), p)
    return LogRank(test, observed, expected)


class Point(NamedTuple):
    """A time of the grid that is shown, and the events since the one before.

    Attributes:
        place: of the time in the grid.
        at_risk: None where it would tell of few rows.
    """

    place: int
    events: int
    at_risk: int | None


def shown_points(
    rows: int, at_risk: IntArray, deaths: IntArray, least: int
) -> Sequence[Point]:
    """Return the times between which at least so many events are, of a group.

    From survival at two times and the rows at risk, the events in between follow. At
    the last of them at least so many rows are at risk; and numbers at risk that are
    shown differ by so many, or not at all.

    >>> shown_points(50, np.array([50, 40, 20, 4]), np.array([3, 9, 1, 1]), 10)
    [Point(place=1, events=12, at_risk=40)]
    """
    points = []
    last = rows
    since = 0
    for index, (risk, died) in enumerate(
        zip(at_risk.tolist(), deaths.tolist(), strict=True)
    ):
        since += died
        if least > 1 and (since < least or risk < least):
            continue
        is_told = least > 1 and 0 < last - risk < least
        points.append(Point(index, since, None if is_told else risk))
        last = last if is_told else risk
        since = 0
    return points
