"""How a run goes, as ``prepare`` is told, and what leaves a part in it.

The server says how a run will go; it can limit what the site plans to release, and
cannot say less of it than the site sees for itself.
"""

from typing import Any, Final

import numpy as np

from client_apps.handlers.training_rows import Batches, TrainingRows
from tp_flower.errors import SiteError
from tp_flower.learning.models.local_model import CENTRES as CENTRES_MODEL
from tp_flower.learning.models.local_model import NUMPY_KINDS, ModelSpec
from tp_flower.methods import DP_SGD, JOINING, METHODS, OUTSIDER, SGD, Method
from tp_flower.privacy.plan import (
    CURVATURE,
    GRADIENTS,
    GRAM,
    MOMENTS,
    PARAMETERS,
    SAMPLED_ROWS,
    Schedule,
)
from tp_flower.protocol import Outline, PrivacyTerms, Update, required
from tp_flower.sources.policy import MODELS, ROWS, SCORES

ANNOUNCED: Final = {SGD: ("batch_uses", "batch_rate")}
"""By family, fields of the outline that its plan of releases needs."""


def method_of(outline: Outline) -> Method:
    """Return the method that the run trains by.

    Raises:
        SiteError: there is none of the name, or its runs are prepared otherwise.
    """
    if outline.strategy not in JOINING:
        raise SiteError(
            f"malformed request: 'strategy' is {outline.strategy!r}; allowed: one of "
            f"{', '.join(JOINING)}"
        )
    return METHODS[outline.strategy]


def check_accounts(method: Method, privacy: PrivacyTerms) -> None:
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


def course_of(
    outline: Outline,
    rows: TrainingRows,
    batches: Batches,
    update: Update,
    spec: ModelSpec,
) -> Schedule:
    """Return how the run goes; what the server says of it only limits the run."""
    family = method_of(outline).family
    own: dict[str, Any] = {}
    if update is Update.CONSENSUS:
        own["exchanges"] = required(outline.exchanges, "exchanges")
    for field in ANNOUNCED.get(family, ()):
        own[field] = required(getattr(outline, field), field)
    return Schedule(
        family=family,
        epochs=outline.epochs,
        batches=len(batches.start) - 1,
        # of the plan that the server has sent: it cannot say less
        row_batches=int(np.bincount(batches.rows).max(initial=0)),
        most_joined_rows=int(rows.multiplicity.max(initial=0)),
        has_first_scores=spec.kind not in NUMPY_KINDS,
        output_scale=spec.output_scale or 1.0,
        **own,
    )


def sends_of(outline: Outline, update: Update) -> tuple[str, ...]:
    """What leaves of a part's rows or model where nothing covers it."""
    if update is Update.GIVEN:
        return (required(outline.sends, "sends"),)
    further = {
        Update.LOCAL: (),
        Update.GRAM: (GRAM, MOMENTS),
        Update.CONSENSUS: (PARAMETERS,),
        Update.SUM: (GRADIENTS,),
    }[update]
    return (CURVATURE, *further)


def kinds_of(outline: Outline, update: Update) -> tuple[str, ...]:
    """What will leave of a shard, as its policy calls it."""
    has_rows = update is Update.GIVEN and outline.sends == SAMPLED_ROWS
    return (ROWS if has_rows else MODELS, SCORES)


def check_given(outline: Outline, update: Update, spec: ModelSpec) -> None:
    """Refuse to let a server solve that has not said so, and models it cannot solve."""
    is_given = update is Update.GIVEN
    if is_given != bool(method_of(outline).solvers):
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
