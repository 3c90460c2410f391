"""Coresets: a weighted sample of the joined rows, and solvers on it at the server."""

from dataclasses import replace
from typing import Final

from tp_flower.learning.models.local_model import CENTRES
from tp_flower.methods.coreset.messages import (
    TRAIN_DRAW,
    TRAIN_MEASURE,
    TRAIN_ROWS,
    TRAIN_WEIGH,
)
from tp_flower.methods.method import Method, least_squares
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update

RIDGE: Final = Method(
    name="coreset-ridge",
    family="coreset",
    actions=(TRAIN_MEASURE, TRAIN_DRAW, TRAIN_WEIGH, TRAIN_ROWS, Action.CONSENSUS),
    epochs=1,
    rules="tp_flower.methods.coreset.settings:RIDGE_RULES",
    updates=(Update.GIVEN,),
    sends_a_row_once=False,
    takes_loss=least_squares,
    sampled_rows=2000,
    solvers=("exact", "saga"),
    plans_noise=True,
)
KMEANS: Final = replace(
    RIDGE,
    name="coreset-kmeans",
    rules="tp_flower.methods.coreset.settings:KMEANS_RULES",
    holds_out=False,
    only_model=CENTRES,
    solvers=("kmeans++", "distdim"),
)
"""The method without a label."""
