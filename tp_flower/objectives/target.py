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

from tp_flower.arrays import FloatArray, class_counts
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
        columns: (N, k), float64: one column; none where a query has no label, or the
            labels stay at their sites.
        classes: the names of the classes; empty for numbers. Of a clustering, which has
            no column, they are the names of its clusters.
        kind: the label's type at the sites, "number", "boolean" or "text".
        noise: the noise that the sites have added; None for labels in the clear.
        names: the meaning of each column, (k,).
    """

    columns: FloatArray
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
        return cls(np.asarray(values, np.float64)[:, None], classes, kind, noise)

    @classmethod
    def without_label(cls, rows: int, clusters: tuple[str, ...] = ()) -> Self:
        """Return the target of rows that have no label, (rows, 0)."""
        return cls(np.zeros((rows, 0)), clusters)

    def __len__(self) -> int:
        """Return N."""
        return len(self.columns)

    @property
    def has_label(self) -> bool:
        """Whether the rows' labels are here, not at their sites or nowhere."""
        return bool(self.columns.shape[1])

    def column(self, name: str) -> FloatArray | None:
        """Return the column of a name, (N,); None if there is none.

        >>> died = Target(np.array([[3.0, 1.0]]), names=(TIME, EVENT))
        >>> died.column(EVENT).tolist(), died.column(ENTRY)
        ([1.0], None)
        """
        return self.column_named(name) if name in self.names else None

    def column_named(self, name: str) -> FloatArray:
        """Return the column of a name, (N,), which it has."""
        values: FloatArray = self.columns[:, self.names.index(name)]
        return values

    @property
    def numbers(self) -> FloatArray:
        """The number of each row, or the index of its class, (N,)."""
        values: FloatArray = self.columns[:, 0]
        return values

    @property
    def codes(self) -> npt.NDArray[np.intp]:
        """The index of each row's class, (N,)."""
        return self.numbers.astype(np.intp)

    @property
    def class_counts(self) -> FloatArray:
        """How many rows each class has, (classes,)."""
        return class_counts(self.numbers, len(self.classes))

    def select(self, rows: Rows) -> Self:
        """Return the target of some rows."""
        return self.with_columns(self.columns[rows])

    def with_columns(self, columns: FloatArray) -> Self:
        """Return a target of other rows, which is read as this one is."""
        return replace(self, columns=columns)
