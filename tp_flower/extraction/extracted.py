"""The rows that a fragment of the query yields on one shard, read from Arrow files.

Layout
    rows.arrow              batches of rows: numbers as float64, vectors as lists of
                            float32, texts and keys as int32 positions in their list
    texts-<column>.arrow    the list: the distinct texts of each batch, batch by batch
    shard.json              the columns' kinds, and the row at which each batch starts

A shard may be larger than memory: it is written and read batch by batch, with plain
reads, because the pages of a memory map count as memory of the process. Small shards
keep the same files in memory. Nothing in the files is keyed: the secret of the hashes
changes with every run.

Notation
    n   rows of the shard that pass the fragment's filters
    k   distinct values of a key
    e   texts of a list: the distinct texts of each batch, summed over the batches
    d   length of a feature's vectors
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.errors import QueryError, SourceError
from tp_flower.extraction.empty_answers import KEY_OF_NO_ROWS
from tp_flower.features.columns import (
    CategoricalColumn,
    CodeArray,
    FeatureColumn,
    NumericColumn,
    VectorColumn,
)
from tp_flower.keyed_hash import HashArray, KeyedHasher, order_of_hashes
from tp_flower.query.fragment import Role

# Arrow's own allocator keeps 40 MiB that are not used
pa.set_memory_pool(pa.system_memory_pool())

ROWS_FILE: Final = "rows.arrow"
TEXTS_FILE: Final = "texts-{}.arrow"
MISSING: Final = -1


class StoredColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the files: a feature before encoding, the label, or a key.

    ``kind`` is "number", "boolean", "time", "text" or "vector", for a key the kinds of
    its parts ("text+time"); ``width`` is d for a vector, 1 for all other kinds.
    """

    kind: str
    column: str
    name: str = ""
    width: int = 1


class ShardContents(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the files, in ``shard.json``.

    ``starts`` has the row at which each batch starts, and n; ``pushed`` describes the
    filters that the database applied. The name and the width of ``units`` are what the
    rows count per and how many of a unit there may be. ``weight``, ``offset``,
    ``event``, ``entry`` and ``strata`` are columns.
    """

    table: str
    engine: str
    pushed: tuple[str, ...]
    columns: tuple[str, ...]
    starts: list[int]
    features: tuple[StoredColumn, ...]
    label: StoredColumn | None
    keys: tuple[StoredColumn, ...]
    groups: StoredColumn | None
    units: StoredColumn | None = None
    weight: str | None = None
    offset: str | None = None
    event: str | None = None
    entry: str | None = None
    strata: str | None = None


@dataclass(frozen=True, eq=False)
class KeyColumn:
    """The join key of each row, as an index into its distinct hashed values.

    Attributes:
        codes: int32 (n,), row of ``hashes``; -1 where any part of the key is NULL.
        hashes: uint64 (k, 2), 128 bits of hash of each distinct value, in the order of
            the hashes, which reveals nothing about the order of the values.
    """

    codes: CodeArray
    hashes: HashArray
    kind: str

    def with_no_rows(self, hasher: KeyedHasher) -> "KeyColumn":
        """Return the key with one more value, that of an answer about no rows."""
        value = hasher.tag_texts(pa.array([KEY_OF_NO_ROWS]))
        return KeyColumn(self.codes, np.vstack([self.hashes, value]), self.kind)


@dataclass(frozen=True, eq=False)
class ExtractedKey:
    """The join key, or the group of a sub-query, of each row.

    Attributes:
        codes: int32 (n,), position in ``texts``; -1 where any part of a key is NULL.
        texts: (k,), the canonical text of each distinct value.
        kind: the kinds of the parts, such as "number" or "text+time".
    """

    codes: CodeArray
    texts: pa.Array
    kind: str

    def hashed(self, hasher: KeyedHasher) -> KeyColumn:
        """Return the key in the form that leaves the site, ordered by its hashes."""
        hashes = hasher.tag_texts(self.texts)
        order = order_of_hashes(hashes)
        # the last is the entry that the code of a missing value selects
        position = np.full(len(order) + 1, MISSING, np.int32)
        position[order] = np.arange(len(order), dtype=np.int32)
        return KeyColumn(position[self.codes], hashes[order], self.kind)

    def with_no_rows(self) -> "ExtractedKey":
        """Return the key with one more value, that of an answer about no rows."""
        texts = pa.concat_arrays([self.texts, pa.array([KEY_OF_NO_ROWS])])
        return ExtractedKey(self.codes, texts, self.kind)

    def numbers(self) -> FloatArray:
        """Return the distinct values as numbers, (k,); of times microseconds.

        Raises SourceError if the key is not one number or time.
        """
        if not len(self.texts):
            # without values, a column of a text file may have any type
            return np.zeros(0)
        if self.kind not in ("number", "time"):
            raise SourceError(
                f"a column of type {self.kind} has no order to hold the last rows out "
                "by: name a number, a date or a timestamp"
            )
        digits = pc.replace_substring_regex(self.texts, "^[a-z]+[0-9]+:", "")
        values: FloatArray = pc.cast(digits, pa.float64()).to_numpy()
        return values


def check_no_null(
    columns: Sequence["LabelColumn"],
    sql: str,
    name: str = "label",
    *,
    are_private: bool = False,
) -> None:
    """Refuse labels that are NULL; ``sql`` is the label as the query writes it.

    Of private labels nothing is told but how many are NULL; ``name`` is what the query
    calls them.
    """
    missing = sum(int(np.isnan(column.values).sum()) for column in columns)
    if not missing:
        return
    kinds = {column.kind for column in columns}
    value = {"text": "'none'", "boolean": "false"}.get(next(iter(kinds), ""), "0")
    filled = f"write COALESCE({sql}, {value}) AS {name}"
    distinct = set[float | str]().union(*(column.present for column in columns))
    if len(distinct) < 2 and not are_private:
        # without these rows nothing could be learned
        advice = (
            f"the others have one {name} at most; if NULL stands for another, {filled}"
        )
    else:
        condition = sql if re.fullmatch(r"[\w.\"]+", sql) else f"({sql})"
        left_out = f"leave them out, WHERE {condition} IS NOT NULL"
        advice = f"{left_out}, or if NULL stands for a value, {filled}"
        if name == "label":
            advice = f"{left_out}, or if NULL stands for a label, {filled}"
    raise QueryError(f"the {name} is NULL in {missing} rows: {advice}")


@dataclass(frozen=True, eq=False)
class LabelColumn:
    """The label of each row: "number", "boolean", "time" or "text".

    Attributes:
        values: float64 (n,), NaN where NULL: numbers, 0/1, seconds since 1970, or for
            text the position in ``categories``, its sorted distinct texts.
    """

    kind: str
    values: FloatArray
    categories: tuple[str, ...] = ()

    @property
    def present(self) -> set[float | str]:
        """The distinct labels that are not NULL."""
        values = np.unique(self.values[~np.isnan(self.values)])
        return {
            self.categories[int(v)] if self.kind == "text" else float(v) for v in values
        }

    @property
    def codes(self) -> CodeArray:
        """int32 (n,), position in ``categories``, -1 where NULL."""
        return np.where(np.isnan(self.values), -1, self.values).astype(np.int32)

    def positions_in(self, classes: Sequence[str | float]) -> FloatArray:
        """Return each label's position among classes, (n,); NaN if it is not one.

        >>> LabelColumn("text", np.array([1.0, 0.0]), ("a", "b")).positions_in(["b"])
        array([ 0., nan])
        """
        place_of = {name: position for position, name in enumerate(classes)}
        if self.kind == "text":
            positions = [place_of.get(name, math.nan) for name in self.categories]
            return np.array([*positions, math.nan])[self.codes]
        distinct, codes = np.unique(self.values, return_inverse=True)
        return np.array([place_of.get(v, math.nan) for v in distinct.tolist()])[codes]


class ExtractedShard:
    """The rows of one fragment on one shard; columns are read when they are needed."""

    def __init__(
        self, contents: ShardContents, open_file: Callable[[str], pa.NativeFile]
    ) -> None:
        self.contents = contents
        self._open_file = open_file
        self.table = contents.table
        self.features = contents.features
        self.rows = contents.starts[-1]
        self._starts = np.array(contents.starts, np.int64)
        self._lists: dict[str, tuple[CodeArray, pa.Array]] = {}

    @property
    def keys(self) -> tuple[ExtractedKey, ...]:
        """The join keys, in the fragment's order."""
        return tuple(self._key(item) for item in self.contents.keys)

    @property
    def groups(self) -> ExtractedKey | None:
        """The groups of a sub-query, with NULL as a value; None without grouping."""
        groups = self.contents.groups
        return self._key(groups) if groups else None

    @property
    def units(self) -> CodeArray | None:
        """The unit of privacy of each row, int32 (n,); None if each row is one."""
        units = self.contents.units
        if not units:
            return None
        return self._codes_and_texts(units.column)[0]

    @property
    def label(self) -> LabelColumn | None:
        """The label, None if another table has it."""
        label = self.contents.label
        if not label:
            return None
        if label.kind != "text":
            return LabelColumn(label.kind, self._numbers(label.column))
        codes, texts = self._codes_and_texts(label.column)
        return LabelColumn(
            "text", np.where(codes < 0, np.nan, codes), tuple(texts.to_pylist())
        )

    @property
    def weight(self) -> FloatArray | None:
        """The weight of each row's joined rows, float64 (n,), NaN where it is NULL."""
        return self.number(Role.WEIGHT)

    def number(self, role: Role) -> FloatArray | None:
        """Return a number of each row, float64 (n,), NaN where it is NULL.

        It is None if the query has none of the role here.
        """
        column = getattr(self.contents, role)
        return self._numbers(column) if column else None

    def column(self, name: str) -> FeatureColumn:
        """Return one whole feature."""
        info = next(info for info in self.features if info.name == name)
        return self._feature(info, self._whole(info.column))

    def blocks(
        self, rows: IndexArray | None, size: int
    ) -> Iterator[dict[str, FeatureColumn]]:
        """Yield all features, ``size`` rows at a time.

        ``rows`` are positions, sorted or consisting of a few sorted runs: each run of
        rows in one batch reads that batch. None reads all rows.
        """
        rows = np.arange(self.rows) if rows is None else rows
        with self._open([info.column for info in self.features]) as file:
            read_batch = lru_cache(maxsize=1)(file.get_batch)
            for start in range(0, len(rows), size):
                block = rows[start : start + size]
                batches = np.searchsorted(self._starts, block, side="right") - 1
                cuts = np.flatnonzero(np.diff(batches)) + 1
                pieces = []
                for first, last in pairwise([0, *cuts.tolist(), len(block)]):
                    number = int(batches[first])
                    pieces.append(
                        read_batch(number).take(
                            block[first:last] - self._starts[number]
                        )
                    )
                table = pa.Table.from_batches(pieces)
                yield {
                    info.name: self._feature(info, table[info.column])
                    for info in self.features
                }

    def _feature(self, info: StoredColumn, values: pa.ChunkedArray) -> FeatureColumn:
        """Return a feature's column from its stored values; absent vectors are NaN."""
        if info.kind == "text":
            codes, texts = self._list(info.column)
            return CategoricalColumn(codes[values.to_numpy()], texts)
        if info.kind != "vector":
            return NumericColumn(values.to_numpy())
        vectors = np.full((len(values), info.width), np.nan, np.float32)
        nested = vectors
        for chunk in values.chunks:
            rows = nested[: len(chunk)]
            nested = nested[len(chunk) :]
            is_present = chunk.is_valid().to_numpy(zero_copy_only=False)
            elements = chunk.flatten().to_numpy(zero_copy_only=False)
            rows[is_present] = elements.reshape(is_present.sum(), info.width)
        return VectorColumn(vectors)

    def _key(self, key: StoredColumn) -> ExtractedKey:
        codes, texts = self._distinct(key.column)
        rows = self._whole(key.column).to_numpy()
        return ExtractedKey(codes[rows], texts, key.kind)

    def _numbers(self, column: str) -> FloatArray:
        numbers: FloatArray = self._whole(column).to_numpy()
        return numbers

    def _codes_and_texts(self, column: str) -> tuple[CodeArray, pa.Array]:
        """Return the code of each row, (n,), and the distinct texts, (k,)."""
        codes, texts = self._list(column)
        return codes[self._whole(column).to_numpy()], texts

    def _list(self, column: str) -> tuple[CodeArray, pa.Array]:
        """Return the code of each text of a list, -1 last, and the k sorted texts."""
        if column not in self._lists:
            codes, texts = self._distinct(column)
            order = pc.sort_indices(texts)
            rank = np.full(len(order) + 1, MISSING, np.int32)
            rank[order.to_numpy()] = np.arange(len(order))
            self._lists[column] = rank[codes], texts.take(order)
        return self._lists[column]

    def _distinct(self, column: str) -> tuple[CodeArray, pa.Array]:
        """Return the same, with the k texts as they come.

        To sort the keys of a million rows takes longer than to read them.
        """
        with pa.ipc.open_stream(self._open_file(TEXTS_FILE.format(column))) as file:
            encoded = file.read_all()["t"].dictionary_encode().combine_chunks()
        codes = np.append(encoded.indices.to_numpy(), np.int32(MISSING))
        return codes, encoded.dictionary

    def _whole(self, column: str) -> pa.ChunkedArray:
        with self._open([column]) as file:
            pieces = (file.get_batch(n) for n in range(file.num_record_batches))
            # copied, because part of a batch would keep the whole batch in memory
            batches = [batch.take(np.arange(batch.num_rows)) for batch in pieces]
            return pa.Table.from_batches(batches, file.schema)[column]

    def _open(self, columns: list[str]) -> pa.ipc.RecordBatchFileReader:
        """Open the rows so that only these columns are read."""
        numbers = [self.contents.columns.index(column) for column in columns]
        options = pa.ipc.IpcReadOptions(included_fields=numbers)
        return pa.ipc.open_file(self._open_file(ROWS_FILE), options=options)
