"""What a site does for a server that solves on a coreset: send what was sampled of it.

Of each part that is either the encoded features of its sampled rows, where its policy
lets rows leave, or what local clustering makes of them: centres, and the nearest centre
of each sampled row (Ding et al. 2016, "K-means clustering with distributed
dimensions"). Which of them is planned, and checked against the policy, in ``prepare``.
"""

import numpy as np

from client_apps.operator.participant import Part
from client_apps.rounds.site import Site
from tp_flower.coresets.kmeans import nearest, weighted_kmeans
from tp_flower.errors import SiteError
from tp_flower.learning.models.encoded_rows import on_host
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol import RowsReply, RowsRequest, SampledRows, row_numbers
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import ROWS


def rows(site: Site, request: RowsRequest) -> RowsReply:
    """Reply with the sampled rows of every part, or with their local clusters."""
    return RowsReply({p.number: _sampled(site, p, request) for p in site.parts()})


def _sampled(site: Site, part: Part, request: RowsRequest) -> SampledRows:
    plan, data = part.outgoing.plan, part.shard.data
    if plan.allows(SAMPLED_ROWS):
        # the policy may have changed since the run was planned
        site.source(part.number).policy.check_release(ROWS, is_private=False)
        features = np.asarray(on_host(data.trained), np.float64)
        return SampledRows(rows=row_numbers(features))
    if plan.allows(CENTRES):
        return _clusters(part, request)
    raise SiteError(
        f"table {part.table}: its rows are not to leave in this run: it was not "
        "planned so"
    )


def _clusters(part: Part, request: RowsRequest) -> SampledRows:
    """Return the centres (k, d) of a part's sampled rows, and each row's centre (n,).

    A part without sampled rows has no centre.
    """
    data = part.shard.data
    points = np.asarray(on_host(data.trained), np.float64)
    masses = np.asarray(data.multiplicity, np.float64)
    if not len(points):
        return SampledRows(centres=points, nearest=np.zeros(0, np.uint32))
    rng = generator(request.seed, Stream.LOCAL_FIT, 0, part.number)
    centres = weighted_kmeans(points, masses, request.clusters, rng)
    labels, _ = nearest(points, centres)
    return SampledRows(centres=centres, nearest=labels.astype(np.uint32))
