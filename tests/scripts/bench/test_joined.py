"""The suite that compares boosted trees with the best models of the joined table."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from scripts.bench.datasets import Dataset, diabetes, prices
from scripts.bench.harness import Options, Outcome, new_results, put_outcome
from scripts.bench.render import suite_block
from scripts.bench.suites import joined as suite
from scripts.joined import models
from scripts.joined.models import fit_factors
from tp_flower.splits import TEST, TRAIN, VALIDATION


def rated(users=40, items=30, seed=0):
    """Ratings of three in four pairs: a mean, effects of both ids, and two factors."""
    draw = np.random.default_rng(seed)
    user, item = np.divmod(np.flatnonzero(draw.random(users * items) < 0.75), items)
    first, second = draw.normal(size=(users, 2)), draw.normal(size=(items, 2))
    labels = 3 + draw.normal(size=users)[user] + (first[user] * second[item]).sum(1)
    subset = draw.choice([TRAIN, VALIDATION, TEST], len(user), p=[0.7, 0.15, 0.15])
    return SimpleNamespace(labels=labels, subset=subset), [user, item]


def error(joined, scores, subset):
    chosen = joined.subset == subset
    return np.sqrt(((scores - joined.labels)[chosen] ** 2).mean())


def test_factors_find_a_product_of_ids():
    joined, ids = rated()
    scores = fit_factors(joined, ids, width=4)
    held_out = error(joined, scores, TEST)
    assert held_out < 0.4 * joined.labels[joined.subset == TEST].std()
    # effects alone leave the product
    without = fit_factors(joined, ids, width=0)
    assert error(joined, without, TEST) > 2 * held_out


def test_the_ridge_of_every_id_is_that_of_its_rows():
    draw = np.random.default_rng(1)
    design, labels = draw.normal(size=(50, 3)), draw.normal(size=50)
    ids = draw.integers(0, 6, 50)
    ids[ids == 4] = 5
    solved = models._ridge_by_id(design, labels, ids, 7, 0.3)
    for number in range(7):
        rows, right = design[ids == number], labels[ids == number]
        gram = rows.T @ rows + 0.3 * len(rows) * np.eye(3)
        expected = np.linalg.solve(gram, rows.T @ right) if len(rows) else np.zeros(3)
        np.testing.assert_allclose(solved[number], expected, rtol=1e-10)


def test_what_is_worse_is_behind_whatever_the_metric():
    assert suite.lag("rmse", 2.0, 1.0) == suite.lag("auc", 0.4, 0.8) == 1.0
    assert suite.lag("rmse", 1.0, 2.0) == suite.lag("auc", 0.8, 0.4) == -0.5


def few_prices() -> Dataset:
    """The made-up prices, of 600 lines."""
    dataset = prices()
    dataset.tables["lines"] = dataset.tables["lines"].iloc[:600]
    return dataset


def test_a_row_has_every_model_and_all_checks(monkeypatch):
    monkeypatch.setattr(suite, "MOST_TREES", 20)
    monkeypatch.setattr(suite, "LEAVES", (7, 15))
    case = suite.Case(
        lambda _: few_prices(),
        {"parts": "group(l.part)"},
        ids=(("l", "lines", "quantity"), ("p", "parts", "part")),
        aims={"parts": 1e9},
    )
    # that of ratings is left out: they are not at hand
    ratings = next(case for case in suite.ZOO if case.ids)
    monkeypatch.setattr(suite, "ZOO", (ratings, case))
    outcome = suite.measure_joined(Options())
    ((name, found),) = outcome.facts.items()
    assert name == "TPC-H, price of a line (a product), parts"
    models_of_row = {*suite.PRODUCTS, suite.JOINT, suite.ONE, suite.LINEAR}
    others = {suite.FACTORS, suite.BEST, "joined rows", "rounds"}
    assert {*models_of_row, *others} == set(found)
    lines = few_prices().tables["lines"]
    assert found["joined rows"] == len(lines)
    # no model is one that knows nothing
    assert max(found[model] for model in models_of_row) < lines["price"].std()
    best = min(found[model] for model in (suite.JOINT, suite.LINEAR, suite.FACTORS))
    assert found[suite.BEST] == best
    behind, bins, linear, one, aim, median = outcome.checks
    assert behind.measured == median.measured == found[suite.DEFAULT] / best - 1
    assert bins.measured == found[suite.BINS] / best - 1
    alone = found[suite.NOTHING_MORE]
    assert linear.measured == alone / found[suite.LINEAR] - 1
    assert one.measured == alone / found[suite.ONE] - 1
    assert aim.is_met


@pytest.mark.parametrize("make", [prices, diabetes])
def test_made_tables_join_to_the_rows_that_they_were_cut_from(make):
    dataset = make()
    first, second = dataset.tables.values()
    key = [name for name in first if name in set(second)]
    assert len(key) == 1
    merged = pd.merge(first, second, on=key)
    assert len(merged) == len(first)
    if make is prices:
        assert (merged["price"] == merged["quantity"] * merged["retail"]).all()


def test_the_page_has_a_line_for_each_row_and_what_is_beyond_its_limit():
    found = dict.fromkeys((*suite.PRODUCTS, suite.ONE), 0.8)
    found |= {suite.JOINT: 0.84, suite.LINEAR: 0.7, suite.BEST: 0.84, "rounds": 9}
    outcome = Outcome(facts={"flights, days": found})
    behind = suite._check(outcome, "flights, days", "auc", found)
    assert behind == pytest.approx(0.05)
    results = new_results()
    put_outcome(results, "joined", outcome, 1.0)
    block = suite_block("joined", results["suites"]["joined"])
    assert "| flights, days | 9 | 0.7 | 0.8 | 0.8 | 0.8 | 0.8 | 0.84 |" in block
    line = "| flights, days: default, behind the best of the join | **5 %** | 3 % |"
    assert line in block
    assert f"behind the {suite.LINEAR}" not in block
