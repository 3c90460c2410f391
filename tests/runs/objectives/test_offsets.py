"""Runs with ``AS offset``, against Newton's method on the joined table.

Claims of policies, in two shards, with exposures; a region is joined to each policy.
"""

import duckdb
import numpy as np
import pandas as pd
import pytest

from strategies import STRATEGIES
from strategies.inference.manifest import write_manifest
from tests.support import federated, predicted
from tests.support.examples.killed_servers import Killed, KilledGrid
from tp_flower.errors import QueryError
from tp_flower.files import HOME_VARIABLE, home_folder
from tp_flower.objectives import Target, make_objective
from tp_flower.query import Query

SOURCE = "FROM policies p JOIN regions r ON p.region = r.id"
OFFSET = "LN(p.exposure)"
COLUMNS = "p.age, p.garage, r.density"
EXACT = {
    "test_fraction": 0.0,
    "validation_fraction": 0.0,
    "effects": "none",
    "device": "cpu",
}
BY_CG = {
    "poisson": "p.claims",
    "gamma": "p.cost",
    "negative-binomial(0.7)": "p.claims",
    "squared": "p.cost",
    "logistic": "p.claims > 1",
}


def sql(label: str = "p.claims", offset: str = OFFSET, source: str = SOURCE) -> str:
    item = f", {offset} AS offset" if offset else ""
    return f"SELECT {label} AS label{item}, {COLUMNS} {source}"


def frames(rows: int = 200) -> federated.Frames:
    rng = np.random.default_rng(5)
    regions = pd.DataFrame({"id": np.arange(12), "density": rng.normal(size=12)})
    region = rng.integers(0, 12, rows)
    age = rng.normal(size=rows)
    garage = rng.choice(["yes", "no"], rows)
    exposure = rng.uniform(0.1, 3.0, rows)
    score = 0.4 * age - 0.5 * (garage == "yes") + 0.6 * regions["density"][region]
    mean = exposure * np.exp(score.to_numpy())
    claims = rng.poisson(mean)
    policies = {"region": region, "age": age, "garage": garage, "exposure": exposure}
    cost = rng.gamma(2.0, mean / 2.0)
    policies |= {"claims": claims, "cost": cost}
    return {"policies": pd.DataFrame(policies), "regions": regions}


def joined(tables: federated.Frames, label: str, source: str = SOURCE) -> pd.DataFrame:
    """The joined rows in the policies' order, their label, offset and columns."""
    with duckdb.connect() as connection:
        for name, frame in tables.items():
            connection.register(name, frame.reset_index(names="place"))
        return connection.sql(
            f"SELECT p.place, CAST({label} AS DOUBLE) AS y, {OFFSET} AS o, p.exposure, "
            f"{COLUMNS} {source} ORDER BY p.place, r.id"
        ).df()


def design(rows: pd.DataFrame) -> np.ndarray:
    is_kept = rows["garage"] == "yes"
    density = rows["density"].fillna(0.0)
    return np.column_stack([np.ones(len(rows)), rows["age"], is_kept, density])


def newton(loss: str, rows: pd.DataFrame, offset, weights=None) -> np.ndarray:
    """The best scores without the offset, by Newton's steps on the joined rows."""
    columns = design(rows)
    classes = ("no", "yes") if loss == "logistic" else ()
    bound = make_objective(loss, Target.of(rows["y"].to_numpy(), classes), weights)
    mass = np.ones(len(rows)) if weights is None else weights
    theta = np.zeros(columns.shape[1])
    for _ in range(100):
        scores = (columns @ theta + offset)[:, None]
        gradient = columns.T @ (mass * bound.gradient(scores)[:, 0])
        hessian = columns.T @ (columns * (mass * bound.hessian(scores)[:, 0])[:, None])
        step = np.linalg.solve(hessian, gradient)
        theta -= step / max(1.0, np.abs(step).max())
        if np.abs(step).max() < 1e-11:
            return columns @ theta
    raise AssertionError("Newton's method has not converged")


def on_sites(tables: federated.Frames):
    policies = tables["policies"]
    parts = policies[:130], policies[130:].reset_index(drop=True)
    return {
        "north": {"policies": [parts[0]]},
        "south": {"policies": [parts[1]]},
        "bureau": {"regions": [tables["regions"]]},
    }


def train(tables, query, strategy, state, **settings):
    sites = on_sites(tables)
    grid = federated.WatchedGrid(sites, state=state)
    run = federated.train(grid, query, strategy, **{**EXACT, **settings})
    return run, predicted.Model(query, state, predicted.make_manifest(run)), sites


def predictions(model, sites, query: str = "") -> pd.DataFrame:
    found = model.table(sites, query).to_pandas()
    return found.sort_values(["row_key", "occurrence"], ignore_index=True)


@pytest.mark.cases("poisson", "gamma", "negative-binomial(0.7)", "logistic")
@pytest.mark.parametrize("loss", BY_CG)
def test_conjugate_gradients_reach_the_optimum_beside_the_offset(loss, tmp_path):
    tables = frames()
    rows = joined(tables, BY_CG[loss])
    offset = rows["o"].to_numpy()
    scores = newton(loss, rows, offset)
    how = {"loss": loss, "tolerance": 1e-9, "l2": 0.0, "num_epochs": 40}
    run, model, sites = train(tables, sql(BY_CG[loss]), "cg", tmp_path, **how)
    classes = ("no", "yes") if loss == "logistic" else ()
    bound = make_objective(loss, Target.of(rows["y"].to_numpy(), classes))
    shifted = (scores + offset)[:, None]
    found = predictions(model, sites)
    np.testing.assert_allclose(found["score"], shifted[:, 0], rtol=1e-6, atol=2e-6)
    predicted_values = bound.response.predict(shifted)
    if classes:
        assert list(found["prediction"]) == [value > 0 for value in predicted_values]
    else:
        np.testing.assert_allclose(
            found["prediction"], predicted_values, rtol=1e-5, atol=1e-5
        )
    final = run.report.final_train
    # of scores as they arrive: words of a fixed point
    assert final["loss"] == pytest.approx(bound.value(shifted), rel=1e-6)
    again = model.evaluate(sites)
    for name, value in final.items():
        assert again[name] == pytest.approx(value, rel=1e-6), name
    assert run.chosen["offset"] == {
        "column": f"p: {OFFSET}",
        "min": pytest.approx(offset.min()),
        "max": pytest.approx(offset.max()),
    }


def test_counts_beside_exposures_are_rates_with_exposures_as_weights(tmp_path):
    tables = frames()
    how = {"loss": "poisson", "tolerance": 1e-9, "l2": 0.0, "num_epochs": 40}
    rate = "p.claims / p.exposure AS label, p.exposure AS weight"
    rates = sql(offset="").replace("p.claims AS label", rate)
    scores = []
    for number, query in enumerate((sql(), rates)):
        _, model, sites = train(tables, query, "cg", tmp_path / str(number), **how)
        scores.append(predictions(model, sites)["score"].to_numpy())
    offset = np.log(tables["policies"]["exposure"])
    np.testing.assert_allclose(scores[0] - offset, scores[1], rtol=1e-5, atol=1e-6)


METHODS = {
    "cg": {},
    "admm": {},
    "sgd": {"batch_size": 64},
    "boost": {"min_rows_per_leaf": 5},
}
# regions are joined several times, or not at all; policies weigh differently
EVERYTHING = {
    "test_fraction": 0.2,
    "validation_fraction": 0.2,
    "effects": "auto",
    "num_epochs": 3,
}


def uneven() -> federated.Frames:
    tables = frames()
    regions = tables["regions"]
    tables["regions"] = pd.concat([regions[:9], regions[:3]], ignore_index=True)
    return tables


def uneven_sql(label: str, offset: str) -> str:
    source = "FROM policies p LEFT JOIN regions r ON p.region = r.id"
    query = sql(label, offset, source)
    return query.replace(", p.age", ", p.exposure AS weight, p.age", 1)


@pytest.mark.parametrize("strategy", METHODS)
def test_least_squares_beside_an_offset_are_those_of_the_difference(strategy, tmp_path):
    """Over LEFT JOINs, many-to-many, with weights, shards, held-out and other rows."""
    tables = uneven()
    runs = []
    for number, query in enumerate(
        (
            uneven_sql("p.cost", "p.age - 7"),
            uneven_sql("p.cost - (p.age - 7)", ""),
        )
    ):
        how = {**EVERYTHING, **METHODS[strategy], "loss": "squared"}
        run, model, sites = train(
            tables, query, strategy, tmp_path / str(number), **how
        )
        runs.append((run.report, predictions(model, sites)["score"]))
    (beside, scores), (difference, left) = runs
    assert beside.final_train == pytest.approx(difference.final_train, rel=1e-6)
    assert beside.final_test == pytest.approx(difference.final_test, rel=1e-6)
    baselines = (report.outcomes["baseline"] for report in (beside, difference))
    ours, theirs = baselines
    for rows in theirs:
        assert ours[rows] == pytest.approx(theirs[rows], rel=1e-6)
    label_rows = joined(
        tables, "p.cost", "FROM policies p LEFT JOIN regions r ON p.region = r.id"
    )
    offset = label_rows["age"].to_numpy() - 7
    np.testing.assert_allclose(scores - offset, left, rtol=1e-5, atol=1e-5)


@pytest.mark.cases("cg", "boost")
@pytest.mark.parametrize("strategy", METHODS)
def test_what_is_added_to_all_offsets_moves_the_base_score_alone(strategy, tmp_path):
    tables = uneven()
    found = []
    for number, offset in enumerate((OFFSET, f"{OFFSET} + 1.5")):
        how = {**EVERYTHING, **METHODS[strategy], "loss": "poisson"}
        query = uneven_sql("p.claims", offset)
        run, model, sites = train(
            tables, query, strategy, tmp_path / str(number), **how
        )
        base = run.training_problem.base_score
        found.append((run.report, base, predictions(model, sites)["prediction"]))
    (plain, base, means), (moved, moved_base, moved_means) = found
    np.testing.assert_allclose(moved_base, base - 1.5)
    np.testing.assert_allclose(moved_means, means, rtol=1e-4)
    for name in ("final_train", "final_test"):
        expected = pytest.approx(getattr(plain, name), rel=1e-4)
        assert getattr(moved, name) == expected


def test_an_offset_of_zero_is_none(tmp_path):
    tables = uneven()
    found = []
    for number, offset in enumerate(("", "0 * p.exposure")):
        how = {**EVERYTHING, **METHODS["boost"], "loss": "poisson"}
        query = uneven_sql("p.claims", offset)
        run, model, sites = train(tables, query, "boost", tmp_path / str(number), **how)
        found.append((run.report.final_test, predictions(model, sites)["prediction"]))
    (test, means), (test_of_zero, means_of_zero) = found
    assert test_of_zero == pytest.approx(test, rel=1e-6)
    np.testing.assert_allclose(means_of_zero, means, rtol=1e-6)


def test_the_first_tree_is_that_of_lightgbm_from_the_offset(tmp_path):
    lightgbm = pytest.importorskip("lightgbm")
    table = frames()["policies"]
    # few values, which both put into the same bins
    table["age"] = (2 * table["age"]).round()
    query = f"SELECT p.claims AS label, {OFFSET} AS offset, p.age FROM policies p"
    sites = {"north": {"policies": [table]}}
    how = {**EXACT, "loss": "poisson", "num_epochs": 1, "leaves": 7}
    how |= {"trees_per_round": 1, "tree_rate": 0.1, "task": "regression"}
    with federated.WatchedGrid(sites, state=tmp_path) as grid:
        run = federated.train(grid, query, "boost", **how)
    model = predicted.Model(query, tmp_path, predicted.make_manifest(run))
    offset = np.log(table["exposure"].to_numpy())
    base = run.training_problem.base_score[0]
    np.testing.assert_allclose(
        base, np.log(table["claims"].sum() / table["exposure"].sum())
    )
    data = lightgbm.Dataset(table[["age"]], table["claims"], init_score=offset + base)
    options = {"objective": "poisson", "num_leaves": 7, "verbose": -1}
    # a table counts the rows of a leaf by their share of the curvature
    curvature = np.exp(offset + base + 0.7)
    options |= {"min_data_in_leaf": 0, "num_threads": 1, "deterministic": True}
    options["min_sum_hessian_in_leaf"] = 20 * curvature.mean()
    booster = lightgbm.train(options, data, num_boost_round=1)
    expected = booster.predict(table[["age"]], raw_score=True)
    added = predictions(model, sites)["score"].to_numpy() - offset - base
    # the server chooses the length of the step, not its direction
    length = added @ expected / (expected @ expected)
    assert length == pytest.approx(1.0, abs=0.05)
    np.testing.assert_allclose(added, length * expected, atol=1e-6)


def test_a_run_that_goes_on_from_its_journal_has_the_offset(tmp_path):
    sites = on_sites(frames(60))
    how = {**EXACT, "loss": "poisson", "num_epochs": 4}

    def strategy(folder, **more):
        query = Query.from_sql(sql())
        return STRATEGIES["cg"](query, **how, output_dir=str(folder), **more)

    with federated.LocalGrid(sites, state=tmp_path / "whole") as grid:
        uninterrupted = strategy(tmp_path / "run")
        uninterrupted.start(grid)
    place = tmp_path / "again"
    with KilledGrid(sites, state=tmp_path / "killed") as grid:
        grid.kill_at = len(uninterrupted.history) - 3
        with pytest.raises(Killed):
            strategy(place).start(grid)
        grid.kill_at = None
        resumed = strategy(place, resume=str(place))
        resumed.start(grid)
    final = uninterrupted.report.final_train
    assert resumed.report.final_train == pytest.approx(final, rel=1e-12)
    assert resumed.chosen["offset"] == uninterrupted.chosen["offset"]


def test_rows_to_predict_have_the_offset_of_the_model(tmp_path):
    tables = frames(60)
    how = {"loss": "poisson", "num_epochs": 1}
    models = [
        train(tables, query, "cg", tmp_path / str(number), **how)[1:]
        for number, query in enumerate((sql(), sql(offset="")))
    ]
    beside, plain = models
    exposure = r'LN\("exposure"\)'
    missing = f"beside the offset {exposure}, and the query has none: select {exposure}"
    other = f'beside the offset {exposure}, not "age": select {exposure} AS offset of p'
    for query, says in ((sql(offset=""), missing), (sql(offset="p.age"), other)):
        for use in (beside[0].table, beside[0].evaluate):
            with pytest.raises(QueryError, match=says):
                use(beside[1], query)
    for use in (plain[0].table, plain[0].evaluate):
        with pytest.raises(QueryError, match="trained without one: leave 'AS offset'"):
            use(plain[1], sql())
    # whatever the case of its name, and without the label
    again = predicted.unlabelled(sql()).replace("AS offset", 'AS "Offset"')
    expected = predictions(*beside)
    assert predictions(*beside, again).equals(expected)
    gone = {**tables, "policies": tables["policies"].drop(columns="exposure")}
    with pytest.raises(QueryError, match="exposure"):
        beside[0].table(on_sites(gone))


def test_boosting_goes_on_from_a_model_with_the_same_offset(tmp_path, monkeypatch):
    pytest.importorskip("lightgbm")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    tables = frames()
    how = {"loss": "poisson", "num_epochs": 5, "effects": "none"}
    how |= {"validation_fraction": 0.3, "test_fraction": 0.2}
    first, model, _ = train(tables, sql(), "cg", tmp_path, **how)
    write_manifest(home_folder(), model.manifest)
    again = {**how, "boost_from": str(model.manifest.model), "num_epochs": 1}
    with pytest.raises(QueryError, match="trained beside the offset"):
        train(tables, sql(offset=""), "boost", tmp_path, **again)
    # no tree has a split: what is left is the model to start from
    again["min_rows_per_leaf"] = 10**6
    second, trees, sites = train(tables, sql(), "boost", tmp_path, **again)
    for name in ("final_train", "final_test"):
        expected = pytest.approx(getattr(first.report, name), rel=1e-5)
        assert getattr(second.report, name) == expected
    ours, theirs = (predictions(each, sites)["score"] for each in (model, trees))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
