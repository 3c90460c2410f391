"""A site's round of boosting: grow trees, and reply with what they add."""

from collections.abc import Mapping

import numpy as np

from client_apps.operator.participant import GROWN, Participant
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError
from tp_flower.learning.models.trees import TreeModel, grow
from tp_flower.methods import Growth
from tp_flower.privacy.plan import MODEL
from tp_flower.protocol.boost_messages import BoostReply, BoostRequest, BoostStep, BoostUpdate
from tp_flower.protocol.codec import check_sizes


def boost(site: Site, request: BoostRequest) -> BoostReply:
    """Add the last trees; grow more, and reply with their values of all rows."""
    updates = {}
    for part in site.parts():
        add_trees(part, request.lengths)
        if request.is_best:
            part.mark_best()
        body = request.parts.get(part.number)
        if body is not None:
            part.begin_scores(request.scores_number)
            updates[part.number] = BoostUpdate(_grown(part, body, request.growth))
        site.save(part)
    return BoostReply(updates)


def add_trees(part: Participant, lengths: Mapping[str, float]) -> None:
    """Add the trees that grew last, times their table's length, if there is one."""
    if part.data.table not in lengths:
        return
    if GROWN not in part.vectors or not isinstance(part.model, TreeModel):
        raise MessageError("no trees have been grown")
    part.model.add(lengths[part.data.table], part.vectors[GROWN])


def _grown(part: Participant, body: BoostStep, growth: Growth) -> AnyArray:
    """Keep new trees, and return their values (n, d_c) as they leave."""
    data, model = part.data, part.model
    check_sizes(body, trained=len(data.multiplicity), outputs=model.outputs)
    if not isinstance(model, TreeModel):
        raise MessageError(f"boosting trains trees, not models {data.spec.kind!r}")
    part.releaser.check_clear(MODEL)
    gradient = body.gradient.astype(np.float64)
    if body.hessian is None:
        counts = data.multiplicity[:, None]
        hessian = np.broadcast_to(counts, gradient.shape).astype(np.float64)
    else:
        hessian = body.hessian.astype(np.float64)
        if (hessian <= 0.0).any():
            raise MessageError("'hessian' must be above 0: a loss is convex")
    rows, model.binned = float(data.multiplicity.sum()), data.binned
    part.vectors[GROWN], values = grow(model, data.features, gradient, hessian, rows, growth)
    return part.release_values(values)
