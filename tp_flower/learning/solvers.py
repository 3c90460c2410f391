"""Exact solutions with a table's Hessian: the theta-update of ADMM, and CG's steps.

The theta-update is a weighted least-squares fit of the target:

    theta_i = argmin  beta R(theta)
                      + (kappa / 2N) sum_j G_ij ||f_i(theta; T_ij) - target_ij||^2

with kappa = c * rho. This is the paper's Eq. 14-16 with the square completed, so that
only the target travels. Linear models have a closed form, which takes one product with
the features per epoch, after one eigendecomposition for all rho.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IntArray, blocks
from tp_flower.features.sparse import EncodedRows, SparseRows, columns_of, dense
from tp_flower.learning.models.local_model import Features, LinearModel, moment

RANK_TOLERANCE = 1e-11

MOST_COLUMNS = 4096
"""A Gram matrix of as many columns takes about 20 s to factorise, eight times as long
for twice as many."""
FREQUENT = 1024  # columns of the block of a wider table; the others have a diagonal
BY_COLUMNS = "columns"
BY_ROWS = "rows"
BY_FREQUENT = "frequent columns, diagonal"
ITERATIVE = "none: iterative"
"""Factorisations of a table's Hessian."""
ITERATIVE_TOLERANCE = 1e-10  # of the residual, relative
MOST_ITERATIONS = 2000

GRAM_VALUES = 1 << 22  # float64 values in a block of rows, 32 MB
LEAST_ROWS = 256


def gram(
    features: "Features | FloatArray",
    multiplicity: AnyArray,
    *,
    intercept: bool = False,
) -> FloatArray:
    """Return [T, 1]^T diag(G) [T, 1], (d [+ 1], d [+ 1]), which shards may sum.

    BLAS computes only half of it, as the symmetric A^T A with A = sqrt(G) [T, 1].

    >>> gram(np.array([[1], [2]], dtype=np.float32), np.array([1, 4]), intercept=True)
    array([[17.,  9.],
           [ 9.,  5.]])
    """
    if isinstance(features, SparseRows):
        return _sparse_gram(features, multiplicity, intercept=intercept)
    width = features.shape[1] + int(intercept)
    total = np.zeros((width, width))
    size = max(GRAM_VALUES // max(width, 1), LEAST_ROWS)
    buffer = np.empty((min(size, len(features)), width))
    for block in blocks(len(features), size):
        rows = buffer[: block.stop - block.start]
        rows[:, : features.shape[1]] = features[block]
        rows[:, features.shape[1] :] = 1.0
        rows *= np.sqrt(multiplicity[block], dtype=np.float64)[:, None]
        total += rows.T @ rows
    return total


def _sparse_gram(
    features: SparseRows, multiplicity: AnyArray, *, intercept: bool
) -> FloatArray:
    """Return the weighted Gram matrix of sparse rows, block by block."""
    width = features.width
    total = np.zeros((width + int(intercept), width + int(intercept)))
    for block in blocks(
        len(features), max(GRAM_VALUES // max(features.stored, 1), LEAST_ROWS)
    ):
        rows = features[block].matrix(np.sqrt(multiplicity[block], dtype=np.float64))
        product = (rows.T @ rows).tocoo()
        total[product.row, product.col] += product.data
    if intercept:
        counts = np.asarray(multiplicity, np.float64)[:, None]
        total[:, -1] = total[-1] = moment(features, counts, intercept=True).ravel()
    return total


def factorisation(rows: int, columns: int, *, is_exact: bool) -> str:
    """Return the cheapest factorisation of a table's Hessian.

    None has more than MOST_COLUMNS^2 numbers: a wider table is solved for iteratively.
    One that need not be exact takes its frequent columns and a diagonal.

    >>> factorisation(100, 300, is_exact=True)
    'rows'
    """
    if 0 < rows < columns and rows * columns <= MOST_COLUMNS**2:
        return BY_ROWS
    if columns <= MOST_COLUMNS:
        return BY_COLUMNS
    return ITERATIVE if is_exact else BY_FREQUENT


def largest_eigenvalue(
    features: Features, multiplicity: AnyArray, *, intercept: bool
) -> float:
    """Return the largest eigenvalue of a table's Gram matrix by Lanczos iteration.

    The matrix is not built.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    width = features.shape[1] + int(intercept)
    model = LinearModel(features.shape[1], 1, intercept=intercept)

    def product(vector: FloatArray) -> FloatArray:
        scores = model.at(vector.ravel()).scores(features)
        return model.pullback(features, multiplicity[:, None] * scores)

    operator = LinearOperator((width, width), product, dtype=np.float64)
    (largest,) = eigsh(
        operator, 1, which="LA", v0=np.ones(width), return_eigenvectors=False
    )
    return float(max(largest, 0.0))


def column_squares(features: Features, weights: AnyArray) -> FloatArray:
    """Return the sum of squares of each column over rows with weights (n,), (d,)."""
    if isinstance(features, SparseRows):
        return features.square_sums(weights)
    squares = np.zeros(features.shape[1])
    for span in blocks(len(features), LEAST_ROWS):
        squares += weights[span] @ np.square(features[span], dtype=np.float64)
    return squares


@dataclass(frozen=True)
class RidgeSolver:
    """The exact theta-update of a linear model, for every rho, from its Gram matrix.

    The intercept is not penalised: it is eliminated by centring, so that one
    eigendecomposition V diag(s) V^T of the centred Gram matrix / N serves all kappa:

        W = V (kappa V^T m) / (kappa s + beta),  c = mean target - mean row W

    ``mean`` is the weighted mean row, (d,), and ``weight`` the sum of G / N; both are 0
    without intercept. N is ``joined_rows``.

    V has a column per row of the table if these are fewer. If V is of the columns in
    ``block`` alone, (k,), the others are their own eigenvectors, after it.
    """

    eigenvalues: FloatArray
    eigenvectors: FloatArray
    mean: FloatArray
    block: IntArray
    weight: float
    joined_rows: int

    @classmethod
    def from_gram(
        cls, matrix: FloatArray, joined_rows: int, *, intercept: bool
    ) -> "RidgeSolver":
        """Factorise [T, 1]^T diag(G) [T, 1] (or T^T diag(G) T without intercept)."""
        matrix = matrix / joined_rows
        if not intercept:
            mean = np.zeros(len(matrix))
            weight = 0.0
        else:
            weight = float(matrix[-1, -1])
            mean = matrix[-1, :-1] / weight
            matrix = matrix[:-1, :-1] - weight * np.outer(mean, mean)
        values, vectors = np.linalg.eigh(matrix)
        block = np.arange(len(mean))
        return cls(np.maximum(values, 0.0), vectors, mean, block, weight, joined_rows)

    @classmethod
    def from_rows(
        cls,
        features: EncodedRows,
        multiplicity: AnyArray,
        joined_rows: int,
        *,
        intercept: bool,
    ) -> "RidgeSolver":
        """Factorise the Gram matrix of few rows (n, d), by n numbers for each column.

        Moments are sums of rows, and parameters are, if they begin at 0: what V leaves
        out is never needed.
        """
        counts, weight, mean = _centre(
            features, multiplicity, joined_rows, intercept=intercept
        )
        rows = np.sqrt(counts)[:, None] * (dense(features) - mean)
        _, sizes, vectors = np.linalg.svd(rows, full_matrices=False)
        return cls(sizes**2, vectors.T, mean, np.arange(len(mean)), weight, joined_rows)

    @classmethod
    def from_frequent(
        cls,
        features: EncodedRows,
        multiplicity: AnyArray,
        joined_rows: int,
        *,
        intercept: bool,
    ) -> "RidgeSolver":
        """Factorise the columns of most variance together, and all others alone."""
        counts, weight, mean = _centre(
            features, multiplicity, joined_rows, intercept=intercept
        )
        squares = column_squares(features, counts)
        variances = np.maximum(squares - weight * mean**2, 0.0)
        order = np.argsort(-variances, kind="stable")
        block = np.sort(order[:FREQUENT])
        others = np.sort(order[FREQUENT:])
        matrix = gram(columns_of(features, block), multiplicity, intercept=intercept)
        inner = cls.from_gram(matrix, joined_rows, intercept=intercept)
        values = np.concatenate([inner.eigenvalues, variances[others]])
        return replace(inner, eigenvalues=values, mean=mean, block=block)

    def _rotate(self, columns: FloatArray) -> FloatArray:
        """Return V^T times an array, (d, d_c)."""
        if len(self.block) == len(columns):
            return self.eigenvectors.T @ columns
        inner = self.eigenvectors.T @ columns[self.block]
        return np.concatenate([inner, np.delete(columns, self.block, axis=0)])

    def _rotate_back(self, rotated: FloatArray) -> FloatArray:
        """Return V times an array, (d, d_c)."""
        if len(self.block) == len(self.mean):
            return self.eigenvectors @ rotated
        size = self.eigenvectors.shape[1]
        columns = np.empty((len(self.mean), rotated.shape[1]))
        columns[self.block] = self.eigenvectors @ rotated[:size]
        columns[np.delete(np.arange(len(columns)), self.block)] = rotated[size:]
        return columns

    @property
    def trace(self) -> float:
        """The trace of [T, 1]^T diag(G) [T, 1] / N."""
        return float(self.eigenvalues.sum()) + self.weight * (
            float(self.mean @ self.mean) + 1.0
        )

    def product(self, parameters: FloatArray) -> FloatArray:
        """Return the Gram matrix times parameters (d [+ 1], d_c): their moments."""

        def product(weights: FloatArray) -> FloatArray:
            return self._rotate_back(self.eigenvalues[:, None] * self._rotate(weights))

        return self.joined_rows * _multiply_with_intercept(
            product, parameters, self.mean, self.weight
        )

    def solve(self, moments: FloatArray, kappa: float, l2: float) -> FloatArray:
        """Return the parameters (d [+ 1], d_c) of the theta-update.

        ``moments`` are [T, 1]^T (G * target), (d [+ 1], d_c), summed over the shards;
        if ``l2`` is 0, the solution of least norm is returned.
        """
        curvature = kappa * self.eigenvalues
        usable = curvature + l2 > RANK_TOLERANCE * curvature.max(initial=0.0)
        scale = np.where(usable, 1.0 / np.where(usable, curvature + l2, 1.0), 0.0)

        def solve(centred: FloatArray) -> FloatArray:
            return self._rotate_back(kappa * self._rotate(centred) * scale[:, None])

        return _eliminate_intercept(
            solve, moments / self.joined_rows, self.mean, self.weight
        )


def _centre(
    features: EncodedRows, multiplicity: AnyArray, joined_rows: int, *, intercept: bool
) -> tuple[FloatArray, float, FloatArray]:
    """Return G / N, (n,), and the solver's ``weight`` and ``mean``."""
    counts = multiplicity / joined_rows
    weight = float(counts.sum()) if intercept else 0.0
    if not weight:
        return counts, weight, np.zeros(features.shape[1])
    return (
        counts,
        weight,
        moment(features, counts[:, None], intercept=False).ravel() / weight,
    )


@dataclass(frozen=True)
class IterativeSolver:
    """The theta-update of a wide linear model by conjugate gradients on a table's rows.

    It has the parameters of :class:`RidgeSolver` to ``ITERATIVE_TOLERANCE``, in the
    memory of the rows and of a few vectors. With ``weight`` > 0 the intercept is
    eliminated by centring; otherwise ``model``, of one output, says whether it is one
    of the parameters to solve for.

    Attributes:
        features: (n, d), with ``counts`` G / N, (n,).
        mean: the weighted mean row, (p,), zeros without centring.
        diagonal: of the matrix that is solved with, but for kappa and l2, (p,).
    """

    model: LinearModel
    features: Features
    counts: FloatArray
    mean: FloatArray
    diagonal: FloatArray
    weight: float
    joined_rows: int

    @classmethod
    def of_rows(
        cls,
        features: EncodedRows,
        multiplicity: AnyArray,
        joined_rows: int,
        *,
        intercept: bool,
        centred: bool,
    ) -> "IterativeSolver":
        """Return a table's solver, with no penalty on its intercept if ``centred``."""
        is_centred = intercept and centred
        counts, weight, mean = _centre(
            features, multiplicity, joined_rows, intercept=is_centred
        )
        diagonal = np.maximum(column_squares(features, counts) - weight * mean**2, 0.0)
        model = LinearModel(features.shape[1], 1, intercept=intercept and not centred)
        if model.intercept:
            mean = np.append(mean, 0.0)
            diagonal = np.append(diagonal, counts.sum())
        return cls(model, features, counts, mean, diagonal, weight, joined_rows)

    @property
    def trace(self) -> float:
        """The trace of [T, 1]^T diag(G) [T, 1] / N."""
        return float(self.diagonal.sum()) + self.weight * (
            float(self.mean @ self.mean) + 1.0
        )

    def _centred_product(self, vector: FloatArray) -> FloatArray:
        """Return the centred Gram matrix / N times a vector, (p,)."""
        scores = self.model.at(vector.ravel()).scores(self.features)
        # of scores about their mean, the sum over the rows is 0
        return self.model.pullback(
            self.features, self.counts[:, None] * (scores - self.mean @ vector.ravel())
        )

    def product(self, parameters: FloatArray) -> FloatArray:
        """Return the Gram matrix times parameters (d [+ 1], d_c): their moments."""

        def product(weights: FloatArray) -> FloatArray:
            return np.stack(
                [self._centred_product(column) for column in weights.T], axis=1
            )

        return self.joined_rows * _multiply_with_intercept(
            product, parameters, self.mean, self.weight
        )

    def solve(self, moments: FloatArray, kappa: float, l2: float) -> FloatArray:
        """Return the parameters (d [+ 1], d_c) of the theta-update.

        See ``RidgeSolver.solve``.
        """
        # without a penalty, only plain steps from 0 end at the solution of least norm
        diagonal = kappa * self.diagonal + l2 if l2 else None

        def product(vector: FloatArray) -> FloatArray:
            return kappa * self._centred_product(vector) + l2 * vector.ravel()

        def solve(centred: FloatArray) -> FloatArray:
            columns = [
                solve_symmetric(
                    product,
                    kappa * right,
                    diagonal,
                    tolerance=ITERATIVE_TOLERANCE,
                    steps=MOST_ITERATIONS,
                )
                for right in centred.T
            ]
            return np.stack(columns, axis=1)

        return _eliminate_intercept(
            solve, moments / self.joined_rows, self.mean, self.weight
        )


Solver = RidgeSolver | IterativeSolver


def solve_symmetric(
    product: Callable[[FloatArray], FloatArray],
    right: FloatArray,
    diagonal: FloatArray | None,
    *,
    tolerance: float,
    steps: int,
) -> FloatArray:
    """Return the solution x (k,) of A x = b, by conjugate gradients.

    A is symmetric and positive definite.

    Args:
        product: returns A v.
        right: b.
        diagonal: of A, by which the residual is scaled; None to leave it.
        tolerance: of the residual, relative to b.
        steps: at most.
    """
    from scipy.sparse.linalg import LinearOperator, cg

    shape = len(right), len(right)
    scaled = None
    if diagonal is not None:
        scaled = LinearOperator(shape, lambda v: v.ravel() / diagonal)
    operator = LinearOperator(shape, product, dtype=np.float64)
    solution, _ = cg(operator, right, rtol=tolerance, maxiter=steps, M=scaled)
    x: FloatArray = solution
    return x


def _multiply_with_intercept(
    product: Callable[[FloatArray], FloatArray],
    parameters: FloatArray,
    mean: FloatArray,
    weight: float,
) -> FloatArray:
    """Return the Gram matrix / N times parameters (d [+ 1], d_c).

    ``product`` multiplies weights by the centred matrix.
    """
    if not weight:
        return product(parameters)
    weights = parameters[:-1]
    total = weight * (mean @ weights + parameters[-1])
    return np.vstack([product(weights) + np.outer(mean, total), total])


def _eliminate_intercept(
    solve: Callable[[FloatArray], FloatArray],
    moments: FloatArray,
    mean: FloatArray,
    weight: float,
) -> FloatArray:
    """Return the parameters (d [+ 1], d_c) for moments.

    ``solve`` returns those for centred moments.
    """
    if not weight:
        return solve(moments)
    centre = moments[-1] / weight
    weights = solve(moments[:-1] - weight * np.outer(mean, centre))
    return np.vstack([weights, centre - mean @ weights])


def exact_update(
    solver: Solver, theta: FloatArray, moments: FloatArray, kappa: float, l2: float
) -> FloatArray:
    """Return theta after its update, (p, d_c), from where the scores step off.

    ``moments`` are [T, 1]^T (G * (target - h)), (p, d_c), summed over the shards, where
    h are the scores of ``theta``, (p, d_c): their own moments need no row.
    """
    return solver.solve(solver.product(theta) + moments, kappa, l2)


@dataclass(frozen=True)
class Iterate:
    """The iterate z of an accelerated descent, the point ``ahead``, y, and t."""

    point: FloatArray
    ahead: FloatArray
    momentum: float = 1.0

    @classmethod
    def at(cls, point: FloatArray) -> "Iterate":
        """Return the start of a descent."""
        return cls(point, point)

    def advance(self, point: FloatArray, *, is_accelerated: bool = True) -> "Iterate":
        """Return the iterate after a step to z+; y+ = z+ if it is not accelerated."""
        if not is_accelerated:
            return Iterate.at(point)
        step = point - self.point
        if float(np.vdot(self.ahead - point, step)) > 0.0:
            return Iterate.at(point)
        momentum = (1.0 + math.sqrt(1.0 + 4.0 * self.momentum**2)) / 2.0
        return Iterate(point, point + (self.momentum - 1.0) / momentum * step, momentum)

    def change_to(self, point: FloatArray) -> float:
        """Return ||y - z+|| / max(1, ||z+||): 0 if and only if z+ = y is optimal."""
        return float(np.linalg.norm(self.ahead - point)) / max(
            1.0, float(np.linalg.norm(point))
        )


def descend(
    gradient: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    step: float,
    *,
    tolerance: float,
    most_steps: int,
) -> FloatArray:
    """Return the minimiser of a smooth function of (p,), given its gradient.

    ``step`` is at most 1 over the largest curvature; the descent ends when the relative
    change of a step is within the tolerance.

    >>> to_twos = lambda z: [1.0, 0.1] * (z - 2.0)
    >>> end = descend(to_twos, np.zeros(2), 1.0, tolerance=1e-12, most_steps=500)
    >>> end.round(9).tolist()
    [2.0, 2.0]
    """
    iterate = Iterate.at(start)
    for _ in range(most_steps):
        point = iterate.ahead - step * gradient(iterate.ahead)
        change = iterate.change_to(point)
        iterate = iterate.advance(point)
        if change <= tolerance:
            break
    return iterate.point
