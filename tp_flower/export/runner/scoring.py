"""Scores: what the model of a table says of its rows.

Notation:
    n  rows of a table, b those of a block     d  encoded columns     w  scores of a row
    R  regions of another table's rows that the scores depend on, at least one
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tp_flower.export.runner.encoding import MISSING, block_of, encode, tags
from tp_flower.export.runner.rows import Array, Json
from tp_flower.export.runner.trees import NO_BIN, bins_of, regions_of, sum_of_trees

Partial = dict[str, Array]
"""What a part says of its rows: arrays by name."""
Region = tuple[int, int] | None
"""The region that rows are scored in, and the one that stands for none."""

BLOCK_VALUES: Final = 1 << 21
"""Encoded values that are held at a time: 16 MB as float64."""
FARTHEST: Final = 6.0
"""Deviations at which a boosted linear model cuts a number."""


def score_rows(part: Json, rows: Json, wanted: Array | None = None) -> Partial:
    """Return what a part says of its rows: scores (n, R, w), keys, and so on.

    Args:
        part: of a table.
        rows: as ``read_rows`` returns them.
        wanted: the regions that rows are scored in, bool (n, R); None for all.
    """
    n = int(rows["rows"])
    arrays = part["arrays"]
    partial = {name: rows[name] for name in rows if name != "features"}
    partial["scores"] = np.zeros((n, part["regions"], part["outputs"]))
    if part["divides"]:
        partial["regions"] = np.zeros(n, np.int64)
    if part["bins"]:
        partial["bins"] = np.full((n, len(part["bins"])), NO_BIN, np.uint8)
    encoded = encode(part, rows["features"])
    size = max(BLOCK_VALUES // max(part["width"], 1), 1)
    for start in range(0, n, size):
        block = np.arange(start, min(start + size, n))
        features = block_of(encoded, part, block)
        of_block = None if wanted is None else wanted[block]
        partial["scores"][block] = _scores(part, features, of_block)
        if part["divides"]:
            partial["regions"][block] = regions_of(arrays, features)
        if part["bins"]:
            partial["bins"][block] = bins_of(part["bins"], arrays, features)
    partial["scores"] += by_key(part, rows, "effect")[:, None, :]
    if "factor-keys" in arrays:
        partial["factors"] = by_key(part, rows, "factor")
    return partial


def _scores(part: Json, features: Array, wanted: Array | None) -> Array:
    """Return the model's scores of a block of rows, in all regions, (b, R, w)."""
    model = MODELS[part["model"]]
    if part["regions"] == 1:
        return model(part, features, None)[:, None, :]
    scores = np.zeros((len(features), part["regions"], part["outputs"]))
    for region in range(part["regions"]):
        rows = np.arange(len(features))
        if wanted is not None:
            rows = np.flatnonzero(wanted[:, region])
        if len(rows):
            of_region = region, part["regions"] - 1
            scores[rows, region] = model(part, features[rows], of_region)
    return scores


def by_key(part: Json, rows: Json, kind: str) -> Array:
    """Return the numbers that a model has of the rows' keys, (n, c); 0 for unknown."""
    n = int(rows["rows"])
    stored = part["arrays"].get(f"{kind}-keys")
    if stored is None:
        return np.zeros((n, 1))
    values = part["arrays"][f"{kind}s"]
    if not len(stored):
        return np.zeros((n, values.shape[1]))
    hashes = np.zeros((n, 2), np.uint64)
    lacks_key = np.zeros(n, np.bool_)
    for number, key in enumerate(part["key-secrets"]):
        codes = rows[f"key{number}.codes"]
        of_texts = tags(key, rows[f"key{number}.texts"])
        hashes ^= np.concatenate([of_texts, np.zeros((1, 2), np.uint64)])[codes]
        lacks_key |= codes < 0
    hashes[lacks_key] = 0
    position = np.minimum(np.searchsorted(stored[:, 0], hashes[:, 0]), len(stored) - 1)
    is_known = (stored[position] == hashes).all(axis=1)
    return np.where(is_known[:, None], values[position].astype(np.float64), 0.0)


def _linear(part: Json, features: Array, _: Region) -> Array:
    """Return T W + c: the intercept is the last row of `weights`, if there is one."""
    weights = part["arrays"]["weights"]
    scores: Array = features.astype(np.float64) @ weights[: part["width"]]
    if len(weights) > part["width"]:
        scores += weights[-1]
    return scores


def _centres(part: Json, features: Array, _: Region) -> Array:
    """Return the squared distances from centres, which are the rows of `weights`."""
    centres = part["arrays"]["weights"]
    wide = features.astype(np.float64)
    distances: Array = wide @ (-2.0 * centres.T)
    distances += (wide**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)
    return np.maximum(distances, 0.0)


def _network(part: Json, features: Array, _: Region) -> Array:
    """Return the outputs of layers with ReLU between them, times the scale."""
    arrays = part["arrays"]
    values: Array = features.astype(np.float64)
    for layer in range(part["layers"]):
        if layer:
            values = np.maximum(values, 0.0)
        values = values @ arrays[f"weights{layer}"].T
        if f"bias{layer}" in arrays:
            values = values + arrays[f"bias{layer}"]
    scaled: Array = values * part["scale"]
    return scaled


def _trees(part: Json, features: Array, region: Region) -> Array:
    """Return the sum of the rounds, each times its step: trees, or a linear model."""
    rows = np.where(features <= MISSING, np.float32(np.nan), features)
    if region is not None:
        number, none = region
        value = np.nan if number == none else number
        rows = np.column_stack([rows, np.full(len(rows), value, np.float32)])
    total = np.zeros((len(rows), part["outputs"]))
    columns = np.ascontiguousarray(rows.T)
    for number, each in enumerate(part["rounds"]):
        if "linear" in each:
            weights = part["arrays"][f"linear{number}"]
            values = _line(each["linear"], rows, weights, is_sparse=part["sparse"])
        else:
            values = sum_of_trees(
                part["arrays"], each["trees"], columns, part["outputs"]
            )
        total += each["step"] * values
    return total


MODELS: Final[Mapping[str, Callable[[Json, Array, Region], Array]]] = {
    "linear": _linear,
    "centres": _centres,
    "network": _network,
    "trees": _trees,
}
"""Each returns the scores (b, w) of a block of encoded rows (b, d)."""


def _line(columns: Json, rows: Array, weights: Array, *, is_sparse: bool) -> Array:
    """Return a linear model's values of rows, NaN where missing, (b, w).

    Its weights are those of numbers, of missing numbers, and of categories. Sparse rows
    were neither centred nor cut.
    """
    total = np.zeros((len(rows), weights.shape[1]))
    following = iter(weights)
    for column, mean in columns["means"].items():
        values = rows[:, int(column)].astype(np.float64)
        scaled = np.nan_to_num((values - mean) / columns["scales"][column])
        if not is_sparse:
            scaled = np.clip(scaled, -FARTHEST, FARTHEST)
        total += scaled.astype(np.float32)[:, None] * next(following)
    for column in columns["missing"]:
        total += np.isnan(rows[:, column])[:, None] * next(following)
    for column, codes in columns["categories"].items():
        of_codes = np.array([*(next(following) for _ in codes), 0.0 * weights[0]])
        position = np.searchsorted(codes, rows[:, int(column)])
        stored = np.array([*codes, np.nan])[position] == rows[:, int(column)]
        total += of_codes[np.where(stored, position, len(codes))]
    return total
