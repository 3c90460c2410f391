"""The vocabulary for declaring messages: numbers, arrays, and disclosures.

A message is a :class:`Request` or a :class:`Reply`: a frozen structure whose fields
have a type and a range. Its fields about one participant, a shard in one role, are a
:class:`PartBody`, stored under the participant's number in ``parts``. Fields that are
arrays declare their dtype and shape; a name in a shape is a size that both ends know.

*Notation*, sizes in shapes; ``n/8`` is one bit for each of n:

    rows        rows of the shard, after the query's filters
    trained     rows in at least one joined training row
    tested      rows in at least one held-out joined row
    scored      all rows that take part, or ``trained`` if nothing is evaluated
    total       all rows that take part, trained or held out
    outputs     d_c, scores per row
    features    columns of an encoded row
    width       features, plus the intercept if the model has one
    parameters  p, of the shard's model
    bin_columns columns of bin numbers
    binned      rows that are scored, whose bin numbers leave
    sample      joined rows of a coreset

Fields with the same meaning in all messages:

    encoder                  of the table, sealed to its shards; absent if in one
    model                    of the table, untrained
    model_name, -version     name under which the model is saved
    l2, penalised            weight of the penalty, and the parameters that it covers
    device                   device that computes the model
    privacy                  mechanisms of the run
    ledger                   lines of the run in the site's ledger
    epoch                    from 1
    joined_rows              N, joined training rows
    trained, tested          masks of rows
    multiplicity             joined rows of each trained row, G; absent if all are 1
    masses                   instead of G, the summed weights of these joined rows
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

from tp_flower.folds import NO_FOLD
from tp_flower.splits import TEST, TRAIN

MOST: Final = (1 << 31) - 1
"""The largest whole number in a message, unless a tighter limit applies."""

LARGEST: Final = 1e30
"""Beyond it float32 may overflow: no legitimate score or gradient is so large."""

LARGEST_FLOAT: Final = float(np.finfo(np.float64).max)


def between(low: float, high: float) -> msgspec.Meta:
    """Return the declaration of a number's range, both ends included."""
    return msgspec.Meta(ge=low, le=high)


def one_of(*choices: str) -> msgspec.Meta:
    """Return the declaration of a text that is one of several."""
    return msgspec.Meta(pattern=rf"^({'|'.join(choices)})\Z")


Count = Annotated[int, between(0, MOST)]
Size = Annotated[int, between(1, MOST)]
Seed = Annotated[int, between(0, (1 << 63) - 1)]
TableRowCount = Annotated[int, between(0, 1 << 53)]
JoinedRows = Annotated[int, between(1, 1 << 53)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST_FLOAT)]
Finite = Annotated[float, between(-LARGEST_FLOAT, LARGEST_FLOAT)]
NonNegative = Annotated[float, between(0, LARGEST_FLOAT)]
Share = Annotated[float, between(0, 1)]
Percent = Annotated[int, between(0, 100)]
Name = Annotated[str, msgspec.Meta(max_length=1 << 16)]
MOST_OF_NAME: Final = 200
"""Characters of a column's name in a report: longer texts are none to show there."""
ColumnName = Annotated[str, msgspec.Meta(max_length=MOST_OF_NAME)]
"""The name of an encoded column, in which a site may have written what it likes."""
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in hexadecimal."""
Strategy = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,63}\Z")]
"""The name of a method, which the recipient looks up."""
Device = Annotated[str, one_of("auto", "cpu", "cuda")]
Document = dict[str, Any]
"""A JSON object that a parser of the library reads: an encoder, a fragment, a model."""

SERVER: Final = "server"
SITES: Final = "sites"
"""Readers of messages; the first is the adversary of every guarantee."""

CLEAR = "clear"
MASKED = "masked"
SEALED = "sealed"
LAPLACE = "laplace"
RANDOMISED_RESPONSE = "randomised-response"
DP_SGD = "dp-sgd"
NOISY_STATISTICS = "statistics"
"""Names of mechanisms: for scores and sums, for labels, and for models."""


class ArraySpec(NamedTuple):
    """The dtype, shape and range of an array; sizes in the shape are numbers or names.

    Attributes:
        nullable: whether NaN stands for a missing value.
        masked: dtype of masked or sealed words in its place, of any value.
    """

    dtype: str
    shape: tuple[str | int, ...]
    low: float | None = None
    high: float | None = None
    nullable: bool = False
    masked: str = ""


def _declaration(
    dtype: str, low: float | None, high: float | None = None, **more: Any
) -> Callable[..., ArraySpec]:
    return lambda *shape: ArraySpec(dtype, shape, low, high, **more)


float32 = _declaration("float32", -LARGEST, LARGEST)
"""Moderate numbers per row: scores, targets."""
float64 = _declaration("float64", -LARGEST, LARGEST)
"""Moderate numbers that are summed: statistics, gradients."""
finite_values = _declaration("float64", -LARGEST_FLOAT, LARGEST_FLOAT)
"""Finite values of a column."""
column_values = _declaration("float64", -LARGEST_FLOAT, LARGEST_FLOAT, nullable=True)
"""A column's finite values; NaN for NULL."""
positions = _declaration("int32", 0)  # row numbers, codes or counts
nullable_positions = _declaration("int32", -1)  # row numbers or codes; -1 for none
score_words = _declaration("float32", -LARGEST, LARGEST, masked="uint32")
"""Scores of rows, or masked words of them."""
unsigned = _declaration("uint32", None)  # unsigned positions
flags = _declaration("uint8", 0, 1)  # one byte per item, 0 or 1
subsets = _declaration("uint8", TRAIN, TEST)
"""Whether a row is trained on (0), validates (1) or is tested on (2)."""
fold_numbers = _declaration("uint8", 0, NO_FOLD)  # of rows; NO_FOLD for none
regions = _declaration("uint8", 0, 255)  # of a table's rows; 255 for a row of none
positive_counts = _declaration("int32", 1)  # numbers of rows, each at least 1
shares = _declaration("float64", -LARGEST, LARGEST, masked="uint64")
"""Numbers, or sealed words, of an array that is summed, or sums, and their check."""
counts = _declaration("int64", 1)  # how many values each item represents
whole_numbers = _declaration("int64", None)  # of any size
sealed = _declaration("uint8", None)  # A sealed text: any bytes
bytes_of = _declaration("uint8", None)  # numbers from 0 to 255


def hash_pairs(*shape: str | int) -> ArraySpec:
    """Return the declaration of keyed hashes of 128 bits, in two numbers each."""
    return ArraySpec("uint64", (*shape, 2))


def bits(rows: str) -> ArraySpec:
    """Return the declaration of a mask: one bit for each of ``rows`` rows."""
    return ArraySpec("uint8", (f"{rows}/8",))


class Discloses(NamedTuple):
    """The information that some fields of a message disclose to its reader.

    Attributes:
        carries: in plain words; names in braces are properties of the run.
        fields: names of the fields; empty if sending the message discloses it.
        covered_by: the mechanism that covers it; how strong it is in a run is a
            property of that run (``strategies/disclosures.py``).
        kinds: its names in a run's plan and in the site's ledger; none if it is not a
            release of rows.
        policy: the rule of a table's policy that allows it; "" for none.
        when: the property of a run on which it is sent; "" for always.
        reader: who finally learns it; "" for the recipient of the message.
    """

    carries: str
    fields: tuple[str, ...] = ()
    covered_by: str = "nothing"
    kinds: tuple[str, ...] = ()
    policy: str = ""
    when: str = ""
    reader: str = ""


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

    It ``discloses`` facts to its ``reader``, in the order of explanation; fields of its
    ``schedule`` say only how the run proceeds.
    """

    reader: ClassVar[str]
    discloses: ClassVar[tuple[Discloses, ...]] = ()
    schedule: ClassVar[tuple[str, ...]] = ()


class Request(Message, frozen=True):
    """A message from the server to a site."""

    reader = SITES


class Reply(Message, frozen=True):
    """A message from a site; ``is_complete`` ones have values for every participant."""

    reader = SERVER
    is_complete: ClassVar[bool] = True


PARTS: Final = "parts"
_UNIONS: Final = (Union, types.UnionType)


@dataclass(frozen=True)
class Layout:
    """How a structure travels: its attributes, by their names on the wire.

    Attributes:
        values: attributes in the JSON header.
        arrays: attributes that are arrays, and their declarations.
        families: the same for dictionaries of arrays.
        part: type of the fields about one participant; None if there are none.
    """

    values: Mapping[str, str]
    arrays: Mapping[str, tuple[str, ArraySpec]]
    families: Mapping[str, tuple[str, ArraySpec]]
    part: type[PartBody] | None


@cache
def layout_of(kind: type[Body]) -> Layout:
    """Return how a structure travels, from its declaration."""
    values: dict[str, str] = {}
    arrays: dict[str, tuple[str, ArraySpec]] = {}
    families: dict[str, tuple[str, ArraySpec]] = {}
    part: type[PartBody] | None = None
    for declared_field in declared_fields(kind):
        hint = _present(declared_field.type)
        name = declared_field.encode_name
        if declared_field.name == PARTS:
            part = get_args(hint)[1]
        elif spec := _array_spec(hint):
            arrays[name] = declared_field.name, spec
        elif get_origin(hint) is dict and (spec := _array_spec(get_args(hint)[1])):
            families[name] = declared_field.name, spec
        else:
            values[name] = declared_field.name
    return Layout(values, arrays, families, part)


def _present(hint: Any) -> Any:
    """Return the type of a field when it is present, if it may be left out."""
    if get_origin(hint) not in _UNIONS:
        return hint
    choices = tuple(c for c in get_args(hint) if c is not type(None))
    return Union[choices]  # noqa: UP007 - of one type it is that type


def _array_spec(hint: Any) -> ArraySpec | None:
    metadata = getattr(hint, "__metadata__", ())
    return next((spec for spec in metadata if isinstance(spec, ArraySpec)), None)


def field_bytes(kind: type[Body], name: str, sizes: Mapping[str, float]) -> float:
    """Return the bytes of an array that a structure carries.

    >>> from tp_flower.protocol.training_messages import ScoreSteps
    >>> field_bytes(ScoreSteps, "step", {"trained": 3, "outputs": 2})
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
