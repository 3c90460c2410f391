"""Epsilon of composed mechanisms, and the noise needed for a target epsilon.

The accountants are those of dp-accounting. They take a second to import, which is done
only when an epsilon is computed: a round of training computes none. Several bounds may
hold for a composition; the smallest is returned.

- Gaussians without sampling together are one Gaussian of multiplier ``1 / mu``,
  ``mu^2 = sum of count / noise_multiplier^2``, whose epsilon is exact.
- Sampled Gaussians cost at most what they cost without sampling, and at most what
  their Rényi divergences say.
- Pure mechanisms are either composed with the rest by their Rényi divergences, or
  their epsilons are added to the rest's.

Reference: Balle and Wang 2018, "Improving the Gaussian mechanism for differential
privacy" (theorem 8); Mironov, Talwar and Zhang 2019, "Rényi differential privacy of the
sampled Gaussian mechanism"; Canonne, Kamath and Steinke 2020, "The discrete Gaussian
for differential privacy" (proposition 12).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from tp_flower.arrays import FloatArray
from tp_flower.privacy.mechanisms import Gaussian, Mechanism, PureDp

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ORDERS: Final[FloatArray] = np.array(
    [2 + x / 10 for x in range(90)]
    + [*range(11, 64), 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512]
)
"""Orders of the Rényi divergences among which the best is taken.

The orders below 2 are best only beyond epsilon 50, and their series may not converge.
"""

_RELATIVE: Final = 1e-6  # the noise found for an epsilon is more than enough by this
_LEAST_SHARE: Final = 2.0**-30  # of the noise without sampling that is tried with it


def epsilon(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """Return the epsilon >= 0 of mechanisms on one unit, each used ``count`` times.

    It is an upper bound: inf if some Gaussian has no noise, or if delta is 0 and there
    is a Gaussian. ``delta`` is in [0, 1).

    >>> round(epsilon([Gaussian(6.0, count=36)], 1e-5), 3)  # mu = sqrt(36) / 6 = 1
    4.377
    >>> epsilon([PureDp(0.5, count=2)], 1e-9)
    1.0
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta!r}; it must be in [0, 1)")
    gaussians = [e for e in mechanisms if isinstance(e, Gaussian) and e.count]
    pure = [e for e in mechanisms if isinstance(e, PureDp) and e.count]
    if gaussians and (delta == 0 or not min(g.noise_multiplier for g in gaussians)):
        return math.inf
    pure_epsilon = sum(mechanism.epsilon * mechanism.count for mechanism in pure)
    if gaussians:
        pure_epsilon += _gaussian_epsilon(gaussians, delta)
    if not pure or delta == 0:
        return pure_epsilon
    return min(pure_epsilon, _renyi_epsilon([*gaussians, *pure], delta))


def noise_multiplier(
    target_epsilon: float,
    delta: float,
    *,
    count: int = 1,
    sample_rate: float = 1.0,
) -> float:
    """Return the smallest noise multiplier whose epsilon is at most the target.

    It exceeds the smallest by at most one millionth. The target, > 0, covers ``count``
    uses on the same unit together (0: no noise is needed); ``delta`` is in (0, 1).

    >>> round(noise_multiplier(4.377, 1e-5, count=36), 2)
    6.0
    """
    if not target_epsilon > 0:
        raise ValueError(f"epsilon is {target_epsilon!r}; it must be above 0")
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}; it must be in (0, 1)")
    if not count or math.isinf(target_epsilon):
        return 0.0
    planned = Gaussian(1.0, count, sample_rate)
    from dp_accounting import get_sigma_gaussian

    def excess(multiplier: float) -> float:
        mechanism = replace(planned, noise_multiplier=multiplier)
        return epsilon([mechanism], delta) - target_epsilon

    enough = (
        math.sqrt(count)
        * float(get_sigma_gaussian(target_epsilon, delta))
        * (1 + _RELATIVE)
    )
    if sample_rate == 1:
        return enough
    return _least_noise(excess, enough)


def _least_noise(excess: Callable[[float], float], enough: float) -> float:
    """Return the smallest sufficient multiplier, given one that suffices."""
    from scipy.optimize import brentq

    low = enough / 2
    lowest = enough * _LEAST_SHARE
    while excess(low) <= 0:
        enough = low
        low = low / 2
        if low < lowest:
            return enough
    root = float(brentq(excess, low, enough, rtol=_RELATIVE / 2))
    # the smallest noise is within the tolerance of the root, on either side
    while root < enough and excess(root) > 0:
        root = min(root * (1 + _RELATIVE), enough)
    return root


def _gaussian_epsilon(gaussians: Sequence[Gaussian], delta: float) -> float:
    """Return the epsilon of Gaussian mechanisms, by the tighter of two bounds."""
    from dp_accounting import get_epsilon_gaussian

    mu = math.sqrt(
        sum(gaussian.count / gaussian.noise_multiplier**2 for gaussian in gaussians)
    )
    bound = float(get_epsilon_gaussian(1 / mu, delta))
    if not bound or all(gaussian.sample_rate == 1 for gaussian in gaussians):
        return bound
    return min(bound, _renyi_epsilon(gaussians, delta))


def _renyi_epsilon(mechanisms: Sequence[Mechanism], delta: float) -> float:
    """Return the epsilon of mechanisms, composed by their Renyi divergences."""
    from dp_accounting.rdp import compute_epsilon

    total = np.zeros_like(ORDERS)
    for mechanism in mechanisms:
        total += mechanism.count * _divergences(replace(mechanism, count=1))
    return float(compute_epsilon(ORDERS, total, delta)[0])


@lru_cache(maxsize=256)
def _divergences(mechanism: Mechanism) -> FloatArray:
    """Return the Rényi divergence of one use at each of ``ORDERS``.

    Among pure mechanisms, randomised response on one bit has the largest.
    """
    from absl import logging
    from dp_accounting import NeighboringRelation, RandomizedResponseDpEvent
    from dp_accounting.rdp import RdpAccountant

    # otherwise each order whose series does not converge logs a line
    logging.set_verbosity(logging.ERROR)
    if isinstance(mechanism, Gaussian):
        accountant = RdpAccountant(ORDERS).compose(_event(mechanism))
    else:
        # the probability of a random answer, which is right half the time
        random_probability = -2 * math.expm1(-np.logaddexp(0.0, -mechanism.epsilon))
        event = RandomizedResponseDpEvent(random_probability, num_buckets=2)
        accountant = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE).compose(
            event
        )
    divergences: FloatArray = accountant.rdp
    return divergences


def _event(gaussian: Gaussian) -> "DpEvent":
    """Return a Gaussian release in the terms of dp-accounting."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    event = GaussianDpEvent(gaussian.noise_multiplier)
    if gaussian.sample_rate == 1:
        return event
    return PoissonSampledDpEvent(gaussian.sample_rate, event)
