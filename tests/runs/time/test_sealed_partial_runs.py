"""Runs over shards that have rows of one key are those over all rows in one shard."""

import numpy as np
import pytest

from strategies import Explain
from tests.support import federated, predicted
from tests.support.peers.keyed_sites import proposal_of
from tests.support.tables.looking_back import (
    GRID,
    SQL,
    check_equal,
    shop,
    three_sites,
    trained,
    two_sites,
)
from tp_flower.errors import QueryError, SiteError
from tp_flower.settings import PrivacySettings
from tp_flower.terms.proposal_text import proposal_text

PARTIALS = {"sealed_partials": True, "test_fraction": 0.0}
WAYS = {"sealed": {"sealed_cutoffs": True}, "grid": {"cutoff_grid": GRID}}
LAST = """SELECT o.y AS label, o.online, p.amount, p.kind FROM orders o ASOF LEFT JOIN
payments p ON p.customer = o.customer AND p.paid <= o.day"""
SPREAD = """SELECT o.y AS label, o.online, w.n, w.spread, w.kind, w.last FROM orders o
LEFT JOIN LATERAL (SELECT COUNT(*) AS n, STDDEV(p.amount) AS spread, MAX(p.kind) AS
kind, MAX(p.paid) FILTER (WHERE p.amount > 20) AS last FROM payments p WHERE
p.customer = o.customer AND p.paid < o.day HAVING COUNT(*) >= 3) w ON TRUE"""
ALL_ROWS = """SELECT o.y AS label, o.online, w.n, w.mean FROM orders o LEFT JOIN LATERAL
(SELECT COUNT(*) AS n, AVG(p.amount) AS mean FROM payments p WHERE p.paid < o.day AND
p.paid >= o.day - INTERVAL 30 DAY) w ON TRUE"""


def crossing(tables, shards=2):
    """Payments of every customer in several shards, at sites of their own."""
    place = np.arange(len(tables["payments"])) % shards
    banks = {f"bank-{n}": tables["payments"][place == n] for n in range(shards)}
    others = {name: {"payments": [own]} for name, own in banks.items()}
    return {"shop": {"orders": [tables["orders"]]}, **others}


@pytest.mark.cases("sealed-SPREAD", "grid-LAST")
@pytest.mark.parametrize("sql", ["SQL", "SPREAD", "LAST", "ALL_ROWS"])
@pytest.mark.parametrize("way", WAYS)
def test_partial_answers_are_merged_into_those_over_all_rows(way, sql):
    tables = shop()
    how = {**WAYS[way], "num_epochs": 6}
    found = trained(crossing(tables, 3), globals()[sql], **PARTIALS, **how)
    expected = trained(two_sites(tables), globals()[sql], test_fraction=0.0, **how)
    check_equal(found, expected)
    rounds = [item.phase for item in found.report.history]
    assert rounds[:4] == ["seal", "cutoffs", "partials", "extract"]


def test_a_solved_model_takes_them_for_rows_like_others():
    tables = shop(60, 300)
    how = {**WAYS["grid"], "method": "moments", "tolerance": 0.0, "num_epochs": 0}
    found = trained(crossing(tables), SQL, **PARTIALS, **how)
    check_equal(found, trained(two_sites(tables), SQL, test_fraction=0.0, **how))


def test_new_rows_are_predicted_by_partial_answers_of_their_own(tmp_path):
    tables, new = shop(60, 300), shop(60, 300, seed=1)
    how = {**WAYS["sealed"], "l2": 0.01, "num_epochs": 3}
    model = predicted.train(
        tmp_path / "all", two_sites(tables), SQL, "cg", **how, test_fraction=0.0
    )
    expected = model.evaluate(two_sites(new))
    shared = predicted.train(
        tmp_path / "own", crossing(tables), SQL, "cg", **how, **PARTIALS
    )
    found = shared.evaluate(crossing(new), sealed_partials=True)
    assert found == pytest.approx(expected, rel=1e-6)


def test_keys_in_several_shards_are_refused_without_the_setting():
    sites = crossing(shop(60, 300))
    how = {**WAYS["grid"], "num_epochs": 1}
    for sql in (SQL, ALL_ROWS):
        with pytest.raises((QueryError, SiteError), match="set sealed-partials = true"):
            trained(sites, sql, **how)
        trained(sites, sql, **how, **PARTIALS)


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        ("COUNT(DISTINCT p.kind)", r"'w': COUNT\(DISTINCT .* write COUNT, SUM"),
        ("EPOCH(MIN(o.day - p.paid))", r"MIN\(.* is of type INTERVAL.* as EPOCH\(x\)"),
    ],
)
def test_what_shards_cannot_send_is_refused_by_name(refused, match):
    sites = crossing(shop(60, 300))
    how = {**WAYS["grid"], "num_epochs": 1, **PARTIALS}
    sql = SQL.replace("COUNT(*)", refused)
    assert sql != SQL
    with pytest.raises((QueryError, SiteError), match=match):
        trained(sites, sql, **how)
    # what the messages say to write is in it
    trained(sites, SQL, **how)


def sites_with(folder, rules):
    tables = shop(60, 300)
    place = np.arange(len(tables["payments"])) % 2
    sites = {
        f"bank-{n}": federated.write_site(
            folder / str(n),
            {"payments": tables["payments"][place == n]},
            {"payments": rules},
            f"bank-{n}",
        )
        for n in range(2)
    }
    orders = {"orders": "most-unmatched = 0.5"}
    shop_site = federated.write_site(
        folder / "shop", {"orders": tables["orders"]}, orders, "shop"
    )
    return {"shop": shop_site, **sites}


@pytest.mark.cases("open", "few rows")
@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ("", r"\(releases.partials = never\) refuses: the run asks for what"),
        (
            'releases.partials = "never"',
            r"\(releases.partials = never\) refuses: the run asks for what",
        ),
        (
            'releases.partials = "partner"\nmin-rows = 5',
            r"\(min-rows\) refuses: a partial answer of one key",
        ),
    ],
    ids=["open", "never", "few rows"],
)
def test_partial_answers_leave_by_a_policy_that_says_so(tmp_path, rules, match):
    sql = SQL.replace(") w ON TRUE", " HAVING COUNT(*) >= 5) w ON TRUE")
    how = {**WAYS["grid"], "num_epochs": 1, **PARTIALS}
    sites = sites_with(tmp_path, rules)
    with pytest.raises(SiteError, match=match):
        trained(sites, sql, **how)
    # where all rows of a key are in one shard
    trained(three_sites(shop(60, 300)), sql, **{**how, "sealed_partials": False})


HIDDEN = """releases.partials = "partner"
min-rows = 1
columns = ["amount"]
filters = ["paid", "kind"]
keys = ["customer"]"""


@pytest.mark.parametrize(
    ("more", "having"),
    [(", MAX(p.kind) AS kind", ""), ("", " HAVING MIN(p.kind) > ''")],
)
def test_partial_answers_are_of_columns_that_features_may_read(tmp_path, more, having):
    """Whatever the query does with them, they leave as values."""
    sql = f"""SELECT o.y AS label, o.online, w.total FROM orders o LEFT JOIN LATERAL
    (SELECT SUM(p.amount) AS total{more} FROM payments p WHERE
    p.customer = o.customer AND p.paid < o.day{having}) w ON TRUE"""
    how = {**WAYS["grid"], "num_epochs": 1, **PARTIALS}
    match = r"\(columns\) refuses: a partial answer, .* reads column 'kind'"
    with pytest.raises(SiteError, match=match):
        trained(sites_with(tmp_path, HIDDEN), sql, **how)


def test_the_time_of_a_last_row_is_of_a_column_that_features_may_read(tmp_path):
    how = {**WAYS["grid"], "num_epochs": 1, **PARTIALS}
    match = r"\(columns\) refuses: a partial answer, ORDER BY .* reads column 'paid'"
    with pytest.raises(SiteError, match=match):
        trained(sites_with(tmp_path, HIDDEN), LAST.replace(", p.kind", ""), **how)


def test_no_epsilon_covers_them():
    noise = PrivacySettings(features="statistics", epsilon=1.0)
    how = {"method": "admm", "num_epochs": 1, "privacy": noise}
    with pytest.raises(QueryError, match="so that no epsilon holds"):
        trained(crossing(shop(60, 300)), SQL, **WAYS["grid"], **PARTIALS, **how)


def test_what_is_sealed_is_booked_and_explained(tmp_path):
    sites = sites_with(tmp_path, 'releases.partials = "partner"')
    how = {**WAYS["grid"], **PARTIALS}
    run = federated.run_query(SQL, sites, "cg", num_epochs=1, device="cpu", **how)
    booked = {
        each["what"]: each
        for each in run.releases
        if each["what"] in ("shard-keys", "partials")
    }
    assert booked["shard-keys"]["site"] == "bank-0"
    assert booked["shard-keys"]["action"] == "query.cutoffs"
    assert "sealed to the sites 'bank-1'" in booked["shard-keys"]["scope"]
    assert booked["partials"]["site"] == "bank-1"
    assert booked["partials"]["action"] == "query.partials"
    assert "sealed to the sites 'bank-0'" in booked["partials"]["scope"]
    # no hash of a group goes to the server
    assert not [n for _, n in run.arrays("query.extract", replies=True) if "group" in n]
    explain = federated.train(sites, SQL, Explain, mode="explain", **how)
    told = [
        (each["message"], each["carries"]) for each in explain.explanation["releases"]
    ]
    _, keys = [text for name, text in told if name == "query.cutoffs"]
    assert "later shards of w: which of their keys" in keys
    _, answers = [text for name, text in told if name == "query.partials"]
    assert "earlier shards of w: for each key that both have" in answers
    (_, window) = explain.explanation["tables"]
    work = " ".join(window["work"])
    # the keys of one, the answers of the other
    assert work.count("it seals its keys and partial answers for other sites") == 2
    proposal = proposal_of(run.sent("query.partials")[0].header)
    assert proposal == proposal_of(run.sent("query.extract")[0].header)
    asked = " ".join(proposal_text(proposal, ["bank-1"]).split())
    assert "w tells the sites of the table's other shards, sealed, which keys" in asked
