"""Decision trees, as LightGBM grows and reads them, and the bins that some trees read.

The nodes of all trees of a part are numbered through, and so are their leaves: arrays
`tree.column`, `tree.threshold` and so on have an entry per node, `tree.value` one per
leaf, `tree.root` one per tree. A child, or a root, of -1 - k is leaf k.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tp_flower.export.runner.encoding import MISSING
from tp_flower.export.runner.rows import Array, Json

Arrays = Mapping[str, Array]

NO_BIN: Final = 255
ZERO: Final = 1
NAN: Final = 2
"""What `tree.missing` says that a node takes for missing: numbers of 0, or none."""
TINY: Final = 1e-35


def sum_of_trees(
    trees: Arrays, span: Sequence[int], columns: Array, outputs: int
) -> Array:
    """Return the sum of some trees of columns (d, b), NaN where missing, (b, w).

    Of several outputs, trees take turns.
    """
    first, last = span
    total = np.zeros((columns.shape[1], outputs))
    for tree in range(first, last):
        leaves = leaves_of(trees, trees["tree.root"][tree], columns)
        total[:, (tree - first) % outputs] += trees["tree.value"][leaves]
    return total


def leaves_of(trees: Arrays, root: int, columns: Array) -> Array:
    """Return the leaf that each row of columns (d, b) falls into from a root, (b,)."""
    leaves = np.zeros(columns.shape[1], np.int64)
    left, right = trees["tree.left"], trees["tree.right"]
    waiting = [(root, np.arange(len(leaves)))]
    while waiting:
        node, rows = waiting.pop()
        if node < 0:
            leaves[rows] = -1 - node
        elif len(rows):
            goes_left = _goes_left(
                trees, node, columns[trees["tree.column"][node]][rows]
            )
            waiting.append((left[node], rows[goes_left]))
            waiting.append((right[node], rows[~goes_left]))
    return leaves


def _goes_left(trees: Arrays, node: int, values: Array) -> Array:
    """Return which values go left at a node: up to a threshold, or in a set.

    What is missing goes to the side that the node names.
    """
    if trees["tree.set"][node] >= 0:
        return _is_in_set(trees, trees["tree.set"][node], values)
    kind = trees["tree.missing"][node]
    if kind != NAN:
        values = np.where(np.isnan(values), 0.0, values)
    left: Array = values <= trees["tree.threshold"][node]
    if kind == NAN:
        # a comparison with NaN is false
        return left | np.isnan(values) if trees["tree.default-left"][node] else left
    if kind == ZERO:
        left[np.abs(values) <= TINY] = trees["tree.default-left"][node]
    return left


def _is_in_set(trees: Arrays, number: int, values: Array) -> Array:
    """Return whether categories are in a set, which is bits of words of 32."""
    start, stop = trees["tree.set-start"][number : number + 2]
    words = trees["tree.set-words"][start:stop].astype("<u4")
    members = np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)
    is_code = (values >= 0) & (values < len(members))
    in_set: Array = members[np.where(is_code, values, 0).astype(np.int64)] & is_code
    return in_set


def regions_of(arrays: Arrays, features: Array) -> Array:
    """Return the region of each row (b, d), by the leaf that it falls into, (b,)."""
    if not len(arrays["region.of-leaf"]):
        return np.zeros(len(features), np.int64)
    rows = np.where(features <= MISSING, np.float32(np.nan), features)
    leaves = leaves_of(arrays, arrays["region.root"][0], rows.T)
    regions: Array = arrays["region.of-leaf"][leaves - arrays["region.first-leaf"][0]]
    return regions


def bins_of(columns: Sequence[Json], arrays: Arrays, features: Array) -> Array:
    """Return the numbers of rows' intervals or categories, uint8 (b, c)."""
    numbers = np.empty((len(features), len(columns)), np.uint8)
    for index, column in enumerate(columns):
        first, size = column["first"], column["size"]
        values = features[:, first]
        if column["hot"]:
            block = np.abs(features[:, first : first + size])
            cells = np.where(block.any(axis=1), block.argmax(axis=1), size)
        elif size:
            codes = np.clip(values, 0, size - 1)
            cells = np.where(values <= MISSING, size, codes)
        else:
            edges = _piece(arrays, "bins-edge", index)
            bins = np.searchsorted(edges, values, side="right")
            cells = np.where(values <= MISSING, len(edges) + 1, bins)
        of_cells = _piece(arrays, "bins-number", index)
        numbers[:, index] = of_cells[cells.astype(np.int64)]
    return numbers


def _piece(arrays: Arrays, name: str, index: int) -> Array:
    """Return what a column has of an array that holds all columns'."""
    start, stop = arrays[f"{name}_starts"][index : index + 2]
    return arrays[f"{name}s"][start:stop]
