"""A part in training: a shard in one role, with what its site keeps of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.operator.shard import Shard, ShardData
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import DivergedError, SettingsError, SiteError, TPFlowerError
from tp_flower.learning.models.devices import Features, on_host
from tp_flower.learning.models.local_model import (
    FitProblem,
    LocalModel,
    ModelSpec,
    build_model,
)
from tp_flower.learning.solvers import RidgeSolver, gram
from tp_flower.privacy.mechanisms import Use, private_scores
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
from tp_flower.protocol import PartBody, Update, row_numbers
from tp_flower.randomness import NoiseSource


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
        from tp_flower.privacy.gradients import fit_privately

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


AnyBody = TypeVar("AnyBody", bound=PartBody)
State = tuple[LocalModel, dict[str, FloatArray]]


@dataclass(frozen=True)
class Part:
    """One shard in one role: the table of the query that it serves as.

    Attributes:
        number: the server's name for it in this run.
        table: alias of the table in the query.
        update: how the table's shards are trained together.
        shard: the client operator.
        solver: the factorised theta-update; None where the server or torch solves.
        device: the setting: where the model is computed.
        outgoing: what leaves it.
    """

    number: int
    table: str
    update: Update
    shard: Shard
    solver: RidgeSolver | None
    device: str
    outgoing: Outgoing

    @property
    def state(self) -> State:
        """What ``Site.save_state`` keeps of the part."""
        return self.shard.model, self.shard.vectors

    def finite_state(self) -> State:
        """Return what is to be kept of the part.

        Raises:
            DivergedError: its model is not finite any more.
        """
        self.finite(self.shard.model.parameters)
        return self.state

    def finite(self, numbers: FloatArray) -> FloatArray:
        """Return the part's parameters or scores.

        Raises:
            DivergedError: they are not finite.
        """
        if not np.isfinite(numbers).all():
            raise DivergedError(
                f"table {self.table}: the model is not finite any more: training "
                "diverged. Lower learning-rate (0 chooses one)"
            )
        return numbers


@dataclass(frozen=True)
class FixedPart:
    """What never changes of a part in training.

    Attributes:
        entry: that it was read from, without features that lie elsewhere.
        data: of the shard.
        spec: of its model.
        update: how the table's shards are trained together.
        plan: of its releases.
        solver: the factorised theta-update; None where the server or torch solves.
    """

    entry: Entry
    data: ShardData
    spec: ModelSpec
    update: Update
    plan: PartPlan
    solver: RidgeSolver | None

    @classmethod
    def read(cls, entry: Entry, features: Features) -> Self:
        """Return what ``prepare`` has kept of a part, with its features."""
        meta: Any = entry.meta
        arrays = entry.arrays
        data = ShardData(
            features=features,
            multiplicity=arrays["multiplicity"],
            tested=arrays["tested"],
            joined_rows=meta["joined_rows"],
            l2=meta["l2"],
            batch_start=arrays["batch-start"],
            batch_rows=arrays["batch-rows"],
        )
        solver = None
        if "eigenvalues" in arrays:
            solver = RidgeSolver(
                arrays["eigenvalues"],
                arrays["eigenvectors"],
                arrays["mean"],
                meta["weight"],
                meta["joined_rows"],
            )
        spec, update = ModelSpec.from_json(meta["model"]), Update(meta["update"])
        plan = PartPlan.from_json(meta["privacy"])
        return cls(entry, data, spec, update, plan, solver)

    def is_of(self, entry: Entry, features: Features) -> bool:
        """Whether it was read from these very objects."""
        return self.entry is entry and self.data.features is features

    def part(
        self, number: int, vectors: dict[str, FloatArray], outgoing: Outgoing
    ) -> Part:
        """Return the part with its current state.

        The model is made anew: what a factory's keeps beside its parameters must not
        differ from process to process.
        """
        meta: Any = self.entry.meta
        width, device = self.data.features.shape[1], meta["device"]
        model = make_model(self.spec, width, device)
        model.parameters = vectors.pop(MODEL)
        shard = Shard(self.data, model, vectors)
        return Part(
            number, meta["table"], self.update, shard, self.solver, device, outgoing
        )


def body_of(bodies: Mapping[int, AnyBody], part: Part) -> AnyBody:
    """Return what a request says of a part.

    Raises:
        SiteError: it says nothing.
    """
    if part.number not in bodies:
        raise SiteError(f"malformed request: it says nothing of part {part.number}")
    return bodies[part.number]


def make_model(spec: ModelSpec, features: int, device: str) -> LocalModel:
    """Return the model of a table; a factory's own errors are told with their text.

    Raises:
        SettingsError: if the model cannot be made.
    """
    try:
        return build_model(spec, features, device)
    except TPFlowerError:
        raise
    except Exception as error:
        # a factory sees sizes only, so that its words cannot quote data
        raise SettingsError(
            f"model {spec.kind!r} raised {type(error).__name__} for {features} "
            f"features and {spec.outputs} outputs: {error}"
        ) from error


def initial_vectors(model: LocalModel, update: Update) -> dict[str, FloatArray]:
    """Return the state vectors that training by ``update`` needs besides theta."""
    zeros = np.zeros(len(model.parameters))
    if update is Update.CONSENSUS:
        return {
            "theta": model.parameters,
            "consensus": model.parameters,
            "consensus_duals": zeros,
        }
    return {"momentum": zeros}
