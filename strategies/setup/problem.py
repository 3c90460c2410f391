"""The training problem: tables, mapping, labels, loss and base score.

The LoJ operator (paper, section 3.1) is here: *gather* lets the head make scores of the
tables' local ones on the joined rows, *scatter* maps what the server computed on joined
rows back to the rows of each table. The joined rows are never built.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from strategies.disclosures import Exposure
from strategies.run.exchange import Part, Replies
from strategies.run.replies import addends_of
from tp_flower.arrays import (
    FLOAT32,
    AnyArray,
    BoolArray,
    FloatArray,
    effective_rows,
)
from tp_flower.heads import Head, table_part
from tp_flower.joins.joining import JoinStep
from tp_flower.joins.mapping import RowWeights, TableMapping, score_steps
from tp_flower.joins.rows import (
    LEAST_TOLERANCE,
    SINGLE_ROWS,
    JoinedRows,
    Vectors,
)
from tp_flower.joins.spread_rows import joined_rows
from tp_flower.joins.workers import Workers
from tp_flower.objectives import Objective, Response
from tp_flower.privacy.score_masks import FixedPoint
from tp_flower.privacy.sealed_sums import add_shares
from tp_flower.protocol.fields import Document, PartBody
from tp_flower.protocol.packet import row_numbers
from tp_flower.protocol.setup_messages import EncodedColumns
from tp_flower.protocol.training_messages import Update
from tp_flower.reports.records import TableReport

SCORES: Final = "scores"  # the vector h of joined rows, (N, d_c)
LocalArray = npt.NDArray[Any]  # vectors (n_i, w) of the head, or masked words of them
LocalScores = Mapping[str, LocalArray]
AnyBody = TypeVar("AnyBody", bound=PartBody)


@dataclass(frozen=True)
class Weighting:
    """The weights of the joined rows, > 0: None where all weigh alike.

    ``column`` is the table and expression of the query's weight, ``entity`` the alias
    of the table whose rows count once each; "" if there is none.
    """

    train: RowWeights | None = None
    test: FloatArray | None = None
    column: str = ""
    entity: str = ""
    left_out: int = 0

    @property
    def train_rows(self) -> FloatArray | None:
        """The training rows' weights, (N,), mean 1; None where all weigh alike."""
        if self.train is None:
            return None
        return self.train.rows

    def report_entry(self, joined_rows: int) -> dict[str, object] | None:
        """Return the report's entry about the weights; None without weights."""
        if not (self.column or self.entity):
            return None
        rows = np.ones(joined_rows) if self.train is None else self.train.rows
        return {
            "column": self.column,
            "entity": self.entity,
            "min": float(rows.min()),
            "max": float(rows.max()),
            "effective-rows": effective_rows(rows),
            "left-out": self.left_out,
        }


class HeldOutMetrics(NamedTuple):
    """The metrics of held-out rows, {} where there are none.

    ``predicted`` are predictions of those that test, to compare with labels, and
    ``row_losses`` their losses, (N',).
    """

    test: dict[str, float] = {}  # noqa: RUF012 - nobody changes it
    validation: dict[str, float] = {}  # noqa: RUF012
    predicted: FloatArray | None = None
    row_losses: FloatArray | None = None


@dataclass(frozen=True)
class PartRows:
    """The position of a part's rows among the table's rows that take part.

    The rows that take part are renumbered: within each part the trained ones come
    first, then those that are only tested, so that targets and scores are slices. Of
    the ``total`` rows from ``start`` on, those marked ``tested``, (total,), are in
    held-out joined rows.
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
    """One table of the query, and the mask of the penalised parameters, (p,)."""

    name: str
    parts: tuple[Part, ...]
    model: str
    features: int
    outputs: int
    penalised: BoolArray

    @property
    def is_linear(self) -> bool:
        """Whether the table's model is linear."""
        return self.model == "linear"


@dataclass(frozen=True)
class TrainedTable(PreparedTable):
    """One table of the query in training over joined rows.

    Attributes:
        largest_curvature: largest eigenvalue of [T, 1]^T diag(G) [T, 1] / N, bounded by
            the sum over the shards; 0 without batches.
        mean_curvature: per shard, the mean diagonal of that matrix.
        gram: the sum of the shards' shares if ``update`` is GRAM, else None.
        gram_deviation: deviation of the noise in ``gram`` from all shards together.
        summed: the parts whose arrays are summed.
        is_sealed: whether their shares are words that only they can read.
        gradient_noise: deviation over clip of the noise in a batch's gradient, from
            all shards together.
        takes_effects: whether all shards may keep effects of their rows' keys.
        takes_factors: whether all may keep factors of them, and send these.
    """

    rows: tuple[PartRows, ...]
    update: Update
    has_intercept: bool
    largest_curvature: float
    mean_curvature: tuple[float, ...]
    is_masked: bool = False
    gram: AnyArray | None = None
    gram_deviation: float = 0.0
    summed: tuple[Part, ...] = ()
    is_sealed: bool = False
    gradient_noise: float = 0.0
    takes_effects: bool = False
    takes_factors: bool = False

    @property
    def width(self) -> int:
        """Features, and the intercept where the model has one."""
        return self.features + int(self.has_intercept)

    @property
    def total_rows(self) -> int:
        """Rows of the table that take part."""
        return sum(rows.total for rows in self.rows)

    def no_scores(self) -> LocalArray:
        """Return the local scores 0 of the rows that take part, (n_i, d_c)."""
        dtype = np.uint32 if self.is_masked else np.float64
        return np.zeros((self.total_rows, self.outputs), dtype)

    def scores(
        self, replies: Replies, index: int, name: str, shape: tuple[int, ...]
    ) -> AnyArray:
        """Return scores that a shard sent: numbers, or masked words of them."""
        return addends_of(
            replies, self.parts[index], name, shape, is_masked=self.is_masked
        )

    def gather_scores(self, replies: Replies, *, is_tested: bool = True) -> LocalArray:
        """Return the local scores of the rows that take part, (n_i, d_c).

        Where the epoch is not tested, those of rows that are only held out are 0.
        """
        scores = self.no_scores()
        for index, rows in enumerate(self.rows):
            span = rows.slice if is_tested else rows.trained_slice
            shape = (span.stop - span.start, self.outputs)
            scores[span] = self.scores(replies, index, "scores", shape)
        return scores

    def gather_tested(self, replies: Replies) -> LocalArray:
        """Return the local scores of held-out rows, (n_i, d_c), 0 of all others."""
        scores = self.no_scores()
        for index, rows in enumerate(self.rows):
            shape = (int(np.count_nonzero(rows.tested)), self.outputs)
            scores[rows.slice][rows.tested] = self.scores(
                replies, index, "tested_scores", shape
            )
        return scores

    def scatter_rows(self, numbers: FloatArray) -> dict[int, AnyArray]:
        """Return each shard's slice of numbers (n_i, d_c) for trained rows."""
        return {
            part.number: row_numbers(numbers[rows.trained_slice])
            for part, rows in zip(self.parts, self.rows, strict=True)
        }

    def for_all(self, body: AnyBody) -> dict[int, AnyBody]:
        """Return the same body for every shard."""
        return {part.number: body for part in self.parts}

    def sum_shares(self, replies: Replies, numbers: int | None = None) -> AnyArray:
        """Return the sum over shards (Eq. 17): p numbers by default, and a check."""
        size = len(self.penalised) if numbers is None else numbers
        shape = (size + 1,)
        is_sealed = self.is_sealed
        return add_shares(
            [
                addends_of(replies, part, "share", shape, is_masked=is_sealed)
                for part in self.summed
            ]
        )


@dataclass(frozen=True, kw_only=True)
class PreparedRun(ABC):
    """The training problem after set-up, whatever trains it.

    ``head`` makes scores of the tables' vectors; ``response`` is their meaning,
    ``base_score`` is b, (d_c,), of zeros unless the server ``has_base``; ``score_unit``
    is the size of scores that masks have room for; ``fan_out`` has, by table, the
    minimum, mean and maximum of the number of joined rows, trained on or held out, that
    each row is in.
    """

    tables: Mapping[str, PreparedTable]
    head: Head
    response: Response
    base_score: FloatArray
    join_steps: tuple[JoinStep, ...]
    source_rows: Mapping[str, int]
    fan_out: Mapping[str, Mapping[str, float]]
    names: Mapping[str, str]
    encoders: Mapping[str, EncodedColumns]
    exposure: Exposure
    score_unit: float = 1.0
    has_base: bool = True
    encodings: Mapping[str, Sequence[Document]] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the label's classes; empty for numbers."""
        return self.response.classes

    @property
    def parts(self) -> list[Part]:
        """All parts of all tables."""
        return [part for table in self.tables.values() for part in table.parts]

    @property
    def rounding(self) -> float:
        """The root-mean-square error of a joined row's score in the form it is sent."""
        return 0.0

    @property
    @abstractmethod
    def joined_rows(self) -> tuple[int, int]:
        """Training rows and held-out rows."""

    def fit_response(self) -> Response:
        """Return the meaning of scores, with what those of the saved model add."""
        return self.response

    def fitted_metrics(self, response: Response) -> dict[str, float]:
        """Return metrics of the test rows by what training has added to the meaning."""
        del response
        return {}

    def table_reports(self) -> list[TableReport]:
        """Return the report's record of every table, in the order of the query."""
        return [
            TableReport(
                table=name,
                name=self.names[name],
                rows=self.source_rows[name],
                features=table.features,
                shards=len(table.parts),
                sites=tuple(part.site for part in table.parts),
                # a LEFT JOINed table may have no row to train on
                multiplicity=self.fan_out[name],
                dropped=self.encoders[name].dropped,
                encoding=self.encodings.get(name, ()),
            )
            for name, table in self.tables.items()
        ]


@dataclass(frozen=True, kw_only=True)
class TrainingProblem(PreparedRun):
    """A training problem over joined rows that nobody holds.

    The mappings cover the tables' rows that take part; the test mapping is None if no
    row is held out. The ``objective`` is that of the N training rows, ``held_out`` that
    of the N' held-out ones, of which ``validates``, (N',), marks those that do not
    test. The scores of the untrained models are (n_i, d_c). ``tolerance`` is what
    is set: 0 where the method chooses. Vectors over joined rows are at the ``workers``,
    if there are some.
    """

    tables: Mapping[str, TrainedTable]
    train: TableMapping
    test: TableMapping | None
    fixed_point: FixedPoint | None
    objective: Objective
    held_out: Objective
    validates: BoolArray
    initial_scores: LocalScores
    l2: float
    weighting: Weighting = field(default_factory=Weighting)
    tolerance: float = 0.0
    workers: Workers | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what reads scores: all that a kernel that is computed elsewhere has.

        No row goes along with it.
        """
        names = ("head", "base_score", "fixed_point")
        return {name: vars(self)[name] for name in names}

    @property
    def is_single(self) -> bool:
        """Whether vectors over the joined rows are stored in single precision."""
        is_precise = 0.0 < self.tolerance < LEAST_TOLERANCE
        is_large = self.train.joined_rows >= SINGLE_ROWS
        return is_large and self.objective.is_separable and not is_precise

    @property
    def joined_rows(self) -> tuple[int, int]:
        """Training rows and held-out rows."""
        return self.train.joined_rows, int(np.count_nonzero(~self.validates))

    @property
    def rounding(self) -> float:
        """The error of the sum of scores: of their fixed point, or of float32."""
        point = self.fixed_point
        if point is None:
            return FLOAT32 * self.score_unit
        return point.rounding

    @property
    def sharded(self) -> list[TrainedTable]:
        """The tables whose shards need a second round."""
        return [t for t in self.tables.values() if t.update is not Update.LOCAL]

    @cached_property
    def rows(self) -> JoinedRows:
        """The training rows, with the objective's vectors and those of the method."""
        return joined_rows(
            self.train,
            self.objective.vectors,
            is_one_part=not self.objective.is_separable,
            is_single=self.is_single,
            workers=self.workers,
        )

    @cached_property
    def held_out_rows(self) -> JoinedRows | None:
        """The held-out rows, with vectors; None without any."""
        if self.test is None:
            return None
        return joined_rows(self.test, is_single=self.is_single, workers=self.workers)

    @property
    def scored_rows(self) -> list[JoinedRows]:
        """The training rows, then the held-out rows if there are some."""
        held_out = self.held_out_rows
        if held_out is None:
            return [self.rows]
        return [self.rows, held_out]

    def over(
        self,
        tables: Mapping[str, TrainedTable],
        mappings: tuple[TableMapping, TableMapping | None],
        **changes: Any,
    ) -> "TrainingProblem":
        """Return the problem of the same joined rows over other rows of the tables."""
        train, test = mappings
        changed = replace(self, tables=tables, train=train, test=test, **changes)
        # the joined rows keep what is known of them
        vars(changed)["rows"] = self.rows.over(train)
        if self.held_out_rows is not None and test is not None:
            vars(changed)["held_out_rows"] = self.held_out_rows.over(test)
        return changed

    def read_sums(self, sums: AnyArray) -> FloatArray:
        """Return the head's vectors v of joined rows, which may be masked words."""
        point = self.fixed_point
        return sums if point is None else point.numbers(sums)

    def read_scores(self, sums: AnyArray) -> FloatArray:
        """Return the scores h (B, d_c) of vectors, which may be masked words."""
        return self.head.combine(self.base_score, self.read_sums(sums))

    def gather(self, local_scores: LocalScores, rows: JoinedRows | None = None) -> None:
        """Store h as the vector ``scores`` of the training rows, or of others."""

        def read(_: Vectors, sums: AnyArray) -> tuple[Vectors, Sequence[float]]:
            return {SCORES: self.read_scores(sums)}, ()

        rows = self.rows if rows is None else rows
        rows.run(read, local_scores, by_table=self.head.needs_tables)

    def pull_back(
        self, derivatives: FloatArray, vectors: FloatArray
    ) -> dict[str, FloatArray]:
        """Return d loss / d v_i (B, w) by table, from d loss / d h (B, d_c)."""
        pulled = self.head.pullback(derivatives, vectors)
        return {
            name: table_part(pulled, position)
            for position, name in enumerate(self.train.tables)
        }

    def scatter_steps(
        self, sums: Mapping[str, FloatArray], kappa: float
    ) -> dict[str, FloatArray]:
        """Return the steps (n_i, d_c) of every table's scores, from seg_i(w v)."""
        weights = self.weighting.train
        tables = self.train.tables
        if weights is None:
            inverse = {
                name: table.inverse_multiplicity for name, table in tables.items()
            }
        else:
            inverse = weights.inverse_multiplicity
        return {
            name: score_steps(table_sums, inverse[name], kappa)
            for name, table_sums in sums.items()
        }

    def fit_response(self) -> Response:
        """Return the meaning of scores, by those of the training rows if it asks."""
        if not self.response.reads_scores:
            return self.response
        return self.objective.fit_response(self.rows.whole(SCORES))

    def fitted_metrics(self, response: Response) -> dict[str, float]:
        """Return metrics of the test rows by what training has added to the meaning."""
        rows = self.held_out_rows
        if not self.response.reads_scores or rows is None or not len(self.tested):
            return {}
        scores = rows.take(SCORES, np.flatnonzero(~self.validates))
        return self.tested.fitted_metrics(scores, response)

    def train_metrics(self, total: float | None = None) -> dict[str, float]:
        """Return the metrics of the training rows' scores.

        ``total`` is the weighted sum of the rows' losses, if a method has added it up.
        """
        if total is None:
            total = self._total_loss()
        value = total / self.objective.mass
        return self.objective.metrics(self.rows.whole(SCORES), value)

    def _total_loss(self) -> float:
        """Return the weighted sum of the training rows' losses."""
        objective = self.objective

        def add_up(vectors: Vectors, _: AnyArray) -> tuple[Vectors, Sequence[float]]:
            return {}, [objective.on(vectors).total(vectors[SCORES])]

        (total,), _ = self.rows.run(add_up)
        return float(total)

    def held_out_metrics(self, local_scores: LocalScores) -> HeldOutMetrics:
        """Return the metrics on test and on validation rows, {} without any."""
        if self.held_out_rows is not None:
            self.gather(local_scores, self.held_out_rows)
        return self.metrics_of_held_out()

    def metrics_of_held_out(self, name: str = SCORES) -> HeldOutMetrics:
        """Return the metrics of a vector of scores of the held-out rows."""
        rows = self.held_out_rows
        if rows is None:
            return HeldOutMetrics()
        tested, validated = (
            rows.take(name, np.flatnonzero(mask))
            for mask in (~self.validates, self.validates)
        )
        return HeldOutMetrics(
            self.tested.metrics(tested) if len(tested) else {},
            self.validated.metrics(validated) if len(validated) else {},
            self.tested.comparable(tested),
            self.tested.row_values(tested),
        )

    def validating_losses(self, held_out: JoinedRows) -> FloatArray:
        """Return the weighted losses (V,) of the held-out rows that validate."""
        validates = np.flatnonzero(self.validates)
        values = self.validated.row_values(held_out.take(SCORES, validates))
        return self.validated.weigh(values)

    @cached_property
    def tested(self) -> Objective:
        """The objective of the rows that test."""
        return self.held_out.select(~self.validates)

    @cached_property
    def validated(self) -> Objective:
        """The objective of the rows that validate."""
        return self.held_out.select(self.validates)

    @cached_property
    def baselines(self) -> dict[str, dict[str, float]]:
        """By part, the metrics of the best constant score of the training rows."""
        parts = {"train": self.objective, "test": self.tested}
        constant = {
            part: objective.constant_metrics(self.base_score)
            for part, objective in parts.items()
        }
        if constant["test"] and self.response.reads_scores:
            trained, tested = (
                np.broadcast_to(self.base_score, (len(part), part.outputs))
                for part in parts.values()
            )
            response = self.objective.fit_response(trained)
            constant["test"] |= self.tested.fitted_metrics(tested, response)
        return constant

    def compare(
        self, predicted: FloatArray | None, *, is_noisy: bool
    ) -> dict[str, object]:
        """Return the report's entries on a constant, and predictions of test rows."""
        if not self.baselines["train"] or is_noisy:
            if not self.baselines["train"]:
                return {}
            return {"baseline": self.baselines}
        test = self.tested.target
        entries: dict[str, object] = {"baseline": self.baselines}
        if predicted is not None and len(test):
            entries |= self.response.compare(
                predicted, test.numbers, self.tested.weights
            )
        if classes := self.classes:
            counts = (y.class_counts.tolist() for y in (self.objective.target, test))
            rows = zip(classes, *counts, strict=True)
            entries["classes"] = {name: {"train": n, "test": m} for name, n, m in rows}
        return entries
