"""The two ways to a run's key, end to end, and what a site refuses in each."""

from itertools import permutations

import pytest
from flwr.app import Message

from client_apps.data.database import FILE
from client_apps.privacy import keys
from client_apps.rounds.site import Site
from strategies.run.grid import InProcessGrid
from tests.support.federated import run_query, train
from tests.support.files import case_table
from tests.support.peers.faulty_grid import rows_in
from tests.support.peers.keyed_sites import AB, SQL, A, B, KeyedGrid
from tp_flower.errors import SettingsError, SiteError
from tp_flower.privacy.key_agreement import GroupSecret
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.protocol.proposal import Proposal
from tp_flower.protocol.setup_messages import ExtractRequest, SealedSecret, SealRequest

CASES = case_table(__file__)
SOURCES = ("pinned", "agreed")
PAIRS = list(permutations(SOURCES, 2))
NOBODY = f"nobody {'ab' * 32}"
BY_OTHERS = "may be read or changed by others"
NOBODY_KEYS = {"public_keys": {}, "site_keys": {}}
NOTHING_PROPOSED = Proposal(query="", parts={}, joins=[], outer=[], settings={})
NOTHING = {**NOBODY_KEYS, "groups": {}, "simulated": False, "seed": 0}
OTHERS = {"2": "ab" * 32, "3": "ab" * 32}


@pytest.fixture
def make(tmp_path):
    def made(source, change=None):
        return KeyedGrid(tmp_path, AB, change).with_key_from(source)

    return made


def site_of(grid, name):
    return Site(grid.contexts[grid.nodes[name]], "5" * 32)


def in_one_run(seen):
    """Call every run by the same name."""
    if not seen.is_reply:
        seen.header["run"] = "5" * 32


@pytest.mark.parametrize("source", SOURCES)
def test_sites_share_a_key_that_no_message_carries(make, source):
    grid = make(source)
    strategy = train(grid, SQL)
    simulated = run_query(SQL, [{"a": A}, {"b": B}], num_epochs=2)
    assert strategy.report.final_train == simulated.strategy.report.final_train
    described = [s.header for s in grid.sent("query.describe", replies=True)]
    for header in described:
        assert header["keys"] == source
        assert ("site-key" in header) == (source == "pinned")
    headers = [*grid.sent("query.seal"), *grid.sent("query.extract")]
    groups = [{*s.header.get("groups", s.header.get("sealed"))} for s in headers]
    assert groups == [{"join-0", "run"}] * 3
    assert sorted(grid.secrets) == sorted(grid.nodes.values())
    (key,) = set(grid.secrets.values())
    assert not [seen for seen in grid.seen if key.hex() in str(seen.header)]
    # models and the cache have no key of the run in them
    for folder in grid.folders.values():
        files = [path for path in (folder / "state").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if key in path.read_bytes()]


def test_run_with_the_name_of_another_has_another_key(make):
    secrets = []
    for _ in range(2):
        grid = make("pinned", in_one_run)
        for folder in grid.folders.values():
            # the sites have forgotten the run, as they do after a week
            forget = "DELETE FROM entries WHERE run LIKE ? || '-%'"
            rows_in(folder / "state" / FILE, forget, "5" * 32)
        train(grid, SQL)
        secrets += set(grid.secrets.values())
    assert len(set(secrets)) == 2


@pytest.mark.parametrize("pair", PAIRS)
def test_mixed_federation(make, pair):
    grid = make("agreed")
    for name, source in zip("ab", pair, strict=True):
        if source == "pinned":
            grid.configure(name, allowed_keys=NOBODY)
    a, b = pair
    match = rf"different places \({a}: 'a-0'; {b}: 'b-0'\): give every site allowed-"
    with pytest.raises(SettingsError, match=match):
        train(grid, SQL)
    assert {seen.action for seen in grid.seen} <= {"query.describe", "query.finish"}
    # given to every site, as the error says
    train(grid.with_key_from("pinned"), SQL)


def write(name, **settings):
    return lambda grid: grid.configure(name, **settings)


def chmod(name, file, mode):
    return lambda grid: (grid.folders[name] / file).chmod(mode)


def remove(name, file):
    return lambda grid: (grid.folders[name] / file).unlink()


def in_memory(grid):
    grid.contexts[grid.nodes["a"]].node_config["state-dir"] = ":memory:"


@pytest.mark.parametrize(
    ("source", "change", "match"),
    [
        ("pinned", remove("b", "allowed_keys"), "allowed-keys cannot be read: No such"),
        ("pinned", write("b", allowed_keys="us abc"), "allowed-keys, line 1: it must"),
        ("pinned", in_memory, "allowed-keys needs a state-dir on disk"),
        ("pinned", chmod("a", "state/site-key", 0o640), f"site-key {BY_OTHERS}"),
    ],
)
def test_sites_that_are_not_set_up_are_refused_at_first(make, source, change, match):
    """When the site first speaks: nothing of its tables has left it."""
    grid = make(source)
    change(grid)
    with pytest.raises((SettingsError, SiteError), match=match) as caught:
        train(grid, SQL)
    assert {seen.action for seen in grid.seen} == {"query.describe", "query.finish"}
    for folder in grid.folders.values():
        assert str(folder) not in str(caught.value)


@CASES.each("left_out", "left_out", "match")
def test_leader_and_member_trust_pinned_keys_only(tmp_path, left_out, match):
    grid = KeyedGrid(tmp_path, AB).pin(tuple(left_out))
    with pytest.raises(SiteError, match=match.format(grid.public_key("b")[:16])):
        train(grid, SQL)
    assert 3 not in grid.secrets
    if left_out[0] == "a":
        assert not grid.leaked()
    # the key that the site's owner gives
    train(grid.pin(), SQL)
    assert 3 in grid.secrets


def test_one_list_for_all_sites_may_name_the_site_itself(tmp_path):
    grid = KeyedGrid(tmp_path, AB)
    lines = [f"{name} {grid.public_key(name)}" for name in grid.nodes]
    for name in grid.nodes:
        grid.configure(name, allowed_keys="\n".join(lines))
    train(grid, SQL)
    assert len(set(grid.secrets.values())) == 1


def test_pinned_leader_makes_no_simulated_secret(make):
    grid = make("pinned")
    # the leader's data are of this process, the server says that all are
    grid.contexts[2].node_config["tables"] = ""
    pair = site_of(grid, "b")
    site = site_of(grid, "a")
    assert site.is_simulated
    member = keys.key_fields(pair)
    leader = keys.key_fields(site)
    both = {
        f"{name}s": {"2": leader[name], "3": member[name]}
        for name in ("public_key", "site_key")
    }
    members = ["2", "3"]
    request = SealRequest(
        keys="pinned", groups={"run": members}, **both, simulated=True, seed=0
    )
    text = keys.seal(site, request).sealed["run"]["3"]
    sealed = {"run": SealedSecret(members=members, text=text)}
    request = ExtractRequest(
        keys="pinned", sealed=sealed, proposal=NOTHING_PROPOSED, parts={}, **both
    )
    keys.take_secrets(pair, request)
    assert pair.hasher().secret != GroupSecret.of_simulation(0).value


@pytest.mark.parametrize(("source", "named"), PAIRS)
def test_server_does_not_choose_the_source(make, source, named):
    site = site_of(make(source), "a")
    keys.key_fields(site)
    match = f"takes the key of a run's hashes from '{source}', and the server asks"
    with pytest.raises(SiteError, match=f"{match} for '{named}'"):
        keys.seal(site, SealRequest(keys=named, **NOTHING))
    request = ExtractRequest(
        keys=named, **NOBODY_KEYS, sealed={}, proposal=NOTHING_PROPOSED, parts={}
    )
    with pytest.raises(SiteError, match=f"{match} for '{named}'"):
        keys.take_secrets(site, request)
    assert not site.store.has("secret")


def with_groups(*groups):
    return lambda header: header["parts"][0].update({"key-groups": groups})


def key_of(field, node, key):
    return lambda header: header[field].update({node: key})


def without(field):
    return lambda header: header.pop(field)


def sealed(**fields):
    """Change what is sealed to the site, of all its groups; None leaves a field out."""

    def change(header):
        for secret in header["sealed"].values():
            secret |= {name.replace("_", "-"): own for name, own in fields.items()}
            for name in [name for name, own in secret.items() if own is None]:
                del secret[name]

    return change


@pytest.mark.parametrize(
    ("source", "change", "match"),
    [
        ("agreed", without("sealed"), "request: it has no 'sealed'"),
        ("agreed", {"sealed": {}}, "'sealed' lacks the secret of group 'run'"),
        ("agreed", sealed(text="ab" * 61), "cannot be opened"),
        ("agreed", sealed(members=None), "missing required field `members`"),
        (
            "agreed",
            sealed(members=[]),
            "'sealed' is .*; allowed: `array` of length >= 1",
        ),
        ("agreed", key_of("public-keys", "2", "00" * 32), "not an X25519 key"),
        ("agreed", sealed(members=["2"]), "keys of group 'run' lack this site's"),
        ("agreed", {"public-keys": {}}, r"'public-keys' lacks nodes \['2', '3'\]"),
        ("agreed", {"public-keys": OTHERS}, "keys of group '[a-z0-9-]+' lack this"),
        ("pinned", without("site-keys"), "request: it has no 'site-keys'"),
        ("pinned", key_of("site-keys", "2", ""), "is not in this site's allowed-keys"),
        ("pinned", sealed(members=["3", "2"]), "cannot be opened"),
        ("agreed", with_groups(), "key-groups'"),
        ("agreed", with_groups("a", "b"), "key-groups'"),
        ("agreed", with_groups("A"), "key-groups'"),
        ("pinned", {"site-keys": {}}, "'site-keys' lacks nodes"),
    ],
)
def test_hostile_requests_about_keys(make, source, change, match):
    action = "query.seal" if "'site-keys'" in match else "query.extract"

    def apply(seen):
        # the leader is node 2
        is_for = seen.node == 3 or action == "query.seal"
        if is_for and (seen.action, seen.is_reply) == (action, False):
            change(seen.header) if callable(change) else seen.header.update(change)

    grid = make(source, apply)
    with pytest.raises(SiteError, match=match):
        train(grid, SQL)
    assert 3 not in grid.secrets


class Repeating(KeyedGrid):
    """A server that asks site b for its rows again before the run is over."""

    request = again = None

    def repeat(self, last):
        header = self.request.header
        if self.is_described:
            fields = {"run": header["run"], "round": 0, "after": None}
            reply = self.send("query.describe", Packet({"tables": ["b"], **fields}))
            # the private key is gone, and the site has no other one in this run
            assert reply.header["public-key"] == header["public-keys"]["3"]
            del header["public-keys"]["2"]
        header["round"] = last["round"]
        self.again = self.send("query.extract", self.request)

    def send(self, action, packet):
        message = Message(pack(packet), 3, action, group_id="1")
        message.metadata.__dict__["_message_id"] = "again"
        return unpack(InProcessGrid._deliver(self, message).content)

    def _deliver(self, message):
        metadata = message.metadata
        if (metadata.message_type, metadata.dst_node_id) == ("query.extract", 3):
            self.request = unpack(message.content)
        if metadata.message_type == "query.finish" and self.again is None:
            self.repeat(unpack(message.content).header)
        return super()._deliver(message)


@pytest.mark.cases("False-agreed", "True-pinned")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("is_described", [False, True])
def test_rows_that_are_asked_for_twice(tmp_path, source, is_described):
    grid = Repeating(tmp_path, AB).with_key_from(source)
    # whether it asks for the site's new public key first
    grid.is_described = is_described
    train(grid, SQL)
    again = grid.again
    assert not again.arrays
    assert "another request has already extracted" in again.header["error"]
    assert again.header["kind"] == "refused"
