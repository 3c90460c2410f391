"""The explanation of a query, against SQL on whole tables and figures by hand."""

import json
import math
import re
from contextlib import closing
from dataclasses import replace

import duckdb
import pytest

from strategies import STRATEGIES, Explain
from strategies.app import CONSOLE_WIDTH
from strategies.disclosures import NOTHING, SET_UP, Exposure, disclosures
from strategies.explain.explanation import explanation_dict
from tests.support.database_tables import fill
from tests.support.examples.explained import (
    ORDERS,
    SMALL,
    SMALL_SQL,
    explain,
    printed,
    run_app,
)
from tests.support.servers import uri
from tp_flower.errors import MappingError
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.protocol.packet import Action
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings
from tp_flower.sources.flights import FLIGHTS_SQL, flights_tables

# by hand: a table that a reader can join in the head


@pytest.fixture(scope="module")
def small():
    return explain(SMALL_SQL, SMALL, test_fraction=0.4, seed=1)


def test_tables_by_hand(small):
    orders, items, customers = small.tables
    assert (orders.table, orders.names, orders.sites) == ("o", ("orders",), ("shop",))
    assert (items.rows, customers.rows) == ((4,), (2, 2))
    assert customers.sites == ("uk", "us")
    # day; same is constant. price. two kinds
    assert [table.features for table in small.tables] == [1, 1, 2]
    assert orders.dropped == ("same",)
    # orders 0, 1 have two items each, order 2 one; the other two are not joined
    assert orders.multiplicity == {"min": 0, "median": 1.0, "mean": 1.0, "max": 2}
    # items a, a in two joined rows, b in one, c in none;
    # customer 1 has 2 + 1 joined rows, customer 2 has 2; nobody and 4 none
    assert [table.unused_rows for table in small.tables] == [2, 1, 2]
    assert (items.multiplicity["median"], customers.multiplicity["max"]) == (1.5, 3)
    assert small.joined_rows_train + small.joined_rows_test == small.joined_rows


def test_joins_by_hand(small):
    first, items, customers = small.join_steps
    assert (first.table, first.rows) == ("o", 5)
    assert (items.rows_before, items.rows, items.unmatched_before) == (5, 5, 2)
    assert (items.fan_out_min, items.fan_out_median, items.fan_out_max) == (0, 1, 2)
    assert (customers.rows, customers.unmatched_before) == (5, 0)
    items, customers = small.joins
    assert (items.left_rows, items.left_null, items.left_unmatched) == (5, 1, 2)
    assert (items.right_rows, items.right_null, items.right_unmatched) == (4, 0, 1)
    assert (items.is_outer, customers.is_outer) == (False, True)
    assert (customers.left_unmatched, customers.right_unmatched) == (1, 2)
    assert customers.right_null == 1
    # keys a and b; customers 1 and 2
    assert (items.checked_keys, customers.checked_keys) == (2, 2)


def test_nothing_is_trained_and_the_sites_forget(small):
    phases = [item.phase for item in small.history]
    assert phases[-2:] == ["check", "finish"]
    assert not {"prepare", "admm", "sgd"} & set(phases)
    assert all(not item.train for item in small.history)


def test_what_the_user_reads(small):
    text = printed(small)
    assert max(map(len, text.splitlines())) <= CONSOLE_WIDTH
    text = " ".join(text.split())
    for line in (
        "rows of customers",
        'join keys: ("item"), ("cust")',
        "Left out, as they are constant: o.same.",
        "LEFT JOIN c",
        "5 joined rows (3 to train on, 2 held out) from 13 rows held.",
        "20 values in the joined table, which is never built, 1.18 times as many as",
        "o: 2 of 5, 1 NULL",
        "Training by admm",
        "Training by admm, epochs: 12",
        "the whole run",
    ):
        assert line in text


def test_a_private_run_sends_what_its_mechanism_needs():
    statistics, gradients = (
        explain(SMALL_SQL, SMALL, privacy=PrivacySettings(features=name)).cost
        for name in ("statistics", "dp-sgd")
    )
    # both shards of the customers send Gram matrices of two features
    assert statistics.set_up.up["c"] - gradients.set_up.up["c"] == 2 * 8 * 2 * 2
    assert statistics.epoch.rounds == gradients.epoch.rounds == 2


def test_the_report_is_json_and_says_the_same(small):
    content = json.loads(json.dumps(explanation_dict(small), allow_nan=False))
    assert content["mode"] == "explain"
    values = {"joined-values": 20, "values-held": 17}
    assert content["saving"] == {"joined-rows": 5, "rows-held": 13, **values}
    of_items = {"min": 0, "median": 1.5, "mean": 1.25, "max": 2}
    assert content["tables"][1]["multiplicity"] == of_items
    left = {"left": "o", "left-rows": 5, "left-null": 1, "left-unmatched": 2}
    right = {"right": "i", "right-rows": 4, "right-null": 0, "right-unmatched": 1}
    join = {"on": "o.item = i.item", "is-outer": False, "checked-keys": 2}
    assert content["joins"][0] == {**join, **left, **right}
    cost = content["cost"]
    assert (cost["strategy"], cost["epochs"]) == ("admm", small.cost.epochs)
    assert cost["epoch"]["rounds"] == 2
    assert cost["run"]["bytes-up"] == pytest.approx(small.cost.run.up)
    assert [step["rows"] for step in content["join-steps"]] == [5, 5, 5]


CORESET = {"coreset_size": 9, "task": "regression"}
DRAWING = {str(action) for action in (Action.MEASURE, Action.DRAW, Action.WEIGH)}


def protections(releases, carries):
    """The protections of what is carried and begins so."""
    return {each.protection for each in releases if each.carries.startswith(carries)}


def messages_of(strategy, *, is_sharded=True, **how) -> tuple[Action, ...]:
    method = STRATEGIES[strategy](Query.from_sql(SMALL_SQL), **how)
    return (*SET_UP, *method.run_messages(is_sharded=is_sharded), Action.FINISH)


@pytest.mark.parametrize("strategy", ["admm", "sgd", "coreset-ridge"])
def test_every_message_is_covered(strategy):
    plain, releases = (
        disclosures(Exposure("o", messages, ["c", "d"], ["c"], ["d"], False, False))
        for messages in (
            messages_of(strategy, coreset_kind="uniform", **CORESET),
            messages_of(strategy, **CORESET),
        )
    )
    messages = {release.message for release in releases}
    assert messages - {release.message for release in plain} == DRAWING
    others = {
        "admm": {Action.SGD, Action.STEP, Action.ROWS},
        "sgd": {Action.ADMM, Action.CONSENSUS, Action.ROWS},
        "coreset-ridge": {Action.SGD, Action.STEP, Action.ADMM},
    }[strategy]
    # of runs that predict, which say themselves what they release
    others |= {Action.SCORE, Action.DELIVER}
    # of sites with models of their own
    others |= {Action.PERSONALISE, Action.SUMMARISE, Action.PERSONAL}
    assert messages == set(map(str, set(Action) - others))
    assert all(release.protection for release in releases)
    labels = [each for each in releases if "label of every row of o" in each.carries]
    assert [release.protection for release in labels] == [NOTHING]
    (keys,) = protections(releases, "join keys")
    assert "keyed hash" in keys
    assert "simulation" not in keys


@pytest.mark.parametrize("family", ["admm", "sgd"])
def test_vfl_tells_a_site_what_each_joined_row_is_made_of(family):
    exposure = Exposure("o", messages_of(family), ["c"], [], [], True, False)
    releases = disclosures(exposure)
    by_joined_rows = disclosures(replace(exposure, by_joined_rows=True))
    changed = {
        (plain.message, plain.to)
        for plain, vfl in zip(releases, by_joined_rows, strict=True)
        if plain.carries != vfl.carries
        and "joined row" in vfl.carries
        and vfl.protection == NOTHING
    }
    further = {"admm": Action.CONSENSUS, "sgd": Action.STEP}[family]
    action = {"admm": Action.ADMM, "sgd": Action.SGD}[family]
    assert changed == {
        (str(Action.PREPARE), "sites"),
        (str(action), "sites"),
        (str(action), "server"),
        (str(further), "server"),
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (KeySource.FILE, "secret file"),
        (KeySource.PINNED, "pinned"),
        (KeySource.AGREED, "an honest server"),
    ],
)
def test_where_the_key_comes_from_is_said(source, words):
    messages = messages_of("admm", is_sharded=False)
    exposure = Exposure("o", messages, [], [], [], True, False, keys=source)
    releases = disclosures(exposure)
    (keys,) = protections(releases, "join keys")
    assert words in keys
    seals = [each.protection for each in releases if each.message == str(Action.SEAL)]
    assert len(seals) == (source is not KeySource.FILE)
    assert all(("pinned" in seal) == (source is KeySource.PINNED) for seal in seals)


def test_a_simulation_says_that_its_key_protects_nothing():
    messages = messages_of("admm", is_sharded=False)
    releases = disclosures(Exposure("o", messages, [], [], [], True, is_simulated=True))
    (keys,) = protections(releases, "join keys")
    assert "the key of a simulation is known to all" in keys
    assert not any("Gram" in release.carries for release in releases)
    assert not any(each.message == str(Action.CONSENSUS) for each in releases)


PRIVATE = PrivacySettings(
    labels="randomised-response",
    label_epsilon=1.5,
    features="dp-sgd",
    epsilon=2.0,
    predictions=8.0,
)


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_what_a_mechanism_covers_is_said_and_what_none_covers_too(strategy):
    tables = ["c", "d"], ["c"], ["d"]
    exposure = Exposure("o", messages_of(strategy), *tables, False, False, fitted=["c"])
    clear, covered = (
        {(each.message, each.to, each.carries): each.protection for each in releases}
        for releases in map(disclosures, (exposure, replace(exposure, privacy=PRIVATE)))
    )
    changed = {key[2]: text for key, text in covered.items() if clear[key] != text}
    dp_sgd = "DP-SGD (epsilon 2, delta 1e-05, per row and run)"
    scores = "clipped scores (epsilon 8, delta 1e-05, per row and run)"
    words = {
        "label of every row": "randomised response on each label (epsilon 1.5)",
        "a score per row": scores,
        "scores of every row": scores,
        "per own row": "made from labels and scores that are covered",
        **dict.fromkeys(["gradients", "final coefficients", "parameters"], dp_sgd),
        **dict.fromkeys(["second moments", "features times targets"], dp_sgd),
    }
    for carries, protection in changed.items():
        assert any(k in carries and v in protection for k, v in words.items()), carries
    assert len(changed) >= 5
    uncovered = {key[2] for key, text in covered.items() if text == NOTHING}
    assert any("count, mean, deviation" in carries for carries in uncovered)
    declared = {each.carries for each in disclosures(replace(exposure, fitted=[]))}
    words = ("count, mean", "how many rows;")
    assert not any(word in carries for carries in declared for word in words)
    # what is left out: the curvature, which is not asked for
    curvature = {"one number of curvature per shard"}
    assert {key[2] for key in clear} - {key[2] for key in covered} == curvature


FLOWN = "(SELECT * FROM flights WHERE arr_delay IS NOT NULL) f"
WEATHER = "f.origin = w.origin AND f.time_hour = w.time_hour"
TABLES = {
    "f": ("flights", "t.arr_delay IS NOT NULL"),
    "p": ("planes", "true"),
    "w": ("weather", "true"),
    "a": ("airports", "true"),
}
JOINS = {
    "p": ("planes p", "f.tailnum = p.tailnum"),
    "w": ("weather w", WEATHER),
    "a": ("airports a", "f.dest = a.faa"),
}


@pytest.fixture
def flights():
    """The flights' tables, with a column row_, and the rows of their join."""
    columns = ", ".join(f"{alias}.row_ AS {alias}_row" for alias in TABLES)
    source = FLIGHTS_SQL[FLIGHTS_SQL.index("FROM flights") :]
    with closing(duckdb.connect()) as connection:
        for name, files in flights_tables().items():
            paths = [str(path) for path in files.values()]
            connection.execute(
                f"CREATE TABLE {name} AS SELECT *, row_number() OVER () AS row_ "
                f"FROM read_parquet({paths})"
            )
        connection.execute(f"CREATE TABLE joined AS SELECT {columns} {source}")
        yield connection


def test_flights_are_what_sql_says(flights):
    explanation = explain(FLIGHTS_SQL, 5, strategy="sgd")
    for table in explanation.tables:
        alias = table.table
        name, where = TABLES[alias]
        sql = (
            f"SELECT count(*), count(*) FILTER (n = 0), min(n), median(n), avg(n), "
            f"max(n) FROM (SELECT count(j.{alias}_row) AS n FROM {name} t "
            f"LEFT JOIN joined j ON j.{alias}_row = t.row_ WHERE {where} "
            "GROUP BY t.row_)"
        )
        figures = table.total_rows, table.unused_rows, *table.multiplicity.values()
        assert flights.execute(sql).fetchone() == pytest.approx(figures)
    for join in explanation.joins:
        right, on = JOINS[join.right]
        left, right_side = join.left_unmatched, join.right_unmatched
        sides = (FLOWN, right, left), (right, FLOWN, right_side)
        for one, other, unmatched in sides:
            sql = (
                f"SELECT count(*) FROM {one} WHERE NOT EXISTS "
                f"(SELECT 1 FROM {other} WHERE {on})"
            )
            assert flights.execute(sql).fetchone() == (unmatched,)
    # known from the data: rows after every step, and the widths of the encoders
    rows = [step.rows for step in explanation.join_steps]
    assert rows == [327_346, 279_017, 277_690, 271_594]
    assert flights.execute("SELECT count(*) FROM joined").fetchone() == (271_594,)
    assert explanation.joined_rows == 271_594
    assert [table.features for table in explanation.tables] == [26, 174, 8, 16]
    assert explanation.joined_values == 271_594 * 224
    held = 327_346 * 26 + 3_322 * 174 + 26_115 * 8 + 1_458 * 16
    assert explanation.values_held == held
    # 100 airports are flown to
    assert explanation.joins[2].checked_keys == 100
    trained = explanation.joined_rows_train
    batches = math.ceil(trained / math.ceil(trained / 100))
    assert explanation.cost.epoch.rounds == 2 * batches


def test_mode_explain_prints_and_writes(tmp_path, capsys):
    content = run_app(tmp_path, mode="explain", seed=1)
    printed_text = capsys.readouterr().out
    assert "Every message, and who learns what" in printed_text
    assert f"Report: {tmp_path / 'report.json'}" in printed_text
    assert (content["mode"], content["status"]) == ("explain", "completed")
    assert content["settings"]["mode"] == "explain"


def test_explain_says_what_it_has_spent_itself(tmp_path, capsys):
    privacy = {"privacy.labels": "laplace", "privacy.label-epsilon": 1.5}
    privacy["privacy.label-range"] = "0, 10"
    content = run_app(tmp_path, mode="explain", task="regression", **privacy)
    assert "What a row has spent against the server" in capsys.readouterr().out
    totals = {
        total["table"]: total["epsilon"] for total in content["privacy"]["totals"]
    }
    assert totals == {"orders": 1.5, "items": 0, "customers": 0}


def test_explain_of_a_join_that_multiplies_rows_names_the_step(tmp_path, capsys):
    words = "the join multiplies rows: i on o.item = i.item: 5 rows become 5"
    with pytest.raises(MappingError, match=words):
        run_app(tmp_path, mode="explain", **{"max-joined-rows": 4})
    assert f"FAILED: {words}" in capsys.readouterr().out


def test_there_is_no_explanation_before_the_rounds():
    strategy = Explain(Query.from_sql(SMALL_SQL))
    assert strategy.settings.mode == "explain"
    with pytest.raises(RuntimeError, match="no explanation before"):
        _ = strategy.explanation


def test_a_query_over_one_table_reads_well_too():
    sql = 'SELECT "[red]".qty AS label, "[red]".day FROM orders "[red]"'
    explanation = explain(sql, {"shop": {"orders": ORDERS}}, test_fraction=0.4)
    text = printed(explanation)
    assert re.search(r"\[red\] +orders", text)
    assert "Join keys" not in text
    assert explanation.cost.strategy == "admm"


def test_explain_names_the_database_and_its_filters(tmp_path, postgresql):
    columns = {"cust": "BIGINT", "amount": "DOUBLE PRECISION"}
    rows = [(1, 2.0), (1, 4.0), (2, 8.0), (3, None)]
    name = fill(postgresql, "payments", columns, rows)
    tables = tmp_path / "tables.toml"
    address = uri(postgresql).replace("\\", "\\\\")
    tables.write_text(f'[tables.payments]\nuri = "{address}"\ntable = "{name}"\n')
    sql = """SELECT o.qty AS label, o.day, p.mean FROM orders o JOIN (
        SELECT cust, AVG(amount) AS mean FROM payments WHERE amount > 1 GROUP BY cust
    ) p ON o.cust = p.cust"""
    explanation = explain(sql, {"shop": {"orders": ORDERS}, "bank": str(tables)})
    orders, payments = explanation.tables
    assert orders.work[-1] == "shop: all in DuckDB at the site"
    assert payments.work[-1] == (
        'payments-0: in postgresql: filter: "amount" > 1. '
        "All else in DuckDB at the site"
    )
    assert "in postgresql" in printed(explanation)
