"""Statistics as they travel from a site to the server, and what the server checks.

Scalars travel as JSON types, lists as arrays. Texts do not travel.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tp_flower.encoding.categories import MOST_CATEGORIES, CategoryStatistics
from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.quantiles import MOST_POINTS, QuantileSummary, rank_error_of
from tp_flower.encoding.spec import KINDS, Need
from tp_flower.encoding.statistics import (
    ColumnStatistics,
    Moments,
    Range,
    declared_statistics,
)
from tp_flower.errors import SchemaError
from tp_flower.privacy.keyed_hash import HashArray

Item = TypeVar("Item")
Arrays = dict[str, npt.NDArray[Any]]

MOST_WIDTH: Final = 1 << 20  # of a vector
_LARGEST: Final = float(np.finfo(np.float64).max)
_POINTS: Final = "quantile-values"
_WEIGHTS: Final = "quantile-weights"
CATEGORY_HASHES: Final = "category-hashes"
CATEGORY_COUNTS: Final = "category-counts"


def to_wire(
    statistics: Mapping[str, ColumnStatistics],
) -> tuple[list[dict[str, Any]], Arrays]:
    """Return a shard's statistics as JSON types, and arrays named after the feature.

    The j-th feature's arrays are called ``feature-j-...``.
    """
    facts, arrays = [], {}
    for number, (name, own) in enumerate(statistics.items()):
        facts.append({"name": name, **_facts(own)})
        for key, array in _arrays(own).items():
            arrays[f"feature-{number}-{key}"] = array
    return facts, arrays


def _facts(own: ColumnStatistics) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": own.kind}
    if not own.is_declared:
        facts |= {"rows": own.rows, "count": own.count}
    if own.kind == "vector":
        facts["width"] = own.width
    if own.moments is not None:
        facts |= {"mean": own.moments.mean, "m2": own.moments.m2}
    if own.range is not None:
        facts |= {"low": own.range.low, "high": own.range.high}
    if own.categories is not None:
        facts["tail"] = own.categories.tail
    return facts


def _arrays(own: ColumnStatistics) -> Arrays:
    arrays: Arrays = {}
    if own.quantiles is not None:
        arrays |= {_POINTS: own.quantiles.values, _WEIGHTS: own.quantiles.weights}
    if own.categories is not None:
        arrays |= {
            CATEGORY_HASHES: own.categories.hashes,
            CATEGORY_COUNTS: own.categories.counts,
        }
    return arrays


def from_wire(
    facts: Any, arrays: Mapping[str, npt.NDArray[Any]], choice: TableChoice, rows: int
) -> dict[str, ColumnStatistics]:
    """Return a shard's statistics by feature, in the query's order.

    Nothing that came is trusted: types, sizes, order and sums are checked.

    Args:
        facts: what ``to_wire`` made.
        arrays: likewise.
        choice: the encoders that the statistics were asked for.
        rows: the most rows that they can be of.

    Raises:
        SchemaError: they are not statistics of these features and so many rows; says
            what is wrong with which feature.
    """
    return read_features(
        facts,
        arrays,
        list(choice.choices),
        lambda name, fields: _read(fields, choice, name, rows),
    )


def read_features(
    facts: Any,
    arrays: Mapping[str, npt.NDArray[Any]],
    names: Sequence[str],
    read: Callable[[str, "Fields"], Item],
) -> dict[str, Item]:
    """Return what a site said of each feature.

    Args:
        facts: a list of one object per feature, in the order of the names.
        arrays: the j-th feature's are called ``feature-j-...``.
        names: of the features.
        read: a feature, from its name and what was said of it.

    Raises:
        SchemaError: something is said of other features, or ``read`` raised an
            ``ImpossibleError``; names the feature.
    """
    if not isinstance(facts, list):
        raise SchemaError("statistics that are no list of features")
    if len(facts) != len(names):
        raise SchemaError(f"statistics of {len(facts)} features, not of {len(names)}")
    found = {}
    for number, (name, own) in enumerate(zip(names, facts, strict=True)):
        prefix = f"feature-{number}-"
        fields = {
            key.removeprefix(prefix): array
            for key, array in arrays.items()
            if key.startswith(prefix)
        }
        if not isinstance(own, dict) or own.get("name") != name:
            raise SchemaError(f"no statistics of feature {name!r} in its place")
        try:
            found[name] = read(name, Fields(own, fields))
        except ImpossibleError as error:
            raise SchemaError(f"statistics of feature {name!r}: {error}") from None
    return found


class ImpossibleError(ValueError):
    """A statistic that no data have."""


class Fields:
    """What a site said of one feature.

    Every method raises ``ImpossibleError`` where it said nothing under the name, or
    something of another type or out of range.
    """

    def __init__(
        self, facts: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        self._facts, self._arrays = facts, arrays

    def count(self, name: str, most: int, least: int = 0) -> int:
        """Return a whole number."""
        value = self._facts.get(name)
        if type(value) is not int or not least <= value <= most:
            raise ImpossibleError(
                f"{name} must be a whole number from {least} to {most}"
            )
        return value

    def number(self, name: str) -> float:
        """Return a finite number."""
        value: Any = self._facts.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # false for NaN, and for an int of any size
        if not (is_number and abs(value) <= _LARGEST):
            raise ImpossibleError(f"{name} must be a finite number")
        return float(value)

    def kind(self, *, may_be_unknown: bool = False) -> str:
        """Return the kind of value; "" of a column without a type."""
        value = self._facts.get("kind")
        if value == "" and may_be_unknown:
            return ""
        if value not in KINDS:
            raise ImpossibleError(f"kind must be one of {', '.join(KINDS)}")
        return str(value)

    def has_array(self, name: str) -> bool:
        """Return whether there is an array of that name."""
        return name in self._arrays

    def array(
        self, name: str, dtype: str, shape: tuple[int, ...], most: int
    ) -> npt.NDArray[Any]:
        """Return an array of any length up to ``most``, and else of this shape."""
        array = self._arrays.get(name)
        wanted = (dtype, 1 + len(shape), shape)
        if array is None or (array.dtype.name, array.ndim, array.shape[1:]) != wanted:
            raise ImpossibleError(f"no usable array {name}")
        if len(array) > most:
            raise ImpossibleError(f"{name} has {len(array)} entries, more than {most}")
        return array


def _read(
    fields: Fields, choice: TableChoice, name: str, rows: int
) -> ColumnStatistics:
    kind = fields.kind(may_be_unknown=choice.is_declared(name, ""))
    if choice.is_declared(name, kind):
        width = fields.count("width", MOST_WIDTH) if kind == "vector" else 0
        return declared_statistics(choice, name, kind, width)
    own_rows = fields.count("rows", rows)
    count = fields.count("count", own_rows)
    if not count:
        return ColumnStatistics(kind, None, own_rows, 0)
    spec = choice.spec_for(name, kind)
    needs = spec.needs
    return ColumnStatistics(
        kind,
        spec,
        own_rows,
        count,
        moments=_read_moments(fields, count) if Need.MOMENTS in needs else None,
        range=_read_range(fields) if Need.RANGE in needs else None,
        quantiles=_read_quantiles(fields, count) if Need.QUANTILES in needs else None,
        categories=_read_categories(fields, count)
        if Need.CATEGORIES in needs
        else None,
    )


def _read_moments(fields: Fields, count: int) -> Moments:
    m2 = fields.number("m2")
    if m2 < 0:
        raise ImpossibleError(f"m2 must be at least 0, not {m2}")
    return Moments(count, fields.number("mean"), m2)


def _read_range(fields: Fields) -> Range:
    low, high = fields.number("low"), fields.number("high")
    if not 0 <= high - low < math.inf:
        raise ImpossibleError("low and high do not span a range")
    return Range(low, high)


def _read_quantiles(fields: Fields, count: int) -> QuantileSummary:
    values = fields.array(_POINTS, "float64", (), MOST_POINTS)
    weights = fields.array(_WEIGHTS, "int64", (), MOST_POINTS)
    if len(values) != len(weights):
        raise ImpossibleError(
            f"{len(values)} quantile points of {len(weights)} weights"
        )
    if not np.isfinite(values).all() or (np.diff(values) < 0).any():
        raise ImpossibleError("quantile points that are not finite and ascending")
    _check_counts(weights, count)
    return QuantileSummary(values, weights, rank_error_of(weights, count))


def _read_categories(fields: Fields, count: int) -> CategoryStatistics:
    hashes, counts = read_categories(fields, "int64")
    _check_counts(counts, count)
    tail = fields.count("tail", count)
    if (counts <= tail).any():
        raise ImpossibleError(f"categories of no more than tail = {tail} rows")
    return CategoryStatistics(hashes, counts, counts, tail)


def read_categories(fields: Fields, dtype: str) -> tuple[HashArray, npt.NDArray[Any]]:
    """Return the hashes (k, 2) of the categories, in order, and a number of each."""
    hashes = fields.array(CATEGORY_HASHES, "uint64", (2,), MOST_CATEGORIES)
    counts = fields.array(CATEGORY_COUNTS, dtype, (), MOST_CATEGORIES)
    if len(hashes) != len(counts):
        raise ImpossibleError(f"{len(hashes)} categories with {len(counts)} counts")
    first, second = hashes[:, 0], hashes[:, 1]
    is_after = (first[1:] > first[:-1]) | (
        (first[1:] == first[:-1]) & (second[1:] > second[:-1])
    )
    if not is_after.all():
        raise ImpossibleError("categories that are not distinct and in order")
    return hashes, counts


def _check_counts(counts: npt.NDArray[np.int64], total: int) -> None:
    # each is checked first, so that the sum cannot overflow
    if (counts < 1).any() or (counts > total).any() or counts.sum() > total:
        raise ImpossibleError(f"counts that are not of {total} values")
