"""Runs whose joined rows are at workers, against those of the server's own process."""

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng

from strategies.run import strategy as rounds
from strategies.training.saving import make_manifest
from tests.support.federated import (
    LAYOUTS,
    Run,
    one_per_site,
    run_query,
    store,
    store_sql,
    whole,
)
from tests.support.predicted import Model, on, scored
from tests.support.tables.workers import WorkersHere
from tp_flower.joins import rows as joins
from tp_flower.joins import spread_rows
from tp_flower.joins.spread_rows import SpreadRows
from tp_flower.settings import PrivacySettings

HOW = {"device": "cpu", "num_epochs": 4, "seed": 3}
VALIDATED = {"validation_fraction": 0.2}
CLEAR = PrivacySettings(scores="clear")
RUNS = {
    "cg": {},
    "cg-sharded": {"layout": "sharded"},
    "cg-squared": {"loss": "squared"},
    "cg-softmax": {"loss": "softmax"},
    "cg-weighted": {"row_weight": "entity", "loss": "squared"},
    "cg-huber": {"loss": "huber(0.5)", "label": "squared"},
    "admm": {},
    "admm-sharded": {"layout": "sharded", **VALIDATED},
    "admm-quantile": {"loss": "quantile(0.8)", "label": "squared"},
    "boost": {**VALIDATED},
    "boost-clear": {"privacy": CLEAR, **VALIDATED},
    "boost-sharded": {"layout": "sharded", **VALIDATED},
    "sgd": {"num_epochs": 2},
    "gd": {"num_epochs": 2},
}
REFINED = {
    "cg-effects": {"effects": "u, f", "loss": "squared"},
    "cg-factors": {"factors": "u, f: 4"},
    "boost-regions": {"loss": "squared", "effects": "none", "label": "r.products"},
    "cg-bins": {"bins": 16, "privacy": CLEAR},
}
RATINGS = """SELECT {} AS label, r.hour, u.age, f.year
FROM ratings r LEFT JOIN users u ON r.user = u.id JOIN films f ON r.film = f.id"""


def ratings(rows: int = 600) -> dict[str, pd.DataFrame]:
    """Stars of users for films: levels of both, tastes, and a product of columns."""
    rng = default_rng(8)
    user, film = rng.integers(0, 30, rows), rng.integers(0, 20, rows)
    age, year = rng.integers(18, 80, 30), rng.integers(1950, 2020, 20)
    levels, tastes = rng.normal(size=(2, 30)), rng.normal(size=(2, 30))
    stars = levels[0][user] + levels[1][film] + 2.0 * tastes[0][user] * tastes[1][film]
    hour = rng.integers(0, 24, rows)
    rated = {"user": np.where(rng.random(rows) < 0.05, 99, user), "film": film}
    rated |= {"hour": hour, "stars": stars.round(3), "products": hour * age[user]}
    return {
        "ratings": pd.DataFrame(rated),
        "users": pd.DataFrame({"id": np.arange(30), "age": age}),
        "films": pd.DataFrame({"id": np.arange(20), "year": year}),
    }


class Started(list[WorkersHere]):
    """The workers of all runs so far; by number, the calls in which the next die."""

    dies_at: Mapping[int, int] = MappingProxyType({})


@pytest.fixture
def workers(monkeypatch):
    """Let runs have workers in this process."""
    started = Started()

    @contextmanager
    def opened(where, on_loss):
        if not where:
            yield None
            return
        there = WorkersHere(where, on_loss)
        there.dies_at = dict(started.dies_at)
        started.append(there)
        yield there
        there.close()

    monkeypatch.setattr(rounds, "open_workers", opened)
    monkeypatch.setattr(joins, "PART_ROWS", 8)
    return started


def trained(name: str, workers: int = 0, **settings: object) -> Run:
    strategy, *_ = name.split("-")
    how = {**HOW, **RUNS[name], **settings}
    layout = LAYOUTS[how.pop("layout", "whole")]
    loss = how.setdefault("loss", "logistic")
    sql = store_sql(how.pop("label", loss))
    sites = one_per_site(layout(store(how.pop("orders", 120))))
    run = run_query(sql, sites, strategy, server_workers=workers, **how)
    assert isinstance(run.problem.rows, SpreadRows) == bool(workers)
    return run


def refined(name: str, workers: int = 0, state: Path | None = None) -> Run:
    strategy, refinement = name.split("-")
    how = {**HOW, **VALIDATED, "loss": "logistic", **REFINED[name]}
    labels = {"squared": "r.stars", "logistic": "r.stars > 0"}
    sql = RATINGS.format(how.pop("label", labels[how["loss"]]))
    sites = on(whole, ratings())
    run = run_query(sql, sites, strategy, state=state, server_workers=workers, **how)
    assert run.chosen.get(refinement) not in (None, "none"), run.chosen
    return run


def numbers_of(run: Run) -> dict[str, object]:
    report = run.report
    # words are masked or sealed
    sent = [s for s in run.seen if not s.is_reply and s.action.startswith("train.")]
    return {
        "losses": run.losses,
        "train": dict(report.final_train),
        "test": dict(report.final_test),
        "contributions": report.contributions,
        "chosen": run.chosen,
        "sent": {
            f"{number}: {seen.action} {key}": array.ravel().tolist()
            for number, seen in enumerate(sent)
            for key, array in seen.arrays.items()
            if array.dtype.kind == "f"
        },
    }


def assert_same(one: object, other: object, where: str = "") -> None:
    """Numbers may differ in their last bits, nothing else."""
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key, value in one.items():
            assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for position, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}/{position}")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-12, abs=1e-12, nan_ok=True), where
    else:
        assert one == other, where


@pytest.mark.cases("cg")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_on_any_number_of_workers(name, workers):
    expected = numbers_of(trained(name))
    for count in (1, 2, 4):
        assert_same(expected, numbers_of(trained(name, count)))
        assert len(workers.pop()) == count
    assert not workers


@pytest.mark.cases("cg-effects")
@pytest.mark.parametrize("name", REFINED)
def test_what_refines_a_model_is_the_same_on_workers(name, workers):
    assert_same(numbers_of(refined(name)), numbers_of(refined(name, 3)))
    assert len(workers) == 1


@pytest.mark.cases("admm")
@pytest.mark.parametrize("name", ["cg", "admm", "boost", "sgd"])
def test_a_worker_that_dies_at_any_time_changes_no_bit(name, workers, monkeypatch):
    """In the set-up, in the middle, and at the end; with a journal, and snapshots."""
    expected = numbers_of(trained(name, 2))
    calls = workers.pop().calls[1]
    for least, when in ((1 << 26, calls // 2), (0, 1), (0, calls // 2), (0, calls - 4)):
        monkeypatch.setattr(spread_rows, "LEAST_JOURNAL", least)
        workers.dies_at = {1: when}
        assert numbers_of(trained(name, 2)) == expected
        assert workers.pop().generations == [0, 1]


def test_predictions_are_the_same_on_workers_that_die(workers, tmp_path):
    name = "cg-factors"
    run = refined(name, state=tmp_path)
    sql = RATINGS.format("r.stars > 0")
    model = Model(sql, tmp_path, make_manifest(run.strategy))
    sites = on(whole, ratings())
    expected, metrics = scored(model.table(sites)), model.evaluate(sites)
    # of the products of factors; of the scores
    for dies_at in ({}, {0: 1}, {0: 7}):
        workers.dies_at = dies_at
        table = model.table(sites, server_workers=2)
        np.testing.assert_array_equal(scored(table), expected)
        there = workers.pop()
        assert there.generations == [len(dies_at), 0]
    assert_same(metrics, model.evaluate(sites, server_workers=2))


@pytest.mark.cases("admm-quantile")
@pytest.mark.parametrize("name", ["cg", "admm-quantile", "boost", "cg-weighted"])
def test_a_kernel_takes_no_rows_along(name, workers):
    sizes = []
    for orders in (150, 900):
        trained(name, 2, orders=orders, num_epochs=2)
        sizes.append(max(workers.pop().kernels))
    # numbers may take a byte more
    assert sizes[1] == pytest.approx(sizes[0], abs=99)
