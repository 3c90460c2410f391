"""What encoders are fitted to, estimated from noisy sums: the server's part.

The sums of a table's shards add up, and their noise does. What no data have is mended
at the end, which costs no privacy:

- what may well be noise is taken for nothing: fewer missing values, and fewer rows in
  unlisted categories, than ``SURE`` deviations of their noise;
- means of z and z^2 are drawn towards those of values all over the range (0 and 1/3, as
  widely spread), the more the more noise they have: of noise alone the range is left;
- a mean is within the declared range, and a variance at least the deviation of its own
  noise (so that a scale is never near 0 by chance) and at most what fits the mean;
- where a feature is all in its listed categories, their counts are moved by the same
  amount to sum to what has a value.

Notation
    s   sums of a feature
    k   categories listed
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.encoding.categories import CategoryStatistics, CountArray
from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.columns import FloatArray
from tp_flower.encoding.private_statistics import NoisyFeature
from tp_flower.encoding.row_sums import (
    FeaturePlan,
    Ranges,
    Sum,
    plan_features,
)
from tp_flower.encoding.spec import Need
from tp_flower.encoding.statistics import ColumnStatistics, Moments, Range
from tp_flower.encoding.statistics_wire import (
    CATEGORY_COUNTS,
    CATEGORY_HASHES,
    MOST_WIDTH,
    Arrays,
    Fields,
    ImpossibleError,
    read_categories,
    read_features,
)
from tp_flower.errors import SchemaError
from tp_flower.privacy.keyed_hash import HashArray

SURE: Final = 2.0
"""Deviations of noise from which on a count is taken for more than noise."""

_SUMS: Final = "sums"
_UNIFORM: Final = (0.0, math.sqrt(1 / 3))
_UNIFORM_SQUARE: Final = (1 / 3, math.sqrt(4 / 45))
"""Mean and deviation of z, and of z^2, where z is uniform from -1 to 1."""

_ROUNDING: Final = 1e-12
_LARGEST: Final = 1e15  # of a sum or a count: no table has so many rows


@dataclass(frozen=True, eq=False)
class NoisyShard:
    """A shard's statistics, as they arrived.

    Attributes:
        plans: of its features; they know its kinds of value.
        features: by name.
        rows: that they are of.
        deviation: of the noise on every sum and count.
    """

    plans: tuple[FeaturePlan, ...]
    features: Mapping[str, NoisyFeature]
    rows: int
    deviation: float


def noisy_to_wire(
    features: Mapping[str, NoisyFeature],
) -> tuple[list[dict[str, Any]], Arrays]:
    """Return a shard's statistics as JSON types, and arrays named after the feature.

    The j-th feature's arrays are called ``feature-j-...``.
    """
    facts, arrays = [], {}
    for number, (name, own) in enumerate(features.items()):
        facts.append({"name": name, "kind": own.kind, "width": own.width})
        found = {
            _SUMS: own.sums,
            CATEGORY_HASHES: own.hashes,
            CATEGORY_COUNTS: own.counts,
        }
        for key, array in found.items():
            if array.size:
                arrays[f"feature-{number}-{key}"] = array
    return facts, arrays


def noisy_from_wire(
    facts: Any,
    arrays: Mapping[str, npt.NDArray[Any]],
    choice: TableChoice,
    ranges: Ranges,
) -> tuple[tuple[FeaturePlan, ...], dict[str, NoisyFeature]]:
    """Return a shard's plans and statistics, in the query's order.

    Nothing that came is trusted: types, sizes and order are checked.

    Args:
        facts: what ``noisy_to_wire`` made.
        arrays: likewise.
        choice: the encoders that the statistics were asked for.
        ranges: that were declared.

    Raises:
        SchemaError: they are not statistics of these features; says what is wrong with
            which feature.
        SettingsError: as ``plan_features`` says, of the kinds that the shard has.
    """
    names = list(choice.choices)
    kinds = read_features(facts, {}, names, lambda _, fields: fields.kind())
    plans = plan_features(choice, kinds, ranges)
    by_name = {plan.name: plan for plan in plans}
    features = read_features(
        facts, arrays, names, lambda name, fields: _read(by_name[name], fields)
    )
    return plans, features


def _read(plan: FeaturePlan, fields: Fields) -> NoisyFeature:
    size, width = len(plan.sums), 0
    if plan.kind == "vector":
        width = fields.count("width", MOST_WIDTH)
    sums = fields.array(_SUMS, "float64", (), size) if size else np.zeros(0)
    if len(sums) != size or not _are_moderate(sums):
        raise ImpossibleError(f"sums that are not {size} finite numbers")
    hashes: HashArray = np.zeros((0, 2), np.uint64)
    counts = np.zeros(0)
    if plan.is_listed and fields.has_array(CATEGORY_HASHES):
        hashes, counts = read_categories(fields, "float64")
    if not _are_moderate(counts) or (counts <= 0).any():
        raise ImpossibleError("counts of categories that are not above 0")
    return NoisyFeature(plan.kind, width, sums, hashes, counts)


def _are_moderate(values: FloatArray) -> bool:
    # NaN compares false
    return bool((np.abs(values) <= _LARGEST).all())


def estimate_table(shards: Sequence[NoisyShard]) -> dict[str, ColumnStatistics]:
    """Return the statistics of a table's features, merged over its shards.

    Raises:
        ValueError: there are no shards.
        SchemaError: a feature is of another kind in one shard than in another; names
            the feature.
    """
    if not shards:
        raise ValueError("no statistics to merge")
    return {plan.name: _estimate(_merged(plan, shards)) for plan in shards[0].plans}


@dataclass(frozen=True, eq=False)
class _Merged:
    """A feature's sums over all shards.

    Attributes:
        plan: of the feature.
        width: of a vector.
        rows: n.
        sums: (s,).
        deviation: of each of the sums.
        hashes: (k, 2), ascending.
        counts: (k,).
        counts_deviation: of the sum of the counts.
    """

    plan: FeaturePlan
    width: int
    rows: int
    sums: FloatArray
    deviation: float
    hashes: HashArray
    counts: FloatArray
    counts_deviation: float


def _merged(plan: FeaturePlan, shards: Sequence[NoisyShard]) -> _Merged:
    every = [shard.features[plan.name] for shard in shards]
    widths = {own.width for own in every if own.width}
    for own in every:
        if own.kind != plan.kind or len(widths) > 1:
            raise SchemaError(
                f"feature {plan.name!r} is a {plan.kind} in one shard and a "
                f"{own.kind} in another, or vectors of different lengths: CAST it"
            )
    hashes, place = np.unique(
        np.concatenate([own.hashes for own in every]), axis=0, return_inverse=True
    )
    counts = np.zeros(len(hashes))
    np.add.at(counts, place.ravel(), np.concatenate([own.counts for own in every]))
    noise = [shard.deviation for shard in shards]
    listed = [math.sqrt(len(own.counts)) for own in every]
    return _Merged(
        plan,
        max(widths, default=0),
        sum(shard.rows for shard in shards),
        np.sum([own.sums for own in every], axis=0),
        math.hypot(*noise),
        hashes,
        counts,
        math.hypot(*(a * b for a, b in zip(noise, listed, strict=True))),
    )


def _estimate(own: _Merged) -> ColumnStatistics:
    plan = own.plan
    count = own.rows - _missing(own)
    if count < 1 or (plan.kind == "vector" and not own.width):
        return ColumnStatistics(plan.kind, None, own.rows, 0)
    needs = frozenset() if plan.kind == "vector" else plan.spec.needs
    return ColumnStatistics(
        plan.kind,
        plan.spec,
        own.rows,
        count,
        moments=_moments(own, count) if Need.MOMENTS in needs else None,
        range=_declared(plan) if Need.RANGE in needs else None,
        categories=_categories(own, count) if plan.is_listed else None,
        width=own.width,
    )


def _missing(own: _Merged) -> int:
    """How many values are missing, 0 where it may be noise."""
    if Sum.MISSING not in own.plan.sums:
        return 0
    # of few rows nothing is sure, not even that all are missing
    found = min(float(own.sums[0]), own.rows)
    return round(found) if found > SURE * own.deviation else 0


def _declared(plan: FeaturePlan) -> Range:
    if plan.limits is None:
        raise ValueError(f"no range of feature {plan.name!r}")
    return Range(plan.limits.low, plan.limits.high)


def _moments(own: _Merged, count: int) -> Moments:
    """Return the estimated moments; the widest there are where nothing was summed."""
    sums = dict(zip(own.plan.sums, own.sums.tolist(), strict=True))
    if Sum.VALUE not in sums:
        # of a cycle, or of what stays as it is: only whether it is constant would count
        return Moments(count, 0.0, float(count))
    centre, half = own.plan.scale
    noise = own.deviation / count
    mean, blur = _drawn(sums[Sum.VALUE] / count, noise, *_UNIFORM)
    mean = min(max(mean, -1.0), 1.0)
    if Sum.SQUARE in sums:
        found = sums[Sum.SQUARE] / count + 0.5
        square, blur_of_square = _drawn(found, noise, *_UNIFORM_SQUARE)
        variance = min(square, 1.0) - mean**2
    else:
        # a boolean's square is 1; where a mean is all there is to know, 1 will do
        variance = 1.0 - mean**2 if own.plan.kind == "boolean" else 1.0
        blur_of_square = 0.0
    if variance < _ROUNDING:
        variance = 0.0
    variance = max(variance, math.hypot(blur_of_square, 2.0 * mean * blur))
    return Moments(count, centre + half * mean, count * half**2 * variance)


def _drawn(
    found: float, noise: float, prior: float, spread: float
) -> tuple[float, float]:
    """Return a noisy mean drawn towards what is expected, and the noise that is left.

    Args:
        found: with noise.
        noise: its deviation.
        prior: what is expected of it.
        spread: give or take.
    """
    share = 1.0 / (1.0 + (noise / spread) ** 2)
    return prior + share * (found - prior), noise * math.sqrt(share)


def _categories(own: _Merged, count: int) -> CategoryStatistics:
    """Return the counts as whole numbers, which sum to ``count`` if they may."""
    counts = own.counts
    rest = count - float(counts.sum())
    may_be_noise = SURE * math.hypot(own.deviation, own.counts_deviation)
    is_all = len(counts) > 0 and rest <= may_be_noise
    if is_all:
        counts = counts + rest / len(counts)
    whole: CountArray = np.maximum(np.rint(counts), 1).astype(np.int64)
    if is_all:
        # what rounding has left
        largest = int(whole.argmax())
        whole[largest] = max(1, int(whole[largest]) + count - int(whole.sum()))
    return CategoryStatistics(own.hashes, whole, whole, 0)
