"""What names the rows of predictions: columns of the label table, as its last keys.

At the site they are read as they are; the server gets a keyed hash of each row's, which
tells whoever lacks the run's key nothing but which rows are named alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from client_apps.orders import Order
from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
from tp_flower.privacy.keyed_hash import HashArray, KeyedHasher

ROW_KEY: Final = "row-key"
PURPOSE: Final = "row keys of predictions"
_NULL: Final = "null"
_HEAD: Final = r"^[a-z]+[0-9]+:"
"""What a key's canonical text begins with: its kind and its length."""
_WHOLE: Final = r"^-?[0-9]{1,18}$"
"""Numbers that int64 has."""


@dataclass(frozen=True)
class RowKey:
    """What an order says of a part's row key.

    Attributes:
        columns: how many of the fragment's last keys it consists of.
        leaves: whether its keyed hash leaves the site.
    """

    columns: int = 0
    leaves: bool = False

    @classmethod
    def of(cls, order: Order, keys: int) -> Self:
        """Return what an order says.

        Args:
            order: of a part.
            keys: how many keys the fragment has.

        Raises:
            SiteError: it has fewer keys, or the order is malformed.
        """
        if not order.has(ROW_KEY):
            return cls()
        told = order.order(ROW_KEY)
        return cls(told.count("columns", low=1, most=keys), told.flag("leaves"))

    def of_shard(self, extracted: ExtractedShard) -> tuple[ExtractedKey, ...]:
        """Return the keys that name the rows."""
        keys = extracted.keys
        return keys[len(keys) - self.columns :]

    def hashes(self, extracted: ExtractedShard, hasher: KeyedHasher) -> HashArray:
        """Return 128 bits of keyed hash of each row's key, uint64 (n, 2).

        A column that is NULL is a value like others.
        """
        texts = [
            pc.fill_null(_on_rows(key, _whole(key.texts)), _NULL)
            for key in self.of_shard(extracted)
        ]
        # each text carries its length: no two keys are one text
        joined = pc.binary_join_element_wise(*texts, "").dictionary_encode()
        found = hasher.purpose(PURPOSE).hash_texts(joined.dictionary)[:, :2]
        return np.ascontiguousarray(found[joined.indices.to_numpy()])


def plain_columns(
    keys: Sequence[ExtractedKey], names: Sequence[str]
) -> Mapping[str, pa.Array]:
    """Return the columns of a row key as they are, (n,) each.

    Args:
        keys: one per column.
        names: of the columns.
    """
    return {
        name: _on_rows(key, _values(key)) for name, key in zip(names, keys, strict=True)
    }


def _whole(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _on_rows(key: ExtractedKey, values: pa.Array) -> pa.Array:
    """Return what each row has of the distinct ``values``; missing where it is NULL."""
    return values.take(pa.array(key.codes, mask=key.codes < 0))


def _values(key: ExtractedKey) -> pa.Array:
    """Return the distinct values behind a key's canonical texts."""
    texts = pc.replace_substring_regex(_whole(key.texts), _HEAD, "", max_replacements=1)
    if key.kind == "boolean":
        return pc.equal(texts, "true")
    if key.kind == "time":
        return pc.cast(pc.cast(texts, pa.int64()), pa.timestamp("us", "UTC"))
    if key.kind != "number":
        return texts
    is_whole = pc.all(pc.match_substring_regex(texts, _WHOLE)).as_py()
    return pc.cast(texts, pa.int64() if is_whole else pa.float64())
