"""Families whose mean is the exponential of the score: counts, costs, claims.

With mu = exp(h), and a variance that grows with the mean as V(mu),

    loss(h; y) = 1/2 deviance(y, mu) = integral from mu to y of (y - t) / V(t) dt
    gradient   = (mu - y) mu / V(mu)

whose least is 0, at mu = y (McCullagh and Nelder 1989, "Generalized Linear Models",
sections 2.3 and 9.2). It is convex in h for each of the four:

    poisson            V = mu                y >= 0
    gamma              V = mu^2              y > 0
    tweedie            V = mu^p              y >= 0, 1 < p < 2
    negative-binomial  V = mu + a mu^2       y >= 0

The names, and the derivatives, are those of LightGBM's objectives and R's families.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from tp_flower.arrays import FloatArray, mean
from tp_flower.objectives.objective import Objective, rising_root
from tp_flower.objectives.response import EXPONENTIAL, NumberResponse, Response
from tp_flower.objectives.target import Target

FARTHEST: Final = 300.0
"""Scores beyond it are taken for it, so that no exponential overflows."""
TREE_STEP: Final = 0.7
"""By how much LightGBM foresees that a leaf may raise a score (`max_delta_step`)."""
LEAST_LABEL: Final = np.finfo(float).tiny
LEAST_DISPERSION: Final = 1e-6
"""What no data tell from 0, that of Poisson counts."""
LARGEST_DISPERSION: Final = 1e4
EXACT_DISPERSION: Final = 1e-9  # of its logarithm
DISPERSION_SLACK: Final = 0.02
"""The share by which a dispersion may be off: standard errors are off by half of it, at
most."""


def exponential(scores: FloatArray) -> FloatArray:
    """Return exp(h), finite and above 0, of the same shape."""
    mu: FloatArray = np.exp(np.clip(scores, -FARTHEST, FARTHEST))
    return mu


@dataclass(frozen=True)
class MeanResponse(NumberResponse):
    """A mean, whose model is measured by its deviance."""

    headline: ClassVar[str] = "deviance"
    ratio: ClassVar[str] = "ratio of means"


@dataclass(frozen=True)
class CountResponse(MeanResponse):
    """A mean count, whose variance has been taken for granted.

    Attributes:
        taken: the dispersion of the loss.
        dispersion: that of largest likelihood, at a trained model's means.

    >>> CountResponse("negative-binomial", taken=1.0, dispersion=1.01).cautions
    ()
    """

    reads_scores: ClassVar[bool] = True
    taken: float = math.nan
    dispersion: float = math.nan

    def report_entries(self) -> dict[str, object]:
        """Return the dispersion that was taken, and the likeliest, as `dispersion`."""
        if math.isnan(self.dispersion):
            return {}
        return {"dispersion": {"taken": self.taken, "likeliest": self.dispersion}}

    @property
    def cautions(self) -> tuple[str, ...]:
        """Return that the labels scatter otherwise than was taken for granted."""
        if not abs(self.dispersion - self.taken) > DISPERSION_SLACK * self.taken:
            return ()
        better = f"negative-binomial({self.dispersion:.4g})"
        if not self.dispersion:
            better = "poisson"
        caution = (
            f"a dispersion of {self.taken:g} was taken for granted; the likeliest at "
            f'this model\'s means is {self.dispersion:.4g}: set loss = "{better}"'
        )
        return (caution,)


class LogLink(Objective):
    """Half the deviance of labels whose mean is exp(h)."""

    class_counts = range(1)
    has_likelihood = True
    least_label: ClassVar[float] = 0.0
    """The least label that it takes."""

    @classmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> MeanResponse:
        """Return the exponential of the score."""
        return MeanResponse(
            cls.name, 1, classes, kind, link=EXPONENTIAL, inverse_link=exponential
        )

    @classmethod
    def refusal(cls, target: Target) -> str:
        """Return why it cannot train on some labels, or ""."""
        least = float(target.numbers.min(initial=np.inf))
        if least >= cls.least_label:
            return ""
        needed = "numbers above 0" if cls.least_label else "numbers of 0 and more"
        return (
            f"loss {cls.name!r} is for {needed}, and the label has {least:g}: filter "
            "these rows in the query, or use another loss"
        )

    @property
    def growth(self) -> float:
        """k, where mu^2 / V(mu) is mu^k, or less."""
        return 1.0

    @abstractmethod
    def variance(self, mu: FloatArray) -> FloatArray:
        """Return V(mu), of the same shape."""

    @abstractmethod
    def deviance(self, mu: FloatArray) -> FloatArray:
        """Return the deviance of every row's mean, (N,)."""

    def base_scores(self) -> FloatArray:
        """Return the logarithm of the mean label."""
        rate = float(mean(self.target.numbers, self.weights))
        return np.log([max(rate, LEAST_LABEL)])

    def row_values(self, scores: FloatArray) -> FloatArray:
        """Return half of the deviance."""
        return 0.5 * self.deviance(exponential(scores[:, 0]))

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return (mu - y) mu / V(mu)."""
        mu = exponential(scores)
        return (mu - self.target.columns) * (mu / self.variance(mu))

    def information(self, scores: FloatArray) -> FloatArray:
        """Return mu^2 / V(mu), which labels of that mean have on average."""
        mu = exponential(scores[:, 0])
        return mu * (mu / self.variance(mu))

    def curvature(self, base: FloatArray) -> float:
        """Return mu^2 / V(mu)."""
        return float(self.information(base[None, :])[0])

    def prox_block(
        self, centre: FloatArray, rho: float, start: FloatArray
    ) -> FloatArray:
        """Return the root of g(z) + rho (z - v), by Newton's steps within bounds.

        It is between v and where mu = y. Where y is 0, it is above v - g(v) / rho, and
        above z = v - 1 or less with g(z) = mu^2 / V(mu) <= rho.
        """
        y = self.target.columns
        level = np.log(np.where(y > 0.0, y, 1.0))
        empty = np.minimum(centre - 1.0, np.log(rho) / self.growth)
        empty = np.maximum(empty, centre - self.gradient(centre) / rho)
        end = np.where(y > 0.0, level, empty)

        def slope(z: FloatArray) -> tuple[FloatArray, FloatArray]:
            return self.gradient(z) + rho * (z - centre), self.hessian(z) + rho

        low = np.minimum(centre, end)
        high = np.maximum(centre, end)
        return rising_root(slope, low, high, np.clip(start, low, high))

    def gradient_scale(self, reach: float) -> float:
        """Return so many deviations of the labels, as derivatives at their mean."""
        if not self.target.has_label:
            return reach
        mu = exponential(self.base_score)
        scale = self.target.numbers.std() * (mu / self.variance(mu))[0]
        return float(scale) * reach or reach

    def measure(self, scores: FloatArray, value: float) -> dict[str, float]:
        """Return the mean deviance, its share that is explained, D2, and the MAE."""
        y = self.target.numbers
        mu = exponential(scores[:, 0])
        rate = max(float(mean(y, self.weights)), LEAST_LABEL)
        constant = float(mean(self.deviance(np.full(len(y), rate)), self.weights))
        return {
            "deviance": 2.0 * value,
            "d2": 1.0 - 2.0 * value / constant if constant else 0.0,
            "mae": float(mean(np.abs(mu - y), self.weights)),
        }


def _log_ratio(y: FloatArray, mu: FloatArray) -> FloatArray:
    """Return y log(y / mu), 0 where y is 0."""
    ratio: FloatArray = y * np.log(np.where(y > 0.0, y, mu) / mu)
    return ratio


class Poisson(LogLink):
    """mu - y h + y log y - y of counts, or of rates with their exposures as weights.

    >>> from tp_flower.objectives import Target
    >>> Poisson(Target.of(np.array([2.0]))).gradient(np.array([[0.0]])).tolist()
    [[-1.0]]
    """

    name = "poisson"
    dispersion_is_known = True

    def variance(self, mu: FloatArray) -> FloatArray:
        """Return mu."""
        return mu

    def deviance(self, mu: FloatArray) -> FloatArray:
        """Return 2 (y log(y / mu) - y + mu)."""
        y = self.target.numbers
        return 2.0 * (_log_ratio(y, mu) - y + mu)

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return mu - y."""
        return exponential(scores) - self.target.columns

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return mu."""
        return exponential(scores)

    def tree_hessian(self, scores: FloatArray) -> FloatArray:
        """Return exp(h + 0.7), as LightGBM's: a leaf steps less far where it rises."""
        return exponential(scores + TREE_STEP)


class Gamma(LogLink):
    """y / mu + h - log y - 1 of costs and durations, whose deviation is as their mean.

    >>> from tp_flower.objectives import Target
    >>> Gamma(Target.of(np.array([2.0]))).gradient(np.array([[0.0]])).tolist()
    [[-1.0]]
    """

    name = "gamma"
    least_label = LEAST_LABEL

    def variance(self, mu: FloatArray) -> FloatArray:
        """Return mu^2."""
        return mu * mu

    def deviance(self, mu: FloatArray) -> FloatArray:
        """Return 2 (y / mu - 1 - log(y / mu))."""
        ratio = self.target.numbers / mu
        return 2.0 * (ratio - 1.0 - np.log(ratio))

    def gradient(self, scores: FloatArray) -> FloatArray:
        """Return 1 - y / mu."""
        return 1.0 - self.target.columns / exponential(scores)

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return y / mu."""
        return self.target.columns / exponential(scores)


class Tweedie(LogLink):
    """Half the deviance of amounts that are often 0, of power p from 1 to 2.

    >>> from tp_flower.objectives import Target
    >>> objective = Tweedie.of_parameter(1.7)(Target.of(np.array([0.0])))
    >>> objective.name, objective.hessian(np.array([[0.0]])).round(3).tolist()
    ('tweedie(1.7)', [[0.3]])
    """

    name = "tweedie"
    parameter = 1.5
    parameter_range = (1.0, 2.0)

    @property
    def growth(self) -> float:
        """2 - p."""
        return 2.0 - self.parameter

    def variance(self, mu: FloatArray) -> FloatArray:
        """Return mu^p."""
        power: FloatArray = mu**self.parameter
        return power

    def deviance(self, mu: FloatArray) -> FloatArray:
        """Return 2 (y^b / (a b) - y mu^a / a + mu^b / b), a = 1 - p and b = 2 - p."""
        y = self.target.numbers
        a = 1.0 - self.parameter
        b = 2.0 - self.parameter
        values = 2.0 * (y**b / (a * b) - y * mu**a / a + mu**b / b)
        return np.maximum(values, 0.0)

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return (2 - p) mu^(2-p) + (p - 1) y mu^(1-p)."""
        p = self.parameter
        mu = exponential(scores)
        values: FloatArray = (2.0 - p) * mu ** (2.0 - p)
        values += (p - 1.0) * self.target.columns * mu ** (1.0 - p)
        return values


class NegativeBinomial(LogLink):
    """Half the deviance of counts of variance mu + a mu^2, with the dispersion a.

    >>> from tp_flower.objectives import Target
    >>> objective = NegativeBinomial.of_parameter(1.0)(Target.of(np.array([3.0])))
    >>> objective.gradient(np.array([[0.0]])).tolist()
    [[-1.0]]
    """

    name = "negative-binomial"
    dispersion_is_known = True
    parameter = 1.0
    parameter_range = (0.0, float("inf"))

    @classmethod
    def make_response(cls, classes: tuple[str, ...], kind: str) -> CountResponse:
        """Return the exponential of the score."""
        return CountResponse(
            *(cls.name, 1, classes, kind),
            link=EXPONENTIAL,
            inverse_link=exponential,
            taken=cls.parameter,
        )

    def fit_response(self, scores: FloatArray) -> Response:
        """Return the response with the likeliest dispersion at the scores' means."""
        mu = exponential(scores[:, 0])
        dispersion = likeliest_dispersion(self.target.numbers, mu, self.weights)
        response = self.make_response((), self.response.kind)
        return replace(response, dispersion=dispersion)

    def variance(self, mu: FloatArray) -> FloatArray:
        """Return mu + a mu^2."""
        return mu + self.parameter * mu * mu

    def deviance(self, mu: FloatArray) -> FloatArray:
        """Return 2 (y log(y / mu) - (y + 1/a) log((1 + a y) / (1 + a mu)))."""
        y = self.target.numbers
        a = self.parameter
        spread = (y + 1.0 / a) * (np.log1p(a * y) - np.log1p(a * mu))
        values: FloatArray = np.maximum(2.0 * (_log_ratio(y, mu) - spread), 0.0)
        return values

    def hessian(self, scores: FloatArray) -> FloatArray:
        """Return (1 + a y) mu / (1 + a mu)^2."""
        a = self.parameter
        y = self.target.columns
        mu = exponential(scores)
        shrunk: FloatArray = mu / (1.0 + a * mu) ** 2
        return shrunk * (1.0 + a * y)


def likeliest_dispersion(
    counts: FloatArray, means: FloatArray, weights: FloatArray | None = None
) -> float:
    """Return the dispersion a of largest likelihood, 0 if counts scatter no further.

    Counts, means and weights are (N,). It is 1 / theta of R's ``MASS::theta.ml``
    (Lawless 1987, "Negative binomial and mixed Poisson regression"). The log likelihood
    of a count, of which lgamma(y + 1) is left out, is

        lgamma(y + 1/a) - lgamma(1/a) + y log(a mu) - (y + 1/a) log(1 + a mu)

    >>> likeliest_dispersion(np.array([0.0, 0.0, 6.0]), np.full(3, 2.0)) > 1.0
    True
    >>> likeliest_dispersion(np.array([2.0, 2.0, 2.0]), np.full(3, 2.0))
    0.0
    """
    # sites and other losses do without: it takes a tenth of a second to import
    from scipy import optimize, special

    def loss(log_dispersion: float) -> float:
        a = np.exp(log_dispersion)
        size = 1.0 / a
        spread = special.gammaln(counts + size) - special.gammaln(size)
        spread += counts * log_dispersion - (counts + size) * np.log1p(a * means)
        return -float(mean(spread, weights))

    optimum = optimize.minimize_scalar(
        loss,
        bounds=(np.log(LEAST_DISPERSION), np.log(LARGEST_DISPERSION)),
        method="bounded",
        options={"xatol": EXACT_DISPERSION},
    )
    dispersion = float(np.exp(optimum.x))
    return dispersion if dispersion > 2.0 * LEAST_DISPERSION else 0.0
