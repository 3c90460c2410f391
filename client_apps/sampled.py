"""What a site does for a server that solves on a coreset: send what was sampled of it.

Of each part that is either the encoded features of its sampled rows, where its policy
lets rows leave, or what local clustering makes of them: centres, and the nearest centre
of each sampled row (Ding et al. 2016, "K-means clustering with distributed
dimensions"). Which of them is planned, and checked against the policy, in ``prepare``.
"""

import numpy as np

from client_apps.orders import MOST_SEED, Order, header_of
from client_apps.part import Part
from client_apps.site import Site
from tp_flower.coresets.kmeans import nearest, weighted_kmeans
from tp_flower.errors import SiteError
from tp_flower.learning.features import on_host
from tp_flower.learning.models import MOST_UNITS
from tp_flower.privacy.plan import CENTRES, NEAREST, SAMPLED_ROWS
from tp_flower.privacy.policy import ROWS
from tp_flower.protocol import AnyArray, ArrayKey, Packet, row_numbers
from tp_flower.randomness import Stream, generator


def rows(site: Site, request: Packet) -> Packet:
    """Reply with the sampled rows of every part, or with their local clusters."""
    header = header_of(request)
    arrays: dict[ArrayKey, AnyArray] = {}
    for part in site.parts():
        for name, array in _sampled(site, part, header).items():
            arrays[part.number, name] = array
    return Packet({}, arrays)


def _sampled(site: Site, part: Part, header: Order) -> dict[str, AnyArray]:
    plan, own = part.outgoing.plan, part.shard.data
    if plan.allows(SAMPLED_ROWS):
        # the policy may have changed since the run was planned
        site.source(part.number).policy.check_release(ROWS, is_private=False)
        features = np.asarray(on_host(own.trained), np.float64)
        return {SAMPLED_ROWS: row_numbers(features)}
    if plan.allows(CENTRES):
        return _clusters(part, header)
    raise SiteError(
        f"table {part.table}: its rows are not to leave in this run: it was not "
        "planned so"
    )


def _clusters(part: Part, header: Order) -> dict[str, AnyArray]:
    """Return the centres (k, d) of a part's sampled rows, and each row's centre (n,).

    A part without sampled rows has no centre.
    """
    own, seed = part.shard.data, header.count("seed", most=MOST_SEED)
    clusters = header.count("clusters", low=1, most=MOST_UNITS)
    points = np.asarray(on_host(own.trained), np.float64)
    masses = np.asarray(own.multiplicity, np.float64)
    if not len(points):
        return {CENTRES: points, NEAREST: np.zeros(0, np.uint32)}
    rng = generator(seed, Stream.LOCAL_FIT, 0, part.number)
    centres = weighted_kmeans(points, masses, clusters, rng)
    labels, _ = nearest(points, centres)
    return {CENTRES: centres, NEAREST: labels.astype(np.uint32)}
