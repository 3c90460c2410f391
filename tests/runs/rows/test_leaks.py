"""Features that may tell the label are named: by what they read, or by what they
achieve.
"""

import numpy as np
import pandas as pd
import pytest

from strategies import Explain
from strategies.inference.predict import Evaluate
from strategies.setup.leaks import find_leaks
from tests.support import predicted
from tests.support.federated import LocalGrid, train, write_site
from tp_flower.query import Query

RNG = np.random.default_rng(5)
ROWS = 300
CUSTOMERS = pd.DataFrame(
    {"id": range(20), "age": RNG.integers(18, 80, 20), "town": RNG.integers(0, 4, 20)}
)
ORDERS = pd.DataFrame(
    {
        "customer": RNG.integers(0, 20, ROWS),
        "day": RNG.integers(1, 29, ROWS),
        "qty": RNG.normal(5, 2, ROWS).round(3),
        "late": RNG.integers(0, 9, ROWS),
        "code": RNG.integers(0, 20, ROWS),
    }
)
SCHEMAS = {
    "orders": dict.fromkeys(ORDERS, "DOUBLE"),
    "customers": dict.fromkeys(CUSTOMERS, "DOUBLE"),
}
SITES = [{"orders": [ORDERS]}, {"customers": [CUSTOMERS]}]
JOIN = "FROM orders o JOIN customers c ON o.customer = c.id"


USUAL = """(SELECT customer AS who, AVG(qty) AS usual, MIN(qty) AS least
FROM orders GROUP BY customer)"""
PEOPLE = "(SELECT id, age AS day FROM customers)"
PAIRS = "FROM customers c JOIN customers d"


@pytest.mark.parametrize(
    ("sql", "leaks"),
    [
        (
            f"SELECT o.qty > 3 AS label, o.qty, o.day, c.age {JOIN}",
            ["feature 'qty' of o: qty"],
        ),
        (
            f"SELECT o.qty AS label, ROUND(o.QTY / 2) AS half, c.age {JOIN}",
            ["feature 'half' of o: qty"],
        ),
        (
            (
                "SELECT o.qty + o.late AS label, o.day + o.late AS due, o.qty * o.late "
                f"AS both {JOIN}"
            ),
            ["feature 'due' of o: late", "feature 'both' of o: late qty"],
        ),
        # through a sub-query's columns, of the same table under another name
        (
            (
                f"SELECT o.qty AS label, m.usual FROM orders o JOIN {USUAL} m ON m.who "
                "= o.customer"
            ),
            ["feature 'usual' of m: qty"],
        ),
        (
            f"SELECT t.usual AS label, t.least FROM {USUAL} t",
            ["feature 'least' of t: qty"],
        ),
        # a join key that is the label
        (
            (
                "SELECT o.code AS label, o.day, c.age FROM orders o JOIN customers c "
                "ON o.code = c.id"
            ),
            ["the join o.code = c.id of o: code"],
        ),
        (
            (
                f"SELECT c.town AS label, c.age, d.age AS other {PAIRS} ON c.town + 1 "
                "= d.id"
            ),
            ["the join c.town + 1 = d.id of c: town"],
        ),
        # filters, other keys, columns of the same name elsewhere
        (f"SELECT o.qty AS label, o.day, c.age {JOIN} WHERE o.qty > 0", []),
        (
            (
                f"SELECT o.day AS label, c.day FROM orders o JOIN {PEOPLE} c ON "
                "o.customer = c.id"
            ),
            [],
        ),
    ],
)
def test_what_reads_the_columns_of_the_label_is_found(sql, leaks):
    found = find_leaks(Query.from_sql(sql).bind(SCHEMAS))
    assert [
        f"{leak.reader} of {leak.table}: {' '.join(sorted(leak.columns))}"
        for leak in found
    ] == leaks


def test_keys_that_hold_rows_out_are_no_joins():
    query = Query.from_sql(f"SELECT o.qty AS label, o.day, c.age {JOIN}")
    assert find_leaks(query.bind(SCHEMAS, split=("o.qty",))) == []


@pytest.mark.parametrize("method", ["cg", "personalised", Explain])
def test_one_warning_names_the_feature_and_the_column(method):
    sql = "SELECT qty > 5 AS label, day, ROUND(qty) AS whole FROM orders"
    warnings = train([{"orders": [ORDERS]}], sql, method).warnings
    (leak,) = [warning for warning in warnings if "label is made" in warning]
    assert leak == (
        "feature 'whole' of orders reads qty, from which the label is made: where that "
        "is not known before the label is, it tells the label, and test metrics "
        "flatter. Leave it out of the query then"
    )
    clean = sql.replace(", ROUND(qty) AS whole", "")
    warnings = train([{"orders": [ORDERS]}], clean, method).warnings
    assert "label is made" not in "".join(warnings)


def test_one_warning_names_the_join_on_the_label():
    sql = (
        "SELECT o.code AS label, o.day, c.age FROM orders o JOIN customers c ON o.code "
        "= c.id"
    )
    (leak,) = [w for w in train(SITES, sql, Explain).warnings if "label is made" in w]
    assert leak.startswith(
        "the join o.code = c.id reads code, from which the label is made: rows"
    )


def toy(rows=40):
    rng = np.random.default_rng(1)
    x = rng.normal(size=rows)
    k = np.arange(rows) % 8
    z = rng.normal(size=8).round(3)
    a = pd.DataFrame({"k": k, "x": x.round(3)})
    a["y"] = 2 * a.x + 3 * z[k]
    return [{"a": [a]}, {"b": [pd.DataFrame({"k": range(8), "z": z})]}]


def test_an_exact_label_is_said_to_be_one_or_leaked():
    sql = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
    run = train(toy(), sql, "cg", num_epochs=20)
    (warning,) = run.warnings
    shares = {name: each["share"] for name, each in run.report.contributions.items()}
    largest = max(shares, key=shares.get)
    assert (
        "nearly perfect: either the label follows exactly from the features, or one"
        in warning
    )
    feature = {"a": "x", "b": "z"}[largest]
    share = f"which has {100 * shares[largest]:.0f} % of the variance of the scores"
    assert warning.endswith(f"Look first at feature '{feature}' of {largest}, {share}")


def told(copied):
    """Orders, and invoices that have the label's value under another name."""
    weekday = np.random.default_rng(2).integers(0, 7, ROWS)
    invoices = pd.DataFrame({"order": range(ROWS), "paid": copied, "weekday": weekday})
    return [{"orders": [ORDERS.assign(id=range(ROWS))]}, {"invoices": [invoices]}]


LEAKED = (
    "{} AS label, o.day, v.paid, v.weekday FROM orders o JOIN invoices v ON v.order = "
    "o.id"
)


@pytest.mark.parametrize(
    ("label", "copied", "score"),
    [
        ("SELECT o.qty", ORDERS.qty * 7, "R² 1"),
        ("SELECT o.qty > 5", 2 + 3 * (ORDERS.qty > 5), "AUC 1"),
    ],
)
def test_a_copy_of_the_label_is_named_where_sites_show_coefficients(
    tmp_path, label, copied, score
):
    tables = {name: own[0] for site in told(copied) for name, own in site.items()}
    rules = dict.fromkeys(tables, "coefficients = true")
    layouts = {
        "feature 'paid' of v": write_site(tmp_path / "shown", tables, rules),
        "the features of v (paid, weekday)": write_site(tmp_path / "hidden", tables),
    }
    for named, file in layouts.items():
        with LocalGrid({"shop": file}) as grid:
            run = train(grid, LEAKED.format(label), "cg", num_epochs=30)
        (warning,) = [text for text in run.warnings if "nearly perfect" in text]
        assert warning.startswith(
            f"{score} on held-out rows (random rows) is nearly perfect"
        )
        assert f"Look first at {named}, which has 100 % of the variance" in warning


def test_the_warning_names_the_feature_that_reads_the_label():
    sql = f"SELECT o.qty AS label, o.day, o.qty * 3 AS triple, c.age {JOIN}"
    run = train(SITES, sql, "cg", num_epochs=30)
    assert run.warnings[0].startswith(
        "feature 'triple' of o reads qty, from which the label"
    )
    assert run.warnings[-1].endswith("Look first at feature 'triple' of o")


def test_what_is_merely_good_is_not_warned_of():
    nearly = 7 * ORDERS.qty + RNG.normal(size=ROWS)
    run = train(told(nearly), LEAKED.format("SELECT o.qty"), "cg", num_epochs=30)
    assert 0.99 < run.report.final_test["r2"] < 0.9999
    assert run.warnings == []


def test_an_evaluation_names_the_table(tmp_path):
    sites = {f"s{n}": own for n, own in enumerate(told(ORDERS.qty / 3))}
    model = predicted.train(
        tmp_path, sites, LEAKED.format("SELECT o.qty"), "cg", num_epochs=30
    )
    strategy = Evaluate(Query.from_sql(model.sql), model.manifest, mode="evaluate")
    model.start(strategy, sites)
    (warning,) = strategy.warnings
    assert "on these rows is nearly perfect" in warning
    assert (
        "Look first at the features of v (paid, weekday), which has 100 % of" in warning
    )
