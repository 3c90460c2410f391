"""What a part sent, checked before anything is computed with it.

``open_replies`` has checked that a reply speaks of the right parts; here every array
and every fact gets its type, shape and range checked, in the name of the site that sent
it.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from strategies.run.exchange import Part, Replies
from tp_flower.arrays import FloatArray
from tp_flower.errors import ReplyError, SchemaError
from tp_flower.extraction.extracted import KeyColumn, LabelColumn
from tp_flower.features.choice import TableChoice
from tp_flower.features.statistics import ColumnStatistics
from tp_flower.features.statistics_codec import from_wire
from tp_flower.protocol import AnyArray, ExtractedPart, StatisticsOfPart

Fact = TypeVar("Fact", int, float, str, list[Any], dict[str, Any])

LARGEST = 1e30
"""Beyond it float32 is about to overflow: no score or gradient gets there by itself."""


_TYPES: Mapping[type, tuple[type, ...]] = {float: (int, float)}


def array_of(
    replies: Replies, part: Part, name: str, shape: tuple[int | None, ...]
) -> AnyArray:
    """Return an array that a part sent.

    Args:
        replies: of the round.
        part: who sent it.
        name: of the field that is the array.
        shape: the expected shape; None allows any size.

    Raises:
        ReplyError: if it is missing, or of another shape.
    """
    array: AnyArray | None = getattr(replies.parts.get(part.number), name, None)
    if array is None:
        raise ReplyError(f"{_who(part)} sent no {name!r}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ReplyError(
            f"{_who(part)} sent {name!r} of shape {array.shape}, expected ({expected})"
        )
    return array


def has_array(replies: Replies, part: Part, name: str) -> bool:
    """Return whether a part sent an array."""
    return getattr(replies.parts.get(part.number), name, None) is not None


def read_key(replies: Replies, part: Part, key: int, rows: int) -> KeyColumn:
    """Return one join key of a part's rows.

    Raises:
        ReplyError: if codes and hashes do not fit the rows or each other.
    """
    body, name = replies.body(part, ExtractedPart), str(key)
    codes, hashes = body.codes.get(name), body.hashes.get(name)
    if codes is None or hashes is None or key >= len(body.keys):
        raise refuse(part, f"no codes, hashes or type of join key {key}")
    if len(codes) != rows:
        raise refuse(part, f"codes of join key {key} for {len(codes)} of {rows} rows")
    if codes.max(initial=-1) >= len(hashes):
        raise refuse(part, f"codes of join key {key} that name no hash")
    return KeyColumn(codes, hashes, body.keys[key])


def read_label(replies: Replies, part: Part, rows: int) -> LabelColumn:
    """Return the label of a part's rows; NaN where it is NULL.

    Raises:
        ReplyError: if it does not fit the rows or its categories.
    """
    body = replies.body(part, ExtractedPart)
    values, label = body.label_values, body.label
    if values is None or label is None or values.shape != (rows,):
        raise refuse(part, f"no label for its {rows} rows")
    names = tuple(label.categories or ())
    present = values[~np.isnan(values)]
    if label.kind == "text" and not np.isin(present, np.arange(len(names))).all():
        raise refuse(part, "labels that are none of its categories")
    return LabelColumn(label.kind, values, names)


def read_weight(replies: Replies, part: Part, rows: int) -> FloatArray:
    """Return what joined rows of a part's rows weigh, (rows,); NaN where it is NULL.

    Raises:
        ReplyError: if it does not fit the rows.
    """
    weight = replies.body(part, ExtractedPart).weight
    if weight is None or weight.shape != (rows,):
        raise refuse(part, f"no weight for its {rows} rows")
    return weight


def read_statistics(
    replies: Replies, part: Part, choice: TableChoice, rows: int
) -> dict[str, ColumnStatistics]:
    """Return the statistics of a part's features.

    Raises:
        ReplyError: if they are not those of these features and at most ``rows`` rows.
    """
    try:
        return from_wire(replies.body(part, StatisticsOfPart), choice, rows)
    except SchemaError as error:
        raise refuse(part, str(error)) from None


def refuse(part: Part, what: str) -> ReplyError:
    """Return the error that says what is wrong with what a part sent."""
    return ReplyError(f"{_who(part)} sent {what}")


def _who(part: Part) -> str:
    return f"site {part.site!r} (table {part.table!r})"
