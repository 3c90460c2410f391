"""The objective of one site: the penalised mean loss of its own rows.

    f(theta) = (1/n) sum_j loss(b + h(theta; x_j), y_j) + l2/2 ||theta||^2

over its n trained rows; the penalty leaves out biases. A site without trained rows has
f = l2/2 ||theta||^2.

Notation:
    b      ``base``         (d_c,), the same at all sites
    theta  ``parameters``   (p,)
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray, blocks
from tp_flower.learning.models import local_model
from tp_flower.learning.solvers import MOST_COLUMNS, gram, largest_eigenvalue
from tp_flower.objectives import Objective
from tp_flower.randomness import NoiseSource

POWER_STEPS = 20  # power steps to estimate an MLP's largest curvature
CURVATURE_MARGIN = 4.0  # of an MLP's curvature, measured at the start
FINITE_STEP = 1e-3  # of the difference in place of a Hessian product


@dataclass(frozen=True)
class SiteObjective:
    """The objective f of a site, over its trained rows, with features (n, d).

    ``mean_loss`` is its part without the penalty, a function of scores (n, d_c).

    Evaluating it sets the model's parameters.
    """

    model: local_model.LocalModel
    features: local_model.Features
    mean_loss: Objective
    base: FloatArray
    l2: float

    def scores(
        self, features: local_model.Features, parameters: FloatArray
    ) -> FloatArray:
        """Return b + h(theta; x) of rows (k, d), (k, d_c)."""
        self.model.parameters = parameters
        return self.model.scores(features) + self.base

    def gradient(
        self, parameters: FloatArray, rows: npt.NDArray[np.int64] | None = None
    ) -> FloatArray:
        """Return the gradient of f at theta, (p,), or with the mean over some rows."""
        features = self.features
        mean_loss = self.mean_loss
        if rows is not None:
            features = local_model.rows_of(features, rows)
            mean_loss = mean_loss.select(rows)
        penalty = self.l2 * np.where(self.model.penalised, parameters, 0.0)
        if not len(mean_loss):
            return penalty
        messages = mean_loss.gradient(self.scores(features, parameters))
        messages /= len(mean_loss)
        return self.model.pullback(features, messages) + penalty

    def penalty(self, parameters: FloatArray) -> float:
        """Return l2/2 ||theta||^2."""
        penalised = parameters[self.model.penalised]
        return 0.5 * self.l2 * float(penalised @ penalised)

    def metrics(
        self,
        parameters: FloatArray,
        features: local_model.Features,
        mean_loss: Objective,
    ) -> dict[str, float]:
        """Return the finite metrics of rows (k, d) with a loss; {} without rows."""
        if not len(mean_loss):
            return {}
        metrics = mean_loss.metrics(self.scores(features, parameters))
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    @property
    def largest_curvature(self) -> float:
        """A bound on the Hessian's largest eigenvalue; for an MLP, an estimate."""
        if not len(self.mean_loss):
            return self.l2
        if isinstance(self.model, local_model.LinearModel):
            rows = self.features
            ones = np.ones(len(self.mean_loss))
            if rows.shape[1] > MOST_COLUMNS:
                largest = largest_eigenvalue(rows, ones, intercept=self.model.intercept)
            else:
                matrix = gram(rows, ones, intercept=self.model.intercept)
                largest = 0.0
                if len(matrix):
                    largest = float(np.linalg.eigvalsh(matrix)[-1])
            bound = self.mean_loss.max_curvature
            return bound * largest / len(self.mean_loss) + self.l2
        return CURVATURE_MARGIN * self._curvature_there() + self.l2

    def _curvature_there(self) -> float:
        """Return the norm of the Hessian at the model's parameters, by power steps."""
        centre = self.model.parameters
        centre_gradient = self.gradient(centre)
        vector = np.ones(len(centre)) / np.sqrt(len(centre))
        size = 0.0
        for _ in range(POWER_STEPS):
            product = (
                self.gradient(centre + FINITE_STEP * vector) - centre_gradient
            ) / FINITE_STEP
            size = float(np.linalg.norm(product))
            if not size:
                break
            vector = product / size
        self.model.parameters = centre
        return size


PAIRS = 128  # random features of a summary: a cosine and a sine each
EMBEDDING_BOUND = 1.0  # norm of phi(x) for every row
BLOCK_ROWS = 4096
TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class RandomFeatures:
    """phi, with <phi(x), phi(y)> about exp(-||x - y||^2 / (2 bandwidth^2)).

    The frequencies, (pairs, d), are drawn once for all sites.
    """

    frequencies: FloatArray

    @classmethod
    def draw(cls, width: int, pairs: int, rng: np.random.Generator) -> Self:
        """Draw the frequencies of rows (n, width), the same at all sites.

        The bandwidth is sqrt(d): two rows of standardised columns are about sqrt(2 d)
        apart on average, so that no site has to report its median.
        """
        return cls(rng.standard_normal((pairs, width)) / np.sqrt(max(width, 1)))

    def embed(self, rows: npt.NDArray[np.floating]) -> FloatArray:
        """Return phi of rows (n, d) as (n, 2 pairs), each of norm 1."""
        angles = rows.astype(np.float64) @ self.frequencies.T
        both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        embedded: FloatArray = both / np.sqrt(len(self.frequencies))
        return embedded

    def mean(self, rows: npt.NDArray[np.floating]) -> FloatArray:
        """Return the mean embedding of rows (n, d), (2 pairs,); zeros without rows."""
        total = np.zeros(2 * len(self.frequencies))
        for block in blocks(len(rows), BLOCK_ROWS):
            total += self.embed(rows[block]).sum(axis=0)
        return total / max(len(rows), 1)


def moments_bound(clip: float) -> float:
    """Return the largest norm of a row's contribution to the moments."""
    return clip**2 + 1.0


def mean_moments(rows: npt.NDArray[np.floating], clip: float = np.inf) -> FloatArray:
    """Return the mean of [x, 1] [x, 1]^T over rows (n, d), as its triangle.

    A row of norm above ``clip`` is scaled down to it. The triangle, of (d + 1) (d + 2)
    / 2 numbers, has the Frobenius norm of the matrix.
    """
    width = rows.shape[1] + 1
    total = np.zeros((width, width))
    for block in blocks(len(rows), BLOCK_ROWS):
        extended = np.ones((len(rows[block]), width))
        extended[:, :-1] = rows[block]
        lengths = np.linalg.norm(extended[:, :-1], axis=1, keepdims=True)
        extended[:, :-1] *= np.minimum(1.0, clip / np.maximum(lengths, TINY))
        total += extended.T @ extended
    return _triangle(total / max(len(rows), 1))


def covariances(moments: FloatArray) -> FloatArray:
    """Return the covariances (N, d (d + 1) / 2) of `mean_moments` (N, s).

    With noise they are no longer covariances: only their distances are used.
    """
    width = int(np.sqrt(2 * moments.shape[1]))
    triangle = np.triu_indices(width)
    full = np.zeros((len(moments), width, width))
    full[:, *triangle] = moments / np.where(
        triangle[0] == triangle[1], 1.0, np.sqrt(2.0)
    )
    means = full[:, :-1, -1]
    return _triangle(full[:, :-1, :-1] - means[:, :, None] * means[:, None, :])


def pairwise_distances(summaries: FloatArray) -> FloatArray:
    """Return the Euclidean distances (N, N) of N sites' summaries (N, s).

    Noise of equal deviation at all sites on average adds the same to every squared
    distance: it blurs the order of the distances without a bias.
    """
    from scipy.spatial.distance import cdist

    distances: FloatArray = cdist(summaries, summaries)
    return distances


def noisy_mean(
    mean: FloatArray, bound: float, rows: int, multiplier: float, noise: NoiseSource
) -> FloatArray:
    """Return a mean over rows with the noise of a Gaussian mechanism.

    A row's contribution has at most norm ``bound``: the sensitivity of the mean is
    bound / n (without rows there is nothing to protect, and n = 1 is assumed). The
    multiplier is deviation over sensitivity; 0 adds no noise.
    """
    return noise.with_gaussian(mean, multiplier * bound / max(rows, 1))


def _triangle(matrices: FloatArray) -> FloatArray:
    """Return upper triangles (..., s), with the norms of the symmetric matrices."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    return matrices[..., rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))
