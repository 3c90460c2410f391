"""Sharing ADMM on the materialised join: no multiplicity, no target.

Boyd et al. 2011, section 7.3 in the papers' notation; every sum runs over joined rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.support.reference import losses
from tests.support.reference.training import Centralised


@dataclass(frozen=True)
class Step:
    """An epoch's end: parameters of each table, z and duals on the joined rows."""

    theta: dict[str, np.ndarray]
    z: np.ndarray
    duals: np.ndarray

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate([matrix.ravel() for matrix in self.theta.values()])


def admm(
    problem: Centralised, epochs: int, rho: float, relaxation=1.0
) -> Iterator[Step]:
    """Yield the epochs of ADMM from theta = 0."""
    rows = len(problem.labels)
    every = range(len(problem.labels))
    theta = {
        table: np.zeros((inputs.shape[1], problem.outputs))
        for table, inputs in problem.inputs.items()
    }
    z = np.tile(problem.base, (rows, 1))
    duals = np.zeros((rows, problem.outputs))
    kappa = len(problem.inputs) * rho
    for epoch in range(epochs):
        h = problem.scores(np.concatenate([m.ravel() for m in theta.values()]), every)
        alpha = relaxation if epoch else 1.0
        relaxed = alpha * h + (1 - alpha) * z
        z = np.array(
            [
                losses.brute_prox(problem.loss, row + dual / rho, label, rho)
                for row, dual, label in zip(relaxed, duals, problem.labels, strict=True)
            ]
        )
        duals = duals + rho * (relaxed - z)
        message = duals + rho * (h - z)
        theta = {
            table: _fit(problem, table, own, message / kappa, kappa)
            for table, own in theta.items()
        }
        yield Step(theta, z, duals)


def _fit(problem, table, theta, correction, kappa) -> np.ndarray:
    """argmin beta R + kappa/2N sum_j ||x_j theta' - (x_j theta - correction_j)||^2."""
    inputs = problem.inputs[table]
    rows = len(problem.labels)
    target = inputs @ theta - correction
    root = np.sqrt(kappa / rows)
    penalty = np.sqrt(problem.l2) * np.diag(problem.penalised[table].astype(float))
    stacked = np.vstack([root * inputs, penalty])
    right = np.vstack([root * target, np.zeros((len(penalty), problem.outputs))])
    return np.linalg.lstsq(stacked, right, rcond=None)[0]
