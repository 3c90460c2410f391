"""The vocabulary that messages are declared in: numbers, arrays, and disclosures.

A message is a :class:`Request` or a :class:`Reply`: a frozen structure whose fields
have a type and a range. Its fields about one participant, a shard in one role, are a
:class:`PartBody`, by the participant's number in ``parts``. Fields that are arrays name
their dtype and shape; a name in a shape is a size that both ends know.

*Notation*, sizes in shapes; ``n/8`` is a bit for each of n:

    rows        of the shard, after the query's filters
    trained     rows in at least one joined training row
    tested      rows in at least one held-out joined row
    scored      all rows that take part, or ``trained`` where nothing is evaluated
    total       all rows that take part, trained or held out
    outputs     d_c, scores per row
    features    of an encoded row
    width       features, and the intercept where the model has one
    parameters  p, of the shard's model
    sample      joined rows of a coreset

Fields that mean the same in all messages:

    encoder, model           of the table; the model is untrained
    model_name, -version     that the model is saved under
    l2, penalised            weight of the penalty, and the parameters that it is on
    device                   where the model is computed
    privacy                  mechanisms of the run
    ledger                   lines of the run in the site's ledger
    epoch                    from 1
    joined_rows              N, joined training rows
    trained, tested          masks of rows, or rows behind joined rows
    multiplicity             joined rows of each trained row, G; absent if all are 1
    masses                   in place of it, their summed weights
    held_out_rows            joined rows that are not trained on
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

LARGEST: Final = 1e30
"""Beyond it float32 is about to overflow: no score or gradient gets there by itself."""

LARGEST_FLOAT: Final = float(np.finfo(np.float64).max)


def between(low: float, high: float) -> msgspec.Meta:
    """Return the declaration of a number's range, both ends included."""
    return msgspec.Meta(ge=low, le=high)


def one_of(*choices: str) -> msgspec.Meta:
    """Return the declaration of a text that is one of some."""
    listed = ", ".join(choices)
    return msgspec.Meta(
        pattern=rf"^({'|'.join(choices)})\Z", description=f"one of {listed}"
    )


Count = Annotated[int, between(0, MOST)]
Size = Annotated[int, between(1, MOST)]
Seed = Annotated[int, between(0, (1 << 63) - 1)]
TableRowCount = Annotated[int, between(0, 1 << 53)]
JoinedRows = Annotated[int, between(1, 1 << 53)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST_FLOAT)]
Finite = Annotated[float, between(-LARGEST_FLOAT, LARGEST_FLOAT)]
NonNegative = Annotated[float, between(0, LARGEST_FLOAT)]
Share = Annotated[float, between(0, 1)]
Name = Annotated[str, msgspec.Meta(max_length=1 << 16)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in hexadecimal."""
Device = Annotated[str, one_of("auto", "cpu", "cuda")]
Document = dict[str, Any]
"""A JSON object that a parser of the library reads: an encoder, a fragment, a model."""

SERVER: Final = "server"
SITES: Final = "sites"


class ArraySpec(NamedTuple):
    """The dtype, shape and range of an array.

    Attributes:
        dtype: of its numbers.
        shape: per dimension its size, or the name of a size.
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


def finite_values(*shape: str | int) -> ArraySpec:
    """Return the declaration of finite values of a column."""
    return ArraySpec("float64", shape, -LARGEST_FLOAT, LARGEST_FLOAT)


def column_values(*shape: str | int) -> ArraySpec:
    """Return the declaration of a column's finite values; NaN for NULL."""
    return finite_values(*shape)._replace(nullable=True)


def positions(*shape: str | int, low: int = 0) -> ArraySpec:
    """Return the declaration of row numbers, codes or counts."""
    return ArraySpec("int32", shape, low)


def unsigned(*shape: str | int) -> ArraySpec:
    """Return the declaration of positions or counts that have no sign."""
    return ArraySpec("uint32", shape, shorter=("uint8",))


def flags(*shape: str | int) -> ArraySpec:
    """Return the declaration of one byte per item, 0 or 1."""
    return ArraySpec("uint8", shape, 0, 1)


def value_counts(*shape: str | int) -> ArraySpec:
    """Return the declaration of how many values each item stands for."""
    return ArraySpec("int64", shape, 1)


def hash_pairs(*shape: str | int) -> ArraySpec:
    """Return the declaration of keyed hashes of 128 bits, in two numbers each."""
    return ArraySpec("uint64", (*shape, 2))


def bits(rows: str) -> ArraySpec:
    """Return the declaration of a mask: one bit for each of ``rows`` rows."""
    return ArraySpec("uint8", (f"{rows}/8",))


class Discloses(NamedTuple):
    """The information that some fields of a message give their reader.

    Attributes:
        carries: in plain words; names in braces are properties of the run.
        fields: their names; empty: the message tells it by being sent.
        covered_by: which mechanism covers it: a name of ``COVERS``.
        kinds: its names in a run's plan and in the site's ledger; none where it is no
            release of rows.
        policy: the rule of a table's policy that allows it; "" for none.
        when: the property of a run that has to hold for it to be sent; "" for always.
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
"""Mechanisms; how strong each is in a run is a property of that run."""


class Body(
    msgspec.Struct,
    frozen=True,
    rename="kebab",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Named JSON values and arrays."""


class PartBody(Body, frozen=True):
    """The fields of a message about one participant."""


class Message(Body, frozen=True):
    """A request or a reply.

    Attributes:
        reader: which side reads it.
        discloses: what it tells its reader, in the order of explanation.
        schedule: fields that tell nothing but how the run goes.
    """

    reader: ClassVar[str]
    discloses: ClassVar[tuple[Discloses, ...]] = ()
    schedule: ClassVar[tuple[str, ...]] = ()


class Request(Message, frozen=True):
    """A message from the server to a site."""

    reader = SITES


class Reply(Message, frozen=True):
    """A message from a site to the server.

    Attributes:
        is_complete: whether it has values of every participant of its request, if it
            has any other than arrays.
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
    """How a structure travels; every field by its name on the wire.

    Attributes:
        values: attributes that travel in the JSON header.
        arrays: attributes that are arrays, and their declarations.
        families: the same of dictionaries of arrays.
        part: type of the fields about one participant; None where there are none.
        allowed: description of the values that each of ``values`` may have.
    """

    values: Mapping[str, str]
    arrays: Mapping[str, tuple[str, ArraySpec]]
    families: Mapping[str, tuple[str, ArraySpec]]
    part: type[PartBody] | None
    allowed: Mapping[str, str]


@cache
def layout_of(kind: type[Body]) -> Layout:
    """Return how a structure travels, from its declaration."""
    values: dict[str, str] = {}
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
            values[name] = declared.name
            allowed[name] = describe(hint)
    return Layout(values, arrays, families, part, allowed)


def describe(hint: Any) -> str:
    """Return in words which values a type allows.

    >>> describe(Annotated[int, msgspec.Meta(ge=0, le=9)])
    'a whole number, at least 0 and at most 9'
    """
    hint = _present(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return " or ".join(map(describe, arguments))
    if origin is Annotated:
        (meta,) = hint.__metadata__
        return meta.description or f"{describe(arguments[0])}, {_limits(meta)}"
    if origin in (list, tuple):
        return f"a list, each {describe(arguments[0])}"
    if origin is dict and arguments[1] is not Any:
        return f"an object, each value {describe(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(str(choice.value) for choice in hint)}"
    return _TYPE_NAMES.get(hint, _OBJECT)


def _limits(meta: msgspec.Meta) -> str:
    if meta.pattern is not None:
        return f"of the form {meta.pattern}"
    if meta.max_length is not None:
        return f"of length at most {meta.max_length}"
    low = f"above {meta.gt:g}" if meta.ge is None else f"at least {_text(meta.ge)}"
    return f"{low} and at most {_text(meta.le)}"


def _text(limit: float | None) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _present(hint: Any) -> Any:
    """Return the type of a field where it is there, if it may be left out."""
    if get_origin(hint) not in _UNIONS:
        return hint
    choices = tuple(c for c in get_args(hint) if c is not type(None))
    return Union[choices]  # noqa: UP007 - of one type it is that type


def _array_spec(hint: Any) -> ArraySpec | None:
    metadata = getattr(hint, "__metadata__", ())
    return next((spec for spec in metadata if isinstance(spec, ArraySpec)), None)


def field_bytes(kind: type[Body], name: str, sizes: Mapping[str, float]) -> float:
    """Return the bytes of an array that a structure carries.

    >>> from tp_flower.protocol.training_messages import AdmmTarget
    >>> field_bytes(AdmmTarget, "target", {"trained": 3, "outputs": 2})
    24.0
    """
    spec = dict(layout_of(kind).arrays.values())[name]
    count = float(np.dtype(spec.dtype).itemsize)
    for size in spec.shape:
        if isinstance(size, int):
            count *= size
        elif size.endswith("/8"):
            count *= -(-sizes[size.removesuffix("/8")] // 8)
        else:
            count *= sizes[size]
    return count
