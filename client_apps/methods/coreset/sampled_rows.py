"""The rows of a coreset, which the server solves on: rows, or their centres.

Rows leave in the clear, encoded, and so only where the run was planned to send them:
the plan of the part has them, and the table's policy, which is asked once more. With
centres the server learns up to as many of them as the clustering has, and the nearest
one of each sampled row (DistDim).
"""

from typing import Any

import numpy as np

from client_apps.methods.site_method import Beginning, JoinMethod, prepared_part
from client_apps.operator.participant import Participant
from client_apps.operator.state import Stateless
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import Site
from tp_flower.errors import SiteError
from tp_flower.features.sparse import dense
from tp_flower.learning.models.local_model import CENTRES as CENTRES_MODEL
from tp_flower.learning.models.local_model import LINEAR, host_features
from tp_flower.methods.coreset import messages
from tp_flower.methods.coreset.messages import TRAIN_ROWS
from tp_flower.methods.coreset.settings import CoresetSettings
from tp_flower.methods.coreset.solvers import nearest, weighted_kmeans
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import row_numbers
from tp_flower.protocol.training_messages import (
    ConsensusReply,
    ConsensusRequest,
    ConsensusUpdate,
    Outline,
    Update,
)
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import ROWS

Part = Participant[Stateless]


class CoresetMethod(JoinMethod[Stateless]):
    """A method whose server solves on the rows of a coreset: a site only sends them."""

    state = Stateless
    carriers = TRAIN_ROWS, Action.CONSENSUS, Action.PREPARE

    def trains(self, kind: str) -> bool:
        """Return whether the server solves for models of a kind."""
        return kind in (LINEAR, CENTRES_MODEL)

    def sends_rows(self, outline: Outline) -> bool:
        """Return whether the sampled rows leave, and not their centres."""
        return outline.sends == SAMPLED_ROWS

    def clear_releases(self, outline: Outline, update: Update) -> tuple[str, ...]:  # noqa: ARG002
        """Return the part of the sampled rows that is sent."""
        return (required(outline.sends, "sends"),)

    def begin(self, part: Participant[Any], columns: int) -> Beginning[Stateless]:  # noqa: ARG002
        """Begin without a curvature, which the server finds itself."""
        return Beginning(prepared_part(part, mean_curvature=0.0), Stateless())


def take_solution(site: Site, request: ConsensusRequest) -> ConsensusReply:
    """Take the parameters that the server has found; reply with their scores."""
    updates = {}
    for part in site.parts(Stateless):
        body = request.parts.get(part.number)
        if body is None:
            continue
        parameters = len(part.model.penalised)
        check_sizes(body, parameters=parameters, summed=parameters + 1)
        part.model.parameters = required(body.parameters, "parameters")
        part.begin_scores(request.scores_number)
        scores = part.release_rows(is_tested=request.evaluate)
        updates[part.number] = ConsensusUpdate(scores)
        site.save(part)
    return ConsensusReply(updates)


def rows(site: Site, request: messages.RowsRequest) -> messages.RowsReply:
    """Reply with every participant's sampled rows, or with their local clusters."""
    agree("seed", site.terms.settings.seed, request.seed)
    proposed = site.terms.settings.of(CoresetSettings)
    agree("clusters", proposed.clusters, request.clusters)
    return messages.RowsReply(
        {p.number: _sample_part(site, p, request) for p in site.parts(Stateless)}
    )


def _sample_part(
    site: Site, part: Part, request: messages.RowsRequest
) -> messages.SampledRows:
    """Return the sampled rows, or their centres (k, d) and each row's nearest (n,).

    Without sampled rows there is no centre.
    """
    data = part.data
    points = np.asarray(dense(host_features(data.trained)), np.float64)
    if data.plan.allows(SAMPLED_ROWS):
        # the policy may have changed since the run was planned
        site.source(part.number).policy.check_release(ROWS, is_private=False)
        return messages.SampledRows(rows=row_numbers(points))
    if not data.plan.allows(CENTRES):
        raise SiteError(f"table {data.table}: this run did not plan to release rows")
    if not len(points):
        return messages.SampledRows(centres=points, nearest=np.zeros(0, np.uint32))
    weights = np.asarray(data.multiplicity, np.float64)
    rng = generator(request.seed, Stream.LOCAL_FIT, 0, part.number)
    centres = weighted_kmeans(points, weights, request.clusters, rng)
    labels, _ = nearest(points, centres)
    return messages.SampledRows(centres=centres, nearest=labels.astype(np.uint32))
