"""Full-batch gradient descent, against the same in numpy on DuckDB's join."""

import functools

import numpy as np
import pytest

from tests.support.examples.left_joins import SOURCE as LEFT
from tests.support.examples.store_reference import reference_of
from tests.support.federated import (
    FEATURES,
    LABELS,
    Run,
    one_per_site,
    run_query,
    sharded,
    store,
    whole,
)
from tests.support.federated import SOURCE as INNER
from tp_flower.errors import SettingsError
from tp_flower.settings import Settings

FRAMES = store()
LAYOUTS = {"whole": whole, "sharded": sharded}
RATE, EPOCHS = 0.1, 3

each_loss = pytest.mark.parametrize("loss", list(LABELS))
each_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


@functools.cache
def trained(loss, layout="whole", source=INNER, strategy="gd", **how) -> Run:
    """A run on the store, made once."""
    sql = f"SELECT {LABELS[loss]} AS label, {FEATURES} {source}"
    settings = {
        "task": "regression" if loss == "squared" else "classification",
        "loss": loss,
        "device": "cpu",
        "l2": 0.02,
        "num_epochs": EPOCHS,
        "learning_rate": RATE,
        **how,
    }
    return run_query(sql, one_per_site(LAYOUTS[layout](FRAMES)), strategy, **settings)


@each_loss
@each_layout
def test_it_is_gradient_descent_on_the_joined_table(layout, loss):
    # plain, and as a heavy ball
    source, momentum = (LEFT, 0.0) if layout == "sharded" else (INNER, 0.9)
    finished = trained(loss, layout, source, momentum=momentum)
    reference = reference_of(finished, FRAMES, loss, source)
    theta = np.zeros_like(finished.flat)
    velocity = np.zeros_like(theta)
    for epoch in range(1, EPOCHS + 1):
        velocity = momentum * velocity + reference.gradient(theta)
        theta = theta - RATE * velocity
        found = np.concatenate(list(finished.parameters[epoch].values()))
        np.testing.assert_allclose(found, theta, atol=1e-6 * np.abs(theta).max())


@pytest.mark.parametrize(("layout", "model"), [("whole", "mlp"), ("sharded", "linear")])
def test_it_is_sgd_with_one_batch_of_all_rows(layout, model):
    finished = trained("logistic", layout, model=model)
    total = finished.strategy.training_problem.train.joined_rows
    same = trained(
        "logistic",
        layout,
        strategy="sgd",
        model=model,
        batch_size=total,
        decay=0.0,
    )
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
    (chosen,) = {finished.strategy.chosen["batch-size"]}
    assert chosen == federation.train.joined_rows
    # a row of a table is sent one number, however often it is joined
    first = next(item for item in finished.history if item.epoch == 1)
    for alias, table in federation.tables.items():
        trained_rows = sum(rows.trained for rows in table.rows)
        assert first.bytes_down[alias] == 4 * trained_rows
        assert trained_rows < federation.train.joined_rows


def test_its_default_step_comes_close_to_the_optimum():
    finished = trained("logistic", learning_rate=0.0, num_epochs=0)
    assert len(finished.losses) == 100
    reference = reference_of(finished, FRAMES, "logistic")
    best = reference.objective(reference.optimum())
    assert reference.objective(finished.flat) <= 1.01 * best


def test_it_has_one_batch():
    with pytest.raises(SettingsError, match=r"batch-size: 5 does not go with strategy"):
        Settings(strategy="gd", batch_size=5)
    assert Settings(strategy="gd").epochs == 100
