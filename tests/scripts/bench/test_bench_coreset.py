"""The benchmark of coresets: costs over a join that is not built, and its tables."""

import json
from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy.spatial.distance import cdist

from scripts.bench.coreset_join import Join, Sampler, units
from scripts.bench.report.coreset_tables import coreset_tables
from scripts.bench.results_file import new_results, put_outcome
from scripts.bench.runs import Outcome
from scripts.bench.suites import coreset
from scripts.data.dataset import Dataset
from scripts.data.store import STORE_SQL, make_store
from tp_flower.coresets.importance import augmented, regression_scores
from tp_flower.settings import Settings


def dataset(name: str) -> Dataset:
    shards = make_store(200, 20, 40)
    tables = {key: pd.concat(own, ignore_index=True) for key, own in shards.items()}
    return Dataset(name, name, "rmse", STORE_SQL, {"task": "regression"}, tables)


@cache
def example() -> tuple[Join, np.ndarray]:
    """A join, and its features built."""
    joined = dataset("store").joined(Settings(task="regression"))
    chosen = ~joined.is_test
    return Join.of(joined, chosen), joined.features[chosen].astype(float)


def test_costs_over_a_join_are_those_of_the_materialised_one():
    join, features = example()
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(join.design(np.arange(join.size)), features)
    theta = rng.normal(size=(join.width + 1, 3))
    slow = features @ theta[:-1] + theta[-1] - join.labels[:, None]
    np.testing.assert_allclose(join.residuals(theta), slow, atol=1e-5)
    centres = rng.normal(size=(4, join.width))
    known = cdist(features, centres, "sqeuclidean").min(axis=1)
    np.testing.assert_allclose(join.distances(centres), known, rtol=1e-5)


def test_scores_are_the_sum_of_those_of_the_columns_of_each_table():
    join, features = example()
    edges = np.cumsum([own.features.shape[1] for own in join.tables])[:-1]
    known = np.zeros(join.size)
    for place, block in enumerate(np.split(features, edges, axis=1)):
        label = join.labels[:, None] if place == 0 else None
        known += regression_scores(
            augmented(block, label, intercept=place == 0),
            np.ones(join.size),
            features=block.shape[1],
            penalty=0.1 * join.size,
        )
    np.testing.assert_allclose(join.regression_scores(0.1), known, rtol=1e-6)


def test_a_sample_by_importance_has_the_uniform_share():
    join, _ = example()
    sampler = Sampler.by_importance(join, np.zeros(join.size))
    sample = sampler.draw(500, np.random.default_rng(0))
    # without other scores it is a uniform sample with replacement
    np.testing.assert_allclose(sample.weights, sample.counts * join.size / 500)
    assert Sampler(join).draw(9, np.random.default_rng(0)).counts.tolist() == [1] * 9


def test_units_are_the_papers():
    widths = {"a": 30, "b": 30, "c": 30}
    # Table 1: 9.9e4 and 9.3e4 for 1000 rows, of which the rows themselves are 9e4
    assert units(1000, "importance", widths, 0) == 97_006
    assert units(1000, "uniform", widths, 0) == 93_000


def test_a_data_set_is_measured_by_runs_and_samples_alike(monkeypatch):
    sizes = {"SIZES": (40, 80), "MAIN_SIZE": 80, "GUARANTEED_SIZE": 100}
    fewer = {"REPEATS": 3, "CLUSTERS": 3, "PARAMETERS": 5}
    for name, value in {**sizes, **fewer}.items():
        monkeypatch.setattr(coreset, name, value)
    measured = coreset.measure_dataset(dataset("flights-delay"))
    outcome = Outcome(checks=measured.checks(), facts={"store": measured.facts})
    results = new_results()
    put_outcome(results, "coreset", outcome, 1.0)
    facts = json.loads(json.dumps(results))["suites"]["coreset"]["facts"]
    ridge, kmeans = coreset_tables(facts)
    train, test = facts["store"]["joined-rows"]
    assert [row[0] for row in ridge.rows] == ["40", "80", f"all {train}"]
    assert kmeans.rows[-1][0] == f"all {train + test}"
    assert ridge.head[1:5] == ["C-Central", "C-SAGA", "U-Central", "U-SAGA"]
    assert kmeans.head[1] == "C-Kmeans++"
    assert "MB to choose them" in ridge.note
    runs = facts["store"]["ridge"]["runs"]
    assert runs["C"]["choice_bytes"] > runs["U"]["choice_bytes"] == 0
    # a run's rows are a sample like the others: its solution is about as good
    full = facts["store"]["ridge"]["full"]["Central"]
    costs = [own["cost"] / full for own in runs.values()]
    assert costs == pytest.approx([1.0, 1.0], rel=0.5)
    names = [check.name for check in outcome.checks]
    assert len(names) == 10 == len(set(names))


def test_what_a_row_of_the_table_says():
    cell = {"mean": 1860.426, "std": 2.06, "units": 468008}
    found = {
        "full": {"Central": 1846.8, "SAGA": None},
        "full-units": 48_901_050,
        "sizes": {
            f"{kind}-{solver}": {"2000": cell}
            for kind in "CU" for solver in ("Central", "SAGA")
        },
        "runs": {
            kind: {"cost": 1859.4, "choice_bytes": 179_768, "row_bytes": 1_161_504,
                   "other_bytes": 8_005_666} for kind in "CU"
        },
    }  # fmt: skip
    facts = {"f": {"title": "Flights", "joined-rows": [217_338, 54_256],
                   "ridge": found, "kmeans": found}}  # fmt: skip
    ridge, kmeans = coreset_tables(facts)
    assert ridge.rows == [
        ["2,000", *["1860.4 ± 2.1"] * 4, "468,008", "468,008"],
        ["all 217,338", "1846.8", "-", "1846.8", "-", "48,901,050", "48,901,050"],
    ]
    assert kmeans.rows[1][0] == "all 271,594"
