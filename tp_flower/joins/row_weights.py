"""What joined rows weigh in training, and what that is for the rows of each table.

    minimise (1/N) sum_j w_j loss(h_j; y_j) + beta sum_i R(theta_i)

Without weights a table's row counts as often as the join repeats it: the distribution
that is learned is that of the joined rows (paper, section 8). With w_j = 1 / G(p(j)) of
one table, the *entity*, each of its rows counts once. Weights are scaled to mean 1 over
the training rows, so that nothing depends on their unit. What a table needs of them is
their sum over each of its rows, which stands where the multiplicity stands without
weights: equal weights are no weights, and whole ones repeat rows.

Notation:
    w_j     weight of joined row j, (N,), > 0, mean 1
    G^w_i   ``masses[i]``  (n_i,): seg_i(w), which is G_i where all w_j are 1
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tp_flower.arrays import FloatArray, effective_rows
from tp_flower.joins.mapping import TableMapping
from tp_flower.joins.table_rows import TableRows


def entity_weights(rows: TableRows) -> FloatArray:
    """Return 1 / G(p(j)) of each joined row, (N,); each must have a row of the table.

    >>> entity_weights(TableRows(np.array([0, 1, 1, 2], np.int32), 3)).tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    weights: FloatArray = rows.inverse_multiplicity[rows.row_of]
    return weights


@dataclass(frozen=True)
class RowWeights:
    """The weights of the joined training rows.

    Attributes:
        rows: w, (N,), > 0, mean 1.
        masses: by table G^w_i, (n_i,): numbers that float32 has, as its sites are sent
            them; 0 where no training row is.
    """

    rows: FloatArray
    masses: Mapping[str, FloatArray]

    @classmethod
    def of(cls, weights: FloatArray, mapping: TableMapping) -> "RowWeights":
        """Return weights (N,) of the mapping's joined rows, scaled to mean 1."""
        own = weights / weights.mean()
        masses = {
            name: rows.segment_sum(own[:, None])[:, 0]
            .astype(np.float32)
            .astype(np.float64)
            for name, rows in mapping.tables.items()
        }
        return cls(own, masses)

    @cached_property
    def inverse_masses(self) -> dict[str, FloatArray]:
        """1 / G^w_i by table, (n_i,); 1 where G^w_i = 0."""
        return {
            name: 1.0 / np.where(mass > 0.0, mass, 1.0)
            for name, mass in self.masses.items()
        }

    @property
    def effective_share(self) -> float:
        """What share of N the effective sample size is, above 0 and at most 1."""
        return effective_rows(self.rows) / len(self.rows)
