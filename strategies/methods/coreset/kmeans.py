"""CoresetKMeans: the server clusters the sampled rows that the sites send."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from strategies.disclosures import DisclosureValues
from strategies.methods.coreset.solved import (
    MESSAGES,
    epoch_traffic,
    form_values,
    joined_rows,
    solve_on_rows,
)
from strategies.run.exchange import Replies, Requests
from strategies.run.replies import array_of, refuse
from strategies.setup.extract import Extracted
from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import TrainedTable, TrainingProblem
from strategies.setup.splitting import Split
from strategies.training.join_method import JoinMethod
from strategies.training.prepare import Preparation
from strategies.training.row_drawing import RowSample
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import TableSize, Traffic
from tp_flower.arrays import AnyArray, BoolArray, FloatArray
from tp_flower.errors import QueryError
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.models.local_model import CENTRES as CENTRES_MODEL
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.methods.coreset.settings import DISTDIM, CoresetSettings
from tp_flower.methods.coreset.solvers import distdim, weighted_kmeans
from tp_flower.objectives import KMEANS, Objective, Target, make_objective
from tp_flower.protocol.training_messages import Update
from tp_flower.query import BoundQuery, Unlabelled
from tp_flower.query.parsing import BESIDE_LABEL
from tp_flower.randomness import Stream, generator


class Clustering(JoinMethod):
    """Clustering over a coreset, at the server."""

    has_label = False
    messages = MESSAGES
    derivatives = 0

    def choose_update(self, *_: Any, **__: Any) -> Update:
        """Let the server set the models."""
        return Update.GIVEN

    def disclosure_values(self, _: JoinedTables) -> DisclosureValues:
        """Return the form in which sampled rows leave."""
        return form_values(self.settings)

    def epoch_traffic(self, tables: Sequence[TableSize], _: int) -> Traffic:
        """Return the traffic of the only epoch."""
        return epoch_traffic(tables, self.settings)

    def epochs(self, problem: TrainingProblem) -> Generator[Requests, Replies, None]:
        """Solve over the rows that the sites send."""
        yield from solve_on_rows(self.run, problem, self._solve)

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns, without its label."""
        bound = self.run.query.bind(schemas, Unlabelled(keeps=BESIDE_LABEL))
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
        names = tuple(map(str, range(self.settings.of(CoresetSettings).clusters)))
        return Target.without_label(extracted.table_rows[bound.label_table], names)

    def choose_objective(self, target: Target, _: BoolArray) -> Objective:
        """Return the objective whose scores are distances to the centres."""
        return make_objective(KMEANS, target)

    def model_spec(self, preparation: Preparation, _: str) -> ModelSpec:
        """Return a table's coordinates of the centres."""
        return ModelSpec(kind=CENTRES_MODEL, outputs=preparation.objective.outputs)

    def restrict(self, joined: JoinedTables, sample: RowSample) -> JoinedTables:
        """Return the joined rows restricted to a coreset; all of them are tested."""
        all_rows = np.arange(joined.mapping.joined_rows)
        restricted = joined.restrict(sample.rows, sample.weights, all_rows)
        weighting = replace(restricted.weighting, test=joined.weighting.train_rows)
        return replace(restricted, weighting=weighting)

    def _solve(
        self, problem: TrainingProblem, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return the centres' coordinates at every table."""
        rng = generator(self.settings.seed, Stream.SOLVE)
        values = self.settings.of(CoresetSettings)
        clusters = values.clusters
        if values.coreset_solver == DISTDIM:
            # for each sampled joined row its local centre, by table
            nearest = []
            local = []
            for name, table in problem.tables.items():
                labels, of_table = _table_clusters(table, replies, clusters)
                nearest.append(problem.train.tables[name].expand(labels))
                local.append(of_table)
            centres = distdim(np.stack(nearest, axis=1), local, weights, clusters, rng)
        else:
            blocks = joined_rows(problem.train, problem.tables, replies)
            points = np.concatenate(list(blocks.values()), axis=1)
            centres = weighted_kmeans(points, weights, clusters, rng)
        self.run.chosen["clusters"] = len(centres)
        # fewer distinct rows than clusters: repeating a centre changes no distance
        centres = centres[np.minimum(np.arange(clusters), len(centres) - 1)]
        edges = np.cumsum([table.features for table in problem.tables.values()])
        coordinates = np.split(centres, edges[:-1], axis=1)
        return {
            name: block.ravel()
            for name, block in zip(problem.tables, coordinates, strict=True)
        }


class CoresetKMeans(TrainingStrategy):
    """Cluster the result of a query by means of a coreset.

    A label in the query is ignored, and the centres are tested on all joined rows.
    """

    name = "coreset-kmeans"
    method_type = Clustering


def models_text(_: Mapping[str, object]) -> str:
    """Return the name of the trained model."""
    return "cluster centres"


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
