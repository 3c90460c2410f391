"""Encodings: from features of a table's rows to the columns that its model reads.

The parameters are those of the training. A category is known by a keyed hash, HMAC of
its text, and only who has the key of `part.json` can tell which one it is.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tp_flower.export.runner.rows import Array, Json, Keys

Hot = tuple[Array, Array | None]
"""Of each row the column that is not 0, -1 for none, and its value; None for ones."""

MISSING: Final = -1e30
"""An encoded value that is missing, of which trees learn the side."""
DAY: Final = 86_400


def encode(part: Json, features: Mapping[str, Any]) -> list[Array | Hot]:
    """Return the encoded columns: of each encoding numbers (n, k), or one hot column.

    They are float32, as the model was trained on them.
    """
    encoded: list[Array | Hot] = []
    for item in part["encoder"]:
        column = features[item["name"]]
        key = part["category-keys"].get(item["name"])
        encoded.append(ENCODERS[item["type"]](item, column, key))
    return encoded


def block_of(encoded: Sequence[Array | Hot], part: Json, rows: Array) -> Array:
    """Return the encoded columns of some rows, float32 (b, d)."""
    block = np.zeros((len(rows), part["width"]), np.float32)
    start = 0
    for item, piece in zip(part["encoder"], encoded, strict=True):
        width = item["width"]
        if isinstance(piece, tuple):
            hot, values = piece
            columns = np.flatnonzero(hot[rows] >= 0)
            ones = 1.0 if values is None else values[rows[columns]]
            block[columns, start + hot[rows[columns]]] = ones
        else:
            block[:, start : start + width] = piece[rows]
        start += width
    return block


def _number(item: Json, column: Any, _: object) -> Array:
    """Return (x - centre) / scale within limits, or its square."""
    values = column
    if item.get("of-length"):
        codes, texts = column
        values = np.append([float(len(text)) for text in texts], np.nan)[codes]
    missing = np.isnan(values)
    fill = item["fill"]
    with np.errstate(over="ignore"):
        scaled = (np.where(missing, fill or 0.0, values) - item["centre"]) / item[
            "scale"
        ]
    scaled = np.clip(scaled, -item["limit"], item["limit"])
    if item["type"] == "square":
        scaled = np.minimum(scaled * scaled, -MISSING)
    elif fill is None:
        scaled[missing] = MISSING
    column_out: Array = scaled[:, None].astype(np.float32)
    return column_out


def _bins(item: Json, column: Array, _: object) -> Hot:
    hot = np.searchsorted(np.array(item["edges"]), column, side="right")
    hot[np.isnan(column)] = -1 if item["fill"] is None else item["fill"]
    return hot, None


def _cyclic(item: Json, column: Array, _: object) -> Array:
    """Return sine and cosine of a number's place in a cycle; 0 where missing."""
    cycle = item["cycle"]
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(cycle, str):
            index, period = _time_part(cycle, column)
        else:
            index, period = np.mod(column, cycle), cycle
        angle = index * (2 * np.pi / period)
    missing = ~np.isfinite(angle)
    angle[missing] = 0.0
    waves = np.column_stack([np.sin(angle), np.cos(angle)])
    waves[missing] = 0.0
    return waves.astype(np.float32)


def _time_part(name: str, column: Array) -> tuple[Array, float]:
    """Return a part of times, seconds since 1970, NaN where missing; and its period."""
    is_known = np.isfinite(column)
    seconds = np.floor(np.where(is_known, column, 0.0)).astype(np.int64)
    days = seconds // DAY
    dates = days.astype("datetime64[D]")
    month = dates.astype("datetime64[M]")
    year = dates.astype("datetime64[Y]")
    parts = {
        "hour": (seconds // 3600 % 24, 24.0),
        "minute": (seconds // 60 % 60, 60.0),
        "weekday": ((days + 4) % 7, 7.0),
        "month": (month.astype(np.int64) % 12 + 1, 12.0),
        "day-of-year": ((dates - year).astype(np.int64) + 1, 366.0),
    }
    values, period = parts[name]
    return np.where(is_known, values, np.nan), period


def _vector(_item: Json, column: Array, _: object) -> Array:
    return np.where(np.isnan(column), np.float32(0), column)


def _missing(item: Json, column: Any, _: object) -> Array:
    """Return 1 where the feature has no value, or where it has one."""
    if isinstance(column, tuple):
        absent = column[0] < 0
    else:
        absent = np.isnan(column).reshape(len(column), -1).all(axis=1)
    values = ~absent if item["type"] == "present" else absent
    flags: Array = values[:, None].astype(np.float32)
    return flags


def _categories(item: Json, column: Any) -> Keys:
    """Return a feature's values as texts, numbers as the shortest that read back."""
    if not item["of-number"]:
        return column  # type: ignore[no-any-return]
    codes = np.full(len(column), -1, np.int64)
    present = ~np.isnan(column)
    distinct, inverse = np.unique(column[present] + 0.0, return_inverse=True)
    codes[present] = inverse
    return codes, distinct.astype("U32")


def _listed(item: Json, column: Any, _: object) -> Hot:
    codes, texts = _categories(item, column)
    places = {text: index for index, text in enumerate(item["categories"])}
    hot = np.array([places.get(str(text), -1) for text in texts] + [-1], np.int64)
    return hot[codes], None


def _hashed(item: Json, column: Any, key: str | None) -> Hot:
    """Return the column of each category, which is known by its keyed hash."""
    codes, texts = _categories(item, column)
    hashes = tags(key or "", texts)
    if item["type"] == "hash":
        hot = (hashes[:, 0] % np.uint64(item["buckets"])).astype(np.int64)
        signs = 1.0 - 2.0 * (hashes[:, 1] & np.uint64(1)).astype(np.float32)
        return np.append(hot, -1)[codes], np.append(signs, np.float32(0))[codes]
    places = {digits: index for index, digits in enumerate(item["hashes"])}
    other = len(places) if item["other"] else -1
    digits = [row.astype(">u8").tobytes().hex() for row in hashes]
    hot = np.array([places.get(each, other) for each in digits] + [-1], np.int64)
    if item["fill"] is not None:
        hot[-1] = item["fill"]
    return hot[codes], None


def _code(item: Json, column: Any, key: str | None) -> Array:
    """Return the number of each category, for trees."""
    hot, _ = _hashed(item, column, key)
    return np.where(hot < 0, MISSING, hot)[:, None].astype(np.float32)


ENCODERS: Final[Mapping[str, Callable[[Json, Any, Any], Any]]] = {
    "number": _number,
    "square": _number,
    "bins": _bins,
    "cyclic": _cyclic,
    "vector": _vector,
    "missing": _missing,
    "present": _missing,
    "listed": _listed,
    "categories": _hashed,
    "codes": _code,
    "hash": _hashed,
}


def tags(key: str, texts: Sequence[str] | Array) -> Array:
    """Return 128 bits of HMAC-SHA-256 of texts, uint64 (k, 2)."""
    secret = bytes.fromhex(key)
    digests = [hmac.digest(secret, str(t).encode(), "sha256")[:16] for t in texts]
    words = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    return words.astype(np.uint64)
