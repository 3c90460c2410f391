"""The end of a run at a site: keep its parts of the model, and forget all else.

What the site keeps is named by the server and counted by its digest. Of a linear model
whose table's policy says so the coefficients leave: numbers for the features that the
server has named, of categories by their keyed hash.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client_apps.data.run_store import cannot_write
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.operator.participant import Part
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import coefficients
from client_apps.rounds.site import Site
from tp_flower.features.encoder import SiteEncoder
from tp_flower.learning.models.local_model import NUMPY_KINDS, LinearModel, ModelSpec
from tp_flower.model_names import ModelVersion
from tp_flower.protocol import (
    AnyArray,
    FinishedPart,
    FinishReply,
    FinishRequest,
    required,
)
from tp_flower.query import Fragment
from tp_flower.software import software


def finish(site: Site, request: FinishRequest) -> FinishReply:
    """Keep the models of a run that went well, and forget all else of it.

    The reply says what the run has released, and what that has cost; of models that
    are kept their digests, and the coefficients that may be shown.
    """
    parts: dict[int, FinishedPart] = {}
    if request.keep_models:
        parts = _keep(site, _model(request), list(site.parts()))
    site.ledger.close(site.store.run)
    account = site.ledger.lines(site.store.run)
    site.round.end_run()
    return FinishReply(ledger=account, parts=parts)


def _model(request: FinishRequest) -> ModelVersion:
    """Return the name that the parts are kept under; it becomes a path."""
    name = required(request.model_name, "model-name")
    return ModelVersion(name, required(request.model_version, "model-version"))


def _keep(
    site: Site, model: ModelVersion, parts: Sequence[Part]
) -> dict[int, FinishedPart]:
    """Save the parts' models, as they are now; return what is said of each.

    Raises:
        SiteError: they cannot be written.
        ModelError: another model has this name and version.
    """
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
    shown: dict[int, AnyArray] = {}
    noted = []
    for part in parts:
        model, source = part.shard.model, site.source(part.number)
        if not (source.policy.coefficients and isinstance(model, LinearModel)):
            continue
        if not part.outgoing.plan.is_private:
            noted.append(coefficients(part.number, source, Guard(site)))
        shown[part.number] = model.weights
    site.ledger.note(site.store.run, noted)
    return shown
