"""The Flower ClientApp: one thin action per message type.

What an action raises on purpose travels back as an error with the part it was at,
which the server turns into a site and a table; anything else is logged here and travels
as its type and place only, because the text of a foreign exception may quote data.
"""

import time
import traceback
from collections.abc import Callable
from logging import ERROR
from pathlib import Path

from flwr.app import Context, Message, RecordDict
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
    site = Site(context)
    try:
        packet = answer(site, unpack(message.content))
        packet.header["seconds"] = time.perf_counter() - started
        content = pack(packet)
    except TPFlowerError as error:
        content = _error(site, str(error))
    except Exception as error:  # noqa: BLE001 - see the module docstring
        log(ERROR, "%s failed:\n%s", message.metadata.message_type, _trace(error))
        content = _error(site, f"{_place(error)}; its text is in the site's log")
    return Message(content, reply_to=message)


def _error(site: Site, text: str) -> RecordDict:
    header: dict[str, object] = {"error": text}
    if site.current_part is not None:
        header["part"] = site.current_part
    return pack(Packet(header))


def _place(error: Exception) -> str:
    """Say what was raised where, without its text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


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
