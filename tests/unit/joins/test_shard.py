"""The client operator: exact fits, steps, the state of consensus, batches."""

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from client_apps.methods.admm import Consensus
from client_apps.methods.sgd import SgdState, take_step
from client_apps.operator.participant import Participant, ShardData
from client_apps.operator.releases import Releaser
from client_apps.operator.state import Stateless
from tp_flower.learning.models.local_model import LinearModel
from tp_flower.learning.solvers import RidgeSolver, exact_update, gram
from tp_flower.randomness import NoiseSource


def participant(data, model, state) -> Participant:
    return Participant(0, data, model, state, Releaser(0, data.plan, NoiseSource()))


def shard() -> Participant:
    data = ShardData(
        features=np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32),
        multiplicity=np.array([1, 2]),
        tested=np.zeros(2, dtype=np.bool_),
        joined_rows=3,
        l2=0.1,
    )
    return participant(data, LinearModel(2, 1, intercept=False), Stateless())


def consensus() -> Consensus:
    return Consensus(
        theta=np.array([3.0, 1.0]),
        common=np.array([1.0, 1.0]),
        duals=np.array([0.5, -2.0]),
    )


def test_a_row_counts_in_a_fit_as_often_as_it_is_joined():
    part = shard()
    kappa = 2.0
    features = part.data.features
    counts = part.data.multiplicity
    target = np.array([[1.0], [3.0]])
    start = np.array([[0.7], [-2.0]])
    solver = RidgeSolver.from_gram(
        gram(features, counts, intercept=False), part.data.joined_rows, intercept=False
    )
    moments = part.moments(target - features @ start, kappa)
    theta = exact_update(solver, start, moments, kappa, part.data.l2)
    rows = np.repeat(features, counts, 0)
    targets = np.repeat(target, counts, 0)
    matrix = kappa / 3 * rows.T @ rows + part.data.l2 * np.eye(2)
    assert_allclose(theta, np.linalg.solve(matrix, kappa / 3 * rows.T @ targets))


def test_a_step_has_momentum_and_spares_the_bias():
    model = LinearModel(1, 1, intercept=True)
    model.parameters = np.array([2.0, 4.0])
    part = participant(shard().data, model, SgdState(np.zeros(2)))
    take_step(part, np.ones(2), 0.5, 0.9)
    # velocity: 1 + 0.1 * 2, and 1
    assert_allclose(part.model.parameters, [1.4, 3.5])
    take_step(part, np.ones(2), 0.5, 0.9)
    # velocity: 1 + 0.1 * 1.4 + 0.9 * 1.2, and 1 + 0.9 * 1
    assert_allclose(part.model.parameters, [0.29, 2.55])


def test_scaled_duals_keep_their_unscaled_value_when_the_penalty_changes():
    state = consensus()
    state.set_penalty(0.2)
    unscaled = 0.2 * state.duals
    state.set_penalty(0.05)
    assert_allclose(0.05 * state.duals, unscaled)
    assert_allclose(state.centre, [1.0 - 2.0, 1.0 + 8.0])


def test_consensus_moves_the_duals_by_what_is_left():
    state = consensus()
    assert_array_equal(state.propose(np.array([2.0, 2.0])), [2.5, 0.0])
    state.accept(np.array([1.5, 3.0]))
    assert_array_equal(state.duals, [1.0, -3.0])
    assert_array_equal(state.common, [1.5, 3.0])


def test_a_batch_has_the_features_of_its_rows_and_one_is_kept(monkeypatch):
    rows = [[0, 3], [1, 3, 4], [2], [0, 1, 2, 3, 4]]
    data = ShardData(
        features=np.arange(18, dtype=np.float32).reshape(6, 3),
        multiplicity=np.ones(5, np.int64),
        tested=np.ones(6, dtype=np.bool_),
        joined_rows=6,
        l2=0.0,
        batch_start=np.cumsum([0, *map(len, rows)]),
        batch_rows=np.concatenate(rows).astype(np.int64),
    )
    for batch in [0, 1, 2, 3, 0, 1, 2, 3, 0, 0]:
        assert_array_equal(data.batch_of(batch), rows[batch])
        assert_array_equal(data.batch(batch), data.features[rows[batch]])
    # a batch of all rows is no copy
    assert np.shares_memory(data.batch(3), data.features)
    first = data.batch(0)
    assert data.batch(0) is first
    second = data.batch(1)
    assert data.batch(0) is not first
    # no large one is kept
    monkeypatch.setattr("client_apps.operator.participant.MOST_KEPT", 8)
    assert data.batch(1) is not second
    assert data.batch(1) is not data.batch(1)
