"""SolvedStrategy: the server solves over the sampled rows that the sites send.

After the set-up there are three messages, in one epoch. ``rows`` brings the rows of the
sample (their encoded features, or local clusters of them); the server solves;
``consensus`` sets the solution as the parameters of the sites' models, and brings the
scores of the sampled and the held-out rows, so that these models are measured, saved
and used like those of the other strategies.
"""

import math
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from msgspec import structs

from strategies.methods.coreset.drawing import restrict_to_sample
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.replies import array_of, refuse
from strategies.run.strategy import EpochResult
from strategies.setup.extract import Extracted
from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import CoresetSample, TrainedTable, TrainingProblem
from strategies.setup.splitting import Split
from strategies.training.base import JoinStrategy
from strategies.training.prepare import Preparation
from strategies.training.traffic import TableSize, Traffic, solved_epoch
from tp_flower.arrays import AnyArray, BoolArray, FloatArray
from tp_flower.errors import QueryError
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.models.local_model import CENTRES as CENTRES_MODEL
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.methods.coreset.importance import (
    CLUSTERS,
    LEAST_GAMMA_SQUARED,
    augmented,
    gamma,
)
from tp_flower.methods.coreset.messages import TRAIN_ROWS, RowsRequest
from tp_flower.methods.coreset.solvers import distdim, solve, weighted_kmeans
from tp_flower.objectives import KMEANS, Objective, Target, make_objective
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol import training_messages
from tp_flower.protocol.messages import Action
from tp_flower.query import BoundQuery, Unlabelled
from tp_flower.randomness import Stream, generator
from tp_flower.settings.run import AUTO
from tp_flower.settings.training import DISTDIM

EVALUATE = "evaluate"  # the round that brings scores is no training


class SolvedStrategy(JoinStrategy):
    """Base of the methods in which the server solves over a coreset."""

    messages = (Action.PREPARE, TRAIN_ROWS, Action.CONSENSUS)

    def choose_update(self, *_: Any, **__: Any) -> training_messages.Update:
        """Let the server set the models."""
        return training_messages.Update.GIVEN

    def outline(self) -> training_messages.Outline:
        """Return the schedule, with the form in which sampled rows leave."""
        return structs.replace(super().outline(), sends=self.sends)

    def baseline(self, _: TrainingProblem) -> float:
        """Return infinity: a solver at the server does not diverge."""
        return math.inf

    @property
    def sends(self) -> str:
        """The form in which sampled rows leave."""
        return CENTRES if self.settings.coreset_solver == DISTDIM else SAMPLED_ROWS

    @property
    def solver(self) -> str:
        """The solver that the settings name, or the first one of the strategy."""
        solver = self.settings.coreset_solver
        return self.settings.method.solvers[0] if solver == AUTO else solver

    @abstractmethod
    def solve(
        self, problem: TrainingProblem, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return the parameters of every table's model, (p,).

        ``weights`` (k,) belong to the sampled joined rows, and have mean 1.
        """

    def epoch_traffic(self, tables: Sequence[TableSize], _: int) -> Traffic:
        """Return the traffic of the only epoch."""
        return solved_epoch(tables, self.sends)

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Ask for the rows, solve, set the models and measure them."""
        self.chosen["coreset-solver"] = self.solver
        rows = RowsRequest(seed=self.settings.seed, clusters=self.settings.clusters)
        replies = yield self.request(ask(rows, problem.parts))
        weights = problem.weighting.train_rows
        parameters = self.solve(
            problem,
            replies,
            np.ones(problem.train.joined_rows) if weights is None else weights,
        )
        common: dict[int, training_messages.CommonParameters] = {}
        for name, table in problem.tables.items():
            common |= table.for_all(
                training_messages.CommonParameters(parameters[name])
            )
        message = training_messages.ConsensusRequest(
            evaluate=True, scores_number=1, parts=common
        )
        replies = yield self.request(
            replace(ask(message, problem.parts), phase=EVALUATE)
        )
        scores = {
            name: table.gather_scores(replies) for name, table in problem.tables.items()
        }
        problem.gather(scores)
        train = problem.train_metrics()
        self.finish_epoch(
            EpochResult(1, train, **problem.held_out_metrics(scores)._asdict())
        )


def joined_rows(
    mapping: TableMapping, tables: Mapping[str, TrainedTable], replies: Replies
) -> dict[str, FloatArray]:
    """Return, by table, the features behind each sampled joined row, (k, d_i).

    A joined row that lacks a row of a LEFT JOINed table has zeros there, which add
    nothing to a linear score.
    """
    blocks = {}
    for name, table in tables.items():
        features = np.zeros((table.total_rows, table.features))
        for part, rows in zip(table.parts, table.rows, strict=True):
            shape = (rows.trained, table.features)
            features[rows.trained_slice] = array_of(replies, part, SAMPLED_ROWS, shape)
        blocks[name] = mapping.tables[name].expand(features)
    return blocks


class CoresetKMeans(SolvedStrategy):
    """Cluster the result of a query by means of a coreset.

    A label in the query is ignored, and the centres are tested on all joined rows.
    """

    name = "coreset-kmeans"
    has_label = False
    importance = CLUSTERS

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns, without its label."""
        bound = self.query.bind(schemas, Unlabelled(keeps_weight=True))
        if bound.outer:
            raise QueryError(
                f"strategy {self.name!r} clusters whole rows, but the query LEFT JOINs "
                f"{', '.join(sorted(bound.outer))}: join it with JOIN"
            )
        return bound

    def split(self, bound: BoundQuery, _: Extracted, mapping: TableMapping) -> Split:
        """Hold out no rows."""
        rows = mapping.tables[bound.label_table].rows
        return Split(np.zeros(mapping.joined_rows, np.uint8), np.zeros(rows, np.bool_))

    def read_labels(self, extracted: Extracted, bound: BoundQuery) -> Target:
        """Return labels without columns, (n, 0), with the names of the clusters."""
        names = tuple(map(str, range(self.settings.clusters)))
        return Target.without_label(extracted.table_rows[bound.label_table], names)

    def choose_objective(self, target: Target, _: BoolArray) -> Objective:
        """Return the objective whose scores are distances to the centres."""
        return make_objective(KMEANS, target)

    def model_spec(self, preparation: Preparation, _: str) -> ModelSpec:
        """Return a table's coordinates of the centres."""
        return ModelSpec(kind=CENTRES_MODEL, outputs=preparation.objective.outputs)

    def restrict(self, joined: JoinedTables, sample: CoresetSample) -> JoinedTables:
        """Return the joined rows restricted to a coreset; all of them are tested."""
        all_rows = np.arange(joined.mapping.joined_rows)
        restricted = restrict_to_sample(joined, sample.sample, all_rows)
        weighting = replace(restricted.weighting, test=joined.weighting.train_rows)
        return replace(restricted, weighting=weighting)

    def solve(
        self, problem: TrainingProblem, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return the centres' coordinates at every table."""
        rng = generator(self.settings.seed, Stream.SOLVE)
        clusters = self.settings.clusters
        if self.solver == DISTDIM:
            # for each sampled joined row its local centre, by table
            nearest, local = [], []
            for name, table in problem.tables.items():
                labels, of_table = _table_clusters(table, replies, clusters)
                nearest.append(labels[problem.train.tables[name].row_of])
                local.append(of_table)
            centres = distdim(np.stack(nearest, axis=1), local, weights, clusters, rng)
        else:
            blocks = joined_rows(problem.train, problem.tables, replies)
            points = np.concatenate(list(blocks.values()), axis=1)
            centres = weighted_kmeans(points, weights, clusters, rng)
        self.chosen["clusters"] = len(centres)
        # fewer distinct rows than clusters: repeating a centre changes no distance
        centres = centres[np.minimum(np.arange(clusters), len(centres) - 1)]
        edges = np.cumsum([table.features for table in problem.tables.values()])
        coordinates = np.split(centres, edges[:-1], axis=1)
        return {
            name: block.ravel()
            for name, block in zip(problem.tables, coordinates, strict=True)
        }


def _table_clusters(
    table: TrainedTable, replies: Replies, clusters: int
) -> tuple[AnyArray, FloatArray]:
    """Return each row's local centre (n_i,), and the local centres of all shards."""
    nearest = np.zeros(table.total_rows, np.int64)
    centres = np.zeros((0, table.features))
    for part, rows in zip(table.parts, table.rows, strict=True):
        of_shard = array_of(replies, part, "centres", (None, table.features))
        labels = array_of(replies, part, "nearest", (rows.trained,))
        count = len(of_shard)
        if count > clusters:
            raise refuse(part, f"{count} centres, but was asked for {clusters} at most")
        if labels.size and int(labels.max()) >= count:
            raise refuse(part, f"centre numbers beyond its {count} centres")
        nearest[rows.trained_slice] = labels + np.int64(len(centres))
        centres = np.concatenate([centres, of_shard])
    return nearest, centres


class CoresetRidge(SolvedStrategy):
    """Fit a linear regression to the result of a query by means of a coreset."""

    name = "coreset-ridge"

    def choose_objective(self, target: Target, is_trained: BoolArray) -> Objective:
        """Return the squared loss, the one that is solved for."""
        objective = super().choose_objective(target, is_trained)
        if not objective.has_constant_hessian:
            raise QueryError(
                f"strategy {self.name!r} is for the squared loss of numbers, not for "
                f"loss {objective.name!r}: use admm or sgd, with a coreset-size"
            )
        return objective

    def solve(
        self, problem: TrainingProblem, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return every table's coefficients; the intercept is in the label table's."""
        blocks = joined_rows(problem.train, problem.tables, replies)
        targets = problem.objective.target.numbers - problem.base_score[0]
        self._measure(problem, blocks, targets, weights)
        theta = solve(
            np.concatenate(list(blocks.values()), axis=1),
            targets,
            weights,
            l2=self.settings.l2,
            l1=self.settings.l1,
            solver=cast(Literal["exact", "saga"], self.solver),
        )
        parameters, start = {}, 0
        for name, table in problem.tables.items():
            stop = start + table.features
            intercept = theta[-1:] if table.has_intercept else theta[:0]
            parameters[name] = np.append(theta[start:stop], intercept)
            start = stop
        return parameters

    def _measure(
        self,
        problem: TrainingProblem,
        blocks: Mapping[str, FloatArray],
        targets: FloatArray,
        weights: FloatArray,
    ) -> None:
        """Measure gamma, and warn if the paper's guarantee assumes a larger one."""
        columns = [
            augmented(
                value,
                targets[:, None] if problem.tables[name].has_intercept else None,
                intercept=problem.tables[name].has_intercept,
            )
            for name, value in blocks.items()
        ]
        lowest, coreset = gamma(columns, weights), self.chosen.get("coreset")
        earlier = coreset if isinstance(coreset, Mapping) else {}
        self.chosen["coreset"] = {**earlier, "gamma": lowest}
        if lowest**2 < LEAST_GAMMA_SQUARED:
            self.warn(
                f"gamma is {lowest:.2g}: columns of some table are nearly combinations "
                "of those of others (Assumption 4.1), so that only the robust "
                "guarantee holds, which leaves out a small share of the rows (Remark "
                "4.3)"
            )
