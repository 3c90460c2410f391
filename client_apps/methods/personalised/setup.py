"""Set-up of a site's own model: encode, keep the labels, summarise for a graph.

The replies are sums of labels (how many of each class), a bound on the objective's
curvature, the number of rows, and a summary of the site if the graph needs one. Rows
and labels stay at the site.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Final

import msgspec
import numpy as np

from client_apps.data.features import forget, move_to_device
from client_apps.data.run_store import Entry
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.personalised.rounds import (
    LOCAL_LABELS,
    PersonalisedModel,
    PersonalState,
    personalised_models,
)
from client_apps.operator.participant import Participant, ShardData, make_model
from client_apps.privacy.guard import check_model, check_plan, check_rows, check_shown
from client_apps.privacy.ledger_entries import release, set_aside
from client_apps.privacy.local_labels import label_sums
from client_apps.privacy.proposal_checks import (
    agree,
    agree_in_model,
    check_begins,
    check_trained,
)
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.features.sparse import dense
from tp_flower.learning.models.local_model import LinearModel, ModelSpec, host_features
from tp_flower.learning.solvers import descend
from tp_flower.methods.method import bounded_loss
from tp_flower.methods.personalised import PERSONALISED, sites
from tp_flower.methods.personalised.messages import (
    BY_DATA,
    BY_FEATURES,
    BY_MODELS,
    SUMMARIES,
    TRAIN_PERSONAL,
    TRAIN_PERSONALISE,
    TRAIN_SUMMARISE,
    PersonalisedPart,
    PersonalisePart,
    PersonaliseReply,
    PersonaliseRequest,
    SiteSummary,
    SummariseReply,
    SummariseRequest,
)
from tp_flower.methods.personalised.settings import PersonalisedSettings, summaries_of
from tp_flower.objectives import (
    Target,
    family_of,
    make_objective,
    response_of,
)
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.mechanisms import Gaussian, Release
from tp_flower.privacy.plan import CURVATURE, GRADIENTS
from tp_flower.protocol.codec import parse
from tp_flower.protocol.packet import unpack_bits
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import LABELS, MODELS, STATISTICS

LABEL_SUMS: Final = "label-sums"
SUMMARY: Final = "summaries"
_SUMMARISED: Final = "summarised"  # entry: the request that was answered, by its digest

_ACTIONS: Final = {
    LABEL_SUMS: TRAIN_PERSONALISE,
    CURVATURE: TRAIN_PERSONALISE,
    SUMMARY: TRAIN_SUMMARISE,
}
_SUMMARIES: Final[Mapping[str, str]] = {
    BY_DATA: "the mean of random Fourier features of rows and labels",
    BY_FEATURES: "the mean of the products of two features",
    BY_MODELS: "the parameters of a model that the site has trained alone",
}
_NOTES: Final[Mapping[str, str]] = {
    LABEL_SUMS: "not covered: how many training rows each class has, or in a "
    "regression the sum of their labels and of the squares",
    CURVATURE: "not covered: one number of how steep the site's objective is",
    GRADIENTS: "not covered: the gradient of the mean loss of the training rows, at "
    "the parameters that the server sends; anew in every round",
    "metrics": "not covered: metrics of the training and of the held-out rows, at the "
    "same parameters",
}


def personalise(site: Site, request: PersonaliseRequest) -> PersonaliseReply:
    """Encode the features, keep the labels, make the model; reply with sums."""
    check_begins(site, TRAIN_PERSONALISE)
    multiplier = _summary_noise(request)
    numbers = (number for number, _ in site.each(request.parts))
    planned = (_plan_releases(site, n, request.graph, multiplier) for n in numbers)
    set_aside(site, chain.from_iterable(planned))
    site.round.arrays.clear()
    starts = {
        number: _start(site, number, body, request, multiplier)
        for number, body in site.each(request.parts)
    }
    settings = site.terms.settings
    agree("graph", summaries_of(settings), request.graph)
    values = settings.of(PersonalisedSettings)
    agree("graph epsilon", values.graph_epsilon, request.graph_epsilon)
    agree("delta", settings.privacy.delta, request.delta)
    return PersonaliseReply(ledger=site.ledger.lines(site.store.run), parts=starts)


def _summary_noise(request: PersonaliseRequest) -> float:
    """Return the noise multiplier of a run's summaries; 0 for no noise."""
    epsilon = request.graph_epsilon
    delta = request.delta
    if not epsilon or request.graph not in (BY_DATA, BY_FEATURES):
        return 0.0
    try:
        return noise_multiplier(epsilon, delta)
    except ValueError as error:
        raise SiteError(
            f"graph-epsilon = {epsilon:g}, delta = {delta:g}: {error}"
        ) from None


def _plan_releases(
    site: Site, number: int, kind: str, multiplier: float
) -> Iterator[tuple[Release, int]]:
    """Yield the releases of a participant: the noisy summary and the uncovered ones."""
    notes = dict(_NOTES)
    if multiplier:
        scope = f"{_SUMMARIES[kind]}; not: the number of rows, and the encoder"
        yield (
            release(
                site, number, TRAIN_SUMMARISE, SUMMARY, scope, Gaussian(multiplier)
            ),
            1,
        )
    elif kind in _SUMMARIES:
        notes[SUMMARY] = f"not covered: {_SUMMARIES[kind]}"
    for released, scope in notes.items():
        action = _ACTIONS.get(released, TRAIN_PERSONAL)
        yield release(site, number, action, released, scope), 1


def _start(
    site: Site,
    number: int,
    body: PersonalisePart,
    request: PersonaliseRequest,
    multiplier: float,
) -> PersonalisedPart:
    """Prepare a site's model and rows for its personal training."""
    source = site.source(number)
    extracted = site.extracted(number)
    # sums and gradients of labels tell the label of a row, in two requests
    check_plan(source, (LABELS, MODELS, STATISTICS))
    rows, count = _rows(site, number, body)
    encoder = fitted_encoder(site, number, body.encoder)
    spec = parse(body.model, "model", partial(msgspec.convert, type=ModelSpec))
    check_model(source, spec, encoder.encoder.width)
    check_shown(source, spec, encoder.encoder.width, count)
    family = parse(len(request.classes), "classes", partial(family_of, request.loss))
    if not bounded_loss(family):
        raise MessageError(f"'loss' {family.name} has no bound that steps are short by")
    classes = tuple(map(str, request.classes))
    outputs = response_of(request.loss, classes, "text").outputs
    if spec.outputs != outputs:
        raise MessageError(f"'model' must have {outputs} outputs")
    agree_in_model(site, number, spec, body.l2)
    labels = _labels(extracted.label, request.classes)[rows]
    features = site.tables.encode(number, encoder, rows)
    model = make_model(spec, features.shape[1], body.device)
    forget(site.store, number)
    data = ShardData(
        features=move_to_device(site.store, number, features, body.device, spec.kind),
        multiplicity=np.ones(count, np.int64),
        tested=np.arange(len(rows)) >= count,
        joined_rows=max(count, 1),
        l2=body.l2,
        table=extracted.table,
        spec=spec,
        device=body.device,
    )
    base = np.zeros(spec.outputs)
    trained_labels = labels[:count]
    mean_loss = make_objective(request.loss, Target.of(trained_labels, classes))
    objective = sites.SiteObjective(model, data.trained, mean_loss, base, body.l2)
    curvature = objective.largest_curvature
    site.start(
        Participant(
            number, data, model, PersonalState(), site.releaser(number, data.plan)
        ),
        PERSONALISED.family,
        {LOCAL_LABELS: labels},
        loss=request.loss,
        classes=list(classes),
        curvature=curvature,
        summary=request.graph,
        noise_multiplier=multiplier,
        # the last one brings metrics alone
        most_rounds=site.terms.settings.epochs + 1,
    )
    return PersonalisedPart(
        features=features.shape[1],
        rows=count,
        label_sums=label_sums(trained_labels, len(request.classes)),
        curvature=curvature,
        penalised=model.penalised.astype(np.uint8),
        parameters=model.parameters.astype(np.float32),
    )


def _rows(site: Site, number: int, body: PersonalisePart) -> tuple[IntArray, int]:
    """Return the rows to train on before those to test on, and their number."""
    source = site.source(number)
    extracted = site.extracted(number)
    trained = unpack_bits(body.trained, extracted.rows)
    tested = unpack_bits(body.tested, extracted.rows)
    if (trained & tested).any():
        raise MessageError("a row is both trained on and held out")
    rows = np.concatenate([np.flatnonzero(trained), np.flatnonzero(tested)])
    count = int(np.count_nonzero(trained))
    check_rows(source, count, f"the model of table {extracted.table!r}")
    check_rows(source, len(rows) - count, f"the metrics of table {extracted.table!r}")
    check_trained(site, number, (trained, tested))
    return rows, count


def _labels(label: LabelColumn | None, classes: list[str | float]) -> FloatArray:
    """Return the labels of all rows as numbers (n,): positions of their classes."""
    if label is None:
        raise MessageError("the part has no label")
    if not classes:
        return label.values
    numbers = label.positions_in(classes)
    if np.isnan(numbers).any():
        raise MessageError("'classes' lacks one of the site's")
    return numbers


ALONE_TOLERANCE: Final = 1e-7
MOST_STEPS: Final = 3000
LEAST_CURVATURE: Final = 1e-30
MOST_TORCH_STEPS: Final = 300  # an MLP alone takes about as many as with others


def summarise(site: Site, request: SummariseRequest) -> SummariseReply:
    """Reply with the metrics of the model trained alone, and the graph's summary.

    A summary leaves once: those of other random features would tell more of the rows.
    """
    site.check_once(_SUMMARISED, "the site has been summarised in this run")
    site.store.save(_SUMMARISED, Entry({}, {REQUEST: site.round.digest}))
    parts: dict[int, SiteSummary] = {}
    for model in personalised_models(site, request.base):
        kind = model.summary if request.summaries else ""
        if request.summaries and kind not in SUMMARIES:
            raise MessageError("no summary was planned in this run")
        alone = model.part.model.parameters
        if request.alone or kind == BY_MODELS:
            alone = _train_alone(model)
        summary = None
        if kind:
            numbers = alone if kind == BY_MODELS else _summary(site, model, request)
            summary = numbers.astype(np.float32)
        local = model.metrics(alone) if request.alone else None
        parts[model.part.number] = SiteSummary(local=local, summary=summary)
    return SummariseReply(parts)


def _train_alone(model: PersonalisedModel) -> FloatArray:
    """Return the minimiser of the site's own objective, (p,)."""
    is_linear = isinstance(model.objective.model, LinearModel)
    return descend(
        model.objective.gradient,
        model.part.model.parameters,
        1.0 / max(model.curvature, LEAST_CURVATURE),
        tolerance=ALONE_TOLERANCE,
        most_steps=MOST_STEPS if is_linear else MOST_TORCH_STEPS,
    )


def _summary(
    site: Site, model: PersonalisedModel, request: SummariseRequest
) -> FloatArray:
    """Return the summary of a site's rows, with noise if the run has it."""
    multiplier = model.noise_multiplier
    features = dense(host_features(model.objective.features))
    if model.summary == BY_DATA:
        rows = np.column_stack(
            [features, _label_columns(model.objective, request.label_scale)]
        )
        rng = generator(request.seed, Stream.SUMMARIES)
        mean = sites.RandomFeatures.draw(rows.shape[1], sites.PAIRS, rng).mean(rows)
        bound = sites.EMBEDDING_BOUND
    else:
        clip = float(np.sqrt(max(features.shape[1], 1))) if multiplier else np.inf
        mean = sites.mean_moments(features, clip)
        bound = sites.moments_bound(clip) if multiplier else 0.0
    if not multiplier:
        return mean
    site.uses.append((model.part.number, SUMMARY, 0))
    # a unit's rows may be alike
    bound *= site.source(model.part.number).policy.rows_per_unit
    return sites.noisy_mean(mean, bound, len(features), multiplier, site.round.noise)


def _label_columns(objective: sites.SiteObjective, scale: float) -> FloatArray:
    """Return the labels as columns on the scale of features, (n, 1 or classes)."""
    loss = objective.mean_loss
    target = objective.mean_loss.target
    classes = len(target.classes)
    if not classes:
        constant = loss.response.predict(objective.base[None, :])
        return (target.columns - constant) / scale
    if loss.outputs == 1:
        return 2.0 * target.columns - 1.0
    columns: FloatArray = 2.0 * (target.columns == np.arange(classes)) - 1.0
    return columns
