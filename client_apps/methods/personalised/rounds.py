"""A round of a site's own model: gradients at the parameters received, and metrics.

The server sends parameters of one or several *tracks*: the site's own model, and the
common model that it is compared with. The site replies with an update for each track
and with the metrics at the parameters received.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.methods.site_method import SiteMethod
from client_apps.operator.participant import Participant, body_of
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import DivergedError, MessageError, ProposalError
from tp_flower.methods.personalised import messages
from tp_flower.methods.personalised.sites import SiteObjective
from tp_flower.objectives import Objective, Target, make_objective
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.fields import LARGEST
from tp_flower.protocol.packet import row_numbers
from tp_flower.randomness import Stream, generator

LOCAL_LABELS: Final = "labels"  # in a participant's entry: the labels of its rows, (n,)


@dataclass
class PersonalState:
    """The state of a site's own model: how many rounds of parameters there were."""

    rounds: int = 0


Part = Participant[PersonalState]


class PersonalisedMethod(SiteMethod[PersonalState]):
    """A model of the site's own, which begins with ``train.personalise``."""

    state = PersonalState


@dataclass(frozen=True)
class PersonalisedModel:
    """A participant with its own model, and the objective of its trained rows.

    Attributes:
        mean_loss: loss of all its rows, the trained ones first.
        noise_multiplier: multiplier of the noise on a summary; 0 for no noise.
        most_rounds: of parameters, by the run's proposal.
    """

    part: Part
    objective: SiteObjective
    mean_loss: Objective
    curvature: float
    summary: str
    noise_multiplier: float
    most_rounds: int

    def metrics(self, parameters: FloatArray) -> messages.SiteMetrics:
        """Return the metrics of the trained and of the held-out rows."""
        objective = self.objective
        trained = self.objective.mean_loss
        train = objective.metrics(parameters, objective.features, trained)
        train["penalty"] = objective.penalty(parameters)
        held_out = slice(len(trained), None)
        test = objective.metrics(
            parameters,
            self.part.data.features[held_out],
            self.mean_loss.select(held_out),
        )
        if any(abs(value) > LARGEST for value in (*train.values(), *test.values())):
            raise DivergedError("metrics are out of range: training diverged")
        return messages.SiteMetrics(train, test)


def personalised_models(
    site: Site, base: Sequence[float]
) -> Iterator[PersonalisedModel]:
    """Yield the site's models, with the base score (d_c,) from the request."""
    for part in site.parts(PersonalState):
        entry = site.store.load(f"part-{part.number}")
        if LOCAL_LABELS not in entry.arrays:
            raise MessageError("the run keeps no labels at the site")
        meta: Any = entry.meta
        model = part.model
        data = part.data
        if len(base) != model.outputs:
            raise MessageError(f"'base' must be {model.outputs} numbers")
        labels = np.array(entry.arrays[LOCAL_LABELS])
        target = Target.of(labels, tuple(meta["classes"]))
        mean_loss = make_objective(meta["loss"], target)
        objective = SiteObjective(
            model=model,
            features=data.trained,
            mean_loss=mean_loss.select(slice(len(data.multiplicity))),
            base=np.array(base, np.float64),
            l2=data.l2,
        )
        summary = meta["summary"]
        multiplier = meta["noise_multiplier"]
        terms = meta["curvature"], summary, multiplier, meta["most_rounds"]
        yield PersonalisedModel(part, objective, mean_loss, *terms)


def personal(site: Site, request: messages.PersonalRequest) -> messages.PersonalReply:
    """Take parameters; reply with updates (except at the end) and metrics."""
    parts: dict[int, messages.TrackUpdates] = {}
    for personalised in personalised_models(site, request.base):
        part = personalised.part
        _count_round(part, personalised.most_rounds)
        body = body_of(request.parts, part)
        check_sizes(body, parameters=len(part.model.penalised))
        parts[part.number] = _track_updates(personalised, body, request)
        # the site's own model is the last one that it received
        part.model.parameters = body.personal.astype(np.float64)
        site.save(part)
    return messages.PersonalReply(parts)


def _count_round(part: Part, most: int) -> None:
    """Count a round of parameters."""
    part.state.rounds += 1
    if part.state.rounds > most:
        raise ProposalError(
            f"the run was proposed with {most} rounds of parameters, and the request "
            "is one more"
        )


def _track_updates(
    personalised: PersonalisedModel,
    body: messages.TrackParameters,
    request: messages.PersonalRequest,
) -> messages.TrackUpdates:
    """Return a track's metrics and, if training goes on, its updates."""
    start = body.personal.astype(np.float64)
    common = None
    if body.common is not None:
        common = body.common.astype(np.float64)
    update = common_update = None
    if request.pace is not None:
        update = row_numbers(_update(personalised, start, request.pace))
        if common is not None:
            common_update = row_numbers(_update(personalised, common, request.pace))
    return messages.TrackUpdates(
        metrics=personalised.metrics(start),
        common_metrics=None if common is None else personalised.metrics(common),
        update=update,
        common_update=common_update,
    )


def _update(
    personalised: PersonalisedModel, start: FloatArray, pace: messages.Pace
) -> FloatArray:
    """Return the mean gradient over the site's local steps, (p,).

    With one step over all rows, that is the gradient of its objective.
    """
    objective = personalised.objective
    part = personalised.part
    rows = len(objective.mean_loss)
    theta = start
    if not pace.batch or pace.batch >= rows:
        for _ in range(pace.steps - 1):
            theta = theta - pace.rate * objective.gradient(theta)
        return part.finite(
            ((start - theta) / pace.rate + objective.gradient(theta)) / pace.steps
        )
    rng = generator(pace.seed, Stream.LOCAL_FIT, pace.epoch, part.number)
    order = rng.permutation(rows)
    steps_taken = 0
    for _ in range(pace.steps):
        if steps_taken + pace.batch > rows:
            order = rng.permutation(rows)
            steps_taken = 0
        batch = order[steps_taken : steps_taken + pace.batch]
        theta = theta - pace.rate * objective.gradient(theta, batch)
        steps_taken += pace.batch
    return part.finite((start - theta) / (pace.rate * pace.steps))
