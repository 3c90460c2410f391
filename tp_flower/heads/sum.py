"""The sum of the tables' vectors, which are scores: h = b + sum_i h_i."""

from collections.abc import Mapping
from dataclasses import dataclass

from tp_flower.arrays import FloatArray
from tp_flower.heads.head import Contribution, Head

SCORE = "score"


@dataclass(frozen=True)
class Sum(Head):
    """Scores that are the base score and the sum of the tables' own.

    >>> import numpy as np
    >>> Sum(outputs=1).combine(np.array([0.5]), np.array([[1.0], [2.0]])).tolist()
    [[1.5], [2.5]]
    """

    name = "sum"
    is_linear = True

    @property
    def width(self) -> int:
        """A score per output."""
        return self.outputs

    def combine(self, base: FloatArray, vectors: FloatArray) -> FloatArray:
        """Return b + v."""
        return base + vectors

    def pullback(self, derivative: FloatArray, _: FloatArray) -> FloatArray:
        """Return the derivative itself."""
        return derivative

    def columns(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the classes, or the score's name if there is one."""
        return classes if self.width > 1 else (SCORE,)

    def contributions(
        self, sums: Mapping[str, FloatArray], joined_rows: int
    ) -> dict[str, Contribution]:
        """Return each table's share of the tables' variances.

            share_i = var(h_i) / sum_k var(h_k)

        over the joined training rows; of several outputs variances are summed. What two
        tables tell alike counts for both. h_i are a table's scores on the joined rows,
        0 where a LEFT JOIN has no row. The sites send sum G h_i and sum G h_i^2 over
        their rows, with the noise of private runs: nobody sees the scores of one table
        for it.

        >>> import numpy as np
        >>> sums = {"a": np.array([[6.0], [18.0]]), "b": np.array([[6.0], [10.0]])}
        >>> shares = Sum(outputs=1).contributions(sums, joined_rows=4)
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
