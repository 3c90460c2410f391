"""The private exact theta-update of linear models: noise on sufficient statistics.

DP-SGD spends its budget on many noisy gradients. A linear model's theta-update needs
only two sums over rows, so noise is added to these: to X^T G X once in a run, and to
one product per epoch.

    G'_j     = min(G_j, R^2 / ||x_j||^2)                weights: long rows count less
    A        = X^T G' X + symmetric noise               once
    q_j      = kappa (target_j - h_j)                   kappa times the server's step
    q'_j     = q_j min(1, tau / (sqrt(G'_j) ||q_j||))
    b        = X^T (G' q') + noise                      every epoch
    theta   := argmin_t  beta R(t) + kappa/2N ||t - theta||_A^2 - <b, t - theta> / N

With A = X^T G X and no clip, the last line is the update of
:mod:`tp_flower.learning.solvers` (``exact_update``), the square around the present
theta completed: target = x theta + q / kappa. Of the two terms of its moments X^T G
target = A theta + b / kappa the first is large and needs no row once A is there, and
the second fades as training converges: it alone is clipped and gets noise. So a fixed
point of training does not depend on A (b = N beta theta there); a noisy A makes other
steps towards it, no other model. Re-weighting a long row keeps the model that it
follows, where scaling it to length R would change it.

A's noise has the spectral norm s sqrt(2 p) (s: deviation on the diagonal); directions
with less weight than that are unknown. :func:`usable_gram` sets negative eigenvalues to
zero and adds that norm to all (as Wang 2018, "AdaSSP", does for ridge regression), so
that an update takes short steps where A says nothing. This is damping, not a penalty:
it vanishes at the fixed point. On flights at epsilon 1 it helps more than any ridge,
averaging or longer training that was tried.

With units of privacy a unit's rows count less together, where one would alone:

    G'_j  = G_j min(1, R^2 / sum_u G_k ||x_k||^2)       over the rows k of j's unit u
    b     = sum_u min(1, R tau / ||B_u||) B_u + noise   B_u = sum_u x_k (G'_k q_k)^T

Guarantee:
    unit: a row of the table, at its site, or a unit; the shards' rows are disjoint, so
        that each shard adds its own noise and the table's rows have the guarantee of
        one shard (not a unit with rows in several).
    neighbours: zero-out (the row's summands against zeros). Row numbers and
        multiplicities G are the server's own.
    sensitivity: ||G'_j x_j x_j^T||_F = G'_j ||x_j||^2 <= R^2 of A in the Frobenius norm
        (the noise has equal deviation in that norm: off the diagonal it is drawn once
        per pair, with s / sqrt(2)), and ||x_j (G'_j q'_j)^T||_F <= R tau of b. A
        unit's sums have the same bounds.
    mechanisms: one Gaussian for A and one for each epoch's b, unsampled, composed.
    not protected: what q_j, computed by the server, reveals of scores that left without
        noise. theta's epsilon holds given the messages that the site received;
        ``privacy.predictions`` covers those as well. The encoders that scale X are
        statistics of their own.

=====================  ===============================================================
case                   what happens
=====================  ===============================================================
no rows                noise alone leaves
noise 0, no clip       A and b are exactly those of the update without privacy
x_j = 0                adds nothing, whatever its G_j
x_j not finite         adds nothing, whatever its target
G_j = 0                adds nothing
q_j not finite, G < 0  refused: there would be no bound
=====================  ===============================================================

A run neither mixes iterates nor balances rho, which would follow the noise. A takes the
place of the Gram matrix in all that is sent or kept; its trace may be negative.

Notation:
    X    ``features`` [, 1]  (n, p)       G    ``multiplicity``  (n,)
    G'   ``weights``  (n,)                q    ``residual``  (n, d_c)
    R    ``radius``                       tau  ``target_bound``
    A    ``gram``  (p, p)                 b    ``moments``  (p, d_c)
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import SiteError
from tp_flower.learning.models.local_model import (
    Features,
    host_features,
    moment,
    rows_of,
)
from tp_flower.learning.solvers import gram
from tp_flower.privacy.gradients import clip_weights, squared_lengths
from tp_flower.privacy.mechanisms import ClippedNoise
from tp_flower.privacy.units import Units
from tp_flower.randomness import NoiseSource

GRAM_SHARE: Final = 0.3  # of 1 / multiplier^2; the epochs share the rest
DAMPING: Final = 1.0  # of A's eigenvalues, times its noise's spectral norm


@dataclass(frozen=True)
class StatisticsPlan:
    """Bounds and noise of one table in one run; a bound of math.inf does not clip.

    Attributes:
        radius: R > 0.
        target_bound: tau > 0.
        gram_multiplier: deviation of A's noise over R^2.
        moments_multiplier: deviation of b's noise over R tau.
    """

    radius: float
    target_bound: float
    gram_multiplier: float
    moments_multiplier: float

    def __post_init__(self) -> None:
        _ = self.gram_deviation, self.moments_deviation

    @property
    def gram_deviation(self) -> float:
        """Deviation of the noise on A's diagonal, s."""
        return ClippedNoise(self.radius * self.radius, self.gram_multiplier).deviation

    @property
    def moments_deviation(self) -> float:
        """Deviation of the noise on each entry of b."""
        return ClippedNoise(
            self.radius * self.target_bound, self.moments_multiplier
        ).deviation


@dataclass(frozen=True)
class Rows:
    """The trained rows of a shard: features (n, d), multiplicity G (n,).

    With an intercept each x_j is followed by a one. Bounds are those of a row's part,
    or of a unit's.
    """

    features: Features
    multiplicity: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    intercept: bool
    units: Units | None = None

    def __post_init__(self) -> None:
        if self.multiplicity.min(initial=0) < 0:
            raise SiteError("a multiplicity is negative")

    @cached_property
    def squares(self) -> FloatArray:
        """||x_j||^2, with an intercept ||[x_j, 1]||^2, (n,)."""
        return squared_lengths(host_features(self.features), intercept=self.intercept)

    def only(self, are_kept: BoolArray) -> Self:
        """Return some of the rows, all of them unchanged."""
        if are_kept.all():
            return self
        rows = np.flatnonzero(are_kept)
        units = self.units and self.units.of(rows)
        return replace(
            self,
            features=rows_of(self.features, rows),
            multiplicity=self.multiplicity[rows],
            units=units,
        )

    def weights(self, radius: float) -> FloatArray:
        """Return G' with G'_j ||x_j||^2 <= radius^2, in sum over a unit, (n,).

        >>> rows = Rows(np.array([[2.0], [1.0]], np.float32), np.array([3, 3]), False)
        >>> rows.weights(2.0).tolist()
        [1.0, 3.0]
        """
        weights = self.multiplicity.astype(np.float64)
        if math.isinf(radius):
            return weights
        squares = self.squares
        bound = radius * radius
        if self.units is not None:
            return weights * (
                bound / np.maximum(self.units.totals(weights * squares), bound)
            )
        # a row of zeros adds nothing, whatever its weight
        largest = np.full_like(squares, math.inf)
        np.divide(bound, squares, out=largest, where=squares > 0)
        return np.minimum(weights, largest)


def noisy_gram(plan: StatisticsPlan, rows: Rows, noise: NoiseSource) -> FloatArray:
    """Return A, (p, p) and symmetric; see the module's guarantee."""
    rows = rows.only(_finite(plan, rows))
    matrix = gram(rows.features, rows.weights(plan.radius), intercept=rows.intercept)
    if not plan.gram_deviation:
        return matrix
    # with sqrt(2) off the diagonal, the triangle has the matrix's Frobenius norm
    upper = np.triu_indices(len(matrix))
    scale = np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))
    triangle = noise.with_gaussian(matrix[upper] * scale, plan.gram_deviation) / scale
    noisy = np.empty_like(matrix)
    noisy[upper] = triangle
    noisy.T[upper] = triangle
    return noisy


def noisy_moments(
    plan: StatisticsPlan, rows: Rows, residual: FloatArray, noise: NoiseSource
) -> FloatArray:
    """Return b, (p, d_c), from q (n, d_c); see the module's guarantee."""
    are_finite = _finite(plan, rows)
    rows = rows.only(are_finite)
    residual = residual[are_finite]
    if not np.isfinite(residual).all():
        raise SiteError("a target is not finite")
    weights = rows.weights(plan.radius)
    if math.isfinite(plan.target_bound):
        weights *= _target_weights(plan, rows, weights, residual)
    sums = moment(rows.features, weights[:, None] * residual, intercept=rows.intercept)
    return noise.with_gaussian(sums, plan.moments_deviation)


def _finite(plan: StatisticsPlan, rows: Rows) -> BoolArray:
    """Return which rows count, (n,): with a bound, those of finite features."""
    if math.isinf(plan.radius):
        return np.ones(len(rows.multiplicity), np.bool_)
    return np.isfinite(rows.squares)


def _target_weights(
    plan: StatisticsPlan, rows: Rows, weights: FloatArray, residual: FloatArray
) -> FloatArray:
    """Return the factors <= 1 on q, (n,), that bound a row's or a unit's part of b."""
    if rows.units is None:
        size = np.sqrt(weights) * np.linalg.norm(residual, axis=1)
        factors: FloatArray = plan.target_bound / np.maximum(size, plan.target_bound)
        return factors
    norms = rows.units.gradient_norms(
        host_features(rows.features),
        weights[:, None] * residual,
        intercept=rows.intercept,
    )
    return clip_weights(norms, plan.radius * plan.target_bound)


def usable_gram(matrix: FloatArray, deviation: float) -> FloatArray:
    """Return A, from one shard or summed, as a positive matrix (p, p).

    ``deviation`` is that of the noise on its diagonal, for all shards; 0 leaves A.
    """
    if not deviation:
        return matrix
    values, vectors = np.linalg.eigh(matrix)
    spectral_norm = deviation * math.sqrt(2.0 * len(matrix))
    floored = np.maximum(values, 0.0) + DAMPING * spectral_norm
    usable: FloatArray = (vectors * floored) @ vectors.T
    return usable
