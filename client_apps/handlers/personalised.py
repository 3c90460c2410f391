"""What a site does in the training of a model of its own: gradients, and metrics.

The server sends parameters, of one *track* or of several (the site's own model, and the
one for all sites that it is compared with). The site replies with an update of each,
and with the metrics that the parameters have there.
"""

from typing import Any

import numpy as np

from client_apps.handlers.personalised_setup import PersonalPart, personal_parts
from client_apps.operator.participant import State, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import DivergedError
from tp_flower.personalised.update_codec import encode_update
from tp_flower.personalised.z_step import piecewise_update
from tp_flower.protocol import (
    Pace,
    PersonalReply,
    PersonalRequest,
    TrackParameters,
    TrackUpdates,
    UpdateCode,
    row_numbers,
)
from tp_flower.randomness import Stream, generator


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
