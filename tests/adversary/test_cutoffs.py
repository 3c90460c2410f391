"""A server that asks a LATERAL sub-query for what its tables' policies keep.

It proposes fragments that no query is bound to: the site refuses them by itself.
"""

from dataclasses import replace

import msgspec
import numpy as np
import pandas as pd
import pytest

from strategies.setup import extract
from tests.support import federated
from tests.support.files import case_table
from tests.support.joined import slow_cutoffs
from tp_flower.errors import PolicyError, SiteError
from tp_flower.extraction.pairs import read_pairs
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
SQL = """SELECT o.y AS label, o.online, w.n, w.total, w.mean, w.since
FROM orders o LEFT JOIN LATERAL (
    SELECT COUNT(*) AS n, SUM(p.amount) AS total, AVG(p.amount) AS mean,
           MIN(EPOCH(o.day) - EPOCH(p.paid)) AS since
    FROM payments p WHERE p.customer = o.customer AND p.paid < o.day
) w ON TRUE"""
COUNTS = SQL.replace(", w.since", "")
GRID = "1 month from 2020-01-01 to 2021-12-31"
HOW = {"method": "cg", "num_epochs": 2, "device": "cpu"}
KEYS_ONLY = """
columns = ["online", "y"]
labels = ["y"]
keys = ["customer", "day"]
"""


def shop():
    rng = np.random.default_rng(0)
    first = np.datetime64("2020-01-01", "us")
    days = rng.integers(0, 700, 150).astype("timedelta64[D]")
    hours = rng.permutation(15_000)[:900].astype("timedelta64[h]")
    orders = {
        "customer": rng.integers(0, 15, 150),
        "day": first + days,
        "online": rng.random(150) < 0.4,
        "y": rng.normal(size=150),
    }
    payments = {
        "customer": rng.integers(0, 15, 900),
        "paid": first + hours,
        "amount": rng.gamma(2.0, 10.0, 900).round(2),
    }
    return {"orders": pd.DataFrame(orders), "payments": pd.DataFrame(payments)}


def asked(monkeypatch, sites, *, sql=COUNTS, change=None, order=None, **how):
    """Train, with a change of the proposal's parts and joins, or their order."""
    honest_bind, honest_propose = Query.bind, extract._propose

    def bind(*args, **more):
        bound = honest_bind(*args, **more)
        return replace(bound, fragments=tuple(bound.fragments[n] for n in order))

    def propose(*args):
        honest = honest_propose(*args)
        document = msgspec.json.decode(msgspec.json.encode(honest))
        change({part["table"]: part for part in document["parts"].values()}, document)
        return msgspec.convert(document, type(honest), str_keys=True)

    if order is not None:
        monkeypatch.setattr(Query, "bind", bind)
    if change is not None:
        monkeypatch.setattr(extract, "_propose", propose)
    with federated.LocalGrid(sites) as grid:
        return federated.train(grid, sql, **{**HOW, **how})


def site_of(folder, **policies):
    return {"shop": federated.write_site(folder / "shop", shop(), policies)}


def told(changes):
    """A change of the sub-query's fragment."""

    def change(parts, _):
        fragment = parts["w"]["fragment"]
        fragment["subquery"] |= changes.get("subquery", {})
        fragment |= {k: v for k, v in changes.items() if k != "subquery"}

    return change


@pytest.mark.parametrize(("changes", "match"), CASES["told"])
def test_what_a_policy_keeps_is_not_told_as_a_cutoff(
    monkeypatch, tmp_path, changes, match
):
    sites = site_of(tmp_path, orders=KEYS_ONLY)
    with pytest.raises(SiteError, match=match):
        asked(monkeypatch, sites, change=told(changes))


def test_a_policy_lets_cutoffs_be_compared(monkeypatch, tmp_path):
    sites = site_of(tmp_path, orders=KEYS_ONLY)
    assert asked(monkeypatch, sites).report.joined_rows_train == 120


def test_a_policy_may_let_features_read_cutoffs(monkeypatch, tmp_path):
    sites = site_of(tmp_path, orders="labels = ['y']")
    assert asked(monkeypatch, sites, sql=SQL).report.joined_rows_train == 120


def test_cutoffs_are_read_after_the_policy_of_their_table_was_asked(
    monkeypatch, tmp_path
):
    """An expression that fails on some row would tell of it, uncounted."""
    sites = site_of(tmp_path, orders="approved-runs = []")

    def change(parts, _):
        key = parts["o"]["fragment"]["keys"][0]
        failing = "CAST(CASE WHEN \"y\" > 2 THEN 'x' ELSE '1' END AS INTEGER)"
        key[key.index('"customer"')] = failing

    with pytest.raises(SiteError, match="whose rows come after it"):
        asked(monkeypatch, sites, change=change, order=(1, 0))


def other_keys(parts, _):
    parts["w"]["fragment"]["keys"] = [['"(cutoff)"', '"n"']]


def changed_keys(parts, _):
    parts["w"]["fragment"]["keys"] = [['"(key 0)" + 1', '"(cutoff)"']]


def fewer_keys(parts, _):
    parts["o"]["fragment"]["keys"] = [['"day"']]


def lateral_around(parts, _):
    """A table that is a LATERAL sub-query, with a grid of its own."""
    around = parts["o"]["fragment"]
    around["subquery"] = parts["w"]["fragment"]["subquery"] | {
        "cutoffs": {
            "table": "",
            "grid": {
                "step": "1 month",
                "first": "2020-01-01",
                "last": "2020-12-31",
                "type": "TIMESTAMP",
            },
        },
        "columns": [["online", "COUNT(*)"], ["y", "COUNT(*)"]],
        "groups": ['"customer"'],
        "filters": ['"day" < "(cutoff)"'],
    }
    around["keys"] = [['"(key 0)"', '"(cutoff)"']]


def missing_around(parts, _):
    parts["w"]["fragment"]["subquery"]["cutoffs"]["table"] = "nothing"


def own_around(parts, _):
    parts["w"]["fragment"]["subquery"]["cutoffs"]["table"] = "w"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (other_keys, "and not its keys and its cutoff"),
        (changed_keys, "and not its keys and its cutoff"),
        (fewer_keys, "whose key has not as many parts"),
        (lateral_around, "which is a LATERAL sub-query itself"),
        (missing_around, "has no join of 'w' with 'nothing'"),
        (own_around, "has no join of 'w' with 'w'"),
    ],
)
def test_cutoffs_are_those_of_the_table_around(monkeypatch, tmp_path, change, match):
    with pytest.raises(SiteError, match=match):
        asked(monkeypatch, site_of(tmp_path), change=change)


def test_cutoffs_of_another_site_are_refused(monkeypatch, tmp_path):
    tables = shop()
    sites = {
        name: federated.write_site(tmp_path / name, {table: tables[table]})
        for name, table in (("shop", "orders"), ("bank", "payments"))
    }

    def change(parts, _):
        parts["w"]["fragment"]["subquery"]["cutoffs"] = {"table": "o", "grid": None}

    with pytest.raises(SiteError, match="of which site 'bank' has not all shards"):
        asked(monkeypatch, sites, change=change, cutoff_grid=GRID)


def window_as_label(parts, document):
    parts["o"]["fragment"]["label"] = None
    parts["w"]["fragment"] |= {"label": '"total"', "features": [["n", '"n"']]}
    document |= {"label-table": "w", "outer": []}


def window_as_weight(parts, _):
    parts["w"]["fragment"]["weight"] = '"total"'


@pytest.mark.parametrize("change", [window_as_label, window_as_weight])
def test_windows_that_differ_in_a_row_do_not_leave_one_by_one(
    monkeypatch, tmp_path, change
):
    """Each is over five payments: the next one's sum tells the payment between."""
    sql = COUNTS.replace(") w ON", " HAVING COUNT(*) >= 5) w ON")
    sites = site_of(tmp_path, payments="min-rows = 5\nmost-unmatched = 1.0")
    asked(monkeypatch, sites, sql=sql)
    with pytest.raises(SiteError, match=r"\(min-rows\) refuses: the difference of two"):
        asked(monkeypatch, sites, sql=sql, change=change)


def test_a_noisy_label_is_not_told_as_a_cutoff(monkeypatch, tmp_path):
    noisy = PrivacySettings(
        labels="laplace", label_epsilon=2.0, label_range=(1.5e9, 1.7e9)
    )
    sql = SQL.replace("o.y AS label", "EPOCH(o.day) AS label")
    how = {"method": "admm", "privacy": noisy}
    with pytest.raises(SiteError, match="'since' reads column 'day', which the label"):
        asked(monkeypatch, site_of(tmp_path), sql=sql, **how)


def test_the_time_that_cutoffs_take_is_limited(tmp_path):
    source, around = slow_cutoffs(tmp_path)
    with pytest.raises(PolicyError, match=r"query-seconds = 1\) refuses"):
        read_pairs(source, around, 0, ["(cutoff)"], b"")
