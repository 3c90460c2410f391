"""The rows that a fragment of the query yields on one shard, read from Arrow files.

Layout
    rows.arrow              batches of rows: numbers as float64, vectors as lists of
                            float32, texts and keys as int32 positions in their list
    texts-<column>.arrow    the list: the distinct texts of each batch, batch by batch
    shard.json              what the columns are, and at which row each batch starts

A shard may be larger than memory: it is written and read batch by batch, with plain
reads, because the pages of a memory map count as memory of the process. Small shards
keep the same files in memory. Nothing in them is keyed: the secret of the hashes
changes with every run.

Notation
    n   rows of the shard that pass the fragment's filters
    k   distinct values of a key
    e   texts of a list: the sum over the batches of their distinct texts
    d   length of a feature's vectors
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.features.columns import (
    CategoricalColumn,
    CodeArray,
    FeatureColumn,
    NumericColumn,
    VectorColumn,
)
from tp_flower.keyed_hash import HashArray, KeyedHasher

# Arrow's own allocator keeps 40 MiB that nobody uses
pa.set_memory_pool(pa.system_memory_pool())

ROWS_FILE: Final = "rows.arrow"
TEXTS_FILE: Final = "texts-{}.arrow"
MISSING: Final = -1


@dataclass(frozen=True)
class FeatureInfo:
    """A feature before it is encoded: "number", "boolean", "time", "text" or "vector".

    ``width`` is d of a vector, 1 of all other kinds.
    """

    name: str
    kind: str
    width: int = 1


@dataclass(frozen=True, eq=False)
class KeyColumn:
    """A join key of each row, as a number into its distinct hashed values.

    Attributes:
        codes: int32 (n,), row of ``hashes``; -1 where any part of the key is NULL.
        hashes: uint64 (k, 2), 128 bits of hash of each distinct value, in the hashes'
            order, so that it tells nothing about the values' order.
        kind: the kinds of the parts, such as "number" or "text+time".
    """

    codes: CodeArray
    hashes: HashArray
    kind: str


@dataclass(frozen=True, eq=False)
class ExtractedKey:
    """A join key, or the group of a sub-query, of each row.

    Attributes:
        codes: int32 (n,), position in ``texts``; -1 where any part of a join key is
            NULL.
        texts: (k,), the canonical text of each distinct value.
        kind: the kinds of the parts, such as "number" or "text+time".
    """

    codes: CodeArray
    texts: pa.Array
    kind: str

    def hashed(self, hasher: KeyedHasher) -> KeyColumn:
        """Return the key as it may leave the site, in the order of its hashes."""
        codes, hashes = self.hashed_whole(hasher)
        return KeyColumn(codes, hashes[:, :2], self.kind)

    def digests(self, hasher: KeyedHasher) -> HashArray:
        """Return 128 further bits of hash of each row of ``hashed``'s, uint64 (k, 2).

        Whoever has the hashes alone cannot tell these.
        """
        return self.hashed_whole(hasher)[1][:, 2:]

    def hashed_whole(self, hasher: KeyedHasher) -> tuple[CodeArray, HashArray]:
        """Return the codes (n,) and all 256 bits (k, 4), in the order of the hashes."""
        hashes = hasher.hash_texts(self.texts)
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        place = np.empty(len(order) + 1, np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        place[-1] = -1  # where a missing value's code points to
        return place[self.codes], np.ascontiguousarray(hashes[order])


@dataclass(frozen=True, eq=False)
class LabelColumn:
    """The label of each row.

    Attributes:
        kind: "number", "boolean", "time" or "text".
        values: float64 (n,), NaN where NULL: numbers, 0/1, seconds since 1970, or for
            text the position in ``categories``.
        categories: the distinct texts of this shard, sorted; empty for other kinds.
    """

    kind: str
    values: FloatArray
    categories: tuple[str, ...] = ()

    @property
    def codes(self) -> CodeArray:
        """int32 (n,), position in ``categories``, -1 where NULL."""
        return np.where(np.isnan(self.values), -1, self.values).astype(np.int32)

    def positions_in(self, classes: Sequence[str | float]) -> FloatArray:
        """Return each label's position among classes, (n,); NaN where it is none.

        >>> LabelColumn("text", np.array([1.0, 0.0]), ("a", "b")).positions_in(["b"])
        array([ 0., nan])
        """
        place_of = {name: place for place, name in enumerate(classes)}
        if self.kind == "text":
            places = [place_of.get(name, math.nan) for name in self.categories]
            return np.array([*places, math.nan])[self.codes]
        distinct, codes = np.unique(self.values, return_inverse=True)
        return np.array([place_of.get(v, math.nan) for v in distinct.tolist()])[codes]


class ExtractedShard:
    """The rows of one fragment on one shard; columns are read when they are needed.

    ``table`` is the table's alias in the query, ``rows`` is n, ``pushed`` the filters
    that the database applied, in words.
    """

    def __init__(
        self, meta: Mapping[str, Any], open_file: Callable[[str], pa.NativeFile]
    ) -> None:
        self.meta = meta
        self.table: str = meta["table"]
        self.rows = int(meta["starts"][-1])
        self.engine: str = meta["engine"]
        self.pushed: tuple[str, ...] = tuple(meta["pushed"])
        self.features = tuple(
            FeatureInfo(item["name"], item["kind"], int(item["width"]))
            for item in meta["features"]
        )
        self._columns = {item["name"]: item["column"] for item in meta["features"]}
        self._starts = np.array(meta["starts"], np.int64)
        self._open_file = open_file
        self._lists: dict[str, tuple[CodeArray, pa.Array]] = {}

    @property
    def keys(self) -> tuple[ExtractedKey, ...]:
        """The join keys, in the fragment's order."""
        return tuple(self._key(item) for item in self.meta["keys"])

    @property
    def groups(self) -> ExtractedKey | None:
        """The groups of a sub-query, NULL being a value too; None without one."""
        item = self.meta["groups"]
        return self._key(item) if item else None

    @property
    def label(self) -> LabelColumn | None:
        """The label, None if it is another table's."""
        item = self.meta["label"]
        if not item:
            return None
        if item["kind"] != "text":
            return LabelColumn(item["kind"], self._numbers(item["column"]))
        codes, texts = self._coded(item["column"])
        values = np.where(codes < 0, np.nan, codes)
        return LabelColumn("text", values, tuple(texts.to_pylist()))

    @property
    def weight(self) -> FloatArray | None:
        """The weight of each row's joined rows, float64 (n,), NaN where it is NULL.

        None if it is another table's, or there is none.
        """
        column = self.meta["weight"]
        return self._numbers(column) if column else None

    def column(self, name: str) -> FeatureColumn:
        """Return one whole feature."""
        column = self._columns[name]
        info = next(info for info in self.features if info.name == name)
        return self._feature(info, self._whole(column))

    def blocks(
        self, rows: IndexArray | None, size: int
    ) -> Iterator[dict[str, FeatureColumn]]:
        """Yield all features, some rows at a time.

        Args:
            rows: positions, sorted or of a few sorted runs: each run of rows in one
                batch reads that batch. None for all rows.
            size: rows of a block, beside the last one.
        """
        rows = np.arange(self.rows) if rows is None else rows
        with self._open(list(self._columns.values())) as file:
            read = lru_cache(maxsize=1)(file.get_batch)
            for start in range(0, len(rows), size):
                block = rows[start : start + size]
                batches = np.searchsorted(self._starts, block, side="right") - 1
                cuts = np.flatnonzero(np.diff(batches)) + 1
                pieces = []
                for first, last in pairwise([0, *cuts.tolist(), len(block)]):
                    number = int(batches[first])
                    inside = block[first:last] - self._starts[number]
                    pieces.append(_take(read(number), inside))
                table = pa.Table.from_batches(pieces)
                yield {
                    info.name: self._feature(info, table[self._columns[info.name]])
                    for info in self.features
                }

    def _feature(self, info: FeatureInfo, values: pa.ChunkedArray) -> FeatureColumn:
        if info.kind == "text":
            codes, texts = self._list(self._columns[info.name])
            return CategoricalColumn(codes[values.to_numpy()], texts)
        if info.kind != "vector":
            return NumericColumn(values.to_numpy())
        vectors = np.full((len(values), info.width), np.nan, np.float32)
        rest = vectors
        for chunk in values.chunks:
            rows, rest = rest[: len(chunk)], rest[len(chunk) :]
            is_present = chunk.is_valid().to_numpy(zero_copy_only=False)
            elements = chunk.flatten().to_numpy(zero_copy_only=False)
            rows[is_present] = elements.reshape(is_present.sum(), info.width)
        return VectorColumn(vectors)

    def _key(self, item: Mapping[str, Any]) -> ExtractedKey:
        return ExtractedKey(*self._coded(item["column"]), item["kind"])

    def _numbers(self, column: str) -> FloatArray:
        numbers: FloatArray = self._whole(column).to_numpy()
        return numbers

    def _coded(self, column: str) -> tuple[CodeArray, pa.Array]:
        """Return the code of each row, (n,), and the distinct texts, (k,)."""
        codes, texts = self._list(column)
        return codes[self._whole(column).to_numpy()], texts

    def _list(self, column: str) -> tuple[CodeArray, pa.Array]:
        """Return the code of each text of a list, -1 last, and the k sorted texts."""
        if column not in self._lists:
            with pa.ipc.open_stream(self._open_file(TEXTS_FILE.format(column))) as file:
                encoded = file.read_all()["t"].dictionary_encode().combine_chunks()
            order = pc.sort_indices(encoded.dictionary)
            rank = np.empty(len(order), np.int32)
            rank[order.to_numpy()] = np.arange(len(order))
            codes = np.append(rank[encoded.indices.to_numpy()], np.int32(MISSING))
            self._lists[column] = codes, encoded.dictionary.take(order)
        return self._lists[column]

    def _whole(self, column: str) -> pa.ChunkedArray:
        with self._open([column]) as file:
            read = (file.get_batch(n) for n in range(file.num_record_batches))
            # copied: a part of a batch would keep all of it in memory
            batches = [_take(batch, np.arange(batch.num_rows)) for batch in read]
            return pa.Table.from_batches(batches, file.schema)[column]

    def _open(self, columns: list[str]) -> pa.ipc.RecordBatchFileReader:
        """Open the rows to read these columns alone."""
        numbers = [self.meta["columns"].index(column) for column in columns]
        options = pa.ipc.IpcReadOptions(included_fields=numbers)
        return pa.ipc.open_file(self._open_file(ROWS_FILE), options=options)


def _take(batch: pa.RecordBatch, rows: IndexArray) -> pa.RecordBatch:
    return batch.take(pa.array(rows))
