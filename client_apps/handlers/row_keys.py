"""What names the rows of predictions: columns of the label table, as its last keys.

At the site they are read as they are. Where the server writes the predictions, it gets
a keyed hash of each row's, which tells whoever lacks the run's key nothing but which
rows are named alike; the site keeps a file that says which hash is which row.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from client_apps.data.run_store import cannot_write
from client_apps.rounds.site import Site
from tp_flower.errors import SiteError
from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
from tp_flower.keyed_hash import HashArray, KeyedHasher
from tp_flower.protocol import RowKeyColumns
from tp_flower.reports.predictions import (
    OCCURRENCE,
    ROW,
    ROW_HASH,
    hex_texts,
    write_predictions,
)

PREDICTIONS: Final = "predictions"
"""Folder below the state folder."""
NAMES: Final = "row-keys"
RUN_SHOWN: Final = 8
PRIVATE_FILE: Final = 0o600
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
        names: of its columns, which are the fragment's last keys.
        leaves: whether its keyed hash leaves the site.
    """

    names: tuple[str, ...] = ()
    leaves: bool = False

    @property
    def columns(self) -> int:
        """How many of the fragment's last keys it consists of."""
        return len(self.names)

    @classmethod
    def of(cls, columns: RowKeyColumns | None, keys: int) -> Self:
        """Return what a request says.

        Args:
            columns: that it names; None for none.
            keys: how many keys the fragment has.

        Raises:
            SiteError: it has fewer keys, or columns are named as others.
        """
        if columns is None:
            return cls()
        names = columns.names
        taken = {name.lower() for name in names} & {ROW, OCCURRENCE, ROW_HASH}
        if taken or len(set(names)) < len(names) or not 0 < len(names) <= keys:
            raise SiteError(
                f"malformed request: 'names' of a row key must be 1 to {keys} that "
                "differ from each other and from the columns of predictions"
            )
        return cls(names, columns.leaves)

    def of_shard(self, extracted: ExtractedShard) -> tuple[ExtractedKey, ...]:
        """Return the keys that name the rows."""
        keys = extracted.keys
        return keys[len(keys) - self.columns :]

    def plain(self, extracted: ExtractedShard) -> dict[str, pa.Array]:
        """Return its columns as they are, (n,) each."""
        keys = zip(self.names, self.of_shard(extracted), strict=True)
        return {name: _on_rows(key, _values(key)) for name, key in keys}

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


def leave_hashes(
    site: Site, number: int, row_key: RowKey, extracted: ExtractedShard
) -> HashArray:
    """Return the hashes of a part's row keys, and keep which row each of them is.

    Raises:
        SiteError: the file cannot be written.
    """
    hashes = row_key.hashes(extracted, site.hasher())
    root, run = site.state_folder, site.store.run
    if root is None:
        return hashes
    columns = {
        ROW_HASH: hex_texts(hashes),
        ROW: pa.array(np.arange(extracted.rows)),
        **row_key.plain(extracted),
    }
    folder = root / PREDICTIONS / f"{NAMES}-{run[:RUN_SHOWN]}"
    path = folder / f"part-{number}.parquet"
    try:
        write_predictions(pa.table(columns), path, {}, PRIVATE_FILE)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return hashes


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
