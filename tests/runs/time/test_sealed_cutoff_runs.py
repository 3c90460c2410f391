"""Runs over cutoffs that sites seal for each other are exact.

They are the runs over a table that DuckDB has made, of the keys that the sub-query's
site has.
"""

import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest

from strategies import STRATEGIES, Explain
from tests.support import federated, predicted
from tests.support.federated import pieces
from tests.support.peers.keyed_sites import proposal_of
from tests.support.peers.session_front import sessions
from tests.support.tables.looking_back import (
    GRID,
    MADE,
    SQL,
    check_equal,
    one_site,
    shop,
    three_sites,
    trained,
    two_sites,
    windows_of,
)
from tp_flower.errors import QueryError, SettingsError, SiteError, TPFlowerError
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.terms.proposal_text import proposal_text

SEALED = {"sealed_cutoffs": True}


def made_of(tables):
    """The orders and their windows, of customers who have paid nothing one for all."""
    orders = tables["orders"]
    is_known = orders["customer"].isin(set(tables["payments"]["customer"]))
    named = orders.assign(id=orders["id"].where(is_known, -1))
    windows = windows_of({**tables, "orders": named}).drop_duplicates("id")
    return one_site({"orders": named, "windows": windows})


def actions(run):
    return [item.phase for item in run.report.history]


@pytest.mark.parametrize("method", ["cg", "boost", "moments"])
def test_sealed_cutoffs_are_those_of_every_row(method):
    tables = shop()
    how = {"num_epochs": 0 if method == "moments" else 3, "method": method}
    how["tolerance"] = 0.0 if method == "moments" else 1e-9
    found = trained(two_sites(tables), SQL, **SEALED, **how)
    expected = trained(made_of(tables), MADE, **how)
    check_equal(found, expected)
    # one round more than an equi-join takes, before the rows are extracted
    assert actions(found)[:3] == ["seal", "cutoffs", "extract"]
    assert len(actions(found)) == len(actions(expected)) + 1


def test_cutoffs_are_sealed_in_sessions():
    """A site answers all messages of a run in one of Flower's."""
    tables = shop(60, 300)
    how = {**SEALED, "num_epochs": 2}
    with (
        tempfile.TemporaryDirectory(prefix="tp-") as folder,
        sessions(two_sites(tables), Path(folder)) as (grid, *_),
    ):
        found = STRATEGIES["cg"](Query.from_sql(SQL), device="cpu", **how)
        found.start(grid)
    check_equal(found, trained(two_sites(tables), SQL, **how))
    assert not grid.refused


def test_where_one_site_has_all_rows_nothing_is_sealed():
    tables = shop()
    found = trained(one_site(tables), SQL, **SEALED, num_epochs=2)
    check_equal(found, trained(one_site(tables), SQL, num_epochs=2))
    assert "cutoffs" not in actions(found)


def sharded(tables):
    """Orders and payments in two shards each, at three sites, of which one has both."""
    orders = pieces(tables["orders"], 70)
    sites = three_sites(tables)
    sites["shop"] = {"orders": orders[:1]}
    sites["bank-1"]["orders"] = orders[1:]
    return sites


def test_several_sites_seal_their_cutoffs_for_several():
    tables = shop()
    # which rows are held out depends on the shards
    how = {**SEALED, "test_fraction": 0.0}
    found = trained(sharded(tables), SQL, **how)
    check_equal(found, trained(made_of(tables), MADE, test_fraction=0.0))


def test_sub_queries_that_compare_the_same_columns_share_what_is_sealed():
    other = SQL.replace(
        ") w ON TRUE",
        ") w ON TRUE LEFT JOIN LATERAL (SELECT MAX(p.amount) AS most FROM payments p "
        "WHERE p.customer = o.customer AND p.paid < o.day) v ON TRUE",
    ).replace("w.since FROM", "w.since, v.most FROM")
    with federated.WatchedGrid(two_sites(shop())) as grid:
        federated.train(grid, other, "cg", num_epochs=1, device="cpu", **SEALED)
    assert len(grid.arrays("query.cutoffs", replies=True)) == 1
    cutoffs = [n for _, n in grid.arrays("query.extract") if n.startswith("cutoffs")]
    assert cutoffs == ["cutoffs/0-0-1"]
    assert {seen.node for seen in grid.sent("query.cutoffs")} == {2}


def test_new_rows_seal_their_own_cutoffs(tmp_path):
    """Evaluated on other rows as a model that DuckDB's windows have trained."""
    new = shop(seed=1)
    model = predicted.train(
        tmp_path / "own", two_sites(shop()), SQL, "cg", l2=0.01, **SEALED
    )
    # the form is the model's, and needs no setting
    found = model.evaluate(two_sites(new))
    reference = predicted.train(tmp_path / "made", made_of(shop()), MADE, "cg", l2=0.01)
    assert found == pytest.approx(reference.evaluate(made_of(new)), rel=1e-6)
    assert model.table(two_sites(new)).num_rows == len(new["orders"])
    with pytest.raises(QueryError, match="features differ from those of model"):
        model.evaluate(two_sites(new), cutoff_grid=GRID)


@pytest.mark.parametrize(
    "privacy",
    [
        PrivacySettings(features="statistics", epsilon=1.0),
        PrivacySettings(scores="clear", predictions=1.0),
    ],
)
def test_no_epsilon_covers_sealed_cutoffs(privacy):
    how = {"method": "admm", "num_epochs": 2, "privacy": privacy}
    with pytest.raises(QueryError, match="so that no epsilon holds"):
        trained(two_sites(shop()), SQL, **SEALED, **how)


def test_a_grid_or_sealed_cutoffs():
    config = {"cutoff-grid": GRID, "sealed-cutoffs": True}
    with pytest.raises(SettingsError, match=r"cutoff-grid: .* not go with sealed-c"):
        Settings.from_run_config(config)
    for mended in ({"cutoff-grid": ""}, {"sealed-cutoffs": False}):
        Settings.from_run_config({**config, **mended})


def sites_with(folder, releases=""):
    tables = shop()
    rules = f"most-unmatched = 0.3\n{releases}"
    return federated.site_per_table(folder, tables, {"orders": rules})


def test_cutoffs_leave_by_a_policy_that_says_so(tmp_path):
    """Nobody else's do, whatever a policy lets leave besides."""
    for number, rules in enumerate(["", 'releases.cutoffs = "never"']):
        with pytest.raises(SiteError, match=r"\(releases.cutoffs = never\) refuses"):
            trained(sites_with(tmp_path / str(number), rules), SQL, **SEALED)
    orders = federated.write_site(tmp_path / "shop", {"orders": shop()["orders"]})
    payments = federated.write_site(tmp_path / "bank", {"payments": shop()["payments"]})
    sites = {"shop": orders, "bank": payments}
    with pytest.raises(SiteError, match="set cutoff-grid in place of sealed-cutoffs"):
        trained(sites, SQL, **SEALED)
    trained(sites, SQL, cutoff_grid=GRID, num_epochs=1)
    released = sites_with(tmp_path / "all", 'releases.cutoffs = "partner"')
    found = trained(released, SQL, **SEALED, num_epochs=2)
    tables = shop()
    check_equal(found, trained(made_of(tables), MADE, num_epochs=2))


def test_what_is_sealed_is_booked_once_and_explained(tmp_path):
    sites = sites_with(tmp_path, 'releases.cutoffs = "partner"')
    run = federated.run_query(SQL, sites, "cg", num_epochs=1, device="cpu", **SEALED)
    (booked,) = [each for each in run.releases if each["what"] == "cutoffs"]
    assert (booked["table"], booked["action"]) == ("orders", "query.cutoffs")
    assert "recognise the keys that they have or guess" in booked["scope"]
    assert "public keys that the server relayed" in booked["scope"]
    explain = federated.train(sites, SQL, Explain, mode="explain", **SEALED)
    explanation = explain.explanation
    _, told = [e for e in explanation["releases"] if e["message"] == "query.cutoffs"]
    assert told["to"] == "sites"
    assert "to the sites of w: at which cutoffs each key has rows" in told["carries"]
    assert "ChaCha20-Poly1305" in told["protection"]
    proposal = proposal_of(run.sent("query.cutoffs")[0].header)
    assert proposal == proposal_of(run.sent("query.extract")[0].header)
    asked = " ".join(proposal_text(proposal, ["orders"]).split())
    assert "o tells the sites of w, sealed, at which times each of its keys" in asked
    assert "sub-query cutoffs: of the rows of o, sealed by their site" in asked
    (around, window) = [" ".join(table["work"]) for table in explanation["tables"]]
    assert "with cutoffs of the rows of o, sealed by their site" in window
    pairs = shop()["orders"][["customer", "day"]].drop_duplicates()
    sealed = next(seen for seen in run.sent("query.cutoffs", replies=True)).arrays
    (size,) = [array.nbytes for array in sealed.values()]
    assert 24 * len(pairs) < size < 30 * len(pairs) + 2000
    assert f"seals its keys and cutoffs for other sites: {size / 1000:.1f} KB" in around


def test_sites_without_a_key_in_common_explain_that_nothing_matches():
    tables = shop(60, 300)
    tables["payments"]["customer"] += 100
    explain = federated.train(two_sites(tables), SQL, Explain, mode="explain", **SEALED)
    (_, window) = explain.explanation["tables"]
    # the answer about no rows is that of all orders
    assert window["rows"] == [1]
    assert window["multiplicity"]["max"] == 60
    assert "no joined row has a row of LATERAL sub-query 'w'" in " ".join(
        explain.warnings
    )


@pytest.mark.parametrize(
    "kind", ["datetime64[s]", "datetime64[ns]", "int16", "uint32", "int64"]
)
def test_cutoffs_of_every_exact_type(kind):
    """Days as numbers, and times of several units."""
    tables = shop(60, 300)
    sql = SQL
    if "int" in kind:
        sql = sql.replace("EPOCH(o.day) - EPOCH(p.paid)", "o.day - p.paid")
        sql = sql.replace("INTERVAL 90 DAY", "90")
        for table, name in (("orders", "day"), ("payments", "paid")):
            days = tables[table][name] - np.datetime64("2019-01-01")
            tables[table][name] = days.dt.days
    tables["orders"]["day"] = tables["orders"]["day"].astype(kind)
    how = {"num_epochs": 2, "test_fraction": 0.0}
    found = trained(two_sites(tables), sql, **SEALED, **how)
    paid = set(tables["payments"]["customer"])
    orders = tables["orders"]
    tables["orders"] = orders[orders["customer"].isin(paid)]
    check_equal(
        trained(two_sites(tables), sql, **SEALED, **how),
        trained(one_site(tables), sql, **how),
    )
    assert found.report.joined_rows_train == len(orders)


def test_keys_of_other_types_are_refused_as_those_of_any_join():
    tables = shop()
    tables["payments"]["customer"] = tables["payments"]["customer"].astype(str)
    with pytest.raises(TPFlowerError, match=r"differ in type.*: text and number; cast"):
        trained(two_sites(tables), SQL, **SEALED, num_epochs=1)
    cast = SQL.replace(" p.customer =", " CAST(p.customer AS INT) =")
    assert cast != SQL
    trained(two_sites(tables), cast, **SEALED, num_epochs=1)


def test_keys_of_several_columns_of_which_one_is_a_uuid():
    """The columns are compared in the order of their names, whatever the query's is."""
    tables = shop(60, 300)
    for table in tables.values():
        table["branch"] = table["customer"] % 3
        table["customer"] = [str(uuid.UUID(int=n)) for n in table["customer"]]
    paid = set(tables["payments"]["customer"])
    tables["orders"] = tables["orders"][tables["orders"]["customer"].isin(paid)]
    sql = SQL.replace(
        "p.customer = o.customer",
        "CAST(p.customer AS UUID) = CAST(o.customer AS UUID) AND p.branch = o.branch",
    )
    how = {"num_epochs": 2, "test_fraction": 0.0}
    check_equal(
        trained(two_sites(tables), sql, **SEALED, **how),
        trained(one_site(tables), SQL, **how),
    )
