"""Runs with ``AS time`` and ``AS event``, against Newton's method on the joined table.

Surgeries of patients, in two shards; of half of the patients a laboratory has a value.
"""

import duckdb
import numpy as np
import pandas as pd
import pytest

from strategies.report_page.page import render
from tests.support import federated, predicted
from tests.support.page_reading import Page
from tests.support.reference import survival as slow
from tp_flower.errors import SettingsError
from tp_flower.objectives.survival import Baseline
from tp_flower.reports.records import report_dict

FROM = """FROM surgeries s JOIN patients p ON s.patient = p.id
LEFT JOIN lab l ON l.patient = p.id"""
COLUMNS = "s.hours, p.age, l.crp"
MARKS = {
    "entry": "s.entered AS entry",
    "strata": "s.clinic AS strata",
    "weights": "s.weight AS weight",
}
EXACT = {"test_fraction": 0.0, "effects": "none", "device": "cpu"}


def sql(*marks: str, source: str = FROM) -> str:
    items = ["s.days AS time", "s.died AS event", *(MARKS[name] for name in marks)]
    return f"SELECT {', '.join(items)}, {COLUMNS} {source}"


def frames(rows: int = 240) -> federated.Frames:
    rng = np.random.default_rng(5)
    patients = pd.DataFrame({"id": np.arange(40), "age": rng.normal(60, 10, 40)})
    lab = pd.DataFrame({"patient": np.arange(0, 40, 2), "crp": rng.gamma(2.0, 2.0, 20)})
    patient = rng.integers(0, 40, rows)
    hours = rng.normal(3.0, 1.0, rows)
    risk = 0.05 * (patients["age"][patient].to_numpy() - 60) + 0.4 * (hours - 3)
    dies = np.ceil(rng.exponential(60 * np.exp(-risk)))
    leaves = np.ceil(rng.uniform(10, 120, rows))
    days = np.minimum(dies, leaves)
    surgeries = {
        "patient": patient,
        "hours": hours,
        "days": days,
        "died": dies <= leaves,
        "entered": np.floor(days * rng.uniform(-0.2, 0.7, rows)),
        "clinic": rng.integers(1, 4, rows),
        "weight": rng.uniform(0.5, 2.0, rows).round(2),
    }
    return {"surgeries": pd.DataFrame(surgeries), "patients": patients, "lab": lab}


def on_sites(tables: federated.Frames):
    surgeries = tables["surgeries"]
    return {
        "north": {"surgeries": [surgeries[:150]]},
        "south": {"surgeries": [surgeries[150:].reset_index(drop=True)]},
        "registry": {"patients": [tables["patients"]]},
        "laboratory": {"lab": [tables["lab"]]},
    }


def joined(tables: federated.Frames) -> pd.DataFrame:
    """The joined rows, in the surgeries' order."""
    with duckdb.connect() as connection:
        for name, frame in tables.items():
            connection.register(name, frame.reset_index(names="place"))
        return connection.sql(
            f"SELECT s.* EXCLUDE patient, p.age, l.crp {FROM} ORDER BY s.place"
        ).df()


def rows_of(table: pd.DataFrame, *marks: str) -> slow.Rows:
    ones = np.ones(len(table))
    mass = table["weight"].to_numpy() if "weights" in marks else ones
    return slow.Rows(
        table["days"].to_numpy(),
        table["died"].to_numpy(),
        table["entered"].to_numpy() if "entry" in marks else -ones,
        table["clinic"].to_numpy() if "strata" in marks else ones,
        mass / mass.mean(),
    )


def train(tables, query, strategy, state, **settings):
    sites = on_sites(tables)
    grid = federated.WatchedGrid(sites, state=state)
    run = federated.train(grid, query, strategy, **{**EXACT, **settings})
    model = predicted.Model(query, state, predicted.make_manifest(run))
    return run, model, sites


def scored(model, sites) -> pd.DataFrame:
    found = model.table(sites).to_pandas()
    return found.sort_values(["row_key", "occurrence"], ignore_index=True)


@pytest.mark.cases("()", "('entry', 'strata', 'weights')")
@pytest.mark.parametrize("marks", [(), ("entry", "strata"), tuple(MARKS)], ids=str)
def test_conjugate_gradients_reach_newtons_optimum(marks, tmp_path):
    """Over two shards, a LEFT JOIN, ties, and whatever else the query names."""
    tables = frames()
    table = joined(tables)
    rows = rows_of(table, *marks)
    columns = table[["hours", "age", "crp"]].to_numpy(float)
    is_there = np.isfinite(columns)
    columns = columns - np.nansum(rows.weights[:, None] * columns, axis=0) / (
        rows.weights @ is_there
    )
    # a row without a match is like the mean of those with one
    columns[~is_there] = 0.0
    scores = columns @ slow.newton(rows, columns)
    how = {"tolerance": 1e-9, "l2": 0.0, "num_epochs": 60}
    run, model, sites = train(tables, sql(*marks), "cg", tmp_path, **how)
    found = scored(model, sites)
    # a constant moves no partial likelihood
    shift = found["score"] - scores
    np.testing.assert_allclose(shift, shift.mean(), atol=2e-5)
    np.testing.assert_allclose(found["hazard_ratio"], np.exp(found["score"]))
    final = run.report.final_train
    assert run.chosen["loss"] == "cox"
    events = int(table["died"].sum())
    assert run.chosen["events"] == {"train": events, "total": events}
    expected = slow.log_likelihood(rows, scores)
    assert final["log_likelihood"] == pytest.approx(expected, rel=1e-7)
    assert final["loss"] == pytest.approx(-expected / len(table), rel=1e-7)
    assert final["concordance"] == pytest.approx(slow.concordance(rows, scores))
    null = run.report.outcomes["baseline"]["train"]
    assert null["log_likelihood"] == pytest.approx(
        slow.log_likelihood(rows, np.zeros(len(table)))
    )
    again = model.evaluate(sites)
    for name in ("loss", "concordance"):
        assert again[name] == pytest.approx(final[name], rel=1e-6)


def test_predictions_have_the_survival_that_the_baseline_says(tmp_path):
    tables = frames()
    how = {"tolerance": 1e-9, "l2": 0.0, "num_epochs": 60}
    run, model, sites = train(tables, sql(), "cg", tmp_path, **how)
    found = scored(model, sites)
    table = joined(tables)
    rows = rows_of(table)
    # Efron's estimate by a loop: each death at a time leaves a smaller rest
    rates = np.exp(found["score"].to_numpy())
    hazard, expected = 0.0, {}
    for time in np.unique(rows.time[rows.event]):
        dying = rows.event & (rows.time == time)
        for rank in range(dying.sum()):
            hazard += 1 / (
                rates[rows.time >= time].sum() - rank / dying.sum() * rates[dying].sum()
            )
        expected[time] = hazard
    (entry,) = run.report.outcomes["survival"]
    assert entry["times"] == list(expected)
    np.testing.assert_allclose(entry["hazards"], [*expected.values()], rtol=1e-5)
    np.testing.assert_allclose(entry["survival"], np.exp(-np.array(entry["hazards"])))
    quartiles = np.quantile(
        rows.time[rows.event], [0.25, 0.5, 0.75], method="inverted_cdf"
    )
    names = [name for name in found if name.startswith("survival.")]
    assert names == [f"survival.{time:g}" for time in quartiles]
    for name, time in zip(names, quartiles, strict=True):
        survival = np.exp(-expected[time] * rates)
        np.testing.assert_allclose(found[name], survival, rtol=1e-5)
    # at other times it is that of the last one with an event
    other = model.table(sites, survival_times=(0.5, 20.25)).to_pandas()
    other = other.sort_values("row_key", ignore_index=True)
    last = max(time for time in expected if time <= 20.25)
    assert [name for name in other if name.startswith("survival.")] == [
        "survival.0.5",
        "survival.20.25",
    ]
    np.testing.assert_array_equal(other["survival.0.5"], 1.0)
    survival = np.exp(-expected[last] * rates)
    np.testing.assert_allclose(other["survival.20.25"], survival, rtol=1e-5)


def test_strata_may_be_texts(tmp_path):
    """The same in both shards, whatever their Unicode form, and as good as numbers."""
    how = {"num_epochs": 3}
    tables = frames()
    texts = {1: "Nord", 2: "Z\u00fcrich", 3: "\u00e9"}
    surgeries = tables["surgeries"].assign(clinic=tables["surgeries"].clinic.map(texts))
    # as macOS writes it
    surgeries.loc[150:, "clinic"] = surgeries.clinic[150:].str.normalize("NFD")
    losses = []
    for number, table in enumerate((tables["surgeries"], surgeries)):
        named = {**tables, "surgeries": table}
        run, _, _ = train(named, sql("strata"), "cg", tmp_path / str(number), **how)
        assert len(run.report.outcomes["survival"]) == 3
        losses.append(run.report.final_train["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_survival_is_told_of_one_baseline_alone(tmp_path):
    run, model, sites = train(frames(), sql("strata"), "cg", tmp_path, num_epochs=2)
    assert [each["stratum"] for each in run.report.outcomes["survival"]] == [1, 2, 3]
    assert not [name for name in scored(model, sites) if "survival" in name]
    with pytest.raises(SettingsError, match="leave it empty"):
        model.table(sites, survival_times=(30.0,))


def test_the_baseline_is_that_of_the_best_epoch(tmp_path):
    """Where rows validate, and a later epoch is the last."""
    how = {"validation_fraction": 0.3, "num_epochs": 6, "patience": 2}
    how |= {"min_rows_per_leaf": 2, "leaves": 31}
    run, model, sites = train(frames(), sql(), "boost", tmp_path, **how)
    assert run.chosen["best-epoch"] < len(run.losses)
    problem = run.training_problem
    best = problem.rows.whole("scores")
    saved = scored(model, sites)["score"].to_numpy()
    assert np.isin(best[:, 0].round(3), saved.round(3)).mean() > 0.9
    expected = problem.objective.baselines(best)
    assert [each.hazards for each in model.manifest.baselines] == [
        each.hazards for each in expected
    ]


@pytest.mark.parametrize("strategy", ["cg", "boost", "gd"])
def test_held_out_rows_are_compared_among_themselves(strategy, tmp_path):
    how = {"test_fraction": 0.25, "validation_fraction": 0.0, "num_epochs": 3}
    how |= {"min_rows_per_leaf": 5} if strategy == "boost" else {}
    run, model, sites = train(frames(), sql(*MARKS), strategy, tmp_path, **how)
    report, problem = run.report, run.training_problem
    assert report.final_train["loss"] < report.outcomes["baseline"]["train"]["loss"]
    held_out = problem.held_out_rows.whole("scores")
    for metrics, objective, scores in (
        (report.final_train, problem.objective, problem.rows.whole("scores")),
        (report.final_test, problem.tested, held_out),
    ):
        time, event, entry, strata = objective.target.columns.T
        mass = objective.weights / objective.weights.mean()
        rows = slow.Rows(time, event > 0, entry, strata, mass)
        expected = -slow.log_likelihood(rows, scores[:, 0])
        assert metrics["loss"] == pytest.approx(expected / len(mass), rel=1e-12)
        concordance = slow.concordance(rows, scores[:, 0])
        assert metrics["concordance"] == pytest.approx(concordance)
    saved = np.sort(scored(model, sites)["score"])
    found = np.concatenate([problem.rows.whole("scores"), held_out])[:, 0]
    np.testing.assert_allclose(saved, np.sort(found), atol=1e-4)


def test_held_out_rows_have_a_brier_score_of_the_baseline_of_training(tmp_path):
    """At all times of the few events, and of a constant score beside it."""
    run, model, sites = train(
        frames(), sql("weights"), "cg", tmp_path, test_fraction=0.4, num_epochs=4
    )
    problem = run.training_problem
    time, event = problem.tested.target.columns.T
    mass = problem.tested.weights
    ones = np.ones(len(time))
    rows = slow.Rows(time, event > 0, -ones, ones, mass)

    def integrated(baseline: Baseline, scores: np.ndarray) -> float:
        last = min(time[rows.event].max(), baseline.times[-1])
        times = np.unique([0.0, *time[rows.event & (time < last)], last])
        values = [slow.brier(rows, baseline.survival(scores, t), t) for t in times]
        return np.trapezoid(values, times) / last

    (baseline,) = run.response.baselines
    scores = problem.held_out_rows.whole("scores")[:, 0]
    found = run.report.final_test["integrated_brier"]
    assert found == pytest.approx(integrated(baseline, scores), rel=1e-12)
    (constant,) = problem.objective.baselines(np.zeros((len(problem.objective), 1)))
    null = run.report.outcomes["baseline"]["test"]["integrated_brier"]
    assert null == pytest.approx(integrated(constant, np.zeros(len(time))), rel=1e-12)
    assert found < null
    assert "integrated_brier" not in run.report.final_train
    page = Page(render(report_dict(run.report)))
    assert "integrated Brier score" in page.text
    # of all rows, by the baseline that was saved
    assert 0.0 < model.evaluate(sites)["integrated_brier"] < 0.25


def test_the_page_of_a_run_shows_survival_and_concordance(tmp_path):
    run, _, _ = train(frames(), sql("strata"), "cg", tmp_path, num_epochs=2)
    page = Page(render(report_dict(run.report)))
    assert "concordance" in page.text
    figure = page.figures["Survival of a score of 0"]
    for entry in run.report.outcomes["survival"]:
        points = figure.points[f"stratum {entry['stratum']:g}"]
        assert points[0] == (0.0, 1.0)
        # in steps
        assert points[1] == (entry["times"][0], 1.0)
        assert points[2] == pytest.approx((entry["times"][0], entry["survival"][0]))
        assert points[-1] == pytest.approx((entry["times"][-1], entry["survival"][-1]))
