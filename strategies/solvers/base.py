"""SolvedStrategy: the server solves over the sampled rows that the sites send it.

Three messages after the set-up, in one epoch: ``rows`` brings what the sites tell of
the rows of the sample (their encoded features, or local clusters of them); the server
solves; ``consensus`` sets what it has found as the parameters of the sites' models, and
brings the scores of the sampled and the held-out rows, so that models are measured,
kept and used as those of the other strategies.
"""

from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from strategies.run.exchange import Replies, Request, ask
from strategies.run.reply_checks import array_of
from strategies.setup.disclosures import sent_of_rows
from strategies.setup.problem import Federation, Table
from strategies.training import joins
from strategies.training.base import EpochResult, RelationalStrategy
from strategies.training.prepare import Plan
from strategies.training.unions import gather_scores, scatter_parameters
from tp_flower.arrays import FloatArray
from tp_flower.joins.mapping import TableMapping
from tp_flower.privacy.plan import SAMPLED_ROWS
from tp_flower.protocol import (
    CommonParameters,
    ConsensusRequest,
    RowsRequest,
    Update,
)
from tp_flower.settings import AUTO

EVALUATE = "evaluate"
"""What the round is called that brings scores: its bytes are not those of training."""


class SolvedStrategy(RelationalStrategy):
    """Base of the methods that solve over a coreset at the server.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    def plan(self) -> Plan:
        """Let the server set the models; the sites are told what they will send."""
        return Plan(
            choose_update=lambda *_: Update.GIVEN,
            plan_arrays=lambda *_: {},
            course=lambda: {"sends": sent_of_rows(self.settings)},
        )

    @property
    def solver(self) -> str:
        """The solver that is asked for, or else the first of the strategy's."""
        asked = self.settings.coreset_solver
        return self.settings.method.solvers[0] if asked == AUTO else asked

    @abstractmethod
    def solve(
        self, federation: Federation, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return the parameters of every table's model, (p,).

        Args:
            federation: the training problem.
            replies: to ``rows``.
            weights: (k,), of the sampled joined rows, mean 1.
        """

    def epochs(self, federation: Federation) -> Generator[Request, Replies, None]:
        """Ask for the rows, solve, set the models and measure them."""
        self.chosen["coreset-solver"] = self.solver
        rows = RowsRequest(seed=federation.seed, clusters=self.settings.clusters)
        replies = yield self.request(ask(rows, federation.parts))
        weights = federation.weighting.train_rows
        found = self.solve(
            federation,
            replies,
            np.ones(federation.train.joined_rows) if weights is None else weights,
        )
        common: dict[int, CommonParameters] = {}
        for name, table in federation.tables.items():
            common |= scatter_parameters(table, found[name])
        message = ConsensusRequest(more_rounds=0, evaluate=True, parts=common)
        request = ask(message, federation.parts)
        replies = yield self.request(replace(request, phase=EVALUATE))
        self.local_scores = {
            name: gather_scores(table, replies)
            for name, table in federation.tables.items()
        }
        scores = joins.gather(federation, self.local_scores)
        train = joins.train_metrics(federation, scores)
        test = joins.test_metrics(federation, self.local_scores)
        self.finish_epoch(EpochResult(1, train, test))

    def add_facts(self, facts: Mapping[str, object], warnings: list[str]) -> None:
        """Say more of the coreset in the report.

        Args:
            facts: by name.
            warnings: what of them is to be warned of.
        """
        known = self.chosen.get("coreset")
        own: dict[str, Any] = dict(known) if isinstance(known, Mapping) else {}
        own["warnings"] = [*own.get("warnings", []), *warnings]
        self.chosen["coreset"] = {**own, **facts}


def joined_rows(
    mapping: TableMapping, tables: Mapping[str, Table], replies: Replies
) -> dict[str, FloatArray]:
    """Return by table what is behind each sampled joined row, (k, d_i).

    A joined row without a row of a LEFT JOINed table has zeros there, which add nothing
    to a linear score.

    Raises:
        ReplyError: a part sent other rows than those that it was asked for.
    """
    return {
        name: mapping.tables[name].expand(_table_rows(table, replies))
        for name, table in tables.items()
    }


def _table_rows(table: Table, replies: Replies) -> FloatArray:
    """Return the features of a table's sampled rows, (n_i, d_i); 0 in the others."""
    found = np.zeros((table.total_rows, table.features))
    for part, rows in zip(table.parts, table.rows, strict=True):
        shape = (rows.trained, table.features)
        found[rows.trained_slice] = array_of(replies, part, SAMPLED_ROWS, shape)
    return found
