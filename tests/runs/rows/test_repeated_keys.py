"""A table of which a few keys name several rows: the join has more rows, and the run
says so.
"""

import numpy as np
import pandas as pd
import pytest

from strategies import Explain
from tests.support.federated import one_per_site, pieces, train

SQL = (
    "SELECT o.qty AS label, o.day, c.age FROM orders o JOIN customers c ON o.customer "
    "= c.id"
)
ADVICE = (
    "If a key should name one row, aggregate c in a sub-query (GROUP BY its join key)"
)


def frames(repeated=5, times=2, orders=1200, of_repeated=23):
    """Orders of customers, of whom the first few are listed several times."""
    rng = np.random.default_rng(0)
    customers = 80
    ids = np.append(np.arange(customers), np.tile(np.arange(repeated), times - 1))
    listed = pd.DataFrame({"id": ids, "age": rng.integers(18, 80, len(ids))})
    bought = rng.integers(repeated, customers, orders)
    bought[: of_repeated * repeated] = np.repeat(np.arange(repeated), of_repeated)
    day = rng.integers(1, 29, orders)
    qty = rng.normal(size=orders)
    return {
        "orders": pd.DataFrame({"customer": bought, "day": day, "qty": qty}),
        "customers": listed,
    }


def explained(tables, sql=SQL, **settings):
    """The warnings and the steps of a query over tables at two sites each."""
    halves = {name: pieces(own, len(own) // 2) for name, own in tables.items()}
    run = train(one_per_site(halves), sql, Explain, **settings)
    return run.warnings, run.explanation["join-steps"]


def test_a_few_repeated_keys_are_counted_with_the_rows_that_they_make():
    tables = frames()
    warnings, (_, step) = explained(tables)
    counts = "5 of 80 keys of customers occur twice (o.customer = c.id): 115 rows more"
    assert warnings == [f"{counts}. {ADVICE}"]
    assert (step["rows-before"], step["rows"]) == (1200, 1315)
    orders, customers = tables.values()
    assert len(orders.merge(customers, left_on="customer", right_on="id")) == 1315
    more = {"table": "c", "keys": 80, "repeated": 5, "most": 2, "more-rows": 115}
    assert step["repeated-keys"] == [more]


def test_the_advice_works():
    once = SQL.replace(
        "customers c", "(SELECT id, MAX(age) AS age FROM customers GROUP BY id) c"
    )
    tables = frames()
    sites = [{name: [own]} for name, own in tables.items()]
    run = train(sites, once, Explain)
    assert run.warnings == []
    assert run.explanation["join-steps"][1]["rows"] == 1200


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (
            frames(repeated=1, times=4, of_repeated=10),
            "1 of 80 keys .* occurs up to 4 times .*: 30 r",
        ),
        (
            frames(repeated=20, of_repeated=2),
            "20 of 80 keys .* occur twice .*: 40 rows more",
        ),
    ],
)
def test_other_numbers(tables, words):
    (warning,), _ = explained(tables)
    assert pd.Series([warning]).str.contains(words).all(), warning


@pytest.mark.parametrize(
    "tables",
    [
        frames(repeated=0),
        # nobody has ordered who is listed twice
        frames(of_repeated=0)
        | {"orders": frames(of_repeated=0)["orders"].query("customer >= 5")},
        # most keys have several rows: a table of many rows per key
        frames(repeated=60, of_repeated=3),
    ],
    ids=["none", "not joined", "many"],
)
def test_no_warning_where_nothing_is_strange(tables):
    assert explained(tables)[0] == []


def test_the_label_table_may_be_the_one_with_repeated_keys():
    tables = frames()
    sql = (
        "SELECT c.age AS label, o.day, o.qty FROM customers c JOIN orders o ON "
        "o.customer = c.id"
    )
    (warning,), (_, step) = explained(tables, sql)
    assert warning.startswith(
        "5 of 80 keys of customers occur twice (o.customer = c.id): 115 rows"
    )
    assert step["rows"] == 1315


def test_a_label_table_whose_rows_mostly_have_keys_of_their_own_is_none():
    """Customers who mostly order once repeat a key of orders; no row of the join is too
    many.
    """
    once = frames(repeated=0, orders=70)["orders"]
    once["customer"] = once.index
    orders = pd.concat([once, once.head(5)], ignore_index=True)
    assert explained(frames(repeated=0) | {"orders": orders})[0] == []
