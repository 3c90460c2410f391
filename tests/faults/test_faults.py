"""Whatever goes wrong, a run ends in the model of one where nothing does.

Or it stops, says who could not go on, and can be resumed.
"""

import re

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support.peers.faulty_grid import (
    CRASHES,
    KILLS,
    LATE,
    LOSSES,
    PASSED,
    PASSING,
    Fault,
    Schedule,
    forget_processes,
    rows_in,
)
from tests.support.peers.faulty_runs import METHODS, place, plain, same_noise
from tp_flower.errors import MissingSiteError, SiteError, TPFlowerError
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.protocol.messages import Action

__all__ = ["place", "plain", "same_noise"]
US = 3
SHARES = 4
SCHEDULE = st.dictionaries(
    st.integers(0, 40), st.sampled_from(Fault), min_size=1, max_size=12
)
"""Which faults happen, by how many messages were tried before."""


def share_of(number: int) -> list[Fault]:
    """Faults that one message can meet, one after the other; no more than two crashes.

    All shares together are all that pass.
    """
    ends = (*CRASHES, *LATE, *PASSED)
    chosen = [fault for fault in PASSING if fault not in ends][number::SHARES]
    for kind in (CRASHES, LATE, PASSED):
        chosen += kind[number::SHARES]
    return sorted(chosen, key=list(Fault).index)


class EachOf:
    """Let every message suffer some faults, one at a try, before it passes."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults
        self._left: dict[tuple[str, int], list[Fault]] = {}

    def __call__(self, action: str, node: int, _: int) -> Fault | None:
        left = self._left.setdefault((action, node), list(self._faults))
        return left.pop(0) if left else None


@pytest.mark.cases(
    "admm-0",
    "sgd-1",
    "personalised-3",
    "cg-0",
    "boost-1",
    "consensus-2",
    "gram-3",
    "dp-sgd-0",
    "statistics-1",
    "labels-2",
    "coreset-3",
    "sgd-sharded-2",
)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", METHODS)
def test_what_passes_is_put_up_with(plain, name, share):
    federation, expected = plain(name)
    faults = share_of(share)
    ended = federation.train(EachOf(faults))
    ended.check_is(expected)
    federation.check_nothing_left()
    # every action has met every fault; a description has nothing to commit
    met = {(action, fault) for action, _, fault in ended.happened}
    actions = {action for action, _ in met}
    for action in actions - {Action.DESCRIBE}:
        assert {fault for asked, fault in met if asked == action} == {*faults}, action


def at_first(action: str, node: int, *faults: Fault) -> Schedule:
    """Let one message suffer faults, one at a try."""
    left = list(faults)

    def schedule(asked: str, at: int, _: int) -> Fault | None:
        return left.pop(0) if left and (asked, at) == (action, node) else None

    return schedule


def last_of_each(asked: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Every action with the node that was asked last."""
    return list(dict(asked).items())


@pytest.mark.cases("cg", "sgd-sharded", "boost", "personalised")
@pytest.mark.parametrize("name", METHODS)
def test_a_site_that_has_lost_its_state_is_brought_up_to_date(plain, name):
    federation, expected = plain(name)
    turn = list(METHODS).index(name)
    for number, (action, node) in enumerate(last_of_each(expected.asked)):
        federation.start()
        fault = LOSSES[(turn + number) % len(LOSSES)]
        ended = federation.train(at_first(action, node, fault))
        assert ended.happened == [(action, node, fault)]
        ended.check_is(expected)
        federation.check_nothing_left()


@pytest.mark.cases("cg", "gram", "boost", "personalised")
@pytest.mark.parametrize("name", METHODS)
def test_a_server_that_is_killed_at_every_action_ends_in_the_same_model(plain, name):
    federation, expected = plain(name)
    kills = {at: list(KILLS) for at in last_of_each(expected.asked)}

    def schedule(action: str, node: int, _: int) -> Fault | None:
        left = kills.get((action, node))
        return left.pop() if left else None

    ended = federation.train(schedule)
    ended.check_is(expected)
    assert not any(kills.values())


def check_clear(error: TPFlowerError) -> None:
    """Assert that an error says who could not go on."""
    assert isinstance(error, MissingSiteError | SiteError)
    assert re.search(r"site '(shop|us|uk)'|^'(shop|us|uk)'|node \d", str(error))


@pytest.mark.cases("cg-6-10")
@pytest.mark.parametrize(("begin", "schedules"), [(6, 10), (6, 25), (7, 25)])
@pytest.mark.parametrize("name", ["admm", "cg", "boost", "gram", "sgd", "sgd-sharded"])
def test_random_faults_end_in_the_same_model_or_in_a_clear_stop(
    plain, name, begin, schedules
):
    @seed(begin)
    @settings(
        max_examples=schedules, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(SCHEDULE)
    def check(chosen: dict[int, Fault]) -> None:
        federation, expected = plain(name)
        ended = federation.train(lambda *at: chosen.get(at[-1]))
        if ended.error is not None:
            check_clear(ended.error)
            first, ended = ended, federation.train()
            ended.happened += first.happened
            if ended.error is not None and has_forgotten_its_end(first):
                check_clear(ended.error)
                assert "start the run again" in str(ended.error)
                return
        ended.check_is(expected)

    check()


def has_forgotten_its_end(ended) -> bool:
    """Whether a site lost its state when it was asked to finish once more.

    It may have finished before, and deleted its keys of the run.
    """
    lost = (*LOSSES, Fault.RESTARTED)
    return any(
        fault in lost
        and action == Action.FINISH
        and ended.asked.count((action, at)) > 1
        for action, at, fault in ended.happened
    )


@pytest.mark.parametrize("loss", [Fault.STATE_GONE, Fault.RESTARTED])
def test_a_site_that_has_forgotten_that_it_has_finished_is_named(plain, loss):
    federation, expected = plain("admm")
    federation.start()
    at = expected.asked.index((Action.FINISH, US))
    # asked again, the others answer what they have answered
    schedule = {at: Fault.SERVER_KILLED_WAITING, at + 3: loss}
    ended = federation.train(lambda *tried: schedule.get(tried[-1]))
    assert ended.happened[-1] == (Action.FINISH, US - 1, loss)
    assert has_forgotten_its_end(ended)
    for again in (ended, federation.train()):
        check_clear(again.error)
        assert "start the run again" in str(again.error)
    # what the sites have saved is whole
    assert ended.parameters.keys() == expected.parameters.keys()


@pytest.mark.parametrize("action", [Action.STATISTICS, TRAIN_ADMM, Action.FINISH])
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
