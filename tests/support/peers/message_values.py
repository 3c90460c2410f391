"""Messages made from their declarations: good ones at random, and all malformed ones.

Whatever is declared of a field decides what is drawn for it, and what is wrong for it:
a value of another type, one out of range, none at all, and one under another name.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import inspect
from msgspec.structs import fields as declared_fields

from tests.support.peers.hostile import header
from tp_flower.protocol.codec import encode
from tp_flower.protocol.fields import ArraySpec, Body, Layout, Message, layout_of
from tp_flower.protocol.messages import ACTIONS
from tp_flower.protocol.packet import WIRE_DTYPES, ArrayKey, Packet

MESSAGES = [kind for action in ACTIONS.values() for kind in action.messages]
EXTRA = "undeclared"
ID = "id"
PARTS = "parts"
MOST_SIDE = 3
_WORDS = st.text(max_size=4)
_JSON = st.none() | st.booleans() | st.integers(-9, 9) | _WORDS
OF_EACH_TYPE = (None, True, 1, 0.5, "x", [[]], {EXTRA: [None]})
"""A value of every type of JSON; those of containers are of nothing declared."""


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    part = layout_of(kind).part
    values = {
        field.name: _values(inspect.type_info(field.type))
        for field in declared_fields(kind)
        if field.name != PARTS
    }
    if part is not None:
        values[PARTS] = st.dictionaries(st.integers(0, 9), bodies(part), max_size=3)
    return st.builds(kind, **values)


@st.composite
def bodies(draw: st.DrawFn, kind: type[Body]) -> Body:
    """Structures of a type, whose arrays agree in the sizes that they share."""
    layout = layout_of(kind)
    sizes = {}
    arrays = dict(layout.arrays.values())
    families = dict(layout.families.values())
    values = {}
    for field in declared_fields(kind):
        if not field.required and draw(st.booleans()):
            continue
        if field.name in arrays:
            values[field.name] = _array(draw, arrays[field.name], sizes, "")
        elif field.name in families:
            values[field.name] = {
                key: _array(draw, families[field.name], sizes, key)
                for key in draw(st.sets(_WORDS, max_size=2))
            }
        else:
            values[field.name] = draw(_values(inspect.type_info(field.type)))
    return kind(**values)


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    return _VALUES[type(info)](info)


_VALUES: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.NoneType: lambda _: st.none(),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.IntType: lambda of: st.integers(of.ge, of.le),
    inspect.FloatType: lambda of: st.floats(
        of.gt if of.ge is None else of.ge, of.le, exclude_min=of.gt is not None
    ),
    inspect.StrType: lambda of: st.from_regex(of.pattern) if of.pattern else _WORDS,
    inspect.EnumType: lambda of: st.sampled_from(of.cls),
    inspect.StructType: lambda of: bodies(of.cls),
    inspect.UnionType: lambda of: st.one_of(*map(_values, of.types)),
    inspect.ListType: lambda of: st.lists(
        _values(of.item_type), min_size=of.min_length or 0, max_size=2
    ),
    inspect.VarTupleType: lambda of: _VALUES[inspect.ListType](of).map(tuple),
    inspect.DictType: lambda of: st.dictionaries(
        _values(of.key_type), _values(of.value_type), max_size=2
    ),
    inspect.AnyType: lambda _: _JSON | st.lists(_JSON, max_size=2),
}


def _array(
    draw: st.DrawFn, spec: ArraySpec, sizes: dict[str, int], key: str
) -> np.ndarray:
    """Draw an array as declared; sizes that are new are drawn, and noted."""
    shape = []
    for size in spec.shape:
        if isinstance(size, str):
            name = size.replace("{}", key).removesuffix("/8")
            if name not in sizes:
                sizes[name] = draw(st.integers(0, MOST_SIDE))
            side = -(-sizes[name] // 8) if size.endswith("/8") else sizes[name]
        else:
            side = size
        shape.append(side)
    dtypes = [name for name in (spec.dtype, spec.masked) if name]
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    return draw(hnp.arrays(dtype, tuple(shape), elements=_numbers(spec, dtype)))


def _numbers(spec: ArraySpec, dtype: np.dtype) -> st.SearchStrategy[Any]:
    if dtype == spec.masked:
        return st.integers(0, np.iinfo(dtype).max)
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


class Malformed(NamedTuple):
    """A packet that is not as its message declares, and the field that is wrong."""

    what: str
    field: str
    packet: Packet


def malformed(kind: type[Message], message: Message) -> Iterator[Malformed]:
    good = encode(message)
    yield from _wrong_objects(kind, good, good.header, ())
    part = layout_of(kind).part
    if part is None:
        yield Malformed(
            "extra array", "arrays", Packet(good.header, {(0, EXTRA): np.zeros(1)})
        )
        return
    layout = layout_of(part)
    for number, values in enumerate(good.header.get(PARTS, [])):
        path = PARTS, number
        yield from _wrong_objects(part, good, values, path)
        for name in (*layout.arrays, *layout.families):
            changed = header(*path, name, value={"0": [0]})(good)
            yield Malformed("an array as a fact", name, changed)
    yield from _wrong_parts(good)
    yield from _wrong_arrays(layout, good)


def _wrong_parts(good: Packet) -> Iterator[Malformed]:
    if PARTS not in good.header:
        yield Malformed("extra list", PARTS, header(PARTS, value=[])(good))
        return
    listed = good.header[PARTS]
    wrong = [None, {}, "x", [None], [{}], *([{ID: i}] for i in (-1, True, "0", 0.5))]
    for value in [*wrong, *([[*listed, listed[0]]] if listed else [])]:
        changed = header(PARTS, value=value)(good)
        yield Malformed(f"{PARTS} = {value!r:.40}", "part", changed)


def _wrong_objects(
    kind: type[Body], good: Packet, values: dict[str, Any], path: tuple[str | int, ...]
) -> Iterator[Malformed]:
    names = [step for step in path if isinstance(step, str) and step != PARTS]

    def changed(name: str, what: str, **value: Any) -> Malformed:
        where = "/".join(map(str, (*path, name)))
        packet = header(*path, name, **value)(good)
        return Malformed(f"{where} {what}", [*names, name][0], packet)

    yield changed(EXTRA, "extra", value=1)
    for field in declared_fields(kind):
        name = field.encode_name
        if name not in layout_of(kind).values:
            continue
        if field.required:
            yield changed(name, "missing")
        for value in wrong_values(field.type, values.get(name)):
            yield changed(name, f"= {value!r:.40}", value=value)
        info = inspect.type_info(field.type)
        for inner in getattr(info, "types", (info,)) if values.get(name) else ():
            if isinstance(inner, inspect.StructType):
                yield from _wrong_objects(inner.cls, good, values[name], (*path, name))


def wrong_values(hint: Any, good: Any = None) -> Iterator[Any]:
    """Yield values that a type does not allow: of other types, out of range."""
    info = inspect.type_info(hint)
    values = _candidates(info)
    if isinstance(info, inspect.DictType) and good:
        value = next(iter(good.values()))
        keys = (key for key in _candidates(info.key_type) if isinstance(key, str))
        values += [{key: value} for key in keys]
    for value in values:
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            yield value


def _candidates(info: inspect.Type) -> list[Any]:
    """Return values of every type, and those just beyond a type's limits."""
    return [*OF_EACH_TYPE, *_BEYOND.get(type(info), lambda _: ())(info)]


def _floats(info: inspect.FloatType) -> list[float]:
    low = info.gt if info.ge is None else math.nextafter(info.ge, -math.inf)
    return [low, math.nextafter(info.le, math.inf), np.nan, np.inf, -np.inf, 10**400]


def _texts(info: inspect.StrType) -> list[str]:
    if info.pattern is None:
        return [] if info.max_length is None else ["x" * (info.max_length + 1)]
    return ["\x00", "../x", f"{_match(info.pattern)}\n"]


def _lists(info: inspect.ListType | inspect.VarTupleType) -> list[list[Any]]:
    longer = [] if info.max_length is None else [["x"] * (info.max_length + 1)]
    return [*longer, *([item] for item in _candidates(info.item_type))]


_BEYOND: dict[type, Callable[[Any], Iterable[Any]]] = {
    inspect.IntType: lambda of: (of.ge - 1, of.le + 1, -(10**400), 10**400),
    inspect.FloatType: _floats,
    inspect.StrType: _texts,
    inspect.ListType: _lists,
    inspect.VarTupleType: _lists,
    inspect.DictType: lambda of: ({"0": v} for v in _candidates(of.value_type)),
    inspect.UnionType: lambda of: (v for one in of.types for v in _candidates(one)),
}


def _match(pattern: str) -> str:
    """Return a text of one of the forms that are in use."""
    texts = (
        *("a" * n for n in (0, 1, 32, 64)),
        "0",
        "table-0",
        *re.findall(r"[A-Za-z]+", pattern),
    )
    return next(text for text in texts if re.search(pattern, text))


def _wrong_arrays(layout: Layout, good: Packet) -> Iterator[Malformed]:
    specs = {key: _spec(layout, key) for key in good.arrays}
    sides = [_first_side(key, spec) for key, spec in specs.items()]
    for key, array in good.arrays.items():
        part, name = key
        field = name.partition("/")[0]
        spec = specs[key]
        for what, changed in _wrong_forms(spec, array):
            packet = Packet(good.header, {**good.arrays, key: changed})
            yield Malformed(f"{key} {what}", field, packet)
        side = _first_side(key, spec)
        if side and sides.count(side) > 1 and len(array):
            longer = {**good.arrays, key: np.concatenate([array, array[:1]])}
            # either of the two may be the one that is refused
            yield Malformed(f"{key} longer", "of shape", Packet(good.header, longer))
        family = field if field in layout.families else f"{name}/0"
        for extra in (EXTRA, family):
            packet = Packet(good.header, {**good.arrays, (part, extra): array})
            yield Malformed(f"{extra} beside {key}", extra, packet)


def _spec(layout: Layout, key: ArrayKey) -> ArraySpec:
    return (layout.arrays | layout.families)[key[1].partition("/")[0]][1]


def _first_side(key: ArrayKey, spec: ArraySpec) -> tuple[int, str] | None:
    """Return the name of an array's first side in its part, if others can share it."""
    side = spec.shape[0]
    if isinstance(side, int) or side.endswith("/8"):
        return None
    return key[0], side.replace("{}", key[1].partition("/")[2])


def _wrong_forms(
    spec: ArraySpec, array: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays of other dtypes, dimensions and ranges than are declared."""
    for dtype in sorted(WIRE_DTYPES - {spec.dtype, spec.masked}):
        with np.errstate(all="ignore"):
            yield dtype, array.astype(dtype)
    yield "deeper", array[..., None]
    yield "deep", np.zeros((1,) * (len(spec.shape) + 2), array.dtype)
    for number in _wrong_numbers(spec, array.dtype) if array.size else ():
        yield f"of {number}", np.full(array.shape, number, array.dtype)


def _wrong_numbers(spec: ArraySpec, dtype: np.dtype) -> Iterator[float]:
    is_float = dtype.kind == "f"
    if is_float and spec.low is not None:
        yield from (np.inf, -np.inf, *(() if spec.nullable else (np.nan,)))
    limits = np.finfo(dtype) if is_float else np.iinfo(dtype)
    for limit, sign in ((spec.low, -1), (spec.high, 1)):
        if limit is None:
            continue
        # twice 0 is 0
        beyond = (2 * limit or sign) if is_float else int(limit) + sign
        if limits.min <= beyond <= limits.max:
            yield beyond
