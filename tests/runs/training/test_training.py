"""ADMM over joins and unions, end to end, against the materialised join."""

import functools

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

import strategies.training.admm
from tests.support.examples.store_reference import (
    held_out_orders,
    reference_of,
    store_labels,
)
from tests.support.federated import (
    ALIASES,
    LABELS,
    SOURCE,
    Run,
    one_per_site,
    pieces,
    run,
    run_query,
    sharded,
    store,
    whole,
)
from tests.support.reference import admm as slow
from tests.support.reference import joins, losses
from tp_flower.errors import DivergedError
from tp_flower.learning.losses import LOSSES, SoftmaxLoss

FRAMES = store()
L2 = 0.01
LAYOUTS = {"whole": whole, "sharded": sharded}

each_loss = pytest.mark.parametrize("loss", list(LABELS))
each_layout = pytest.mark.parametrize("layout", list(LAYOUTS))


@functools.cache
def trained(loss: str, layout: str = "whole", **settings) -> Run:
    """A run on the store, made once; with ``one_site`` long runs are faster."""
    shards = LAYOUTS[layout](FRAMES)
    sites = [shards] if settings.pop("one_site", False) else one_per_site(shards)
    return run(loss, sites, **{"l2": L2, "num_epochs": 6, **settings})


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """How far apart two parameter vectors are, relative to their size."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def by_row(finished: Run, layout: str, alias: str) -> dict[int, list[float]]:
    """The encoded rows of a table by their position in the whole table."""
    sizes = [len(frame) for frame in LAYOUTS[layout](FRAMES)[ALIASES[alias]]]
    order, start = [], 0
    for size in sizes:
        own = np.arange(start, start + size)
        is_trained = finished.trained[alias][own]
        is_tested = finished.tested[alias][own]
        order += [*own[is_trained], *own[is_tested & ~is_trained]]
        start += size
    return dict(zip(order, finished.features[alias].tolist(), strict=True))


# what is trained on


@each_layout
def test_the_joined_rows_are_duckdbs(layout):
    federation = trained("squared", layout).strategy.training_problem
    every = joins.joined_positions(whole(FRAMES), ALIASES, SOURCE)
    tested = trained("squared", layout).tested["o"]
    assert federation.train.joined_rows == sum(not tested[row[0]] for row in every)
    assert federation.test.joined_rows == sum(tested[row[0]] for row in every)
    assert federation.join_steps[-1].rows == len(every)


@each_loss
def test_labels_and_base_score_are_those_of_the_joined_rows(loss):
    finished = trained(loss)
    reference = reference_of(finished, FRAMES, loss)
    federation = finished.strategy.training_problem
    np.testing.assert_array_equal(federation.train_labels, reference.labels)
    np.testing.assert_allclose(federation.base_score, reference.base, rtol=1e-12)


@each_layout
def test_sites_encode_as_the_reference_does(layout):
    finished = trained("squared", layout)
    reference = reference_of(finished, FRAMES, "squared")
    every = joins.joined_positions(whole(FRAMES), ALIASES, SOURCE)
    tested = finished.tested["o"]
    rows = [row for row in every if not tested[row[0]]]
    for number, (alias, inputs) in enumerate(reference.inputs.items()):
        encoded = by_row(finished, layout, alias)
        width = len(next(iter(encoded.values())))
        joined = np.array([encoded[row[number]] for row in rows])
        # float32 at the sites
        np.testing.assert_allclose(joined, inputs[:, :width], atol=1e-6)


@pytest.mark.parametrize("alias", list(ALIASES))
def test_encoding_of_shards_is_the_encoding_of_the_whole(alias):
    together = by_row(trained("squared", "whole"), "whole", alias)
    apart = by_row(trained("squared", "sharded"), "sharded", alias)
    assert together.keys() == apart.keys()
    # the merged mean may differ in its last digit, and float32 rounds that away
    for row, values in together.items():
        np.testing.assert_allclose(apart[row], values, rtol=1e-6, atol=1e-7)


def test_encoders_of_shards_are_those_of_the_whole():
    one, other = (
        trained("squared", name).strategy.training_problem for name in LAYOUTS
    )
    for alias in ALIASES:
        left, right = one.encoders[alias], other.encoders[alias]
        assert left.feature_names == right.feature_names
        assert left.dropped == right.dropped


# iterates


@pytest.mark.parametrize(
    ("loss", "form", "corrections", "relaxation"),
    [
        ("squared", "sharing", 3, 1.0),
        ("squared", "sharing", 3, 1.5),
        ("squared", "jacobi", 1, 1.0),
        ("logistic", "sharing", 3, 1.5),
        ("softmax", "sharing", 3, 1.0),
    ],
)
def test_every_epoch_is_admm_on_the_joined_rows(loss, form, corrections, relaxation):
    rho = 0.4
    finished = trained(
        loss,
        admm_form=form,
        rho=rho,
        over_relaxation=relaxation,
        anderson_memory=0,
        num_epochs=3,
    )
    reference = reference_of(finished, FRAMES, loss)
    steps = slow.admm(reference, 3, rho, corrections, relaxation)
    for epoch, step in enumerate(steps, start=1):
        theta = np.concatenate(list(finished.parameters[epoch].values()))
        # scores and targets travel as float32, the reference's prox is good to 1e-7
        assert distance(theta, step.flat) < 2e-6


@each_loss
@pytest.mark.parametrize("memory", [0, 5])
@each_layout
def test_duals_are_the_gradient_at_z_after_every_epoch(
    loss, memory, layout, monkeypatch
):
    steps = []
    original = strategies.training.admm.admm_step

    def spy(state, scores, labels, used_loss, over_relaxation=1.0):
        new, message = original(state, scores, labels, used_loss, over_relaxation)
        steps.append((state, scores, labels, over_relaxation, new))
        return new, message

    monkeypatch.setattr("strategies.training.admm.admm_step", spy)
    run(
        loss,
        one_per_site(LAYOUTS[layout](FRAMES)),
        num_epochs=4,
        anderson_memory=memory,
    )
    assert len(steps) == 4
    for old, scores, labels, alpha, new in steps:
        np.testing.assert_allclose(
            new.duals, losses.gradients(loss, new.z, labels), atol=1e-12
        )
        relaxed = alpha * scores + (1 - alpha) * old.z
        # Eq. 8; equal because z is optimal, to the precision of the prox
        np.testing.assert_allclose(
            new.duals, old.duals + old.rho * (relaxed - new.z), atol=2e-8
        )


@each_loss
@pytest.mark.parametrize("memory", [0, 5])
def test_shards_with_gram_statistics_make_the_iterates_of_the_whole(loss, memory):
    together = trained(loss, "whole", anderson_memory=memory, num_epochs=12)
    apart = trained(loss, "sharded", anderson_memory=memory, num_epochs=12)
    assert apart.strategy.chosen["lou"] == {"o": "gram", "c": "gram", "i": "gram"}
    assert together.strategy.chosen["lou"] == {"o": "local", "c": "local", "i": "local"}
    for epoch in range(1, 13):
        one, other = (
            np.concatenate(list(r.parameters[epoch].values()))
            for r in (apart, together)
        )
        assert distance(one, other) < 1e-6
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-6)


# where it ends


@each_loss
@each_layout
@pytest.mark.parametrize("l2", [0.0, L2])
def test_at_convergence_the_gradient_of_the_joined_objective_is_zero(loss, layout, l2):
    finished = trained(
        loss, layout, num_epochs=120, l2=l2, tolerance=1e-8, one_site=True
    )
    reference = reference_of(finished, FRAMES, loss)
    assert np.abs(reference.gradient(finished.flat)).max() <= 1e-5
    best = reference.objective(reference.optimum())
    # without a penalty softmax is flat in some directions
    assert reference.objective(finished.flat) <= best * (1 + 1e-6)


@pytest.mark.parametrize("form", ["auto", "balanced", "over-relaxed"])
def test_plain_admm_converges_too(form):
    how = {
        "auto": {"anderson_memory": 0},
        "balanced": {"anderson_memory": 0, "over_relaxation": 1.0},
        "over-relaxed": {"anderson_memory": 0, "over_relaxation": 1.8},
    }[form]
    finished = trained("logistic", num_epochs=250, one_site=True, **how)
    reference = reference_of(finished, FRAMES, "logistic")
    assert np.abs(reference.gradient(finished.flat)).max() <= 1e-5


@each_loss
@pytest.mark.parametrize("rho", [0.02, 5.0])
def test_sharing_converges_for_any_rho(loss, rho):
    finished = trained(loss, num_epochs=150, rho=rho, one_site=True)
    reference = reference_of(finished, FRAMES, loss)
    # far from the automatic rho it takes longer, but it does not diverge
    assert np.abs(reference.gradient(finished.flat)).max() <= 1e-4


@pytest.mark.parametrize(
    ("loss", "inner_rounds"),
    [("squared", 1), ("squared", 3), ("logistic", 3), ("softmax", 1)],
)
def test_consensus_reaches_the_same_optimum(loss, inner_rounds):
    finished = trained(
        loss,
        "sharded",
        lou="consensus",
        inner_rounds=inner_rounds,
        num_epochs=300,
        one_site=True,
    )
    assert finished.strategy.chosen["lou"]["o"] == "consensus"
    reference = reference_of(finished, FRAMES, loss)
    best = reference.objective(reference.optimum())
    assert reference.objective(finished.flat) == pytest.approx(best, rel=1e-5)
    assert np.abs(reference.gradient(finished.flat)).max() <= 1e-3


def test_jacobi_diverges_where_sharing_converges():
    """Three tables that can all explain the label, joined row by row."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    frames = {
        name: pd.DataFrame({"k": np.arange(30), "x": x + 0.1 * rng.normal(size=30)})
        for name in ("a", "b", "c")
    }
    frames["a"]["y"] = 3 * x + rng.normal(size=30)
    sql = (
        "SELECT a.y AS label, a.x, b.x, c.x FROM a JOIN b ON a.k = b.k "
        "JOIN c ON a.k = c.k"
    )
    own = {"anderson_memory": 0, "over_relaxation": 1.0, "rho": 0.5, "num_epochs": 25}
    sites = one_per_site(whole(frames))
    losses = run_query(sql, sites, admm_form="sharing", **own).losses
    assert losses[-1] < losses[0]
    assert losses[-1] == pytest.approx(losses[-2], rel=1e-3)
    with pytest.raises(DivergedError, match="training diverged in epoch"):
        run_query(sql, sites, admm_form="jacobi", **own)


def test_one_table_is_centralised_ridge_in_a_few_epochs():
    orders = FRAMES["orders"]
    sql = "SELECT qty AS label, day, online FROM orders"
    finished = run_query(
        sql, [{"orders": orders}], l2=0.3, num_epochs=8, test_fraction=1e-9
    )
    day, online = orders["day"], orders["online"].astype(float)
    dense = np.column_stack(
        [
            (day - day.mean()) / day.std(ddof=0),
            (online - online.mean()) / online.std(ddof=0),
            np.ones(len(orders)),
        ]
    )
    qty = orders["qty"].to_numpy()
    matrix = dense.T @ dense / len(orders) + np.diag([0.3, 0.3, 0.0])
    expected = np.linalg.solve(matrix, dense.T @ (qty - qty.mean()) / len(orders))
    np.testing.assert_allclose(finished.theta["orders"], expected, atol=1e-6)


# what must not matter


def test_dealing_of_shards_to_sites_does_not_matter():
    orders, customers, items = sharded(FRAMES).values()
    expected = trained("logistic", "sharded")
    deals = [
        [{"orders": orders, "customers": customers, "items": items}],
        [
            {"orders": orders, "items": [items[0]]},
            {"customers": customers},
            {"items": [items[1]]},
        ],
        [
            {"customers": [customers[0]], "orders": [orders[0]]},
            {"orders": [orders[1]], "items": items},
            {"customers": [customers[1]], "orders": [orders[2]]},
        ],
    ]
    for sites in deals:
        finished = run("logistic", sites, l2=L2, num_epochs=6)
        np.testing.assert_array_equal(finished.flat, expected.flat)
        assert finished.losses == expected.losses
        assert finished.history[-2].test == expected.history[-2].test


def test_where_a_table_is_cut_does_not_matter():
    expected = trained("softmax")
    for cuts in ([30], [5, 6], [20, 40, 50]):
        shards = {**whole(FRAMES), "orders": pieces(FRAMES["orders"], *cuts)}
        finished = run("softmax", one_per_site(shards), l2=L2, num_epochs=6)
        assert distance(finished.flat, expected.flat) < 1e-6


def test_seed_decides_the_split_and_repeats():
    again = run("squared", one_per_site(whole(FRAMES)), l2=L2, num_epochs=6)
    np.testing.assert_array_equal(again.flat, trained("squared").flat)
    other = trained("squared", seed=1)
    assert (other.tested["o"] != again.tested["o"]).any()


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_held_out_rows_do_not_influence_training(loss, strategy):
    first = trained(loss, strategy=strategy)
    held_out = held_out_orders(first, len(FRAMES["orders"]))
    assert held_out.sum() == round(0.2 * len(FRAMES["orders"]))
    orders = FRAMES["orders"].copy()
    # other labels (of both classes), and features far away
    orders.loc[held_out, "qty"] = 6.0 - orders.loc[held_out, "qty"]
    orders.loc[held_out, "day"] += 1000
    changed = run(
        loss,
        one_per_site(whole({**FRAMES, "orders": orders})),
        strategy,
        l2=L2,
        num_epochs=6,
    )
    np.testing.assert_array_equal(changed.flat, first.flat)
    assert changed.losses == first.losses
    assert changed.history[-2].test != first.history[-2].test


# metrics


@each_loss
@each_layout
def test_metrics_are_those_of_the_joined_rows(loss, layout):
    finished = trained(loss, layout)
    reference = reference_of(finished, FRAMES, loss)
    every = joins.joined_positions(whole(FRAMES), ALIASES, SOURCE)
    tested = finished.tested["o"]
    train_scores = reference.scores(finished.flat, range(len(reference.labels)))
    _check_metrics(
        loss, finished.strategy.report.final_train, train_scores, reference.labels
    )
    encoded = {alias: by_row(finished, layout, alias) for alias in ALIASES}
    matrices = reference.split(finished.flat)
    rows = [row for row in every if tested[row[0]]]
    scores = []
    for row in rows:
        score = reference.base.copy()
        for alias, position in zip(ALIASES, row, strict=True):
            inputs = [*encoded[alias][position], *([1.0] if alias == "o" else [])]
            score = score + np.array(inputs) @ matrices[alias]
        scores.append(score)
    labels = store_labels(FRAMES, loss)[[row[0] for row in rows]]
    _check_metrics(loss, finished.strategy.report.final_test, np.array(scores), labels)


def _check_metrics(loss, reported, scores, labels):
    assert reported["loss"] == pytest.approx(
        losses.mean_value(loss, scores, labels), rel=1e-5
    )
    if loss == "squared":
        expected = {
            "rmse": np.sqrt(metrics.mean_squared_error(labels, scores[:, 0])),
            "r2": metrics.r2_score(labels, scores[:, 0]),
        }
    elif loss == "logistic":
        expected = {
            "auc": metrics.roc_auc_score(labels, scores[:, 0]),
            "accuracy": metrics.accuracy_score(labels, scores[:, 0] > 0),
            "log_loss": losses.mean_value(loss, scores, labels),
        }
    else:
        rates = SoftmaxLoss(3).gradient(scores, labels) + np.eye(3)[labels.astype(int)]
        # a class that no held-out row has is left out
        areas = [
            metrics.roc_auc_score(labels == k, rates[:, int(k)])
            for k in np.unique(labels)
        ]
        expected = {
            "auc": np.mean(areas),
            "accuracy": metrics.accuracy_score(labels, scores.argmax(axis=1)),
            "log_loss": metrics.log_loss(labels, rates, labels=[0, 1, 2]),
        }
    for name, value in expected.items():
        assert reported[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_names_of_losses_are_those_of_the_tests():
    assert set(LOSSES) == set(LABELS)


# rounds and bytes (design section 6)


def assert_one_message_per_site(finished: Run) -> None:
    for number in range(1, len(finished.history) + 1):
        nodes = [s.node for s in finished.seen if s.round == number and not s.is_reply]
        assert len(nodes) == len(set(nodes))
        replies = [s.node for s in finished.seen if s.round == number and s.is_reply]
        assert sorted(replies) == sorted(nodes)


@pytest.mark.parametrize(
    ("layout", "how", "actions"),
    [
        ("whole", {}, ["admm"]),
        ("whole", {"lou": "consensus"}, ["admm"]),
        ("sharded", {}, ["admm", "consensus"]),
        ("sharded", {"lou": "consensus"}, ["admm", "consensus"]),
        (
            "sharded",
            {"lou": "consensus", "inner_rounds": 3},
            ["admm", *["consensus"] * 3],
        ),
        # inner rounds are consensus's: statistics need none
        ("sharded", {"inner_rounds": 3}, ["admm", "consensus"]),
    ],
)
def test_rounds_per_epoch(layout, how, actions):
    finished = trained("squared", layout, num_epochs=3, **how)
    for epoch in (1, 2, 3):
        rounds = finished.requests(epoch)
        assert [requests[0].action for requests in rounds] == [
            f"train.{action}" for action in actions
        ]
    assert_one_message_per_site(finished)
    set_up = [requests[0].action for requests in finished.requests(0)]
    assert set_up == [
        "query.seal",
        "query.extract",
        "query.statistics",
        "train.prepare",
        "query.finish",
    ]


def test_a_site_of_several_shards_gets_one_message():
    sites = [{name: list(own) for name, own in sharded(FRAMES).items()}]
    finished = run("squared", sites, num_epochs=2)
    assert_one_message_per_site(finished)
    assert {len(requests) for requests in finished.requests(1)} == {1}


def test_only_sites_of_sharded_tables_take_the_second_round():
    shards = {**whole(FRAMES), "customers": pieces(FRAMES["customers"], 4)}
    finished = run("squared", one_per_site(shards), num_epochs=1)
    first, second = finished.requests(1)
    assert (len(first), len(second)) == (4, 2)


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_bytes_of_join_only_admm_are_one_number_per_row_and_output(loss):
    totals = {}
    for orders in (100, 1000):
        finished = run(
            loss,
            one_per_site(whole(store(orders=orders, customers=orders // 10))),
            num_epochs=3,
            test_fraction=1e-9,
        )
        federation = finished.strategy.training_problem
        floor = (
            4
            * federation.loss.outputs
            * np.array([table.total_rows for table in federation.tables.values()])
        )
        epochs = [item for item in finished.history if item.phase == "admm"]
        assert len(epochs) == 3
        for item in epochs:
            assert [item.bytes_up[alias] for alias in ALIASES] == floor.tolist()
            assert [item.bytes_down[alias] for alias in ALIASES] == floor.tolist()
        totals[orders] = epochs[-1].overhead_bytes
        # the record of the round is what went over the grid
        seen = [s for s in finished.seen if s.round == epochs[-1].round]
        everything = sum(s.bytes for s in seen)
        assert everything == 2 * floor.sum() + totals[orders]
    # layouts name the number of rows: some more digits, and 8-byte alignment
    assert abs(totals[1000] - totals[100]) <= 6 * (2 + 8)
    assert totals[1000] < 6 * 1000


def test_held_out_rows_ride_up_but_not_down():
    finished = trained("squared")
    tables = finished.strategy.training_problem.tables
    item = next(item for item in finished.history if item.phase == "admm")
    for alias, table in tables.items():
        trained_rows = int(finished.trained[alias].sum())
        assert item.bytes_down[alias] == 4 * trained_rows
        assert item.bytes_up[alias] == 4 * table.total_rows


# stopping


def test_tolerance_stops_early():
    full = trained("squared", num_epochs=100)
    early = trained("squared", num_epochs=100, tolerance=1e-3)
    count = len(early.losses)
    assert 1 < count < 100
    last = [item for item in early.history if item.train][-1]
    assert max(last.primal_residual, last.dual_residual) < 1e-3
    before = [item for item in early.history if item.train][-2]
    assert max(before.primal_residual, before.dual_residual) >= 1e-3
    assert early.losses == full.losses[:count]
    assert early.seen[-1].action == "query.finish"


def test_result_is_flowers():
    finished = trained("logistic", num_epochs=3)
    result = finished.result
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert list(result.evaluate_metrics_serverapp) == [1, 2, 3]
    assert result.train_metrics_clientapp[3]["loss"] == finished.losses[-1]
    base = result.arrays["base-score"].numpy()
    np.testing.assert_array_equal(base, finished.strategy.training_problem.base_score)


def test_num_rounds_of_start_are_epochs():
    assert len(trained("squared", num_epochs=2).losses) == 2


# models without a closed form


@pytest.mark.parametrize(("layout", "share"), [("whole", 0.8), ("sharded", 0.95)])
def test_mlps_lower_the_loss_of_the_joined_rows(layout, share):
    finished = trained(
        "squared",
        layout,
        model="mlp",
        hidden_sizes=(8,),
        num_epochs=3,
        one_site=True,
    )
    labels = reference_of(finished, FRAMES, "squared").labels
    assert finished.losses[-1] < share * labels.var() / 2


def test_models_of_single_tables():
    finished = trained("squared", models=(("c", "mlp"),), num_epochs=2)
    tables = finished.strategy.training_problem.tables
    assert {name: table.is_linear for name, table in tables.items()} == {
        "o": True,
        "c": False,
        "i": True,
    }
