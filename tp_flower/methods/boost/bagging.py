"""Trees that the shards of a table show each other, and the average of their forests.

They leave a shard without what LightGBM writes beside them, such as the columns'
ranges. Those of another shard are checked before LightGBM reads them, which trusts its
files: every node is in one place of one tree, and splits a column that there is.

The average is one forest of all trees, whose leaves are scaled by their shard's share
of the joined rows (Breiman 1996, "Bagging predictors", with shards for samples).
"""

from collections.abc import Sequence
from typing import Annotated, Final, Self

import msgspec
import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.errors import ModelError

_Child = Annotated[int, msgspec.Meta(ge=-(1 << 16), lt=1 << 16)]
_Code = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """A tree in LightGBM's terms: of a child below 0, ~child is the number of a leaf.

    The threshold of a split by categories is the number of a set, whose bits are in
    ``cat_threshold``, from one of ``cat_boundaries`` to the next.
    """

    leaf_value: list[float]
    split_feature: list[_Code]
    split_gain: list[float]
    threshold: list[float]
    decision_type: list[Annotated[int, msgspec.Meta(ge=0, lt=16)]]
    left_child: list[_Child]
    right_child: list[_Child]
    cat_boundaries: list[_Code]
    cat_threshold: list[_Code]

    @classmethod
    def of(cls, section: str) -> Self:
        """Return the tree of a section of LightGBM's text."""
        values = dict(line.partition("=")[::2] for line in section.splitlines())
        fields = [values.get(name, "").split() for name in cls.__struct_fields__]
        return msgspec.convert(fields, cls, strict=False)

    def is_valid(self, columns: int) -> bool:
        """Whether it is a tree, and over so many columns."""
        splits = len(self.leaf_value) - 1
        sets = len(self.cat_boundaries) - 1
        lengths = {len(getattr(self, name)) for name in _SPLIT_FIELDS}
        if lengths != {splits}:
            return False
        if not splits:
            return bool(np.isfinite(self.leaf_value).all())
        children = np.array([self.left_child, self.right_child])
        named = np.array(self.threshold)[np.array(self.decision_type) % 2 == 1]
        return bool(
            np.array_equal(
                np.sort(children, None), [*range(~splits, 0), *range(1, splits)]
            )
            # a node comes after the one above it: there is no circle
            and ((children < 0) | (children > np.arange(splits))).all()
            and max(self.split_feature) < columns
            and np.isin(named, np.arange(sets)).all()
            and self.cat_boundaries[:1] in ([], [0])
            and (np.diff(self.cat_boundaries) > 0).all()
            and sum(self.cat_boundaries[-1:]) == len(self.cat_threshold)
            and np.isfinite([*self.leaf_value, *self.split_gain]).all()
            and (np.array(self.threshold) > -np.inf).all()
        )

    def text(self, number: int, share: float) -> bytes:
        """Return LightGBM's text, with leaves scaled by a share."""
        sets = max(len(self.cat_boundaries) - 1, 0)
        lines = [
            b"Tree=%d\nnum_leaves=%d\nnum_cat=%d" % (number, len(self.leaf_value), sets)
        ]
        for name in self.__struct_fields__:
            values = getattr(self, name)
            if name in ("leaf_value", "split_gain"):
                values = [share * value for value in values]
            # the shortest texts that are read as the same numbers, much faster than str
            text = (
                msgspec.json.encode(values)[1:-1]
                .replace(b",", b" ")
                .replace(b"null", b"inf")
            )
            lines.append(name.encode() + b"=" + text)
        return b"\n".join([*lines, b"is_linear=0\nshrinkage=1\n\n"])


_SPLIT_FIELDS: Final = Tree.__struct_fields__[1:7]


class ShardTrees(msgspec.Struct, frozen=True):
    """The trees that a shard has grown on the joined rows of its own."""

    joined_rows: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    trees: list[Tree]


def shown_trees(grown: AnyArray, joined_rows: float) -> bytes:
    """Return trees (their text's bytes) as another shard may see them."""
    return msgspec.msgpack.encode(ShardTrees(joined_rows, read_trees(grown)))


def read_trees(grown: AnyArray) -> list[Tree]:
    """Return the trees of LightGBM's text, as its bytes."""
    sections = (
        grown.tobytes().decode().partition("end of trees")[0].split("\nTree=")[1:]
    )
    return [Tree.of(section) for section in sections]


def write_trees(trees: Sequence[bytes], columns: int, outputs: int) -> AnyArray:
    """Return LightGBM's text, as bytes, of the texts of numbered trees.

    Without trees it is empty.
    """
    header = _HEADER.format(outputs, columns - 1, " ".join(["none"] * columns)).encode()
    text = b""
    if trees:
        text = b"".join([header, *trees, b"end of trees\n"])
    return np.frombuffer(text, np.uint8)


def average(documents: Sequence[bytes], columns: int, outputs: int) -> AnyArray:
    """Return the average of the shards' forests, as the bytes of LightGBM's text.

    Raises:
        ModelError: they are not trees over the columns, for so many outputs.
    """
    try:
        shards = [
            msgspec.msgpack.decode(document, type=ShardTrees) for document in documents
        ]
    except msgspec.DecodeError:
        raise ModelError("malformed trees") from None
    total = sum(shard.joined_rows for shard in shards if shard.trees) or 1.0
    trees: list[bytes] = []
    for shard in shards:
        if len(shard.trees) % outputs or not all(
            tree.is_valid(columns) for tree in shard.trees
        ):
            raise ModelError("malformed trees")
        share = shard.joined_rows / total
        trees += (
            tree.text(number, share)
            for number, tree in enumerate(shard.trees, len(trees))
        )
    return write_trees(trees, columns, outputs)


_HEADER: Final = """tree
version=v4
num_class={0}
num_tree_per_iteration={0}
label_index=0
max_feature_idx={1}
feature_names={2}
feature_infos={2}

"""
