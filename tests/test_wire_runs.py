"""Runs with numbers in two bytes on the wire: the same model for half the bytes."""

from collections import Counter

import numpy as np
import pytest

from client_apps.app import app
from client_apps.site import Site
from strategies import STRATEGIES, TablePuppetSGD
from tests import hostile
from tests.federated import one_per_site, run, sharded, store, store_sql, whole
from tests.hostile import US, US_PART, HostileGrid, StoppedError
from tests.test_cost import check, explained, sent
from tests.test_cost import trained as trained_on_store
from tests.test_sites import TamperingGrid, array, train
from tp_flower.datasets import FLIGHTS_REGRESSION_SQL, FLIGHTS_SQL, STORE_SQL
from tp_flower.errors import ReplyError
from tp_flower.grid import InProcessGrid
from tp_flower.privacy.settings import PrivacySettings
from tp_flower.protocol import Packet, unpack
from tp_flower.query import Query
from tp_flower.wire import Narrow, Precision, round_to_nearest, wide

NARROW = ["float16", "bfloat16"]
ROWS = ("target", "messages", "scores", "batch-scores", "tested-scores")
LAYOUTS = {"whole": whole, "sharded": sharded}
FRAMES = store()

each_narrow = pytest.mark.parametrize("precision", NARROW)


def trained(strategy, layout, precision, **settings):
    """Train on the store, and count what arrays take on the wire, by name."""
    counted = Counter()

    def count(message):
        if message.metadata.message_type.startswith("train."):
            for (_, name), own in unpack(message.content).arrays.items():
                counted[name] += own.nbytes
                assert isinstance(own, Narrow) == (name in narrow)

    rows = set(ROWS) | {"gradient"}
    narrow = rows if precision != "float32" else set()
    settings = {
        "num_epochs": 3,
        "seed": 3,
        "device": "cpu",
        "batch_size": 12,
        **settings,
    }
    made = STRATEGIES[strategy](
        Query.from_sql(store_sql("squared")), wire=precision, **settings
    )
    sites = one_per_site(LAYOUTS[layout](FRAMES))
    grid = InProcessGrid(app, sites, observe=count)
    try:
        made.start(grid)
    finally:
        grid.close()
    return made, counted


@pytest.mark.parametrize(
    ("strategy", "layout", "precision", "how"),
    [
        ("admm", "whole", "float16", {}),
        ("admm", "sharded", "bfloat16", {}),
        ("admm", "sharded", "float16", {"lou": "consensus"}),
        ("sgd", "whole", "bfloat16", {}),
        ("sgd", "sharded", "float16", {}),
        ("sgd", "sharded", "bfloat16", {"staleness": 1}),
    ],
)
def test_numbers_of_rows_take_half_the_bytes(strategy, layout, precision, how):
    plain, before = trained(strategy, layout, "float32", **how)
    found, after = trained(strategy, layout, precision, **how)
    assert before.keys() == after.keys()
    for name, size in before.items():
        share = {"gradient": 4}.get(name, 2 if name in ROWS else 1)
        assert size == share * after[name], name
    # and the report counts what travelled
    assert sum(before.values()) - sum(after.values()) == sum(
        report.bytes_up - other.bytes_up + report.bytes_down - other.bytes_down
        for report, other in [(plain.report, found.report)]
    )
    # for the same model, as near as 8 bits of 60 rows bring it
    assert found.report.final_train["rmse"] == pytest.approx(
        plain.report.final_train["rmse"], rel=2e-2 if precision == "bfloat16" else 2e-3
    )


@pytest.mark.parametrize("strategy", ["admm", "sgd"])
def test_a_seed_repeats_a_run(strategy):
    sites = one_per_site(sharded(FRAMES))
    how = {"strategy": strategy, "num_epochs": 1, "wire": "bfloat16", "batch_size": 20}
    one, same = run("squared", sites, **how), run("squared", sites, **how)
    np.testing.assert_array_equal(one.flat, same.flat)
    exact = run("squared", sites, **{**how, "wire": "float32"})
    assert np.abs(one.flat - exact.flat).max() > 0


@pytest.mark.parametrize("way", ["admm", "sgd-sharded"])
def test_explain_foretells_the_bytes(way):
    strategy, _, layout = way.partition("-")
    how = {"strategy": strategy, "num_epochs": 2, "wire": "float16", "batch_size": 150}
    layout = layout or "whole"
    costs = explained(layout, STORE_SQL, **how).strategies
    (cost,) = [own for own in costs if own.is_chosen]
    check(cost.run, sent(trained_on_store(layout, STORE_SQL, **how).history))


@pytest.mark.slow
def test_first_scores_of_torch_models_are_rounded():
    _, before = trained("admm", "whole", "float32", model="mlp", num_epochs=1)
    _, after = trained("admm", "whole", "float16", model="mlp", num_epochs=1)
    assert before["scores"] == 2 * after["scores"]


@each_narrow
def test_noisy_statistics_are_of_the_scores_that_arrived(precision):
    """A site's moments are of the target less what the server made it from."""
    privacy = PrivacySettings(features="statistics", epsilon=8.0)
    arrived, checked = {}, 0

    def compare(message):
        nonlocal checked
        metadata = message.metadata
        if metadata.message_type != "train.admm":
            return
        if metadata.reply_to_message_id:
            for (part, name), own in unpack(message.content).arrays.items():
                assert name == "scores"
                arrived[part] = wide(own)
            return
        site = Site(grid.contexts[metadata.dst_node_id], grid.run_name)
        kept = {part.number: part.shard.vectors for part in site.parts()}
        for part in {part for part, _ in unpack(message.content).arrays}:
            if part in arrived:
                np.testing.assert_array_equal(kept[part]["sent"], arrived[part])
                checked += 1

    sites = one_per_site(whole(FRAMES))
    grid = InProcessGrid(app, sites, observe=compare)
    made = STRATEGIES["admm"](
        Query.from_sql(store_sql("squared")),
        num_epochs=3,
        wire=precision,
        privacy=privacy,
    )
    try:
        made.start(grid)
    finally:
        grid.close()
    assert checked == 2 * 3


# what must not arrive


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("strategy", "action", "name"),
    [("admm", "train.consensus", "scores"), ("sgd", "train.sgd", "gradient")],
)
def test_a_reply_that_is_not_finite_is_refused(strategy, action, name, bad):
    def spoil(own):
        return round_to_nearest(np.full(own.shape, bad), Precision.FLOAT16)

    grid = TamperingGrid(action, US, array(US_PART, name, spoil))
    with pytest.raises(ReplyError, match=r"site 'us' .* not finite"):
        train(grid, STRATEGIES[strategy], wire="float16")


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda a: round_to_nearest(np.full(a.shape, np.nan), Precision.BFLOAT16), 1),
        (
            lambda a: Narrow(np.full(a.shape, 0x7C00, np.uint16), Precision.FLOAT16, 0),
            1,
        ),
        # the largest bfloat16 times the largest power of two
        (
            lambda a: Narrow(
                np.full(a.shape, 0x7F7F, np.uint16), Precision.BFLOAT16, 160
            ),
            1,
        ),
        (lambda _: round_to_nearest(np.ones((99, 1)), Precision.FLOAT16), 2),
        # the layout says what it is: any of the three will do
        (lambda a: round_to_nearest(np.ones(a.shape), Precision.BFLOAT16), 0),
        (lambda a: np.ones(a.shape, np.float32), 0),
    ],
)
@pytest.mark.parametrize("name", ["messages", "gradient"])
def test_a_request_is_checked_when_it_is_wide(tmp_path, name, spoil, error):
    action = {"messages": "train.sgd", "gradient": "train.step"}[name]
    done = []

    def change(asked, node, packet):
        if (asked, node) == (action, US) and not done:
            done.append(True)
            arrays = {**packet.arrays}
            arrays[US_PART, name] = spoil(packet.array(US_PART, name))
            yield "spoilt", Packet(packet.header, arrays)

    grid = HostileGrid(tmp_path, change, stops=True)
    with pytest.raises(StoppedError):
        hostile.train(grid, TablePuppetSGD, batch_size=5, wire="float16")
    (answer,) = grid.answers
    if not error:
        assert not answer.error
        return
    answer.check_nothing_left()
    assert ["", "must hold finite numbers", "but must be"][error] in answer.error


# flights


def on_flights(sql, **settings):
    strategy = STRATEGIES[settings["strategy"]](Query.from_sql(sql), **settings)
    grid = InProcessGrid(app, 5)
    try:
        strategy.start(grid)
    finally:
        grid.close()
    return strategy.report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sql", "metric"),
    [
        ("admm", FLIGHTS_SQL, "auc"),
        ("admm", FLIGHTS_REGRESSION_SQL, "rmse"),
        ("sgd", FLIGHTS_SQL, "auc"),
    ],
)
def test_the_metric_on_flights_stays(strategy, sql, metric):
    how = {"strategy": strategy, "num_epochs": 3 if strategy == "admm" else 1}
    plain = on_flights(sql, **how)
    for precision in NARROW if metric == "auc" and strategy == "admm" else NARROW[:1]:
        found = on_flights(sql, wire=precision, **how)
        assert found.final_test[metric] == pytest.approx(
            plain.final_test[metric], rel=1e-3
        )
        for before, after in zip(plain.history, found.history, strict=True):
            if before.phase == "admm" and before.epoch:
                assert before.bytes_down.keys() == after.bytes_down.keys()
                for table, size in before.bytes_down.items():
                    assert size == 2 * after.bytes_down[table]
