"""The masks of a participant's scores: made when its rows are named, kept with them.

A site masks by every join key of its fragment. What it keeps is a tag per distinct key,
and which of them each row has; the keys of the masks stay with the run's other secrets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.privacy.score_masks import (
    NO_MASK,
    FixedPoint,
    JoinMask,
    RowIndex,
    WordArray,
    masked,
)
from tp_flower.protocol.inference_messages import ScorePart
from tp_flower.protocol.packet import row_numbers, unpack_bits
from tp_flower.protocol.setup_messages import JoinSide
from tp_flower.protocol.training_messages import Masking, PreparePart

if TYPE_CHECKING:
    from tp_flower.extraction.extracted import ExtractedKey

GroupKeys = Callable[[str], bytes]
"""Returns the key of a group of sites."""

_TAGS, _CODES = "mask-tags-{}", "mask-codes-{}"
_TAG_PURPOSE = "tags of score masks"


@dataclass(frozen=True)
class ScoreMasks:
    """The masks of the rows of a participant that take part, (n,)."""

    point: FixedPoint
    sides: tuple[JoinSide, ...]
    joins: tuple[JoinMask, ...]

    def words(self, scores: FloatArray, rows: RowIndex, name: str) -> WordArray:
        """Return the masked scores (k, d_c) of some of the rows."""
        return masked(scores, self.point, self.joins, rows, name)

    @property
    def unmatched(self) -> tuple[int, int]:
        """How many rows lack the mask of some join, and how many rows there are."""
        bare = [mask.codes == NO_MASK for mask in self.joins]
        return (int(np.any(bare, axis=0).sum()), len(bare[0])) if bare else (0, 0)

    def arrays(self) -> dict[str, AnyArray]:
        """Return the arrays that :meth:`read` reads."""
        arrays: dict[str, AnyArray] = {}
        for number, mask in enumerate(self.joins):
            arrays[_TAGS.format(number)] = mask.tags
            arrays[_CODES.format(number)] = mask.codes
        return arrays

    def facts(self) -> dict[str, object]:
        """Return the plain values that :meth:`read` reads."""
        return {
            "point": [self.point.bits, self.point.tables],
            "sides": msgspec.to_builtins(self.sides),
        }

    @classmethod
    def read(cls, facts: Any, arrays: Mapping[str, AnyArray], keys: GroupKeys) -> Self:
        """Return the masks of stored facts and arrays."""
        sides = msgspec.convert(facts["sides"], tuple[JoinSide, ...])
        joins = tuple(
            JoinMask(
                keys(side.group),
                arrays[_TAGS.format(number)],
                arrays[_CODES.format(number)],
                side.is_positive,
            )
            for number, side in enumerate(sides)
        )
        return cls(FixedPoint(*facts["point"]), sides, joins)


def sent_scores(
    scores: FloatArray, masks: ScoreMasks | None, rows: RowIndex, name: str
) -> AnyArray:
    """Return scores (k, d_c) of some rows as they leave: numbers, or masked words."""
    return row_numbers(scores) if masks is None else masks.words(scores, rows, name)


def are_masked(masking: Masking | None, body: PreparePart | ScorePart) -> bool:
    """Return whether masks hide the scores; a table without joins has none."""
    return masking is not None and bool(body.joins)


def score_masks(
    masking: Masking | None,
    body: PreparePart | ScorePart,
    join_keys: "Sequence[ExtractedKey]",
    rows: npt.NDArray[np.integer],
    keys: GroupKeys,
) -> ScoreMasks | None:
    """Return the masks of rows (n,), positions in the table; None without masking.

    ``join_keys`` are those of the fragment that joins compare. The body of the request
    has the sides of the joins, and the rows that a LEFT JOIN finds no partner for.

    Raises:
        MessageError: a join key has no mask, or a row lacks the key of a join.
    """
    if masking is None:
        return None
    sides, unmatched = body.joins, body.unmatched
    if bare := sorted(set(range(len(join_keys))) - {side.key for side in sides}):
        raise MessageError(
            f"'joins' has no side of join keys {bare}: they mask nothing"
        )
    masks = []
    for side in sides:
        if side.key >= len(join_keys):
            raise MessageError(
                f"'joins' names join key {side.key}; the table has {len(join_keys)}"
            )
        key, group_key = join_keys[side.key], keys(side.group)
        codes, hashes = key.hashed_whole(KeyedHasher(group_key).purpose(_TAG_PURPOSE))
        codes = codes[rows]
        if side.group in unmatched:
            alone = unpack_bits(unmatched[side.group], len(key.codes))[rows]
            codes = np.where(alone, np.int32(NO_MASK), codes)
            lacking = (codes < 0) & ~alone
        else:
            lacking = codes < 0
        if lacking.any():
            raise MessageError(
                f"{int(lacking.sum())} rows take part in {side.group} without a key"
            )
        used, places = np.unique(codes[codes >= 0], return_inverse=True)
        compact = np.full(len(codes), NO_MASK, np.int32)
        compact[codes >= 0] = places
        tags = np.ascontiguousarray(hashes[used, :2])
        masks.append(JoinMask(group_key, tags, compact, side.is_positive))
    point = FixedPoint(masking.bits, masking.tables)
    return ScoreMasks(point, tuple(sides), tuple(masks))
