"""SGD and gradient descent over joins and unions against both on the built join."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from client_apps.data import run_store as store_module
from strategies.run import strategy as run_strategy
from tests.support.examples.store_runs import (
    FRAMES,
    LEFT,
    after,
    assert_optimal,
    batches_of,
    distance,
    each_layout,
    each_loss,
    loss_left,
    reference_of,
    sgd_of,
)
from tests.support.examples.store_runs import trained as on_store
from tests.support.federated import ALIASES, SOURCE, Run, run, store, task_of, whole
from tests.support.reference.training import Mlp, SgdSettings, mlp_sgd, sgd

HOW = SgdSettings(rate=0.05)
EPOCHS = 3
BATCH = 11
SETTINGS = {"l2": 0.02, "num_epochs": EPOCHS, "learning_rate": HOW.rate}
descended = functools.partial(on_store, strategy="gd", **SETTINGS)


def trained(loss: str, layout: str = "whole", model: str = "linear", **how) -> Run:
    how = {"batch_size": BATCH, "model": model, "hidden_sizes": (6,), **SETTINGS} | how
    return on_store(loss, layout, "sgd", **how)


@pytest.mark.cases("sharded-squared", "whole-logistic", "sharded-softmax")
@each_loss
@each_layout
def test_gd_is_gradient_descent_on_the_joined_table(layout, loss):
    """It is gradient descent as a heavy ball."""
    source = LEFT if layout == "sharded" else SOURCE
    finished = descended(loss, layout, source=source)
    reference = reference_of(finished, source)
    theta = np.zeros_like(finished.flat)
    velocity = np.zeros_like(theta)
    for epoch in range(1, EPOCHS + 1):
        velocity = HOW.momentum * velocity + reference.gradient(theta)
        theta = theta - HOW.rate * velocity
        atol = 1e-6 * np.abs(theta).max()
        np.testing.assert_allclose(after(finished, epoch), theta, atol=atol)


def test_a_long_run_keeps_the_sums_of_each_epochs_rounds(monkeypatch):
    single = trained("logistic", "sharded", one_site=False).report
    monkeypatch.setattr(run_strategy, "MOST_RECORDS", 5)
    # runs are remembered, and one at a single site is another
    merged = trained("logistic", "sharded", one_site=True).report
    # set-up and the end stay; the rounds of an epoch are of two phases
    rounds = [item.round for item in single.history]
    assert rounds == list(range(1, len(rounds) + 1))
    phases = [item.phase for item in merged.history if item.epoch]
    assert phases == ["sgd", "step"] * EPOCHS
    last, expected_last = (
        [(item.round, item.train, item.test) for item in report.history[-3:]]
        for report in (merged, single)
    )
    assert last == expected_last
    counted = ("rounds", "bytes_up", "bytes_down")
    sums = merged.traffic()
    expected = single.traffic()
    assert [sums[name] for name in counted] == [expected[name] for name in counted]
    for way in ("bytes-up", "bytes-down"):
        assert sums["totals"][way] == expected["totals"][way]


@pytest.mark.parametrize(("layout", "model"), [("whole", "mlp"), ("sharded", "linear")])
def test_gd_is_sgd_with_one_batch_of_all_rows(layout, model):
    how = {"model": model, "learning_rate": 0.0}
    finished = descended("logistic", layout, **how)
    total = finished.problem.train.joined_rows
    # a chosen rate stays as it is in both
    same = descended("logistic", layout, strategy="sgd", batch_size=total, **how)
    for own, theirs in zip(finished.parameters, same.parameters, strict=True):
        for table in own:
            np.testing.assert_array_equal(own[table], theirs[table])
    for own, theirs in zip(finished.history, same.history, strict=True):
        assert (own.bytes_up, own.bytes_down) == (theirs.bytes_up, theirs.bytes_down)


@pytest.mark.parametrize(("layout", "rounds"), [("whole", 1), ("sharded", 2)])
def test_an_epoch_of_gd_is_a_step(layout, rounds):
    finished = descended("squared", layout)
    actions = [[r[0].action for r in finished.requests(e)] for e in (1, 2)]
    assert actions == [["train.sgd", "train.step"][:rounds]] * 2
    federation = finished.problem
    assert finished.chosen["batch-size"] == federation.train.joined_rows
    # a row of a table is sent one number, however often it is joined
    first = next(item for item in finished.history if item.epoch == 1)
    for alias, table in federation.tables.items():
        trained_rows = sum(rows.trained for rows in table.rows)
        assert first.bytes_down[alias] == 4 * trained_rows
        assert trained_rows < federation.train.joined_rows


def test_the_default_step_of_gd_comes_close_to_the_optimum():
    finished = descended("logistic", learning_rate=0.0, num_epochs=0)
    assert len(finished.losses) == 100
    assert_optimal(finished, excess=0.01)


@each_loss
def test_every_epoch_visits_every_joined_row_once_in_another_order(loss):
    finished = trained(loss)
    total = finished.problem.train.joined_rows
    epochs = batches_of(finished)
    assert len(epochs) == EPOCHS
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(total))
        sizes = sorted(len(batch) for batch in batches)
        assert sizes[1:] == [BATCH] * (len(batches) - 1)
        assert sizes[0] == (total % BATCH or BATCH)
    assert epochs[0] != epochs[1]
    assert sorted(map(tuple, epochs[0])) == sorted(map(tuple, epochs[1]))


@pytest.mark.cases("sharded-logistic", "whole-softmax", "whole-squared")
@each_loss
@each_layout
def test_linear_models_are_those_of_centralised_sgd(loss, layout):
    finished = trained(loss, layout)
    assert distance(finished.flat, sgd_of(finished, HOW)) < 1e-5


@pytest.mark.cases("whole-logistic", "sharded-softmax", "whole-squared")
@each_loss
@each_layout
def test_mlps_are_those_of_centralised_sgd(loss, layout):
    finished = trained(loss, layout, "mlp")
    reference = reference_of(finished)
    scale = float(reference.labels.std()) if task_of(loss) == "regression" else 1.0
    reference = replace(reference, l2=reference.l2 * scale**2)
    model = Mlp(hidden=6, scale=scale, label_table="o")
    start = finished.parameters[0]
    batches = batches_of(finished)
    expected = mlp_sgd(reference, start, model, batches, HOW)
    found = np.concatenate([finished.theta[table] for table in expected])
    assert distance(found, np.concatenate(list(expected.values()))) < 1e-5


def test_the_penalty_reaches_the_steps():
    finished = trained("logistic", l2=0.0)
    expected = sgd_of(finished, HOW)
    assert distance(finished.flat, expected) < 1e-5
    assert distance(trained("logistic").flat, expected) > 1e-3


@pytest.mark.cases("linear-squared", "linear-logistic", "mlp-softmax")
@each_loss
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_shards_train_as_the_whole(loss, model):
    together, apart = (trained(loss, layout, model) for layout in ("whole", "sharded"))
    assert batches_of(together) == batches_of(apart)
    # scores and Y travel as float32
    assert distance(apart.flat, together.flat) < 1e-6
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-6)


def test_no_process_needs_to_know_what_another_did(tmp_path):
    """In deployment every message is answered by a process of its own."""

    def forget(_):
        store_module._CACHE.clear()

    how = {"num_epochs": 2}
    found = trained("logistic", "mixed", state=tmp_path, change=forget, **how)
    np.testing.assert_array_equal(found.flat, trained("logistic", "mixed", **how).flat)


@pytest.mark.parametrize(
    ("layout", "actions"),
    [
        ("whole", ["train.sgd"]),
        ("sharded", ["train.sgd", "train.step"]),
        ("mixed", ["train.sgd", "train.step"]),
    ],
)
def test_rounds_per_epoch(layout, actions):
    finished = trained("squared", layout)
    total = finished.problem.train.joined_rows
    batches = -(-total // BATCH)
    for epoch in range(1, EPOCHS + 1):
        rounds = finished.requests(epoch)
        assert [requests[0].action for requests in rounds] == actions * batches
        for requests in rounds:
            nodes = [request.node for request in requests]
            assert len(nodes) == len(set(nodes))


def test_a_batch_sends_its_distinct_rows_only():
    finished = trained("softmax")
    federation = finished.problem
    plan = finished.strategy.method._batches.plan
    rounds = [item for item in finished.history if item.phase == "sgd"]
    requests = {seen.round: seen for seen in finished.sent("train.sgd")}
    sent = [requests[item.round].header["batch"] for item in rounds]
    for item, batch in zip(rounds, sent, strict=True):
        for alias, rows in federation.train.tables.items():
            distinct = len(set(rows.row_of[plan.order[plan.slice(batch)]].tolist()))
            assert item.bytes_down[alias] == 4 * 3 * distinct
    # the reply brings the scores of the batch that follows
    distinct = {a: np.diff(plan.tables[a].start) for a in ALIASES}
    for item, following in zip(rounds[:5], sent[1:6], strict=True):
        for alias in ALIASES:
            assert item.bytes_up[alias] == 4 * 3 * distinct[alias][following]


@each_layout
def test_metrics_are_of_the_epochs_model(layout):
    """Each epoch's model scores the held-out joined rows, from its own parameters."""
    finished = trained("squared", layout)
    reference = reference_of(finished)
    report = finished.report
    scores = reference.scores(finished.flat, range(len(reference.labels)))[:, 0]
    rmse = np.sqrt(((scores - reference.labels) ** 2).mean())
    assert report.final_train["rmse"] == pytest.approx(rmse, rel=1e-5)
    federation = finished.problem
    ended = [item for item in finished.history if item.train]
    for epoch, item in enumerate(ended, start=1):
        scores = np.full(federation.test.joined_rows, federation.base_score[0])
        for alias, rows in federation.test.tables.items():
            theta = finished.parameters[epoch][alias]
            features = finished.features
            width = features[alias].shape[1]
            local = features[alias] @ theta[:width] + theta[width:].sum()
            scores += local[rows.row_of]
        rmse = np.sqrt(((scores - federation.held_out.target.numbers) ** 2).mean())
        assert item.test["rmse"] == pytest.approx(rmse, rel=1e-5)


def test_early_epochs_report_the_loss_of_their_batches_before_their_steps():
    finished = trained("logistic", num_epochs=2)
    reference = reference_of(finished)
    first = batches_of(finished)[0]
    total = 0.0
    for number in range(len(first)):
        theta = sgd(reference, [first[:number]], HOW)[-1]
        scores = reference.scores(theta, first[number])[:, 0]
        labels = reference.labels[first[number]]
        total += float((np.logaddexp(0, scores) - labels * scores).sum())
    assert finished.losses[0] == pytest.approx(total / len(reference.labels), rel=1e-5)


def test_tolerance_stops_early():
    early = trained("squared", tolerance=0.01, num_epochs=60, learning_rate=0.0)
    assert 2 < len(early.losses) < 60
    changes = np.abs(np.diff(early.losses)) / np.array(early.losses[1:])
    assert changes[-1] < 0.01
    assert (changes[:-1] >= 0.01).all()


@pytest.mark.cases("squared")
@each_loss
def test_automatic_rate_trains_on_batches_of_one_row(loss):
    """A hundredth of few joined rows is one: noisy steps must stay small."""
    finished = run(loss, [whole(FRAMES)], "sgd", l2=1e-3, num_epochs=6)
    assert finished.chosen["batch-size"] == 1
    assert loss_left(finished) < 0.25


def test_automatic_batch_size_is_a_hundredth_of_the_joined_rows():
    finished = run("squared", [whole(store(orders=400))], "sgd", num_epochs=1)
    total = finished.problem.train.joined_rows
    assert finished.chosen["batch-size"] == -(-total // 100)
