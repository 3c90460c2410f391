"""A site's epoch of conjugate gradients: the descent directions of its models.

A table in one shard answers ``descent`` with the scores of its direction v. The shards
of a table answer with their share of the gradient first, and with scores after
``direction``. See :mod:`tp_flower.learning.conjugate_gradients`.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from client_apps.methods.admm import step_of
from client_apps.operator.masks import Masked
from client_apps.operator.participant import DESCENT, DIRECTION, GRADIENT, Participant
from client_apps.privacy.proposal_checks import check_products
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError
from tp_flower.privacy.key_agreement import pair_masks
from tp_flower.privacy.plan import PRODUCTS
from tp_flower.privacy.sealed_sums import fixed_words
from tp_flower.protocol import descent_messages as messages
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.training_messages import Update

PRODUCTS_PURPOSE: Final = "products of directions"


def descend(site: Site, request: messages.DescentRequest) -> messages.DescentReply:
    """Take the last step; reply with the next direction, or the share of a gradient."""
    updates = {}
    for part in site.parts():
        step = step_of(site, part, request.parts)
        if request.line is not None:
            part.advance(request.line.length, request.line.conjugacy)
        if request.is_best:
            part.mark_best()
        moments = part.moments(step, 1.0)
        if part.data.update is Update.GRAM:
            update = messages.DescentUpdate(share=part.share(moments, _unit(part)))
        else:
            place = request.parts[part.number].place
            scores, products = _direct(site, part, moments, request.terms, place)
            update = messages.DescentUpdate(scores=scores, products=products)
        updates[part.number] = update
        site.save(part)
    return messages.DescentReply(updates)


def direct(site: Site, request: messages.DirectionRequest) -> messages.DirectionReply:
    """Reply with the directions that follow from the sums of shards' gradients."""
    updates = {}
    for part in site.parts():
        if part.number not in request.parts:
            continue
        body = request.parts[part.number]
        check_sizes(body, summed=len(part.model.penalised) + 1)
        moments = part.total(body.sum, _unit(part)).reshape(-1, part.model.outputs)
        scores, products = _direct(site, part, moments, request.terms, body.place)
        updates[part.number] = messages.DirectionUpdate(
            scores=scores, products=products
        )
        site.save(part)
    return messages.DirectionReply(updates)


def _unit(part: Participant) -> float:
    """Return the size of a sum of features times derivatives."""
    return part.data.joined_rows * part.data.label_scale


def _direct(
    site: Site,
    part: Participant,
    moments: FloatArray,
    terms: messages.DescentTerms,
    place: int | None,
) -> tuple[AnyArray, AnyArray | None]:
    """Return the scores of v = -B^-1 g, from the table's moments -N (g - beta theta).

    The shard that has a place in the sum of the products returns them, too.
    """
    data, model, solver = part.data, part.linear, part.data.solver
    if solver is None:
        raise MessageError("the table has no solver")
    drawn = data.l2 * np.where(model.penalised, model.parameters, 0.0)
    # of the loss, and of the penalty that draws the parameters to 0
    gradient = drawn - moments.ravel() / data.joined_rows
    descent = -solver.solve(
        gradient.reshape(-1, model.outputs) * (data.joined_rows / terms.curvature),
        terms.curvature,
        data.l2 * terms.tables,
    ).ravel()
    part.begin_scores(terms.scores_number)
    # in a unit that shrinks with them, small scores are as exact as large ones
    scaled = replace(part, model=model.at(descent / terms.score_unit))
    scores = scaled.release_scores(data.features, slice(None), "scores")
    words = None
    if place is not None:
        zero = np.zeros_like(descent)
        penalised = data.l2 * np.where(model.penalised, descent, 0.0)
        products = np.array(
            [
                gradient @ descent,
                part.vectors.get(GRADIENT, zero) @ descent,
                penalised @ descent,
                penalised @ part.vectors.get(DIRECTION, zero),
            ]
        )
        part.releaser.check_clear(PRODUCTS)
        check_products(site, part.number, terms.tables, place)
        # the masks cancel over the tables
        secret = site.hasher().purpose(PRODUCTS_PURPOSE).secret
        name = f"scores {terms.scores_number}"
        masks = pair_masks(secret, place, terms.tables, len(products), name.encode())
        fixed = fixed_words(products / terms.product_unit, terms.tables, data.table)
        words = fixed.view(np.uint64) + masks
        part.releaser.masked.append(Masked(part.number, f"products of {name}", words))
    part.vectors[GRADIENT], part.vectors[DESCENT] = gradient, descent
    return scores, words
