"""Trees of LightGBM's text as arrays, which plain numpy can read.

The nodes of all trees are numbered through, and so are the leaves; a child, or a root,
of -1 - k is leaf k. ``tp_flower.export.runner.trees`` reads the arrays.

Reference:
    LightGBM's ``Tree::ToString`` (src/io/tree.cpp), version 4 of the text.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import ModelError

_CATEGORICAL: Final = 1
_DEFAULT_LEFT: Final = 2
_MISSING_SHIFT: Final = 2
"""Bits of `decision_type`: the two above say what is missing."""
_WORD: Final = 32  # bits of a word of categories
NO_SET: Final = -1


class TreeArrays:
    """Arrays of trees, to which texts are added.

    Attributes:
        roots: of each tree.
        leaves: how many all trees have.
    """

    def __init__(self) -> None:
        self.roots: list[int] = []
        self.leaves = 0
        self._nodes = 0
        self._words = 0
        self._columns: dict[str, list[AnyArray]] = {name: [] for name in _TYPES}
        self._columns["set-start"].append(np.zeros(1, np.int64))

    def add(self, text: str) -> tuple[int, int]:
        """Add the trees of a text; return the first one's number, and the next after.

        Raises:
            ModelError: they are no plain trees.
        """
        first = len(self.roots)
        head, *blocks = text.partition("\nend of trees")[0].split("\nTree=")
        if "average_output" in head.splitlines():
            raise ModelError("malformed trees: of a random forest")
        for block in blocks:
            pairs = (line.partition("=") for line in block.splitlines()[1:])
            self._add_tree({name: value for name, _, value in pairs})
        return first, len(self.roots)

    def most_category(self, column: int) -> int:
        """Return the greatest category of a column that a node names; -1 for none."""
        sets = np.concatenate([np.zeros(0, np.int64), *self._columns["set"]])
        columns = np.concatenate([np.zeros(0, np.int64), *self._columns["column"]])
        starts = np.concatenate(self._columns["set-start"])
        most = -1
        for number in sets[(sets >= 0) & (columns == column)]:
            words = self._all("set-words")[starts[number] : starts[number + 1]]
            bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
            most = max(most, int(np.flatnonzero(bits).max(initial=-1)))
        return most

    @property
    def arrays(self) -> dict[str, AnyArray]:
        """The arrays by name: ``tree.root``, and what nodes and leaves have."""
        named = {f"tree.{name}": self._all(name) for name in _TYPES}
        return {"tree.root": np.array(self.roots, np.int64), **named}

    def _all(self, name: str) -> AnyArray:
        kind = np.dtype(_TYPES[name])
        return np.concatenate([np.zeros(0, kind), *self._columns[name]]).astype(kind)

    def _add_tree(self, tree: Mapping[str, str]) -> None:
        """Add one tree, by the lines of its text."""
        try:
            values = _numbers(tree, "leaf_value")
            if tree.get("is_linear", "0") != "0":
                raise ModelError("malformed trees: of linear leaves")
            if len(values) > 1:
                self.roots.append(self._nodes)
                self._add_nodes(tree)
            else:
                self.roots.append(-1 - self.leaves)
        except (KeyError, ValueError) as error:
            raise ModelError(f"malformed trees: {type(error).__name__}") from None
        self._columns["value"].append(values)
        self.leaves += len(values)

    def _add_nodes(self, tree: Mapping[str, str]) -> None:
        """Add the nodes of a tree that has some."""
        kinds = _whole_numbers(tree, "decision_type")
        thresholds = _numbers(tree, "threshold")
        is_set = kinds & _CATEGORICAL > 0
        sets = np.full(len(kinds), NO_SET)
        if is_set.any():
            first = sum(len(starts) for starts in self._columns["set-start"]) - 1
            sets[is_set] = first + thresholds[is_set].astype(np.int64)
            starts = _whole_numbers(tree, "cat_boundaries")
            words = _whole_numbers(tree, "cat_threshold")
            self._columns["set-start"].append(self._words + starts[1:])
            self._columns["set-words"].append(words)
            self._words += len(words)
        added = {
            "column": _whole_numbers(tree, "split_feature"),
            "threshold": thresholds,
            "missing": kinds >> _MISSING_SHIFT & 3,
            "default-left": kinds & _DEFAULT_LEFT > 0,
            "set": sets,
            "left": self._renumbered(tree, "left_child"),
            "right": self._renumbered(tree, "right_child"),
        }
        for name, array in added.items():
            self._columns[name].append(array)
        self._nodes += len(kinds)

    def _renumbered(self, tree: Mapping[str, str], name: str) -> IntArray:
        """Return children by their numbers among all nodes, or all leaves."""
        children = _whole_numbers(tree, name)
        return np.where(children >= 0, self._nodes + children, children - self.leaves)


_TYPES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("column", "left", "right", "set", "set-start"), np.int64),
    **dict.fromkeys(("threshold", "value"), np.float64),
    "missing": np.int8,
    "default-left": np.bool_,
    "set-words": np.uint32,
}


def _numbers(tree: Mapping[str, str], name: str) -> FloatArray:
    return np.array([float(text) for text in tree[name].split()])


def _whole_numbers(tree: Mapping[str, str], name: str) -> IntArray:
    return np.array([int(text) for text in tree[name].split()], np.int64)
