"""What a part sent, checked before anything is computed with it.

``open_replies`` has checked that a reply speaks of the right parts; here every array
and every fact gets its type, shape and range checked, in the name of the site that sent
it.
"""

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from strategies.exchange import Part, Replies
from tp_flower.encoding.choice import TableChoice
from tp_flower.encoding.statistics import ColumnStatistics
from tp_flower.encoding.statistics_wire import from_wire
from tp_flower.errors import ReplyError, SchemaError
from tp_flower.explain.words import SiteWork
from tp_flower.extraction.extracted import KeyColumn, LabelColumn
from tp_flower.learning.losses import FloatArray
from tp_flower.protocol import AnyArray

Fact = TypeVar("Fact", int, float, str, list[Any], dict[str, Any])

LARGEST = 1e30
"""Beyond it float32 is about to overflow: no score or gradient gets there by itself."""

LABEL_KINDS = frozenset({"number", "boolean", "time", "text"})

_TYPES: Mapping[type, tuple[type, ...]] = {float: (int, float)}


def array_of(
    replies: Replies,
    part: Part,
    name: str,
    shape: tuple[int | None, ...],
    dtypes: tuple[str, ...] = ("float32", "float64"),
) -> AnyArray:
    """Return an array that a part sent.

    Args:
        replies: of the round.
        part: who sent it.
        name: of the array.
        shape: the expected shape; None allows any size.
        dtypes: the dtypes allowed.

    Raises:
        ReplyError: if it is missing, of another shape or dtype, or holds numbers that
            are not finite or absurdly large.
    """
    array = replies.arrays.get((part.number, name))
    if array is None:
        raise ReplyError(f"{_who(part)} sent no {name!r}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.name not in dtypes:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ReplyError(
            f"{_who(part)} sent {name!r} as {array.dtype.name} of shape {array.shape}, "
            f"expected {' or '.join(dtypes)} of shape ({expected})"
        )
    if array.dtype.kind == "f" and not _is_moderate(array):
        raise ReplyError(
            f"{_who(part)} sent {name!r} with values that are not finite or above "
            f"{LARGEST:g}: training diverged there. Lower learning-rate (0 chooses "
            "it), set rho to 0 (chosen), or raise l2; if all are at their defaults, "
            "look for extreme values in the data"
        )
    return array


def fact_of(
    facts: Mapping[int, Mapping[str, Any]], part: Part, name: str, kind: type[Fact]
) -> Fact:
    """Return a fact that a part reported; a float may be written as an int.

    Raises:
        ReplyError: if it is missing, of another type, negative or not finite.
    """
    value: Any = facts[part.number].get(name)
    is_kind = type(value) in _TYPES.get(kind, (kind,))
    is_number = isinstance(value, int | float)
    # false for NaN and infinity, and for a whole number beyond any float
    if not is_kind or (is_number and not 0 <= value <= sys.float_info.max):
        raise ReplyError(f"{_who(part)} reported no usable {name!r}")
    result: Fact = value
    return result


def read_key(replies: Replies, part: Part, key: int, rows: int) -> KeyColumn:
    """Return one join key of a part's rows.

    Raises:
        ReplyError: if codes and hashes do not fit the rows or each other.
    """
    codes = array_of(replies, part, f"codes-{key}", (rows,), ("int32",))
    hashes = array_of(replies, part, f"hashes-{key}", (None, 2), ("uint64",))
    if codes.min(initial=0) < -1 or codes.max(initial=-1) >= len(hashes):
        raise refuse(part, f"codes of join key {key} that name no hash")
    kinds = fact_of(replies.facts(), part, "keys", list)
    if not 0 <= key < len(kinds) or not isinstance(kinds[key], str):
        raise refuse(part, f"no type of join key {key}")
    return KeyColumn(codes, hashes, kinds[key])


def read_work(facts: Mapping[int, Mapping[str, Any]], part: Part) -> SiteWork:
    """Return where a part's fragment ran.

    Raises:
        ReplyError: it is not told in words.
    """
    pushed = fact_of(facts, part, "pushed", list)
    if not all(isinstance(words, str) for words in pushed):
        raise refuse(part, "no words of what its database filters")
    return SiteWork(fact_of(facts, part, "engine", str), tuple(pushed))


def read_label(replies: Replies, part: Part, rows: int) -> LabelColumn:
    """Return the label of a part's rows; NaN where it is NULL.

    Raises:
        ReplyError: if it does not fit the rows or its categories.
    """
    values = replies.arrays.get((part.number, "label"))
    if values is None or values.dtype != np.float64 or values.shape != (rows,):
        raise refuse(part, f"no label for its {rows} rows")
    label = fact_of(replies.facts(), part, "label", dict)
    categories = label.get("categories")
    is_listed = isinstance(categories, list) and all(
        isinstance(name, str) for name in categories
    )
    if label.get("kind") not in LABEL_KINDS or not is_listed:
        raise refuse(part, "a label of an unknown kind")
    names = tuple(label["categories"])
    present = values[~np.isnan(values)]
    if label["kind"] == "text" and not np.isin(present, np.arange(len(names))).all():
        raise refuse(part, "labels that are none of its categories")
    if np.isinf(present).any():
        raise refuse(part, "infinite labels")
    return LabelColumn(label["kind"], values, names)


def read_weight(replies: Replies, part: Part, rows: int) -> FloatArray:
    """Return what joined rows of a part's rows weigh, (rows,); NaN where it is NULL.

    Raises:
        ReplyError: if it does not fit the rows, or is infinite.
    """
    values = replies.arrays.get((part.number, "weight"))
    if values is None or values.dtype != np.float64 or values.shape != (rows,):
        raise refuse(part, f"no weight for its {rows} rows")
    if np.isinf(values).any():
        raise refuse(part, "infinite weights")
    return values


def read_statistics(
    replies: Replies, part: Part, choice: TableChoice, rows: int
) -> dict[str, ColumnStatistics]:
    """Return the statistics of a part's features.

    Raises:
        ReplyError: if they are not those of these features and at most ``rows`` rows.
    """
    reported = fact_of(replies.facts(), part, "statistics", list)
    arrays = {
        name: array
        for (number, name), array in replies.arrays.items()
        if number == part.number
    }
    try:
        return from_wire(reported, arrays, choice, rows)
    except SchemaError as error:
        raise refuse(part, str(error)) from None


def refuse(part: Part, what: str) -> ReplyError:
    """Return the error that says what is wrong with what a part sent."""
    return ReplyError(f"{_who(part)} sent {what}")


def _is_moderate(array: AnyArray) -> bool:
    # NaN compares false
    low, high = array.min(initial=0.0), array.max(initial=0.0)
    return bool(low >= -LARGEST and high <= LARGEST)


def _who(part: Part) -> str:
    return f"site {part.site!r} (table {part.table!r})"
