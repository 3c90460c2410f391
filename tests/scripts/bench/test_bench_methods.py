"""Curves, claims, tables and the page of the benchmark of methods."""

import math
import re
from dataclasses import replace

import pandas as pd
import pytest

from scripts.bench import reference as bench_reference
from scripts.bench.curves import (
    PAPER_NETWORKS,
    Cost,
    Curve,
    curve_of,
    is_within,
    phase_seconds,
)
from scripts.bench.datasets import store
from scripts.bench.reference import measure_reference
from scripts.bench.report.page import render_page
from scripts.bench.report.plots import figures_of
from scripts.bench.results_file import new_results, put_outcome
from scripts.bench.runs import Check, Options, Outcome
from scripts.bench.suites import methods
from scripts.bench.suites.methods import (
    METHODS,
    claims,
    measure_run,
    run_settings,
    summary,
)
from scripts.data.dataset import Dataset
from scripts.data.store import STORE_SQL, make_store
from scripts.joined.baselines import BASELINES
from strategies.report_page.costs import US_UK
from tp_flower.reports.records import RoundReport

# an epoch of two rounds: 300 bytes of arrays and 20 of headers
HISTORY = [
    RoundReport(1, 0, "seal", {}, {}, {}, {}, 100, 0.5, 0.25, 1.0),
    RoundReport(2, 1, "admm", {}, {}, {"a": 100}, {"b": 50}, 10, 1.0, 2.0, 4.0),
    RoundReport(3, 1, "admm", {}, {"auc": 0.6}, {"a": 100}, {"b": 50}, 10, 1.0, 2.0),
    RoundReport(4, 2, "admm", {}, {}, {"a": 100}, {"b": 50}, 10, 1.0, 2.0),
    RoundReport(5, 2, "admm", {}, {"auc": 0.7}, {"a": 100}, {"b": 50}, 10, 1.0, 2.0),
    RoundReport(6, 0, "finish", {}, {}, {}, {}, 7, 9.0, 9.0),
]


def test_a_curve_adds_up_the_rounds_of_set_up_and_epochs() -> None:
    curve = curve_of(HISTORY, "auc")
    assert curve.set_up == Cost(1, 100, 0.5, 0.25)
    assert curve.metric == (0.6, 0.7)
    # the round that only ends the run is not in it
    assert curve.costs == (Cost(3, 420, 2.5, 4.25), Cost(5, 740, 4.5, 8.25))
    assert curve.per_epoch == Cost(2, 320, 2.0, 4.0)
    assert Curve.from_json(curve.to_json()) == curve


def test_phases_of_set_up_go_by_name() -> None:
    assert phase_seconds(HISTORY) == {
        "seal": [0.5, 0.25, 1.0],
        "epochs": [4.0, 8.0, 4.0],
        "finish": [9.0, 9.0, 0.0],
    }


def test_a_metric_that_was_not_computed_is_nan() -> None:
    curve = curve_of([replace(item, test={}) for item in HISTORY], "auc")
    assert all(math.isnan(value) for value in curve.metric)
    assert curve.reached("auc", 0.5, 0.01) == 0


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        # by hand, from sections 6.1.2 and 6.3: 10 rounds and 21 megabytes
        ("US-UK", 1.36 + 168.0 / 420.0),
        ("US-US", 0.67 + 168.0 / 1150.0),
        ("US-East, US-West", 0.63 + 21.0 / 60.0),
        ("US-West, EU", 1.53 + 21.0 / 26.2),
        ("US-East, EU", 1.10 + 21.0 / 33.8),
    ],
)
def test_modelled_communication(network: str, seconds: float) -> None:
    chosen = {own.name: own for own in PAPER_NETWORKS}[network]
    cost = Cost(rounds=10, bytes=21_000_000)
    assert cost.communication_seconds(chosen) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("rmse", 1.0101, True),
        ("rmse", 1.0112, False),
        ("rmse", 0.5, True),
        ("loss", 1.02, False),
        ("auc", 0.9901, True),
        ("auc", 0.9889, False),
        ("auc", 1.0, True),
        ("rmse", math.nan, False),
        ("auc", math.nan, False),
    ],
)
def test_within_one_per_cent(metric: str, value: float, expected: bool) -> None:
    reference = 1.0 if metric != "rmse" else 1.0005
    assert is_within(value, metric, reference) is expected


def dataset_of(**metrics):
    """Methods whose epochs cost one round and 1000 bytes each, from 2 rounds on."""
    found = {
        "title": "made up",
        "metric": "rmse",
        "reference": 1.0,
        "guess": 2.0,
        "floor": 500,
        "failed": {},
        "settings": {},
        "join-seconds": 0.1,
        "optimum-seconds": 0.2,
        "joined-rows": [80, 20],
        "features": 3,
        "rows": {"a": 50, "b": 12},
        "baselines": {
            "SGD": {"last": 1.0, "steps": 2, "seconds": 0.5, "metric": [1.1, 1.0]},
            "boosted trees": {"missing": "lightgbm"},
        },
        "methods": {},
    }
    for name, values in metrics.items():
        method = name.replace("_", "-")
        costs = [
            Cost(2 + n, 1000 * n, 0.1 * n, 0.2 * n) for n in range(1, len(values) + 1)
        ]
        curve = Curve(tuple(values), tuple(costs), Cost(2, 0, 0.0, 0.0))
        found["methods"][method] = {
            "title": METHODS[method].title,
            "curve": curve.to_json(),
            "phases": {"seal": [0.0, 0.1, 0.0], "epochs": [0.1, 0.2, 0.3]},
            "seconds": 1.0,
            "cpu-seconds": 1.5,
            "peak-mib": 12.0,
            **summary(found, curve),
        }
    return found


def test_summary_of_a_run() -> None:
    run = dataset_of(admm=[1.5, 1.005, 1.0])["methods"]["admm"]
    assert (run["epochs-to-1%"], run["epochs-to-0.1%"]) == (2, 3)
    assert (run["rounds-per-epoch"], run["bytes-per-epoch"]) == (1, 1000)
    assert run["bytes-over-floor"] == 2.0
    to_one = run["to-1%"]
    assert (to_one["rounds"], to_one["bytes"]) == (4, 2000)
    assert to_one["compute-seconds"] == pytest.approx(0.6)
    expected = 4 * 0.136 + 8 * 2000 / 0.42e9
    assert to_one["communication-seconds"]["US-UK"] == pytest.approx(expected)


def measured(dataset) -> list[float]:
    return [check.measured for check in claims(dataset)]


def test_claims_are_ratios_to_the_best_of_the_others() -> None:
    dataset = dataset_of(admm=[2.0, 1.0], sgd=[1.0], gd=[2.0, 2.0, 1.0])
    time, epochs, failed = claims(dataset)
    # ADMM is there after 4 rounds, SGD after 3
    assert time.measured == pytest.approx(4 / 3, rel=1e-3)
    assert not time.is_met
    assert (epochs.measured, epochs.is_met) == (0.5, True)
    assert failed.is_met


def test_a_tie_is_one_and_met() -> None:
    assert measured(dataset_of(admm=[2.0, 1.0], sgd=[1.0], vfl_sgd=[1.0]))[1] == 1.0


def test_who_never_arrives_has_lost_and_others_are_not_waited_for() -> None:
    time, epochs, _ = measured(dataset_of(admm=[1.0], sgd=[2.0], gd=[2.0]))
    assert (time, epochs) == (0.0, math.inf)
    time, epochs, _ = measured(dataset_of(admm=[2.0], sgd=[2.0], gd=[2.0]))
    assert (time, epochs) == (math.inf, math.inf)


def test_methods_over_shards_are_compared_among_themselves() -> None:
    dataset = dataset_of(
        admm=[1.0], sgd=[1.0], ucq_admm=[2.0, 1.0], ucq_sgd=[2.0, 2.0, 1.0]
    )
    names = [check.name for check in claims(dataset)]
    assert [("UCQ" in name) for name in names] == [False, False, True, True, False]
    assert measured(dataset)[2] == pytest.approx(4 / 5, rel=1e-3)


def test_a_failed_method_is_a_missed_figure() -> None:
    dataset = dataset_of(admm=[1.0]) | {"failed": {"gd": "out of memory"}}
    (check,) = claims(dataset)
    assert "gd" in check.name
    assert not check.is_met


def small_store() -> Dataset:
    shards = make_store(300, 20, 30)
    tables = {name: pd.concat(own, ignore_index=True) for name, own in shards.items()}
    return Dataset(
        *("small", "Small", "rmse", STORE_SQL), {"task": "regression"}, tables
    )


@pytest.mark.parametrize("name", ["admm", "ucq-admm"])
def test_methods_and_reference_hold_out_the_same_rows(name: str, monkeypatch) -> None:
    dataset, method = small_store(), METHODS[name]
    own = {"scikit-learn": BASELINES["scikit-learn"]}
    monkeypatch.setattr(bench_reference, "BASELINES", own)
    reference = measure_reference(dataset, run_settings(dataset, None, {}))
    run = measure_run(dataset, method, run_settings(dataset, method, {}))
    # metrics of so few held-out rows agree only if the rows do
    last = Curve.from_json(run["curve"]).metric[-1]
    assert last == pytest.approx(reference["reference"], rel=1e-3)
    (found,) = reference["baselines"].values()
    assert found["last"] == pytest.approx(reference["reference"], rel=1e-3)
    assert found["steps-to-1%"] == 1
    # float32 both ways for every row that is joined, by hand
    tables = dataset.tables
    used = tables["orders"].merge(tables["items"]).merge(tables["customers"])
    rows = [
        used["order_id"].nunique(),
        len(tables["items"].merge(used[["item_id"]].drop_duplicates())),
        used["customer_id"].nunique(),
    ]
    assert reference["floor"] == 8 * sum(rows)
    assert sum(reference["joined-rows"]) == len(used)


def test_two_shards_hold_the_rows_in_order() -> None:
    dataset = small_store()
    sites = dataset.two_shards()
    assert list(sites)[:4] == ["orders-0", "orders-1", "items-0", "items-1"]
    for name, frame in dataset.tables.items():
        first, second = (sites[f"{name}-{number}"][name] for number in (0, 1))
        assert abs(len(first) - len(second)) <= 1
        ids = [*first.iloc[:, 0], *second.iloc[:, 0]]
        assert ids == frame.iloc[:, 0].tolist()


def test_settings_of_the_user_win_over_those_of_the_method() -> None:
    own = run_settings(small_store(), METHODS["gd"], {"strategy": "sgd"})
    assert (own.strategy, own.num_epochs) == (
        "sgd",
        METHODS["gd"].settings["num-epochs"],
    )
    own = run_settings(small_store(), METHODS["sgd"], {"num-epochs": 3, "l2": 0.5})
    assert (own.strategy, own.num_epochs, own.l2) == ("sgd", 3, 0.5)
    assert own.task == "regression"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(datasets=("flight",)), "no data set 'flight'; there are flights, "),
        (Options(methods=("adm",)), "no method 'adm'; there are admm, sgd"),
    ],
)
def test_unknown_names_are_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.measure_methods(options)


def test_a_failing_run_loses_nothing_of_the_others(monkeypatch) -> None:
    made = dataset_of(sgd=[1.0])

    def child(_, task):
        if task["method"] == "reference":
            return {k: v for k, v in made.items() if k not in {"methods", "failed"}}
        if task["method"] == "admm":
            raise RuntimeError("killed")
        return made["methods"]["sgd"]

    monkeypatch.setattr(methods, "in_process_of_its_own", child)
    options = Options(datasets=("store",), methods=("admm", "sgd"))
    found = methods.measure_methods(options).facts["store"]
    assert found["failed"] == {"admm": "killed"}
    assert list(found["methods"]) == ["sgd"]


def test_the_page_has_everything_and_needs_nothing() -> None:
    results = new_results()
    dataset = dataset_of(admm=[2.0, 1.0], sgd=[math.nan, 1.0], ucq_admm=[1.5, 1.4])
    outcome = Outcome(claims(dataset), {"store": dataset})
    put_outcome(results, "methods", outcome, 3.0)
    other = Outcome(
        [Check("bytes <&> more", 0.5, 1.0, "%")],
        {"deep": {"figure": 4.25}},
        {"a gap above the optimum": {"ADMM": [0.1, 0.01], "SGD": [0.2, math.inf]}},
    )
    put_outcome(results, "bytes", other, 1.0)
    results["failed"]["speed"] = "OSError: no memory"
    page = render_page(results, figures_of(results))
    for text in (
        "What it costs to reach test RMSE &lt;= 1.0100",
        "An epoch, and the whole run",
        "Seconds by phase",
        "boosted trees (lightgbm is missing)",
        "Suite speed failed: OSError: no memory",
        "bytes &lt;&amp;&gt; more",
        "deep: figure",
        "TP-UCQ-ADMM",
    ):
        assert text in page
    assert page.count("<img ") == page.count(' alt="') == 3
    targets = re.findall(r'(?:href|src|action)="([^"]{1,22})', page)
    kinds = {"#" if target[0] == "#" else target for target in targets}
    assert kinds == {"#", "data:image/png;base64,"}
    assert "://" not in page
    assert "url(" not in page


def test_the_store_is_many_to_many() -> None:
    tables = store().tables
    assert tables["items"]["item_id"].duplicated().any()
    assert tables["orders"]["item_id"].duplicated().any()


def test_the_paper_names_its_networks_once() -> None:
    assert US_UK in PAPER_NETWORKS
    assert len({network.name for network in PAPER_NETWORKS}) == 5
