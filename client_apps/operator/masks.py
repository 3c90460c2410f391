"""The masks of a participant's scores: made when its rows are named, kept with them.

A site masks by every join key of its fragment. What it keeps is a tag per distinct key,
and which of them each row has; the keys of the masks stay with the run's other secrets,
and so does a digest of the words that have left under each name: no name's masks hide
others.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from client_apps.data.run_store import Entry
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.privacy.score_masks import NO_MASK, FixedPoint, JoinMask, ScoreMasks
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.training_messages import Masking

if TYPE_CHECKING:
    import pyarrow as pa

    from tp_flower.extraction.extracted import ExtractedKey
    from tp_flower.terms.groups import JoinSide

GroupKeys = Callable[[str], bytes]  # returns the key of a group of sites
_TAGS: Final = "mask-tags-{}"
_CODES: Final = "mask-codes-{}"
_POINT: Final = "mask-point"
_SIDES: Final = "mask-sides"
_TAG_PURPOSE: Final = "tags of score masks"


class Masked(NamedTuple):
    """Words that leave under the masks of a name, at a participant.

    >>> Masked(0, "sum 1", np.zeros(2, np.uint64)).digest.hex()[:8]
    'f91e3c49'
    """

    part: int
    name: str
    words: AnyArray

    @property
    def digest(self) -> bytes:
        """A digest of the words: no others may leave under these masks."""
        digest = hashlib.sha256(f"{self.words.dtype.str} {self.words.shape} ".encode())
        digest.update(np.ascontiguousarray(self.words).data if self.words.size else b"")
        return digest.digest()


def masks_entry(masks: ScoreMasks) -> Entry:
    """Return the entry of masks that is stored with a shard's data: all but keys."""
    arrays: dict[str, AnyArray] = {}
    for number, mask in enumerate(masks.joins):
        arrays[_TAGS.format(number)] = mask.tags
        arrays[_CODES.format(number)] = mask.codes
    join_sides = [[mask.group, mask.is_positive, mask.shared] for mask in masks.joins]
    return Entry(
        arrays, {_POINT: [masks.point.bits, masks.point.tables], _SIDES: join_sides}
    )


def read_masks(entry: Entry, keys: GroupKeys) -> ScoreMasks | None:
    """Return the masks that :func:`masks_entry` has stored; None without masks."""
    meta: Any = entry.meta
    if _POINT not in meta:
        return None
    arrays: Any = entry.arrays
    joins = tuple(
        JoinMask(
            group,
            keys(group),
            arrays[_TAGS.format(number)],
            arrays[_CODES.format(number)],
            is_positive,
            shared,
        )
        for number, (group, is_positive, shared) in enumerate(meta[_SIDES])
    )
    return ScoreMasks(FixedPoint(*meta[_POINT]), joins)


def are_masked(masking: Masking | None, sides: "Sequence[JoinSide]") -> bool:
    """Return whether masks hide the scores; a table without joins has none."""
    return masking is not None and bool(sides)


@dataclass(frozen=True)
class MaskedRows:
    """The rows of a part whose scores leave, and by what they are masked.

    Attributes:
        rows: (n,), positions in the table.
        join_keys: of the fragment, those that joins compare.
        sides: of the run's joins.
        unmatched: by group, the rows that a LEFT JOIN finds no partner for, a bit each.
        answered: the groups of joins whose other side has an answer for rows with a key
            that it lacks: its mask is that of no rows.
        tag_keys: the run's keys of tags, where a fit of a search has keys of its own.
    """

    rows: npt.NDArray[np.integer]
    join_keys: "Sequence[ExtractedKey]"
    sides: "Sequence[JoinSide]"
    unmatched: Mapping[str, AnyArray]
    answered: Collection[str] = ()
    tag_keys: GroupKeys | None = None


def score_masks(
    masking: Masking | None, masked: MaskedRows, keys: GroupKeys
) -> ScoreMasks | None:
    """Return the masks of the scores of a part's rows; None without masking.

    Raises:
        MessageError: a row lacks the key of a join.
    """
    if masking is None:
        return None
    # few messages make masks, but all of them may import this module
    import pyarrow as pa

    masks = []
    for side in masked.sides:
        codes, texts, shared = _keys_of_rows(masked, side)
        is_used = np.zeros(len(texts), np.bool_)
        is_used[codes[codes >= 0]] = True
        tag_keys = keys if masked.tag_keys is None else masked.tag_keys
        hasher = KeyedHasher(tag_keys(side.group)).purpose(_TAG_PURPOSE)
        tags = hasher.tag_texts(texts.filter(pa.array(is_used)))
        # the last is what the code of a missing value selects
        places = np.append(np.cumsum(is_used, dtype=np.int32) - 1, np.int32(NO_MASK))
        masks.append(
            JoinMask(
                side.group,
                keys(side.group),
                tags,
                places[codes],
                side.is_positive,
                NO_MASK if shared is None else int(places[shared]),
            )
        )
    return ScoreMasks(FixedPoint(masking.bits, masking.tables), tuple(masks))


def _keys_of_rows(
    masked: MaskedRows, side: "JoinSide"
) -> "tuple[npt.NDArray[np.int32], pa.Array, int | None]":
    """Return by which of the keys each row is masked, (n,), and the keys' texts.

    Rows without a partner have no mask, or the one that is returned last: that of the
    answer about no rows.
    """
    key = masked.join_keys[side.key]
    codes = key.codes[masked.rows]
    alone = np.zeros(len(codes), np.bool_)
    if side.group in masked.unmatched:
        alone = unpack_bits(masked.unmatched[side.group], len(key.codes))[masked.rows]
    lacking = (codes < 0) & ~alone
    if lacking.any():
        raise MessageError(
            f"{int(lacking.sum())} rows take part in {side.group} without a key"
        )
    is_answered = alone & (codes >= 0) & (side.group in masked.answered)
    codes = np.where(alone, np.int32(NO_MASK), codes)
    if not is_answered.any():
        return codes, key.texts, None
    answered = key.with_no_rows()
    shared = len(answered.texts) - 1
    return np.where(is_answered, np.int32(shared), codes), answered.texts, shared
