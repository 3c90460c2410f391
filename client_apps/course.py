"""How a run goes, as ``prepare`` is told, and what leaves a part in it.

The server says how a run will go; it can limit what the site plans to release, and
cannot say less of it than the site sees for itself.
"""

from typing import Any, Final

import numpy as np

from client_apps.orders import Order
from client_apps.rows import Batches, TrainingRows
from tp_flower.errors import SiteError
from tp_flower.learning.centres import CENTRES as CENTRES_MODEL
from tp_flower.learning.models import NUMPY_KINDS, ModelSpec
from tp_flower.methods import CORESET, METHODS, PERSONAL, SGD, Method
from tp_flower.privacy.plan import (
    CENTRES,
    CURVATURE,
    GRADIENTS,
    GRAM,
    MOMENTS,
    PARAMETERS,
    SAMPLED_ROWS,
    Course,
)
from tp_flower.privacy.policy import MODELS, ROWS, SCORES
from tp_flower.protocol import Update
from tp_flower.settings import PrivacySettings, uncounted

JOINING: Final = tuple(n for n, own in METHODS.items() if own.family != PERSONAL)
"""The strategies whose runs are prepared by this message."""
MOST_STEPS: Final = 1_000_000


def method_of(header: Order) -> Method:
    """Return the method that the run trains by."""
    return METHODS[header.order("course").text("strategy", JOINING)]


def check_counted(method: Method, settings: PrivacySettings) -> None:
    """Refuse mechanisms whose cost per row is not known for the method.

    Raises:
        SiteError: the accounts would be too low.
    """
    sent = "rows as they are" if method.family == CORESET else "expanded rows"
    for key in uncounted(method, settings):
        raise SiteError(
            f"privacy.{key} is of methods that send a row of a table once, with "
            f"noise, not of those on {sent}"
        )


def course_of(
    header: Order,
    rows: TrainingRows,
    batches: Batches,
    update: Update,
    spec: ModelSpec,
) -> Course:
    """Return how the run goes; what the server says of it only limits the run."""
    told, family = header.order("course"), method_of(header).family
    own: dict[str, Any] = {}
    if update is Update.CONSENSUS:
        own["exchanges"] = told.count("exchanges", low=1, most=MOST_STEPS)
    if family == SGD:
        own["batch_uses"] = told.count("batch-uses", most=MOST_STEPS)
        own["batch_rate"] = told.number("batch-rate", high=1.0)
    return Course(
        family=family,
        epochs=told.count("epochs", most=MOST_STEPS),
        batches=len(batches.start) - 1,
        # of the plan that the server has sent: it cannot say less
        row_batches=int(np.bincount(batches.rows).max(initial=0)),
        most_joined_rows=int(rows.multiplicity.max(initial=0)),
        has_first_scores=spec.kind not in NUMPY_KINDS,
        output_scale=spec.output_scale or 1.0,
        **own,
    )


def sends_of(header: Order, update: Update) -> tuple[str, ...]:
    """What leaves of a part's rows or model where nothing covers it."""
    if update is Update.GIVEN:
        return (_sampled(header),)
    further = {
        Update.LOCAL: (),
        Update.GRAM: (GRAM, MOMENTS),
        Update.CONSENSUS: (PARAMETERS,),
        Update.SUM: (GRADIENTS,),
    }[update]
    return (CURVATURE, *further)


def kinds_of(header: Order, update: Update) -> tuple[str, ...]:
    """What will leave of a shard, as its policy calls it."""
    has_rows = update is Update.GIVEN and _sampled(header) == SAMPLED_ROWS
    return (ROWS if has_rows else MODELS, SCORES)


def check_given(header: Order, update: Update, spec: ModelSpec) -> None:
    """Refuse to let a server solve that has not said so, and models it cannot solve.

    Raises:
        SiteError: strategy, update and model do not go together.
    """
    is_given = update is Update.GIVEN
    if is_given != (method_of(header).family == CORESET):
        raise SiteError(
            f"malformed request: update {update.value!r} does not go with strategy "
            f"{header.order('course').text('strategy')!r}: {Update.GIVEN.value!r} is "
            "of those that solve on a coreset, and they have no other"
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


def _sampled(header: Order) -> str:
    """Return what of the sampled rows the server solves from."""
    return header.order("course").text("sends", (SAMPLED_ROWS, CENTRES))
