"""A run on a sample of the label table's rows is a run on a table with these rows alone."""

import io

import numpy as np
import pytest
from rich.console import Console

from strategies.cli import model_view
from strategies.explain.explanation import Explain
from strategies.training.saving import make_manifest
from tests.support.examples.store_runs import FRAMES, LAYOUTS, LEFT, query
from tests.support.federated import SOURCE, one_per_site, run_query, train
from tp_flower.randomness import Stream, generator
from tp_flower.splits import split_rows

SHARE = 0.6
SAMPLED = split_rows(len(FRAMES["orders"]), SHARE, generator(0, Stream.SAMPLE))


def sampled_sites(layout):
    shards = dict(LAYOUTS[layout](FRAMES))
    edges = np.cumsum([len(frame) for frame in shards["orders"]])[:-1]
    shards["orders"] = [
        frame[mask].reset_index(drop=True)
        for frame, mask in zip(shards["orders"], np.split(SAMPLED, edges), strict=True)
    ]
    return one_per_site(shards)


@pytest.mark.parametrize("layout", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("loss", "source", "how"),
    [
        ("squared", SOURCE, {"strategy": "cg", "validation_fraction": 0.2}),
        ("softmax", LEFT, {"strategy": "admm", "row_weight": "entity"}),
        ("logistic", SOURCE, {"strategy": "sgd", "batch_size": 20, "test_split": "time(o.day)"}),
        ("squared", LEFT, {"strategy": "vfl-admm", "test_split": "random(c)"}),
    ],
)
def test_a_sample_is_the_query_over_its_rows(layout, loss, source, how):
    how = {"loss": loss, "l2": 0.01, "device": "cpu", "num_epochs": 2, **how}
    strategy, sql = how.pop("strategy"), query(loss, source)
    sampled = run_query(sql, one_per_site(LAYOUTS[layout](FRAMES)), strategy, sample=SHARE, **how)
    alone = run_query(sql, sampled_sites(layout), strategy, **how)
    np.testing.assert_allclose(sampled.flat, alone.flat, rtol=1e-9, atol=1e-12)
    reports = sampled.strategy.report, alone.strategy.report
    for name in ("final_train", "final_test", "joined_rows_train", "joined_rows_test"):
        of_sample, of_rows = (getattr(report, name) for report in reports)
        assert of_sample == pytest.approx(of_rows, rel=1e-9, nan_ok=True)


def test_classes_are_those_of_the_sample():
    label = f"CASE WHEN o.rowid = {np.flatnonzero(~SAMPLED)[5]} THEN 'x' "
    label += "WHEN o.day > 14 THEN 'b' ELSE 'a' END"
    frames = FRAMES | {"orders": FRAMES["orders"].assign(rowid=range(60))}
    sites = [LAYOUTS["whole"](frames)]
    sql = query().replace("o.qty AS", f"{label} AS")
    assert train(sites, sql, "cg").training_problem.classes == ("a", "b", "x")
    assert train(sites, sql, "cg", sample=SHARE).training_problem.classes == ("a", "b")


def test_the_sample_stands_beside_what_is_measured_on_it():
    name = "random rows, sample = 0.6 of the label rows"
    strategy = train([LAYOUTS["whole"](FRAMES)], query(), "cg", sample=SHARE)
    assert strategy.report.split["name"] == name
    console = Console(file=io.StringIO(), width=400)
    console.print(model_view(make_manifest(strategy)))
    assert f"({name})" in console.file.getvalue()
    explained = train([LAYOUTS["whole"](FRAMES)], query(), Explain, sample=SHARE).explanation
    report = strategy.report
    rows = {"train": report.joined_rows_train, "test": report.joined_rows_test}
    assert explained["joined-rows"] == rows
