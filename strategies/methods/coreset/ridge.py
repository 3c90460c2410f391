"""CoresetRidge: the server fits a linear regression to the rows that the sites send."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from strategies.disclosures import DisclosureValues
from strategies.methods.coreset.solved import (
    MESSAGES,
    epoch_traffic,
    form_values,
    joined_rows,
    solve_on_rows,
    solver_of,
)
from strategies.run.exchange import Replies, Requests
from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import TrainingProblem
from strategies.training.join_method import JoinMethod
from strategies.training.strategy import TrainingStrategy
from strategies.training.traffic import TableSize, Traffic
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.errors import QueryError
from tp_flower.methods.coreset.importance import (
    LEAST_GAMMA_SQUARED,
    augment,
    gamma,
)
from tp_flower.methods.coreset.solvers import solve
from tp_flower.objectives import Objective, Target
from tp_flower.protocol.training_messages import Update
from tp_flower.settings.rules import general_methods


class Ridge(JoinMethod):
    """Linear regression over a coreset, at the server."""

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

    def choose_objective(self, target: Target, is_trained: BoolArray) -> Objective:
        """Return the squared loss, the one that is solved for."""
        objective = super().choose_objective(target, is_trained)
        if not objective.has_constant_hessian:
            raise QueryError(
                f"strategy {self.name!r} is for the squared loss of numbers, not for "
                f"loss {objective.name!r}: use {general_methods()}, "
                "with a coreset-size"
            )
        return objective

    def _solve(
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
            solver=cast(Literal["exact", "saga"], solver_of(self.settings)),
        )
        parameters = {}
        start = 0
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
            augment(
                value,
                targets[:, None] if problem.tables[name].has_intercept else None,
                intercept=problem.tables[name].has_intercept,
            )
            for name, value in blocks.items()
        ]
        lowest = gamma(columns, weights)
        coreset = self.run.chosen.get("coreset")
        earlier = coreset if isinstance(coreset, Mapping) else {}
        self.run.chosen["coreset"] = {**earlier, "gamma": lowest}
        if lowest**2 < LEAST_GAMMA_SQUARED:
            self.run.warn(
                f"gamma is {lowest:.2g}: columns of some table are nearly combinations "
                "of those of others (Assumption 4.1), so that only the robust "
                "guarantee holds, which leaves out a small share of the rows (Remark "
                "4.3)"
            )


class CoresetRidge(TrainingStrategy):
    """Fit a linear regression to the result of a query by means of a coreset."""

    name = "coreset-ridge"
    method_type = Ridge
