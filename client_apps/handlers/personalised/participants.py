"""A site's parts in the training of models of their own: objective, rows, metrics."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.operator.participant import Part
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError
from tp_flower.learning.losses import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss
from tp_flower.personalised.site_objective import SiteObjective
from tp_flower.privacy.plan import CURVATURE
from tp_flower.protocol import Body, SiteMetrics, check_sizes

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

    def metrics(self, parameters: FloatArray) -> SiteMetrics:
        """Return the metrics of the trained and of the held-out rows."""
        own, data = self.objective, self.part.shard.data
        count = len(data.multiplicity)
        train = own.metrics(parameters, own.features, own.labels)
        held_out = data.features[count:]
        test = own.metrics(parameters, held_out, self.labels[count:])
        penalty = {"penalty": own.penalty(parameters)}
        return SiteMetrics({**train, **penalty}, dict(test))

    def check_parameters(self, body: Body) -> None:
        """Refuse parameters (p,) that are not those of the part's model.

        Raises:
            MessageError: they are not.
        """
        check_sizes(body, parameters=len(self.part.shard.model.penalised))


def personal_parts(site: Site, base: Sequence[float]) -> Iterator[PersonalPart]:
    """Yield the site's parts, with the base score (d_c,) that a request names.

    Raises:
        SiteError: the site has none in this run, or the base score is another model's.
    """
    for part in site.parts():
        kept = site.store.load(f"part-{part.number}")
        if LABELS_KEPT not in kept.arrays:
            raise SiteError("malformed request: the run keeps no labels at the site")
        meta: Any = kept.meta
        outputs = part.shard.model.outputs
        if len(base) != outputs or not np.isfinite(base).all():
            raise SiteError(
                f"malformed request: 'base' must be {outputs} finite numbers"
            )
        labels = np.array(kept.arrays[LABELS_KEPT])
        data = part.shard.data
        objective = SiteObjective(
            model=part.shard.model,
            features=data.trained,
            labels=labels[: len(data.multiplicity)],
            loss=loss_of(meta["loss"], outputs),
            base=np.array(base, np.float64),
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


def loss_of(name: str, outputs: int) -> Loss:
    """Return the loss of a name.

    Raises:
        SiteError: it is of other scores.
    """
    if name == "softmax":
        if outputs < 2:
            raise SiteError("malformed request: loss 'softmax' needs two scores a row")
        return SoftmaxLoss(outputs)
    if outputs != 1:
        raise SiteError(f"malformed request: loss {name!r} is of one score a row")
    return SquaredLoss() if name == "squared" else LogisticLoss()
