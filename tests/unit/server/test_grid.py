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
SITES = {"us": {"t": FRAME}, "uk": {"t": [FRAME, FRAME]}}


def echo_app(seen: list | None = None) -> ClientApp:
    """Answers with its node's number, and counts its messages in its state."""
    app = ClientApp()

    @app.query("echo")
    def echo(message: Message, context: Context) -> Message:
        if seen is not None:
            seen.append((message, context))
        count = int(context.state.config_records.get("n", {"n": 0})["n"]) + 1
        context.state["n"] = ConfigRecord({"n": count})
        echoed = ConfigRecord({"node": context.node_id, "count": count})
        return Message(RecordDict({"echo": echoed}), reply_to=message)

    @app.query("raise")
    def fail(_message: Message, _context: Context) -> Message:
        raise ValueError("no such column")

    return app


def ask(grid: InProcessGrid, action: str = "query.echo") -> list[Message]:
    messages = [
        grid.create_message(RecordDict(), action, node, "1")
        for node in grid.get_node_ids()
    ]
    return list(grid.send_and_receive(messages))


def test_every_site_answers_for_itself_and_keeps_its_state():
    observed = []
    grid = InProcessGrid(echo_app(), SITES, observe=observed.append)
    nodes = list(grid.get_node_ids())
    assert len(nodes) == 2
    for count in (1, 2):
        echoes = [reply.content["echo"] for reply in ask(grid)]
        assert [(e["node"], e["count"]) for e in echoes] == [(n, count) for n in nodes]
    is_reply = [bool(message.metadata.reply_to_message_id) for message in observed]
    assert is_reply == [False, True, False, True] * 2


def test_messages_are_serialised_and_replies_name_their_sender_and_message():
    received = []
    grid = InProcessGrid(echo_app(received), SITES)
    node = next(iter(grid.get_node_ids()))
    content = RecordDict({"c": ConfigRecord({"k": [1, 2]})})
    message = grid.create_message(content, "query.echo", node, "7")
    (identifier,) = grid.push_messages([message])
    ((incoming, _),) = received
    assert incoming.content is not content
    assert incoming.content["c"]["k"] == [1, 2]
    (reply,) = grid.pull_messages([identifier])
    assert reply.metadata.reply_to_message_id == identifier
    assert reply.metadata.src_node_id == node
    assert reply.metadata.group_id == "7"
    # each reply is pulled once
    assert list(grid.pull_messages([identifier])) == []


@pytest.mark.parametrize(
    ("action", "reasons"),
    [("query.raise", ("ValueError", "no such column")), ("train.nothing", ())],
)
def test_an_app_that_raises_is_an_error_of_code_2(action, reasons):
    grid = InProcessGrid(echo_app(), SITES)
    for reply in ask(grid, action):
        assert reply.has_error()
        assert reply.error.code == 2
        assert all(reason in reply.error.reason for reason in reasons)
    # later rounds go on
    assert not ask(grid)[0].has_error()


def test_an_unknown_node_gets_no_message():
    grid = InProcessGrid(echo_app(), SITES)
    message = grid.create_message(RecordDict(), "query.echo", 99, "1")
    assert list(grid.push_messages([message])) == [""]
    assert list(grid.send_and_receive([message])) == []


def test_sites_see_their_own_tables_and_the_run_config():
    received = []
    grid = InProcessGrid(echo_app(received), SITES, run_config={"seed": 3})
    ask(grid)
    for (_, context), (name, shards) in zip(
        received, {"us": 1, "uk": 2}.items(), strict=True
    ):
        sources = load_tables(str(context.node_config["tables"]))
        assert [source.site for source in sources] == [name] * shards
        assert context.run_config == {"seed": 3}


def configs(sites, key):
    grid = InProcessGrid(echo_app(), sites)
    return [context.node_config.get(key) for context in grid.contexts.values()]


def test_sites_may_be_lists_numbers_and_files(tmp_path):
    tables = configs([{"t": FRAME}, {"u": FRAME}], "tables")
    assert [load_tables(text)[0].site for text in tables] == ["site-0", "site-1"]
    assert configs(3, "partition-id") == [0, 1, 2]
    assert configs(3, "num-partitions") == [3, 3, 3]
    path = tmp_path / "tables.toml"
    assert configs([path], "tables") == [str(path)]


def test_close_lets_go_of_the_frames():
    grid = InProcessGrid(echo_app(), [{"t": FRAME}])
    (context,) = grid.contexts.values()
    grid.close()
    with pytest.raises(SourceError, match="no data frames are registered"):
        load_tables(str(context.node_config["tables"]))


def test_grids_are_runs_of_their_own():
    one, other = (InProcessGrid(echo_app(), SITES) for _ in range(2))
    assert one.run.run_id != other.run.run_id
    assert {c.run_id for c in one.contexts.values()} == {one.run.run_id}


def test_flowers_fedavg_runs_on_it():
    """Sites of 1 and 3 rows add 1 and 2: their weighted mean is 1.75 a round."""
    app = ClientApp()
    rows = {0: 1, 1: 3}

    def number(context: Context) -> int:
        return int(context.node_config["partition-id"])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (array,) = message.content["arrays"].to_numpy_ndarrays()
        new = ArrayRecord([array + 1.0 + number(context)])
        metrics = MetricRecord({"num-examples": rows[number(context)]})
        content = RecordDict({"arrays": new, "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        (array,) = message.content["arrays"].to_numpy_ndarrays()
        metrics = MetricRecord(
            {"num-examples": rows[number(context)], "sum": float(array.sum())}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = InProcessGrid(app, sites=2)
    result = FedAvg().start(grid, ArrayRecord([np.zeros(2)]), num_rounds=3)
    (array,) = result.arrays.to_numpy_ndarrays()
    np.testing.assert_allclose(array, 3 * 1.75)
    sums = [result.evaluate_metrics_clientapp[k]["sum"] for k in (1, 2, 3)]
    assert sums == pytest.approx([3.5, 7.0, 10.5])
