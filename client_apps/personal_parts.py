"""A site's parts in the training of models of their own: objective, rows, metrics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.orders import FloatArray, Order, real_numbers
from client_apps.part import Part
from client_apps.site import Site
from tp_flower.errors import SiteError
from tp_flower.learning.losses import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss
from tp_flower.learning.site_objective import SiteObjective
from tp_flower.privacy.plan import CURVATURE
from tp_flower.protocol import Packet

LABELS_KEPT: Final = "labels"
"""Of a part's entry: the labels of its rows, (n,)."""


@dataclass(frozen=True)
class PersonalPart:
    """A part and what it minimises.

    Attributes:
        part: in training.
        objective: of its trained rows.
        labels: of all its rows, (n,), the trained ones first.
        curvature: a bound of the objective's.
        start: (p,), parameters that nobody has trained.
        summary: what may leave for the graph: its kind, and the noise's multiplier.
    """

    part: Part
    objective: SiteObjective
    labels: FloatArray
    curvature: float
    start: FloatArray
    summary: Mapping[str, Any]

    @property
    def number(self) -> int:
        """Of the part."""
        return self.part.number

    def metrics(self, parameters: FloatArray) -> dict[str, dict[str, float]]:
        """Return the metrics of the trained and of the held-out rows."""
        own, data = self.objective, self.part.shard.data
        count = len(data.multiplicity)
        train = own.metrics(parameters, own.features, own.labels)
        held_out = data.features[count:]
        test = own.metrics(parameters, held_out, self.labels[count:])
        penalty = {"penalty": own.penalty(parameters)}
        return {"train": {**train, **penalty}, "test": test}

    def parameters(self, request: Packet, name: str) -> FloatArray:
        """Return parameters (p,) that a request sends.

        Raises:
            SiteError: they are not those of the part's model.
        """
        array = request.array(self.number, name)
        shape = (len(self.part.shard.model.penalised),)
        return real_numbers(array, name, shape)


def personal_parts(site: Site, header: Order) -> Iterator[PersonalPart]:
    """Yield the site's parts, with the base score that a request names.

    Raises:
        SiteError: the site has none in this run, or the base score is another model's.
    """
    for part in site.parts():
        kept = site.store.load(f"part-{part.number}")
        if LABELS_KEPT not in kept.arrays:
            raise SiteError("malformed request: the run keeps no labels at the site")
        meta: Any = kept.meta
        outputs = part.shard.model.outputs
        base = np.array(header.parsed("base", _floats), np.float64)
        base = real_numbers(base, "base", (outputs,))
        labels = np.array(kept.arrays[LABELS_KEPT])
        data = part.shard.data
        objective = SiteObjective(
            model=part.shard.model,
            features=data.trained,
            labels=labels[: len(data.multiplicity)],
            loss=loss_of(Order({"loss": meta["loss"]}, "the part"), outputs),
            base=base,
            l2=data.l2,
        )
        yield PersonalPart(
            part,
            objective,
            labels,
            meta[CURVATURE],
            part.shard.model.parameters,
            meta["summary"],
        )


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]


def loss_of(order: Order, outputs: int) -> Loss:
    """Return the loss that an order names.

    Raises:
        SiteError: there is none of the name, or it is of other scores.
    """
    name = order.text("loss", ("squared", "logistic", "softmax"))
    if name == "softmax":
        if outputs < 2:
            raise SiteError("malformed request: loss 'softmax' needs two scores a row")
        return SoftmaxLoss(outputs)
    if outputs != 1:
        raise SiteError(f"malformed request: loss {name!r} is of one score a row")
    return SquaredLoss() if name == "squared" else LogisticLoss()
