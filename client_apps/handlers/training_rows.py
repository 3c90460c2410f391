"""The rows of a part that take part in training or are held out, and their batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from client_apps.privacy.guard import check_rows
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.extraction.extracted import ExtractedKey
from tp_flower.folds import NO_FOLD, folds_by_hash
from tp_flower.privacy.units import Units
from tp_flower.protocol.codec import check_positions, check_sizes, required
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.setup_messages import SplitTerms
from tp_flower.protocol.training_messages import PreparePart
from tp_flower.sources.shards import ShardSource
from tp_flower.splits import BY_HASH, BY_ORDER, TRAIN, Shares, split_by_hash


@dataclass(frozen=True)
class TrainingRows:
    """The rows that take part, the trained ones first.

    Attributes:
        positions: (n,), in the table, each once.
        multiplicity: (n_trained,), G, the joined rows of each trained row; G^w if
            joined rows are weighted.
        tested: (n,) bool, rows that appear in held-out joined rows.
    """

    positions: IntArray
    multiplicity: IntArray | FloatArray
    tested: npt.NDArray[np.bool_]

    def check_accounted(self) -> None:
        """Refuse rows of unknown privacy cost if models or scores are protected."""
        if self.multiplicity.dtype.kind == "f":
            raise SiteError(
                "the run protects models or scores, but its joined rows are weighted: "
                "clips and noise need rows that count once per joined row"
            )

    @property
    def trained(self) -> int:
        """Rows that are trained on."""
        return len(self.multiplicity)

    def masks(self, rows: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which rows of the table train and which are held out, (rows,) each."""
        is_trained = np.zeros(rows, np.bool_)
        is_tested = np.zeros(rows, np.bool_)
        is_trained[self.positions[: self.trained]] = True
        is_tested[self.positions[self.tested]] = True
        return is_trained, is_tested

    def units_of(self, codes: AnyArray | None) -> Units | None:
        """Return the units of privacy of the trained rows, by those of the table's."""
        if codes is None:
            return None
        return Units(codes[self.positions[: self.trained]])


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
    """Return the rows that a request selects by masks."""
    trained = unpack_bits(body.trained, rows)
    tested = unpack_bits(body.tested, rows)
    positions = np.concatenate(
        [np.flatnonzero(trained), np.flatnonzero(tested & ~trained)]
    )
    check_sizes(body, trained=int(np.count_nonzero(trained)))
    multiplicity = read_multiplicity(body.multiplicity, body.masses, body.joined_rows)
    training_rows = TrainingRows(positions, multiplicity, tested[positions])
    if is_private:
        training_rows.check_accounted()
    return training_rows


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
    check_rows(source, rows.trained, f"the model of table {table!r}")
    sizes = np.diff(batches.start)
    if sends_sums and np.any(sizes):
        check_rows(
            source,
            int(sizes[sizes > 0].min()),
            f"a batch's gradient of table {table!r}",
        )


def told_split(
    site: Site, terms: SplitTerms | None, keys: Sequence[ExtractedKey]
) -> dict[str, AnyArray]:
    """Return what the last key says of each row: its subset, or its place in time."""
    if terms is None:
        return {}
    key = keys[-1]
    if terms.by == BY_HASH:
        hasher = site.hasher().purpose(f"split {terms.seed}")
        hashes = hasher.hash_texts(key.texts)
        subset = split_by_hash(hashes, Shares(terms.test, terms.validation))
        # the last value is that of a missing one
        arrays = {"subset": np.append(subset, np.uint8(TRAIN))[key.codes]}
        if terms.folds:
            folds = folds_by_hash(hashes, terms.folds)
            arrays["folds"] = np.append(folds, np.uint8(NO_FOLD))[key.codes]
        return arrays
    times = key.numbers()
    if terms.by == BY_ORDER:
        times = np.unique(times, return_inverse=True)[1].astype(np.float64)
    return {"times": np.append(times, np.nan)[key.codes]}
