"""With whom a table takes part: partners by the names that its owner has given their
keys.
"""

import pytest

from tests.support.federated import train, write_site
from tests.support.ledgers import ledger_lines
from tests.support.peers.keyed_sites import AB, SQL, KeyedGrid
from tp_flower.errors import SiteError, SourceError
from tp_flower.sources.policy_entries import read_policy

C = AB["b"].rename(columns={"x": "z"})
ABC = {**AB, "c": C}
CHAIN = "SELECT a.y AS label, b.x, c.z FROM a JOIN b ON a.k = b.k JOIN c ON a.k = c.k"


def federation(folder, rules, tables=AB, change=None):
    """Sites with pinned keys, of which the owner of table a has these rules."""
    grid = KeyedGrid(folder, tables, change).pin()
    write_site(folder / "a", {"a": tables["a"]}, {"a": rules}, site="a-0")
    return grid


@pytest.mark.parametrize("rules", ["", 'partners = "any"', 'partners = ["b"]'])
def test_a_table_takes_part_with_the_partners_of_its_owner(tmp_path, rules):
    assert train(federation(tmp_path, rules), SQL).report.history


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [("partners = []", "no other site"), ('partners = ["b"]', "b")],
)
def test_a_site_that_is_no_partner_is_refused_by_its_name(tmp_path, rules, allowed):
    grid = federation(tmp_path, rules, ABC)
    match = (
        r"\(partners\) refuses: site '[bc]' takes part in the run; its owner allows "
        rf"{allowed}$"
    )
    with pytest.raises(SiteError, match=match):
        train(grid, CHAIN)
    refusals = ledger_lines(grid.folders["a"] / "state", "refuse")
    assert [line for line in refusals if "partners" in line["reason"]]


def test_partners_need_pinned_keys(tmp_path):
    grid = KeyedGrid(tmp_path, AB)
    write_site(tmp_path / "a", {"a": AB["a"]}, {"a": 'partners = ["b"]'}, site="a-0")
    match = (
        r"\(partners\) refuses: this site does not pin .* allowed-keys = \"FILE\" .* "
        r"site-key"
    )
    with pytest.raises(SiteError, match=match):
        train(grid, SQL)


def as_a_shard_of_b(seen):
    """Say that site c has rows of b's table, to give it the key of the masks of a and
    b.
    """
    if seen.action == "query.seal" and "join-0" in seen.header.get("groups", ()):
        seen.header["groups"]["join-0"].append("4")
    if seen.action == "query.extract" and not seen.is_reply:
        parts = seen.header["proposal"]["parts"]
        of_c = {"site": "c-0", "node": "4", "site-key": parts["2"]["site-key"]}
        parts["9"] = {**parts["1"], **of_c}
        for group, sealed in seen.header["sealed"].items():
            if group == "join-0" and "4" not in sealed["members"]:
                sealed["members"].append("4")


def test_a_shard_that_the_server_claims_for_another_site_is_a_partner_like_others(
    tmp_path,
):
    """One that is not listed gets no key; one that is listed may side with the
    server.
    """
    grid = federation(tmp_path, 'partners = ["b"]', ABC, as_a_shard_of_b)
    with pytest.raises(SiteError, match=r"\(partners\) refuses: site 'c' takes part"):
        train(grid, CHAIN)
    assert grid.nodes["a"] not in grid.secrets


@pytest.mark.parametrize("value", ["b", 3, ["b", 3]])
def test_partners_are_a_list_of_names_or_any(value):
    with pytest.raises(
        SourceError, match="'partners' of the policy of table 't' must be"
    ):
        read_policy({"policy": {"partners": value}}, {}, "table 't'")
    assert (
        read_policy({"policy": {"partners": "any"}}, {}, "table 't'").partners is None
    )
