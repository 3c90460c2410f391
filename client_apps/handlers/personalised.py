"""What a site does in the training of a model of its own: gradients, and metrics.

The server sends parameters, of one *track* or of several (the site's own model, and the
one for all sites that it is compared with). The site replies with an update of each,
and with the metrics that the parameters have there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.operator.participant import Part, State, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import DivergedError, SiteError
from tp_flower.learning.losses import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss
from tp_flower.personalised.sites import SiteObjective
from tp_flower.personalised.update_codec import encode_update
from tp_flower.personalised.z_step import piecewise_update
from tp_flower.privacy.plan import CURVATURE
from tp_flower.protocol import (
    Body,
    Pace,
    PersonalReply,
    PersonalRequest,
    SiteMetrics,
    TrackParameters,
    TrackUpdates,
    UpdateCode,
    check_sizes,
    row_numbers,
)
from tp_flower.randomness import Stream, generator

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


def personal(site: Site, request: PersonalRequest) -> PersonalReply:
    """Take parameters; reply with updates (unless it is the end) and metrics."""
    parts: dict[int, TrackUpdates] = {}
    changed: dict[int, State] = {}
    for part in personal_parts(site, request.base):
        body = body_of(request.parts, part.part)
        part.check_parameters(body)
        parts[part.number] = _track_updates(part, body, request)
        # the site's own model is what it was sent last
        part.part.shard.model.parameters = body.personal.astype(np.float64)
        changed[part.number] = part.part.state
    site.save_state(changed)
    return PersonalReply(parts)


def _track_updates(
    part: PersonalPart, body: TrackParameters, request: PersonalRequest
) -> TrackUpdates:
    """Return the metrics of the parameters that came, and updates of them."""
    start = body.personal.astype(np.float64)
    common = None if body.common is None else body.common.astype(np.float64)
    fields: dict[str, Any] = {}
    if request.pace is not None:
        update = _finite(part, _update(part, start, request.pace))
        if request.code is None:
            fields["update"] = row_numbers(update)
        else:
            fields["code"] = _coded(update, request.code)
        if common is not None:
            common_update = _finite(part, _update(part, common, request.pace))
            fields["common_update"] = row_numbers(common_update)
    return TrackUpdates(
        metrics=part.metrics(start),
        common_metrics=None if common is None else part.metrics(common),
        **fields,
    )


def _update(part: PersonalPart, start: FloatArray, pace: Pace) -> FloatArray:
    """Return the mean of the gradients that the site's steps take, (p,).

    With one step over all rows that is the gradient of its objective.
    """
    own, rows = part.objective, len(part.objective.labels)
    if not pace.batch or pace.batch >= rows:
        theta = start
        for _ in range(pace.steps - 1):
            theta = theta - pace.rate * own.gradient(theta)
        return ((start - theta) / pace.rate + own.gradient(theta)) / pace.steps
    rng = generator(pace.seed, Stream.LOCAL_FIT, pace.epoch, part.number)
    theta, order, taken = start, rng.permutation(rows), 0
    for _ in range(pace.steps):
        if taken + pace.batch > rows:
            order, taken = rng.permutation(rows), 0
        batch = order[taken : taken + pace.batch]
        theta = theta - pace.rate * own.batch_gradient(theta, batch)
        taken += pace.batch
    mean: FloatArray = (start - theta) / (pace.rate * pace.steps)
    return mean


def _coded(update: FloatArray, code: UpdateCode) -> AnyArray:
    """Return an update of the site's own model as Eq. 7 shortens it.

    Raises:
        DivergedError: it is beyond float32.
    """
    try:
        return encode_update(piecewise_update(update, code.gamma), code.clusters)
    except ValueError as error:
        raise DivergedError(f"{error}: training diverged") from None


def _finite(part: PersonalPart, update: FloatArray) -> FloatArray:
    """Return an update.

    Raises:
        DivergedError: it is not finite.
    """
    if not np.isfinite(update).all():
        raise DivergedError(
            f"table {part.part.table}: the update is not finite: training diverged. "
            "Lower learning-rate (0 chooses one)"
        )
    return update
