"""Run a query's fragment on a shard: join keys, label and feature columns.

DuckDB evaluates the fragment's expressions in one streamed pass over the shard, in the
shard's own row order. Rows are written to the files batch by batch as they arrive: only
a few batches are ever in memory, and no Python object is made per row.
"""

import dataclasses
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from tp_flower.duckdb_engine import quote_name, safe_message
from tp_flower.errors import SourceError
from tp_flower.extraction import extracted, select_plan
from tp_flower.extraction.empty_answers import NO_ANSWERS, NoRows
from tp_flower.extraction.pairs import register_pairs
from tp_flower.extraction.time_limit import TimeLimit
from tp_flower.extraction.unit_rows import scan_drawn_rows
from tp_flower.query.cutoffs import PAIRS
from tp_flower.query.fragment import Fragment, Role
from tp_flower.sources.shards import Scan, ShardSource

META_FILE: Final = "shard.json"
MOST_ROWS: Final = 1 << 16
MOST_VALUES: Final = 1 << 19  # of a batch, about 4 MB, if vectors have known lengths
_VECTORS: Final = pa.list_(pa.float32())
_TEXTS: Final = pa.schema([("t", pa.string())])


def extract(
    source: ShardSource,
    fragment: Fragment,
    folder: Path | None = None,
    order_key: bytes = b"",
    pairs: pa.Table | None = None,
    no_rows: NoRows = NO_ANSWERS,
) -> extracted.ExtractedShard:
    """Run a fragment on a shard; keep the columns in an empty folder, or in memory.

    Rows come in the shard's own order, so that their position identifies them in every
    run. If it has none, they are sorted by a keyed hash of everything that the fragment
    yields except the label, and equal rows stay interchangeable. Without the key the
    order reveals nothing about the values; with a public hash, the number of rows
    before a guessed one could be computed. If rows were also sorted by the label, those
    of one label could be adjacent, and noisy labels could be averaged.

    A LATERAL sub-query has a row for each of the ``pairs`` of keys and cutoffs, which
    may have its answers beside them, made of those of several shards. Its
    answer about ``no_rows`` is the last row, whatever the order of the others.
    """
    files: dict[str, pa.NativeFile] = {}
    with ExitStack() as stack:

        def create(name: str) -> pa.NativeFile:
            path = folder and str(folder / name)
            files[name] = pa.OSFile(path, "wb") if path else pa.BufferOutputStream()
            return stack.enter_context(files[name])

        opened_scan = stack.enter_context(scan_drawn_rows(source, fragment, order_key))
        answers = ""
        if pairs is not None:
            register_pairs(opened_scan.connection, PAIRS, pairs)
            subquery = opened_scan.fragment.subquery
            if subquery and set(subquery.names) == {*pairs.column_names}:
                answers = PAIRS
        limit = TimeLimit(source, fragment.table)
        stack.enter_context(limit.interrupt_late(opened_scan.connection))
        plan = select_plan.make_plan(source, opened_scan, no_rows, answers)
        writer = _Writer(plan, create, has_pairs=pairs is not None)
        for batch in _batches(opened_scan, plan, order_key, limit):
            writer.add(batch)
        contents = writer.finish(fragment.table, opened_scan.pushed)
    if folder:
        (folder / META_FILE).write_bytes(msgspec.json.encode(contents))
        return open_extracted(folder)
    buffers = {name: file.getvalue() for name, file in files.items()}
    return extracted.ExtractedShard(
        contents, lambda name: pa.BufferReader(buffers[name])
    )


def open_extracted(folder: Path) -> extracted.ExtractedShard:
    """Return the shard that ``extract`` wrote to a folder."""
    contents = msgspec.json.decode(
        (folder / META_FILE).read_bytes(), type=extracted.ShardContents
    )
    return extracted.ExtractedShard(
        contents, lambda name: pa.OSFile(str(folder / name))
    )


class _Writer:
    """Writes the batches of a plan's SELECT to new Arrow files."""

    def __init__(
        self,
        plan: select_plan.Plan,
        create: Callable[[str], pa.NativeFile],
        *,
        has_pairs: bool,
    ) -> None:
        self._plan = plan
        self._has_pairs = has_pairs
        self._plain_keys = plan.plain_keys
        self._widths = {
            p.column: select_plan.vector_width(p.type) for p in plan.vectors
        }
        self._starts = [0]
        self._listed = Counter[str]()
        self._lists = {
            column: pa.ipc.new_stream(
                create(extracted.TEXTS_FILE.format(column)), _TEXTS
            )
            for column in plan.listed
        }
        self._schema = pa.schema(
            [
                *((piece.column, pa.float64()) for piece in plan.numbers),
                *((column, pa.int32()) for column in plan.listed),
                *((piece.column, _VECTORS) for piece in plan.vectors),
            ]
        )
        self._file = pa.ipc.new_file(create(extracted.ROWS_FILE), self._schema)

    def add(self, batch: pa.RecordBatch) -> None:
        """Write a batch of rows."""
        for piece in self._plan.numbers:
            self._check_finite(piece, batch[piece.column])
        columns = [
            *(batch[piece.column] for piece in self._plan.numbers),
            *(self._positions(column, batch[column]) for column in self._plan.listed),
            *(
                self._vectors(piece, batch[piece.column])
                for piece in self._plan.vectors
            ),
        ]
        self._file.write_batch(pa.record_batch(columns, schema=self._schema))
        self._starts.append(self._starts[-1] + batch.num_rows)

    def finish(self, table: str, pushed: Sequence[str]) -> extracted.ShardContents:
        """Close the files and return their description."""
        for file in (*self._lists.values(), self._file):
            file.close()
        plan = self._plan
        keys = {
            column: extracted.StoredColumn(
                kind="+".join(p.kind for p in parts), column=column
            )
            for column, parts in plan.composites.items()
        }
        groups = keys.pop(select_plan.GROUPS, None)
        units = keys.pop(select_plan.UNIT, None)
        if units is not None:
            policy = plan.source.policy
            units = replace(units, name=policy.per, width=policy.rows_per_unit)
        return extracted.ShardContents(
            table=table,
            engine=plan.source.engine,
            pushed=tuple(pushed),
            columns=tuple(self._schema.names),
            starts=self._starts,
            features=tuple(
                extracted.StoredColumn(
                    name=piece.name,
                    kind=piece.kind,
                    column=piece.column,
                    width=self._widths.get(piece.column, 1) or 0,
                )
                for piece in plan.features
            ),
            label=next(
                (
                    extracted.StoredColumn(kind=p.kind, column=p.column)
                    for p in plan.label
                ),
                None,
            ),
            keys=tuple(keys.values()),
            groups=groups,
            units=units,
            **{str(role): piece.column for role, piece in plan.by_role.items()},
        )

    def _positions(self, column: str, values: pa.Array) -> pa.Array:
        """Return each row's position in the list of texts, -1 where it is NULL."""
        is_plain = column in self._plain_keys
        if self._has_pairs and column in self._plan.composites and not is_plain:
            positions, texts = _numbered(values)
        else:
            encoded = values.dictionary_encode()
            positions, texts = encoded.indices, encoded.dictionary
        if is_plain:
            texts = select_plan.canonical_texts(texts, self._plain_keys[column])
        self._lists[column].write_batch(pa.record_batch([texts], ["t"]))
        first = pa.scalar(self._listed[column], pa.int32())
        self._listed[column] += len(texts)
        return pc.add(positions, first).fill_null(extracted.MISSING)

    def _vectors(self, piece: select_plan.TypedColumn, vectors: pa.Array) -> pa.Array:
        """Return vectors of float32; SourceError if they differ in length."""
        lengths = pc.min_max(pc.list_value_length(vectors))
        shortest = lengths["min"].as_py()
        longest = lengths["max"].as_py()
        if longest is not None:
            width = self._widths[piece.column]
            width = self._widths[piece.column] = shortest if width is None else width
            if shortest != longest or shortest != width:
                raise SourceError(
                    f"{self._plan.source}: the vectors of {piece.name!r} differ in "
                    f"length: {shortest} and {max(longest, width)}; all must have the "
                    "same length"
                )
        vectors = vectors.cast(_VECTORS, safe=False)
        self._check_finite(piece, vectors.flatten())
        return vectors

    def _check_finite(self, piece: select_plan.TypedColumn, values: pa.Array) -> None:
        if np.isinf(values.to_numpy(zero_copy_only=False)).any():
            example = ""
            if piece is self._plan.by_role.get(Role.OFFSET):
                example = ", such as WHERE exposure > 0 for LN(exposure)"
            raise SourceError(
                f"{self._plan.source}: {piece.name!r} has infinite values: "
                f"filter them out or replace them in the query{example}"
            )


def _numbered(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the position of each text among those that are not NULL, and these.

    For keys of pairs of which no two are equal, a dictionary takes longer.
    """
    is_present = texts.is_valid()
    counted = pc.cumulative_sum(is_present.cast(pa.int32()))
    return pc.if_else(is_present, pc.subtract(counted, 1), None), texts.drop_null()


def _order(
    connection: duckdb.DuckDBPyConnection,
    plan: select_plan.Plan,
    order_key: bytes,
    *,
    has_pairs: bool,
) -> str:
    """Return the ORDER BY of a table of unsorted rows.

    Rows are named by position, so it tells nothing of their values: in the order of two
    queries together, or with equal rows side by side, it would tell which are equal. No
    two rows are equal where each is of a pair of a key and a cutoff.
    """
    label = {piece.column for piece in plan.label}
    names = connection.table("unsorted").columns
    columns = [quote_name(name) for name in names if name not in label]
    if not columns:
        return ""
    unlabelled = dataclasses.replace(plan, label=())
    key = hmac.digest(order_key, unlabelled.select.encode(), "sha256").hex()
    row = f"CAST(hash({', '.join(columns)}) AS VARCHAR)"
    if not has_pairs:
        row += f" || ' ' || row_number() OVER (PARTITION BY {row})"
    # with a key of 32 bytes, one block of SHA-256
    return f"ORDER BY sha256(unhex('{key}') || encode({row}))"


def _batches(
    opened: Scan, plan: select_plan.Plan, order_key: bytes, limit: TimeLimit
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a plan in an order that reveals nothing about their values."""
    connection = opened.connection
    width = len(plan.numbers) + len(plan.listed)
    width += sum(select_plan.vector_width(piece.type) or 1 for piece in plan.vectors)
    size = max(1, min(MOST_ROWS, MOST_VALUES // max(width, 1)))
    try:
        if opened.needs_sort or opened.fragment.subquery is not None:
            # DuckDB groups in parallel, and databases do not guarantee an order either
            subquery = opened.fragment.subquery
            # with a sub-query there is one step, whose rows need not be written down
            kind = "TABLE" if subquery is None else "VIEW"
            for number, _ in enumerate(opened.chunks()):
                start = "INSERT INTO" if number else f"CREATE TEMP {kind}"
                clause = "" if number else " AS"
                limit.check()
                connection.execute(f"{start} unsorted{clause} {plan.select}")
            has_pairs = subquery is not None and subquery.cutoffs is not None
            order = _order(connection, plan, order_key, has_pairs=has_pairs)
            yield from connection.sql(
                f"SELECT * FROM unsorted {order}"
            ).to_arrow_reader(size)
        else:
            for _ in opened.chunks():
                limit.check()
                yield from connection.sql(plan.select).to_arrow_reader(size)
        if plan.empty_answer:
            yield from connection.sql(plan.empty_select).to_arrow_reader(size)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        # before what was interrupted is run again, to find what fails
        limit.check()
        failure = plan.failure(connection)
        if failure is None and not isinstance(error, duckdb.Error):
            # a failure in mid-stream is raised by Arrow, with DuckDB's text
            text = safe_message(duckdb.Error(str(error)))
            failure = SourceError(f"{plan.source}: {text}")
        raise failure or error from None
