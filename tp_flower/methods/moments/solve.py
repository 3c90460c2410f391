"""Linear models from the second moments of the joined rows.

Least squares with a ridge penalty, as the other methods have it:

    min over theta, b of  1/(2 N) sum_j |x_j theta + b - y_j|^2 + l2/2 |theta|^2

For classes, the columns of y are indicators, and the model is the linear discriminant
(Hastie, Tibshirani, Friedman 2009, section 4.3): its scores are the log odds of classes
whose features are normal with one covariance, which the moments determine. Its
direction is that of least squares on the indicators; its scale and intercept make
probabilities of it.

Notation:
    D  columns of all tables        d  features        k  columns of the label
    N  joined rows                  d_c  scores
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.methods.moments.noise import LabelUnit

SLACK = 1e-6
MOST_DEVIATIONS = 8.0
"""Of noise: so far from its mean is one entry in 10^15."""
LEAST_EIGENVALUE = 1e-11
"""Of the largest: below it, rounding decides about a direction; it gets no weight."""


class Solution(NamedTuple):
    """Coefficients (d, d_c) of the features, and intercepts (d_c,)."""

    coefficients: FloatArray
    intercept: FloatArray


class Spectrum(NamedTuple):
    """Eigenvalues (d,) and eigenvectors (d, d) of a positive semidefinite matrix.

    The values ascend; those in which nothing but rounding is left are 0.
    """

    values: FloatArray
    vectors: FloatArray

    @classmethod
    def of(cls, matrix: FloatArray, least: float = 0.0) -> Self:
        """Return the spectrum of a symmetric matrix (d, d), each value at least so."""
        if not len(matrix):
            return cls(np.zeros(0), matrix)
        values, vectors = np.linalg.eigh(matrix)
        if least:
            return cls(np.maximum(values, least), vectors)
        return cls(
            np.where(values > LEAST_EIGENVALUE * values[-1], values, 0.0), vectors
        )

    @property
    def rank(self) -> int:
        """The number of eigenvalues above 0."""
        return int(np.count_nonzero(self.values))

    def inverses(self, l2: float) -> FloatArray:
        """Return the eigenvalues of the pseudoinverse after adding l2 to all, (d,)."""
        shifted = self.values + l2
        is_kept = shifted > LEAST_EIGENVALUE * shifted.max(initial=0.0)
        inverses: FloatArray = np.divide(
            1.0, shifted, out=np.zeros_like(shifted), where=is_kept
        )
        return inverses

    def solve(self, l2: float, right: FloatArray) -> FloatArray:
        """Return (matrix + l2)^+ right, (d, k): of all solutions the shortest."""
        solution: FloatArray = self.vectors @ (
            self.inverses(l2)[:, None] * (self.vectors.T @ right)
        )
        return solution


@dataclass(frozen=True, eq=False)
class JoinedMoments:
    """S, the sums of products of columns over the joined rows of a pass, (D, D).

    Attributes:
        features: positions of the features, (d,).
        labels: positions of the label's columns, (k,).
        intercept: position of the column of ones.
        deviations: of the noise on them, (D, D), a numeric label's in the unit that it
            is clipped in; None without.
        label_unit: that unit.
    """

    matrix: FloatArray
    features: IndexArray
    labels: IndexArray
    intercept: int
    deviations: FloatArray | None = None
    label_unit: LabelUnit = field(default_factory=LabelUnit)

    def scaled(self, factor: float) -> "JoinedMoments":
        """Return the moments of rows that weigh so many times as much."""
        return replace(self, matrix=factor * self.matrix)

    def without_intercept(
        self, scales: FloatArray, *taken: "JoinedMoments"
    ) -> "JoinedMoments":
        """Return those of an information whose means are in the label's columns.

        The sums of the features times each of these are added, squared and scaled (k,),
        and other moments of the features ``taken`` off; the intercept, which such an
        information does not have, is beside all others.
        """
        # constants have no information: rounding then multiplies deviations alone
        centre = np.eye(len(self.matrix))
        centre[self.features, self.intercept] = -self.mean_features
        centred = centre @ self.matrix @ centre.T
        of_features = np.ix_(self.features, self.features)
        sums = centred[np.ix_(self.features, self.labels)]
        information = centred[of_features] + (sums * scales) @ sums.T
        for others in taken:
            information -= (centre @ others.matrix @ centre.T)[of_features]
        matrix = np.zeros_like(self.matrix)
        matrix[of_features] = information
        matrix[self.intercept, self.intercept] = self.joined_rows
        return replace(self, matrix=matrix)

    def are_of(self, joined_rows: int) -> bool:
        """Return whether they can be moments of so many joined rows.

        Uniform words, which are what altered words or counts leave, can hardly be.
        """
        noise = np.zeros_like(self.matrix)
        if self.deviations is not None:
            noise = MOST_DEVIATIONS * self.deviations
        squares = np.diag(self.matrix + noise)
        if not np.all(squares >= 0.0) or self.joined_rows != joined_rows:
            return False
        # Cauchy and Schwarz, but for noise and rounding to fixed point
        bound = np.sqrt(np.outer(squares, squares)) * (1.0 + SLACK) + SLACK + noise
        return bool(np.all(np.abs(self.matrix) <= bound))

    def in_unit_of(self, label: LabelUnit) -> "JoinedMoments":
        """Return the moments of a numeric label that was clipped in another unit."""
        matrix = self._unclipped(self.matrix, label)
        return replace(self, matrix=matrix, label_unit=label)

    def _unclipped(self, matrix: FloatArray, label: LabelUnit) -> FloatArray:
        """Return sums (D, D) of a label that was clipped in a unit, in its own."""
        matrix = matrix.copy()
        matrix[self.labels] *= label.half
        matrix[self.labels] += label.middle * matrix[self.intercept]
        matrix[:, self.labels] *= label.half
        matrix[:, self.labels] += label.middle * matrix[:, [self.intercept]]
        return matrix

    def positive(self) -> "JoinedMoments":
        """Return moments that rows could have, near those that noise has moved.

        In no direction there is less than the deviation of the noise.
        """
        if self.deviations is None:
            return self
        values, vectors = np.linalg.eigh(self.matrix)
        floored = np.maximum(values, self.deviations.max())
        return replace(self, matrix=(vectors * floored) @ vectors.T, deviations=None)

    def with_more_noise(self, generator: np.random.Generator) -> "JoinedMoments":
        """Return the moments with further noise, as much as they have."""
        if self.deviations is None:
            return self
        upper = np.triu(self.deviations * generator.normal(size=self.matrix.shape))
        noise = self._unclipped(upper + np.triu(upper, 1).T, self.label_unit)
        return replace(self, matrix=self.matrix + noise)

    def noise_along(self, combination: FloatArray) -> FloatArray:
        """Return the covariance (D, D) of the noise on S v, for a combination v (D,).

        Rows and columns of the label are not in its own unit.
        """
        if self.deviations is None:
            return np.zeros_like(self.matrix)
        along = combination.copy()
        along[self.intercept] += self.label_unit.middle * combination[self.labels].sum()
        along[self.labels] *= self.label_unit.half
        variances = self.deviations**2
        # a moment of two columns is in two rows of S
        covariance: FloatArray = variances * np.outer(along, along)
        np.fill_diagonal(covariance, variances @ along**2)
        return covariance

    @property
    def noise_ridge(self) -> FloatArray:
        """The ridge on each feature, (d,), that keeps noise from taking over.

        It is the spectral norm of noise as on the feature's moments, per joined row:
        for equal noise on d features of one table, sigma sqrt(2 d) / N. Of half to
        eight times of that, it was best, or within 0.03 of R2, for every table of
        flights, store and MovieLens whose noise the models stand.
        """
        if self.deviations is None:
            return np.zeros(len(self.features))
        of_features = self.deviations[np.ix_(self.features, self.features)]
        norms: FloatArray = 2.0 * np.linalg.norm(of_features, axis=1)
        return norms / self.joined_rows

    @property
    def of_parameters(self) -> FloatArray:
        """The moments of the features and the intercept, which is last, (d + 1, d + 1).

        In their order a model has its coefficients.
        """
        order = [*self.features, self.intercept]
        matrix: FloatArray = self.matrix[np.ix_(order, order)]
        return matrix

    @property
    def joined_rows(self) -> float:
        """N."""
        return float(self.matrix[self.intercept, self.intercept])

    @property
    def mean_features(self) -> FloatArray:
        """The features' means, (d,)."""
        return self._means(self.features)

    @property
    def mean_labels(self) -> FloatArray:
        """The means of the label's columns, (k,)."""
        return self._means(self.labels)

    def _means(self, columns: IndexArray) -> FloatArray:
        means: FloatArray = self.matrix[columns, self.intercept] / self.joined_rows
        return means

    @property
    def label_deviation(self) -> float:
        """The root of the mean variance of the label's columns; 1 for a constant."""
        variances = np.diag(self.covariance_of(self.labels, self.labels))
        return float(np.sqrt(max(variances.mean(), 0.0))) or 1.0

    @property
    def covariance(self) -> FloatArray:
        """The features' covariance, (d, d), with the ridge that its noise needs."""
        covariance = self.covariance_of(self.features, self.features)
        return covariance + np.diag(self.noise_ridge)

    @property
    def _least(self) -> float:
        """What eigenvalues are at least, where noise may make them negative."""
        return float(self.noise_ridge.mean()) if len(self.features) else 0.0

    @cached_property
    def spectrum(self) -> Spectrum:
        """That of the features' covariance."""
        return Spectrum.of(self.covariance, self._least)

    def covariance_of(self, left: IndexArray, right: IndexArray) -> FloatArray:
        """Return the covariances of some columns with others, (len(left), len(right)).

        Divided by N, as the objective is.
        """
        moments = self.matrix[np.ix_(left, right)] / self.joined_rows
        covariance: FloatArray = moments - np.outer(
            self._means(left), self._means(right)
        )
        return covariance

    def ridge(self, l2: float) -> Solution:
        """Return the least-squares fit of the label's columns."""
        cross = self.covariance_of(self.features, self.labels)
        return self.with_intercept(self.spectrum.solve(l2, cross))

    def with_intercept(self, coefficients: FloatArray) -> Solution:
        """Return coefficients (d, k) with the intercepts that fit best."""
        intercept = self.mean_labels - self.mean_features @ coefficients
        return Solution(coefficients, intercept)

    def discriminant(self, l2: float) -> Solution:
        """Return the linear discriminant: one score of two classes, else one of each.

        The ridge is added to the covariance within the classes.
        """
        shares = self._label_shares
        means = self.matrix[np.ix_(self.labels, self.features)] / (
            shares[:, None] * self.joined_rows
        )
        if len(shares) == 1:
            other = (self.mean_features - shares * means) / (1.0 - shares)
            means = np.concatenate([other, means])
            shares = np.array([1.0 - shares[0], shares[0]])
        centred = means - self.mean_features
        within = self.covariance - (centred * shares[:, None]).T @ centred
        # from the mean: what all classes share says nothing of either, and columns
        # that add up to 1 have no variance along it
        coefficients = Spectrum.of(within, self._least).solve(l2, centred.T)
        middle = self.mean_features + 0.5 * centred
        intercept = np.log(shares) - (middle.T * coefficients).sum(axis=0)
        if len(self.labels) == 1:
            coefficients = coefficients[:, 1:] - coefficients[:, :1]
            intercept = intercept[1:] - intercept[:1]
        return Solution(coefficients, intercept)

    @property
    def class_scores(self) -> FloatArray:
        """The scores that the classes' shares alone give, (k,), or (1,) of two."""
        scores: FloatArray = np.log(self._label_shares)
        if len(scores) == 1:
            scores = scores - np.log1p(-self._label_shares)
        return scores

    @property
    def _label_shares(self) -> FloatArray:
        """The shares of the label's columns, where they are indicators of classes."""
        # noise may leave less than nothing of a class
        least = 1.0 / self.joined_rows
        shares: FloatArray = np.clip(self.mean_labels, least, 1.0 - least)
        return shares

    def metrics(self, solution: Solution) -> dict[str, float]:
        """Return the loss, RMSE and R2 of a least-squares fit, over all its columns."""
        fit = np.zeros((len(self.matrix), len(self.labels)))
        fit[self.features] = solution.coefficients
        fit[self.intercept] = solution.intercept
        fit[self.labels, np.arange(len(self.labels))] = -1.0
        # rounding may make the square of a perfect fit negative
        squares = np.maximum((fit * (self.matrix @ fit)).sum(axis=0), 0.0)
        mean_square = float(squares.sum()) / self.joined_rows
        variance = float(np.trace(self.covariance_of(self.labels, self.labels)))
        metrics = {"loss": 0.5 * mean_square, "rmse": float(np.sqrt(mean_square))}
        if variance > 0.0:
            metrics["r2"] = 1.0 - mean_square / variance
        return metrics

    def constant(self) -> Solution:
        """Return the fit of the label's means alone."""
        shape = (len(self.features), len(self.labels))
        return Solution(np.zeros(shape), self.mean_labels)
