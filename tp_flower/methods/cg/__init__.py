"""Conjugate gradients, for linear models without noise: the fewest rounds."""

from typing import Final

from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.cg.messages import TRAIN_DESCENT, TRAIN_DIRECTION
from tp_flower.methods.method import Method, curved_loss
from tp_flower.methods.moments.messages import TRAIN_INFORMATION
from tp_flower.protocol.training_messages import Update

CG: Final = Method(
    name="cg",
    family="cg",
    actions=(TRAIN_DESCENT, TRAIN_DIRECTION, TRAIN_INFORMATION),
    epochs=100,
    rules="tp_flower.methods.cg.settings:RULES",
    updates=(Update.GRAM,),
    only_model=LINEAR,
    takes_loss=curved_loss,
)
