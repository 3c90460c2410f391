"""Runs over derived tables: the same as over tables that hold their rows."""

import re
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pandas as pd
import pytest

import tp_flower
from strategies.explain.explanation import Explain
from tests.support.command_line import printed_by
from tests.support.federated import LocalGrid, train, write_site
from tests.support.files import toml_lines
from tests.support.ledgers import ledger_lines
from tests.support.policies import lenient
from tests.support.tables.sources import rows_of, sources_of
from tp_flower.errors import SiteError
from tp_flower.settings import PrivacySettings

ROWS = 90
ASOF = """SELECT v.*, l.value, l.taken, avg(v.cost) OVER (PARTITION BY v.patient
  ORDER BY v.seen ROWS BETWEEN 3 PRECEDING AND 1 PRECEDING) AS mean
FROM visits v ASOF LEFT JOIN lab l ON l.patient = v.patient AND l.taken <= v.seen"""
SQL = """SELECT r.cost AS label, r.value, r.mean, r.kind, p.age
FROM records r JOIN patients p ON r.patient = p.id"""
SITE = f"""
[tables]
visits = {{ path = "visits.csv", site = "hospital" }}
lab = {{ path = "lab.parquet", site = "hospital" }}
[tables.records]
sql = '''{ASOF}'''
site = "hospital"
policy = "open"
"""


def tables():
    rng = np.random.default_rng(5)
    hours = rng.permutation(24 * 200)
    start = pd.Timestamp("2024-01-01")
    visits = pd.DataFrame(
        {
            "patient": rng.integers(0, 12, ROWS),
            "seen": start + pd.to_timedelta(hours[:ROWS], unit="h"),
            "kind": rng.choice(["a", "b", "c"], ROWS),
        }
    )
    lab = pd.DataFrame(
        {
            "patient": rng.integers(0, 12, 2 * ROWS),
            "taken": start + pd.to_timedelta(hours[ROWS : 3 * ROWS], unit="h"),
            "value": rng.normal(size=2 * ROWS).round(3),
        }
    )
    age = rng.integers(20, 80, 12)
    visits["cost"] = (0.1 * age[visits.patient] + rng.normal(size=ROWS)).round(2)
    return {"visits": visits, "lab": lab}, pd.DataFrame({"id": range(12), "age": age})


def hospital(folder, text=SITE):
    """A site of visits, measurements and what is derived of them, and one of
    patients.
    """
    here, patients = tables()
    folder.mkdir(parents=True, exist_ok=True)
    here["visits"].to_csv(folder / "visits.csv", index=False)
    here["lab"].to_parquet(folder / "lab.parquet")
    (folder / "tables.toml").write_text(text)
    registry = write_site(folder / "registry", {"patients": patients})
    return {"hospital": folder / "tables.toml", "registry": registry}


def stored(folder):
    """The same site with the rows of the derived table in a database."""
    folder.mkdir()
    source = sources_of(folder, hospital(folder)["hospital"].read_text())[-1]
    rows = rows_of(source)
    with closing(sqlite3.connect(folder / "records.db")) as database:
        database.execute(
            "CREATE TABLE records (patient INTEGER, seen TIMESTAMP, kind TEXT, "
            "cost REAL, value REAL, taken TIMESTAMP, mean REAL)"
        )
        database.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                [str(value) if hasattr(value, "year") else value for value in row]
                for row in rows
            ],
        )
        database.commit()
    text = "[tables.records]\npath = 'records.db'\nsite = 'hospital'\npolicy = 'open'"
    return hospital(folder, text)


def final(strategy):
    report = strategy.report
    return [*report.final_train.values(), *report.final_test.values()]


@pytest.mark.cases("cg-*", "boost-*")
@pytest.mark.parametrize(
    ("method", "more"), [("cg", {}), ("sgd", {"batch_size": 40}), ("boost", {})]
)
def test_the_run_is_that_of_a_table_that_holds_the_rows(tmp_path, method, more):
    """Exactly: rows come in an order of their contents, so the split is the same."""
    settings = {"device": "cpu", "test_fraction": 0.3, "num_epochs": 3, **more}
    derived = train(hospital(tmp_path / "derived"), SQL, method, **settings)
    expected = train(stored(tmp_path / "stored"), SQL, method, **settings)
    assert derived.report.joined_rows_train < ROWS
    assert final(derived) == final(expected)
    assert derived.training_problem.encoders == expected.training_problem.encoders


def test_tables_in_code(tmp_path):
    here, patients = tables()
    sites = {
        "hospital": {**here, "records": {"sql": ASOF}},
        "registry": {"patients": patients},
    }
    settings = {"strategy": "cg", "test_fraction": 0.0}
    fitted = tp_flower.fit(SQL, sites, **settings)
    expected = tp_flower.fit(SQL, hospital(tmp_path), **settings)
    # values in CSV files have fewer digits than memory, but these are rounded
    assert fitted.report["final"]["train"] == pytest.approx(
        expected.report["final"]["train"]
    )


def test_a_changed_table_is_read_anew(tmp_path):
    """A second run takes rows from the cache until a table behind them changes."""
    settings = {"test_fraction": 0.0, "num_epochs": 2}
    with LocalGrid(hospital(tmp_path), state=tmp_path / "state") as grid:
        first = final(train(grid, SQL, "cg", **settings))
        entries = set(cached(tmp_path))
        assert final(train(grid, SQL, "cg", **settings)) == first
        assert set(cached(tmp_path)) == entries
        lab = tables()[0]["lab"]
        lab.assign(value=lab.value**2).to_parquet(tmp_path / "lab.parquet")
        assert final(train(grid, SQL, "cg", **settings)) != first
        assert entries < set(cached(tmp_path))


def cached(folder):
    return [path.name for path in (folder / "state" / "hospital").rglob("rows-*")]


@pytest.mark.parametrize("sql", ["SELECT hidden FROM lab", "FROM lab WHERE hidden >"])
def test_an_error_of_the_sql_stays_in_the_sites_log(tmp_path, sql):
    """The server reads whose table it is, and nothing of what the owner wrote."""
    text = SITE.replace(ASOF, sql)
    with pytest.raises(SiteError, match="'sql'") as caught:
        train(hospital(tmp_path, text), SQL, "cg")
    message = str(caught.value)
    assert "records" in message
    for name in ("hidden", "taken", "visits", "WHERE", str(tmp_path)):
        assert name not in message


def test_explain_and_check_say_whose_sql_it_is(tmp_path):
    sites = hospital(tmp_path)
    tables = train(sites, SQL, Explain).explanation["tables"]
    ours, theirs = (table["work"][-1] for table in tables)
    assert (
        ours
        == "hospital: over the answer to its owner's SQL, all in DuckDB at the site"
    )
    assert theirs == "registry: all in DuckDB at the site"
    assert "ASOF" not in str(tables)
    shutil.copy(tmp_path / "registry" / "patients.csv", tmp_path / "patients.csv")
    with (tmp_path / "tables.toml").open("a") as file:
        file.write('[tables.patients]\npath = "patients.csv"\nsite = "registry"\n')
    run = toml_lines({"tables": "tables.toml", "sql": SQL})
    (tmp_path / "run.toml").write_text(run)
    assert "fit together" in printed_by("check", tmp_path / "run.toml")


def restricted(rules, columns, of_visits=None):
    """A hospital with a policy of the derived table, which renames columns."""
    sql = "SELECT patient, kind AS sort, cost AS price, cost AS label_too FROM visits"
    of_visits = "" if of_visits is None else of_visits
    return f"""
[tables.visits]
path = "visits.csv"
site = "hospital"
{of_visits}
[tables.records]
sql = "{sql}"
[tables.records.policy]
{lenient(columns, rules)}
"""


NAMES = ("patient", "sort", "price", "label_too")
RENAMED = "SELECT r.price AS label, r.sort, p.age FROM records r JOIN patients p "
RENAMED += "ON r.patient = p.id"
OF_VISITS = RENAMED.replace("records", "visits").replace("sort", "kind")
OF_VISITS = OF_VISITS.replace("price", "cost")


def policy_of_visits(rules):
    columns = ("patient", "seen", "kind", "cost")
    return f"[tables.visits.policy]\n{lenient(columns, rules)}"


def test_queries_of_both_count_for_the_quota(tmp_path):
    text = restricted(
        "queries-per-day = 9", NAMES, policy_of_visits("queries-per-day = 2")
    )
    settings = {"test_fraction": 0.0, "num_epochs": 1}
    with LocalGrid(hospital(tmp_path, text), state=tmp_path / "state") as grid:
        for sql in (RENAMED, OF_VISITS):
            train(grid, sql, "cg", **settings)
        match = r"\(queries-per-day\) refuses: 2 queries have read table {} within"
        for sql, table in ((RENAMED, "records"), (OF_VISITS, "visits")):
            with pytest.raises(SiteError, match=match.format(table)):
                train(grid, sql, "cg", **settings)
    lines = ledger_lines(tmp_path / "state" / "hospital", "answer")
    assert [line["table"] for line in lines] == ["records", "visits"]
    assert len({line["source"] for line in lines}) == 1


def test_scores_of_both_count_together_whatever_the_columns_are_called(tmp_path):
    rules = "scores-per-rank = 1.0"
    text = restricted(rules, NAMES, policy_of_visits(rules))
    settings = {"test_fraction": 0.0, "num_epochs": 1}
    wide = ", ".join(f"r.{{}} ** {k} AS p{k}" for k in range(1, 7))
    with LocalGrid(hospital(tmp_path, text), state=tmp_path / "state") as grid:
        for sql, column in ((RENAMED, "label_too"), (OF_VISITS, "cost")):
            features = f"{wide.replace('{}', column)}, p.age"
            train(grid, sql.replace("p.age", features), "cg", **settings)
    lines = ledger_lines(tmp_path / "state" / "hospital", "scores")
    assert len(lines) == 2
    assert all("(any)" in line["columns"] for line in lines)


def test_no_derived_column_is_a_feature_beside_a_noisy_label(tmp_path):
    """It may be the label under another name."""
    text = restricted("", NAMES, policy_of_visits(""))
    sql = (
        "SELECT v.cost AS label, r.label_too, p.age FROM visits v "
        "JOIN records r ON v.patient = r.patient JOIN patients p ON v.patient = p.id"
    )
    private = PrivacySettings(
        labels="laplace", label_epsilon=1.0, label_range=(0.0, 9.0)
    )
    match = "its label leaves with noise only, but feature .* reads column 'label_too'"
    with pytest.raises(SiteError, match=match):
        train(hospital(tmp_path, text), sql, "cg", privacy=private)


def test_nor_beside_a_noisy_label_of_another_table_that_it_reads(tmp_path):
    """A derived table has the account of the first table that its SELECT reads."""
    sql = (
        "SELECT l.value AS label, r.value, p.age FROM lab l "
        "JOIN records r ON l.patient = r.patient JOIN patients p ON l.patient = p.id"
    )
    private = PrivacySettings(
        labels="laplace", label_epsilon=1.0, label_range=(0.0, 9.0)
    )
    text = SITE.replace('"lab.parquet"', '"lab.parquet", policy = "open"')
    match = "table l: its label leaves with noise only, but feature .* column 'value'"
    with pytest.raises(SiteError, match=match):
        train(hospital(tmp_path, text), sql, "cg", privacy=private)


def test_a_sub_query_over_a_derived_table(tmp_path):
    """A derived table is grouped and filtered like another."""
    sql = (
        "SELECT r.cost AS label, s.n, p.age FROM records r "
        "JOIN (SELECT patient, COUNT(*) AS n FROM records WHERE value > 0 "
        "GROUP BY patient) s ON s.patient = r.patient "
        "JOIN patients p ON r.patient = p.id WHERE r.mean IS NOT NULL"
    )
    runs = [
        train(make(tmp_path / make.__name__), sql, "cg", test_fraction=0.0)
        for make in (hospital, stored)
    ]
    assert final(runs[0]) == pytest.approx(final(runs[1]), rel=1e-9)


COLUMNS = ["patient", "seen", "kind", "cost", "value", "taken", "mean"]
UNCOUNTED = SITE.replace('policy = "open"\n', "")
PAST = "l.taken <= v.seen"
LEFT = f"{PAST} WHERE v.patient NOT IN (SELECT patient FROM withdrawn)"
WITHDRAWN = """[tables.withdrawn]
path = "withdrawn.csv"
site = "hospital"
"""


def test_an_account_does_not_begin_anew_in_silence(tmp_path):
    """A SELECT that reads one table more would: its owner names the account so far."""
    (tmp_path / "withdrawn.csv").write_text("patient\n3\n")
    policy = f"[tables.records.policy]\n{lenient(COLUMNS, 'queries-per-day = 1')}\n"
    sites = hospital(tmp_path, UNCOUNTED + policy)
    state = tmp_path / "state" / "hospital"
    with LocalGrid(sites, state=tmp_path / "state") as grid:

        def run(text):
            sites["hospital"].write_text(text)
            train(grid, SQL, "cg", test_fraction=0.0, num_epochs=1)

        run(UNCOUNTED + policy)
        changed = UNCOUNTED.replace(PAST, LEFT) + WITHDRAWN + policy
        with pytest.raises(SiteError, match="would begin anew") as refusal:
            run(changed)
        assert "SELECT" not in str(refusal.value)
        reason = ledger_lines(state, "refuse")[-1]["reason"]
        assert "the SELECT of 'records' reads other tables than before" in reason
        (account,) = re.findall('budget-name = "(account:[0-9a-f]{32})"', reason)
        options = ("--tables", sites["hospital"], "--state-dir", state)
        assert account in printed_by("account", *options)
        with pytest.raises(SiteError, match="1 queries have read table records"):
            run(f"{changed}budget-name = '{account}'")
