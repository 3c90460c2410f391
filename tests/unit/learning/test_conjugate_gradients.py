"""Both halves of conjugate gradients in float64, against those on the joined table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import brentq
from scipy.special import expit

from tests.support.reference.families import Family
from tests.support.reference.training import Centralised, conjugate_gradients
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.joins.rows import JoinedRows
from tp_flower.learning.solvers import RidgeSolver, gram
from tp_flower.methods.cg.conjugate_gradients import (
    Descent,
    Products,
    find_least,
    start_line,
)

EPOCHS = 4


class Table:
    """One table: its features with an intercept, rows in the join, and direction."""

    def __init__(self, rng: np.random.Generator, weights, outputs: int) -> None:
        rows = rng.integers(2, 9)
        columns = rng.integers(1, 4)
        self.rows = TableRows(rng.integers(0, rows, len(weights)), int(rows))
        self.weights = self.rows.segment_sum(weights[:, None])[:, 0]
        self.features = rng.normal(size=(rows, columns + 1))
        self.features[:, -1] = 1.0
        self.penalised = np.arange(columns + 1) < columns
        self.theta = self.direction = self.before = np.zeros((columns + 1, outputs))

    def descend(self, numbers, curvature, l2, tables) -> tuple[np.ndarray, np.ndarray]:
        """Return v on the table's rows, and the products, of sums of w r over them."""
        joined = len(self.rows.row_of)
        mask = self.penalised[:, None]
        matrix = gram(self.features[:, :-1], self.weights, intercept=True)
        solver = RidgeSolver.from_gram(matrix, joined, intercept=True)
        moments = self.features.T @ numbers
        gradient = moments / joined + l2 * mask * self.theta
        self.step = -solver.solve(gradient * joined / curvature, curvature, tables * l2)
        penalised = [l2 * mask * self.step, l2 * mask * self.direction]
        others = [gradient, self.before, *penalised]
        self.before = gradient
        products = np.array([np.vdot(other, self.step) for other in others])
        return self.features @ self.step, products

    def advance(self, server: Descent) -> None:
        self.direction = self.step + server.conjugacy * self.direction
        self.theta = self.theta + server.length * self.direction


@pytest.mark.parametrize(
    ("name", "classes", "most"),
    [("squared", 0, 1e-8), ("logistic", 2, 1e-6), ("softmax", 3, 1e-6)],
)
@settings(max_examples=10)
@given(number=st.integers(0, 2**32 - 1))
def test_every_iterate_is_that_on_the_joined_table(name, classes, most, number):
    rng = default_rng(number)
    loss = Family(name, classes)
    l2 = 0.1
    weights = rng.uniform(0.5, 2.0, 40)
    weights /= weights.mean()
    count = rng.integers(1, 4)
    tables = {str(n): Table(rng, weights, loss.outputs) for n in range(count)}
    labels = rng.integers(0, classes or 5, 40).astype(float)
    # every class has a row
    labels[:classes] = np.arange(classes)
    objective = loss.on(labels, weights)
    base = objective.base_score
    inputs = {n: table.features[table.rows.row_of] for n, table in tables.items()}
    masks = {n: table.penalised for n, table in tables.items()}
    problem = Centralised(name, inputs, labels, base, l2, masks, weights)
    curvature = float(objective.curvature(base))
    expected = conjugate_gradients(problem, EPOCHS, curvature)
    server = started(tables, objective, base)
    for theta in expected[1:]:
        sums = server.derivatives()
        parts = [
            table.descend(sums[name], curvature, l2, count)
            for name, table in tables.items()
        ]
        scores, products = zip(*parts, strict=True)
        local = dict(zip(tables, scores, strict=True))
        server.step(local, np.asarray, Products(*sum(products)))
        for table in tables.values():
            table.advance(server)
        actual = np.concatenate([table.theta.ravel() for table in tables.values()])
        assert_allclose(actual, theta, atol=most)
        squares = sum(np.sum(t.theta[t.penalised] ** 2) for t in tables.values())
        assert server.penalty == pytest.approx(l2 / 2.0 * squares, abs=10 * most)


def _noiseless(rng):
    """Two tables of a label that is linear in both, and their start."""
    tables = [Table(rng, np.ones(40), 1) for _ in range(2)]
    parts = [t.rows.expand(t.features @ rng.normal(size=t.theta.shape)) for t in tables]
    labels = np.sum(parts, axis=0)[:, 0]
    tables = {str(number): table for number, table in enumerate(tables)}
    base = np.array([labels.mean()])
    return tables, started(tables, Family("squared").on(labels), base)


def started(tables, objective, base) -> Descent:
    mapping = TableMapping({name: table.rows for name, table in tables.items()})
    rows = JoinedRows(mapping, objective.vectors)
    start_line(rows, base)
    return Descent(rows, objective, base)


def _scores(server):
    return server.rows.whole("scores")


def _labels(server):
    return server._objective.target.numbers


def _loss(server):
    return np.mean((_scores(server)[:, 0] - _labels(server)) ** 2)


def _exchange(tables, server, unit):
    """Take a step whose scores are rounded to a unit; return the rounding."""
    sums = server.derivatives()
    local = {}
    products = 0.0
    for name, table in tables.items():
        scores, numbers = table.descend(sums[name], 1.0, 0.0, len(tables))
        local[name] = np.rint(scores / unit) * unit if unit else scores
        products = products + numbers
    rounding = unit * np.sqrt(len(tables) / 12.0)
    server.step(local, np.asarray, Products(*products), rounding)
    for table in tables.values():
        table.advance(server)


def test_the_drift_is_by_how_much_the_servers_scores_are_off():
    ratios = []
    for seed in range(40):
        tables, server = _noiseless(default_rng(seed))
        for _ in range(3):
            _exchange(tables, server, 1e-3)
        exact = sum(
            table.rows.expand(table.features @ table.theta) for table in tables.values()
        )
        error = _scores(server) - _labels(server).mean() - exact
        ratios.append(np.sqrt(np.mean(error**2)) / server.drift)
    # rows of a table share their error: 2 to 8 of them scatter by about a quarter
    assert np.median(ratios) == pytest.approx(1.0, abs=0.25)


def test_scores_that_the_rounding_hides_take_no_step_and_arrive_finer_next():
    tables, server = _noiseless(default_rng(0))
    _exchange(tables, server, 0.0)
    before = _scores(server).copy()
    thetas = [table.theta for table in tables.values()]
    hidden = 10.0 * server.size
    _exchange(tables, server, hidden)
    assert server.length == 0.0
    assert_array_equal(_scores(server), before)
    for table, theta in zip(tables.values(), thetas, strict=True):
        assert_array_equal(table.theta, theta)
    assert server.drift < 1e-6
    loss = _loss(server)
    _exchange(tables, server, 1e-4 * server.size)
    assert server.conjugacy == 0.0  # it begins anew
    assert _loss(server) < loss


def test_a_noiseless_label_ends_where_rounding_does():
    tables, server = _noiseless(default_rng(0))
    norms = []
    ends = []
    for _ in range(12):
        # 20 bits, as of masked scores
        _exchange(tables, server, 2.0**-20 * min(server.size, 8.0))
        norms.append(np.sqrt(max(server.slope, 0.0)))
        ends.append(server.slope <= server.noise)
    loss = _loss(server) / np.var(_labels(server))
    assert ends.index(True) > 0
    assert all(ends[ends.index(True) + 4 :])
    assert loss < 1e-10


def test_gradient_over_a_corrected_loss_below_zero_is_finite():
    tables, server = _noiseless(default_rng(0))
    _exchange(tables, server, 1e-3)
    for loss in (0.0, -1e-9, -1e3):
        assert 1.0 < server.gradient_norm(loss) <= 1e6
        # both are measured against the same
        ratio = server.noise_norm(loss) / server.gradient_norm(loss)
        assert ratio == pytest.approx(np.sqrt(server.noise / server.slope))


@given(st.integers(0, 10_000), st.floats(-3.0, 1.0))
def test_a_line_search_ends_at_the_least_value(number, size):
    rng = default_rng(number)
    features, scores = rng.normal(size=(2, 20))
    features *= 10.0**size
    labels = rng.integers(0, 2, 20)

    def rise_at(length: float) -> float:
        chances = expit(scores + length * features)
        return float((chances - labels) @ features) + 1e-3 * length

    rise = rise_at(0.0)
    if rise > 0.0:
        features = -features
        rise = rise_at(0.0)
    length, left = find_least(rise_at, rise)
    assert_allclose(length, brentq(rise_at, 0.0, 1e9), rtol=1e-3)
    assert abs(left) <= abs(rise_at(length)) <= 1e-4 * abs(rise)


def test_a_line_search_ends_where_the_slope_jumps_or_never_rises():
    assert find_least(lambda at: -1.0 if at < 0.7 else 2.0, -1.0)[0] == pytest.approx(
        0.7
    )
    assert find_least(lambda _: -1.0, -1.0) == (2.0**20, -1.0)
