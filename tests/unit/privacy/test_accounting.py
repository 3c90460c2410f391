"""Epsilon equals that of independent accountants, closed forms and integrals.

The product takes dp-accounting's accountants; Opacus's share no code with them.
"""

import math
from functools import partial

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy.special import log_ndtr

from tests.support.files import case_table, output_of
from tp_flower.privacy.accounting import ORDERS, _divergences, epsilon, noise_multiplier
from tp_flower.privacy.mechanisms import Gaussian, PureDp

CASES = case_table(__file__)
DELTA = 1e-5

# noise multiplier, sample rate, steps: epsilon from 0.2 to 20
GRID = CASES["grid"]
CODE = """
import sys
from tp_flower.privacy.accounting import epsilon, noise_multiplier
from tp_flower.privacy.mechanisms import Gaussian, PureDp
epsilon([Gaussian(3.0, 5), PureDp(0.1)], 1e-5)
noise_multiplier(1.0, 1e-5, count=12)
print({'torch', 'opacus'} & set(sys.modules))
"""


def by_divergences(gaussians):
    """Return epsilon by Opacus's Rényi accountant."""
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64))
    total = sum(
        compute_rdp(
            q=one.sample_rate,
            noise_multiplier=one.noise_multiplier,
            steps=one.count,
            orders=orders,
        )
        for one in gaussians
    )
    return get_privacy_spent(orders=orders, rdp=total, delta=DELTA)[0]


def composed(accountant, mechanisms):
    """Return epsilon of mechanisms without sampling by one of dp-accounting's."""
    for each in mechanisms:
        if isinstance(each, PureDp):
            event = dp_accounting.LaplaceDpEvent(1 / each.epsilon)
        else:
            event = dp_accounting.GaussianDpEvent(each.noise_multiplier)
        accountant.compose(event, each.count)
    return accountant.get_epsilon(DELTA)


def gaussian_delta(epsilon, mu):
    """Return delta of a Gaussian of multiplier 1 / mu (Balle and Wang 2018, theorem 8).

    Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu), by logarithms: large e do not overflow.
    """
    upper = float(log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(upper) * -math.expm1(min(lower - upper, 0.0))


@pytest.mark.cases(
    "0.8-0.05-200", "1.0-0.1-10", "2.0-0.1-1000", "20.0-0.3-500", "5.0-0.5-20"
)
@pytest.mark.parametrize(("multiplier", "rate", "steps"), GRID)
def test_epsilon_equals_that_of_independent_accountants(multiplier, rate, steps):
    mechanisms = [Gaussian(multiplier, steps, rate)]
    bound = epsilon(mechanisms, DELTA)
    assert bound == pytest.approx(by_divergences(mechanisms), rel=0.002)
    optimistic = pld.privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        sampling_prob=rate,
        pessimistic_estimate=False,
        value_discretization_interval=1e-3,
        use_connect_dots=False,
    ).self_compose(steps)
    assert optimistic.get_epsilon_for_delta(DELTA) <= bound


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 30.0, 1e4])
def test_epsilon_of_gaussians_solves_the_closed_form(mu, delta):
    solution = epsilon([Gaussian(5 / mu, 16), Gaussian(5 / mu, 9)], delta)
    if gaussian_delta(0.0, mu) <= delta:
        assert solution == 0.0
    else:
        assert gaussian_delta(solution, mu) == pytest.approx(delta, rel=1e-5)


def test_gaussians_of_different_noise_compose_sampled_or_not():
    plain = [Gaussian(8.0, 10), Gaussian(20.0, 100), Gaussian(3.0)]
    expected = composed(pld.PLDAccountant(), plain)
    assert epsilon(plain, DELTA) == pytest.approx(expected, rel=0.001)
    mixed = [Gaussian(2.0, 1000, 0.01), Gaussian(5.0, 2), Gaussian(1.5, 50, 0.02)]
    total = epsilon(mixed, DELTA)
    assert total == pytest.approx(by_divergences(mixed), rel=0.01)
    assert total > epsilon(mixed[1:], DELTA)


def test_pure_mechanisms_add_up_or_compose_whichever_is_less():
    assert epsilon([PureDp(2.0), PureDp(0.5, 4)], DELTA) == 4.0
    # without delta only pure mechanisms have an epsilon
    assert epsilon([PureDp(0.25, 3)], 0.0) == 0.75
    assert epsilon([PureDp(0.25, 3), Gaussian(9.0)], 0.0) == math.inf
    many = [PureDp(0.01, 2000), Gaussian(10.0, 4)]
    expected = composed(rdp.RdpAccountant(), many)
    # the independent one knows that the mechanism is Laplace's, which is a little less
    assert expected < epsilon(many, DELTA) < 1.05 * expected
    assert epsilon(many, DELTA) < 20.0


def test_a_pure_divergence_is_that_of_randomised_response():
    # a bit kept with probability 3/4, order 2: log((3/4)^2 / (1/4) + (1/4)^2 / (3/4))
    divergence = _divergences(PureDp(math.log(3)))[ORDERS == 2]
    assert divergence == pytest.approx(math.log(9 / 4 + 1 / 12), rel=1e-12)


def test_epsilon_at_the_ends_of_noise_and_sampling():
    for rate in (1.0, 0.1):
        assert epsilon([Gaussian(0.0, 1, rate)], DELTA) == math.inf
        assert epsilon([Gaussian(0.0, 0, rate)], DELTA) == 0.0
    assert epsilon([], DELTA) == 0.0
    # sampling never costs more than its absence
    rates = [0.3, 0.9, 0.99, 0.9999, 1.0]
    sampled = [epsilon([Gaussian(2.0, 100, q)], DELTA) for q in rates]
    assert sampled == sorted(sampled)
    assert sampled[-1] == epsilon([Gaussian(2.0, 100)], DELTA)
    # the example of docs/reference/mechanisms.md
    assert epsilon([Gaussian(6.0, 900, 0.04)], DELTA) == pytest.approx(0.81, abs=5e-3)


@pytest.mark.parametrize(
    ("target", "count", "rate"),
    [(0.5, 1, 1.0), (1.0, 120, 1.0), (1.0, 500, 0.05), (8.0, 100, 0.1)],
)
def test_the_noise_for_a_target_is_just_enough(target, count, rate):
    multiplier = noise_multiplier(target, DELTA, count=count, sample_rate=rate)
    assert epsilon([Gaussian(multiplier, count, rate)], DELTA) <= target
    less = Gaussian(multiplier * (1 - 1e-5), count, rate)
    assert epsilon([less], DELTA) > target


@pytest.mark.parametrize("delta", [1e-300, 0.5, 0.999999])
def test_the_noise_for_any_delta_is_enough(delta):
    assert epsilon([Gaussian(noise_multiplier(1.0, delta))], delta) <= 1.0
    assert noise_multiplier(1.0, delta, count=0) == 0.0
    assert noise_multiplier(math.inf, delta, count=5) == 0.0


@pytest.mark.parametrize(
    ("function", "arguments", "match"),
    [
        (epsilon, ([], 1.0), r"delta is 1.0; it must be in \[0, 1\)"),
        (epsilon, ([], math.nan), "delta is nan"),
        (noise_multiplier, (0.0, DELTA), "epsilon is 0.0; it must be above 0"),
        (noise_multiplier, (math.nan, DELTA), "epsilon is nan"),
        (noise_multiplier, (1.0, 0.0), "delta is 0.0"),
        (partial(noise_multiplier, count=-1), (1.0, DELTA), "count is out of range"),
    ],
)
def test_arguments_out_of_range_are_refused(function, arguments, match):
    with pytest.raises(ValueError, match=match):
        function(*arguments)


def test_plain_and_pure_mechanisms_are_accounted_without_torch():
    assert output_of(CODE) == "set()\n"
