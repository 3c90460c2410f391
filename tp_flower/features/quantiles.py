"""Quantiles of a feature that is spread over shards: mergeable equi-depth summaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.features.columns import FloatArray

CountArray = npt.NDArray[np.int64]

MOST_POINTS: Final = 1000
"""Points of one shard's summary, m."""


@dataclass(frozen=True, eq=False)
class QuantileSummary:
    r"""Some of a feature's values, each standing for a run of consecutive ranks.

    A shard sorts its n values, cuts them into g = min(m, n // min_count) groups of
    consecutive ranks whose sizes differ by at most one (each has min_count values or
    more), and keeps the middle value of each group with the group's size as its
    weight. Merging collects the points of all shards; nothing is thrown away, so the
    order of merging does not matter and the error does not grow with it.

    **Error.** Let F(x) be the number of values <= x over all shards, and W(x) the
    weight of the points <= x. Then |F(x) - W(x)| <= ``rank_error`` for every x: in a
    shard, a group whose values are all <= x or all > x counts right in both, and at
    most one group has values on both sides. If its middle value, at 0-based place
    (s - 1) // 2 of s, is <= x, at least (s - 1) // 2 + 1 of its values are, and W has
    counted s: too many by s // 2 at most. If it is > x, at most (s - 1) // 2 <= s // 2
    of its values are <= x, and W has counted none. So a shard adds at most half its
    largest group, and one with fewer than min_count values, which sends nothing, adds
    those. The same holds for values < x. In terms of the n_q values of shard q:

        rank_error <= sum_q max(ceil(n_q / m), 2 min_count - 1) / 2

    which is (1 / 2m) of all rows, plus at most half a row per shard, unless shards are
    smaller than 2 m min_count. With min_count = 1 and n_q <= m for all q it is 0:
    the quantiles are exact.

    Attributes:
        values: float64 (g,), the points in ascending order.
        weights: int64 (g,), how many values each stands for.
        rank_error: bound on |F - W|.
    """

    values: FloatArray
    weights: CountArray
    rank_error: int

    @property
    def count(self) -> int:
        """How many values the points stand for."""
        return int(self.weights.sum())

    def quantile(self, p: float) -> float:
        """Return the p-quantile of the weighted points, interpolated linearly.

        Of points with weight 1 it is numpy's. In general it is a value x with
        F(x) >= floor(r) + 1 - rank_error, and fewer than ceil(r) + 1 + rank_error
        values below it, where r = p * (count - 1).

        Raises:
            ValueError: there are no points.
        """
        if not len(self.values):
            raise ValueError("a summary without points has no quantiles")
        rank = p * (self.count - 1)
        ends = np.cumsum(self.weights)
        below, above = self.values[
            np.searchsorted(ends, [np.floor(rank), np.ceil(rank)], side="right")
        ]
        share = rank - np.floor(rank)
        # below + share * (above - below) could overflow
        between = (1 - share) * below + share * above
        return float(min(max(between, below), above))


def summarise(values: FloatArray, min_count: int = 1) -> QuantileSummary:
    """Return the summary of a shard's values.

    Args:
        values: (n,), finite.
        min_count: the fewest values that a point may stand for.
    """
    groups = min(MOST_POINTS, len(values) // min_count)
    if not groups:
        nothing = np.zeros(0, dtype=np.int64)
        return QuantileSummary(np.zeros(0), nothing, len(values))
    edges = np.arange(groups + 1, dtype=np.int64) * len(values) // groups
    points = np.sort(values)[(edges[:-1] + edges[1:] - 1) // 2]
    weights = np.diff(edges)
    return _ordered(points, weights, rank_error_of(weights, len(values)))


def rank_error_of(weights: CountArray, count: int) -> int:
    """Return the error that a shard's points add, for its ``count`` values."""
    return int(weights.max(initial=0)) // 2 + count - int(weights.sum())


def merge_quantiles(summaries: Sequence[QuantileSummary]) -> QuantileSummary:
    """Return the summary of the union of the shards' values, in any order."""
    values = np.concatenate([summary.values for summary in summaries])
    weights = np.concatenate([summary.weights for summary in summaries])
    return _ordered(values, weights, sum(own.rank_error for own in summaries))


def _ordered(
    values: FloatArray, weights: CountArray, rank_error: int
) -> QuantileSummary:
    """Return the summary of these points; equal points go by weight.

    So a summary is the same in whatever order it was merged, or not merged at all.
    """
    order = np.lexsort((weights, values))
    return QuantileSummary(values[order], weights[order], rank_error)
