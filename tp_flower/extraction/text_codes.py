"""Number the distinct texts of a column that is read in batches.

Each batch brings its own distinct texts, found by Arrow; a row is kept as the position
of its text in the list of all batches' texts. At the end DuckDB, which spills to disk
where it must, gives every text of the list its number: rows are not read again.

Notation
    e   texts in the list: the sum over the batches of their distinct texts
    k   distinct texts
"""

from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tp_flower.duckdb_engine import lock, new_engine, quote_text, shared_cursor

CodeArray = npt.NDArray[np.int32]

MISSING: Final = -1
BUFFERED: Final = 1 << 16
"""Texts that wait to be written to DuckDB together."""
MEMORY: Final = "256MB"


class TextLists:
    """The lists of several columns.

    Args:
        columns: how many.
        spill: a folder for what does not fit into memory, of which DuckDB makes and
            removes a folder of its own; None for memory alone.
    """

    def __init__(self, columns: int, spill: Path | None) -> None:
        self._connection = _spilling(spill) if spill else shared_cursor()
        self._waiting: list[list[pa.Array]] = [[] for _ in range(columns)]
        self._written = [0] * columns
        self._pending = [0] * columns
        for column in range(columns):
            self._connection.execute(f"CREATE TEMP TABLE list_{column} (t VARCHAR)")

    def add(self, column: int, texts: pa.Array) -> CodeArray:
        """Add a batch; return each row's position in the list, -1 where it is NULL."""
        encoded = texts.dictionary_encode()
        first = self._written[column] + self._pending[column]
        self._waiting[column].append(encoded.dictionary)
        self._pending[column] += len(encoded.dictionary)
        if self._pending[column] >= BUFFERED:
            self._write(column)
        positions: CodeArray = encoded.indices.fill_null(MISSING - first).to_numpy(
            zero_copy_only=False
        ) + np.int32(first)
        return positions

    def number(self, column: int) -> tuple[CodeArray, pa.Array]:
        """Return the code of every text in the list (e,), and the k sorted texts."""
        self._write(column)
        execute, name = self._connection.execute, f"list_{column}"
        execute(
            f"CREATE TEMP TABLE distinct_{column} AS "
            "SELECT t, row_number() OVER (ORDER BY t) - 1 AS code "
            f"FROM (SELECT DISTINCT t FROM {name})"
        )
        codes = np.empty(self._written[column], np.int32)
        pairs = self._connection.sql(
            f"SELECT {name}.rowid AS position, CAST(code AS INTEGER) AS code "
            f"FROM {name} JOIN distinct_{column} USING (t)"
        ).to_arrow_reader(BUFFERED)
        for batch in pairs:  # a join keeps no order
            codes[batch["position"].to_numpy()] = batch["code"].to_numpy()
        texts = (
            self._connection.sql(f"SELECT t FROM distinct_{column} ORDER BY code")
            .to_arrow_table()["t"]
            .combine_chunks()
        )
        execute(f"DROP TABLE {name}")
        execute(f"DROP TABLE distinct_{column}")
        return codes, texts

    def close(self) -> None:
        """Forget the lists."""
        self._connection.close()

    def _write(self, column: int) -> None:
        if not self._pending[column]:
            return
        table = pa.table({"t": pa.chunked_array(self._waiting[column])})
        self._connection.register("waiting", table)
        self._connection.execute(f"INSERT INTO list_{column} SELECT t FROM waiting")
        self._connection.unregister("waiting")
        self._written[column] += self._pending[column]
        self._pending[column] = 0
        self._waiting[column].clear()


def _spilling(folder: Path) -> duckdb.DuckDBPyConnection:
    """An engine of its own, which uses little memory and the shard's own folder."""
    connection = new_engine()
    connection.execute(f"SET memory_limit = '{MEMORY}'")
    spill = quote_text(str(folder / "duckdb-spill"))
    connection.execute(f"SET temp_directory = {spill}")
    lock(connection)
    return connection
