"""Settings of a run: each declared once, with its default, range, readers and text."""

from tp_flower.settings.declare import Setting, declared
from tp_flower.settings.privacy import PrivacySettings
from tp_flower.settings.run import (
    AUTO,
    EVALUATE,
    EXPLAIN,
    LABEL_SITE,
    MEAN,
    PREDICT,
    SERVER,
    STALE,
    TRAIN,
    columns_of,
    entity_named,
)
from tp_flower.settings.settings import (
    GROUPS,
    KEYS,
    SETTINGS,
    Settings,
    weight_problems,
)
from tp_flower.settings.training import (
    BY_ROWS,
    DISTDIM,
    EVERYTHING,
    IMPORTANCE,
    INTERCEPT,
    LAST,
    UNIFORM,
    named_coordinates,
)

__all__ = [
    "AUTO",
    "BY_ROWS",
    "DISTDIM",
    "EVALUATE",
    "EVERYTHING",
    "EXPLAIN",
    "GROUPS",
    "IMPORTANCE",
    "INTERCEPT",
    "KEYS",
    "LABEL_SITE",
    "LAST",
    "MEAN",
    "PREDICT",
    "SERVER",
    "SETTINGS",
    "STALE",
    "TRAIN",
    "UNIFORM",
    "PrivacySettings",
    "Setting",
    "Settings",
    "columns_of",
    "declared",
    "entity_named",
    "named_coordinates",
    "weight_problems",
]
