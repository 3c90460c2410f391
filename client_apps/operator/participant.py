"""A part in training: a shard in one role, with what its site keeps of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.operator.releases import Outgoing
from client_apps.operator.shard import Shard, ShardData
from tp_flower.arrays import FloatArray
from tp_flower.errors import DivergedError, SettingsError, SiteError, TPFlowerError
from tp_flower.learning.models.encoded_rows import Features
from tp_flower.learning.models.local_model import LocalModel, ModelSpec, build_model
from tp_flower.learning.solvers import RidgeSolver
from tp_flower.privacy.plan import PartPlan
from tp_flower.protocol import PartBody, Update

AnyBody = TypeVar("AnyBody", bound=PartBody)
State = tuple[LocalModel, dict[str, FloatArray]]

MODEL = "model"


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
