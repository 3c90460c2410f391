"""Scores h_ij of single rows, clipped and noised: what a site sends of its predictions.

A score reads its private row; that theta came out of a private mechanism does not make
it a post-processing of one. So every release of a row's scores is paid for by itself:

    h_j min(1, B / ||h_j||)  +  N(0, (sigma B)^2 I)

Guarantee:
    unit          one row of the table; its scores appear once in a release
    neighbours    the row's scores, or zero in their place (zero-out)
    sensitivity   B: a Gaussian mechanism of multiplier sigma per release of the row
    not covered   which rows are asked for, and that the row is there

| edge case                 | result                                                |
|---------------------------|-------------------------------------------------------|
| no rows                   | no rows                                               |
| scores of zero            | noise around zero                                     |
| scores that are not finite| infinite ones are clipped; NaN counts as zero         |
| B = inf, sigma = 0        | the scores themselves                                 |
"""

import math

import numpy as np

from tp_flower.learning.models.local_model import FloatArray
from tp_flower.noise import NoiseSource

_LARGEST = 1e150  # its square is a number


def private_scores(
    scores: FloatArray, *, clip: float, noise_multiplier: float, noise: NoiseSource
) -> FloatArray:
    """Return scores (n, d_c) with rows clipped to norm B and Gaussian noise.

    Args:
        scores: local scores, (n, d_c).
        clip: B, > 0, in the unit of the scores; inf for none.
        noise_multiplier: sigma, >= 0.
        noise: where the noise comes from.

    Raises:
        ValueError: noise without a clip: it would have no scale.
    """
    if math.isinf(clip):
        if noise_multiplier:
            raise ValueError(
                f"noise_multiplier is {noise_multiplier}, but clip is infinite: "
                "noise needs a finite clip"
            )
        return scores
    clipped = clip_rows(scores, clip)
    return noise.with_gaussian(clipped, noise_multiplier * clip)


def clip_rows(values: FloatArray, clip: float) -> FloatArray:
    """Return values (n, d_c) with rows of at most norm ``clip``, > 0 and finite.

    >>> rows = np.array([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_rows(rows, clip=1.0).round(6).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    finite = np.nan_to_num(values, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)
    finite = np.clip(finite, -_LARGEST, _LARGEST)
    norms = np.linalg.norm(finite, axis=1, keepdims=True)
    clipped: FloatArray = finite * (clip / np.maximum(norms, clip))
    return clipped
