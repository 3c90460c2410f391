"""RelationalStrategy: a Flower Strategy whose training set is the result of a query.

Set-up takes three rounds: ``extract`` brings hashed join keys and labels, from which the server
builds the mapping; with ``statistics`` the sites fit encoders, for tables in several shards with
``fit``, a fourth; ``prepare`` sends multiplicities and the batch plan, and brings the start of
training. A coreset takes three more rounds (:mod:`strategies.coresets.draw`) before ``prepare``.

A method overrides the hooks in which it differs: which rows a table trains on, which
loss, whether there is a label, how shards train together.
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from logging import INFO
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Result
from msgspec.structs import replace as replace_struct

from strategies.coresets.draw import draw_coreset, restrict_to_sample
from strategies.disclosures import Exposure, disclosures, exposure_of, privacy_report
from strategies.run.exchange import PartArrays, Replies, Requests, ask
from strategies.run.sites import Inventory
from strategies.run.strategy import BestEpoch, EpochResult, RoundListener, RoundStrategy
from strategies.setup.absent_columns import check_present
from strategies.setup.columns import bind_columns, reading_warnings
from strategies.setup.encoding import TableEncoding, fit_encoders, fitted_tables
from strategies.setup.extract import Extracted, extract
from strategies.setup.joined_rows import JoinedRows, Layouts, encoder_choices, lay_out
from strategies.setup.labels import Labels, choose_loss, gather_labels, task_line
from strategies.setup.leaks import (
    find_leaks,
    leak_warnings,
    nearly_perfect,
    perfect_warning,
    suspects_of,
    used_features,
)
from strategies.setup.problem import CoresetSample, PreparedRun, TrainingProblem
from strategies.setup.row_weights import declared_weighting, row_weights, without_weightless
from strategies.setup.split_warnings import split_warnings
from strategies.setup.splitting import Split, sampled_rows, split_joined, table_named
from strategies.training.outcome import Outcome, coefficients_of, read_digests, score_sums_of
from strategies.training.overfitting import overfitting
from strategies.training.prepare import Preparation, prepare
from strategies.training.traffic import ShardSize, TableSize, Traffic
from strategies.training.trend import DIVERGED, NOT_CONVERGED, trend_verdict
from strategies.training.working_memory import vector_bytes
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.coresets.importance import REGRESSION
from tp_flower.errors import DivergedError
from tp_flower.joins.joining import build_mapping
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.metrics import contributions, no_better
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.losses import Loss
from tp_flower.model_names import ModelVersion, make_version
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Outline, Update
from tp_flower.query import BoundQuery, Query
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings
from tp_flower.settings.run import AUTO
from tp_flower.settings.training import IMPORTANCE
from tp_flower.splits import TEST, TRAIN

DIVERGENCE_FACTOR: Final = 100.0
"""Times the loss of the best constant score: an epoch of a training that converges is
never this bad."""


def check_epoch(epoch: int, loss: float, baseline: float) -> None:
    """Raise DivergedError if a loss is not finite, or far above a constant score's."""
    # a corrected loss may be 0 or negative
    if math.isfinite(loss) and loss <= DIVERGENCE_FACTOR * max(abs(baseline), 1.0):
        return
    raise DivergedError(
        f"training diverged in epoch {epoch}: its loss is {loss:.4g}, against "
        f"{baseline:.4g} for a constant score"
        + (f"; num-epochs = {epoch - 1} stops before it" if epoch > 1 else "")
    )


def _digest_of_tested(is_tested: BoolArray, joined: JoinedRows) -> str:
    """Return the digest of which joined rows test, and of their labels unless these are noisy."""
    labels = b"" if joined.labels.noise else joined.values[is_tested].tobytes()
    return hashlib.sha256(is_tested.tobytes() + labels).hexdigest()


Run = TypeVar("Run", bound=PreparedRun)


class RelationalStrategy(RoundStrategy, Generic[Run]):
    """Base of the methods that train on the rows of a query.

    ``overrides`` replace single settings; ``on_round`` is called with the record of
    every round. ``chosen`` has the values of settings that were 0, "" or "auto".
    """

    has_label: ClassVar[bool] = True
    # whether sites copy the model of lowest training loss, where no rows validate
    copies_lowest: ClassVar[bool] = False
    _final = EpochResult(0, {}, {})  # of the epoch whose model is saved
    _lowest_test = EpochResult(0, {}, {})  # of the epoch of lowest loss on the test rows
    _copied = EpochResult(0, {}, {})  # of the epoch whose model the sites have copied

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        # sites are told the strategy that trains, whatever the settings name
        overrides["strategy"] = self.name
        super().__init__(query, settings, on_round, **overrides)
        self.chosen: dict[str, object] = {}
        self.training_problem: Run | None = None
        self.outcome = Outcome()
        self._baseline = math.inf
        self.held_out_digest = self.tested_digest = ""
        self.best = BestEpoch(self.settings.patience_epochs)
        self.losses: list[float] = []
        # by training loss, where no rows validate; what a training that diverges ends with
        self.lowest = BestEpoch()
        self.verdict = ""
        self.split_facts: dict[str, object] = {"name": self.settings.split_name}

    def start(self, *args: Any, **options: Any) -> Result:
        """Set up and train; a training that diverges says what to change."""
        try:
            return super().start(*args, **options)
        except DivergedError as error:
            raise DivergedError(f"{error}. {self._advice}") from error

    @abstractmethod
    def set_up(self) -> Generator[Requests, Replies, Run]:
        """Run the set-up rounds and return the training problem."""

    @abstractmethod
    def epochs(self, problem: Run) -> Generator[Requests, Replies, None]:
        """Train; call :meth:`finish_epoch` at the end of every epoch."""

    @abstractmethod
    def outcome_of(self, replies: Replies, problem: Run) -> Outcome:
        """Return the outcome of the run, from the replies to its last message."""

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns."""
        return self.query.bind(schemas, split=self.settings.split.columns)

    def baseline(self, _: Run) -> float:
        """Return the loss of a constant score; infinity if it is not known."""
        return math.inf

    def default_settings(self) -> Settings:
        """Return the defaults of the method."""
        return Settings(strategy=self.name)

    def rounds(self) -> Generator[Requests, Replies, None]:
        """Set up, train, and let the sites forget the run."""
        self.chosen["num-epochs"] = self.settings.epochs
        self.best = BestEpoch(self.settings.patience_epochs)
        self.lowest = BestEpoch()
        self._lowest_test = EpochResult(0, {}, {})
        self.losses = []
        problem = self.training_problem = yield from self.set_up()
        for table, encoder in problem.encoders.items():
            if encoder.dropped:
                names = ", ".join(encoder.dropped)
                log(INFO, "table %s: constant features dropped: %s", table, names)
        self._baseline = self.baseline(problem)
        self.epoch = 1
        try:
            yield from self.epochs(problem)
        except DivergedError as error:
            if not self.has_usable_model:
                raise
            last = self._end_with_best(problem, error)
        else:
            self.verdict = self.judge(problem)
            last = ask(self.last_request(), problem.parts)
        self.epoch = 0
        if self.verdict.startswith((NOT_CONVERGED, DIVERGED)):
            self.warn(self.verdict)
        replies = yield last
        self.outcome = self.outcome_of(replies, problem)

    @property
    def is_best(self) -> bool:
        """Whether the last epoch's model is the best so far: the sites copy it."""
        return self.best.is_last or self.lowest.is_last

    @property
    def has_usable_model(self) -> bool:
        """Whether the sites have the copy of an epoch that was better than a constant score."""
        epoch = self.best.epoch or self.lowest.epoch
        return bool(epoch) and self.losses[epoch - 1] < self._baseline < math.inf

    def _end_with_best(self, problem: Run, error: DivergedError) -> Requests:
        """Return the request that ends a diverged run with the model of its best epoch.

        A site that could not take a round has not copied the model that came before it.
        """
        kind = "validation" if self.best.epoch else "training"
        self.verdict = (
            f"{DIVERGED} in epoch {self.epoch}: the model of epoch "
            f"{self.best.epoch or self.lowest.epoch}, of the lowest {kind} loss, is saved "
            f"({error}). {self._advice}"
        )
        self._final = self._copied
        copied = replace_struct(self.last_request(), step=None, is_best=False, has_diverged=True)
        pending = self._progress.pending
        is_lost = pending is not None and getattr(pending.message, "is_best", False)
        uncopied = replace_struct(self.last_request(), is_best=True, has_diverged=True)
        by_node = {
            part.node: uncopied if is_lost and part.node in error.nodes else copied
            for part in problem.parts
        }
        return ask(copied, problem.parts, by_node)

    @property
    def _advice(self) -> str:
        rate = self.chosen.get("learning-rate", "chosen")
        return f"Lower learning-rate (here {rate}), raise l2 or look for extreme values"

    @property
    def ends_by_loss(self) -> bool:
        """Whether training ends when its loss has settled: num-epochs does not say when."""
        settings = self.settings
        return not (settings.num_epochs or settings.is_noisy or settings.coreset_size)

    def judge(self, problem: Run) -> str:
        """Return the verdict on the training, after its last epoch."""
        if self.settings.is_noisy:
            return "not judged: noise hides the trend of the loss"
        if self.best.is_over:
            return f"converged: epoch {self.best.epoch} had the lowest validation loss"
        is_convex = all(table.is_linear for table in problem.tables.values())
        return trend_verdict(self.losses, is_convex=is_convex, rounding=problem.rounding)

    def last_request(self) -> FinishRequest:
        """Return the request that ends the run: the sites save its models."""
        name, version = self.model.name, self.model.version
        # without validation rows the last model is saved
        is_best = self.best.is_last or math.isinf(self.best.loss)
        return FinishRequest(
            keep_models=True, model_name=name, model_version=version, is_best=is_best
        )

    def finish_epoch(self, result: EpochResult) -> None:
        """Record an epoch; its metrics belong to the round that just ended."""
        check_epoch(result.epoch, result.train["loss"], self._baseline)
        self.losses.append(result.train["loss"])
        if result.validation:
            self.best = self.best.after(result.epoch, result.validation["loss"])
            self.chosen["best-epoch"] = self.best.epoch
        elif self.copies_lowest and not self.settings.is_noisy:
            self.lowest = self.lowest.after(result.epoch, result.train["loss"])
        if self.is_best:
            self._copied = result
        # without validation rows, the last model is the best
        if self.best.epoch == result.epoch or math.isinf(self.best.loss):
            self._final = result
        if result.test and not result.test["loss"] >= self._lowest_test.test.get("loss", math.inf):
            self._lowest_test = result
        super().finish_epoch(result)

    @property
    def model(self) -> ModelVersion:
        """Name and version of the run's model."""
        version = make_version(self.started_at, self.session.run)
        return ModelVersion(self.settings.model_name, version)

    def request(self, request: Requests) -> Requests:
        """Return a request as one of the epoch, if its disclosures are explained."""
        problem = self.training_problem
        if problem is not None and request.action not in problem.exposure.messages:
            raise RuntimeError(
                f"{type(self).__name__} sends {request.action}, and neither explain "
                "nor the report would say what it discloses: list it in the strategy's "
                "`messages` or `messages_of_shards`"
            )
        return super().request(request)

    def result_arrays(self) -> ArrayRecord:
        """Return the base score."""
        if (problem := self.training_problem) is None:
            return ArrayRecord()
        return ArrayRecord({"base-score": Array(problem.base_score)})

    @property
    def report(self) -> RunReport:
        """The record of the run so far."""
        problem = self.training_problem
        if problem is None:
            raise RuntimeError("there is no report before the set-up is done")
        train_rows, test_rows = problem.joined_rows
        return RunReport(
            **self.record_fields,
            chosen=self.chosen,
            tables=problem.table_reports(),
            joined_rows_train=train_rows,
            joined_rows_test=test_rows,
            split=self.split_facts,
            join_steps=problem.join_steps,
            final_train=self._final.train,
            final_test=self._final.test,
            model=str(self.model) if self.is_finished else "",
            verdict=self.verdict,
            contributions={
                table: {"share": each.share, "mean-score": each.mean_score.tolist()}
                for table, each in self.outcome.contributions.items()
            },
            coefficients=self.outcome.coefficient_facts(problem),
            outcomes=self.outcome.comparison,
            privacy=privacy_report(
                disclosures(problem.exposure),
                self.ledgers,
                self.settings.privacy,
                is_complete=self.is_finished,
            ),
        )


class JoinStrategy(RelationalStrategy[TrainingProblem]):
    """Base of the methods that train over joins and unions.

    Attributes:
        methods: the methods that can be chosen, by name: classes with their own name.
        messages: messages of training, and those added if a table has several shards.
        by_joined_rows: whether messages have an entry per joined row (VFL) or per row.
        label_reach: how far the derivatives of a squared loss reach, in deviations of
            the label, before they are clipped.
    """

    methods: ClassVar[dict[str, type["JoinStrategy"]]] = {}
    messages: ClassVar[tuple[Action, ...]]
    messages_of_shards: ClassVar[tuple[Action, ...]] = ()
    by_joined_rows: ClassVar[bool] = False
    importance: ClassVar[str] = REGRESSION
    label_reach: ClassVar[float] = 1.0
    has_penalty: ClassVar[bool] = True  # l2 weighs it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            cls.methods[cls.name] = cls

    @abstractmethod
    def choose_update(self, table: str, shards: int, *, is_linear: bool) -> Update:
        """Return how the shards of a table train together."""

    @abstractmethod
    def epoch_traffic(self, tables: Sequence[TableSize], batches: int, *, is_last: bool) -> Traffic:
        """Return the traffic of an epoch of some batches."""

    def working_bytes(self, table: TableSize, _: ShardSize) -> float:
        """Return the memory that a shard's model takes besides its encoded rows."""
        return vector_bytes(table)

    def batch_size(self, _: int) -> int:
        """Return B, at most N; 0 without batches."""
        return 0

    def split(self, bound: BoundQuery, extracted: Extracted, mapping: TableMapping) -> Split:
        """Return which joined rows are held out."""
        parts = extracted.parts.get(bound.split_table, ())
        return split_joined(bound, parts, extracted.replies, mapping, self.settings)

    def read_labels(self, extracted: Extracted, bound: BoundQuery) -> Labels:
        """Return the labels of the label table."""
        columns = extracted.label_columns(bound.label_table)
        return gather_labels(columns, self.settings, bound.label_sql)

    def choose_loss(self, labels: Labels, trained: FloatArray) -> Loss:
        """Return the loss for the labels (N,) of the joined training rows."""
        return choose_loss(labels, trained, self.settings)

    def restrict(self, joined: JoinedRows, sample: CoresetSample) -> JoinedRows:
        """Return the joined rows restricted to a coreset's training rows."""
        return restrict_to_sample(joined, sample.sample)

    def training_rows(self, joined: JoinedRows) -> JoinedRows:
        """Return the joined rows in terms of the rows that the tables train on."""
        return joined

    def model_spec(self, preparation: Preparation, table: str) -> ModelSpec:
        """Return the local model of a table, untrained."""
        return preparation.spec(table)

    def plan_batches(self, _: TableMapping, __: Layouts) -> PartArrays:
        """Return the batch plan's arrays for ``prepare``, by part."""
        return {}

    def outline(self) -> Outline:
        """Return the announced schedule."""
        return Outline(strategy=self.name, epochs=self.settings.epochs)

    def baseline(self, problem: TrainingProblem) -> float:
        """Return the loss of the best constant score, which no epoch may far exceed.

        It is infinity if noise can make an epoch bad, and the next one good.
        """
        if self.settings.is_noisy:
            return math.inf
        return problem.baselines["train"].get("loss", math.inf)

    def run_messages(self, *, is_sharded: bool) -> tuple[Action, ...]:
        """Return a run's messages after ``extract``, up to the one that ends it."""
        return (
            Action.STATISTICS,
            *((Action.FIT,) if is_sharded else ()),
            *((Action.MEASURE, Action.DRAW, Action.WEIGH) if self.is_measured else ()),
            *self.messages,
            *(self.messages_of_shards if is_sharded else ()),
        )

    def exposure(
        self,
        joined: JoinedRows,
        inventory: Inventory,
        updates: Mapping[str, Update],
        encoders: Mapping[str, TableEncoding],
    ) -> Exposure:
        """Return the facts that decide who learns what."""
        parts, outline = joined.extracted.parts, self.outline()
        return exposure_of(
            joined.bound,
            parts,
            self.settings,
            inventory,
            self.run_messages(is_sharded=any(len(shards) > 1 for shards in parts.values())),
            gram=[name for name, update in updates.items() if update is Update.GRAM],
            weight=joined.weighting.column,
            is_weighted=joined.weighting.train is not None,
            has_label=self.has_label,
            fitted=fitted_tables(encoders),
            by_joined_rows=self.by_joined_rows,
            sends=outline.sends or "",
            has_inner_rounds=(outline.exchanges or 1) > 1,
        )

    def score_start(self, _: JoinedRows) -> Generator[Requests, Replies, None]:
        """Learn the scores that training starts from; they are constant."""
        yield from ()

    @property
    def is_measured(self) -> bool:
        """Whether a coreset is drawn by importance."""
        settings = self.settings
        return bool(settings.coreset_rows) and settings.coreset_kind == IMPORTANCE

    def set_up(self) -> Generator[Requests, Replies, TrainingProblem]:
        """Run the set-up rounds and return the training problem."""
        settings = self.settings
        all_rows = yield from self.join(self.inventory)
        yield from self.score_start(all_rows)
        encoders = yield from fit_encoders(all_rows, self)
        joined, coreset = all_rows, None
        if settings.coreset_rows:
            coreset = yield from draw_coreset(all_rows, encoders, settings, self.importance)
            joined = self.restrict(all_rows, coreset)
        joined = self.training_rows(joined)
        preparation = Preparation(
            joined, settings, encoders, all_rows.train_labels, self.label_reach
        )
        specs = {name: self.model_spec(preparation, name) for name in joined.layouts}
        batches = self.plan_batches(joined.train, joined.layouts)
        updates = {
            name: self.choose_update(
                name, len(layout.parts), is_linear=specs[name].kind == "linear"
            )
            for name, layout in joined.layouts.items()
        }
        tables, initial_scores, fixed_point = yield from prepare(
            preparation, specs, updates, batches, self.outline()
        )
        self.chosen["loss"] = joined.loss.name
        # over all rows: a sample's rows also have the weights of their draws
        if facts := all_rows.weighting.facts(all_rows.train.joined_rows):
            self.chosen["row-weight"] = facts
        if coreset is not None:
            self.chosen["coreset"] = coreset.facts()
        return TrainingProblem(
            tables=tables,
            train=joined.train,
            test=joined.test,
            train_labels=joined.train_labels,
            test_labels=joined.test_labels,
            validates=joined.validates,
            loss=joined.loss,
            # the server knows all labels, and a sample may have only one class
            base_score=all_rows.loss.base_score(
                all_rows.train_labels, all_rows.weighting.train_rows
            ),
            initial_scores=initial_scores,
            score_unit=preparation.score_unit,
            fixed_point=fixed_point,
            l2=settings.l2,
            classes=joined.labels.classes,
            label_kind=joined.labels.kind,
            join_steps=joined.steps,
            source_rows=joined.extracted.table_rows,
            fan_out={name: rows.multiplicity for name, rows in all_rows.mapping.tables.items()},
            names=joined.names,
            encoders={name: item.columns for name, item in encoders.items()},
            encodings={name: item.rows() for name, item in encoders.items()},
            exposure=self.exposure(joined, self.inventory, updates, encoders),
            weighting=joined.weighting,
            coreset=coreset,
        )

    def join(self, inventory: Inventory) -> Generator[Requests, Replies, JoinedRows]:
        """Extract and return the joined rows."""
        settings = self.settings
        bound, columns = bind_columns(self.bind, inventory)
        for problem in columns.unread if self.query.has_stars else ():
            self.warn(f"{problem}; * leaves it out")
        self.warn(*reading_warnings(bound, columns))
        for alias, _ in settings.models:
            table_named(bound, alias, "models")
        if settings.split.table:
            table_named(bound, settings.split.table, "test-split")
        self.warn(*leak_warnings(bound))
        weighting = declared_weighting(bound, settings)
        choices = encoder_choices(bound, settings)
        check_present(bound, inventory)
        extracted = yield from extract(bound, settings, inventory, columns)
        self.warn(*extracted.absent)
        rows = extracted.table_rows
        sampled = sampled_rows(rows[bound.label_table], settings)
        labels = self.read_labels(extracted, bound).of_rows(sampled)
        if settings.task == AUTO and self.has_label:
            self.chosen["task"] = task_line(labels, settings)
        mapping, steps = build_mapping(
            bound.joins,
            extracted.keys,
            rows,
            bound.label_table,
            bound.outer,
            settings.max_joined_rows,
            sampled,
            extracted.filters,
        )
        mapping, weights, weighting = without_weightless(
            mapping, extracted.weights, weighting, bound.weight_table or ""
        )
        split = self.split(bound, extracted, mapping)
        is_test = split.subset != TRAIN
        train_weights, test_weights = (
            row_weights(weighting, weights, mapping, rows) for rows in (~is_test, is_test)
        )
        (train, test), layouts = lay_out(mapping, is_test, extracted)
        values = labels.values[mapping.tables[bound.label_table].row_of]
        joined = JoinedRows(
            bound=bound,
            choices=choices,
            extracted=extracted,
            labels=labels,
            mapping=mapping,
            steps=steps,
            held_out=split.held_out | ~sampled,
            subset=split.subset,
            train=train,
            test=test,
            layouts=layouts,
            values=values,
            loss=self.choose_loss(labels, values[~is_test]),
            weighting=replace(weighting, test=test_weights),
        )
        self.warn(*split_warnings(joined, self.settings))
        self.held_out_digest = hashlib.sha256(split.subset.tobytes()).hexdigest()
        self.tested_digest = _digest_of_tested(split.subset == TEST, joined)
        self.split_facts |= {"validation-rows": int(np.count_nonzero(joined.validates))}
        return joined.with_weights(train_weights)

    def _perfect_score(self, problem: TrainingProblem) -> str:
        """Return the metric that is nearly perfect on the test rows; "" where noise decides it."""
        if not self.has_label or self.settings.privacy.covers_labels:
            return ""
        labels = problem.test_labels[~problem.validates]
        return nearly_perfect(self._final.test, len(problem.classes), labels)

    def outcome_of(self, replies: Replies, problem: TrainingProblem) -> Outcome:
        """Return the digests, the coefficients and each table's contribution."""
        coefficients = {
            name: weights
            for name, table in problem.tables.items()
            if (weights := coefficients_of(replies, table)) is not None
        }
        sums = {
            name: sums
            for name, table in problem.tables.items()
            if (sums := score_sums_of(replies, table)) is not None
        }
        rows = f"held-out rows ({self.settings.split_name})"
        if warning := no_better(self._final.test, problem.baselines["test"], rows):
            self.warn(warning)
        # where rows validate, they have chosen the epoch
        if math.isinf(self.best.loss) and not self.settings.is_noisy:
            l2 = self.settings.l2 if self.has_penalty else None
            warning = overfitting(self._lowest_test, self._final, problem.test_weights, rows, l2)
            if warning:
                self.warn(warning)
        shares = contributions(sums, problem.train.joined_rows)
        if score := self._perfect_score(problem):
            columns = {t: used_features(problem.encoders[t].features) for t in problem.tables}
            suspects = suspects_of(shares, columns, coefficients)
            bound, _ = bind_columns(self.bind, self.inventory)
            leaks = find_leaks(bound)
            self.warn(perfect_warning(score, rows, leaks, suspects))
        return Outcome(
            digests=read_digests(replies, problem.parts),
            coefficients=coefficients,
            contributions=shares,
            comparison=problem.compare(
                self._final.predicted, is_noisy=self.settings.privacy.covers_labels
            ),
        )
