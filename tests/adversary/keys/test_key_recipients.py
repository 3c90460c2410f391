"""Who has the keys of a run: recipients more than the sites, and sites that collude.

The server has every message, and the keys of the sites that side with it.
"""

import re

import pandas as pd
import pytest

from client_apps.privacy.keys import _site_keys
from tests.support.federated import train
from tests.support.ledgers import ledger_lines
from tests.support.peers.keyed_sites import (
    AB,
    SQL,
    KeyedGrid,
    proposal_of,
    propose_a_stranger,
    public_keys,
)
from tp_flower.errors import SiteError
from tp_flower.privacy.key_agreement import KeyPair, PublicKeys, SiteKeys, sealed_name
from tp_flower.settings import PrivacySettings

CLEAR = PrivacySettings(scores="clear")
MORE = "9"
"""The node that the server names besides the sites."""
C = pd.DataFrame({"m": [1, 2, 3, 4], "z": [1.0, -1.0, 2.0, 0.0]})
ABC = {"a": AB["a"].assign(m=[4, 3, 2, 1]), "b": AB["b"], "c": C}
CHAIN = SQL.replace("b.x", "b.x, c.z") + " JOIN c ON a.m = c.m"
LINES = (
    r"no means to tell the other sites' public keys .* allowed-keys = \"FILE\" .*"
    r" keys = \"unchecked\""
)


class OneMore:
    """A server that proposes one site more to all, of a table of its own; it replaces
    nobody.

    Attributes:
        opened: the secrets that it opens, by group.
        hides: whether it tells sites but the leader of the true recipients alone.
    """

    def __init__(self, site_key=None, *, hides=False):
        self.pair = SiteKeys(KeyPair(), KeyPair() if site_key else None)
        self.site_key = site_key
        self.hides = hides
        self.opened = {}
        self.leader = None
        self.run = ""

    def __call__(self, seen):
        header = seen.header
        message = (seen.action, seen.is_reply)
        if message == ("query.describe", True):
            keys = header["public-key"], header.get("site-key", "")
            self.leader = self.leader or PublicKeys(*map(bytes.fromhex, keys))
        if message == ("query.seal", False):
            self.name(header)
            for nodes in header["groups"].values():
                nodes.append(MORE)
            self.asked = header
        if message == ("query.seal", True) and "sealed" in header:
            self.open(header["sealed"], int(self.run, 16))
        if message == ("query.extract", False) and not self.hides:
            self.name(header)
            for sealed in header["sealed"].values():
                sealed["members"].append(MORE)
            propose_a_stranger(header, MORE)
        self.run = header.get("run", self.run)

    def name(self, header):
        header["public-keys"][MORE] = self.pair.run.public.hex()
        header["site-keys"][MORE] = self.site_key or ""

    def open(self, sealed, run):
        for group, texts in sealed.items():
            name = sealed_name(group, public_keys(self.asked, texts))
            text = bytes.fromhex(texts[MORE])
            self.opened[group] = self.pair.open(text, self.leader, run, name)


def recipients(grid, name):
    """By group, the fingerprints of the keys in the ledger line of a site's run."""
    return ledger_lines(grid.folders[name] / "state", "keys")[-1]["groups"]


def test_of_unchecked_keys_one_recipient_more_has_all_keys_and_the_ledger_says_so(
    tmp_path, caplog
):
    server = OneMore()
    caplog.set_level("INFO", "flwr")
    grid = KeyedGrid(tmp_path, AB, server)
    train(grid, SQL, privacy=CLEAR)
    asked = grid.sent("query.extract")[0].header
    run_keys = [bytes.fromhex(key) for key in asked["public-keys"].values()]
    proposal = proposal_of(asked).fingerprint
    key = server.opened["run"].of_run(
        int(grid.run_name, 16), run_keys, proposal=proposal
    )
    # with it the server hashes what it likes
    assert set(grid.secrets.values()) == {key}
    for name in grid.nodes:
        listed = recipients(grid, name)
        assert {group: len(keys) for group, keys in listed.items()} == {"run": 3}
        assert PublicKeys(server.pair.run.public).fingerprint in listed["run"]
    assert len(re.findall(r"event=keys .*run:3:[0-9a-f]{8}:", caplog.text)) >= 2


def test_recipients_of_pinned_keys_have_the_same_fingerprint_in_every_run(tmp_path):
    listed = []
    for _ in range(2):
        grid = KeyedGrid(tmp_path, AB).pin()
        train(grid, SQL)
        listed += [recipients(grid, name) for name in grid.nodes]
    assert all(each == listed[0] for each in listed)
    pinned = [bytes.fromhex(grid.public_key(name)) for name in grid.nodes]
    names = [PublicKeys(b"", key).fingerprint for key in pinned]
    assert listed[0] == {"run": names, "join-0": names}


def test_a_recipient_more_than_the_pinned_ones_is_refused_and_named(tmp_path):
    server = OneMore("ab" * 32)
    grid = KeyedGrid(tmp_path, AB, server).pin()
    match = r"site key of node 9, abababababababab\.\.\., is not in .*allowed-keys"
    with pytest.raises(SiteError, match=match):
        train(grid, SQL)
    assert not server.opened
    assert not grid.leaked()
    # it is at query.seal, before a site is told of any table
    (line,) = ledger_lines(tmp_path / "a" / "state", "refuse")
    assert re.search(match, line["reason"])
    assert line["action"] == "query.seal"


def test_a_pinned_key_that_is_named_twice_is_refused_and_named(tmp_path):
    grid = KeyedGrid(tmp_path, AB)
    key = grid.public_key("b")
    grid.change = OneMore(key)
    grid.pin()
    match = rf"nodes 3 and 9 of group 'run' have one public key, {key[:16]}"
    with pytest.raises(SiteError, match=match):
        train(grid, SQL)
    assert not grid.leaked()


def test_sites_cannot_be_told_of_fewer_recipients_than_there_are(tmp_path):
    server = OneMore(hides=True)
    grid = KeyedGrid(tmp_path, AB, server)
    with pytest.raises(SiteError, match="secret of the run cannot be opened"):
        train(grid, SQL)
    assert server.opened
    assert not grid.leaked()


@pytest.mark.parametrize("careless", ["a", "b"])
def test_a_real_site_without_keys_seals_and_opens_no_secret(tmp_path, careless):
    grid = KeyedGrid(tmp_path, AB)
    del grid.contexts[grid.nodes[careless]].node_config["keys"]
    with pytest.raises(SiteError, match=f"'{careless}-0'.*{LINES}"):
        train(grid, SQL)
    assert grid.nodes[careless] not in grid.secrets


def test_a_query_of_one_site_needs_no_keys_of_others(tmp_path):
    grid = KeyedGrid(tmp_path, {"a": AB["a"]})
    del grid.contexts[2].node_config["keys"]
    assert train(grid, "SELECT a.y AS label, a.k FROM a").report.history


def test_keys_are_unchecked_or_nothing(tmp_path):
    grid = KeyedGrid(tmp_path, AB)
    grid.contexts[2].node_config["keys"] = "yes"
    with pytest.raises(Exception, match='config keys can be "unchecked" only'):
        train(grid, SQL)


class Colluder(KeyedGrid):
    """The server has the keys of one site, which it takes as the run goes on."""

    def __init__(self, folder, name, change=None):
        super().__init__(folder, ABC, self.look)
        self.name = name
        self.forge = change
        self.sealed = {}
        self.asked = {}

    def look(self, seen):
        kind = seen.action, seen.is_reply
        if self.forge is not None:
            self.forge(seen)
        if kind == ("query.seal", False):
            self.asked |= dict.fromkeys(seen.header["groups"], seen)
        if kind == ("query.seal", True):
            self.sealed |= seen.header.get("sealed", {})
        if kind == ("query.extract", False) and seen.node == self.nodes[self.name]:
            self.keys = _site_keys(self.site(seen.node))

    def open_with(self, keys, group):
        """Try every text of a group under the keys, as if it were sealed to them."""
        asked = self.asked[group].header
        members = public_keys(asked, asked["groups"][group])
        name = sealed_name(group, members)
        run = int(self.run_name, 16)
        for text in self.sealed[group].values():
            try:
                return keys.open(bytes.fromhex(text), members[0], run, name)
            except SiteError:
                continue
        return None


@pytest.mark.parametrize("source", ["pinned", "agreed"])
def test_a_site_that_colludes_opens_no_edge_but_its_own(tmp_path, source):
    grid = Colluder(tmp_path, "b").with_key_from(source)
    train(grid, CHAIN)
    assert grid.open_with(grid.keys, "join-0") is not None
    assert grid.open_with(grid.keys, "join-1") is None


class Middle:
    """Puts a key of its own in place of site c's, for the edge between a and c."""

    def __init__(self):
        self.pair = SiteKeys(KeyPair())

    def __call__(self, seen):
        if seen.action == "query.seal" and "join-1" in seen.header.get("groups", ()):
            seen.header["public-keys"]["4"] = self.pair.run.public.hex()


def test_pinned_keys_hide_an_edge_from_the_server_and_another_site(tmp_path):
    pinned = Colluder(tmp_path / "pinned", "b", Middle()).with_key_from("pinned")
    with pytest.raises(SiteError, match="cannot be opened"):
        train(pinned, CHAIN)
    assert pinned.open_with(pinned.forge.pair, "join-1") is None


def test_a_pinned_site_that_has_no_side_of_an_edge_is_refused_its_key(tmp_path):
    """By the proposal a site knows whose tables a join has."""

    def name_b(seen):
        if (seen.action, seen.is_reply) == ("query.seal", False):
            seen.header["groups"]["join-1"].append("3")
        sealed = seen.header.get("sealed", {})
        if seen.action == "query.extract" and "join-1" in sealed:
            sealed["join-1"]["members"].append("3")

    grid = Colluder(tmp_path, "b", name_b).with_key_from("pinned")
    with pytest.raises(
        SiteError, match=r"'sealed': the run was proposed with .*'join-1'"
    ):
        train(grid, CHAIN)
    # b itself, which is told the truth, is the only one to answer
    answered = {seen.node for seen in grid.seen if seen.is_reply and seen.arrays}
    assert answered <= {grid.nodes["b"]}
