"""A table of the joined rows: means, deviations and shares of every column, by group.

Of what is hidden nothing is in the report. A count is, and so is a mean of so many
values; how many are missing is no secret where none are.

Notation:
    c  groups, and all rows as the first where there are groups        r  categories
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from strategies.methods.moments.describe.groups import ALL, DescribedRows, whole
from tp_flower.arrays import AnyArray, BoolArray, FloatArray, IntArray
from tp_flower.features.spec import EncoderSpec
from tp_flower.methods.moments.describe import figures
from tp_flower.methods.moments.describe.cells import hidden_cells
from tp_flower.methods.moments.describe.encoders import CATEGORIES, NUMBERS, scale_of

Entry = dict[str, Any]
EVENTS: Final = ("true", "1", "1.0")
"""Categories that say that there is an event."""
HIDDEN: Final = (
    "Counts below {} are hidden (min-cell), others so that sums do not tell them, and "
    "what is of such rows; a variable with a hidden cell has no test."
)
IMPRECISE: Final = (
    "{0}: its deviation is small beside its mean, and {1}: unless it is constant, "
    "declare its range, encoders = '{0}=range(<low>, <high>)', or subtract a constant "
    "in the query."
)
NO_RATE: Final = (
    "No rate of events: {} joined rows have no time, or do not say whether they have "
    "an event."
)


@dataclass(frozen=True, eq=False)
class TableOne:
    """The figures of every feature, in groups.

    Attributes:
        least: rows that are shown.
        sharded: the tables in several shards.
        times: the features of the time and of the event, if the query names them.
    """

    rows: DescribedRows
    least: int
    sharded: frozenset[str]
    times: tuple[str, str] | None = None

    def entry(self) -> Entry:
        """Return the report's entries on groups, variables, and notes."""
        visible = self._shown(self._sizes[None, self._own])[0]
        names = [ALL] * self._has_groups + list(self.rows.groups.names)
        variables = [
            self._number(feature) if self._is_number(feature) else self._shares(feature)
            for feature in self.rows.specs
            if feature != self.rows.group
        ]
        rates = [] if self.times is None else list(self._rates(*self.times))
        return {
            "groups": [
                {"name": name, "rows": _of(size, is_shown)}
                for name, size, is_shown in zip(
                    names, self._sizes, visible, strict=True
                )
            ],
            "variables": variables + rates,
            "notes": list(self._notes()),
        }

    @property
    def _has_groups(self) -> bool:
        return bool(self.rows.group)

    @property
    def _own(self) -> slice:
        """The groups themselves, without all rows."""
        return slice(int(self._has_groups), None)

    @property
    def _compared(self) -> slice:
        """The groups that tests compare."""
        return slice(1, 1 + self.rows.groups.compared.stop)

    @cached_property
    def _groups(self) -> FloatArray:
        """The columns of all rows and of the groups, (D, c)."""
        columns = self.rows.groups.columns
        if not self._has_groups:
            return columns
        return np.concatenate([self.rows.every, columns], axis=1)

    @cached_property
    def _sizes(self) -> IntArray:
        """The number of rows of each, (c,)."""
        return self.rows.rows_of(self._groups)

    def _shown(self, counts: IntArray) -> BoolArray:
        """Return which counts (r, groups) are shown, with all rows, (r, c)."""
        is_shown: BoolArray = ~hidden_cells(counts, self.least)[:-1]
        if not self._has_groups:
            return is_shown[:, :1]
        return np.concatenate([is_shown[:, -1:], is_shown[:, :-1]], axis=1)

    def _is_number(self, feature: str) -> bool:
        return self.rows.specs[feature].kind in NUMBERS

    def _spread(self, feature: str) -> tuple[IntArray, figures.Spread]:
        """Return the rows with a value and their spread, in the unit of the column."""
        positions = self.rows.columns_of(feature)
        if not len(positions):
            nothing = np.zeros(len(self._sizes), np.int64)
            return nothing, figures.spread_of(nothing, *np.zeros((2, len(nothing))))
        sums, squares = self.rows.sums(self.rows.unit(positions[:2]), self._groups)
        counts = self._sizes
        if self.rows.specs[feature].present:
            present = self.rows.unit(positions[-1:])
            counts = self.rows.count(present, self._groups)
        rounding = self._rounding(feature)
        return counts, figures.spread_of(counts, sums, squares, rounding)

    def _rounding(self, feature: str) -> float:
        is_sharded = feature.partition(".")[0] in self.sharded
        return figures.rounding(self.rows.joined_rows, is_sharded=is_sharded)

    def _number(self, feature: str) -> Entry:
        """Return the entry of a number."""
        counts, spread = self._spread(feature)
        missing = self._sizes - counts
        is_shown = self._shown(self._beside(counts[None, :], missing)[:, self._own])
        test = None
        if self._has_groups and is_shown.all():
            test = figures.analysis_of_variance(
                counts[self._compared],
                figures.Spread(*(values[self._compared] for values in spread)),
            )
        centre, unit = scale_of(self.rows.specs[feature])
        has_mean, is_told = is_shown[0], is_shown[-1]
        cells = _cells(
            count=(counts, has_mean),
            mean=(centre + unit * spread.means, has_mean),
            deviation=(unit * spread.deviations, has_mean),
            missing=(missing, is_told),
        )
        row = {"category": "", "cells": cells}
        return {"variable": feature, "kind": "number", **entry_of(test), "rows": [row]}

    def _shares(self, feature: str) -> Entry:
        """Return the entry of categories."""
        names, columns, present = self.rows.categories(feature)
        counts = self.rows.counts(columns, self._groups)
        missing = self._sizes - self.rows.count(present, self._groups)
        is_shown = self._shown(self._beside(counts, missing)[:, self._own])
        test = None
        if self._has_groups and is_shown.all() and names:
            test = figures.chi_squared(counts[:, self._compared])
        shares = figures.shares_of(counts)
        rows = [
            {
                "category": name,
                "cells": _cells(
                    count=(counts[row], is_shown[row]),
                    share=(shares.shares[row], is_shown[row]),
                    low=(shares.low[row], is_shown[row]),
                    high=(shares.high[row], is_shown[row]),
                    missing=(missing, is_shown[-1]),
                ),
            }
            for row, name in enumerate(names)
        ]
        return {"variable": feature, "kind": "category", **entry_of(test), "rows": rows}

    def _beside(self, counts: IntArray, missing: IntArray) -> IntArray:
        """Return counts (r, c) with the row of missing values, if there are some."""
        if not missing.any():
            return counts
        return np.concatenate([counts, missing[None, :]])

    def _rates(self, time: str, event: str) -> Iterator[Entry]:
        """Yield the entry of events per unit of time, if every row has both."""
        if self._without(time, event):
            return
        counts, spread = self._spread(time)
        centre, unit = scale_of(self.rows.specs[time])
        times = counts * (centre + unit * np.nan_to_num(spread.means))
        events = self._events(event)
        others = self._sizes - events
        is_shown = self._shown(np.stack([events, others])[:, self._own])[0]
        rates = figures.rates_of(events, times)
        test = None
        if self._has_groups and is_shown.all():
            test = figures.equal_rates(events[self._compared], times[self._compared])
        cells = _cells(
            events=(events, is_shown),
            time=(times, is_shown),
            rate=(rates.rates, is_shown),
            low=(rates.low, is_shown),
            high=(rates.high, is_shown),
        )
        row = {"category": "", "cells": cells}
        yield {"variable": "rate", "kind": "rate", **entry_of(test), "rows": [row]}

    def _events(self, event: str) -> IntArray:
        """Return the number of rows with an event, (c,)."""
        spec = self.rows.specs[event]
        positions = self.rows.columns_of(event)
        if not self._is_number(event):
            category = event_category(spec) or 0
            column = self.rows.unit(positions[category : category + 1])
            return self.rows.count(column, self._groups)
        counts, spread = self._spread(event)
        centre, unit = scale_of(spec)
        sums = counts * (centre + unit * np.nan_to_num(spread.means))
        return whole(sums)

    def _without(self, time: str, event: str) -> int:
        """Return how many rows have no time, or none of whether they have an event."""
        missing = [
            self.rows.joined_rows - int(self._present(feature))
            for feature in (time, event)
        ]
        return max(missing)

    def _present(self, feature: str) -> int:
        if self._is_number(feature):
            return int(self._spread(feature)[0][0])
        present = self.rows.categories(feature).present
        return int(self.rows.count(present, self._groups)[0])

    def _notes(self) -> Iterator[str]:
        """Yield what is to be said of the figures."""
        if self.least > 1:
            yield HIDDEN.format(self.least)
        for feature in filter(self._is_number, self.rows.specs):
            # of all rows: in a small group values may be equal
            counts, spread = self._spread(feature)
            error = float(spread.errors[0])
            if error > figures.NOTABLE and counts[0] > 1 and spread.means[0]:
                precision = f"right to about {error:.0%}"
                if np.isinf(error):
                    precision = "nothing but rounding is left of it"
                yield IMPRECISE.format(feature, precision)
        if self.times is not None and (missing := self._without(*self.times)):
            yield NO_RATE.format(missing if missing >= self.least else "some")


def _cells(**values: tuple[AnyArray, BoolArray]) -> list[Entry]:
    """Return a cell for each group, of figures (c,) that are shown or not."""
    some, _ = next(iter(values.values()))
    return [
        {
            name: _of(figure[n], is_shown[n])
            for name, (figure, is_shown) in values.items()
        }
        for n in range(len(some))
    ]


def _of(value: Any, is_shown: Any) -> int | float | None:
    """Return a number for the report; None of what is hidden, or is none."""
    if not is_shown or not np.isfinite(value):
        return None
    return int(value) if isinstance(value, np.integer) else float(value)


def event_category(spec: EncoderSpec) -> int | None:
    """Return which declared category says that there is an event; None if none does."""
    if spec.kind != CATEGORIES:
        return None
    places = (n for n, name in enumerate(spec.categories) if name.lower() in EVENTS)
    return next(places, None)


def entry_of(test: figures.Test | None) -> Entry:
    """Return a test as the report has it."""
    if test is None:
        return {"test": "", "statistic": None, "freedom": [], "p": None}
    return {
        "test": test.name,
        "statistic": test.statistic,
        "freedom": list(test.freedom),
        "p": test.p,
    }
