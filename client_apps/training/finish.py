"""The end of a run at a site: its models are saved, and its state is deleted."""

from client_apps.data.database import cannot_write
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.boost import add_trees
from client_apps.operator import participant
from client_apps.privacy import ledger_entries
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.learning.models.local_model import NUMPY_KINDS, LinearModel
from tp_flower.learning.models.trees import TreeModel
from tp_flower.model_names import ModelVersion, software
from tp_flower.privacy import plan as privacy_plan
from tp_flower.protocol.codec import required
from tp_flower.protocol.inference_messages import (
    FinishedPart,
    FinishReply,
    FinishRequest,
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
