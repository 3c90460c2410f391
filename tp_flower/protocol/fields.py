"""The vocabulary that messages are declared in: numbers, arrays, and disclosures.

A message is a :class:`Request` or a :class:`Reply`: a frozen structure whose fields
have a type and a range. What it says of one participant, a shard in one role, is a
:class:`PartBody`, by the participant's number in ``parts``. Fields that are arrays name
their dtype and shape; a name in a shape is a size that both ends know, such as the rows
of the shard that are trained on.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    Union,
    get_args,
    get_origin,
)

import msgspec
import numpy as np
from msgspec.structs import fields as declared_fields

MOST: Final = (1 << 31) - 1
"""The largest whole number in a message where nothing else limits it."""

MOST_SEED: Final = (1 << 63) - 1

LARGEST: Final = 1e30
"""Beyond it float32 is about to overflow: no score or gradient gets there by itself."""

_LARGEST_FLOAT: Final = float(np.finfo(np.float64).max)

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=MOST_SEED)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=_LARGEST_FLOAT)]
Finite = Annotated[float, msgspec.Meta(ge=-_LARGEST_FLOAT, le=_LARGEST_FLOAT)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=_LARGEST_FLOAT)]
JoinedRows = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Document = dict[str, Any]
"""A JSON object that a parser of the library reads: an encoder, a fragment, a model."""

SERVER: Final = "server"
SITES: Final = "sites"


def one_of(*choices: str) -> msgspec.Meta:
    """Return the declaration of a text that is one of some."""
    listed = ", ".join(choices)
    return msgspec.Meta(
        pattern=rf"^({'|'.join(choices)})\Z", description=f"one of {listed}"
    )


class ArraySpec(NamedTuple):
    """The dtype, shape and range of an array.

    Attributes:
        dtype: of its numbers.
        shape: per dimension its size, or the name of a size.
        low: the least number; None for any.
        high: the largest number; None for any.
        nullable: whether NaN stands for a missing value.
        shorter: dtypes of fewer bytes that may take its place.
    """

    dtype: str
    shape: tuple[str | int, ...]
    low: float | None = None
    high: float | None = None
    nullable: bool = False
    shorter: tuple[str, ...] = ()


def float32(*shape: str | int) -> ArraySpec:
    """Return the declaration of moderate numbers per row: scores, targets."""
    return ArraySpec("float32", shape, -LARGEST, LARGEST)


def float64(*shape: str | int) -> ArraySpec:
    """Return the declaration of moderate numbers that add up: statistics, gradients."""
    return ArraySpec("float64", shape, -LARGEST, LARGEST)


def amounts(*shape: str | int) -> ArraySpec:
    """Return the declaration of finite values of a column."""
    return ArraySpec("float64", shape, -_LARGEST_FLOAT, _LARGEST_FLOAT)


def column_values(*shape: str | int) -> ArraySpec:
    """Return the declaration of a column's finite values; NaN for NULL."""
    return ArraySpec("float64", shape, -_LARGEST_FLOAT, _LARGEST_FLOAT, nullable=True)


def positions(*shape: str | int, low: int = 0) -> ArraySpec:
    """Return the declaration of row numbers, codes or counts."""
    return ArraySpec("int32", shape, low)


def unsigned(*shape: str | int) -> ArraySpec:
    """Return the declaration of positions or counts that have no sign."""
    return ArraySpec("uint32", shape, shorter=("uint8",))


def masked_sums(*shape: str | int) -> ArraySpec:
    """Return the declaration of numbers that are uniform modulo 2^64."""
    return ArraySpec("uint64", shape)


def coded(*shape: str | int) -> ArraySpec:
    """Return the declaration of bytes that a decoder of the library reads."""
    return ArraySpec("uint8", shape)


def flags(*shape: str | int) -> ArraySpec:
    """Return the declaration of one byte per item, 0 or 1."""
    return ArraySpec("uint8", shape, 0, 1)


def value_counts(*shape: str | int) -> ArraySpec:
    """Return the declaration of how many values each item stands for."""
    return ArraySpec("int64", shape, 1)


def random_weights(*shape: str | int) -> ArraySpec:
    """Return the declaration of random weights of 32 bits."""
    return ArraySpec("uint32", shape)


def hash_pairs(*shape: str | int) -> ArraySpec:
    """Return the declaration of keyed hashes of 128 bits, in two numbers each."""
    return ArraySpec("uint64", (*shape, 2))


def bits(rows: str) -> ArraySpec:
    """Return the declaration of a mask: one bit for each of ``rows`` rows."""
    return ArraySpec("uint8", (f"{rows}/8",))


class Discloses(NamedTuple):
    """What some fields of a message tell their reader.

    Attributes:
        carries: what they tell, in plain words; names in braces are facts of the run.
        fields: their names; empty: what the message tells by being sent.
        covered_by: which mechanism covers it: a name of ``COVERS``.
        kinds: how a run's plan and the site's ledger call it; none where it is no
            release of rows.
        policy: the rule of a table's policy that allows it; "" for none.
        when: the fact of a run that has to be there for it to be sent; "" for always.
        reader: who learns it in the end; "" for whom the message is sent to.
    """

    carries: str
    fields: tuple[str, ...] = ()
    covered_by: str = "nothing"
    kinds: tuple[str, ...] = ()
    policy: str = ""
    when: str = ""
    reader: str = ""


COVERS: Final = frozenset(
    {
        *("nothing", "hashes", "labels", "models", "scores", "messages"),
        *("sealed", "masked", "summaries"),
    }
)
"""Mechanisms; how strong each is in a run is a fact of that run."""


class Body(
    msgspec.Struct,
    frozen=True,
    rename="kebab",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Named facts and arrays."""


class PartBody(Body, frozen=True):
    """What a message says of one participant."""


class Message(Body, frozen=True):
    """What one side tells the other in a round.

    Attributes:
        reader: which side reads it.
        discloses: what it tells its reader, in the order of explanation.
        schedule: fields that tell nothing but how the run goes.
    """

    reader: ClassVar[str]
    discloses: ClassVar[tuple[Discloses, ...]] = ()
    schedule: ClassVar[tuple[str, ...]] = ()


class Request(Message, frozen=True):
    """What the server asks of a site."""

    reader = SITES


class Reply(Message, frozen=True):
    """What a site answers.

    Attributes:
        is_complete: whether it says something of every participant that it is asked
            about, if it says facts of any.
    """

    reader = SERVER
    is_complete: ClassVar[bool] = True


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
