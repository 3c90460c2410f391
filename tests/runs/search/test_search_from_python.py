"""Searches from Python and the command line, and what they return."""

import numpy as np
import pandas as pd
import pytest

from tests.support.command_line import printed_by, refused_by
from tests.support.federated import named_sites, store, store_sql, whole, write_site
from tp_flower import SearchResult, fit, search
from tp_flower.errors import QueryError, SettingsError

SQL = store_sql("squared")
GRID = [{"l2": [0.01, 1.0], "num_epochs": [2]}, {"strategy": ["gd"]}]


@pytest.fixture(scope="module")
def sites():
    shards = named_sites(whole(store()))
    return {
        name: {table: frames[0] for table, frames in tables.items()}
        for name, tables in shards.items()
    }


@pytest.fixture(scope="module")
def found(sites):
    return search(SQL, sites, GRID, folds=2, num_epochs=1)


def test_the_frames_have_every_fit_and_their_means(found):
    fits = found.fits
    assert len(fits) == 2 * 3
    assert set(fits["fold"]) == {0, 1}
    assert (fits["bytes"] > 0).all()
    assert (fits["epochs"] == np.where(fits["strategy"] == "gd", 1, 2)).all()
    means = fits.groupby("candidate")["loss"].mean().sort_values()
    candidates = found.candidates
    assert candidates["candidate"].tolist() == means.index.tolist()
    np.testing.assert_allclose(candidates["loss"], means)
    spread = fits.groupby("candidate")["loss"].std(ddof=0)
    np.testing.assert_allclose(
        candidates.set_index("candidate")["deviation"].sort_index(), spread
    )
    first = candidates.iloc[0]
    assert {key: first[key] for key in found.best} == dict(found.best)


def test_the_model_predicts_and_its_page_shows_the_search(found):
    assert (
        len(found.model.predict().frame)
        == found.model.report["joined-rows"]["train"]
        + found.model.report["joined-rows"]["test"]
    )
    page = (found.model.folder / "report.html").read_text()
    assert "What the search took" in page
    assert "range over the folds" in page
    for text in (found.text(), repr(found)):
        assert "l2" in text
    assert found.plot().startswith("<svg")


def test_random_candidates_are_as_many_as_asked_for(sites):
    grid = {"l2": "log(1e-3, 1)"}
    found = search(SQL, sites, grid, folds=2, candidates=2, num_epochs=1)
    assert len(found.candidates) == 2
    assert found.candidates["l2"].between(1e-3, 1.0).all()


def test_too_many_folds_are_refused_and_fewer_are_not(sites):
    how = {"folds": 4, "test_fraction": 0.0, "num_epochs": 1}
    with pytest.raises(QueryError, match="take fewer folds, or a split with more"):
        search(SQL, sites, {"l2": [0.1]}, test_split="group(c.region)", **how)
    split = "group(o.customer)"
    found = search(SQL, sites, {"l2": [0.1]}, test_split=split, **how)
    assert found.best == {"l2": 0.1}


def test_a_run_that_is_no_search_has_no_result_of_one(sites):
    model = fit(SQL, sites, num_epochs=1)
    with pytest.raises(SettingsError, match="searched nothing: set folds"):
        SearchResult(model)
    assert SearchResult(fit(SQL, sites, num_epochs=1, folds=2)).best == {}


@pytest.mark.usefixtures("home")
def test_the_command_prints_the_candidates(tmp_path):
    frame = pd.DataFrame({"x": range(24), "y": [2.0 * x for x in range(24)]})
    tables = write_site(tmp_path / "site", {"t": frame})
    how = ["--set", f"tables={tables}", "--set", "sql=SELECT y AS label, x FROM t"]
    text = printed_by("tune", *how, "--grid", "l2=1e-6,10", "--folds", "2")
    assert "fit 4 of 5: fold 2, l2 = 10: loss" in text
    assert text.index("1e-06  ") < text.index("10  ")
    assert "Model: default@" in text
    assert "write key=value" in refused_by("tune", *how, "--grid", "l2", status=2)
