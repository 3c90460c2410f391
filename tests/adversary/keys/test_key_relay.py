"""The secret that the sites of a run agree on, and a server or leader that changes it.

That no message carries it is in ``test_key_sources.py``.
"""

import pytest

from tests.support.federated import WatchedGrid, on_requests, train
from tests.support.peers.keyed_sites import SQL, A, B
from tp_flower.errors import ReplyError, SiteError
from tp_flower.privacy.key_agreement import GroupSecret

SIMULATED = [{"a": A}, {"b": B}]
LEFT_OUT = "site 'site-0' did not seal the secret of group 'run' to all its sites"
NO_TEXT = "site 'site-0' sent a reply to query.seal .* 'sealed' is .*; allowed: "


@pytest.fixture
def one_real(tmp_path):
    """A simulated site, and one with a tables file as a real site has it."""
    B.to_csv(tmp_path / "b.csv", index=False)
    file = tmp_path / "b.toml"
    file.write_text('[tables.b]\npath = "b.csv"\npolicy = "open"\n')
    return [{"a": A}, file]


class Relay(WatchedGrid):
    """Change what the leader is asked or answers; keep the secrets of the sites."""

    def __init__(self, sites, request=None, reply=None):
        super().__init__(sites, self._relay)
        self.changes = (request, reply)
        self.secrets = []

    def _relay(self, seen):
        change = self.changes[seen.is_reply]
        if seen.action == "query.seal" and change is not None:
            seen.header.update(change)
        if seen.action == "query.extract" and seen.is_reply and seen.arrays:
            self.secrets.append(self.site(seen.node).hasher().secret)


def secrets(sites, seed=0):
    """Train, and return each site's secret."""
    grid = Relay(sites)
    train(grid, SQL, seed=seed)
    return grid.secrets


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_simulation_repeats_its_secret(seed):
    assert secrets(SIMULATED, seed) == [GroupSecret.of_simulation(seed).value] * 2


def test_one_real_site_makes_the_secret_random(one_real):
    (first, second), (other, _) = secrets(one_real), secrets(one_real)
    assert first == second
    assert first not in (other, GroupSecret.of_simulation(0).value)


def test_real_site_refuses_the_secret_of_a_simulation(one_real):
    match = "site 'b-0'.*secret is for simulations.*tables file of its own"
    with pytest.raises(SiteError, match=match):
        train(Relay(one_real, {"simulated": True}), SQL)


@pytest.mark.parametrize(
    ("sealed", "error", "match"),
    [
        ({}, ReplyError, LEFT_OUT),
        ({"2": "ab"}, ReplyError, LEFT_OUT),
        ({"2": 3, "3": "ab"}, ReplyError, NO_TEXT),
        ({"2": "no hexadecimal", "3": "no hexadecimal"}, ReplyError, NO_TEXT),
        ({"2": "ab" * 40, "3": "ab" * 40}, SiteError, "cannot be opened"),
    ],
)
def test_leader_that_seals_no_secret(sealed, error, match):
    reply = {"sealed": {"run": sealed, "join-0": sealed}}
    with pytest.raises(error, match=match):
        train(Relay(SIMULATED, reply=reply), SQL)


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("00", "'public-keys' is {.*'3': '00'}; allowed"),
        ("00" * 32, "not an X25519 key"),
    ],
)
def test_public_key_that_is_none(key, match):
    @on_requests("query.seal")
    def put(seen):
        seen.header["public-keys"]["3"] = key

    with pytest.raises(SiteError, match=match):
        train(WatchedGrid(SIMULATED, put), SQL)
