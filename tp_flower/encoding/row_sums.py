"""What a row adds to the private statistics of its part, and how much that can be.

Every row adds one vector to a sum. Of a feature it has those of these entries that its
encoder is fitted to:

    missing     1 where there is no value, else 0
    value       z, the value's place in its declared range, from -1 (low) to 1 (high);
                outside of it the nearer end; 0 where missing
    square      z^2 - 1/2; 0 where missing, and not there for a boolean: it is 1/2
    categories  1 at the row's category, of all texts that there might be

A range, bins, a cycle or a hash are no statistics: the declared range, or nothing, is
enough for them.

The vector's norm is at most ``C = sqrt(sum of c_f^2)``. With a square,
``z^2 + (z^2 - 1/2)^2 = z^4 + 1/4``, so that ``c_f^2 = 5/4``; otherwise no more than one
entry of a feature is not 0, and that is at most 1, so that ``c_f^2 = 1``.

Notation
    n   rows of the part
    s   sums of a feature
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.columns import FeatureColumn, FloatArray
from tp_flower.encoding.derived import derive
from tp_flower.encoding.ranges import EXAMPLE, Limits
from tp_flower.encoding.spec import EncoderSpec, Need
from tp_flower.errors import SettingsError

Ranges = Mapping[str, Limits]

BLOCK_ROWS: Final = 1 << 18
"""Rows whose contributions are held at a time."""

_BOOLEAN: Final = Limits(0.0, 1.0)
_WITH_SQUARE: Final = 1.25
_OF_SPREAD: Final = ("standard", "length")


class Sum(StrEnum):
    """What is summed over the rows."""

    MISSING = "missing"
    VALUE = "value"
    SQUARE = "square"


@dataclass(frozen=True)
class FeaturePlan:
    """What a feature adds to the vector of a row.

    Attributes:
        name: of the feature.
        kind: of value.
        spec: of its encoder, in full.
        limits: of its values, or of what is derived from them; None: not needed.
    """

    name: str
    kind: str
    spec: EncoderSpec
    limits: Limits | None = None

    @property
    def sums(self) -> tuple[Sum, ...]:
        """What is summed, in this order."""
        takes_spread = self.spec.kind in _OF_SPREAD
        takes_mean = takes_spread or self.spec.missing == "mean"
        if self.kind == "vector":
            takes_spread = takes_mean = False
        wanted = {
            Sum.MISSING: takes_mean or self.is_listed or self.spec.indicator,
            Sum.VALUE: takes_mean,
            Sum.SQUARE: takes_spread and self.kind != "boolean",
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def is_listed(self) -> bool:
        """Whether its categories are counted."""
        return self.kind != "vector" and Need.CATEGORIES in self.spec.needs

    @property
    def needs(self) -> frozenset[Need]:
        """What leaves with noise, beside how many values are missing."""
        found = {Need.MOMENTS} if Sum.VALUE in self.sums else set()
        return frozenset(found | ({Need.CATEGORIES} if self.is_listed else set()))

    @property
    def bound_squared(self) -> float:
        """The largest squared norm of what a row adds, c_f^2."""
        if Sum.SQUARE in self.sums:
            return _WITH_SQUARE
        return 1.0 if self.sums else 0.0

    def sums_of(self, column: FeatureColumn) -> FloatArray:
        """Return the sums over a column's rows, (s,).

        Raises:
            SchemaError: the column is of another kind; names the feature.
        """
        total = np.zeros(len(self.sums))
        if not self.sums:
            return total
        if Sum.VALUE in self.sums:
            values = derive(self.name, column, self.spec).values
        else:
            values = np.where(column.is_missing, np.nan, 0.0)
        for start in range(0, len(values), BLOCK_ROWS):
            block = values[start : start + BLOCK_ROWS]
            total += self.contributions(block).sum(axis=0)
        return total

    def contributions(self, values: FloatArray) -> FloatArray:
        """Return what each row adds to the sums, (n, s).

        Args:
            values: (n,), or what is derived from them; NaN where missing.
        """
        added = np.zeros((len(values), len(self.sums)))
        missing = added[:, 0] = np.isnan(values)
        if Sum.VALUE in self.sums:
            added[:, 1] = np.where(missing, 0.0, self.places(values))
        if Sum.SQUARE in self.sums:
            added[:, 2] = np.where(missing, 0.0, added[:, 1] ** 2 - 0.5)
        return added

    def places(self, values: FloatArray) -> FloatArray:
        """Return the places of values in the range, from -1 to 1; NaN stays."""
        centre, half = self.scale
        with np.errstate(over="ignore"):
            # what is beyond any float is beyond the range
            return np.clip((values - centre) / half, -1.0, 1.0)

    @property
    def scale(self) -> tuple[float, float]:
        """The middle of the range, and half its width."""
        if self.limits is None:
            raise ValueError(f"no range of feature {self.name!r}")
        half = self.limits.high / 2 - self.limits.low / 2
        return self.limits.low + half, half


def plan_features(
    choice: TableChoice, kinds: Mapping[str, str], ranges: Ranges
) -> tuple[FeaturePlan, ...]:
    """Return what is summed of each feature of a table.

    Args:
        choice: the encoders of the table.
        kinds: of value, by feature.
        ranges: declared, by feature.

    Raises:
        SchemaError: an encoder does not fit its feature.
        SettingsError: an encoder takes quantiles, or a feature has no range of the
            kind that it needs; lists all such features.
    """
    plans = [_plan(choice, name, kind, ranges) for name, kind in kinds.items()]
    if problems := feature_problems(choice, kinds, ranges):
        raise no_private_statistics(problems)
    return tuple(plans)


def feature_problems(
    choice: TableChoice, kinds: Mapping[str, str], ranges: Ranges
) -> list[str]:
    """Return why features have no private statistics; arguments as above.

    Raises:
        SchemaError: an encoder does not fit its feature.
    """
    found = {
        name: _problem(_plan(choice, name, kind, ranges), ranges.get(name))
        for name, kind in kinds.items()
    }
    return [f"{choice.table}.{name}: {text}" for name, text in found.items() if text]


def no_private_statistics(problems: Sequence[str]) -> SettingsError:
    """Return the error that lists the features' problems."""
    return SettingsError(
        "private statistics (privacy.statistics) are not possible of:\n  - "
        + "\n  - ".join(problems)
    )


def _plan(choice: TableChoice, name: str, kind: str, ranges: Ranges) -> FeaturePlan:
    spec = choice.spec_for(name, kind)
    return FeaturePlan(name, kind, spec, _limits(kind, spec, ranges.get(name)))


def _limits(kind: str, spec: EncoderSpec, declared: Limits | None) -> Limits | None:
    return _BOOLEAN if kind == "boolean" and spec.kind != "length" else declared


def _problem(plan: FeaturePlan, declared: Limits | None) -> str:
    spec, is_length = plan.spec, plan.spec.kind == "length"
    if plan.kind == "vector":
        return ""
    if Need.QUANTILES in spec.needs:
        return (
            f"encoder {spec} takes quantiles, which do not leave with noise: use "
            "standard, min-max or bins, and missing=mean or missing=zero"
        )
    if Sum.VALUE not in plan.sums and Need.RANGE not in spec.needs:
        return ""
    if plan.limits is None:
        what = "the length of its texts" if is_length else "it"
        return f"{what} needs a range in privacy.ranges, as in {EXAMPLE}"
    is_time = plan.kind == "time"
    if declared is not None and declared.is_time != is_time:
        return f"it is a {plan.kind}: its range must be of {_ENDS[is_time]}"
    return ""


_ENDS: Final = {True: "dates such as 1950-01-01", False: "numbers"}


def sensitivity(plans: Sequence[FeaturePlan]) -> float:
    """Return C, the largest norm of a row's vector.

    >>> from tp_flower.encoding.spec import EncoderSpec
    >>> number = FeaturePlan("x", "number", EncoderSpec("standard"), Limits(0.0, 1.0))
    >>> round(sensitivity([number] * 4) ** 2, 6)
    5.0
    """
    return math.sqrt(sum(plan.bound_squared for plan in plans))
