"""The values of a feature at which partial dependence is told.

None is a single row's: a number is the mean of as many rows as a category needs, or one
that as many rows have.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from tp_flower.features.columns import (
    CategoricalColumn,
    FeatureColumn,
    NumericColumn,
)

MOST_NUMBERS: Final = 10
MOST_CATEGORIES: Final = 20


@dataclass(frozen=True, eq=False)
class Grid:
    """Some values of a feature.

    Attributes:
        column: the values, as rows have them, (g,).
        categories: their texts; () of numbers.
    """

    column: NumericColumn | CategoricalColumn
    categories: tuple[str, ...] = ()


def grid_of(column: FeatureColumn, fewest: int) -> Grid | None:
    """Return values of a feature, each of ``fewest`` rows; None of a vector.

    Of numbers these are all, or where there are many the means of tenths of the rows;
    of categories the most frequent ones.

    >>> grid_of(NumericColumn(np.array([1.0, 1.0, 2.0, np.nan])), 2).column.values
    array([1.])
    >>> grid_of(NumericColumn(np.arange(24.0)), 12).column.values
    array([ 5.5, 17.5])
    >>> column = CategoricalColumn(np.array([0, 1, 1, -1], np.int32), ("a", "b"))
    >>> grid_of(column, 2).categories
    ('b',)
    """
    if isinstance(column, CategoricalColumn):
        codes = column.codes[column.codes >= 0]
        counts = np.bincount(codes, minlength=len(column.texts))
        order = np.argsort(-counts, kind="stable")[:MOST_CATEGORIES]
        chosen = order[counts[order] >= fewest].astype(np.int32)
        texts = tuple(column.texts[int(code)].as_py() for code in chosen)
        return Grid(CategoricalColumn(chosen, column.texts), texts)
    if not isinstance(column, NumericColumn):
        return None
    numbers = np.sort(column.values[np.isfinite(column.values)])
    distinct, counts = np.unique(numbers, return_counts=True)
    if len(distinct) <= MOST_NUMBERS:
        return Grid(NumericColumn(distinct[counts >= fewest]))
    parts = min(MOST_NUMBERS, len(numbers) // fewest)
    means = [part.mean() for part in np.array_split(numbers, parts)] if parts else []
    return Grid(NumericColumn(np.unique(means)))
