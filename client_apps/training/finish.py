"""The end of a run at a site: its models are saved, and its state is deleted."""

from dataclasses import dataclass
from typing import Any

from client_apps.data.database import cannot_write
from client_apps.data.row_effects import EFFECT, FACTOR, KeyNumbers
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.handlers.column_names import show_names
from client_apps.handlers.encoding import fitted_encoder
from client_apps.handlers.inference import drop_unused_keys
from client_apps.methods.registry import method_of
from client_apps.methods.site_method import SiteMethod
from client_apps.operator.participant import Participant
from client_apps.privacy import ledger_entries
from client_apps.privacy.key_rules import takes_effects, takes_factors
from client_apps.privacy.proposal_checks import contradiction
from client_apps.rounds.site import Site
from client_apps.training.bins import binning_of
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.learning.models.local_model import NUMPY_KINDS
from tp_flower.model_names import ModelVersion, software
from tp_flower.privacy import plan as privacy_plan
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.inference_messages import (
    FinishedPart,
    FinishReply,
    FinishRequest,
)
from tp_flower.protocol.training_messages import MOST_FACTORS


def finish(site: Site, request: FinishRequest) -> FinishReply:
    """Save the models of a successful run, and delete the rest of its state.

    The reply has the run's lines of the ledger, the digests of saved models, and the
    coefficients that may be shown, with the names of their columns.
    """
    parts: dict[int, FinishedPart] = {}
    if request.keep_models:
        # the name becomes a path
        model = ModelVersion(
            required(request.model_name, "model_name"),
            required(request.model_version, "model_version"),
        )
        method = method_of(site.family)
        for part in list(site.parts(method.state)):
            has_moved = method.take_last_step(part, request)
            if not request.is_best:
                part.return_to_best()
            added = _key_part(site, part, request)
            if has_moved or request.has_diverged or added.effects is not None:
                part.releaser.check_clear("sums of scores")
                part.sum_scores(_of_rows(part, added.effects))
            # else they would be one row's score
            sums = None
            if part.data.is_even:
                sums = part.progress.score_sums
            coefficients = _coefficients(site, method, part)
            names = categories = None
            if coefficients is not None:
                columns = part.data.features.shape[1]
                names, categories = show_names(site, part.number, columns)
            parts[part.number] = FinishedPart(
                digest=_keep(site, model, part, added),
                coefficients=coefficients,
                names=names,
                categories=categories,
                score_sums=sums,
            )
    drop_unused_keys(site)
    site.ledger.close(site.store.run)
    account = site.ledger.lines(site.store.run)
    site.round.arrays.clear()
    site.round.is_over = True
    return FinishReply(ledger=account, parts=parts)


@dataclass(frozen=True)
class _KeyPart:
    """What a part's saved model adds to scores for the keys of its rows."""

    effects: KeyNumbers | None = None
    factors: KeyNumbers | None = None


def _key_part(site: Site, part: Participant[Any], request: FinishRequest) -> _KeyPart:
    """Return what the request gives a part's keys, as far as the run proposed it."""
    body = request.parts.get(part.number)
    hashes = part.data.row_keys
    if body is None:
        return _KeyPart()
    settings = site.terms.settings
    for field, takes in (("effects", takes_effects), ("factors", takes_factors)):
        is_taken = takes(site, part.number) and not request.has_diverged
        if getattr(body, field) is not None and (hashes is None or not is_taken):
            proposed = f"{field} = {getattr(settings, field)}"
            raise contradiction(field, proposed, f"{field} of each row")
    if hashes is None:
        return _KeyPart()
    check_sizes(body, trained=len(hashes), outputs=part.model.outputs)
    _check_width(site, body.factors)
    names = part.data.key_names
    return _KeyPart(
        *(
            None if values is None else KeyNumbers.of(kind, names, hashes, values)
            for kind, values in ((EFFECT, body.effects), (FACTOR, body.factors))
        )
    )


def _check_width(site: Site, factors: AnyArray | None) -> None:
    """Refuse more factors of a key than were proposed."""
    if factors is None:
        return
    settings = site.terms.settings
    width = factors.shape[1]
    if width != (settings.factor_width or width) or width > MOST_FACTORS:
        proposed = f"factors = {settings.factors}"
        raise contradiction("factors", proposed, f"{width} of each row")


def _of_rows(part: Participant[Any], effects: KeyNumbers | None) -> FloatArray | None:
    """Return the effects of the trained rows, (n_trained, d_c); None without any."""
    hashes = part.data.row_keys
    if effects is None or hashes is None:
        return None
    return effects.find(hashes)


def _keep(
    site: Site,
    model: ModelVersion,
    part: Participant[Any],
    added: _KeyPart,
) -> str | None:
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
        start=site.terms.settings.start,
        effects=added.effects,
        factors=added.factors,
        bins=binning_of(site, part.number),
    )
    folder = part_folder(site.state_folder, model, part.number)
    try:
        return saved.keep(folder, is_durable=not site.is_simulated)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _coefficients(
    site: Site, method: SiteMethod[Any], part: Participant[Any]
) -> AnyArray | None:
    """Note and return the coefficients (d [+ 1], d_c), if they may leave.

    The coefficients of a privately trained model follow from releases that are already
    paid for, and cost nothing more.
    """
    if not site.source(part.number).policy.coefficients:
        return None
    coefficients = method.coefficients(part)
    if coefficients is not None and not part.data.plan.is_private:
        ledger_entries.note(site, part.number, privacy_plan.COEFFICIENTS)
    return coefficients
