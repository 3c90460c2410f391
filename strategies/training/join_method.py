"""JoinMethod: a method that trains on the joined rows of several tables.

Set-up takes three rounds: ``extract`` brings hashed join keys and labels, from which
the server builds the mapping; with ``statistics`` the sites fit encoders, for tables in
several shards with ``fit``, a fourth; ``prepare`` sends multiplicities and the batch
plan, and brings the start of training. Rows to train on may be drawn before ``prepare``
(:mod:`strategies.training.row_drawing`), which takes rounds of its own.

A method overrides the hooks in which it differs: which rows a table trains on, which
loss, whether there is a label, how shards train together.
"""

import hashlib
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from strategies.disclosures import DisclosureValues, Exposure, exposure_of
from strategies.inference.manifest import Manifest, lineage
from strategies.ranks import (
    Ranks,
    ScoreForecast,
    asks_ranks,
    ends_early,
    epochs_of,
    rank_rows,
)
from strategies.registry import row_drawing
from strategies.run.exchange import PartArrays, Replies, Requests
from strategies.run.sites import Inventory
from strategies.run.strategy import EpochResult
from strategies.score_readings import ScoreReading, SentDerivatives, score_readings
from strategies.setup.absent_columns import check_present
from strategies.setup.columns import Columns, bind_columns
from strategies.setup.encoding import TableEncoding, fit_encoders, fitted_tables
from strategies.setup.extract import Extracted, extract
from strategies.setup.joined_rows import (
    JoinedTables,
    Layouts,
    MappedRows,
    encoder_choices,
)
from strategies.setup.labels import (
    check_numbers,
    choose_objective,
    gather_labels,
    keep_classes_of,
    task_line,
)
from strategies.setup.leaks import (
    cutoff_warnings,
    nearly_perfect,
    perfect_warning,
    query_warnings,
    suspects_of,
)
from strategies.setup.masking import check_masks
from strategies.setup.problem import TrainedTable, TrainingProblem
from strategies.setup.row_weights import declared_weighting, drop_weightless
from strategies.setup.split_warnings import split_warnings
from strategies.setup.splitting import Split, check_aliases, split_joined
from strategies.training.bins import (
    NO_BINS,
    TableBins,
    ask_bins,
    bins_of_tables,
    fit_trees,
)
from strategies.training.key_factors import (
    FittedFactors,
    check_factors,
    keys_with_factors,
)
from strategies.training.outcome import (
    Outcome,
    coefficients_of,
    names_of,
    read_digests,
    score_sums_of,
)
from strategies.training.overfitting import overfitting
from strategies.training.prepare import Preparation, prepare
from strategies.training.refining import refine_by_keys, warn_of_keys
from strategies.training.row_drawing import RowDrawing, RowSample
from strategies.training.row_effects import (
    keys_of_tables,
    mark_scores,
    restore_scores,
)
from strategies.training.server_method import ServerMethod
from strategies.training.traffic import ShardSize, TableSize, Traffic
from strategies.training.working_memory import vector_bytes
from tp_flower.arrays import BoolArray
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.heads import Head, Sum
from tp_flower.joins.joining import RowLimits, build_mapping
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.learning.joint_trees import SHARE
from tp_flower.learning.models.local_model import NUMPY_KINDS, ModelSpec
from tp_flower.objectives import Objective, Target, no_better
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update
from tp_flower.query import BoundQuery
from tp_flower.settings.declare import AUTO
from tp_flower.settings.training import NONE
from tp_flower.terms.extraction import sampled_rows
from tp_flower.terms.run_terms import outline_of


class JoinMethod(ServerMethod[TrainingProblem]):
    """The server half of a method that trains over joins and unions.

    Attributes:
        messages: messages of training, and those added if a table has several shards.
        derivatives: the order of the loss's derivatives that sites are sent.
        coefficient: the name of a feature's only coefficient; "" where every output has
            one.
        usual_epochs: within which the loss comes to 0.1 % of its least, on the
            benchmarks' data.
        head: how the tables' vectors make scores.
        trains_any_head: whether it trains by the chain rule through any head; if not,
            the scores must be a sum.
        label_reach: how far the derivatives of a squared loss reach, in deviations of
            the label, before they are clipped.
        sample: the rows that are trained on; None for all.
        keys: by table, those of the rows that take part, where they may get effects.
        factor_keys: the same where they may get factors.
        factors: what the best model has of them; None for none.
        factors_of_start: the tables whose rows' factors left to score the model that
            training starts from.
        binned: by table, the bins of the rows that take part, where they have left.
        scores_left: by part number, the score vectors that its table's policy still
            lets it release; parts without such a limit are not in it.
    """

    messages: ClassVar[tuple[Action, ...]]
    messages_of_shards: ClassVar[tuple[Action, ...]] = ()
    derivatives: ClassVar[int] = 1
    usual_epochs: ClassVar[int] = 20
    label_reach: ClassVar[float] = 1.0
    has_penalty: ClassVar[bool] = True  # l2 weighs it
    coefficient: ClassVar[str] = ""
    head: ClassVar[type[Head]] = Sum
    trains_any_head: ClassVar[bool] = False
    scores_left: Mapping[int, int] = MappingProxyType({})
    sample: RowSample | None = None
    keys: Mapping[str, TableRows] = MappingProxyType({})
    factor_keys: Mapping[str, TableRows] = MappingProxyType({})
    factors: FittedFactors | None = None
    factors_of_start: Sequence[str] = ()
    binned: Mapping[str, TableBins] = MappingProxyType({})

    @abstractmethod
    def choose_update(self, table: str, shards: int, *, is_linear: bool) -> Update:
        """Return how the shards of a table train together."""

    @abstractmethod
    def epoch_traffic(self, tables: Sequence[TableSize], batches: int) -> Traffic:
        """Return the traffic of an epoch of some batches, not the last one."""

    def working_bytes(self, table: TableSize, _: ShardSize) -> float:
        """Return the memory that a shard's model takes besides its encoded rows."""
        return vector_bytes(table)

    def batch_size(self, _: int) -> int:
        """Return B, at most N; 0 without batches."""
        return 0

    def sent_derivatives(self, joined_rows: int) -> SentDerivatives:
        """Return which derivatives sites are sent of N joined rows."""
        return SentDerivatives(self.derivatives, self.batch_size(joined_rows))

    def split(
        self, bound: BoundQuery, extracted: Extracted, mapping: TableMapping
    ) -> Split:
        """Return which joined rows are held out."""
        parts = extracted.parts.get(bound.split_table, ())
        return split_joined(bound, parts, extracted.replies, mapping, self.settings)

    def read_labels(self, extracted: Extracted, bound: BoundQuery) -> Target:
        """Return the labels of the label table."""
        return gather_labels(extracted, bound, self.settings)

    def choose_objective(self, target: Target, is_trained: BoolArray) -> Objective:
        """Return the objective of the joined rows, some of which are trained on."""
        return choose_objective(target, is_trained, self.settings)

    def restrict(self, joined: JoinedTables, sample: RowSample) -> JoinedTables:
        """Return the joined rows restricted to a sample of the training rows."""
        return joined.restrict(sample.rows, sample.weights)

    def model_spec(self, preparation: Preparation, table: str) -> ModelSpec:
        """Return the local model of a table, untrained."""
        return preparation.spec(table)

    def plan_batches(self, _: TableMapping, __: Layouts) -> PartArrays:
        """Return the batch plan's arrays for ``prepare``, by part."""
        return {}

    def baseline(self, problem: TrainingProblem) -> float:
        """Return the loss of the best constant score, which no epoch may far exceed.

        It is infinity if noise can make an epoch bad, and the next one good, or if a
        solver at the server ends in one epoch.
        """
        if self.settings.is_noisy or self.settings.method.solvers:
            return math.inf
        return problem.baselines["train"].get("loss", math.inf)

    @property
    def messages_of_start(self) -> tuple[Action, ...]:
        """The messages that bring the scores that training starts from."""
        return ()

    @property
    def rounds_of_start(self) -> int:
        """The method's own rounds between set-up and epochs."""
        return 0

    def run_messages(
        self, *, is_sharded: bool, is_ranked: bool = False
    ) -> tuple[Action, ...]:
        """Return a run's messages after ``extract``, up to the one that ends it."""
        messages = [*self.messages_of_start, Action.STATISTICS]
        if is_sharded:
            messages.append(Action.FIT)
        if self.drawing is not None:
            messages += self.drawing.messages
        if is_ranked:
            messages.append(Action.RANK)
        messages += self.messages
        if is_sharded:
            messages += self.messages_of_shards
        return tuple(messages)

    def disclosure_values(self, _: JoinedTables) -> DisclosureValues:
        """Return the values of names that only the method's own messages use."""
        return DisclosureValues()

    def exposure(
        self,
        joined: JoinedTables,
        inventory: Inventory,
        updates: Mapping[str, Update],
        encoders: Mapping[str, TableEncoding],
    ) -> Exposure:
        """Return the properties of the run that decide who learns what."""
        parts = joined.extracted.parts
        starts: Iterable[Manifest] = ()
        if self.messages_of_start:
            starts = lineage(home_folder(), self.settings.start)
        bins: Mapping[str, int] = {}
        if self.settings.asks_bins and self.head(1).is_linear:
            widths = {name: item.columns.width for name, item in encoders.items()}
            bins = bins_of_tables(parts, widths, self.settings, inventory)
        messages = self.run_messages(
            is_sharded=any(len(shards) > 1 for shards in parts.values()),
            is_ranked=self.asks_ranks(inventory),
        )
        if bins:
            messages = (*messages, Action.BINS)
        return exposure_of(
            joined.bound,
            parts,
            self.settings,
            inventory,
            messages,
            updates=updates,
            weight=joined.weighting.column,
            is_weighted=joined.weighting.train is not None,
            has_label=self.has_label,
            keeps_labels=self.settings.method.keeps_labels,
            fitted=fitted_tables(encoders),
            has_batches=bool(self.batch_size(1)),
            fits_effects=self.settings.fits_effects,
            fits_factors=self.settings.fits_factors,
            sends_factors=self.factors_of_start,
            fits=self.run.fits,
            bins=bins,
            scores_bins=any(model.trees for model in starts),
            method=self.disclosure_values(joined),
            vectors=self.head.discloses,
        )

    def asks_ranks(self, inventory: Inventory) -> bool:
        """Return whether scores leave, and a policy limits them by ranks."""
        return self.settings.method.sends_scores and asks_ranks(inventory)

    def releases_per_epoch(self, batches: int, *, is_sharded: bool) -> int:
        """Return how often scores of a row leave in an epoch, at most.

        It is in so many ``batches``; ``is_sharded`` says whether some table is.
        """
        del batches, is_sharded
        return 1

    def forecast_scores(
        self,
        ranks: Ranks,
        joined: JoinedTables,
        specs: Mapping[str, ModelSpec],
        encoders: Mapping[str, TableEncoding],
    ) -> list[ScoreForecast]:
        """Return how many epochs of scores each part with a score limit may release."""
        size = self.batch_size
        train = joined.train
        outputs = self.head(joined.objective.outputs).width
        batches = 0
        if size(1):
            batches = -(-train.joined_rows // size(train.joined_rows))
        is_sharded = any(len(layout.parts) > 1 for layout in joined.layouts.values())
        # of a shard in several roles all scores count
        roles = Counter((part.node, part.shard) for part in ranks.left)
        return [
            ScoreForecast(
                part=part,
                left=left,
                first=0 if specs[part.table].kind in NUMPY_KINDS else outputs,
                per_epoch=roles[part.node, part.shard]
                * outputs
                * self.releases_per_epoch(
                    int(
                        min(
                            train.tables[part.table].multiplicity.max(initial=1),
                            batches,
                        )
                    ),
                    is_sharded=is_sharded,
                ),
                columns=encoders[part.table].columns.width,
            )
            for part, left in ranks.left.items()
        ]

    def warnings_of_scores(self, forecasts: Sequence[ScoreForecast]) -> Iterator[str]:
        """Yield warnings of the limits that policies set to the training."""
        epochs = self.settings.num_epochs
        fewest_first = sorted(forecasts, key=epochs_of)
        refused = [item for item in fewest_first if not item.epochs]
        # one number that all policies allow
        refused = refused or [item for item in fewest_first[:1] if epochs > item.epochs]
        for item in refused:
            yield f"training will be refused: {item.refusal}"
        short = [item for item in fewest_first if 0 < item.epochs < self.usual_epochs]
        if short and not epochs:
            yield ends_early(self.name, self.usual_epochs, short)

    def warnings_of_encoders(self, _: Mapping[str, TableEncoding]) -> Iterator[str]:
        """Yield warnings of what training would do with the encoded rows."""
        yield from ()

    def mark_best(self) -> None:
        """Keep the scores of the best epoch, if it may be refined at the server."""
        problem = self.run.training_problem
        if isinstance(problem, TrainingProblem) and self._reads_best(problem):
            mark_scores(problem)

    def collect(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Ask for the bins of the tables that show them, where rows validate."""
        most = problem.exposure.bins
        if self.settings.most_bins and not most:
            self.run.warn(NO_BINS)
        if most and not math.isinf(self.run.best.loss):
            self.binned = yield from ask_bins(problem, most)

    def _grow_trees(self, problem: TrainingProblem) -> None:
        """Grow trees on the tables' bins at the best epoch's scores, if they help."""
        if not self.binned:
            return
        self.joint = fit_trees(problem, self.binned, self.settings)
        self.run.chosen["bins"] = NONE if self.joint is None else self.joint.entry
        mark_scores(problem)
        self._measure_refined(problem)

    def _measure_refined(self, problem: TrainingProblem) -> None:
        """Take the metrics of the scores as those of the final model."""
        final = self.run.final
        self.run.final = EpochResult(
            final.epoch,
            problem.train_metrics(),
            residuals=final.residuals,
            **problem.metrics_of_held_out()._asdict(),
        )

    def refine(self, problem: TrainingProblem) -> None:
        """Fit trees of bins, then effects and factors of keys, to what is left."""
        self._grow_trees(problem)
        warn_of_keys(self.run, self.keys, self.factor_keys)
        if not self._reads_best(problem) or math.isinf(self.run.best.loss):
            return
        restore_scores(problem)
        refined = refine_by_keys(self.run, problem, self.keys, self.factor_keys)
        if refined.is_empty:
            return
        self.factors = refined.factors
        # a site's score, its effects among it, counts by this share
        share = SHARE if self.joint else 1.0
        self.last_parts = refined.parts(problem, share)
        self._measure_refined(problem)

    def _reads_best(self, problem: TrainingProblem) -> bool:
        """Whether the server reads the best epoch's scores once training has ended."""
        has_keys = bool(self.keys or self.factor_keys)
        return has_keys or bool(problem.exposure.bins) or problem.response.reads_scores

    def score_start(self, _: JoinedTables) -> Generator[Requests, Replies, None]:
        """Learn the scores that training starts from; they are constant."""
        yield from ()

    @cached_property
    def drawing(self) -> RowDrawing | None:
        """The step that draws the rows to train on; None if all are."""
        if not self.settings.training_sample:
            return None
        return row_drawing(self.settings)

    def readings(self, problem: TrainingProblem) -> list[ScoreReading]:
        """Return at how many rows sites and server work out scores."""
        return score_readings(
            problem.exposure,
            self.sent_derivatives(problem.train.joined_rows),
            problem.objective,
            problem.train,
            problem.tables,
            self.scores_left,
        )

    def set_up(self) -> Generator[Requests, Replies, TrainingProblem]:
        """Run the set-up rounds and return the training problem."""
        all_rows = yield from self.join(self.run.inventory)
        yield from self.score_start(all_rows)
        encoders = yield from fit_encoders(all_rows, self.run)
        return (yield from self.begin(all_rows, encoders))

    def begin(
        self, all_rows: JoinedTables, encoders: Mapping[str, TableEncoding]
    ) -> Generator[Requests, Replies, TrainingProblem]:
        """Return the problem of training on joined rows, whose encoders are fitted."""
        settings = self.settings
        joined = all_rows
        if self.drawing is not None:
            self.sample = yield from self.drawing.draw(all_rows, encoders)
            joined = self.restrict(all_rows, self.sample)
        check_factors(joined, settings)
        keys: Mapping[str, TableRows] = {}
        if settings.fits_key_numbers and self.head(1).is_linear:
            keys = keys_of_tables(joined)
        preparation = Preparation(
            joined,
            settings,
            encoders,
            all_rows.train_objective,
            self.head(joined.objective.outputs),
            self.label_reach,
        )
        specs = {name: self.model_spec(preparation, name) for name in joined.layouts}
        if self.asks_ranks(self.run.inventory):
            preparation = yield from self._rank_rows(preparation, specs)
        batches = self.plan_batches(joined.train, joined.layouts)
        updates = {
            name: self.choose_update(
                name, len(layout.parts), is_linear=specs[name].kind == "linear"
            )
            for name, layout in joined.layouts.items()
        }
        tables, initial_scores, fixed_point = yield from prepare(
            preparation, specs, updates, batches, outline_of(settings)
        )
        self.keys = {n: k for n, k in keys.items() if tables[n].takes_effects}
        self.factor_keys = keys_with_factors(joined, keys, tables, settings)
        self._report_choices(all_rows)
        return TrainingProblem(
            tables=tables,
            train=joined.train,
            test=joined.test,
            objective=joined.train_objective,
            held_out=joined.test_objective,
            validates=joined.validates,
            head=preparation.head,
            response=joined.objective.response,
            # the server knows all labels, and a sample may have only one class
            base_score=all_rows.train_objective.base_score,
            initial_scores=initial_scores,
            score_unit=preparation.score_unit,
            fixed_point=fixed_point,
            l2=settings.l2,
            tolerance=settings.asked_tolerance,
            join_steps=joined.steps,
            source_rows=joined.extracted.table_rows,
            fan_out=all_rows.fan_out,
            names=joined.names,
            encoders={name: item.columns for name, item in encoders.items()},
            encodings={name: item.rows() for name, item in encoders.items()},
            exposure=self.exposure(joined, self.run.inventory, updates, encoders),
            weighting=joined.weighting,
            workers=self.run.workers,
        )

    def _rank_rows(
        self, preparation: Preparation, specs: Mapping[str, ModelSpec]
    ) -> Generator[Requests, Replies, Preparation]:
        """Limit the epochs by the score vectors that policies let leave.

        Return the preparation with the sites' statements to each other.
        """
        joined = preparation.joined
        ranks = yield from rank_rows(joined, preparation.encoders)
        self.scores_left = ranks.by_number
        forecasts = self.forecast_scores(ranks, joined, specs, preparation.encoders)
        # a refusal names a number of epochs that all policies allow
        if forecasts:
            self.run.limit_epochs(min(forecasts, key=epochs_of))
        return replace(preparation, cover=ranks.cover)

    def _report_choices(self, all_rows: JoinedTables) -> None:
        """Add the loss, the numbers of rows and their sample to the report."""
        # over all rows: a sample's rows also have the weights of their draws
        self.run.chosen |= all_rows.report_entries()
        if self.sample is not None:
            self.run.chosen |= self.sample.report_entries()

    def _check_head(self) -> None:
        """Refuse a head that the method cannot train, or whose scores have no masks."""
        head = self.head
        if not (head.is_linear or self.trains_any_head):
            raise SettingsError(
                f"strategy {self.name!r} trains scores that are sums over the tables, "
                f"which head {head.name!r} does not make: choose a strategy that "
                "trains by gradients"
            )
        check_masks(head, self.settings)

    def _bind_columns(self, inventory: Inventory) -> tuple[BoundQuery, Columns]:
        """Return the query over the sites' columns, and warn of misleading parts."""
        bound, columns = bind_columns(self.bind, inventory)
        check_aliases(bound, self.settings)
        check_numbers(bound, self.settings)
        self.run.warn(*query_warnings(self.run.query, bound, columns))
        return bound, columns

    def join(self, inventory: Inventory) -> Generator[Requests, Replies, JoinedTables]:
        """Extract and return the joined rows, of which some are held out."""
        return self.divide((yield from self.map_rows(inventory)))

    def map_rows(
        self, inventory: Inventory
    ) -> Generator[Requests, Replies, MappedRows]:
        """Extract and return the joined rows."""
        settings = self.settings
        self._check_head()
        bound, columns = self._bind_columns(inventory)
        weighting = declared_weighting(bound, settings)
        check_present(bound, inventory)
        extracted = yield from extract(bound, settings, inventory, columns)
        self.run.warn(*extracted.absent, *cutoff_warnings(bound, extracted))
        rows = extracted.table_rows
        sampled = sampled_rows(rows[bound.label_table], settings)
        labels = keep_classes_of(self.read_labels(extracted, bound), sampled)
        mapping, steps = build_mapping(
            bound.joins,
            extracted.keys,
            rows,
            bound.label_table,
            bound.outer,
            RowLimits(settings.max_joined_rows, settings.memory_bytes),
            sampled,
            extracted.filters,
            extracted.answering,
        )
        mapping, weights, weighting = drop_weightless(
            mapping, extracted.weights, weighting, bound.weight_table or ""
        )
        return MappedRows(
            bound=bound,
            extracted=extracted,
            labels=labels,
            mapping=mapping,
            steps=steps,
            weights=weights,
            weighting=weighting,
            sampled=sampled,
            inventory=inventory,
        )

    def divide(self, rows: MappedRows, fold: int | None = None) -> JoinedTables:
        """Return the joined rows, of which some are held out: a fold of a search."""
        if fold is None:
            joined = self._divide(rows, fold)
            self._report_division(joined)
            return joined
        key = (fold, self.settings.validation_share, self.name)
        if key not in rows.folds:
            rows.folds.clear()
            rows.folds[key] = self._divide(rows, fold)
        return rows.folds[key]

    def _report_division(self, joined: JoinedTables) -> None:
        """Add the task and the split to the report, with warnings of them."""
        if self.settings.task == AUTO and self.has_label:
            self.run.chosen["task"] = task_line(joined.labels, self.settings)
        self.run.warn(*split_warnings(joined, self.settings))
        self.run.held_out_digest = hashlib.sha256(joined.subset.tobytes()).hexdigest()
        self.run.tested_digest = joined.digest_of_tested
        self.run.split_entry |= {
            "validation-rows": int(np.count_nonzero(joined.validates))
        }

    def _divide(self, rows: MappedRows, fold: int | None) -> JoinedTables:
        if fold is None:
            split = self.split(rows.bound, rows.extracted, rows.mapping)
        else:
            rows, split = rows.in_fold(self.settings, fold)
        choices = encoder_choices(rows.bound, self.settings)
        return rows.divide(*split, choices, self.choose_objective)

    def _perfect_score(self, problem: TrainingProblem) -> str:
        """Return the metric that is nearly perfect on the test rows.

        It is "" where noise decides it.
        """
        if not self.has_label or self.settings.privacy.covers_labels:
            return ""
        return nearly_perfect(self.run.final.test, problem.tested.target)

    def coefficient_shape(self, table: TrainedTable) -> tuple[int, int] | None:
        """Return the shape of the coefficients that a table's sites may show."""
        if not table.is_linear:
            return None
        return (table.width, table.outputs)

    def read_outcome(
        self, replies: Replies, problem: TrainingProblem, weight: int | None = None
    ) -> Outcome:
        """Return the digests, the coefficients and each table's contribution.

        ``weight`` is that of all rows trained on; None stands for their number.
        """
        coefficients = {}
        names = {}
        for name, table in problem.tables.items():
            weights = coefficients_of(replies, table, self.coefficient_shape(table))
            if weights is not None:
                coefficients[name] = weights
            names[name] = names_of(replies, table, problem.encoders[name].names)
        sums = {
            name: sums
            for name, table in problem.tables.items()
            if (sums := score_sums_of(replies, table)) is not None
        }
        return Outcome(
            digests=read_digests(replies, problem.parts),
            coefficients=coefficients,
            names=names,
            coefficient=self.coefficient,
            contributions=problem.head.contributions(
                sums, problem.train.joined_rows if weight is None else weight
            ),
            factors={} if self.factors is None else self.factors.widths,
        )

    def outcome_of(self, replies: Replies, problem: TrainingProblem) -> Outcome:
        """Return the outcome of the sites' replies; warn of misleading metrics."""
        outcome = self.read_outcome(replies, problem)
        rows = f"held-out rows ({self.settings.split_name})"
        headline = problem.response.headline
        constant = problem.baselines["test"]
        if warning := no_better(headline, self.run.final.test, constant, rows):
            self.run.warn(warning)
        # where rows validate, they have chosen the epoch
        if math.isinf(self.run.best.loss) and not self.settings.is_noisy:
            l2 = self.settings.l2 if self.has_penalty else None
            warning = overfitting(
                self.run.lowest_test, self.run.final, problem.tested.weights, rows, l2
            )
            if warning:
                self.run.warn(warning)
        if score := self._perfect_score(problem):
            features = {
                name: problem.encoders[name].features for name in problem.tables
            }
            suspects = suspects_of(
                outcome.contributions, features, outcome.coefficients
            )
            bound, _ = bind_columns(self.bind, self.run.inventory)
            self.run.warn(perfect_warning(score, rows, bound, suspects))
        comparison = problem.compare(
            self.run.final.predicted, is_noisy=self.settings.privacy.covers_labels
        )
        return replace(outcome, comparison=comparison)
