"""Settings of a run: each declared once, with its default, range, readers and text."""

from tp_flower.settings.conflicts import uncounted, weight_problems
from tp_flower.settings.coreset import (
    DISTDIM,
    IMPORTANCE,
    MOST_CLUSTERS,
    MOST_ROWS,
    UNIFORM,
)
from tp_flower.settings.data import MAX_JOINED_ROWS, entity_named
from tp_flower.settings.declare import Setting, declared
from tp_flower.settings.personalised import (
    BY_DATA,
    BY_FEATURES,
    BY_MODELS,
    BY_ROWS,
    EVERYTHING,
    INTERCEPT,
    LAST,
    SUMMARIES,
    named_coordinates,
)
from tp_flower.settings.privacy import PrivacySettings
from tp_flower.settings.run import (
    AUTO,
    DEVICES,
    EVALUATE,
    EXPLAIN,
    LABEL_SITE,
    MEAN,
    PREDICT,
    SERVER,
    STALE,
    TRAIN,
    columns_of,
)
from tp_flower.settings.settings import Settings
from tp_flower.settings.values import GROUPS, KEYS, SETTINGS

__all__ = [
    "AUTO",
    "BY_DATA",
    "BY_FEATURES",
    "BY_MODELS",
    "BY_ROWS",
    "DEVICES",
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
    "MAX_JOINED_ROWS",
    "MEAN",
    "MOST_CLUSTERS",
    "MOST_ROWS",
    "PREDICT",
    "SERVER",
    "SETTINGS",
    "STALE",
    "SUMMARIES",
    "TRAIN",
    "UNIFORM",
    "PrivacySettings",
    "Setting",
    "Settings",
    "columns_of",
    "declared",
    "entity_named",
    "named_coordinates",
    "uncounted",
    "weight_problems",
]
