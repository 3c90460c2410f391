"""Whole runs on noisy labels: what travels, what it gives away, what is learned."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from strategies.explain.explanation import Explain
from strategies.run.exchange import Part
from strategies.setup.labels import read_private_labels
from strategies.setup.problem import TrainingProblem
from tests.support import federated
from tests.support.examples.site_examples import noise_of_known_keys
from tests.support.federated import WatchedGrid
from tests.support.files import case_table
from tp_flower.errors import ReplyError, SettingsError, SiteError
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.objectives.logistic import sigmoid
from tp_flower.privacy.label_mechanisms import LabelPlan, epsilon_of_noise
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.terms.extraction import label_plan

__all__ = ["noise_of_known_keys"]

CASES = case_table(__file__)
ROWS = 6000
CERTAIN = 100.0  # epsilon at which no class is ever changed
SQL = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.id = b.id"


def pairs(rows=ROWS):
    """Two tables, one row of b for each of a: what b's site is sent is of one label."""
    rng = np.random.default_rng(4)
    x, z = rng.normal(size=(2, rows))
    y = rng.random(rows) < sigmoid(0.8 * x - 1.2 * z - 0.5)
    ids = rng.permutation(rows)
    a = pd.DataFrame({"id": ids, "x": x, "y": y})
    b = pd.DataFrame({"id": ids, "z": z}).sample(frac=1, random_state=1)
    return a, b.reset_index(drop=True)


def train(grid, sql, privacy, strategy="admm", **settings):
    settings = Settings(strategy=strategy, device="cpu", privacy=privacy, **settings)
    return federated.train(grid, sql, strategy, settings=settings)


def train_pairs(privacy, strategy="admm", **settings):
    a, b = pairs()
    grid = WatchedGrid([{"a": [a[:2500], a[2500:]]}, {"b": b}])
    return grid, train(grid, SQL, privacy, strategy, num_epochs=3, **settings)


def train_store(loss, privacy, strategy="admm", frames=None, **settings):
    shards = federated.sharded(federated.store() if frames is None else frames)
    grid = WatchedGrid(federated.one_per_site(shards))
    return train(grid, federated.store_sql(loss), privacy, strategy, **settings)


def response(epsilon, **fields):
    fields |= {"labels": "randomised-response", "label_epsilon": epsilon}
    return PrivacySettings(**fields)


@pytest.mark.cases(
    "admm-softmax-laplace",
    "sgd-softmax-randomised-response",
    "cg-logistic-randomised-response",
    "boost-logistic-laplace",
)
@pytest.mark.parametrize("mechanism", ["laplace", "randomised-response"])
@pytest.mark.parametrize("loss", ["logistic", "softmax"])
@pytest.mark.parametrize(
    ("strategy", "course"),
    [
        ("admm", {"num_epochs": 4}),
        # noisy labels leave nothing to regions and effects of keys
        ("boost", {"num_epochs": 4, "regions": "none", "effects": "none"}),
        ("cg", {"num_epochs": 4}),
        ("sgd", {"num_epochs": 2, "batch_size": 20}),
    ],
    ids=["admm", "boost", "cg", "sgd"],
)
def test_noise_that_changes_no_class_changes_no_figure(
    loss, mechanism, strategy, course
):
    classes = ("a", "b", "c") if loss == "softmax" else ()
    private = PrivacySettings(
        labels=mechanism, label_epsilon=CERTAIN, label_classes=classes
    )
    clear, noisy = (
        train_store(loss, privacy, strategy, **course).report
        for privacy in (PrivacySettings(), private)
    )
    # but for the rounding of what is left, and where the z-update's iteration stops
    assert noisy.final_train == pytest.approx(clear.final_train, rel=1e-8)
    assert noisy.final_test == pytest.approx(clear.final_test, rel=1e-8)


def test_listed_classes_are_numbered_as_listed():
    privacy = PrivacySettings(
        labels="laplace", label_epsilon=CERTAIN, label_classes=("c", "a", "b", "never")
    )
    problem = train_store("softmax", privacy, num_epochs=1).training_problem
    assert problem.classes == ("c", "a", "b", "never")
    assert problem.response.outputs == 4
    assert set(problem.objective.target.numbers) == {0.0, 1.0, 2.0}


def true_labels():
    """Of a's rows in the order of the shards."""
    return pairs()[0]["y"].to_numpy()


def labels_sent(grid):
    arrays = grid.arrays("query.extract", replies=True)
    keys = sorted(key for key in arrays if key[1] == "label-values")
    return np.concatenate([arrays[key] for key in keys])


def guessed_by_other_site(grid, method, action, array):
    """What b's site guesses of a's labels by the sign of what it is sent per row.

    Its rows' derivatives of the loss, p - y, are below zero where y = 1; a step goes
    against them.
    """
    a, b = pairs()
    truth = a.set_index("id")["y"][b["id"]].to_numpy()
    (part,) = method.training_problem.tables["b"].parts
    key = part.number, array
    told = next(s.arrays[key] for s in grid.sent(action) if key in s.arrays)
    masks = grid.arrays("train.prepare")
    rows = np.flatnonzero(np.unpackbits(masks[part.number, "trained"], count=len(b)))
    if array == "step":
        return ((told[:, 0] > 0) == truth[rows]).mean(), len(rows)
    start = masks[part.number, "batch-start"]
    first = grid.sent("train.sgd")[0].header["batch"]
    rows = rows[masks[part.number, "batch-rows"][start[first] : start[first + 1]]]
    return ((told[:, 0] < 0) == truth[rows]).mean(), len(rows)


MECHANISMS = [
    (PrivacySettings(), 1.0),
    (response(2.0), 0.881),
    (response(1.0), 0.731),
    (response(0.01), 0.502),
    (PrivacySettings(labels="laplace", label_noise=0.5), 0.929),
    (PrivacySettings(labels="laplace", label_epsilon=0.02), 0.502),
]
NAMES = [f"{p.labels}-{p.label_epsilon or p.label_noise:g}" for p, _ in MECHANISMS]


@pytest.mark.parametrize(("privacy", "expected"), MECHANISMS, ids=NAMES)
def test_labels_are_guessed_from_messages_as_often_as_the_noise_allows(
    privacy, expected
):
    grid, method = train_pairs(privacy, test_fraction=0.0)
    plan = label_plan(Settings(privacy=privacy))
    keep = plan.noise.keep if plan else 1.0
    assert keep == pytest.approx(expected, abs=5e-4)
    assert_as_often((labels_sent(grid) == true_labels()).mean(), ROWS, keep)
    found, rows = guessed_by_other_site(grid, method, "train.admm", "step")
    assert rows == ROWS
    assert_as_often(found, rows, keep)


@pytest.mark.parametrize(("privacy", "expected"), MECHANISMS[:3], ids=NAMES[:3])
def test_labels_are_guessed_from_derivatives_as_often_as_the_noise_allows(
    privacy, expected
):
    grid, method = train_pairs(privacy, "sgd", test_fraction=0.0, batch_size=2000)
    found, rows = guessed_by_other_site(grid, method, "train.sgd", "messages")
    assert rows == 2000
    assert_as_often(found, rows, expected)


def assert_as_often(found, rows, keep):
    assert abs(found - keep) <= 3.5 * np.sqrt(keep * (1 - keep) / rows) + 5e-4


def test_no_true_label_is_in_any_message():
    """With noise of a sixteenth, no array of one number per row is the labels'."""
    grid, _ = train_pairs(response(np.log(15.0)))
    truth = true_labels()
    shards = (truth, truth[:2500], truth[2500:])
    for array in (own for seen in grid.seen for own in seen.arrays.values()):
        flat = np.asarray(array, np.float64).ravel()
        for own in shards:
            if len(flat) == len(own):
                assert (flat != own).mean() > 0.03


def learned(monkeypatch, privacy):
    """The held-out rows' scores, and the strategy that found them."""
    kept = []
    measure = TrainingProblem.held_out_metrics

    def keep(federation, local):
        kept.append(federation.read_scores(federation.test.expand(local)))
        return measure(federation, local)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingProblem, "held_out_metrics", keep)
        _, method = train_pairs(privacy)
    return kept[-1], method


def test_the_correction_learns_what_the_true_labels_teach(monkeypatch):
    scores, clear = learned(monkeypatch, PrivacySettings())
    truth = clear.training_problem.held_out
    best = truth.metrics(scores)
    found, method = learned(monkeypatch, response(1.0))
    raw, uncorrected = learned(monkeypatch, response(1.0, label_correction=False))
    corrected = truth.metrics(found)
    biased = truth.metrics(raw)
    assert corrected["log_loss"] - best["log_loss"] < 0.01
    assert biased["log_loss"] - best["log_loss"] > 0.04
    # and says so: the estimate is of the true labels' metric, else of the noise's
    reported = method.report.final_test
    assert clear.report.outcomes.keys() == {
        *("baseline", "classes", "confusion", "deciles", "calibration", "curve")
    }
    # counts would be those of the noisy labels
    assert all(
        each.report.outcomes.keys() == {"baseline"} for each in (method, uncorrected)
    )
    assert reported["log_loss"] == pytest.approx(corrected["log_loss"], abs=0.08)
    assert reported["accuracy"] == pytest.approx(corrected["accuracy"], abs=0.1)
    assert uncorrected.report.final_test["accuracy"] < biased["accuracy"] - 0.05


def test_numbers_with_noise_are_regressed():
    privacy = PrivacySettings(
        labels="laplace", label_epsilon=5.0, label_range=(0.0, 8.0)
    )
    plain = replace(privacy, label_correction=False)
    how = {"frames": federated.store(2000, 300), "task": "regression"}
    clear, noisy, raw = (
        train_store("squared", own, **how).report
        for own in (PrivacySettings(), privacy, plain)
    )
    # noise of variance 2 (8/5)^2 = 5.1 on labels whose residuals have about 0.5
    assert raw.final_test["rmse"] > 2.0
    assert noisy.final_test["loss"] == pytest.approx(clear.final_test["loss"], abs=0.9)
    gap = raw.final_train["loss"] - noisy.final_train["loss"]
    assert gap == pytest.approx((8 / 5) ** 2, rel=0.5)


def site_files(folder):
    a, b = pairs(400)
    policy = "epsilon = 2\nreleases = {models = 'clear', scores = 'clear', "
    policies = {"a": policy + "statistics = 'clear'}"}
    sites = federated.site_per_table(folder, {"a": a, "b": b}, policies)
    return WatchedGrid(sites, state=folder / "state")


def test_a_rerun_uses_and_pays_for_the_same_labels(tmp_path):
    first = site_files(tmp_path)
    second = site_files(tmp_path)
    one = train(first, SQL, response(1.5), num_epochs=1)
    # another method, other features, the same labels
    other = SQL.replace("a.x, ", "")
    train(second, other, response(1.5), "sgd", num_epochs=1)
    np.testing.assert_array_equal(labels_sent(first), labels_sent(second))
    assert one.training_problem is not None
    with pytest.raises(SiteError, match=r"has spent epsilon 1.5 of 2 .* requested: 1"):
        train(site_files(tmp_path), SQL, response(1.0), num_epochs=1)


def test_explaining_a_run_draws_the_labels_that_it_will_train_on(tmp_path):
    grid = site_files(tmp_path)
    settings = Settings(mode="explain", privacy=response(1.5))
    federated.train(grid, SQL, Explain, settings=settings)
    later = site_files(tmp_path)
    train(later, SQL, response(1.5), num_epochs=1)
    np.testing.assert_array_equal(labels_sent(grid), labels_sent(later))


@pytest.mark.parametrize(
    ("plan", "match"),
    [*CASES["plans"], (None, "'label-privacy': the run was proposed with")],
)
def test_a_plan_that_a_server_has_weakened_gets_no_labels(tmp_path, plan, match):
    grid = site_files(tmp_path)

    @federated.on_requests("query.extract")
    def change(seen):
        for order in seen.header["parts"]:
            order["label-privacy"] = plan

    grid.change = change
    with pytest.raises(SiteError, match=match):
        train(grid, SQL, response(1.0))
    sent = grid.sent("query.extract", replies=True)
    arrays = [seen.arrays for seen in sent if "error" in seen.header]
    assert arrays
    assert not any(arrays)


@pytest.mark.parametrize(("task", "labels", "fields", "match"), CASES["settings"])
def test_settings_that_do_not_fit_the_task_are_refused(task, labels, fields, match):
    fields = {name: tuple(values) for name, values in fields.items()}
    privacy = PrivacySettings(labels=labels, label_epsilon=1.0, **fields)
    with pytest.raises(SettingsError, match=match):
        label_plan(Settings(task=task, privacy=privacy))


def test_the_plan_of_the_settings():
    def plan(**fields):
        return label_plan(Settings(privacy=PrivacySettings(**fields)))

    assert plan() is None
    assert plan(labels="laplace", label_noise=0.5) == LabelPlan(
        "laplace", epsilon_of_noise(0.5)
    )
    noisy_number = plan(labels="laplace", label_noise=0.5, label_range=(1.0, 5.0))
    assert noisy_number.noise.variance == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("plan", "column"),
    [
        ({}, ("number", np.ones(2))),
        ({}, ("boolean", np.array([0.0, 0.5]))),
        ({}, ("boolean", np.array([0.0, np.nan]))),
        ({"classes": ("a", "b")}, ("text", np.zeros(2), ("b", "a"))),
        ({"limits": (0.0, 1.0)}, ("number", np.array([0.0, np.nan]))),
    ],
)
def test_labels_that_are_not_what_the_plan_makes_are_refused(plan, column):
    pairs = [(Part(0, "a", "shop", 2, 0), LabelColumn(*column))]
    with pytest.raises(ReplyError, match=r"'shop'.*labels without the noise"):
        read_private_labels(pairs, LabelPlan("laplace", 1.0, **plan))
