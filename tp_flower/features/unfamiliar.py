"""Values unlike those that an encoder was fitted to.

An encoder takes any value: of a category without a column it writes zeros, and a number
however far from the mean it scales. A model then says something of rows unlike those
that it was trained on, and nothing in its scores shows it.

Notation:
    n  rows of the shard        m  rows to encode
"""

from collections.abc import Callable, Iterator
from typing import Final, TypeGuard

import numpy as np

from tp_flower.arrays import BoolArray, IntArray
from tp_flower.features.columns import FeatureColumn, as_numeric
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.encodings import (
    LARGEST,
    CategoryEncoding,
    FeatureEncoding,
    NumberEncoding,
    SquareEncoding,
    categories_for,
)

FAR: Final = 30.0
"""Units of the encoder, such as standard deviations, from its centre."""
MOST_FAR: Final = 1.0 / FAR**2
"""Of the rows that a mean and a deviation are of: no more are so far (Chebyshev)."""
MOST_UNSEEN: Final = 0.05
"""Of the rows with a value. New categories are few from one month to the next."""

ReadColumn = Callable[[str], FeatureColumn]
"""Returns the column of a feature, (n,)."""


def unfamiliar_features(
    encoder: SiteEncoder, read: ReadColumn, rows: IntArray
) -> Iterator[str]:
    """Yield a text per feature of which many values are unlike those of the fit.

    Features whose encoders were declared, or put rare categories into one column, say
    nothing of what they were fitted to.

    Args:
        encoder: of the rows.
        read: returns their features.
        rows: those that are encoded, (m,).
    """
    encodings = encoder.encoder.encodings
    numbers = [item for item in encodings if _is_number(item)]
    # categories besides a number are numbers, which need not be listed
    names = {item.name for item in numbers}
    for number in numbers:
        if not _is_fitted(number):
            continue
        is_far = _is_far(number, read(number.name))[rows]
        if np.count_nonzero(is_far) > MOST_FAR * len(rows):
            yield _text(number.name, is_far, "a number far outside of those")
    for encoding in encodings:
        if not isinstance(encoding, CategoryEncoding) or encoding.name in names:
            continue
        if encoding.has_other:
            continue
        is_present, is_unseen = _unseen(encoder, encoding, read(encoding.name), rows)
        if np.count_nonzero(is_unseen) > MOST_UNSEEN * np.count_nonzero(is_present):
            yield _text(encoding.name, is_unseen, "a category that is none of those")


def _is_number(encoding: FeatureEncoding) -> TypeGuard[NumberEncoding]:
    """Whether an encoding is of a number itself, and not of its square."""
    return isinstance(encoding, NumberEncoding) and not isinstance(
        encoding, SquareEncoding
    )


def _text(name: str, is_odd: BoolArray, difference: str) -> str:
    return (
        f"column {name!r}: {np.count_nonzero(is_odd):,} of {len(is_odd):,} rows have "
        f"{difference} that its encoder was fitted to"
    )


def _is_fitted(encoding: NumberEncoding) -> bool:
    """Whether centre and scale are those of rows: neither declared nor left out."""
    is_scaled = (encoding.centre, encoding.scale) != (0.0, 1.0)
    return is_scaled and encoding.limit == LARGEST and not encoding.of_length


def _is_far(encoding: NumberEncoding, column: FeatureColumn) -> BoolArray:
    """Return which rows have a number far from the centre, (n,)."""
    with np.errstate(over="ignore"):
        distances = np.abs(as_numeric(encoding.name, column).values - encoding.centre)
    is_far: BoolArray = distances > FAR * encoding.scale
    return is_far


def _unseen(
    encoder: SiteEncoder,
    encoding: CategoryEncoding,
    column: FeatureColumn,
    rows: IntArray,
) -> tuple[BoolArray, BoolArray]:
    """Return which of some rows have a category, and which one without a column."""
    categories = categories_for(encoding, column)
    codes = categories.codes[rows]
    is_present = codes >= 0
    columns = encoder.find(encoding, categories.texts).hot
    return is_present, is_present & (columns[codes] < 0)
