"""A server that lies in one field of one request of a good run, for what it would gain.

The lies are made of the honest run: the same field's value in another part, message or
round, one more or one less of it, the other way round. They are well-formed: a
malformed message is refused before it is understood (``message_values`` makes those).
"""

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pandas as pd
from msgspec.structs import FieldInfo, fields

from client_apps.data.key_files import ROW_ORDER_KEY, site_key
from tests.support.federated import LocalGrid, write_site
from tests.support.peers.hostile import Kept
from tests.support.peers.told import Row, Told, watch
from tp_flower.errors import MessageError, TPFlowerError
from tp_flower.protocol.fields import PARTS, Body, layout_of
from tp_flower.protocol.messages import Action, action_named
from tp_flower.protocol.packet import Packet, pack, pack_bits, unpack, unpack_bits

Path_ = tuple[str | int, ...]
Change = Callable[[Packet], Packet]
Changes = Mapping[tuple[str, int], Sequence[Change]]  # by action and node
Tried = Callable[[str, int, Packet], Iterable["Lie"]]
Run = Callable[[LocalGrid], Any]  # runs a strategy on a grid, and returns it

MOST_OTHERS = 3  # values of a field elsewhere in the run
BITS = {"trained", "tested", "rows", "unmatched"}
"""Arrays of a bit for each row; of ``train.weigh``, "rows" are row numbers."""


class Place(NamedTuple):
    """A field of a request: its structure and name, and where it is in a message.

    Attributes:
        field: "PreparePart.joins".
        path: in the header; of an array, its part and name.
    """

    action: str
    node: int
    field: str
    path: Path_
    is_array: bool


class Lie(NamedTuple):
    """What a field says instead, in words, and the request that says it."""

    place: Place
    what: str
    change: Change


@dataclass
class Record:
    """A run: its messages as they passed, what left the sites, and how it ended.

    Lies that were tried are ``refused``, with the reason, or ``answered``.
    """

    refused: dict[Lie, str] = field(default_factory=dict)
    answered: list[Lie] = field(default_factory=list)

    requests: list[tuple[str, int, Packet]] = field(default_factory=list)
    replies: list[tuple[str, int, Packet]] = field(default_factory=list)
    told: Told = field(default_factory=Told)
    error: str = ""
    strategy: Any = None

    @cached_property
    def values(self) -> dict[str, list[Any]]:
        """The values of each field in the requests of a run that is over."""
        values: dict[str, list[Any]] = {}
        for action, node, packet in self.requests:
            for place in places(action, node, packet):
                if not place.is_array:
                    found = value_at(packet, place.path)
                    values.setdefault(place.field, []).append(found)
        return values

    def reply_to(self, action: str, node: int) -> Packet:
        return next(p for a, n, p in self.replies if (a, n) == (action, node))


class LyingGrid(LocalGrid):
    """Replaces the first request of an action to a node by ``lies``.

    ``tried`` are sent before it, each to a site as it was; those that are answered are
    noted.
    """

    def __init__(self, sites, lies: Changes, tried: Tried) -> None:
        super().__init__(sites)
        self.record = Record()
        self._lies = dict(lies)
        self._tried = tried
        self._asked: set[tuple[str, int]] = set()

    def _deliver(self, message):
        action, node = asked = (
            message.metadata.message_type,
            message.metadata.dst_node_id,
        )
        packet = unpack(message.content)
        if asked not in self._asked:
            self._asked.add(asked)
            for lie in self._tried(action, node, packet):
                self._try(message, lie)
        for change in self._lies.pop(asked, ()):
            packet = change(packet)
        message.content = pack(packet)
        self.record.requests.append((action, node, _copied(packet)))
        reply = super()._deliver(message)
        if action == Action.EXTRACT:
            # the end of a run deletes them
            self.record.told.learn_keys(self.site(node))
        self.record.replies.append((action, node, _copied(unpack(reply.content))))
        return reply

    def _try(self, message, lie: Lie) -> None:
        kept = Kept(self.contexts[lie.place.node])
        told = self.record.told
        message = copy.deepcopy(message)
        try:
            message.content = pack(lie.change(unpack(message.content)))
        except MessageError:
            return
        told.is_paused = True
        reply = unpack(super()._deliver(message).content)
        told.is_paused = False
        if "error" in reply.header:
            assert not reply.arrays
            assert set(reply.header) <= {"error", "kind", "part", "round", "at"}
            self.record.refused[lie] = reply.header["error"]
        else:
            self.record.answered.append(lie)
        if "error" not in reply.header or kept.is_stopped:
            kept.restore()


def _copied(packet: Packet) -> Packet:
    return Packet(
        copy.deepcopy(packet.header), {k: np.array(a) for k, a in packet.arrays.items()}
    )


class Federation:
    """Sites whose files are copied for every run, so that their rows have one order.

    With ``policies`` they pin each other's keys.
    """

    def __init__(
        self, folder: Path, tables: dict[str, dict[str, pd.DataFrame]], policies=None
    ):
        self.folder = folder
        self.tables = tables
        self.policies = policies
        self._runs = 0
        self._template = folder / "template"
        for number, (site, frames) in enumerate(tables.items()):
            if policies is not None:
                write_site(self._template / site, frames, policies, site=site)
            (self._template / "state" / str(number)).mkdir(parents=True)

    def run(
        self, run: Run, lies: Changes | None = None, tried: Tried = lambda *_: ()
    ) -> Record:
        """Run on a copy of the sites; an error of the run is part of the record."""
        self._runs += 1
        place = self.folder / f"run-{self._runs}"
        shutil.copytree(self._template, place)
        grid = LyingGrid(self._sites(place), lies or {}, tried)
        states = {
            node: place / "state" / str(n) for n, node in enumerate(grid.contexts)
        }
        for node, state in states.items():
            grid.keep_state(node, state)
        if self.policies is not None:
            self._pin(grid, states)
        record = grid.record
        with watch() as record.told:
            try:
                record.strategy = run(grid)
            except TPFlowerError as error:
                record.error = str(error)
            finally:
                grid.close()
        self._keep_orders(states)
        shutil.rmtree(place)
        return record

    def _sites(self, place: Path) -> dict[str, Any]:
        if self.policies is None:
            return dict(self.tables)
        return {site: place / site / "tables.toml" for site in self.tables}

    def _pin(self, grid: LocalGrid, states: Mapping[int, Path]) -> None:
        keys = {node: site_key(state).public.hex() for node, state in states.items()}
        for node, own in keys.items():
            lines = [f"site-{n} {key}" for n, key in keys.items() if key != own]
            file = states[node].parent / f"allowed-{node}"
            file.write_text("\n".join(lines))
            file.chmod(0o600)
            grid.contexts[node].node_config["allowed-keys"] = str(file)

    def _keep_orders(self, states: Mapping[int, Path]) -> None:
        """Let the next run's rows have the order of this one's."""
        for state in states.values():
            kept = self._template / "state" / state.name / ROW_ORDER_KEY
            if (state / ROW_ORDER_KEY).exists() and not kept.exists():
                shutil.copy2(state / ROW_ORDER_KEY, kept)


def joined_rows(record: Record) -> set[frozenset[Row]]:
    """Return the joined rows of a run, as sets of rows of its parts."""
    problem = record.strategy.training_problem
    rows: set[frozenset[Row]] = set()
    behind = {}
    for alias, table in problem.tables.items():
        positions = [record.told.rows[part.number] for part in table.parts]
        owner = np.repeat(
            [part.number for part in table.parts], [len(own) for own in positions]
        )
        behind[alias] = owner, np.concatenate(positions)
    for mapping in filter(None, (problem.train, problem.test)):
        for joined in range(mapping.joined_rows):
            found = []
            for alias, table in mapping.tables.items():
                row = int(table.row_of[joined])
                if row >= 0:
                    owner, place = behind[alias]
                    found.append((int(owner[row]), int(place[row])))
            rows.add(frozenset(found))
    return rows


def problem_rows(record: Record, part: int) -> int:
    for action, _, packet in record.replies:
        if action == Action.EXTRACT:
            for facts in packet.header["parts"]:
                if facts["id"] == part:
                    return int(facts["rows"])
    raise KeyError(part)


def places(action: str, node: int, packet: Packet) -> Iterator[Place]:
    """Yield every field of a request that it has, by its declaration."""
    kind = action_named(action).request
    yield from _places(action, node, kind, packet.header, ())
    if (part := layout_of(kind).part) is None:
        return
    for index, facts in enumerate(packet.header.get(PARTS, ())):
        yield from _places(action, node, part, facts, (PARTS, index))
    for number, name in packet.arrays:
        where = f"{part.__name__}.{name.partition('/')[0]}"
        yield Place(action, node, where, (number, name), True)
    present = {(number, name) for number, name in packet.arrays}
    for where, (name, _) in ABSENT.items():
        structure, _, _ = where.partition(".")
        for number in sorted(
            {n for n, _ in present} if structure == part.__name__ else ()
        ):
            if (number, name) not in present:
                yield Place(action, node, where, (number, name), True)


@cache
def declared_fields(kind: type[Body]) -> Sequence[FieldInfo]:
    """Return the fields of a structure, whose types take long to work out."""
    return fields(kind)


def _places(
    action, node, kind: type[Body], facts: dict, path: Path_
) -> Iterator[Place]:
    layout = layout_of(kind)
    for declared in declared_fields(kind):
        name = declared.encode_name
        if declared.name == PARTS or name not in layout.values:
            continue
        yield Place(action, node, f"{kind.__name__}.{name}", (*path, name), False)
        value = facts.get(name)
        structures = [k for k in _inner(declared.type) if issubclass(k, Body)]
        if not structures or not value:
            continue
        (inner,) = structures
        if isinstance(value, list):
            items: list[tuple[Path_, Any]] = [
                ((name, i), v) for i, v in enumerate(value)
            ]
        elif isinstance(value, dict) and set(value) <= set(
            inner.__struct_encode_fields__
        ):
            items = [((name,), value)]
        else:
            items = [((name, key), v) for key, v in value.items()]
        for step, item in items:
            yield from _places(action, node, inner, item, (*path, *step))


def _inner(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for argument in get_args(hint):
        yield from _inner(argument)


def value_at(packet: Packet, path: Path_) -> Any:
    value: Any = packet.header
    for step in path:
        value = value.get(step) if isinstance(value, dict) else value[step]
    return value


def with_value(path: Path_, value: Any) -> Callable[[Packet], Packet]:
    """Return a change of a packet: a value at a place of its header."""

    def change(packet: Packet) -> Packet:
        header = copy.deepcopy(packet.header)
        place: Any = header
        for step in path[:-1]:
            place = place[step]
        if value is None:
            place.pop(path[-1], None)
        else:
            place[path[-1]] = value
        return Packet(header, packet.arrays)

    return change


def with_array(path: Path_, array: np.ndarray) -> Callable[[Packet], Packet]:
    """Return a change of a packet: another array in a part's place."""
    return lambda packet: Packet(packet.header, {**packet.arrays, path: array})


def lies(place: Place, packet: Packet, honest: Record) -> Iterator[tuple[str, Change]]:
    """Yield what the field could say instead: in words, and as a change of the
    request.
    """
    if place.is_array:
        for what, array in _arrays(place, packet, honest):
            yield what, with_array(place.path, array)
        return
    value = value_at(packet, place.path)
    for what, other in _alternatives(place, value, honest):
        if other != value:
            yield what, with_value(place.path, other)


def _alternatives(
    place: Place, value: Any, honest: Record
) -> Iterator[tuple[str, Any]]:
    seen: list[Any] = []
    for other in _others(place, honest):
        if other != value and other not in seen and len(seen) < MOST_OTHERS:
            seen.append(other)
            yield f"of another message: {other!r:.60}", other
    for other in (*_values(value), *WORDS.get(place.field, ())):
        yield f"= {other!r:.60}", other
    for what, change in CHANGES.get(place.field, ()) if value is not None else ():
        yield what, change(copy.deepcopy(value))


def _others(place: Place, honest: Record) -> Iterator[Any]:
    """Yield the values that the field has elsewhere in the honest run."""
    yield from honest.values.get(place.field, ())


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {0, 1, value - 1, value + 1, 2 * value} - {value, -1}
    elif isinstance(value, float):
        yield from (value / 2 or 0.5, 2 * value or 1.0, 1e-6 * value or 1e-6)
    elif isinstance(value, list) and value:
        yield value[1:]
        yield [*value, *value]
        yield value[::-1]
    elif isinstance(value, dict) and value:
        first, *others = value
        yield {key: value[key] for key in others}
        if others:
            yield {**value, first: value[others[0]], others[0]: value[first]}


def _arrays(
    place: Place, packet: Packet, honest: Record
) -> Iterator[tuple[str, np.ndarray]]:
    part = int(place.path[0])
    name = str(place.path[1])
    if (part, name) not in packet.arrays:
        yield "though absent", ABSENT[place.field][1](problem_rows(honest, part))
        return
    array = packet.arrays[part, name]
    family = name.partition("/")[0]
    if family in BITS and array.dtype == np.uint8:
        yield from _bits(unpack_bits(array, problem_rows(honest, part)))
        return
    for key, other in packet.arrays.items():
        is_alike = other.dtype == array.dtype and other.shape == array.shape
        if is_alike and key != (part, name) and key[1].partition("/")[0] == family:
            yield f"that of {key}", other
    if array.dtype.kind == "u" or not array.size:
        yield "changed", array + np.ones(1, array.dtype)
    else:
        yield from _numbers(array)


def _bits(chosen: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield other selections of rows."""
    fewer = chosen.copy()
    single = np.zeros(len(chosen), bool)
    fewer[np.flatnonzero(chosen)[:1]] = False
    single[np.flatnonzero(chosen)[:1]] = True
    others = {"one row fewer": fewer, "one row": single}
    others |= {"all rows": np.ones(len(chosen), bool), "the others": ~chosen}
    for what, rows in others.items():
        if not np.array_equal(rows, chosen):
            yield what, pack_bits(rows)


def _numbers(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield numbers of which one counts for most, or all, or the others."""
    is_whole = array.dtype.kind == "i"
    largest = np.abs(array).max() or 1
    heavy = array.copy()
    only = np.zeros_like(array)
    heavy.reshape(-1)[0] = 1000 if is_whole else 100 * largest
    only.reshape(-1)[0] = largest
    yield "of one row", heavy
    if is_whole:
        yield "all the least", np.full_like(array, array.min())
    else:
        yield "of one row alone", only
        yield "nothing", np.zeros_like(array)
    yield "the other way round", array[::-1].copy()


def _one_group(groups: Any) -> Any:
    return dict.fromkeys(groups, next(iter(groups.values())))


def _same_number(shards: Any) -> Any:
    return {"numbers": shards["numbers"][:1] * 2, "group": shards["group"]}


CHANGES: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
    "PrepareRequest.masking": [("in the clear", lambda _: None)],
    "ScoreRequest.masking": [("in the clear", lambda _: None)],
    "PreparePart.union": [
        ("in the clear", lambda u: {k: u[k] for k in u if k != "group"})
    ],
    "SealRequest.groups": [("one group of all members", _one_group)],
    "StatisticsPart.shards": [("a shard twice", _same_number)],
    "ExtractPart.fragment": [
        ("the label as a feature", lambda f: {**f, "features": [["price", '"qty"']]}),
        ("a hidden column", lambda f: {**f, "features": [["price", '"salary"']]}),
        ("one row", lambda f: {**f, "filters": ['"price" > 1.5']}),
        ("another key", lambda f: {**f, "keys": f["keys"][::-1]}),
    ],
    "StatisticsPart.encoders": [
        (
            "constants",
            lambda e: {**e, "specs": dict.fromkeys(e["specs"], "range(1000, 1001)")},
        ),
        ("fewest", lambda e: {**e, "specs": dict(list(e["specs"].items())[:1])}),
    ],
    "PreparePart.model": [
        ("a network", lambda m: {**m, "kind": "mlp", "hidden": [2]}),
        ("trees", lambda m: {**m, "kind": "trees"}),
        ("without an intercept", lambda m: {**m, "intercept": not m["intercept"]}),
    ],
}
"""Lies that follow from what a field means."""

WORDS: dict[str, tuple[Any, ...]] = {
    "SplitTerms.by": ("hash", "order", "value"),
    "BatchStep.evaluate": ("tested", "all"),
    "LabelTerms.mechanism": ("laplace", "randomised-response"),
    "Outline.strategy": ("admm", "cg", "sgd", "boost", "gd", "coreset-ridge"),
    "Outline.sends": ("rows", "centres"),
    "PreparePart.update": ("local", "gram", "consensus", "sum", "given"),
    "PrivacyTerms.features": ("clear", "dp-sgd", "statistics"),
    "ExtractPart.local-label": ("auto",),
    "ExtractPart.split": ({"by": "value", "seed": 0, "test": 0.5, "validation": 0.0},),
    "ExtractPart.label-privacy": (
        {"mechanism": "laplace", "epsilon": 1e6, "classes": [], "limits": [-9.0, 9.0]},
    ),
    "MeasureRequest.sensitivities": ("regression", "clusters"),
    "AdmmStep.deviation": (1.0,),
    "FinishRequest.keep-models": (True, False),
    "FinishRequest.has-diverged": (True,),
    "FinishRequest.is-best": (True, False),
    "StatisticsPart.shards": ({"group": "table-1", "numbers": [1, 2]},),
    "BoostRequest.bagged": (["o"], ["c"]),
    "BoostRequest.pooled": (["o"], ["c"]),
}
"""Values that a field may have besides those of the honest run."""

ABSENT: dict[str, tuple[str, Callable[[int], np.ndarray]]] = {
    "PreparePart.unmatched": (
        "unmatched/join-0",
        lambda rows: pack_bits(np.ones(rows, bool)),
    ),
    "ScorePart.unmatched": (
        "unmatched/join-0",
        lambda rows: pack_bits(np.ones(rows, bool)),
    ),
    "PreparePart.batch-rows": ("batch-rows", lambda _: np.zeros(1, np.int32)),
}
"""Arrays that an honest server leaves out: their names, and what they say of so many
rows."""
