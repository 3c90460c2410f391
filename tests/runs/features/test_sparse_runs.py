"""Runs on sparse rows, which end where those on dense rows do."""

import numpy as np
import pytest

from tests.support.federated import (
    LAYOUTS,
    SOURCE,
    Run,
    one_per_site,
    run_query,
    store,
)
from tp_flower.features import encoder
from tp_flower.learning import solvers

FRAMES = store()
ENCODERS = (
    "c.region=one-hot(9); i.item=hash(9); i.price=bins(5) indicator; o.day=one-hot(20)"
)
SQL = f"SELECT o.qty AS label, o.day, c.age, c.region, i.item, i.price {SOURCE}"
METHODS = [
    ("cg", "whole", {}),
    ("cg", "sharded", {}),
    ("admm", "whole", {}),
    ("admm", "sharded", {"lou": "gram"}),
    ("admm", "sharded", {"lou": "consensus"}),
    ("admm", "whole", {"model": "mlp", "device": "cpu"}),
    ("sgd", "sharded", {"batch_size": 40}),
    ("gd", "whole", {}),
    ("boost", "whole", {}),
]


@pytest.fixture
def layout_of(monkeypatch: pytest.MonkeyPatch):
    """Make all tables sparse, or none, whatever their width."""

    def choose(*, is_sparse: bool) -> None:
        monkeypatch.setattr(encoder, "is_sparse", lambda *_: is_sparse)

    return choose


def finished(strategy: str, layout: str, **settings: object) -> Run:
    if strategy != "boost":
        settings = {"l2": 1e-2} | settings
    if strategy != "coreset-ridge":
        settings = {"num_epochs": 3} | settings
    settings |= {"encoders": ENCODERS, "seed": 1}
    return run_query(SQL, one_per_site(LAYOUTS[layout](FRAMES)), strategy, **settings)


@pytest.mark.parametrize(("strategy", "layout", "settings"), METHODS)
def test_a_run_ends_where_it_does_on_dense_rows(layout_of, strategy, layout, settings):
    ends = []
    for is_sparse in (True, False):
        layout_of(is_sparse=is_sparse)
        ends.append(finished(strategy, layout, **settings))
    sparse, full = ends
    np.testing.assert_allclose(sparse.losses, full.losses, rtol=1e-4)
    if strategy != "boost":
        np.testing.assert_allclose(sparse.flat, full.flat, rtol=1e-3, atol=1e-5)
    for table, rows in full.features.items():
        np.testing.assert_array_equal(sparse.features[table], rows)


def test_sensitivities_are_those_of_dense_rows(layout_of):
    totals = []
    for is_sparse in (True, False):
        layout_of(is_sparse=is_sparse)
        measured = finished("coreset-ridge", "whole", coreset_size=30)
        replies = measured.sent("train.measure", replies=True)
        parts = (part for seen in replies for part in seen.header["parts"])
        totals.append([part["total"] for part in parts])
    assert len(totals[0]) == 3
    np.testing.assert_allclose(*totals, rtol=1e-9)


@pytest.mark.cases("admm-whole-settings0", "sgd-sharded-settings2")
@pytest.mark.parametrize(
    ("strategy", "layout", "settings"),
    [
        ("admm", "whole", {}),
        ("admm", "sharded", {"lou": "consensus"}),
        ("sgd", "sharded", {"batch_size": 40}),
    ],
)
def test_wide_tables_build_no_gram_matrix(
    layout_of, monkeypatch, strategy, layout, settings
):
    built = finished(strategy, layout, **settings)
    layout_of(is_sparse=True)
    monkeypatch.setattr(solvers, "MOST_COLUMNS", 1)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a Gram matrix of a wide table")

    monkeypatch.setattr("client_apps.operator.releases.gram", refused)
    without = finished(strategy, layout, **settings)
    np.testing.assert_allclose(without.flat, built.flat, rtol=1e-3, atol=1e-5)


def test_sparse_rows_are_mapped_from_the_sites_cache(layout_of, tmp_path):
    layout_of(is_sparse=True)
    files: set[str] = set()

    def watch(_: object) -> None:
        # the entries of a run's data frames go when it ends
        files.update(path.name for path in tmp_path.rglob("*features-*/*"))

    mapped = finished("cg", "whole", state=tmp_path, change=watch)
    assert files == {"values.npy", "columns.npy", "width.json", "entry.json"}
    np.testing.assert_array_equal(mapped.flat, finished("cg", "whole").flat)
