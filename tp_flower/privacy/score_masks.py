"""Masks on the scores of a table's rows, which cancel in every joined row.

Where rows of two tables meet, both sides of every join equality e hold the same key. A
row's score leaves its site as

    w_i(r) = fix(h_i(r)) + sum_e sign(i, e) PRF(K_e; tag(key_e(r)), n)      mod 2^32

with the sign + at one side of the equality and - at the other. K_e is known to the
sites of the two sides alone, ``tag`` is a keyed hash of the key's value, and n numbers
the scores of the run: no two of them share a mask. In a joined row the masks of every
equality cancel, so that the server adds the words of all tables and reads the sum of
their scores; from words that do not add up to joined rows it learns nothing
(docs/explanation/masks.md has the proof).

A row that a LEFT JOIN finds no partner for keeps no mask of that equality. Where the
other side has an answer for all keys that it lacks (``extraction/empty_answers.py``),
rows with such keys have one mask, that of the answer.

Where the rows of tables are pairs with a region of another table's row
(``joins/pairs.py``), the tag is of the key and the region, which all pairs behind a
joined row share: the proof holds of pairs as it does of rows.

fix is a number in fixed point: x 2^b, rounded. Of M tables each may use the M-th part
of the 32 bits, so that no sum wraps around.

Notation:
    n  rows           k  distinct keys of a side of an equality        d_c  outputs
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tp_flower.arrays import FloatArray
from tp_flower.errors import DivergedError
from tp_flower.keyed_hash import HashArray

WordArray = npt.NDArray[np.uint32]
RowIndex = slice | npt.NDArray[np.integer | np.bool_]

_BLOCK_BYTES: Final = 16
_WORDS: Final = _BLOCK_BYTES // 4
_PURPOSE: Final = b"tp_flower score mask v1 "

RANGE_BITS: Final = 10  # the sum of the scores stays within 2^10 times their unit
NO_MASK: Final = -1
_REGIONS: Final = 1 << 8  # a byte, in the highest of a tag
_REGION_SHIFT: Final = 56


@dataclass(frozen=True)
class FixedPoint:
    """The fixed point of a run's scores.

    Attributes:
        bits: b, after the point; negative for large scores.
        tables: M, whose scores are summed.
    """

    bits: int
    tables: int

    @classmethod
    def for_scores(cls, unit: float, tables: int) -> "FixedPoint":
        """Return the fixed point for scores whose size is about ``unit`` > 0.

        >>> round(FixedPoint.for_scores(1.0, 3).limit, 3)
        341.333
        """
        return cls(31 - RANGE_BITS - round(np.log2(unit)), tables)

    @property
    def limit(self) -> float:
        """The absolute score of one table that none may reach.

        With it the sum of M rounded scores stays below 2^31.
        """
        return (2.0**31 / self.tables - 1.0) / 2.0**self.bits

    @property
    def rounding(self) -> float:
        """The root mean square error of the sum of M rounded scores.

        >>> round(FixedPoint(bits=10, tables=3).rounding * 2**10, 3)
        0.5
        """
        return float(2.0**-self.bits * np.sqrt(self.tables / 12.0))

    def words(self, scores: FloatArray) -> WordArray:
        """Return fix(h) of scores (n, d_c).

        Raises:
            DivergedError: a score is out of range.
        """
        # false for NaN
        if not np.abs(scores).max(initial=0.0) < self.limit:
            # the server reads this: a score's value would tell what masks hide
            raise DivergedError(
                "a score is out of range; the run's fixed point allows up to "
                f"{self.limit:g}: training diverged"
            )
        return np.rint(scores * 2.0**self.bits).astype(np.int32).view(np.uint32)

    def numbers(self, words: WordArray) -> FloatArray:
        """Return the numbers whose fixed point the words are, (n, d_c).

        >>> point = FixedPoint(bits=20, tables=2)
        >>> point.numbers(point.words(np.array([[-1.5], [0.25]]))).tolist()
        [[-1.5], [0.25]]
        """
        return words.view(np.int32) / 2.0**self.bits


@dataclass(frozen=True)
class JoinMask:
    """One side of a join equality, at the rows of one participant.

    Attributes:
        group: the name of the group of sites that share the key.
        key: K_e.
        tags: uint64 (k, 2), of the distinct keys.
        codes: int32 (n,), which tag a row has; -1 for a row without a mask.
        is_positive: whether the masks are added.
        shared: the code of rows whose keys the other side lacks: that of its answer
            about no rows. It hides them from each other as little as no mask.
    """

    group: str
    key: bytes = field(repr=False)
    tags: HashArray
    codes: npt.NDArray[np.int32]
    is_positive: bool
    shared: int = NO_MASK

    def of_rows(self, rows: RowIndex, outputs: int, name: str) -> WordArray:
        """Return the masks of some rows, (n, d_c), for the scores of a name."""
        codes = self.codes[rows]
        if not (len(codes) and len(self.tags)):
            return np.zeros((len(codes), outputs), np.uint32)
        # one of the two is cheaper; "wrap" reads any tag for a row without a mask
        if len(codes) < len(self.tags):
            words = self._key_masks(
                self.tags.take(codes, axis=0, mode="wrap"), outputs, name
            )
        else:
            words = self._key_masks(self.tags, outputs, name).take(
                codes, axis=0, mode="wrap"
            )
        if self._masks_all:
            return words
        return np.where(codes[:, None] == NO_MASK, np.uint32(0), words)

    def split(
        self, rows: npt.NDArray[np.integer], regions: npt.NDArray[np.uint8]
    ) -> "JoinMask":
        """Return the masks of pairs of rows and regions, (m,) each.

        A pair's tag is that of its row's key and its region: pairs of one row that
        are in different regions have different masks.
        """
        key_codes = self.codes[rows]
        combined = key_codes.astype(np.int64) * _REGIONS + regions
        has_mask = key_codes != NO_MASK
        used, places = np.unique(combined[has_mask], return_inverse=True)
        tags = self.tags[used // _REGIONS]
        # far from the bits that number a row's blocks
        tags[:, 1] ^= (used % _REGIONS).astype(np.uint64) << np.uint64(_REGION_SHIFT)
        codes = np.full(len(key_codes), NO_MASK, np.int32)
        codes[has_mask] = places
        return replace(self, tags=tags, codes=codes, shared=NO_MASK)

    @cached_property
    def _cipher(self) -> CipherContext:
        # to make it for every message would take longer than the masks of a batch
        return Cipher(
            AES(hashlib.sha256(_PURPOSE + self.key).digest()), ECB()
        ).encryptor()

    @cached_property
    def _masks_all(self) -> bool:
        return NO_MASK not in self.codes

    def _key_masks(self, tags: HashArray, outputs: int, name: str) -> WordArray:
        """Return the masks of keys (n, d_c), by their tags (n, 2)."""
        # different inputs of one permutation: two tags whose difference is that of two
        # names, or a few bits, are as unlikely as two that are equal
        inputs = tags ^ np.frombuffer(
            hashlib.sha256(name.encode()).digest()[:_BLOCK_BYTES], "<u8"
        )
        blocks = -(-outputs // _WORDS)
        if blocks > 1:
            inputs = np.repeat(inputs[:, None, :], blocks, axis=1)
            inputs[:, :, 1] ^= np.arange(blocks, dtype=np.uint64)
        text = self._cipher.update(np.ascontiguousarray(inputs, "<u8").data.cast("B"))
        return np.frombuffer(text, "<u4").reshape(len(tags), blocks * _WORDS)[
            :, :outputs
        ]


@dataclass(frozen=True)
class ScoreMasks:
    """The masks of a participant's rows that take part, (n,), and their fixed point."""

    point: FixedPoint
    joins: tuple[JoinMask, ...]

    def words(self, scores: FloatArray, rows: RowIndex, name: str) -> WordArray:
        """Return the masked scores (k, d_c) of some of the rows.

        ``name`` is unique to these scores in the run: the same at all participants, and
        for no other scores.
        """
        words = self.point.words(scores)
        for mask in self.joins:
            row_masks = mask.of_rows(rows, scores.shape[1], name)
            if mask.is_positive:
                words += row_masks
            else:
                words -= row_masks
        return words

    def split(
        self, rows: npt.NDArray[np.integer], regions: npt.NDArray[np.uint8]
    ) -> "ScoreMasks":
        """Return the masks of pairs of rows and regions, (m,) each."""
        joins = tuple(mask.split(rows, regions) for mask in self.joins)
        return ScoreMasks(self.point, joins)

    def take(self, rows: npt.NDArray[np.integer]) -> "ScoreMasks":
        """Return the masks of some rows, in their order."""
        joins = [replace(mask, codes=mask.codes.take(rows)) for mask in self.joins]
        return ScoreMasks(self.point, tuple(joins))

    @property
    def unmatched(self) -> tuple[int, int]:
        """How many rows have no partner in some join, and how many rows there are."""
        bare = [np.isin(mask.codes, (NO_MASK, mask.shared)) for mask in self.joins]
        if bare:
            return (int(np.any(bare, axis=0).sum()), len(bare[0]))
        return (0, 0)
