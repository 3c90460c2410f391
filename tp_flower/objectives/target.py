"""The target: the label's columns on some rows, and how to read them.

Nobody but an objective reads the columns as they are: a family decides how many it has,
and which meaning. Others ask for the number or the class of a row. Of survival the
columns are times, events as 0 and 1, and perhaps entries and strata; a time is the
number of a row.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray, chosen_rows, class_counts
from tp_flower.objectives.noise import LabelNoise

LABEL: Final = "label"
TIME: Final = "time"
EVENT: Final = "event"
ENTRY: Final = "entry"
STRATA: Final = "strata"
MAX_CLASSES: Final = 1000
LARGEST_LABEL: Final = 1e18
"""Sites compute with float32, the server with squares of residuals."""
Rows = slice | npt.NDArray[Any]
"""A slice of rows, a mask of them, or their positions."""


@dataclass(frozen=True, eq=False)
class Target:
    """The label of N rows: a number, or the index of a class.

    Attributes:
        stored: the ``columns``, (N, k), as they are kept: those of classes a byte each.
            One column; none where a query has no label, or the labels stay at their
            sites.
        classes: the names of the classes; empty for numbers. Of a clustering, which has
            no column, they are the names of its clusters.
        kind: the label's type at the sites, "number", "boolean" or "text".
        noise: the noise that the sites have added; None for labels in the clear.
        names: the meaning of each column, (k,).
    """

    stored: AnyArray
    classes: tuple[str, ...] = ()
    kind: str = "number"
    noise: LabelNoise | None = None
    names: tuple[str, ...] = (LABEL,)

    @classmethod
    def of(
        cls,
        values: npt.ArrayLike,
        classes: tuple[str, ...] = (),
        kind: str = "number",
        noise: LabelNoise | None = None,
    ) -> Self:
        """Return the target of numbers or class indices (N,), one column.

        >>> Target.of(np.array([1.0, 0.0]), ("no", "yes")).columns.shape
        (2, 1)
        """
        columns = np.asarray(values, np.float64)[:, None]
        return cls(_compact(columns) if classes else columns, classes, kind, noise)

    @classmethod
    def without_label(cls, rows: int, clusters: tuple[str, ...] = ()) -> Self:
        """Return the target of rows that have no label, (rows, 0)."""
        return cls(np.zeros((rows, 0)), clusters)

    def __len__(self) -> int:
        """Return N."""
        return len(self.stored)

    @property
    def has_label(self) -> bool:
        """Whether the rows' labels are here, not at their sites or nowhere."""
        return bool(self.stored.shape[1])

    @property
    def columns(self) -> FloatArray:
        """The label's columns, (N, k), float64."""
        return self.stored.astype(np.float64, copy=False)

    def column(self, name: str) -> FloatArray | None:
        """Return the column of a name, (N,); None if there is none.

        >>> died = Target(np.array([[3.0, 1.0]]), names=(TIME, EVENT))
        >>> died.column(EVENT).tolist(), died.column(ENTRY)
        ([1.0], None)
        """
        return self.column_named(name) if name in self.names else None

    def column_named(self, name: str) -> FloatArray:
        """Return the column of a name, (N,), which it has."""
        values = self.stored[:, self.names.index(name)]
        return values.astype(np.float64, copy=False)

    @property
    def numbers(self) -> FloatArray:
        """The number of each row, or the index of its class, (N,)."""
        return self.stored[:, 0].astype(np.float64, copy=False)

    @property
    def codes(self) -> npt.NDArray[np.intp]:
        """The index of each row's class, (N,)."""
        return self.stored[:, 0].astype(np.intp)

    @property
    def class_counts(self) -> FloatArray:
        """How many rows each class has, (classes,)."""
        return class_counts(self.numbers, len(self.classes))

    def select(self, rows: Rows) -> Self:
        """Return the target of some rows."""
        return self.with_columns(chosen_rows(self.stored, rows))

    def with_columns(self, stored: AnyArray) -> Self:
        """Return a target of other rows, which is read as this one is."""
        return replace(self, stored=stored)


def _compact(columns: FloatArray) -> AnyArray:
    """Return the indices of classes, a byte each if all of them fit."""
    # comparisons with NaN, of a row that has no class, are false
    if not ((columns >= 0.0) & (columns <= np.iinfo(np.uint8).max)).all():
        return columns
    compact = columns.astype(np.uint8)
    return compact if np.array_equal(compact, columns) else columns
