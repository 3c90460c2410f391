"""A site's log: each request, and what became of it."""

import logging

import pytest
from flwr.app import Context, RecordDict

from client_apps.app import app
from client_apps.rounds.site import Site
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tests.support.federated import WatchedGrid, store, store_on_disk, store_sql
from tests.support.log_lines import events, logged_run
from tp_flower.errors import TPFlowerError
from tp_flower.events import SHOWN_DIGITS
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.query import Query

SERVER = {"start", "sent", "reply", "round", "finish", "stop"}
FORGED = "../../x\nevent=answered"


def grid_of(folder, change=None):
    """One site with all tables in files."""
    sites = {"all": store_on_disk(folder)}
    return WatchedGrid(sites, change, state=folder / "states")


def strategy_of():
    return TablePuppetADMM(Query.from_sql(store_sql("squared")), num_epochs=1)


def test_every_message_has_a_line(tmp_path, caplog):
    grid = grid_of(tmp_path)
    strategy = strategy_of()
    lines = logged_run(strategy, grid, caplog)
    lines = [line for line in lines if line["event"] not in SERVER]
    recipients = [line for line in lines if line["event"] == "keys"]
    # one site leads its groups, and is all of them
    assert len(recipients) == 2
    assert all("run:1:" in line["recipients"] for line in recipients)
    lines = [line for line in lines if line not in recipients]
    requests = [seen.action for seen in grid.seen if not seen.is_reply]
    assert [line["action"] for line in lines] == requests
    same = {
        "event": "answered",
        "level": "INFO",
        "site": "0",
        "run": strategy.session.run[:SHOWN_DIGITS],
    }
    assert all(line.items() >= same.items() for line in lines)
    rounds = [int(line["round"]) for line in lines]
    assert rounds == sorted(rounds)
    assert min(float(line["seconds"]) for line in lines) >= 0
    for key in ("bytes-in", "bytes-out"):
        assert min(int(line[key]) for line in lines) > 0


def test_a_simulation_says_so_at_debug_only(caplog):
    with caplog.at_level(logging.INFO, logger="flwr"):
        strategy_of().start(InProcessGrid(app, {"all": store()}))
    assert {line["event"] for line in events(caplog.records)} <= SERVER


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h["fit"].update(kappa='1" event="answered\n'), "kappa"),
        (lambda h: h.update(run=FORGED), f"'run' is {FORGED!r}; allowed"),
        (lambda h: h.update(round=-1), "round"),
    ],
    ids=["value", "run", "round"],
)
def test_a_refusal_says_why_in_one_line(tmp_path, caplog, change, reason):
    def spoil(seen):
        if seen.action == TRAIN_ADMM and not seen.is_reply:
            change(seen.header)

    with pytest.raises(TPFlowerError):
        logged_run(strategy_of(), grid_of(tmp_path, spoil), caplog)
    lines = events(caplog.records)
    (refused,) = (line for line in lines if line["event"] == "refused")
    expected = ("ERROR", TRAIN_ADMM, "refused")
    assert tuple(refused[key] for key in ("level", "action", "kind")) == expected
    assert reason in refused["reason"]
    assert all(line["event"] != "answered" or line["level"] == "INFO" for line in lines)


def test_an_error_names_no_folder_of_the_site(tmp_path):
    tables = tmp_path / "tables.toml"
    state = tmp_path / "state"
    data = tmp_path / "orders.csv"
    data.write_text("id\n1\n")
    tables.write_text(f'[tables.orders]\npath = "{data}"\nsite = "us"\n')
    config = {"tables": str(tables), "state-dir": str(state)}
    site = Site(Context(1, 2, config, RecordDict(), {}))
    for path in (tables, state / "run" / "part-1", data):
        assert str(tmp_path) not in site.redact_places(f"cannot read {path}: full")
