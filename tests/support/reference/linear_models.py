"""Generalised linear models of built joins by Fisher scoring, as R's glm has them."""

from dataclasses import dataclass

import numpy as np
from scipy import stats


def _logistic(scores):
    chances = 1.0 / (1.0 + np.exp(-scores))
    return chances, chances * (1.0 - chances), chances * (1.0 - chances)


def _log_link(variance):
    def family(scores):
        mean = np.exp(scores)
        return mean, mean, variance(mean)

    return family


# by loss: means, their derivatives by the score, and their variances
FAMILIES = {
    "squared": lambda scores: (scores, np.ones_like(scores), np.ones_like(scores)),
    "logistic": _logistic,
    "poisson": _log_link(lambda mean: mean),
    "gamma": _log_link(lambda mean: mean**2),
    "tweedie(1.4)": _log_link(lambda mean: mean**1.4),
    "negative-binomial(0.7)": _log_link(lambda mean: mean + 0.7 * mean**2),
}
KNOWN_DISPERSION = {"logistic", "poisson", "negative-binomial(0.7)"}
STEPS = 100


@dataclass(frozen=True)
class LinearFit:
    """Coefficients (p,), the intercept last, their covariance, and what t is of."""

    coefficients: np.ndarray
    covariance: np.ndarray
    freedom: float

    @property
    def errors(self) -> np.ndarray:
        return np.sqrt(np.diag(self.covariance))

    @property
    def chances(self) -> np.ndarray:
        ratios = np.abs(self.coefficients / self.errors)
        return 2.0 * stats.t.sf(ratios, self.freedom)

    @property
    def reach(self) -> np.ndarray:
        return stats.t.ppf(0.975, self.freedom) * self.errors


def fit_linear(
    features: np.ndarray,
    label: np.ndarray,
    loss: str,
    *,
    weights: np.ndarray | None = None,
    offset: np.ndarray | float = 0.0,
    l2: float = 0.0,
    is_robust: bool = False,
    clusters: np.ndarray | None = None,
) -> LinearFit:
    """Fit by Fisher scoring; errors are by the expected information, as R's are.

    With the numbers of rows' clusters they are clustered, cluster by cluster, HC1.
    """
    design = np.column_stack([features, np.ones(len(label))])
    rows, width = design.shape
    weights = np.ones(rows) if weights is None else weights
    penalty = np.diag(np.append(np.full(width - 1, l2 * weights.sum()), 0.0))
    theta = np.zeros(width)
    family = FAMILIES[loss]
    if loss not in ("squared", "logistic"):
        theta[-1] = np.log(label.mean())
    for _ in range(STEPS):
        mean, slope, variance = family(design @ theta + offset)
        by_row = weights * slope**2 / variance
        information = design.T @ (by_row[:, None] * design)
        slopes = weights * (label - mean) * slope / variance
        theta = theta + np.linalg.solve(
            information + penalty, design.T @ slopes - penalty @ theta
        )
    freedom, dispersion = np.inf, 1.0
    if loss not in KNOWN_DISPERSION:
        freedom = rows - width
        dispersion = np.sum(weights * (label - mean) ** 2 / variance) / freedom
    bread = np.linalg.inv(information + penalty)
    meat = dispersion * information
    if is_robust:
        meat = design.T @ (slopes[:, None] ** 2 * design)
    if clusters is not None:
        numbers = np.unique(clusters)
        scores = slopes[:, None] * design
        sums = [scores[clusters == number].sum(axis=0) for number in numbers]
        meat = sum(np.outer(each, each) for each in sums)
        meat *= len(numbers) / (len(numbers) - 1) * (rows - 1) / (rows - width)
        freedom = len(numbers) - 1
    return LinearFit(theta, bread @ meat @ bread, freedom)


@dataclass(frozen=True)
class ClassFit:
    """Differences from the first class, (K - 1, p), the intercept last in each."""

    coefficients: np.ndarray
    covariance: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        return np.sqrt(np.diag(self.covariance)).reshape(self.coefficients.shape)


def fit_classes(
    features: np.ndarray,
    label: np.ndarray,
    *,
    weights: np.ndarray | None = None,
    l2: float = 0.0,
) -> ClassFit:
    """Fit a softmax by Newton's steps, row by row; labels are numbers from 0.

    Its scores are those of all classes, of which a ridge penalises all coefficients.
    """
    design = np.column_stack([features, np.ones(len(label))])
    classes, width = label.max() + 1, design.shape[1]
    weights = np.ones(len(label)) if weights is None else weights
    penalty = np.kron(
        np.eye(classes), np.diag([l2 * weights.sum()] * (width - 1) + [0])
    )
    theta = np.zeros((classes, width))
    for _ in range(STEPS):
        scores = design @ theta.T
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        information = np.zeros((classes * width, classes * width))
        for row, chance, weight in zip(design, chances, weights, strict=True):
            of_row = np.diag(chance) - np.outer(chance, chance)
            information += weight * np.kron(of_row, np.outer(row, row))
        slopes = weights[:, None] * (np.eye(classes)[label] - chances)
        gradient = (slopes.T @ design).ravel() - penalty @ theta.ravel()
        step = np.linalg.pinv(information + penalty, rcond=1e-11) @ gradient
        theta = theta + step.reshape(theta.shape)
        if np.abs(step).max() < 1e-12:
            break
    bread = np.linalg.pinv(information + penalty, rcond=1e-11)
    from_first = np.kron(np.eye(classes)[1:] - np.eye(classes)[:1], np.eye(width))
    covariance = from_first @ bread @ information @ bread @ from_first.T
    return ClassFit((from_first @ theta.ravel()).reshape(-1, width), covariance)
