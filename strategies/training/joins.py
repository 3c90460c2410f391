"""The LoJ operator: learning over joined rows that are never built (paper section 3.1).

*gather* sums the tables' local scores on the joined rows, *scatter* brings what the
server computed on joined rows back to the rows of each table; what lies between is the
strategy's.
"""

from collections.abc import Mapping

from strategies.setup.problem import Federation
from tp_flower.arrays import FloatArray
from tp_flower.learning.admm import targets
from tp_flower.learning.metrics import evaluate

LocalScores = Mapping[str, FloatArray]


def gather(federation: Federation, local_scores: LocalScores) -> FloatArray:
    """Return the scores h of the training rows, (N, d_c)."""
    return federation.train.sum_scores(federation.base_score, local_scores)


def scatter_targets(
    federation: Federation,
    local_scores: LocalScores,
    message: FloatArray,
    kappa: float,
) -> dict[str, FloatArray]:
    """Return every table's target (n_i, d_c) from v (N, d_c)."""
    weights = federation.weighting.train
    if weights is not None:
        message = weights.rows[:, None] * message
    inverse = {} if weights is None else weights.inverse_masses
    return {
        name: targets(
            federation.train.tables[name], scores, message, kappa, inverse.get(name)
        )
        for name, scores in local_scores.items()
    }


def train_metrics(federation: Federation, scores: FloatArray) -> dict[str, float]:
    """Return the metrics of scores (N, d_c) on the training rows."""
    weights = federation.weighting.train_rows
    return evaluate(federation.loss, scores, federation.train_labels, weights)


def test_metrics(federation: Federation, local_scores: LocalScores) -> dict[str, float]:
    """Return the metrics on the held-out rows; nothing without any."""
    if federation.test is None:
        return {}
    scores = federation.test.sum_scores(federation.base_score, local_scores)
    weights = federation.weighting.test
    return evaluate(federation.loss, scores, federation.test_labels, weights)
