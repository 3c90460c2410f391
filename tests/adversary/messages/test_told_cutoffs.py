"""What the server and partners learn of cutoffs besides what sites seal."""

import numpy as np
import pytest

from tests.support import federated
from tests.support.federated import WatchedGrid
from tests.support.peers.keyed_sites import KeyedGrid
from tests.support.tables.looking_back import shop
from tp_flower.errors import SiteError

RELEASED = 'releases.cutoffs = "partner"\nmost-unmatched = 0.5\n'
HOW = {"num_epochs": 1, "device": "cpu", "sealed_cutoffs": True}

LISTED = 'columns = ["online", "y"]\nlabels = ["y"]\nkeys = ["customer", "day"]\n'
BEFORE = "TIMESTAMP '2020-12-01'"
FROM = (
    "FROM payments p WHERE p.customer = o.customer AND p.paid < o.day "
    f"AND o.day < {BEFORE}"
)
COUNT = f"SELECT COUNT(*) AS n {FROM}"
LAST = f"SELECT p.amount AS n {FROM} ORDER BY p.paid DESC LIMIT 1"
HAVING = f"{COUNT} HAVING COUNT(*) >= 1"


def sites_of(folder, rules, tables=None):
    policies = {"orders": RELEASED + rules}
    return federated.site_per_table(folder, tables or shop(), policies)


def check_refused(sites, match, sql):
    """Run, and assert that nothing of cutoffs has left."""
    raised = pytest.raises(SiteError, match=match)
    with WatchedGrid(sites) as grid, raised:
        federated.train(grid, sql, "cg", **HOW)
    assert not grid.arrays("query.cutoffs", replies=True)


def looking_back(subquery, label="o.y", features="o.online, w.n", end=""):
    return (
        f"SELECT {label} AS label, {features} FROM orders o "
        f"JOIN LATERAL ({subquery}) w ON TRUE {end}"
    )


def test_which_rows_have_an_answer_tells_the_server_of_their_cutoffs(tmp_path):
    """The conditions are the server's: a column that is no filter would be searched."""
    allowed = LISTED + 'filters = ["day"]\n'
    paths = sites_of(tmp_path, allowed)
    with WatchedGrid(paths) as grid:
        federated.train(grid, looking_back(HAVING), "cg", **HOW)
    extracted = grid.sent("query.extract", replies=True)
    (hashes, codes), (answers, _) = (
        (seen.arrays[part, "hashes/0"], seen.arrays[part, "codes/0"])
        for part, seen in enumerate(sorted(extracted, key=lambda seen: seen.node))
    )
    has_answer = np.isin(hashes[:, 0], answers[:, 0])[codes]
    is_before = shop()["orders"]["day"].to_numpy() < np.datetime64("2020-12-01")
    assert has_answer.any()
    assert not has_answer[~is_before].any()


@pytest.mark.parametrize(
    "sql",
    [
        looking_back(HAVING),
        looking_back(LAST),
        looking_back(COUNT, end="WHERE w.n > 0"),
    ],
)
def test_conditions_on_a_cutoff_are_filters_of_its_table(tmp_path, sql):
    match = r"\(filters\) refuses: whether LATERAL sub-query 'w' has an answer reads"
    check_refused(sites_of(tmp_path, LISTED), match, sql)


@pytest.mark.parametrize(
    ("label", "features", "rule"),
    [("w.n", "o.online, o.y", "labels"), ("o.y", "w.n AS weight, o.online", "labels")],
)
def test_a_label_of_an_answer_is_made_of_its_cutoff(tmp_path, label, features, rule):
    """``n`` may be the day: the payments that are counted are chosen by it."""
    sql = looking_back(HAVING, label, features)
    allowed = LISTED + 'filters = ["day"]\n'
    match = rf"\({rule}\) refuses: the (label|weight), of LATERAL .* reads column 'day'"
    check_refused(sites_of(tmp_path, allowed), match, sql)


def test_a_column_that_leaves_hashed_only_is_no_cutoff_that_is_sealed(tmp_path):
    """A cutoff may be any whole number, and another site reads it."""
    tables = shop()
    tables["payments"]["number"] = tables["payments"]["customer"]
    hidden = 'keys = ["day"]\njoin-only = ["customer"]\n'
    sql = looking_back(
        "SELECT COUNT(*) AS n FROM payments p WHERE p.number < o.customer"
    )
    match = r"\(join-only\) refuses: a cutoff that is sealed reads column 'customer'"
    check_refused(sites_of(tmp_path, hidden, tables), match, sql)


def test_a_key_beside_a_cutoff_leaves_hashed(tmp_path):
    hidden = 'keys = ["day"]\njoin-only = ["customer"]\n'
    with WatchedGrid(sites_of(tmp_path, hidden)) as grid:
        sql = looking_back(
            "SELECT COUNT(*) AS n FROM payments p WHERE "
            "p.customer = o.customer AND p.paid < o.day"
        )
        federated.train(grid, sql, "cg", **HOW)
    assert grid.arrays("query.cutoffs", replies=True)


CHOSEN = "SUM(CASE WHEN p.customer = 3 AND p.kind = 'once' THEN p.amount ELSE 0 END)"
FEW_WINDOWS = f"""SELECT o.y AS label, o.online, w.one FROM orders o JOIN LATERAL (
SELECT {CHOSEN} AS one FROM payments p WHERE p.paid < o.day HAVING COUNT(*) >= 20
) w ON TRUE"""
OVER = CHOSEN.replace("p.", "")
WINDOWED = f"""SELECT o.y AS label, o.online, w.one FROM orders o JOIN (SELECT shop,
{OVER} OVER (PARTITION BY shop ORDER BY shop) AS one FROM payments) w
ON w.shop = o.shop"""


@pytest.mark.parametrize(
    ("sql", "cutoffs"),
    [
        (FEW_WINDOWS, {"sealed_cutoffs": True}),
        (FEW_WINDOWS, {"cutoff_grid": "1 day from 2020-01-01 to 2021-12-31"}),
        (WINDOWED, {}),
    ],
)
def test_moments_of_windows_are_those_of_a_row_that_all_have(tmp_path, sql, cutoffs):
    """A column that one payment has is not 0 in any window after it."""
    tables = {name: frame.assign(shop=1) for name, frame in shop().items()}
    paid = tables["payments"]
    chosen = paid.index[paid["customer"] == 3][0]
    paid.loc[chosen, ["kind", "paid"]] = "once", paid["paid"].min()
    rules = {
        "orders": RELEASED + 'releases.moments = "clear"',
        "payments": 'min-rows = 20\nmin-count = 20\nreleases.moments = "clear"',
    }
    how = {"num_epochs": 0, "tolerance": 0.0, "device": "cpu", **cutoffs}
    match = r"\(min-rows\) refuses: the moments of table 'w', whose windows may all"
    sites = federated.site_per_table(tmp_path, tables, rules)
    with WatchedGrid(sites) as grid, pytest.raises(SiteError, match=match):
        federated.train(grid, sql, "moments", **how)
    assert not grid.arrays("train.moments", replies=True).keys() & {1}


def test_the_account_says_which_column_was_sealed_for_whom(tmp_path):
    sealing = {"orders": shop()["orders"]}
    with KeyedGrid(tmp_path, shop()).pin() as grid:
        federated.write_site(
            tmp_path / "orders", sealing, {"orders": RELEASED}, "orders-0"
        )
        finished = federated.train(grid, looking_back(COUNT), "cg", **HOW)
    lines = [line["release"] for own in finished.ledgers.values() for line in own]
    (booked,) = [each for each in lines if each["what"] == "cutoffs"]
    assert booked["scope"].startswith("sealed to the sites 'payments-0', no ")
    assert 'at which "day" each key has rows' in booked["scope"]
