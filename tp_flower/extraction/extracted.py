"""What a fragment of the query yields on one shard, and how it is kept.

Numbers lie in files in blocks of rows, texts as codes and the list of distinct ones.
The same code keeps the files in a folder or, for small shards, in this process. Nothing
that is kept is keyed: the secret of the hashes changes with every run.

Notation
    n   rows of the shard that pass the fragment's filters
    k   distinct values of a key
    d   length of a feature's vectors
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.extraction.block_files import BlockReader, Files, Rows
from tp_flower.features.columns import (
    CategoricalColumn,
    CodeArray,
    FeatureColumn,
    NumericColumn,
    VectorColumn,
)
from tp_flower.keyed_hash import HashArray, KeyedHasher

NUMBERS: Final = "numbers.bin"
POSITIONS: Final = "positions.bin"
MOST_BETWEEN: Final = 64
"""Rows between two wanted ones that are cheaper to read than to skip."""


@dataclass(frozen=True)
class FeatureInfo:
    """A feature before it is encoded.

    Attributes:
        name: in the query.
        kind: "number", "boolean", "time", "text" or "vector".
        width: d of a vector, 1 of all other kinds.
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
    """A join key, or what a sub-query groups by, of each row.

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


class ExtractedShard:
    """What a fragment yields on one shard; columns are read when they are asked for.

    Args:
        files: where the columns are.
        meta: what ``extract`` wrote about them, plain JSON types.

    Attributes:
        table: the fragment's table (its alias in the query).
        rows: n; zero if no row passes the filters.
        features: what the features are, in the fragment's order.
        engine: the kind of database that the rows came from.
        pushed: the filters that it applied, in words.
        meta: as given.
    """

    def __init__(self, files: Files, meta: Mapping[str, Any]) -> None:
        self.meta = meta
        self.table: str = meta["table"]
        self.rows = int(meta["rows"])
        self.engine: str = meta["engine"]
        self.pushed: tuple[str, ...] = tuple(meta["pushed"])
        self.features = tuple(
            FeatureInfo(item["name"], item["kind"], int(item["width"]))
            for item in meta["features"]
        )
        self._slots = {item["name"]: int(item["slot"]) for item in meta["features"]}
        self._files = files
        self._numbers = self._reader(NUMBERS, meta["numbers"], np.float64)
        self._positions = self._reader(POSITIONS, meta["positions"], np.int32)
        self._lists: dict[int, tuple[CodeArray, pa.Array]] = {}

    @property
    def keys(self) -> tuple[ExtractedKey, ...]:
        """The join keys, in the fragment's order."""
        return tuple(self._key(item) for item in self.meta["keys"])

    @property
    def groups(self) -> ExtractedKey | None:
        """What a sub-query groups by, NULL being a value too; None without one."""
        item = self.meta["groups"]
        return self._key(item) if item else None

    @property
    def label(self) -> LabelColumn | None:
        """The label, None if it is another table's."""
        item = self.meta["label"]
        if not item:
            return None
        if item["kind"] != "text":
            return LabelColumn(item["kind"], self._numbers.column(item["slot"]))
        codes, texts = self._codes(item["slot"]), self._list(item["slot"])[1]
        values = np.where(codes < 0, np.nan, codes)
        return LabelColumn("text", values, tuple(texts.to_pylist()))

    @property
    def weight(self) -> FloatArray | None:
        """What joined rows of each row weigh, float64 (n,), NaN where it is NULL.

        None if it is another table's, or there is none.
        """
        # what was kept before there were weights says nothing of one
        item = self.meta.get("weight")
        return self._numbers.column(item["slot"]) if item else None

    def column(self, name: str) -> FeatureColumn:
        """Return one whole feature.

        Raises:
            KeyError: there is no such feature.
        """
        slot = self._slots[name]
        info = next(info for info in self.features if info.name == name)
        if info.kind == "vector":
            return self._vectors(info, slot, slice(0, self.rows))
        if info.kind == "text":
            return CategoricalColumn(self._codes(slot), self._list(slot)[1])
        return NumericColumn(self._numbers.column(slot))

    def blocks(
        self, rows: IndexArray | None, size: int
    ) -> Iterator[dict[str, FeatureColumn]]:
        """Yield all features, some rows at a time.

        Args:
            rows: positions, sorted or of a few sorted runs; None for all rows.
            size: rows of a block, beside the last one.
        """
        total = self.rows if rows is None else len(rows)
        for start in range(0, total, size):
            span = slice(start, min(start + size, total))
            yield self._block(span if rows is None else rows[span])

    def _block(self, rows: Rows) -> dict[str, FeatureColumn]:
        numbers = self._numbers.take(rows)
        has_texts = any(info.kind == "text" for info in self.features)
        positions = self._positions.take(rows) if has_texts else None
        block: dict[str, FeatureColumn] = {}
        for info in self.features:
            slot = self._slots[info.name]
            if info.kind == "vector":
                block[info.name] = self._vectors(info, slot, rows)
            elif positions is not None and info.kind == "text":
                codes, texts = self._list(slot)
                block[info.name] = CategoricalColumn(codes[positions[slot]], texts)
            else:
                block[info.name] = NumericColumn(numbers[slot])
        return block

    def _key(self, item: Mapping[str, Any]) -> ExtractedKey:
        slot = int(item["slot"])
        return ExtractedKey(self._codes(slot), self._list(slot)[1], item["kind"])

    def _codes(self, slot: int) -> CodeArray:
        codes: CodeArray = self._list(slot)[0][self._positions.column(slot)]
        return codes

    def _list(self, slot: int) -> tuple[CodeArray, pa.Array]:
        """The codes of a list of texts, -1 last, and the distinct texts."""
        if slot not in self._lists:
            count, size = self.meta["lists"][slot]
            codes = self._files.read(f"codes-{slot}.bin", np.int32, 0, count)
            data = self._files.read(f"texts-{slot}.bin", np.uint8, 0, size)
            texts = pa.ipc.open_stream(pa.py_buffer(data)).read_all()["t"]
            self._lists[slot] = codes, texts.combine_chunks()
        return self._lists[slot]

    def _vectors(self, info: FeatureInfo, slot: int, rows: Rows) -> VectorColumn:
        name, width = f"vectors-{slot}.bin", info.width

        def read(first: int, last: int) -> npt.NDArray[np.float32]:
            offset = first * width * np.dtype(np.float32).itemsize
            found = self._files.read(name, np.float32, offset, (last - first) * width)
            return found.reshape(last - first, width)

        if isinstance(rows, slice):
            return VectorColumn(read(rows.start, rows.stop))
        values = np.empty((len(rows), width), np.float32)
        # rows that lie close together are read with what lies between them
        steps = np.diff(rows)
        cuts = np.flatnonzero((steps < 0) | (steps > MOST_BETWEEN)) + 1
        edges = [0, *cuts.tolist(), len(rows)]
        for start, stop in pairwise(edges):
            if stop > start:
                first, last = int(rows[start]), int(rows[stop - 1]) + 1
                values[start:stop] = read(first, last)[rows[start:stop] - first]
        return VectorColumn(values)

    def _reader(self, name: str, facts: Mapping[str, int], dtype: Any) -> BlockReader:
        shape = (int(facts["width"]), self.rows)
        return BlockReader(self._files, name, shape, int(facts["block-rows"]), dtype)
