"""The client operator: what one shard of one table computes in training.

Algorithm 1 of the paper gives a client three functions: *receive* (what the message
carried), *compute* (the methods here) and *send* (what they return). A shard is made
from what its site keeps, changed by at most one method per message, and saved again.

Notation:
    T_i^q    ``features``  (n, d): encoded rows that take part, trained ones first
    G_i      ``multiplicity``  (n_trained,)
    theta    ``model.parameters``  (p,)        w, u  ``consensus``, ``consensus_duals``
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import FloatArray
from tp_flower.learning.models.devices import Features, rows_of
from tp_flower.learning.models.local_model import LinearModel, LocalModel, moment
from tp_flower.learning.solvers import RidgeSolver

IntArray = npt.NDArray[np.int64]

MOST_KEPT = 1 << 24
"""Features of a batch that are kept for the next message: 64 MiB."""


@dataclass(frozen=True)
class ShardData:
    """What never changes during training.

    Attributes:
        features: (n, d) float32, the trained rows first, then those only tested; where
            the model is computed.
        multiplicity: (n_trained,), G of the trained rows; where joined rows are
            weighted, what those of each row weigh.
        tested: (n,) bool, rows that appear in held-out joined rows.
        joined_rows: N of the training rows.
        l2: beta.
        batch_start: (batches + 1,) and
        batch_rows: the rows of each SGD batch; empty without a plan.
    """

    features: Features
    multiplicity: IntArray | FloatArray
    tested: npt.NDArray[np.bool_]
    joined_rows: int
    l2: float
    batch_start: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    batch_rows: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    _gathered: dict[int, Features] = field(default_factory=dict, repr=False)

    @property
    def trained(self) -> Features:
        """The features of the trained rows, (n_trained, d)."""
        return self.features[: len(self.multiplicity)]

    def batch_of(self, batch: int) -> IntArray:
        """Return the distinct rows of an SGD batch, ascending, (k,)."""
        return self.batch_rows[self.batch_start[batch] : self.batch_start[batch + 1]]

    def batch(self, batch: int) -> Features:
        """Return the features of the distinct rows of an SGD batch, (k, d).

        Those of the last call are kept: a batch's scores are asked for in one message,
        and its gradient in the next, which the same process may answer.
        """
        if batch in self._gathered:
            return self._gathered[batch]
        rows = self.batch_of(batch)
        if len(rows) == len(self.multiplicity):
            return self.trained
        found = rows_of(self.features, rows)
        self._gathered.clear()
        if found.shape[0] * found.shape[1] <= MOST_KEPT:
            self._gathered[batch] = found
        return found


class Shard:
    """One shard in training.

    Args:
        data: what never changes.
        model: f_i with the current parameters.
        vectors: the other vectors of the state by name, each (p,): ``momentum``,
            ``theta``, ``consensus``, ``consensus_duals`` and the ``rho_in`` (1,) that
            scales them, as far as they exist.
    """

    def __init__(
        self, data: ShardData, model: LocalModel, vectors: dict[str, FloatArray]
    ) -> None:
        self.data, self.model, self.vectors = data, model, vectors

    def scores(self) -> FloatArray:
        """Return the local scores of all rows that take part, (n, d_c)."""
        return self.model.scores(self.data.features)

    def trained_scores(self) -> FloatArray:
        """Return the local scores of the rows that are trained on, (n_trained, d_c)."""
        return self.model.scores(self.data.trained)

    def tested_scores(self) -> FloatArray:
        """Return the local scores of the held-out rows, (n_tested, d_c)."""
        return self.model.scores(self.data.features[self.data.tested])

    def moments(self, target: FloatArray) -> FloatArray:
        """Return [T, 1]^T (G * target), (d [+ 1], d_c): adds up over the shards."""
        weighted = self.data.multiplicity[:, None] * target
        return moment(self.data.trained, weighted, intercept=self.linear.intercept)

    def fit_exactly(
        self, solver: RidgeSolver, target: FloatArray, kappa: float
    ) -> None:
        """Set theta to the exact theta-update of a linear model (Eq. 16)."""
        weights = solver.solve(self.moments(target), kappa, self.data.l2)
        self.model.parameters = weights.ravel()

    def fit_consensus_exactly(
        self, solver: RidgeSolver, target: FloatArray, kappa: float, rho_in: float
    ) -> FloatArray:
        """Fit theta^q (Eq. 22) of a linear model and return theta^q + u^q, (p,).

        With theta = a + delta, a = w - u, this is a ridge of strength rho_in on the
        target that a leaves. ``solver`` penalises the intercept like the rest.
        """
        centre = self.centre
        self.model.parameters = centre
        left = target - self.model.scores(self.data.trained)
        delta = solver.solve(self.moments(left), kappa, rho_in)
        return self.propose(centre + delta.ravel())

    @property
    def centre(self) -> FloatArray:
        """What theta^q is drawn to, w - u, (p,)."""
        return self.vectors["consensus"] - self.vectors["consensus_duals"]

    def set_inner_penalty(self, rho_in: float) -> None:
        """Use rho_in from now on: scaled duals u are divided by it, so they follow."""
        before = self.vectors.get("rho_in")
        if before is not None:
            self.vectors["consensus_duals"] *= before[0] / rho_in
        self.vectors["rho_in"] = np.array([rho_in])

    def propose(self, theta: FloatArray) -> FloatArray:
        """Keep theta^q and return theta^q + u^q, all that the server needs, (p,)."""
        self.vectors["theta"] = theta
        return theta + self.vectors["consensus_duals"]

    def accept_consensus(self, consensus: FloatArray) -> None:
        """Take w, update u += theta - w (Eq. 21); the shard predicts with w."""
        self.vectors["consensus_duals"] += self.vectors["theta"] - consensus
        self.vectors["consensus"] = consensus
        self.model.parameters = consensus

    def batch_scores(self, batch: int) -> FloatArray:
        """Return the local scores of the distinct rows of a batch, (k, d_c)."""
        return self.model.scores(self.data.batch(batch))

    def step(self, gradient: FloatArray, learning_rate: float, momentum: float) -> None:
        """Take one SGD step (Eq. 13 or 19) with the mean gradient of the loss, (p,).

        velocity = momentum * velocity + gradient + beta * theta (biases without beta);
        theta -= learning_rate * velocity.
        """
        velocity = self._drift(momentum) + gradient
        self.vectors["momentum"] = velocity
        self.model.parameters = self.model.parameters - learning_rate * velocity

    def foreseen(self, learning_rate: float, momentum: float) -> FloatArray:
        """Return theta after a step whose gradient is not known yet, without it, (p,).

        Most of a step with momentum is known before. Nesterov's momentum takes the
        gradient there; here that makes steps on stale scores stable at larger rates.
        """
        return self.model.parameters - learning_rate * self._drift(momentum)

    def _drift(self, momentum: float) -> FloatArray:
        """Return what of the next velocity does not depend on the data, (p,)."""
        theta = self.model.parameters
        decay = self.data.l2 * np.where(self.model.penalised, theta, 0.0)
        return momentum * self.vectors["momentum"] + decay

    @property
    def linear(self) -> LinearModel:
        """The model, which must be linear."""
        if not isinstance(self.model, LinearModel):
            raise TypeError(f"{type(self.model).__name__} has no exact solution")
        return self.model
