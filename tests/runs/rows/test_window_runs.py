"""Windows in whole runs: as if the owner had computed the column, and what stops one.

Results of drivers: several a day, days without a date, drivers without a result.
"""

import numpy as np
import pandas as pd
import pytest

from client_apps.handlers.setup import _group_hashes
from tests.support import federated, predicted
from tests.support.federated import (
    WatchedGrid,
    on_requests,
    run_query,
    site_per_table,
    write_site,
)
from tests.support.reference.joins import engine_of
from tp_flower.errors import QueryError, SiteError, TPFlowerError
from tp_flower.query import Feature, Fragment, SubQuery
from tp_flower.settings import PrivacySettings

FORM = (
    "AVG(points) OVER (PARTITION BY driver ORDER BY day RANGE BETWEEN "
    "INTERVAL 30 DAY PRECEDING AND INTERVAL 1 DAY PRECEDING)"
)
LAST = "LAG(points, 1, 0) OVER (PARTITION BY driver ORDER BY day, race)"
WINDOWED = f"SELECT *, {FORM} AS form, {LAST} AS last_points FROM results"
SOURCE = "JOIN drivers d ON d.id = r.driver WHERE r.last_points < 9 AND r.y IS NOT NULL"
SELECTED = "SELECT r.y AS label, r.form, r.last_points, d.age FROM"
SQL = f"{SELECTED} ({WINDOWED}) r {SOURCE}"
BEFOREHAND = f"{SELECTED} computed r {SOURCE}"
EXACT = {"num_epochs": 4, "test_fraction": 0.0, "device": "cpu"}
PRIVATE = PrivacySettings(features="statistics", epsilon=4.0, delta=1e-5)


def results(rows: int = 120, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    day = pd.Timestamp("2024-03-01") + pd.to_timedelta(
        rng.integers(0, 90, rows), unit="D"
    )
    points = rng.integers(0, 11, rows).astype(float)
    frame = pd.DataFrame(
        {
            "race": np.arange(rows),
            "driver": rng.integers(0, 9, rows),
            "day": day,
            "points": points,
            "y": 0.5 * points + rng.normal(size=rows).round(3),
        }
    )
    frame.loc[3, "day"] = pd.NaT
    frame.loc[5, "points"] = np.nan
    return frame


RESULTS = results()
DRIVERS = pd.DataFrame({"id": np.arange(10), "age": np.arange(10) % 4 + 25.0})


def computed(frame: pd.DataFrame = RESULTS) -> pd.DataFrame:
    """The results, with the columns as DuckDB computes them."""
    with engine_of({"results": frame}) as engine:
        return engine.execute(f"{WINDOWED} ORDER BY race").df()


def by_driver(frame: pd.DataFrame = RESULTS) -> list[pd.DataFrame]:
    """Two shards, with all results of a driver in one of them."""
    return [part for _, part in frame.groupby(frame["driver"] % 2)]


def sites(*shards: pd.DataFrame, name: str = "results") -> list[dict]:
    return [{"drivers": DRIVERS}, *({name: shard} for shard in shards)]


def refused(match, shards, sql=SQL, **settings):
    """Expect a refusal, before any training."""
    grid = WatchedGrid(sites(*shards))
    with pytest.raises((QueryError, SiteError), match=match):
        federated.train(grid, sql, **settings)
    return [seen.action for seen in grid.seen]


@pytest.mark.parametrize("shards", [[RESULTS], by_driver()], ids=["whole", "sharded"])
def test_a_run_is_that_on_columns_that_were_computed_beforehand(shards):
    run = run_query(SQL, sites(*shards), "cg", **EXACT)
    expected = run_query(BEFOREHAND, sites(computed(), name="computed"), "cg", **EXACT)
    assert run.report.joined_rows_train == expected.report.joined_rows_train
    for table, theta in expected.theta.items():
        np.testing.assert_allclose(run.theta[table], theta, rtol=1e-5, atol=1e-7)
    assert run.report.final_train == pytest.approx(expected.report.final_train)


def test_predictions_are_those_on_columns_that_were_computed_beforehand(tmp_path):
    """New rows have no label: the star of the sub-query has a column less."""
    model = predicted.train(
        tmp_path / "a", {"r": {"results": [RESULTS]}, **driver_site()}, SQL, **EXACT
    )
    expected = predicted.train(
        tmp_path / "b",
        {"r": {"computed": [computed()]}, **driver_site()},
        BEFOREHAND,
        **EXACT,
    )
    new = results(60, seed=7)
    source = SOURCE.replace(" AND r.y IS NOT NULL", "")
    selected = predicted.unlabelled(SELECTED)
    scores = []
    for trained, name, frame, relation in (
        (expected, "computed", computed(new), "computed"),
        (model, "results", new, f"({WINDOWED})"),
    ):
        rows = {"r": {name: [frame.drop(columns="y")]}, **driver_site()}
        table = trained.table(rows, f"{selected} {relation} r {source}")
        scores.append(sorted(table["score"].to_pylist()))
    assert len(scores[0]) > 40
    assert scores[0] == pytest.approx(scores[1])


def test_a_model_is_not_for_other_windows(tmp_path):
    rows = {"r": {"results": [RESULTS]}, **driver_site()}
    model = predicted.train(tmp_path, rows, SQL, **EXACT)
    for other in (
        SQL.replace("INTERVAL 30 DAY", "INTERVAL 20 DAY"),
        SQL.replace("PARTITION BY driver ORDER BY day, race", "ORDER BY day, race"),
    ):
        with pytest.raises(TPFlowerError, match="features differ from those of model"):
            model.table(rows, other)


def driver_site() -> dict:
    return {"drivers": {"drivers": [DRIVERS]}}


def test_a_partition_that_crosses_shards_is_refused_with_the_count():
    halves = [RESULTS[:60], RESULTS[60:]]
    match = (
        r"sub-query 'r' aggregates groups that cross shards: \d of \d groups have rows "
        r"at several of the sites 'site-1', 'site-2'.*of windows are those of PARTITION"
    )
    actions = refused(match, halves)
    assert not [action for action in actions if action.startswith("train.")]


def test_every_partition_by_of_a_sub_query_is_compared():
    by_race = "LAG(points, 1, 0) OVER (PARTITION BY race % 2 ORDER BY day, race)"
    refused(
        "2 of 11 groups have rows at several", by_driver(), SQL.replace(LAST, by_race)
    )


def test_a_window_of_a_whole_table_needs_it_in_one_shard():
    """The server sees it before it asks for rows, and a site before it answers."""
    alone = SQL.replace("PARTITION BY driver ORDER BY day, race", "ORDER BY day, race")
    assert federated.train(sites(RESULTS), alone, **EXACT).report.final_train
    match = (
        r"a window of sub-query 'r' has no PARTITION BY, .* sites 'site-1', 'site-2'"
    )
    actions = refused(match, by_driver(), alone)
    assert "query.extract" not in actions


def test_a_site_does_not_compare_windows_of_a_whole_table():
    alone = SQL.replace("PARTITION BY driver ORDER BY day, race", "ORDER BY day, race")

    @on_requests("query.extract")
    def ask_for_groups(seen):
        for part in seen.header["parts"]:
            part["groups"] = True

    with pytest.raises(SiteError, match="'groups': the run was proposed with False"):
        run_query(alone, sites(RESULTS), change=ask_for_groups, **EXACT)


def test_a_site_sends_no_groups_of_a_whole_table():
    over = Feature("r", 'RANK() OVER (ORDER BY "day")')
    fragment = Fragment("r", "results", subquery=SubQuery((over,)))
    with pytest.raises(SiteError, match="table r: a window has no PARTITION BY"):
        _group_hashes(None, None, fragment)


def test_the_latest_result_of_every_driver():
    latest = "ROW_NUMBER() OVER (PARTITION BY driver ORDER BY day DESC, race)"
    sql = f"""SELECT d.age AS label, r.points FROM drivers d JOIN (SELECT driver, points
        FROM results WHERE day IS NOT NULL QUALIFY {latest} = 1) r ON d.id = r.driver"""
    strategy = federated.train(sites(*by_driver()), sql, **EXACT)
    assert strategy.report.joined_rows_train == RESULTS["driver"].nunique()


def policy_run(folder, rules: str, sql: str = SQL, **settings):
    tables = {"results": RESULTS, "drivers": DRIVERS}
    grid = site_per_table(folder, tables, {"results": rules})
    return run_query(sql, grid, **{**EXACT, **settings})


def test_policies_in_a_run(tmp_path):
    """What windows partition by may be a key that features may not read."""
    allowed = 'columns = ["points", "day", "race", "y"]\nkeys = ["driver"]\n'
    allowed += 'filters = ["points", "day", "race", "y"]\n'
    policy_run(tmp_path / "a", allowed)
    hidden = allowed.replace('"race", ', "").replace('["driver"]', '["driver", "race"]')
    match = r"columns\) refuses: feature 'last_points' reads column 'race'"
    with pytest.raises(SiteError, match=match):
        policy_run(tmp_path / "b", hidden)
    few = "min-rows = 200"
    with pytest.raises(SiteError, match=r"min-rows.*too few rows"):
        policy_run(tmp_path / "c", few)
    policy_run(tmp_path / "d", "min-rows = 20")


@pytest.mark.parametrize(
    "privacy",
    [
        PRIVATE,
        PrivacySettings(predictions=2.0, delta=1e-5),
        PrivacySettings(labels="laplace", label_epsilon=1.0, label_range=(-5.0, 9.0)),
    ],
    ids=["models", "scores", "labels"],
)
def test_noise_for_single_rows_is_refused(tmp_path, privacy):
    """A row changes the windows of others: nothing says how many."""
    match = (
        "windows of sub-query 'r' let one row change the values of others.*"
        "sets privacy-unit"
    )
    with pytest.raises(SiteError, match=match):
        policy_run(tmp_path, "min-rows = 2", privacy=privacy, task="regression")


def test_windows_of_one_unit_cost_what_its_rows_do(tmp_path):
    """All rows of a window are the driver's, and leave with the driver."""
    unit = 'privacy-unit = "driver"\nrows-per-unit = 5'
    runs = [
        policy_run(tmp_path / str(n), unit, sql, privacy=PRIVATE)
        for n, sql in enumerate(
            [SQL, SQL.replace(FORM, "points * 2").replace(LAST, "points * 3 - 30")]
        )
    ]
    plain, windowed = (
        [
            (release["what"], release["mechanism"], release["unit"])
            for release in run.releases
            if release["table"] == "results" and release["mechanism"]
        ]
        for run in reversed(runs)
    )
    assert windowed == plain != []
    assert runs[0].sizes[0] <= RESULTS["driver"].nunique() * 5
    by_race = SQL.replace(
        "PARTITION BY driver ORDER BY day, race", "ORDER BY day, race"
    )
    match = "windows over rows of different units; PARTITION BY driver as well in each"
    with pytest.raises(SiteError, match=match):
        policy_run(tmp_path / "b", unit, by_race, privacy=PRIVATE)


def test_two_choices_of_rows_by_windows_are_two_selections(tmp_path):
    """They may differ in one row, as two filters may."""
    latest = "ROW_NUMBER() OVER (PARTITION BY driver ORDER BY day, race)"
    sql = f"""SELECT a.y AS label, a.points, b.points AS p FROM (SELECT * FROM results
        QUALIFY {latest} > 1) a JOIN (SELECT * FROM results QUALIFY {latest} > 2) b
        ON a.driver = b.driver"""
    site = write_site(tmp_path / "s", {"results": RESULTS}, {"results": "min-rows = 5"})
    with pytest.raises(
        SiteError, match="the difference of two of the run's conditions"
    ):
        run_query(sql, {"s": site}, **EXACT)
