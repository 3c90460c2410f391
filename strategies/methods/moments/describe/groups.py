"""Groups of joined rows, and sums over them: moments with the groups' columns.

Notation:
    D  columns of all tables        c  groups        r  categories
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from tp_flower.arrays import FloatArray, IndexArray, IntArray
from tp_flower.features.spec import EncoderSpec
from tp_flower.methods.moments.describe.encoders import category_names
from tp_flower.methods.moments.solve import JoinedMoments

ALL: Final = "all"
MISSING: Final = "(missing)"
OTHER: Final = "(other)"


def whole(sums: FloatArray) -> IntArray:
    """Return sums of whole numbers, but for rounding, as whole numbers."""
    numbers: IntArray = np.rint(sums).astype(np.int64)
    return numbers


class Categories(NamedTuple):
    """The categories of a feature, and the columns that are 1 in their rows, (D, r).

    Attributes:
        present: the column of the rows that have a value, (D, 1).
    """

    names: Sequence[str]
    columns: FloatArray
    present: FloatArray


class RowGroups(NamedTuple):
    """Disjoint groups of joined rows, by their columns, (D, c)."""

    names: Sequence[str]
    columns: FloatArray

    @property
    def compared(self) -> slice:
        """Those that tests compare: not the rows without a group."""
        return slice(len(self.names) - (MISSING in self.names[-1:]))


@dataclass(frozen=True, eq=False)
class DescribedRows:
    """The joined rows of a run, as their moments describe them.

    Attributes:
        positions: in the moments, of the columns of each feature that has any.
        specs: the encoder of every feature, ``table.name``, in the query's order.
        group: the feature whose categories are the groups; "" without groups.
    """

    moments: JoinedMoments
    positions: Mapping[str, IndexArray]
    specs: Mapping[str, EncoderSpec]
    group: str = ""

    @property
    def joined_rows(self) -> int:
        """N."""
        return round(self.moments.joined_rows)

    @cached_property
    def every(self) -> FloatArray:
        """The column of ones, (D, 1)."""
        return self.unit(np.array([self.moments.intercept]))

    def unit(self, positions: IndexArray) -> FloatArray:
        """Return columns of the moments, each as a combination of all, (D, m)."""
        columns = np.zeros((len(self.moments.matrix), len(positions)))
        columns[positions, np.arange(len(positions))] = 1.0
        return columns

    def columns_of(self, feature: str) -> IndexArray:
        """Return the positions of a feature's columns; none of one without values."""
        return self.positions.get(feature, np.zeros(0, np.intp))

    def sums(self, columns: FloatArray, groups: FloatArray) -> FloatArray:
        """Return the sums of columns (D, m) over the rows of groups (D, c), (m, c)."""
        sums: FloatArray = columns.T @ (self.moments.matrix @ groups)
        return sums

    def counts(self, columns: FloatArray, groups: FloatArray) -> IntArray:
        """Return the sums of columns that are 0 or 1, (m, c)."""
        sums = np.maximum(self.sums(columns, groups), 0.0)
        return whole(sums)

    def rows_of(self, groups: FloatArray) -> IntArray:
        """Return the number of rows of groups (D, c), (c,)."""
        return self.count(self.every, groups)

    def count(self, column: FloatArray, groups: FloatArray) -> IntArray:
        """Return the sums of one column (D, 1) that is 0 or 1, (c,)."""
        count: IntArray = self.counts(column, groups)[0]
        return count

    def categories(self, feature: str) -> Categories:
        """Return a feature's categories.

        Values that no column is of are a category of their own.
        """
        spec = self.specs[feature]
        positions = self.columns_of(feature)
        if not len(positions):
            return Categories([], self.unit(positions), np.zeros_like(self.every))
        if not spec.present:
            columns = self.unit(positions)
            names = category_names(spec, len(positions))
            return Categories(names, columns, columns.sum(axis=1, keepdims=True))
        columns = self.unit(positions[:-1])
        present = self.unit(positions[-1:])
        names = category_names(spec, len(positions) - 1)
        rest = present - columns.sum(axis=1, keepdims=True)
        return Categories(*self._with_rest(names, columns, OTHER, rest), present)

    @cached_property
    def groups(self) -> RowGroups:
        """The groups, of which rows without a value are one; else all rows."""
        if not self.group:
            return RowGroups([ALL], self.every)
        names, columns, present = self.categories(self.group)
        rest = self.every - present
        return RowGroups(*self._with_rest(names, columns, MISSING, rest))

    def _with_rest(
        self, names: Sequence[str], columns: FloatArray, name: str, rest: FloatArray
    ) -> tuple[Sequence[str], FloatArray]:
        """Return categories with the one of the rest, (D, 1), if it has rows."""
        if not self.rows_of(rest).any():
            return names, columns
        return [*names, name], np.concatenate([columns, rest], axis=1)
