"""What a site does to prepare a model of its own: encode, keep its labels, reply.

The reply is sums of labels (how many of each class), a bound of the objective's
curvature, and how many rows there are. Rows and labels stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.data.device import forget
from client_apps.data.features import rows_of
from client_apps.data.run_store import Entry
from client_apps.handlers.personalised import (
    LABELS_KEPT,
    PersonalPart,
    loss_of,
    personal_parts,
)
from client_apps.operator.participant import State, make_model
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Shard
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import QueryError, SiteError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.features.encoder import TableEncoder
from tp_flower.learning.losses import Loss
from tp_flower.learning.models.devices import on_host
from tp_flower.learning.models.local_model import LinearModel, LocalModel, ModelSpec
from tp_flower.learning.solvers import descend
from tp_flower.methods import BY_DATA, BY_FEATURES, BY_MODELS, SUMMARIES
from tp_flower.personalised.sites import (
    EMBEDDING_BOUND,
    RandomFeatures,
    SiteObjective,
    mean_moments,
    moments_bound,
    noisy_mean,
)
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.mechanisms import Gaussian, Planned
from tp_flower.privacy.plan import CURVATURE, GRADIENTS, PartPlan
from tp_flower.protocol import (
    Action,
    LabelFacts,
    PersonalisedPart,
    PersonalisePart,
    PersonaliseReply,
    PersonaliseRequest,
    SiteSummary,
    SummariseReply,
    SummariseRequest,
    Update,
    parse,
    unpack_bits,
)
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import LABELS, MODELS, STATISTICS
from tp_flower.sources.shards import ShardSource

MOST_CLASSES: Final = 1000
LARGEST_LABEL: Final = 1e18


def kept_label_facts(source: ShardSource, label: LabelColumn, task: str) -> LabelFacts:
    """Return what the server may know of labels that stay.

    Args:
        source: their shard.
        label: of its rows.
        task: of the run; "auto" is classification for booleans and texts.

    Raises:
        QueryError: labels are missing, too large or of too many classes.
        PolicyError: the names of its classes may not leave.
    """
    missing = int(np.isnan(label.values).sum())
    if missing:
        raise QueryError(
            f"the label is NULL in {missing} rows: add a filter (WHERE ... IS NOT NULL)"
        )
    is_classes = task == "classification" or (
        task == "auto" and label.kind in ("boolean", "text")
    )
    if not is_classes:
        if np.abs(label.values).max(initial=0.0) > LARGEST_LABEL:
            raise QueryError(f"a label is beyond {LARGEST_LABEL:g}: divide it")
        return LabelFacts(label.kind)
    found: list[Any] = np.unique(label.values).tolist()
    if label.kind == "text":
        found = list(label.categories)
    if label.kind != "boolean":
        # the name of a class is the value of a label
        source.policy.check_release(LABELS, is_private=False)
    if len(found) > MOST_CLASSES:
        raise QueryError(
            f"the label has {len(found)} distinct values; classification takes at most "
            f'{MOST_CLASSES}: set task = "regression", or group them in the query'
        )
    return LabelFacts(label.kind, classes=found)


def label_numbers(label: LabelColumn, classes: list[Any] | None) -> FloatArray:
    """Return the labels as numbers (n,): their classes' positions, if there are any.

    Args:
        label: of the rows.
        classes: of all sites, ascending: texts, or numbers; None in a regression.

    Raises:
        SiteError: a label is none of the classes.
    """
    if classes is None:
        return label.values
    own: FloatArray = label.values
    if label.kind == "text":
        places = {name: float(code) for code, name in enumerate(classes)}
        known = [places.get(name, np.nan) for name in label.categories]
        numbers = np.array([*known, np.nan])[label.codes]
    else:
        values = np.array([v for v in classes if type(v) in (int, float)], np.float64)
        if len(values) != len(classes) or not len(values):
            raise SiteError("malformed request: 'classes' must be a list of numbers")
        numbers = np.searchsorted(values, own).astype(np.float64)
        near = values[np.minimum(numbers, len(values) - 1).astype(np.intp)]
        numbers = np.where(near == own, numbers, np.nan)
    if np.isnan(numbers).any():
        raise SiteError("malformed request: 'classes' lacks one of the site's")
    return numbers


def label_sums(labels: FloatArray, classes: int) -> list[float]:
    """Return how many labels each class has; of numbers their count, sum and squares.

    >>> label_sums(np.array([1.0, 3.0]), 0)
    [2.0, 4.0, 10.0]
    >>> label_sums(np.array([1.0, 0.0, 1.0]), 2)
    [1.0, 2.0]
    """
    if classes:
        counts = np.bincount(labels.astype(np.intp), minlength=classes)
        return [float(count) for count in counts]
    return [float(len(labels)), float(labels.sum()), float(labels @ labels)]


LABEL_SUMS: Final = "label-sums"
METRICS: Final = "metrics"
SUMMARY: Final = "summaries"

_ACTIONS: Final = {
    LABEL_SUMS: Action.PERSONALISE,
    CURVATURE: Action.PERSONALISE,
    SUMMARY: Action.SUMMARISE,
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
    "the parameters that the server sends; in every round anew",
    METRICS: "not covered: metrics of the training and of the held-out rows, at the "
    "same parameters",
}


@dataclass(frozen=True)
class _Ready:
    """A part whose features are encoded.

    Attributes:
        entry: what never changes in training.
        model: untrained.
        start: of the reply.
    """

    entry: Entry
    model: LocalModel
    start: PersonalisedPart


def personalise(site: Site, request: PersonaliseRequest) -> PersonaliseReply:
    """Encode the features, keep the labels, make the model; reply with sums."""
    summary = _summary_order(request)
    ready = {
        number: _prepare_part(site, number, body, request, summary)
        for number, body in site.each(request.parts)
    }
    _set_aside(site, list(ready), summary)
    parts: dict[int, PersonalisedPart] = {}
    states: dict[int, State] = {}
    for number, part in site.each(ready):
        site.save_part(number, part.entry)
        site.round.forget(rows_of(number))
        parts[number] = part.start
        states[number] = (part.model, {})
    site.start_state(states)
    return PersonaliseReply(ledger=site.ledger.lines(site.store.run), parts=parts)


def _summary_order(request: PersonaliseRequest) -> dict[str, Any]:
    """Return what a request says of summaries: their kind, and the noise on them.

    Raises:
        SiteError: no noise is of the size that epsilon asks for.
    """
    kind, epsilon, delta = request.graph, request.graph_epsilon, request.delta
    if not epsilon or kind not in (BY_DATA, BY_FEATURES):
        return {"kind": kind, "multiplier": 0.0}
    try:
        return {"kind": kind, "multiplier": noise_multiplier(epsilon, delta)}
    except ValueError as error:
        raise SiteError(
            f"graph-epsilon = {epsilon:g}, delta = {delta:g}: {error}"
        ) from None


def _set_aside(site: Site, numbers: Sequence[int], summary: Mapping[str, Any]) -> None:
    """Reserve the noisy summaries, and note what nothing covers.

    Raises:
        SiteError: a budget does not suffice, or the ledger cannot be written.
    """
    notes, kind = dict(_NOTES), str(summary["kind"])
    if kind in _SUMMARIES and not summary["multiplier"]:
        notes[SUMMARY] = f"not covered: {_SUMMARIES[kind]}"
    sources = {number: site.source(number) for number in numbers}
    shards = [Shard.of(site, number, own) for number, own in sources.items()]
    planned = [
        Planned(
            shard.release(
                Action.SUMMARISE,
                SUMMARY,
                f"{_SUMMARIES[kind]}; not: the number of rows, and the encoder",
                Gaussian(summary["multiplier"]),
            ),
            limit=1,
        )
        for shard in shards
        if summary["multiplier"]
    ]
    site.reserve(planned, Guard(site).budgets(list(sources.values())))
    noted = [
        shard.release(_ACTIONS.get(what, Action.PERSONAL), what, scope)
        for shard in shards
        for what, scope in notes.items()
    ]
    site.ledger.note(site.store.run, noted)


def _prepare_part(
    site: Site,
    number: int,
    body: PersonalisePart,
    request: PersonaliseRequest,
    summary: Mapping[str, Any],
) -> _Ready:
    guard, source, extracted = Guard(site), site.source(number), site.extracted(number)
    guard.check_plan(source, (MODELS, STATISTICS))
    trained = unpack_bits(body.trained, extracted.rows)
    tested = unpack_bits(body.tested, extracted.rows)
    if (trained & tested).any():
        raise SiteError("malformed request: a row is both trained on and held out")
    rows = np.concatenate([np.flatnonzero(trained), np.flatnonzero(tested)])
    count = int(np.count_nonzero(trained))
    guard.check_rows(source, count, f"the model of table {extracted.table!r}")
    held = len(rows) - count
    guard.check_rows(source, held, f"the metrics of table {extracted.table!r}")
    table_encoder = parse(body.encoder, "encoder", TableEncoder.from_json)
    encoder = table_encoder.at_site(site.hasher())
    spec = parse(body.model, "model", ModelSpec.from_json)
    every, classes = _labels(site, number, request, spec)
    labels = every[rows]
    features = site.tables.encode(number, encoder, rows)
    model = make_model(spec, features.shape[1], body.device)
    meta: dict[str, Any] = {
        "table": extracted.table,
        "joined_rows": max(count, 1),
        "l2": body.l2,
        "loss": request.loss,
        "device": body.device,
        "encoder": encoder.to_json(),
        "model": spec.to_json(),
        "update": str(Update.LOCAL),
        "privacy": PartPlan().to_json(),
        "summary": summary,
    }
    arrays: dict[str, AnyArray] = {
        "features": features,
        "multiplicity": np.ones(count, np.int32),
        "tested": np.arange(len(rows)) >= count,
        "batch-start": np.zeros(1, np.int64),
        "batch-rows": np.zeros(0, np.int64),
        LABELS_KEPT: labels,
    }
    entry = Entry(arrays, meta)
    forget(site.store, number)
    placed = site.place(number, entry)
    loss = loss_of(request.loss, spec.outputs)
    base = np.zeros(spec.outputs)
    own = labels[:count]
    objective = SiteObjective(model, placed[:count], own, loss, base, meta["l2"])
    meta[CURVATURE] = objective.largest_curvature
    start = PersonalisedPart(
        features=features.shape[1],
        rows=count,
        label_sums=label_sums(own, classes),
        curvature=meta[CURVATURE],
        penalised=model.penalised.astype(np.uint8),
        parameters=model.parameters.astype(np.float32),
    )
    return _Ready(entry, model, start)


def _labels(
    site: Site, number: int, request: PersonaliseRequest, spec: ModelSpec
) -> tuple[FloatArray, int]:
    """Return the labels of all rows as numbers, and how many classes there are."""
    label = site.extracted(number).label
    if label is None:
        raise SiteError("malformed request: the part has no label")
    loss: Loss = loss_of(request.loss, spec.outputs)
    if loss.name == "squared":
        return label_numbers(label, None), 0
    classes: list[Any] = list(request.classes)
    if loss.outputs != (len(classes) if loss.name == "softmax" else 1):
        raise SiteError("malformed request: 'classes' are not those of the loss")
    return label_numbers(label, classes), len(classes)


ALONE_TOLERANCE: Final = 1e-7
MOST_STEPS: Final = 3000
LEAST_CURVATURE: Final = 1e-30
MOST_TORCH_STEPS: Final = 300
"""An MLP's steps alone are about as many as its rounds with others."""
PAIRS: Final = 128
"""Of random features: a summary is twice as many numbers."""


def summarise(site: Site, request: SummariseRequest) -> SummariseReply:
    """Reply with the metrics of the model of the site alone, and what a graph needs."""
    parts: dict[int, SiteSummary] = {}
    for part in personal_parts(site, request.base):
        kind = _kind(part) if request.summaries else ""
        is_trained = request.alone or kind == BY_MODELS
        alone = _alone(part) if is_trained else part.start
        summary = None
        if kind:
            found = alone if kind == BY_MODELS else _summary(site, part, kind, request)
            summary = found.astype(np.float32)
        local = part.metrics(alone) if request.alone else None
        parts[part.number] = SiteSummary(local=local, summary=summary)
    return SummariseReply(parts)


def _kind(part: PersonalPart) -> str:
    """Return what was planned to leave of a part.

    Raises:
        SiteError: nothing was.
    """
    kind = str(part.summary["kind"])
    if kind not in SUMMARIES:
        raise SiteError("malformed request: no summary was planned in this run")
    return kind


def _alone(part: PersonalPart) -> FloatArray:
    """Return the minimiser of the site's own objective, (p,)."""
    own = part.objective
    is_linear = isinstance(own.model, LinearModel)
    return descend(
        own.gradient,
        part.start,
        1.0 / max(part.curvature, LEAST_CURVATURE),
        tolerance=ALONE_TOLERANCE,
        most_steps=MOST_STEPS if is_linear else MOST_TORCH_STEPS,
    )


def _summary(
    site: Site, part: PersonalPart, kind: str, request: SummariseRequest
) -> FloatArray:
    """Return the summary of a part's trained rows, with the noise that is planned."""
    own, multiplier = part.objective, float(part.summary["multiplier"])
    features = np.asarray(on_host(own.features))
    if kind == BY_DATA:
        labels = _label_columns(part, request.label_scale)
        rows = np.column_stack([features, labels])
        rng = generator(request.seed, Stream.SUMMARIES)
        mean = RandomFeatures.draw(rows.shape[1], PAIRS, rng).mean(rows)
        bound = EMBEDDING_BOUND
    else:
        clip = float(np.sqrt(max(features.shape[1], 1))) if multiplier else np.inf
        mean = mean_moments(features, clip)
        bound = moments_bound(clip) if multiplier else 0.0
    if not multiplier:
        return mean
    site.uses.append((part.number, SUMMARY, 0))
    return noisy_mean(mean, bound, len(own.labels), multiplier, site.noise)


def _label_columns(part: PersonalPart, scale: float) -> FloatArray:
    """Return the labels as columns like standardised features, (n, 1 or classes)."""
    own = part.objective
    labels = own.labels[:, None]
    if own.loss.name == "squared":
        labels = (labels - own.base[0]) / scale
    elif own.loss.outputs == 1:
        labels = 2.0 * labels - 1.0
    else:
        labels = 2.0 * (labels == np.arange(own.loss.outputs)) - 1.0
    return np.asarray(labels, np.float64)
