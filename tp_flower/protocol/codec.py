"""Messages to packets and back, with the same checks at both ends.

A fact travels in the packet's JSON header under its name in kebab case. What is said of
a participant is listed under ``parts``, unless it is arrays alone. Arrays travel under
(participant, name), those of a family under (participant, name/key). Whatever is not
declared is refused, by the sender and by the reader.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError, RangeError, TPFlowerError
from tp_flower.protocol.fields import (
    MOST,
    PARTS,
    ArraySpec,
    Body,
    Layout,
    Message,
    PartBody,
    layout_of,
)
from tp_flower.protocol.messages import content_of
from tp_flower.protocol.packet import ArrayKey, Packet

ID: Final = "id"
_FAMILY: Final = "/"
_MALFORMED: Final = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError),
    RecursionError,
)
"""What a parser of a document of the wrong form raises."""

AnyMessage = TypeVar("AnyMessage", bound=Message)
AnyBody = TypeVar("AnyBody", bound=Body)
Field = TypeVar("Field")
Parsed = TypeVar("Parsed")


def encode(message: Message) -> Packet:
    """Return the packet that carries a message.

    Raises:
        MessageError: the message is not what its type declares.
    """
    layout = layout_of(type(message))
    header = _facts(message, layout)
    _build(type(message), header if layout.part is None else {**header, PARTS: {}})
    arrays: dict[ArrayKey, AnyArray] = {}
    if layout.part is None:
        return Packet(header, arrays)
    part_layout = layout_of(layout.part)
    listed = []
    for number, body in getattr(message, PARTS).items():
        facts, carried = _facts(body, part_layout), _arrays(body, part_layout)
        _part(layout.part, facts, carried, number)
        if part_layout.facts:
            listed.append({ID: number, **facts})
        arrays.update({(number, name): array for name, array in carried.items()})
    if part_layout.facts:
        header[PARTS] = listed
    return Packet(header, arrays)


def decode(kind: type[AnyMessage], packet: Packet) -> AnyMessage:
    """Return the message of a type that a packet carries, without its envelope.

    Raises:
        MessageError: the packet is not what the type declares.
    """
    layout = layout_of(kind)
    header = content_of(packet.header)
    if layout.part is None:
        if packet.arrays:
            raise MessageError("it has arrays, but none are declared")
        return _build(kind, header)
    carried: dict[int, dict[str, AnyArray]] = {}
    for (number, name), array in packet.arrays.items():
        if not 0 <= number <= MOST:
            raise MessageError(f"array {name!r} is of part {number}, which none is")
        carried.setdefault(number, {})[name] = array
    if layout_of(layout.part).facts:
        listed = _listed(header)
        if foreign := carried.keys() - listed.keys():
            raise MessageError(f"it has arrays of parts {sorted(foreign)}, not listed")
    elif PARTS in header:
        raise MessageError(f"it lists {PARTS!r}, which have nothing but arrays")
    else:
        listed = {number: {} for number in carried}
    parts = {
        number: _part(layout.part, facts, carried.get(number, {}), number)
        for number, facts in listed.items()
    }
    message = _build(kind, {**header, PARTS: {}})
    return msgspec.structs.replace(message, parts=parts)


def read_facts(kind: type[AnyBody], facts: Mapping[str, Any]) -> AnyBody:
    """Return a structure without arrays, such as an envelope.

    Raises:
        MessageError: the facts are not what the type declares.
    """
    return _build(kind, facts)


def check_sizes(body: Body, **sizes: int) -> None:
    """Refuse arrays whose sizes differ from what is known of their subject.

    Args:
        body: with the arrays.
        sizes: by name; a size that is not named may be any.

    Raises:
        MessageError: a dimension has another size.
    """
    for name, array, spec in _declared_arrays(body):
        _check_shape(name, array, spec, dict(sizes))


def required(value: Field | None, name: str) -> Field:
    """Return the value of a field that a message may leave out, but not here.

    Args:
        value: of the field.
        name: of the field.

    Raises:
        MessageError: it is left out.
    """
    if value is None:
        raise MessageError(f"it has no {name.replace('_', '-')!r}")
    return value


def parse(document: Any, name: str, parser: Callable[[Any], Parsed]) -> Parsed:
    """Return what a parser of the library makes of a document in a message.

    Raises:
        TPFlowerError: what the parser raises on purpose.
        MessageError: it fails otherwise: the document is of another form.
    """
    try:
        return parser(document)
    except TPFlowerError:
        raise
    except _MALFORMED as error:
        raise MessageError(
            f"{name!r} is not of the form that it has in a run"
        ) from error


def _facts(body: Body, layout: Layout) -> dict[str, Any]:
    """Return the facts of a structure by their names on the wire."""
    return {
        name: msgspec.to_builtins(value)
        for name, attribute in layout.facts.items()
        if (value := getattr(body, attribute)) is not None
    }


def _arrays(body: Body, layout: Layout) -> dict[str, AnyArray]:
    """Return the arrays of a structure by their names on the wire."""
    carried = {
        name: array
        for name, (attribute, _) in layout.arrays.items()
        if (array := getattr(body, attribute)) is not None
    }
    for name, (attribute, _) in layout.families.items():
        for key, array in (getattr(body, attribute) or {}).items():
            carried[f"{name}{_FAMILY}{key}"] = array
    return carried


def _part(
    kind: type[PartBody],
    facts: Mapping[str, Any],
    carried: Mapping[str, AnyArray],
    number: int,
) -> PartBody:
    """Return what is said of a participant, its facts and its arrays checked."""
    layout = layout_of(kind)
    for name in facts:
        if name in layout.arrays or name in layout.families:
            raise MessageError(f"{name!r} is not an array", number)
    fields = dict(facts)
    for name, array in carried.items():
        field, _, key = name.partition(_FAMILY)
        if field in layout.families and field != name:
            fields.setdefault(field, {})[key] = array
        elif name in layout.arrays:
            fields[name] = array
        else:
            raise MessageError(f"it has array {name!r}, which is not declared", number)
    return _build(kind, fields, number)


def _listed(header: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Take the list of participants out of a header; return the facts of each."""
    listed = header.pop(PARTS, None)
    if type(listed) is not list:
        raise MessageError(f"{PARTS!r} must be a list of objects")
    facts: dict[int, dict[str, Any]] = {}
    for item in listed:
        number = item.get(ID) if type(item) is dict else None
        if type(number) is not int or not 0 <= number <= MOST:
            raise MessageError(
                f"an item of {PARTS!r} has no {ID!r}; allowed: a whole number from 0 "
                f"to {MOST}"
            )
        if number in facts:
            raise MessageError(f"part {number} is listed twice")
        facts[number] = {name: item[name] for name in item if name != ID}
    return facts


def _build(
    kind: type[AnyBody], fields: Mapping[str, Any], part: int | None = None
) -> AnyBody:
    """Return a structure, its facts and its arrays checked."""
    try:
        body = msgspec.convert(fields, kind, dec_hook=_array_hook)
    except (msgspec.ValidationError, RecursionError) as error:
        raise MessageError(_explain(kind, fields, str(error)), part) from None
    try:
        sizes: dict[str, int] = {}
        for name, array, spec in _declared_arrays(body):
            _check_dtype(name, array, spec)
            _check_shape(name, array, spec, sizes)
            _check_range(name, array, spec)
    except MessageError as error:
        raise type(error)(str(error), part) from None
    return body


def _array_hook(kind: Any, value: Any) -> Any:  # noqa: ARG001 - msgspec's signature
    """Let arrays through; msgspec checks the type of what is returned."""
    return value


def _declared_arrays(body: Body) -> list[tuple[str, AnyArray, ArraySpec]]:
    layout = layout_of(type(body))
    arrays = [
        (name, array, spec)
        for name, (attribute, spec) in layout.arrays.items()
        if (array := getattr(body, attribute)) is not None
    ]
    for name, (attribute, spec) in layout.families.items():
        for key, array in (getattr(body, attribute) or {}).items():
            arrays.append((f"{name}{_FAMILY}{key}", array, spec))
    return arrays


def _check_dtype(name: str, array: AnyArray, spec: ArraySpec) -> None:
    dtypes = (spec.dtype, *spec.shorter)
    if array.dtype.name not in dtypes or array.ndim != len(spec.shape):
        raise _refused_array(name, array, spec, {})


def _check_shape(
    name: str, array: AnyArray, spec: ArraySpec, sizes: dict[str, int]
) -> None:
    """Compare an array's shape with the known sizes; note those that are new."""
    key = name.partition(_FAMILY)[2]
    for length, declared in zip(array.shape, spec.shape, strict=True):
        size = declared.replace("{}", key) if isinstance(declared, str) else declared
        if isinstance(size, int):
            expected = size
        elif size.endswith("/8"):
            rows = sizes.get(size.removesuffix("/8"))
            expected = length if rows is None else -(-rows // 8)
        else:
            expected = sizes.setdefault(size, length)
        if length != expected:
            raise _refused_array(name, array, spec, sizes)


def _check_range(name: str, array: AnyArray, spec: ArraySpec) -> None:
    """Refuse numbers out of range, and NaN where nothing may be missing."""
    if not array.size or (spec.low is None and spec.high is None):
        return
    smallest, largest = array.min(), array.max()
    if spec.nullable and np.isnan(smallest):
        present = array[~np.isnan(array)]
        smallest, largest = present.min(initial=0.0), present.max(initial=0.0)
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


def _refused_array(
    name: str, array: AnyArray, spec: ArraySpec, sizes: Mapping[str, int]
) -> MessageError:
    key = name.partition(_FAMILY)[2]
    declared = [str(size).replace("{}", key) for size in spec.shape]
    shape = " x ".join(
        f"{sizes[size]} ({size})" if size in sizes else size for size in declared
    )
    return MessageError(
        f"array {name!r} is {array.dtype.name} of shape {array.shape}; allowed: "
        f"{spec.dtype} of shape {shape}"
    )


def _explain(kind: type[Body], fields: Mapping[str, Any], reason: str) -> str:
    """Return what is wrong with a fact: its name, its value and what is allowed."""
    layout = layout_of(kind)
    names = [*layout.facts, *layout.arrays, *layout.families]
    for name in fields:
        if name not in names and name != PARTS:
            return f"it has {name!r}, which is not declared"
    _, is_located, path = reason.rpartition("`$.")
    name = path.rstrip("`").split("[")[0].split(".")[0]
    if not is_located:
        missing = reason.rpartition("field `")[2].rstrip("`")
        return f"it has no {missing!r}"
    allowed = layout.allowed[name]
    return (
        f"{name!r} is {reprlib.repr(fields.get(name))}; allowed: {allowed} ({reason})"
    )
