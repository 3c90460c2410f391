"""Solving at the server over the sampled rows that the sites send.

After the set-up there are three messages, in one epoch. ``rows`` brings the rows of the
sample (their encoded features, or local clusters of them); the server solves;
``consensus`` sets the solution as the parameters of the sites' models, and brings the
scores of the sampled and the held-out rows, so that these models are measured, saved
and used like those of the other methods.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from strategies.disclosures import DisclosureValues
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.replies import array_of
from strategies.run.strategy import EpochResult
from strategies.setup.problem import TrainedTable, TrainingProblem
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import TableSize, Tally, Traffic, shards_of
from tp_flower.arrays import FloatArray
from tp_flower.joins.mapping import TableMapping
from tp_flower.methods.coreset.messages import TRAIN_ROWS, RowsRequest, SampledRows
from tp_flower.methods.coreset.settings import CoresetSettings
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import (
    CommonParameters,
    ConsensusRequest,
    ConsensusUpdate,
)
from tp_flower.settings import Settings
from tp_flower.settings.declare import AUTO

EVALUATE: Final = "evaluate"  # the round that brings scores is no training
MESSAGES: Final = (Action.PREPARE, TRAIN_ROWS, Action.CONSENSUS)

Solve = Callable[[TrainingProblem, Replies, FloatArray], Mapping[str, FloatArray]]
"""From the sites' rows to the parameters of every table's model, (p,).

The weights (k,) belong to the sampled joined rows, and have mean 1."""


def form_values(settings: Settings) -> DisclosureValues:
    """Return the values of names that the disclosures of sampled rows use."""
    form = settings.rules.sends(settings)
    values = {"sends_rows": form == SAMPLED_ROWS, "sends_centres": form == CENTRES}
    return DisclosureValues(values)


def solver_of(settings: Settings) -> str:
    """Return the solver that the settings name, or the first one of the method."""
    solver = settings.of(CoresetSettings).coreset_solver
    if solver == AUTO:
        return settings.method.solvers[0]
    return solver


def solve_on_rows(
    run: TrainingStrategy, problem: TrainingProblem, solve: Solve
) -> Generator[Requests, Replies, None]:
    """Ask for the rows, solve, set the models and measure them."""
    settings = run.settings
    run.chosen["coreset-solver"] = solver_of(settings)
    clusters = settings.of(CoresetSettings).clusters
    rows = RowsRequest(seed=settings.seed, clusters=clusters)
    replies = yield run.request(ask(rows, problem.parts))
    weights = problem.weighting.train_rows
    if weights is None:
        weights = np.ones(problem.train.joined_rows)
    parameters = solve(problem, replies, weights)
    common: dict[int, CommonParameters] = {}
    for name, table in problem.tables.items():
        common |= table.for_all(CommonParameters(parameters[name]))
    message = ConsensusRequest(evaluate=True, scores_number=1, parts=common)
    replies = yield run.request(replace(ask(message, problem.parts), phase=EVALUATE))
    scores = {
        name: table.gather_scores(replies) for name, table in problem.tables.items()
    }
    problem.gather(scores)
    train = problem.train_metrics()
    held_out = problem.held_out_metrics(scores)
    run.finish_epoch(EpochResult(1, train, **held_out._asdict()))


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


def epoch_traffic(tables: Sequence[TableSize], settings: Settings) -> Traffic:
    """Return the traffic of solving on sampled rows, or on centres of clusters."""
    tally = Tally()
    is_rows = settings.rules.sends(settings) == SAMPLED_ROWS
    fields = ("rows",) if is_rows else ("centres", "nearest")
    for table, shard in shards_of(tables):
        # a centre per output; a shard with fewer rows has fewer
        sizes = table.sizes(shard) | {"clusters": table.outputs, "scored": shard.total}
        tally.add_up(sizes, SampledRows, *fields)
        tally.add_up(sizes, ConsensusUpdate, "scores")
        tally.add_down(sizes, CommonParameters, "parameters")
    return tally.traffic(rounds=2)
