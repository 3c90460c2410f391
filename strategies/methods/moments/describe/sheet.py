"""Survival curves by group, from the moments of two features of intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from strategies.methods.moments.describe.groups import DescribedRows
from strategies.methods.moments.describe.table import entry_of
from tp_flower.arrays import IntArray
from tp_flower.errors import QueryError
from tp_flower.methods.moments.describe import curves
from tp_flower.methods.moments.describe.cells import hidden_sizes
from tp_flower.methods.moments.describe.queries import INTERVAL, INTERVAL_OF_EVENT

Entry = dict[str, Any]
HIDDEN: Final = (
    "Shown are times with {0} events (min-cell) since the one before and {0} rows at "
    "risk. Curves and test are made of all times of the grid."
)
WITHOUT: Final = "{} joined rows without a time or an event are left out."


@dataclass(frozen=True, eq=False)
class CurveSheet:
    """The curves of every group on a grid of times.

    Attributes:
        least: rows and events that are shown.
    """

    rows: DescribedRows
    times: Sequence[float]
    least: int

    def entry(self) -> Entry:
        """Return the report's entries on curves, the log-rank test, and notes."""
        counts = self._counts
        sizes = counts.rows.sum(axis=1)
        events = counts.deaths.sum(axis=1)
        hides = hidden_sizes(sizes, self.least)
        hides_events = (
            hidden_sizes(events, self.least)
            | hidden_sizes(sizes - events, self.least)
            | hides
        )
        names = self.rows.groups.names
        compared = self.rows.groups.compared
        test = curves.log_rank(
            curves.GridCounts(counts.rows[compared], counts.events[compared])
        )
        return {
            "curves": [
                {
                    "group": name,
                    "rows": None if hides[n] else int(sizes[n]),
                    "events": None if hides_events[n] else int(events[n]),
                    "points": [] if hides[n] else list(self._points(n)),
                }
                for n, name in enumerate(names)
            ],
            "log-rank": {
                **entry_of(test.test),
                "groups": [
                    {
                        "group": name,
                        "observed": None if hides_events[n] else int(test.observed[n]),
                        "expected": float(test.expected[n]),
                    }
                    for n, name in enumerate(names[compared])
                ],
            },
            "notes": self._notes(int(sizes.sum())),
        }

    @cached_property
    def _counts(self) -> curves.GridCounts:
        """Rows and events by group and time.

        Raises:
            QueryError: a time is negative, or an event neither 0 nor 1.
        """
        rows, events = (
            self._by_interval(name) for name in (INTERVAL, INTERVAL_OF_EVENT)
        )
        if rows[:, 0].any():
            raise QueryError(
                "some joined rows have a time below 0, or an event that is neither 0 "
                "nor 1: filter them out, or write the event as a condition, such as "
                "s.status = 'died' AS event"
            )
        return curves.GridCounts(rows[:, 1:], events[:, 1:])

    def _by_interval(self, name: str) -> IntArray:
        """Return the rows of groups by interval, (g, m + 2), the invalid first."""
        feature = next(
            feature
            for feature in self.rows.specs
            if feature.endswith(f".{name}") and feature != self.rows.group
        )
        positions = self.rows.columns_of(feature)
        groups = self.rows.groups.columns
        if not len(positions):
            return np.zeros((groups.shape[1], len(self.times) + 2), np.int64)
        # the last is that of a value
        columns = self.rows.unit(positions[:-1])
        return self.rows.counts(columns, groups).T

    def _points(self, group: int) -> Sequence[Entry]:
        """Return the points of a group's curve that are shown."""
        at_risk = self._counts.at_risk[group]
        deaths = self._counts.deaths[group]
        curve = curves.kaplan_meier(at_risk, deaths)
        size = int(self._counts.rows[group].sum())
        points = curves.shown_points(size, at_risk, deaths, self.least)
        return [
            {
                "time": self.times[point.place],
                "at-risk": point.at_risk,
                "events": point.events,
                **{
                    name.rstrip("s"): _of(values[point.place])
                    for name, values in curve._asdict().items()
                },
            }
            for point in points
        ]

    def _notes(self, counted: int) -> list[str]:
        notes = [HIDDEN.format(self.least)] if self.least > 1 else []
        if without := self.rows.joined_rows - counted:
            number = without if without >= self.least else "Some"
            notes.append(WITHOUT.format(number))
        return notes


def _of(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
