"""How far the paper's assumptions hold, measured on the rows of a sample.

gamma (Assumption 4.1): the smallest singular value of [U_1, ..., U_T], with U_i an
orthonormal basis of the columns of table i over the joined rows. 0: some column is a
combination of other tables' columns (and the scores may miss it); 1: the tables'
columns are orthogonal. The sample size that the theorem requires grows as 1 / gamma^2.

tau (Assumption 5.1): the smallest number with ||x - x'||^2 <= tau ||x^(t) - x'^(t)||^2
for all pairs of joined rows, for some table t. It is infinite if for every t two
different joined rows share their row of t, which is usual in joins, where a table's
rows repeat. The median over pairs tells how a typical pair behaves.

docs/how-to/coresets.md says what a sample is worth where they are far from met.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.coresets.importance import whitening
from tp_flower.learning.solvers import gram

LEAST_GAMMA_SQUARED: Final = 0.01
MOST_TAU: Final = 100.0
MOST_PAIRS: Final = 100_000


def gamma(blocks: Sequence[npt.NDArray[Any]], weights: FloatArray) -> float:
    """Return the smallest singular value of [U_1, ..., U_T], from 0 to 1.

    Each table's block (m, p_i) has its columns on the sampled joined rows; the label
    table's includes the intercept's and the label's. Sums with the weights (m,), > 0,
    stand for sums over all joined rows.

    >>> first = np.array([[1.0], [2.0]])
    >>> others = (np.array([[2.0], [-1.0]]), 3.0 * first)
    >>> [round(gamma([first, other], np.ones(2)), 9) for other in others]
    [1.0, 0.0]
    """
    bases = [block @ whitening(gram(block, weights)) for block in blocks]
    together = np.concatenate(bases, axis=1)
    smallest = np.linalg.eigvalsh(gram(together, weights)).min(initial=1.0)
    # this is a square: rounding can turn 0 into what would be 1e-8 as a root
    return float(np.sqrt(np.clip(smallest, 0.0, 1.0))) if smallest > 1e-12 else 0.0


@dataclass(frozen=True)
class PairRatio:
    """The distance of two joined rows, relative to the distance that one table sees.

    ``largest`` is tau over the pairs, infinite if no table separates all of them;
    ``median`` is the median over pairs, for the table where it is smallest.
    """

    largest: float
    median: float


def tau(blocks: Sequence[npt.NDArray[Any]], rng: np.random.Generator) -> PairRatio:
    """Return tau and its median over pairs of rows, for the best table each."""
    rows = len(blocks[0])
    if rows * (rows - 1) // 2 <= MOST_PAIRS:
        first, second = np.triu_indices(rows, 1)
    else:
        first, second = rng.integers(rows, size=(2, MOST_PAIRS))
    local = np.stack([_squared_distances(block, first, second) for block in blocks])
    total = local.sum(axis=0)
    local, total = local[:, total > 0], total[total > 0]
    if not len(total):
        return PairRatio(1.0, 1.0)
    ratios = np.divide(total, local, where=local > 0, out=np.full(local.shape, np.inf))
    # for an even number of pairs the upper median: a mean may involve an infinite one
    middle = np.sort(ratios, axis=1)[:, len(total) // 2]
    return PairRatio(float(ratios.max(axis=1).min()), float(middle.min()))


def _squared_distances(
    rows: npt.NDArray[Any],
    first: npt.NDArray[np.intp],
    second: npt.NDArray[np.intp],
) -> FloatArray:
    """Return the squared distances of pairs, column by column to save memory."""
    total = np.zeros(len(first))
    for column in rows.T.astype(np.float64):
        total += (column[first] - column[second]) ** 2
    return total
