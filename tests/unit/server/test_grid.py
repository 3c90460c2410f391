"""The in-process grid with Flower's own strategies and apps."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from strategies.run.grid import InProcessGrid
from tp_flower.errors import SourceError
from tp_flower.sources.shards import load_tables

FRAME = pd.DataFrame({"x": [1, 2]})


class Echo:
    """A grid of apps that answer with their node's number and count their messages."""

    def __init__(self, sites, **how):
        self.received = []
        self.observed = []
        app = ClientApp()

        @app.query("echo")
        def echo(message: Message, context: Context) -> Message:
            self.received.append((message, context))
            count = int(context.state.config_records.get("n", {"n": 0})["n"]) + 1
            context.state["n"] = ConfigRecord({"n": count})
            echoed = ConfigRecord({"node": context.node_id, "count": count})
            return Message(RecordDict({"echo": echoed}), reply_to=message)

        @app.query("raise")
        def fail(_message: Message, _context: Context) -> Message:
            raise ValueError("no such column")

        self.grid = InProcessGrid(app, sites, observe=self.observed.append, **how)

    def ask(self, action="query.echo"):
        messages = [
            self.grid.create_message(RecordDict(), action, node, "1")
            for node in self.grid.get_node_ids()
        ]
        return list(self.grid.send_and_receive(messages))

    def configured(self, key):
        return [each.node_config.get(key) for each in self.grid.contexts.values()]


@pytest.fixture
def two():
    sites = {"us": {"t": FRAME}, "uk": {"t": [FRAME, FRAME]}}
    return Echo(sites, run_config={"seed": 3})


def test_every_site_answers_for_itself_with_its_tables_and_keeps_its_state(two):
    nodes = list(two.grid.get_node_ids())
    assert len(nodes) == 2
    for count in (1, 2):
        echoes = [reply.content["echo"] for reply in two.ask()]
        assert [(e["node"], e["count"]) for e in echoes] == [(n, count) for n in nodes]
    is_reply = [bool(message.metadata.reply_to_message_id) for message in two.observed]
    assert is_reply == [False, True, False, True] * 2
    for (_, context), sites in zip(two.received, (["us"], ["uk"] * 2), strict=False):
        sources = load_tables(str(context.node_config["tables"]))
        assert [source.site for source in sources] == sites
        assert context.run_config == {"seed": 3}


def test_messages_are_serialised_and_replies_name_their_sender_and_message(two):
    node = next(iter(two.grid.get_node_ids()))
    content = RecordDict({"c": ConfigRecord({"k": [1, 2]})})
    message = two.grid.create_message(content, "query.echo", node, "7")
    (identifier,) = two.grid.push_messages([message])
    ((incoming, _),) = two.received
    assert incoming.content is not content
    assert incoming.content["c"]["k"] == [1, 2]
    (reply,) = two.grid.pull_messages([identifier])
    metadata = reply.metadata
    assert metadata.reply_to_message_id == identifier
    assert metadata.src_node_id == node
    assert metadata.group_id == "7"
    # each reply is pulled once
    assert list(two.grid.pull_messages([identifier])) == []


@pytest.mark.parametrize(
    ("action", "reason"), [("query.raise", "no such column"), ("train.nothing", "")]
)
def test_an_app_that_raises_is_an_error_and_an_unknown_node_none(two, action, reason):
    for reply in two.ask(action):
        assert reply.error.code == 2
        assert reason in reply.error.reason
    # later rounds go on
    assert not two.ask()[0].has_error()
    message = two.grid.create_message(RecordDict(), "query.echo", 99, "1")
    assert list(two.grid.push_messages([message])) == [""]
    assert list(two.grid.send_and_receive([message])) == []


def test_sites_may_be_lists_numbers_and_files_and_frames_go_when_it_closes(tmp_path):
    lists = Echo([{"t": FRAME}, {"u": FRAME}])
    tables = lists.configured("tables")
    assert [load_tables(text)[0].site for text in tables] == ["site-0", "site-1"]
    lists.grid.close()
    with pytest.raises(SourceError, match="no data frames are registered"):
        load_tables(tables[0])
    assert Echo(3).configured("partition-id") == [0, 1, 2]
    assert Echo(3).configured("num-partitions") == [3, 3, 3]
    path = tmp_path / "tables.toml"
    assert Echo([path]).configured("tables") == [str(path)]
    assert lists.grid.run.run_id != Echo(3).grid.run.run_id


def test_flowers_fedavg_runs_on_it():
    """Sites of 1 and 3 rows add 1 and 2: their weighted mean is 1.75 a round."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        (array,) = message.content["arrays"].to_numpy_ndarrays()
        new = ArrayRecord([array + 1.0 + number])
        metrics = MetricRecord({"num-examples": 1 + 2 * number})
        answer = RecordDict({"arrays": new, "metrics": metrics})
        return Message(answer, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _context: Context) -> Message:
        (array,) = message.content["arrays"].to_numpy_ndarrays()
        metrics = MetricRecord({"num-examples": 1, "sum": float(array.sum())})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = InProcessGrid(app, sites=2)
    result = FedAvg().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=3)
    sums = [result.evaluate_metrics_clientapp[k]["sum"] for k in (1, 2, 3)]
    assert sums == pytest.approx([3.5, 7.0, 10.5])
