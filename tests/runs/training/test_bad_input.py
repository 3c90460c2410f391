"""Every bad input of issue 2 has an error of its own, before training starts."""

import duckdb
import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

from client_apps.app import app
from strategies import TablePuppetADMM, TablePuppetSGD
from strategies.run.grid import InProcessGrid
from tp_flower.errors import (
    MappingError,
    QueryError,
    SchemaError,
    SettingsError,
    SiteError,
    SourceError,
    TPFlowerError,
)
from tp_flower.query import Query
from tp_flower.settings import Settings

ROWS = 10
FROM = "FROM orders o JOIN customers c ON o.cust = c.id"
COLUMNS = "SELECT o.qty AS label, o.price, c.age"
SQL = f"{COLUMNS} {FROM}"


def orders(**changes) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "cust": np.arange(ROWS) % 4,
            "price": np.arange(ROWS) * 1.5,
            "qty": np.arange(ROWS) * 2.0 + 1.0,
            "note": [f"n{k}" for k in range(ROWS)],
        }
    )
    return frame.assign(**changes)


def customers(ids=(0, 1), **changes) -> pd.DataFrame:
    age = [20.0 + 7 * k * k for k in ids]
    return pd.DataFrame({"id": list(ids), "age": age}).assign(**changes)


def sites(**changed):
    return {
        "shop": {"orders": orders()},
        "us": {"customers": customers((0, 1))},
        "uk": {"customers": customers((2, 3))},
    } | changed


def start(hosted=None, sql=SQL, method=TablePuppetADMM, seen=None, **settings):
    note = None if seen is None else lambda m: seen.append(m.metadata.message_type)
    grid = InProcessGrid(app, sites() if hosted is None else hosted, observe=note)
    strategy = method(Query.from_sql(sql), **{"num_epochs": 2, **settings})
    strategy.start(grid)
    return strategy


def refused(error, match, hosted=None, sql=SQL, **settings):
    """Check the error, and that no site was asked to train."""
    seen: list[str] = []
    with pytest.raises(error, match=match):
        start(hosted, sql, seen=seen, **settings)
    assert not {"train.admm", "train.sgd"} & set(seen)


@pytest.mark.parametrize("method", [TablePuppetADMM, TablePuppetSGD])
def test_good_input_trains(method):
    assert start(method=method).report.final_train["rmse"] > 0.0


# the query


@pytest.mark.parametrize(
    ("sql", "match"),
    [
        (
            "SELEC o.qty AS label FROM orders o",
            r"does not parse: line 1, column 8: .* at '.'",
        ),
        (
            "SELECT o.qty AS label, FROM WHERE",
            "column 33: Expected table name at 'WHERE'",
        ),
        (
            f"{COLUMNS} FROM orders o JOIN customers c ON true",
            "condition TRUE .* a join an equality between columns of two tables",
        ),
        (
            f"{COLUMNS} FROM orders o JOIN customers c",
            "join of c has no equality condition: add ON or USING",
        ),
        (
            f"{COLUMNS} FROM orders o JOIN customers c ON cust > id",
            "condition cust > id needs the values of 2 tables .* only an equality",
        ),
        (
            f"{COLUMNS} FROM orders o, customers c",
            "table 'c' is not connected .* add an equality condition",
        ),
        (
            f"SELECT o.qty AS label, o.price * c.age AS x {FROM}",
            r"feature o.price \* c.age needs the values of 2 tables \(o, c\)",
        ),
        (
            f"SELECT o.qty * c.age AS label, o.price {FROM}",
            r"the label o.qty \* c.age needs the values of 2 tables",
        ),
        (
            f"{SQL} WHERE o.price > c.age",
            "condition o.price > c.age needs the values of 2 tables",
        ),
        (
            f"{SQL} WHERE o.price > 1 OR c.age > 2",
            "condition o.price > 1 OR c.age > 2 needs the values of 2",
        ),
        (f"SELECT o.qty, c.age {FROM}", "the query has no label: write"),
        (
            f"SELECT o.qty AS label, o.pryce, c.age {FROM}",
            r"'o' has no column 'pryce' \(did you mean 'price'\?\)",
        ),
        (
            f"SELECT o.qty AS label, agee {FROM}",
            r"no table has a column 'agee' \(did you mean 'age'\?\)",
        ),
        (
            f"SELECT o.qty AS label, x.age {FROM}",
            "feature x.age: no table is called 'x' here; tables: o, c",
        ),
    ],
)
def test_query(sql, match):
    refused(QueryError, match, sql=sql)


# tables and sites


def test_table_that_no_site_hosts_is_missed_at_once():
    sql = SQL.replace("customers", "custmers")
    refused(
        SchemaError,
        r"no site hosts table 'custmers' \(did you mean 'customers'\?\): 3 sites "
        r"answered within 0\.\d seconds .*hosted tables: customers, orders",
        sql=sql,
    )


def test_shards_that_differ_in_columns():
    uk = {"customers": customers((2, 3)).rename(columns={"age": "years"})}
    refused(
        SchemaError,
        "table 'customers': the shards of sites 'uk' and 'us' differ: "
        r"only 'uk' has \['years'\], only 'us' has \['age'\]",
        sites(uk=uk),
    )


def test_shards_that_differ_in_types():
    uk = {"customers": customers((2, 3), age=["old", "young"])}
    refused(
        SchemaError,
        "column 'age' is VARCHAR at site 'uk' and DOUBLE at site 'us'.*types",
        sites(uk=uk),
    )


def test_number_types_need_not_agree():
    uk = {"customers": customers((2, 3), age=np.array([50, 60], dtype=np.int16))}
    start(sites(uk=uk))


@pytest.mark.parametrize("method", [TablePuppetADMM, TablePuppetSGD])
def test_column_without_values_in_one_shard_works(method):
    uk = {"customers": customers((2, 3), age=[None, None])}
    start(sites(uk=uk), method=method)
    text = sites(
        us={"customers": customers((0, 1), age=["old", "young"])},
        uk={"customers": customers((2, 3), age=[np.nan, np.nan])},
    )
    assert start(text, method=method).training_problem.tables["c"].features == 2


def test_column_without_values_in_all_shards_is_dropped():
    federation = start(
        sites(
            us={"customers": customers((0, 1), age=[None, None])},
            uk={"customers": customers((2, 3), age=[None, None])},
        )
    ).training_problem
    assert federation.encoders["c"].dropped == ("age",)


def test_table_name_in_other_case_is_the_same_table():
    uk = {"Customers": customers((2, 3))}
    assert len(start(sites(uk=uk)).training_problem.tables["c"].parts) == 2


def test_table_without_a_row():
    none = {"customers": customers((2, 3)).head(0)}
    refused(
        SchemaError,
        r"^table 'c' is empty: none of its sites \(.*us.*\) has a row$",
        sites(uk=none, us=none),
    )
    refused(
        SchemaError,
        r"^table 'c' is empty after the query's filters: none of its sites \(.*uk",
        sql=f"{SQL} WHERE c.id < 0",
    )
    refused(
        SchemaError,
        "^table 'o' is empty after the query's filters: none of its sites",
        sql=f"{SQL} WHERE o.price IS NULL AND o.price IS NOT NULL",
    )


def test_shard_that_no_other_row_joins_works():
    strategy = start(sites(uk={"customers": customers((8, 9))}))
    assert strategy.report.joined_rows_train > 0
    start(sites(uk={"customers": customers((8, 9))}), method=TablePuppetSGD)
    start(sites(uk={"customers": customers((8, 9))}), lou="consensus")


def test_join_without_rows_says_what_every_step_leaves():
    hosted = sites(
        us={"customers": customers((10, 11))}, uk={"customers": customers((12, 13))}
    )
    match = "the join has no rows; rows left after each step: o: 10, c: 0"
    refused(MappingError, match, hosted)


def test_join_on_null_keys_has_no_rows():
    hosted = sites(shop={"orders": orders(cust=None)})
    refused(MappingError, "the join has no rows", hosted)


def test_keys_of_different_types():
    hosted = sites(shop={"orders": orders(cust=[str(k % 4) for k in range(ROWS)])})
    refused(
        MappingError,
        r"join .*o\.cust.*c\.id.* differ in type: o: text, c: number; cast one side",
        hosted,
    )


def test_column_of_a_type_without_use():
    hosted = sites(shop={"orders": orders(price=[["a", "b"]] * ROWS)})
    refused(SiteError, r"table 'orders'.*'price' is of type .*\[\]", hosted)


# values


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_feature(value):
    hosted = sites(us={"customers": customers((0, 1), age=[value, 1.0])})
    refused(SiteError, "site 'us', table 'c': .*'age' has infinite values", hosted)


def test_infinite_label():
    hosted = sites(shop={"orders": orders(qty=[np.inf, *range(1, ROWS)])})
    refused(SiteError, "site 'shop', table 'o': .*'label' has infinite", hosted)


def test_values_too_large_to_standardise():
    hosted = sites(us={"customers": customers((0, 1), age=[1e300, -1e300])})
    refused(SiteError, "site 'us', table 'c': .*'age'.*too large", hosted)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_null_labels(task):
    hosted = sites(shop={"orders": orders(qty=[None, None, *range(2, ROWS)])})
    refused(QueryError, "label is NULL in 2 rows: add a filter", hosted, task=task)


def test_null_labels_filtered_out_work():
    hosted = sites(shop={"orders": orders(qty=[None, None, *range(2, ROWS)])})
    start(hosted, sql=f"{SQL} WHERE o.qty IS NOT NULL")


def test_constant_label():
    hosted = sites(shop={"orders": orders(qty=7.5)})
    match = r"label is constant in the \d+ joined training rows \(one value: 7.5\)"
    refused(QueryError, match, hosted)


@pytest.mark.parametrize(
    ("label", "shown"), [("o.qty > 100", "0"), ("'a' || (o.qty > 0)", "atrue")]
)
def test_one_class(label, shown):
    sql = f"SELECT {label} AS label, o.price, c.age {FROM}"
    refused(QueryError, rf"label is constant .*one class: {shown}\)", sql=sql)


def test_text_label_in_regression():
    sql = f"SELECT o.note AS label, o.price, c.age {FROM}"
    refused(QueryError, "label is text, .* CAST it", sql=sql, task="regression")


def test_loss_that_does_not_fit_the_label():
    refused(QueryError, "'logistic' needs a classification task", loss="logistic")
    sql = f"SELECT o.qty > 5 AS label, c.age {FROM}"
    refused(QueryError, "'squared' needs a regression task", sql=sql, loss="squared")
    sql = f"SELECT 'a' || (o.cust) AS label, c.age {FROM}"
    match = "'logistic' needs two classes, the label has 4"
    refused(QueryError, match, sql=sql, loss="logistic")


def test_nothing_left_to_train_on():
    hosted = sites(shop={"orders": orders().head(1)})
    match = r"all joined rows are held out for testing: lower test-fraction \(0.9\)"
    refused(QueryError, match, hosted, test_fraction=0.9)


@pytest.mark.parametrize(
    ("expression", "note", "match"),
    [
        ("CAST(o.note AS INTEGER)", "secret", r"CAST.*fails on some.*\(to INT32\)"),
        ("CAST(o.note AS DATE)", "2024-13-45", r"CAST.* fails on some value: Conv"),
        ("CAST(o.note AS DECIMAL(4, 1))", "98765.4", r"CAST.* fails on some value"),
    ],
)
def test_failed_conversion_names_the_expression_not_the_value(expression, note, match):
    hosted = sites(shop={"orders": orders(note=note)})
    sql = f"SELECT o.qty AS label, {expression} AS x, c.age {FROM}"
    with pytest.raises(SiteError, match=f"site 'shop', table 'o': .*'x', {match}") as e:
        start(hosted, sql)
    assert note not in str(e.value)


def test_failed_filter_is_named():
    sql = f"{SQL} WHERE CAST(o.note AS INTEGER) > 3"
    match = r"site 'shop', table 'o': .*a filter, .*CAST.*fails on some value"
    with pytest.raises(SiteError, match=match) as caught:
        start(sql=sql)
    assert "n0" not in str(caught.value)


def test_failed_key_is_named():
    sql = SQL.replace("o.cust", "CAST(o.note AS INTEGER)")
    refused(SiteError, "table 'o': .*join key .*CAST.*fails on some value", sql=sql)


def test_enumerated_types_do_not_travel():
    texts: list[str] = []

    def note(message: Message) -> None:
        texts.append(str(message.content.config_records["message"]["header"]))

    categories = pd.Categorical(["secret-a", "secret-b"] * (ROWS // 2))
    hosted = sites(shop={"orders": orders(note=categories)})
    strategy = TablePuppetADMM(Query.from_sql(SQL), num_epochs=1)
    strategy.start(InProcessGrid(app, hosted, observe=note))
    assert not [text for text in texts if "secret" in text]


def test_enumerated_types_within_others_do_not_travel(tmp_path):
    with duckdb.connect(tmp_path / "crm.duckdb") as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('secret-a', 'it''s secret)')")
        connection.execute(
            "CREATE TABLE orders AS SELECT 1 AS cust, 2.0 AS qty, 3.0 AS price, "
            "{'m': CAST('secret-a' AS mood)} AS note"
        )
    file = tmp_path / "tables.toml"
    file.write_text('[tables.orders]\npath = "crm.duckdb"\ntable = "orders"\n')
    texts: list[str] = []

    def note(message: Message) -> None:
        texts.append(str(message.content.config_records["message"]["header"]))

    hosted = {**sites(), "shop": file}
    strategy = TablePuppetADMM(Query.from_sql(SQL.replace("o.price", "o.note")))
    with pytest.raises(SiteError, match=r"STRUCT\(m VARCHAR\), which cannot be used"):
        strategy.start(InProcessGrid(app, hosted, observe=note))
    assert not [text for text in texts if "secret" in text]


def test_rare_class_of_the_label_does_not_leave_the_site(tmp_path):
    notes = ["yes"] * 5 + ["no"] * 4 + ["secret"]
    orders(note=notes).to_csv(tmp_path / "orders.csv", index=False)
    file = tmp_path / "tables.toml"
    texts: list[str] = []

    def note(message: Message) -> None:
        texts.append(str(message.content.config_records["message"]["header"]))

    def train(min_count: int) -> None:
        file.write_text(
            f"[tables.orders]\npath = 'orders.csv'\nmin-count = {min_count}\n"
        )
        query = Query.from_sql(SQL.replace("o.qty", "o.note"))
        grid = InProcessGrid(app, {**sites(), "shop": file}, observe=note)
        TablePuppetADMM(query, num_epochs=1).start(grid)

    with pytest.raises(SiteError, match="1 classes of fewer than min-count = 4 rows"):
        train(4)
    assert not [text for text in texts if "secret" in text]
    train(1)


# settings


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"num-epoch": 3}, "num-epoch: unknown.*num-epochs.*Valid settings: sql, task"),
        ({"num-epochs": "three"}, "num-epochs: 'three' is not a whole number"),
        ({"strategy": "adm"}, "strategy: 'adm' is not one of admm, sgd"),
        ({"test-fraction": 1.5}, "test-fraction: 1.5 is out of range"),
        ({"progress": 1}, "progress: 1 is not true or false"),
    ],
)
def test_run_config(config, match):
    with pytest.raises(SettingsError, match=match):
        Settings.from_run_config(config)


def test_model_of_an_unknown_table():
    models = (("custs", "mlp"),)
    refused(SettingsError, "models names table 'custs'; .* o, c", models=models)


def test_model_that_cannot_be_imported():
    match = "site 'shop', table 'o': .*'nowhere:model' cannot be imported"
    refused(SiteError, match, model="nowhere:model")


def test_more_sites_wanted_than_there_are():
    refused(SchemaError, "min-sites = 9 are not there: 3 sites answered", min_sites=9)


# files


def tables_file(folder, text):
    path = folder / "tables.toml"
    path.write_text(text)
    return path


def test_tables_file_that_is_missing(tmp_path):
    hosted = sites(us=tmp_path / "none.toml")
    refused(TPFlowerError, "the tables file of the site does not exist", hosted)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[tables.customers", "is not TOML"),
        ("", "names no tables"),
        ("[tables.customers]\npth = 'a.csv'", "unknown key 'pth'.*path"),
        ("[tables.customers]\npath = 'a.xls'", "a.xls"),
    ],
)
def test_tables_file_that_is_malformed(tmp_path, text, match):
    refused(SiteError, match, sites(us=tables_file(tmp_path, text)))


def test_file_that_is_missing(tmp_path):
    path = tables_file(tmp_path, "[tables.customers]\npath = 'a.csv'\nsite = 'us'")
    match = r"table 'customers' at site 'us' \(its file\): the file does not exist"
    refused(SiteError, match, sites(us=path))


def test_file_that_cannot_be_read(tmp_path):
    (tmp_path / "a.csv").mkdir()
    path = tables_file(tmp_path, "[tables.customers]\npath = 'a.csv'\nsite = 'us'")
    refused(SiteError, r"\(its file\): the folder has no Parquet files", sites(us=path))


def test_line_of_a_file_is_not_quoted(tmp_path):
    (tmp_path / "a.csv").write_text("id,age\n0,30\n1,sec'ret\n")
    text = "[tables.customers]\npath='a.csv'\nsite='us'\ntypes = { age = 'INTEGER' }"
    match = r"CSV Error on Line: 3; Error when converting column \"age\"; to INTEGER"
    with pytest.raises(SiteError, match=match) as caught:
        start(sites(us=tables_file(tmp_path, text)))
    assert "ret" not in str(caught.value).replace(str(tmp_path), "")


def test_frame_that_is_none():
    with pytest.raises(SourceError, match="expected a pandas DataFrame, not list"):
        InProcessGrid(app, sites(us={"customers": [[1, 2]]}))
