"""CoresetRidge: least squares over a sample of the joined rows, solved at the server.

Algorithm 2 of the paper samples the rows (:mod:`strategies.coresets.draw`); their
encoded features are sent, and scikit-learn solves ridge regression, lasso or elastic
net on them, by the objective of every other strategy:

    (1/N) sum_j w_j/2 (sum_i t_ij theta_i + b - y_j)^2
        + l2/2 ||theta||^2 + l1 ||theta||_1

with the weights of the sample, scaled to mean 1. Where all rows are taken, it is the
fit of the whole join.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, section 4.
"""

from collections.abc import Mapping
from typing import Literal, cast

import numpy as np

from strategies.run.exchange import Replies
from strategies.setup.problem import Federation
from strategies.solvers.base import SolvedStrategy, joined_rows
from tp_flower.arrays import FloatArray
from tp_flower.coresets.assumptions import LEAST_GAMMA_SQUARED, gamma
from tp_flower.coresets.leverage import augmented
from tp_flower.coresets.regression import solve


class CoresetRidge(SolvedStrategy):
    """Fit a linear regression to the result of a query by a coreset of it.

    Args:
        query: the training set.
        settings: of the run; keyword arguments override single ones.
    """

    name = "coreset-ridge"

    def solve(
        self, federation: Federation, replies: Replies, weights: FloatArray
    ) -> Mapping[str, FloatArray]:
        """Return the coefficients of every table; the intercept is the label's."""
        blocks = joined_rows(federation.train, federation.tables, replies)
        targets = federation.train_labels - federation.base_score[0]
        self._measure(federation, blocks, targets, weights)
        theta = solve(
            np.concatenate(list(blocks.values()), axis=1),
            targets,
            weights,
            l2=self.settings.l2,
            l1=self.settings.l1,
            solver=cast(Literal["exact", "saga"], self.solver),
        )
        found, start = {}, 0
        for name, table in federation.tables.items():
            own = theta[start : start + table.features]
            found[name] = np.append(own, theta[-1:] if table.has_intercept else [])
            start += table.features
        return found

    def _measure(
        self,
        federation: Federation,
        blocks: Mapping[str, FloatArray],
        targets: FloatArray,
        weights: FloatArray,
    ) -> None:
        """Measure gamma, and warn where the paper's guarantee asks for more."""
        columns = [
            augmented(
                own,
                targets[:, None] if federation.tables[name].has_intercept else None,
                intercept=federation.tables[name].has_intercept,
            )
            for name, own in blocks.items()
        ]
        found = gamma(columns, weights)
        warnings = []
        if found**2 < LEAST_GAMMA_SQUARED:
            warnings.append(
                f"gamma is {found:.2g}: columns of some table are nearly combinations "
                "of those of others (Assumption 4.1), so that only the robust "
                "guarantee holds, which leaves out a small share of the rows "
                "(Remark 4.3)"
            )
        self.add_facts({"gamma": found}, warnings)
