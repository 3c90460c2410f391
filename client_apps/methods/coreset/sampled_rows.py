"""The rows of a coreset, which the server solves on: rows, or their centres.

Rows leave in the clear, encoded, and so only where the run was planned to send them:
the plan of the part has them, and the table's policy, which is asked once more. With
centres the server learns up to as many of them as the clustering has, and the nearest
one of each sampled row (DistDim).
"""

import numpy as np

from client_apps.operator.participant import Participant
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import Site
from tp_flower.coresets.solvers import nearest, weighted_kmeans
from tp_flower.errors import SiteError
from tp_flower.features.sparse import dense
from tp_flower.learning.models.local_model import on_host
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol import coreset_messages as messages
from tp_flower.protocol.packet import row_numbers
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import ROWS


def rows(site: Site, request: messages.RowsRequest) -> messages.RowsReply:
    """Reply with every participant's sampled rows, or with their local clusters."""
    agree("seed", site.terms.settings.seed, request.seed)
    agree("clusters", site.terms.settings.clusters, request.clusters)
    return messages.RowsReply(
        {p.number: _sampled(site, p, request) for p in site.parts()}
    )


def _sampled(
    site: Site, part: Participant, request: messages.RowsRequest
) -> messages.SampledRows:
    """Return the sampled rows, or their centres (k, d) and each row's nearest (n,).

    Without sampled rows there is no centre.
    """
    data = part.data
    points = np.asarray(dense(on_host(data.trained)), np.float64)
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
