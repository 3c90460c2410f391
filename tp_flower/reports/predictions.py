"""Predictions: from the scores of joined rows to a Parquet file.

A joined row is identified by its row of the label table, and by its number among that
row's joined rows (``occurrence``): a many-to-many join makes several.

docs/how-to/predict.md lists the columns of the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tp_flower.arrays import BoolArray, FloatArray, IntArray
from tp_flower.files import whole_file
from tp_flower.losses import KMEANS, make_loss, sigmoid, softmax

PREDICTIONS_FILE: Final = "predictions.parquet"
OCCURRENCE: Final = "occurrence"
ROW: Final = "row"
ROW_HASH: Final = "row_key"
_SCORE, _PREDICTION, _PROBABILITY = "score", "prediction", "probability"
_PARTIAL, _DISTANCE = "is_partial", "distance"
RESERVED: Final = frozenset(
    {ROW, ROW_HASH, OCCURRENCE, _SCORE, _PREDICTION, _PARTIAL, _DISTANCE}
)
"""Names that no column of a row key can have."""


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


@dataclass(frozen=True)
class Outputs:
    """The meaning of a model's scores, by its loss.

    ``classes`` are the names of the label's classes, or the numbers of a clustering's
    centres; empty in a regression. A predicted class has the label's type, ``kind``.
    """

    loss: str
    classes: tuple[str, ...] = ()
    kind: str = "text"

    def __post_init__(self) -> None:
        make_loss(self.loss, len(self.classes))

    @property
    def count(self) -> int:
        """The number of scores of a row, d_c."""
        return make_loss(self.loss, len(self.classes)).outputs

    @property
    def values(self) -> pa.Array:
        """The classes as values of the label's type, (k,)."""
        is_whole = all(name.lstrip("-").isdecimal() for name in self.classes)
        number = pa.int64() if is_whole else pa.float64()
        types = {"text": pa.string(), "boolean": pa.bool_(), "number": number}
        return pa.array(self.classes).cast(types[self.kind])

    def probabilities(self, scores: FloatArray) -> FloatArray:
        """Return the probability of every class, (N, k).

        >>> Outputs("logistic", ("no", "yes")).probabilities(np.array([[0.0]])).tolist()
        [[0.5, 0.5]]
        """
        if self.count > 1:
            return softmax(scores)
        return np.column_stack([sigmoid(-scores[:, 0]), sigmoid(scores[:, 0])])


def occurrences(rows: IntArray) -> IntArray:
    """Number the joined rows of each row from 0, (N,); equal rows are adjacent.

    >>> occurrences(np.array([0, 2, 2, 2, 5])).tolist()
    [0, 0, 1, 2, 0]
    """
    first_rows = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])[: len(rows)])
    return np.arange(len(rows)) - np.repeat(
        first_rows, np.diff(np.append(first_rows, len(rows)))
    )


def prediction_table(names: pa.Array, scored: Scored, outputs: Outputs) -> pa.Table:
    """Return the predictions of joined rows, which ``names`` (N,) name."""
    columns = {ROW_HASH: names, OCCURRENCE: pa.array(occurrences(scored.rows))}
    for k in range(outputs.count):
        name = f"{_SCORE}.{outputs.classes[k]}" if outputs.count > 1 else _SCORE
        columns[name] = pa.array(scored.scores[:, k])
    columns |= _predicted(scored.scores, outputs)
    columns[_PARTIAL] = pa.array(scored.is_partial)
    return pa.table(columns)


def _predicted(scores: FloatArray, outputs: Outputs) -> dict[str, pa.Array]:
    if outputs.loss == KMEANS:
        return {
            _PREDICTION: pa.array(outputs.classes).take(
                pa.array(scores.argmin(axis=1))
            ),
            # noise on the scores can make one negative
            _DISTANCE: pa.array(np.sqrt(np.maximum(scores.min(axis=1), 0.0))),
        }
    if not outputs.classes:
        return {_PREDICTION: pa.array(scores[:, 0])}
    chances = outputs.probabilities(scores)
    # with equal probabilities the first class, as in the accuracy
    columns = {_PREDICTION: outputs.values.take(pa.array(chances.argmax(axis=1)))}
    for k, name in enumerate(outputs.classes):
        columns[f"{_PROBABILITY}.{name}"] = pa.array(chances[:, k])
    return columns


def write_predictions(
    table: pa.Table, path: Path, metadata: Mapping[str, str], mode: int
) -> None:
    """Write predictions to a file; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file_metadata = {f"tp_flower.{key}": text for key, text in metadata.items()}
    with whole_file(path, is_durable=True, mode=mode) as file:
        pq.write_table(table.replace_schema_metadata(file_metadata), file)
