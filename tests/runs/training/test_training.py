"""ADMM over joins and unions, end to end, against the materialised join."""

import functools

import numpy as np
import pytest
from scipy.special import expit
from sklearn import metrics as sk
from sklearn.dummy import DummyClassifier, DummyRegressor

from strategies import TablePuppetSGD
from strategies.training.strategy import check_epoch
from tests.support.examples.store_runs import (
    FRAMES,
    LAYOUTS,
    after,
    assert_optimal,
    distance,
    each_layout,
    each_loss,
    query,
    reference_of,
    store_labels,
)
from tests.support.examples.store_runs import trained as on_store
from tests.support.federated import (
    ALIASES,
    LABELS,
    SOURCE,
    LocalGrid,
    Run,
    one_per_site,
    pieces,
    run,
    run_query,
    sharded,
    store,
    whole,
)
from tests.support.files import case_table
from tests.support.reference import admm as slow
from tests.support.reference import joins
from tp_flower.errors import DivergedError, ReplyError
from tp_flower.objectives import names_of_losses
from tp_flower.query import Query

CASES = case_table(__file__)
L2 = 0.01
trained = functools.partial(on_store, num_epochs=6)


def by_row(finished: Run, layout: str, alias: str) -> dict[int, list[float]]:
    """The encoded rows of a table by their position in the whole table."""
    sizes = [len(frame) for frame in LAYOUTS[layout](FRAMES)[ALIASES[alias]]]
    order = []
    start = 0
    for size in sizes:
        own = np.arange(start, start + size)
        is_trained = finished.trained[alias][own]
        is_tested = finished.tested[alias][own]
        order += [*own[is_trained], *own[is_tested & ~is_trained]]
        start += size
    return dict(zip(order, finished.features[alias].tolist(), strict=True))


@pytest.mark.cases("whole-squared", "sharded-logistic", "whole-softmax")
@each_loss
@each_layout
def test_joined_rows_features_and_labels_are_those_of_duckdbs_join(loss, layout):
    finished = trained(loss, layout)
    reference = reference_of(finished)
    problem = finished.problem
    np.testing.assert_array_equal(problem.objective.target.numbers, reference.labels)
    np.testing.assert_allclose(problem.base_score, reference.base, rtol=1e-12)
    every = joins.joined_positions(whole(FRAMES), ALIASES, SOURCE)
    tested = finished.tested["o"]
    rows = [row for row in every if not tested[row[0]]]
    assert problem.train.joined_rows == len(rows)
    assert problem.test.joined_rows == len(every) - len(rows)
    assert problem.join_steps[-1].rows == len(every)
    together = trained(loss).problem
    for number, (alias, inputs) in enumerate(reference.inputs.items()):
        encoded = by_row(finished, layout, alias)
        joined = np.array([encoded[row[number]] for row in rows])
        # float32 at the sites
        np.testing.assert_allclose(joined, inputs[:, : joined.shape[1]], atol=1e-6)
        assert problem.encoders[alias] == together.encoders[alias]


@pytest.mark.parametrize(("loss", "relaxation"), CASES["admm"])
def test_every_epoch_is_admm_on_the_joined_rows(loss, relaxation):
    rho = 0.4
    finished = trained(loss, num_epochs=3, rho=rho, over_relaxation=relaxation)
    steps = slow.admm(reference_of(finished), 3, rho, relaxation)
    for epoch, step in enumerate(steps, start=1):
        # scores and targets travel as float32, the reference's prox is good to 1e-7
        assert distance(after(finished, epoch), step.flat) < 2e-6


@each_loss
def test_shards_with_gram_statistics_make_the_iterates_of_the_whole(loss):
    layouts = ("whole", "sharded")
    together, apart = (trained(loss, layout, num_epochs=12) for layout in layouts)
    assert apart.chosen["lou"] == dict.fromkeys(ALIASES, "gram")
    assert together.chosen["lou"] == dict.fromkeys(ALIASES, "local")
    for epoch in range(1, 13):
        assert distance(after(apart, epoch), after(together, epoch)) < 1e-6
    np.testing.assert_allclose(apart.losses, together.losses, rtol=1e-6)


@pytest.mark.cases("0.0-whole-softmax", "0.01-sharded-squared", "0.01-whole-logistic")
@each_loss
@each_layout
@pytest.mark.parametrize("l2", [0.0, L2])
def test_at_convergence_the_gradient_of_the_joined_objective_is_zero(loss, layout, l2):
    # masked scores are rounded to a millionth of the label's deviation; without a
    # penalty classes have no finite optimum: no order of the customer without a region,
    # which has a column, is of class 0, so that its parameters grow ever more slowly
    gradient, excess = (2e-4, 3e-4) if loss != "squared" and not l2 else (2e-5, 3e-6)
    assert_optimal(
        trained(loss, layout, num_epochs=400, l2=l2, tolerance=1e-8, one_site=True),
        gradient=gradient,
        excess=excess,
    )


@pytest.mark.cases(
    "logistic-how0-1e-05-1e-08",
    "squared-how3-0.0001-1e-08",
    "softmax-how5-0.0001-1e-08",
    "logistic-how7-0.004-0.003",
)
@pytest.mark.parametrize(
    ("loss", "how", "gradient", "excess"),
    [
        ("logistic", {}, 1e-5, 1e-8),
        ("logistic", {"over_relaxation": 1.0}, 1e-5, 1e-8),
        ("logistic", {"over_relaxation": 1.8}, 1e-5, 1e-8),
        *((loss, {"rho": 0.02}, 1e-4, 1e-8) for loss in LABELS),
        # far above the automatic rho, shifts between tables whose sum stays take longer
        *((loss, {"rho": 5.0, "num_epochs": 1200}, 4e-3, 3e-3) for loss in LABELS),
    ],
)
def test_plain_admm_and_any_rho_converge_too(loss, how, gradient, excess):
    finished = trained(loss, **{"num_epochs": 250, "one_site": True, **how})
    assert_optimal(finished, gradient=gradient, excess=excess)


@pytest.mark.cases("squared")
@each_loss
def test_consensus_reaches_the_same_optimum(loss):
    finished = trained(loss, "sharded", lou="consensus", num_epochs=300, one_site=True)
    assert finished.chosen["lou"]["o"] == "consensus"
    assert_optimal(finished, gradient=1e-3, excess=1e-5)


def test_one_table_is_centralised_ridge_in_a_few_epochs():
    orders = FRAMES["orders"]
    sql = "SELECT qty AS label, day, online FROM orders"
    finished = run_query(
        sql, [{"orders": orders}], l2=0.3, num_epochs=8, test_fraction=1e-9
    )
    features = orders[["day", "online"]].astype(float)
    scaled = (features - features.mean()) / features.std(ddof=0)
    dense = np.column_stack([scaled, np.ones(len(orders))])
    qty = orders["qty"].to_numpy()
    matrix = dense.T @ dense / len(orders) + np.diag([0.3, 0.3, 0.0])
    expected = np.linalg.solve(matrix, dense.T @ (qty - qty.mean()) / len(orders))
    np.testing.assert_allclose(finished.theta["orders"], expected, atol=1e-6)


def test_dealing_of_shards_to_sites_does_not_matter():
    orders, customers, items = sharded(FRAMES).values()
    expected = trained("logistic", "sharded")
    deals = [
        [{"orders": orders, "customers": customers, "items": items}],
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
    for cuts in ([5, 6], [20, 40, 50]):
        shards = {**whole(FRAMES), "orders": pieces(FRAMES["orders"], *cuts)}
        finished = run("softmax", one_per_site(shards), l2=L2, num_epochs=6)
        assert distance(finished.flat, expected.flat) < 1e-6


def test_seed_decides_the_split_and_repeats():
    again = run("squared", one_per_site(whole(FRAMES)), l2=L2, num_epochs=6)
    np.testing.assert_array_equal(again.flat, trained("squared").flat)
    assert (trained("squared", seed=1).tested["o"] != again.tested["o"]).any()


@pytest.mark.parametrize(("loss", "strategy", "how"), CASES["held_out"])
def test_held_out_rows_do_not_influence_training(loss, strategy, how):
    first = trained(loss, strategy=strategy, **how)
    held_out = first.tested["o"]
    assert 0 < held_out.sum() <= round(0.2 * len(FRAMES["orders"]))
    orders = FRAMES["orders"].copy()
    # other labels (of both classes), and features far away
    orders.loc[held_out, "qty"] = 6.0 - orders.loc[held_out, "qty"]
    orders.loc[held_out, "day"] += 1000
    sites = one_per_site(whole({**FRAMES, "orders": orders}))
    changed = run(loss, sites, strategy, l2=L2, num_epochs=6, **how)
    np.testing.assert_array_equal(changed.flat, first.flat)
    assert changed.losses == first.losses
    assert changed.history[-2].test != first.history[-2].test


@pytest.mark.cases("whole-squared", "sharded-logistic", "whole-softmax")
@each_loss
@each_layout
def test_metrics_are_those_of_the_joined_rows(loss, layout):
    finished = trained(loss, layout)
    reference = reference_of(finished)
    report = finished.report
    objective = finished.problem.objective
    scores = reference.scores(finished.flat, range(len(reference.labels)))
    expected = objective.metrics(scores)
    assert report.final_train == pytest.approx(expected, rel=1e-4, abs=1e-5)
    every = joins.joined_positions(whole(FRAMES), ALIASES, SOURCE)
    rows = np.array([row for row in every if finished.tested["o"][row[0]]])
    scores = np.tile(reference.base, (len(rows), 1))
    matrices = reference.split(finished.flat)
    for place, alias in enumerate(ALIASES):
        encoded = by_row(finished, layout, alias)
        inputs = np.array([encoded[row] for row in rows[:, place]])
        scores += inputs @ matrices[alias][: inputs.shape[1]]
        scores += matrices[alias][inputs.shape[1] :].sum(axis=0)
    held_out = objective.on({"target": store_labels(loss)[rows[:, 0], None]})
    expected = held_out.metrics(scores)
    assert report.final_test == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all("not converged" in warning for warning in report.warnings)
    labels = {"train": reference.labels, "test": store_labels(loss)[rows[:, 0]]}
    dummy = DummyRegressor() if loss == "squared" else DummyClassifier()
    dummy.fit(labels["train"][:, None], labels["train"])
    assert_compared(report.outcomes, labels, scores, dummy)


def assert_compared(outcomes, labels, scores, dummy):
    """Compare with scikit-learn's constant, counts and means."""
    is_number = isinstance(dummy, DummyRegressor)
    codes = range(max(scores.shape[1], 2))
    for part, values in labels.items():
        guess = dummy.predict(values[:, None])
        expected = {}
        if is_number:
            expected["rmse"] = sk.root_mean_squared_error(values, guess)
            expected["mae"] = sk.mean_absolute_error(values, guess)
        else:
            expected["accuracy"] = sk.accuracy_score(values, guess)
            rates = dummy.predict_proba(values[:, None])
            expected["log_loss"] = sk.log_loss(values, rates, labels=[*codes])
            counts = [of_class[part] for of_class in outcomes["classes"].values()]
            assert (
                counts == np.bincount(values.astype(int), minlength=len(codes)).tolist()
            )
        actual = outcomes["baseline"][part]
        assert {name: actual[name] for name in expected} == pytest.approx(expected)
    if is_number or scores.shape[1] == 1:
        predicted = scores[:, 0] if is_number else expit(scores[:, 0])
        tenths = np.array_split(np.argsort(scores[:, 0]), len(scores) // 10)
        for group, rows in zip(outcomes["deciles"], tenths, strict=True):
            means = predicted[rows].mean(), labels["test"][rows].mean()
            names = "rows", "predicted", "actual"
            assert tuple(group[name] for name in names) == pytest.approx(
                (len(rows), *means), rel=1e-4, abs=1e-5
            )
    if is_number:
        return
    if scores.shape[1] == 1:
        assert_ranked(outcomes, labels["test"], expit(scores[:, 0]))
    guess = scores[:, 0] > 0 if scores.shape[1] == 1 else scores.argmax(axis=1)
    matrix = sk.confusion_matrix(labels["test"], guess, labels=[*codes])
    assert [
        [*row.values()] for row in outcomes["confusion"].values()
    ] == matrix.tolist()


def assert_ranked(outcomes, labels, chances):
    """Compare the Brier score and the curve of thresholds with scikit-learn's."""
    brier = sk.brier_score_loss(labels, chances)
    assert outcomes["calibration"]["brier"] == pytest.approx(brier, rel=1e-4)
    ends = np.array([point["rows"] for point in outcomes["curve"]])
    roc = sk.roc_curve(labels, chances, drop_intermediate=False)
    taken = (chances >= roc[2][:, None]).sum(axis=1)
    for name, values in zip(("false_alarms", "recall"), roc, strict=False):
        assert [point[name] for point in outcomes["curve"]] == pytest.approx(
            np.interp(ends, taken, values).tolist()
        )


@pytest.mark.cases("admm-linear", "admm-mlp")
@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_the_unit_of_a_label_changes_nothing_but_the_unit_of_the_model(strategy, model):
    def fit(unit):
        orders = FRAMES["orders"].assign(qty=FRAMES["orders"]["qty"] * unit)
        sites = one_per_site(whole({**FRAMES, "orders": orders}))
        how = {"l2": 0.1}
        # the fits of a network take its time
        epochs = 2 if model == "mlp" else 4
        losses = run(
            "squared", sites, strategy, model=model, num_epochs=epochs, **how
        ).losses
        return [loss / unit**2 for loss in losses]

    expected = fit(1.0)
    assert expected[-1] < 0.9 * expected[0]
    for unit in (2.0**-13, 2.0**20):
        assert fit(unit) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("strategy", ["cg", "boost"])
def test_a_model_of_chance_is_no_better_than_a_constant_and_says_so(strategy):
    orders = FRAMES["orders"]
    chance = np.random.default_rng(1).permutation(orders["qty"])
    sites = one_per_site(whole({**FRAMES, "orders": orders.assign(qty=chance)}))
    how = {"min_rows_per_leaf": 2} if strategy == "boost" else {}
    report = run("squared", sites, strategy, **how).report
    model = report.final_test["rmse"]
    constant = report.outcomes["baseline"]["test"]["rmse"]
    words = f"no better than a constant: rmse {model:.4g} against {constant:.4g}"
    (warning,) = (
        text for text in report.warnings if "joined rows validate" not in text
    )
    assert words in warning


def test_names_of_losses_are_those_of_the_tests():
    # of labels of their own: tests/runs/objectives/test_families.py
    others = {"poisson", "gamma", "tweedie", "negative-binomial", "huber", "quantile"}
    # tests/runs/objectives/test_survival.py
    others.add("cox")
    assert set(names_of_losses()) == set(LABELS) | others, (
        "give it a label in LABELS of federated.py"
    )


def assert_one_message_per_site(finished: Run) -> None:
    for number in range(1, len(finished.history) + 1):
        nodes = [s.node for s in finished.seen if s.round == number and not s.is_reply]
        assert len(nodes) == len(set(nodes))
        replies = [s.node for s in finished.seen if s.round == number and s.is_reply]
        assert sorted(replies) == sorted(nodes)


@pytest.mark.parametrize(("layout", "how", "actions"), CASES["rounds"])
def test_rounds_per_epoch(layout, how, actions):
    finished = trained("squared", layout, num_epochs=3, **how)
    for epoch in (1, 2, 3):
        taken = [requests[0].action for requests in finished.requests(epoch)]
        assert taken == [f"train.{action}" for action in actions]
    assert_one_message_per_site(finished)
    set_up = [requests[0].action for requests in finished.requests(0)]
    fits = ["query.statistics", *(["query.fit"] if layout == "sharded" else [])]
    assert set_up == [
        "query.seal",
        "query.extract",
        *fits,
        "train.prepare",
        "query.finish",
    ]


def test_sites_are_sent_what_their_shards_need():
    finished = run("squared", [sharded(FRAMES)], num_epochs=2)
    assert_one_message_per_site(finished)
    assert {len(requests) for requests in finished.requests(1)} == {1}
    # only sites of sharded tables take the second round
    first, second = trained("squared", "mixed").requests(1)
    assert (len(first), len(second)) == (4, 2)


@pytest.mark.parametrize("loss", ["squared", "softmax"])
def test_bytes_of_join_only_admm_are_one_number_per_row_and_output(loss):
    totals = {}
    for orders in (100, 1000):
        sites = one_per_site(whole(store(orders=orders, customers=orders // 10)))
        finished = run(loss, sites, num_epochs=3, test_fraction=1e-9)
        federation = finished.problem
        rows = [table.total_rows for table in federation.tables.values()]
        floor = 4 * federation.response.outputs * np.array(rows)
        epochs = [item for item in finished.history if item.phase == "admm"]
        assert len(epochs) == 3
        for item in epochs:
            assert [item.bytes_up[alias] for alias in ALIASES] == floor.tolist()
            assert [item.bytes_down[alias] for alias in ALIASES] == floor.tolist()
        totals[orders] = epochs[-1].overhead_bytes
        # the record of the round is what went over the grid
        seen = [s for s in finished.seen if s.round == epochs[-1].round]
        assert sum(s.bytes for s in seen) == 2 * floor.sum() + totals[orders]
    # layouts name the number of rows: some more digits, and 8-byte alignment
    assert abs(totals[1000] - totals[100]) <= 6 * (2 + 8)
    assert totals[1000] < 6 * 1000


def test_held_out_rows_ride_up_but_not_down():
    finished = trained("squared")
    tables = finished.problem.tables
    item = next(item for item in finished.history if item.phase == "admm")
    for alias, table in tables.items():
        assert item.bytes_down[alias] == 4 * int(finished.trained[alias].sum())
        assert item.bytes_up[alias] == 4 * table.total_rows


def test_tolerance_stops_early():
    full = trained("squared", num_epochs=100)
    early = trained("squared", num_epochs=100, tolerance=1e-3)
    count = len(early.losses)
    assert 1 < count < 100
    ended = [item for item in early.history if item.train]
    before, last = (max(item.residuals.values()) for item in ended[-2:])
    assert last < 1e-3 <= before
    assert early.losses == full.losses[:count]
    assert early.seen[-1].action == "query.finish"


def test_result_is_flowers():
    finished = trained("logistic", num_epochs=3)
    result = finished.result
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert list(result.evaluate_metrics_serverapp) == [1, 2, 3]
    assert result.train_metrics_clientapp[3]["loss"] == finished.losses[-1]
    base = result.arrays["base-score"].numpy()
    np.testing.assert_array_equal(base, finished.problem.base_score)


def test_a_loss_beyond_that_of_a_constant_is_refused():
    for loss in (float("nan"), float("inf"), 201.0):
        with pytest.raises(
            DivergedError, match=r"epoch 3: .*num-epochs = 2 stops before"
        ):
            check_epoch(3, loss, 2.0)
    check_epoch(1, 200.0, 2.0)
    check_epoch(1, -5.0, 0.1)
    check_epoch(1, 99.0, -0.5)


def test_sgd_with_too_large_steps_stops_within_its_first_epochs():
    strategy = TablePuppetSGD(
        Query.from_sql(query()), num_epochs=50, learning_rate=30.0, batch_size=8
    )
    with pytest.raises((DivergedError, ReplyError), match="Lower learning-rate"):
        strategy.start(LocalGrid([whole(FRAMES)]))
    assert strategy.epoch < 50


@pytest.mark.parametrize(("layout", "share"), [("whole", 0.8), ("sharded", 0.95)])
def test_mlps_lower_the_loss_of_the_joined_rows(layout, share):
    finished = trained(
        "squared", layout, model="mlp", hidden_sizes=(8,), num_epochs=3, one_site=True
    )
    assert finished.losses[-1] < share * reference_of(finished).labels.var() / 2


def test_models_of_single_tables():
    finished = trained("squared", models=(("c", "mlp"),), num_epochs=2)
    tables = finished.problem.tables
    is_linear = {name: table.is_linear for name, table in tables.items()}
    assert is_linear == {"o": True, "c": False, "i": True}
