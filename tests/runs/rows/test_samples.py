"""A run on a sample of the label table's rows is a run on a table with these rows
alone.
"""

import numpy as np
import pytest

from strategies.explain.explanation import Explain
from strategies.inference.manifest import metrics_of_test
from strategies.training.saving import make_manifest
from tests.support.examples.store_runs import FRAMES, LAYOUTS, LEFT, each_layout, query
from tests.support.federated import SOURCE, one_per_site, run_query, train
from tp_flower.randomness import Stream, generator
from tp_flower.splits import split_rows

SHARE = 0.6
SAMPLED = split_rows(len(FRAMES["orders"]), SHARE, generator(0, Stream.SAMPLE))
MARKED = FRAMES | {"orders": FRAMES["orders"].assign(sampled=SAMPLED)}


@pytest.mark.cases("cg-sharded", "weighted-sharded", "sgd-whole", "split-whole")
@each_layout
@pytest.mark.parametrize(
    ("loss", "source", "how"),
    [
        ("squared", SOURCE, {"strategy": "cg", "validation_fraction": 0.2}),
        ("softmax", LEFT, {"strategy": "admm", "row_weight": "entity"}),
        (
            "logistic",
            SOURCE,
            {"strategy": "sgd", "batch_size": 20, "test_split": "time(o.day)"},
        ),
        ("squared", LEFT, {"strategy": "admm", "test_split": "random(c)"}),
    ],
    ids=["cg", "weighted", "sgd", "split"],
)
def test_a_sample_is_the_query_over_its_rows(layout, loss, source, how):
    how = {"loss": loss, "l2": 0.01, "device": "cpu", "num_epochs": 2, **how}
    strategy = how.pop("strategy")
    sql = query(loss, source)
    sites = one_per_site(LAYOUTS[layout](MARKED))
    sampled = run_query(sql, sites, strategy, sample=SHARE, **how)
    alone = run_query(f"{sql} WHERE o.sampled", sites, strategy, **how)
    np.testing.assert_allclose(sampled.flat, alone.flat, rtol=1e-9, atol=1e-12)
    reports = sampled.report, alone.report
    for name in ("final_train", "final_test", "joined_rows_train", "joined_rows_test"):
        of_sample, of_rows = (getattr(report, name) for report in reports)
        assert of_sample == pytest.approx(of_rows, rel=1e-9, nan_ok=True)


def test_classes_are_those_of_the_sample():
    label = "CASE WHEN o.day > 14 THEN 'b' WHEN o.sampled THEN 'a' ELSE 'x' END"
    sites = [LAYOUTS["whole"](MARKED)]
    sql = query().replace("o.qty AS", f"{label} AS")
    assert train(sites, sql, "cg").training_problem.classes == ("a", "b", "x")
    assert train(sites, sql, "cg", sample=SHARE).training_problem.classes == ("a", "b")


def test_the_sample_stands_beside_what_is_measured_on_it():
    name = "random rows, sample = 0.6 of the label rows"
    strategy = train([LAYOUTS["whole"](FRAMES)], query(), "cg", sample=SHARE)
    assert strategy.report.split["name"] == name
    assert metrics_of_test(make_manifest(strategy)).endswith(f"({name})")
    explained = train(
        [LAYOUTS["whole"](FRAMES)], query(), Explain, sample=SHARE
    ).explanation
    assert explained["joined-rows"]["train"] == strategy.report.joined_rows_train
