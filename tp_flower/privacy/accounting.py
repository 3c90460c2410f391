"""Epsilon of composed mechanisms, and the noise that a target epsilon takes.

*Notation*: ``sigma`` noise multiplier, ``k`` count, ``q`` sample rate, ``alpha`` order
of a Rényi divergence.

Which formula holds depends on what is composed:

- Gaussians that are not sampled are together one Gaussian of multiplier ``1 / mu``,
  ``mu^2 = sum of k / sigma^2``. Its epsilon is known in closed form and exactly
  (``gaussian_delta``), whatever the accountant.
- Sampled Gaussians take an accountant: "rdp" (Rényi divergences) or "prv" (privacy loss
  random variables, numerically composed; tighter, slower), both of Opacus. Neither is
  asked to say more than the closed form of the same Gaussians without sampling.
- Pure mechanisms are composed by their Rényi divergences with the rest, or their
  epsilons are added to the rest's; the smaller counts.
- What shows with a small probability only takes that off the delta of the rest.

Reference: Balle and Wang 2018, "Improving the Gaussian mechanism for differential
privacy" (theorem 8); Mironov, Talwar and Zhang 2019, "Rényi differential privacy of the
sampled Gaussian mechanism"; Gopi, Lee and Wutschitz 2021, "Numerical composition of
differential privacy"; Balle et al. 2020, "Hypothesis testing interpretations and Rényi
differential privacy" (theorem 21).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray
from tp_flower.methods import ACCOUNTANTS, PRV, RDP
from tp_flower.privacy.mechanisms import Gaussian, Mechanism, PureDp

ORDERS: Final[FloatArray] = np.array(
    [1 + x / 100 for x in (1, 2, 3, 5, 7)]
    + [1 + x / 10 for x in range(1, 100)]
    + [*range(11, 64), 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512]
)
"""Orders of the Rényi divergences among which the best is taken."""

_PRV_PASSES: Final = 2
_PRV_RELATIVE: Final = 0.003
_PRV_ERRORS: Final = (1e-3, 0.1)
_RELATIVE: Final = 1e-4
_EXACT: Final = 1e-12
_LARGEST: Final = 1e9


def epsilon(
    mechanisms: Sequence[Mechanism], delta: float, accountant: str = RDP
) -> float:
    """Return the epsilon of all mechanisms together, each used ``count`` times.

    Args:
        mechanisms: on the same unit, in any order; none: 0.
        delta: in [0, 1).
        accountant: of sampled Gaussians, "rdp" or "prv".

    Returns:
        An upper bound >= 0; inf where some Gaussian has no noise, or delta is 0 and
        there is a Gaussian.

    Raises:
        ValueError: delta or the accountant is not one of these.

    >>> round(epsilon([Gaussian(6.0, count=36)], 1e-5), 3)  # mu = sqrt(36) / 6 = 1
    4.377
    >>> epsilon([PureDp(0.5, count=2)], 1e-9)
    1.0
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta!r}; it must be in [0, 1)")
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant is {accountant!r}; one of {ACCOUNTANTS}")
    gaussians = [e for e in mechanisms if isinstance(e, Gaussian) and e.count]
    pure = [e for e in mechanisms if isinstance(e, PureDp) and e.count]
    if gaussians and (delta == 0 or not min(g.noise_multiplier for g in gaussians)):
        return math.inf
    added = _gaussian_epsilon(gaussians, delta, accountant)
    added += sum(each.epsilon * each.count for each in pure)
    if not pure or delta == 0:
        return added
    return min(added, _from_divergences(_divergences([*gaussians, *pure]), delta))


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    count: int = 1,
    sample_rate: float = 1.0,
    accountant: str = RDP,
) -> float:
    """Return the smallest noise multiplier whose epsilon is at most the one given.

    Found in a bracket that closes to 1e-4 (relative); its safe end is returned.

    Args:
        epsilon: of all uses together, > 0.
        delta: in (0, 1).
        count: uses on the same unit; 0: no noise is needed.
        sample_rate: as in ``Gaussian``.
        accountant: "rdp" or "prv".

    Raises:
        ValueError: an argument is out of range, or no noise is enough.

    >>> round(noise_multiplier(4.377, 1e-5, count=36), 2)
    6.0
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon!r}; it must be above 0")
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}; it must be in (0, 1)")
    if not count or math.isinf(epsilon):
        return 0.0
    start = 1.0
    if accountant == PRV and sample_rate < 1:
        # RDP needs no less noise, and is quicker
        start = noise_multiplier(epsilon, delta, count=count, sample_rate=sample_rate)

    def excess(multiplier: float) -> float:
        planned = Gaussian(multiplier, count, sample_rate)
        return _epsilon_of([planned], delta, accountant) - epsilon

    return _smallest(excess, start, _RELATIVE)


def server_mechanism(
    multiplier: float, batches_per_epoch_of_row: int, epochs: int
) -> Gaussian:
    """Return what SGD costs a row against the server, which chooses the batches.

    There is no amplification by sampling against someone who knows which rows are in a
    batch. A row is in one message for each batch that has one of its joined rows: at
    most ``min(G_j, batches)`` of an epoch's, however many joined rows it has there, as
    the messages of one row in one batch are summed before they are clipped.

    By hand: a row in 4 of the 100 batches of each of 9 epochs is in ``4 x 9 = 36``
    messages. With a multiplier of 6 they are one Gaussian of
    ``mu = sqrt(36) / 6 = 1``. Its epsilon at delta 1e-5 is 4.377:
    ``Phi(0.5 - 4.377) - exp(4.377) Phi(-0.5 - 4.377) = 5.29e-5 - 4.29e-5``. Who takes
    the batches for secret finds 0.81 (900 steps at rate 0.04): not against the server.

    Args:
        multiplier: noise multiplier of one message.
        batches_per_epoch_of_row: of the row that is in most.
        epochs: planned.

    Returns:
        A mechanism of sample rate 1.

    >>> server_mechanism(6.0, batches_per_epoch_of_row=4, epochs=9)
    Gaussian(noise_multiplier=6.0, count=36, sample_rate=1.0)
    """
    return Gaussian(multiplier, batches_per_epoch_of_row * epochs)


def outsider_mechanism(
    multiplier: float, batch_rate: float, multiplicity: int, steps: int
) -> Gaussian:
    """Return what SGD costs a row against someone who sees the final model only.

    Holds only if each joined row is in each batch independently with probability
    ``batch_rate`` (Poisson); batches of a fixed size or of a shuffled epoch are no
    such draw. A row is in a batch if one of its ``G`` joined rows is, so that its rate
    is ``1 - (1 - r)^G``: not ``r``, and below ``G r``.

    By hand: ``r = 0.01`` and ``G = 3``: ``1 - 0.99^3 = 1 - 0.970299 = 0.029701``.

    Args:
        multiplier: noise multiplier of one message.
        batch_rate: ``r`` in (0, 1].
        multiplicity: ``G`` >= 1, of the row that has most joined rows.
        steps: batches of the whole run.

    Raises:
        ValueError: an argument is out of range.

    >>> round(outsider_mechanism(2.0, 0.01, multiplicity=3, steps=100).sample_rate, 6)
    0.029701
    """
    if not 0 < batch_rate <= 1:
        raise ValueError(f"batch_rate is {batch_rate!r}; it must be in (0, 1]")
    if multiplicity < 1:
        raise ValueError(f"multiplicity is {multiplicity!r}; it must be at least 1")
    # 1 - (1 - r)^G without the cancellation of a small r
    rate = (
        1.0 if batch_rate == 1 else -math.expm1(multiplicity * math.log1p(-batch_rate))
    )
    return Gaussian(multiplier, steps, rate)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the exact delta of a Gaussian of multiplier ``1 / mu`` at an epsilon.

    ``Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu)`` (Balle and Wang 2018, theorem 8),
    by logarithms, so that a large epsilon does not overflow.

    >>> round(gaussian_delta(0.0, 1.0), 4)  # the distance of N(0, 1) and N(1, 1)
    0.3829
    """
    if not mu:
        return 0.0
    # a ledger is opened more often than an epsilon is computed
    from scipy.special import log_ndtr

    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(upper) * -math.expm1(min(lower - upper, 0.0))


def _epsilon_of(
    mechanisms: Sequence[Mechanism], delta: float, accountant: str
) -> float:
    # ``noise_multiplier`` has an argument of the function's name
    return epsilon(mechanisms, delta, accountant)


def _gaussian_epsilon(
    gaussians: Sequence[Gaussian], delta: float, accountant: str
) -> float:
    if not gaussians:
        return 0.0
    unsampled = _closed_form(gaussians, delta)
    if all(each.sample_rate == 1 for each in gaussians):
        return unsampled
    bound = min(unsampled, _from_divergences(_divergences(gaussians), delta))
    return _prv_epsilon(gaussians, delta, bound) if accountant == PRV else bound


def _closed_form(gaussians: Sequence[Gaussian], delta: float) -> float:
    mu = _composed_mu(gaussians)
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    return _smallest(lambda each: gaussian_delta(each, mu) - delta, mu, _EXACT)


def _composed_mu(gaussians: Sequence[Gaussian]) -> float:
    return math.sqrt(sum(g.count / g.noise_multiplier**2 for g in gaussians))


def _divergences(mechanisms: Sequence[Gaussian | PureDp]) -> FloatArray:
    """Return the Rényi divergence of all at each of ``ORDERS``."""
    total = np.zeros_like(ORDERS)
    for each in mechanisms:
        total += each.count * _divergence(each)
    return total


def _divergence(mechanism: Gaussian | PureDp) -> FloatArray:
    if isinstance(mechanism, PureDp):
        return _pure_divergence(mechanism.epsilon)
    if mechanism.sample_rate == 1:
        return ORDERS / (2 * mechanism.noise_multiplier**2)
    return _sampled_divergence(mechanism.noise_multiplier, mechanism.sample_rate)


def _pure_divergence(epsilon: float) -> FloatArray:
    """Return the divergences of randomised response on a bit, which has the largest.

    They are below both epsilon and ``alpha epsilon^2 / 2`` (Bun and Steinke 2016,
    "Concentrated differential privacy", proposition 3.3).
    """
    keep, flip = -math.log1p(math.exp(-epsilon)), -np.logaddexp(0.0, epsilon)
    same = ORDERS * keep + (1 - ORDERS) * flip
    other = ORDERS * flip + (1 - ORDERS) * keep
    bound: FloatArray = np.logaddexp(same, other) / (ORDERS - 1)
    return bound


@lru_cache(maxsize=256)
def _sampled_divergence(multiplier: float, rate: float) -> FloatArray:
    # opacus imports torch, which a process that only composes Gaussians need not
    from opacus.accountants.analysis.rdp import compute_rdp

    divergences: FloatArray = np.asarray(
        compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=ORDERS)
    )
    return divergences


def _from_divergences(divergences: FloatArray, delta: float) -> float:
    bounds = (
        divergences
        + np.log1p(-1 / ORDERS)
        - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    )
    return max(float(np.nanmin(bounds)), 0.0)


def _prv_epsilon(gaussians: Sequence[Gaussian], delta: float, bound: float) -> float:
    """Return a bound by privacy loss random variables, if it is below another one."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [
        (each.noise_multiplier, each.sample_rate, each.count)
        for each in gaussians
        if each.sample_rate < 1
    ]
    plain = [each for each in gaussians if each.sample_rate == 1]
    if plain:
        accountant.history.append((1 / _composed_mu(plain), 1.0, 1))
    found = bound
    for _ in range(_PRV_PASSES):
        # its error is part of what it returns, and is chosen by what was found last
        error = min(max(_PRV_RELATIVE * found, _PRV_ERRORS[0]), _PRV_ERRORS[1])
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                latest = float(accountant.get_epsilon(delta, eps_error=error))
        except (RuntimeError, ValueError):
            # its grid is too coarse, and it says so; what was found still holds
            break
        is_close = latest > found / 2
        found = min(found, latest)
        if is_close:
            break
    return found


def _smallest(excess: Callable[[float], float], start: float, relative: float) -> float:
    """Return the smallest positive number of no excess, from above.

    By false position in a bracket; an end that stays twice loses half its weight
    (the Illinois algorithm), so that both ends close in.

    Raises:
        ValueError: there is none below 1e9 times the start.
    """
    low = high = start
    over = under = excess(start)
    while under > 0:
        low, over, high = high, under, 2 * high
        under = excess(high)
        if high > _LARGEST * start:
            raise ValueError("no amount of noise is enough for this epsilon and delta")
    while over <= 0 and low > start / _LARGEST:
        high, under, low = low, over, low / 2
        over = excess(low)
    was_over: bool | None = None
    while high - low > relative * high:
        # beyond the precision of the numbers both ends may be alike
        ratio = over / (over - under) if over > under else math.nan
        middle = low + (ratio if math.isfinite(ratio) else 0.5) * (high - low)
        margin = relative * high / 2
        middle = min(max(middle, low + margin), high - margin)
        found = excess(middle)
        is_over = found > 0
        if is_over:
            low, over = middle, found
            under /= 1 + (was_over is True)
        else:
            high, under = middle, found
            over /= 1 + (was_over is False)
        was_over = is_over
    return high
