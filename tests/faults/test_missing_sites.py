"""Training that a site leaves, and training that does not come to an end."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.peers.faulty_grid import Fault, Schedule
from tests.support.peers.faulty_runs import (
    METHODS,
    Federation,
    Method,
    place,
    same_noise,
)
from tp_flower.errors import DivergedError, MissingSiteError, ReplyError
from tp_flower.methods.admm.messages import TRAIN_ADMM

__all__ = ["place", "same_noise"]
SHOP = 2
US = 3
SOARING = {"learning_rate": 1e6, "num_epochs": 200, "l2": 1.0}
MLP = {"model": "mlp", "hidden_sizes": (4,), "batch_size": 6, "learning_rate": 1e12}


def gone(node: int, first: int, last: int) -> Schedule:
    """Let no message reach a site, which is not the shop's, in some epochs of ADMM."""
    epoch = 0

    def schedule(action: str, at: int, _: int) -> Fault | None:
        nonlocal epoch
        # the shop is asked first, once in an epoch
        epoch += (action, at) == (TRAIN_ADMM, SHOP)
        return Fault.DROP_REQUEST if at == node and first <= epoch <= last else None

    return schedule


def test_a_site_that_is_missing_stops_the_run_until_it_is_back(place):
    method = METHODS["gram"]
    own = {**method.own, "num_epochs": 9}
    federation = Federation(place / "gram", replace(method, own=own))
    federation.start()
    expected = federation.train()
    federation.start()
    ended = federation.train(gone(US, 3, 3))
    assert isinstance(ended.error, MissingSiteError)
    assert "no reply to train.admm from site 'us' (table 'c')" in str(ended.error)
    assert len(ended.losses) == 2
    assert federation.can_be_resumed
    again = federation.train()
    assert again.error is None
    assert again.losses == expected.losses


@pytest.mark.parametrize(
    "own", [{"batch_size": 6, **SOARING}, {**MLP, "num_epochs": 20}], ids=["sgd", "mlp"]
)
def test_training_that_diverges_stops_with_the_last_checkpoint(place, own):
    federation = Federation(place / own.get("model", "linear"), Method("sgd", own=own))
    federation.start()
    ended = federation.train()
    assert isinstance(ended.error, DivergedError | ReplyError)
    assert "diverged" in str(ended.error)
    assert federation.can_be_resumed
    assert not ended.parameters
    assert np.isfinite(ended.losses).all()
    # it is the same again: nothing of what went wrong was kept
    again = federation.train()
    assert str(again.error) == str(ended.error)
    assert again.losses == ended.losses
