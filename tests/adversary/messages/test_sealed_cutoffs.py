"""A server, or a partner, that would have more of cutoffs than sites seal for it.

The shop has orders, the bank payments: the shop seals its cutoffs for the bank.
"""

from dataclasses import replace

import numpy as np
import pytest

from client_apps.privacy import sealed_pairs as sealing
from strategies.setup import extract
from tests.support import federated
from tests.support.federated import WatchedGrid, on_requests, pieces
from tests.support.joined import slow_cutoffs
from tests.support.peers.hostile import like
from tests.support.peers.keyed_sites import KeyedGrid
from tests.support.tables.looking_back import GRID, SQL, shop, two_sites
from tp_flower.errors import PolicyError, QueryError, SiteError
from tp_flower.extraction import sealed_pairs
from tp_flower.extraction.sealed_pairs import MOST_PAIRS, KeyedPairs
from tp_flower.protocol.packet import Packet, bytes_of, pack, unpack
from tp_flower.settings import PrivacySettings

RELEASED = 'releases.cutoffs = "partner"\nmost-unmatched = 0.5\n'
SHOP, BANK = 2, 3
HOW = {"num_epochs": 1, "device": "cpu", "sealed_cutoffs": True}
COUNTS = SQL.replace(", w.since", "")
LISTED = 'columns = ["online", "y"]\nlabels = ["y"]\nkeys = ["customer", "day"]'


def sites_of(folder, rules=""):
    return federated.site_per_table(folder, shop(), {"orders": RELEASED + rules})


def run(sites, change=None, sql=COUNTS, **how):
    with WatchedGrid(sites, change) as grid:
        federated.train(grid, sql, "cg", **{**HOW, **how})
    return grid


def refused(sites, match, change=None, action="", node=SHOP, **how):
    """Run with a change of a request to a node; return what had been sent."""

    @on_requests(action)
    def changed(seen):
        if node == seen.node:
            change(seen)

    raised = pytest.raises((SiteError, QueryError), match=match)
    with WatchedGrid(sites, changed) as grid, raised:
        federated.train(grid, how.pop("sql", COUNTS), "cg", **{**HOW, **how})
    return grid


def nothing_left(grid):
    return not grid.arrays("query.cutoffs", replies=True)


def test_the_server_is_shown_bytes_of_which_it_has_no_key():
    tables = shop()
    grid = run(two_sites(tables))
    ((place, sealed),) = grid.arrays("query.cutoffs", replies=True).items()
    assert place == (0, f"cutoffs/{BANK}-0-1")
    arrived = grid.arrays("query.extract")
    assert np.array_equal(arrived[1, "cutoffs/0-0-1"], sealed)
    days = tables["orders"]["day"].to_numpy().astype("datetime64[us]").view(np.int64)
    content = sealed.tobytes()
    assert not [day for day in days.tolist() if day.to_bytes(8, "little") in content]


def other_proposal(seen):
    seen.header["proposal"]["query"] += " "


def other_readings(seen):
    for part in seen.header["parts"]:
        part["readings"] = {"day": {"type": "DATE", "format": "%Y"}}


def other_members(seen):
    seen.header["public-keys"]["9"] = seen.header["public-keys"][str(BANK)][::-1]


@pytest.mark.parametrize("change", [other_proposal, other_readings, other_members])
def test_rows_are_extracted_by_the_request_that_cutoffs_were_sealed_by(
    tmp_path, change
):
    match = "another request has already brought the secrets of this run"
    refused(sites_of(tmp_path), match, change, "query.extract")


def test_a_key_in_the_place_of_the_recipients_opens_no_secret(tmp_path):
    """What a site seals to is what the secrets of the run are sealed to, and for."""

    def change(seen):
        seen.header["public-keys"][str(BANK)] = "07" * 32

    match = "the sealed secret of the run cannot be opened"
    grid = refused(sites_of(tmp_path), match, change, "query.cutoffs")
    assert nothing_left(grid)


def pinned(folder, change=None):
    grid = KeyedGrid(folder, shop(), change).pin()
    orders = {"orders": shop()["orders"]}
    federated.write_site(folder / "orders", orders, {"orders": RELEASED}, "orders-0")
    return grid


def test_under_pinned_keys_the_server_has_no_key_of_the_cutoffs(tmp_path):
    with pinned(tmp_path) as grid:
        run = federated.train(grid, COUNTS, "cg", **HOW)
    lines = [line["release"] for own in run.ledgers.values() for line in own]
    (booked,) = [each for each in lines if each["what"] == "cutoffs"]
    assert "nor by putting its own keys in their place" in booked["scope"]


def test_a_key_in_the_place_of_a_pinned_one_is_refused(tmp_path):
    @on_requests("query.cutoffs")
    def change(seen):
        seen.header["site-keys"][str(BANK)] = "07" * 32

    raised = pytest.raises(SiteError, match="is not in this site's allowed-keys")
    with pinned(tmp_path, change) as grid, raised:
        federated.train(grid, COUNTS, "cg", **HOW)
    assert nothing_left(grid)


def test_cutoffs_are_sealed_for_nodes_that_share_the_secrets(tmp_path):
    def change(seen):
        seen.header["proposal"]["parts"]["1"]["node"] = "9"

    match = "'sealed' lacks node 9 of a proposed table"
    assert nothing_left(refused(sites_of(tmp_path), match, change, "query.cutoffs"))


def test_pairs_of_another_run_are_not_opened(tmp_path):
    sites = sites_of(tmp_path)
    (old,) = run(sites).arrays("query.cutoffs", replies=True).values()

    def replay(seen):
        assert seen.arrays[1, "cutoffs/0-0-1"].shape == old.shape
        seen.arrays[1, "cutoffs/0-0-1"] = old

    match = "of table 'o' cannot be opened: site 'orders' has not sealed them for this"
    refused(sites, match, replay, "query.extract", node=BANK)


@pytest.mark.parametrize("place", [(0, "cutoffs/5-0-1"), (1, "cutoffs/4-0-1")])
def test_pairs_for_another_site_or_of_another_part_are_not_opened(place):
    tables = shop()
    is_even = tables["payments"]["customer"] % 2 == 0
    banks = [tables["payments"][is_even], tables["payments"][~is_even]]
    sites = {
        f"shop-{n}": {"orders": [own]}
        for n, own in enumerate(pieces(tables["orders"], 70))
    }
    sites |= {f"bank-{n}": {"payments": [own]} for n, own in enumerate(banks)}
    sealed = {}

    def swap(seen):
        if seen.action == "query.cutoffs" and seen.is_reply:
            sealed.update(seen.arrays)
        if (seen.action, seen.is_reply, seen.node) == ("query.extract", False, 4):
            names = {name for _, name in seen.arrays}
            assert names == {"cutoffs/0-0-1", "cutoffs/1-0-1"}
            seen.arrays[2, "cutoffs/0-0-1"] = sealed[place]

    with pytest.raises(SiteError, match="site 'shop-0' has not sealed them for this"):
        run(sites, swap)


def left_out(seen):
    del seen.arrays[1, "cutoffs/0-0-1"]


def once_more(seen):
    seen.arrays[1, "cutoffs/0-0-7"] = seen.arrays[1, "cutoffs/0-0-1"]


@pytest.mark.parametrize("change", [left_out, once_more])
def test_a_site_is_sent_the_pairs_that_its_parts_take(tmp_path, change):
    match = r"'cutoffs': the run was proposed with \['0-0-1'\], and the request says"
    refused(sites_of(tmp_path), match, change, "query.extract", node=BANK)


def test_who_seals_is_sent_no_pairs(tmp_path):
    def change(seen):
        seen.arrays[0, "cutoffs/0-0-1"] = np.zeros(9, np.uint8)

    match = r"'cutoffs': the run was proposed with \[\], and the request says"
    assert nothing_left(refused(sites_of(tmp_path), match, change, "query.cutoffs"))


def test_a_site_seals_cutoffs_of_the_fragment_that_is_proposed(tmp_path):
    def change(seen):
        seen.header["parts"][0]["fragment"]["filters"] = ['"y" > 0']

    match = "'fragment': the run was proposed with"
    assert nothing_left(refused(sites_of(tmp_path), match, change, "query.cutoffs"))


class AskingGrid(WatchedGrid):
    """Asks a site for cutoffs, before or after it answers a request like that."""

    def __init__(self, sites, action, node, change, *, is_before):
        super().__init__(sites)
        self._asks = action, node
        self._change_of_header = change
        self._is_before = is_before
        self.answer = Packet({}, {})

    def _deliver(self, message):
        metadata = message.metadata
        if (metadata.message_type, metadata.dst_node_id) != self._asks:
            return super()._deliver(message)
        if self._is_before:
            self._ask(message)
        reply = super()._deliver(message)
        if not self._is_before:
            self._ask(message)
        return reply

    def _ask(self, message):
        header = unpack(message.content).header
        header = {**header, "round": header["round"] + (not self._is_before)}
        packet = Packet(self._change_of_header(header), {})
        asked = like(message, pack(packet), "query.cutoffs")
        self.answer = unpack(super()._deliver(asked).content)


def other_types(header):
    parts = [{**part, "types": {"y": "DOUBLE"}} for part in header["parts"]]
    return {**header, "parts": parts}


@pytest.mark.parametrize(
    ("action", "node", "is_before", "how", "change", "match"),
    [
        ("query.cutoffs", SHOP, False, {}, dict, "already sealed this run's cutoffs"),
        ("query.cutoffs", SHOP, False, {}, other_types, "already sealed this run's"),
        ("query.extract", BANK, False, {}, dict, "before the rows of a run are extr"),
        ("query.extract", BANK, True, {}, dict, "no cutoffs of a table of this site"),
        ("query.extract", SHOP, True, {"cutoff_grid": GRID}, dict, "does not have"),
        ("query.extract", SHOP, False, {"cutoff_grid": GRID}, dict, "before the rows"),
    ],
)
def test_cutoffs_are_sealed_once_and_where_a_run_has_some(
    action, node, is_before, how, change, match
):
    how = {**HOW, "sealed_cutoffs": not how, **how}
    sites = two_sites(shop())
    with AskingGrid(sites, action, node, change, is_before=is_before) as grid:
        federated.train(grid, COUNTS, "cg", **how)
    assert match in grid.answer.header["error"]
    assert not grid.answer.arrays


def changed_parts(monkeypatch, change):
    """Let the server propose other fragments, by table, than the query's."""
    honest = extract._propose

    def propose(*args):
        proposal = honest(*args)
        change({part.table: part.fragment for part in proposal.parts.values()})
        return proposal

    monkeypatch.setattr(extract, "_propose", propose)


def feature_of_the_cutoff(fragments):
    fragments["w"]["features"][0][1] = 'EPOCH("(cutoff)")'


def fewer_keys(fragments):
    fragments["o"]["keys"] = [['"day"']]


def one_row(fragments):
    fragments["o"]["filters"] = ['"y" > 2.5']


def lateral_around(fragments):
    grid = {"step": "1 month", "first": "2020-01-01", "last": "2020-12-31"}
    fragments["o"]["subquery"] = fragments["w"]["subquery"] | {
        "cutoffs": {"table": "", "grid": grid | {"type": "TIMESTAMP"}},
        "columns": [["online", "COUNT(*)"], ["y", "COUNT(*)"]],
        "groups": ['"customer"'],
        "filters": ['"day" < "(cutoff)"'],
    }
    fragments["o"]["keys"] = [['"(key 0)"', '"(cutoff)"']]


@pytest.mark.parametrize(
    ("rules", "change", "match"),
    [
        (LISTED, feature_of_the_cutoff, "reads column 'day'; it may read online, y"),
        ('keys = ["customer"]', dict, r"\(keys\) refuses: join key 0 reads col.*'day'"),
        ("approved-runs = []", dict, r"\(approved-runs\) refuses"),
        ("min-rows = 5", one_row, r"\(min-rows\) refuses: the answer of table 'o'"),
        ("queries-per-day = 1", dict, r"\(queries-per-day\) refuses: 1 queries"),
        ("", fewer_keys, "whose key has not as many parts"),
        ("", lateral_around, "which is a LATERAL sub-query itself"),
    ],
)
def test_a_site_seals_what_its_policy_lets_the_run_read(
    monkeypatch, tmp_path, rules, change, match
):
    changed_parts(monkeypatch, change)
    grid = refused(sites_of(tmp_path, rules), match)
    assert nothing_left(grid) or "queries" in rules


def test_two_selections_of_rows_are_refused_before_cutoffs_of_one_leave(tmp_path):
    """One of an alias of the same table, which is not the table around."""
    sql = COUNTS.replace("SELECT o.y", "SELECT x.y AS again, o.y") + (
        " JOIN orders x ON x.id = o.id WHERE x.y < 2"
    )
    match = r"the difference of two of the run's conditions"
    grid = refused(sites_of(tmp_path, "min-rows = 5"), match, sql=sql)
    assert nothing_left(grid)


def test_a_noisy_label_is_not_sealed_as_a_cutoff(tmp_path):
    limits = (1.5e9, 1.7e9)
    noisy = PrivacySettings(labels="laplace", label_epsilon=2.0, label_range=limits)
    sql = COUNTS.replace("o.y AS label", "EPOCH(o.day) AS label")
    match = "a cutoff that is sealed, or the key beside it, reads column 'day'"
    grid = refused(sites_of(tmp_path), match, sql=sql, privacy=noisy)
    assert nothing_left(grid)


def sealing_instead(monkeypatch, change):
    """Let the shop seal other pairs than its own."""
    honest = sealing.hash_pairs
    monkeypatch.setattr(sealing, "hash_pairs", lambda *args: change(honest(*args)))


def twice(pairs):
    order = np.repeat(np.arange(len(pairs.cutoffs)), 2)
    return replace(pairs, hashes=pairs.hashes[order], cutoffs=pairs.cutoffs[order])


def unsorted(pairs):
    return replace(pairs, hashes=pairs.hashes[::-1], cutoffs=pairs.cutoffs[::-1])


def of_type(kind):
    return lambda pairs: replace(pairs, type=kind)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (twice, "not distinct, or not sorted"),
        (unsorted, "not distinct, or not sorted"),
        (of_type("VARCHAR"), "they are of type VARCHAR"),
        (of_type("DOUBLE"), "they are of type DOUBLE"),
        (of_type("DATE"), "a cutoff is no value of type DATE"),
        (of_type("SMALLINT"), "a cutoff is no value of type SMALLINT"),
    ],
)
def test_a_partner_seals_pairs_of_rows_or_is_refused(monkeypatch, change, match):
    sealing_instead(monkeypatch, change)
    refused(two_sites(shop()), f"that site 'shop' has sealed .* are refused: .*{match}")


def other_part(packet):
    (values,) = packet.header["parts"]
    arrays = {(7, name): array for (_, name), array in packet.arrays.items()}
    return bytes_of(Packet({"parts": [{**values, "id": 7}]}, arrays))


def fewer_cutoffs(packet):
    return bytes_of(
        Packet(packet.header, {**packet.arrays, (0, "cutoffs"): np.zeros(1, np.int64)})
    )


@pytest.mark.parametrize(
    "content", [lambda _: b"", lambda _: bytes(99), other_part, fewer_cutoffs]
)
def test_a_partner_seals_a_document_of_pairs(monkeypatch, content):
    monkeypatch.setattr(sealing, "bytes_of", content)
    match = "the cutoffs that site 'shop' has sealed of table 'o' are refused"
    refused(two_sites(shop()), match)


def test_a_partner_seals_no_more_pairs_than_a_site_answers(monkeypatch):
    """Of one site, of several together, and at the site that seals them."""
    pairs = len(shop()["orders"][["customer", "day"]].drop_duplicates())
    monkeypatch.setattr(sealing, "MOST_PAIRS", pairs - 1)
    refused(
        two_sites(shop()), f"sent more than {pairs - 1} pairs of a key and a cutoff"
    )
    monkeypatch.setattr(sealed_pairs, "MOST_PAIRS", pairs - 1)
    match = "are not sealed: set cutoff-grid in place of sealed-cutoffs"
    refused(two_sites(shop()), match)
    run(two_sites(shop()), sealed_cutoffs=False, cutoff_grid=GRID)
    monkeypatch.setattr(sealing, "hash_pairs", unchecked)
    refused(two_sites(shop()), f"there are more than {pairs - 1} of them")
    assert MOST_PAIRS == 4_000_000


def unchecked(pairs, kind, kinds, hasher):
    """Hashes as many as there are, whatever their order."""
    hashes = hasher.tag_texts(pairs[sealed_pairs.TEXT])
    numbers = pairs["(cutoff)"].combine_chunks().cast("int64").to_numpy()
    return KeyedPairs(hashes, numbers, kind, kinds)


def test_the_time_that_sealed_cutoffs_take_is_limited(tmp_path):
    source, around = slow_cutoffs(tmp_path)
    with pytest.raises(PolicyError, match=r"query-seconds = 1\) refuses"):
        sealed_pairs.read_key_texts(source, around, 0, 0, b"")


def test_a_site_that_guesses_no_key_has_its_own_answered_alone():
    """The bank has one row for all others: the server counts the answers."""
    tables = shop()
    grid = run(two_sites(tables))
    (bank,) = [s for s in grid.sent("query.extract", replies=True) if s.node == BANK]
    orders = tables["orders"]
    known = orders[orders["customer"].isin(set(tables["payments"]["customer"]))]
    pairs = known[["customer", "day"]].drop_duplicates()
    assert bank.header["parts"][0]["rows"] == len(pairs) + 1
