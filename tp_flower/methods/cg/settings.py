"""What conjugate gradients read of a run's settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tp_flower.methods.method import curved_loss
from tp_flower.methods.moments.messages import TRAIN_INFORMATION
from tp_flower.objectives import family_named, names_of_losses
from tp_flower.settings.declare import AUTO, OneOf, Readers, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.run import JOINED, TRAIN
from tp_flower.settings.settings import COVERED, Settings
from tp_flower.settings.training import FITTED, NONE

MODEL: Final = "model"
ROBUST: Final = "robust"
CURVATURE: Final = "curvature"
SQUARES: Final = "squared slope"
"""Of a row's loss at the model's score, by which its columns are weighted."""

WEIGHED: Final = (
    "for standard errors, sums over the joined rows of the products of two columns, in "
    "which it says how much each row weighs: departing from the protocol, it reads "
    "single rows from them"
)


@dataclass(frozen=True)
class CgSettings:
    """Strategy "cg": what else it tells of a linear model."""

    readers = Readers(
        of_methods=True, refusal="is for strategy 'cg' only, not {strategy!r}"
    )

    standard_errors: str = setting(
        NONE,
        'Standard errors of coefficients, after training: "model" takes the loss\'s '
        'own variance for the label\'s, "robust" does not (HC0); "none" sends nothing '
        'for them. Policies allow it by releases.covariance. Strategy "moments" has '
        "those of least squares without the setting.",
        OneOf((NONE, MODEL, ROBUST)),
    )


def has_errors(settings: Settings) -> bool:
    """Return whether a run trains, or explains, a model with standard errors."""
    is_read = "standard_errors" in settings.rules.reads
    return is_read and settings.of(CgSettings).standard_errors != NONE


def _begins(settings: Settings) -> bool:
    return settings.mode == TRAIN and has_errors(settings)


def _tells(settings: Settings) -> str:
    return WEIGHED if has_errors(settings) else ""


def weightings_of(settings: Settings) -> tuple[str, ...]:
    """Return by what the joined rows are weighed, once each, for standard errors."""
    if settings.of(CgSettings).standard_errors == ROBUST:
        return (CURVATURE, SQUARES)
    return (CURVATURE,)


def _conflicts(settings: Settings) -> Iterator[str]:
    kind = settings.of(CgSettings).standard_errors
    if kind == NONE:
        return
    asked = f"standard-errors: {kind!r}"
    if settings.loss != AUTO and not family_named(settings.loss).has_likelihood:
        able = [name for name in names_of_losses() if family_named(name).has_likelihood]
        yield (
            f"{asked} needs the likelihood of a label, which loss {settings.loss!r} "
            f"is not; {', '.join(able)} are"
        )
    for covered in settings.privacy.covered(*COVERED):
        yield f"{asked} would not count the noise of privacy.{covered}: leave it out"
    if settings.validation_share:
        yield (
            f"{asked} is for a model at its optimum, and rows that validate end "
            "training before: leave validation-fraction 0, and effects, factors and "
            "bins as they are"
        )
    if settings.row_weight != JOINED:
        yield (
            f"{asked} does not say how row-weight = {settings.row_weight!r} changes a "
            "row's variance: leave one of them out"
        )
    if settings.is_sampled:
        yield f"{asked} is for all joined rows, not for a coreset: leave it out"


def _preference(settings: Settings) -> int:
    """Prefer conjugate gradients where they can train, and rows are all there.

    Of a coreset's run, only ADMM scores held-out rows once.
    """
    is_plain = not (settings.other_model or settings.is_noisy or settings.is_sampled)
    has_curvature = settings.loss == AUTO or curved_loss(family_named(settings.loss))
    return 2 if is_plain and has_curvature else 0


RULES: Final = Rules(
    groups=(CgSettings,),
    reads=names_of(CgSettings) | FITTED | {"tolerance", "l2"},
    conflicts=_conflicts,
    preference=_preference,
    tells=_tells,
    pads_sums=has_errors,
    begins={TRAIN_INFORMATION: _begins},
)
