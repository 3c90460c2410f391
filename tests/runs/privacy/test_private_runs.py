"""Whole runs with their mechanisms on: what leaves, what it costs, what is refused.

A small federation in this process; the ledger is that of real sites, in memory.
"""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from client_apps.privacy.ledger_entries import _SEALED as SEALED
from strategies.report_page.page import result_view
from tests.support import federated
from tests.support.examples.store_runs import each_layout, each_loss
from tests.support.files import case_table
from tests.support.page_reading import console_text
from tp_flower.errors import SettingsError, SiteError
from tp_flower.learning.models.local_model import moment
from tp_flower.learning.solvers import gram
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import SCORES_TELL, Gaussian, Mechanism
from tp_flower.privacy.sealed_sums import joined_gram
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings

EPOCHS = 3
DELTA = 1e-5
CLEAR = PrivacySettings()
STATISTICS = PrivacySettings(features="statistics", epsilon=1.0, delta=DELTA)
UNBOUNDED = PrivacySettings(
    features="statistics", clip=10.0, target_clip=10.0, noise_multiplier=1e-9
)
EVERYTHING = {"labels": "randomised-response", "label_epsilon": 2.0, "predictions": 4.0}
CASES = case_table(__file__)
# where there is noise, nothing is mixed or balanced
PLAIN = {"over_relaxation": 1.0, "rho": 0.3, "l2": 0.01}


@functools.cache
def trained(
    privacy: PrivacySettings = CLEAR,
    strategy: str = "admm",
    layout: str = "sharded",
    loss: str = "logistic",
    **settings: object,
) -> federated.Run:
    sites = federated.one_per_site(federated.LAYOUTS[layout](federated.store()))
    settings = {"num_epochs": EPOCHS, "privacy": privacy, **settings}
    return federated.run(loss, sites, strategy, **settings)


def accounts(finished: federated.Run) -> list[dict]:
    return [one for own in finished.report.privacy["ledger"].values() for one in own]


def releases(finished: federated.Run) -> list[dict]:
    return [own["release"] for own in accounts(finished)]


def arrays_of(
    finished: federated.Run, name: str, action: str = "", *, is_reply: bool = True
) -> dict[tuple[int, int], np.ndarray]:
    """The arrays of a name that sites have sent, or were sent, by (round, part)."""
    return {
        (seen.round, number): array
        for seen in finished.seen
        if seen.is_reply == is_reply and seen.action in (action or seen.action)
        for (number, own), array in seen.arrays.items()
        if own == name
    }


def parts_of(finished: federated.Run) -> dict[int, tuple]:
    """By part: the encoded rows that are trained on, how often each, G, intercept."""
    federation = finished.problem
    found = {}
    for name, table in federation.tables.items():
        counts = federation.train.tables[name].multiplicity
        for part, rows in zip(table.parts, table.rows, strict=True):
            own = finished.features[name][rows.slice][: rows.trained]
            found[part.number] = (own, counts[rows.trained_slice], table.has_intercept)
    return found


@pytest.mark.cases("admm-dp-sgd-whole-settings2", "sgd-dp-sgd-whole-settings5")
@pytest.mark.parametrize(
    ("strategy", "features", "layout", "settings"), CASES["budgets"]
)
def test_a_run_spends_what_it_planned_and_no_more(strategy, features, layout, settings):
    privacy = PrivacySettings(features=features, epsilon=1.5, **EVERYTHING)
    finished = trained(privacy, strategy, layout, **{"batch_size": 20, **settings})
    for account in accounts(finished):
        if "limit" in account:
            assert account["used"] == account["limit"], account["release"]["what"]
    for total in finished.report.privacy["totals"]:
        assert total["models"] == pytest.approx(1.5, rel=5e-3)
        assert total["scores"] == pytest.approx(4.0, rel=1e-3)
        assert total["labels"] == (2.0 if total["table"] == "orders" else "")
        # of a table in one shard no statistics leave
        further = {"statistics"} if layout == "sharded" else set()
        assert set(total["uncovered"]) == {"keys", "counts"} | further


@each_layout
def test_each_site_has_paid_what_was_asked_for(layout):
    replies = trained(STATISTICS, layout=layout).sent("query.finish", replies=True)
    ledgers = [seen.header["ledger"] for seen in replies]
    assert len(ledgers) == (7 if layout == "sharded" else 3)
    for lines in ledgers:
        used = {
            line["release"]["what"]: Gaussian(
                mechanism["noise_multiplier"], line["used"]
            )
            for line in lines
            if (mechanism := line["release"]["mechanism"])
        }
        counts = {what: own.count for what, own in used.items()}
        assert counts == {"gram": 1, "moments": EPOCHS}
        assert 0.999 <= epsilon(list(used.values()), DELTA) <= 1.0


def test_every_release_is_reserved_before_it_leaves_and_named_in_words():
    released = releases(trained(STATISTICS))
    kinds = {release["what"] for release in released}
    clear = {"keys", "counts", "labels", "statistics", "scores"}
    assert kinds == clear | {"gram", "moments"}
    for release in released:
        assert release["unit"].split(" at ")[0].endswith(f"a row of {release['table']}")
        assert release["adversary"] == "server"
        assert release["scope"], release["what"]
        is_covered = release["mechanism"] is not None
        assert is_covered == (release["what"] in {"gram", "moments"})
        if is_covered:
            # the scores left as they are, and the targets are made from them
            assert "come from scores without noise" in release["scope"]


def test_with_scores_covered_the_guarantee_takes_less_for_granted():
    finished = trained(PrivacySettings(features="statistics", predictions=2.0))
    scopes = {release["what"]: release["scope"] for release in releases(finished)}
    assert scopes["scores"] == "given the encoder, whose statistics are not covered"
    assert scopes["moments"] == f"{SEALED}; {scopes['scores']}"
    # over-relaxation rests where there is noise
    assert finished.chosen["over-relaxation"] == 1.0


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_clear_runs_reserve_nothing(strategy):
    finished = trained(CLEAR, strategy, batch_size=20)
    assert not any(release["mechanism"] for release in releases(finished))
    for total in finished.report.privacy["totals"]:
        assert total["features"] == "none: sums of scores tell of the features"
        assert total["models"] in ("none", "")


def printed(report):
    """What the console shows of a run, in one line."""
    return " ".join(console_text(result_view(report_dict(report)), width=200).split())


@pytest.mark.parametrize("features", ["clear", "statistics"])
def test_scores_in_the_clear_leave_no_epsilon_to_print(features):
    finished = trained(PrivacySettings(features=features, scores="clear"))
    report = finished.report
    assert {total["features"] for total in report.privacy["totals"]} == {SCORES_TELL}
    scopes = {
        release["scope"]
        for release in releases(finished)
        if release["what"] == "scores"
    }
    assert scopes == {SCORES_TELL}
    assert "No epsilon of features: scores in the clear tell the features." in printed(
        report
    )


def test_a_multiplier_that_is_given_is_in_the_ledger():
    finished = trained(PrivacySettings(features="dp-sgd", noise_multiplier=2.5))
    mechanisms = [
        own["mechanism"] for own in releases(finished) if own["what"] == "model"
    ]
    assert {mechanism["noise_multiplier"] for mechanism in mechanisms} == {2.5}
    total = finished.report.privacy["totals"][0]["models"]
    assert total == pytest.approx(epsilon([Gaussian(2.5, count=20 * EPOCHS)], DELTA))


@pytest.mark.cases("sharded-squared", "whole-logistic", "whole-softmax")
@each_loss
@each_layout
def test_statistics_without_bounds_and_noise_train_as_ever(loss, layout):
    clear, noisy = (
        trained(privacy, layout=layout, loss=loss, **PLAIN)
        for privacy in (CLEAR, UNBOUNDED)
    )
    # targets travel as float32, and each epoch starts from the other's result
    for one, other in zip(noisy.parameters, clear.parameters, strict=True):
        for alias, theta in other.items():
            np.testing.assert_allclose(one[alias], theta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(noisy.losses, clear.losses, rtol=1e-6)
    for one, other in zip(noisy.history, clear.history, strict=True):
        assert one.test == pytest.approx(other.test, rel=1e-4)


@pytest.mark.cases("whole-squared-linear")
@pytest.mark.parametrize(("layout", "loss", "model"), CASES["without-noise"])
def test_gradients_without_noise_and_clip_train_as_ever(layout, loss, model):
    privacy = PrivacySettings(features="dp-sgd", noise_multiplier=1e-12, clip=1e6)
    noisy, clear = (
        trained(
            own,
            "sgd",
            layout,
            loss,
            batch_size=25,
            learning_rate=0.01,
            model=model,
            validation_fraction=0.0,
        )
        for own in (privacy, CLEAR)
    )
    # the report's epsilon of so little noise is beyond what floats hold
    histories = (own.strategy.history for own in (clear, noisy))
    for before, after in zip(*histories, strict=True):
        assert after.train == pytest.approx(before.train, rel=1e-4)


@each_layout
def test_no_statistic_leaves_as_it_is(layout):
    # what a shard seals, as it would leave in the clear
    private = trained(dataclasses.replace(STATISTICS, unions="clear"), layout=layout)
    parts = parts_of(private)
    grams = arrays_of(private, "share", "train.prepare")
    joined_rows = private.problem.train.joined_rows
    is_sharded = layout == "sharded"
    assert len(grams) == (7 if is_sharded else 0)
    alike = 0
    for (_, number), share in grams.items():
        features, counts, intercept = parts[number]
        matrix = joined_rows * joined_gram(share[:-1], features.shape[1] + intercept)
        exact = gram(features, counts, intercept=intercept)
        alike += np.count_nonzero((matrix == exact)[np.triu_indices(len(matrix))])
        np.testing.assert_array_equal(matrix, matrix.T)
    # noise stands on a grid, where a count may meet itself by chance; a number that no
    # shard covers would be alike in all of them
    assert alike <= 1
    moments = arrays_of(private, "share", "train.admm")
    assert len(moments) == (7 * EPOCHS if is_sharded else 0)
    assert len(arrays_of(private, "share")) == len(grams) + len(moments)


def test_moments_are_of_the_steps_that_the_server_sent():
    # scores with noise move the steps further than any label does
    privacy = dataclasses.replace(
        UNBOUNDED, target_clip=100.0, predictions=2.0, unions="clear"
    )
    finished = trained(privacy, loss="squared", **PLAIN)
    parts = parts_of(finished)
    steps = arrays_of(finished, "step", "train.admm", is_reply=False)
    sent = arrays_of(finished, "share", "train.admm")
    for (turn, number), sums in sent.items():
        features, counts, intercept = parts[number]
        weighted = counts[:, None] * steps[turn, number].astype(np.float64)
        expected = moment(features, weighted, intercept=intercept)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            sums[:-1], expected.ravel(), rtol=1e-4, atol=1e-4 * scale
        )
    assert len(sent) == 7 * EPOCHS


def test_what_leaves_has_the_noise_that_the_ledger_says():
    """Scores of constant models are clipped, and differ by their noise alone."""
    privacy = PrivacySettings(scores="clear", predictions=2.0, prediction_clip=0.5)
    # 1,875 draws: the bound is nine standard errors of their deviation
    epochs = 25
    finished = trained(privacy, layout="whole", l2=1e6, num_epochs=epochs)
    (mechanism,) = {
        msgspec.convert(release["mechanism"], Mechanism)
        for release in releases(finished)
        if release["what"] == "scores"
    }
    spent = epsilon([replace(mechanism, count=epochs)], DELTA)
    assert spent == pytest.approx(2.0, rel=1e-3)
    # the label table's intercept is not penalised: it moves its scores together
    sent = arrays_of(finished, "scores").values()
    residual = np.concatenate([own - own.mean() for own in sent])
    assert len(residual) > 1800
    assert residual.std() == pytest.approx(0.5 * mechanism.noise_multiplier, rel=0.15)


@pytest.mark.cases("dp-sgd-train.admm-consensus")
@pytest.mark.parametrize(("features", "action", "lou"), CASES["anew"])
def test_noise_is_drawn_anew_by_every_shard_and_run(features, action, lou):
    """Twice the same run: what is private differs, what is not is the same."""
    clear = PrivacySettings(unions="clear")
    private = dataclasses.replace(clear, features=features, epsilon=1.0)
    how = {"batch_size": 60, "num_epochs": 1}
    strategy = "sgd" if action == "train.sgd" else "admm"
    for privacy, settings in ((private, how), (clear, {**how, "lou": lou})):
        one, other = (
            arrays_of(
                trained.__wrapped__(privacy, strategy, **settings), "share", action
            )
            for _ in range(2)
        )
        assert one.keys() == other.keys()
        assert one
        for place, array in one.items():
            assert array.dtype == np.float64
            assert np.array_equal(array, other[place]) == (privacy == clear)


@pytest.mark.parametrize(("lou", "features", "match"), CASES["uncovered"])
def test_a_way_over_shards_that_a_mechanism_does_not_cover(lou, features, match):
    with pytest.raises(SettingsError, match=match):
        trained(PrivacySettings(features=features), lou=lou)


def test_a_model_that_dp_sgd_cannot_train_is_refused_before_training():
    grid = federated.WatchedGrid(
        federated.one_per_site(federated.sharded(federated.store()))
    )
    how = {"model": "tests.runs.privacy.test_private_runs:with_batch_norm"}
    how["privacy"] = PrivacySettings(features="dp-sgd")
    match = r"layer '1' \(BatchNorm1d\) has no gradients row by row"
    with pytest.raises(SiteError, match=match):
        federated.train(grid, federated.store_sql("logistic"), **how)
    assert grid.sent("train.prepare")
    assert not grid.sent("train.admm")


def with_batch_norm(features, outputs, intercept):
    from torch import nn

    last = nn.Linear(4, outputs, bias=intercept)
    return nn.Sequential(nn.Linear(features, 4), nn.BatchNorm1d(4), last)
