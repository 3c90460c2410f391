"""A site's local update by DP-SGD: the fit of a model to targets, from noisy gradients.

Objective, an equal of ``FitProblem`` divided by a number that no private value decides:

    L = (kappa / (r s^2)) [ mean_j w_j 1/2 ||f(theta; T_j) - target_j||^2 + penalty ]

with w_j = G_j / mean(G), s the scale of the labels and r the norm that a row [x, 1] may
be expected to have. kappa (f - target) is the gradient of the joined rows' loss, of
order s, so that the gradients of most rows have a norm below 1: a clip of 1 leaves them
alone. (A clip far below most norms makes all rows count alike, and the fit a regression
of the median: on flights an AUC of 0.64 in place of 0.70.) One step:

    B         each row with probability q, drawn here, seen by nobody      (Poisson)
    g         clip-and-noise(sum_B gradients) / (q n) + gradient of the penalty
    theta    -= rate * Adam(g)

Adam at a fixed rate. It takes steps of the rate's size even where a gradient is nothing
but noise, and theta then wanders: the rate is divided by 1 + 20 nu, where nu = sigma
sqrt(p) / (q n) is the norm of the noise over the clip, which is public.

Guarantee:
    unit          one row of the table; neighbours and sensitivity as in ``gradients``
    mechanism     ``steps`` Gaussians per update, sub-sampled with rate q: amplified, as
                  nobody sees the batch; q = 1 is no sampling
    post-process  penalty, Adam, theta and all that is computed of theta alone
    not covered   targets that were made of scores without noise of their own; n, G

Notation:
    C, sigma  ``clip``, ``noise_multiplier``      q, n  ``sample_rate``, rows
    r, s      ``row_norm``, ``output_scale``      p     parameters

Reference:
    Abadi et al. 2016, Algorithm 1; Kingma and Ba 2015, Algorithm 1.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np

from tp_flower.learning.models.encoded_rows import on_host
from tp_flower.learning.models.fit_problem import FitProblem
from tp_flower.learning.models.local_model import FloatArray, LinearModel, LocalModel
from tp_flower.noise import NoiseSource
from tp_flower.privacy.gradients import private_sum
from tp_flower.privacy.mechanisms import Gaussian

NOISE_DAMPING: Final = 20.0
"""The rate is divided by 1 + this * nu: flat between 10 and 30 on flights."""

LINEAR_RATE: Final = 0.01
TORCH_RATE: Final = 0.03
"""Chosen by experiments on flights, linear and MLP, at epsilon 1 and 8."""


@dataclass(frozen=True)
class PrivateFit:
    """How one local update runs; decided before training, from public numbers.

    The defaults of ``sample_rate`` and ``steps`` were chosen by experiments on flights
    (epsilon 1 to 8, 12 epochs): at equal epsilon whole passes are a little better than
    samples of the rows, and 20 to 50 small steps than 10 large ones; averages of the
    iterates and a falling rate gain nothing.

    Attributes:
        clip: C, > 0.
        noise_multiplier: sigma, >= 0.
        sample_rate: q, in (0, 1].
        steps: of one update.
        learning_rate: Adam's, in units of the parameters (of linear models: of s); 0:
            ``LINEAR_RATE`` or ``TORCH_RATE``.
        output_scale: s, 1 in classification, the labels' deviation in regression.
        row_norm: r, sqrt(1 + the table's feature columns before encoding): an encoded
            column has a square of about 1.
    """

    clip: float
    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 20
    learning_rate: float = 0.0
    output_scale: float = 1.0
    row_norm: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("clip", "sample_rate", "output_scale", "row_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: above 0")
        if not (self.sample_rate <= 1 and self.steps >= 1):
            raise ValueError(
                f"sample_rate is {self.sample_rate} and steps is {self.steps}, "
                "allowed: at most 1, and at least 1"
            )
        for name in ("noise_multiplier", "learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed: from 0 on")

    def mechanism(self, updates: int) -> Gaussian:
        """Return what ``updates`` local updates cost each row of the table."""
        return Gaussian(self.noise_multiplier, self.steps * updates, self.sample_rate)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the plan that ``to_json`` wrote.

        Raises:
            TypeError: a field is unknown or missing.
            ValueError: a value is out of range.
        """
        return cls(**data)


def fit_privately(
    model: LocalModel, problem: FitProblem, plan: PrivateFit, noise: NoiseSource
) -> None:
    """Fit a model in place by DP-SGD, warm-started from its current parameters.

    Without rows the penalised parameters move to the centre at once.

    Raises:
        SettingsError: a torch model has a layer without gradients row by row.
    """
    own = on_host(problem.features)
    rows = len(own)
    if not rows:
        model.parameters = problem.settle(model.parameters)
        return
    # linear models have parameters in the labels' unit; Adam's steps are of order 1
    is_linear = isinstance(model, LinearModel)
    unit = plan.output_scale if is_linear else 1.0
    scale = unit * problem.kappa / (plan.row_norm * plan.output_scale**2)
    weights = scale * problem.weights[:, None]
    penalty = scale * problem.relative_penalty
    theta = model.parameters.copy()
    rate = plan.learning_rate or (LINEAR_RATE if is_linear else TORCH_RATE)
    adam = _Adam(len(theta), unit * rate / _damping(plan, rows, len(theta)))
    for _ in range(plan.steps):
        drawn = _batch(plan, rows, noise)
        features = own[drawn]
        residuals = model.scores(features) - problem.target[drawn]
        total = private_sum(
            model,
            features,
            weights[drawn] * residuals,
            clip=plan.clip,
            noise_multiplier=plan.noise_multiplier,
            noise=noise,
        )
        gradient = total / (plan.sample_rate * rows)
        theta = theta - adam.step(gradient + penalty * (theta - problem.centre))
        model.parameters = theta


def _batch(plan: PrivateFit, rows: int, noise: NoiseSource) -> Any:
    """Draw the rows of a step: an index of arrays; a slice, which copies nothing."""
    if plan.sample_rate == 1.0:
        return slice(None)
    return noise.bernoulli(rows, plan.sample_rate)


def _damping(plan: PrivateFit, rows: int, parameters: int) -> float:
    """Return what the noise makes of the learning rate: what it is divided by."""
    relative = plan.noise_multiplier * math.sqrt(parameters) / (plan.sample_rate * rows)
    return 1.0 + NOISE_DAMPING * relative


class _Adam:
    """Adam with its usual constants, on one flat vector."""

    FIRST, SECOND, TINY = 0.9, 0.999, 1e-8

    def __init__(self, size: int, rate: float) -> None:
        self._mean, self._square = np.zeros(size), np.zeros(size)
        self._rate, self._steps = rate, 0

    def step(self, gradient: FloatArray) -> FloatArray:
        """Return what to subtract from the parameters, (p,)."""
        self._steps += 1
        self._mean = self.FIRST * self._mean + (1 - self.FIRST) * gradient
        self._square = self.SECOND * self._square + (1 - self.SECOND) * gradient**2
        mean = self._mean / (1 - self.FIRST**self._steps)
        square = self._square / (1 - self.SECOND**self._steps)
        change: FloatArray = self._rate * mean / (np.sqrt(square) + self.TINY)
        return change
