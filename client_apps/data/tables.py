"""The rows of a run's participants at a site, and their encoded features.

A participant's fragment is run once: its rows are stored in the site's cache, where
later messages, other processes and later runs of the same query find them. If there is
no way to tell whether the source has changed, they are kept for one run only.
"""

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from logging import WARNING
from pathlib import Path
from secrets import token_bytes
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from flwr.common.logger import log

from client_apps.data.cache import ONCE, entry_name
from client_apps.data.database import cannot_write
from client_apps.data.features import (
    FEATURES,
    CachedFeatures,
    map_features,
    rows_of,
    write_features,
)
from client_apps.data.key_files import row_order_key
from client_apps.data.run_store import Entry, lost_state
from tp_flower.arrays import IndexArray, blocks
from tp_flower.errors import SourceError
from tp_flower.extraction.empty_answers import NO_ANSWERS, NoRows
from tp_flower.extraction.extract import extract, open_extracted
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.extraction.pairs import digest_of
from tp_flower.features.columns import FeatureColumn, empty_column
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.sparse import EncodedRows, SparseRows
from tp_flower.keyed_hash import KEY_BYTES
from tp_flower.node_config import IN_MEMORY
from tp_flower.query.fragment import Fragment
from tp_flower.sources.csv_shards import merging_texts
from tp_flower.sources.shards import (
    ShardSchema,
    ShardSource,
    describe,
    fingerprint,
)

ROWS: Final = "rows"
MOST_VALUES: Final = 1 << 19  # features encoded at a time, besides LEAST_ROWS
LEAST_ROWS: Final = 256
_PROCESS_KEY: Final = token_bytes(KEY_BYTES)

Content = TypeVar("Content")


class SiteTables:
    """The shards of a site as one run has read them.

    ``is_simulated``: the data belong to the run, so that nothing is secret.
    """

    def __init__(self, features: CachedFeatures, *, is_simulated: bool) -> None:
        self._features = features
        self._is_simulated = is_simulated
        self._store = features.store
        self._root = features.root
        self._cache = features.cache

    @cached_property
    def order_key(self) -> bytes:
        """The key that orders unordered rows; all simulations share one."""
        if self._is_simulated:
            return b""
        if self._root == IN_MEMORY:
            return _PROCESS_KEY
        return row_order_key(self._root)

    def describe(self, source: ShardSource) -> ShardSchema:
        """Return a shard's columns, types and number of rows."""
        return self._load_or_make(
            "schema", source, [], ShardSchema, lambda: _describe(source)
        )

    def merging_texts(self, source: ShardSource, names: Sequence[str]) -> list[str]:
        """Return which columns of texts have some that differ, but are equal values."""
        if not names:
            return []
        return self._load_or_make(
            "merging",
            source,
            [sorted(names)],
            list[str],
            lambda: merging_texts(source, names),
        )

    def _load_or_make(
        self,
        name: str,
        source: ShardSource,
        inputs: Sequence[object],
        content_type: type[Content],
        read: Callable[[], Content],
    ) -> Content:
        """Return the result of ``read``, from the cache if it is there.

        It depends on the source's rows, and on ``inputs``.
        """
        state = fingerprint(source)
        if self._cache is None or state is None:
            return read()

        def make(folder: Path) -> None:
            content = msgspec.json.encode(read())
            _check_unchanged(source, state)
            (folder / f"{name}.json").write_bytes(content)

        folder = self._obtain(entry_name(name, _identity(source), *inputs, state), make)
        return msgspec.json.decode(
            (folder / f"{name}.json").read_bytes(), type=content_type
        )

    def extract(
        self,
        number: int,
        source: ShardSource,
        fragment: Fragment,
        pairs: pa.Table | None = None,
        no_rows: NoRows = NO_ANSWERS,
    ) -> ExtractedShard:
        """Return a participant's rows, from the cache or by running its fragment.

        A LATERAL sub-query has a row for each of the ``pairs`` of keys and cutoffs, and
        perhaps one about ``no_rows``.
        """

        def run(folder: Path | None = None) -> ExtractedShard:
            return extract(source, fragment, folder, self.order_key, pairs, no_rows)

        if self._cache is None:
            # in memory nothing is written: the entry holds the object itself
            extracted = run()
            self._store.save(rows_of(number), Entry({}, {ROWS: extracted}))
            return extracted
        state = fingerprint(source)
        changes = state or uuid.uuid4().hex
        inputs = (_identity(source), fragment.to_json(), changes, self._is_simulated)
        policy = source.policy
        privacy_unit = [policy.per, policy.rows_per_unit] if policy.privacy_unit else []
        of_pairs = [] if pairs is None else [digest_of(pairs)]
        answers = ["no rows"] if no_rows.is_last_row else []
        answers += [f"null key {number}" for number in sorted(no_rows.null_keys)]
        further = (*privacy_unit, *of_pairs, *answers)
        name = entry_name(ROWS if state else f"{ONCE}{ROWS}", *inputs, *further)

        def make(folder: Path) -> None:
            run(folder)
            _check_unchanged(source, state)

        folder = self._obtain(name, make)
        self._store.save(rows_of(number), Entry({}, {ROWS: name}))
        return open_extracted(folder)

    def extracted(self, number: int) -> ExtractedShard:
        """Return the rows of a participant; LostStateError if they are gone."""
        rows = self._store.load(rows_of(number)).meta[ROWS]
        if isinstance(rows, ExtractedShard):
            return rows
        return open_extracted(self._features.find(rows))

    def identity(self, number: int) -> str:
        """Return an identifier that changes when a participant's rows change."""
        rows = self._store.load(rows_of(number)).meta[ROWS]
        # rows in memory were read by this process: another might read different ones
        if isinstance(rows, ExtractedShard):
            return uuid.uuid4().hex
        return str(rows)

    def encode(
        self,
        number: int,
        encoder: SiteEncoder,
        rows: IndexArray,
        *,
        is_private: bool = False,
    ) -> EncodedRows:
        """Return a participant's features (n, d), memory-mapped where possible.

        ``rows`` (n,) consist of a few sorted runs. A column whose kind differs from its
        encoder's raises a SchemaError, unless the run ``is_private``: then all its
        values count as missing, because a refusal would reveal that some are present.
        """
        extracted = self.extracted(number)
        if self._cache is None:
            return encode_rows(extracted, encoder, rows, is_private=is_private)
        missing = _misfits(extracted, encoder, is_private=is_private)
        source = str(self._store.load(rows_of(number)).meta[ROWS])
        return self._write_features(
            number,
            _features_name(source, encoder.to_json(), rows, *missing),
            len(rows),
            encoder.encoder.new_rows(0),
            lambda: _encode_blocks(extracted, encoder, rows, missing),
        )

    def _write_features(
        self,
        number: int,
        name: str,
        rows: int,
        empty: EncodedRows,
        encoded: Callable[[], Iterator[EncodedRows]],
    ) -> EncodedRows:
        """Return a participant's features from the cache, writing them if missing.

        ``empty`` are such features without rows.
        """
        path = self._obtain(
            name, lambda folder: write_features(folder, rows, empty, encoded())
        )
        self._features.encoded[number] = name
        return map_features(path)

    def _obtain(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the folder of a cache entry, made if it is not there."""
        if self._cache is None:
            raise lost_state()
        try:
            return self._cache.obtain(name, make)
        except OSError as error:
            raise cannot_write(self._cache.folder, error) from error


def encode_rows(
    extracted: ExtractedShard,
    encoder: SiteEncoder,
    rows: IndexArray,
    *,
    is_private: bool,
) -> EncodedRows:
    """Return the features (n, d) of some rows in memory, see `SiteTables.encode`."""
    missing = _misfits(extracted, encoder, is_private=is_private)
    out = encoder.encoder.new_rows(len(rows))
    for span, columns in _columns(extracted, rows, missing, _block_rows(out)):
        encoder.write(columns, out[span])
    return out


def _misfits(
    extracted: ExtractedShard, encoder: SiteEncoder, *, is_private: bool
) -> tuple[str, ...]:
    """Return the columns of a private run that are of another kind than encoded."""
    if not is_private:
        return ()
    kinds = {info.name: (info.kind, info.width) for info in extracted.features}
    return encoder.encoder.find_misfits(kinds)


def _describe(source: ShardSource) -> ShardSchema:
    """Describe a shard; warnings about odd columns go to the site's log."""
    schema = describe(source)
    for text in schema.warnings:
        log(WARNING, text)
    return schema


def _identity(source: ShardSource) -> list[Any]:
    """Return everything that decides which rows of a source are read, and how."""
    identity: list[Any] = [str(source), dict(source.types), list(source.nulls)]
    identity += [vars(source.text), dict(source.rename), list(source.absent)]
    identity.append({n: [r.type, r.format] for n, r in sorted(source.readings.items())})
    if source.derived is not None:
        identity.append(source.derived.sql)
        for name, shards in source.derived.tables.items():
            identity += [name, *map(_identity, shards)]
    database = source.database
    if database is None:
        return identity
    login = database.url.url
    return [
        *identity,
        list(database.order_by),
        database.is_pushed_down,
        # another user or search path may see other rows
        login.username,
        {name: str(value) for name, value in login.query.items()},
    ]


def _check_unchanged(source: ShardSource, state: str | None) -> None:
    if state is not None and fingerprint(source) != state:
        raise SourceError(f"{source}: changed while it was read; start the run again")


def _features_name(source: str, *inputs: object) -> str:
    """Return a name for features made from another entry; arrays enter as hashes."""
    kind = FEATURES
    if source.startswith(ONCE):
        kind = f"{ONCE}{FEATURES}"
    hashed_inputs: list[object] = []
    for value in inputs:
        if isinstance(value, np.ndarray):
            content = np.ascontiguousarray(value).tobytes()
            hashed_inputs.append(hashlib.sha256(content).hexdigest())
        else:
            hashed_inputs.append(value)
    return entry_name(kind, source, *hashed_inputs)


def _block_rows(features: EncodedRows) -> int:
    """Return how many rows of such features are encoded at a time."""
    stored = features.stored if isinstance(features, SparseRows) else features.shape[1]
    return max(MOST_VALUES // max(stored, 1), LEAST_ROWS)


def _columns(
    extracted: ExtractedShard, rows: IndexArray, missing: Collection[str], size: int
) -> Iterator[tuple[slice, dict[str, FeatureColumn]]]:
    """Yield feature columns of ``rows`` in blocks; those in ``missing`` are empty."""
    spans = blocks(len(rows), size)
    for span, columns in zip(spans, extracted.blocks(rows, size), strict=True):
        columns.update({name: empty_column(span.stop - span.start) for name in missing})
        yield span, columns


def _encode_blocks(
    extracted: ExtractedShard,
    encoder: SiteEncoder,
    rows: IndexArray,
    missing: Collection[str],
) -> Iterator[EncodedRows]:
    """Yield the features of some rows at a time; each block overwrites the last."""
    size = _block_rows(encoder.encoder.new_rows(0))
    out = encoder.encoder.new_rows(min(size, len(rows)))
    for span, columns in _columns(extracted, rows, missing, size):
        block = out[: span.stop - span.start]
        encoder.write(columns, block)
        yield block
