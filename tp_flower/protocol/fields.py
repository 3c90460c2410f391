"""The vocabulary that messages are declared in: numbers, arrays, and disclosures.

A message is a :class:`Request` or a :class:`Reply`: a frozen structure whose fields
have a type and a range. What it says of one participant, a shard in one role, is a
:class:`PartBody`, by the participant's number in ``parts``. Fields that are arrays name
their dtype and shape; a name in a shape is a size that both ends know, such as the rows
of the shard that are trained on.
"""

from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]

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
