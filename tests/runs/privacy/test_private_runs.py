"""Whole runs with their mechanisms on: what leaves, what it costs, what is refused.

A small federation in this process; the ledger is that of real sites, in memory.
"""

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from client_apps.app import app
from client_apps.rounds.site import Site
from strategies import STRATEGIES
from strategies.run.grid import InProcessGrid
from tests.support.federated import one_per_site, sharded, store, store_sql, whole
from tp_flower.errors import SettingsError, SiteError
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Gaussian, Mechanism
from tp_flower.protocol.packet import unpack
from tp_flower.query import Query
from tp_flower.settings import PrivacySettings, Settings

EPOCHS = 3
NO_NOISE = 1e-12
EVERYTHING = {
    "labels": "randomised-response",
    "label_epsilon": 2.0,
    "predictions": 4.0,
}


def train(
    privacy, strategy="admm", *, shards=sharded, loss="logistic", seen=None, **settings
):
    """Return the strategy after a run, and all messages."""
    seen = [] if seen is None else seen
    grid = InProcessGrid(app, one_per_site(shards(store())), observe=seen.append)
    settings = {"num_epochs": EPOCHS, **settings}
    own = Settings(strategy=strategy, device="cpu", privacy=privacy, **settings)
    method = STRATEGIES[strategy](Query.from_sql(store_sql(loss)), own)
    method.start(grid)
    return method, seen


def accounts(method):
    """All records of the sites' ledgers."""
    return [one for own in method.report.privacy["ledger"].values() for one in own]


def arrays(seen, name):
    """What every reply carried under a name, by part, in order."""
    found = {}
    for message in seen:
        if message.metadata.reply_to_message_id:
            for (part, other), array in unpack(message.content).arrays.items():
                if other == name:
                    found.setdefault(part, []).append(np.array(array))
    return found


WAYS = [
    ("admm", "statistics", {}),
    ("admm", "dp-sgd", {}),
    ("admm", "dp-sgd", {"inner_rounds": 2}),
    ("admm", "dp-sgd", {"model": "mlp"}),
    ("sgd", "dp-sgd", {}),
    ("sgd", "dp-sgd", {"staleness": 1}),
    ("sgd", "dp-sgd", {"model": "mlp"}),
]


@pytest.mark.parametrize("shards", [whole, sharded])
@pytest.mark.parametrize(("strategy", "features", "settings"), WAYS)
def test_a_run_spends_what_it_planned_and_no_more(strategy, features, settings, shards):
    settings = {"batch_size": 20, **settings}
    privacy = PrivacySettings(features=features, epsilon=1.5, **EVERYTHING)
    method, _ = train(privacy, strategy, shards=shards, **settings)
    for account in accounts(method):
        if "limit" in account:
            assert account["used"] == account["limit"], account["release"]["what"]
    for total in method.report.privacy["totals"]:
        # models 1.5 and scores 4, composed; the labels' 2 on top
        has_label = total["table"] == "orders"
        assert 4.0 < total["epsilon"] < 1.5 + 4.0 + 2.0 * has_label + 1e-6
        assert set(total["uncovered"]) == {"keys", "counts", "statistics"}


def test_every_release_is_reserved_before_it_leaves_and_named_in_words():
    privacy = PrivacySettings(features="statistics")
    method, _ = train(privacy)
    kinds = {own["release"]["what"] for own in accounts(method)}
    assert kinds == {
        *("keys", "counts", "labels", "statistics", "gram", "moments", "scores")
    }
    for own in accounts(method):
        release = own["release"]
        assert release["unit"].split(" at ")[0].endswith(f"a row of {release['table']}")
        assert release["adversary"] == "server"
        assert release["scope"], release["what"]
        is_covered = release["mechanism"] is not None
        assert is_covered == (release["what"] in {"gram", "moments"})
        if is_covered:
            # the scores left as they are, and the targets are made from them
            assert "come from scores without noise" in release["scope"]


def test_with_scores_covered_the_guarantee_takes_less_for_granted():
    privacy = PrivacySettings(features="statistics", predictions=2.0)
    method, _ = train(privacy)
    scopes = {
        own["release"]["what"]: own["release"]["scope"] for own in accounts(method)
    }
    assert scopes["moments"] == "given the encoder, whose statistics are not covered"
    assert scopes["scores"] == scopes["moments"]


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_clear_runs_reserve_nothing(strategy):
    method, _ = train(PrivacySettings(), strategy, batch_size=20)
    assert not any(own["release"]["mechanism"] for own in accounts(method))
    assert {total["epsilon"] for total in method.report.privacy["totals"]} == {0.0}


@pytest.mark.parametrize("shards", [whole, sharded])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_statistics_without_noise_and_clip_train_as_ever(shards, loss):
    privacy = PrivacySettings(
        features="statistics",
        noise_multiplier=NO_NOISE,
        clip=20.0,
        target_clip=20.0,
    )
    noisy, _ = train(privacy, shards=shards, loss=loss)
    plain, _ = train(
        PrivacySettings(),
        shards=shards,
        loss=loss,
        anderson_memory=0,
        over_relaxation=1.0,
        rho=noisy.chosen["rho"],
        lou="gram",
    )
    for before, after in zip(plain.history, noisy.history, strict=True):
        assert after.train == pytest.approx(before.train, rel=1e-4)
        assert after.test == pytest.approx(before.test, rel=1e-4)


@pytest.mark.parametrize(
    ("shards", "loss", "model"),
    [
        (whole, "squared", "linear"),
        (sharded, "logistic", "linear"),
        (sharded, "squared", "mlp"),
    ],
)
def test_gradients_without_noise_and_clip_train_as_ever(shards, loss, model):
    settings = {"batch_size": 25, "learning_rate": 0.01, "model": model}
    privacy = PrivacySettings(
        features="dp-sgd", noise_multiplier=NO_NOISE, clip=1e6, predictions=0.0
    )
    noisy, _ = train(privacy, "sgd", shards=shards, loss=loss, **settings)
    plain, _ = train(PrivacySettings(), "sgd", shards=shards, loss=loss, **settings)
    for before, after in zip(plain.history, noisy.history, strict=True):
        assert after.train == pytest.approx(before.train, rel=1e-4)


def test_what_leaves_has_the_noise_that_the_ledger_says():
    """Scores of constant models are clipped, and differ by their noise alone."""
    privacy = PrivacySettings(predictions=2.0, prediction_clip=0.5)
    method, seen = train(privacy, shards=whole, l2=1e6)
    sent = np.concatenate(
        [own for each in arrays(seen, "scores").values() for own in each]
    )
    (mechanism,) = {
        msgspec.convert(own["release"]["mechanism"], Mechanism)
        for own in accounts(method)
        if own["release"]["what"] == "scores"
    }
    assert epsilon([replace(mechanism, count=EPOCHS)], 1e-5) == pytest.approx(
        2.0, rel=1e-3
    )
    # the label table's intercept is not penalised: it moves its scores together
    expected = 0.5 * mechanism.noise_multiplier
    residual = np.concatenate(
        [own - own.mean() for each in arrays(seen, "scores").values() for own in each]
    )
    assert len(sent) > 200
    assert residual.std() == pytest.approx(expected, rel=0.15)


def test_noisy_statistics_are_of_the_scores_that_arrived():
    """A site's moments are of the target less what the server made it from."""
    privacy = PrivacySettings(features="statistics", epsilon=8.0, predictions=2.0)
    arrived, compared = {}, 0

    def compare(message):
        nonlocal compared
        metadata = message.metadata
        if metadata.message_type != "train.admm":
            return
        numbers = unpack(message.content).arrays
        if metadata.reply_to_message_id:
            arrived.update({part: array for (part, _), array in numbers.items()})
            return
        site = Site(grid.contexts[metadata.dst_node_id], grid.run_name)
        vectors = {part.number: part.vectors for part in site.parts()}
        for part in arrived.keys() & {part for part, _ in numbers}:
            np.testing.assert_array_equal(vectors[part]["sent"], arrived[part])
            compared += 1

    grid = InProcessGrid(app, one_per_site(whole(store())), observe=compare)
    own = Settings(num_epochs=EPOCHS, device="cpu", privacy=privacy)
    try:
        STRATEGIES["admm"](Query.from_sql(store_sql("squared")), own).start(grid)
    finally:
        grid.close()
    assert compared == 2 * EPOCHS


def test_parameters_and_gradients_of_shards_are_noisy():
    """Twice the same run: what is private differs, what is not is the same."""
    for strategy, name in (("admm", "proposal"), ("sgd", "gradient")):
        privacy = PrivacySettings(features="dp-sgd", epsilon=1.0)
        short = {"batch_size": 60, "num_epochs": 1}
        runs = [train(privacy, strategy, **short)[1] for _ in range(2)]
        first, second = (arrays(seen, name) for seen in runs)
        assert first.keys() == second.keys()
        assert all(not np.array_equal(first[p][0], second[p][0]) for p in first)
        clear = [
            train(PrivacySettings(), strategy, lou="consensus", **short)[1]
            for _ in range(2)
        ]
        first, second = (arrays(seen, name) for seen in clear)
        assert all(np.array_equal(first[p][0], second[p][0]) for p in first)


def test_against_an_outsider_batches_are_drawn_and_the_server_pays_more():
    privacy = PrivacySettings(
        features="dp-sgd", adversary="outsider", epsilon=1.0, predictions=3.0
    )
    method, seen = train(privacy, "sgd", batch_size=20)
    gradients = [
        own["release"]
        for own in accounts(method)
        if own["release"]["what"] == "gradients"
    ]
    assert gradients
    for release in gradients:
        assert release["mechanism"]["sample_rate"] == 1.0
        assert "against an outsider" in release["scope"]
    costs = [
        Gaussian(own["noise_multiplier"], own["count"])
        for own in (release["mechanism"] for release in gradients)
    ]
    assert max(epsilon([cost], 1e-5) for cost in costs) > 1.0
    # the batches are never the same, whatever the seed
    plans = []
    for run in (seen, train(privacy, "sgd", batch_size=20, num_epochs=1)[1]):
        prepared = [
            unpack(m.content).arrays
            for m in run
            if m.metadata.message_type == "train.prepare"
        ]
        plans.append(
            [
                a.tolist()
                for own in prepared
                for key, a in own.items()
                if key[1] == "batch-rows"
            ]
        )
    assert plans[0] != plans[1]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"lou": "gram", "features": "dp-sgd"},
            "lou is 'gram', but privacy.features = 'dp-sgd' needs 'consensus'",
        ),
        ({"lou": "consensus", "features": "statistics"}, "needs 'gram' or 'auto'"),
    ],
)
def test_a_way_over_shards_that_a_mechanism_does_not_cover_is_refused(settings, match):
    features = settings.pop("features")
    with pytest.raises(SettingsError, match=match):
        train(PrivacySettings(features=features), **settings)


def test_mixing_and_balancing_rest_where_there_is_noise():
    method, _ = train(PrivacySettings(predictions=1.0))
    assert method.chosen["anderson-memory"] == 0
    assert method.chosen["over-relaxation"] == 1.0


def test_a_multiplier_that_is_given_is_in_the_ledger():
    privacy = PrivacySettings(features="dp-sgd", noise_multiplier=2.5)
    method, _ = train(privacy)
    found = {
        own["release"]["mechanism"]["noise_multiplier"]
        for own in accounts(method)
        if own["release"]["what"] == "model"
    }
    assert found == {2.5}
    spent = Gaussian(2.5, count=20 * EPOCHS)
    total = method.report.privacy["totals"][0]["epsilon"]
    assert total == pytest.approx(epsilon([spent], 1e-5))


def test_a_model_that_dp_sgd_cannot_train_is_refused_before_training():
    match = r"layer '1' \(BatchNorm1d\) has no gradients row by row"
    seen = []
    with pytest.raises(SiteError, match=match):
        train(
            PrivacySettings(features="dp-sgd"),
            model="tests.runs.privacy.test_private_runs:with_batch_norm",
            seen=seen,
        )
    assert {message.metadata.message_type.split(".")[0] for message in seen} == {
        "query",
        "train",
    }
    assert not any(m.metadata.message_type == "train.admm" for m in seen)


def with_batch_norm(features, outputs, intercept):
    from torch import nn

    return nn.Sequential(
        nn.Linear(features, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, outputs, bias=intercept),
    )
