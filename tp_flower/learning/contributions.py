"""The contribution of each table to the scores of the joined rows.

    share_i = cov(h_i, h) / var(h),   h = b + sum_i h_i

over the joined training rows, with their weights. The shares add up to 1, because
var(h) is the sum of the covariances; one may be negative, if a table's scores cancel
part of the others'. With several outputs, covariances and variances are summed.

In private runs the scores include their noise: the shares are post-processing, and cost
no row any additional privacy.

Notation:
    h_i  local scores of table i on the joined rows, 0 where a LEFT JOIN has no row
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.joins.mapping import TableMapping


@dataclass(frozen=True)
class Contribution:
    """The mean of h_i, (d_c,), and its share of var(h); 0 where h is constant."""

    mean_score: FloatArray
    share: float


def contributions(
    mapping: TableMapping,
    local_scores: Mapping[str, FloatArray],
    weights: FloatArray | None = None,
) -> dict[str, Contribution]:
    """Return the contribution of each table, from its local scores (n_i, d_c).

    >>> from tp_flower.joins.mapping import TableRows
    >>> rows = np.array([0, 1, 1, 0], np.int32)
    >>> mapping = TableMapping({"a": TableRows(np.arange(4, dtype=np.int32), 4),
    ...                         "b": TableRows(rows, 2)})
    >>> scores = {"a": np.array([[3.0], [0], [0], [3]]), "b": np.array([[2.0], [1]])}
    >>> shares = contributions(mapping, scores)
    >>> [(t, each.mean_score.tolist(), each.share) for t, each in shares.items()]
    [('a', [1.5], 0.75), ('b', [1.5], 0.25)]
    """
    outputs = next(iter(local_scores.values())).shape[1]
    total = mapping.sum_scores(np.zeros(outputs), local_scores)
    total -= np.average(total, axis=0, weights=weights)
    weighted = total if weights is None else weights[:, None] * total
    variance = float(np.vdot(weighted, total))
    total_weight = len(total) if weights is None else float(weights.sum())
    shares = {}
    for table, scores in local_scores.items():
        rows = mapping.tables[table]
        # <expand(s), y> = <s, segment_sum(y)>: no table needs an array of N scores
        covariance = float(np.vdot(scores, rows.segment_sum(weighted)))
        multiplicity = (
            rows.multiplicity.astype(np.float64)
            if weights is None
            else rows.segment_sum(weights[:, None])[:, 0]
        )
        shares[table] = Contribution(
            mean_score=multiplicity @ scores / total_weight,
            share=covariance / variance if variance > 0.0 else 0.0,
        )
    return shares
