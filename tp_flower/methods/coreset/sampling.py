"""Drawing joined rows by importance without building them.

The law of the sample. Joined row j of N weighs w0_j and has the score

    s_j = sum_i g_i(p_i(j)) + T / W,    W = sum_j w0_j,    total = sum_j w0_j s_j

with T tables. Each of m draws is row j with probability q_j = w0_j s_j / total, and a
draw of it weighs w0_j / (m q_j) = total / (m s_j): the expected weighted sum of any
cost over the sample is sum_j w0_j cost_j.

Drawing needs no joined row at any site. Let G^w_r be the sum of w0 over the joined rows
of row r of table i, and total_i = sum_r G^w_r g_i(r).

    server       a table i with probability total_i / total, or the uniform share
                 with probability T / total                       ``party_counts``
    site of i    a row r with probability G^w_r g_i(r) / total_i  ``draw_rows``
    server       one of the row's joined rows j with probability
                 w0_j / G^w_r; of the uniform share w0_j / W      ``draw_joined``

A draw is joined row j with probability

    sum_i total_i / total * G^w_r g_i(r) / total_i * w0_j / G^w_r  (r = p_i(j))
        + T / total * w0_j / W
    = w0_j / total * (sum_i g_i(p_i(j)) + T / W)  =  q_j

which is Algorithm 1 on the materialised join: there party i draws joined row j with
probability w0_j g_i(p_i(j)) / total_i. Draws of the same joined row are merged.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, Algorithm 1;
    ours: the joined rows' weights, the tables' multiplicities, the server's share.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray, IntArray, effective_rows
from tp_flower.joins.mapping import TableRows

Generator = np.random.Generator


def party_counts(totals: AnyArray, size: int, rng: Generator) -> IntArray:
    """Return each party's number of draws, (T,), from the parties' total scores."""
    sums = np.asarray(totals, np.float64)
    if not np.isfinite(sums).all() or (sums < 0).any() or not sums.any():
        raise ValueError(f"totals {sums.tolist()} must be finite, >= 0, not all 0")
    return rng.multinomial(size, sums / sums.sum())


def draw_rows(weights: AnyArray, count: int, rng: Generator) -> IntArray:
    """Return ``count`` positions, drawn with probabilities in proportion to weights."""
    ends = np.cumsum(weights, dtype=np.float64)
    if not count:
        return np.zeros(0, np.int64)
    if not len(ends) or not ends[-1] > 0:
        raise ValueError(f"cannot draw {count} rows: none has a weight above 0")
    # the first end above the number; a row of weight 0 has an empty interval
    positions: IntArray = np.searchsorted(
        ends, rng.random(count) * ends[-1], side="right"
    )
    return positions


def draw_joined(
    rows: TableRows,
    positions: npt.NDArray[np.integer],
    row_weights: FloatArray | None,
    rng: Generator,
) -> IntArray:
    """Return a joined row for each drawn row of a table, (count,), in the draws' order.

    ``row_weights`` are w0, (N,), None if all are 1: one of the row's joined rows is
    drawn in proportion to w0.

    >>> twice = TableRows(np.array([1, 0, 1], np.int32), 2)
    >>> draw_joined(twice, np.array([0, 0]), None, np.random.default_rng(0)).tolist()
    [1, 1]
    """
    is_hit = np.zeros(rows.rows, np.bool_)
    is_hit[positions] = True
    joined = rows.by_row(is_hit)
    sizes = np.where(is_hit, rows.multiplicity, 0)
    if not sizes[positions].all():
        missing = int((sizes[positions] == 0).sum())
        raise ValueError(f"{missing} drawn rows are in no joined row")
    stops = np.cumsum(sizes)[positions]
    starts = stops - sizes[positions]
    share = rng.random(len(positions))
    if row_weights is None:
        draws = starts + (share * (stops - starts)).astype(np.int64)
    else:
        ends = np.concatenate([[0.0], np.cumsum(row_weights[joined])])
        targets = ends[starts] + share * (ends[stops] - ends[starts])
        draws = np.searchsorted(ends, targets, side="right") - 1
    # a rounding error at the edge of a group must not reach the next group
    rows_drawn: IntArray = joined[np.clip(draws, starts, stops - 1)]
    return rows_drawn


def draw_uniform(
    count: int, joined_rows: int, row_weights: FloatArray | None, rng: Generator
) -> IntArray:
    """Return ``count`` joined rows, each with probability w0_j / W: the server's share.

    Its term T / W of a score (paper: T times 1/n) bounds the weights of the draws.
    """
    if row_weights is None:
        return rng.integers(joined_rows, size=count)
    return draw_rows(row_weights, count, rng)


@dataclass(frozen=True)
class Sample:
    """A weighted sample of joined rows, from m = ``size`` draws.

    The distinct rows ``joined`` (k,) ascend; weighted sums over them, with weights > 0,
    estimate sums over all joined rows. ``counts`` (k,) are their draws.
    """

    joined: IntArray
    counts: IntArray
    weights: FloatArray
    size: int

    @cached_property
    def effective_rows(self) -> float:
        """(sum w)^2 / sum w^2: a mean over so many equal rows is as precise."""
        return effective_rows(self.weights)


def weigh_sample(draws: IntArray, scores: FloatArray, total: float) -> Sample:
    """Return the draws merged, each with the weight total / (m s_j) per draw.

    ``scores`` (k,), s_j > 0, belong to the distinct rows of ``draws`` in ascending
    order, and include the uniform term; ``total`` is the sum of w0_j s_j over all
    joined rows: the totals of the parties plus T for the uniform share.

    >>> sample = weigh_sample(np.array([4, 2, 4]), np.array([0.5, 2.0]), 6.0)
    >>> sample.joined.tolist(), sample.weights.tolist()
    ([2, 4], [4.0, 2.0])
    """
    joined, counts = np.unique(draws, return_counts=True)
    if scores.shape != joined.shape:
        raise ValueError(f"scores have shape {scores.shape}, expected {joined.shape}")
    if not (scores > 0).all():
        raise ValueError("scores of drawn rows must be above 0")
    return Sample(joined, counts, counts * (total / (len(draws) * scores)), len(draws))


def uniform_sample(
    joined_rows: int, size: int, row_weights: FloatArray | None, rng: Generator
) -> Sample:
    """Return ``size`` distinct joined rows, drawn uniformly, with weights w0_j N / m.

    If N is at most ``size``, all rows are taken, with their own weights.
    """
    count = min(size, joined_rows)
    joined = np.sort(rng.choice(joined_rows, count, replace=False, shuffle=False))
    weights = np.ones(count) if row_weights is None else row_weights[joined]
    weights = weights * (joined_rows / count)
    return Sample(joined, np.ones(count, np.int64), weights, count)
