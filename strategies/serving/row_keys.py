"""The rows of the label table by their keys, as requests name them.

Notation:
    n  rows of the label table      N  joined rows      k  keys of a request
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.types as pt

from strategies.serving.request_queue import (
    KeyValue,
    MalformedError,
    RowKey,
    UnknownKeyError,
)
from tp_flower.arrays import IntArray

MOST_LISTED: Final = 10  # of unknown keys


class RowKeys:
    """The rows of the label table and their joined rows, by key.

    >>> keys = RowKeys(pa.table({"id": [7, 8, 7]}), np.array([0, 0, 2]))
    >>> [rows.tolist() for rows in keys.joined_rows([{"id": 7}, {"id": 8}])]
    [[0, 1, 2], []]
    """

    def __init__(self, columns: pa.Table, label_rows: IntArray) -> None:
        """Index rows.

        Args:
            columns: of the row key, of n rows.
            label_rows: (N,) ascending, the row behind each joined row.
        """
        self._columns = columns
        # by column, its values, and the pairs of the number so far and a value; an
        # index of several columns would do the same in ten times the time
        self._levels: list[tuple[pd.Index, pd.Index]] = []
        numbers = np.zeros(columns.num_rows, np.int64)
        for column in columns.columns:
            of_rows = column.to_pandas()
            values = pd.Index(of_rows).unique()
            pairs = numbers * len(values) + values.get_indexer(of_rows)
            numbers, distinct = pd.factorize(pairs)
            self._levels.append((values, pd.Index(distinct)))
        self._rows = np.argsort(numbers, kind="stable")
        keys = int(numbers.max(initial=-1)) + 1
        self._starts = np.searchsorted(numbers[self._rows], np.arange(keys + 1))
        self._label_rows = label_rows

    def joined_rows(self, keys: Sequence[RowKey]) -> list[IntArray]:
        """Return by key the positions of its joined rows, ascending.

        Raises:
            MalformedError: a key has other columns, or values of another type.
            UnknownKeyError: no row has one of the keys.
        """
        numbers = self._numbers_of(self._read(keys))
        if unknown := np.flatnonzero(numbers < 0).tolist():
            raise UnknownKeyError(
                "no row of the label table has "
                + ", ".join(f"keys[{at}]" for at in unknown[:MOST_LISTED])
                + ("" if len(unknown) <= MOST_LISTED else " and others")
            )
        rows_of_requests = []
        for number in numbers.tolist():
            rows = self._rows[self._starts[number] : self._starts[number + 1]]
            first = np.searchsorted(self._label_rows, rows, side="left")
            last = np.searchsorted(self._label_rows, rows, side="right")
            spans = [np.arange(*span) for span in zip(first, last, strict=True)]
            rows_of_requests.append(np.concatenate(spans))
        return rows_of_requests

    def _numbers_of(self, columns: pa.Table) -> IntArray:
        """Return the number of each of some keys (k,); -1 for one that no row has."""
        numbers = np.zeros(columns.num_rows, np.int64)
        for (values, pairs), column in zip(self._levels, columns.columns, strict=True):
            codes = values.get_indexer(column.to_pandas())
            is_known = (numbers >= 0) & (codes >= 0)
            positions = pairs.get_indexer(numbers * len(values) + codes)
            numbers = np.where(is_known, positions, -1)
        return numbers

    def _read(self, keys: Sequence[RowKey]) -> pa.Table:
        """Return the columns of a request's keys, (k,) each."""
        names = self._columns.column_names
        for at, key in enumerate(keys):
            if key.keys() != set(names):
                raise MalformedError(
                    f"keys[{at}] has {_listed(key)}, and the row key is "
                    f"{_listed(names)}"
                )
        return pa.table(
            {
                name: self._read_column(name, [key[name] for key in keys])
                for name in names
            }
        )

    def _read_column(self, name: str, values: Sequence[KeyValue]) -> pa.Array:
        """Return a column of a request's keys, in the type of the rows'."""
        kind = self._columns.schema.field(name).type
        for at, value in enumerate(values):
            if not _fits(value, kind):
                raise MalformedError(
                    f"keys[{at}].{name} is {value!r}, and the column has {kind}"
                )
        try:
            return pa.array(values).cast(kind)
        except (pa.ArrowException, OverflowError) as error:
            raise MalformedError(f"keys[..].{name}: {error}") from None


def _fits(value: KeyValue, kind: pa.DataType) -> bool:
    """Return whether a value of JSON can be one of a column: times are texts there."""
    if pt.is_boolean(kind):
        return isinstance(value, bool)
    if pt.is_integer(kind):
        return type(value) is int
    if pt.is_floating(kind):
        return type(value) in (int, float)
    return isinstance(value, str)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no column"
