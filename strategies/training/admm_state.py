"""The arrays of ADMM's server, and what an epoch does with them.

:class:`~strategies.training.admm.AdmmServer` decides (rho, relaxation, when to forget
the past); what it decides about lies here.
"""

from strategies.setup.problem import Federation
from strategies.training import joins
from tp_flower.arrays import FloatArray
from tp_flower.learning.admm import (
    AdmmState,
    LocalScores,
    Residuals,
    admm_step,
    initial_state,
    residuals,
)
from tp_flower.learning.anderson import AndersonMixer, Point


class AdmmArrays:
    """z, duals, the scores of the joined rows, and those of the tables' rows.

    Args:
        federation: the training problem.
        corrections: c.
        memory: epochs that Anderson mixing looks back on; 0 without.
    """

    def __init__(self, federation: Federation, corrections: int, memory: int) -> None:
        self._federation = federation
        self._mixer = AndersonMixer(
            federation.train, memory, corrections, federation.weighting.train
        )
        self._stepped = initial_state(
            federation.base_score, federation.train.joined_rows, rho=1.0
        )
        local_scores = dict(federation.initial_scores)
        scores = joins.gather(federation, local_scores)
        self._reached = self._point = Point(scores, self._stepped.duals, local_scores)

    def targets(
        self, rho: float, kappa: float, over_relaxation: float
    ) -> dict[str, FloatArray]:
        """Take the z- and dual update; return every table's target (n_i, d_c)."""
        self._stepped, message = admm_step(
            AdmmState(self._stepped.z, self._point.duals, rho),
            self._point.scores,
            self._federation.train_labels,
            self._federation.loss,
            over_relaxation,
        )
        return joins.scatter_targets(
            self._federation, self._point.local_scores, message, kappa
        )

    def take(self, local_scores: LocalScores) -> Residuals:
        """Take the sites' new scores (n_i, d_c); return the residuals of the epoch."""
        before = self._reached.scores
        scores = joins.gather(self._federation, local_scores)
        self._reached = Point(scores, self._stepped.duals, local_scores)
        return residuals(
            self._stepped,
            scores,
            before,
            self._federation.base_score,
            self._federation.weighting.train_rows,
        )

    def train_metrics(self) -> dict[str, float]:
        """Return the metrics of the scores that were taken last."""
        return joins.train_metrics(self._federation, self._reached.scores)

    def test_metrics(self) -> dict[str, float]:
        """Return those on the held-out rows; nothing without any."""
        return joins.test_metrics(self._federation, self._reached.local_scores)

    def mix(self, rho: float) -> None:
        """Move the next epoch's start by Anderson mixing, once scores were taken."""
        self._point = self._mixer.mix(rho, self._point, self._reached)

    def restart_mixing(self) -> None:
        """Forget the epochs before."""
        self._mixer.restart()

    @property
    def duals(self) -> FloatArray:
        """The duals lambda after their last update, (N, d_c)."""
        return self._stepped.duals

    @property
    def z(self) -> FloatArray:
        """The auxiliary variable z after its last update, (N, d_c)."""
        return self._stepped.z
