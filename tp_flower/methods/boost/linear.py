"""Linear models of a table's rows, which boosting fits before it grows trees.

Trees approach a slope by steps, and none goes on beyond the rows that it was grown on:
where the truth is linear they stay behind. So the first rounds of boosting answer the
loss's derivatives by a ridge regression of each table,

    theta = argmin sum_r G_r x_r theta + 1/2 H_r (x_r theta)^2 + lambda/2 ||theta||^2

over scaled numbers, indicators of missing ones, and the categories of codes. It has no
intercept: that of all tables is the base score. lambda is small in a full fit. A
shrunk one of at most 256 columns chooses it by generalised cross-validation (Golub,
Heath and Wahba 1979, eq. 1.4) over the table's rows, whose answers are y_r = -G_r / H_r
with weights H_r:

    lambda = argmin  n sum_r H_r (y_r - x_r theta(lambda))^2 / (n - df(lambda))^2

Where windows over the past give a table dozens of correlated columns, a full fit learns
their noise; where tables share what they explain, shrunk fits approach it slowly. So
shrunk fits come first, and full ones while these still help.

Notation:
    x_r  a row of the :class:`Design`, (n, k)    theta  ``weights``  (k, d_c)
    lambda  ``penalty``    df  the trace of X (X^T H X + lambda)^-1 X^T H
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeAlias

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, blocks
from tp_flower.errors import ModelError
from tp_flower.learning.solvers import solve_symmetric
from tp_flower.methods.boost.settings import BoostSettings

if TYPE_CHECKING:
    import numpy.typing as npt
    from scipy.sparse import csr_matrix

    from tp_flower.settings import Settings

TreeRows: TypeAlias = "npt.NDArray[np.float32] | csr_matrix"

PENALTY: Final = 1e-4  # of a mean loss, as l2 of linear models
FEWEST_ROWS: Final = 1.0  # of joined ones, whose curvature the penalty has at least
MOST_DIRECT: Final = 256  # columns, whose matrix is solved at once
CATEGORY_ROWS: Final = 2  # joined ones, that a category with a weight has at least
PENALTIES: Final = np.geomspace(1e-4, 1e3, 64)
"""That a shrunk fit chooses from, of a mean loss; the last leaves nothing."""
ITERATIONS: Final = 60
PRECISION: Final = 1e-4  # of the solution: the next round corrects it
# deviations: a stand-in for "missing", such as 1e7, must not tilt all other rows
FARTHEST: Final = 6.0


class DesignColumns(msgspec.Struct, frozen=True):
    """How a table's columns are read by a linear model.

    A category that is not listed adds nothing, as a missing number does.

    Attributes:
        means: of the columns of numbers, by column; 0 where rows are stored sparsely.
        scales: of the same.
        missing: the columns with an indicator of missing values.
        categories: the codes that have a weight, ascending, by column.
    """

    means: dict[int, float] = {}
    scales: dict[int, float] = {}
    missing: list[int] = []
    categories: dict[int, list[int]] = {}

    @property
    def of_weights(self) -> list[int]:
        """The column that each weight is of, (k,)."""
        columns = [*self.means, *self.missing]
        for column, codes in self.categories.items():
            columns += [column] * len(codes)
        return columns

    def design(self, rows: TreeRows) -> "Design":
        """Return the matrix (n, k) of rows (n, d), whose missing values are NaN."""
        from scipy.sparse import csr_matrix, hstack

        blocks = [
            _indicators(column_of(rows, column), codes)
            for column, codes in self.categories.items()
        ]
        if isinstance(rows, np.ndarray):
            categories = csr_matrix(hstack(blocks)) if blocks else None
            return Design(self._numbers(rows), categories)
        return Design(None, csr_matrix(hstack([self._sparse_numbers(rows), *blocks])))

    def _numbers(self, rows: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        """Return numbers and indicators, float32."""
        width = len(self.means) + len(self.missing)
        numbers = np.zeros((len(rows), width), np.float32)
        for index, (column, mean) in enumerate(self.means.items()):
            scaled = (rows[:, column].astype(np.float64) - mean) / self.scales[column]
            numbers[:, index] = np.clip(np.nan_to_num(scaled), -FARTHEST, FARTHEST)
        for index, column in enumerate(self.missing, start=len(self.means)):
            numbers[:, index] = np.isnan(rows[:, column])
        return numbers

    def _sparse_numbers(self, rows: "csr_matrix") -> "csr_matrix":
        """Return the numbers of sparse rows, scaled and not centred."""
        from scipy.sparse import csr_matrix

        columns = list(self.means)
        numbers = csr_matrix(rows[:, columns], copy=True)
        scales = np.array([self.scales[column] for column in columns])
        scaled = np.nan_to_num(numbers.data / scales[numbers.indices])
        numbers.data = scaled.astype(np.float32)
        return numbers


@dataclass(frozen=True)
class Design:
    """The matrix X (n, k) of a linear model: a dense block, and a sparse one."""

    dense: "npt.NDArray[np.float32] | None"
    sparse: "csr_matrix | None"

    def times(self, weights: FloatArray) -> FloatArray:
        """Return X theta, (n, ..), of weights (k, ..)."""
        total: FloatArray | float = 0.0
        start = 0
        if (dense := self.dense) is not None:
            start = dense.shape[1]
            # a block at a time is in double precision
            parts = [dense[b] @ weights[:start] for b in blocks(len(dense))]
            total = np.concatenate(parts)
        if self.sparse is not None:
            total = total + self.sparse @ weights[start:]
        return np.asarray(total)

    def back(self, values: FloatArray) -> FloatArray:
        """Return X^T v, (k,), of values (n,)."""
        parts = []
        if (dense := self.dense) is not None:
            products = (dense[b].T @ values[b] for b in blocks(len(values)))
            parts.append(sum(products))
        if self.sparse is not None:
            parts.append(self.sparse.T @ values)
        return np.concatenate(parts)

    @property
    def width(self) -> int:
        """The number k of columns."""
        parts = (self.dense, self.sparse)
        return sum(part.shape[1] for part in parts if part is not None)

    def gram(self, mass: FloatArray) -> FloatArray:
        """Return X^T diag(H) X, (k, k)."""
        total = np.zeros((self.width, self.width))
        start = 0 if self.dense is None else self.dense.shape[1]
        for block in blocks(len(mass)):
            weights = mass[block, None]
            dense = np.zeros((len(weights), 0))
            if self.dense is not None:
                dense = self.dense[block].astype(np.float64)
                total[:start, :start] += dense.T @ (weights * dense)
            if self.sparse is not None:
                sparse = self.sparse[block]
                weighted = sparse.multiply(weights).tocsr()
                total[start:, start:] += (sparse.T @ weighted).toarray()
                total[start:, :start] += weighted.T @ dense
        total[:start, start:] = total[start:, :start].T
        return total

    def first(self, rows: int) -> "Design":
        """Return the first rows."""
        return Design(
            None if self.dense is None else self.dense[:rows],
            None if self.sparse is None else self.sparse[:rows],
        )

    def squared(self, mass: FloatArray) -> FloatArray:
        """Return the diagonal of X^T diag(H) X, (k,), of the rows of ``mass``."""
        parts = []
        if self.dense is not None:
            dense = self.dense
            parts.append(sum(mass[b] @ dense[b] ** 2 for b in blocks(len(mass))))
        if self.sparse is not None:
            squares = self.sparse.copy()
            squares.data = squares.data**2
            parts.append(squares.T @ mass)
        return np.concatenate(parts)


@dataclass(frozen=True)
class RidgeFit:
    """How a linear model is fitted.

    Attributes:
        least_rows: joined rows that an indicator has at least. A category needs no
            more than two: the penalty shrinks what few rows say, and where many are
            rare (artists, players) trees of larger leaves would not know them.
        is_shrunk: whether the rows choose the penalty.
    """

    least_rows: int
    is_shrunk: bool = False


class LinearPart(msgspec.Struct, frozen=True):
    """A linear model as text.

    Attributes:
        weights: (k, d_c).
        gains: (k,), by how much each lowers the loss alone, by its second order, summed
            as LightGBM sums those of splits.
    """

    columns: DesignColumns
    weights: list[list[float]]
    gains: list[float]

    def text(self) -> AnyArray:
        """Return the model as bytes of text."""
        return np.frombuffer(msgspec.json.encode(self), np.uint8)

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the model of a text; ModelError of any other."""
        try:
            part = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            raise ModelError("malformed linear part of trees") from None
        columns = part.columns
        sizes = {len(columns.of_weights), len(part.weights), len(part.gains)}
        if len(sizes) > 1 or columns.means.keys() != columns.scales.keys():
            raise ModelError("malformed linear part of trees")
        return part

    def values(self, rows: TreeRows) -> FloatArray:
        """Return the values of rows (n, d), whose missing values are NaN, (n, d_c)."""
        return self.columns.design(rows).times(np.array(self.weights))

    def values_by(self, rows: TreeRows, columns: Sequence[AnyArray]) -> FloatArray:
        """Return what each of some sets of columns adds to the values, (F, n, d_c)."""
        design = self.columns.design(rows)
        of_weights = self.columns.of_weights
        weights = np.array(self.weights)
        return np.stack(
            [
                design.times(np.where(np.isin(of_weights, each)[:, None], weights, 0.0))
                for each in columns
            ]
        )


def linear_epochs_of(settings: "Settings") -> int:
    """Return in how many epochs tables may fit linear models before they grow trees.

    None judges them without validation rows, and a saved model has taken their place.
    """
    if settings.start or not settings.validation_share:
        return 0
    return min(settings.of(BoostSettings).linear_epochs, settings.epochs // 4)


def is_linear(text: str) -> bool:
    """Whether a text is that of a linear model, not of trees."""
    return text.startswith("{")


def fit_linear(
    rows: TreeRows,
    gradient: FloatArray,
    hessian: FloatArray,
    counts: AnyArray,
    codes: Sequence[int],
    fit: RidgeFit,
) -> tuple[AnyArray, FloatArray]:
    """Return a linear model as its text's bytes, and its values of all rows (n, d_c).

    Args:
        rows: (n, d), the trained ones first; missing values are NaN.
        gradient: G (n_trained, d_c).
        hessian: H (n_trained, d_c), above 0.
        counts: the joined rows of each trained row, (n_trained,).
        codes: the columns that are codes of categories.
        fit: how it is fitted.
    """
    trained = len(gradient)
    columns = DesignColumns()
    if trained:
        columns = _columns(rows[:trained], counts, codes, fit.least_rows)
    if not columns.of_weights:
        return np.zeros(0, np.uint8), np.zeros((rows.shape[0], gradient.shape[1]))
    design = columns.design(rows)
    of_trained = design.first(trained)
    weights = np.stack(
        [
            _solve(
                *(of_trained, gradient[:, output], hessian[:, output]),
                is_shrunk=fit.is_shrunk,
            )
            for output in range(gradient.shape[1])
        ],
        axis=1,
    )
    # twice what a weight lowers the loss, as in trees
    gains = sum(
        of_trained.squared(hessian[:, output]) * weights[:, output] ** 2
        for output in range(gradient.shape[1])
    )
    part = LinearPart(columns, weights.tolist(), np.asarray(gains).tolist())
    return part.text(), design.times(weights)


def _columns(
    rows: TreeRows, counts: AnyArray, codes: Sequence[int], least_rows: int
) -> DesignColumns:
    """Return how the columns of the trained rows are read."""
    weights = counts / counts.sum()
    categories: dict[int, list[int]] = {}
    for column in codes:
        values = column_of(rows, column)
        is_present = ~np.isnan(values)
        numbers = values[is_present].astype(np.int64)
        sizes = (
            np.bincount(numbers, counts[is_present]) if len(numbers) else np.zeros(0)
        )
        enough = sizes >= min(least_rows, CATEGORY_ROWS)
        categories[column] = np.flatnonzero(enough).tolist()
    if not isinstance(rows, np.ndarray):
        return DesignColumns(*_sparse_scales(rows, weights, codes), [], categories)
    means, scales = {}, {}
    missing: list[int] = []
    for column in sorted(set(range(rows.shape[1])) - set(codes)):
        values = column_of(rows, column)
        is_missing = np.isnan(values)
        share = 1.0 - float(weights[is_missing].sum())
        mean = 0.0
        if share > 0.0:
            mean = float(weights @ np.nan_to_num(values)) / share
        centred = np.where(is_missing, 0.0, values - mean)
        deviation = float(np.sqrt(weights @ centred**2))
        if deviation > 0.0:
            means[column], scales[column] = mean, deviation
        absent, present = counts[is_missing].sum(), counts[~is_missing].sum()
        if min(absent, present) >= least_rows:
            missing.append(column)
    return DesignColumns(means, scales, missing, categories)


def _sparse_scales(
    rows: "csr_matrix", weights: FloatArray, codes: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return means of 0, and the root of the mean square, of sparse columns."""
    squares = rows.copy()
    squares.data = np.nan_to_num(squares.data.astype(np.float64)) ** 2
    size = np.sqrt(squares.T @ weights)
    used = [int(c) for c in np.flatnonzero(size) if c not in set(codes)]
    return dict.fromkeys(used, 0.0), {column: float(size[column]) for column in used}


def _solve(
    design: Design, gradient: FloatArray, mass: FloatArray, *, is_shrunk: bool
) -> FloatArray:
    """Return the weights (k,) of one output, with its G and H, (n,)."""
    penalty = max(PENALTY * float(mass.sum()), FEWEST_ROWS * float(mass.mean()))
    right = -design.back(gradient)
    if design.width <= MOST_DIRECT:
        values, vectors = np.linalg.eigh(design.gram(mass))
        values, turned = np.maximum(values, 0.0), vectors.T @ right
        if is_shrunk:
            total = float((gradient**2 / mass).sum())
            choices = np.maximum(PENALTIES * float(mass.sum()), penalty)
            penalty = choose_penalty(values, turned, total, len(mass), choices)
        return np.asarray(vectors @ (turned / (values + penalty)), np.float64)

    def product(vector: FloatArray) -> FloatArray:
        return design.back(mass * design.times(vector)) + penalty * vector

    return solve_symmetric(
        product,
        right,
        design.squared(mass) + penalty,
        tolerance=PRECISION,
        steps=ITERATIONS,
    )


def choose_penalty(
    values: FloatArray,
    turned: FloatArray,
    total: float,
    rows: int,
    penalties: FloatArray,
) -> float:
    """Return the penalty of least generalised cross-validation.

    Where the columns can fit every row nothing is left to judge by: it is the first.

    Args:
        values: the eigenvalues of X^T diag(H) X, (k,), 0 or above.
        turned: X^T (-G) along their vectors, (k,).
        total: the squares of the answers, times their weights, summed.
        rows: n.
        penalties: to choose from, ascending.
    """
    if rows <= len(values):
        return float(penalties[0])
    sums = values + penalties[:, None]
    # of the squares, what theta(lambda) explains
    explained = (turned**2 * (sums + penalties[:, None]) / sums**2).sum(axis=1)
    freedom = (values / sums).sum(axis=1)
    scores = np.maximum(total - explained, 0.0) / (rows - freedom) ** 2
    return float(penalties[np.argmin(scores)])


def column_of(rows: TreeRows, column: int) -> FloatArray:
    """Return a column of rows, float64 (n,)."""
    values = rows[:, [column]]
    if not isinstance(values, np.ndarray):
        values = values.toarray()
    return values.ravel().astype(np.float64)


def _indicators(values: FloatArray, codes: Sequence[int]) -> "csr_matrix":
    """Return the one-hot encoding of codes, (n, categories); 0 for all others."""
    from scipy.sparse import csr_matrix

    categories = np.array(codes, np.float64)
    index = np.minimum(np.searchsorted(categories, values), max(len(categories) - 1, 0))
    is_known = np.zeros(len(values), np.bool_)
    if len(categories):
        is_known = categories[index] == values
    row = np.flatnonzero(is_known)
    ones = np.ones(len(row), np.float32)
    return csr_matrix((ones, (row, index[row])), shape=(len(values), len(categories)))
