"""The contribution of each table to the scores of the joined rows.

    share_i = var(h_i) / sum_k var(h_k)

over the joined training rows, weighted as they are; of several outputs variances are
summed. What two tables tell alike counts for both. The sites sum up their scores where
they leave, with the noise of private runs: nobody sees the scores of one table for it.

Notation:
    h_i  local scores of table i on the joined rows, 0 where a LEFT JOIN has no row
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray


@dataclass(frozen=True)
class Contribution:
    """The mean of h_i, (d_c,), and its share of the tables' variances."""

    mean_score: FloatArray
    share: float


def score_sums(scores: FloatArray, multiplicity: npt.NDArray[np.number]) -> FloatArray:
    """Return sum G s and sum G s^2 of a shard's scores (n, d_c), (2, d_c).

    G is the ``multiplicity`` (n,), G^w of weighted joined rows. Sums of shards add up.

    >>> score_sums(np.array([[3.0], [0.0]]), np.array([2, 2])).tolist()
    [[6.0], [18.0]]
    """
    return np.stack([multiplicity @ scores, multiplicity @ scores**2])


def contributions(
    sums: Mapping[str, FloatArray], joined_rows: int
) -> dict[str, Contribution]:
    """Return the contribution of each table, from its ``score_sums`` (2, d_c).

    >>> sums = {"a": np.array([[6.0], [18.0]]), "b": np.array([[6.0], [10.0]])}
    >>> shares = contributions(sums, joined_rows=4)
    >>> [(t, each.mean_score.tolist(), each.share) for t, each in shares.items()]
    [('a', [1.5], 0.9), ('b', [1.5], 0.1)]
    """
    means = {table: total / joined_rows for table, total in sums.items()}
    variances = {
        # rounding may make it negative
        table: max(float((square - mean**2).sum()), 0.0)
        for table, (mean, square) in means.items()
    }
    whole = sum(variances.values())
    return {
        table: Contribution(mean, variances[table] / whole if whole else 0.0)
        for table, (mean, _) in means.items()
    }
