"""A number with two values is a label of classes, wherever its values are; others stay
numbers.
"""

import numpy as np
import pandas as pd
import pytest

from client_apps.privacy.local_labels import local_label_facts
from strategies import Explain
from tests.support import predicted
from tests.support.examples.explained import printed
from tests.support.federated import WatchedGrid, train
from tp_flower.errors import QueryError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.settings import PrivacySettings
from tp_flower.sources.policy import NEVER, PRIVATE, Policy, Releases
from tp_flower.sources.tables_file import ShardSource

ROWS = 80
JOIN = "FROM o JOIN c ON o.k = c.k"
SQL = f"SELECT o.y AS label, o.x, c.z {JOIN}"
REMEDY = 'to train on the numbers set task = "regression"'


def sites(values, kind=float):
    """Two sites with a value of the label each, and one of the joined table."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=ROWS)
    k = rng.integers(0, 9, ROWS)
    z = rng.normal(size=9)
    is_high = x + z[k] + 0.5 * rng.logistic(size=ROWS) > 0
    rows = pd.DataFrame(
        {"y": np.where(is_high, values[1], values[0]).astype(kind), "x": x, "k": k}
    )
    shards = [rows[~is_high], rows[is_high]]
    tables = [{"o": [shard.reset_index(drop=True)]} for shard in shards]
    return [*tables, {"c": [pd.DataFrame({"k": range(9), "z": z})]}]


@pytest.mark.cases("values0-*", "values2-*", "values4-*")
@pytest.mark.parametrize(
    ("values", "kind", "names"),
    [
        ((0, 1), int, "0 and 1"),
        ((0, 1), float, "0 and 1"),
        ((-1, 1), "int8", "-1 and 1"),
        ((1, 2), int, "1 and 2"),
        ((0.25, 7.5), float, "0.25 and 7.5"),
    ],
)
def test_two_values_over_all_shards_are_classes_and_the_line_says_so(
    values, kind, names
):
    def report_of(**settings):
        return train(sites(values, kind), SQL, "cg", seed=3, **settings).report

    run = report_of()
    line = f"classification, because the label has two values, {names}; {REMEDY}"
    assert run.chosen["task"] == line
    assert run.chosen["loss"] == "logistic"
    assert run.final_train == report_of(task="classification").final_train
    assert list(run.outcomes["classes"]) == names.split(" and ")
    # the remedy, as the line has it
    assert "rmse" in report_of(task="regression").final_train


@pytest.mark.parametrize("strategy", ["admm", "sgd", "gd", "boost"])
def test_every_strategy_trains_on_classes(strategy):
    more = {"batch_size": 20} if strategy == "sgd" else {}
    run = train(sites((0, 1), int), SQL, strategy, num_epochs=2, **more).report
    assert {"auc", "log_loss"} <= run.final_train.keys()


def test_decimals_of_two_values_are_classes():
    rates = SQL.replace("o.y", "CAST(o.y AS DECIMAL(6, 2))")
    chosen = train(sites((0.5, 2)), rates, "cg").report.chosen["task"]
    assert "two values, 0.5 and 2" in chosen


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (
            "1 + CAST(abs(o.x) * 1e6 AS BIGINT) % 5",
            "it has 5 values, from 1 to 5; .* as classes",
        ),
        (
            "(1 + CAST(abs(o.x) * 1e6 AS BIGINT) % 10) / 2",
            "10 values, from 0.5 to 5; to train",
        ),
        ("o.x * 3", "because the label is a number$"),
    ],
)
def test_ratings_and_other_numbers_stay_numbers(label, words):
    sql = SQL.replace("o.y", label)
    run = train(sites((0, 1)), sql, "cg").report
    assert "rmse" in run.final_train
    assert run.chosen["task"].startswith("regression, because the label is a number")
    assert pd.Series([run.chosen["task"]]).str.contains(words).all()
    if "set task" in run.chosen["task"]:
        classes = train(sites((0, 1)), sql, "cg", task="classification").report
        assert "auc" in classes.final_train


def test_the_line_is_in_the_explanation():
    explained = train(sites((0, 1), int), SQL, Explain).explanation
    line = f"Task: classification, because the label has two values, 0 and 1; {REMEDY}."
    assert line in " ".join(printed(explained, is_full=False).split())


@pytest.mark.parametrize(
    ("strategy", "settings", "setting"),
    [
        ("cg", {"loss": "squared"}, "loss = 'squared'"),
        ("coreset-ridge", {"coreset_size": 40, "num_epochs": 0}, "the strategy"),
    ],
)
def test_what_is_for_numbers_keeps_them_numbers(strategy, settings, setting):
    run = train(sites((0, 1), int), SQL, strategy, **settings).report
    assert run.chosen["task"] == f"regression, because {setting} is for numbers"
    assert "rmse" in run.final_train


def test_noisy_numbers_are_not_counted():
    """Labels with noise are of the kind that the settings declare, whatever their
    values are.
    """
    noisy = PrivacySettings(labels="laplace", label_epsilon=4.0, label_range="0, 1")
    run = train(sites((0, 1)), SQL, "cg", privacy=noisy).report
    assert run.chosen["task"] == "regression, because the label is a number"
    declared = PrivacySettings(
        labels="randomised-response", label_epsilon=4.0, label_classes="0, 1"
    )
    run = train(sites((0, 1)), SQL, "cg", privacy=declared).report
    line = "classification, because the noise on the label is for classes"
    assert run.chosen["task"] == line


def named(tables):
    return {f"s{number}": own for number, own in enumerate(tables)}


def test_a_saved_model_predicts_the_numbers_and_refuses_a_third(tmp_path):
    trained = sites((-1, 1), int)
    model = predicted.train(tmp_path, named(trained), SQL, "cg")
    assert model.manifest.classes == ("-1", "1")
    table = model.table(named(trained))
    values = table["prediction"].to_numpy()
    assert values.dtype.kind == "i"
    assert set(values) == {-1, 1}
    chances = table["probability.1"].to_numpy()
    assert (values == np.where(chances > 0.5, 1, -1)).all()
    # rows of one class alone are measured as that class
    ones = [{"o": [trained[1]["o"][0]]}, {"o": [trained[1]["o"][0]]}, trained[2]]
    accuracy = model.evaluate(named(ones))["accuracy"]
    high = table["probability.1"].to_numpy()[(ROWS - len(ones[0]["o"][0])) :]
    assert accuracy == pytest.approx((high > 0.5).mean())
    strange = [{"o": [trained[0]["o"][0].assign(y=3)]}, *trained[1:]]
    with pytest.raises(
        QueryError, match=r"1 classes that the model does not know \('3'\)"
    ):
        model.evaluate(named(strange))


def of_carriers(*labels):
    """Sites of one table, with the labels of their rows, in turn."""
    rng = np.random.default_rng(1)
    frames = [
        pd.DataFrame({"y": np.resize(own, 30), "a": rng.normal(size=30)})
        for own in labels
    ]
    return {f"s{number}": {"t": [own]} for number, own in enumerate(frames)}


@pytest.mark.parametrize(
    ("labels", "settings", "is_classes", "shown"),
    [
        # no site has both values
        (([0], [1], [1]), {}, True, [[0.0], [1.0], [1.0]]),
        (([0, 1], [1]), {}, True, [[0.0, 1.0], [1.0]]),
        # three values between them, or at one of them
        (([0, 1], [1, 2]), {}, False, [[0.0, 1.0], [1.0, 2.0]]),
        (([0, 1], [1, 2, 3]), {}, False, [[0.0, 1.0], None]),
        # a label that stays a number is not shown
        (([0, 1], [1, 0]), {"loss": "squared"}, False, [None, None]),
        (([0, 1], [1, 0]), {"task": "regression"}, False, [None, None]),
    ],
)
def test_labels_that_stay_at_their_sites(labels, settings, is_classes, shown):
    sql = "SELECT y AS label, a FROM t"
    with WatchedGrid(of_carriers(*labels)) as grid:
        run = train(grid, sql, "personalised", **settings).report
    replies = grid.sent("query.extract", replies=True)
    parts = [part for seen in replies for part in seen.header["parts"]]
    assert [part["label"].get("classes") for part in parts] == shown
    assert ("accuracy" in run.final_train) == is_classes
    if is_classes:
        assert run.chosen["task"].startswith(
            "classification, because the label has two values"
        )


@pytest.mark.parametrize(
    ("values", "policy", "min_count", "classes"),
    [
        ([0, 1, 1, 0], Policy(), 1, [0.0, 1.0]),
        ([0, 1, 1, 0], Policy(), 2, [0.0, 1.0]),
        # too few rows of a class; labels that may not leave as they are; three values
        ([0, 1, 1, 1], Policy(), 2, None),
        ([0, 1, 1, 0], Policy(releases=Releases(labels=PRIVATE)), 1, None),
        ([0, 1, 1, 0], Policy(releases=Releases(labels=NEVER)), 1, None),
        ([0, 1, 2, 0], Policy(), 1, None),
        ([], Policy(), 1, []),
    ],
)
def test_a_site_shows_two_values_only_as_its_policy_lets_labels_leave(
    values, policy, min_count, classes
):
    source = ShardSource("t", "s", 0, policy=policy, min_count=min_count)
    label = LabelColumn("number", np.array(values, np.float64))
    assert local_label_facts(source, label, "auto", "y").classes == classes
    assert local_label_facts(source, label, "regression", "y").classes is None
