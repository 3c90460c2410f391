"""What training from second moments reads of a run's settings."""

from collections.abc import Iterator
from typing import Final

from tp_flower.methods.moments.messages import TRAIN_MOMENTS
from tp_flower.settings.rules import Rules
from tp_flower.settings.run import CLASSIFICATION, TRAIN
from tp_flower.settings.settings import Settings


def _conflicts(settings: Settings) -> Iterator[str]:
    strategy = settings.method_name
    if settings.num_epochs > 1:
        yield (
            f"num-epochs: strategy {strategy!r} solves once, not "
            f"{settings.num_epochs} times: leave it 0"
        )
    if settings.l1 and settings.task == CLASSIFICATION:
        yield f"l1: strategy {strategy!r} takes none for classes: leave it 0"


def _begins(settings: Settings) -> bool:
    return settings.mode == TRAIN and TRAIN_MOMENTS in settings.method.actions


RULES: Final = Rules(
    reads=frozenset({"sample", "test_split", "validation_fraction", "l1", "l2"}),
    conflicts=_conflicts,
    begins={TRAIN_MOMENTS: _begins},
)
