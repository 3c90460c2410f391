"""Hashed join keys as small numbers that are equal where the hashes are."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tp_flower.errors import MappingError
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.query import Join

IntArray = npt.NDArray[np.int32]

NULL = -1


def join_codes(
    join: Join, left: Sequence[KeyColumn], right: Sequence[KeyColumn]
) -> tuple[IntArray, IntArray]:
    """Return the codes of both sides of a join, (n_left,) and (n_right,).

    Two codes are equal where both halves of the hashes are; -1 is NULL.

    Args:
        join: for messages.
        left: the left key of its table's shards, in shard order.
        right: the right key.

    Raises:
        MappingError: if the two sides hash different types.
    """
    _check_kinds(join, left, right)
    codes = common_codes([*left, *right])
    return np.concatenate(codes[: len(left)]), np.concatenate(codes[len(left) :])


def common_codes(keys: Sequence[KeyColumn]) -> list[IntArray]:
    """Return per shard the codes (n,) that equal hashes share across all the shards."""
    hashes = np.concatenate([key.hashes for key in keys])
    # the extra last entry is what NULL takes
    lookup = np.append(_dense(hashes), np.int32(NULL))
    codes, offset = [], 0
    for key in keys:
        place = np.where(key.codes < 0, len(hashes), key.codes + offset)
        codes.append(lookup.take(place))
        offset += len(key.hashes)
    return codes


def _dense(hashes: npt.NDArray[np.uint64]) -> IntArray:
    """Return (k,) int32, from 0: equal where rows of hashes (k, 2) are equal."""
    # every shard's hashes come sorted by the first half: this merges them
    order = np.argsort(hashes[:, 0], kind="stable")
    ordered = hashes[order]
    differs = ordered[1:] != ordered[:-1]
    if (differs[:, 1] & ~differs[:, 0]).any():
        # equal first halves of different hashes, once in 2**64 pairs
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        ordered = hashes[order]
        differs = ordered[1:] != ordered[:-1]
    codes = np.zeros(len(hashes), dtype=np.int32)
    codes[order[1:]] = np.cumsum(differs.any(axis=1), dtype=np.int32)
    return codes


def _check_kinds(
    join: Join, left: Sequence[KeyColumn], right: Sequence[KeyColumn]
) -> None:
    kinds = {
        side: sorted({key.kind for key in keys if len(key.hashes)})
        for side, keys in ((join.left, left), (join.right, right))
    }
    # a shard without a single value has no type to differ in
    if len({kind for kinds_of in kinds.values() for kind in kinds_of}) > 1:
        raise MappingError(
            f"the keys of the join {join.text} differ in type: "
            + ", ".join(f"{side}: {' or '.join(kind)}" for side, kind in kinds.items())
            + "; cast one side in the query"
        )
