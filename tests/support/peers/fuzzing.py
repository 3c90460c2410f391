"""Malformed messages, made of good ones by a seeded generator.

A good request is taken apart into what travels: the text of the header, the text of the
layout, the payload, and Flower's records around them. Each mutant has one of these
changed; or one field has a value that its declaration does not allow. Some mutants are
good requests again: whoever sends them looks at the answer.
"""

import copy
import json
import math
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from tests.support.peers.hostile import GONE, places
from tests.support.peers.message_values import malformed
from tp_flower.protocol import packet as wire
from tp_flower.protocol.codec import decode
from tp_flower.protocol.fields import Message
from tp_flower.protocol.messages import ENVELOPE

MARK = "tp-fuzzed"
"""Is in every name that is a path trick."""

LONG = "x" * 10_000
DEEP = 10_000
MOST = (1 << 31) - 1
"""The longest that Flower can say an array is."""
PATHS = (
    *(f"../{MARK}", f"../../../../../../../../{MARK}", f"/{MARK}", f"{MARK}/../.."),
    *("..", ".", "/", "~", f"~/{MARK}", f"..\\{MARK}", f"C:\\{MARK}", f"%2e%2e/{MARK}"),
    *(f"{MARK}\x00", f"{MARK}\n", f"{MARK}/x", f"file:///{MARK}", f"\ud800{MARK}"),
    *(LONG, f"../{MARK}/{LONG}", f"a{MARK}@latest", f"{MARK} -rf", f"$({MARK})"),
    *("0" * 32 + f"/../../{MARK}", "20260101-000000-abcd" + f"/../../{MARK}"),
)
VALUES = (
    *(-1, -(1 << 31), 1 << 31, 1 << 53, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64),
    *(-(1 << 64), 10**400, 10**4000, 0, 1, 2, 3, 7, 12, 13, 99, 1 << 61),
    *(None, True, False, 0.5, 1.0, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf),
    *(-math.inf, "", "0", "3", "NaN", "None", "header", "parameters", {}, {"": 0}),
    *({"id": 0}, [{}], [{"id": 0}, {"id": 0}], [[["x"]]], {"x": {"x": {"x": 1}}}),
    # shapes
    *([], [[]], [None], [-1], [1, 2], [0] * 65, [1] * 33, [0] * DEEP, [LONG]),
    *([1 << 60], [1 << 31, 1 << 31, 1 << 31], [1 << 63, 0], [10**400, 0], [0, 1 << 60]),
    # types of arrays
    *sorted(wire.WIRE_DTYPES),
    *("float16", "bfloat16", "object", "O", "str", "U10", "S4", "bool", "complex128"),
    *("datetime64[ns]", "float128", ">f8", "V8", "uint8, uint8", LONG, MARK),
)
TOKENS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "0x10", "'", '"', "\\u12"),
    *("[" * DEEP, "{" * DEEP, '{"a":' * DEEP, "]", "}", ",", ":", "\x00", "\ufeff"),
    *('"\\ud800"', "--", "//", "+1", "nul", "1.", "\x7f", "\n", "😀"),
)
NOT_TEXT = (
    *(None, b"\xff\xfe\x80", b"", 0, 1.5, True, [1], ["{}"], [b"{}"], [1.5, 2.5]),
    "\ud800".encode("utf-8", "surrogatepass"),
)
NO_LAYOUT = [[0, "target", "float32", [3]]]
"""In place of a layout of no arrays."""

DECLARED = 0.4
"""Of the mutants, those with a value that a declaration does not allow."""

Mutant = tuple[str, RecordDict]


class Fuzzer:
    """Makes mutants of requests.

    Args:
        rng: decides all.
        folder: an existing one, for paths that could be written to.
    """

    def __init__(self, rng: np.random.Generator, folder: Path) -> None:
        self._rng = rng
        self._paths = (*PATHS, f"{folder}/{MARK}", f"{folder}/../{MARK}")
        self._values = (*VALUES, *self._paths)

    def mutants(self, content: RecordDict, kind: type[Message]) -> Iterator[Mutant]:
        """Yield changed copies of a message without end, each by what is changed."""
        packet = wire.unpack(content)
        envelope = {k: own for k, own in packet.header.items() if k in ENVELOPE}
        undeclared = list(malformed(kind, decode(kind, packet)))
        changes = [self._characters, self._value, self._value, self._value]
        changes += [self._form, self._form, self._payload, self._records, self._type]
        if json.loads(_text(content, wire.LAYOUT)):
            changes += [self._array_values, self._array_values]
        while True:
            if self._rng.random() < DECLARED:
                wrong = self._one(undeclared)
                yield wrong.what, _written(wrong.packet, envelope)
                continue
            change = self._one(changes)
            yield change.__name__.strip("_"), change(content)

    # what is changed

    def _characters(self, content):
        """Some characters of the JSON of the header or of the layout."""
        name = self._one((wire.HEADER, wire.LAYOUT))
        return _with(content, **{name: self._spoilt(_text(content, name))})

    def _value(self, content):
        """One value of the header or of the layout, or the name of one."""
        name = self._one((wire.HEADER, wire.LAYOUT))
        document = json.loads(_text(content, name))
        if name == wire.LAYOUT:
            document = document or NO_LAYOUT
        paths = list(places(document))
        if not paths:
            return self._form(content)
        *path, last = self._one(paths)
        place = reduce(getitem, path, document)
        value = self._one((GONE, *self._values))
        is_rare = self._rng.random() < 0.1
        if value is GONE:
            del place[last]
        elif is_rare and isinstance(place, dict):
            place[str(value)] = place.pop(last)
        elif is_rare:
            place.append(copy.deepcopy(value))
        else:
            place[last] = copy.deepcopy(value)
        return _with(content, **{name: _json(document)})

    def _form(self, content):
        """Valid JSON, most of it, that is no header, or no layout."""
        name = self._one((wire.HEADER, wire.LAYOUT))
        path = json.dumps(self._one(self._paths))
        text = _text(content, name)
        layout = json.loads(_text(content, wire.LAYOUT))
        first = _json((layout or NO_LAYOUT)[0])
        forms = [
            *("", "null", "0", "[]", '""', "{}", f"[{text}]", f"{text}{text}"),
            *("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "0" + "}" * DEEP),
            *(json.dumps(text), f"{text[:-1]},", f"[{','.join(['0'] * DEEP)}]"),
        ]
        if name == wire.HEADER:
            forms += [
                *(f'{{"parts":{form}}}' for form in (f"[{text}]", forms[-1])),
                *(f'{{"parts":[{{"id":{path}}}]}}', f'{{"run":{path},"round":0}}'),
                f'{{{path}:{text},"run":{path}}}',
                '{"error":"no","kind":"transient"}',
            ]
        else:
            forms += [
                *("[[]]", "[null]", first, f"[{','.join([first] * 100)}]"),
                *map(_json, (layout[1:], [*layout, *layout[::-1]])),
                *(
                    _json([*layout, [part, name, dtype, shape]])
                    for part, name, dtype, shape in (
                        (0, json.loads(path), "uint8", [0]),
                        (0, "target", "float32", [1 << 20] * DEEP),
                        (0, "target", "float32", [10**4000] * 100),
                        (1 << 40, "target", "uint8", [0]),
                    )
                ),
            ]
        return _with(content, **{name: self._one(forms)})

    def _payload(self, content):
        """The bytes of the arrays, or what is there in their place."""
        payload = content.config_records[wire.MESSAGE].get(wire.PAYLOAD, b"")
        forms = (
            *(None, b"", payload[:-1], payload[:-8], payload + b"\0", payload * 3),
            *("text", 3, 0.5, True, [1, 2], [payload], payload[::-1] + b"12345678"),
            b"\x93NUMPY\x01\x00" + payload,
        )
        return _with(content, **{wire.PAYLOAD: self._one(forms)})

    def _array_values(self, content):
        """Numbers that are none, or too large, too small, too many or too few."""
        payload = bytearray(content.config_records[wire.MESSAGE].get(wire.PAYLOAD, b""))
        layout = json.loads(_text(content, wire.LAYOUT))
        number = int(self._rng.integers(len(layout)))
        start, size = _span(layout, number)
        own = np.frombuffer(bytes(payload[start : start + size]), layout[number][2])
        kinds = (np.nan, np.inf, -np.inf, 5e-324, 1e-40, 1e300, -1.0, 2.0**62, 1e30)
        dtype = self._one((layout[number][2], "float64", "float32", "int64", "uint8"))
        count = self._one((len(own), len(own), len(own) + 1, max(len(own) - 1, 0)))
        with np.errstate(all="ignore"):
            new = np.resize(own, count).astype(np.float64)
            hit = self._rng.random(count) < self._one((0.1, 1.0))
            new = np.where(hit, self._one(kinds), new).astype(dtype)
        layout[number][2:] = [dtype, [count, *layout[number][3][1:]]]
        padded = new.tobytes() + bytes(-new.nbytes % 8)
        payload[start : start + size + (-size % 8)] = padded
        return _with(
            content, **{wire.LAYOUT: _json(layout), wire.PAYLOAD: bytes(payload)}
        )

    def _records(self, content):
        """Other records of Flower's than the one that is read."""
        record = content.config_records[wire.MESSAGE]
        data = Array(np.arange(6.0))
        pickled = Array("object", (1,), "numpy.ndarray", _pickled())
        arrays = (
            *(pickled, data, _huge(), Array("float64", (MOST,), "numpy.ndarray", b"")),
            Array("float32", (MOST,), "torch.tensor", b"\x80\x04."),
        )
        payloads = [ArrayRecord({wire.PAYLOAD: array}) for array in arrays]
        payloads += [ArrayRecord({"a": data, "b": data})]
        payloads += [
            MetricRecord({wire.PAYLOAD: 1}),
            ConfigRecord({wire.PAYLOAD: b"1"}),
        ]
        layout = '[[0,"target","uint8",[8]]]'
        in_record = ConfigRecord(
            {wire.HEADER: record[wire.HEADER], wire.LAYOUT: layout}
        )
        forms = (
            {},
            {wire.MESSAGE: ConfigRecord()},
            {wire.MESSAGE: MetricRecord({wire.HEADER: 1, wire.LAYOUT: 2.0})},
            {wire.MESSAGE: MetricRecord({wire.HEADER: [1], wire.LAYOUT: [2.0]})},
            {wire.MESSAGE: ArrayRecord({wire.HEADER: data, wire.LAYOUT: data})},
            {wire.MESSAGE: ArrayRecord({wire.HEADER: pickled, wire.LAYOUT: pickled})},
            {f"{wire.MESSAGE}s": record},
            {self._one(self._paths).replace("\ud800", ""): record},
            *({wire.MESSAGE: in_record, wire.ARRAYS: payload} for payload in payloads),
        )
        return RecordDict(self._one(forms))

    def _type(self, content):
        """Something that is no text where a text is."""
        return _with(
            content, **{self._one((wire.HEADER, wire.LAYOUT)): self._one(NOT_TEXT)}
        )

    # with what

    def _one(self, choices):
        return choices[int(self._rng.integers(len(choices)))]

    def _spoilt(self, text):
        """A text with something cut out or put in."""
        place = int(self._rng.integers(len(text)))
        kind = self._rng.integers(4)
        if kind == 0:
            return text[:place]
        if kind == 1:
            return text[:place] + text[place + 1 :]
        token = self._one((*TOKENS, *map(str, self._values))).replace("\ud800", "")
        return text[:place] + token + text[place + int(kind == 2) :]


def _text(content: RecordDict, name: str) -> str:
    return str(content.config_records[wire.MESSAGE][name])


def _with(content: RecordDict, **changes) -> RecordDict:
    """Return the request with entries of its record changed, or gone."""
    record = {**content.config_records[wire.MESSAGE], **changes}
    kept = {name: value for name, value in record.items() if value is not None}
    return RecordDict({**content, wire.MESSAGE: ConfigRecord(kept)})


def _written(packet: wire.Packet, envelope: dict) -> RecordDict:
    """Return the content of a message that nobody has checked."""
    content = wire.pack(wire.Packet({}, packet.arrays))
    return _with(content, **{wire.HEADER: _json({**envelope, **packet.header})})


def _json(value: object) -> str:
    """What a hostile server writes, NaN too."""
    return json.dumps(value, separators=(",", ":"))


def _span(layout: list, number: int) -> tuple[int, int]:
    """Where an array lies in the payload: start and size in bytes."""
    start = 0
    for _, _, dtype, shape in layout[:number]:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        start += size + (-size % 8)
    _, _, dtype, shape = layout[number]
    return start, math.prod(shape) * np.dtype(dtype).itemsize


def _pickled() -> bytes:
    """What NumPy would unpickle, if it were let: a call of ``os.mkdir``."""
    return _npy("|O", 1, b"cos\nmkdir\n(V" + MARK.encode() + b"\ntR.")


def _huge() -> Array:
    """Eight bytes that say of themselves that they are 2**60."""
    return Array("uint8", (MOST,), "numpy.ndarray", _npy("|u1", 1 << 60, bytes(8)))


def _npy(dtype: str, size: int, data: bytes) -> bytes:
    """The text of NumPy's format that says what the data is, and the data."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({size},), }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + text.ljust(117).encode() + b"\n" + data
