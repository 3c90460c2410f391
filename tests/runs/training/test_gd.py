"""Full-batch gradient descent, against the same in numpy on DuckDB's join."""

import functools

import numpy as np
import pytest

from tests.support.examples.store_runs import (
    LEFT,
    after,
    each_layout,
    each_loss,
    reference_of,
)
from tests.support.examples.store_runs import trained as on_store
from tests.support.federated import SOURCE

RATE, EPOCHS = 0.1, 3
trained = functools.partial(
    on_store, strategy="gd", l2=0.02, num_epochs=EPOCHS, learning_rate=RATE
)


@each_loss
@each_layout
def test_it_is_gradient_descent_on_the_joined_table(layout, loss):
    # plain, and as a heavy ball
    source, momentum = (LEFT, 0.0) if layout == "sharded" else (SOURCE, 0.9)
    finished = trained(loss, layout, source=source, momentum=momentum)
    reference = reference_of(finished, source)
    theta = np.zeros_like(finished.flat)
    velocity = np.zeros_like(theta)
    for epoch in range(1, EPOCHS + 1):
        velocity = momentum * velocity + reference.gradient(theta)
        theta = theta - RATE * velocity
        atol = 1e-6 * np.abs(theta).max()
        np.testing.assert_allclose(after(finished, epoch), theta, atol=atol)


@pytest.mark.parametrize(("layout", "model"), [("whole", "mlp"), ("sharded", "linear")])
def test_it_is_sgd_with_one_batch_of_all_rows(layout, model):
    finished = trained("logistic", layout, model=model)
    total = finished.strategy.training_problem.train.joined_rows
    how = {"model": model, "batch_size": total, "decay": 0.0}
    same = trained("logistic", layout, strategy="sgd", **how)
    for own, theirs in zip(finished.parameters, same.parameters, strict=True):
        for table in own:
            np.testing.assert_array_equal(own[table], theirs[table])
    for own, theirs in zip(finished.history, same.history, strict=True):
        assert (own.bytes_up, own.bytes_down) == (theirs.bytes_up, theirs.bytes_down)


@pytest.mark.parametrize(("layout", "rounds"), [("whole", 1), ("sharded", 2)])
def test_an_epoch_is_a_step(layout, rounds):
    finished = trained("squared", layout)
    actions = [[r[0].action for r in finished.requests(e)] for e in (1, 2)]
    assert actions == [["train.sgd", "train.step"][:rounds]] * 2
    federation = finished.strategy.training_problem
    assert finished.strategy.chosen["batch-size"] == federation.train.joined_rows
    # a row of a table is sent one number, however often it is joined
    first = next(item for item in finished.history if item.epoch == 1)
    for alias, table in federation.tables.items():
        trained_rows = sum(rows.trained for rows in table.rows)
        assert first.bytes_down[alias] == 4 * trained_rows
        assert trained_rows < federation.train.joined_rows


def test_its_default_step_comes_close_to_the_optimum():
    finished = trained("logistic", learning_rate=0.0, num_epochs=0)
    assert len(finished.losses) == 100
    reference = reference_of(finished)
    best = reference.objective(reference.optimum())
    assert reference.objective(finished.flat) <= 1.01 * best
