"""What a site does to predict: score rows with a part of a model that it has kept.

They are the rows that the server has found in joined rows, and the part is one that a
training run left here. The server names model, version and part; the site sends nothing
unless the part is of this very table and of these very features, as any other query
would tell of the model, not of the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.operator.participant import make_model
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Shard, scored
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import ModelError
from tp_flower.learning.models.local_model import LocalModel
from tp_flower.model_names import ModelVersion
from tp_flower.privacy.gradients import check_scores
from tp_flower.privacy.plan import PartPlan, plan_prediction
from tp_flower.privacy.releases import Planned
from tp_flower.protocol import (
    ScoredPart,
    ScorePart,
    ScoreReply,
    ScoreRequest,
    parse,
    unpack_bits,
)
from tp_flower.query import Fragment
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.sources.policy import SCORES


@dataclass(frozen=True)
class _Ready:
    """A part whose model is there, and whose releases are planned.

    Attributes:
        model: with the parameters that it was trained to.
        saved: the part of the model.
        rows: (k,), positions of the rows to score.
        plan: what is done to their scores.
    """

    model: LocalModel
    saved: SavedModel
    rows: np.ndarray[Any, np.dtype[np.int64]]
    plan: PartPlan


def score(site: Site, request: ScoreRequest) -> ScoreReply:
    """Reply with the local scores of the rows that are named, each once."""
    settings = parse(request.privacy, "privacy", Settings.from_run_config).privacy
    ready = {
        number: _ready(site, number, body, request, settings)
        for number, body in site.each(request.parts)
    }
    _set_aside(site, ready)
    scored_parts: dict[int, ScoredPart] = {}
    for number, part in site.each(ready):
        scores = _scores(site, number, part, settings)
        outgoing = site.outgoing(number, part.plan)
        scored_parts[number] = ScoredPart(
            rows=len(part.rows), scores=outgoing.scores(scores)
        )
    site.pay()
    return ScoreReply(ledger=site.ledger.lines(site.store.run), parts=scored_parts)


def _ready(
    site: Site,
    number: int,
    body: ScorePart,
    request: ScoreRequest,
    settings: PrivacySettings,
) -> _Ready:
    guard, source, extracted = Guard(site), site.source(number), site.extracted(number)
    guard.check_plan(source, settings, (SCORES,))
    rows = np.flatnonzero(unpack_bits(body.rows, extracted.rows))
    guard.check_rows(source, len(rows), f"the scores of table {extracted.table!r}")
    saved = _saved(site, body, ModelVersion(request.model_name, request.model_version))
    _check_fits(saved, Fragment.from_json(site.fragment(number)))
    width = saved.encoder.encoder.width
    model = make_model(saved.spec, width, request.device)
    model.parameters = saved.parameters
    if settings.covers_predictions:
        check_scores(model, width)
    plan = plan_prediction(settings, saved.spec.output_scale or 1.0)
    return _Ready(model, saved, rows, plan)


def _saved(site: Site, body: ScorePart, model: ModelVersion) -> SavedModel:
    """Return the part of the model that a request names.

    Raises:
        ModelError: the site does not have it, or another one.
    """
    root = site.state_folder
    if root is None:
        raise ModelError("this site keeps no models: its state-dir is ':memory:'")
    folder = part_folder(root, model, body.model_part)
    if not folder.is_dir():
        raise ModelError(f"this site has no part {body.model_part} of model {model}")
    return SavedModel.load(folder, body.digest)


def _check_fits(saved: SavedModel, fragment: Fragment) -> None:
    """Refuse rows that are not made as those that the model was trained on.

    Raises:
        ModelError: says what differs; of the model nothing that the request has not.
    """
    own = saved.fragment
    for what, found, kept in (
        ("table", fragment.name.lower(), own.name.lower()),
        ("alias", fragment.table, own.table),
        ("features", fragment.features, own.features),
        ("grouping", _grouping(fragment), _grouping(own)),
    ):
        if found != kept:
            raise ModelError(
                f"the model's part is of another table or query: its {what} differs "
                f"from that of {fragment.table!r} in this one"
            )


def _grouping(fragment: Fragment) -> object:
    """Return what a sub-query's columns are made of; its filters may differ."""
    own = fragment.subquery
    return None if own is None else (own.columns, own.groups)


def _set_aside(site: Site, ready: Mapping[int, _Ready]) -> None:
    """Reserve what leaves, or note that nothing covers it.

    Raises:
        SiteError: a budget does not suffice, or the ledger cannot be written.
    """
    sources = {number: site.source(number) for number in ready}
    releases = [
        scored(Shard.of(site, number, sources[number]), part.plan)
        for number, part in ready.items()
    ]
    budgets = Guard(site).budgets(list(sources.values()))
    covered = [Planned(own, 1) for own in releases if own.mechanism is not None]
    site.reserve(covered, budgets)
    site.ledger.note(site.store.run, [own for own in releases if own.mechanism is None])


def _scores(
    site: Site, number: int, part: _Ready, settings: PrivacySettings
) -> FloatArray:
    """Return the scores (k, d_c) of a part's rows, with nothing done to them."""
    features = site.tables.encode(
        number,
        part.saved.encoder,
        part.rows,
        is_private=settings.covers_predictions,
    )
    return part.model.scores(features)
