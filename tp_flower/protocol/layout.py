"""How a declared structure travels: which fields are facts, and which are arrays."""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec.structs import fields as declared_fields

from tp_flower.protocol.fields import ArraySpec, Body, PartBody

PARTS: Final = "parts"
_TYPE_NAMES: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
_UNIONS: Final = (Union, types.UnionType)
_OBJECT: Final = "an object of names"


@dataclass(frozen=True)
class Layout:
    """How a structure travels.

    Attributes:
        facts: attribute by name on the wire.
        arrays: attribute and declaration by name on the wire.
        families: the same for dictionaries of arrays.
        part: the type of what is said of one participant; None for nothing.
        allowed: what each fact may be, in words, by name on the wire.
    """

    facts: Mapping[str, str]
    arrays: Mapping[str, tuple[str, ArraySpec]]
    families: Mapping[str, tuple[str, ArraySpec]]
    part: type[PartBody] | None
    allowed: Mapping[str, str]


@cache
def layout_of(kind: type[Body]) -> Layout:
    """Return how a structure travels, from its declaration."""
    facts: dict[str, str] = {}
    arrays: dict[str, tuple[str, ArraySpec]] = {}
    families: dict[str, tuple[str, ArraySpec]] = {}
    allowed: dict[str, str] = {}
    part: type[PartBody] | None = None
    for declared in declared_fields(kind):
        hint, name = _present(declared.type), declared.encode_name
        if declared.name == PARTS:
            part = get_args(hint)[1]
        elif spec := _array_spec(hint):
            arrays[name] = declared.name, spec
        elif get_origin(hint) is dict and (spec := _array_spec(get_args(hint)[1])):
            families[name] = declared.name, spec
        else:
            facts[name] = declared.name
            allowed[name] = describe(hint)
    return Layout(facts, arrays, families, part, allowed)


def describe(hint: Any) -> str:
    """Return in words what a fact of a type may be.

    >>> describe(Annotated[int, msgspec.Meta(ge=0, le=9)])
    'a whole number, at least 0 and at most 9'
    """
    hint = _present(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return " or ".join(map(describe, arguments))
    if origin is Annotated:
        metas = [m for m in hint.__metadata__ if isinstance(m, msgspec.Meta)]
        if choices := [m.description for m in metas if m.description]:
            return choices[0]
        limits = [_limits(meta) for meta in metas]
        return ", ".join([describe(arguments[0]), *filter(None, limits)])
    if origin in (list, tuple):
        return f"a list, each {describe(arguments[0])}"
    if origin is dict and arguments[1] is not Any:
        return f"an object, each value {describe(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(choice.value) for choice in hint)}"
    return _TYPE_NAMES.get(hint, _OBJECT)


def field_bytes(kind: type[Body], name: str, sizes: Mapping[str, float]) -> float:
    """Return the bytes of an array that a structure carries.

    Args:
        kind: of the structure.
        name: of the field.
        sizes: that its shape names.

    >>> from tp_flower.protocol import AdmmTarget
    >>> field_bytes(AdmmTarget, "target", {"trained": 3, "outputs": 2})
    24.0
    """
    specs = dict(layout_of(kind).arrays.values())
    return array_bytes(specs[name], sizes)


def array_bytes(spec: ArraySpec, sizes: Mapping[str, float]) -> float:
    """Return the bytes of an array.

    Args:
        spec: its declaration.
        sizes: by name; ``"n/8"`` is a bit for each of ``n``, in whole bytes.

    Raises:
        KeyError: a size that its shape names is missing.
    """
    count = float(np.dtype(spec.dtype).itemsize)
    for size in spec.shape:
        if isinstance(size, int):
            count *= size
        elif size.endswith("/8"):
            count *= -(-sizes[size.removesuffix("/8")] // 8)
        else:
            count *= sizes[size]
    return count


def _limits(meta: msgspec.Meta) -> str:
    limits = [
        f"{words} {limit}" if isinstance(limit, int) else f"{words} {limit:g}"
        for words, limit in (
            ("above", meta.gt),
            ("at least", meta.ge),
            ("at most", meta.le),
        )
        if limit is not None
    ]
    if meta.pattern is not None:
        limits.append(f"of the form {meta.pattern}")
    if meta.max_length is not None:
        limits.append(f"of length at most {meta.max_length}")
    return " and ".join(limits)


def _present(hint: Any) -> Any:
    """Return the type of a field where it is there, if it may be left out."""
    if get_origin(hint) not in _UNIONS:
        return hint
    choices = tuple(c for c in get_args(hint) if c is not type(None))
    return Union[choices]  # noqa: UP007 - of one type it is that type


def _array_spec(hint: Any) -> ArraySpec | None:
    metadata = getattr(hint, "__metadata__", ())
    return next((spec for spec in metadata if isinstance(spec, ArraySpec)), None)
