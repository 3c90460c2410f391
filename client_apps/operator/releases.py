"""What leaves a part in training: as it is, or clipped, noised and paid for.

Every covered release is one use of the part's plan. The uses of a message are written
to the site's ledger, and have reached its disk, before the reply is sent
(``Site.pay``); what is beyond the plan is refused there, and nothing leaves.
"""

from dataclasses import dataclass, field, replace

from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError
from tp_flower.learning.models.encoded_rows import Features, on_host
from tp_flower.learning.models.fit_problem import FitProblem
from tp_flower.learning.models.local_model import LocalModel
from tp_flower.learning.solvers import gram
from tp_flower.noise import NoiseSource
from tp_flower.privacy.plan import (
    BATCH_SCORES,
    GRADIENTS,
    GRAM,
    MODEL,
    MOMENTS,
    SCORES,
    PartPlan,
)
from tp_flower.privacy.releases import Use
from tp_flower.privacy.scores import private_scores
from tp_flower.privacy.statistics_update import Rows, noisy_gram, noisy_moments
from tp_flower.protocol import AnyArray, row_numbers


@dataclass(frozen=True)
class Outgoing:
    """The releases of one part.

    Attributes:
        number: of the part.
        plan: what is done to them.
        noise: of the site.
        uses: of the message, which the site pays for together.
    """

    number: int
    plan: PartPlan
    noise: NoiseSource = field(repr=False)
    uses: list[Use] = field(default_factory=list)

    def check_clear(self, what: str) -> None:
        """Refuse to compute something as it is in a run that protects the models.

        A plan is made from what the server says of the run; what it asks for later may
        be something else, which the plan has no noise for.

        Raises:
            SiteError: the plan is a private one.
        """
        if self.plan.is_private:
            raise SiteError(
                f"the run is to protect the models, and its plan has no noise for "
                f"{what}: the course of the run is not the one that was planned"
            )

    def scores(self, scores: FloatArray) -> AnyArray:
        """Return scores (n, d_c) of all rows, or of the held-out ones, to be sent."""
        return self._scores(scores, SCORES, 0)

    def batch_scores(self, scores: FloatArray, batch: int) -> AnyArray:
        """Return the scores (k, d_c) of the distinct rows of a batch, to be sent."""
        return self._scores(scores, BATCH_SCORES, batch)

    def gradient(
        self,
        model: LocalModel,
        features: Features,
        messages: FloatArray,
        batch: int,
    ) -> FloatArray:
        """Return sum_j Y_j^T dh_j/dtheta over the rows of a batch (Eq. 18), (p,)."""
        plan = self.plan.gradients
        if plan is None:
            self.check_clear(GRADIENTS)
            return model.pullback(features, messages)
        # opacus takes a second to import
        from tp_flower.privacy.gradients import private_sum

        self._use(GRADIENTS, batch)
        return private_sum(
            model,
            on_host(features),
            messages,
            clip=plan.clip,
            noise_multiplier=plan.noise_multiplier,
            noise=self.noise,
        )

    def fit(self, model: LocalModel, problem: FitProblem, learning_rate: float) -> None:
        """Fit a model in place by DP-SGD; a learning rate of 0 is the plan's."""
        if self.plan.fit is None:
            raise TypeError("the part has no plan for DP-SGD")
        from tp_flower.privacy.dp_fit import fit_privately

        self._use(MODEL, 0)
        # how far a step goes is no secret, and costs nothing
        plan = replace(self.plan.fit, learning_rate=learning_rate)
        fit_privately(model, problem, plan, self.noise)

    def gram(self, rows: Rows) -> FloatArray:
        """Return [T, 1]^T diag(G) [T, 1] of the trained rows, (p, p)."""
        if self.plan.statistics is None:
            self.check_clear(GRAM)
            return gram(rows.features, rows.multiplicity, intercept=rows.intercept)
        self._use(GRAM, 0)
        return noisy_gram(self.plan.statistics, rows, self.noise)

    def moments(self, rows: Rows, residual: FloatArray) -> FloatArray:
        """Return [T, 1]^T (G * residual) of what is left to fit (n, d_c), (p, d_c)."""
        if self.plan.statistics is None:
            raise TypeError("the part has no plan for private statistics")
        self._use(MOMENTS, 0)
        return noisy_moments(self.plan.statistics, rows, residual, self.noise)

    def _scores(self, scores: FloatArray, what: str, key: int) -> AnyArray:
        plan = self.plan.scores
        if plan is not None:
            self._use(what, key)
            scores = private_scores(
                scores,
                clip=plan.clip,
                noise_multiplier=plan.noise_multiplier,
                noise=self.noise,
            )
        return row_numbers(scores)

    def _use(self, what: str, key: int) -> None:
        self.uses.append((self.number, what, key))
