"""A federation where everything goes wrong that can, by a schedule.

Messages are lost or come late or twice, ClientApps are killed wherever it hurts, disks
are full, state is damaged, nodes restart, and the server is killed. Time is virtual: a
minute of silence takes no time.
"""

import errno
import os
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from flwr.app import Error, Message

from client_apps.data import database, run_store
from client_apps.data.database import FILE
from client_apps.data.ledger import open_ledger
from client_apps.rounds import site
from strategies.run import exchange
from strategies.run import sites as inventory
from tests.support.federated import LocalGrid
from tp_flower.database import Database
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import unpack

COLUMNS = "run, name, touched, meta, layout, checksum, data"
COMMITTED = "name IN ('.round', '.reply')"


class Fault(StrEnum):
    """What happens to one try of one message, or just before it.

    In the order in which one message can meet them all: first those that leave the
    site as it was, last those that let the message pass.
    """

    UNKNOWN_NODE = "Flower does not know the node"
    FLOWER_0 = "Flower error 0"
    FLOWER_1 = "Flower error 1"
    FLOWER_2 = "Flower error 2"
    FLOWER_3 = "Flower error 3"
    FLOWER_4 = "Flower error 4"
    FLOWER_5 = "Flower error 5"
    FLOWER_8 = "Flower error 8"
    DROP_REQUEST = "the request is lost"
    UNREADABLE = "the site's disk cannot be read now"
    DISK_FULL = "the site's disk is full"
    KILLED_PAYING = "the app is killed when it has paid"
    KILLED_COMMITTING = "the app is killed before it commits"
    KILLED_COMMITTED = "the app is killed when it has committed"
    DROP_REPLY = "the reply is lost"
    KILLED_FORGETTING = "the app is killed while it forgets what is over"
    KILLED_REPLYING = "the app is killed before it replies"
    LATE_REQUEST = "the request arrives after the next try"
    LATE_REPLY = "the reply arrives after the next try"
    STRAY = "a copy of the request arrives after the next request"
    RESTARTED = "the site's process is a new one"
    TWICE = "the request arrives twice"
    STATE_GONE = "the site's state file is gone"
    STATE_DAMAGED = "the site's state file is damaged"
    STATE_OLD = "the site's state is as it was when it was asked last"
    SERVER_KILLED_SENDING = "the server is killed before it sends"
    SERVER_KILLED_WAITING = "the server is killed before it gets the reply"


LOSSES = (Fault.STATE_GONE, Fault.STATE_DAMAGED, Fault.STATE_OLD)
KILLS = (Fault.SERVER_KILLED_SENDING, Fault.SERVER_KILLED_WAITING)
PASSING = tuple(fault for fault in Fault if fault not in (*LOSSES, *KILLS))
"""What another try mends, and nobody need know of."""

CRASHES = (
    *(Fault.FLOWER_1, Fault.FLOWER_2, Fault.FLOWER_8, Fault.KILLED_PAYING),
    *(Fault.KILLED_COMMITTING, Fault.KILLED_COMMITTED, Fault.KILLED_FORGETTING),
    Fault.KILLED_REPLYING,
)
"""What may be tried again a few times only: the app may do it each time."""

LATE = (Fault.LATE_REQUEST, Fault.LATE_REPLY)
PASSED = (Fault.STRAY, Fault.RESTARTED, Fault.TWICE)
"""The message has passed at the next try, or at this one."""

CODES = {
    fault: int(fault.name.rpartition("_")[2])
    for fault in Fault
    if fault.name.startswith("FLOWER")
}
UNSENT = (
    *(Fault.UNKNOWN_NODE, Fault.DROP_REQUEST, Fault.LATE_REQUEST),
    Fault.SERVER_KILLED_SENDING,
)
CRASHED = 8
OF_SERVER = (3, 5)
"""Errors that do not say which node they are about."""

Schedule = Callable[[str, int, int], Fault | None]
"""What happens to a try, by action, node, and how many tries of all there were."""


class ServerKilledError(BaseException):
    """The server is gone: nothing of its own can see it."""


class SiteKilledError(BaseException):
    """A site's process is gone."""


@dataclass
class World:
    """What goes on when the server is killed: the schedule, and what is on its way.

    ``tamper`` is called with a message and its reply, to return what arrives.
    ``happened`` are the faults that did, ``asked`` all tries; by node, ``strays`` are
    requests that arrive later, ``states`` what it kept before the last request.
    """

    schedule: Schedule = lambda *_: None
    tamper: Callable[[Message, Message], Message] = lambda _, reply: reply
    tries: int = 0
    happened: list[tuple[str, int, Fault]] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)
    strays: dict[int, list[Message]] = field(default_factory=dict)
    states: dict[int, list[tuple]] = field(default_factory=dict)


class FaultyGrid(LocalGrid):
    """Deliver messages as the schedule of a world says, which outlives the server."""

    def __init__(self, world: World, sites: Mapping[str, Path], state: Path) -> None:
        super().__init__(sites, state=state)
        self.world = world
        self._late: defaultdict[int, list[tuple[str, Message | None]]]
        self._late = defaultdict(list)
        self._requests: dict[str, Message] = {}
        self._unknown: set[str] = set()

    def push_messages(self, messages):
        """Send messages; one to a node that is not known has no id."""
        identifiers = []
        for message in messages:
            (identifier,) = super().push_messages([message])
            identifiers.append("" if identifier in self._unknown else identifier)
        return identifiers

    def pull_messages(self, message_ids):
        """Return the replies that have arrived."""
        return [
            reply for reply in super().pull_messages(message_ids) if reply is not None
        ]

    def _deliver(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        world = self.world
        action = message.metadata.message_type
        fault = world.schedule(action, node, world.tries)
        world.tries += 1
        world.asked.append((action, node))
        late = self._late.pop(node, [])
        strays = world.strays.pop(node, [])
        if fault is not None:
            world.happened.append((action, node, fault))
        reply = self._happen(fault, message)
        for identifier, held in late:
            # a request that comes after the next one is answered, too
            request = self._requests.pop(identifier, None)
            self._replies[identifier] = held if request is None else self._call(request)
        for stray in strays:
            self._call(stray)
        return reply

    def _happen(self, fault: Fault | None, message: Message) -> Message | None:
        """Return what comes back of a try, if anything does."""
        node = message.metadata.dst_node_id
        self._lose(fault, node)
        self._remember(node)
        if fault in CODES:
            return flower_error(CODES[fault], message)
        if fault in UNSENT:
            self._keep_back(fault, message)
            return None
        with HOOKS.get(fault, nullcontext)():
            return self._after(fault, message, self._call(message))

    def _keep_back(self, fault: Fault, message: Message) -> None:
        """Do what happens in place of a request's arrival."""
        identifier = message.metadata.message_id
        if fault is Fault.SERVER_KILLED_SENDING:
            raise ServerKilledError
        if fault is Fault.UNKNOWN_NODE:
            self._unknown.add(identifier)
        if fault is Fault.LATE_REQUEST:
            self._requests[identifier] = message
            self._late[message.metadata.dst_node_id].append((identifier, None))

    def _after(
        self, fault: Fault | None, message: Message, reply: Message
    ) -> Message | None:
        """Do what happens when a site has replied; return what arrives of it."""
        node = message.metadata.dst_node_id
        if fault is Fault.SERVER_KILLED_WAITING:
            raise ServerKilledError
        if fault is Fault.KILLED_REPLYING:
            return flower_error(CRASHED, message)
        if fault is Fault.STRAY:
            self.world.strays.setdefault(node, []).append(message)
        if fault is Fault.TWICE:
            check_same(reply, reply := self._call(message))
        if fault is Fault.LATE_REPLY:
            self._late[node].append((message.metadata.message_id, reply))
        return None if fault in (Fault.DROP_REPLY, Fault.LATE_REPLY) else reply

    def _call(self, message: Message) -> Message:
        """Return what the site's app answers; Flower's error if it was killed."""
        try:
            return self.world.tamper(message, super()._deliver(message))
        except SiteKilledError:
            forget_processes()
            return flower_error(CRASHED, message)

    def _database(self, node: int) -> Path:
        return self.state_dir(node) / FILE

    def _remember(self, node: int) -> None:
        query = f"SELECT {COLUMNS} FROM entries WHERE run <> 'labels'"
        self.world.states[node] = rows_in(self._database(node), query)

    def _lose(self, fault: Fault | None, node: int) -> None:
        if fault not in (*LOSSES, Fault.RESTARTED):
            return
        forget_processes()
        path = self._database(node)
        before = self.world.states.get(node, [])
        for row in committed_rows(path):
            run, name, *_, data = row
            if not has_entries(path, run):
                # the run is over there: nothing is left to go on with but the record
                continue
            change_row(path, row, None)
            if fault is Fault.STATE_DAMAGED and name == ".round":
                change_row(path, row, flipped(data or b" "))
            elif fault is Fault.STATE_OLD:
                # the ledger stays as it is
                rows_in(path, "DELETE FROM entries WHERE run = ?", run)
                for earlier in before:
                    if earlier[0] == run:
                        change_row(path, earlier, earlier[-1])


def rows_in(path: Path, query: str, *values: object) -> list[tuple]:
    """Return what another program finds, or changes, in a site's database."""
    if not path.exists():
        return []
    with opened(path) as connection:
        return connection.execute(query, values).fetchall()


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a site's database as another program does, for one transaction."""
    with closing(sqlite3.connect(path)) as connection, connection:
        # nobody cuts the power of a test's machine
        connection.execute("PRAGMA synchronous = OFF")
        yield connection


def committed_rows(path: Path) -> list[tuple]:
    """Return the committed rounds of a site's runs and their replies."""
    return rows_in(path, f"SELECT {COLUMNS} FROM entries WHERE {COMMITTED}")


def has_entries(path: Path, run: str) -> bool:
    """Whether anything is kept of a run but its committed round."""
    return bool(
        rows_in(path, f"SELECT 1 FROM entries WHERE run = ? AND NOT {COMMITTED}", run)
    )


def change_row(path: Path, row: tuple, data: bytes | None) -> None:
    """Put other data into a row; None removes it."""
    with opened(path) as connection:
        own = "DELETE FROM entries WHERE run = ? AND name = ?"
        connection.execute(own, row[:2])
        if data is not None:
            put_rows(connection, [(*row[:-1], data)])


def put_rows(connection: sqlite3.Connection, rows: Sequence[tuple]) -> None:
    """Put entries into a site's database, in place of those of their names."""
    marks = ", ".join("?" * len(COLUMNS.split(",")))
    query = f"INSERT OR REPLACE INTO entries ({COLUMNS}) VALUES ({marks})"
    connection.executemany(query, rows)


def flipped(data: bytes) -> bytes:
    """Return data with a byte in the middle that is another one."""
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


def check_same(first: Message, second: Message) -> None:
    """Assert that two replies to one request are the same, byte for byte."""
    told, again = (unpack(reply.content) for reply in (first, second))
    if first.metadata.message_type == Action.DESCRIBE or "error" in told.header:
        assert told.header | {"seconds": 0} == again.header | {"seconds": 0}
    else:
        assert first.content == second.content


def forget_processes() -> None:
    """Forget what this process knows of the sites, as another one would."""
    run_store._CACHE.clear()
    open_ledger.cache_clear()
    for key, own in list(database._OPEN.items()):
        if own.path is not None and own._connection is not None:
            # as at the end of a process that was killed within a transaction
            own._connection.close()
        if own.path is not None:
            del database._OPEN[key]


def lose_state(store: run_store.SiteStore) -> None:
    """Forget everything of a run, as a site whose database was restored."""
    run_store._CACHE.pop((store._root, store.run), None)
    store._write("DELETE FROM entries WHERE run = ?", store.run)
    if store._folder is not None:
        shutil.rmtree(store._folder, ignore_errors=True)


def flower_error(code: int, message: Message) -> Message:
    error = Message(Error(code, "as tested"), reply_to=message)
    if code in OF_SERVER:
        error.metadata.__dict__["_src_node_id"] = 1
    return error


def _full(database: Database) -> None:
    database.rollback()
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise database._refusal(error) from error


def _unreadable(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _killed_after(owner: type, name: str) -> Callable:
    """Return what has the site's process killed when a method is done."""
    method = getattr(owner, name)

    def both(*arguments, **named):
        method(*arguments, **named)
        raise SiteKilledError

    return lambda: patch.object(owner, name, both)


HOOKS = {
    Fault.UNREADABLE: lambda: patch.object(run_store.SiteStore, "last", _unreadable),
    Fault.DISK_FULL: lambda: patch.object(Database, "commit", _full),
    Fault.KILLED_PAYING: _killed_after(site.Site, "pay"),
    Fault.KILLED_COMMITTING: _killed_after(database.Changes, "_write"),
    Fault.KILLED_COMMITTED: _killed_after(database.Changes, "_commit"),
    Fault.KILLED_FORGETTING: _killed_after(run_store.SiteStore, "sweep"),
}


@contextmanager
def virtual_time() -> Iterator[None]:
    """Let the server wait for nothing, and disks be fast."""
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        # more time passes than was asked for: there are many polls
        now += 50 * seconds

    own = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    with ExitStack() as patches:
        for module in (exchange, inventory):
            patches.enter_context(patch.object(module, "time", own))
        patches.enter_context(patch.object(os, "fsync", lambda _: None))
        patches.enter_context(patch.object(os, "fdatasync", lambda _: None))
        yield
