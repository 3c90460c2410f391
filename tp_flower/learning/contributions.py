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

from tp_flower.arrays import FloatArray


@dataclass(frozen=True)
class Contribution:
    """The mean of h_i, (d_c,), and its share of the tables' variances."""

    mean_score: FloatArray
    share: float


def contributions(
    sums: Mapping[str, FloatArray], joined_rows: int
) -> dict[str, Contribution]:
    """Return the contribution of each table, from its sums (2, d_c).

    They are sum G h_i and sum G h_i^2 over the rows of table i.

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
