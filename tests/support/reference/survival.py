"""The partial likelihood and the concordance as the books write them, pair by pair.

Slow on purpose, and shared with nobody: Efron 1977; Harrell et al. 1982.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from tp_flower.objectives import Target, make_objective
from tp_flower.objectives.survival import Cox

MEAN_WEIGHT = 1.75
"""Of the rows of R."""


@dataclass(frozen=True)
class Rows:
    """Rows with times, events, entries, strata and weights, (n,) each."""

    time: np.ndarray
    event: np.ndarray
    entry: np.ndarray
    stratum: np.ndarray
    weights: np.ndarray

    @classmethod
    def drawn(cls, seed: int, rows: int, *, ties: int = 0, **has: bool) -> "Rows":
        """Rows of which some tie at one of so many times, if any; else, of floats."""
        rng = np.random.default_rng(seed)
        time = rng.exponential(10.0, rows) + 0.1
        if ties:
            time = rng.integers(1, ties + 1, rows).astype(float)
        entry = np.full(rows, -1.0)
        if has.get("entry"):
            entry = np.floor(time * rng.uniform(-0.5, 0.999, rows) * 4) / 4
        strata = rng.integers(0, 3, rows) if has.get("strata") else np.zeros(rows)
        weights = rng.uniform(0.2, 3.0, rows) if has.get("weights") else np.ones(rows)
        weights /= weights.mean()
        event = rng.random(rows) < 0.6
        return cls(time, event, entry, strata, weights)

    def objective(self, *names: str) -> Cox:
        """The family bound to these columns, with those of some names."""
        columns = {"time": self.time, "event": self.event}
        columns |= {
            name: {"entry": self.entry, "strata": self.stratum}[name]
            for name in names
            if name != "weights"
        }
        weights = self.weights if "weights" in names else None
        target = Target(
            np.column_stack([*columns.values()]).astype(float), names=tuple(columns)
        )
        return make_objective("cox", target, weights)

    def at_risk(self, row: int) -> np.ndarray:
        """Whether each row is at risk when one has its event, (n,)."""
        is_there = (self.entry < self.time[row]) & (self.time >= self.time[row])
        return is_there & (self.stratum == self.stratum[row])


def rows_of_r() -> tuple[Rows, np.ndarray]:
    """The rows of tests/unit/objectives/survival.R, and their features (120, 2)."""
    i = np.arange(1, 121)
    time = 1.0 + (i * 37) % 25
    entry = np.floor(time * ((i * 13) % 11) / 11 * 0.9)
    event = (i * i * 7) % 10 < 6
    weights = (1 + (i % 4) / 2) / MEAN_WEIGHT
    rows = Rows(time, event, entry, (i % 3).astype(float), weights)
    return rows, np.column_stack([np.sin(i), np.cos(2.3 * i)])


def log_likelihood(rows: Rows, scores: np.ndarray) -> float:
    """Efron's partial log likelihood, by a loop over the distinct times."""
    logs = scores + np.log(rows.weights)
    total = 0.0
    deaths = [i for i in range(len(scores)) if rows.event[i]]
    for moment in {(rows.stratum[i], rows.time[i]) for i in deaths}:
        dying = [i for i in deaths if (rows.stratum[i], rows.time[i]) == moment]
        there = rows.at_risk(dying[0])
        weight = rows.weights[dying].mean()
        total += float(rows.weights[dying] @ scores[dying])
        whole = logsumexp(logs[there])
        share = math.exp(logsumexp(logs[dying]) - whole)
        for rank in range(len(dying)):
            total -= weight * (whole + math.log1p(-rank / len(dying) * share))
    return total


def information(rows: Rows, scores: np.ndarray, features: np.ndarray) -> np.ndarray:
    """The second derivative of minus the log likelihood by coefficients, (d, d).

    It is the features' covariance among the rows at risk, added up over the deaths.
    """
    hazards = rows.weights * np.exp(scores)
    total = np.zeros((features.shape[1],) * 2)
    deaths = [i for i in range(len(scores)) if rows.event[i]]
    for moment in {(rows.stratum[i], rows.time[i]) for i in deaths}:
        dying = [i for i in deaths if (rows.stratum[i], rows.time[i]) == moment]
        there = rows.at_risk(dying[0])
        weight = rows.weights[dying].mean()
        for rank in range(len(dying)):
            left = hazards * there
            left[dying] *= 1.0 - rank / len(dying)
            chances = left / left.sum()
            centred = features - chances @ features
            total += weight * (centred.T * chances) @ centred
    return total


def concordance(rows: Rows, scores: np.ndarray) -> float:
    """The share of comparable pairs whose order the scores tell, pair by pair."""
    good = every = 0.0
    for i in np.flatnonzero(rows.event):
        for j in np.flatnonzero(rows.at_risk(i)):
            if rows.time[j] == rows.time[i] and rows.event[j]:
                continue
            weight = rows.weights[i] * rows.weights[j]
            every += weight
            good += weight * (0.5 * (scores[i] == scores[j]) + (scores[i] > scores[j]))
    return good / every


def brier(rows: Rows, alive: np.ndarray, time: float) -> float:
    """Graf's score at a time of probabilities (n,) to survive it, row by row."""

    def remaining(until: float) -> float:
        """The chance not to be censored before: of one time, events come first."""
        left = 1.0
        for moment in np.unique(rows.time[~rows.event]):
            if moment < until:
                is_censored = (rows.time == moment) & ~rows.event
                there = rows.weights[(rows.time > moment) | is_censored].sum()
                left *= 1.0 - rows.weights[is_censored].sum() / there
        return left

    total = 0.0
    for i, (moment, weight) in enumerate(zip(rows.time, rows.weights, strict=True)):
        if rows.event[i] and moment <= time:
            total += weight * alive[i] ** 2 / remaining(moment)
        elif moment >= time:
            total += weight * (1.0 - alive[i]) ** 2 / remaining(time)
    return total / rows.weights.sum()


def newton(rows: Rows, features: np.ndarray, l2: float = 0.0) -> np.ndarray:
    """The coefficients (d,) of least -log likelihood + l2/2 ||b||^2, one death a time.

    Newton's steps with the information matrix, event time by event time.
    """
    theta = np.zeros(features.shape[1])
    for _ in range(50):
        score, information = _derivatives(rows, features, theta)
        information = information + l2 * np.eye(len(theta))
        step = np.linalg.solve(information, score - l2 * theta)
        theta = theta + step
        if np.abs(step).max() < 1e-12:
            return theta
    raise AssertionError("Newton's method has not converged")


def _derivatives(rows: Rows, features: np.ndarray, theta: np.ndarray):
    scores = features @ theta
    rates = rows.weights * np.exp(scores - scores.max())
    deaths = np.flatnonzero(rows.event)
    score = rows.weights[deaths] @ features[deaths]
    information = np.zeros((len(theta), len(theta)))
    for stratum, time in sorted({(rows.stratum[i], rows.time[i]) for i in deaths}):
        is_dying = rows.event & (rows.stratum == stratum) & (rows.time == time)
        there = rows.at_risk(int(np.flatnonzero(is_dying)[0]))
        weight = rows.weights[is_dying].mean()
        for rank in range(count := int(is_dying.sum())):
            shares = rates * there * (1.0 - rank / count * is_dying)
            shares = shares / shares.sum()
            mean = shares @ features
            score = score - weight * mean
            spread = features - mean
            information += weight * spread.T @ (shares[:, None] * spread)
    return score, information
