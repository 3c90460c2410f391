"""The releases of a participant, with the noise of its plan."""

from collections import Counter
from dataclasses import dataclass, field, replace

from client_apps.data.score_counts import ScoreLimit
from client_apps.operator.masks import Masked
from tp_flower import errors
from tp_flower.arrays import FloatArray
from tp_flower.learning.models import local_model
from tp_flower.learning.solvers import gram
from tp_flower.privacy.mechanisms import Spend, private_scores
from tp_flower.privacy.plan import (
    BATCH_SCORES,
    GRADIENTS,
    GRAM,
    MODEL,
    MOMENTS,
    SCORES,
    PartPlan,
)
from tp_flower.privacy.statistics_update import Rows, noisy_gram, noisy_moments
from tp_flower.privacy.units import Units
from tp_flower.randomness import NoiseSource


@dataclass(frozen=True)
class Releaser:
    """The releases of one participant, with the noise of its plan.

    ``uses`` and ``masked`` are those of the message that the site is answering,
    ``scored`` how many score vectors leave in it without noise, by part, where a policy
    limits them.
    """

    number: int
    plan: PartPlan
    noise: NoiseSource = field(repr=False)
    uses: list[Spend] = field(default_factory=list)
    scored: Counter[tuple[int, ScoreLimit]] = field(default_factory=Counter)
    masked: list[Masked] = field(default_factory=list, repr=False)

    def check_clear(self, release: str) -> None:
        """Refuse to compute something without noise in a run that protects models.

        A plan follows the announced schedule; a later request may need a release that
        the plan has no noise for.
        """
        if self.plan.is_private:
            raise errors.SiteError(
                "the run protects the models, but its plan has no noise for "
                f"{release}: the run does not follow its announced schedule"
            )

    def scores(self, scores: FloatArray, batch: int | None = None) -> FloatArray:
        """Return scores (n, d_c) of all or held-out rows, or of a batch, as planned."""
        if (plan := self.plan.scores) is not None:
            self.uses.append(
                (self.number, SCORES if batch is None else BATCH_SCORES, batch or 0)
            )
            scores = private_scores(scores, plan, self.noise)
        return scores

    def gradient(
        self,
        model: local_model.LocalModel,
        features: local_model.Features,
        messages: FloatArray,
        batch: int,
        units: Units | None = None,
    ) -> FloatArray:
        """Return sum_j Y_j^T dh_j/dtheta over the rows of a batch (Eq. 18), (p,)."""
        plan = self.plan.gradients
        if plan is None:
            self.check_clear(GRADIENTS)
            return model.pullback(features, messages)
        # opacus takes a second to import
        from tp_flower.privacy.gradients import private_sum

        self.uses.append((self.number, GRADIENTS, batch))
        return private_sum(
            model,
            local_model.host_features(features),
            messages,
            plan,
            self.noise,
            units,
        )

    def fit(
        self,
        model: local_model.LocalModel,
        problem: local_model.FitProblem,
        learning_rate: float,
        units: Units | None = None,
    ) -> None:
        """Fit a model in place by DP-SGD; learning rate 0 takes the plan's."""
        if self.plan.fit is None:
            raise TypeError("the part has no plan for DP-SGD")
        from tp_flower.privacy.gradients import fit_privately

        self.uses.append((self.number, MODEL, 0))
        # the size of a step is not secret, and costs nothing
        plan = replace(self.plan.fit, learning_rate=learning_rate)
        fit_privately(model, problem, plan, self.noise, units)

    def gram(self, rows: Rows) -> FloatArray:
        """Return [T, 1]^T diag(G) [T, 1] of the trained rows, (p, p)."""
        if self.plan.statistics is None:
            self.check_clear(GRAM)
            return gram(rows.features, rows.multiplicity, intercept=rows.intercept)
        self.uses.append((self.number, GRAM, 0))
        return noisy_gram(self.plan.statistics, rows, self.noise)

    def moments(self, rows: Rows, residual: FloatArray) -> FloatArray:
        """Return [T, 1]^T (G * residual), (p, d_c), of a residual (n, d_c)."""
        if self.plan.statistics is None:
            raise TypeError("the part has no plan for private statistics")
        self.uses.append((self.number, MOMENTS, 0))
        return noisy_moments(self.plan.statistics, rows, residual, self.noise)
