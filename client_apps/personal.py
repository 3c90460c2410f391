"""What a site does in the training of a model of its own: gradients, and metrics.

The server sends parameters, of one *track* or of several (the site's own model, and the
one for all sites that it is compared with). The site replies with an update of each,
and with the metrics that the parameters have there.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from client_apps.orders import MOST_SEED, FloatArray, Order, header_of
from client_apps.part import State
from client_apps.personal_parts import PersonalPart, personal_parts
from client_apps.site import Site
from tp_flower.errors import DivergedError, SiteError
from tp_flower.personal.codec import MOST_CODES, encode_update
from tp_flower.personal.taut_string import piecewise_update
from tp_flower.protocol import AnyArray, ArrayKey, Packet
from tp_flower.randomness import Stream, generator

TRACKS: Final = ("personal", "global")
MOST_STEPS: Final = 100_000
MOST_GAMMA: Final = 1e30


@dataclass(frozen=True)
class _Pace:
    """How a site goes on from the parameters that it is sent.

    Attributes:
        steps: that it takes on its own.
        rate: of each; with one step it says nothing.
        batch: rows of a step; 0 for all.
        seed: of the batches.
        epoch: likewise.
    """

    steps: int
    rate: float
    batch: int
    seed: int
    epoch: int

    @classmethod
    def of(cls, header: Order) -> Self:
        """Return what a request says of it."""
        return cls(
            steps=header.count("steps", low=1, most=MOST_STEPS),
            rate=header.number("rate", above_zero=True),
            batch=header.count("batch"),
            seed=header.count("seed", most=MOST_SEED),
            epoch=header.count("epoch"),
        )


def personal(site: Site, request: Packet) -> Packet:
    """Take parameters; reply with updates (unless it is the end) and metrics."""
    header = header_of(request)
    pace = _Pace.of(header) if header.has("steps") else None
    tracks = header.texts("tracks")
    if not tracks or not set(tracks) <= set(TRACKS):
        raise SiteError(f"malformed request: 'tracks' must be of {', '.join(TRACKS)}")
    facts: list[dict[str, Any]] = []
    arrays: dict[ArrayKey, AnyArray] = {}
    changed: dict[int, State] = {}
    for part in personal_parts(site, header):
        told: dict[str, Any] = {"id": part.number}
        for track in tracks:
            start = part.parameters(request, track)
            if pace is not None:
                update = _finite(part, _update(part, start, pace))
                arrays[part.number, track] = _sent(update, track, header)
            told[track] = part.metrics(start)
        facts.append(told)
        # the site's own model is what it was sent last
        part.part.shard.model.parameters = part.parameters(request, TRACKS[0])
        changed[part.number] = part.part.state
    site.save_state(changed)
    return Packet({"parts": facts}, arrays)


def _update(part: PersonalPart, start: FloatArray, pace: _Pace) -> FloatArray:
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


def _sent(update: FloatArray, track: str, header: Order) -> AnyArray:
    """Return an update as it travels: float32, or Eq. 7's of the site's own model.

    Raises:
        DivergedError: it is beyond float32.
    """
    if track != TRACKS[0] or not header.has("gamma"):
        return update.astype(np.float32)
    gamma = header.number("gamma", MOST_GAMMA)
    clusters = header.count("clusters", most=MOST_CODES)
    try:
        return encode_update(piecewise_update(update, gamma), clusters)
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
