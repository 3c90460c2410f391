"""Set-up: from a query and the sites' tables to a training problem, in three rounds.

``extract`` brings hashed join keys and labels, from which the server builds the
mapping; ``statistics`` brings what the encoders need, merged exactly over the shards;
where a coreset is trained on, three rounds draw it (:mod:`strategies.coresets.draw`);
``prepare`` sends encoders, multiplicities and the batch plan, and brings what training
starts from. A function with ``yield`` sends a :class:`Request` and receives its
:class:`Replies`.
"""

import math
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.coresets.draw import draw_coreset, restrict_to_sample
from strategies.run.exchange import Part, PartArrays, Replies, Request, ask
from strategies.run.replies import read_statistics, refuse
from strategies.run.sites import Inventory
from strategies.setup.disclosures import audience_of
from strategies.setup.joined_rows import JoinedRows, SplitRows, align, expand
from strategies.setup.problem import Table, TableLayout, TrainingProblem
from strategies.training.operators import checked, gather_scores
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.fitting import fit
from tp_flower.features.statistics import merge_tables
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.label_noise import ClassNoise, NumberNoise
from tp_flower.learning.models.local_model import CENTRES, ModelSpec
from tp_flower.protocol import (
    Outline,
    PersonalisedPart,
    PreparedPart,
    PreparePart,
    PrepareRequest,
    PrivacyTerms,
    StatisticsPart,
    StatisticsRequest,
    Update,
    pack_bits,
)
from tp_flower.query import Query
from tp_flower.settings import Settings

IntArray = npt.NDArray[np.int64]

SQUARED_REACH = {"sgd": 3.0}
"""How far the derivatives of a squared loss reach, in deviations of the label, before
they are clipped. In SGD the bias of a clip at one costs more than the noise of one at
three (test RMSE at epsilon 1 on MovieLens 1.116 and 1.110); in ADMM it does not."""

SetUp = Generator[Request, Replies, TrainingProblem]
UpdateChooser = Callable[[str, int, bool], Update]


@dataclass(frozen=True)
class Plan:
    """What a strategy decides about the set-up.

    Attributes:
        choose_update: (table, shards, is linear) -> how its shards train together.
        plan_arrays: (training mapping, tables) -> arrays sent with ``prepare``.
        course: () -> what the sites plan their releases by, besides the epochs; asked
            for after ``plan_arrays``.
    """

    choose_update: UpdateChooser
    plan_arrays: Callable[[TableMapping, Mapping[str, TableLayout]], PartArrays]
    course: Callable[[], Mapping[str, Any]] = dict


def set_up(query: Query, settings: Settings, plan: Plan, inventory: Inventory) -> SetUp:
    """Run the set-up rounds and return the training problem.

    Raises:
        TPFlowerError: any of its kinds, before any training, if the query does not fit
            the tables or the label does not fit the task.
    """
    joined = yield from align(query, settings, inventory)
    encoders = yield from fit_encoders(joined)
    whole, drawn = joined, None
    if settings.coreset_rows:
        drawn = yield from draw_coreset(joined, encoders, settings)
        joined = restrict_to_sample(joined, drawn.sample)
    if settings.method.is_expanded:
        joined = expand(joined)
    problem = Problem(joined, settings, encoders, whole.train_labels)
    tables, initial_scores = yield from _prepare(problem, plan)
    return TrainingProblem(
        tables=tables,
        train=joined.train,
        test=joined.test,
        train_labels=joined.train_labels,
        test_labels=joined.test_labels,
        loss=joined.loss,
        # the server knows all labels, and a sample may have one class only
        base_score=whole.loss.base_score(
            whole.train_labels, whole.weighting.train_rows
        ),
        initial_scores=initial_scores,
        l2=settings.l2,
        seed=settings.seed,
        classes=joined.labels.classes,
        join_steps=joined.steps,
        source_rows=joined.extracted.table_rows,
        fan_out=fan_out(whole),
        names=joined.names,
        encoders=encoders,
        audience=audience_of(
            joined,
            settings,
            inventory,
            {name: table.update for name, table in tables.items()},
            encoders,
        ),
        weighting=joined.weighting,
        coreset=drawn,
        # of all rows: those of a sample weigh by how they were drawn, too
        weight_facts=whole.weighting.facts(whole.train.joined_rows),
    )


def fit_encoders(
    joined: SplitRows,
) -> Generator[Request, Replies, dict[str, TableEncoder]]:
    """Merge the shards' statistics; the label table's are of its training rows only."""
    extracted, label_table = joined.extracted, joined.bound.label_table
    trained: dict[int, Any] = {}
    start = 0
    for part in extracted.parts[label_table]:
        stop = start + extracted.rows[part.number]
        trained[part.number] = pack_bits(~joined.held_out[start:stop])
        start = stop
    choices = joined.choices
    bodies = {
        part.number: StatisticsPart(
            encoders=choices[part.table].to_json(), rows=trained.get(part.number)
        )
        for part in extracted.all_parts
    }
    replies = yield ask(StatisticsRequest(bodies), extracted.all_parts)
    merged = {
        table: merge_tables(
            [
                read_statistics(
                    replies, part, choices[table], extracted.rows[part.number]
                )
                for part in parts
            ]
        )
        for table, parts in extracted.parts.items()
    }
    return {table: fit(table, own) for table, own in merged.items()}


@dataclass(frozen=True)
class Problem:
    """What ``prepare`` is made from.

    Attributes:
        joined: the joined rows.
        settings: of the run.
        encoders: of every table.
        train_labels: of all joined training rows, of which a sample may be trained on.
    """

    joined: JoinedRows
    settings: Settings
    encoders: Mapping[str, TableEncoder]
    train_labels: FloatArray

    @property
    def label_scale(self) -> float:
        """The size of the loss's derivatives, noise of the labels included.

        Soft targets that allow for noise on a class reach (1 - q) / (p - q).
        """
        if self.joined.loss.name == "squared":
            deviation = float(self.train_labels.std()) or 1.0
            return deviation * SQUARED_REACH.get(self.settings.family, 1.0)
        noise = self.joined.labels.noise
        if not isinstance(noise, ClassNoise):
            return 1.0
        return (1.0 - noise.flip) / noise.contrast

    @property
    def output_scale(self) -> float:
        """The deviation of true labels in regression, 1 in classification."""
        if self.joined.loss.name != "squared":
            return 1.0
        variance = float(self.train_labels.var())
        noise = self.joined.labels.noise
        if isinstance(noise, NumberNoise):
            # of labels that noise has drowned, a hundredth is as good as any guess
            variance = max(variance - noise.variance, 0.01 * variance)
        return math.sqrt(variance)

    def spec(self, table: str) -> ModelSpec:
        """Return the local model of a table."""
        loss = self.joined.loss
        kind = self.settings.model_of(table)
        if self.settings.method.is_clustering:
            return ModelSpec(kind=CENTRES, outputs=loss.outputs)
        return ModelSpec(
            # where no feature says anything, a larger model has nothing to learn
            kind=kind if self.encoders[table].width else "linear",
            outputs=loss.outputs,
            intercept=table == self.joined.bound.label_table,
            hidden_sizes=self.settings.hidden_sizes,
            output_scale=self.output_scale,
            seed=model_seed(self.settings, table),
        )


def model_seed(settings: Settings, table: str) -> int:
    """Return what a table's model starts from: one for all shards, another per table.

    >>> [model_seed(Settings(seed=3), table) for table in "ab"]
    [4056279928, 1758247618]
    """
    return zlib.crc32(f"{settings.seed}/{table}".encode())


def _prepare(
    problem: Problem, plan: Plan
) -> Generator[Request, Replies, tuple[dict[str, Table], dict[str, FloatArray]]]:
    joined, settings = problem.joined, problem.settings
    parts: dict[int, PreparePart] = {}
    updates: dict[str, Update] = {}
    specs = {table: problem.spec(table) for table in joined.compact}
    planned = plan.plan_arrays(joined.train, joined.compact)
    for table, own in joined.compact.items():
        is_linear = specs[table].kind == "linear"
        updates[table] = plan.choose_update(table, len(own.parts), is_linear)
        order: dict[str, Any] = {
            "encoder": problem.encoders[table].to_json(),
            "model": specs[table].to_json(),
            "update": updates[table],
            "joined_rows": joined.train.joined_rows,
            "l2": settings.l2,
            "device": settings.device,
            "label_scale": problem.label_scale,
            "mean_multiplicity": _mean_multiplicity(joined, table),
        }
        if settings.method.is_expanded:
            order["held_out_rows"] = len(joined.test_labels)
        for number, arrays in own.set_up_arrays().items():
            parts[number] = PreparePart(**order, **arrays, **planned.get(number, {}))
    request = PrepareRequest(
        privacy=PrivacyTerms.of(settings.privacy),
        outline=Outline(
            strategy=settings.strategy, epochs=settings.epochs, **plan.course()
        ),
        parts=parts,
    )
    every = [part for own in joined.compact.values() for part in own.parts]
    replies = yield ask(request, every)
    tables, initial = {}, {}
    for name, own in joined.compact.items():
        trained = _table(own, specs[name], updates[name], replies)
        if updates[name] is Update.GRAM:
            trained = _with_gram(trained, replies)
        tables[name] = trained
        has_none = trained.is_linear or trained.update is Update.GIVEN
        zero = np.zeros((trained.total_rows, joined.loss.outputs))
        initial[name] = zero if has_none else gather_scores(trained, replies)
    return tables, initial


def fan_out(joined: JoinedRows) -> dict[str, IntArray]:
    """Return by table the joined rows of each of its rows that is trained on."""
    found = {}
    for table, rows in joined.train.tables.items():
        counts = rows.multiplicity
        found[table] = counts[counts > 0]
    return found


def _mean_multiplicity(joined: JoinedRows, table: str) -> float:
    """Return the mean number of joined rows of a table's rows that are trained on."""
    counts = joined.train.tables[table].multiplicity
    used = counts[counts > 0]
    return float(used.mean()) if len(used) else 1.0


def common_shape(
    parts: Sequence[Part], prepared: Sequence[PreparedPart | PersonalisedPart]
) -> tuple[int, BoolArray]:
    """Return the encoded columns d and the penalised parameters (p,) of all shards.

    Raises:
        ReplyError: a shard has others than the first one.
    """
    first, model = parts[0], prepared[0]
    for part, body in zip(parts, prepared, strict=True):
        if body.features != model.features:
            raise refuse(part, f"another number of features than {first.site!r}")
        if body.penalised.shape != model.penalised.shape:
            raise refuse(part, f"another number of parameters than {first.site!r}")
    return model.features, model.penalised.astype(np.bool_)


def _table(
    own: TableLayout, spec: ModelSpec, update: Update, replies: Replies
) -> Table:
    prepared = [replies.body(part, PreparedPart) for part in own.parts]
    features, penalised = common_shape(own.parts, prepared)
    is_linear = spec.kind == "linear"
    return Table(
        name=own.name,
        parts=own.parts,
        rows=own.rows,
        update=update,
        features=features,
        outputs=spec.outputs,
        has_intercept=spec.intercept,
        is_linear=is_linear,
        # the largest eigenvalue of a sum is at most the sum of the largest
        largest_curvature=sum(body.largest_curvature for body in prepared if is_linear),
        mean_curvature=tuple(body.mean_curvature for body in prepared),
        penalised=penalised,
        gram=None,
        gradient_noise=math.hypot(*(body.gradient_noise or 0.0 for body in prepared)),
    )


def _with_gram(table: Table, replies: Replies) -> Table:
    deviations = [
        replies.body(part, PreparedPart).gram_deviation or 0.0 for part in table.parts
    ]
    width = table.features + int(table.has_intercept)
    total = np.zeros((width, width))
    for index in range(len(table.parts)):
        total += checked(replies, table, index, "gram", (width, width))
    return table.with_gram(total, math.hypot(*deviations))
