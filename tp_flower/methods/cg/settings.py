"""What conjugate gradients read of a run's settings: they have none of their own."""

from typing import Final

from tp_flower.methods.method import curved_loss
from tp_flower.objectives import family_named
from tp_flower.settings.declare import AUTO
from tp_flower.settings.rules import Rules
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import FITTED


def _preference(settings: Settings) -> int:
    """Prefer conjugate gradients where they can train, and rows are all there.

    Of a coreset's run, only ADMM scores held-out rows once.
    """
    is_plain = not (settings.other_model or settings.is_noisy or settings.is_sampled)
    has_curvature = settings.loss == AUTO or curved_loss(family_named(settings.loss))
    return 2 if is_plain and has_curvature else 0


RULES: Final = Rules(reads=FITTED | {"tolerance", "l2"}, preference=_preference)
