"""How many joined rows a mini-batch has where the settings do not say."""

import math

from tp_flower.protections import DP_SGD
from tp_flower.settings import Settings

BATCHES_PER_EPOCH = 100
"""Automatic batch size: 1/100 of the joined rows (paper, section 8)."""

PRIVATE_BATCHES_PER_EPOCH = 20
"""The same for DP-SGD: a row pays for every batch that it is in, and the noise of a
batch is the less beside its gradient the more rows it has."""


def choose_batch_size(settings: Settings, joined_rows: int) -> int:
    """Return B, at most N."""
    if settings.method.is_full_batch:
        return joined_rows
    is_private = settings.privacy.features == DP_SGD
    batches = PRIVATE_BATCHES_PER_EPOCH if is_private else BATCHES_PER_EPOCH
    size = settings.batch_size or math.ceil(joined_rows / batches)
    return min(size, joined_rows)
