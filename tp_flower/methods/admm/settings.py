"""Settings of ADMM, over the tables and over the shards of a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tp_flower.settings.declare import AUTO, BY_METHOD, Range, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.settings import Settings
from tp_flower.settings.training import FITTED, GRAM, LocalSettings


@dataclass(frozen=True)
class AdmmSettings:
    """ADMM, over the tables and over the shards of a table."""

    readers = BY_METHOD

    rho: float = setting(
        0.0,
        "ADMM penalty; 0 = from the curvature of the loss, then residual balancing.",
        Range(0),
    )
    over_relaxation: float = setting(
        0.0,
        "ADMM over-relaxation, below 2; 1 = off, 0 = 1.5, or 1 under noise.",
        Range(0, 2),
    )


def _preference(settings: Settings) -> int:
    """Prefer ADMM to all others where a setting of its own is set."""
    values = settings.of(AdmmSettings)
    is_tuned = (
        values.rho
        or values.over_relaxation
        or settings.local_epochs
        or settings.lou != AUTO
    )
    return 3 if is_tuned else 1


def _conflicts(settings: Settings) -> Iterator[str]:
    if settings.lou == GRAM and settings.other_model:
        yield (
            f"lou: 'gram' needs linear models, but {settings.other_model!r} is set: "
            "use auto or consensus"
        )


RULES: Final = Rules(
    groups=(AdmmSettings, LocalSettings),
    reads=names_of(AdmmSettings)
    | FITTED
    | {"tolerance", "l2", "lou", "local_epochs", "learning_rate"},
    conflicts=_conflicts,
    preference=_preference,
)
