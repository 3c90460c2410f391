"""Run a query's fragment on a shard: join keys, label and feature columns.

DuckDB evaluates the fragment's expressions in one streamed reading of the shard, in the
shard's own row order. What arrives is written on at once, column by column within
blocks of rows: no more than some batches of rows are ever held, and no Python object
is made per row.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import SourceError
from tp_flower.extraction.block_files import Files, FolderFiles, MemoryFiles
from tp_flower.extraction.extracted import (
    ExtractedKey,
    ExtractedShard,
    FeatureInfo,
    KeyColumn,
    LabelColumn,
)
from tp_flower.extraction.select_plan import Plan, make_plan
from tp_flower.extraction.shard_writer import ShardWriter
from tp_flower.query.fragment import Fragment
from tp_flower.sources.shards import Scan, ShardSource, scan

__all__ = [
    "ExtractedKey",
    "ExtractedShard",
    "FeatureInfo",
    "KeyColumn",
    "LabelColumn",
    "extract",
    "open_extracted",
]

META_FILE: Final = "shard.json"
BATCH_ROWS: Final = 1 << 14
BATCH_VALUES: Final = 1 << 21
"""Numbers of a batch, where the lengths of the vectors are known."""


def extract(
    source: ShardSource,
    fragment: Fragment,
    folder: Path | None = None,
    order_key: bytes = b"",
) -> ExtractedShard:
    """Run a fragment on a shard.

    Rows come in the shard's own order, so that their position names them in every run;
    where it has none, they are sorted by a keyed hash of all that the fragment yields
    but the label, which puts equal rows in an equal order. Without the key the order
    says nothing of the values; a hash that everybody can compute would tell of a guess
    how many rows come before it. Sorted by the label, too, rows of one label could lie
    side by side, and whoever sees noisy labels would see through the noise.

    Args:
        source: the shard.
        fragment: what to run.
        folder: an empty folder to keep the columns in; None to keep them in memory.
        order_key: of the site, for rows without an order of their own.

    Raises:
        QueryError: the fragment is not what a site may run, or names a column that the
            shard does not have.
        SourceError: the source cannot be read, an expression fails on its values or is
            of a type that cannot be used, a feature or label is infinite, or the
            vectors of a feature differ in length.
    """
    files: Files = FolderFiles(folder) if folder else MemoryFiles()
    with scan(source, fragment) as opened:
        plan = make_plan(source, opened)
        with closing(ShardWriter(plan, files, folder)) as writer:
            for batch in _batches(opened, plan, order_key):
                writer.add(batch)
            meta = {
                **writer.finish(fragment.table),
                "engine": source.engine,
                "pushed": list(opened.pushed),
            }
    if folder:
        (folder / META_FILE).write_text(json.dumps(meta), encoding="utf-8")
    return ExtractedShard(files, meta)


def open_extracted(folder: Path) -> ExtractedShard:
    """Return what ``extract`` kept in a folder.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no description of a shard.
    """
    meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    return ExtractedShard(FolderFiles(folder), meta)


def _batches(opened: Scan, plan: Plan, order_key: bytes) -> Iterator[pa.RecordBatch]:
    """Yield what the plan selects, some rows at a time."""
    connection = opened.connection
    size = BATCH_ROWS
    widths = sum(piece.width or 1 for piece in plan.vectors)
    if widths:
        size = max(1, min(size, BATCH_VALUES // widths))
    try:
        if opened.needs_sort or opened.fragment.subquery is not None:
            # DuckDB groups in parallel, and a database promises no order either
            for number, _ in enumerate(opened.chunks()):
                start = "INSERT INTO" if number else "CREATE TEMP TABLE"
                then = "" if number else " AS"
                connection.execute(f"{start} unsorted{then} {plan.select}")
            # rows go by their position: sorted values would tell their ranks
            label = {piece.column for piece in plan.label}
            columns = connection.table("unsorted").columns
            others = [quote_name(name) for name in columns if name not in label]
            order = ""
            if others:
                row = f"CAST(hash({', '.join(others)}) AS VARCHAR)"
                order = f"ORDER BY sha256('{order_key.hex()}' || {row})"
            yield from connection.sql(
                f"SELECT * FROM unsorted {order}"
            ).to_arrow_reader(size)
        else:
            for _ in opened.chunks():
                yield from connection.sql(plan.select).to_arrow_reader(size)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        failure = plan.failure(connection)
        if failure is None and not isinstance(error, duckdb.Error):
            # a failure in the middle of a stream comes as Arrow's, with DuckDB's text
            text = safe_message(duckdb.Error(str(error)))
            failure = SourceError(f"{plan.source}: {text}")
        raise failure or error from None
