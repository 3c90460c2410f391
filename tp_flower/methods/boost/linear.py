"""Linear models of a table's rows, which boosting fits before it grows trees.

Trees approach a slope by steps, and none goes on beyond the rows that it was grown on:
where the truth is linear they stay behind. So the first rounds of boosting answer the
loss's derivatives by a ridge regression of each table,

    theta = argmin sum_r G_r x_r theta + 1/2 H_r (x_r theta)^2 + lambda/2 ||theta||^2

over centred and scaled numbers, an indicator of missing ones, and the categories of
codes, by conjugate gradients. It has no intercept: that of all tables is the base
score.

Notation:
    x_r  a row of ``Design.matrix``, (n, k)    theta  ``weights``  (k, d_c)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import ModelError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

PENALTY: Final = 1e-4  # of a mean loss, as l2 of linear models
FEWEST_ROWS: Final = 1.0  # of joined ones, whose curvature the penalty has at least
ITERATIONS: Final = 60
PRECISION: Final = 1e-4  # of the solution: the next round corrects it


class LinearPart(msgspec.Struct, frozen=True):
    """A linear model as text: of each column a mean and a scale, or its categories.

    A category that no trained row has adds nothing, as a missing number does.

    Attributes:
        means: of the columns of numbers, by column.
        scales: of the same.
        categories: the codes that have a weight, ascending, by column.
        missing: the columns with an indicator of missing values.
        weights: (k, d_c), those of the columns of numbers, then of ``missing``, then of
            the categories, column by column.
        gains: (k,), by how much each lowers the loss alone, by its second order, summed
            as LightGBM sums those of splits.
    """

    means: dict[int, float]
    scales: dict[int, float]
    missing: list[int]
    categories: dict[int, list[int]]
    weights: list[list[float]]
    gains: list[float] = []

    def text(self) -> AnyArray:
        """Return the model as bytes of text."""
        return np.frombuffer(msgspec.json.encode(self), np.uint8)

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the model of a text; ModelError of any other."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            raise ModelError("malformed linear part of trees") from None

    def values(self, rows: "AnyArray | csr_matrix") -> FloatArray:
        """Return the values of rows (n, d), whose missing values are NaN, (n, d_c)."""
        values: FloatArray = self.design(rows) @ np.array(self.weights)
        return values

    def design(self, rows: "AnyArray | csr_matrix") -> "csr_matrix":
        """Return the matrix (n, k) that the weights are of."""
        from scipy.sparse import csr_matrix, hstack

        blocks = [_numbers(rows, self.means, self.scales)]
        for column in self.missing:
            is_missing = np.isnan(_column(rows, column))[:, None]
            blocks.append(csr_matrix(is_missing, dtype=np.float64))
        for column, codes in self.categories.items():
            blocks.append(_indicators(_column(rows, column), codes))
        return csr_matrix(hstack(blocks))

    @property
    def columns(self) -> list[int]:
        """The column of the rows that each weight is of, (k,)."""
        columns = [*self.means, *self.missing]
        for column, codes in self.categories.items():
            columns += [column] * len(codes)
        return columns


def is_linear(text: str) -> bool:
    """Whether a text is that of a linear model, not of trees."""
    return text.startswith("{")


def fit_linear(
    rows: "AnyArray | csr_matrix",
    trained: int,
    gradient: FloatArray,
    hessian: FloatArray,
    codes: Sequence[int],
) -> tuple[AnyArray, FloatArray]:
    """Return a linear model as its text's bytes, and its values of all rows (n, d_c).

    Args:
        rows: (n, d), the trained ones first; missing values are NaN.
        trained: how many train.
        gradient: G (n_trained, d_c).
        hessian: H (n_trained, d_c), above 0.
        codes: the columns that are codes of categories.
    """
    outputs = gradient.shape[1]
    if not trained or not rows.shape[1]:
        return np.zeros(0, np.uint8), np.zeros((rows.shape[0], outputs))
    frame = _frame(rows[:trained], hessian.mean(axis=1), codes)
    design = frame.design(rows)
    weights = _solve(design[:trained], gradient, hessian)
    # sum_r H_r (x_r theta)^2 of each column: twice what it lowers the loss, as in trees
    gains = (
        (design[:trained].multiply(design[:trained]).T @ hessian) * weights**2
    ).sum(axis=1)
    fitted = msgspec.structs.replace(
        frame, weights=weights.tolist(), gains=gains.tolist()
    )
    values: FloatArray = design @ weights
    return fitted.text(), values


def _frame(
    rows: "AnyArray | csr_matrix", mass: FloatArray, codes: Sequence[int]
) -> LinearPart:
    """Return a model of the trained rows without weights."""
    total = mass.sum()
    means: dict[int, float] = {}
    scales: dict[int, float] = {}
    missing: list[int] = []
    categories: dict[int, list[int]] = {}
    for column in range(rows.shape[1]):
        values = _column(rows, column)
        is_missing = np.isnan(values)
        if column in codes:
            categories[column] = np.unique(values[~is_missing]).astype(int).tolist()
            continue
        known = np.where(is_missing, 0.0, values)
        share = mass[~is_missing].sum() / total
        mean = float(mass @ known / total / share) if share else 0.0
        centred = np.where(is_missing, 0.0, values - mean)
        deviation = float(np.sqrt(mass @ centred**2 / total))
        if deviation > 0.0:
            means[column] = mean
            scales[column] = deviation
        if 0 < np.count_nonzero(is_missing) < len(values):
            missing.append(column)
    return LinearPart(means, scales, missing, categories, [])


def _solve(
    design: "csr_matrix", gradient: FloatArray, hessian: FloatArray
) -> FloatArray:
    """Return the weights (k, d_c), an output after the other."""
    squares = design.multiply(design).T
    columns = []
    for output in range(gradient.shape[1]):
        mass = hessian[:, output]
        penalty = max(PENALTY * float(mass.sum()), FEWEST_ROWS * float(mass.mean()))
        diagonal = squares @ mass + penalty
        columns.append(
            _solve_output(design, gradient[:, output], mass, penalty, diagonal)
        )
    return np.stack(columns, axis=1)


def _solve_output(
    design: "csr_matrix",
    gradient: FloatArray,
    mass: FloatArray,
    penalty: float,
    diagonal: FloatArray,
) -> FloatArray:
    """Return the weights (k,) of one output; ``diagonal`` is that of its matrix."""
    from scipy.sparse.linalg import LinearOperator, cg

    def product(vector: FloatArray) -> FloatArray:
        curved: FloatArray = design.T @ (mass * (design @ vector)) + penalty * vector
        return curved

    def precondition(vector: FloatArray) -> FloatArray:
        return vector / diagonal

    shape = design.shape[1], design.shape[1]
    operator, inverse = (
        LinearOperator(shape, matvec=by, dtype=np.float64)
        for by in (product, precondition)
    )
    right = -(design.T @ gradient)
    solution, _ = cg(operator, right, rtol=PRECISION, maxiter=ITERATIONS, M=inverse)
    weights: FloatArray = solution
    return weights


def _column(rows: "AnyArray | csr_matrix", column: int) -> FloatArray:
    """Return a column of rows, float64 (n,)."""
    values = rows[:, column]
    if not isinstance(values, np.ndarray):
        values = values.toarray().ravel()
    return values.astype(np.float64)


def _numbers(
    rows: "AnyArray | csr_matrix", means: dict[int, float], scales: dict[int, float]
) -> "csr_matrix":
    """Return the columns of numbers, centred and scaled; 0 where they are missing."""
    from scipy.sparse import csr_matrix

    centred = np.zeros((rows.shape[0], len(means)))
    for place, (column, mean) in enumerate(means.items()):
        values = (_column(rows, column) - mean) / scales[column]
        centred[:, place] = np.nan_to_num(values)
    return csr_matrix(centred)


def _indicators(values: FloatArray, codes: Sequence[int]) -> "csr_matrix":
    """Return the one-hot encoding of codes, (n, categories); 0 for all others."""
    from scipy.sparse import csr_matrix

    known = np.array(codes, np.float64)
    place = np.minimum(np.searchsorted(known, values), max(len(known) - 1, 0))
    is_known = np.zeros(len(values), np.bool_)
    if len(known):
        is_known = known[place] == values
    row = np.flatnonzero(is_known)
    ones = np.ones(len(row))
    return csr_matrix((ones, (row, place[row])), shape=(len(values), len(known)))
