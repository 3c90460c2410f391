"""Boosting at a site: grow trees, average the shards', and reply with their values."""

from collections.abc import Mapping

import numpy as np

from client_apps.handlers.encoding import shared
from client_apps.operator.participant import (
    SCORE_SUMS,
    SCORES_NUMBER,
    Participant,
    score_sums,
)
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import check_growth
from client_apps.privacy.proposal_checks import agree_in_growth
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, PolicyError
from tp_flower.features.sparse import dense
from tp_flower.learning.models.bagging import average, shown_trees
from tp_flower.learning.models.local_model import on_host
from tp_flower.learning.models.pooling import grow_pooled, shown_sums
from tp_flower.learning.models.trees import TreeModel, grow, sum_of_trees
from tp_flower.methods import CLEAR, Growth
from tp_flower.privacy.plan import MODEL
from tp_flower.privacy.shard_seals import TREES, ShardSeal
from tp_flower.protocol.boost_messages import (
    BagReply,
    BagRequest,
    BagUpdate,
    BoostReply,
    BoostRequest,
    BoostStep,
    BoostUpdate,
)
from tp_flower.protocol.codec import check_sizes, required

Derivatives = tuple[FloatArray, FloatArray]
"""G and H of a shard's trained rows, (n_trained, d_c) each."""

GROWN, BAGGED = "grown", "bagged"
VALUES, REACHED = "values_{}", "reached"
"""State vectors: the last trees' text as bytes, that of the average of the shards',
either's values (n, d_c), and the sum of what all trees have added to the trained rows'
scores."""


def boost(site: Site, request: BoostRequest) -> BoostReply:
    """Add the last trees, and grow more.

    Reply with the values of the new trees, seal them for the table's other shards, or
    both.
    """
    updates = {}
    for part in site.parts():
        add_trees(part, request.lengths, is_bagged=request.is_bagged)
        if request.is_best:
            # before the first trees, of the model that they go on from
            zero = np.zeros((2, part.model.outputs))
            part.vectors[SCORE_SUMS] = part.vectors.get(SCORE_SUMS, zero)
            part.mark_best()
        body = request.parts.get(part.number)
        if body is not None:
            agree_in_growth(site, part.data.table, request)
            part.begin_scores(request.scores_number)
            seal, growth, table = None, request.growth, part.data.table
            check_growth(site.source(part.number), growth, part.model.outputs)
            derivatives = _derivatives(part, body)
            if table in request.bagged:
                seal, _ = shared(site, part.number)
                growth = growth.of_shards(len(seal.shards))
            is_pooled = table in request.pooled
            values = _no_trees(part) if is_pooled else _grow(part, *derivatives, growth)
            updates[part.number] = BoostUpdate(
                scores=part.release_values(values) if request.sends_scores else None,
                sealed=_sealed(site, part, request, seal, derivatives)
                if seal
                else None,
            )
            part.vectors[VALUES.format(GROWN)] = values
        site.save(part)
    return BoostReply(updates)


def bag(site: Site, request: BagRequest) -> BagReply:
    """Average the trees of each table, or grow pooled ones.

    Reply with their values on all rows.
    """
    updates = {}
    for part in site.parts():
        body = request.parts.get(part.number)
        if body is not None:
            agree_in_growth(site, part.data.table, request)
            part.vectors[VALUES.format(BAGGED)] = values = _together(
                site, part, request
            )
            part.begin_scores(request.scores_number)
            updates[part.number] = BagUpdate(part.release_values(values))
            site.save(part)
    return BagReply(updates)


def add_trees(
    part: Participant, lengths: Mapping[str, float], *, is_bagged: bool
) -> None:
    """Add the trees that grew last, times their table's length, if there is one."""
    if part.data.table not in lengths:
        return
    name = BAGGED if is_bagged else GROWN
    if name not in part.vectors or not isinstance(part.model, TreeModel):
        raise MessageError("no trees have been grown, or none averaged")
    step, counts = lengths[part.data.table], part.data.multiplicity
    part.model.add(step, part.vectors[name])
    added = step * part.vectors[VALUES.format(name)][: len(counts)]
    part.vectors[REACHED] = part.vectors.get(REACHED, 0.0) + added
    part.vectors[SCORE_SUMS] = score_sums(part.vectors[REACHED], counts)


def _derivatives(part: Participant, body: BoostStep) -> Derivatives:
    """Return G and H of the trained rows, (n_trained, d_c) each."""
    data, model = part.data, part.model
    check_sizes(body, trained=len(data.multiplicity), outputs=model.outputs)
    part.releaser.check_clear(MODEL)
    gradient = body.gradient.astype(np.float64)
    if body.hessian is None:
        counts = data.multiplicity[:, None]
        return gradient, np.broadcast_to(counts, gradient.shape).astype(np.float64)
    hessian = body.hessian.astype(np.float64)
    if (hessian <= 0.0).any():
        raise MessageError("'hessian' must be above 0: a loss is convex")
    return gradient, hessian


def _trees(part: Participant) -> TreeModel:
    """Return a participant's model."""
    if not isinstance(part.model, TreeModel):
        raise MessageError(f"boosting trains trees, not models {part.data.spec.kind!r}")
    return part.model


def _grow(
    part: Participant, gradient: FloatArray, hessian: FloatArray, growth: Growth
) -> FloatArray:
    """Keep new trees, and return their values (n, d_c)."""
    data, model = part.data, _trees(part)
    rows, model.binned = float(data.multiplicity.sum()), data.binned
    part.vectors[GROWN], values = grow(
        model, data.features, gradient, hessian, rows, growth
    )
    return values


def _no_trees(part: Participant) -> FloatArray:
    """Keep no trees of this shard alone, and return their values (n, d_c), 0."""
    part.vectors[GROWN] = np.zeros(0, np.uint8)
    return np.zeros((len(part.data.features), part.model.outputs))


def _sealed(
    site: Site,
    part: Participant,
    request: BoostRequest,
    seal: ShardSeal,
    derivatives: Derivatives,
) -> AnyArray | None:
    """Seal new trees, or sums, for the table's other shards.

    None if a policy lets no trees leave, and the site sends scores instead.
    """
    number, level = part.number, site.source(part.number).policy.releases.models
    if level != CLEAR:
        refused = (
            f"the table's policy (releases.models = {level}) refuses: the run asks for"
        )
        if part.data.table in request.pooled:
            raise PolicyError(
                f"{refused} sums of the loss's derivatives by column, for the table's "
                "other shards. Its shards tell the label, so that trees which each "
                "grows alone would know rows by their shard: strategy = 'cg' trains "
                "without showing them anything, and lou = 'local' accepts the shard as "
                "a feature"
            )
        if request.sends_scores:
            return None
        raise PolicyError(
            f"{refused} trees, for the table's other shards; each shard may grow its "
            "own (lou = 'local', or 'auto')"
        )
    ledger_entries.note(site, number, ledger_entries.TREES)
    data = part.data
    if data.table in request.pooled:
        document = shown_sums(
            dense(on_host(data.trained)),
            _trees(part).forest.categorical,
            *derivatives,
            data.multiplicity,
            request.growth.least_rows,
        )
    else:
        document = shown_trees(part.vectors[GROWN], float(data.multiplicity.sum()))
    return seal.seal(
        document, TREES.format(request.scores_number), number, site.round.digest
    )


def _together(site: Site, part: Participant, request: BagRequest) -> FloatArray:
    """Store the shards' averaged or pooled trees; return their values (n, d_c)."""
    data, outputs, body = part.data, part.model.outputs, request.parts[part.number]
    if GROWN not in part.vectors:
        raise MessageError("no trees have been grown for an average")
    part.vectors[BAGGED] = part.vectors[GROWN]
    if body.is_own:
        return part.vectors[VALUES.format(GROWN)]
    check_growth(site.source(part.number), request.growth, outputs)
    seal, _ = shared(site, part.number)
    name = TREES.format(int(part.vectors[SCORES_NUMBER][0]))
    documents = [
        seal.open(required(body.trees.get(str(shard)), f"trees/{shard}"), name, shard)
        for shard in seal.shards
    ]
    columns = data.features.shape[1]
    if data.table in request.pooled:
        codes = _trees(part).forest.categorical
        part.vectors[BAGGED] = grow_pooled(
            documents, codes, columns, outputs, request.growth
        )
    else:
        part.vectors[BAGGED] = average(documents, columns, outputs)
    text = part.vectors[BAGGED].tobytes().decode()
    return sum_of_trees([(1.0, text)], data.features, outputs)
