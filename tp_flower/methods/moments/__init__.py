"""Aggregates only: linear models from the second moments of the joined rows."""

from typing import Final

from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.method import Method, least_squares
from tp_flower.methods.moments.messages import (
    TRAIN_MOMENTS,
    TRAIN_SOLUTION,
    TRAIN_SOLVE,
)
from tp_flower.protocol.training_messages import Update

MOMENTS: Final = Method(
    name="moments",
    family="moments",
    actions=(TRAIN_MOMENTS, TRAIN_SOLVE, TRAIN_SOLUTION),
    epochs=1,
    rules="tp_flower.methods.moments.settings:RULES",
    updates=(Update.GIVEN,),
    only_model=LINEAR,
    solves_tables=True,
    is_prepared=False,
    sends_scores=False,
    keeps_labels=True,
    is_compared=True,
    takes_loss=least_squares,
    tells="the second moments of the joined rows: for each two columns of the tables, "
    "the label among them, the sum of their products: of single rows nothing, unless a "
    "column, a filter or a key marks one",
    plans_noise=True,
)
