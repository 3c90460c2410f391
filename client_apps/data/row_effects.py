"""Row effects at a site: kept with the saved model, under the keys of the rows.

The server fits them (:mod:`tp_flower.learning.row_effects`) and sends one for each
trained row. A saved model finds them again by the join keys of the rows that it scores;
a key that training has not seen has the effect 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, ModelError
from tp_flower.keyed_hash import KEY_BYTES, HashArray, KeyedHasher

if TYPE_CHECKING:
    from tp_flower.extraction.extracted import ExtractedKey

# what is hashed stays at the site, as the rows and the models do
_HASHER: Final = KeyedHasher(bytes(KEY_BYTES))
_PURPOSE: Final = "row effects by {}"
_HASHES: Final = "effect-keys"
_VALUES: Final = "effects"
NO_KEY: Final = 0  # in both words: of rows that lack one


def key_names(names: Sequence[str], keys: Sequence["ExtractedKey"]) -> tuple[str, ...]:
    """Return the names of keys with their kinds, which must be those of training."""
    return tuple(f"{n} ({key.kind})" for n, key in zip(names, keys, strict=True))


def hash_keys(
    names: Sequence[str], keys: Sequence["ExtractedKey"], rows: AnyArray
) -> HashArray:
    """Return 128 bits of hash of the join keys of some rows, uint64 (n, 2).

    Args:
        names: of the keys in the query.
        keys: of all rows of the table, in the same order.
        rows: (n,), positions.
    """
    hashes = np.zeros((len(rows), 2), np.uint64)
    lacks_key = np.zeros(len(rows), np.bool_)
    for name, key in zip(names, keys, strict=True):
        hasher = _HASHER.purpose(_PURPOSE.format(name))
        codes, distinct = key.hashed_whole(hasher)
        codes = codes[rows]
        lacks_key |= codes < 0
        hashes ^= np.concatenate([distinct[:, :2], np.zeros((1, 2), np.uint64)])[codes]
    hashes[lacks_key] = NO_KEY
    return hashes


@dataclass(frozen=True)
class KeyEffects:
    """The effects that a saved model has of the keys of a table.

    Attributes:
        names: of the keys in the query, sorted: those of rows to score must be the
            same.
        hashes: uint64 (K, 2), of the keys, ascending.
        values: float32 (K, d_c).
    """

    names: tuple[str, ...]
    hashes: HashArray
    values: AnyArray

    @classmethod
    def of(cls, names: Sequence[str], hashes: HashArray, values: AnyArray) -> Self:
        """Return the effects of keys from those of rows, (n, 2) and (n, d_c).

        Raises:
            MessageError: two rows of one key have different effects.
        """
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        hashes, values = hashes[order], values[order]
        is_first = np.ones(len(hashes), np.bool_)
        is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
        if (values[1:] != values[:-1])[~is_first[1:]].any():
            raise MessageError("'effects' differ between rows of one key")
        is_first &= (hashes != NO_KEY).any(axis=1)
        return cls(
            tuple(sorted(names)),
            np.ascontiguousarray(hashes[is_first]),
            np.ascontiguousarray(values[is_first], np.float32),
        )

    def find(self, hashes: HashArray) -> FloatArray:
        """Return the effects of keys (n, 2), float64 (n, d_c); 0 of unknown ones."""
        found = np.zeros((len(hashes), self.values.shape[1]))
        if not len(self.hashes):
            return found
        # equal first halves of different hashes occur once in 2**64 pairs
        place = np.searchsorted(self.hashes[:, 0], hashes[:, 0])
        place = np.minimum(place, len(self.hashes) - 1)
        is_known = (self.hashes[place] == hashes).all(axis=1)
        found[is_known] = self.values[place[is_known]]
        return found

    def check_keys(self, names: Sequence[str]) -> None:
        """Refuse rows that are joined by other keys than those of the effects."""
        if len(self.hashes) and tuple(sorted(names)) != self.names:
            raise ModelError(
                "the model has effects of rows by the keys of its query's joins "
                f"({', '.join(self.names)}), and this query joins the table by "
                f"{', '.join(names) or 'none'}: join it as in training"
            )

    @property
    def arrays(self) -> dict[str, AnyArray]:
        """The arrays that :meth:`read` reads."""
        return {_HASHES: self.hashes, _VALUES: self.values}

    @classmethod
    def read(cls, names: Sequence[str], arrays: dict[str, Any]) -> Self:
        """Return the effects that a saved model has."""
        return cls(tuple(names), arrays[_HASHES], arrays[_VALUES])
