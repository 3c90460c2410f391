"""Figures of groups, from sums over their rows.

Notation:
    c  groups        r  categories        n  rows with a value
"""

from typing import Final, NamedTuple

import numpy as np

from tp_flower.arrays import FloatArray, IntArray
from tp_flower.objectives.comparison import CONFIDENCE, wilson_interval

FLOAT_ROUNDING: Final = 2.0**-23
"""Of an encoded value, relative to it: it is stored in 24 bits."""
WORD_ROUNDING: Final = 2.0**-32
COMMON_ROUNDING: Final = 2.0**-27
"""Of a column in fixed point, relative to the root of its sum of squares: with bits of
its own, and with bits that its table's shards have in common."""
NOTABLE: Final = 0.01


class Test(NamedTuple):
    """A test of whether groups differ.

    Attributes:
        freedom: degrees; of F those of the groups, then those within.
    """

    name: str
    statistic: float
    freedom: tuple[float, ...]
    p: float


class Spread(NamedTuple):
    """Means and deviations (n - 1) of a number in groups, (c,); NaN without rows.

    Attributes:
        errors: of the deviations, relative, that rounding may have made.
    """

    means: FloatArray
    deviations: FloatArray
    errors: FloatArray


def spread_of(
    counts: IntArray, sums: FloatArray, squares: FloatArray, rounding: float = 0.0
) -> Spread:
    """Return means and deviations of groups, from their sums.

    Args:
        counts: rows with a value.
        sums: of the values.
        squares: sums of their squares.
        rounding: of a sum, relative; a deviation that may be nothing else is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        means = sums / counts
        within = np.maximum(squares - counts * means**2, 0.0)
        within[within <= rounding * squares] = 0.0
        deviations = np.sqrt(np.where(counts > 1, within / (counts - 1), np.nan))
        errors = 0.5 * rounding * squares / within
    return Spread(means, deviations, np.where(within > 0.0, errors, np.inf))


def rounding(joined_rows: int, *, is_sharded: bool) -> float:
    """Return the rounding of a sum over a column, relative to the sum."""
    of_words = COMMON_ROUNDING if is_sharded else WORD_ROUNDING
    return float(FLOAT_ROUNDING + of_words * np.sqrt(joined_rows))


def chi_squared(counts: IntArray) -> Test | None:
    """Return Pearson's test of counts (r, c), without Yates's correction.

    None of a single row or column; those without any count do not count.

    >>> chi_squared(np.array([[10, 20], [20, 10]])).statistic.__round__(4)
    6.6667
    """
    from scipy.special import chdtrc

    counts = counts[counts.any(axis=1)][:, counts.any(axis=0)]
    freedom = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    if min(counts.shape) < 2:
        return None
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return Test("chi-squared", statistic, (freedom,), float(chdtrc(freedom, statistic)))


def analysis_of_variance(counts: IntArray, spread: Spread) -> Test | None:
    """Return the F test of equal means, of groups with rows; None of a single one.

    Source: Fisher 1925; of two groups it is the square of Student's t.
    """
    from scipy.special import fdtrc

    has_rows = counts > 0
    counts = counts[has_rows]
    groups = len(counts)
    within = int(counts.sum()) - groups
    if groups < 2 or within < 1:
        return None
    means = spread.means[has_rows]
    overall = counts @ means / counts.sum()
    between = float(counts @ (means - overall) ** 2) / (groups - 1)
    deviations = np.nan_to_num(spread.deviations[has_rows])
    residual = float((counts - 1) @ deviations**2) / within
    if residual <= 0.0:
        return None
    statistic = between / residual
    p = float(fdtrc(groups - 1, within, statistic))
    return Test("F", statistic, (groups - 1, within), p)


class CategoryShares(NamedTuple):
    """Shares of categories in groups, and the ends of the 95 % interval, (r, c)."""

    shares: FloatArray
    low: FloatArray
    high: FloatArray


def shares_of(counts: IntArray) -> CategoryShares:
    """Return the shares of counts (r, c) in the sums of their columns.

    Intervals are Wilson's, which are those of R's ``prop.test(correct = FALSE)``; NaN
    in a group without rows.

    >>> [values[0].round(3).tolist() for values in shares_of(np.array([[15], [25]]))]
    [[0.375], [0.242], [0.53]]
    """
    rows = counts.sum(axis=0)
    shares: FloatArray = counts / np.maximum(rows, 1)
    return CategoryShares(shares, *wilson_interval(counts, rows))


class Rates(NamedTuple):
    """Events per unit of time in groups, and the ends of the 95 % interval, (c,)."""

    rates: FloatArray
    low: FloatArray
    high: FloatArray


def rates_of(events: IntArray, times: FloatArray) -> Rates:
    """Return crude rates, with exact intervals of a Poisson count.

    Source: Garwood 1936, "Fiducial limits for the Poisson distribution".

    >>> [value.round(2).tolist() for value in rates_of(np.array([10]), np.array([5.0]))]
    [[2.0], [0.96], [3.68]]
    """
    from scipy.special import chdtri

    tail = (1.0 - CONFIDENCE) / 2.0
    low = np.zeros(len(events))
    some = events > 0
    low[some] = chdtri(2.0 * events[some], 1.0 - tail) / 2.0
    high = chdtri(2.0 * events + 2.0, tail) / 2.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = [np.where(times > 0.0, end / times, np.nan) for end in (low, high)]
        rates = np.where(times > 0.0, events / times, np.nan)
    return Rates(rates, *ends)


def equal_rates(events: IntArray, times: FloatArray) -> Test | None:
    """Return the chi-squared test of events (c,) that are in proportion to times (c,).

    It is R's ``chisq.test(events, p = times / sum(times))``, of groups that have been
    observed for some time; None of a single one, or without an event.

    >>> equal_rates(np.array([10, 30]), np.array([5.0, 5.0])).statistic
    10.0
    """
    from scipy.special import chdtrc

    events, times = events[times > 0.0], times[times > 0.0]
    if len(events) < 2 or not events.any():
        return None
    expected = events.sum() * times / times.sum()
    statistic = float(((events - expected) ** 2 / expected).sum())
    freedom = len(events) - 1
    return Test("chi-squared", statistic, (freedom,), float(chdtrc(freedom, statistic)))
