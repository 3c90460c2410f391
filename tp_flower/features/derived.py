"""What encoders first make of a column: lengths, places in a cycle, texts of numbers.

Statistics and encodings are both of the derived values.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.features.columns import (
    CategoricalColumn,
    FeatureColumn,
    FloatArray,
    NumericColumn,
    as_categorical,
    as_numeric,
)
from tp_flower.features.spec import TIME_PARTS, EncoderSpec

_DAY: Final = 86400
_EPOCH_WEEKDAY: Final = 4  # 1970 began on a Thursday; Sunday is 0

TimePart = Callable[[FloatArray], FloatArray]


def text_lengths(column: CategoricalColumn) -> NumericColumn:
    """Return the number of characters of each text; NaN where it is missing.

    >>> text_lengths(CategoricalColumn(np.array([1, -1, 0]), ("", "äb"))).values
    array([ 2., nan,  0.])
    """
    lengths = np.asarray(pc.utf8_length(column.texts))
    return NumericColumn(np.append(lengths.astype(np.float64), np.nan)[column.codes])


def number_texts(column: NumericColumn) -> CategoricalColumn:
    """Return numbers as categories: the shortest text that reads back as the number.

    >>> number_texts(NumericColumn(np.array([2.0, np.nan, 0.5]))).categories
    ('0.5', '2.0')
    """
    codes = np.full(column.rows, -1, dtype=np.int32)
    is_present = ~column.is_missing
    # + 0.0: there is one zero
    distinct, inverse = np.unique(column.values[is_present] + 0.0, return_inverse=True)
    codes[is_present] = inverse
    # numpy's text of a float64 is the shortest exact one on every platform
    return CategoricalColumn(codes, pa.array(distinct.astype("U32"), pa.string()))


def derive(name: str, column: FeatureColumn, spec: EncoderSpec) -> NumericColumn:
    """Return the numbers that an encoder is fitted to.

    Raises:
        SchemaError: the column is of another kind; names the feature.
    """
    if spec.kind == "length":
        return text_lengths(as_categorical(name, column))
    return as_numeric(name, column)


def categories_of(column: FeatureColumn, name: str) -> CategoricalColumn:
    """Return a column as categories; those of numbers are their texts.

    Raises:
        SchemaError: the column holds vectors; names the feature.
    """
    if isinstance(column, NumericColumn):
        return number_texts(column)
    return as_categorical(name, column)


def cycle_of(argument: float | str) -> tuple[TimePart, float]:
    """Return what takes the place in a cycle from numbers, and the cycle's length.

    Args:
        argument: of the encoder ``cyclic``: a period, or a part of a time.
    """
    if isinstance(argument, str):
        return _PARTS[argument], float(TIME_PARTS[argument])
    return (lambda values: np.mod(values, argument)), float(argument)


def _days(seconds: FloatArray) -> np.ndarray[tuple[int], np.dtype[np.datetime64]]:
    return np.floor(seconds / _DAY).astype(np.int64).astype("datetime64[D]")


def _month(seconds: FloatArray) -> FloatArray:
    months = _days(seconds).astype("datetime64[M]").astype(np.int64)
    return (months % 12 + 1).astype(np.float64)


def _day_of_year(seconds: FloatArray) -> FloatArray:
    days = _days(seconds)
    first = days.astype("datetime64[Y]").astype("datetime64[D]")
    return np.asarray((days - first).astype(np.float64) + 1)


def _where_present(part: TimePart) -> TimePart:
    """Let NaN pass: it has no date."""

    def compute(seconds: FloatArray) -> FloatArray:
        is_missing = np.isnan(seconds)
        places = part(np.where(is_missing, 0.0, seconds))
        return np.where(is_missing, np.nan, places)

    return compute


_PARTS: Final[Mapping[str, TimePart]] = {
    "hour": lambda seconds: np.floor(np.mod(seconds, _DAY) / 3600),
    "minute": lambda seconds: np.floor(np.mod(seconds, 3600) / 60),
    "weekday": lambda seconds: np.mod(np.floor(seconds / _DAY) + _EPOCH_WEEKDAY, 7),
    "month": _where_present(_month),
    "day-of-year": _where_present(_day_of_year),
}
"""As in SQL: hour 0-23, minute 0-59, month 1-12, Sunday 0, day of the year 1-366."""
