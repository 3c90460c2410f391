"""The account of a site's rows, as their owner reads it."""

import json

import pytest
from msgspec.structs import replace

from client_apps.app import app
from client_apps.data.ledger import open_ledger
from client_apps.privacy.guard import source_id
from strategies.run.grid import InProcessGrid
from tests.support.command_line import printed_by, refused_by
from tests.support.federated import store, store_sql, train, write_site
from tp_flower.privacy import mechanisms
from tp_flower.settings import PrivacySettings
from tp_flower.sources.shards import load_tables


@pytest.fixture
def tables(tmp_path):
    policy = 'epsilon = 4.5\nbudget-name = "orders"\n'
    policy += 'releases = { scores = "clear", statistics = "clear" }'
    return write_site(tmp_path, store(), {"orders": policy}, "shop")


def planned(source):
    words = ("train.admm", "model", "a row of items", "", "server")
    return mechanisms.Reservation(
        mechanisms.Release("items", source, 9, *words, mechanisms.Gaussian(4.0)), 16
    )


def spent(tables):
    """The lines that the command prints, by table."""
    state = str(tables.parent / "state")
    lines = printed_by("account", "--tables", tables, "--state-dir", state).splitlines()
    return {line.split()[0]: line.split()[3:] for line in lines if " at shop" in line}


def test_runs_add_up_and_what_is_reserved_counts(tables):
    nothing = ["0.0000", "row", "no", "budget", "1e-05"]
    assert spent(tables) == {
        "orders": ["0.0000", "row", "4.5", "1e-05"],
        "customers": nothing,
        "items": nothing,
    }
    labels = {"labels": "randomised-response", "label_epsilon": 2.0}
    privacy = PrivacySettings(features="statistics", **labels)
    grid = InProcessGrid(app, [str(tables)])
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(tables.parent / "state")
    method = train(grid, store_sql("logistic"), privacy=privacy)
    after = spent(tables)
    assert float(after["orders"][0]) == pytest.approx(3.0, abs=1e-3)
    assert float(after["items"][0]) == pytest.approx(1.0, abs=1e-3)
    totals = method.report.privacy["totals"]
    (source,) = {each["source"] for each in totals if each["table"] == "items"}
    open_ledger(str(tables.parent / "state")).reserve("open", [planned(source)], {})
    assert float(spent(tables)["items"][0]) > 4.0


def test_a_table_whose_scores_left_in_the_clear_has_no_epsilon(tables):
    spent(tables)
    ledger = open_ledger(str(tables.parent / "state"))
    orders = next(s for s in load_tables(str(tables)) if s.table == "orders")
    scores = replace(planned(source_id(orders)).release, what="scores", mechanism=None)
    for scope, words in (
        (mechanisms.SCORE_SUMS, "0.0000"),
        (mechanisms.SCORES_TELL, "none: scores in the clear tell the features"),
    ):
        ledger.note(str(scope == mechanisms.SCORES_TELL), [replace(scores, scope=scope)])
        assert " ".join(spent(tables)["orders"]).startswith(words)


def test_the_ledger_is_printed_and_begun_anew(tables, tmp_path):
    state = ["--state-dir", str(tables.parent / "state")]
    ledger = open_ledger(state[1])
    ledger.reserve("open", [planned("source")], {})
    text = printed_by("account", "--export", *state)
    (line,) = map(json.loads, text.splitlines())
    assert (line["event"], line["release"]["table"]) == ("reserve", "items")
    assert len(line["checksum"]) == 32
    file = tmp_path / "until-today.jsonl"
    printed_by("account", "--begin-anew", file, *state)
    assert file.read_text() == text
    assert ledger.spent("source") == []
    ledger.reserve("open", [planned("source")], {})
    # an account that was written down is not written over
    reason = refused_by("account", "--begin-anew", file, *state)
    assert "until-today.jsonl: File exists" in reason
    assert ledger.spent("source") != []
    reason = refused_by("account", "--tables", tmp_path / "none.toml")
    assert "none.toml does not exist" in reason
    for options in ((), ("--export", "--tables", tables), ("--export", "--page", "x")):
        assert "use one of --tables" in refused_by("account", *options, status=2)
