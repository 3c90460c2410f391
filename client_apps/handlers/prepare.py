"""Preparing training at a site: encode, plan the releases, make the models.

The planned releases of a run are set aside in the site's ledger first; nothing of a row
is computed for the server before that. The server announces the run's schedule: it can
limit the planned releases, and cannot announce less than the site counts itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from client_apps.data.database import cannot_write
from client_apps.data.features import forget, rows_of
from client_apps.data.run_store import Entry
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.handlers.training_rows import (
    Batches,
    TrainingRows,
    check_rows,
    read_batches,
    read_rows,
)
from client_apps.operator.participant import (
    Outgoing,
    Part,
    ShardData,
    State,
    fixed_entry,
    initial_vectors,
    make_model,
)
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Run, Shard, releases_of
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SettingsError, SiteError
from tp_flower.features.encoder import SiteEncoder, TableEncoder
from tp_flower.learning.models.local_model import CENTRES as CENTRES_MODEL
from tp_flower.learning.models.local_model import (
    NUMPY_KINDS,
    Features,
    LinearModel,
    LocalModel,
    ModelSpec,
)
from tp_flower.learning.solvers import RidgeSolver
from tp_flower.methods import (
    DP_SGD,
    JOINING,
    METHODS,
    NOISY_STATISTICS,
    OUTSIDER,
    SGD,
    Method,
)
from tp_flower.model_names import ModelVersion, software
from tp_flower.privacy.gradients import check_per_row, check_scores
from tp_flower.privacy.mechanisms import Reservation
from tp_flower.privacy.plan import (
    COEFFICIENTS,
    CURVATURE,
    GRADIENTS,
    GRAM,
    MOMENTS,
    PARAMETERS,
    SAMPLED_ROWS,
    PartPlan,
    Schedule,
    plan_part,
)
from tp_flower.privacy.statistics_update import Rows, usable_gram
from tp_flower.protocol.codec import parse, required
from tp_flower.protocol.inference_messages import (
    FinishedPart,
    FinishReply,
    FinishRequest,
)
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
from tp_flower.query import Fragment
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import MODELS, ROWS, SCORES

Start = tuple[PreparedPart, Entry]


@dataclass(frozen=True)
class _Prepared:
    """A part whose features are encoded, and whose releases are planned.

    Attributes:
        columns: about the mean squared norm of an encoded row.
    """

    entry: Entry
    model: LocalModel
    update: Update
    plan: PartPlan
    columns: int
    features: Features


def prepare(site: Site, request: PrepareRequest) -> PrepareReply:
    """Encode the features and make the models; reply with the start of training."""
    privacy, method = request.privacy, _method(request.outline)
    _check_accounts(method, privacy)
    prepared = {
        number: _prepare_part(site, number, body, request.outline, privacy)
        for number, body in site.each(request.parts)
    }
    run = Run(site.store.run, method.family, privacy, _fitted_parts(site))
    _set_aside(site, run, prepared)
    starts: dict[int, PreparedPart] = {}
    states: dict[int, State] = {}
    for number, part in site.each(prepared):
        start, entry = _start(part, site.outgoing(number, part.plan))
        site.save_part(number, entry)
        site.round.forget(rows_of(number))
        starts[number] = start
        states[number] = (part.model, initial_vectors(part.model, part.update))
    site.start_state(states)
    site.pay()
    return PrepareReply(ledger=site.ledger.lines(run.name), parts=starts)


def _prepare_part(
    site: Site,
    number: int,
    body: PreparePart,
    outline: Outline,
    privacy: PrivacyTerms,
) -> _Prepared:
    guard, source = Guard(site), site.source(number)
    update = body.update
    sends_rows = update is Update.GIVEN and outline.sends == SAMPLED_ROWS
    guard.check_plan(source, (ROWS if sends_rows else MODELS, SCORES), privacy)
    table_encoder = parse(body.encoder, "encoder", TableEncoder.from_json)
    encoder = table_encoder.at_site(site.hasher())
    is_private = privacy.covers_features or privacy.covers_predictions
    rows = read_rows(body, site.extracted(number).rows, is_private=is_private)
    batches = read_batches(body, rows.trained)
    check_rows(
        guard,
        source,
        site.extracted(number).table,
        rows,
        batches,
        sends_sums=update is Update.SUM and not privacy.covers_features,
    )
    features = site.tables.encode(number, encoder, rows.own, is_private=is_private)
    if rows.place is not None:
        features = site.tables.repeat(number, features, rows.place)
    spec = parse(body.model, "model", ModelSpec.from_json)
    _check_given(outline, update, spec)
    _check_exact(privacy, update, spec)
    width = features.shape[1]
    model = make_model(spec, width, body.device)
    if privacy.features == DP_SGD:
        check_per_row(model, width)
    elif privacy.covers_predictions:
        check_scores(model, width)
    columns = table_encoder.columns + int(spec.intercept)
    schedule = replace(
        _schedule(outline, rows, batches, update, spec),
        mean_multiplicity=_mean_multiplicity(body),
        columns=columns,
        label_scale=body.label_scale,
    )
    plan = plan_part(
        privacy,
        schedule,
        sends=_clear_releases(outline, update),
        is_linear=spec.kind == "linear",
    )
    data = ShardData(
        features=features,
        multiplicity=rows.multiplicity,
        tested=rows.tested,
        joined_rows=body.joined_rows,
        l2=body.l2,
        batch_start=batches.start,
        batch_rows=batches.rows,
    )
    whole = fixed_entry(
        data,
        spec,
        plan,
        table=site.extracted(number).table,
        encoder=encoder.to_json(),
        device=body.device,
        update=str(update),
    )
    forget(site.store, number)
    return _Prepared(whole, model, update, plan, columns, site.place(number, whole))


def _method(outline: Outline) -> Method:
    """Return the method that the run trains by."""
    if outline.strategy not in JOINING:
        raise SiteError(
            f"malformed request: 'strategy' is {outline.strategy!r}; allowed: one of "
            f"{', '.join(JOINING)}"
        )
    return METHODS[outline.strategy]


def _check_accounts(method: Method, privacy: PrivacyTerms) -> None:
    """Refuse mechanisms whose cost per row is not known for the method."""
    covered = {
        "features": privacy.covers_features,
        "predictions": privacy.covers_predictions,
    }
    if any(covered.values()) and not method.sends_a_row_once:
        key = next(key for key, is_covered in covered.items() if is_covered)
        sent = "rows in the clear" if method.solvers else "expanded rows"
        raise SiteError(
            f"privacy.{key} is of methods that send a row of a table once, with "
            f"noise, not of those on {sent}"
        )
    is_for_outsiders = privacy.adversary == OUTSIDER and privacy.features == DP_SGD
    if is_for_outsiders and not privacy.covers_predictions:
        raise SiteError(
            "privacy.adversary: 'outsider' needs privacy.predictions: scores without "
            "noise go into the other tables' models, which an outsider sees as well"
        )


def _schedule(
    outline: Outline,
    rows: TrainingRows,
    batches: Batches,
    update: Update,
    spec: ModelSpec,
) -> Schedule:
    """Return the schedule of the run, capped by the numbers that the site counts."""
    family = _method(outline).family
    announced: dict[str, Any] = {}
    if update is Update.CONSENSUS:
        announced["exchanges"] = required(outline.exchanges, "exchanges")
    if family == SGD:
        for field in ("batch_uses", "batch_rate"):
            announced[field] = required(getattr(outline, field), field)
    return Schedule(
        family=family,
        epochs=outline.epochs,
        batches=len(batches.start) - 1,
        # of the plan that the server has sent: it cannot say less
        row_batches=int(np.bincount(batches.rows).max(initial=0)),
        most_joined_rows=int(rows.multiplicity.max(initial=0)),
        has_first_scores=spec.kind not in NUMPY_KINDS,
        output_scale=spec.output_scale or 1.0,
        **announced,
    )


def _clear_releases(outline: Outline, update: Update) -> tuple[str, ...]:
    """Return the releases of a part's rows or model that nothing covers."""
    if update is Update.GIVEN:
        return (required(outline.sends, "sends"),)
    further = {
        Update.LOCAL: (),
        Update.GRAM: (GRAM, MOMENTS),
        Update.CONSENSUS: (PARAMETERS,),
        Update.SUM: (GRADIENTS,),
    }[update]
    return (CURVATURE, *further)


def _check_given(outline: Outline, update: Update, spec: ModelSpec) -> None:
    """Refuse to let a server solve that has not said so, and models it cannot solve."""
    is_given = update is Update.GIVEN
    if is_given != bool(_method(outline).solvers):
        raise SiteError(
            f"malformed request: update {update.value!r} does not go with strategy "
            f"{outline.strategy!r}: {Update.GIVEN.value!r} is of those that solve on a "
            "coreset, and they have no other"
        )
    if spec.kind == CENTRES_MODEL and not is_given:
        raise SiteError(
            f"malformed request: a model of kind {spec.kind!r} takes update "
            f"{Update.GIVEN.value!r}, not {update.value!r}"
        )
    if is_given and spec.kind not in NUMPY_KINDS:
        raise SiteError(
            f"malformed request: update {update.value!r} is of models of kinds "
            f"{', '.join(sorted(NUMPY_KINDS))}, not {spec.kind!r}"
        )


def _check_exact(privacy: PrivacyTerms, update: Update, spec: ModelSpec) -> None:
    """Refuse noise on statistics that the model is not fitted by."""
    is_exact = spec.kind == "linear" and update in (Update.LOCAL, Update.GRAM)
    if privacy.features == NOISY_STATISTICS and not is_exact:
        raise SiteError(
            f"privacy.features = {NOISY_STATISTICS!r} is of linear models that are "
            f"fitted exactly, not of {spec.kind!r} by {update.value!r}"
        )


def _mean_multiplicity(body: PreparePart) -> float:
    """Return the unit of noise, besides the size of labels; 0 of no rows."""
    size = body.mean_multiplicity
    if 0 < size < LEAST_SCALE:
        raise SiteError(
            f"malformed request: 'mean-multiplicity' is {size:g}, which is too small; "
            f"allowed: 0, or from {LEAST_SCALE:g} on"
        )
    return size


def _fitted_parts(site: Site) -> frozenset[int]:
    """Return the parts whose statistics have left in this run, by the site's ledger."""
    releases = [line["release"] for line in site.ledger.lines(site.store.run)]
    return frozenset(
        release["part"]
        for release in releases
        if release["what"] == ledger_entries.STATISTICS
    )


def _set_aside(site: Site, run: Run, prepared: Mapping[int, _Prepared]) -> None:
    """Reserve the covered releases of the run, and note the others."""
    guard = Guard(site)
    sources = {number: site.source(number) for number in prepared}
    releases = [
        pair
        for number, part in prepared.items()
        for pair in releases_of(run, Shard.of(site, number, sources[number]), part.plan)
    ]
    site.reserve(
        [Reservation(each, limit) for each, limit in releases if each.mechanism],
        guard.budgets(list(sources.values())),
    )
    site.ledger.note(run.name, [each for each, _ in releases if not each.mechanism])


def _start(part: _Prepared, outgoing: Outgoing) -> Start:
    """Return the start of training, and the entry to be saved."""
    if part.update is Update.GIVEN:
        # nobody asks for curvature where the server solves
        return _prepared(part, mean_curvature=0.0), part.entry
    if isinstance(part.model, LinearModel):
        return _start_linear(part.model, part, outgoing)
    return _start_torch(part, outgoing), part.entry


def _prepared(part: _Prepared, **fields: Any) -> PreparedPart:
    return PreparedPart(
        features=part.entry.arrays["features"].shape[1],
        penalised=part.model.penalised.astype(np.uint8),
        **fields,
    )


def _start_linear(model: LinearModel, part: _Prepared, outgoing: Outgoing) -> Start:
    """Return the start, and the entry with its factorised solver.

    SGD needs the largest curvature, for its step size, and ADMM the solver: each costs
    an eigendecomposition.
    """
    entry, plan = part.entry, part.plan
    if plan.fit is not None or plan.gradients is not None:
        return _prepared(part, **_typical_curvature(part, len(model.weights))), entry
    multiplicity = entry.arrays["multiplicity"]
    trained = part.features[: len(multiplicity)]
    matrix = outgoing.gram(Rows(trained, multiplicity, intercept=model.intercept))
    total = entry.meta["joined_rows"]
    facts = {
        "mean_curvature": float(np.trace(matrix)) / (total * max(len(matrix), 1)),
    }
    if plan.statistics is not None:
        # the trace of a noisy matrix may be negative
        facts = _typical_curvature(part, len(model.weights))
    if len(entry.arrays["batch_start"]) > 1:
        largest = np.linalg.eigvalsh(matrix / total).max(initial=0.0)
        facts["largest_curvature"] = float(largest)
        return _prepared(part, **facts), entry
    deviation = plan.statistics.gram_deviation if plan.statistics else 0.0
    if part.update is Update.GRAM:
        return _prepared(part, gram=matrix, gram_deviation=deviation, **facts), entry
    matrix = usable_gram(matrix, deviation)
    # a consensus step penalises every parameter alike, the intercept too
    centred = model.intercept and part.update is Update.LOCAL
    solver = RidgeSolver.from_gram(matrix, total, intercept=centred)
    arrays = {
        **entry.arrays,
        "eigenvalues": solver.eigenvalues,
        "eigenvectors": solver.eigenvectors,
        "mean": solver.mean,
    }
    whole = Entry(arrays, {**entry.meta, "weight": solver.weight})
    return _prepared(part, **facts), whole


def _typical_curvature(part: _Prepared, parameters: int) -> dict[str, float]:
    """Return the curvature of standardised features: it says nothing of the rows.

    The trace of the Gram matrix over N is the mean of G ||x||^2, summed over the rows,
    and its largest eigenvalue is at most that.
    """
    gradients = part.plan.gradients
    joined = int(part.entry.arrays["multiplicity"].sum())
    trace = part.columns * joined / part.entry.meta["joined_rows"]
    is_sgd = len(part.entry.arrays["batch_start"]) > 1
    return {
        "largest_curvature": trace if is_sgd else 0.0,
        "mean_curvature": trace / max(parameters, 1),
        "gradient_noise": gradients.noise_multiplier if gradients else 0.0,
    }


def _start_torch(part: _Prepared, outgoing: Outgoing) -> PreparedPart:
    """Return the first scores, and the mean diagonal of the Gauss-Newton matrix.

    The diagonal is estimated with one random vector e of signs (Hutchinson):
    ||J^T (sqrt(G) e)||^2 / p has that mean as its expectation.
    """
    entry, model = part.entry, part.model
    multiplicity = entry.arrays["multiplicity"]
    trained = part.features[: len(multiplicity)]
    outputs = int(entry.meta["model"]["outputs"])
    rng = generator(int(entry.meta["model"]["seed"]), Stream.CURVATURE)
    signs: FloatArray = rng.choice([-1.0, 1.0], size=(len(trained), outputs))
    try:
        probe = model.pullback(trained, np.sqrt(multiplicity)[:, None] * signs)
    except (RuntimeError, TypeError, ValueError) as error:
        # torch tells shapes and types here, no values
        raise SettingsError(
            f"model {entry.meta['model']['kind']!r} does not turn rows of "
            f"{trained.shape[1]} features into {outputs} scores: {error}"
        ) from error
    mean = float(probe @ probe) / (entry.meta["joined_rows"] * len(probe))
    facts = {"mean_curvature": mean}
    if part.plan.is_private:
        facts = _typical_curvature(part, len(probe))
    scores = outgoing.scores(model.scores(part.features))
    return _prepared(part, scores=scores, **facts)


def finish(site: Site, request: FinishRequest) -> FinishReply:
    """Keep the models of a run that went well, and forget all else of it.

    The reply has the run's lines of the ledger; of saved models their digests, and the
    coefficients that may be shown.
    """
    parts: dict[int, FinishedPart] = {}
    if request.keep_models:
        # it becomes a path
        model = ModelVersion(
            required(request.model_name, "model_name"),
            required(request.model_version, "model_version"),
        )
        parts = _keep(site, model, list(site.parts()))
    site.ledger.close(site.store.run)
    account = site.ledger.lines(site.store.run)
    site.round.end_run()
    return FinishReply(ledger=account, parts=parts)


def _keep(
    site: Site, model: ModelVersion, parts: Sequence[Part]
) -> dict[int, FinishedPart]:
    """Save the parts' models; return the digest and the coefficients of each."""
    root = site.state_folder
    coefficients = _coefficients(site, parts)
    return {
        part.number: FinishedPart(
            digest=None if root is None else _keep_part(site, root, model, part),
            coefficients=coefficients.get(part.number),
        )
        for part in parts
    }


def _keep_part(site: Site, root: Path, model: ModelVersion, part: Part) -> str:
    meta: Any = site.store.load(f"part-{part.number}").meta
    spec = ModelSpec.from_json(meta["model"])
    saved = SavedModel(
        table=part.table,
        encoder=SiteEncoder.from_json(meta["encoder"]),
        spec=spec,
        parameters=part.shard.model.parameters,
        fragment=Fragment.from_json(site.fragment(part.number)),
        versions=software(has_torch=spec.kind not in NUMPY_KINDS),
    )
    folder = part_folder(root, model, part.number)
    try:
        return saved.keep(folder, is_durable=not site.is_simulated)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _coefficients(site: Site, parts: Sequence[Part]) -> dict[int, AnyArray]:
    """Return the coefficients (d [+ 1], d_c) that may leave, once they are noted.

    Those of a model that was trained privately are made from releases that are paid
    for, and cost nothing more.
    """
    coefficients_of: dict[int, AnyArray] = {}
    noted = []
    for part in parts:
        model, source = part.shard.model, site.source(part.number)
        if not (source.policy.coefficients and isinstance(model, LinearModel)):
            continue
        if not part.outgoing.plan.is_private:
            name = Guard(site).source_id(source)
            shard = Shard(part.number, source.table, source.site, name)
            noted.append(shard.uncovered(COEFFICIENTS))
        coefficients_of[part.number] = model.weights
    site.ledger.note(site.store.run, noted)
    return coefficients_of
