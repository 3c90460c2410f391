"""The server's log of a run, and what it does not quote."""

import pytest
from flwr.app import Message

from client_apps.app import app
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tests.support.log_lines import events, logged_run
from tests.support.peers.keyed_sites import SQL, A, B
from tp_flower.errors import TPFlowerError
from tp_flower.events import SHOWN_DIGITS
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.protocol.packet import Packet, pack
from tp_flower.query import Query

FORGED = 'north"\nERROR: event=finish'
SITES = {"shop": {"a": A}, FORGED: {"b": B}}


class Failing(InProcessGrid):
    """Answer a site's first message of a type with an error instead."""

    def __init__(self, kind: str) -> None:
        super().__init__(app, SITES)
        self.kind = kind
        self.has_failed = False

    def _deliver(self, message):
        if message.metadata.message_type == TRAIN_ADMM and not self.has_failed:
            self.has_failed = True
            header = {"error": "no\nspace", "kind": self.kind, "round": 4}
            return Message(pack(Packet(header)), reply_to=message)
        return super()._deliver(message)


def train(grid, caplog):
    strategy = TablePuppetADMM(Query.from_sql(SQL), num_epochs=2, test_fraction=0.0)
    return strategy, logged_run(strategy, grid, caplog)


def test_a_run_is_told_from_start_to_end(caplog):
    strategy, lines = train(InProcessGrid(app, SITES), caplog)
    lines = [
        line for line in lines if line["run"] == strategy.session.run[:SHOWN_DIGITS]
    ]
    start, finish = (line for line in lines if line["level"] != "DEBUG")
    assert start["event"] == "start"
    assert finish["event"] == "finish"
    assert start["strategy"] == "TablePuppetADMM"
    assert start["sites"] == f"{FORGED},shop"
    assert finish["rounds"] == str(len(strategy.history))


def test_a_message_that_is_sent_again_is_told_with_its_site(caplog):
    _, lines = train(Failing("transient"), caplog)
    (retry,) = (line for line in lines if line["event"] == "retry")
    assert retry["level"] == "WARNING"
    assert retry["site"] in {"shop", FORGED}
    assert retry["action"] == "train.admm"
    assert lines[-1]["event"] == "finish"


def test_a_run_that_fails_says_what_with_and_quotes_nobody(caplog):
    with pytest.raises(TPFlowerError, match="space"):
        train(Failing("refused"), caplog)
    lines = events(caplog.records)
    (stop,) = (line for line in lines if line["event"] == "stop")
    assert stop["level"] == "ERROR"
    assert stop["error"] == "SiteError"
    assert stop["checkpoint"] == "false"
    assert all("space" not in str(line) for line in lines)
