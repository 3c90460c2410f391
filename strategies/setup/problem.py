"""What the server knows after set-up: parts, mapping, labels, loss and base score."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from strategies.disclosures import Audience
from strategies.run.exchange import Part
from strategies.setup.row_weights import Weighting
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.coresets.sampling import Sample
from tp_flower.features.encoder import TableEncoder
from tp_flower.joins.mapping import JoinStep, TableMapping, TableRows
from tp_flower.joins.table_rows import NO_ROW
from tp_flower.learning.losses import Loss
from tp_flower.protocol import Update, pack_bits
from tp_flower.reports.records import TableReport


@dataclass(frozen=True)
class CoresetSample:
    """A sample of the joined training rows.

    Attributes:
        kind: how it was drawn: ``"importance"`` or ``"uniform"``.
        sample: of the joined training rows, by their numbers among all of them.
        joined_rows: N, how many there were.
        totals: by table, what the sensitivities of its rows sum to, as its sites say;
            empty where rows were drawn uniformly.
        shares: by table, of the draws that it decides on the average; the rest are
            drawn uniformly.
        capped: the parts whose totals were more than they can be, in words.
    """

    kind: str
    sample: Sample
    joined_rows: int
    totals: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    capped: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return what a report says of the sample."""
        return {
            "kind": self.kind,
            "size": self.sample.size,
            "distinct-rows": len(self.sample.joined),
            "joined-rows": self.joined_rows,
            "effective-rows": self.sample.effective_rows,
            "largest-weight": self.sample.largest_over_mean,
            "totals": dict(self.totals),
            "shares": dict(self.shares),
            "uniform-share": 1.0 - sum(self.shares.values()),
            "capped": list(self.capped),
        }


@dataclass(frozen=True)
class PartRows:
    """Where the rows of a part lie among the rows of its table that take part.

    The rows that take part are renumbered: per part the trained ones first, then those
    that are only tested. So a part's target is one slice and its scores another.

    Attributes:
        start: first row of the part.
        trained: number of its trained rows.
        total: number of its rows that take part.
        tested: (total,) bool, rows that appear in held-out joined rows.
    """

    start: int
    trained: int
    total: int
    tested: BoolArray

    @property
    def trained_slice(self) -> slice:
        """The trained rows within the table."""
        return slice(self.start, self.start + self.trained)

    @property
    def slice(self) -> slice:
        """All rows of the part within the table."""
        return slice(self.start, self.start + self.total)


@dataclass(frozen=True)
class PreparedTable:
    """One table of the query, whatever trains its models.

    Attributes:
        name: alias in the query.
        parts: its shards.
        features: encoded columns, d.
        outputs: d_c.
        is_linear: whether its model is linear.
        penalised: (p,) bool, the model's parameters that the penalty covers.
    """

    name: str
    parts: tuple[Part, ...]
    features: int
    outputs: int
    is_linear: bool
    penalised: BoolArray


@dataclass(frozen=True)
class Table(PreparedTable):
    """One table of the query in training over joined rows.

    Attributes:
        rows: where each part's rows lie, in the order of the parts.
        update: how its shards are trained together.
        has_intercept: whether its model has the output intercept.
        largest_curvature: largest eigenvalue of [T, 1]^T diag(G) [T, 1] / N, bounded by
            the sum over the shards; 0 without batches.
        mean_curvature: per shard, the mean diagonal of that matrix.
        gram: its sum over the shards where ``update`` is GRAM, else None.
        gram_deviation: of the noise that the shards have added to it together.
        gradient_noise: deviation over clip of the noise that the shards add together to
            the gradient of a batch.
    """

    rows: tuple[PartRows, ...]
    update: Update
    has_intercept: bool
    largest_curvature: float
    mean_curvature: tuple[float, ...]
    gram: FloatArray | None
    gram_deviation: float = 0.0
    gradient_noise: float = 0.0

    def with_gram(self, gram: FloatArray, deviation: float) -> "Table":
        """Return the table with the Gram matrix that its shards sent."""
        return replace(self, gram=gram, gram_deviation=deviation)

    @property
    def total_rows(self) -> int:
        """Rows of the table that take part."""
        return sum(rows.total for rows in self.rows)


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ABC):
    """The training problem after set-up, whatever trains it.

    Attributes:
        tables: by alias.
        loss: of scores against labels.
        base_score: b, (d_c,).
        classes: names of the label's classes; empty in regression.
        join_steps: one record per table, in the order of joining.
        source_rows: rows of every table after its filters.
        fan_out: by table, the joined training rows of each of its rows that is in one.
        names: name of every table at the sites.
        encoders: of every table.
        audience: what decides who learns what.
    """

    tables: Mapping[str, PreparedTable]
    loss: Loss
    base_score: FloatArray
    classes: tuple[str, ...]
    join_steps: tuple[JoinStep, ...]
    source_rows: Mapping[str, int]
    fan_out: Mapping[str, npt.NDArray[np.int64]]
    names: Mapping[str, str]
    encoders: Mapping[str, TableEncoder]
    audience: Audience

    @property
    def parts(self) -> list[Part]:
        """All parts of all tables."""
        return [part for table in self.tables.values() for part in table.parts]

    @property
    @abstractmethod
    def joined_rows(self) -> tuple[int, int]:
        """How many joined rows are trained on, and how many are held out."""

    @property
    def chosen(self) -> dict[str, object]:
        """What a report says that the set-up has chosen."""
        return {"loss": self.loss.name}


@dataclass(frozen=True, kw_only=True)
class TrainingProblem(PreparedRun):
    """A training problem over joined rows that nobody holds.

    Attributes:
        train: mapping of the training rows, over the tables' rows that take part.
        test: mapping of the held-out rows, or None without any.
        train_labels: (N,).
        test_labels: (N_test,).
        initial_scores: local scores (n_i, d_c) of the untrained models.
        l2: beta.
        seed: of the run.
        weighting: what the joined rows weigh.
        coreset: the sample that is trained on; None where all joined rows are.
        weight_facts: what a report says of the weights that were asked for.
    """

    tables: Mapping[str, Table]
    train: TableMapping
    test: TableMapping | None
    train_labels: FloatArray
    test_labels: FloatArray
    initial_scores: Mapping[str, FloatArray]
    l2: float
    seed: int
    weighting: Weighting = field(default_factory=Weighting)
    coreset: CoresetSample | None = None
    weight_facts: Mapping[str, object] | None = None

    @property
    def joined_rows(self) -> tuple[int, int]:
        """Joined training rows and held-out ones."""
        return self.train.joined_rows, len(self.test_labels)

    @property
    def chosen(self) -> dict[str, object]:
        """The loss, the weights that were asked for, and the coreset."""
        chosen = super().chosen
        if self.weight_facts:
            chosen["row-weight"] = self.weight_facts
        if self.coreset is not None:
            chosen["coreset"] = self.coreset.facts()
        return chosen

    @property
    def sharded(self) -> list[Table]:
        """The tables whose shards need a second round."""
        return [t for t in self.tables.values() if t.update is not Update.LOCAL]


def table_reports(problem: PreparedRun) -> list[TableReport]:
    """Return what the report says of every table, in the order of the query."""
    reports = []
    for name, table in problem.tables.items():
        trained = problem.fan_out[name]
        reports.append(
            TableReport(
                table=name,
                name=problem.names[name],
                rows=problem.source_rows[name],
                features=table.features,
                shards=len(table.parts),
                sites=tuple(part.site for part in table.parts),
                # a LEFT JOINed table may have no row to train on
                multiplicity_min=int(trained.min()) if len(trained) else 0,
                multiplicity_mean=float(trained.mean()) if len(trained) else 0.0,
                multiplicity_max=int(trained.max(initial=0)),
                dropped=problem.encoders[name].dropped,
            )
        )
    return reports


@dataclass(frozen=True)
class TableLayout(ABC):
    """How the rows of one table that take part are numbered.

    Attributes:
        name: alias of the table.
        parts: its shards.
        rows: where each part's rows lie after renumbering.
        masses: per part, (trained rows,): G^w, which takes the place of G where joined
            rows are weighted; None where they are not.
    """

    name: str
    parts: tuple[Part, ...]
    rows: tuple[PartRows, ...]
    masses: tuple[npt.NDArray[np.float32], ...] | None = field(
        default=None, kw_only=True
    )

    @property
    @abstractmethod
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part's shard, whether they take part or not."""

    @abstractmethod
    def set_up_arrays(self) -> dict[int, dict[str, Any]]:
        """Return what ``prepare`` sends to each part."""


Layout = TypeVar("Layout", bound=TableLayout)


@dataclass(frozen=True)
class CompactTable(TableLayout):
    """One table's rows that take part, each once.

    Attributes:
        trained: per part, (rows of the shard,) bool.
        tested: per part, (rows of the shard,) bool.
        multiplicity: per part, (trained rows,): G of its trained rows.
    """

    trained: tuple[BoolArray, ...]
    tested: tuple[BoolArray, ...]
    multiplicity: tuple[npt.NDArray[np.int32], ...]

    @property
    def shard_rows(self) -> tuple[int, ...]:
        """Rows of each part's shard."""
        return tuple(len(own) for own in self.trained)

    def set_up_arrays(self) -> dict[int, dict[str, Any]]:
        """Return what ``prepare`` sends to each part."""
        return {
            part.number: {
                "trained": pack_bits(self.trained[k]),
                "tested": pack_bits(self.tested[k]),
                **(
                    {"multiplicity": self.multiplicity[k]}
                    if self.masses is None
                    else {"masses": self.masses[k]}
                ),
            }
            for k, part in enumerate(self.parts)
        }


def compact_tables(
    mapping: TableMapping,
    is_test: BoolArray,
    parts: Mapping[str, tuple[Part, ...]],
    part_rows: Mapping[int, int],
) -> tuple[TableMapping, TableMapping | None, dict[str, CompactTable]]:
    """Split the joined rows and renumber every table's rows.

    Args:
        mapping: of all joined rows.
        is_test: (N_all,) bool, the held-out joined rows.
        parts: by table, in shard order.
        part_rows: rows of every part.

    Returns:
        The mapping of the training rows, that of the held-out rows (None without any),
        and the renumbered tables.
    """
    train, test = mapping.select(~is_test), mapping.select(is_test)
    return compact_rows(train, test, parts, part_rows)


def compact_rows(
    train: TableMapping,
    test: TableMapping,
    parts: Mapping[str, tuple[Part, ...]],
    part_rows: Mapping[int, int],
) -> tuple[TableMapping, TableMapping | None, dict[str, CompactTable]]:
    """Renumber the rows of every table that are in some joined rows.

    Args:
        train: mapping of the joined rows to train on, over all rows of the tables.
        test: likewise of those to test on; some may be the same.
        parts: by table, in shard order.
        part_rows: rows of every part.

    Returns:
        Both mappings over the renumbered rows (None for a test without any), and the
        renumbered tables.
    """
    train_rows: dict[str, TableRows] = {}
    test_rows: dict[str, TableRows] = {}
    compact: dict[str, CompactTable] = {}
    for name, own in parts.items():
        counts = train.tables[name].multiplicity
        tested = test.tables[name].multiplicity > 0
        sizes = [part_rows[part.number] for part in own]
        compact[name], new_number = _compact(name, own, sizes, counts, tested)
        total = sum(rows.total for rows in compact[name].rows)
        train_rows[name] = TableRows(new_number[train.tables[name].row_of], total)
        test_rows[name] = TableRows(new_number[test.tables[name].row_of], total)
    return (
        TableMapping(train_rows),
        TableMapping(test_rows) if test.joined_rows else None,
        compact,
    )


def weighted_tables(
    tables: Mapping[str, Layout], masses: Mapping[str, FloatArray]
) -> dict[str, Layout]:
    """Return the tables with what the training rows of each row weigh.

    Args:
        tables: by name.
        masses: by name G^w, (rows that take part,): numbers that float32 has.
    """
    return {
        name: replace(
            own,
            masses=tuple(
                masses[name][rows.trained_slice].astype(np.float32) for rows in own.rows
            ),
        )
        for name, own in tables.items()
    }


def _compact(
    name: str,
    parts: tuple[Part, ...],
    sizes: list[int],
    counts: npt.NDArray[np.int64],
    tested: BoolArray,
) -> tuple[CompactTable, npt.NDArray[np.int32]]:
    """Return the renumbered table and the new number of each old row, (n_i + 1,)."""
    # the extra last entry stays: NO_ROW is renumbered to itself
    new_number = np.full(len(counts) + 1, NO_ROW, dtype=np.int32)
    rows, trained_masks, tested_masks, multiplicity = [], [], [], []
    start = offset = 0
    for size in sizes:
        own_counts = counts[offset : offset + size]
        own_tested = tested[offset : offset + size]
        own_trained = own_counts > 0
        kept = np.concatenate(
            [np.flatnonzero(own_trained), np.flatnonzero(own_tested & ~own_trained)]
        )
        new_number[offset + kept] = np.arange(start, start + len(kept), dtype=np.int32)
        trained = int(np.count_nonzero(own_trained))
        rows.append(PartRows(start, trained, len(kept), own_tested[kept]))
        trained_masks.append(own_trained)
        tested_masks.append(own_tested)
        multiplicity.append(own_counts[own_trained].astype(np.int32))
        start, offset = start + len(kept), offset + size
    table = CompactTable(
        name,
        parts,
        tuple(rows),
        tuple(trained_masks),
        tuple(tested_masks),
        tuple(multiplicity),
    )
    return table, new_number
