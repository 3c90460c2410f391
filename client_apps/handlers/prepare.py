"""Preparing training at a site: encode, plan the releases, make the models.

The planned releases of a run are first reserved in the site's ledger; before that,
nothing about a row is computed for the server. The server announces the run's schedule:
it can limit the planned releases, but cannot announce less than the site counts itself.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from client_apps.data.database import cannot_write
from client_apps.data.features import forget, place
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.handlers import training_rows
from client_apps.handlers.boosting import add_trees
from client_apps.handlers.encoding import fitted_encoder
from client_apps.operator import participant
from client_apps.operator.masks import MaskedRows, are_masked, score_masks
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import check_model, check_plan, counts_evenly
from client_apps.privacy.keys import run_key
from client_apps.privacy.proposal_checks import (
    agree_in_all,
    check_begins,
    check_prepared,
    check_protection,
    check_trained,
)
from client_apps.privacy.score_limits import EncodedPart, admit_scores
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, SettingsError, SiteError
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.sparse import EncodedRows
from tp_flower.learning import solvers
from tp_flower.learning.models.local_model import CENTRES as CENTRES_MODEL
from tp_flower.learning.models.local_model import (
    NUMPY_KINDS,
    LinearModel,
    LocalModel,
    ModelSpec,
    on_host,
)
from tp_flower.learning.models.trees import TreeModel
from tp_flower.methods import DP_SGD, LINEAR, METHODS, NOISY_STATISTICS, TREES, Method
from tp_flower.model_names import ModelVersion, software
from tp_flower.privacy import plan as privacy_plan
from tp_flower.privacy.gradients import check_per_row, check_scores
from tp_flower.privacy.sealed_sums import ShardUnion, split_gram
from tp_flower.privacy.statistics_update import usable_gram
from tp_flower.protocol.codec import parse, required
from tp_flower.protocol.inference_messages import (
    FinishedPart,
    FinishReply,
    FinishRequest,
)
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import (
    LEAST_SCALE,
    Outline,
    PreparedPart,
    PreparePart,
    PrepareReply,
    PrepareRequest,
    PrivacyTerms,
    Update,
)
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import MODELS, ROWS, SCORES


def prepare(site: Site, request: PrepareRequest) -> PrepareReply:
    """Encode the features and make the models; reply with the start of training."""
    privacy, method = request.privacy, METHODS[request.outline.strategy]
    check_begins(site, Action.PREPARE)
    _check_accounts(method, privacy)
    prepared = {
        number: _prepare_part(site, number, body, request)
        for number, body in site.each(request.parts)
    }
    agree_in_all(site.terms.outline, request.outline)
    check_protection(site, privacy, request.masking)
    fitted = {n for n, (_, encoder) in prepared.items() if encoder.encoder.fitted}
    parts = {n: part for n, (part, _) in prepared.items()}
    ledger_entries.set_aside(
        site,
        ledger_entries.planned_releases(site, parts, method.family, privacy, fitted),
    )
    for number, (part, _) in site.each(prepared):
        ledger_entries.note_unmatched(site, number, part.data.masks)
    starts: dict[int, PreparedPart] = {}
    site.round.arrays.clear()
    for number, (part, encoder) in site.each(prepared):
        columns, is_exact = encoder.encoder.columns, not method.only_model
        start, solver = _start(part, columns, is_exact=is_exact)
        if start.mean_curvature and not part.data.is_even:
            # else it would be the squared norm of one row
            typical = _typical_curvature(part, columns + int(part.data.spec.intercept))
            start = msgspec.structs.replace(start, **typical)
        if _sends_first_scores(request, part.data.spec):
            part.begin_scores(0)
            if part.data.spec.kind in NUMPY_KINDS:
                scores = part.release_zeros()
            else:
                scores = part.release_scores(part.data.features, slice(None), "scores")
            start = msgspec.structs.replace(start, scores=scores)
        starts[number] = start
        site.start(replace(part, data=replace(part.data, solver=solver)), {})
    site.pay()
    return PrepareReply(ledger=site.ledger.lines(site.store.run), parts=starts)


def _model(
    spec: ModelSpec,
    width: int,
    device: str,
    encoder: SiteEncoder,
    privacy: PrivacyTerms,
) -> LocalModel:
    """Return the untrained model of a part, which fits the run's noise."""
    model = participant.make_model(spec, width, device)
    if isinstance(model, TreeModel):
        model.start(encoder.encoder.coded)
    if privacy.features == DP_SGD:
        check_per_row(model, width)
    elif privacy.covers_predictions:
        check_scores(model, width)
    return model


def _prepare_part(
    site: Site, number: int, body: PreparePart, request: PrepareRequest
) -> tuple[participant.Participant, SiteEncoder]:
    source, extracted = site.source(number), site.extracted(number)
    sides = site.terms.join_sides(number)
    outline, privacy, update = request.outline, request.privacy, body.update
    sends_rows = update is Update.GIVEN and outline.sends == privacy_plan.SAMPLED_ROWS
    check_plan(
        source,
        (ROWS if sends_rows else MODELS, SCORES),
        privacy,
        is_masked=are_masked(request.masking, sides),
        # nothing is summed of a table in one shard
        is_sealed=update is Update.LOCAL
        or (body.union is not None and body.union.group is not None),
    )
    encoder = fitted_encoder(site, number, body.encoder)
    spec = parse(body.model, "model", partial(msgspec.convert, type=ModelSpec))
    _check_model(outline, privacy, update, spec)
    check_model(source, spec, encoder.encoder.width)
    is_private = privacy.covers_features or privacy.covers_predictions
    rows = training_rows.read_rows(body, extracted.rows, is_private=is_private)
    batches = training_rows.read_batches(body, rows.trained)
    training_rows.check_training_rows(
        source,
        extracted.table,
        rows,
        batches,
        sends_sums=update is Update.SUM and not privacy.covers_features,
    )
    features = site.tables.encode(
        number, encoder, rows.positions, is_private=is_private
    )
    encoded = EncodedPart(encoder.encoder, features, rows.positions)
    check_prepared(site, number, body, spec)
    check_trained(site, number, rows.masks(extracted.rows))
    has_noise = privacy.covers_predictions
    limit = admit_scores(
        site, number, encoded, body.cover, spec.outputs, has_noise=has_noise
    )
    model = _model(spec, features.shape[1], body.device, encoder, privacy)
    plan = privacy_plan.plan_part(
        privacy,
        replace(
            _schedule(body, request, batches, spec),
            columns=encoder.encoder.columns + int(spec.intercept),
            rows_per_unit=source.policy.rows_per_unit,
        ),
        sends=_clear_releases(outline, update),
        is_linear=spec.kind == "linear",
    )
    masked = MaskedRows(rows.positions, site.join_keys(number), sides, body.unmatched)
    forget(site.store, number)
    data = participant.ShardData(
        features=place(site.store, number, features, body.device, spec.kind),
        multiplicity=rows.multiplicity,
        tested=rows.tested,
        joined_rows=body.joined_rows,
        l2=body.l2,
        batch_start=batches.start,
        batch_rows=batches.rows,
        table=extracted.table,
        spec=spec,
        update=update,
        plan=plan,
        device=body.device,
        masks=score_masks(request.masking, masked, site.group_key),
        units=rows.units_of(extracted.units) if is_private else None,
        union=_union(site, number, body, extracted.table, trained=rows.trained),
        label_scale=body.label_scale,
        limit=limit,
        is_even=counts_evenly(rows.multiplicity, source.policy.min_rows),
        most_scores=site.terms.most_scores(batches.count),
        most_sums=site.terms.most_sums(batches.count),
    )
    vectors, releaser = (
        participant.initial_vectors(model, update),
        site.releaser(number, plan),
    )
    return participant.Participant(number, data, model, vectors, releaser), encoder


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
    shards = sorted(f"{key} {shard}" for shard, key in union.shards.items())
    shard, group = f"{run_key(site)} {number}", union.group or ""
    # a consensus is sought by the shards with rows to train on
    if shard not in shards and (trained or body.update is not Update.CONSENSUS):
        raise MessageError("'union' lacks this shard, which has rows to train on")
    key = site.group_key(group) if group else b""
    return ShardUnion(group, key, tuple(shards), shard, table)


def _check_accounts(method: Method, privacy: PrivacyTerms) -> None:
    """Refuse mechanisms whose cost per row is unknown for the method."""
    covered = {
        "features": privacy.covers_features,
        "predictions": privacy.covers_predictions,
    }
    if any(covered.values()) and method.only_model:
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
    """Return the run's schedule, capped by what the site counts itself."""
    outline, unit = request.outline, body.mean_multiplicity
    if 0 < unit < LEAST_SCALE:
        raise MessageError(
            f"'mean-multiplicity' is {unit:g}, which is too small; allowed: 0, or from "
            f"{LEAST_SCALE:g} on"
        )
    return privacy_plan.Schedule(
        epochs=outline.epochs,
        sends_gradients=METHODS[outline.strategy].sends_gradients,
        batches=batches.count,
        # counted in the server's batch plan, which the server cannot understate
        row_batches=int(np.bincount(batches.rows).max(initial=0)),
        has_first_scores=_sends_first_scores(request, spec),
        output_scale=spec.output_scale or 1.0,
        mean_multiplicity=unit,
        label_scale=body.label_scale,
    )


def _clear_releases(outline: Outline, update: Update) -> tuple[str, ...]:
    """Return the releases of rows or the model that no mechanism covers."""
    if update is Update.GIVEN:
        return (required(outline.sends, "sends"),)
    further = {
        Update.LOCAL: (),
        Update.GRAM: (privacy_plan.GRAM, privacy_plan.MOMENTS),
        Update.CONSENSUS: (privacy_plan.PARAMETERS,),
        Update.SUM: (privacy_plan.GRADIENTS,),
    }[update]
    if METHODS[outline.strategy].only_model == LINEAR:
        further = (*further, privacy_plan.PRODUCTS)
    return (privacy_plan.CURVATURE, *further)


def _check_model(
    outline: Outline, privacy: PrivacyTerms, update: Update, spec: ModelSpec
) -> None:
    """Refuse models that are not solvable, or have no private mechanism.

    A server may solve only if it has announced so.
    """
    is_given, by_server = update is Update.GIVEN, Update.GIVEN.value
    if is_given != bool(METHODS[outline.strategy].solvers):
        raise MessageError(
            f"update {update.value!r} does not go with strategy {outline.strategy!r}: "
            f"{by_server!r} is for strategies on a coreset, which take no other"
        )
    only = METHODS[outline.strategy].only_model
    if (only and spec.kind != only) or (spec.kind == TREES and only != TREES):
        raise MessageError(
            f"strategy {outline.strategy!r} does not train models {spec.kind!r}"
        )
    if spec.kind == CENTRES_MODEL and not is_given:
        raise MessageError(
            f"a model of kind {spec.kind!r} takes update {by_server!r}, not "
            f"{update.value!r}"
        )
    if is_given and spec.kind not in NUMPY_KINDS:
        raise MessageError(
            f"update {update.value!r} is for models of kinds "
            f"{', '.join(sorted(NUMPY_KINDS))}, not {spec.kind!r}"
        )
    is_exact = spec.kind == "linear" and update in (Update.LOCAL, Update.GRAM)
    if privacy.features == NOISY_STATISTICS and not is_exact:
        raise SiteError(
            f"privacy.features = {NOISY_STATISTICS!r} is for linear models that are "
            f"fitted exactly, not for {spec.kind!r} by {update.value!r}"
        )


Start = tuple[PreparedPart, solvers.Solver | None]


def _start(part: participant.Participant, columns: int, *, is_exact: bool) -> Start:
    """Return the start of training, and the solver of a linear model, exact or not.

    The mean squared norm of a row is about ``columns``; the intercept adds 1.
    """
    data, model = part.data, part.model
    if data.update is Update.GIVEN or data.spec.kind == TREES:
        # the curvature is not needed if the server solves, nor of trees
        return _prepared(part, mean_curvature=0.0), None
    typical = _typical_curvature(part, columns + int(data.spec.intercept))
    if isinstance(model, LinearModel):
        return _start_linear(model, part, typical, is_exact=is_exact)
    return _start_torch(part, typical), None


def _prepared(part: participant.Participant, **fields: Any) -> PreparedPart:
    return PreparedPart(
        features=part.data.features.shape[1],
        penalised=part.model.penalised.astype(np.uint8),
        **fields,
    )


def _start_linear(
    model: LinearModel,
    part: participant.Participant,
    typical: dict[str, float],
    *,
    is_exact: bool,
) -> Start:
    """Return the reply, and the solver of a linear model.

    SGD needs the largest curvature for its step size, and ADMM the solver; each costs
    an eigendecomposition, or iterations for a wide table.
    """
    data, plan = part.data, part.data.plan
    if plan.fit is not None or plan.gradients is not None:
        return _prepared(part, **typical), None
    total, width = data.joined_rows, max(len(model.parameters) // model.outputs, 1)
    if plan.statistics is None:
        rows, counts, is_sgd = (
            on_host(data.trained),
            data.multiplicity,
            len(data.batch_start) > 1,
        )
        if is_sgd and width > solvers.MOST_COLUMNS:
            return _prepared(part, **_wide_curvature(model, rows, counts, total)), None
        solver = (
            None if is_sgd else _solver_of_rows(part, model, rows, is_exact=is_exact)
        )
        if solver is not None:
            return _prepared(part, mean_curvature=solver.trace / width), solver
    matrix = part.releaser.gram(data.rows(intercept=model.intercept))
    mean = float(np.trace(matrix)) / (total * width)
    # the trace of a noisy matrix may be negative
    curvature = {"mean_curvature": mean} if plan.statistics is None else typical
    if len(data.batch_start) > 1:
        curvature["largest_curvature"] = float(
            np.linalg.eigvalsh(matrix / total).max(initial=0.0)
        )
        return _prepared(part, **curvature), None
    deviation = plan.statistics.gram_deviation if plan.statistics else 0.0
    if data.update is Update.GRAM:
        noise = {"gram_deviation": deviation, **curvature}
        return _prepared(
            part, share=part.share(split_gram(matrix / total)), **noise
        ), None
    matrix = usable_gram(matrix, deviation)
    # a consensus step penalises all parameters, including the intercept
    centred = model.intercept and data.update is Update.LOCAL
    solver = solvers.RidgeSolver.from_gram(matrix, total, intercept=centred)
    return _prepared(part, **curvature), solver


def _solver_of_rows(
    part: participant.Participant,
    model: LinearModel,
    rows: EncodedRows,
    *,
    is_exact: bool,
) -> solvers.Solver | None:
    """Return the solver of a table that needs no whole Gram matrix; None if it does."""
    data, way = part.data, solvers.factorisation(*rows.shape, is_exact=is_exact)
    start = rows, data.multiplicity, data.joined_rows
    is_local = data.update is Update.LOCAL
    if is_local and way == solvers.BY_ROWS:
        return solvers.RidgeSolver.from_rows(*start, intercept=model.intercept)
    if is_local and way == solvers.BY_FREQUENT:
        return solvers.RidgeSolver.from_frequent(*start, intercept=model.intercept)
    if data.update is not Update.GRAM and rows.shape[1] > solvers.MOST_COLUMNS:
        # a consensus step penalises all parameters, including the intercept
        return solvers.IterativeSolver.of_rows(
            *start, intercept=model.intercept, centred=is_local
        )
    return None


def _wide_curvature(
    model: LinearModel, rows: EncodedRows, counts: AnyArray, joined_rows: int
) -> dict[str, float]:
    """Return the mean and the largest curvature of a wide linear model, for SGD."""
    trace = float(solvers.column_squares(rows, counts).sum())
    if model.intercept:
        trace += float(counts.sum())
    largest = solvers.largest_eigenvalue(rows, counts, intercept=model.intercept)
    return {
        "mean_curvature": trace
        / (joined_rows * (rows.shape[1] + int(model.intercept))),
        "largest_curvature": largest / joined_rows,
    }


def _typical_curvature(part: participant.Participant, columns: int) -> dict[str, float]:
    """Return the curvature of standardised features, which reveals nothing about rows.

    The trace of the Gram matrix over N is the mean of G ||x||^2, summed over the rows,
    and its largest eigenvalue is at most that.
    """
    data, gradients = part.data, part.data.plan.gradients
    model = part.model
    shared = model.outputs if isinstance(model, LinearModel) else 1
    trace = columns * int(data.multiplicity.sum()) / data.joined_rows
    return {
        "largest_curvature": trace if len(data.batch_start) > 1 else 0.0,
        "mean_curvature": trace / max(len(model.penalised) // shared, 1),
        "gradient_noise": gradients.noise_multiplier * data.plan.unit_norm
        if gradients
        else 0.0,
    }


def _start_torch(
    part: participant.Participant, typical: dict[str, float]
) -> PreparedPart:
    """Return the start: the mean diagonal of the Gauss-Newton matrix.

    The diagonal is estimated with one random vector e of signs (Hutchinson):
    ||J^T (sqrt(G) e)||^2 / p has that mean as its expectation.
    """
    data, model, spec = part.data, part.model, part.data.spec
    shape = len(data.multiplicity), spec.outputs
    signs: FloatArray = generator(spec.seed, Stream.CURVATURE).choice(
        [-1.0, 1.0], size=shape
    )
    try:
        probe = model.pullback(
            data.trained, np.sqrt(data.multiplicity)[:, None] * signs
        )
    except (RuntimeError, TypeError, ValueError) as error:
        # torch's errors name shapes and types, no values
        raise SettingsError(
            f"model {spec.kind!r} does not turn rows of {data.features.shape[1]} "
            f"features into {spec.outputs} scores: {error}"
        ) from error
    mean = float(probe @ probe) / (data.joined_rows * len(probe))
    curvature = typical if data.plan.is_private else {"mean_curvature": mean}
    return _prepared(part, **curvature)


def _sends_first_scores(request: PrepareRequest, spec: ModelSpec) -> bool:
    """Whether a model's scores are needed before it is trained.

    A linear model's are known to be 0; masked, they are needed for their masks.
    """
    return request.sends_scores and (
        request.masking is not None or spec.kind not in NUMPY_KINDS
    )


def finish(site: Site, request: FinishRequest) -> FinishReply:
    """Save the models of a successful run, and delete the rest of its state.

    The reply has the run's lines of the ledger, the digests of saved models, and the
    coefficients that may be shown.
    """
    parts: dict[int, FinishedPart] = {}
    if request.keep_models:
        # the name becomes a path
        model = ModelVersion(
            required(request.model_name, "model_name"),
            required(request.model_version, "model_version"),
        )
        for part in list(site.parts()):
            if request.step is not None:
                part.advance(request.step.length, request.step.conjugacy)
            add_trees(part, request.lengths, is_bagged=request.is_bagged)
            if not request.is_best:
                part.return_to_best()
            if request.step is not None or request.has_diverged:
                part.releaser.check_clear("sums of scores")
                part.vectors[participant.SCORE_SUMS] = participant.score_sums(
                    part.model.scores(part.data.trained), part.data.multiplicity
                )
            digest, sums = (
                _keep(site, model, part),
                part.vectors.get(participant.SCORE_SUMS),
            )
            if not part.data.is_even:
                # else they would be one row's score
                sums = None
            parts[part.number] = FinishedPart(digest, _coefficients(site, part), sums)
    site.ledger.close(site.store.run)
    account = site.ledger.lines(site.store.run)
    site.round.arrays.clear()
    site.round.is_over = True
    return FinishReply(ledger=account, parts=parts)


def _keep(site: Site, model: ModelVersion, part: participant.Participant) -> str | None:
    """Save a participant's model; return its digest, None if the site saves none."""
    if site.state_folder is None:
        return None
    spec = part.data.spec
    saved = SavedModel(
        table=part.data.table,
        encoder=fitted_encoder(site, part.number),
        spec=spec,
        parameters=part.model.parameters,
        fragment=site.fragment(part.number),
        versions=software(has_torch=spec.kind not in NUMPY_KINDS),
    )
    folder = part_folder(site.state_folder, model, part.number)
    try:
        return saved.keep(folder, is_durable=not site.is_simulated)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _coefficients(site: Site, part: participant.Participant) -> AnyArray | None:
    """Note and return the coefficients (d [+ 1], d_c), if they may leave.

    Of trees they are each feature's gain, (d, 1).

    The coefficients of a privately trained model follow from releases that are already
    paid for, and cost nothing more.
    """
    model, source = part.model, site.source(part.number)
    if not (source.policy.coefficients and isinstance(model, LinearModel | TreeModel)):
        return None
    if not part.data.plan.is_private:
        ledger_entries.note(site, part.number, privacy_plan.COEFFICIENTS)
    if isinstance(model, TreeModel):
        counts = part.data.multiplicity
        return model.gains(
            part.data.features.shape[1], float(counts.mean()) if len(counts) else 1.0
        )
    return model.weights
