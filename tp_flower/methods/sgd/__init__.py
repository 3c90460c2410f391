"""Stochastic gradient descent, and gradient descent as its baseline."""

from dataclasses import replace
from typing import Final

from tp_flower.methods.method import Method, any_loss, separable_loss
from tp_flower.methods.sgd.messages import TRAIN_SGD, TRAIN_STEP
from tp_flower.protocol.training_messages import Update

SGD: Final = Method(
    name="sgd",
    family="sgd",
    actions=(TRAIN_SGD, TRAIN_STEP),
    epochs=30,
    few_epochs=10,
    rules="tp_flower.methods.sgd.settings:RULES",
    updates=(Update.SUM,),
    sends_gradients=True,
    takes_loss=separable_loss,
    plans_noise=True,
)
GD: Final = replace(
    SGD,
    name="gd",
    epochs=100,
    few_epochs=100,
    is_full_batch=True,
    takes_loss=any_loss,
)
