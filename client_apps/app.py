"""The Flower ClientApp: one thin action per message type.

What an action raises on purpose travels back as an error that names the site and the
table; anything else is logged here and travels as its type and place only, because the
text of a foreign exception may quote data.
"""

import time
import traceback
from collections.abc import Callable
from logging import ERROR

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from client_apps import setup, training
from client_apps.site import Site
from tp_flower.errors import TPFlowerError
from tp_flower.protocol import Packet, pack, unpack

Answer = Callable[[Site, Packet], Packet]

app = ClientApp()


def _reply(message: Message, context: Context, answer: Answer) -> Message:
    started = time.perf_counter()
    try:
        site = Site(context)
        packet = answer(site, unpack(message.content))
    except TPFlowerError as error:
        packet = Packet({"error": str(error), "type": type(error).__name__})
    except Exception as error:  # noqa: BLE001 - see the module docstring
        log(ERROR, "action failed:\n%s", traceback.format_exc())
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        packet = Packet(
            {
                "error": f"{type(error).__name__} at {place}; its text is in the site's log",
                "type": "SiteError",
            }
        )
    packet.header["seconds"] = time.perf_counter() - started
    return Message(pack(packet), reply_to=message)


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Answer which shards this site hosts."""
    return _reply(message, context, setup.describe)


@app.query("extract")
def extract(message: Message, context: Context) -> Message:
    """Answer with hashed join keys and labels."""
    return _reply(message, context, setup.extract_rows)


@app.query("statistics")
def statistics(message: Message, context: Context) -> Message:
    """Answer with the statistics of the features."""
    return _reply(message, context, setup.statistics)


@app.train("prepare")
def prepare(message: Message, context: Context) -> Message:
    """Encode the features and make the model."""
    return _reply(message, context, setup.prepare)


@app.train("admm")
def admm(message: Message, context: Context) -> Message:
    """Fit the targets of one ADMM epoch."""
    return _reply(message, context, training.admm)


@app.train("consensus")
def consensus(message: Message, context: Context) -> Message:
    """Take the common parameters of sharded tables."""
    return _reply(message, context, training.consensus)


@app.train("sgd")
def sgd(message: Message, context: Context) -> Message:
    """Take one SGD batch."""
    return _reply(message, context, training.sgd)


@app.train("step")
def step(message: Message, context: Context) -> Message:
    """Take the summed gradients of sharded tables."""
    return _reply(message, context, training.step)


@app.query("finish")
def finish(message: Message, context: Context) -> Message:
    """Forget the run."""
    return _reply(message, context, training.finish)
