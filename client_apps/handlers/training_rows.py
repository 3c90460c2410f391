"""The rows of a part that take part in training, and their batches.

A method counts either the rows of the table, each once with its multiplicity, or the
joined rows (VFL): then a row of the table appears once for every joined row that it is
in. The policy's minimum of rows always counts rows of the table.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from client_apps.privacy.guard import check_rows
from tp_flower.arrays import AnyArray, FloatArray, IntArray, count_distinct
from tp_flower.errors import MessageError, SiteError
from tp_flower.privacy.units import Units
from tp_flower.protocol.codec import check_positions, check_sizes, required
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.training_messages import PreparePart
from tp_flower.sources.shards import ShardSource


@dataclass(frozen=True)
class TrainingRows:
    """The rows that take part, the trained ones first.

    Attributes:
        positions: (k,), in the table, each once.
        place: (n,), the index in ``positions`` of each row that takes part; None if
            these are the rows of the table themselves.
        multiplicity: (n_trained,), G, the joined rows of each trained row; G^w if
            joined rows are weighted.
        tested: (n,) bool, rows that appear in held-out joined rows.
    """

    positions: IntArray
    place: IntArray | None
    multiplicity: IntArray | FloatArray
    tested: npt.NDArray[np.bool_]

    def check_accounted(self) -> None:
        """Refuse rows of unknown privacy cost if models or scores are protected."""
        if self.place is not None:
            raise SiteError(
                "the run protects models or scores, but lists a row of the table for "
                "every joined row: clips and noise need rows that a message has once"
            )
        if self.multiplicity.dtype.kind == "f":
            raise SiteError(
                "the run protects models or scores, but its joined rows are weighted: "
                "clips and noise need rows that count once per joined row"
            )

    @property
    def behind(self) -> IntArray:
        """(n,), the table's row of each row that takes part."""
        return self.positions if self.place is None else self.positions[self.place]

    @property
    def trained(self) -> int:
        """Rows that are trained on."""
        return len(self.multiplicity)

    @property
    def trained_positions(self) -> int:
        """Rows of the table that are trained on."""
        return (
            self.trained
            if self.place is None
            else count_distinct(self.place[: self.trained])
        )

    @property
    def counts(self) -> IntArray | FloatArray:
        """How often each of the table's rows counts in sums over the trained ones."""
        if self.place is None:
            return self.multiplicity
        return np.bincount(self.place[: self.trained], self.multiplicity)

    def table_rows(
        self, rows: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which rows of the table train and which are held out, (rows,) each."""
        is_trained, is_tested = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        is_trained[self.behind[: self.trained]] = True
        is_tested[self.behind[self.tested]] = True
        return is_trained, is_tested

    def units_of(self, codes: AnyArray | None) -> Units | None:
        """Return the units of privacy of the trained rows, by those of the table's."""
        return None if codes is None else Units(codes[self.positions[: self.trained]])

    def table_rows_by_batch(self, batches: "Batches") -> IntArray:
        """Return the number of the table's rows in each batch, (batches,)."""
        sizes = np.diff(batches.start)
        if self.place is None:
            return sizes
        batch_of, rows = np.repeat(np.arange(len(sizes)), sizes), len(self.positions)
        pairs = np.unique(batch_of * rows + self.place[batches.rows])
        return np.bincount(pairs // max(rows, 1), minlength=len(sizes))


@dataclass(frozen=True)
class Batches:
    """The trained rows of each SGD batch, ascending; ``start`` is (batches + 1,)."""

    start: IntArray
    rows: IntArray

    @property
    def count(self) -> int:
        """The number of batches."""
        return len(self.start) - 1


def read_rows(body: PreparePart, rows: int, *, is_private: bool) -> TrainingRows:
    """Return the requested rows, given by masks or by lists for joined rows."""
    is_listed = body.expanded_trained is not None
    training_rows = expanded(body, rows) if is_listed else once_each(body, rows)
    if is_private:
        training_rows.check_accounted()
    return training_rows


def once_each(body: PreparePart, rows: int) -> TrainingRows:
    """Return the rows that a request selects by masks: each row of the table once."""
    trained = unpack_bits(required(body.trained, "trained"), rows)
    tested = unpack_bits(required(body.tested, "tested"), rows)
    positions = np.concatenate(
        [np.flatnonzero(trained), np.flatnonzero(tested & ~trained)]
    )
    check_sizes(body, trained=int(np.count_nonzero(trained)))
    multiplicity = read_multiplicity(body.multiplicity, body.masses, body.joined_rows)
    return TrainingRows(positions, None, multiplicity, tested[positions])


def read_multiplicity(
    multiplicity: AnyArray | None, masses: AnyArray | None, joined_rows: int
) -> IntArray | FloatArray:
    """Return G of the trained rows, or G^w if joined rows are weighted.

    The N weights have mean 1, so that no row's joined rows weigh more than N in total.
    """
    if masses is None:
        counts = required(multiplicity, "multiplicity")
        if counts.max(initial=0) > joined_rows:
            raise MessageError(
                f"array 'multiplicity' must hold numbers from 1 to {joined_rows}"
            )
        return counts.astype(np.int64)
    # the sum may have been rounded
    largest = joined_rows * (1.0 + np.finfo(np.float32).eps)
    if masses.size and not (masses.min() > 0.0 and masses.max() <= largest):
        raise MessageError(
            f"array 'masses' must hold weights above 0 and at most {joined_rows}"
        )
    return masses.astype(np.float64)


def expanded(body: PreparePart, rows: int) -> TrainingRows:
    """Return the rows that a request lists, one per joined row that has one."""
    lists = []
    for name, array, limit in (
        ("trained", body.expanded_trained, body.joined_rows),
        ("tested", body.expanded_tested, required(body.held_out_rows, "held_out_rows")),
    ):
        row_list = required(array, f"expanded-{name}").astype(np.int64)
        check_positions(row_list, f"expanded-{name}", rows)
        if len(row_list) > limit:
            raise MessageError(
                f"array 'expanded-{name}' has {len(row_list)} rows, "
                f"but there are {limit} joined rows to list"
            )
        lists.append(row_list)
    behind, trained = np.concatenate(lists), len(lists[0])
    check_sizes(body, trained=trained)
    multiplicity: IntArray | FloatArray = np.ones(trained, np.int64)
    if body.masses is not None:
        multiplicity = read_multiplicity(None, body.masses, body.joined_rows)
    is_used = np.zeros(rows, np.bool_)
    is_used[behind] = True
    return TrainingRows(
        positions=np.flatnonzero(is_used),
        place=(np.cumsum(is_used) - 1)[behind],
        multiplicity=multiplicity,
        tested=np.arange(len(behind)) >= trained,
    )


def read_batches(body: PreparePart, trained: int) -> Batches:
    """Return the rows of each SGD batch; no batches without a plan.

    A row that appears twice in a batch would contribute more than the clip allows.
    """
    if body.batch_start is None:
        return Batches(np.zeros(1, np.int64), np.zeros(0, np.int64))
    rows = required(body.batch_rows, "batch_rows").astype(np.int64)
    start = body.batch_start.astype(np.int64)
    check_positions(rows, "batch_rows", trained)
    is_whole = len(start) and start[0] == 0 and start[-1] == len(rows)
    if not is_whole or np.any(np.diff(start) < 0):
        raise MessageError("'batch-start' does not divide 'batch-rows'")
    # invariant: rows ascend within a batch
    begins = np.zeros(len(rows), np.bool_)
    begins[start[start < len(rows)]] = True
    if np.any((np.diff(rows) <= 0) & ~begins[1:]):
        raise MessageError("the rows of a batch are not ascending and distinct")
    return Batches(start, rows)


def check_training_rows(
    source: ShardSource,
    table: str,
    rows: TrainingRows,
    batches: Batches,
    *,
    sends_sums: bool,
) -> None:
    """Refuse to train on too few rows of the table, or to send sums over too few."""
    check_rows(source, rows.trained_positions, f"the model of table {table!r}")
    sizes = rows.table_rows_by_batch(batches)
    if sends_sums and np.any(sizes):
        check_rows(
            source,
            int(sizes[sizes > 0].min()),
            f"a batch's gradient of table {table!r}",
        )
