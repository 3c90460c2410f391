"""The explanation of a query, against figures by hand."""

import json
import re
from contextlib import closing
from dataclasses import replace

import duckdb
import numpy as np
import pandas as pd
import pytest

from strategies import STRATEGIES, Explain
from strategies.disclosures import NOTHING, SET_UP, Exposure, disclosures
from strategies.methods.personalised.setup import TRAINING
from strategies.report_page.page import PAGE_FILE
from strategies.run.failures import LOG_FILE
from strategies.training.join_method import JoinMethod
from tests.support.examples.explained import (
    ORDERS,
    SMALL,
    SMALL_SQL,
    columns,
    explain,
    printed,
    run_app,
)
from tests.support.files import case_table
from tests.support.page_reading import Page
from tests.support.policies import OPEN
from tests.support.tables.sources import tables_file, write_frame
from tp_flower.errors import MappingError
from tp_flower.methods.boost.messages import TRAIN_PAIRS, TRAIN_REGIONS
from tp_flower.methods.coreset.messages import TRAIN_DRAW, TRAIN_MEASURE, TRAIN_WEIGH
from tp_flower.methods.moments.messages import TRAIN_INFORMATION, TRAIN_SOLVE
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.protocol.messages import ACTIONS, Action, action_named
from tp_flower.protocol.training_messages import Update
from tp_flower.query import Query
from tp_flower.reports.results import CONSOLE_WIDTH
from tp_flower.settings import PrivacySettings
from tp_flower.sources.flights import FLIGHTS_SQL, flights_tables

CASES = case_table(__file__)
CORESET = {"coreset_size": 9, "task": "regression"}
DRAWING = {str(action) for action in (TRAIN_MEASURE, TRAIN_DRAW, TRAIN_WEIGH)}
PRIVATE = PrivacySettings(
    labels="randomised-response",
    label_epsilon=1.5,
    features="dp-sgd",
    epsilon=2.0,
    predictions=8.0,
)
PER = "per row (or the privacy-unit of a policy) and run"
FLOWN = "(SELECT * FROM flights WHERE arr_delay IS NOT NULL) f"
JOINS = {
    "f": (FLOWN, ""),
    "p": ("planes p", "f.tailnum = p.tailnum"),
    "w": ("weather w", "f.origin = w.origin AND f.time_hour = w.time_hour"),
    "a": ("airports a", "f.dest = a.faa"),
}


@pytest.fixture(scope="module")
def small():
    return explain(SMALL_SQL, SMALL, test_fraction=0.4, seed=1)


def test_the_report_is_json_and_right_by_hand(small):
    phases = [item["phase"] for item in small["history"]]
    # nothing is trained, and the sites forget
    assert phases[-2:] == ["fit", "finish"]
    assert not {"prepare", "admm", "sgd"} & set(phases)
    content = json.loads(json.dumps(small, allow_nan=False))
    assert content["mode"] == "explain"
    tables = content["tables"]
    # of o, same is constant; c has two kinds
    names = ("table", "names", "sites", "rows", "features", "dropped")
    assert columns(tables, *names) == [
        ["o", ["orders"], ["shop"], [5], 1, ["same"]],
        ["i", ["items"], ["maker"], [4], 1, []],
        ["c", ["customers"], ["uk", "us"], [2, 2], 0, ["kind"]],
    ]
    # orders 0, 1 have two items each, order 2 one; the other two are not joined;
    # items a, a in two joined rows, b in one, c in none;
    # customer 1 has 2 + 1 joined rows, customer 2 has 2; nobody and 4 none
    assert columns(tables, "unused-rows", "multiplicity") == [
        [2, {"min": 0, "median": 1.0, "mean": 1.0, "max": 2}],
        [1, {"min": 0, "median": 1.5, "mean": 1.25, "max": 2}],
        [2, {"min": 0, "median": 1.0, "mean": 1.25, "max": 3}],
    ]
    steps = columns(content["join-steps"], "table", "rows-before", "rows")
    assert steps == [["o", 0, 5], ["i", 5, 5], ["c", 5, 5]]
    fan_outs = ("fan-out-min", "fan-out-median", "fan-out-max", "unmatched-before")
    assert columns(content["join-steps"][1:], *fan_outs) == [[0, 1, 2, 2], [1, 1, 1, 0]]
    # keys a and b; customers 1 and 2
    assert columns(content["joins"], "on", "is-outer") == [
        ["o.item = i.item", False],
        ["o.cust = c.id", True],
    ]
    left = ("left", "left-rows", "left-null", "left-unmatched")
    assert columns(content["joins"], *left) == [["o", 5, 1, 2], ["o", 5, 0, 1]]
    right = ("right", "right-rows", "right-null", "right-unmatched")
    assert columns(content["joins"], *right) == [["i", 4, 0, 1], ["c", 4, 1, 2]]
    values = {"joined-values": 10, "values-held": 9}
    assert content["saving"] == {"joined-rows": 5, "rows-held": 13, **values}
    assert sum(content["joined-rows"].values()) == 5
    cost = content["cost"]
    assert cost["strategy"] == "cg"
    assert cost["epochs"] == 100
    assert cost["rounds"]["epoch"] == 2


def test_what_the_user_reads(small):
    text = printed(small)
    assert max(map(len, text.splitlines())) <= CONSOLE_WIDTH
    text = " ".join(text.split())
    for line in CASES["messages"]:
        assert line in text


def protections(releases, carries):
    return {each.protection for each in releases if each.carries.startswith(carries)}


def messages_of(strategy, *, is_sharded=True, **how) -> tuple[Action, ...]:
    method = STRATEGIES[strategy](Query.from_sql(SMALL_SQL), **how)
    return (*SET_UP, *method.method.run_messages(is_sharded=is_sharded), Action.FINISH)


def exposed(strategy, messages, **more) -> Exposure:
    """What a run exposes whose tables c and d are sharded, one of them grouped."""
    kind = Update.SUM if strategy == "sgd" else Update.CONSENSUS
    updates = {"c": kind if strategy == "sgd" else Update.GRAM, "d": kind}
    method = STRATEGIES[strategy](Query.from_sql(SMALL_SQL)).method
    facts = {"updates": updates, "method": method.disclosure_values(None), **more}
    return Exposure("o", messages, ["c", "d"], ["d"], False, False, **facts)


@pytest.mark.parametrize("strategy", ["admm", "sgd", "coreset-ridge"])
def test_every_message_is_covered(strategy):
    uniform = messages_of(strategy, coreset_kind="uniform", **CORESET)
    drawn = messages_of(strategy, **CORESET)
    plain = disclosures(exposed(strategy, uniform))
    releases = disclosures(exposed(strategy, drawn))
    messages = {release.message for release in releases}
    assert messages - {release.message for release in plain} == DRAWING
    assert messages == set(map(str, drawn))
    assert all(release.protection for release in releases)
    labels = [each for each in releases if "label of every row of o" in each.carries]
    assert [release.protection for release in labels] == [NOTHING]
    (keys,) = protections(releases, "join keys")
    assert "keyed hash" in keys
    assert "simulation" not in keys


def test_every_message_is_of_a_method_or_a_prediction():
    sent = {
        *SET_UP,
        *map(action_named, DRAWING),
        *TRAINING,
        Action.STATISTICS,
        Action.FIT,
        Action.RANK,
        Action.BINS,
        Action.SCORE,
        Action.DIVIDE,
        Action.INSPECT,
        # where a LATERAL sub-query looks back from another site's rows
        Action.CUTOFFS,
        # where shards have rows of one key, and answer together
        Action.PARTIALS,
        # where policies let a table be divided
        TRAIN_REGIONS,
        TRAIN_PAIRS,
        # where conjugate gradients end with standard errors
        TRAIN_INFORMATION,
        # where the label's site solves by moments
        TRAIN_SOLVE,
        # where a search begins a fit
        Action.NEXT,
        Action.SESSION,
        Action.FINISH,
    }
    for strategy in STRATEGIES.values():
        if issubclass(method := strategy.method_type, JoinMethod):
            sent |= {*method.messages, *method.messages_of_shards}
    unsent = set(ACTIONS.values()) - sent
    assert not unsent, "list them in the `messages` of the strategy that sends them"


@pytest.mark.parametrize(
    ("source", "is_simulated", "words"),
    [
        (KeySource.PINNED, False, "pinned"),
        (KeySource.AGREED, False, "an honest server"),
        (KeySource.AGREED, True, "the key of a simulation is known to all"),
    ],
)
def test_where_the_key_comes_from_is_said(source, is_simulated, words):
    messages = messages_of("admm", is_sharded=False)
    exposure = Exposure("o", messages, [], [], True, is_simulated, keys=source)
    releases = disclosures(exposure)
    (keys,) = protections(releases, "join keys")
    assert words in keys
    seals = [each.protection for each in releases if each.message == str(Action.SEAL)]
    assert len(seals) == 1
    assert all(("pinned" in seal) == (source is KeySource.PINNED) for seal in seals)
    # of tables in one shard
    assert not any("Gram" in release.carries for release in releases)
    assert not any(each.message == str(Action.CONSENSUS) for each in releases)


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_what_a_mechanism_covers_is_said_and_what_none_covers_too(strategy):
    exposure = exposed(strategy, messages_of(strategy), fitted=["c"])
    clear, covered = (
        {(each.message, each.to, each.carries): each.protection for each in releases}
        for releases in map(disclosures, (exposure, replace(exposure, privacy=PRIVATE)))
    )
    changed = {key[2]: text for key, text in covered.items() if clear[key] != text}
    dp_sgd = f"DP-SGD (models: epsilon 2, delta 1e-05, {PER})"
    scores = f"clipped scores (scores: epsilon 8, delta 1e-05, {PER})"
    words = {
        "label of every row": "randomised response on each label (labels: epsilon 1.5)",
        "a score per row": scores,
        "mean and variance": scores,
        "scores of every row": scores,
        "per row of the site": "made from labels and scores that are covered",
        **dict.fromkeys(["gradients", "final coefficients", "parameters"], dp_sgd),
        **dict.fromkeys(["second moments", "features times score steps"], dp_sgd),
    }
    for carries, protection in changed.items():
        assert any(k in carries and v in protection for k, v in words.items()), carries
    assert len(changed) >= 5
    # of the statistics the other shards learn all, the server nothing
    sealed = [key for key in clear if "count, mean, deviation" in key[2]]
    assert [key[1] for key in sealed] == ["sites"]
    assert all("ChaCha20-Poly1305; an honest server" in clear[key] for key in sealed)
    declared = disclosures(replace(exposure, fitted=[]))
    assert not any("count, mean" in each.carries for each in declared)
    # what is left out: the curvature and the facts about features, not asked for
    left_out = {key[2] for key in clear} - {key[2] for key in covered}
    starts = {carries[:15] for carries in left_out}
    assert starts == {"a summary of ea", "one number of c"}
    assert len(left_out) == 2


def test_flights_are_what_sql_says():
    explanation = explain(FLIGHTS_SQL, 5, strategy="sgd")
    with closing(duckdb.connect()) as connection:
        for name, files in flights_tables().items():
            paths = list(map(str, files.values()))
            connection.execute(
                f"CREATE TABLE {name} AS "
                f"SELECT *, row_number() OVER () AS n FROM read_parquet({paths})"
            )
        source = FLIGHTS_SQL[FLIGHTS_SQL.index("FROM flights") :]
        connection.execute(
            "CREATE TABLE joined AS SELECT f.n AS f, p.n AS p, w.n AS w, a.n AS a "
            + source
        )
        for table in explanation["tables"]:
            alias = table["table"]
            counts = (
                f"SELECT count(j.{alias}) AS times FROM {JOINS[alias][0]} "
                f"LEFT JOIN joined j ON j.{alias} = {alias}.n GROUP BY {alias}.n"
            )
            figures = connection.execute(
                "SELECT count(*), count(*) FILTER (times = 0), min(times), "
                f"median(times), avg(times), max(times) FROM ({counts})"
            ).fetchone()
            multiplicity = table["multiplicity"].values()
            expected = sum(table["rows"]), table["unused-rows"], *multiplicity
            assert figures == pytest.approx(expected)
        for join in explanation["joins"]:
            right, on = JOINS[join["right"]]
            for table, other, unmatched in (
                (FLOWN, right, join["left-unmatched"]),
                (right, FLOWN, join["right-unmatched"]),
            ):
                assert connection.execute(
                    f"SELECT count(*) FROM {table} ANTI JOIN {other} ON {on}"
                ).fetchone() == (unmatched,)
    assert_a_screen(explanation, "flights 327,346", "48,329 have no match in p")
    # known from the data: the rows after every step
    steps = [step["rows"] for step in explanation["join-steps"]]
    assert steps == [327_346, 279_017, 277_690, 271_594]


def assert_a_screen(explanation, *words):
    lines = printed(explanation, is_full=False).splitlines()
    # the app prints 12 more, of its rounds, commands and files
    assert len(lines) <= 49
    assert max(map(len, lines)) <= CONSOLE_WIDTH
    text = " ".join(" ".join(lines).split())
    for expected in (*words, *CASES["screen"]):
        assert expected in text


def test_the_memory_of_every_site_and_of_the_server_is_forecast(small):
    memory = small["memory"]
    assert set(memory["sites"]) == set(SMALL)
    # of five rows next to nothing, besides what any site takes
    for peak in (*memory["sites"].values(), memory["server"]):
        assert 1e6 < peak < 1e7
    assert "Memory, about: shop 9.0" in printed(small, is_full=False)
    assert "Memory of training, about, at its peak" in printed(small)


def test_seven_tables_are_explained_on_a_screen():
    squares = np.arange(9.0) ** 2
    frame = pd.DataFrame({"id": range(9), "next": range(1, 10), "x": squares})
    sites = {f"s{n}": {f"table_{n}": frame} for n in range(7)}
    joins = (f"JOIN table_{n} t{n} ON t{n - 1}.next = t{n}.id" for n in range(1, 7))
    features = ", ".join(f"t{n}.x AS x{n}" for n in range(1, 7))
    sql = f"SELECT t0.x AS label, {features} FROM table_0 t0 {' '.join(joins)}"
    explanation = explain(sql, sites)
    lost = [f"1 have no match in t{n + 1} on t{n}.next = t{n + 1}.id" for n in range(6)]
    assert_a_screen(explanation, "2 joined rows to train on, 1 held out", *lost)


def test_mode_explain_prints_and_writes_also_what_it_has_spent(tmp_path, capsys):
    privacy = {
        "privacy.labels": "laplace",
        "privacy.label-epsilon": 1.5,
        "privacy.label-range": "0, 10",
    }
    content = run_app(tmp_path, mode="explain", task="regression", **privacy)
    text = capsys.readouterr().out
    page = Page((tmp_path / PAGE_FILE).read_text()).text
    for words in (
        "The server learns, in the clear: ",
        "Epsilon per row, and what is not covered",
    ):
        assert words in text
    assert "Epsilon per row, and what is not covered" in page
    assert "Every message, and who learns what" in page
    assert "to be learned from 3 tables" in page
    assert "Training by cg, at most 100 epochs" in page
    assert "the whole run 206 " in page
    assert "206 rounds would wait" in page
    assert "5.62 s (session) or 17 min 10 s (flower)" in page
    waiting = {"session": 5 + 206 * 0.003, "flower": 206 * 5}
    assert content["cost"]["waiting"] == pytest.approx(waiting)
    assert f"Report: {tmp_path / 'report.json'}" in text
    assert content["mode"] == "explain"
    assert content["status"] == "completed"
    totals = dict(columns(content["privacy"]["totals"], "table", "labels"))
    assert totals == {"orders": 1.5, "items": "", "customers": ""}


def test_explain_of_a_join_that_multiplies_rows_names_the_step(tmp_path):
    words = "the join multiplies rows: i on o.item = i.item: 5 rows become 5"
    with pytest.raises(MappingError, match=words):
        run_app(tmp_path, mode="explain", **{"max-joined-rows": 4})
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"].startswith(f"failed: {words}")
    assert words in (tmp_path / PAGE_FILE).read_text()
    assert "Traceback" in (tmp_path / LOG_FILE).read_text()
    with pytest.raises(RuntimeError, match="no explanation before"):
        _ = Explain(Query.from_sql(SMALL_SQL)).explanation


def test_a_query_over_one_table_reads_well_too():
    sql = 'SELECT "[red]".qty AS label, "[red]".day FROM orders "[red]"'
    explanation = explain(sql, {"shop": {"orders": ORDERS}}, test_fraction=0.4)
    text = printed(explanation)
    assert re.search(r"\[red\] +orders", text)
    assert "Join keys" not in text
    assert explanation["cost"]["strategy"] == "cg"


def test_explain_names_the_database_and_its_filters(tmp_path):
    database = tmp_path / "payments.sqlite"
    payments = pd.DataFrame({"cust": [1, 1, 2, 3], "amount": [2.0, 4.0, 8.0, None]})
    write_frame(payments, database, "payments")
    text = f"[tables.payments]\nuri = 'sqlite:///{database}'\ntable = 'payments'\n"
    tables = tables_file(tmp_path, text + OPEN)
    sql = """SELECT o.qty AS label, o.day, p.mean FROM orders o JOIN (
        SELECT cust, AVG(amount) AS mean FROM payments WHERE amount > 1 GROUP BY cust
    ) p ON o.cust = p.cust"""
    explanation = explain(sql, {"shop": {"orders": ORDERS}, "bank": tables})
    orders, payments = explanation["tables"]
    assert orders["work"][-1] == "shop: all in DuckDB at the site"
    assert payments["work"][-1] == (
        'payments-0: in sqlite: filter: "amount" > 1. All else in DuckDB at the site'
    )
    assert "in sqlite" in printed(explanation)
