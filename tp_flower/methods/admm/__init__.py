"""ADMM: over the tables of a join, and over the shards of a table."""

from typing import Final

from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.method import Method, separable_loss
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update

ADMM: Final = Method(
    name="admm",
    family="admm",
    actions=(TRAIN_ADMM, Action.CONSENSUS),
    epochs=100,
    few_epochs=12,
    rules="tp_flower.methods.admm.settings:RULES",
    updates=(Update.GRAM, Update.CONSENSUS),
    unions=("gram", "consensus"),
    solves_tables=True,
    takes_loss=separable_loss,
    plans_noise=True,
)
