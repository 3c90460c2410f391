"""The cross-check of the alignment: compare the table mapping with the sites' keys.

For every join, and every distinct key that the mapping matched in it, the server picks
one joined row, and asks the sites of both sides for a digest of the keys behind it:

    sum_k weight_k * hash(key_k)  mod 2**64

with a random weight per key, the same for both sides, and bits of the keyed hash that
are sent nowhere else. If the digests agree, rows, hashes and mapping belong together: a
difference in any key is missed with a probability of at most 2**-32. The server learns
nothing that the mapping does not tell it.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import refuse
from strategies.setup.extract import key_groups
from strategies.setup.joined_rows import JoinedRows
from tp_flower.arrays import IndexArray
from tp_flower.errors import MappingError
from tp_flower.joins.joining import join_codes
from tp_flower.protocol.setup_messages import CheckedPart, CheckPart, CheckRequest
from tp_flower.query import Join

WEIGHT_BITS = 32


@dataclass(frozen=True)
class Side:
    """One side of a join, and a row of its table for every matched key, (k,)."""

    table: str
    key: int
    rows: IndexArray


def check_alignment(
    joined: JoinedRows, rng: np.random.Generator
) -> Generator[Requests, Replies, dict[str, int]]:
    """Let the sites confirm the mapping; return the count of compared keys by join."""
    joins = joined.bound.joins
    if not joins:
        return {}
    sides = {n: _sides(joined, join) for n, join in enumerate(joins)}
    weights = {
        n: rng.integers(1, 1 << WEIGHT_BITS, len(left.rows), dtype=np.uint32)
        for n, (left, _) in sides.items()
    }
    bodies: dict[int, CheckPart] = {}
    for number, both in sides.items():
        for side in both:
            _ask_side(joined, number, side, weights[number], bodies)
    parts = [part for part in joined.extracted.all_parts if part.number in bodies]
    replies = yield ask(CheckRequest(bodies), parts)
    for number, both in sides.items():
        left, right = (
            _answer(replies, joined.extracted.parts[side.table], number)
            for side in both
        )
        join, keys = joins[number], len(both[0].rows)
        if left != right or left[0] != keys:
            raise MappingError(
                f"the two sides of the join {join.text} do not hold the same keys: of "
                f"{keys} matched keys {join.left} found {left[0]} and {join.right} "
                f"{right[0]}, and their digests differ. The mapping does not describe "
                "the tables: some site changed its table, its order of rows or its key "
                "during the run; nothing was trained"
            )
    return {join.text: len(sides[n][0].rows) for n, join in enumerate(joins)}


def _sides(joined: JoinedRows, join: Join) -> tuple[Side, Side]:
    """Return one row per matched key, on both sides in the same key order."""
    keys, mapping = joined.extracted.keys, joined.mapping
    codes, _ = join_codes(
        join, keys[join.left, join.left_key], keys[join.right, join.right_key]
    )
    left, right = mapping.tables[join.left].row_of, mapping.tables[join.right].row_of
    matched = np.flatnonzero((left >= 0) & (right >= 0))
    # of several joined rows with a key the last write wins: any will do
    row_of_key = np.full(int(codes.max(initial=-1)) + 1, -1, dtype=np.int64)
    row_of_key[codes[left[matched]]] = matched
    row_of_key = row_of_key[row_of_key >= 0]
    return (
        Side(join.left, join.left_key, left[row_of_key]),
        Side(join.right, join.right_key, right[row_of_key]),
    )


def _ask_side(
    joined: JoinedRows,
    join: int,
    side: Side,
    weights: npt.NDArray[np.uint32],
    bodies: dict[int, CheckPart],
) -> None:
    groups = key_groups(joined.bound)[side.table]
    for part, span in joined.extracted.shards_of(side.table):
        is_own = (side.rows >= span.start) & (side.rows < span.stop)
        body = bodies.setdefault(part.number, CheckPart(joins={}, key_groups=groups))
        body.rows[str(join)] = (side.rows[is_own] - span.start).astype(np.int32)
        body.weights[str(join)] = weights[is_own]
        body.joins[str(join)] = side.key


def _answer(
    replies: Replies, parts: Sequence[Part], join: int
) -> tuple[int, tuple[int, ...]]:
    """Return the count and the digest of a side, summed over the table's shards."""
    count, digest = 0, np.zeros(2, dtype=np.uint64)
    for part in parts:
        body = replies.body(part, CheckedPart)
        if str(join) not in body.counts or str(join) not in body.digest:
            raise refuse(part, f"no count and digest of the keys of join {join}")
        count += body.counts[str(join)]
        digest += body.digest[str(join)]
    return count, tuple(digest.tolist())
