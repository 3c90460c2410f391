"""Boosted trees as arrays, for a runner without LightGBM.

A round is either trees or a linear model, times its step; the tree that divides a
table's rows into regions comes after those of the rounds.
"""

from typing import Any

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.learning.models.portable import Portable
from tp_flower.learning.tree_arrays import TreeArrays
from tp_flower.methods.boost.linear import LinearPart, is_linear
from tp_flower.methods.boost.trees import Forest


def portable_forest(spec: ModelSpec, width: int, parameters: AnyArray) -> Portable:
    """Return the forest of parameters (p,) uint8, over ``width`` encoded columns."""
    del spec  # a forest says all by itself
    forest = Forest.of(parameters)
    trees = TreeArrays()
    arrays: dict[str, AnyArray] = {}
    rounds: list[dict[str, Any]] = []
    most_region = -1
    for step, text in forest.rounds:
        if is_linear(text):
            part = LinearPart.of(text)
            arrays[f"linear{len(rounds)}"] = np.array(part.weights)
            columns = msgspec.to_builtins(part.columns, str_keys=True)
            rounds.append({"step": step, "linear": columns})
            # the column behind the encoded ones is the region of another table's row
            codes = part.columns.categories.get(width, [])
            most_region = max(most_region, *codes, -1)
        elif text:
            rounds.append({"step": step, "trees": trees.add(text)})
    if forest.regions is not None:
        arrays |= _regions(forest, trees)
    regions = 1
    if forest.reads_regions:
        # one more for rows in none, and in regions that nothing names
        regions = max(most_region, trees.most_category(width)) + 2
    return Portable(
        {"model": "trees", "rounds": rounds},
        arrays | trees.arrays,
        regions,
        divides=forest.regions is not None,
    )


def _regions(forest: Forest, trees: TreeArrays) -> dict[str, AnyArray]:
    """Return the arrays of the tree of regions, whose nodes are added to the others."""
    tree = forest.regions
    of_leaf = np.zeros(0, np.int64)
    first_leaf = trees.leaves
    root = -1
    if tree is not None and tree.text:
        first, _ = trees.add(tree.text)
        root = trees.roots[first]
        of_leaf = np.array(tree.region_of_leaf, np.int64)
    return {
        "region.root": np.array([root], np.int64),
        "region.first-leaf": np.array([first_leaf], np.int64),
        "region.of-leaf": of_leaf,
    }
