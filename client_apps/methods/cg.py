"""A site's epoch of conjugate gradients: the descent directions of its models.

A table in one shard answers ``descent`` with the scores of its direction v. The shards
of a table answer with their share of the gradient first, and with scores after
``direction``. See :mod:`tp_flower.methods.cg.conjugate_gradients`.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from client_apps.methods.exact import start_exactly, step_of
from client_apps.methods.site_method import Beginning, JoinMethod
from client_apps.operator.masks import Masked
from client_apps.operator.participant import Participant
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError
from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.cg import messages
from tp_flower.methods.cg.messages import TRAIN_DESCENT
from tp_flower.privacy.key_agreement import fixed_point_masks
from tp_flower.privacy.plan import PRODUCTS
from tp_flower.privacy.sealed_sums import fixed_words
from tp_flower.protocol.codec import check_sizes
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import LineStep, Outline, Update

PRODUCTS_PURPOSE: Final = "products of directions"


@dataclass
class CgState:
    """The state of conjugate gradients.

    Attributes:
        gradient: g, of the joint objective at the last parameters, (p,).
        descent: v, whose scores have left last, (p,); None before any.
        direction: p, of the last step, (p,).
    """

    gradient: FloatArray
    direction: FloatArray
    descent: FloatArray | None = None


Part = Participant[CgState]


class CgMethod(JoinMethod[CgState]):
    """Conjugate gradients at a site: of linear models alone."""

    state = CgState
    carriers = TRAIN_DESCENT, Action.PREPARE

    def trains(self, kind: str) -> bool:
        """Return whether models of a kind are linear."""
        return kind == LINEAR

    def clear_releases(self, outline: Outline, update: Update) -> tuple[str, ...]:
        """Return the releases that no mechanism covers; products are masked."""
        return (*super().clear_releases(outline, update), PRODUCTS)

    def begin(self, part: Participant[Any], columns: int) -> Beginning[CgState]:
        """Begin with the solver that scales the gradients."""
        reply, solver = start_exactly(part, columns, is_exact=False)
        zeros = np.zeros(len(part.model.parameters))
        return Beginning(reply, CgState(zeros, zeros), solver)

    def take_last_step(self, part: Part, request: FinishRequest) -> bool:
        """Take the step along the last direction."""
        if request.step is None:
            return super().take_last_step(part, request)
        advance(part, request.step)
        return True


def advance(part: Part, line: LineStep) -> None:
    """Take a step theta += a p, p = v + c p."""
    state = part.state
    if state.descent is None:
        raise MessageError("no direction has left")
    state.direction = state.descent + line.conjugacy * state.direction
    part.model.parameters = part.model.parameters + line.length * state.direction


def descend(site: Site, request: messages.DescentRequest) -> messages.DescentReply:
    """Take the last step; reply with the next direction, or the share of a gradient."""
    updates = {}
    for part in site.parts(CgState):
        step = step_of(site, part, request.parts)
        if request.line is not None:
            advance(part, request.line)
        if request.is_best:
            part.mark_best()
        moments = part.moments(step, 1.0)
        if part.data.update is Update.GRAM:
            update = messages.DescentUpdate(share=part.share(moments, _unit(part)))
        else:
            position = request.parts[part.number].place
            scores, products = _direct(site, part, moments, request.terms, position)
            update = messages.DescentUpdate(scores=scores, products=products)
        updates[part.number] = update
        site.save(part)
    return messages.DescentReply(updates)


def direct(site: Site, request: messages.DirectionRequest) -> messages.DirectionReply:
    """Reply with the directions that follow from the sums of shards' gradients."""
    updates = {}
    for part in site.parts(CgState):
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


def _unit(part: Part) -> float:
    """Return the size of a sum of features times derivatives."""
    return part.data.joined_rows * part.data.label_scale


def _direct(
    site: Site,
    part: Part,
    moments: FloatArray,
    terms: messages.DescentTerms,
    position: int | None,
) -> tuple[AnyArray, AnyArray | None]:
    """Return the scores of v = -B^-1 g, from the table's moments -N (g - beta theta).

    The shard that has a place in the sum of the products returns them, too.
    """
    data = part.data
    model = part.linear
    solver = part.data.solver
    if solver is None:
        raise MessageError("the table has no solver")
    penalty_gradient = data.l2 * np.where(model.penalised, model.parameters, 0.0)
    gradient = penalty_gradient - moments.ravel() / data.joined_rows
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
    if position is not None:
        penalised = data.l2 * np.where(model.penalised, descent, 0.0)
        products = np.array(
            [
                gradient @ descent,
                part.state.gradient @ descent,
                penalised @ descent,
                penalised @ part.state.direction,
            ]
        )
        part.releaser.check_clear(PRODUCTS)
        check_products(site, part.number, terms.tables, position)
        # the masks cancel over the tables
        secret = site.hasher().purpose(PRODUCTS_PURPOSE).secret
        name = f"scores {terms.scores_number}"
        masks = fixed_point_masks(
            secret, position, terms.tables, len(products), name.encode()
        )
        fixed = fixed_words(products / terms.product_unit, terms.tables, data.table)
        words = fixed.view(np.uint64) + masks
        part.releaser.masked.append(Masked(part.number, f"products of {name}", words))
    part.state.gradient = gradient
    part.state.descent = descent
    return scores, words


def check_products(site: Site, number: int, tables: int, position: int) -> None:
    """Refuse products whose masks would cancel over other tables than those of the run.

    The first shard of a table sends them.
    """
    proposal = site.terms.proposal
    table = proposal.parts[number].table
    agree("tables", len(proposal.tables), tables)
    is_first = number == min(proposal.shards_of(table))
    agree("place", proposal.tables.index(table) if is_first else None, position)
