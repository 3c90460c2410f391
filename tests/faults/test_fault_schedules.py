"""Faults at random: a run ends in the same model, or stops and can be resumed."""

import re

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support.peers.faulty_grid import Fault, forget_processes, rows_in
from tests.support.peers.faulty_runs import place, plain, same_noise
from tp_flower.errors import MissingSiteError, SiteError, TPFlowerError
from tp_flower.protocol.packet import Action

__all__ = ["place", "plain", "same_noise"]

US = 3
SCHEDULES = 50
"""Of each method: 200 in all."""

SCHEDULE = st.dictionaries(
    st.integers(0, 40), st.sampled_from(Fault), min_size=1, max_size=12
)
"""Which faults happen, by how many messages were tried before."""


def check_clear(error: TPFlowerError) -> None:
    """Assert that an error says who could not go on."""
    assert isinstance(error, MissingSiteError | SiteError)
    assert re.search(r"site '(shop|us|uk)'|^'(shop|us|uk)'|node \d", str(error))


@pytest.mark.parametrize("name", ["admm", "gram", "sgd", "sgd-stale"])
def test_random_faults_end_in_the_same_model_or_in_a_clear_stop(plain, name):
    @seed(6)
    @settings(
        max_examples=SCHEDULES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEDULE)
    def check(chosen: dict[int, Fault]) -> None:
        federation, expected = plain(name)
        ended = federation.train(lambda *at: chosen.get(at[-1]))
        if ended.error is not None:
            check_clear(ended.error)
            before = ended.happened
            ended = federation.train()
            ended.happened += before
        ended.check_is(expected)

    check()


@pytest.mark.parametrize("action", [Action.STATISTICS, Action.ADMM, Action.FINISH])
def test_a_site_that_has_lost_its_keys_too_cannot_go_on_and_it_is_said(plain, action):
    federation, expected = plain("gram")

    def lose_all(asked: str, node: int, _: int) -> None:
        if (asked, node) == (action, US):
            forget_processes()
            forget = "DELETE FROM entries WHERE run <> 'labels'"
            rows_in(federation.database("us"), forget)

    ended = federation.train(lose_all)
    assert isinstance(ended.error, SiteError)
    match = r"^site 'us'.*\(it has lost its state, and cannot be brought up to date; "
    assert re.search(match + "start the run again", str(ended.error))
    # what the others and the server know is not thrown away with it
    assert federation.can_be_resumed
    federation.start()
    federation.train().check_is(expected)
