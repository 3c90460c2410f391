"""What conjugate gradients read of a run's settings."""

from typing import Final

from tp_flower.methods.method import curved_loss
from tp_flower.methods.moments.messages import TRAIN_INFORMATION
from tp_flower.methods.moments.settings import (
    ErrorSettings,
    begins_information,
    error_conflicts,
    has_errors,
    tells_of_errors,
)
from tp_flower.objectives import family_named
from tp_flower.settings.declare import AUTO
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import FITTED


def _preference(settings: Settings) -> int:
    """Prefer conjugate gradients where they can train, and rows are all there.

    Of a coreset's run, only ADMM scores held-out rows once.
    """
    is_plain = not (settings.other_model or settings.is_noisy or settings.is_sampled)
    has_curvature = settings.loss == AUTO or curved_loss(family_named(settings.loss))
    return 2 if is_plain and has_curvature else 0


RULES: Final = Rules(
    groups=(ErrorSettings,),
    reads=names_of(ErrorSettings) | FITTED | {"tolerance", "l2"},
    conflicts=error_conflicts,
    preference=_preference,
    tells=tells_of_errors,
    pads_sums=has_errors,
    begins={TRAIN_INFORMATION: begins_information},
)
