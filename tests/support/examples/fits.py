"""A weighted ridge regression of 60 rows, as a fit of a model, and its solution."""

import numpy as np

from tp_flower.learning.models.local_model import FitProblem


def normal_rows(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def with_ones(features: np.ndarray, intercept: bool = True) -> np.ndarray:
    """Features in 64 bits; with an intercept, a last column of ones."""
    wide = features.astype(np.float64)
    return np.hstack([wide, np.ones((len(wide), 1))]) if intercept else wide


def fit_problem(model, strength: float = 0.02, scale: float = 1.0) -> FitProblem:
    """Rows of three features that explain all of the target but a little noise."""
    rng = np.random.default_rng(2)
    features = normal_rows(60, 3)
    target = features @ np.array([[1.0], [-2.0], [0.5]]) + 0.5
    target = scale * (target + 0.1 * rng.normal(size=(60, 1)))
    return FitProblem(
        features=features,
        multiplicity=rng.integers(1, 5, 60),
        target=target,
        kappa=0.7,
        joined_rows=200,
        strength=strength,
        centre=np.zeros(len(model.penalised)),
        penalised=model.penalised,
    )


def ridge_of(problem: FitProblem) -> np.ndarray:
    """The docstring of FitProblem, solved: the intercept is free."""
    dense = with_ones(problem.features)
    scale = problem.kappa / problem.joined_rows
    weighted = problem.multiplicity[:, None] * dense
    penalty = problem.strength * np.diag([1.0, 1.0, 1.0, 0.0])
    matrix = scale * dense.T @ weighted + penalty
    right = scale * weighted.T @ problem.target + penalty @ problem.centre[:, None]
    return np.linalg.solve(matrix, right).ravel()
