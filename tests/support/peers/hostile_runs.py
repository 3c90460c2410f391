"""Good runs in which the server sends one changed request, and tables of such cases."""

import re
import tomllib
from pathlib import Path

import pytest

from strategies import Explain
from tests.support.peers.hostile import FOREIGN, SQL, HostileGrid, StoppedError, train

# categories come in the order of their hashes, which differ from run to run: so would
# the columns that the first weights of a network are of
TORCH = {"model": "mlp", "num_epochs": 1, "sql": SQL.replace(", c.kind", "")}
RUNS = {
    "admm": ("admm", {}),
    "consensus": ("admm", {"lou": "consensus"}),
    "torch": ("admm", TORCH),
    "sgd": ("sgd", {"batch_size": 5}),
    "explain": (Explain, {"mode": "explain"}),
}


def cases(file: Path, group: str) -> list[tuple[str, ...]]:
    """A group of a TOML file: run, site, action, change, and what is said of it.

    ``change_of`` reads the change; what is said of the message is a pattern.
    """
    return [
        (run, site, action, change, match)
        for run, sites in tomllib.loads(file.read_text(encoding="utf-8"))[group].items()
        for site, actions in sites.items()
        for action, changes in actions.items()
        for change, match in changes.items()
    ]


def refusals(file: Path, *groups: str) -> pytest.MarkDecorator:
    """One test for each case of the groups."""
    names = ("run", "site", "action", "change", "match")
    own = [case for group in groups for case in cases(file, group)]
    ids = [f"{run}: {action} {change}" for run, _, action, change, _ in own]
    return pytest.mark.parametrize(names, own, ids=ids)


def once(action, node, changes):
    """Send changed copies of the first such request, each by its name."""
    done = []

    def hostile(asked, at, packet):
        if (asked, at) != (action, node) or done:
            return
        done.append(True)
        for what, change in changes.items():
            yield what, change(packet)

    return hostile


def answers_to(folder, action, node, changes, method="admm", **settings):
    """Send changed copies of one request in a good run; return what the site says."""
    policies = settings.pop("policies", None)
    grid = HostileGrid(folder, once(action, node, changes), policies, stops=True)
    with pytest.raises(StoppedError):
        train(grid, method, **settings)
    return grid.answers


def refusal(folder, action, node, change, *method, **settings):
    """Send one changed request in a good run; return the refusal."""
    (answer,) = answers_to(folder, action, node, {"it": change}, *method, **settings)
    answer.check_nothing_left()
    return answer


def refused(*arguments, **settings):
    """Send one changed request in a good run; return the text of the refusal."""
    return refusal(*arguments, **settings).error


def check_refusals(answers):
    """Assert that what is refused is refused on purpose, and nothing leaves."""
    for answer in answers:
        assert not FOREIGN.match(answer.error), answer
        if answer.error:
            answer.check_nothing_left()


def check_all_refused(answers, match=None):
    """Assert that each answer is a refusal which says this, or what it is named."""
    assert answers
    for answer in answers:
        answer.check_nothing_left()
        assert re.search(match or answer.what, answer.error), answer


def spread(changes, number, of):
    """Every so-manyth change: tests of all numbers together send all of them."""
    return (change for place, change in enumerate(changes) if place % of == number)
