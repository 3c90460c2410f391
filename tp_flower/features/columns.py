"""Feature columns of a shard, as its extraction yields them.

Notation
    n   rows of the shard, or of a block of its rows
    d   elements of a vector
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.arrays import AnyArray, BoolArray, FloatArray, IndexArray
from tp_flower.errors import SchemaError
from tp_flower.features.spec import TIME_PARTS

Float32Array = npt.NDArray[np.float32]
CodeArray = npt.NDArray[np.int32]
Rows = slice | IndexArray | BoolArray

TimePart = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, eq=False)
class _ArrayColumn:
    values: AnyArray

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.values)

    def take(self, rows: Rows) -> Self:
        """Return the column of these rows."""
        return type(self)(self.values[rows])


@dataclass(frozen=True, eq=False)
class NumericColumn(_ArrayColumn):
    """A feature with numbers: booleans are 0 and 1, times seconds since 1970 (UTC).

    The values are float64 (n,), NaN for missing ones.
    """

    values: FloatArray

    @property
    def is_missing(self) -> BoolArray:
        """Mask of the rows without a value, (n,)."""
        return np.isnan(self.values)


@dataclass(frozen=True, eq=False)
class VectorColumn(_ArrayColumn):
    """A feature with vectors of one length, such as embeddings.

    The values are float32 (n, d), NaN for missing rows or elements.
    """

    values: Float32Array

    @property
    def width(self) -> int:
        """Length of the vectors, d."""
        return int(self.values.shape[1])

    @property
    def is_missing(self) -> BoolArray:
        """Mask of the rows without any element, (n,)."""
        return np.asarray(np.isnan(self.values).all(axis=1))


@dataclass(frozen=True, eq=False)
class CategoricalColumn:
    """A feature with text values.

    Codes are int32 (n,), positions in ``texts``, -1 for missing values. Texts are the
    sorted distinct values of this shard: an Arrow array of strings. The blocks of a
    shard share one object, so that it is hashed once.
    """

    codes: CodeArray
    texts: pa.Array

    def __init__(self, codes: CodeArray, texts: pa.Array | Sequence[str]) -> None:
        object.__setattr__(self, "codes", codes)
        is_array = isinstance(texts, pa.Array | pa.ChunkedArray)
        texts = texts if is_array else pa.array(texts, pa.string())
        object.__setattr__(self, "texts", texts)

    @property
    def rows(self) -> int:
        """Number of rows, n."""
        return len(self.codes)

    @property
    def is_missing(self) -> BoolArray:
        """Mask of the rows without a value, (n,)."""
        return self.codes < 0

    def take(self, rows: Rows) -> "CategoricalColumn":
        """Return the column of these rows, with the same ``texts``."""
        return CategoricalColumn(self.codes[rows], self.texts)


FeatureColumn = NumericColumn | CategoricalColumn | VectorColumn


def empty_column(rows: int) -> NumericColumn:
    """Return a column without any value, which fits every encoder."""
    return NumericColumn(np.full(rows, np.nan))


def example_column(kind: str, width: int) -> FeatureColumn:
    """Return a made-up column with one value, of a kind and, for vectors, a width."""
    if kind == "vector":
        return VectorColumn(np.ones((1, width), np.float32))
    if kind == "text":
        return CategoricalColumn(np.zeros(1, np.int32), ("",))
    return NumericColumn(np.ones(1))


def as_numeric(name: str, column: FeatureColumn) -> NumericColumn:
    """Return a feature's column as numbers; one without values may be of any kind."""
    if isinstance(column, NumericColumn):
        return column
    _check_empty(name, column, "numeric")
    return empty_column(column.rows)


def as_categorical(name: str, column: FeatureColumn) -> CategoricalColumn:
    """Return a feature's column as texts; one without values may be of any kind."""
    if isinstance(column, CategoricalColumn):
        return column
    _check_empty(name, column, "categorical")
    return CategoricalColumn(np.full(column.rows, -1, dtype=np.int32), ())


def as_vectors(name: str, column: FeatureColumn, width: int) -> VectorColumn:
    """Return a feature's column as vectors; one without values may be of any kind."""
    if isinstance(column, VectorColumn):
        if column.width == width:
            return column
        if column.rows and not column.is_missing.all():
            raise SchemaError(
                f"feature {name!r} has vectors of length {column.width} in this shard, "
                f"expected {width}"
            )
    else:
        _check_empty(name, column, "a vector")
    return VectorColumn(np.full((column.rows, width), np.nan, dtype=np.float32))


def _check_empty(name: str, column: FeatureColumn, wanted: str) -> None:
    if not column.is_missing.all():
        raise SchemaError(f"feature {name!r} is not {wanted} in this shard")


def text_lengths(column: CategoricalColumn) -> NumericColumn:
    """Return the number of characters of each text; NaN for missing ones.

    >>> text_lengths(CategoricalColumn(np.array([1, -1, 0]), ("", "äb"))).values
    array([ 2., nan,  0.])
    """
    lengths = np.asarray(pc.utf8_length(column.texts))
    return NumericColumn(np.append(lengths.astype(np.float64), np.nan)[column.codes])


def number_texts(column: NumericColumn) -> CategoricalColumn:
    """Return numbers as categories: the shortest text that reads back as the number.

    >>> number_texts(NumericColumn(np.array([2.0, np.nan, 0.5]))).texts.to_pylist()
    ['0.5', '2.0']
    """
    codes = np.full(column.rows, -1, dtype=np.int32)
    is_present = ~column.is_missing
    # + 0.0 turns -0.0 into 0.0
    distinct, inverse = np.unique(column.values[is_present] + 0.0, return_inverse=True)
    codes[is_present] = inverse
    # numpy writes the shortest exact text of a float64 on every platform
    return CategoricalColumn(codes, pa.array(distinct.astype("U32"), pa.string()))


def has_levels(column: NumericColumn, most: int) -> bool:
    """Return whether the values are at most ``most`` different whole numbers.

    >>> has_levels(NumericColumn(np.array([1.0, 2.0, 4.0, np.nan])), 3)
    True
    """
    present = column.values[~column.is_missing]
    # of many different numbers the first rows have too many already
    for rows in (present[:1000], present):
        if len(np.unique(rows)) > most or not (rows == np.floor(rows)).all():
            return False
    return bool(len(present))


NUMBERS_OR_DATES: Final = (
    r"^\s*([-+]?[$€£]?(\d+([.,]\d*)*|[.,]\d+)([eE][-+]?\d+)?\s?%?"
    r"|(\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4})([ T]\d\d?:\d\d\S*)?)\s*$"
)
"""The form of numbers and dates in texts."""


MOST_MARKS: Final = 5
"""Other texts in a column of numbers that may all stand for a missing value, such as
N/A or -."""


def nearly_numbers(column: FeatureColumn, few: float = 0.0) -> bool:
    """Return whether 95 % of the texts are numbers or dates.

    Three quarters are enough where the others are but a few different texts. In any
    case, a share of more than ``few`` must not be plain digits.
    """
    if not isinstance(column, CategoricalColumn):
        return False
    is_readable = np.asarray(
        pc.match_substring_regex(column.texts, NUMBERS_OR_DATES), np.bool_
    )
    is_plain = np.asarray(pc.utf8_is_digit(column.texts), np.bool_)
    rows = column.codes[~column.is_missing]
    if not len(rows) or 1.0 - is_plain[rows].mean() <= few:
        return False
    distinct_others = len(np.unique(rows[~is_readable[rows]]))
    return bool(
        is_readable[rows].mean() >= (0.75 if distinct_others <= MOST_MARKS else 0.95)
    )


def cycle_of(argument: float | str) -> tuple[TimePart, float]:
    """Return the function that gives a number's place in a cycle, and its length."""
    if isinstance(argument, str):
        return partial(_time_part, argument), float(TIME_PARTS[argument])
    return (lambda values: np.mod(values, argument)), float(argument)


_PARTS: Final[Mapping[str, Callable[..., pa.Array]]] = {
    "hour": pc.hour,
    "minute": pc.minute,
    "weekday": partial(pc.day_of_week, week_start=7),
    "month": pc.month,
    "day-of-year": pc.day_of_year,
}
"""As in SQL: hour 0-23, minute 0-59, month 1-12, Sunday 0, day of the year 1-366."""


def _time_part(name: str, seconds: FloatArray) -> FloatArray:
    """Return a part of times (n,), seconds since 1970 (UTC); NaN where missing."""
    return np.asarray(
        _PARTS[name](pa.array(np.floor(seconds).astype("datetime64[s]"))), np.float64
    )
