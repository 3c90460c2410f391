"""A forecast of the memory that training takes at every site and at the server.

It is the peak over what a process has when its libraries are loaded. Encoded rows and
matrices are counted; what reading, hashing and exchanging take is a number of bytes for
each value, row, category and distinct join key, fitted to processes of their own on the
benchmark's data (``scripts/benchmark.py --suite memory``).

Left out are the libraries (300 MB of a process, torch as much again), the memory of a
GPU, that of a database's server, and what drawing a coreset takes. Encoded rows of a
site that keeps its state in files are mapped from there: they count here, but the
system may take them back.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables
from strategies.training.join_method import JoinMethod
from strategies.training.traffic import ShardSize, TableSize
from tp_flower.features.sparse import is_sparse
from tp_flower.features.spec import LEVELS, EncoderSpec
from tp_flower.joins.joining import JOINED_ROW, RowLimits
from tp_flower.joins.mapping import number_type
from tp_flower.protocol.fields import Document

SITE: Final = 9e6
READ_ROWS: Final = 122_880  # of a row group, which DuckDB holds at a time
READ_VALUE: Final = 15.5
DISTINCT_KEY: Final = 280.0
CATEGORY: Final = 830.0
TRAINED_ROW: Final = 70.0
"""Bytes at a site: in any case, and by what there is of each."""

SERVER: Final = 2e6
MAPPED_ROW: Final = 30.0  # of JOINED_ROW, where joined rows are mapped from files
ROW_NUMBERS: Final = 2.0  # those of a joined row, before the split and behind it
SERVER_KEY: Final = 12.0  # of a row
"""Bytes at the server."""

ONE_HOT: Final = frozenset({"one-hot", "hash", "bins", "categories", ""})


@dataclass(frozen=True)
class ShardTerms:
    """The numbers that a shard's memory is made of."""

    values: float
    distinct: float
    categories: float
    taking_part: float
    features: float
    solver: float

    @property
    def bytes(self) -> float:
        """The peak at the site that the shard adds to."""
        return (
            READ_VALUE * self.values
            + DISTINCT_KEY * self.distinct
            + CATEGORY * self.categories
            + TRAINED_ROW * self.taking_part
            + self.features
            + self.solver
        )


def forecast(
    joined: JoinedTables,
    encoders: Mapping[str, TableEncoding],
    tables: Sequence[TableSize],
    method: JoinMethod,
) -> Document:
    """Return the peak bytes of each site, by name, of the server, and of its files.

    ``tables`` are the run's, whose shards are in the order of the parts.
    """
    sites: defaultdict[str, float] = defaultdict(lambda: SITE)
    for table in tables:
        parts = joined.extracted.parts[table.name]
        for position, (part, shard) in enumerate(zip(parts, table.shards, strict=True)):
            terms = _terms(joined, encoders[table.name], table, shard, position, method)
            sites[part.site] += terms.bytes
    is_mapped = RowLimits(memory=method.settings.memory_bytes).are_mapped(
        joined.mapping.joined_rows
    )
    server, files = _server_bytes(joined, tables, is_mapped=is_mapped)
    return {
        "sites": {site: round(peak) for site, peak in sites.items()},
        "server": round(server),
        "server-files": round(files),
    }


def _terms(
    joined: JoinedTables,
    encoding: TableEncoding,
    table: TableSize,
    shard: ShardSize,
    position: int,
    method: JoinMethod,
) -> ShardTerms:
    """Return the terms of a shard's memory forecast."""
    keys = [
        shards
        for (name, _), shards in joined.extracted.keys.items()
        if name == table.name
    ]
    columns = len(encoding.columns.features) + len(keys) + table.has_intercept
    stored = stored_values(encoding)
    width = table.features
    of_row = 8.0 * stored if is_sparse(width, stored) else 4.0 * width
    return ShardTerms(
        values=columns * min(shard.rows, READ_ROWS),
        distinct=sum(len(shards[position].hashes) for shards in keys),
        categories=width - stored,
        taking_part=shard.total * (1 + (table.outputs - 1) / 2),
        features=of_row * shard.total,
        solver=method.working_bytes(table, shard),
    )


def _server_bytes(
    joined: JoinedTables, tables: Sequence[TableSize], *, is_mapped: bool
) -> tuple[float, float]:
    """Return the forecast of the server's memory, and of its files of joined rows."""
    extracted = joined.extracted
    outputs = tables[0].outputs
    keys = sum(len(key.codes) for shards in extracted.keys.values() for key in shards)
    rows = joined.mapping.joined_rows
    numbers = sum(number_type(n).itemsize for n in extracted.table_rows.values())
    memory = SERVER + SERVER_KEY * keys
    if not is_mapped:
        return memory + rows * (ROW_NUMBERS * numbers + JOINED_ROW * outputs), 0.0
    stored = ROW_NUMBERS * numbers + (JOINED_ROW - MAPPED_ROW) * outputs
    return memory + rows * MAPPED_ROW * outputs, rows * stored


def stored_values(encoding: TableEncoding) -> int:
    """Return an estimate of the values that a sparse table stores of an encoded row."""
    encoders = {item.column: item.encoder for item in encoding.features}
    stored = 0
    for name, count in encoding.columns.features.items():
        text = encoders.get(name, "")
        spec = EncoderSpec.parse(text) if text else None
        kind = spec.kind if spec else ""
        if kind in ONE_HOT:
            added = 0 if spec is None else spec.indicator + spec.present
            stored += min(count, 1 + added)
        else:
            stored += min(count, 2) if kind == LEVELS else count
    return stored
