"""What gradient descent reads of a run's settings, which other methods read, too."""

from collections.abc import Iterator
from typing import Final

from tp_flower.settings.rules import Rules
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import FITTED


def _conflicts(settings: Settings) -> Iterator[str]:
    """Refuse a batch size where the only batch has all rows."""
    if settings.method.is_full_batch and settings.batch_size:
        yield (
            f"batch-size: {settings.batch_size!r} does not go with strategy "
            f"{settings.method_name!r}, whose one batch has all joined rows: leave it "
            "0, or use sgd"
        )


RULES: Final = Rules(
    reads=FITTED | {"tolerance", "l2", "batch_size", "learning_rate"},
    conflicts=_conflicts,
)
