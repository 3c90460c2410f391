"""Runs over rows up to a cutoff are the runs over a table that DuckDB has made."""

import re
import sqlite3

import numpy as np
import pytest

from strategies.training import server_method
from tests.support import federated, predicted
from tests.support.federated import pieces
from tests.support.files import case_table
from tests.support.tables.looking_back import (
    GRID,
    MADE,
    SQL,
    check_equal,
    made,
    one_site,
    shop,
    three_sites,
    trained,
    two_sites,
    windows_of,
)
from tp_flower.errors import QueryError, SiteError
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
LAST = """SELECT o.y AS label, o.online, p.amount, p.kind FROM orders o ASOF LEFT JOIN
payments p ON p.customer = o.customer AND p.paid <= o.day"""


def on_grid(tables):
    """The windows of customers at the start of months; of those without rows one."""
    orders = tables["orders"]
    day = orders["day"].dt.to_period("M").dt.to_timestamp()
    moved = orders.assign(day=day)
    windows = windows_of({**tables, "orders": moved}).sort_values("id")
    number = moved.groupby(["customer", "day"]).ngroup().to_numpy()
    named = np.where(windows["n"] > 0, number, -1)
    windows = windows.assign(id=named).drop_duplicates("id")
    return {"orders": orders.assign(id=named), "windows": windows}


@pytest.mark.parametrize("method", ["cg", "admm", "boost", "moments"])
def test_at_one_site_the_windows_are_those_of_every_row(method):
    tables = shop()
    how = {"num_epochs": 0 if method == "moments" else 4, "method": method}
    how["tolerance"] = 0.0 if method == "moments" else 1e-9
    found = trained(one_site(tables), SQL, **how)
    windows = {"orders": tables["orders"], "windows": windows_of(tables)}
    check_equal(found, trained(one_site(windows), MADE, **how))
    assert not [text for text in found.warnings if "rows of" in text]


@pytest.mark.parametrize("split", ["time(o.day)", "group(o.customer)"])
def test_rows_are_held_out_by_their_cutoff_or_key(split):
    tables = shop()
    how = {"test_split": split, "test_fraction": 0.3}
    found = trained(one_site(tables), SQL, **how)
    windows = {"orders": tables["orders"], "windows": windows_of(tables)}
    check_equal(found, trained(one_site(windows), MADE, **how))


def test_effects_and_validation_take_the_windows_for_a_table_like_others():
    tables = shop()
    how = {"validation_fraction": 0.3, "effects": "w", "method": "boost"}
    how |= {"num_epochs": 6, "tolerance": 0.0}
    found = trained(two_sites(tables), SQL, cutoff_grid=GRID, **how)
    check_equal(found, trained(one_site(on_grid(tables)), MADE, **how))


def test_between_sites_the_windows_are_those_of_the_grid():
    tables = shop()
    found = trained(two_sites(tables), SQL, cutoff_grid=GRID)
    check_equal(found, trained(one_site(on_grid(tables)), MADE))
    assert not [text for text in found.warnings if "rows of" in text]


@pytest.mark.parametrize("sites", [one_site, two_sites])
def test_new_rows_are_scored_from_their_own_windows(tmp_path, sites):
    """Evaluated on other rows as a model that DuckDB's windows have trained."""
    new = shop(seed=1)
    how = {"cutoff_grid": GRID, "l2": 0.01}
    model = predicted.train(tmp_path / "own", sites(shop()), SQL, "cg", **how)
    found = model.evaluate(sites(new))
    windows, new_windows = (
        on_grid(tables)
        if sites is two_sites
        else {"orders": tables["orders"], "windows": windows_of(tables)}
        for tables in (shop(), new)
    )
    reference = predicted.train(
        tmp_path / "made", one_site(windows), MADE, "cg", l2=0.01
    )
    expected = reference.evaluate(one_site(new_windows))
    assert found == pytest.approx(expected, rel=1e-6)
    assert model.table(sites(new)).num_rows == len(new["orders"])


def test_a_model_of_one_window_is_not_one_of_another(tmp_path):
    model = predicted.train(tmp_path, one_site(shop()), SQL, "cg")
    with pytest.raises(QueryError, match="features differ from those of model"):
        model.evaluate(one_site(shop()), SQL.replace("90 DAY", "30 DAY"))


@pytest.mark.parametrize(
    "other",
    ["1 week from 2020-01-01 to 2021-12-31", "1 month from 2020-02-01 to 2021-12-31"],
)
def test_a_model_of_one_grid_is_not_one_of_another(tmp_path, other):
    model = predicted.train(tmp_path, two_sites(shop()), SQL, "cg", cutoff_grid=GRID)
    with pytest.raises(QueryError, match="features differ from those of model"):
        model.evaluate(two_sites(shop()), cutoff_grid=other)


def test_a_later_end_of_the_grid_keeps_the_model(tmp_path):
    model = predicted.train(tmp_path, two_sites(shop()), SQL, "cg", cutoff_grid=GRID)
    longer = GRID.replace("2021-12-31", "2022-12-31")
    found = model.evaluate(two_sites(shop()), cutoff_grid=longer)
    assert found == model.evaluate(two_sites(shop()))


def test_the_last_row_before_a_cutoff_is_that_of_duckdb():
    tables = shop()
    rows = made(tables, LAST.replace("o.y AS label, o.online", "o.id"))
    found = trained(one_site(tables), LAST)
    sql = (
        "SELECT o.y AS label, o.online, r.amount, r.kind FROM orders o "
        "LEFT JOIN rows r ON r.id = o.id"
    )
    # without a row before it there is none, and in DuckDB's answer one of NULLs
    rows = rows[rows["amount"].notna()]
    check_equal(
        found, trained(one_site({"orders": tables["orders"], "rows": rows}), sql)
    )


def test_shards_that_divide_the_keys_answer_as_one():
    tables = shop()
    sites = three_sites(tables)
    found = trained(sites, SQL, cutoff_grid=GRID)
    expected = trained(two_sites(tables), SQL, cutoff_grid=GRID)
    check_equal(found, expected)
    sites["bank-1"] = {"payments": [tables["payments"]]}
    with pytest.raises(QueryError, match="groups that cross shards"):
        trained(sites, SQL, cutoff_grid=GRID)


def test_label_rows_in_shards_of_one_site_have_their_windows():
    tables = shop()
    orders = tables["orders"]
    sharded = {
        "shop": {"orders": pieces(orders, 40, 90), "payments": [tables["payments"]]}
    }
    # which rows are held out depends on the shards
    how = {"test_fraction": 0.0}
    check_equal(trained(sharded, SQL, **how), trained(one_site(tables), SQL, **how))


@pytest.mark.parametrize("where", ["", " AND p.kind = 'card'"])
@pytest.mark.parametrize("kind", ["JOIN", "LEFT JOIN"])
def test_payments_in_shards_of_the_orders_site_answer_once(kind, where):
    """The last two customers have none, in any shard."""
    tables = shop()
    paid = tables["payments"]
    of = [paid[paid["customer"] % 3 == n] for n in range(3)]
    sharded = {"shop": {"orders": [tables["orders"]], "payments": of}}
    sql = SQL.replace("LEFT JOIN", kind).replace("90 DAY", f"90 DAY{where}")
    how = {"test_fraction": 0.0}
    check_equal(trained(sharded, sql, **how), trained(one_site(tables), sql, **how))


@pytest.mark.parametrize(("sql", "how", "match"), CASES["warnings"])
def test_what_may_tell_the_future_is_said(sql, how, match):
    found = trained(
        one_site(shop()) if not how else two_sites(shop()), sql, num_epochs=2, **how
    )
    assert any(re.search(match, text) for text in found.warnings), found.warnings


@pytest.mark.parametrize(
    "privacy",
    [
        PrivacySettings(features="statistics", epsilon=1.0),
        PrivacySettings(scores="clear", predictions=1.0),
    ],
)
def test_no_epsilon_covers_rows_before_a_cutoff(privacy):
    with pytest.raises(QueryError, match="so that no epsilon holds"):
        trained(one_site(shop()), SQL, method="admm", num_epochs=2, privacy=privacy)


def test_a_site_refuses_what_no_epsilon_covers(monkeypatch):
    """Whatever the server has overlooked."""
    monkeypatch.setattr(server_method, "check_no_cutoffs", lambda _: None)
    privacy = PrivacySettings(features="statistics", epsilon=1.0)
    with pytest.raises(SiteError, match="so that no epsilon holds"):
        trained(one_site(shop()), SQL, method="admm", num_epochs=2, privacy=privacy)


def test_a_site_refuses_noisy_labels_that_are_rows_before_a_cutoff():
    """A row would be the label of all later cutoffs."""
    sql = """SELECT w.amount AS label, o.online FROM orders o JOIN LATERAL (SELECT
    amount FROM payments p WHERE p.customer = o.customer AND p.paid < o.day
    ORDER BY p.paid DESC LIMIT 1) w ON TRUE"""
    privacy = PrivacySettings(labels="laplace", label_epsilon=1.0, label_range="0, 100")
    with pytest.raises(SiteError, match="so that no epsilon holds"):
        trained(one_site(shop()), sql, privacy=privacy, task="regression")


def test_a_policy_with_units_refuses_rows_before_a_cutoff(tmp_path):
    tables = shop()
    policy = 'privacy-unit = ["customer"]\nrows-per-unit = 100'
    file = federated.write_site(tmp_path / "shop", tables, {"payments": policy})
    with pytest.raises(
        SiteError, match="reads a row of payments at every later cutoff"
    ):
        trained({"shop": file}, SQL)


ORDERS = """columns = ["online"]\nlabels = ["y"]\nkeys = ["customer", "day"]
filters = {filters}\nexpressions = true\nmin-rows = 1\nmost-unmatched = 0.2"""
PAYMENTS = """columns = ["amount", "paid"]\nlabels = []\nkeys = ["customer"]
filters = ["paid"]\nexpressions = true\nmin-rows = 1"""


def test_policies_that_list_keys_and_filters_allow_a_grid(tmp_path):
    """A key and a cutoff, and the condition that it lies on the grid."""
    tables = shop()

    def sites(filters):
        policies = {"orders": ORDERS.format(filters=filters), "payments": PAYMENTS}
        return federated.site_per_table(tmp_path / str(len(filters)), tables, policies)

    found = trained(sites(["day"]), SQL, cutoff_grid=GRID)
    check_equal(found, trained(two_sites(tables), SQL, cutoff_grid=GRID))
    with pytest.raises(SiteError, match=r"\(filters\).* reads column 'day'"):
        trained(sites([]), SQL, cutoff_grid=GRID)


def test_rows_whose_keys_have_no_rows_count_as_without_a_partner(tmp_path):
    """All of them have one mask, which hides them from each other no better."""
    orders = ORDERS.format(filters=["day"]).replace("0.2", "0.1")
    policies = {"orders": orders, "payments": PAYMENTS}
    sites = federated.site_per_table(tmp_path, shop(), policies)
    with pytest.raises(SiteError, match=r"most-unmatched = 0\.1\) refuses"):
        trained(sites, SQL, cutoff_grid=GRID)


VALUES = """SELECT o.y AS label, o.online,
(SELECT COUNT(*) FROM payments p WHERE p.customer = o.customer) AS n,
(SELECT AVG(p.amount) FROM payments p WHERE p.customer = o.customer) AS mean
FROM orders o"""


@pytest.mark.cases("two_sites-moments")
@pytest.mark.parametrize(
    ("sites", "method"),
    [
        *((one_site, "cg"), (two_sites, "cg"), (three_sites, "cg")),
        *((two_sites, "moments"), (three_sites, "moments"), (two_sites, "boost")),
    ],
)
def test_values_of_keys_without_rows_are_those_of_duckdb(sites, method):
    tables = shop()
    how = {"num_epochs": 0 if method == "moments" else 30, "method": method}
    how["tolerance"] = 0.0 if method == "moments" else 1e-9
    found = trained(sites(tables), VALUES, test_fraction=0.0, **how)
    orders = tables["orders"]
    # one row for each customer, and one for those without payments
    paid = set(tables["payments"]["customer"])
    orders = orders.assign(
        customer=orders["customer"].where(lambda c: c.isin(paid), -1)
    )
    sql = VALUES.replace("o.y AS label, o.online", "DISTINCT o.customer")
    windows = made({**tables, "orders": orders}, sql)
    expected = "SELECT o.y AS label, o.online, w.n, w.mean FROM orders o JOIN windows w"
    reference = trained(
        one_site({"orders": orders, "windows": windows}),
        f"{expected} ON w.customer = o.customer",
        test_fraction=0.0,
        **how,
    )
    assert len(windows) == len(paid) + 1
    check_equal(found, reference)
    assert not [text for text in found.warnings if "without rows" in text]


@pytest.mark.parametrize(
    ("sites", "how"),
    [
        (one_site, {"method": "moments", "num_epochs": 0, "tolerance": 0.0}),
        (two_sites, {"sealed_cutoffs": True}),
        (two_sites, {"cutoff_grid": GRID}),
    ],
)
def test_null_keys_and_cutoffs_have_the_answer_about_no_rows(sites, how):
    tables = shop()
    orders = tables["orders"]
    place = orders["id"]
    customer = orders["customer"].astype("Int64").mask(place % 7 == 0)
    day = orders["day"].mask(place % 11 == 0)
    tables["orders"] = orders = orders.assign(customer=customer, day=day)
    found = trained(sites(tables), SQL, test_fraction=0.0, **how)
    if "cutoff_grid" in how:
        reference = on_grid(tables)
    else:
        has_key = orders["customer"].notna() & orders["day"].notna()
        if how.get("sealed_cutoffs"):
            has_key &= orders["customer"].isin(set(tables["payments"]["customer"]))
        named = orders.assign(id=orders["id"].where(has_key, -1))
        windows = windows_of({**tables, "orders": named}).drop_duplicates("id")
        reference = {"orders": named, "windows": windows}
    if "method" not in how:
        how = {}
    check_equal(found, trained(one_site(reference), MADE, test_fraction=0.0, **how))
    assert not [text for text in found.warnings if "without rows" in text]


def test_beside_noise_keys_without_rows_have_no_match():
    """A row of nobody would be one more under the noise."""
    privacy = PrivacySettings(features="statistics", epsilon=1.0)
    how = {"method": "admm", "num_epochs": 1, "privacy": privacy}
    found = trained(two_sites(shop()), VALUES, **how)
    said = r"^n of .*: 21 of 150 joined rows have a key without rows"
    assert [text for text in found.warnings if re.search(said, text)]


def test_cutoffs_and_rows_may_be_in_files_of_other_kinds(tmp_path):
    """Orders in a CSV file whose days are month first, payments in SQLite."""
    tables = shop()
    orders = tables["orders"].assign(
        day=tables["orders"]["day"].dt.strftime("%m/%d/%Y")
    )
    orders.to_csv(tmp_path / "orders.csv", index=False)
    paid = tables["payments"].assign(
        paid=tables["payments"]["paid"].dt.strftime("%Y-%m-%d %H:%M:%S")
    )
    with sqlite3.connect(tmp_path / "bank.db") as database:
        paid.to_sql("payments", database, index=False)
    database.close()
    file = tmp_path / "tables.toml"
    file.write_text(CASES["files"].format(folder=tmp_path))
    check_equal(trained({"shop": file}, SQL), trained(one_site(tables), SQL))


def sites_by_kind(tables):
    """Payments of a customer in two shards, which their kind tells apart."""
    paid = tables["payments"]
    is_card = paid["kind"] == "card"
    shards = {"bank-1": paid[is_card], "bank-2": paid[~is_card]}
    others = {site: {"payments": [own]} for site, own in shards.items()}
    return {"shop": {"orders": [tables["orders"]]}, **others}


LAYOUTS = {
    "one": one_site,
    "two": two_sites,
    "three": three_sites,
    "by kind": sites_by_kind,
}


@pytest.mark.parametrize("case", CASES["advice"], ids=lambda case: case["says"][:40])
def test_advice_about_times_works(case):
    """What a message says to write trains, without the message."""
    sites = LAYOUTS[case["sites"]](shop())
    how = {"num_epochs": 2, **case.get("how", {})}
    try:
        said = " ".join(trained(sites, case["sql"], **how).warnings)
    except (QueryError, SiteError) as error:
        said = str(error)
    assert case["says"] in said
    mended = trained(sites, case["mended"], **how, **case.get("also", {}))
    assert not [text for text in mended.warnings if case["says"] in text]
