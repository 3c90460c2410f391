"""Good runs in which the server sends one changed request."""

import pytest

from strategies import TablePuppetADMM
from tests.support.peers.hostile import HostileGrid, StoppedError, train


def once(action, node, **changes):
    """Send changed copies of the first such request, each by its name."""
    done = []

    def hostile(asked, at, packet):
        if (asked, at) != (action, node) or done:
            return
        done.append(True)
        for what, change in changes.items():
            yield what, change(packet)

    return hostile


def refused(*arguments, **settings):
    """Send one changed request in a good run; return the text of the refusal."""
    return refusal(*arguments, **settings).error


def refusal(folder, action, node, change, method=TablePuppetADMM, **settings):
    """Send one changed request in a good run; return the refusal."""
    policies = settings.pop("policies", None)
    grid = HostileGrid(folder, once(action, node, it=change), policies, stops=True)
    with pytest.raises(StoppedError):
        train(grid, method, **settings)
    (answer,) = grid.answers
    answer.check_nothing_left()
    return answer


def spread(changes, number, of):
    """Every so-manyth change: tests of all numbers together send all of them."""
    return (change for place, change in enumerate(changes) if place % of == number)
