"""TablePuppetBoost: boosted trees over joins, in a handful of rounds.

One epoch costs one round: the loss's first two derivatives go down, summed over the
joined rows of each row; what the new trees add to the scores comes up. The shards of a
table grow trees of their own. See :mod:`tp_flower.learning.boosting`.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from strategies.inference import manifest
from strategies.inference.scoring import Joined, score
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.strategy import EpochResult, RoundListener
from strategies.setup.joined_rows import JoinedRows
from strategies.setup.problem import TrainedTable, TrainingProblem
from strategies.training.base import JoinStrategy
from strategies.training.prepare import Preparation, model_seed
from strategies.training.traffic import TableSize, Traffic, boost_epoch
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SettingsError
from tp_flower.files import home_folder
from tp_flower.learning.boosting import Boosting
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.methods import TREES, Growth
from tp_flower.model_names import find_version
from tp_flower.protocol.boost_messages import BoostRequest, BoostStep
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.settings.run import STOP
from tp_flower.splits import TRAIN

NO_SPLIT: Final = (
    "no table's trees have a split, so that all rows get one score: lower min-rows-per-leaf (%d)"
)


class TablePuppetBoost(JoinStrategy):
    """Train boosted trees over the result of a query."""

    name = "boost"
    messages = (Action.PREPARE, Action.BOOST)

    _lengths: Mapping[str, float] = {}
    _start: tuple[FloatArray, FloatArray] | None = None

    def __init__(
        self,
        query: Query,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        super().__init__(query, settings, on_round, **overrides)
        if name := self.settings.boost_from:
            # a run that resumes must not take a later version
            start = str(find_version(home_folder(), name))
            self.settings = self.settings.with_fields(boost_from=start)

    def run_messages(self, *, is_sharded: bool) -> tuple[Action, ...]:
        """Return a run's messages after ``extract``, up to the one that ends it."""
        further = (Action.SCORE,) if self.settings.boost_from else ()
        return (*further, *super().run_messages(is_sharded=is_sharded))

    def score_start(self, joined: JoinedRows) -> Generator[Requests, Replies, None]:
        """Score the joined rows with the model to start from, if there is one."""
        if not self.settings.boost_from:
            return
        model = manifest.resolve(home_folder(), self.settings.boost_from)
        manifest.check_query(model, joined.bound)
        check_same_rows(model, joined, self.held_out_digest)
        missing = manifest.find_missing(model, self.inventory)
        manifest.without_missing(model, joined.bound, missing, STOP)
        rows = Joined(joined.bound, joined.extracted, joined.mapping, joined.steps, missing)
        scores = yield from score(rows, model, self.settings, self.inventory)
        is_train = joined.subset == TRAIN
        self._start = scores[is_train], scores[~is_train]

    def choose_update(self, *_: Any, **__: Any) -> Update:
        """Let every shard grow trees of its own."""
        return Update.LOCAL

    def model_spec(self, preparation: Preparation, table: str) -> ModelSpec:
        """Return trees for every table."""
        spec = preparation.spec(table)
        return replace(spec, kind=TREES, intercept=False)

    def epoch_traffic(self, tables: Sequence[TableSize], *_: Any, **__: Any) -> Traffic:
        """Return the traffic of an epoch."""
        return boost_epoch(tables)

    def last_request(self) -> FinishRequest:
        """Return the request that ends the run; the last trees are added."""
        return replace(super().last_request(), lengths=dict(self._lengths))

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Run the epochs, until the validation rows say that it is enough.

        Where scores leave in the clear, a table whose step is 0 grows no more trees.
        """
        weights, base = problem.weighting.train_rows, problem.base_score
        constant = np.tile(base, (len(problem.test_labels), 1))
        start, test = self._start or (base, constant)
        boosting = Boosting(problem.loss, problem.train_labels, weights, start)
        growing, self._lengths = dict(problem.tables), {}
        for epoch in range(1, self.settings.epochs + 1):
            request = BoostRequest(
                growth=self._growth,
                lengths=dict(self._lengths),
                is_best=self.best.is_last,
                scores_number=self.epoch,
                parts=_steps(problem, growing, *boosting.derivatives()),
            )
            replies = yield self.request(ask(request, problem.parts))
            scores = {name: table.gather_scores(replies) for name, table in growing.items()}
            # of masked scores only the sum over all tables has a meaning
            sums = [{name: values} for name, values in scores.items()]
            sums = [scores] if problem.fixed_point else sums
            directions = [problem.add_up(each) for each in sums]
            lengths = boosting.step(directions)
            if problem.test is not None:
                for length, each in zip(lengths, sums, strict=True):
                    test += length * problem.add_up(each, is_tested=True)
            self._lengths = {
                name: float(length)
                for each, length in zip(sums, lengths, strict=True)
                for name in each
            }
            held_out = problem.metrics_of_held_out(test)._asdict()
            train = problem.train_metrics(boosting.scores)
            self.finish_epoch(EpochResult(epoch, train, **held_out))
            growing = {name: growing[name] for name, a in self._lengths.items() if a}
            has_split = any(direction.any() for direction in directions)
            if epoch == 1 and not has_split:
                self.warn(NO_SPLIT % self.settings.min_rows_per_leaf)
            if self.best.is_over or not growing or not has_split:
                return

    def judge(self, problem: TrainingProblem) -> str:
        """Return the verdict: the training loss of trees falls for ever."""
        if self.settings.validation_share:
            return super().judge(problem)
        others = "; so must the model that it goes on from" if self.settings.boost_from else ""
        return f"not judged: no rows validate; validation-fraction = 0.1 holds some out{others}"

    @property
    def _growth(self) -> Growth:
        settings = self.settings
        return Growth(
            trees=settings.trees_per_round,
            leaves=settings.leaves,
            rate=settings.tree_rate,
            least_rows=settings.min_rows_per_leaf,
            seed=model_seed(settings, "trees") >> 1,
        )


def check_same_rows(model: manifest.Manifest, joined: JoinedRows, held_out: str) -> None:
    """Refuse a model of another label, or one that has trained on held-out rows."""
    label = manifest.label_text(joined.bound.fragments_of(joined.bound.label_table))
    aspects = {
        "label": (model.label, label),
        "loss": (model.loss, joined.loss.name),
        "classes": (model.classes, joined.labels.classes),
        "held-out rows": (model.held_out, held_out),
    }
    different = [name for name, (old, new) in aspects.items() if old != new]
    if different:
        raise SettingsError(
            f"boost-from: model {model.model} was trained with other {', '.join(different)}: train "
            "both with one query, seed, test-split, test-fraction and validation-fraction"
        )


def _steps(
    problem: TrainingProblem,
    growing: Mapping[str, TrainedTable],
    gradient: FloatArray,
    hessian: FloatArray,
) -> dict[int, BoostStep]:
    """Return the derivatives' sums over each row's joined rows, by part."""
    steps: dict[int, BoostStep] = {}
    is_constant = problem.loss.is_regression
    for name, table in growing.items():
        rows = problem.train.tables[name]
        gradients = table.scatter_rows(rows.segment_sum(gradient))
        hessians: Mapping[int, AnyArray] = {}
        if not is_constant:
            hessians = table.scatter_rows(rows.segment_sum(hessian))
        steps |= {
            number: BoostStep(gradient=sums, hessian=hessians.get(number))
            for number, sums in gradients.items()
        }
    return steps
