"""TablePuppetMoments: linear models from the second moments of the joined rows.

Aggregates only: nobody sees a number per row. One round brings padded sums by join key
(:mod:`tp_flower.methods.moments.exchange`), from which the server has X^T X of the
joined rows, the label among the columns, exactly; it solves, and a second round brings
every site the parameters of its table. Labels stay at their site.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any, Final

import numpy as np

from strategies.disclosures import DisclosureValues
from strategies.methods.moments.assembly import (
    ALTERED,
    PADS,
    column_bits,
    common_bits,
    matrices,
)
from strategies.methods.moments.describe.encoding import (
    check_groups,
    describing_settings,
)
from strategies.methods.moments.describe.section import description
from strategies.methods.moments.join_counts import JoinCounts
from strategies.methods.moments.label_site import (
    READ_BY_SITE,
    WORD,
    SiteSolution,
    check_reader,
    let_site_solve,
    reader_traffic,
)
from strategies.methods.moments.noise import (
    NoiseEffect,
    TableNoise,
    check_noise,
    planned_noises,
    refusals,
)
from strategies.methods.moments.section import (
    PASSES,
    answers,
    errors_note,
    feature_columns,
    label_names,
    noise_entry,
    path_entry,
    rows_by_table,
    statistics_by_table,
    undetermined,
)
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.replies import refuse
from strategies.run.sites import Inventory
from strategies.run.strategy import EpochResult
from strategies.setup.encoding import TableEncoding, fit_encoders
from strategies.setup.extract import Extracted
from strategies.setup.joined_rows import JoinedTables
from strategies.setup.labels import (
    fitting_loss,
    label_facts,
    read_classes,
)
from strategies.setup.problem import TrainedTable, TrainingProblem
from strategies.training.join_method import JoinMethod
from strategies.training.outcome import Outcome
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import TableSize, Traffic
from strategies.training.trend import CONVERGED
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import QueryError, ReplyError
from tp_flower.learning.models.local_model import LINEAR
from tp_flower.methods.moments.describe.queries import bind_described
from tp_flower.methods.moments.describe.settings import DescribeSettings, described
from tp_flower.methods.moments.inference import Inference, NoisyFit
from tp_flower.methods.moments.messages import (
    TRAIN_MOMENTS,
    TRAIN_SOLUTION,
    TRAIN_SOLVE,
    MomentsRequest,
    PaddedPart,
    SolutionRequest,
    SolvedPart,
)
from tp_flower.methods.moments.noise import LabelUnit
from tp_flower.methods.moments.penalties import (
    TOLERANCE,
    Fit,
    Penalty,
    chosen_fit,
    fit_path,
    violation,
)
from tp_flower.methods.moments.questions import FeatureColumns
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.reading.label_site import checked_widths
from tp_flower.methods.moments.settings import label_site_reads
from tp_flower.methods.moments.solve import JoinedMoments, Solution
from tp_flower.methods.moments.terms import (
    TRAINED,
    norms_of,
    private_tables,
    splitting_table,
    tree_of,
)
from tp_flower.objectives import Objective, Target, make_objective
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update
from tp_flower.query import BoundQuery, Query
from tp_flower.randomness import Stream, generator
from tp_flower.reports.records import RunReport
from tp_flower.settings import Settings
from tp_flower.settings.run import JOINED
from tp_flower.splits import TEST, VALIDATION

NOISE: Final = (
    "Gaussian noise covers the values of a row, or privacy-unit, of {tables} (epsilon "
    "{epsilon:g} each, delta {delta:g}), given keys, counts and the label's classes"
)
MISSED: Final = (
    "the coefficients miss the optimum's conditions{}, as some columns are nearly "
    "collinear: raise l2"
)


class Moments(JoinMethod):
    """Least squares from second moments, at the server."""

    messages = (TRAIN_MOMENTS, TRAIN_SOLUTION)
    derivatives = 0
    _classes: Sequence[str | float] = ()
    _magnitude = 0
    _counts: JoinCounts
    moments: Mapping[int, JoinedMoments]
    _path: Sequence[Fit] = ()
    _fit: Fit
    _inference: Inference | None = None
    _unshrunk: Solution | None = None
    _noise: NoiseEffect | None = None
    _section: Mapping[str, object] | None = None
    _by_site: SiteSolution | None = None

    @classmethod
    def parse(cls, sql: str, settings: Settings) -> Query:
        """Return the query, which needs no label where rows are described."""
        if described(settings):
            return Query.from_sql(sql, needs_label=False, needs_features=False)
        return super().parse(sql, settings)

    @property
    def saves_model(self) -> bool:
        """Whether the run ends with a model: not where it describes rows."""
        return not described(self.settings)

    def choose_update(self, *_: Any, **__: Any) -> Update:
        """Let the server set the models."""
        return Update.GIVEN

    @property
    def _site_reads(self) -> bool:
        """Whether the label's site reads the moments in place of the server."""
        return label_site_reads(self.settings)

    def run_messages(
        self, *, is_sharded: bool, is_ranked: bool = False
    ) -> tuple[Action, ...]:
        """Return a run's messages, with the one for the label's site if it reads."""
        messages = super().run_messages(is_sharded=is_sharded, is_ranked=is_ranked)
        if not self._site_reads:
            return messages
        index = messages.index(TRAIN_SOLUTION)
        return (*messages[:index], TRAIN_SOLVE, *messages[index:])

    def disclosure_values(self, joined: JoinedTables) -> DisclosureValues:
        """Return what covers the padded sums."""
        private = private_tables(joined.extracted.proposal, self.settings)
        reads = self._site_reads
        values = {
            "private": ", ".join(sorted(private)),
            "sums_scores": not reads and len(private) < len(joined.layouts),
            "server_reads": not reads,
            "reader": joined.bound.label_table if reads else "",
        }
        pads = READ_BY_SITE if reads else PADS
        if private:
            privacy = self.settings.privacy
            noise = NOISE.format(
                tables=values["private"], epsilon=privacy.epsilon, delta=privacy.delta
            )
            pads = f"{PADS}; {noise}"
        return DisclosureValues(values, {"pads": pads})

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns, weighted by one table at most."""
        if described(self.settings):
            values = self.settings.of(DescribeSettings)
            return bind_described(self.run.query, schemas, values)
        bound = super().bind(schemas)
        if bound.weight_table is not None and self.settings.row_weight != JOINED:
            raise QueryError(
                f"strategy {self.name!r} takes one weight: leave 'AS weight' out, or "
                "row-weight, or use strategy = 'cg'"
            )
        return bound

    def read_labels(self, extracted: Extracted, bound: BoundQuery) -> Target:
        """Return the target without its column: the label's kind, and its classes."""
        tree_of(extracted.proposal)
        if self._site_reads:
            check_reader(extracted.parts, bound.label_table)
        parts = extracted.parts[bound.label_table]
        classes = read_classes(extracted, parts, self.settings)
        self._classes = classes.values
        if self._classes and self.settings.l1:
            raise QueryError(
                f"l1 is for labels that are numbers: of classes strategy {self.name!r} "
                "makes the linear discriminant, which has the penalty l2 alone; "
                "leave l1 0"
            )
        facts = [
            label_facts(extracted, part)
            for part in parts
            if extracted.rows[part.number]
        ]
        self._magnitude = max((label.magnitude or 0 for label in facts), default=0)
        rows = extracted.table_rows[bound.label_table]
        _ = self._label_unit
        return Target(np.zeros((rows, 0)), classes.names, classes.kind)

    def choose_objective(self, target: Target, is_trained: BoolArray) -> Objective:
        """Return the objective by which scores are read, without labels."""
        if not is_trained.any():
            raise QueryError(
                "all joined rows are held out for testing: lower test-fraction "
                f"({self.settings.test_fraction:g}) or add rows"
            )
        return make_objective(fitting_loss(target.classes, self.settings.loss), target)

    def join(self, inventory: Inventory) -> Generator[Requests, Replies, JoinedTables]:
        """Extract the joined rows, and count them along the joins."""
        if described(self.settings):
            self.run.settings = describing_settings(self.bind, self.settings, inventory)
        joined = yield from super().join(inventory)
        proposal = joined.extracted.proposal
        self._counts = JoinCounts.of(
            joined, splitting_table(proposal, self.settings), tree_of(proposal)
        )
        return joined

    def epoch_traffic(self, tables: Sequence[TableSize], _: int) -> Traffic:
        """Return the traffic of the two rounds: padded sums, and parameters."""
        tree = self._counts.tree
        widths = self._counts.columns({table.name: table.features for table in tables})
        if self._site_reads:
            widths = checked_widths(widths)
        total = sum(widths.values())
        passes = self._counts.passes
        up = 0.0
        down = 0.0
        for name, rows in self._counts.rows.items():
            for number in rows.edges:
                is_joined = rows.is_joined(number)
                behind = tree.behind(number, name)
                on_this_side = total - sum(widths[other] for other in behind)
                up += float(np.count_nonzero(is_joined)) * on_this_side
                shards = self._counts.told_shards(number, name)
                for part in self._counts.joined.extracted.parts[name]:
                    keys = len(self._counts.places[number, part])
                    down += float(len(passes) * keys * shards)
            bits = self._counts.bits[name]
            down += 0.0 if bits is None else len(bits) / WORD
        senders = len(self._counts.joined.parts)
        for first, second in combinations_with_replacement(tree.tables, 2):
            up += float(senders * widths[first] * widths[second]) * len(passes)
        if self._site_reads:
            label_table = self._counts.joined.bound.label_table
            more = reader_traffic(self._counts, tables, label_table)
            return Traffic(rounds=3, up=WORD * up + more[0], down=WORD * down + more[1])
        up += sum(widths[table.name] * len(table.shards) for table in tables)
        down += float(sum(table.parameters for table in tables))
        return Traffic(rounds=2, up=WORD * up, down=WORD * down)

    def baseline(self, _: TrainingProblem) -> float:
        """Return infinity: a solution is no epoch that could diverge."""
        return math.inf

    def judge(self, _: TrainingProblem) -> str:
        """Return that the problem has been solved."""
        if described(self.settings):
            return "described from the moments of the joined rows"
        suffix = ", by the label's site" if self._site_reads else ""
        if self._noise is not None:
            suffix = self._noise.verdict
        return f"{CONVERGED}: solved from the moments of the joined rows{suffix}"

    def set_up(self) -> Generator[Requests, Replies, TrainingProblem]:
        """Run the set-up rounds, and the one that brings the moments."""
        joined = yield from self.join(self.run.inventory)
        encoders = yield from fit_encoders(joined, self.run)
        if described(self.settings):
            check_groups(joined.bound, self.settings, encoders)
        noises = self._plan_noise(encoders)
        check_noise(noises, self.settings)
        self.run.warn(*(f"noise on {each}" for each in noises if not each.is_cheap))
        layout = self._layout(joined, encoders)
        request = MomentsRequest(
            passes=list(self._counts.passes),
            columns=dict(layout.columns),
            bits=self._noise_bits(joined),
            outputs=layout.outputs,
            classes=list(self._classes),
            largest_weight=self._counts.largest_weight,
            label_rows=[
                joined.extracted.rows[part.number]
                for part in joined.extracted.parts[joined.bound.label_table]
            ],
            split_rows=self._counts.split_rows(self.settings),
            parts={
                part.number: self._counts.part(
                    part,
                    encoders[part.table],
                    common_bits(self._counts, layout, part.table, self._magnitude),
                )
                for part in joined.parts
            },
        )
        replies = yield ask(request, joined.parts)
        if self._site_reads:
            self._by_site = yield from let_site_solve(self._counts, replies, layout)
        else:
            self.moments = self._assemble(joined, replies, layout)
        self.run.chosen["loss"] = joined.objective.name
        updates = dict.fromkeys(joined.layouts, Update.GIVEN)
        return TrainingProblem(
            tables={
                name: self._table(joined, name, encoders[name])
                for name in joined.layouts
            },
            train=joined.train,
            test=joined.test,
            objective=joined.train_objective,
            held_out=joined.test_objective,
            validates=joined.validates,
            score_unit=self._score_unit(joined),
            head=self.head(joined.objective.outputs),
            response=joined.objective.response,
            base_score=self._base_score(joined),
            has_base=self._by_site is None,
            initial_scores={},
            fixed_point=None,
            l2=self.settings.l2,
            join_steps=joined.steps,
            source_rows=joined.extracted.table_rows,
            fan_out=joined.fan_out,
            names=joined.names,
            encoders={name: item.columns for name, item in encoders.items()},
            encodings={name: item.rows() for name, item in encoders.items()},
            exposure=self.exposure(joined, self.run.inventory, updates, encoders),
            weighting=joined.weighting,
        )

    def _layout(
        self, joined: JoinedTables, encoders: Mapping[str, TableEncoding]
    ) -> ColumnLayout:
        """Return where the tables' columns are in the moments."""
        widths = {
            name: encoders[name].columns.width for name in self._counts.tree.tables
        }
        columns = self._counts.columns(widths)
        label_table = joined.bound.label_table
        return ColumnLayout(columns, label_table, self._counts.outputs)

    def warnings_of_encoders(
        self, encoders: Mapping[str, TableEncoding]
    ) -> Iterator[str]:
        """Yield how much noise the run's epsilon puts on each private table."""
        for refusal in refusals(self._plan_noise(encoders), self.settings):
            yield f"training will be refused: {refusal}"

    def _plan_noise(self, encoders: Mapping[str, TableEncoding]) -> list[TableNoise]:
        """Note and return the noise of every private table."""
        noises = planned_noises(self._counts, encoders, self.settings)
        if noises:
            self.run.chosen["noise"] = "; ".join(map(str, noises))
        return noises

    def _noise_bits(self, joined: JoinedTables) -> dict[str, int]:
        """Return the bits of every table's columns, where moments have noise."""
        if not self.settings.privacy.covers_features:
            return {}
        norms = norms_of(joined.extracted.proposal, self.settings)
        shards = {name: len(layout.parts) for name, layout in joined.layouts.items()}
        return norms.bits(int(self._counts.totals.sum()), shards)

    def _base_score(self, joined: JoinedTables) -> FloatArray:
        """Return the best constant score, as other methods have it.

        It is 0 where the label's site has it as part of the intercept.
        """
        if self._by_site is not None:
            return np.zeros(joined.objective.outputs)
        if joined.labels.classes:
            return self.moments[TRAINED].class_scores
        return self.moments[TRAINED].mean_labels

    def _score_unit(self, joined: JoinedTables) -> float:
        """Return about how large scores are."""
        if joined.labels.classes:
            return 1.0
        if self._by_site is not None:
            return self._by_site.unit
        return self.moments[TRAINED].label_deviation

    def _table(
        self, joined: JoinedTables, name: str, encoding: TableEncoding
    ) -> TrainedTable:
        """Return a table as the other methods have it after ``prepare``."""
        layout = joined.layouts[name]
        features = encoding.columns.width
        outputs = self.head(joined.objective.outputs).width
        has_intercept = name == joined.bound.label_table
        penalised = np.ones((features + has_intercept, outputs), np.bool_)
        penalised[features:] = False
        return TrainedTable(
            name=name,
            parts=layout.parts,
            rows=layout.rows,
            update=Update.GIVEN,
            model=LINEAR,
            features=features,
            outputs=outputs,
            has_intercept=has_intercept,
            largest_curvature=0.0,
            mean_curvature=(),
            penalised=penalised.ravel(),
        )

    def _assemble(
        self, joined: JoinedTables, replies: Replies, layout: ColumnLayout
    ) -> dict[int, JoinedMoments]:
        """Return the moments of every pass, from the sites' padded sums."""
        deviations = layout.deviations(self._noise_of_tables(joined, replies))
        moments = {}
        bits = column_bits(self._counts, replies, layout)
        read = matrices(self._counts, replies, layout, bits)
        for position, (number, matrix) in enumerate(read.items()):
            found = JoinedMoments(
                matrix, layout.features, layout.labels, layout.intercept, deviations
            )
            if not found.are_of(int(self._counts.totals[position])):
                raise ReplyError(ALTERED)
            if self._label_unit is not None:
                found = found.in_unit_of(self._label_unit)
            moments[number] = found
        return moments

    @property
    def _is_noisy(self) -> bool:
        """Whether the moments have noise."""
        return self.moments[TRAINED].deviations is not None

    @property
    def _is_weighted(self) -> bool:
        """Whether joined rows have weights."""
        return self._counts.joined.weighting.train is not None

    @cached_property
    def _label_unit(self) -> LabelUnit | None:
        """The unit of a numeric label that noise covers; None for others."""
        privacy = self.settings.privacy
        if not privacy.covers_features or self._classes:
            return None
        return LabelUnit.of(privacy.label_range)

    def _noise_of_tables(
        self, joined: JoinedTables, replies: Replies
    ) -> dict[str, float]:
        """Return the deviation of the noise that the shards of each table add."""
        private = private_tables(joined.extracted.proposal, self.settings)
        variances = dict.fromkeys(private, 0.0)
        for part in joined.parts:
            deviation = replies.body(part, PaddedPart).deviation
            if (deviation > 0.0) != (part.table in private):
                raise refuse(part, f"noise of deviation {deviation:g}")
            if deviation:
                variances[part.table] += deviation**2
        return {table: math.sqrt(value) for table, value in variances.items()}

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Solve, and send the parameters."""
        if self._by_site is not None:
            yield from self._forward(problem, self._by_site)
            return
        trained = self.moments[TRAINED]
        if described(self.settings):
            # nothing is fitted: the model is that of the constant label
            constant = trained.constant()
            yield from self._send(problem, constant, constant)
            return
        asked = Penalty(self.settings.l1, self.settings.l2)
        self._path = fit_path(trained, self.moments, asked)
        self._fit = fit = self._choose(asked)
        solution = fit.solution
        if problem.classes:
            solution = trained.discriminant(fit.penalty.l2)
        elif not (asked.l1 or self._is_weighted):
            self._estimate_errors(fit)
        if self._is_noisy:
            self._noise = NoiseEffect.of(
                self.moments,
                fit.penalty.l2,
                generator(self.settings.seed, Stream.NOISE),
                has_classes=bool(self._classes),
            )
            self.run.warn(*self._noise.warnings())
        yield from self._send(problem, solution, fit.solution)

    def _send(
        self, problem: TrainingProblem, solution: Solution, fitted: Solution
    ) -> Generator[Requests, Replies, None]:
        """Send the tables' parameters; end the epoch by a least-squares fit."""
        parts = {
            part.number: SolvedPart(parameters=block.ravel())
            for name, block in rows_by_table(
                problem, self._parameters(problem, solution)
            ).items()
            for part in problem.tables[name].parts
        }
        yield self.run.request(ask(SolutionRequest(parts=parts), problem.parts))
        metrics = {n: moments.metrics(fitted) for n, moments in self.moments.items()}
        self._finish(self._noise.known(metrics) if self._noise else metrics)

    def _forward(
        self, problem: TrainingProblem, solved: SiteSolution
    ) -> Generator[Requests, Replies, None]:
        """Send the parameters that the label's site has sealed."""
        parts = {name: table.parts for name, table in problem.tables.items()}
        request = SolutionRequest(parts=solved.parts(parts))
        yield self.run.request(ask(request, problem.parts))
        if VALIDATION in solved.metrics:
            self._tell_penalty(solved.penalty)
        if not solved.is_optimal:
            self.run.warn(MISSED.format(""))
        self._finish(solved.metrics)

    def _finish(self, metrics: Mapping[int, dict[str, float]]) -> None:
        """End the epoch with metrics by pass."""
        self.run.finish_epoch(
            EpochResult(
                1,
                metrics[TRAINED],
                metrics.get(TEST, {}),
                validation=metrics.get(VALIDATION, {}),
                is_judged=self._noise is None,
            )
        )

    def _estimate_errors(self, fit: Fit) -> None:
        """Keep the inference of a regression, and what it is of."""
        trained = self.moments[TRAINED]
        if not self._is_noisy:
            self._inference = Inference.of_squares(trained, fit)
        elif noisy := NoisyFit.of(trained, fit.penalty.l2):
            self._inference = noisy.inference
            self._unshrunk = noisy.solution

    def _describe(self, problem: TrainingProblem) -> Mapping[str, object]:
        """Return the report's entries about the joined rows."""
        joined = self._counts.joined
        sharded = {name for name, each in joined.layouts.items() if len(each.parts) > 1}
        return description(
            self.moments[TRAINED],
            feature_columns(problem),
            joined.bound,
            self.settings,
            frozenset(sharded),
        )

    def _choose(self, asked: Penalty) -> Fit:
        """Return the fit asked for, or of lowest validation loss if rows validate."""
        fit = chosen_fit(self._path, asked)
        if VALIDATION in self.moments:
            self._tell_penalty(fit.penalty)
        missed = violation(self.moments[TRAINED], fit)
        if asked.l1 and missed > TOLERANCE:
            self.run.warn(MISSED.format(f" by {missed:.1g}"))
        return fit

    def _tell_penalty(self, penalty: Penalty) -> None:
        """Report the penalty that the validation rows have chosen."""
        self.run.chosen["l2"] = penalty.l2
        if self.settings.l1:
            self.run.chosen["l1"] = penalty.l1

    def _parameters(self, problem: TrainingProblem, solution: Solution) -> FloatArray:
        """Return the coefficients, and the intercept beyond the base, (d + 1, d_c)."""
        return np.vstack(
            [solution.coefficients, solution.intercept - problem.base_score]
        )

    def _statistics(self, problem: TrainingProblem) -> dict[str, dict[str, FloatArray]]:
        """Return statistics of every table's coefficients, (d_t [+ 1], d_c) by name."""
        blocks: dict[str, dict[str, FloatArray]] = {name: {} for name in problem.tables}
        if self._noise is not None:
            deviations = np.vstack(self._noise.coefficients)
            for table, block in rows_by_table(problem, deviations).items():
                blocks[table]["noise"] = block
        if self._inference is None:
            return blocks
        solution = self._fit.solution
        if self._unshrunk is not None:
            solution = self._unshrunk
            unshrunk = self._parameters(problem, solution)
            for table, block in rows_by_table(problem, unshrunk).items():
                blocks[table]["unshrunk"] = block
        estimates = self._parameters(problem, solution)
        found = statistics_by_table(problem, self._inference, estimates)
        return {table: {**own, **found[table]} for table, own in blocks.items()}

    def outcome_of(self, replies: Replies, problem: TrainingProblem) -> Outcome:
        """Return the outcome of the sites' replies, compared with the mean label."""
        constant = self._constant_metrics()
        baseline = {PASSES[n]: dict(constant.get(n, {})) for n in (TRAINED, TEST)}
        weight = int(self._counts.totals[self._counts.passes.index(TRAINED)])
        outcome = self.read_outcome(replies, problem, weight)
        if self._by_site is not None:
            return replace(outcome, comparison={"baseline": baseline})
        if described(self.settings):
            self._section = self._describe(problem)
        else:
            columns = feature_columns(problem, outcome.names)
            self._section = self._report_section(problem, columns)
        return replace(
            outcome,
            statistics=self._statistics(problem),
            comparison={"baseline": baseline},
        )

    def _constant_metrics(self) -> Mapping[int, Mapping[str, float]]:
        """Return the metrics of the mean label, by pass."""
        if self._by_site is not None:
            return self._by_site.constant
        constant = self.moments[TRAINED].constant()
        return {n: moments.metrics(constant) for n, moments in self.moments.items()}

    def complete(self, report: RunReport) -> RunReport:
        """Return the report with what else the moments tell."""
        if not self._section:
            return report
        return replace(report, sections={"moments": self._section})

    def _report_section(
        self, problem: TrainingProblem, columns: FeatureColumns
    ) -> dict[str, object]:
        """Return what the moments tell besides the model."""
        label_table = self._counts.joined.bound.label_table
        repeats = int(problem.fan_out[label_table]["max"])
        labels = label_names(problem.classes, len(self.moments[TRAINED].labels))
        l2 = self._fit.penalty.l2
        passes = {
            number: moments.positive() for number, moments in self.moments.items()
        }
        return {
            "path": path_entry(self._path, self._noise),
            "errors": errors_note(
                problem,
                self._fit,
                self._inference,
                repeats,
                is_noisy=self._is_noisy,
                is_weighted=self._is_weighted,
            ),
            "undetermined": undetermined(columns, self._inference),
            "noise": noise_entry(self._noise),
            **answers(passes, columns, labels, l2, self._noise),
        }


class TablePuppetMoments(TrainingStrategy):
    """Train linear models over the result of a query from its second moments."""

    name = "moments"
    method_type = Moments
