"""Predictions: from the scores of joined rows to a Parquet file.

A joined row is identified by its row of the label table, and by its number among that
row's joined rows (``occurrence``): a many-to-many join makes several.

docs/how-to/predict.md lists the columns of the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tp_flower.arrays import BoolArray, FloatArray, IntArray, blocks
from tp_flower.files import whole_file
from tp_flower.objectives import Response
from tp_flower.objectives.kmeans import DISTANCE
from tp_flower.objectives.survival import HAZARD_RATIO

PREDICTIONS_FILE: Final = "predictions.parquet"
OCCURRENCE: Final = "occurrence"
ROW: Final = "row"
ROW_HASH: Final = "row_key"
_SCORE = "score"
_PREDICTION = "prediction"
_PARTIAL = "is_partial"
RESERVED: Final = frozenset(
    {ROW, ROW_HASH, OCCURRENCE, _SCORE, _PREDICTION, _PARTIAL, DISTANCE, HAZARD_RATIO}
)
"""Names that no column of a row key can have."""
_RUN_DIGITS: Final = 8
TABLE_ROWS: Final = 1 << 20
"""Joined rows whose predictions are made at a time."""


@dataclass(frozen=True)
class Scored:
    """Joined rows with their scores (N, d_c).

    Attributes:
        rows: (N,) ascending, the row of the label table behind each joined row.
        is_partial: (N,), rows in which a mean replaces some table's score.
    """

    rows: IntArray
    scores: FloatArray
    is_partial: BoolArray

    def occurrences(self, block: slice) -> IntArray:
        """Return the numbers of a block's rows among the joined rows of each."""
        rows = self.rows[block]
        numbers = occurrences(rows)
        first = np.searchsorted(self.rows, rows[:1])
        numbers[rows == rows[:1]] += block.start - first
        return numbers


def class_values(response: Response) -> pa.Array:
    """Return the classes as values of the label's type, (k,)."""
    is_whole = all(name.lstrip("-").isdecimal() for name in response.classes)
    number = pa.int64() if is_whole else pa.float64()
    types = {"text": pa.string(), "boolean": pa.bool_(), "number": number}
    return pa.array(response.classes).cast(types[response.kind])


def occurrences(rows: IntArray) -> IntArray:
    """Number the joined rows of each row from 0, (N,); equal rows are adjacent.

    >>> occurrences(np.array([0, 2, 2, 2, 5])).tolist()
    [0, 0, 1, 2, 0]
    """
    first_rows = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])[: len(rows)])
    return np.arange(len(rows)) - np.repeat(
        first_rows, np.diff(np.append(first_rows, len(rows)))
    )


def prediction_table(
    name_rows: Callable[[IntArray], pa.Array], scored: Scored, response: Response
) -> pa.Table:
    """Return the predictions of joined rows.

    They are made block by block: what is needed on the way would take as much memory
    as the predictions.

    Args:
        name_rows: returns the names (k,) of some rows of the label table (k,).
        scored: the joined rows (N,).
        response: the meaning of their scores.
    """
    spans = list(blocks(len(scored.rows), TABLE_ROWS)) or [slice(0, 0)]
    return pa.concat_tables(
        _predictions(name_rows, scored, response, span) for span in spans
    )


def _predictions(
    name_rows: Callable[[IntArray], pa.Array],
    scored: Scored,
    response: Response,
    block: slice,
) -> pa.Table:
    """Return the predictions of a block of joined rows."""
    scores = scored.scores[block]
    columns = {
        ROW_HASH: name_rows(scored.rows[block]),
        OCCURRENCE: pa.array(scored.occurrences(block)),
    }
    for k in range(response.outputs):
        name = _SCORE
        if response.outputs > 1:
            name = f"{_SCORE}.{response.classes[k]}"
        columns[name] = pa.array(scores[:, k])
    predicted = response.predict(scores)
    if response.classes:
        codes = pa.array(predicted.astype(np.int64))
        columns[_PREDICTION] = class_values(response).take(codes)
    else:
        columns[_PREDICTION] = pa.array(predicted)
    details = response.details(scores)
    columns |= {name: pa.array(values) for name, values in details.items()}
    columns[_PARTIAL] = pa.array(scored.is_partial[block])
    return pa.table(columns)


def row_keys_folder(state: Path, run: str) -> Path:
    """Return where a site keeps the row keys of a run's predictions.

    Args:
        state: the site's state folder.
        run: name of the run, of which the first digits are enough.
    """
    return state / "predictions" / f"row-keys-{run[:_RUN_DIGITS]}"


def with_row_keys(predictions: pa.Table, row_keys: pa.Table) -> pa.Table:
    """Return predictions with the columns of their row keys in front.

    Args:
        predictions: with the hash of each joined row's row key.
        row_keys: the hash, the row, and the columns of the row key of each row.
    """
    rows = pc.index_in(predictions[ROW_HASH], value_set=row_keys[ROW_HASH])
    columns = row_keys.drop_columns([ROW_HASH, ROW]).take(rows)
    return pa.table(
        [*columns.columns, *predictions.columns],
        [*columns.column_names, *predictions.column_names],
    )


def write_predictions(
    table: pa.Table, path: Path, metadata: Mapping[str, str], mode: int
) -> None:
    """Write predictions to a file; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file_metadata = {f"tp_flower.{key}": text for key, text in metadata.items()}
    with whole_file(path, is_durable=True, mode=mode) as file:
        pq.write_table(table.replace_schema_metadata(file_metadata), file)
