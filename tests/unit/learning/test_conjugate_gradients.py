"""Both halves of conjugate gradients in float64, against those on the joined table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference.training import Centralised, conjugate_gradients
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.conjugate_gradients import Descent, Products
from tp_flower.learning.solvers import RidgeSolver, gram
from tp_flower.losses import make_loss

EPOCHS = 4


class Table:
    """One table: its features with an intercept, rows in the join, and direction."""

    def __init__(self, rng: np.random.Generator, weights, outputs: int) -> None:
        rows, columns = rng.integers(2, 9), rng.integers(1, 4)
        self.rows = TableRows(rng.integers(0, rows, len(weights)), int(rows))
        self.weights = self.rows.segment_sum(weights[:, None])[:, 0]
        self.features = rng.normal(size=(rows, columns + 1))
        self.features[:, -1] = 1.0
        self.penalised = np.arange(columns + 1) < columns
        self.theta = self.direction = self.before = np.zeros((columns + 1, outputs))

    def descend(self, numbers, curvature, l2, tables) -> tuple[np.ndarray, np.ndarray]:
        """Return v on the joined rows, and the products, of w r on the joined rows."""
        joined, mask = len(self.rows.row_of), self.penalised[:, None]
        matrix = gram(self.features[:, :-1], self.weights, intercept=True)
        solver = RidgeSolver.from_gram(matrix, joined, intercept=True)
        moments = self.features.T @ self.rows.segment_sum(numbers)
        gradient = moments / joined + l2 * mask * self.theta
        self.step = -solver.solve(gradient * joined / curvature, curvature, tables * l2)
        penalised = [l2 * mask * self.step, l2 * mask * self.direction]
        others = [gradient, self.before, *penalised]
        self.before = gradient
        products = np.array([np.vdot(other, self.step) for other in others])
        return self.rows.expand(self.features @ self.step), products

    def advance(self, server: Descent) -> None:
        self.direction = self.step + server.conjugacy * self.direction
        self.theta = self.theta + server.length * self.direction


@pytest.mark.parametrize(
    ("name", "classes", "most"), [("squared", 0, 1e-8), ("logistic", 2, 1e-6), ("softmax", 3, 1e-6)]
)
@settings(max_examples=10)
@given(number=st.integers(0, 2**32 - 1))
def test_every_iterate_is_that_on_the_joined_table(name, classes, most, number):
    rng, loss, l2 = np.random.default_rng(number), make_loss(name, classes), 0.1
    weights = rng.uniform(0.5, 2.0, 40)
    weights /= weights.mean()
    count = rng.integers(1, 4)
    tables = {str(n): Table(rng, weights, loss.outputs) for n in range(count)}
    labels = rng.integers(0, classes or 5, 40).astype(float)
    # every class has a row
    labels[:classes] = np.arange(classes)
    base = loss.base_score(labels, weights)
    inputs = {n: table.features[table.rows.row_of] for n, table in tables.items()}
    masks = {n: table.penalised for n, table in tables.items()}
    problem = Centralised(name, inputs, labels, base, l2, masks, weights)
    curvature = float(loss.curvature(base))
    expected = conjugate_gradients(problem, EPOCHS, curvature)
    server = Descent(loss, labels, weights, base)
    for theta in expected[1:]:
        numbers = weights[:, None] * server.derivatives()
        parts = [t.descend(numbers, curvature, l2, count) for t in tables.values()]
        scores, products = (sum(each) for each in zip(*parts, strict=True))
        server.step(scores, Products(*products))
        for table in tables.values():
            table.advance(server)
        actual = np.concatenate([table.theta.ravel() for table in tables.values()])
        np.testing.assert_allclose(actual, theta, atol=most)
