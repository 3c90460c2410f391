"""Bad inputs stop a run before training; errors and messages quote no value of a row.

Queries, tables files, labels and types that are refused have tables of their own beside
what refuses them; here stands one of each way to the user, and what a whole run adds.
"""

import re

import duckdb
import numpy as np
import pandas as pd
import pytest

from tests.support.federated import WatchedGrid, train, write_site
from tests.support.files import case_table
from tests.support.policies import OPEN
from tp_flower import errors
from tp_flower.errors import (
    MappingError,
    QueryError,
    SchemaError,
    SettingsError,
    SiteError,
    TPFlowerError,
)

CASES = case_table(__file__)
ROWS = 10
SQL = "SELECT o.qty AS label, o.price, c.age FROM orders o JOIN customers c"
SQL += " ON o.cust = c.id"


def shop(rows=ROWS, **changes):
    k = np.arange(rows)
    frame = pd.DataFrame({"cust": k % 4, "price": k * 1.5, "qty": k * 2.0 + 1.0})
    frame["note"] = [f"n{row}" for row in k]
    return {"shop": {"orders": frame.assign(**changes)}}


def customers(*ids, **changes) -> pd.DataFrame:
    age = [20.0 + 7 * k * k for k in ids]
    return pd.DataFrame({"id": list(ids), "age": age}).assign(**changes)


def us(*ids, **changes):
    return {"us": {"customers": customers(*(ids or (0, 1)), **changes)}}


def uk(*ids, **changes):
    return {"uk": {"customers": customers(*(ids or (2, 3)), **changes)}}


def start(changed=None, sql=SQL, method="admm", seen=None, **settings):
    """Train on three sites, or what is changed of them; refused runs train nothing."""
    grid = WatchedGrid(shop() | us() | uk() | (changed or {}))
    grid.seen = [] if seen is None else seen
    try:
        return train(grid, sql, method, **settings)
    except TPFlowerError:
        assert not {"train.admm", "train.sgd"} & {
            message.action for message in grid.seen
        }
        raise


NO_ROW = {name: {"customers": customers(2).head(0)} for name in ("us", "uk")}


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        (
            {"uk": {"customers": customers(2).rename(columns={"age": "years"})}},
            SchemaError,
            (
                r"feature c.age: table 'customers': column 'age' is at site 'us', but "
                r"not at 'uk'"
            ),
        ),
        (NO_ROW, SchemaError, r"^table 'c' is empty: none of its sites \(.*us.*\) has"),
        (us(10, 11) | uk(12), MappingError, "no rows; rows left .*: o: 10, c: 0"),
        (shop(cust=None), MappingError, "the join has no rows"),
        (
            shop(cust="x"),
            MappingError,
            r"join .*o\.cust.*c\.id.* differ in type: o: text, c: number; cast the",
        ),
        (
            shop(price=[["a"]] * ROWS),
            SiteError,
            r"table 'orders'.*'price' is of type .*\[\]",
        ),
        (us(age=[np.inf, 1]), SiteError, "'us', table 'c': .*'age' has infinite val"),
        (us(age=[1e300, -1e300]), SiteError, "'us', table 'c': .*'age'.*too large"),
        (
            shop(qty=[None, *range(1, ROWS)]),
            QueryError,
            "NULL in 1 rows: leave them out, WHERE o.qty IS NOT NULL",
        ),
        (shop(qty=7.5), QueryError, r"constant in the \d+ joined .* \(one value: 7.5"),
    ],
)
def test_tables_that_are_refused(changed, error, match):
    with pytest.raises(error, match=match):
        start(changed)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"models": (("custs", "mlp"),)}, SettingsError, "table 'custs'; .* o, c"),
        ({"model": "nowhere:m"}, SiteError, "'shop', table 'o': .*'nowhere:m' cannot"),
        ({"min_sites": 9}, SchemaError, "min-sites = 9 are not there: 3 sites answer"),
        *(
            ({"sql": SQL.replace(old, new)}, getattr(errors, error), match)
            for old, new, error, match in CASES["queries"]
        ),
    ],
)
def test_queries_and_settings_that_are_refused(how, error, match):
    with pytest.raises(error, match=match):
        start(**how)


@pytest.mark.parametrize(
    ("text", "match"),
    [*CASES["files"], (None, "the tables file of the site does not exist")],
)
def test_files_that_are_refused(tmp_path, text, match):
    file = tmp_path / "tables.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SiteError, match=match):
        start({"us": file})


@pytest.mark.cases(
    "types-admm",
    "nulls-admm",
    "texts-sgd",
    "strangers-admm",
    "case-admm",
    "columns-sgd",
    "kinds-sgd",
)
@pytest.mark.parametrize("method", ["admm", "sgd"])
@pytest.mark.parametrize(
    "changed",
    [
        uk(age=np.array([50, 60], dtype=np.int16)),
        uk(age=[None, None]),
        us(age=["old", "young"]) | uk(age=[np.nan, np.nan]),
        # nobody has ordered here
        uk(8, 9),
        {
            "uk": {
                "Customers": customers(2, 3).rename(columns={"id": "ID", "age": "Age"})
            }
        },
        uk(note="x"),
        us(note=1) | uk(note="x"),
    ],
    ids=["types", "nulls", "texts", "strangers", "case", "columns", "kinds"],
)
def test_shards_that_fit(method, changed):
    strategy = start(changed, method=method)
    assert strategy.report.final_train["rmse"] > 0.0
    table = strategy.training_problem.tables["c"]
    assert len(table.parts) == 2
    # texts are two categories, and the missing ones of the other shard a third
    assert table.features == (3 if "old" in str(changed) else 1)


def test_a_star_takes_what_a_policy_lets_features_read_and_all_shards_have(tmp_path):
    rules = {
        "customers": (
            "columns = ['age', 'extra']\nkeys = ['id', 'code']\njoin-only = ['no']"
        )
    }
    frames = us(0, 1, code=7, secret=1, no=2, extra=1) | uk(
        2, 3, code=8, no=2, secret=3
    )
    files = [
        write_site(tmp_path / site, frame, rules if site == "us" else None)
        for site, frame in frames.items()
    ]
    strategy = start({"us": files[0], "uk": files[1]}, SQL.replace("c.age", "c.*"))
    assert strategy.training_problem.encoders["c"].features == {"age": 1}


def test_all_sites_that_refuse_are_named_at_once(tmp_path):
    rules = {"orders": "labels = []", "customers": "keys = []"}
    changed = {
        name: write_site(tmp_path / name, tables, rules)
        for name, tables in (shop() | us()).items()
    }
    with pytest.raises(SiteError) as caught:
        start(changed)
    orders, customers = str(caught.value).split("; site ")
    assert re.match(r"site 'shop', table 'o': .*\(labels\).*'qty'", orders)
    assert re.match(r"'us', table 'c': .*\(keys\).*'id'; .* no column$", customers)


def test_column_without_values_in_all_shards_is_dropped():
    problem = start(us(age=[None, None]) | uk(age=[None, None])).training_problem
    assert problem.encoders["c"].dropped == ("age",)


def test_null_labels_may_be_filtered_out():
    changed = shop(qty=[None, None, *range(2, ROWS)])
    strategy = start(changed, sql=f"{SQL} WHERE o.qty IS NOT NULL")
    assert strategy.training_problem.tables["o"].total_rows == ROWS - 2


@pytest.mark.parametrize(("note", "change", "match"), CASES["conversions"])
def test_failed_conversion_names_the_expression_not_the_value(note, change, match):
    match = f"site 'shop', table 'o': .*{match}"
    with pytest.raises(SiteError, match=match) as caught:
        start(shop(note=note), SQL.replace(*change))
    assert "fails on some value" in str(caught.value)
    assert note not in str(caught.value)


def test_line_of_a_file_is_not_quoted(tmp_path):
    (tmp_path / "a.csv").write_text("id,age\n0,30\n1,sec'ret\n")
    text = "[tables.customers]\npath='a.csv'\nsite='us'\ntypes = { age = 'INTEGER' }"
    (tmp_path / "tables.toml").write_text(f"{text}\n{OPEN}")
    match = (
        "column 'age' at site 'us' has a type in 'types', but more than one in 10 of "
        "its texts"
    )
    with pytest.raises(SchemaError, match=match) as caught:
        start({"us": tmp_path / "tables.toml"})
    assert "ret" not in str(caught.value).replace(str(tmp_path), "")


def assert_no_secret(seen):
    assert seen
    assert not [message for message in seen if "secret" in str(message.header)]


def test_enumerated_types_do_not_travel(tmp_path):
    seen = []
    start(shop(note=pd.Categorical(["secret-a", "secret-b"] * (ROWS // 2))), seen=seen)
    assert_no_secret(seen)
    with duckdb.connect(tmp_path / "crm.duckdb") as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('secret-a', 'it''s secret)')")
        connection.execute(
            "CREATE TABLE orders AS SELECT 1 AS cust, 2.0 AS qty, 3.0 AS price, "
            "{'m': CAST('secret-a' AS mood)} AS note"
        )
    file = tmp_path / "tables.toml"
    seen = []
    file.write_text(f"[tables.orders]\npath='crm.duckdb'\ntable='orders'\n{OPEN}")
    with pytest.raises(SiteError, match=r"STRUCT\(m VARCHAR\), which cannot be used"):
        start({"shop": file}, SQL.replace("o.price", "o.note"), seen=seen)
    assert_no_secret(seen)


def test_rare_class_of_the_label_does_not_leave_the_site(tmp_path):
    notes = ["yes"] * 5 + ["no"] * 4 + ["secret"]
    shop(note=notes)["shop"]["orders"].to_csv(tmp_path / "orders.csv", index=False)
    file = tmp_path / "tables.toml"
    seen = []
    sql = SQL.replace("o.qty", "o.note")
    text = f"[tables.orders]\n{OPEN}path = 'orders.csv'\nmin-count = "
    file.write_text(f"{text}4")
    with pytest.raises(SiteError, match="1 classes of fewer than min-count = 4 rows"):
        start({"shop": file}, sql, seen=seen)
    # both remedies that the error names
    start({"shop": file}, f"{sql} WHERE o.note IN ('yes', 'no')", seen=seen)
    one = "CASE WHEN o.note = 'yes' THEN 'yes' ELSE 'other' END AS label"
    start({"shop": file}, sql.replace("o.note AS label", one), seen=seen)
    assert_no_secret(seen)
    file.write_text(f"{text}1")
    start({"shop": file}, sql)
