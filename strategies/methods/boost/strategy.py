"""TablePuppetBoost: boosted trees over joins, in a handful of rounds.

One epoch costs one round: the loss's first two derivatives go down, summed over the
joined rows of each row; what the new trees add to the scores comes up. The shards of a
table grow trees of their own. See :mod:`tp_flower.methods.boost.boosting`.
"""

import math
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace as replace_fields
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from strategies.disclosures import DisclosureValues
from strategies.inference import manifest
from strategies.inference.scoring import Joined, score
from strategies.methods.boost.regions import Division, divisible_tables
from strategies.methods.boost.traffic import epoch_traffic
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import NOTABLE_FALL, BestEpoch, EpochResult
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables, MappedRows
from strategies.setup.problem import (
    SCORES,
    HeldOutMetrics,
    TrainedTable,
    TrainingProblem,
)
from strategies.setup.shard_labels import ShardLabels, shards_that_tell_labels
from strategies.training.join_method import JoinMethod
from strategies.training.outcome import GAIN, Outcome
from strategies.training.prepare import Preparation
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import ShardSize, TableSize, Traffic
from strategies.training.working_memory import tree_bytes
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import ReplyError, SettingsError
from tp_flower.files import home_folder
from tp_flower.learning.models.local_model import LINEAR, ModelSpec
from tp_flower.methods.boost import settings as defaults
from tp_flower.methods.boost.boosting import Boosting, add_direction, step_along
from tp_flower.methods.boost.linear import linear_epochs_of
from tp_flower.methods.boost.messages import (
    BAGGED,
    LARGE_SHARD,
    LOCAL,
    POOLED,
    SCORES_PER_EPOCH,
    TRAIN_BAG,
    TRAIN_BOOST,
    TRAIN_PAIRS,
    TRAIN_REGIONS,
    TREES,
    BagPart,
    BagRequest,
    BoostRequest,
    BoostStep,
    Growth,
)
from tp_flower.methods.boost.settings import BoostSettings
from tp_flower.model_names import find_version
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update
from tp_flower.settings.declare import AUTO
from tp_flower.settings.run import STOP
from tp_flower.splits import TRAIN
from tp_flower.terms.run_terms import model_seed

NO_SPLIT: Final = (
    "no table's trees have a split, so that all rows get one score: lower "
    "min-rows-per-leaf (%d)"
)
NO_TREES: Final = (
    "no epoch of trees predicts the validation rows better than %s alone, which they "
    "go on from: the saved model adds no trees to it"
)
BEHIND_LINEAR: Final = (
    "these trees are behind the linear model %s on the same held-out rows: %s %.4g "
    "against %.4g; boost-from goes on from it"
)
NO_LINEAR: Final = (
    "none saved here is tested on the same rows: strategy = cg trains one to compare "
    "with"
)
SHARD_IS_POOLED: Final = (
    "%s: trees that each shard grows alone would know rows by their shard, and "
    "held-out rows of the same shards cannot tell. So the shards pool sums by column "
    "(lou = pooled), of which trees of one column each grow"
)
SHARD_IS_FEATURE: Final = (
    "%s, and each shard grows trees of its own (lou = local): the shard is a feature "
    "of this model. Its metrics hold for new rows only where their shard tells their "
    "label, too; "
    'lou = "auto" trains without it'
)
SHARD_LEARNS_LITTLE: Final = (
    "%s: averaged trees (lou = bagged), each grown on the labels of one shard, learn "
    "little from "
    'its columns; lou = "pooled" grows them on sums over all shards'
)


class Boost(JoinMethod):
    """Boosting at the server."""

    has_penalty = False
    derivatives = 2
    coefficient = GAIN
    messages = (Action.PREPARE, TRAIN_BOOST)
    messages_of_shards = (TRAIN_BAG,)

    _lengths: Mapping[str, float] = {}
    _is_bagged = False
    _bagged: Sequence[str] = ()  # the tables whose shards show each other trees
    _sends_own_scores = True
    _label = ""
    _joined_rows = 0  # to train on
    _telling: Sequence[ShardLabels] = ()  # the tables whose shards tell the labels
    _division: Division
    # of training and of held-out rows
    start_scores: tuple[FloatArray, FloatArray] | None = None

    def __init__(self, run: TrainingStrategy) -> None:
        super().__init__(run)
        if name := run.settings.start:
            # a run that resumes must not take a later version
            start = str(find_version(home_folder(), name))
            run.settings = run.settings.with_fields(boost_from=start)

    def divide(self, rows: MappedRows, fold: int | None = None) -> JoinedTables:
        """Return the joined rows; warn of shards that tell the labels."""
        joined = super().divide(rows, fold)
        self._joined_rows = joined.train.joined_rows
        self._choose()
        fragments = joined.bound.fragments_of(joined.bound.label_table)
        self._label = manifest.label_text(fragments)
        self._telling = list(shards_that_tell_labels(joined))
        telling = [table.table for table in self._telling]
        self._division = Division(
            self.run,
            divisible_tables(self.settings, joined.bound, rows.inventory, telling),
            joined.bound.label_table,
        )
        warnings = {
            AUTO: SHARD_IS_POOLED,
            LOCAL: SHARD_IS_FEATURE,
            BAGGED: SHARD_LEARNS_LITTLE,
        }
        if self.settings.lou in warnings:
            for table in self._telling:
                self.run.warn(warnings[self.settings.lou] % table.text)
        return joined

    @property
    def rounds_of_start(self) -> int:
        """The rounds of regions: all tables are asked, and one may be divided."""
        if not self._division.divisible:
            return 0
        return 2 if self.settings.of(BoostSettings).regions != AUTO else 1

    @property
    def messages_of_start(self) -> tuple[Action, ...]:
        """The messages that bring the scores of a model to go on from."""
        if not self.settings.start:
            return ()
        if self._divided_by_start:
            return (Action.DIVIDE, Action.SCORE)
        return (Action.SCORE,)

    @property
    def _divided_by_start(self) -> str:
        """The tables of which the model to go on from reads regions."""
        if not self.settings.start:
            return ""
        model = manifest.resolve(home_folder(), self.settings.start)
        return manifest.divided_tables(home_folder(), model)

    def run_messages(
        self, *, is_sharded: bool, is_ranked: bool = False
    ) -> tuple[Action, ...]:
        """Return the messages of a run, those of regions if it may have some."""
        messages = super().run_messages(is_sharded=is_sharded, is_ranked=is_ranked)
        if self._division.divisible:
            messages += (TRAIN_REGIONS, TRAIN_PAIRS)
        return messages

    def disclosure_values(self, joined: JoinedTables) -> DisclosureValues:
        """Return the tables whose shards show each other trees, and whose scores leave.

        Scores of each shard's own trees leave unless all tables average or pool.
        """
        shards = {name: len(layout.parts) for name, layout in joined.layouts.items()}
        self._bagged = self._tables_to_average(shards, joined.train.joined_rows)
        is_shared = self.settings.lou in (BAGGED, POOLED)
        self._sends_own_scores = not (is_shared and self._bagged)
        values = {
            "bagged": ", ".join(self._bagged),
            "divided": self._divided_by_start,
            "divides": ", ".join(self._division.divisible),
            "scores_own_trees": self._sends_own_scores,
        }
        return DisclosureValues(values)

    def _tables_to_average(
        self, shards: Mapping[str, int], joined_rows: int
    ) -> list[str]:
        """Return the tables whose shards may average their trees, or pool sums.

        Without validation rows nothing says which are better: those of large shards do
        not.
        """
        lou = self.settings.lou
        is_validated = self.settings.validation_share > 0.0
        large: float = LARGE_SHARD
        if lou != AUTO or is_validated:
            large = math.inf
        pooled = self._tables_to_pool(shards)
        return [
            name
            for name, count in shards.items()
            if count > 1
            and lou != LOCAL
            and (joined_rows < large * count or name in pooled)
        ]

    def _tables_to_pool(self, tables: Iterable[str]) -> list[str]:
        """Return the tables whose shards pool sums.

        By default they are those whose shards tell the labels.
        """
        if self.settings.lou == POOLED:
            return list(tables)
        telling = {table.table for table in self._telling}
        return [
            name for name in tables if self.settings.lou == AUTO and name in telling
        ]

    def score_start(self, joined: JoinedTables) -> Generator[Requests, Replies, None]:
        """Score the joined rows with the model to start from, if there is one."""
        if not self.settings.start:
            return
        model = manifest.resolve(home_folder(), self.settings.start)
        manifest.check_query(model, joined.bound)
        check_same_rows(model, joined, self.run.held_out_digest, self.run.tested_digest)
        if model.held_out != self.run.held_out_digest:
            self.run.chosen["boost-from"] = (
                f"{model.model}, which has trained on the validation rows"
            )
        missing = manifest.find_missing(model, self.run.inventory)
        manifest.drop_missing(model, joined.bound, missing, STOP)
        rows = Joined(
            joined.bound, joined.extracted, joined.mapping, joined.steps, missing
        )
        self.factors_of_start = manifest.factor_tables(home_folder(), model)
        scores = yield from score(rows, model, self.settings, self.run.inventory)
        is_train = joined.subset == TRAIN
        self.start_scores = scores[is_train], scores[~is_train]

    def choose_update(self, *_: Any, **__: Any) -> Update:
        """Let every shard grow trees of its own, whatever becomes of them."""
        return Update.LOCAL

    def model_spec(self, preparation: Preparation, table: str) -> ModelSpec:
        """Return trees for every table."""
        spec = preparation.spec(table)
        return replace(spec, kind=TREES, intercept=False)

    def coefficient_shape(self, table: TrainedTable) -> tuple[int, int]:
        """Return that of the features' gains, (d, 1)."""
        return table.features, 1

    def working_bytes(self, table: TableSize, shard: ShardSize) -> float:
        """Return the memory of the values that trees read."""
        return tree_bytes(table, shard)

    def epoch_traffic(self, tables: Sequence[TableSize], _: int) -> Traffic:
        """Return the traffic of an epoch."""
        shards = {table.name: len(table.shards) for table in tables}
        bagged = self._tables_to_average(shards, tables[0].joined_rows)
        return epoch_traffic(tables, self._growth, bagged, self._tables_to_pool(bagged))

    def releases_per_epoch(self, batches: int, *, is_sharded: bool) -> int:
        """Return how often scores leave, of each shard's trees and of those of all."""
        del batches
        if is_sharded and self.settings.lou != LOCAL:
            return 2
        return 1

    def with_last_step(self, request: FinishRequest) -> FinishRequest:
        """Return the request that ends the run, and adds the last trees."""
        lengths = dict(self._lengths)
        return replace(request, lengths=lengths, is_bagged=self._is_bagged)

    def begin(
        self, all_rows: JoinedTables, encoders: Mapping[str, TableEncoding]
    ) -> Generator[Requests, Replies, TrainingProblem]:
        """Begin training, and ask for the regions of tables that may be divided.

        It starts at the base score, or at those of a model to continue from.
        """
        problem = yield from super().begin(all_rows, encoders)
        starts = self.start_scores or (problem.base_score, problem.base_score)
        for rows, start in zip(problem.scored_rows, starts, strict=False):
            rows.fill(SCORES, start)
        boosting = Boosting(problem.rows, problem.objective)
        # by trees on what nothing explains yet: later what remains is noise
        divisible = self._division.tables_of(problem)
        yield from self._division.ask(
            problem, _derivatives(boosting, divisible), self._growth, self._joined_rows
        )
        return problem

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Run the epochs, until the validation rows say that it is enough.

        Where scores leave in the clear, a table whose step is 0 grows no more trees.
        """
        self._judge_start(problem)
        boosting = Boosting(problem.rows, problem.objective)
        growing = dict(problem.tables)
        self._lengths = {}
        self._is_bagged = False
        choices: Counter[str] = Counter()
        linear_epochs = yield from self._linear_epochs(problem, boosting)
        first = linear_epochs + 1
        for epoch in range(first, self.run.most_epochs + 1):
            # shards whose own trees were better once differ in all epochs
            bagged = [] if choices[LOCAL] else [x for x in self._bagged if x in growing]
            steps = yield from self._steps(problem, boosting, growing, bagged)
            # of equals the later: no rows validate, or the trees are alike
            step = min(reversed(steps), key=lambda each: each.validation_loss)
            self._take(problem, step, epoch)
            choices[self._choice(step, bagged)] += 1
            growing = {name: growing[name] for name, a in self._lengths.items() if a}
            if epoch == first:
                self._check_splits(step)
                # what single tables explain is in the scores, and hides nothing
                paired = yield from self._division.divide(problem)
                if paired is not None:
                    self.keys, self.factor_keys = map(
                        self._division.keys, (self.keys, self.factor_keys)
                    )
                    self.run.training_problem = problem = paired
                    growing = dict(problem.tables)
                    boosting = Boosting(problem.rows, problem.objective)
                    continue
            if self.run.best.is_over or not growing or not step.has_split:
                break
        if self.start_scores and self.run.best.epoch == 0:
            self.run.warn(NO_TREES % self.settings.start)
        self._report_choices_of_shards(problem, choices)

    def _report_choices_of_shards(
        self, problem: TrainingProblem, choices: Counter[str]
    ) -> None:
        """Report how the shards of tables have trained, if some table has several."""
        if any(len(table.parts) > 1 for table in problem.tables.values()):
            trees = sum(choices.values())
            counts = (f"{name} in {n} of {trees} epochs" for name, n in choices.items())
            self.run.chosen["lou"] = ", ".join(counts)

    def _check_splits(self, step: "Step") -> None:
        """Warn of first trees without a split."""
        if not step.has_split:
            values = self.settings.of(BoostSettings)
            self.run.warn(NO_SPLIT % values.min_rows_per_leaf)

    def _take(self, problem: TrainingProblem, step: "Step", epoch: int) -> None:
        """Take a step, and end the epoch."""
        for rows in problem.scored_rows:
            step_along(rows, step.lengths, step.directions)
        self._lengths = step.by_table
        self._is_bagged = step.is_bagged
        train = problem.train_metrics()
        self.run.finish_epoch(EpochResult(epoch, train, **step.metrics._asdict()))

    def _linear_epochs(
        self, problem: TrainingProblem, boosting: Boosting
    ) -> Generator[Requests, Replies, int]:
        """Let the tables fit linear models; return in how many epochs.

        Shards fit their own, as they grow their own trees, and where they do not: none.
        Where the validation loss falls by little, full fits follow the shrunk ones, and
        trees the full ones.
        """
        most = min(linear_epochs_of(self.settings), self.run.most_epochs // 4)
        last = problem.metrics_of_held_out().validation.get("loss", math.inf)
        linear = {"is_linear": True, "is_shrunk": True}
        for epoch in range(1, most + 1):
            (step,) = yield from self._steps(
                problem, boosting, problem.tables, [], **linear
            )
            fall = last - step.validation_loss
            self._take(problem, step if fall > 0.0 else step.none(problem), epoch)
            if fall < defaults.LEAST_LINEAR_FALL * step.validation_loss:
                if not linear["is_shrunk"]:
                    return epoch
                linear["is_shrunk"] = False
            last = min(last, step.validation_loss)
        return most

    def _judge_start(self, problem: TrainingProblem) -> None:
        """Take the model to continue from, if there is one, as the best so far.

        So trees that do not improve on it are dropped.
        """
        self.run.best = BestEpoch(self._patience)
        if not self.start_scores:
            return
        metrics = problem.metrics_of_held_out()
        if metrics.validation:
            train = problem.train_metrics()
            self.run.final = EpochResult(0, train, **metrics._asdict())
            self.run.best = self.run.best.after(0, metrics.validation["loss"])
            self.run.chosen["best-epoch"] = 0
            self.mark_best()

    def _steps(
        self,
        problem: TrainingProblem,
        boosting: Boosting,
        growing: Mapping[str, TrainedTable],
        bagged: list[str],
        **linear: bool,
    ) -> Generator[Requests, Replies, list["Step"]]:
        """Let the tables grow trees, or fit linear models; return steps along them.

        For ``bagged`` tables, also along the average of their shards' trees; ``linear``
        are the fields of the request that ask for linear models.
        """
        # of scores: two in an epoch, each with a mask of its own
        number = SCORES_PER_EPOCH * self.run.epoch
        sends_scores = self._sends_own_scores or not bagged
        sharded = [name for name, table in growing.items() if len(table.parts) > 1]
        pooled = self._tables_to_pool(sharded if linear else bagged)
        request = BoostRequest(
            growth=self._growth,
            **linear,
            lengths=dict(self._lengths),
            is_bagged=self._is_bagged,
            is_best=self.run.best.is_last,
            sends_scores=sends_scores,
            bagged=bagged,
            pooled=pooled,
            scores_number=number,
            parts=_derivatives(boosting, growing),
        )
        replies = yield self.run.request(ask(request, problem.parts))
        steps = []
        if linear or (sends_scores and not pooled):
            steps.append(_step(problem, boosting, growing, replies))
        parts: dict[int, BagPart] = {}
        for name, table in growing.items():
            trees = {
                str(part.number): sealed
                for part in table.parts
                if (sealed := getattr(replies.parts.get(part.number), "sealed", None))
                is not None
            }
            is_own = name not in bagged or len(trees) < len(table.parts)
            shared_trees = {} if is_own else trees
            parts |= table.for_all(BagPart(is_own=is_own, trees=shared_trees))
        if not all(part.is_own for part in parts.values()):
            bag = BagRequest(
                growth=self._growth,
                scores_number=number + 1,
                pooled=pooled,
                parts=parts,
            )
            replies = yield self.run.request(ask(bag, problem.parts))
            steps.append(_step(problem, boosting, growing, replies, is_bagged=True))
        if not steps:
            raise ReplyError(
                f"a shard of {', '.join(bagged)} has sealed no trees for the others"
            )
        return steps

    def _choice(self, step: "Step", bagged: Sequence[str]) -> str:
        """Return how the shards of tables have trained in an epoch."""
        if not step.is_bagged:
            return LOCAL
        pooled = self._tables_to_pool(bagged)
        if pooled and len(pooled) < len(bagged):
            return f"{BAGGED}, but {POOLED} for {', '.join(pooled)},"
        return POOLED if pooled else BAGGED

    def judge(self, problem: TrainingProblem) -> str:
        """Return the verdict: the training loss of trees falls for ever."""
        del problem
        if self.settings.validation_share:
            return ""
        return "not judged: no rows validate; validation-fraction = 0.1 holds some out"

    def outcome_of(self, replies: Replies, problem: TrainingProblem) -> Outcome:
        """Return the outcome; warn if a linear model is better on the same rows."""
        self._compare_with_saved(problem)
        outcome = super().outcome_of(replies, problem)
        divided = self._division.of_epoch(self.run.final.epoch)
        return replace_fields(outcome, divided=divided)

    def _compare_with_saved(self, problem: TrainingProblem) -> None:
        """Compare with linear models of the label that are tested on the same rows.

        They take rounds of their own: what this home folder has of them costs none.
        """
        loss = self.run.final.test.get("loss")
        if loss is None:
            return
        label = (self._label, problem.response.loss, problem.classes)
        linear = [
            model
            for model in manifest.saved_models(home_folder())
            if model.tested == self.run.tested_digest
            and (model.label, model.loss, model.classes) == label
            and all(table.kind == LINEAR for table in model.tables)
            and "loss" in model.test
        ]
        if not linear:
            self.run.chosen["linear-model"] = NO_LINEAR
            return
        best = min(linear, key=lambda model: model.test["loss"])
        self.run.chosen["linear-model"] = str(best.model)
        if loss - best.test["loss"] > NOTABLE_FALL * abs(loss):
            name = problem.response.headline
            figures = (
                metrics.get(name, math.nan)
                for metrics in (self.run.final.test, best.test)
            )
            self.run.warn(BEHIND_LINEAR % (best.model, name, *figures))

    def _choose(self) -> None:
        """Record the choices that settings leave to the number of rows."""
        self.run.chosen |= {
            "trees-per-round": self._growth.trees,
            "leaves": self._growth.leaves,
            "patience": self._patience,
        }

    @property
    def _growth(self) -> Growth:
        """The growth of trees: the settings, or defaults by the rows."""
        settings = self.settings
        is_validated = self.settings.validation_share > 0.0
        values = settings.of(BoostSettings)
        # without validation rows there are few epochs
        if is_validated:
            trees = defaults.trees_by_rows(self._joined_rows)
        else:
            trees = defaults.TREES
        most = defaults.LEAVES_OF_REST if settings.start else defaults.LEAVES
        return Growth(
            trees=values.trees_per_round or trees,
            leaves=values.leaves or defaults.leaves_by_rows(self._joined_rows, most),
            rate=values.tree_rate,
            least_rows=values.min_rows_per_leaf,
            seed=model_seed(settings.seed, "trees") >> 1,
        )

    @property
    def _patience(self) -> int:
        settings = self.settings
        if settings.patience or not settings.validation_share:
            return settings.patience
        return defaults.patience_by_trees(self._growth.trees)


class TablePuppetBoost(TrainingStrategy):
    """Train boosted trees over the result of a query."""

    name = "boost"
    method_type = Boost


def models_text(settings: Mapping[str, object]) -> str:
    """Return the name of the trained models.

    >>> models_text({"boost-from": "linear@1"})
    'boosted trees from linear@1'
    """
    start = settings.get("boost-from")
    if not start:
        return "boosted trees"
    return f"boosted trees from {start}"


def check_same_rows(
    model: manifest.Manifest, joined: JoinedTables, held_out: str, tested: str
) -> None:
    """Refuse a model of another label, or one that has trained on the rows that test.

    It may have trained on those that validate: they flatter it, and trees the less.
    """
    label = manifest.label_text(joined.bound.fragments_of(joined.bound.label_table))
    aspects = {
        "label": (model.label, label),
        "loss": (model.loss, joined.objective.name),
        "classes": (model.classes, joined.labels.classes),
        "held-out rows": (
            model.tested or model.held_out,
            tested if model.tested else held_out,
        ),
    }
    different = [name for name, (old, new) in aspects.items() if old != new]
    if different:
        raise SettingsError(
            f"boost-from: model {model.model} was trained with other "
            f"{', '.join(different)}: train both with one query, task, seed, "
            "test-split and test-fraction"
        )


class Step(NamedTuple):
    """A step along new trees: its lengths, by table and direction, and its result.

    ``directions`` are names of vectors over the joined rows.
    """

    by_table: dict[str, float]
    lengths: FloatArray
    directions: list[str]
    has_split: bool
    metrics: HeldOutMetrics
    is_bagged: bool = False

    def none(self, problem: TrainingProblem) -> "Step":
        """Return the step of length 0, after which nothing has changed."""
        return self._replace(
            by_table=dict.fromkeys(self.by_table, 0.0),
            lengths=np.zeros_like(self.lengths),
            metrics=problem.metrics_of_held_out(),
        )

    @property
    def validation_loss(self) -> float:
        """The loss of the validation rows, 0 without any."""
        return self.metrics.validation.get("loss", 0.0)


def _step(
    problem: TrainingProblem,
    boosting: Boosting,
    growing: Mapping[str, TrainedTable],
    replies: Replies,
    *,
    is_bagged: bool = False,
) -> Step:
    """Return the best step along the values of new trees.

    Of masked scores only the sum over all tables has a meaning.
    """
    scores = {name: table.gather_scores(replies) for name, table in growing.items()}
    if problem.fixed_point:
        sums = [scores]
    else:
        sums = [{name: values} for name, values in scores.items()]
    kind = BAGGED if is_bagged else LOCAL
    directions = [f"{kind} direction {number}" for number in range(len(sums))]
    local = dict(zip(directions, sums, strict=True))
    held_out = problem.held_out_rows
    read = problem.read_sums
    has_split = [
        add_direction(problem.rows, name, read, each) for name, each in local.items()
    ]
    lengths = boosting.lengths(directions)
    result = SCORES
    if held_out is not None:
        for name, each in local.items():
            add_direction(held_out, name, read, each)
        result = f"{kind} scores"
        step_along(held_out, lengths, directions, result)
    by_table = dict(
        zip(growing, np.broadcast_to(lengths, len(growing)).tolist(), strict=True)
    )
    metrics = problem.metrics_of_held_out(result)
    return Step(by_table, lengths, directions, any(has_split), metrics, is_bagged)


def _derivatives(
    boosting: Boosting, growing: Mapping[str, TrainedTable]
) -> dict[int, BoostStep]:
    """Return the derivatives' sums over each row's joined rows, by part."""
    steps: dict[int, BoostStep] = {}
    for name, (gradient, hessian) in boosting.derivatives(growing).items():
        table = growing[name]
        hessians: Mapping[int, AnyArray] = {}
        if hessian is not None:
            hessians = table.scatter_rows(hessian)
        steps |= {
            number: BoostStep(gradient=rows, hessian=hessians.get(number))
            for number, rows in table.scatter_rows(gradient).items()
        }
    return steps
