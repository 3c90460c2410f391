"""The site half of a training method, as the rest of a site sees it.

A method has a state (:mod:`client_apps.operator.state`), functions that answer its
messages (``registry.py`` lists both), and what it adds to the beginning and the end of
training. The last are the hooks of :class:`SiteMethod`, and of :class:`JoinMethod`
where it trains over joins, by ``train.prepare``. Policies, rows, masks, budgets and
the ledger are no method's: ``client_apps/training`` sees to them for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic

import numpy as np

from client_apps.operator.participant import Participant
from client_apps.operator.state import State
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError
from tp_flower.learning.models.local_model import (
    LINEAR,
    NUMPY_KINDS,
    LinearModel,
    LocalModel,
)
from tp_flower.learning.solvers import Solver
from tp_flower.privacy import plan
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Outline, PreparedPart, Update

if TYPE_CHECKING:
    from tp_flower.features.encoder import SiteEncoder

SUMMED: Final[Mapping[Update, tuple[str, ...]]] = {
    Update.LOCAL: (),
    Update.GRAM: (plan.GRAM, plan.MOMENTS),
    Update.CONSENSUS: (plan.PARAMETERS,),
    Update.SUM: (plan.GRADIENTS,),
    Update.GIVEN: (),
}
"""What the shards of a table send of their models, by how they train together."""


class SiteMethod(ABC, Generic[State]):
    """The site half of a method: its state, and how it ends.

    Attributes:
        state: the dataclass of a participant's state, besides its model.
    """

    state: ClassVar[type[Any]]

    def take_last_step(self, part: Participant[State], request: FinishRequest) -> bool:
        """Take the step that comes with the end of a run.

        Return whether the model has moved since its scores left, so that their sums
        are out of date. A method without such a step refuses one.
        """
        if request.step is not None or part.data.table in request.lengths:
            raise MessageError("this run has no step to take at its end")
        return False

    def coefficients(self, part: Participant[State]) -> AnyArray | None:
        """Return the coefficients that a policy may show, (d [+ 1], d_c), if any."""
        if not isinstance(part.model, LinearModel):
            return None
        return part.model.weights


@dataclass(frozen=True)
class Beginning(Generic[State]):
    """How a participant begins: its state and solver, and what the server learns."""

    reply: PreparedPart
    state: State
    solver: Solver | None = None


class JoinMethod(SiteMethod[State]):
    """The site half of a method that trains over joins.

    Attributes:
        carriers: the messages that its planned releases leave with.
    """

    carriers: ClassVar[tuple[Action, ...]]

    def trains(self, kind: str) -> bool:
        """Return whether it trains models of a kind: those with a gradient."""
        return kind == LINEAR or kind not in NUMPY_KINDS

    def sends_rows(self, outline: Outline) -> bool:  # noqa: ARG002 - methods use it
        """Return whether encoded rows leave, for which policies have a rule."""
        return False

    def clear_releases(self, outline: Outline, update: Update) -> tuple[str, ...]:  # noqa: ARG002
        """Return the releases of rows or the model that no mechanism covers."""
        return (plan.CURVATURE, *SUMMED[update])

    def adapt(self, model: LocalModel, encoder: "SiteEncoder") -> None:
        """Fit an untrained model to the features that are encoded for it."""

    @abstractmethod
    def begin(self, part: Participant[Any], columns: int) -> Beginning[State]:
        """Return how a participant begins; ``columns`` are its encodings.

        What leaves of the rows goes through the part's releaser, as planned.
        """


def prepared_part(part: Participant[Any], **fields: Any) -> PreparedPart:
    """Return the reply about a prepared participant, with more of its fields."""
    return PreparedPart(
        features=part.data.features.shape[1],
        penalised=part.model.penalised.astype(np.uint8),
        **fields,
    )
