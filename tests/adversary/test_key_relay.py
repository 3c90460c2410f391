"""The sites of a run agree on a secret that no message shows to the server."""

import pandas as pd
import pytest

from client_apps.app import app
from client_apps.rounds.site import Site
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.errors import ReplyError, SiteError
from tp_flower.privacy.key_agreement import GroupSecret
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.query import Query

SQL = "SELECT a.y AS label, b.x FROM a JOIN b ON a.k = b.k"
A = pd.DataFrame({"k": [1, 2, 3, 4], "y": [0.0, 1.0, 2.0, 4.0]})
B = pd.DataFrame({"k": [1, 2, 3, 4], "x": [0.5, 1.5, 3.0, 4.0]})


def write_tables(folder, name, frame):
    """A tables file as a real site has it."""
    frame.to_csv(folder / f"{name}.csv", index=False)
    path = folder / f"{name}.toml"
    path.write_text(f'[tables.{name}]\npath = "{name}.csv"\n')
    return path


def secrets(sites, seed=0):
    """Train, and return each site's secret and all messages as text."""
    seen, kept = [], {}

    class Watching(InProcessGrid):
        def _deliver(self, message):
            seen.append(str(message.content))
            reply = super()._deliver(message)
            seen.append(str(reply.content))
            if message.metadata.message_type == "query.extract":
                node = message.metadata.dst_node_id
                kept[node] = Site(self.contexts[node], self.run_name).hasher().secret
            return reply

    strategy = TablePuppetADMM(Query.from_sql(SQL), num_epochs=1, seed=seed)
    strategy.start(Watching(app, sites))
    return kept, seen


def test_sites_share_a_secret_that_no_message_carries(tmp_path):
    sites = [write_tables(tmp_path, "a", A), write_tables(tmp_path, "b", B)]
    kept, seen = secrets(sites)
    assert len(kept) == 2
    assert len(set(kept.values())) == 1
    (secret,) = set(kept.values())
    assert secret != GroupSecret.of_simulation(0).value
    assert not [text for text in seen if secret.hex() in text or repr(secret) in text]
    again, _ = secrets(sites)
    assert set(again.values()) != {secret}


def test_simulation_repeats_its_secret():
    sites = [{"a": A}, {"b": B}]
    assert set(secrets(sites)[0].values()) == {GroupSecret.of_simulation(0).value}
    # the largest seed that there is
    for seed in (5, 2**63 - 1):
        expected = {GroupSecret.of_simulation(seed).value}
        assert set(secrets(sites, seed)[0].values()) == expected


def test_one_real_site_makes_the_secret_random(tmp_path):
    kept, _ = secrets([{"a": A}, write_tables(tmp_path, "b", B)])
    assert len(set(kept.values())) == 1
    assert GroupSecret.of_simulation(0).value not in kept.values()


class ChangedSeal(InProcessGrid):
    """Change what the leader is asked or answers."""

    def __init__(self, sites, change_request=None, change_reply=None):
        super().__init__(app, sites)
        self.change_request, self.change_reply = change_request, change_reply

    def _deliver(self, message):
        is_seal = message.metadata.message_type == "query.seal"
        if is_seal and self.change_request:
            header = unpack(message.content).header
            message.content = pack(Packet(header | self.change_request))
        reply = super()._deliver(message)
        if is_seal and self.change_reply is not None:
            reply.content = pack(Packet(self.change_reply))
        return reply


def run(grid):
    TablePuppetADMM(Query.from_sql(SQL), num_epochs=1).start(grid)


def test_real_site_refuses_the_secret_of_a_simulation(tmp_path):
    grid = ChangedSeal([{"a": A}, write_tables(tmp_path, "b", B)], {"simulated": True})
    match = "site 'b-0'.*secret is that of a simulation.*tables file of its own"
    with pytest.raises(SiteError, match=match):
        run(grid)


@pytest.mark.parametrize("sealed", [{}, {"2": "ab"}])
def test_leader_that_leaves_a_site_out(sealed):
    grid = ChangedSeal([{"a": A}, {"b": B}], change_reply={"sealed": sealed})
    with pytest.raises(ReplyError, match="site 'site-0' did not seal the run's secret"):
        run(grid)


@pytest.mark.parametrize(
    "sealed",
    [
        None,
        {"2": 3, "3": "ab"},
        [],
        {"2": "no hexadecimal", "3": "no hexadecimal"},
    ],
)
def test_leader_that_seals_nothing_that_could_be_a_secret(sealed):
    grid = ChangedSeal([{"a": A}, {"b": B}], change_reply={"sealed": sealed})
    match = "site 'site-0' sent a reply to query.seal .* 'sealed' is .*; allowed: "
    with pytest.raises(ReplyError, match=match):
        run(grid)


def test_sealed_secret_that_cannot_be_opened():
    reply = {"sealed": {"2": "ab" * 40, "3": "ab" * 40}}
    grid = ChangedSeal([{"a": A}, {"b": B}], change_reply=reply)
    with pytest.raises(SiteError, match="cannot be opened"):
        run(grid)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"2": "00", "3": "11"}, "'public-keys' is {'2': '00', '3': '11'}; allowed"),
        ({"2": "00" * 32, "3": "00" * 32}, "not a key of X25519"),
    ],
)
def test_public_key_that_is_none(keys, match):
    grid = ChangedSeal([{"a": A}, {"b": B}], {"public-keys": keys})
    with pytest.raises(SiteError, match=match):
        run(grid)
