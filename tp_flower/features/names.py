"""The names of a table's encoded columns, as the owner of its rows may show them.

Most follow from the query and the encoders: ``age``, ``age is missing``, and declared
categories. A category that was counted has the text of some rows, and the ends of bins
the smallest and the largest value: a site names these from its own rows, as far as it
may, and leaves others to their number.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from tp_flower.features.columns import FeatureColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.encodings import (
    ABSENT,
    OTHER,
    BinEncoding,
    CategoryEncoding,
    CodeEncoding,
    FeatureEncoding,
    HashEncoding,
    ListedEncoding,
    categories_for,
)
from tp_flower.protocol.fields import MOST_OF_NAME

UNNAMED: Final = ""
"""In place of a name: the column has its number alone."""


@dataclass(frozen=True)
class ColumnNames:
    """The names of encoded columns, `UNNAMED` for columns without one.

    Attributes:
        declared: those that follow from the query and the encoders, d in all.
        of_values: those that are made of values of rows, d in all.
    """

    declared: tuple[str, ...]
    of_values: tuple[str, ...]

    @property
    def merged(self) -> tuple[str, ...]:
        """Every column's name, d in all."""
        pairs = zip(self.of_values, self.declared, strict=True)
        return tuple(one or other for one, other in pairs)


def name_columns(
    encoder: SiteEncoder,
    rows_of: Callable[[str], FeatureColumn],
    least_rows: int | None,
) -> ColumnNames:
    """Return the names of a table's encoded columns.

    Args:
        encoder: of the table.
        rows_of: returns a feature's column of the rows that train, by its name.
        least_rows: that a category must have to be named; None where no name may be
            made of values.
    """
    declared: list[str] = []
    of_values: list[str] = []
    for encoding in encoder.encoder.encodings:
        unnamed = [UNNAMED] * len(encoding.feature_names)
        if not _tells_values(encoding):
            declared += _declared_names(encoding)
            of_values += unnamed
            continue
        declared += unnamed
        if least_rows is None:
            of_values += unnamed
        elif isinstance(encoding, CategoryEncoding):
            column = rows_of(encoding.name)
            of_values += _category_names(encoder, encoding, column, least_rows)
        else:
            # the edges of bins follow from the ends of the range: of single rows
            of_values += unnamed if least_rows > 1 else encoding.feature_names
    column_names = ColumnNames(tuple(declared), tuple(of_values))
    times = Counter(column_names.merged)

    def shown(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            name if times[name] == 1 and is_showable(name) else UNNAMED
            for name in names
        )

    return ColumnNames(shown(declared), shown(of_values))


def is_showable(name: str) -> bool:
    """Return whether a name fits a table and hides none of its characters."""
    return len(name) <= MOST_OF_NAME and name.isprintable()


def _tells_values(encoding: FeatureEncoding) -> bool:
    """Return whether the names of an encoding's columns are made of values of rows."""
    # a column of codes is called as its feature
    is_category = isinstance(encoding, CategoryEncoding)
    is_category = is_category and not isinstance(encoding, CodeEncoding)
    return is_category or isinstance(encoding, BinEncoding)


def _declared_names(encoding: FeatureEncoding) -> list[str]:
    """Return the names that follow from the query and the encoder."""
    if isinstance(encoding, HashEncoding):
        # values share a column, which is called by none of them
        return [UNNAMED] * len(encoding.feature_names)
    if isinstance(encoding, ListedEncoding):
        return [_named(encoding, text) for text in encoding.categories]
    return list(encoding.feature_names)


def _named(encoding: CategoryEncoding | ListedEncoding, text: str) -> str:
    """Return the name of a category's column; 2 for the number 2.0."""
    category = text.removesuffix(".0") if encoding.of_number else text
    return f"{encoding.name}={category}"


def _category_names(
    encoder: SiteEncoder,
    encoding: CategoryEncoding,
    column: FeatureColumn,
    least_rows: int,
) -> list[str]:
    """Return the names of categories that enough rows of the column have.

    The columns of missing and of all other values are named by the same rule. Rows are
    counted by their own value: who has fitted the encoder may have chosen which values
    share a column.
    """
    values = categories_for(encoding, column)
    targets = encoder.find(encoding, values.texts).hot
    of_texts = targets[:-1]
    codes = values.codes[~values.is_missing]
    rows = np.bincount(codes, minlength=len(of_texts))
    listed = len(encoding.hashes)
    names = [UNNAMED] * len(encoding.feature_names)
    is_named = (of_texts >= 0) & (of_texts < listed) & (rows >= max(least_rows, 1))
    texts = values.texts.take(pa.array(np.flatnonzero(is_named))).to_pylist()
    for text, position in zip(texts, of_texts[is_named].tolist(), strict=True):
        names[position] = _named(encoding, text)
    missing = values.rows - len(codes)
    others = int(rows[of_texts == listed].sum())
    rows_of_rest = {
        ABSENT: missing,
        OTHER: others + missing * (encoding.fill == listed),
    }
    for position, name in enumerate(encoding.feature_names):
        rest = name.removeprefix(f"{encoding.name}=")
        if rows_of_rest.get(rest, 0) >= max(least_rows, 1):
            names[position] = name
    return names
