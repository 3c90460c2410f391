"""Statistics of features with Gaussian noise: what encoders are fitted to, privately.

The vectors that the rows of a part add up to (``row_sums``) leave with noise. From them
and the number of rows, which the server knows, it estimates what encoders take
(``noisy_statistics``).

Notation
    C   the largest norm of a row's vector, ``row_sums.sensitivity``
    s   sums of a feature
    k   categories of a feature: those that some row has, or those listed

Guarantee
    unit         a row, as the query's fragment yields it
    neighbours   the row's vector is added, or zeros are (zero-out)
    sensitivity  C
    mechanism    one Gaussian of deviation ``multiplier C`` over the whole vector
    categories   which texts there are is data: only counts that are not 0 get noise,
                 and only noisy counts above a threshold are listed. One that a single
                 row has passes it with probability ``chance / (features with
                 categories)`` at most, so that anything of a row that no other row has
                 shows with probability ``chance``, which is added to delta
    not covered  the number of rows, types, and the length of vectors

    ============================  =================================================
    a value outside its range     counts as the end of the range
    an infinite value             likewise
    a part without rows           zeros, which need no noise
    multiplier 0                  the exact sums, and every category of min_count
    ============================  =================================================

Reference: Korolova et al. 2009, "Releasing search queries and clicks privately"
(thresholds); Wilkins et al. 2024, "Exact privacy analysis of the Gaussian sparse
histogram mechanism". That the deltas add up holds as the noise on counts is
independent: whether a text that nobody else has is shown is a release of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy.special import ndtri

from tp_flower.encoding.categories import (
    MOST_CATEGORIES,
    PositionArray,
    category_purpose,
    short_hashes,
)
from tp_flower.encoding.columns import FeatureColumn, FloatArray, VectorColumn
from tp_flower.encoding.derived import categories_of
from tp_flower.encoding.row_sums import FeaturePlan, sensitivity
from tp_flower.encoding.statistics import Sample
from tp_flower.privacy.keyed_hash import HashArray
from tp_flower.privacy.noise import GRID_BITS, NoiseSource

ReadColumn = Callable[[str], FeatureColumn]


@dataclass(frozen=True)
class Noise:
    """The noise on a part's statistics.

    Attributes:
        multiplier: deviation over C, >= 0.
        chance: with which something of a row that no other has may show, in (0, 1).
        source: of the noise.
    """

    multiplier: float
    chance: float
    source: NoiseSource


@dataclass(frozen=True, eq=False)
class NoisyFeature:
    """What leaves of a feature.

    Attributes:
        kind: of value.
        width: length of a vector, 0 if there is none; 0 for other kinds.
        sums: float64 (s,), in the order of ``FeaturePlan.sums``.
        hashes: uint64 (k, 2), of the listed categories, in ascending order.
        counts: float64 (k,), their noisy counts.
    """

    kind: str
    width: int
    sums: FloatArray
    hashes: HashArray
    counts: FloatArray


def rare_threshold(deviation: float, chance: float, listed: int) -> float:
    """Return the noisy count from which on a category is listed.

    Args:
        deviation: of the noise on counts.
        chance: see ``Noise``.
        listed: features with categories, >= 1.

    >>> round(rare_threshold(10.0, 1e-6, listed=1), 1)  # 1 + 10 x 4.753
    48.5
    """
    # noisy counts lie on a grid: rounding must not lift any above the threshold
    quantile = float(-ndtri(chance / listed)) + 2.0**-GRID_BITS
    return 1.0 + deviation * max(quantile, 0.0)


@dataclass(frozen=True, eq=False)
class ExactFeature:
    """What the rows of a part add up to, without noise: it does not leave.

    Attributes:
        sums: float64 (s,).
        texts: (k,), the categories that some row has; none where they do not count.
        counts: float64 (k,), rows of each.
        width: length of a vector, 0 if there is none; 0 for other kinds.
    """

    sums: FloatArray
    texts: pa.Array
    counts: FloatArray
    width: int = 0


def exact_feature(plan: FeaturePlan, column: FeatureColumn) -> ExactFeature:
    """Return what rows add up to.

    Raises:
        SchemaError: the column is of another kind; names the feature.
    """
    sums = plan.sums_of(column)
    width = column.width if isinstance(column, VectorColumn) else 0
    if not plan.is_listed:
        return ExactFeature(sums, pa.array([], pa.string()), np.zeros(0), width)
    found = categories_of(column, plan.name)
    counts = np.bincount(found.codes[found.codes >= 0], minlength=len(found.texts))
    present = np.flatnonzero(counts)
    texts = found.texts.take(pa.array(present))
    return ExactFeature(sums, texts, counts[present].astype(np.float64))


def private_statistics(
    plans: Sequence[FeaturePlan],
    read: ReadColumn,
    sample: Sample,
    table: str,
    noise: Noise,
) -> dict[str, NoisyFeature]:
    """Return what leaves of a part's features.

    Args:
        plans: of the features.
        read: a feature's column, by name.
        sample: of its rows; its ``min_count`` is one of noisy counts.
        table: alias in the query.
        noise: on all of it.

    Raises:
        SchemaError: a column is of another kind than its plan; names the feature.
    """
    deviation = noise.multiplier * sensitivity(plans)
    listed = sum(plan.is_listed for plan in plans)
    least = float(sample.min_count)
    if listed:
        least = max(least, rare_threshold(deviation, noise.chance, listed))
    found = {}
    for plan in plans:
        column = read(plan.name)
        if sample.rows is not None:
            column = column.take(sample.rows)
        exact = exact_feature(plan, column)
        sums = noise.source.with_gaussian(exact.sums, deviation)
        counts = noise.source.with_gaussian(exact.counts, deviation)
        shown = _shown(counts, least)
        hashes: HashArray = np.zeros((0, 2), np.uint64)
        if len(shown):
            hasher = sample.hasher.purpose(category_purpose(table, plan.name))
            hashes = short_hashes(exact.texts.take(pa.array(shown)), hasher)
        # in the order of the hashes: theirs says nothing about that of the texts
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        listed_counts = counts[shown][order]
        found[plan.name] = NoisyFeature(
            plan.kind, exact.width, sums, hashes[order], listed_counts
        )
    return found


def _shown(counts: FloatArray, least: float) -> PositionArray:
    """Return the positions of the counts to list: the largest if there are many."""
    shown = np.flatnonzero(counts >= least)
    if len(shown) > MOST_CATEGORIES:
        ranked = np.argsort(-counts[shown], kind="stable")
        shown = shown[ranked[:MOST_CATEGORIES]]
    return shown
