"""Rows of tables behind joined rows, made by hand."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.rows import JoinedRows


def table_rows(row_of: Sequence[int] | npt.NDArray[np.integer], rows: int) -> TableRows:
    """The row of a table behind each joined row, -1 for none."""
    return TableRows(np.array(row_of, np.int32), rows)


def one_to_one(
    rows: int, vectors: Mapping[str, npt.NDArray[np.floating]] | None = None
) -> JoinedRows:
    """Joined rows with vectors, which are the rows of table ``t``, each once."""
    mapping = TableMapping({"t": table_rows(range(rows), rows)})
    return JoinedRows(mapping, dict(vectors or {}))
