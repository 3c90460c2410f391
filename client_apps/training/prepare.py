"""Preparing training at a site: encode, plan the releases, make the models.

The planned releases of a run are first reserved in the site's ledger; before that,
nothing about a row is computed for the server. The server announces the run's schedule:
it can limit the planned releases, but cannot announce less than the site counts itself.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from client_apps.data.features import forget, move_to_device
from client_apps.data.row_effects import hash_keys, key_names
from client_apps.data.score_counts import ScoreLimit
from client_apps.handlers import training_rows
from client_apps.handlers.column_names import keep_names
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.registry import join_method_of
from client_apps.methods.site_method import JoinMethod
from client_apps.operator import participant
from client_apps.operator.curvature import typical_curvature
from client_apps.operator.masks import (
    MaskedRows,
    are_masked,
    read_masks,
    score_masks,
)
from client_apps.operator.state import Stateless
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import (
    check_model,
    check_plan,
    check_shown,
    counts_evenly,
)
from client_apps.privacy.key_rules import takes_effects, takes_factors
from client_apps.privacy.keys import run_key
from client_apps.privacy.proposal_checks import (
    agree_in_all,
    check_begins,
    check_bins,
    check_prepared,
    check_protection,
    check_trained,
)
from client_apps.privacy.score_limits import EncodedPart, admit_scores
from client_apps.rounds.site import Site, names_of_shards
from tp_flower.errors import MessageError, SiteError
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.sparse import EncodedRows
from tp_flower.keyed_hash import HashArray
from tp_flower.learning.models.local_model import NUMPY_KINDS, LocalModel, ModelSpec
from tp_flower.methods.method import METHODS, Method
from tp_flower.methods.moments.messages import TRAIN_INFORMATION
from tp_flower.privacy import plan as privacy_plan
from tp_flower.privacy.gradients import check_per_row, check_scores
from tp_flower.privacy.score_masks import FixedPoint, ScoreMasks
from tp_flower.privacy.sealed_sums import ShardUnion
from tp_flower.protocol.codec import parse, required
from tp_flower.protocol.fields import DP_SGD, NOISY_STATISTICS
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import (
    LEAST_SCALE,
    Masking,
    Outline,
    PreparedPart,
    PreparePart,
    PrepareReply,
    PrepareRequest,
    PrivacyTerms,
    Update,
)
from tp_flower.sources.policy import COVARIANCE, MODELS, ROWS, SCORES
from tp_flower.sources.shards import ShardSource


def prepare(site: Site, request: PrepareRequest) -> PrepareReply:
    """Encode the features and make the models; reply with the start of training."""
    check_begins(site, Action.PREPARE)
    privacy = request.privacy
    declared = _declared_method(request.outline)
    method = join_method_of(declared.family)
    _check_accounts(declared, privacy)
    encoders = {}
    parts = {}
    for number, body in site.each(request.parts):
        checked = _check_part(site, number, body, request, method)
        encoders[number] = checked.encoder
        parts[number] = _make_participant(site, number, body, request, method, checked)
    agree_in_all(site.terms.outline, request.outline)
    check_protection(site, privacy, request.masking)
    fitted = {number for number, each in encoders.items() if each.encoder.fitted}
    planned = ledger_entries.planned_releases(
        site, parts, method.carriers, privacy, fitted
    )
    ledger_entries.set_aside(site, planned)
    for number, part in site.each(parts):
        ledger_entries.note_unmatched(site, number, part.data.masks)
    starts: dict[int, PreparedPart] = {}
    site.round.arrays.clear()
    for number, part in site.each(parts):
        columns = _columns(encoders[number], part.data.spec)
        beginning = method.begin(part, columns)
        reply = _start(part, beginning.reply, columns, request)
        starts[number] = msgspec.structs.replace(
            reply,
            takes_effects=takes_effects(site, number),
            takes_factors=takes_factors(site, number),
        )
        started = part.with_state(beginning.solver, beginning.state)
        # errors are of sums by the rows' keys
        keeps_rows = site.terms.allows(TRAIN_INFORMATION)
        site.start(started, declared.family, {}, keeps_rows=keeps_rows)
    site.pay()
    account = None if site.repeats_fold else site.ledger.lines(site.store.run)
    return PrepareReply(ledger=account, parts=starts)


def _declared_method(outline: Outline) -> Method:
    """Return the method that an outline names; MessageError if it is none."""
    if outline.strategy not in METHODS:
        raise MessageError(f"'strategy' is {outline.strategy!r}, which is no method")
    return METHODS[outline.strategy]


def _start(
    part: participant.Participant[Any],
    reply: PreparedPart,
    columns: int,
    request: PrepareRequest,
) -> PreparedPart:
    """Return a method's reply as it may leave, with the first scores if need be."""
    if reply.mean_curvature and not part.data.is_even:
        # else it would be the squared norm of one row
        typical = typical_curvature(part, columns)
        reply = msgspec.structs.replace(reply, **typical)
    if not _sends_first_scores(request, part.data.spec):
        return reply
    part.begin_scores(0)
    if part.data.spec.kind in NUMPY_KINDS:
        scores = part.release_zeros()
    else:
        scores = part.release_scores(part.data.features, slice(None), "scores")
    return msgspec.structs.replace(reply, scores=scores)


def _check_noise(model: LocalModel, width: int, privacy: PrivacyTerms) -> None:
    """Refuse a model that a run's noise does not cover."""
    if privacy.features == DP_SGD:
        check_per_row(model, width)
    elif privacy.covers_predictions:
        check_scores(model, width)


@dataclass(frozen=True)
class _CheckedPart:
    """The inputs of a part's training, which policy and proposal allow.

    Attributes:
        extracted: the part's rows, before they were encoded.
        features: (n, d), the rows in the order of ``rows.positions``.
        limit: on the score vectors that may leave without noise; None for none.
    """

    spec: ModelSpec
    encoder: SiteEncoder
    extracted: ExtractedShard
    rows: training_rows.TrainingRows
    batches: training_rows.Batches
    features: EncodedRows
    limit: ScoreLimit | None


def _check_part(
    site: Site,
    number: int,
    body: PreparePart,
    request: PrepareRequest,
    method: JoinMethod[Any],
) -> _CheckedPart:
    """Check what a part is asked to train, and encode its rows."""
    source = site.source(number)
    privacy = request.privacy
    _check_releases(site, number, body, request, method)
    encoder = fitted_encoder(site, number, body.encoder)
    spec = parse(body.model, "model", partial(msgspec.convert, type=ModelSpec))
    _check_model(request.outline, privacy, body.update, spec, method)
    check_model(source, spec, encoder.encoder.width)
    extracted = site.extracted(number)
    rows, batches = _read_rows(source, extracted, body, privacy)
    check_shown(source, spec, encoder.encoder.width, rows.trained)
    features = site.tables.encode(
        number, encoder, rows.positions, is_private=privacy.is_private
    )
    check_prepared(site, number, body, spec)
    check_trained(site, number, rows.masks(extracted.rows))
    limit = admit_scores(
        site,
        number,
        EncodedPart(encoder.encoder, features, rows.positions),
        body.cover,
        spec.outputs,
        has_noise=privacy.covers_predictions,
    )
    return _CheckedPart(spec, encoder, extracted, rows, batches, features, limit)


def _check_releases(
    site: Site,
    number: int,
    body: PreparePart,
    request: PrepareRequest,
    method: JoinMethod[Any],
) -> None:
    """Refuse releases that the policy forbids under the run's protection."""
    check_plan(
        site.source(number),
        (ROWS if method.sends_rows(request.outline) else MODELS, SCORES),
        request.privacy,
        is_masked=are_masked(request.masking, site.terms.join_sides(number)),
        # nothing is summed of a table in one shard
        is_sealed=body.update is Update.LOCAL
        or (body.union is not None and body.union.group is not None),
    )
    settings = site.terms.settings
    if settings.asks_bins and settings.most_bins and site.fragment(number).features:
        # they would leave after training
        check_bins(site, number, settings.most_bins)
    if site.terms.allows(TRAIN_INFORMATION):
        # as would these
        site.source(number).policy.check_release(COVARIANCE, is_private=False)


def _read_rows(
    source: ShardSource,
    extracted: ExtractedShard,
    body: PreparePart,
    privacy: PrivacyTerms,
) -> tuple[training_rows.TrainingRows, training_rows.Batches]:
    """Return the rows to train on and their batches; refuse too few rows."""
    rows = training_rows.read_rows(body, extracted.rows, is_private=privacy.is_private)
    batches = training_rows.read_batches(body, rows.trained)
    training_rows.check_training_rows(
        source,
        extracted.table,
        rows,
        batches,
        sends_sums=body.update is Update.SUM and not privacy.covers_features,
    )
    return rows, batches


def _make_participant(
    site: Site,
    number: int,
    body: PreparePart,
    request: PrepareRequest,
    method: JoinMethod[Any],
    checked: _CheckedPart,
) -> participant.Participant[Stateless]:
    """Return the participant of a part, with its model and the plan of its releases."""
    source = site.source(number)
    privacy = request.privacy
    spec, rows, batches = checked.spec, checked.rows, checked.batches
    width = checked.features.shape[1]
    model = participant.make_model(spec, width, body.device)
    method.adapt(model, checked.encoder)
    _check_noise(model, width, privacy)
    schedule = replace(
        _schedule(body, request, batches, spec),
        columns=_columns(checked.encoder, spec),
        rows_per_unit=source.policy.rows_per_unit,
    )
    plan = privacy_plan.plan_part(
        privacy,
        schedule,
        sends=method.clear_releases(request.outline, body.update),
        is_linear=spec.kind == "linear",
    )
    names_of_keys, row_keys = _row_keys(site, number, rows)
    trained = rows.positions[: rows.trained]
    keep_names(site, number, checked.encoder, checked.extracted, trained)
    forget(site.store, number)
    data = participant.ShardData(
        features=move_to_device(
            site.store, number, checked.features, body.device, spec.kind
        ),
        multiplicity=rows.multiplicity,
        tested=rows.tested,
        joined_rows=body.joined_rows,
        l2=body.l2,
        batch_start=batches.start,
        batch_rows=batches.rows,
        table=checked.extracted.table,
        spec=spec,
        update=body.update,
        plan=plan,
        device=body.device,
        masks=_masks(site, number, request.masking, rows, body),
        units=rows.units_of(checked.extracted.units) if privacy.is_private else None,
        row_keys=row_keys,
        key_names=names_of_keys,
        union=_union(site, number, body, checked.extracted.table, trained=rows.trained),
        label_scale=body.label_scale,
        limit=checked.limit,
        is_even=counts_evenly(rows.multiplicity, source.policy.min_rows),
        most_scores=site.terms.most_scores(batches.count),
        most_sums=site.terms.most_sums(batches.count),
        kept=site.kept_of_fold(number),
    )
    return participant.Participant(
        number, data, model, Stateless(), site.releaser(number, plan)
    )


def _masks(
    site: Site,
    number: int,
    masking: Masking | None,
    rows: training_rows.TrainingRows,
    body: PreparePart,
) -> ScoreMasks | None:
    """Return the masks of a part's scores.

    The fits of a search on the same rows have the same tags, under keys of their own.
    """
    if masking is None:
        return None
    last = site.last_entry(number)
    masks = None if last is None else read_masks(last, site.group_key)
    if masks is not None:
        return replace(masks, point=FixedPoint(masking.bits, masking.tables))
    masked = MaskedRows(
        rows.positions,
        site.join_keys(number),
        site.terms.join_sides(number),
        body.unmatched,
        site.terms.answered_groups(number),
        site.run_key,
    )
    return score_masks(masking, masked, site.group_key)


def _row_keys(
    site: Site, number: int, rows: training_rows.TrainingRows
) -> tuple[tuple[str, ...], HashArray | None]:
    """Return hashes of the trained rows' keys, if the run may give these some numbers.

    And what the keys are called.
    """
    if not (takes_effects(site, number) or takes_factors(site, number)):
        return (), None
    names, keys = site.join_key_names(number), site.join_keys(number)
    trained = rows.positions[: rows.trained]
    return key_names(names, keys), hash_keys(names, keys, trained)


def _columns(encoder: SiteEncoder, spec: ModelSpec) -> int:
    """Return the encodings of a row: about its mean squared norm."""
    return encoder.encoder.columns + int(spec.intercept)


def _union(
    site: Site, number: int, body: PreparePart, table: str, *, trained: int
) -> ShardUnion | None:
    """Return the shards that a participant's arrays are summed with.

    A shard is named by its site's key, which no other site has: the server may number
    two shards alike, but cannot make them use one mask.
    """
    if body.update in (Update.LOCAL, Update.GIVEN):
        if body.union is not None:
            raise MessageError(f"'union' does not go with update {body.update.value!r}")
        return None
    union = required(body.union, "union")
    if union.shards is None:
        shards = site.shard_names(site.fragment(number).table)
    else:
        shards = names_of_shards(union.shards)
    shard = f"{run_key(site)} {number}"
    group = union.group or ""
    # a consensus is sought by the shards with rows to train on
    if shard not in shards and (trained or body.update is not Update.CONSENSUS):
        raise MessageError("'union' lacks this shard, which has rows to train on")
    key = site.group_key(group) if group else b""
    return ShardUnion(group, key, shards, shard, table)


def _check_accounts(method: Method, privacy: PrivacyTerms) -> None:
    """Refuse mechanisms whose cost per row is unknown for the method."""
    covered = {
        "features": privacy.covers_features,
        "predictions": privacy.covers_predictions,
    }
    if any(covered.values()) and not method.plans_noise:
        raise SiteError(f"the run asks for noise, and {method.family!r} has none")
    if any(covered.values()) and not method.sends_a_row_once:
        key = next(key for key, is_covered in covered.items() if is_covered)
        raise SiteError(
            f"privacy.{key} is for methods that send a row of a table once, with "
            "noise, not for those on rows in the clear"
        )


def _schedule(
    body: PreparePart,
    request: PrepareRequest,
    batches: training_rows.Batches,
    spec: ModelSpec,
) -> privacy_plan.Schedule:
    """Return the run's schedule, capped by the site's own counts."""
    outline = request.outline
    multiplicity = body.mean_multiplicity
    if 0 < multiplicity < LEAST_SCALE:
        raise MessageError(
            f"'mean-multiplicity' is {multiplicity:g}, which is too small; "
            f"allowed: 0, or from {LEAST_SCALE:g} on"
        )
    return privacy_plan.Schedule(
        epochs=outline.epochs,
        sends_gradients=_declared_method(outline).sends_gradients,
        batches=batches.count,
        # counted in the server's batch plan, which the server cannot understate
        row_batches=int(np.bincount(batches.rows).max(initial=0)),
        has_first_scores=_sends_first_scores(request, spec),
        output_scale=spec.output_scale or 1.0,
        mean_multiplicity=multiplicity,
        label_scale=body.label_scale,
    )


def _check_model(
    outline: Outline,
    privacy: PrivacyTerms,
    update: Update,
    spec: ModelSpec,
    method: JoinMethod[Any],
) -> None:
    """Refuse models that are not solvable, or have no private mechanism.

    A server may solve only if it has announced so.
    """
    by_server = Update.GIVEN.value
    if (update is Update.GIVEN) != bool(_declared_method(outline).solvers):
        raise MessageError(
            f"update {update.value!r} does not go with strategy {outline.strategy!r}: "
            f"{by_server!r} is for strategies whose server solves, which take no other"
        )
    if not method.trains(spec.kind):
        raise MessageError(
            f"strategy {outline.strategy!r} does not train models {spec.kind!r}"
        )
    is_exact = spec.kind == "linear" and update in (Update.LOCAL, Update.GRAM)
    if privacy.features == NOISY_STATISTICS and not is_exact:
        raise SiteError(
            f"privacy.features = {NOISY_STATISTICS!r} is for linear models that are "
            f"fitted exactly, not for {spec.kind!r} by {update.value!r}"
        )


def _sends_first_scores(request: PrepareRequest, spec: ModelSpec) -> bool:
    """Whether a model's scores are needed before it is trained.

    A linear model's are known to be 0; masked, they are needed for their masks.
    """
    return request.sends_scores and (
        request.masking is not None or spec.kind not in NUMPY_KINDS
    )
