"""Joined rows whose vectors are at the workers of the server.

Each worker has consecutive joined rows, whole parts of those that
:class:`~tp_flower.joins.rows.JoinedRows` computes, so that partial results are the same
and combined in the same order. Sums over the rows of a table are added pairwise, in the
order of the workers: their last bits depend on how many there are.

The server keeps the row numbers and the vectors that it has begun with, those of the
objective. Of a table whose rows are in the order of the joined rows, as the label's
often are, each worker knows the rows of its own joined rows alone; values of any other
are stored once for all.

A worker that has died is replaced, and its partition made again: from the row numbers,
from the last *snapshot* of the vectors, and by a *journal* of what was run and filled
since. What no later vector depends on leaves the journal; once it has twice the bytes
of the vectors themselves, a snapshot of these is written to files of the server.

Notation:
    N    joined rows       n_i  rows of table i        W  workers that have some rows
"""

import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BLOCK_ROWS, AnyArray, FloatArray, blocks_of
from tp_flower.joins import rows as joins
from tp_flower.joins.mapping import NO_ROW, RowNumbers, TableMapping, number_type
from tp_flower.joins.partitions import PartialRun, Sums
from tp_flower.joins.rows import NO_LOCAL, Combine, JoinedRows, Kernel, as_read
from tp_flower.joins.workers import WorkerLostError, Workers, until_done

DIVIDED: Final = 1.25
"""Times the rows of a table that its workers may know together, at most, for each to be
sent those that it knows."""
JOURNAL: Final = 2
"""Times the bytes of the vectors that a journal may have before they are written."""
LEAST_JOURNAL: Final = 1 << 26
"""Bytes of a journal that is not worth a snapshot."""


@dataclass(frozen=True, eq=False)
class SpreadRows(JoinedRows):
    """N joined rows, whose vectors are at workers.

    Attributes:
        vectors: those that they begin with, by name, (N, ..).
        workers: of the server.
        snapshot: other vectors to begin with, of the same joined rows.
    """

    workers: Workers = field(kw_only=True)
    snapshot: "Snapshot | None" = None

    def __post_init__(self) -> None:
        """Spread the rows over the workers."""
        spread = _Spread(self)
        object.__setattr__(self, "_spread", spread)
        weakref.finalize(self, self.workers.drop, spread.key).atexit = False

    @property
    def _spread_rows(self) -> "_Spread":
        spread: _Spread = vars(self)["_spread"]
        return spread

    def fill(self, name: str, values: FloatArray) -> None:
        """Store a vector by its values (N, ...), or the values (c,) of every row."""
        self._spread_rows.fill(name, values)

    def run_parts(
        self,
        kernel: Kernel,
        local: Mapping[str, AnyArray] = NO_LOCAL,
        combine: Combine = "add",
        *,
        by_table: bool = False,
        part_rows: int = 0,
    ) -> list[FloatArray]:
        """Call a kernel for all joined rows; return each part's partial result."""
        del part_rows
        return self._spread_rows.run(kernel, local, combine, by_table=by_table)

    def sums(self, name: str, tables: Iterable[str] | None = None) -> Sums:
        """Return by table the sums (n_i, c) of a vector (N, c) over each row's rows."""
        chosen = self.sizes if tables is None else tables
        return until_done(lambda: self._spread_rows.sums(name, list(chosen)))

    def whole(self, name: str) -> AnyArray:
        """Return a vector (N, ..), to read, which all workers send."""
        values = np.concatenate(self._spread_rows.stored(name))
        values = as_read(values)
        values.flags.writeable = False
        return values

    def take(self, name: str, rows: npt.NDArray[np.integer]) -> AnyArray:
        """Return the entries of a vector at some joined rows (k,), (k, ..)."""
        return as_read(self._spread_rows.take(name, rows))

    def select(self, mask: npt.NDArray[np.bool_]) -> JoinedRows:
        """Return the joined rows that a mask (N,) marks, at the server."""
        vectors = {
            name: np.concatenate(self._spread_rows.stored(name))[mask]
            for name in self._spread_rows.names
        }
        return JoinedRows(
            self.mapping.select(mask), vectors, self.is_one_part, self.is_single
        )

    def over(self, mapping: TableMapping) -> JoinedRows:
        """Return the same joined rows over other rows of tables, with their vectors."""
        return SpreadRows(
            mapping,
            self.vectors,
            is_single=self.is_single,
            workers=self.workers,
            snapshot=self._spread_rows.take_snapshot(),
        )


def joined_rows(
    mapping: TableMapping,
    vectors: dict[str, AnyArray] | None = None,
    *,
    is_one_part: bool = False,
    is_single: bool = False,
    workers: Workers | None = None,
) -> JoinedRows:
    """Return joined rows at the workers, if there are some, or at the server.

    Rows of one part, whose derivatives depend on each other, stay at the server.
    """
    vectors = {} if vectors is None else vectors
    has_parts = mapping.joined_rows > joins.PART_ROWS and not is_one_part
    if workers is not None and has_parts:
        return SpreadRows(mapping, vectors, is_single=is_single, workers=workers)
    return JoinedRows(mapping, vectors, is_one_part, is_single)


@dataclass(frozen=True)
class JournalEntry:
    """A call of all workers that has changed vectors.

    Attributes:
        method: of :class:`~tp_flower.joins.partitions.Partitions`.
        args: by partition.
        reads, writes: the vectors that it reads, and makes.
        nbytes: of its arguments.
    """

    method: str
    args: Sequence[tuple[object, ...]]
    reads: frozenset[str]
    writes: frozenset[str]
    nbytes: int


def needed(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Return the entries that some vector depends on, as it is after the last one."""
    kept: list[JournalEntry] = []
    names = frozenset[str]().union(*(entry.writes for entry in entries))
    for entry in reversed(entries):
        if entry.writes & names:
            kept.append(entry)
            names = (names - entry.writes) | entry.reads
    return kept[::-1]


class Snapshot:
    """The vectors of all partitions in files, which end with the last that uses them.

    Attributes:
        names: of the vectors.
    """

    def __init__(self, partitions: Iterable[Mapping[str, AnyArray]]) -> None:
        """Write the vectors of each partition, one after the other."""
        self._folder = Path(tempfile.mkdtemp(prefix="tp-flower-rows-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.names: frozenset[str] = frozenset()
        for number, vectors in enumerate(partitions):
            self.names = frozenset(vectors)
            for position, name in enumerate(sorted(vectors)):
                np.save(self._file(number, position), vectors[name])

    def load(self, number: int) -> dict[str, AnyArray]:
        """Return the vectors of a partition."""
        return {
            name: np.load(self._file(number, position))
            for position, name in enumerate(sorted(self.names))
        }

    def _file(self, number: int, position: int) -> Path:
        return self._folder / f"{number}-{position}.npy"


class _Spread:
    """The partitions of joined rows, and how each is made again.

    Attributes:
        key: of the partitions, at the workers.
        names: of the vectors.
    """

    def __init__(self, rows: SpreadRows) -> None:
        self._workers = rows.workers
        self._mapping = rows.mapping
        self._vectors = rows.vectors
        self._snapshot = rows.snapshot
        self._is_single = rows.is_single
        self.key = rows.workers.new_key()
        self._spans = _spans(rows.rows, len(rows.workers))
        self._divided = {
            name: spans
            for name, table in rows.mapping.tables.items()
            if (spans := _divide(table.row_of, table.rows, self._spans))
        }
        self._generations = [-1] * len(self._spans)
        self._journal: list[JournalEntry] = []
        # bytes of the vectors that workers have made, by name
        self._made: dict[str, int] = {}
        began = frozenset[str]() if rows.snapshot is None else rows.snapshot.names
        self.names = {*rows.vectors, *began}

    def fill(self, name: str, values: FloatArray) -> None:
        """Store a vector by its values, or those of every row."""
        each: Sequence[FloatArray] = [values] * len(self._spans)
        if values.ndim > 1:
            each = [self._workers.put(values[span]) for span in self._spans]
        args = [(name, part) for part in each]
        made = self._on_all("fill", args)
        self._note(
            JournalEntry("fill", args, frozenset(), frozenset([name]), values.nbytes),
            {name: sum(made)},
        )

    def run(
        self,
        kernel: Kernel,
        local: Mapping[str, AnyArray],
        combine: Combine,
        *,
        by_table: bool,
    ) -> list[FloatArray]:
        """Call a kernel for all joined rows; return each part's partial result."""
        how = combine, by_table, joins.PART_ROWS
        # as it is now: it may read what changes later
        sent = self._workers.put(kernel)
        args = [(how, sent, *some) for some in self._local(local)]
        runs: list[PartialRun] = self._on_all("run", args)
        made: Counter[str] = Counter()
        for each in runs:
            made.update(each.writes)
        if made:
            reads = frozenset[str]().union(*(each.reads for each in runs))
            nbytes = sum(values.nbytes for values in local.values())
            self._note(JournalEntry("run", args, reads, frozenset(made), nbytes), made)
        return [result for each in runs for result in each.results]

    def _local(self, local: Mapping[str, AnyArray]) -> list[tuple[Any, ...]]:
        """Return what each worker is sent of the tables' values (n_i, c)."""
        shared = {n: each for n, each in local.items() if n not in self._divided}
        common: tuple[Any, ...] = (self._workers.put(shared),) if shared else ()
        divided = [name for name in local if name in self._divided]
        if not divided:
            return [common] * len(self._spans)
        return [
            (
                *common,
                self._workers.put(
                    {name: local[name][self._divided[name][part]] for name in divided}
                ),
            )
            for part in range(len(self._spans))
        ]

    def sums(self, name: str, tables: Sequence[str]) -> Sums:
        """Return by table the sums of a vector; a worker may die meanwhile."""
        divided = [table for table in tables if table in self._divided]
        shared = [table for table in tables if table not in self._divided]
        numbers = range(len(self._spans))
        parts = {n: self._begin(n, "sums", (name, divided)) for n in numbers if divided}
        pairs = [(n, self._begin(n, "sums", (name, shared))) for n in numbers if shared]
        while len(pairs) > 1:
            pairs = [self._added(pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
        total: Sums = {}
        for _, future in pairs:
            total |= self._get(future)
        for number, future in parts.items():
            for table, sums in self._get(future).items():
                if table not in total:
                    rows = self._mapping.tables[table].rows
                    total[table] = np.zeros((rows, sums.shape[1]))
                total[table][self._divided[table][number]] += sums
        return {table: total[table] for table in tables}

    def _added(self, pair: Sequence[tuple[int, Any]]) -> tuple[int, Any]:
        """Let the first worker of two add their sums; one alone has its own."""
        (number, left), *others = pair
        for _, right in others:
            left = self._workers.call(number, "add", left, right)
        return number, left

    def stored(self, name: str) -> list[AnyArray]:
        """Return a vector by partition, as it is stored."""
        return self._on_all("entries", [(name,)] * len(self._spans))

    def take(self, name: str, rows: npt.NDArray[np.integer]) -> AnyArray:
        """Return the entries of a vector at some joined rows, as they are stored."""
        places = [(rows >= span.start) & (rows < span.stop) for span in self._spans]
        parts = self._on_all(
            "entries",
            [
                (name, rows[position] - span.start)
                for position, span in zip(places, self._spans, strict=True)
            ],
        )
        taken = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
        for position, part in zip(places, parts, strict=True):
            taken[position] = part
        return taken

    def take_snapshot(self) -> Snapshot | None:
        """Write the vectors that workers have made to files; the journal is empty."""
        if self._journal:
            made = set(self._made)
            if self._snapshot is not None:
                made |= self._snapshot.names
            vectors = (
                {name: self._on_one(number, "entries", (name,)) for name in made}
                for number in range(len(self._spans))
            )
            self._snapshot = Snapshot(vectors)
            self._journal = []
        return self._snapshot

    def _note(self, entry: JournalEntry, made: Mapping[str, int]) -> None:
        """Keep an entry from which partitions can be made again."""
        self._made.update(made)
        self.names |= made.keys()
        self._journal = needed([*self._journal, entry])
        nbytes = sum(entry.nbytes for entry in self._journal)
        if nbytes > max(LEAST_JOURNAL, JOURNAL * sum(self._made.values())):
            self.take_snapshot()

    def _on_all(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        """Return the results of a call of every worker that has rows."""
        futures = [
            self._begin(n, method, arguments) for n, arguments in enumerate(args)
        ]
        return [
            self._on_one(n, method, args[n], future) for n, future in enumerate(futures)
        ]

    def _on_one(
        self, number: int, method: str, args: tuple[object, ...], future: Any = None
    ) -> Any:
        """Return the result of a call of one worker, replaced if it has died.

        The call may have begun, as ``future``. Where its result is lost, the worker is
        replaced even if it lives: what has changed vectors once must not do so again.
        """
        begun = [] if future is None else [future]

        def result() -> Any:
            call = begun.pop() if begun else self._begin(number, method, args)
            try:
                return self._get(call)
            except WorkerLostError:
                self._workers.lose(number)
                raise

        return until_done(result)

    def _get(self, future: Any) -> Any:
        return self._workers.get(future)

    def _begin(self, number: int, method: str, args: tuple[object, ...]) -> Any:
        """Begin a call of a worker, which has its partition by then."""
        generation = self._workers.generation(number)
        if generation != self._generations[number]:
            self._place(number)
            self._generations[number] = generation
        return self._workers.call(number, method, self.key, *args)

    def _place(self, number: int) -> None:
        """Let a worker have its partition, as the journal says."""
        span = self._spans[number]
        vectors = {n: np.asarray(each[span]) for n, each in self._vectors.items()}
        if self._snapshot is not None:
            vectors |= self._snapshot.load(number)
        call = self._workers.call
        tables = {name: self._rows_of(name, number) for name in self._mapping.tables}
        call(number, "place", self.key, tables, vectors, self._is_single)
        for entry in self._journal:
            call(number, entry.method, self.key, *entry.args[number])

    def _rows_of(self, name: str, number: int) -> tuple[RowNumbers, int]:
        """Return a table's rows behind a worker's joined rows, and how many it has."""
        table = self._mapping.tables[name]
        # those of a file are sent as others are
        row_of = np.asarray(table.row_of[self._spans[number]])
        if name not in self._divided:
            return row_of, table.rows
        span = self._divided[name][number]
        rows = span.stop - span.start
        numbers = np.where(row_of < 0, NO_ROW, row_of - span.start)
        return numbers.astype(number_type(rows)), rows


def _spans(rows: int, workers: int) -> list[slice]:
    """Return the joined rows of each worker: whole parts, as many as the others'."""
    parts = -(-rows // joins.PART_ROWS)
    edges = np.linspace(0, parts, min(workers, parts) + 1).astype(np.int64)
    starts = [min(int(edge) * joins.PART_ROWS, rows) for edge in edges]
    return [slice(*pair) for pair in pairwise(starts)]


def _divide(row_of: RowNumbers, rows: int, spans: Sequence[slice]) -> list[slice]:
    """Return the rows of a table that are behind each worker's joined rows.

    There are none where workers share most rows, and each knows all of them.
    """
    if len(spans) == 1:
        return []
    spans_of_rows = [_known(row_of, span) for span in spans]
    if sum(each.stop - each.start for each in spans_of_rows) > DIVIDED * rows:
        return []
    return spans_of_rows


def _known(row_of: RowNumbers, span: slice) -> slice:
    """Return the least slice of rows that are behind some joined rows."""
    edges = []
    for block in blocks_of(span, BLOCK_ROWS):
        some = row_of[block]
        some = some[some >= 0]
        if len(some):
            edges += [int(some.min()), int(some.max()) + 1]
    return slice(min(edges, default=0), max(edges, default=0))
