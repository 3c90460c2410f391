"""What a search refuses, and how it goes on where a server or a site has stopped."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from strategies import STRATEGIES
from strategies.search.run import Search
from tests.support.examples.killed_servers import Killed, KilledGrid, sites_of
from tests.support.federated import (
    LocalGrid,
    WatchedGrid,
    on_requests,
    one_per_site,
    site_per_table,
    store,
    store_sql,
    whole,
)
from tp_flower.errors import SiteError
from tp_flower.query import Query

SQL = store_sql("squared")
ONE = {"num_epochs": 1, "device": "cpu", "folds": 2}
SITES = one_per_site(whole(store()))


def start(sites, change=None, method=Search, sql=SQL, **settings):
    """Run a search, or a run of its own, on sites; return its strategy."""
    strategy = method(Query.from_sql(sql), **settings)
    with WatchedGrid(sites, change) as grid:
        strategy.start(grid)
    return strategy


def change_next(**fields):
    """A change of the requests for the next fit."""

    def change(seen):
        seen.header.update(fields)

    return on_requests("train.next")(change)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"fit": 2}, "'fit': the run was proposed with 1, and the request says 2"),
        ({"candidate": 1}, "'candidate': the run was proposed with 0 in fit 1, and"),
    ],
)
def test_a_site_counts_the_fits_itself(fields, match):
    with pytest.raises(SiteError, match=match):
        start(SITES, change_next(**fields), **ONE)


def test_a_run_that_is_no_search_has_no_fits():
    def change(seen):
        seen.header["proposal"]["settings"]["folds"] = 0

    with pytest.raises(SiteError, match=r"train\.next, which such a run does not have"):
        start(SITES, on_requests("query.extract")(change), **ONE)


def test_nothing_is_trained_in_a_search_before_a_fit_has_begun():
    """The server leaves out the message by which the sites count."""

    def change(seen):
        seen.header["proposal"]["settings"]["folds"] = 2

    cg = STRATEGIES["cg"]
    match = r"query\.statistics, which such a run does not have"
    with pytest.raises(SiteError, match=match):
        start(SITES, on_requests("query.extract")(change), cg, num_epochs=1)


def test_folds_that_differ_in_few_rows_of_a_table_are_refused(tmp_path):
    """The difference of two models would tell of these rows."""
    sites = site_per_table(tmp_path, store(), {"customers": "min-rows = 3\n"})
    whole_rows = {"test_fraction": 0.0, "test_split": "random(c)"}
    assert start(sites, **ONE, **whole_rows).results
    reason = "the difference of two folds' training rows of table 'customers'"
    with pytest.raises(SiteError, match=f"min-rows.*{re.escape(reason)}"):
        start(sites, **ONE, test_fraction=0.0)


def test_a_table_that_limits_its_score_vectors_is_not_searched_over(tmp_path):
    """Its candidates are trained one by one."""
    rng = np.random.default_rng(0)
    wide = pd.DataFrame(rng.normal(size=(80, 6)), columns=list("abcdef"))
    wide["k"] = range(80)
    label = pd.DataFrame({"k": range(80), "y": rng.normal(size=80)})
    frames = {"t": label, "w": wide}
    sites = site_per_table(tmp_path, frames, {"w": "scores-per-rank = 100\n"})
    sql = "SELECT t.y AS label, a, b, c, d, e, f FROM t JOIN w ON t.k = w.k"
    with pytest.raises(SiteError, match="a search releases them in every fit: train"):
        start(sites, sql=sql, **ONE)
    alone = {name: value for name, value in ONE.items() if name != "folds"}
    assert start(sites, method=STRATEGIES["cg"], sql=sql, **alone).is_finished


@pytest.mark.cases("14")
@pytest.mark.parametrize("at", [6, -9, 14])
def test_a_search_whose_server_was_killed_ends_as_one_that_was_not(tmp_path, at):
    def search(folder: Path, **settings):
        tried = '[{"l2": 0.1}, {"l2": 1.0}]'
        how = {**ONE, "candidates": tried, "output_dir": str(folder), **settings}
        return Search(Query.from_sql(SQL), **how)

    whole_run = search(tmp_path / "whole")
    with LocalGrid(sites_of(False), state=tmp_path / "whole" / "sites") as grid:
        whole_run.start(grid)
    folder = tmp_path / "killed"
    grid = KilledGrid(sites_of(False), state=folder / "sites")
    grid.kill_at = at
    with pytest.raises(Killed):
        search(folder).start(grid)
    grid.kill_at = None
    resumed = search(folder, resume=str(folder))
    resumed.start(grid)
    grid.close()
    assert [fit.loss for fit in resumed.results] == pytest.approx(
        [fit.loss for fit in whole_run.results], rel=1e-12
    )
    assert resumed.report.final_test == pytest.approx(whole_run.report.final_test)
    used = [
        [line.get("used") for lines in run.ledgers.values() for line in lines]
        for run in (resumed, whole_run)
    ]
    assert used[0] == used[1]
    assert np.isfinite(resumed.report.final_test["loss"])
