"""Effects and factors at a site: kept with the saved model, by the keys of the rows.

The server fits them (:mod:`tp_flower.learning.row_effects` and
:mod:`tp_flower.learning.key_factors`) and sends those of each trained row. A saved
model finds them again by the join keys of the rows that it scores; of a key that
training has not seen they are 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, ModelError
from tp_flower.keyed_hash import (
    KEY_BYTES,
    HashArray,
    KeyedHasher,
    order_of_hashes,
)

if TYPE_CHECKING:
    from tp_flower.extraction.extracted import ExtractedKey

# what is hashed stays at the site, as the rows and the models do
_HASHER: Final = KeyedHasher(bytes(KEY_BYTES))
_PURPOSE: Final = "row effects by {}"
_HASHES: Final = "{}-keys"
_VALUES: Final = "{}s"
EFFECT: Final = "effect"
FACTOR: Final = "factor"
NO_KEY: Final = 0  # in both words: of rows that lack one


def key_names(names: Sequence[str], keys: Sequence["ExtractedKey"]) -> tuple[str, ...]:
    """Return the names of keys with their kinds, which must be those of training."""
    return tuple(f"{n} ({key.kind})" for n, key in zip(names, keys, strict=True))


def key_hasher(name: str) -> KeyedHasher:
    """Return the hasher of a key's values, by its name in the query."""
    return _HASHER.purpose(_PURPOSE.format(name))


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
        distinct = key_hasher(name).hash_texts(key.texts)[:, :2]
        codes = key.codes[rows]
        lacks_key |= codes < 0
        hashes ^= np.concatenate([distinct, np.zeros((1, 2), np.uint64)])[codes]
    hashes[lacks_key] = NO_KEY
    return hashes


@dataclass(frozen=True)
class KeyNumbers:
    """The effects, or the factors, that a saved model has of the keys of a table.

    Attributes:
        kind: which of them, as one of them is called.
        names: of the keys in the query, sorted: those of rows to score must be the
            same.
        hashes: uint64 (K, 2), of the keys, ascending.
        values: float32 (K, c): effects on each output, or factors.
    """

    kind: str
    names: tuple[str, ...]
    hashes: HashArray
    values: AnyArray

    @classmethod
    def of(
        cls, kind: str, names: Sequence[str], hashes: HashArray, values: AnyArray
    ) -> Self:
        """Return the numbers of keys from those of rows, (n, 2) and (n, c).

        Raises:
            MessageError: two rows of one key have different ones.
        """
        order = order_of_hashes(hashes)
        hashes, values = hashes[order], values[order]
        is_first = np.ones(len(hashes), np.bool_)
        is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
        if (values[1:] != values[:-1])[~is_first[1:]].any():
            raise MessageError(
                f"{_VALUES.format(kind)!r} differ between rows of one key"
            )
        is_first &= (hashes != NO_KEY).any(axis=1)
        return cls(
            kind,
            tuple(sorted(names)),
            np.ascontiguousarray(hashes[is_first]),
            np.ascontiguousarray(values[is_first], np.float32),
        )

    def find(self, hashes: HashArray) -> FloatArray:
        """Return the numbers of keys (n, 2), float64 (n, c); 0 of unknown ones."""
        numbers = np.zeros((len(hashes), self.values.shape[1]))
        if not len(self.hashes):
            return numbers
        # equal first halves of different hashes occur once in 2**64 pairs
        position = np.searchsorted(self.hashes[:, 0], hashes[:, 0])
        position = np.minimum(position, len(self.hashes) - 1)
        is_known = (self.hashes[position] == hashes).all(axis=1)
        numbers[is_known] = self.values[position[is_known]]
        return numbers

    def check_keys(self, names: Sequence[str]) -> None:
        """Refuse rows that are joined by other keys than those of the training."""
        if len(self.hashes) and tuple(sorted(names)) != self.names:
            raise ModelError(
                f"the model has {_VALUES.format(self.kind)} of rows by the keys of its "
                "query's joins "
                f"({', '.join(self.names)}), and this query joins the table by "
                f"{', '.join(names) or 'none'}: join it as in training"
            )

    @property
    def arrays(self) -> dict[str, AnyArray]:
        """The arrays that :meth:`read` reads."""
        return {
            _HASHES.format(self.kind): self.hashes,
            _VALUES.format(self.kind): self.values,
        }

    @property
    def metadata(self) -> dict[str, list[str]]:
        """What it reads beside them."""
        return {_HASHES.format(self.kind): list(self.names)}

    @classmethod
    def read(
        cls, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, Any]
    ) -> Self | None:
        """Return the numbers of a kind that a saved model has; None for none."""
        hashes = _HASHES.format(kind)
        if hashes not in metadata:
            return None
        names = tuple(metadata[hashes])
        return cls(kind, names, arrays[hashes], arrays[_VALUES.format(kind)])
