"""The LoJ operator: learning over joined rows that are never built (paper section 3.1).

*gather* sums the tables' local scores on the joined rows, *scatter* brings what the
server computed on joined rows back to the rows of each table; what lies between is the
strategy's.
"""

from collections.abc import Mapping

import numpy as np

from strategies.run.exchange import Replies
from strategies.run.replies import array_of
from strategies.setup.problem import Table, TrainingProblem
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import ReplyError
from tp_flower.learning.admm import targets
from tp_flower.learning.metrics import evaluate
from tp_flower.learning.solvers import RidgeSolver
from tp_flower.privacy.statistics_update import private_update, usable_gram
from tp_flower.protocol import CommonParameters, row_numbers

LocalScores = Mapping[str, FloatArray]


def gather(problem: TrainingProblem, local_scores: LocalScores) -> FloatArray:
    """Return the scores h of the training rows, (N, d_c)."""
    return problem.train.sum_scores(problem.base_score, local_scores)


def scatter_targets(
    problem: TrainingProblem,
    local_scores: LocalScores,
    message: FloatArray,
    kappa: float,
) -> dict[str, FloatArray]:
    """Return every table's target (n_i, d_c) from v (N, d_c)."""
    weights = problem.weighting.train
    if weights is not None:
        message = weights.rows[:, None] * message
    inverse = {} if weights is None else weights.inverse_masses
    return {
        name: targets(
            problem.train.tables[name], scores, message, kappa, inverse.get(name)
        )
        for name, scores in local_scores.items()
    }


def train_metrics(problem: TrainingProblem, scores: FloatArray) -> dict[str, float]:
    """Return the metrics of scores (N, d_c) on the training rows."""
    weights = problem.weighting.train_rows
    return evaluate(problem.loss, scores, problem.train_labels, weights)


def test_metrics(
    problem: TrainingProblem, local_scores: LocalScores
) -> dict[str, float]:
    """Return the metrics on the held-out rows; nothing without any."""
    if problem.test is None:
        return {}
    scores = problem.test.sum_scores(problem.base_score, local_scores)
    weights = problem.weighting.test
    return evaluate(problem.loss, scores, problem.test_labels, weights)


def gather_scores(table: Table, replies: Replies) -> FloatArray:
    """Return the local scores of a table's rows that take part, (n_i, d_c).

    Raises:
        ReplyError: if a shard's scores have the wrong shape or are not finite.
    """
    blocks = [
        checked(replies, table, index, "scores", (rows.total, table.outputs))
        for index, rows in enumerate(table.rows)
    ]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def gather_trained(table: Table, replies: Replies, scores: FloatArray) -> FloatArray:
    """Return the scores (n_i, d_c) with those of the trained rows as the shards sent.

    Raises:
        ReplyError: if a shard's scores have the wrong shape or are not finite.
    """
    found = scores.copy()
    for index, rows in enumerate(table.rows):
        shape = (rows.trained, table.outputs)
        block = checked(replies, table, index, "scores", shape)
        found[rows.trained_slice] = block
    return found


def gather_tested(table: Table, replies: Replies, scores: FloatArray) -> None:
    """Write the shards' scores of held-out rows into ``scores`` (n_i, d_c)."""
    for index, rows in enumerate(table.rows):
        count = int(np.count_nonzero(rows.tested))
        shape = (count, table.outputs)
        block = checked(replies, table, index, "tested_scores", shape)
        scores[rows.slice][rows.tested] = block


def scatter_rows(table: Table, numbers: FloatArray) -> dict[int, AnyArray]:
    """Return each shard's slice of a table's numbers (n_i, d_c) of trained rows."""
    return {
        part.number: row_numbers(numbers[rows.trained_slice])
        for part, rows in zip(table.parts, table.rows, strict=True)
    }


def scatter_parameters(
    table: Table, parameters: FloatArray
) -> dict[int, CommonParameters]:
    """Return the same parameters (p,) for every shard."""
    common = CommonParameters(parameters)
    return {part.number: common for part in table.parts}


def sum_over_shards(table: Table, replies: Replies, name: str) -> FloatArray:
    """Return the sum of what the shards sent: moments or vectors (p,) (Eq. 17)."""
    shape: tuple[int, ...] = table.penalised.shape
    if name == "moments":
        shape = (table.features + int(table.has_intercept), table.outputs)
    total = np.zeros(shape)
    for index in range(len(table.parts)):
        total += checked(replies, table, index, name, shape)
    return total


def consensus_parameters(
    table: Table, replies: Replies, rho_in: float, l2: float
) -> FloatArray:
    """Return w from the shards' theta^q + u^q (Eq. 20), (p,).

    w = Q rho_in / (Q rho_in + beta) * mean(theta + u); the paper's Eq. 20 has M where
    consensus ADMM has Q_i. Biases are not penalised and are just averaged. A shard
    without rows to train on has no opinion: it takes w, and no part in it.
    """
    every = range(len(table.parts))
    asked = [index for index in every if table.rows[index].trained] or list(every)
    shape, shards = table.penalised.shape, len(asked)
    proposals = [checked(replies, table, k, "proposal", shape) for k in asked]
    mean = np.sum(proposals, axis=0) / shards
    shrink = shards * rho_in / (shards * rho_in + l2)
    shrunk: FloatArray = np.where(table.penalised, shrink * mean, mean)
    return shrunk


class GramSolver:
    """The theta-update of one sharded table from summed statistics (linear, exact).

    Statistics with noise are of what is left to fit, so that the solver keeps theta.
    """

    def __init__(self, table: Table, joined_rows: int, *, is_private: bool) -> None:
        if table.gram is None:
            raise ReplyError(f"table {table.name}: its shards sent no Gram matrix")
        self._solver = RidgeSolver.from_gram(
            usable_gram(table.gram, table.gram_deviation),
            joined_rows,
            intercept=table.has_intercept,
        )
        self._theta = np.zeros((len(table.gram), table.outputs))
        self._is_private = is_private

    def solve(self, moments: FloatArray, kappa: float, l2: float) -> FloatArray:
        """Return the flat parameters of the table's model, (p,)."""
        if not self._is_private:
            return self._solver.solve(moments, kappa, l2).ravel()
        self._theta = private_update(self._solver, self._theta, moments, kappa, l2)
        return self._theta.ravel()


def checked(
    replies: Replies, table: Table, index: int, name: str, shape: tuple[int, ...]
) -> FloatArray:
    """Return an array that a shard sent, as float64.

    Raises:
        ReplyError: if it is missing, of another shape, or training diverged.
    """
    return array_of(replies, table.parts[index], name, shape).astype(np.float64)
