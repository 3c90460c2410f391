"""Whole-run approval: a site answers in the runs that its owner has approved, and in no
other.
"""

import copy
import json
import re
import tomllib

import pytest

from client_apps.data.ledger import open_ledger
from client_apps.privacy import approval
from strategies import Explain
from strategies.run.sites import find_sites
from tests.support.command_line import invoke, printed_by, refused_by, site_options
from tests.support.federated import LocalGrid, train, write_site
from tests.support.files import case_table
from tests.support.peers.hostile import (
    ORDERS_TEXT,
    SHOP,
    SQL,
    HostileGrid,
    ledger_lines,
    tables,
)
from tests.support.predicted import predicting, unlabelled
from tp_flower.errors import QueryError, SiteError
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import Packet
from tp_flower.protocol.setup_messages import DescribeRequest
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.terms.fragment_text import text_digest

CASES = case_table(__file__)
RULES = CASES["rules"]
NONE_WAITS = "No run waits for an approval.\n"
EXPLAINING = {"method": Explain, "mode": "explain"}
RUN = {
    "strategy": "admm",
    "encoders": "o.price=range(0, 9); o.day=cyclic(28)",
    "num_epochs": 1,
}


def grid_of(folder, approved, instead=None):
    listed = json.dumps([*approved])
    policies = {"orders": f"{RULES}\napproved-runs = {listed}"}
    return HostileGrid(folder, policies=policies, instead=instead)


def run(folder, approved=(), sql=SQL, method=None, instead=None, **settings):
    grid = grid_of(folder, approved, instead)
    if private := settings.pop("privacy", None):
        settings["privacy"] = PrivacySettings(**private)
    settings = {**RUN, **settings}
    return train(grid, sql, method or settings["strategy"], **settings)


def refused(folder, *arguments, **settings):
    """Run, and return the shop's refusal as it stands in the ledger."""
    match = r"site 'shop', .* \(approved-runs\) refuses: the run "
    with pytest.raises(SiteError, match=match):
        run(folder, *arguments, **settings)
    return ledger_lines(folder, "shop", "refuse")[-1]


@pytest.fixture(scope="module")
def approved(tmp_path_factory):
    """The digest of the run that the owner has approved."""
    return refused(tmp_path_factory.mktemp("approved"))["proposal"]


def test_a_run_waits_until_its_owner_has_read_and_approved_it(tmp_path):
    line = refused(tmp_path)
    assert "source" not in line
    (proposal,) = approval.refused_proposals([line])
    assert proposal.digest == line["proposal"]
    reason = f"the run {proposal.digest} is not approved; its owner reads"
    assert reason in line["reason"]
    # the others were asked for the same
    assert ledger_lines(tmp_path, "us")[-1]["proposal"] == proposal.digest
    file = tmp_path / "shop" / "tables.toml"
    before = file.read_text()
    shown = invoke("approve", *site_options(tmp_path), answer="n\n")
    assert shown.exit_code == 0
    for text in CASES["shown"]:
        assert text in " ".join(shown.stdout.split())
    assert file.read_text() == before
    answer = invoke("approve", *site_options(tmp_path), answer="y\n")
    assert answer.stdout.startswith(f"RUN {proposal.digest}\nTABLES\n")
    words = 'Approved: approved-runs of [tables."orders"]'
    assert words in answer.stdout.replace(".policy", "")
    rules = tomllib.loads(file.read_text())["tables"]["orders"]["policy"]
    assert rules["approved-runs"] == [proposal.digest]
    assert printed_by("approve", *site_options(tmp_path)) == NONE_WAITS
    run(tmp_path, [proposal.digest])
    assert ledger_lines(tmp_path, "shop")[-1]["proposal"] == proposal.digest


@pytest.mark.parametrize("change", CASES["changes"], ids=lambda change: change["what"])
def test_an_approval_is_not_replayed_for_another_run(tmp_path, approved, change):
    """Most ask this owner for the approved query, whose text alone ``approved-queries``
    bound.
    """
    other = {"sql": change.get("sql", SQL), **change.get("settings", {})}
    line = refused(tmp_path, [approved], **other)
    # not even one that asks this owner for nothing else
    asks_otherwise = change.get("asks-otherwise", False)
    assert (line["digest"] != text_digest(ORDERS_TEXT)) == asks_otherwise
    assert line["proposal"] != approved


def test_approved_training_may_be_explained_and_the_other_way_round(tmp_path, approved):
    run(tmp_path, [approved], **EXPLAINING)
    run(tmp_path, [approved], **EXPLAINING, output_dir=str(tmp_path / "out"))
    assert refused(tmp_path, **EXPLAINING)["proposal"] == approved
    # what is the operator's own is no part of it
    run(tmp_path, [approved], site_timeout=99.0, progress=False, track="")


def test_approved_training_is_no_approval_of_predictions(tmp_path, approved):
    trained = run(tmp_path, [approved])

    def predict(*approvals, **settings):
        strategy = predicting(trained, unlabelled(SQL), **settings)
        strategy.start(grid_of(tmp_path, [approved, *approvals]))

    with pytest.raises(SiteError, match="approved-runs"):
        predict()
    line = ledger_lines(tmp_path, "shop", "refuse")[-1]
    predict(line["proposal"])
    # nor is that of one model of another
    with pytest.raises(SiteError, match="approved-runs"):
        predict(line["proposal"], model_name="another")


def test_a_server_that_tells_an_owner_of_another_run_gets_nothing(tmp_path, approved):
    """The approved proposal before a request for another column."""
    kept = {}

    def watch(action, _, packet):
        if action == Action.EXTRACT:
            kept["proposal"] = packet.header["proposal"]
        return packet

    run(tmp_path / "approved", [approved], instead=watch)

    def replay(action, node, packet):
        if action == Action.EXTRACT and node == SHOP:
            proposal = copy.deepcopy(kept["proposal"])
            nodes = {
                (part["table"], part["site"]): part["node"]
                for part in packet.header["proposal"]["parts"].values()
            }
            for part in proposal["parts"].values():
                part["node"] = nodes[part["table"], part["site"]]
            return Packet({**packet.header, "proposal": proposal}, packet.arrays)
        return packet

    sql = SQL.replace("o.price, ", "")
    match = r"site 'shop', .*'fragment': the run was proposed with"
    with pytest.raises(SiteError, match=match):
        run(tmp_path / "other", [approved], sql=sql, instead=replay, encoders="")
    assert ledger_lines(tmp_path / "other", "shop") == []


def test_what_is_described_before_an_approval_counts_no_rows(tmp_path):
    """Of the same columns, other rows have the same description."""

    def described(folder, rows, approved):
        frame = tables()["shop"]["orders"].iloc[:rows].assign(note=None)
        frame.loc[frame.index[3:], "note"] = "by taxi"
        policies = {"orders": f"columns = ['price', 'note']\n{approved}"}
        write_site(folder, {"orders": frame}, policies, "shop")
        with LocalGrid({"shop": folder / "tables.toml"}) as grid:
            request = DescribeRequest(["orders"])
            inventory = find_sites(grid, Settings(), request, "5" * 32)
        (shard,) = inventory.shards
        return shard

    approvals = "approved-runs = []"
    few, more = (
        described(tmp_path / f"approved-{rows}", rows, approvals) for rows in (3, 5)
    )
    assert (few.rows, few.all_null) == (None, [])
    assert few == more
    open_shard = described(tmp_path / "open", 3, "")
    assert (open_shard.rows, open_shard.all_null) == (3, ["note"])


@pytest.mark.parametrize("column", ["o.pric", "pric"])
def test_a_query_that_names_no_column_is_told_none(tmp_path, column):
    sql = SQL.replace("o.price", column)
    with pytest.raises(QueryError, match=r"no (table has a )?column 'pric'") as raised:
        run(tmp_path, sql=sql)
    assert not {"price", "day", "cust"} & {*re.findall(r"\w+", str(raised.value))}


def test_a_proposal_is_kept_up_to_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(approval, "MOST_BYTES", 100)
    assert refused(tmp_path)["document"] is None
    assert printed_by("approve", *site_options(tmp_path)) == NONE_WAITS


def test_the_file_of_the_operator_is_as_good(tmp_path, approved):
    with pytest.raises(SiteError):
        run(tmp_path, output_dir=str(tmp_path / "out"))
    file = tmp_path / "out" / "proposal.json"
    open_ledger(str(tmp_path / "shop" / "state")).begin_anew()
    text = printed_by("approve", file, "--yes", *site_options(tmp_path))
    assert text.startswith(f"RUN {approved}\n")
    rules = (tmp_path / "shop" / "tables.toml").read_text()
    assert f'approved-runs = ["{approved}"]' in rules
    refusal = refused_by("approve", "--yes", *site_options(tmp_path), status=2)
    assert "name its proposal.json" in refusal


def test_a_run_that_cannot_be_read_does_not_hide_others(tmp_path):
    first = refused(tmp_path)
    document = first["document"]
    document["settings"]["no-such\u202esetting"] = 1
    ledger = open_ledger(str(tmp_path / "shop" / "state"))
    line = {"table": "orders", "site": "shop", "document": document}
    ledger.record("7-a", "refuse", [line], {})
    shown = invoke("approve", *site_options(tmp_path), answer="n\n").stdout
    assert shown.count("RUN sha256:") == 2
    assert shown.count("Approve this run?") == 1
    reason = "1 setting is not usable:\\n  - no-such\\u202esetting: unknown setting"
    assert f"refused: {reason}" in shown
