"""Training on weighted joined rows: as on the materialised join with sample weights."""

import functools

import numpy as np
import pytest

from tests.federated import (
    FEATURES,
    LABELS,
    SOURCE,
    Run,
    one_per_site,
    run,
    run_query,
    sharded,
    store,
    whole,
)
from tests.reference.training import SgdSettings, sgd
from tests.store_reference import reference_of
from tests.test_sgd import batches_of

FRAMES = store()
L2 = 0.01
LAYOUTS = {"whole": whole, "sharded": sharded}
HOW = SgdSettings(rate=0.02, momentum=0.5, decay=0.1)
BY_SQL = {
    "entity": "1.0 / COUNT(*) OVER (PARTITION BY o.position_)",
    "entity(C)": "1.0 / COUNT(*) OVER (PARTITION BY c.id)",
    "entity( i )": "1.0 / COUNT(*) OVER (PARTITION BY i.position_)",
}


@functools.cache
def trained(loss: str, layout: str = "whole", strategy: str = "admm", **how) -> Run:
    """A run on the store, made once."""
    sites = one_per_site(LAYOUTS[layout](FRAMES))
    return run(loss, sites, strategy, **{"l2": L2, **how})


def distance(one, other) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize(
    ("loss", "layout", "weight"),
    [
        ("squared", "whole", "entity(C)"),
        ("logistic", "sharded", "entity"),
        ("softmax", "whole", "entity( i )"),
    ],
)
def test_admm_reaches_the_weighted_optimum(loss, layout, weight):
    finished = trained(loss, layout, row_weight=weight, num_epochs=120, tolerance=1e-8)
    reference = reference_of(finished, FRAMES, loss, weight=BY_SQL[weight])
    assert np.abs(reference.gradient(finished.flat)).max() <= 1e-5
    best = reference.objective(reference.optimum())
    assert reference.objective(finished.flat) <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("loss", "layout"), [("logistic", "whole"), ("softmax", "sharded")]
)
def test_sgd_is_centralised_sgd(loss, layout):
    finished = trained(
        loss,
        layout,
        "sgd",
        row_weight="entity(c)",
        num_epochs=3,
        batch_size=16,
        learning_rate=HOW.rate,
        momentum=HOW.momentum,
        decay=HOW.decay,
    )
    reference = reference_of(finished, FRAMES, loss, weight=BY_SQL["entity(C)"])
    expected = sgd(reference, batches_of(finished), HOW)
    assert distance(finished.flat, expected) < 1e-5


# the query's weight


def query(weight: str, loss: str = "squared", source: str = SOURCE) -> str:
    return f"SELECT {LABELS[loss]} AS label, {weight} AS weight, {FEATURES} {source}"


def train(sql: str, layout: str = "whole", frames=FRAMES, strategy="admm", **how):
    how = {"loss": "auto", "task": "auto", "device": "cpu", "l2": L2, **how}
    return run_query(sql, one_per_site(LAYOUTS[layout](frames)), strategy, **how)


@pytest.mark.parametrize(
    ("loss", "layout", "weight", "source"),
    [
        ("squared", "sharded", "c.age", SOURCE),
        ("logistic", "whole", "i.price", SOURCE),
    ],
)
def test_a_weight_of_any_inner_table(loss, layout, weight, source):
    frames = store()
    frames["customers"]["age"] = frames["customers"]["age"].fillna(0.0)
    finished = train(
        query(weight, loss, source),
        layout,
        frames,
        loss=loss,
        task="regression" if loss == "squared" else "classification",
        num_epochs=120,
        tolerance=1e-8,
    )
    reference = reference_of(finished, frames, loss, source, weight)
    assert np.abs(reference.gradient(finished.flat)).max() <= 1e-5
