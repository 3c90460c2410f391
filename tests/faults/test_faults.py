"""Whatever goes wrong, a run ends in the model of one where nothing does."""

import pytest

from tests.support.peers.faulty_grid import (
    CRASHES,
    KILLS,
    LATE,
    LOSSES,
    PASSED,
    PASSING,
    Fault,
    Schedule,
)
from tests.support.peers.faulty_runs import METHODS, place, plain, same_noise
from tp_flower.protocol.packet import Action

__all__ = ["place", "plain", "same_noise"]

# every fault, at every message


SHARES = 4


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
        self._met: dict[tuple[str, int], int] = {}
        self._last: dict[int, str] = {}

    def __call__(self, action: str, node: int, _: int) -> Fault | None:
        met = self._met.get((action, node), 0)
        self._met[action, node] = met + 1
        return self._faults[met] if met < len(self._faults) else None


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


# what a site has lost, and a server that is killed


def at_first(action: str, node: int, *faults: Fault) -> Schedule:
    """Let one message suffer faults, one at a try."""
    left = list(faults)

    def schedule(asked: str, at: int, _: int) -> Fault | None:
        return left.pop(0) if left and (asked, at) == (action, node) else None

    return schedule


def last_of_each(asked: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Every action with the node that was asked last."""
    return list(dict(asked).items())


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
