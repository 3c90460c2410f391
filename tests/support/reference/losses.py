"""Losses of one row at a time, in extended precision, as the paper writes them.

Deliberately slow, and shares nothing with `tp_flower`. Scores are a vector of d_c
numbers, the label is a number or a class.
"""

import numpy as np
from scipy.optimize import minimize

Wide = np.longdouble
VARIANCES = {
    "poisson": lambda mu: mu,
    "gamma": lambda mu: mu**2,
    "tweedie": lambda mu: mu**1.5,
    "negative-binomial": lambda mu: mu + mu**2,
}


def half_deviance(name: str, y, mu) -> float:
    """Return half the deviance of a label and a mean, as textbooks write it."""
    y = Wide(y)
    own = y * np.log(y / mu) if y else Wide(0)
    if name == "poisson":
        return own - y + mu
    if name == "gamma":
        return y / mu - 1 - np.log(y / mu)
    if name == "tweedie":
        return -4 * np.sqrt(y) + 2 * y / np.sqrt(mu) + 2 * np.sqrt(mu)
    return own - (y + 1) * np.log((1 + y) / (1 + mu))


def row_value(name: str, scores, label) -> float:
    """Return the loss of one row."""
    scores = np.asarray(scores, Wide)
    if name == "squared":
        return (scores[0] - Wide(label)) ** 2 / 2
    if name == "logistic":
        # two classes with scores (0, h)
        return row_value("softmax", [0.0, scores[0]], label)
    if name in VARIANCES:
        return half_deviance(name, label, np.exp(np.clip(scores[0], -300, 300)))
    residual = scores[0] - Wide(label)
    if name == "quantile":
        return max(-residual / 2, residual / 2)
    if name == "huber":
        size = abs(residual)
        return size**2 / 2 if size <= 1 else size - Wide(1) / 2
    assert name == "softmax", f"write down what {name!r} is of one row"
    top = scores.max()
    total = Wide(0)
    for score in scores:
        total += np.exp(score - top)
    return np.log(total) + top - scores[int(label)]


def row_gradient(name: str, scores, label) -> np.ndarray:
    """Return d loss / d scores of one row."""
    scores = np.asarray(scores, Wide)
    if name == "squared":
        return scores - Wide(label)
    if name == "logistic":
        return row_gradient("softmax", [0.0, scores[0]], label)[1:]
    if name in VARIANCES:
        mu = np.exp(np.clip(scores, -300, 300))
        return (mu - Wide(label)) * mu / VARIANCES[name](mu)
    if name == "quantile":
        return np.sign(scores - Wide(label)) / 2
    if name == "huber":
        return np.clip(scores - Wide(label), -1, 1)
    assert name == "softmax", f"write down the gradient of {name!r} of one row"
    rates = np.exp(scores - scores.max())
    rates /= rates.sum()
    rates[int(label)] -= 1
    return rates


def prox_gradient(name: str, z, centre, label, rho: float) -> np.ndarray:
    """Return the gradient of loss(z) + rho/2 ||z - v||^2 of one row."""
    gap = np.asarray(z, Wide) - np.asarray(centre, Wide)
    return row_gradient(name, z, label) + Wide(rho) * gap


def brute_prox(name: str, centre, label, rho: float) -> np.ndarray:
    """Return argmin_z loss(z) + rho/2 ||z - v||^2 of one row by a general minimiser."""
    centre = np.asarray(centre, float)

    def objective(z):
        return float(row_value(name, z, label)) + rho / 2 * ((z - centre) ** 2).sum()

    def gradient(z):
        return np.asarray(prox_gradient(name, z, centre, label, rho), float)

    options = {"maxiter": 20000, "gtol": 1e-12, "ftol": 1e-16}
    return minimize(
        objective, centre, jac=gradient, method="L-BFGS-B", options=options
    ).x


def mean_value(name: str, scores, labels, weights=None) -> float:
    """Return the mean loss over rows, of weights with mean 1 if they have some."""
    rows = [row_value(name, s, y) for s, y in zip(scores, labels, strict=True)]
    if weights is not None:
        rows = [w * row for w, row in zip(weights, rows, strict=True)]
    return float(sum(rows) / len(rows))


def gradients(name: str, scores, labels) -> np.ndarray:
    """Return d loss / d scores of every row."""
    rows = [row_gradient(name, s, y) for s, y in zip(scores, labels, strict=True)]
    return np.array(rows, float)
