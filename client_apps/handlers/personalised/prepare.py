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
from client_apps.handlers.personalised.local_labels import label_numbers, label_sums
from client_apps.handlers.personalised.participants import LABELS_KEPT, loss_of
from client_apps.operator.participant import State, make_model
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Shard
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError
from tp_flower.features.encoder import TableEncoder
from tp_flower.learning.losses import Loss
from tp_flower.learning.models.local_model import LocalModel, ModelSpec
from tp_flower.personalised.site_objective import SiteObjective
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.mechanisms import Gaussian
from tp_flower.privacy.plan import CURVATURE, GRADIENTS, PartPlan
from tp_flower.privacy.releases import Planned
from tp_flower.protocol import (
    Action,
    AnyArray,
    PersonalisedPart,
    PersonalisePart,
    PersonaliseReply,
    PersonaliseRequest,
    Update,
    parse,
    unpack_bits,
)
from tp_flower.settings import BY_DATA, BY_FEATURES, PrivacySettings
from tp_flower.settings import BY_MODELS as OF_MODELS
from tp_flower.sources.policy import MODELS, STATISTICS

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
    OF_MODELS: "the parameters of a model that the site has trained alone",
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
    guard.check_plan(source, PrivacySettings(), (MODELS, STATISTICS))
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
