"""A server that sends what it should not, in the middle of a good run.

The sites are real ones: tables files with policies, and state folders of their own.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_apps.data.counter import COUNTER_FILE
from client_apps.data.database import FILE
from client_apps.handlers import encoding
from client_apps.rounds.transaction import STOPPED
from tests.support import federated, ledgers
from tests.support.federated import LocalGrid, write_site
from tests.support.peers.faulty_grid import COLUMNS, opened, put_rows, rows_in
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import HEADER, MESSAGE, Packet, pack, unpack

SQL = (
    "SELECT o.qty AS label, o.price, o.day, c.age, c.kind "
    "FROM orders o JOIN customers c ON o.cust = c.id"
)
ORDERS_TEXT = """\
table "orders"
feature "day": "day"
feature "price": "price"
label: "qty"
join key: "cust\""""
"""What the query asks of its first table, for the table's owner."""
POLICIES = {
    "orders": """
        columns = ["price", "day"]
        labels = ["qty"]
        join-only = ["cust"]
        min-rows = 3
        releases = { statistics = "moments" }
    """
}
OF_SINGLE_SITES = {
    "orders": POLICIES["orders"].replace("{ stat", '{ models = "clear", stat')
}
"""Policies for methods whose models leave in the clear."""
OF_MOMENTS = {
    "orders": POLICIES["orders"].replace(
        "{ stat", '{ moments = "clear", regressions = "clear", stat'
    )
}
"""Policies for second moments of the joined rows."""
OF_COVARIANCE = {
    "orders": POLICIES["orders"].replace("{ stat", '{ covariance = "clear", stat')
}
"""Policies for what standard errors are made of."""
WITH_BINS = {"orders": POLICIES["orders"].replace("{ stat", "{ bins = 4, stat")}
"""Policies that let bin numbers leave."""
WITH_INSPECTION = {
    "orders": POLICIES["orders"].replace("{ stat", '{ inspection = "clear", stat'),
    "customers": 'releases = { inspection = "clear" }',
}
"""Policies that let a saved model be inspected."""
WITH_REGIONS = {
    table: rules.replace("{ stat", "{ regions = 4, stat") + "\nsees-regions = true"
    for table, rules in POLICIES.items()
}
"""Policies that let one table be divided, and the others see it."""
WITH_CUTOFFS = {
    "orders": POLICIES["orders"].replace("{ stat", '{ cutoffs = "partner", stat'),
    "customers": 'releases = { partials = "partner" }',
}
"""Policies that let cutoffs and partial answers be sealed for another site."""
WITH_COVER = {"orders": f"{POLICIES['orders']}\ncover = 1\nscores-per-rank = 0.5"}
"""Policies that ask how much rows vary."""
SHOP = 2
US = 3
UK = 4
ORDERS = 0
UK_PART = 1
US_PART = 2
FOREIGN = re.compile(r"^\w+ at \w+\.py:\d+; its text is in the site's log$")
"""How a site tells an exception that nobody raised on purpose."""

GONE = object()
Change = Callable[[Packet], Packet]
ENTRIES = f"SELECT {COLUMNS} FROM entries WHERE run <> 'labels'"
LEDGER = "SELECT seq, line FROM ledger ORDER BY seq"
MASKED = "SELECT run, name, digest FROM masked ORDER BY run, name"
WRONG = (
    *(None, True, -1, 10**6, 10**400, 0.5, float("nan"), float("inf"), "", "x"),
    *("\u0000", [], [1], [None], {}, {"x": 1}, [[["x"]]]),
)
"""Values that few names of a header allow."""


def tables() -> dict[str, dict[str, pd.DataFrame]]:
    """The tables of each site."""
    rng = np.random.default_rng(3)
    rows = 12
    orders = pd.DataFrame(
        {
            "cust": np.arange(rows) % 6,
            "price": rng.normal(size=rows),
            "day": rng.integers(1, 29, rows),
            "qty": rng.normal(size=rows),
            "salary": rng.normal(size=rows),
        }
    )

    def customers(*ids: int) -> pd.DataFrame:
        age = [20.0 + 7 * k * k for k in ids]
        kind = [f"k{k % 2}" for k in ids]
        return pd.DataFrame({"id": ids, "age": age, "kind": kind})

    return {
        "shop": {"orders": orders},
        "us": {"customers": customers(0, 1, 2)},
        "uk": {"customers": customers(3, 4, 5)},
    }


@dataclass
class Answer:
    """The answer of a site to a request, and ``what`` was hostile about it."""

    action: str
    node: int
    what: str
    header: dict
    arrays: dict

    @property
    def error(self) -> str:
        return self.header.get("error", "")

    def check_nothing_left(self) -> None:
        """Assert that the reply is a refusal, and nothing else."""
        assert self.error
        assert set(self.header) <= {"error", "kind", "part", "round", "at"}
        assert not self.arrays


class StoppedError(Exception):
    """The run has shown what it was to show."""


def like(message: Message, content: RecordDict, action: str = "") -> Message:
    """Return a message with other content, and maybe of another action."""
    changed = Message(content, dst_node_id=SHOP, message_type="query")
    changed.metadata.__dict__.update(message.metadata.__dict__)
    if action:
        changed.metadata.__dict__["_message_type"] = action
    return changed


class HostileGrid(LocalGrid):
    """Send changed copies of requests before the requests themselves.

    ``changes`` is called with action, node and request, to yield what is sent before
    it: its name, and the request, or the action and the request. ``instead`` is called
    in the same way, to return what is sent in a request's place. With ``stops`` the run
    ends when there are ``answers`` to the changed requests. Arrays that left a site are
    in ``left``: action, part and name.
    """

    def __init__(
        self, folder, changes=None, policies=None, instead=None, *, stops=False
    ):
        self._stops = stops
        self._changes = changes or (lambda *_: ())
        self._instead = instead or (lambda _, __, packet: packet)
        self.left: list[tuple[str, int, str]] = []
        rules = {**POLICIES, **(policies or {})}
        paths = {
            site: write_site(folder / site, frames, rules)
            for site, frames in tables().items()
        }
        super().__init__(paths)
        for site, node in zip(paths, self.contexts, strict=True):
            self.keep_state(node, folder / site / "state")
        self.answers: list[Answer] = []

    def _deliver(self, message):
        action = message.metadata.message_type
        node = message.metadata.dst_node_id
        changes = list(self._changes(action, node, unpack(message.content)))
        if changes:
            kept = Kept(self.contexts[node])
        for what, sent in changes:
            asked, packet = sent if isinstance(sent, tuple) else (action, sent)
            reply = self._send(message, packet, asked)
            answer = Answer(asked, node, what, reply.header, reply.arrays)
            self.answers.append(answer)
            # whatever becomes of it, only its first request for rows is answered
            # nor any more after a refusal that tells of rows
            if not answer.error or action == Action.EXTRACT or kept.is_stopped:
                kept.restore()
        if changes and self._stops:
            raise StoppedError
        packet = self._instead(action, node, unpack(message.content))
        reply = self._send(message, packet, action)
        return Message(pack(reply), reply_to=message)

    def _send(self, message, packet, action):
        """Return a site's reply to a request that is like another one."""
        content = pack(Packet({}, packet.arrays))
        record = content.config_records[MESSAGE]
        # written here: pack refuses NaN, which a hostile server does not
        content[MESSAGE] = ConfigRecord({**record, HEADER: json.dumps(packet.header)})
        reply = unpack(super()._deliver(like(message, content, action)).content)
        self.left += [(action, part, name) for part, name in reply.arrays]
        return reply


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """The files of a site but for its database, with its counter, and locks: size and
    time.
    """
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith((FILE, COUNTER_FILE, ".lock"))
    }


class Kept:
    """What a site keeps, to be compared, and put back after a good request."""

    def __init__(self, context: Context) -> None:
        self.folder = Path(str(context.node_config["state-dir"]))
        self.contents = {path: path.read_bytes() for path in files(self.folder)}
        self._files, self._rows = files(self.folder), self._read_rows()

    def _read_rows(self) -> list[list[tuple]]:
        queries = (f"{ENTRIES} ORDER BY id", LEDGER, MASKED)
        if not (self.folder / FILE).exists():
            return [[] for _ in queries]
        with opened(self.folder / FILE) as connection:
            return [connection.execute(query).fetchall() for query in queries]

    def changed(self, what: object) -> set[Path]:
        """Return the files that are others now; the database must be the same.

        The ledger may have lines about refusals since.
        """
        entries, lines, masked = self._read_rows()
        assert (entries, masked) == (self._rows[0], self._rows[2]), what
        before = self._rows[1]
        assert lines[: len(before)] == before, what
        events = {json.loads(line)["event"] for _, line in lines[len(before) :]}
        assert events <= {"refuse"}, what
        return {path for path, _ in files(self.folder).items() ^ self._files.items()}

    @property
    def is_stopped(self) -> bool:
        """Whether the site has refused a request for its rows, and answers no more."""
        return bool(
            rows_in(self.folder / FILE, "SELECT 1 FROM entries WHERE name = ?", STOPPED)
        )

    def restore(self) -> None:
        """Put it back, as no attacker could; the ledger, and labels that are paid for,
        grow.
        """
        for path in files(self.folder):
            if path not in self.contents:
                path.unlink()
                with suppress(OSError):  # there are others in it
                    path.parent.rmdir()
        for path, data in self.contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        with opened(self.folder / FILE) as connection:
            connection.execute("DELETE FROM entries WHERE run <> 'labels'")
            put_rows(connection, self._rows[0])
            connection.execute("DELETE FROM masked")
            connection.executemany("INSERT INTO masked VALUES (?, ?, ?)", self._rows[2])
        self._files, self._rows = files(self.folder), self._read_rows()


def ledger_lines(folder: Path, site: str, *events: str) -> list[dict]:
    """The lines of a site's ledger about some events, by default of queries
    answered.
    """
    return ledgers.ledger_lines(folder / site / "state", *(events or ["answer"]))


def shard_seal(grid: LocalGrid, node: int, part: int) -> ShardSeal:
    """The seal of a part's table, which all of the table's shards have."""
    seal, _ = encoding.seal_and_encoders(grid.site(node), part)
    return seal


def train(grid, method="admm", sql=SQL, **settings):
    """Run to the end; return the strategy."""
    return federated.train(grid, sql, method, **settings)


def header(*path, value=GONE) -> Change:
    """Put a value at a place in the header, or take away what is there.

    Of a fragment the server proposes the same, or the site would see that it does not.
    """

    def change(packet):
        changed, place = copied_along(packet.header, path[:-1])
        if value is GONE:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        propose_fragments(changed)
        return Packet(changed, packet.arrays)

    return change


def copied_along(document: Any, path: Sequence[Any]) -> tuple[Any, Any]:
    """Return a document that may be changed at a place, and the place."""
    changed = place = copy.copy(document)
    for step in path:
        place[step] = copy.copy(place[step])
        place = place[step]
    return changed, place


def propose_fragments(header: dict) -> None:
    """Let the proposal of a request for rows have the fragments that its parts have."""
    proposal = header.get("proposal")
    parts = header.get("parts")
    if not (isinstance(proposal, dict) and isinstance(proposal.get("parts"), dict)):
        return
    copies = {key: copy.copy(part) for key, part in proposal["parts"].items()}
    header["proposal"] = {**proposal, "parts": copies}
    for part in parts if isinstance(parts, list) else ():
        is_whole = isinstance(part, dict) and {"id", "fragment"} <= part.keys()
        proposed = copies.get(str(part["id"])) if is_whole else None
        if isinstance(proposed, dict):
            proposed["fragment"] = part["fragment"]


def array(part, name, function=None) -> Change:
    """Change an array, or leave it out."""

    def change(packet):
        arrays = dict(packet.arrays)
        found = arrays.pop((part, name))
        if function is not None:
            arrays[part, name] = function(found)
        return Packet(packet.header, arrays)

    return change


def arrays(part, **values) -> Change:
    """Put other arrays in the place of a part's; ``batch_rows`` is "batch-rows"."""
    own = {(part, name.replace("_", "-")): array for name, array in values.items()}
    return lambda packet: Packet(packet.header, {**packet.arrays, **own})


def renumbered(packet: Packet) -> Packet:
    """Speak of a part that the site does not have, in place of its first."""
    arrays = {(7, name): values for (_, name), values in packet.arrays.items()}
    return Packet(header("parts", 0, "id", value=7)(packet).header, arrays)


def change_of(text: str) -> Change:
    """A change by its text, in which ``part.`` is short for ``parts.0.``.

    ``part.rows = 13`` and ``sealed gone`` change the header; ``0/target shorter``,
    ``0/target float64`` and ``0/target[0] = NaN`` an array, ``0/target`` of part 0.
    """
    place, sign, value = text.partition(" = ")
    if not sign:
        place, value = text.split(" ", 1)
    if "/" not in place:
        steps = re.sub(r"^part\.", "parts.0.", place).split(".")
        # nodes are names in an object, all other numbers are places in a list
        is_list = not place.startswith("public-keys.")
        path = [int(step) if is_list and step.isdigit() else step for step in steps]
        return header(*path, value=json.loads(value) if sign else GONE)
    part, name = place.split("/", 1)
    if value == "gone":
        return array(int(part), name)
    if sign:
        first = functools.partial(_with_first, json.loads(value))
        return array(int(part), name.removesuffix("[0]"), first)
    reshaped = {**RESHAPED, "turned": np.transpose, "flat": np.ravel}
    return array(int(part), name, reshaped.get(value) or methodcaller("astype", value))


def _with_first(value: float, values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed.reshape(-1)[0] = value
    return changed


def places(value, path=()) -> Iterator[tuple]:
    """Yield the path of everything in a JSON object, what holds others too."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def undeclared(packet: Packet) -> Iterator[tuple[str, Packet]]:
    """Yield the request with one name more than it declares, in every place of it."""
    yield "a fact", header("more", value=1)(packet)
    for place in range(len(packet.header.get("parts", ()))):
        yield "a part's fact", header("parts", place, "more", value=1)(packet)
    numbers = [facts["id"] for facts in packet.header.get("parts", ())]
    for part in {*numbers, *(part for part, _ in packet.arrays)}:
        for name in ("more", "more/0"):
            arrays = {**packet.arrays, (part, name): np.zeros(1)}
            yield "an array", Packet(packet.header, arrays)


def wrong_headers(packet: Packet) -> Iterator[tuple[str, Packet]]:
    """Yield the request with each place of its header gone, or wrong in many ways."""
    yield from undeclared(packet)
    for path in places(packet.header):
        yield f"{path} gone", header(*path)(packet)
        for value in WRONG:
            yield f"{path} = {value!r:.20}", header(*path, value=value)(packet)


RESHAPED = {
    "shorter": lambda a: a[:-1],
    "empty": lambda a: a[:0],
    "twice": lambda a: np.concatenate([a, a]),
    "wider": lambda a: np.concatenate([a, a], axis=-1),
    "deeper": lambda a: a[..., None],
    "scalar": lambda a: np.zeros((), a.dtype),
    "halves": lambda a: a.astype(np.float64) + 0.5,
    "NaN": lambda a: np.full(a.shape, np.nan, np.float32),
    "infinite": lambda a: np.full(a.shape, np.inf),
    "huge": lambda a: np.full(a.shape, 1e300),
    "-1": lambda a: np.full(a.shape, -1, np.int64),
    "2**62": lambda a: np.full(a.shape, 1 << 62, np.int64),
    "2**64 - 1": lambda a: np.full(a.shape, (1 << 64) - 1, np.uint64),
    "bytes": lambda a: a.astype(np.uint8),
    # of the declared dtype: only the values are wrong
    "its least": lambda a: np.full(a.shape, limits(a).min, a.dtype),
    "its most": lambda a: np.full(a.shape, limits(a).max, a.dtype),
    "its NaN": lambda a: np.full(a.shape, np.nan).astype(a.dtype),
    "its infinity": lambda a: np.full(a.shape, -np.inf).astype(a.dtype),
}


def limits(array):
    """The least and the most that an array of its dtype can hold."""
    return (np.finfo if array.dtype.kind == "f" else np.iinfo)(array.dtype)


def wrong_arrays(packet: Packet) -> Iterator[tuple[str, Packet]]:
    """Yield the request with each array gone, or wrong in many ways."""
    for part, name in packet.arrays:
        yield f"{part}/{name} gone", array(part, name)(packet)
        for what, function in RESHAPED.items():
            with np.errstate(invalid="ignore"):
                changed = array(part, name, function)(packet)
            yield f"{part}/{name} {what}", changed
