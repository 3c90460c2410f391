"""The state of a participant: its codec, and that no two arrays have one name."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from client_apps.data.run_store import Entry
from client_apps.methods import registry
from client_apps.operator.participant import Participant, ShardData
from client_apps.operator.releases import Releaser
from client_apps.operator.state import Progress, Stateless, read_state, write_state
from tests.support.examples.site_examples import make_site, together
from tp_flower.errors import LostStateError, MessageError
from tp_flower.learning.models.local_model import LinearModel
from tp_flower.randomness import NoiseSource


@dataclass
class Inner:
    """A state within a state."""

    centre: np.ndarray
    weight: float | None = None


@dataclass
class Outer:
    """A state of every kind of field."""

    count: int = 0
    weight: float = 0.0
    bytes: np.ndarray | None = None
    inner: Inner | None = None


STATES = {
    "empty": Outer(),
    "numbers": Outer(count=3, weight=-0.5),
    "bytes": Outer(bytes=np.arange(4, dtype=np.uint8)),
    "inner": Outer(count=1, inner=Inner(np.ones(2), 0.25)),
    "without a weight": Outer(inner=Inner(np.zeros(0))),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_read_as_it_was_written(name):
    state = STATES[name]
    arrays = write_state(state)
    again = read_state(Outer, {**arrays, "model": np.ones(3)})
    for key, array in write_state(again).items():
        assert_array_equal(array, arrays.pop(key))
        assert not np.shares_memory(array, arrays.get(key, np.zeros(0)))
    assert not arrays
    assert again.count == state.count
    assert again.weight == state.weight


def test_the_names_of_arrays_are_those_of_fields():
    state = Outer(inner=Inner(np.ones(2), 0.25))
    names = {"count", "weight", "inner-centre", "inner-weight"}
    assert set(write_state(state)) == names
    # as sites of earlier versions have stored them
    progress = write_state(Progress(scores_number=7))
    assert_array_equal(progress["scores_number"], [7.0])


@pytest.mark.parametrize("family", registry.ROOMS)
def test_every_method_has_a_state_that_can_be_stored(family):
    state = registry.method_of(family).state
    common = set(Progress.__dataclass_fields__)
    assert not common & set(state.__dataclass_fields__)


@pytest.fixture
def site(tmp_path):
    return make_site(tmp_path)


def participant(state, parameters):
    model = LinearModel(2, 1, intercept=False)
    model.parameters = np.array(parameters)
    data = ShardData(np.zeros((1, 2)), np.ones(1), np.zeros(1, np.bool_), 1, 0.0)
    return Participant(0, data, model, state, Releaser(0, data.plan, NoiseSource()))


def test_what_becomes_none_is_no_longer_stored(site):
    site.save(participant(Outer(inner=Inner(np.ones(2))), [1.0, 2.0]))
    assert (0, "inner-centre") in site.round.arrays
    site.save(participant(Outer(), [1.0, 2.0]))
    names = {name for _, name in site.round.arrays}
    assert names == {"model", "sums", "count", "weight"}


def test_a_state_takes_no_name_of_what_all_participants_have(site):
    @dataclass
    class Taken:
        sums: int = 0

    with pytest.raises(ValueError, match="Taken: the name sums is taken"):
        site.save(participant(Taken(), [1.0, 2.0]))


def test_a_model_that_is_not_finite_is_not_stored(site):
    with pytest.raises(Exception, match="no longer finite"):
        site.save(participant(Stateless(), [1.0, np.inf]))
    assert not site.round.arrays


def test_the_state_of_an_older_version_counts_as_lost(site):
    """It does not say by which method the run trains: the rounds are sent again."""
    with pytest.raises(MessageError, match="no model has been prepared in this run"):
        _ = site.family
    site.save(participant(Stateless(), [1.0, 2.0]))
    with together(site):
        site.store.save("part-0", Entry({}, {}))
        with pytest.raises(LostStateError, match="has lost its state"):
            _ = site.family
