"""Encoding of messages as packets and back, with the same checks at both ends.

A value travels in the packet's JSON header under its field's name in kebab case. Values
about a participant are listed under ``parts``, unless it has only arrays. Arrays travel
under (participant, name), those of a family under (participant, name/key). Whatever is
not declared is refused (:class:`MessageError`), by both sender and reader.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError, RangeError, TPFlowerError
from tp_flower.protocol import fields as f
from tp_flower.protocol.messages import ENVELOPE, Failure
from tp_flower.protocol.packet import Packet

ID: Final = "id"
_FAMILY: Final = "/"
_MALFORMED: Final = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError),
    RecursionError,
)
"""The exceptions of a parser whose document has the wrong form."""

AnyMessage = TypeVar("AnyMessage", bound=f.Message)
AnyReply = TypeVar("AnyReply", bound=f.Reply)
AnyBody = TypeVar("AnyBody", bound=f.Body)
Field = TypeVar("Field")
Parsed = TypeVar("Parsed")


def encode(message: f.Message) -> Packet:
    """Return the packet that carries a message, which its reader will accept."""
    layout = f.layout_of(type(message))
    header = _values(message)
    parts: dict[int, f.PartBody] = getattr(message, f.PARTS) if layout.part else {}
    if layout.part and f.layout_of(layout.part).values:
        header[f.PARTS] = [
            {ID: number, **_values(body)} for number, body in parts.items()
        ]
    arrays = {
        (number, name): array
        for number, body in parts.items()
        for name, array, _ in _arrays(body)
    }
    packet = Packet(header, arrays)
    decode(type(message), packet)
    return packet


def decode(kind: type[AnyMessage], packet: Packet) -> AnyMessage:
    """Return the message of a type that a packet carries, without its envelope."""
    layout = f.layout_of(kind)
    header = {n: value for n, value in packet.header.items() if n not in ENVELOPE}
    if layout.part is None:
        if packet.arrays:
            raise MessageError("it has arrays, but none are declared")
        return _build(kind, header)
    carried: dict[int, dict[str, AnyArray]] = {}
    for (number, name), array in packet.arrays.items():
        if not 0 <= number <= f.MOST:
            raise MessageError(f"array {name!r} names part {number}, at most {f.MOST}")
        carried.setdefault(number, {})[name] = array
    if f.layout_of(layout.part).values:
        part_values = _take_parts(header)
        if foreign := carried.keys() - part_values.keys():
            raise MessageError(f"it has arrays of unlisted parts {sorted(foreign)}")
    elif f.PARTS in header:
        raise MessageError(f"it lists {f.PARTS!r}, but they have only arrays")
    else:
        part_values = {number: {} for number in carried}
    parts = {
        number: _build_part(layout.part, values, carried.get(number, {}), number)
        for number, values in part_values.items()
    }
    return msgspec.structs.replace(_build(kind, {**header, f.PARTS: {}}), parts=parts)


def decode_reply(kind: type[AnyReply], packet: Packet) -> AnyReply | Failure:
    """Return the reply of a type that a packet carries, or the failure in its place."""
    if is_failure(packet):
        return decode(Failure, packet)
    return decode(kind, packet)


def is_failure(packet: Packet) -> bool:
    """Whether a packet carries a :class:`Failure`, the only reply with an error."""
    return "error" in packet.header


def add_envelope(packet: Packet, envelope: f.Body) -> Packet:
    """Return a packet that also says which round it belongs to."""
    header = _values(envelope)
    _build(type(envelope), header)
    return Packet({**packet.header, **header}, packet.arrays)


def read_envelope(kind: type[AnyBody], packet: Packet) -> AnyBody:
    """Return the envelope of a packet."""
    header = packet.header
    return _build(kind, {name: header[name] for name in header if name in ENVELOPE})


def check_sizes(body: f.Body, **sizes: int) -> None:
    """Refuse arrays whose sizes differ from those that the reader knows, by name."""
    for name, array, spec in _arrays(body):
        _check_shape(name, array, spec, dict(sizes))


def check_positions(array: AnyArray, name: str, rows: int) -> None:
    """Refuse positions beyond the last row."""
    if array.size and array.max() >= rows:
        wire_name = name.replace("_", "-")
        raise MessageError(
            f"array {wire_name!r} must hold numbers from 0 to {rows - 1}"
        )


def required(value: Field | None, name: str) -> Field:
    """Return the value of a field that is optional in the message, but not here."""
    if value is None:
        raise MessageError(f"it has no {name.replace('_', '-')!r}")
    return value


def parse(document: Any, name: str, parser: Callable[[Any], Parsed]) -> Parsed:
    """Return what a parser of the library makes of a document in a message.

    Raises:
        TPFlowerError: the parser raises it on purpose.
        MessageError: it fails otherwise: the document is of another form.
    """
    try:
        return parser(document)
    except TPFlowerError:
        raise
    except _MALFORMED as error:
        raise MessageError(f"{name!r} is malformed") from error


def _values(body: f.Body) -> f.Document:
    """Return the values of a structure's header by their names on the wire."""
    return {
        name: msgspec.to_builtins(value)
        for name, attribute in f.layout_of(type(body)).values.items()
        if (value := getattr(body, attribute)) is not None
    }


def _arrays(body: f.Body) -> Iterator[tuple[str, AnyArray, f.ArraySpec]]:
    """Yield a structure's arrays: name on the wire, array and declaration."""
    layout = f.layout_of(type(body))
    for name, (attribute, spec) in layout.arrays.items():
        if (array := getattr(body, attribute)) is not None:
            yield name, array, spec
    for name, (attribute, spec) in layout.families.items():
        for key, array in (getattr(body, attribute) or {}).items():
            yield f"{name}{_FAMILY}{key}", array, spec


def _take_parts(header: f.Document) -> dict[int, f.Document]:
    """Take the list of participants out of a header; return the values of each."""
    parts = header.pop(f.PARTS, None)
    if type(parts) is not list:
        raise MessageError(f"{f.PARTS!r} must be a list of objects")
    values: dict[int, f.Document] = {}
    for item in parts:
        number = item.get(ID) if type(item) is dict else None
        if type(number) is not int or not 0 <= number <= f.MOST:
            raise MessageError(
                f"an item of {f.PARTS!r} has no {ID!r}; allowed: a whole number from 0 "
                f"to {f.MOST}"
            )
        if number in values:
            raise MessageError(f"part {number} is listed twice")
        values[number] = {name: item[name] for name in item if name != ID}
    return values


def _build_part(
    kind: type[f.PartBody],
    values: Mapping[str, Any],
    carried: Mapping[str, AnyArray],
    number: int,
) -> f.PartBody:
    """Return a part of a message; refuse arrays that it does not declare."""
    layout = f.layout_of(kind)
    for name in values:
        if name in layout.arrays or name in layout.families:
            raise MessageError(f"{name!r} is not an array", number)
    fields = dict(values)
    for name, array in carried.items():
        field, _, key = name.partition(_FAMILY)
        if field in layout.families and field != name:
            fields.setdefault(field, {})[key] = array
        elif name in layout.arrays:
            fields[name] = array
        else:
            raise MessageError(f"it has array {name!r}, which is not declared", number)
    return _build(kind, fields, number)


def _build(
    kind: type[AnyBody], fields: Mapping[str, Any], part: int | None = None
) -> AnyBody:
    """Return a message or part with its fields and arrays checked."""
    try:
        # msgspec checks the type of arrays, and does not copy them
        body = msgspec.convert(
            fields, kind, str_keys=True, dec_hook=lambda _, value: value
        )
    except (msgspec.ValidationError, RecursionError) as error:
        raise MessageError(_explain(kind, fields, str(error)), part) from None
    try:
        sizes: dict[str, int] = {}
        for name, array, spec in _arrays(body):
            dtype = _dtype_name(array.dtype)
            if dtype not in (spec.dtype, spec.masked):
                raise _wrong_form(name, array, spec, {})
            _check_shape(name, array, spec, sizes)
            if dtype != spec.masked:
                _check_range(name, array, spec)
    except MessageError as error:
        raise type(error)(str(error), part) from None
    return body


# NumPy builds the name anew every time
@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)


def _check_shape(
    name: str, array: AnyArray, spec: f.ArraySpec, sizes: dict[str, int]
) -> None:
    """Compare an array's shape with the known sizes; record new ones."""
    if array.ndim != len(spec.shape):
        raise _wrong_form(name, array, spec, {})
    for length, size in zip(array.shape, spec.shape, strict=True):
        if isinstance(size, int):
            expected = size
        elif "{}" in size:
            expected = sizes.setdefault(
                size.replace("{}", name.partition(_FAMILY)[2]), length
            )
        elif size.endswith("/8"):
            rows = sizes.get(size.removesuffix("/8"))
            expected = length if rows is None else -(-rows // 8)
        else:
            expected = sizes.setdefault(size, length)
        if length != expected:
            raise _wrong_form(name, array, spec, sizes)


def _check_range(name: str, array: AnyArray, spec: f.ArraySpec) -> None:
    """Refuse numbers out of range, and NaN where no value may be missing."""
    if not array.size or (spec.low is None and spec.high is None):
        return
    # faster than array.min() and array.max()
    smallest = np.minimum.reduce(array, axis=None)
    largest = np.maximum.reduce(array, axis=None)
    if spec.nullable and np.isnan(smallest):
        present = array[~np.isnan(array)]
        smallest = present.min(initial=0.0)
        largest = present.max(initial=0.0)
    # false for NaN
    is_above = spec.low is None or smallest >= spec.low
    is_below = spec.high is None or largest <= spec.high
    if not (is_above and is_below):
        low = "-inf" if spec.low is None else f"{spec.low:g}"
        high = "inf" if spec.high is None else f"{spec.high:g}"
        raise RangeError(
            f"array {name!r} has numbers that are not finite or out of range; allowed: "
            f"from {low} to {high}"
        )


def _wrong_form(
    name: str, array: AnyArray, spec: f.ArraySpec, sizes: Mapping[str, int]
) -> MessageError:
    """Return the error about an array of another dtype or shape than declared."""
    key = name.partition(_FAMILY)[2]
    sizes_text = [str(size).replace("{}", key) for size in spec.shape]
    shape = " x ".join(
        f"{sizes[size]} ({size})" if size in sizes else size for size in sizes_text
    )
    return MessageError(
        f"array {name!r} is {array.dtype.name} of shape {array.shape}; allowed: "
        f"{spec.dtype} of shape {shape}"
    )


def _explain(kind: type[f.Body], fields: Mapping[str, Any], reason: str) -> str:
    """Return the name of a wrong field, its value and what is allowed."""
    layout = f.layout_of(kind)
    names = {*layout.values, *layout.arrays, *layout.families, f.PARTS}
    for name in fields:
        if name not in names:
            return f"it has {name!r}, which is not declared"
    _, is_located, path = reason.rpartition("`$.")
    name = path.rstrip("`").split("[")[0].split(".")[0]
    if not is_located:
        missing = reason.rpartition("field `")[2].rstrip("`")
        return f"it has no {missing!r}"
    allowed = reason.replace("Expected ", "allowed: ", 1)
    return f"{name!r} is {reprlib.repr(fields.get(name))}; {allowed}"
