"""Boosting at a site: grow trees, average the shards', and reply with their values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.handlers.encoding import seal_and_encoders
from client_apps.methods.site_method import Beginning, JoinMethod, prepared_part
from client_apps.operator.participant import Participant, score_sums
from client_apps.privacy import ledger_entries
from client_apps.privacy.proposal_checks import agree, contradiction
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import MessageError, PolicyError
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.sparse import dense
from tp_flower.learning.models.local_model import LocalModel, host_features
from tp_flower.methods.boost.bagging import average, shown_trees
from tp_flower.methods.boost.linear import RidgeFit, linear_epochs_of
from tp_flower.methods.boost.messages import (
    BAGGED,
    LOCAL,
    POOLED,
    SCORES_PER_EPOCH,
    TRAIN_BOOST,
    TREES,
    BagReply,
    BagRequest,
    BagUpdate,
    BoostReply,
    BoostRequest,
    BoostStep,
    BoostUpdate,
    Growth,
)
from tp_flower.methods.boost.pooling import grow_pooled, shown_sums
from tp_flower.methods.boost.settings import BoostSettings
from tp_flower.methods.boost.trees import (
    TreeModel,
    fit_before_trees,
    grow,
    sum_of_trees,
)
from tp_flower.privacy.plan import MODEL
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.fields import CLEAR
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.sources.shards import ShardSource

SHOWN_TREES: Final = "trees"
# of the scores with this number, so that no earlier ones pass for them
SEALED_TREES: Final = "trees {}"
_SCOPE: Final = (
    "not covered: trees, whose splits lie between values of single rows, and whose "
    "leaves have sums of the loss's derivatives, or such sums by intervals of each "
    "column; sealed to the table's other shards"
)
"""What a shard shows the table's others, by the name and the scope in its ledger."""

Derivatives = tuple[FloatArray, FloatArray]
"""G and H of a shard's trained rows, (n_trained, d_c) each."""


@dataclass
class Grown:
    """Trees that are not in the model yet.

    Attributes:
        text: of the trees, as bytes.
        values: on all rows, (n, d_c).
    """

    text: AnyArray
    values: FloatArray


@dataclass
class BoostState:
    """The state of boosting.

    Attributes:
        grown: the trees that the shard grew last.
        bagged: the average of those of the table's shards, or their pooled trees.
        reached: the sum of what all trees have added to the trained rows' scores,
            (n_trained, d_c).
        regions: once the regions of the rows have left, their tree as bytes; the model
            has it where other tables read them.
        is_paired: 1 once the rows are pairs of rows and regions.
    """

    grown: Grown | None = None
    bagged: Grown | None = None
    reached: FloatArray | None = None
    regions: AnyArray | None = None
    is_paired: int = 0

    def pair(self, rows: IntArray, trained: int) -> None:
        """Take pairs (m,) for the rows, of which so many are trained on."""
        for grown in (self.grown, self.bagged):
            if grown is not None:
                grown.values = grown.values[rows]
        if self.reached is not None:
            self.reached = self.reached[rows[:trained]]
        self.is_paired = 1


Part = Participant[BoostState]


class BoostMethod(JoinMethod[BoostState]):
    """Boosting at a site: of trees alone, which have no curvature."""

    state = BoostState
    carriers = TRAIN_BOOST, Action.PREPARE

    def trains(self, kind: str) -> bool:
        """Return whether models of a kind are trees."""
        return kind == TREES

    def adapt(self, model: LocalModel, encoder: SiteEncoder) -> None:
        """Let trees know which features are codes of categories."""
        if isinstance(model, TreeModel):
            model.start(encoder.encoder.coded)

    def begin(self, part: Participant[Any], columns: int) -> Beginning[BoostState]:  # noqa: ARG002
        """Begin without trees."""
        return Beginning(prepared_part(part, mean_curvature=0.0), BoostState())

    def take_last_step(self, part: Part, request: FinishRequest) -> bool:
        """Add the last trees; the sums of their scores are up to date."""
        if request.step is not None:
            return super().take_last_step(part, request)
        add_trees(part, request.lengths, is_bagged=request.is_bagged)
        return False

    def coefficients(self, part: Part) -> AnyArray | None:
        """Return the gain of each feature, (d, 1)."""
        counts = part.data.multiplicity
        columns = part.data.features.shape[1]
        joined_rows = 1.0
        if len(counts):
            joined_rows = float(counts.mean())
        return _trees(part).gains(columns, joined_rows)


def boost(site: Site, request: BoostRequest) -> BoostReply:
    """Add the last trees, and grow more.

    Reply with the values of the new trees, seal them for the table's other shards, or
    both.
    """
    updates = {}
    for part in site.parts(BoostState):
        add_trees(part, request.lengths, is_bagged=request.is_bagged)
        if request.is_best:
            if part.progress.score_sums is None:
                # before the first trees, of the model that they go on from
                part.progress.score_sums = np.zeros((2, part.model.outputs))
            part.mark_best()
        body = request.parts.get(part.number)
        if body is not None:
            updates[part.number] = _answer(site, part, request, body)
        site.save(part)
    return BoostReply(updates)


def _answer(
    site: Site, part: Part, request: BoostRequest, body: BoostStep
) -> BoostUpdate:
    """Grow what is asked for; return its values, or its trees under seal, or both."""
    table = part.data.table
    agree_in_growth(site, table, request)
    if request.is_linear:
        _agree_in_linear(site, request.scores_number)
    part.begin_scores(request.scores_number)
    growth = request.growth
    _check_growth(site.source(part.number), growth, part.model.outputs)
    derivatives = derivatives_of(part, body)
    seal = None
    if table in request.bagged:
        seal, _ = seal_and_encoders(site, part.number)
        growth = growth.of_shards(len(seal.shards))
    is_idle = request.is_linear and _shares_trees(site, table)
    if table in request.pooled or is_idle:
        grown = _no_trees(part)
    elif request.is_linear:
        grown = _fit_linear(part, *derivatives, request)
    else:
        grown = _grow(part, *derivatives, growth)
    scores = sealed = None
    if request.sends_scores and not len(grown.text):
        # of no trees, which tells nothing
        scores = part.release_zeros()
    elif request.sends_scores:
        scores = part.release_values(grown.values)
    if seal is not None:
        sealed = _seal_growth(site, part, request, seal, derivatives, grown)
    part.state.grown = grown
    return BoostUpdate(scores=scores, sealed=sealed)


def bag(site: Site, request: BagRequest) -> BagReply:
    """Average the trees of each table, or grow pooled ones.

    Reply with their values on all rows.
    """
    updates = {}
    for part in site.parts(BoostState):
        body = request.parts.get(part.number)
        if body is not None:
            agree_in_growth(site, part.data.table, request)
            bagged = part.state.bagged = _combine_shards(site, part, request)
            part.begin_scores(request.scores_number)
            updates[part.number] = BagUpdate(part.release_values(bagged.values))
            site.save(part)
    return BagReply(updates)


def agree_in_growth(site: Site, table: str, request: BoostRequest | BagRequest) -> None:
    """Refuse a growth of trees that differs from the proposal.

    So leaves cannot become smaller, and trees that are to stay at their shards do not
    leave.
    """
    settings = site.terms.settings
    growth = request.growth
    values = settings.of(BoostSettings)
    agree("growth.least_rows", values.min_rows_per_leaf, growth.least_rows)
    agree("growth.rate", values.tree_rate, growth.rate)
    agree("growth.trees", values.trees_per_round or growth.trees, growth.trees)
    agree("growth.leaves", values.leaves or growth.leaves, growth.leaves)
    if settings.lou == LOCAL and table in getattr(request, "bagged", ()):
        raise contradiction("bagged", f"lou = {LOCAL}", table)
    if settings.lou in (LOCAL, BAGGED) and table in request.pooled:
        raise contradiction("pooled", f"lou = {settings.lou}", table)
    if settings.lou == POOLED and table in getattr(request, "bagged", ()):
        agree("pooled", True, table in request.pooled)


def _agree_in_linear(site: Site, scores_number: int) -> None:
    """Refuse a linear model in an epoch that the proposal has for trees."""
    allowed = linear_epochs_of(site.terms.settings)
    epoch = scores_number // SCORES_PER_EPOCH
    if epoch > allowed:
        raise contradiction("linear epochs", allowed, epoch)


def add_trees(part: Part, lengths: Mapping[str, float], *, is_bagged: bool) -> None:
    """Add the trees that grew last, times their table's length, if there is one."""
    if part.data.table not in lengths:
        return
    state = part.state
    step = lengths[part.data.table]
    counts = part.data.multiplicity
    trees = state.bagged if is_bagged else state.grown
    if trees is None:
        raise MessageError("no trees have been grown, or none averaged")
    _trees(part).add(step, trees.text)
    added = step * trees.values[: len(counts)]
    state.reached = added if state.reached is None else state.reached + added
    part.progress.score_sums = score_sums(state.reached, counts)


def derivatives_of(part: Part, body: BoostStep) -> Derivatives:
    """Return G and H of the trained rows, (n_trained, d_c) each."""
    data = part.data
    model = part.model
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


def _trees(part: Part) -> TreeModel:
    """Return a participant's model."""
    if not isinstance(part.model, TreeModel):
        raise MessageError(f"boosting trains trees, not models {part.data.spec.kind!r}")
    return part.model


def _grow(
    part: Part, gradient: FloatArray, hessian: FloatArray, growth: Growth
) -> Grown:
    """Return new trees of the shard alone."""
    data = part.data
    model = _trees(part)
    rows = float(data.multiplicity.sum())
    model.binned = data.binned
    return Grown(*grow(model, data.features, gradient, hessian, rows, growth))


def _shares_trees(site: Site, table: str) -> bool:
    """Whether the shards of a table, if there are several, may keep to nothing own."""
    parts = site.terms.proposal.parts.values()
    is_sharded = sum(part.table == table for part in parts) > 1
    return is_sharded and site.terms.settings.lou in (BAGGED, POOLED)


def _fit_linear(
    part: Part, gradient: FloatArray, hessian: FloatArray, request: BoostRequest
) -> Grown:
    """Return a linear model of the shard's rows, which goes before trees."""
    data = part.data
    fit = RidgeFit(request.growth.least_rows, request.is_shrunk)
    fitted = fit_before_trees(
        _trees(part), data.features, gradient, hessian, data.multiplicity, fit
    )
    return Grown(*fitted)


def _no_trees(part: Part) -> Grown:
    """Return no trees, whose values are 0."""
    values = np.zeros((len(part.data.features), part.model.outputs))
    return Grown(np.zeros(0, np.uint8), values)


def _seal_growth(
    site: Site,
    part: Part,
    request: BoostRequest,
    seal: ShardSeal,
    derivatives: Derivatives,
    grown: Grown,
) -> AnyArray | None:
    """Seal new trees, or sums, for the table's other shards.

    None if a policy lets no trees leave, and the site sends scores instead.
    """
    number = part.number
    level = site.source(part.number).policy.releases.models
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
    ledger_entries.note_scope(site, number, SHOWN_TREES, _SCOPE)
    data = part.data
    if data.table in request.pooled:
        document = shown_sums(
            dense(host_features(data.trained)),
            _trees(part).forest.categorical,
            *derivatives,
            data.multiplicity,
            request.growth.least_rows,
        )
    else:
        document = shown_trees(grown.text, float(data.multiplicity.sum()))
    return seal.seal(
        document, SEALED_TREES.format(request.scores_number), number, site.round.digest
    )


def _combine_shards(site: Site, part: Part, request: BagRequest) -> Grown:
    """Return the average of the shards' trees, or the trees that they pool."""
    data = part.data
    outputs = part.model.outputs
    body = request.parts[part.number]
    if part.state.grown is None:
        raise MessageError("no trees have been grown for an average")
    if body.is_own:
        return part.state.grown
    _check_growth(site.source(part.number), request.growth, outputs)
    seal, _ = seal_and_encoders(site, part.number)
    name = SEALED_TREES.format(part.progress.scores_number)
    documents = [
        seal.open(required(body.trees.get(str(shard)), f"trees/{shard}"), name, shard)
        for shard in seal.shards
    ]
    columns = data.features.shape[1]
    if data.table in request.pooled:
        codes = _trees(part).forest.categorical
        text = grow_pooled(documents, codes, columns, outputs, request.growth)
    else:
        text = average(documents, columns, outputs)
    trees = [(1.0, text.tobytes().decode())]
    return Grown(text, sum_of_trees(trees, data.features, outputs))


def _check_growth(source: ShardSource, growth: Growth, outputs: int) -> None:
    """Refuse a boosting round of more leaves than a model may have parameters."""
    leaves = growth.trees * growth.leaves * outputs
    source.policy.check_size(
        leaves, "leaves a round", "fewer leaves or trees-per-round"
    )
