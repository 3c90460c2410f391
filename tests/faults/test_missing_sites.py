"""Training without a site for a while, and training that does not come to an end."""

from dataclasses import replace
from pathlib import Path

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
from tp_flower.protocol.messages import Action
from tp_flower.settings import PrivacySettings

__all__ = ["place", "same_noise"]
SHOP, US = 2, 3
PATIENT = {"on_missing": "stale", "max_stale": 3, "num_epochs": 10}
CLEAR = PrivacySettings(scores="clear", unions="clear")
"""Last scores and sums have masks that do not cancel those of new ones."""
SOARING = {"learning_rate": 1e6, "num_epochs": 200, "l2": 1.0}
MLP = {"model": "mlp", "hidden_sizes": (4,), "batch_size": 6, "learning_rate": 1e12}


def gone(node: int, first: int, last: int) -> Schedule:
    """Let no message reach a site, which is not the shop's, in some epochs of ADMM."""
    epoch = 0

    def schedule(action: str, at: int, _: int) -> Fault | None:
        nonlocal epoch
        # the shop is asked first, once in an epoch
        epoch += (action, at) == (Action.ADMM, SHOP)
        return Fault.DROP_REQUEST if at == node and first <= epoch <= last else None

    return schedule


def federation_of(place: Path, name: str, **settings: object) -> Federation:
    """Return sites that no run has asked yet, and a method that can wait for them."""
    own = {**METHODS[name].own, **PATIENT, **settings}
    folder = place / "-".join((name, *map(str, own.values())))
    own = {"privacy": CLEAR, **own}
    federation = Federation(folder, replace(METHODS[name], own=own))
    federation.start()
    return federation


@pytest.mark.parametrize("name", ["admm", "gram", "consensus"])
def test_training_goes_on_with_the_last_scores_of_a_site_that_is_missing(place, name):
    federation = federation_of(place, name)
    expected = federation.train()
    federation.start()
    ended = federation.train(gone(US, 3, 5))
    assert ended.error is None
    assert any(fault is Fault.DROP_REQUEST for *_, fault in ended.happened)
    # it was asked again when it was back: the model has come to the same place
    assert len(ended.losses) == 10
    assert ended.losses[4] != expected.losses[4]
    assert ended.losses[-1] == pytest.approx(expected.losses[-1], rel=0.02)
    federation.check_nothing_left()


def test_a_site_that_is_missing_for_too_long_stops_the_run(place):
    federation = federation_of(place, "gram", num_epochs=9)
    expected = federation.train()
    federation.start()
    ended = federation.train(gone(US, 3, 6))
    assert isinstance(ended.error, MissingSiteError)
    assert "no reply to train.admm from site 'us' (table 'c')" in str(ended.error)
    assert len(ended.losses) == 5
    assert federation.can_be_resumed
    again = federation.train()
    assert again.error is None
    assert len(again.losses) == 9
    assert again.losses[:5] == ended.losses
    assert again.losses[-1] == pytest.approx(expected.losses[-1], rel=0.02)


def test_nobody_goes_on_without_a_site_that_has_sent_nothing_yet(place):
    federation = federation_of(place, "gram", num_epochs=4)
    ended = federation.train(gone(US, 1, 1))
    assert isinstance(ended.error, MissingSiteError)
    assert not ended.losses
    assert federation.can_be_resumed


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
