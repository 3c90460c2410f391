"""Attacks on hashed keys by a server that has every message of a real run.

The server tries every possible customer number. It finds all of them where the hash has
no key, or one that it knows, and none where the key is the sites' secret.
"""

import hashlib
import json
import re
from collections import defaultdict
from functools import cache

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from client_apps.handlers import encoding
from tests.support.federated import on_requests, run_query, train
from tests.support.files import case_table
from tests.support.joined import run as extracted
from tests.support.peers.keyed_sites import (
    KeyedGrid,
    proposal_of,
    propose_a_stranger,
    public_keys,
)
from tp_flower.errors import SiteError
from tp_flower.features.statistics import category_purpose
from tp_flower.keyed_hash import RUN_GROUP, KeyedHasher, hex_texts
from tp_flower.privacy.key_agreement import (
    GroupSecret,
    KeyPair,
    PublicKeys,
    SiteKeys,
    sealed_name,
)
from tp_flower.protocol.proposal import Proposal, ProposedJoin, ProposedPart
from tp_flower.query import Fragment, Query
from tp_flower.settings import PrivacySettings
from tp_flower.terms.groups import key_groups

CASES = case_table(__file__)
CLEAR = PrivacySettings(scores="clear")
NUMBERS = 100_000
ROWS = 525
SQL = "SELECT o.y AS label, c.x FROM orders o JOIN customers c ON o.customer = c.id"
SOURCES = ("pinned", "agreed")
MORE = "9"
ALL = ("orders", "customers", "items")
THREE = f"{SQL.replace('c.x', 'c.x, i.z')} JOIN items i ON o.item = i.item"


def frames():
    """Orders of customers whose numbers have five digits; item is such a number too."""
    rng = np.random.default_rng(0)
    number = rng.choice(NUMBERS, ROWS, replace=False)
    orders = pd.DataFrame({"customer": number, "item": rng.permutation(number)})
    orders["y"] = rng.normal(size=ROWS)
    customers = pd.DataFrame({"id": rng.permutation(number)})
    customers["x"] = rng.normal(size=ROWS)
    items = pd.DataFrame({"item": rng.permutation(number)})
    items["z"] = rng.normal(size=ROWS)
    return {"orders": orders, "customers": customers, "items": items}


def federation(folder, source, names=("orders", "customers"), change=None):
    grid = KeyedGrid(folder, {name: frames()[name] for name in names}, change)
    return grid.with_key_from(source)


@cache
def texts():
    """The canonical text of every possible number, as the published code writes it."""
    frame = pd.DataFrame({"id": np.arange(NUMBERS)})
    key = extracted(frame, Fragment("table", "table", keys=(('"id"',),))).keys[0]
    return key.texts.take(key.codes)


def rows_as_bytes(hashes):
    return {row.tobytes() for row in np.ascontiguousarray(hashes)}


def recovered(sent, guesses):
    sent = np.concatenate([rows for rows in sent if len(rows)])
    is_found = np.zeros(len(sent), bool)
    for guess in guesses:
        # both halves: 128 bits of chance
        is_found |= np.isin(sent, guess).all(axis=1)
    return is_found.mean()


def plain(text_array):
    """SHA-256 of the texts, without a key: 128 bits, uint64 (k, 2)."""
    digests = [hashlib.sha256(t.encode()).digest() for t in text_array.to_pylist()]
    whole = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
    return whole.reshape(-1, 4)[:, :2]


def with_key(key):
    return KeyedHasher(key).purpose("join keys group-0").tag_texts(texts())


def all_the_server_has(grid):
    """Every string of 32 bytes in any message: the server may take it for the key."""
    headers = json.dumps([seen.header for seen in grid.seen])
    found = {bytes(32), GroupSecret.of_simulation(0).value}
    for text in re.findall('"((?:[0-9a-f]{2}){32,})"', headers):
        content = bytes.fromhex(text)
        # a sealed secret is longer: in its middle is the encrypted key
        found |= {content[:32], content[-32:], content[13:45]}
    return {value for value in found if len(value) == 32}


class TestDictionary:
    """More than 99 % without a key, nothing with ours."""

    def test_recovers_an_unkeyed_hash(self, tmp_path, monkeypatch):
        monkeypatch.setattr(KeyedHasher, "tag_texts", lambda _, own: plain(own))
        grid = federation(tmp_path, "agreed")
        train(grid, SQL)
        assert recovered(grid.hashes().values(), [plain(texts())]) > 0.99

    def test_recovers_the_keys_of_a_simulation(self):
        # the attack itself is sound: it differs from the next test in the secret alone
        sites = [{name: frames()[name]} for name in ("orders", "customers")]
        arrays = run_query(SQL, sites, seed=3).arrays("query.extract", replies=True)
        sent = [rows for (_, name), rows in arrays.items() if "hashes/" in name]
        assert sum(map(len, sent)) == 2 * ROWS
        key = GroupSecret.of_simulation(3).value
        assert recovered(sent, [with_key(key)]) == 1.0

    @pytest.mark.cases("agreed")
    @pytest.mark.parametrize("source", SOURCES)
    def test_recovers_nothing_of_a_real_run(self, tmp_path, source):
        grid = federation(tmp_path, source)
        train(grid, SQL)
        sent = list(grid.hashes().values())
        assert sum(map(len, sent)) == 2 * ROWS
        public = [
            bytes.fromhex(seen.header["public-key"])
            for seen in grid.sent("query.describe", replies=True)
        ]
        run_id = int(grid.run_name, 16)
        guessed = all_the_server_has(grid)
        assert len(guessed) > 4
        proposal = proposal_of(grid.sent("query.extract")[0].header).fingerprint
        guessed |= {
            GroupSecret(key).of_run(run_id, public, proposal=proposal)
            for key in guessed
        }
        guesses = [plain(texts()), *map(with_key, guessed)]
        assert recovered(sent, guesses) == 0.0
        # with the sites' key the same attack finds every number
        (key,) = set(grid.secrets.values())
        assert recovered(sent, [with_key(key)]) == 1.0


def test_dictionary_of_categories(tmp_path, monkeypatch):
    # of 1000 possible postcodes, which ones do the customers have?
    possible = pa.array([f"EC{number:03}" for number in range(1000)])
    own = {name: frames()[name] for name in ("orders", "customers")}
    postcodes = possible.to_numpy(zero_copy_only=False)
    own["customers"]["x"] = np.random.default_rng(0).choice(postcodes, ROWS)

    kept: list[str] = []

    def noted(table, statistics):
        encoder = fit(table, statistics)
        for item in encoder.encodings:
            kept.extend(getattr(item, "hashes", ()))
        return encoder

    fit = encoding.fit
    monkeypatch.setattr(encoding, "fit", noted)
    grid = KeyedGrid(tmp_path, own)
    train(grid, SQL, seed=3)
    (key,) = set(grid.secrets.values())
    hasher = KeyedHasher(key).purpose(category_purpose("c", "x"))
    guesses = hasher.hash_texts(possible)[:, :2]
    # with the sites' key the attack finds every postcode in their encoder
    assert set(kept) - {"(other)"} <= set(hex_texts(guesses).to_pylist())
    assert len(set(kept)) == 255
    # and none in any message: the categories of a table in one shard do not leave it
    headers = json.dumps([seen.header for seen in grid.seen])
    arrays = [a.tobytes() for seen in grid.seen for a in seen.arrays.values()]
    abridged = 0
    for row, digits in zip(guesses, hex_texts(guesses).to_pylist(), strict=True):
        assert digits[:16] not in headers
        assert not any(row.tobytes() in content for content in arrays)
        abridged += digits[:8] in headers
    # run numbers and keys have a thousand places where eight digits of a guess may
    # stand by chance, which one does in a run of five thousand
    assert abridged <= 2


class Middle:
    """A server that puts public keys of its own in place of the sites'.

    It makes itself one site more, so that no site lacks its own key.

    Attributes:
        secrets: of the run, as far as it could open what was sealed to its keys.
        refusals: why it could not.
    """

    def __init__(self, *, as_leader=True, swap_site_keys=True):
        self.pairs = defaultdict(lambda: SiteKeys(KeyPair(), KeyPair()))
        self.as_leader = as_leader
        self.swap_site_keys = swap_site_keys
        self.told = {}
        self.secrets = []
        self.refusals = []
        self.grid = None

    def __call__(self, seen):
        header = seen.header
        message = (seen.action, seen.is_reply)
        if message == ("query.describe", True):
            keys = (header["public-key"], header.get("site-key", ""))
            self.told[seen.node] = PublicKeys(*map(bytes.fromhex, keys))
        if message == ("query.seal", False):
            self._ask(header, str(seen.node))
        if message == ("query.seal", True) and "sealed" in header:
            self._read(header["sealed"], seen.node)
        if message == ("query.extract", False) and self.as_leader:
            self._forge(seen)

    @property
    def is_pinned(self):
        return any(public.site for public in self.told.values())

    def _own(self, node):
        """Its keys in place of a node's, as the source of the sites' key has them."""
        pair = self.pairs[node]
        return SiteKeys(pair.run, pair.site if self.is_pinned else None)

    def _ask(self, header, leader):
        for node in {*header["public-keys"]} - {leader}:
            self._replace(header, node)

    def _replace(self, header, node):
        header["public-keys"][node] = self.pairs[node].run.public.hex()
        if self.swap_site_keys:
            header["site-keys"][node] = self._own(node).public.site.hex()

    def _read(self, sealed, leader):
        run_id = int(self.grid.run_name, 16)
        asked = self.grid.seen[-1].header
        for group, texts in sealed.items():
            name = sealed_name(group, public_keys(asked, texts))
            for node, text in texts.items():
                sender = self.told[leader]
                opener = self._own(node)
                try:
                    opened = opener.open(bytes.fromhex(text), sender, run_id, name)
                    self.secrets += [opened] * (group == RUN_GROUP)
                except SiteError as error:
                    self.refusals.append(str(error))

    def _forge(self, seen):
        """Seal a secret that it has to a site, in the leader's place."""
        secret = self.secrets[0] if self.secrets else GroupSecret.random()
        self.secrets = [secret]
        run_id = int(self.grid.run_name, 16)
        header = seen.header
        # a site more; or, under the pinned key of another one
        others = {*header["public-keys"]} - {str(seen.node)}
        maker = MORE if self.swap_site_keys else others.pop()
        self._replace(header, maker)
        if maker == MORE:
            propose_a_stranger(header, MORE)
        for group, sealed in header["sealed"].items():
            members = [maker, *(node for node in sealed["members"] if node != maker)]
            name = sealed_name(group, public_keys(header, members))
            text = (
                self._own(maker).seal(secret, self.told[seen.node], run_id, name).hex()
            )
            sealed |= {"text": text, "members": members}

    def recovered(self):
        sent = list(self.grid.hashes().values())
        public = [own.run for own in self.told.values()]
        public += [self.pairs[MORE].run.public] * (MORE in self.pairs)
        run_id = int(self.grid.run_name, 16)
        proposal = proposal_of(self.grid.sent("query.extract")[-1].header).fingerprint
        keys = [
            secret.of_run(run_id, public, proposal=proposal) for secret in self.secrets
        ]
        return recovered(sent, map(with_key, keys)) if sent else 0.0


def attack(folder, source, middle):
    grid = federation(folder, source, change=middle)
    middle.grid = grid
    return grid


class TestServerInTheMiddle:
    @pytest.mark.parametrize("listens", [True, False])
    def test_reads_all_keys_that_are_not_pinned(self, tmp_path, listens):
        """It may make the secret itself, and not even listen to the leader."""
        middle = Middle()
        if not listens:
            middle._read = lambda *_: None
        # the keys of joins would need a table of its own in them
        train(attack(tmp_path, "agreed", middle), SQL, privacy=CLEAR)
        # no site noticed anything
        assert middle.recovered() == 1.0

    def test_leader_does_not_seal_to_its_keys(self, tmp_path):
        middle = Middle()
        grid = attack(tmp_path, "pinned", middle)
        with pytest.raises(SiteError, match="the server has put a key of its own"):
            train(grid, SQL)
        assert not grid.leaked()
        assert not middle.secrets

    def test_cannot_open_what_is_sealed_to_a_pinned_key(self, tmp_path):
        # the site keys are the true ones, so that the leader seals; only the keys of
        # the run are the server's
        middle = Middle(as_leader=False, swap_site_keys=False)
        grid = attack(tmp_path, "pinned", middle)
        with pytest.raises(SiteError, match="secret of the run cannot be opened"):
            train(grid, SQL)
        # of two groups, to two sites
        assert middle.refusals == ["the sealed secret of the run cannot be opened"] * 4
        assert not middle.secrets
        assert not grid.leaked()

    @pytest.mark.parametrize(("swapped", "match"), CASES["middle"])
    def test_sites_take_no_secret_of_it(self, tmp_path, swapped, match):
        middle = Middle(swap_site_keys=swapped)
        # the leader is asked as it should be
        middle._ask = lambda *_: None
        grid = attack(tmp_path, "pinned", middle)
        with pytest.raises(SiteError, match=match):
            train(grid, SQL)
        assert not grid.leaked()
        assert middle.recovered() == 0.0


@pytest.mark.parametrize("source", SOURCES)
def test_two_runs_share_nothing(tmp_path, source):
    grids = [federation(tmp_path, source) for _ in range(2)]
    for grid in grids:
        # the server names the second run by the number of the first
        for context in grid.contexts.values():
            context.run_id = 9
        train(grid, SQL)
    first, second = (
        set().union(*map(rows_as_bytes, grid.hashes().values())) for grid in grids
    )
    assert len(first) == len(second) == ROWS
    assert not first & second


def test_two_groups_share_nothing(tmp_path):
    # customers and items have the same numbers
    grid = federation(tmp_path, "agreed", ALL)
    train(grid, THREE)
    found = {
        (node, name): rows_as_bytes(array)
        for (node, _, name), array in grid.hashes().items()
    }
    orders, customers, items = (grid.nodes[name] for name in frames())
    assert len(found) == 4
    by_customer = [found[orders, "hashes/0"], found[customers, "hashes/0"]]
    by_item = [found[orders, "hashes/1"], found[items, "hashes/0"]]
    assert by_customer[0] == by_customer[1]
    assert by_item[0] == by_item[1]
    assert not by_customer[0] & by_item[0]


def test_server_cannot_name_two_columns_alike_to_compare_them(tmp_path):
    @on_requests("query.extract")
    def change(seen):
        for order in seen.header["parts"]:
            order["key-groups"] = ["one"] * len(order["key-groups"])

    grid = federation(tmp_path, "agreed", ALL, change)
    with pytest.raises(
        SiteError, match=r"'key-groups': the run was proposed with .*group-0"
    ):
        train(grid, THREE)
    assert not grid.hashes()


def test_hashes_have_128_bits(tmp_path):
    grid = federation(tmp_path, "agreed")
    train(grid, SQL)
    for hashes in grid.hashes().values():
        assert hashes.dtype == np.uint64
        assert hashes.shape == (ROWS, 2)
        bits = np.unpackbits(hashes.view(np.uint8), axis=1)
        # each of the 128 is a fair coin, and no two of them are one: 8 standard errors
        # are exceeded by one of 8256 such numbers once in 10**11 runs
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 8 * 0.5 / np.sqrt(ROWS)
        correlation = np.corrcoef(bits.T) - np.eye(128)
        assert np.abs(correlation).max() < 8 / np.sqrt(ROWS)


def proposed(bound):
    """The tables and joins of a query as sites are told of them."""
    parts = {
        n: ProposedPart(table=t, shard=n, site="s", node="2", fragment={})
        for n, t in enumerate(bound.tables)
    }
    names = ("left", "left_key", "right", "right_key")
    joins = [
        ProposedJoin(**{name: getattr(join, name) for name in names})
        for join in bound.joins
    ]
    return Proposal(query="", parts=parts, joins=joins, outer=[], settings={})


@pytest.mark.parametrize(("joins", "expected"), CASES["joins"])
def test_queries_name_groups_by_their_joins(joins, expected):
    schema = dict.fromkeys(["id", "k", "l", "m", "x", "y"], "BIGINT")
    bound = Query.from_sql(f"SELECT a.y AS label, b.x FROM a {joins}").bind(
        dict.fromkeys("abcd", schema)
    )
    names = (
        alias + "".join(name.removeprefix("group-") for name in own)
        for alias, own in key_groups(proposed(bound)).items()
    )
    assert " ".join(names) == expected
