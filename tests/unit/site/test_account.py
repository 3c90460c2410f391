"""The account of a site's rows, as their owner reads it."""

import json
import re
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from client_apps.account_page import account_page
from client_apps.app import app
from client_apps.data import query_quota
from client_apps.data.ledger import Ledger, open_ledger
from client_apps.data.score_counts import ScoreLimit
from client_apps.privacy.accounts import check_account
from client_apps.privacy.guard import source_id
from strategies.run.grid import InProcessGrid
from tests.support.command_line import printed_by, refused_by
from tests.support.examples.planned import release
from tests.support.federated import store, store_sql, train, write_site
from tests.support.page_reading import Page
from tp_flower.errors import PolicyError
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import (
    SCORE_SUMS,
    SCORES_TELL,
    Gaussian,
    Reservation,
)
from tp_flower.reports.blocks import Record, Table
from tp_flower.settings import PrivacySettings
from tp_flower.sources.shards import load_tables


@pytest.fixture
def tables(tmp_path):
    policy = (
        'epsilon = 4.5\nbudget-name = "orders"\n'
        'releases = { scores = "clear", statistics = "clear" }'
    )
    return write_site(tmp_path, store(), {"orders": policy}, "shop")


@pytest.fixture
def state(tables):
    """The site's state folder."""
    return str(tables.parent / "state")


def planned(source):
    return Reservation(release("model", Gaussian(4.0), source, 9, "items"), 16)


@pytest.fixture
def spent(tables, state):
    """What the command prints, by table and column."""

    def by_table():
        text = printed_by("account", "--tables", tables, "--state-dir", state)
        lines = [line.strip() for line in text.splitlines() if " at " in line]
        head, *rows = [re.split(r"  +", line) for line in lines]
        by_column = [dict(zip(head, cells, strict=True)) for cells in rows]
        return {cells["table at site"].split()[0]: cells for cells in by_column}

    return by_table


def test_runs_add_up_and_what_is_reserved_counts(tables, state, spent):
    nothing = {"features": "-", "spent": "0.0000", "per": "row", "delta": "1e-05"}
    budgets = {"orders": "4.5", "customers": "no budget", "items": "no budget"}
    assert spent() == {
        table: {"table at site": f"{table} at shop", "of": budget, **nothing}
        for table, budget in budgets.items()
    }
    privacy = PrivacySettings(
        features="statistics", labels="randomised-response", label_epsilon=2.0
    )
    grid = InProcessGrid(app, [str(tables)])
    for context in grid.contexts.values():
        context.node_config["state-dir"] = state
    method = train(grid, store_sql("logistic"), privacy=privacy)
    after = spent()
    for table, spends, of_labels in (("orders", 3.0, "2.0000"), ("items", 1.0, "-")):
        assert float(after[table]["spent"]) == pytest.approx(spends, abs=1e-3)
        assert float(after[table]["models"]) == pytest.approx(1.0, abs=1e-3)
        assert after[table]["features"] == "none"
        assert after[table]["labels"] == of_labels
    totals = method.report.privacy["totals"]
    (source,) = {each["source"] for each in totals if each["table"] == "items"}
    open_ledger(state).reserve("open", [planned(source)], {})
    for column in ("models", "spent"):
        assert float(spent()["items"][column]) > 4.0


def test_metrics_say_what_the_account_and_the_ledger_do(tables, state, spent):
    grid = InProcessGrid(app, [str(tables)])
    for context in grid.contexts.values():
        context.node_config["state-dir"] = state
    privacy = PrivacySettings(
        features="statistics", labels="randomised-response", label_epsilon=2.0
    )
    train(grid, store_sql("logistic"), privacy=privacy)
    ledger = open_ledger(state)
    lines = [json.loads(line) for line in ledger.export()]
    text = printed_by("account", "--tables", tables, "--state-dir", state, "--metrics")
    samples = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    for table, cells in spent().items():
        labels = f'{{table="{table}",site="shop",shard="0"'
        value = float(samples[f"tp_flower_site_epsilon_spent{labels}}}"])
        assert f"{value:.4f}" == cells["spent"]
        answered = sum(
            line["event"] == "answer" and line["table"] == table for line in lines
        )
        assert answered > 0
        counted = samples[f'tp_flower_site_queries_total{labels},outcome="answered"}}']
        assert int(counted) == answered
        assert int(samples[f"tp_flower_site_queries_of_day{labels}}}"]) == answered
    of_orders = {name: value for name, value in samples.items() if "orders" in name}
    limits = ("epsilon_budget", "queries_per_day")
    assert [v for n, v in of_orders.items() if any(limit in n for limit in limits)] == [
        "4.5",
        "1000000",
    ]
    with patch.object(query_quota, "DAY_SECONDS", -1):
        text = printed_by(
            "account", "--tables", tables, "--state-dir", state, "--metrics"
        )
    assert 'queries_of_day{table="orders",site="shop",shard="0"} 0\n' in text


def test_one_run_without_noise_leaves_no_epsilon_of_features_for_ever(
    tables, state, spent
):
    """Noisy models and scores have one, until scores leave masked."""
    spent()
    ledger = open_ledger(state)
    orders = next(s for s in load_tables(str(tables)) if s.table == "orders")
    model = planned(source_id(orders))
    noisy = replace(model.release, what="scores")
    ledger.reserve("a", [model, Reservation(noisy, 9)], {})
    cells = spent()["orders"]
    assert cells["features"] == cells["spent"]
    features = epsilon([Gaussian(4.0, 16 + 9)], 1e-5)
    assert float(cells["features"]) == pytest.approx(features, abs=1e-4)
    for scope, reason in (
        (SCORE_SUMS, "sums of scores tell of the features"),
        (SCORES_TELL, "scores in the clear tell the features"),
    ):
        ledger.note(reason, [replace(noisy, mechanism=None, scope=scope)])
        after = spent()["orders"]
        assert after["features"] == "none"
        assert "scores" not in after
        assert after["models"] == cells["models"]
        assert after["spent"] == cells["spent"]
        page = tables.parent / "account.html"
        text = printed_by(
            "account", "--tables", tables, "--state-dir", state, "--page", page
        )
        for shown in (" ".join(text.split()), Page(page.read_text()).text):
            assert f"No epsilon of features: {reason}." in shown
            assert "no bound on what is told of features" in shown


def test_the_ledger_is_printed_and_begun_anew(tables, state, tmp_path):
    ledger = open_ledger(state)
    ledger.reserve("open", [planned("source")], {})
    text = printed_by("account", "--export", "--state-dir", state)
    (line,) = map(json.loads, text.splitlines())
    assert line["event"] == "reserve"
    assert line["release"]["table"] == "items"
    assert len(line["checksum"]) == 32
    file = tmp_path / "until-today.jsonl"
    begin_anew = ("account", "--begin-anew", file, "--state-dir", state)
    printed_by(*begin_anew)
    assert file.read_text() == text
    assert ledger.spent("source") == []
    ledger.reserve("open", [planned("source")], {})
    # an account that was written down is not written over
    reason = refused_by(*begin_anew)
    assert "until-today.jsonl: File exists" in reason
    assert ledger.spent("source") != []
    reason = refused_by("account", "--tables", tmp_path / "none.toml")
    assert "none.toml does not exist" in reason
    both = ("--tables", tables, "--page", "x", "--metrics")
    for options in (
        (),
        ("--export", "--tables", tables),
        ("--export", "--page", "x"),
        ("--export", "--metrics"),
        both,
    ):
        assert "use one of --tables" in refused_by("account", *options, status=2)


def test_the_page_has_the_score_vectors_that_are_left(tmp_path):
    """They count for every query that reads one of the columns, as the ledger does."""
    ledger = Ledger(str(tmp_path / "state"))
    line = {"table": "visits", "site": "h", "source": "F"}
    ledger.record("run", "answer", [line], {})
    limits = {
        columns: ScoreLimit("F", "v", columns, 0.5, 16, allowed)
        for columns, allowed in ((("a",), 8), (("a", "b"), 9), (("c",), 7))
    }
    counts = ((("a",), 3), (("a", "b"), 1), (("c",), 2), (("a",), 1))
    for number, (columns, vectors) in enumerate(counts):
        ledger.count_scores(str(number), {(1, limits[columns]): vectors})
    items = [Record(json.loads(text)) for text in ledger.export()]
    page = Page(account_page(items, Table("", (), ()), None, ["clinic"]))
    text = " ".join(page.text.split())
    assert "Account of clinic" in text
    for columns, left, allowed in (("a", 5, 8), ("a, b", 5, 9), ("c", 2, 7)):
        assert f"visits at h {columns} {left} {allowed}" in text
        names = tuple(columns.split(", "))
        assert ledger.scores_used(limits[names]) == left


def visits(folder, *paths, policy="budget-name = ''"):
    """The shards of a table of these files, whose policy has a rule."""
    for path in paths:
        (folder / path).write_text("k\n1\n")
    shards = ", ".join(f"{{ path = '{path}' }}" for path in paths)
    file = folder / "tables.toml"
    text = f"[tables.visits]\nsite = 'h'\nshards = [{shards}]\n"
    file.write_text(f"{text}[tables.visits.policy]\n{policy}\n")
    return load_tables(str(file))


def query(ledger, run, *shards):
    """Record a query of each shard that is admitted."""
    for shard in shards:
        check_account(ledger, shard, shards)
        line = {"table": shard.table, "site": shard.site, "source": source_id(shard)}
        ledger.record(run, "answer", [line], {})


def test_rows_that_have_moved_need_the_name_of_an_account(tmp_path):
    ledger = Ledger(str(tmp_path / "state"))
    query(ledger, "1", *visits(tmp_path, "a.csv"))
    # one shard more, or fewer, changes no account of the others
    query(ledger, "2", *visits(tmp_path, "a.csv", "b.csv"))
    query(ledger, "3", *visits(tmp_path, "b.csv", "c.csv", "a.csv"))
    query(ledger, "4", *visits(tmp_path, "c.csv"))
    moved = visits(tmp_path, "d.csv")
    with pytest.raises(PolicyError, match="'visits' are at another place than before"):
        query(ledger, "5", *moved)
    names = ledger.accounts("visits", "h")
    for name in names:
        shards = visits(tmp_path, "d.csv", policy=f"budget-name = 'account:{name}'")
        assert source_id(*shards) == name
        query(ledger, "6", *shards)
    unknown = f"account:{'0' * 32}"
    with pytest.raises(PolicyError, match=f"the ledger has no account '{unknown}'"):
        query(
            ledger,
            "7",
            *visits(tmp_path, "d.csv", policy=f"budget-name = '{unknown}'"),
        )
    query(ledger, "8", *visits(tmp_path, "d.csv", policy="budget-name = 'new'"))
    # what has left under the new name would be forgotten
    with pytest.raises(PolicyError, match="would begin anew"):
        query(ledger, "9", *visits(tmp_path, "a.csv"))
    assert ledger.accounts("elsewhere", "h") == []
