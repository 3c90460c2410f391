"""Data frames as the rows of a shard, without the columns that DuckDB cannot read."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np
import pyarrow as pa

from tp_flower.duckdb_engine import shared_cursor
from tp_flower.sources.csv_columns import EARLY_ROWS

if TYPE_CHECKING:
    import pandas as pd

_CONVERSIONS: Final = {
    "PeriodDtype": ".dt.to_timestamp()",
    "SparseDtype": ".sparse.to_dense()",
    "LongDoubleDType": '.astype("float64")',
}
"""What makes a column of a type of pandas readable; ``.astype(str)`` makes any other.
"""
_INTEGERS: Final = {
    "int8": "TINYINT",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "uint8": "UTINYINT",
    "uint16": "USMALLINT",
    "uint32": "UINTEGER",
    "uint64": "UBIGINT",
}
PLAIN: Final = {
    **_INTEGERS,
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "bool": "BOOLEAN",
    "datetime64[s]": "TIMESTAMP_S",
    "datetime64[ms]": "TIMESTAMP_MS",
    "datetime64[us]": "TIMESTAMP",
    "datetime64[ns]": "TIMESTAMP_NS",
    "str": "VARCHAR",
    # of values that may be missing
    **{
        name.replace("i", "I").replace("u", "U"): kind
        for name, kind in _INTEGERS.items()
    },
    "Float32": "FLOAT",
    "Float64": "DOUBLE",
    "boolean": "BOOLEAN",
    "string": "VARCHAR",
}
"""Types that DuckDB reads whatever the values are, and its own for them: of texts, if
Arrow holds them.
"""


@dataclass(frozen=True)
class HostedFrame:
    """A data frame of this process.

    Attributes:
        unread: by its name, why no query can read a column.
        readable: positions of the other columns; None for all.
    """

    frame: "pd.DataFrame"
    unread: Mapping[str, str] = field(default_factory=dict)
    readable: tuple[int, ...] | None = None

    @property
    def rows(self) -> "pd.DataFrame":
        """The columns that can be read, with texts as names."""
        frame = self._readable_columns
        if all(isinstance(name, str) for name in frame.columns):
            return frame
        return frame.rename(columns=str)

    @property
    def _readable_columns(self) -> "pd.DataFrame":
        if self.readable is None:
            return self.frame
        return self.frame.iloc[:, list(self.readable)]

    @property
    def plain_types(self) -> dict[str, str] | None:
        """The DuckDB type of each column; None if only DuckDB can tell.

        It reads other types by their values, and renames columns that have one name.
        """
        kinds = self._readable_columns.dtypes
        types = {str(n): PLAIN[str(k)] for n, k in kinds.items() if _is_plain(k)}
        names = {name.casefold() for name in types if name}
        return types if len(names) == len(types) == len(kinds) else None

    def conversion(self, column: str) -> str:
        """Return what makes a column readable, in Python."""
        names = [*map(str, self.frame.columns)]
        position = names.index(column)
        dtype = type(self.frame.dtypes.iloc[position]).__name__
        cell = f"frame[{self.frame.columns[position]!r}]"
        return (
            f"write {cell} = {cell}{_CONVERSIONS.get(dtype, '.astype(str)')} before "
            "the run"
        )


def read_frame(value: object) -> "pd.DataFrame | None":
    """Return a data frame of pandas, polars or Arrow as one of pandas; None for others.

    Columns of Arrow keep their types, and integers that are missing stay missing.

    >>> frame = read_frame(pa.table({"n": [1, None]}))
    >>> frame.dtypes.to_dict()
    {'n': int64[pyarrow]}
    """
    import pandas as pd

    if isinstance(value, pd.DataFrame):
        return value.copy() if _runs_backwards(value) else value
    table = value.to_arrow() if hasattr(value, "to_arrow") else value
    if not hasattr(table, "__arrow_c_stream__"):
        return None
    frame: pd.DataFrame = pa.table(table).to_pandas(types_mapper=pd.ArrowDtype)
    return frame


def _runs_backwards(frame: "pd.DataFrame") -> bool:
    """Return whether a column is a view from its end, which DuckDB cannot read."""
    columns = (column for _, column in frame.items())
    arrays = (c.to_numpy() for c in columns if isinstance(c.dtype, np.dtype))
    return any(array.strides[0] < 0 for array in arrays)


def hosted_frame(frame: "pd.DataFrame") -> HostedFrame:
    """Return a frame with what is to be known of its columns."""
    with closing(shared_cursor()) as connection:
        if _is_readable(connection, frame):
            return HostedFrame(frame)
        positions = range(frame.shape[1])
        readable = tuple(
            k for k in positions if _is_readable(connection, frame.iloc[:, [k]])
        )
    hosted = HostedFrame(frame, readable=readable)
    reasons = {
        str(frame.columns[k]): f"is of pandas' type {_kind(frame.dtypes.iloc[k])}"
        for k in positions
        if k not in readable
    }
    return replace(
        hosted,
        unread={
            name: f"{reason}, which cannot be read: {hosted.conversion(name)}"
            for name, reason in reasons.items()
        },
    )


def _is_readable(connection: duckdb.DuckDBPyConnection, frame: "pd.DataFrame") -> bool:
    """Return whether DuckDB can read a frame's columns."""
    doubtful = [k for k, kind in enumerate(frame.dtypes) if not _is_plain(kind)]
    if not doubtful:
        return True
    try:
        connection.register("probe", frame.iloc[:, doubtful].rename(columns=str))
        # some objects are only found out when they are converted
        rows = f"SELECT * FROM probe LIMIT {EARLY_ROWS}"
        connection.execute(f"CREATE OR REPLACE TEMP TABLE readable AS {rows}")
    except duckdb.Error:
        return False
    return True


def _is_plain(dtype: Any) -> bool:
    """Return whether a type is one of ``PLAIN``; Python's own texts may be no text."""
    return str(dtype) in PLAIN and getattr(dtype, "storage", "pyarrow") == "pyarrow"


def _kind(dtype: Any) -> str:
    """Return a type's name without values, such as categories or a fill value."""
    if hasattr(dtype, "fill_value"):
        return f"Sparse[{dtype.subtype}]"
    if hasattr(dtype, "categories"):
        return f"category of {dtype.categories.dtype}"
    return str(dtype)
