"""The encoder of a table: feature columns become one float32 matrix, dense or sparse.

The encoder is fitted to the merged statistics of all shards (``fitting.py``), and every
shard encodes with it, so a sharded table is encoded like an unsplit one. What the
shards send each other is a :class:`TableEncoder`, which identifies categories only by
keyed hash; a site makes it a :class:`SiteEncoder`, which encodes rows.

Notation
    n   rows of the shard, or of a block of its rows
    d   width of the encoding, ``TableEncoder.width``
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, Self

import msgspec
import numpy as np
import pyarrow as pa

from tp_flower.arrays import blocks
from tp_flower.errors import SchemaError
from tp_flower.features.columns import FeatureColumn, Float32Array, example_column
from tp_flower.features.encodings import (
    CodeEncoding,
    FeatureEncoding,
    HashedEncoding,
    OneHotWriter,
    Targets,
    VectorEncoding,
    Writer,
    categories_for,
)
from tp_flower.features.sparse import EncodedRows, SparseRows, is_sparse
from tp_flower.features.statistics import category_purpose, short_hashes
from tp_flower.keyed_hash import KeyedHasher

VERSION: Final = 2
BLOCK_VALUES: Final = 1 << 18  # float32 values written at a time: about a core's cache


@dataclass(frozen=True)
class TableEncoder:
    """A table's fitted encoder, without texts and without a key.

    Encodings are in the query's order of features; a feature may have two of them (its
    values, and which are missing). The dropped features are constant or empty;
    ``fitted`` names those whose statistics the encoder was fitted to.
    """

    table: str
    encodings: tuple[FeatureEncoding, ...]
    dropped: tuple[str, ...] = ()
    fitted: tuple[str, ...] = ()

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """The name of each encoded column, d in all; categories appear as hashes."""
        return tuple(name for item in self.encodings for name in item.feature_names)

    @property
    def width(self) -> int:
        """Number of encoded columns, d."""
        return len(self.feature_names)

    def feature_of(self, column: int) -> str:
        """Return the name of the feature that an encoded column is of."""
        return self.owners[column].name

    @cached_property
    def spans(self) -> tuple[slice, ...]:
        """The encoded columns of each encoding."""
        ends = accumulate(len(item.feature_names) for item in self.encodings)
        return tuple(slice(*pair) for pair in pairwise((0, *ends)))

    @cached_property
    def stored(self) -> int:
        """Number of values that a sparse row stores.

        The columns of a one-hot encoding share one value; every other column has one.
        """
        return sum(
            1 if item.is_one_hot else len(item.feature_names) for item in self.encodings
        )

    def new_rows(self, rows: int) -> EncodedRows:
        """Return encoded rows (n, d) to fill, in the layout that takes less memory."""
        if is_sparse(self.width, self.stored):
            return SparseRows.empty(rows, self.stored, self.width)
        return np.empty((rows, self.width), np.float32)

    @property
    def coded(self) -> tuple[int, ...]:
        """The encoded columns that are codes of categories."""
        return tuple(
            column
            for column, item in enumerate(self.owners)
            if isinstance(item, CodeEncoding)
        )

    @property
    def owners(self) -> tuple[FeatureEncoding, ...]:
        """The encoding that each encoded column is of, d in all."""
        return tuple(item for item in self.encodings for _ in item.feature_names)

    @property
    def columns(self) -> int:
        """The approximate mean squared norm of an encoded row: each number adds one."""
        return sum(
            encoding.width if isinstance(encoding, VectorEncoding) else 1
            for encoding in self.encodings
        )

    def find_misfits(self, kinds: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
        """Return the features whose kind differs from their encoding's, by name.

        ``kinds`` are the kinds of a shard's features, with the length of vectors.
        """
        misfits = {
            item.name
            for item in self.encodings
            if item.name in kinds and not _fits(item, example_column(*kinds[item.name]))
        }
        return tuple(sorted(misfits))

    def for_site(self, hasher: KeyedHasher) -> "SiteEncoder":
        """Return the encoder of rows, with keys derived from the site's hasher."""
        keys = {
            encoding.name: hasher.purpose(category_purpose(self.table, encoding.name))
            for encoding in self.encodings
            if isinstance(encoding, HashedEncoding)
        }
        return SiteEncoder(self, keys)

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types, with a version."""
        return {"version": VERSION, **msgspec.to_builtins(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Self:
        """Rebuild an encoder from ``to_json``."""
        if (version := data.get("version")) != VERSION:
            raise SchemaError(f"encoder has version {version!r}, expected {VERSION}")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise SchemaError(f"malformed encoder: {error}") from None


@dataclass(frozen=True)
class SiteEncoder:
    """Encodes the rows of a table's shards; a site keeps it with its model.

    ``keys`` are the hashers of the features with hashed categories, by feature. With
    them new rows can be encoded after the run and its secret are gone.
    """

    encoder: TableEncoder
    keys: Mapping[str, KeyedHasher] = field(repr=False)
    _targets: dict[str, tuple[pa.Array, Targets]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def transform(
        self, columns: Mapping[str, FeatureColumn], out: Float32Array | None = None
    ) -> Float32Array:
        """Return the encoded rows, float32 (n, d), C-contiguous without ``out``.

        Little is held besides ``out``, such as a memory map: it is written in blocks of
        rows.
        """
        writers = self._writers(columns)
        # a table without features still has rows: ``out`` knows how many
        rows_of_out = 0 if out is None else len(out)
        total = max((c.rows for c in columns.values()), default=rows_of_out)
        width = self.encoder.width
        if out is None:
            out = np.empty((total, width), dtype=np.float32)
        if out.shape != (total, width) or out.dtype != np.float32:
            raise ValueError(
                f"out must be float32 {(total, width)}, not {out.dtype} {out.shape}"
            )
        for block in blocks(total, max(256, BLOCK_VALUES // max(1, width))):
            for span, write in writers:
                write(block, out[block, span])
        return out

    def write(self, columns: Mapping[str, FeatureColumn], out: EncodedRows) -> None:
        """Write the encoded rows (n, d) into ``out``, in whichever layout it has."""
        if isinstance(out, SparseRows):
            self._write_sparse(columns, out)
        else:
            self.transform(columns, out)

    def _write_sparse(
        self, columns: Mapping[str, FeatureColumn], out: SparseRows
    ) -> None:
        """Write rows as values (n, stored) and the encoded columns that they are in."""
        first = 0
        for span, write in self._writers(columns):
            if isinstance(write, OneHotWriter):
                write.write_sparse(
                    slice(None), out.columns[:, first], out.values[:, first]
                )
                out.columns[:, first] += span.start
                first += 1
            else:
                stored = slice(first, first + span.stop - span.start)
                write(slice(None), out.values[:, stored])
                out.columns[:, stored] = np.arange(span.start, span.stop)
                first = stored.stop

    def to_json(self) -> dict[str, object]:
        """Return plain JSON types, with the keys: for the site's own files only."""
        return {
            "encoder": self.encoder.to_json(),
            "keys": {name: key.secret.hex() for name, key in self.keys.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild a site's encoder from ``to_json``; SchemaError if malformed."""
        try:
            encoder = TableEncoder.from_json(data["encoder"])
            keys = {
                str(name): KeyedHasher(bytes.fromhex(key))
                for name, key in data["keys"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            # the text of the error might quote a key
            raise SchemaError("malformed encoder of a site") from None
        for encoding in encoder.encodings:
            if isinstance(encoding, HashedEncoding) and encoding.name not in keys:
                raise SchemaError(f"no key for the categories of {encoding.name!r}")
        return cls(encoder, keys)

    def _writers(
        self, columns: Mapping[str, FeatureColumn]
    ) -> list[tuple[slice, Writer]]:
        """Return the writer of each encoding, with the columns that it fills."""
        writers = []
        encoder = self.encoder
        for encoding, span in zip(encoder.encodings, encoder.spans, strict=True):
            name = encoding.name
            if name not in columns:
                raise SchemaError(
                    f"feature {name!r} is not among the shard's: {', '.join(columns)}"
                )
            if isinstance(encoding, HashedEncoding):
                categories = categories_for(encoding, columns[name])
                write = self.find(encoding, categories.texts).writer(categories)
            else:
                write = encoding.writer(columns[name])
            writers.append((span, write))
        return writers

    def find(self, encoding: HashedEncoding, texts: pa.Array) -> Targets:
        """Return each text's column; the blocks of a shard share their texts."""
        cached = self._targets.get(encoding.name)
        if cached is not None and cached[0] is texts:
            return cached[1]
        targets = encoding.targets(short_hashes(texts, self.keys[encoding.name]))
        self._targets[encoding.name] = (texts, targets)
        return targets


def _fits(encoding: FeatureEncoding, column: FeatureColumn) -> bool:
    """Return whether an encoding can be applied to a column."""
    try:
        if isinstance(encoding, HashedEncoding):
            categories_for(encoding, column)
        else:
            encoding.writer(column)
    except SchemaError:
        return False
    return True
