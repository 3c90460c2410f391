"""A Flower app that answers messages with themselves, over either channel.

`scripts/bench_deploy.py` bundles it with the project's packages, in whose app it takes
the place of training; it reads the settings `num-epochs` (rounds), `batch-size` (bytes
each way), `min-sites`, `channel` and `output-dir`.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from client_apps.rounds.session import hold_session
from strategies.run.channel import SessionGrid, open_channel
from tp_flower.protocol.codec import add_envelope, decode, encode
from tp_flower.protocol.messages import Action, ReplyEnvelope
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.protocol.session_messages import SessionRequest

POLL_SECONDS = 0.1
SESSION_SECONDS = 300.0
ECHO = "query.echo"

# one a line: Flower looks for them without running the file
server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send rounds of messages to all sites; write the seconds of each."""
    config, seconds = context.run_config, list[float]()
    nodes = list(grid.get_node_ids())
    while len(nodes) < int(config["min-sites"]):
        time.sleep(POLL_SECONDS)
        nodes = list(grid.get_node_ids())
    values = np.zeros(int(config["batch-size"]), np.uint8)
    with open_channel(grid, str(config["channel"]), SESSION_SECONDS) as channel:
        for number in range(int(config["num-epochs"])):
            content = Packet({"round": number}, {(0, "values"): values})
            messages = [Message(pack(content), node, ECHO) for node in nodes]
            started = time.perf_counter()
            _exchange(channel, messages)
            seconds.append(time.perf_counter() - started)
    Path(str(config["output-dir"])).write_text(json.dumps(seconds), encoding="utf-8")


def _exchange(grid: Grid, messages: Sequence[Message]) -> None:
    missing = set(grid.push_messages(messages))
    while missing:
        for reply in grid.pull_messages(missing):
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
            missing.remove(reply.metadata.reply_to_message_id)
        if missing and isinstance(grid, SessionGrid):
            grid.wait(1.0)
        elif missing:
            time.sleep(POLL_SECONDS)


@client.query("echo")
def echo(message: Message, _: Context) -> Message:
    """Return what came."""
    return Message(message.content, reply_to=message)


@client.query(str(Action.SESSION).partition(".")[2])
def hold(message: Message, context: Context) -> Message:
    """Return what comes, until the session ends."""
    opening = decode(SessionRequest, unpack(message.content))

    def answer(_: str, content: RecordDict) -> RecordDict:
        return content

    reply = hold_session(opening, context.node_config, context.node_id, answer)
    content = pack(add_envelope(encode(reply), ReplyEnvelope()))
    return Message(content, reply_to=message)
