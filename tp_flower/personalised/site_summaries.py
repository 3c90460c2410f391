"""What a site tells of its rows so that the server can see which sites are alike.

The draft names three spaces and leaves their distances open. Here they are:

    data      || mean phi(x) at i - mean phi(x) at j ||   (MMD of a Gaussian kernel)
    features  || Cov_i - Cov_j ||_F
    models    || theta_i - theta_j ||                     (each trained at its site)

phi are random Fourier features (Rahimi and Recht 2007), so that the mean embedding of a
site's rows is one short vector. Rows may hold the label as one more column.

Guarantee: with noise, a summary is a Gaussian mechanism. The unit is one row of a site;
neighbours are the site's rows with one row's share left out of the mean (zero-out; the
number of rows is known). A share's norm is 1 for the embedding and at most clip^2 + 1
for the moments, so the mean changes by at most that over the number of rows. A model
has no such bound: its distance is for sites that train with DP-SGD, or need no noise.
Not covered: the number of rows, and the encoder's own statistics.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import blocks
from tp_flower.noise import NoiseSource

FloatArray = npt.NDArray[np.float64]

EMBEDDING_BOUND = 1.0
"""Norm of phi(x), of every row."""
BLOCK_ROWS = 4096
TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True)
class RandomFeatures:
    """phi, with <phi(x), phi(y)> about exp(-||x - y||^2 / (2 bandwidth^2)).

    Attributes:
        frequencies: (pairs, d), drawn once for all sites.
    """

    frequencies: FloatArray

    @classmethod
    def draw(
        cls,
        width: int,
        pairs: int,
        rng: np.random.Generator,
        *,
        bandwidth: float | None = None,
    ) -> "RandomFeatures":
        """Draw the frequencies of rows (n, width).

        Args:
            width: d.
            pairs: a cosine and a sine each.
            rng: the same at all sites.
            bandwidth: > 0; None is sqrt(d): two rows of standardised columns are on
                average sqrt(2 d) apart, and no site is asked for its median.
        """
        scale = bandwidth or np.sqrt(max(width, 1))
        return cls(rng.standard_normal((pairs, width)) / scale)

    def embed(self, rows: npt.NDArray[np.floating]) -> FloatArray:
        """Return phi of rows (n, d) as (n, 2 pairs), each of norm 1."""
        angles = rows.astype(np.float64) @ self.frequencies.T
        both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        embedded: FloatArray = both / np.sqrt(len(self.frequencies))
        return embedded

    def mean(self, rows: npt.NDArray[np.floating]) -> FloatArray:
        """Return the mean embedding of rows (n, d), (2 pairs,); zeros of no rows."""
        total = np.zeros(2 * len(self.frequencies))
        for block in blocks(len(rows), BLOCK_ROWS):
            total += self.embed(rows[block]).sum(axis=0)
        return total / max(len(rows), 1)


def moments_bound(clip: float) -> float:
    """Return what norm a row's share of the moments has at most."""
    return clip**2 + 1.0


def mean_moments(rows: npt.NDArray[np.floating], clip: float = np.inf) -> FloatArray:
    """Return the mean of [x, 1] [x, 1]^T over rows (n, d), as its triangle.

    Args:
        rows: of encoded features.
        clip: a row of a larger norm is scaled down to it.

    Returns:
        ((d + 1) (d + 2) / 2,), with the Euclidean norm of the matrix's Frobenius norm.
    """
    width = rows.shape[1] + 1
    total = np.zeros((width, width))
    for block in blocks(len(rows), BLOCK_ROWS):
        own = np.ones((len(rows[block]), width))
        own[:, :-1] = rows[block]
        lengths = np.linalg.norm(own[:, :-1], axis=1, keepdims=True)
        own[:, :-1] *= np.minimum(1.0, clip / np.maximum(lengths, TINY))
        total += own.T @ own
    return _triangle(total / max(len(rows), 1))


def covariances(moments: FloatArray) -> FloatArray:
    """Return the covariances (N, d (d + 1) / 2) of what `mean_moments` told (N, s).

    With noise the matrices are not quite covariances any more; their distances are
    meant, nothing else.
    """
    width = int(np.sqrt(2 * moments.shape[1]))
    places = np.triu_indices(width)
    full = np.zeros((len(moments), width, width))
    full[:, *places] = moments / np.where(places[0] == places[1], 1.0, np.sqrt(2.0))
    means = full[:, :-1, -1]
    centred = full[:, :-1, :-1] - means[:, :, None] * means[:, None, :]
    return _triangle(centred)


def pairwise_distances(summaries: FloatArray) -> FloatArray:
    """Return the Euclidean distances (N, N) of N sites' summaries (N, s).

    Noise of one deviation at all sites adds the same to every squared distance on
    average: it blurs the order of the distances and does not bend it.
    """
    from scipy.spatial.distance import cdist

    distances: FloatArray = cdist(summaries, summaries)
    return distances


def noisy_mean(
    mean: FloatArray, bound: float, rows: int, multiplier: float, noise: NoiseSource
) -> FloatArray:
    """Return a mean over rows with the noise of a Gaussian mechanism.

    Args:
        mean: of shares whose norm is at most ``bound``.
        bound: see the module.
        rows: of the site; of none there is nothing to protect, and one is assumed.
        multiplier: deviation over sensitivity, >= 0; 0 adds nothing.
        noise: of the site.
    """
    return noise.with_gaussian(mean, multiplier * bound / max(rows, 1))


def _triangle(matrices: FloatArray) -> FloatArray:
    """Return upper triangles (..., s), with the norm of the symmetric matrices."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    triangle: FloatArray = matrices[..., rows, columns] * scale
    return triangle
