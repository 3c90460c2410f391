"""Messages made from their declarations: good ones at random, and all malformed ones.

Whatever is declared of a field decides what is drawn for it, and what is wrong for it:
a value of another type, one out of range, none at all, and one under another name.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import fields as declared_fields

from tp_flower.protocol.codec import encode
from tp_flower.protocol.fields import ArraySpec, Body, Message, layout_of
from tp_flower.protocol.messages import EXCHANGES
from tp_flower.protocol.packet import WIRE_DTYPES, Packet

MESSAGES = [kind for exchange in EXCHANGES.values() for kind in exchange]
EXTRA = "undeclared"
ID, PARTS = "id", "parts"
MOST_SIDE = 3
_WORDS = st.text(max_size=4)
_JSON = st.none() | st.booleans() | st.integers(-9, 9) | _WORDS
_DOCUMENTS = st.dictionaries(_WORDS, _JSON | st.lists(_JSON, max_size=2), max_size=2)

OF_OTHER_TYPES: Mapping[type, Any] = {
    type(None): None,
    bool: True,
    int: 1,
    float: 0.5,
    str: "x",
    list: [[]],
    dict: {EXTRA: [None]},
}
"""A value of every type of JSON; those of containers are of nothing declared."""


# good ones


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of a type, with up to three parts."""
    part = layout_of(kind).part
    values = {
        field.name: _facts(field.type)
        for field in declared_fields(kind)
        if field.name != PARTS
    }
    if part is not None:
        values[PARTS] = st.dictionaries(st.integers(0, 9), bodies(part), max_size=3)
    return st.builds(kind, **values)


@st.composite
def bodies(draw: st.DrawFn, kind: type[Body]) -> Body:
    """Structures of a type, whose arrays agree in the sizes that they share."""
    layout, sizes = layout_of(kind), {}
    arrays, families = dict(layout.arrays.values()), dict(layout.families.values())
    values = {}
    for field in declared_fields(kind):
        if not field.required and draw(st.booleans()):
            continue
        if field.name in arrays:
            values[field.name] = draw(_array(arrays[field.name], sizes, ""))
        elif field.name in families:
            values[field.name] = {
                key: draw(_array(families[field.name], sizes, key))
                for key in draw(st.sets(_WORDS, max_size=2))
            }
        else:
            values[field.name] = draw(_facts(field.type))
    return kind(**values)


def _facts(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a fact's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _limited(arguments[0], _meta(hint))
    if origin is dict:
        if arguments[1] is Any:
            return _DOCUMENTS
        return st.dictionaries(*map(_facts, arguments), max_size=2)
    if origin in (list, tuple):
        return st.lists(_facts(arguments[0]), max_size=2).map(origin)
    if arguments:
        return st.one_of(*map(_facts, arguments))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    if issubclass(hint, Body):
        return bodies(hint)
    plain = {type(None): st.none(), bool: st.booleans(), str: _WORDS}
    return plain[hint]


def _limited(hint: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if hint is int:
        return st.integers(meta.ge, meta.le)
    if hint is float:
        low = meta.gt if meta.ge is None else meta.ge
        return st.floats(low, meta.le, exclude_min=meta.gt is not None)
    if meta.pattern is not None:
        return st.from_regex(meta.pattern)
    # a list, or a text
    return _facts(hint)


def _array(
    spec: ArraySpec, sizes: dict[str, int], key: str
) -> st.SearchStrategy[np.ndarray]:
    """Arrays as declared; sizes that are new are drawn, and noted."""

    @st.composite
    def drawn(draw: st.DrawFn) -> np.ndarray:
        shape = []
        for size in spec.shape:
            if isinstance(size, int):
                shape.append(size)
                continue
            name = size.replace("{}", key).removesuffix("/8")
            if name not in sizes:
                sizes[name] = draw(st.integers(0, MOST_SIDE))
            side = sizes[name]
            shape.append(-(-side // 8) if size.endswith("/8") else side)
        dtype = np.dtype(draw(st.sampled_from((spec.dtype, *spec.shorter))))
        return draw(hnp.arrays(dtype, tuple(shape), elements=_numbers(spec, dtype)))

    return drawn()


def _numbers(spec: ArraySpec, dtype: np.dtype) -> st.SearchStrategy[Any]:
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        low = limits.min if spec.low is None else int(spec.low)
        high = limits.max if spec.high is None else int(spec.high)
        return st.integers(low, high)
    width = 8 * dtype.itemsize
    low, high = (
        None if limit is None else float(dtype.type(limit) * dtype.type(0.5))
        for limit in (spec.low, spec.high)
    )
    numbers = st.floats(low, high, width=width, allow_nan=False, allow_infinity=False)
    return numbers | st.just(np.nan) if spec.nullable else numbers


# malformed ones


class Malformed(NamedTuple):
    """A packet that is not what its message declares.

    Attributes:
        what: is wrong.
        field: name of the field that it is wrong in.
        packet: that has it.
    """

    what: str
    field: str
    packet: Packet


def malformed(kind: type[Message], message: Message) -> Iterator[Malformed]:
    """Yield packets that are wrong in one place, from a good message."""
    good = encode(message)
    yield from _wrong_objects(kind, good, ())
    part = layout_of(kind).part
    for number, facts in enumerate(good.header.get(PARTS, [])):
        yield from _wrong_objects(part, good, (PARTS, number))
        for name in (*layout_of(part).arrays, *layout_of(part).families):
            header = _with(good.header, (PARTS, number), {**facts, name: {"0": [0]}})
            yield Malformed("an array as a fact", name, Packet(header, good.arrays))
    if part is None:
        arrays = {(0, EXTRA): np.zeros(1)}
        yield Malformed("extra array", "arrays", Packet(good.header, arrays))
    else:
        yield from _wrong_parts(good)
        yield from _wrong_arrays(layout_of(part), good)


def _wrong_parts(good: Packet) -> Iterator[Malformed]:
    if PARTS not in good.header:
        header = {**good.header, PARTS: []}
        yield Malformed("extra list", PARTS, Packet(header, good.arrays))
        return
    listed = good.header[PARTS]
    wrong = [
        None,
        {},
        "x",
        [None],
        [{}],
        *([{ID: own}] for own in (-1, True, "0", 0.5)),
    ]
    for value in [*wrong, *([[*listed, listed[0]]] if listed else [])]:
        header = {**good.header, PARTS: value}
        yield Malformed(f"{PARTS} = {value!r:.40}", "part", Packet(header, good.arrays))


def _wrong_objects(
    kind: type[Body], good: Packet, path: tuple[str | int, ...]
) -> Iterator[Malformed]:
    """Yield packets with wrong facts of the object at a place of the header."""
    place = good.header
    for step in path:
        place = place[step]
    top = [step for step in path if step != PARTS and not isinstance(step, int)][:1]

    def made(what: str, name: str, changed: dict[str, Any]) -> Malformed:
        where = "/".join(map(str, (*path, name)))
        header = _with(good.header, path, changed)
        field = top[0] if top else name
        return Malformed(f"{where} {what}", field, Packet(header, good.arrays))

    yield made("extra", EXTRA, {**place, EXTRA: 1})
    facts = layout_of(kind).values
    for field in declared_fields(kind):
        name = field.encode_name
        if name not in facts:
            continue
        if field.required:
            gone = {key: own for key, own in place.items() if key != name}
            yield made("missing", name, gone)
        for value in wrong_values(field.type, place.get(name)):
            yield made(f"= {value!r:.40}", name, {**place, name: value})
        for inner in _structures(field.type) if place.get(name) else ():
            yield from _wrong_objects(inner, good, (*path, name))


def _structures(hint: Any) -> list[type[Body]]:
    """Return the declared structures that a fact may be."""
    choices = (hint, *get_args(hint)) if get_origin(hint) is not list else ()
    return [own for own in choices if isinstance(own, type) and issubclass(own, Body)]


def wrong_values(hint: Any, good: Any = None) -> Iterator[Any]:
    """Yield values that a fact's type does not allow: of other types, out of range."""
    allowed = _json_types(hint)
    yield from (own for kind, own in OF_OTHER_TYPES.items() if kind not in allowed)
    choices = get_args(hint) if get_origin(hint) is not Annotated else (hint,)
    for choice in choices or (hint,):
        yield from (own for own in _out_of_range(choice) if not _fits(hint, own))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (list, tuple):
        yield from ([own] for own in wrong_values(arguments[0]))
    elif origin is dict and arguments[1] is not Any:
        yield from ({"0": own} for own in wrong_values(arguments[1]))
        if isinstance(good, dict) and good:
            own = next(iter(good.values()))
            yield from (
                {key: own} for key in wrong_values(arguments[0]) if key == str(key)
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _out_of_range(hint: Any) -> Iterator[Any]:
    """Yield values of a type that are beyond its limits."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        yield EXTRA
    if get_origin(hint) is not Annotated:
        return
    kind, meta = get_args(hint)[0], _meta(hint)
    if kind is int:
        yield from (meta.ge - 1, meta.le + 1, -(10**400), 10**400)
    elif kind is float:
        yield from (np.nan, np.inf, -np.inf, 10**400)
        yield meta.gt if meta.ge is None else math.nextafter(meta.ge, -math.inf)
        yield math.nextafter(meta.le, math.inf)
    elif meta.pattern is not None:
        yield from ("\x00", "../x", f"{_match(meta.pattern)}\n")
    elif meta.max_length is not None:
        item = "x" if kind is str else ["x"]
        yield item * (meta.max_length + 1)


def _match(pattern: str) -> str:
    """Return a text of one of the forms that are in use."""
    tried = (n * "a" for n in (0, 1, 32, 64))
    tried = (*tried, "0", *re.findall(r"[a-z]+", pattern))
    return next(own for own in tried if re.search(pattern, own))


def _fits(hint: Any, value: Any) -> bool:
    """Whether some other choice of a union takes a value."""
    others = [own for own in get_args(hint) if get_origin(hint) is not Annotated]
    return any(
        isinstance(value, str) and other is str for other in others if other is not hint
    )


def _json_types(hint: Any) -> set[type]:
    """Return the types of JSON that a fact of a type may be written as."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _json_types(arguments[0])
    if origin in (list, tuple, dict):
        # of nothing that is declared: see OF_OTHER_TYPES
        return {dict} if origin is dict and arguments[1] is Any else set()
    if arguments:
        return set().union(*map(_json_types, arguments))
    if issubclass(hint, Body):
        return set()
    if issubclass(hint, Enum):
        return set()
    return {float, int} if hint is float else {hint}


def _wrong_arrays(layout: Any, good: Packet) -> Iterator[Malformed]:
    """Yield packets with wrong arrays."""
    shared = _shared_sizes(layout, good)
    for key, array in good.arrays.items():
        part, name = key
        field = name.partition("/")[0]
        spec = (layout.arrays | layout.families)[field][1]
        others = {other: own for other, own in good.arrays.items() if other != key}
        for what, changed in _wrong_forms(spec, array):
            packet = Packet(good.header, {**others, key: changed})
            yield Malformed(f"{key} {what}", field, packet)
        if key in shared and len(array):
            longer = {**others, key: np.concatenate([array, array[:1]])}
            # either of the two may be the one that is refused
            yield Malformed(f"{key} longer", "of shape", Packet(good.header, longer))
        family = field if field in layout.families else f"{name}/0"
        for extra in (EXTRA, family):
            packet = Packet(good.header, {**good.arrays, (part, extra): array})
            yield Malformed(f"{extra} beside {key}", extra, packet)


def _wrong_forms(
    spec: ArraySpec, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays of other dtypes, dimensions and ranges than are declared."""
    for dtype in sorted(WIRE_DTYPES - {spec.dtype, *spec.shorter}):
        with np.errstate(all="ignore"):
            yield dtype, array.astype(dtype)
    yield "deeper", array[..., None]
    yield "deep", np.zeros((1, 1, 1), array.dtype)
    for what, number in _wrong_numbers(spec, array.dtype) if array.size else ():
        yield what, np.full(array.shape, number, array.dtype)


def _shared_sizes(layout: Any, good: Packet) -> set[tuple[int, str]]:
    """Return the arrays whose first side is that of another array of their part."""
    first: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for part, name in good.arrays:
        field, _, key = name.partition("/")
        size = (layout.arrays | layout.families)[field][1].shape[0]
        if isinstance(size, str) and not size.endswith("/8"):
            first.setdefault((part, size.replace("{}", key)), []).append((part, name))
    return {key for keys in first.values() if len(keys) > 1 for key in keys}


def _wrong_numbers(spec: ArraySpec, dtype: np.dtype) -> Iterator[tuple[str, Any]]:
    is_float = dtype.kind == "f"
    if is_float and spec.low is not None:
        if not spec.nullable:
            yield "NaN", np.nan
        yield from (("infinite", np.inf), ("minus infinite", -np.inf))
    limits = np.finfo(dtype) if is_float else np.iinfo(dtype)
    for what, limit, sign in (("low", spec.low, -1), ("high", spec.high, 1)):
        if limit is None:
            continue
        beyond = 2 * limit if is_float else int(limit) + sign
        if limits.min <= beyond <= limits.max:
            yield f"too {what}", beyond


def _meta(hint: Any) -> msgspec.Meta:
    """Return the limits of a type, whichever of several declarations they are in."""
    found = [own for own in hint.__metadata__ if isinstance(own, msgspec.Meta)]
    names = ("gt", "ge", "le", "pattern", "max_length")
    limits = {
        name: value
        for own in found
        for name in names
        if (value := getattr(own, name)) is not None
    }
    return msgspec.Meta(**limits)


def _with(header: dict[str, Any], path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of a header with another value at a place."""
    if not path:
        return value
    copied = json.loads(json.dumps(header))
    place = copied
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copied
