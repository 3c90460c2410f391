"""Personalised models tied by a graph of similar sites: functions on arrays.

Source: Zhao, Liu, Jiang, He, "Communication Efficient Training of Federated Model Over
Unbalanced Labels" (draft). Each module says what the draft leaves open, and what it
corrects.
"""

from typing import Final

from tp_flower.methods.method import Method, bounded_loss
from tp_flower.methods.personalised.messages import (
    TRAIN_PERSONAL,
    TRAIN_PERSONALISE,
    TRAIN_SUMMARISE,
)

PERSONALISED: Final = Method(
    name="personalised",
    family="personal",
    actions=(TRAIN_PERSONALISE, TRAIN_SUMMARISE, TRAIN_PERSONAL),
    epochs=60,
    rules="tp_flower.methods.personalised.settings:RULES",
    joins=False,
    is_prepared=False,
    sends_scores=False,
    keeps_labels=True,
    takes_loss=bounded_loss,
    plans_noise=True,
)
