"""The advice of messages about saved models and stopped runs is applied to what raised
it.
"""

import shutil
from dataclasses import replace

import pytest

from tests.support.examples.killed_servers import killed, sites_of, strategy_in
from tests.support.federated import (
    FEATURES,
    SOURCE,
    LocalGrid,
    named_sites,
    sharded,
    store,
    whole,
)
from tests.support.predicted import on, train, train_store
from tp_flower.errors import ModelError, QueryError, SettingsError, SiteError
from tp_flower.settings import PrivacySettings

STORE = on(whole, store())
UNLABELLED = f"SELECT {FEATURES} {SOURCE}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train_store(tmp_path_factory.mktemp("model"), "squared", STORE)


def test_a_row_key_of_another_table(model):
    with pytest.raises(
        QueryError, match="the rows of 'o' are predicted: name columns of o"
    ):
        model.table(STORE, UNLABELLED, row_key="c.age")
    assert model.table(STORE, UNLABELLED, row_key="o.day").num_rows


def test_a_row_key_with_the_name_of_a_column_of_predictions(model):
    frames = store()
    frames["orders"]["score"] = frames["orders"]["day"]
    sites = on(whole, frames)
    with pytest.raises(
        SettingsError, match=r"would clash with .*: rename it in a sub-query"
    ):
        model.table(sites, UNLABELLED, row_key="o.score")
    orders = "FROM (SELECT *, score AS own_score FROM orders) o"
    renamed = UNLABELLED.replace("FROM orders o", orders)
    assert model.table(sites, renamed, row_key="o.own_score").num_rows


def test_the_query_of_another_model(model, tmp_path):
    other = "SELECT p.weight FROM items p"
    advice = (
        "are to be predicted, but the query has p: name the model of this query with "
        "model-name"
    )
    with pytest.raises(QueryError, match=advice):
        model.table(STORE, other)
    named = train(tmp_path, STORE, "SELECT p.price AS label, p.weight FROM items p")
    assert named.table(STORE, other).num_rows == len(store()["items"])


def test_a_row_far_outside_of_the_training_rows(model):
    frames = store()
    frames["orders"].loc[3, "day"] = 1e9
    sites = on(whole, frames)
    with pytest.raises(
        SiteError, match=r"leave such rows out by WHERE, or set privacy.scores"
    ):
        model.table(sites, UNLABELLED)
    assert model.table(sites, f"{UNLABELLED} WHERE o.day < 1e6").num_rows
    assert model.table(
        sites, UNLABELLED, privacy=PrivacySettings(scores="clear")
    ).num_rows


def test_sites_that_are_gone(tmp_path):
    sites = named_sites(sharded(store()))
    model = train_store(tmp_path, "squared", sites)
    gone = {name: own for name, own in sites.items() if name != "customers-1"}
    match = (
        r"unavailable: 'customers-1' .*; start them, or set on-missing = 'mean' to "
        r"predict with"
    )
    with pytest.raises(ModelError, match=match):
        model.table(gone, UNLABELLED)
    assert model.table(gone, UNLABELLED, on_missing="mean").num_rows
    assert model.table(sites, UNLABELLED).num_rows


def test_sites_without_a_state_folder(model):
    with pytest.raises(
        SiteError, match=r"this site keeps no models: .* give it a folder"
    ):
        replace(model, state=None).table(STORE, UNLABELLED)
    assert model.table(STORE, UNLABELLED).num_rows


def test_noise_for_the_scores_of_trees(model, tmp_path):
    trees = train_store(tmp_path, "squared", STORE, strategy="boost", num_epochs=1)
    noise = PrivacySettings(predictions=1.0)
    advice = (
        "no noise is planned for the scores of trees: leave privacy.predictions out, "
        "or predict by a linear model"
    )
    with pytest.raises(SiteError, match=advice):
        trees.table(STORE, UNLABELLED, privacy=noise)
    assert trees.table(STORE, UNLABELLED).num_rows
    assert model.table(STORE, UNLABELLED, privacy=noise).num_rows


@pytest.mark.parametrize("remedy", ["resume", "remove", "choose"])
def test_the_folder_of_a_stopped_run(tmp_path, remedy):
    grid = killed(tmp_path, "admm", False, 5)
    advice = "resume that run, remove the folder, or choose another output-dir"
    with pytest.raises(SettingsError, match=advice):
        strategy_in(tmp_path, "admm").start(grid)
    folder = tmp_path
    state = None
    settings = {}
    if remedy == "resume":
        state = tmp_path / "sites"
        settings = {"resume": str(tmp_path)}
    elif remedy == "remove":
        shutil.rmtree(tmp_path)
    else:
        folder = tmp_path / "another"
    run = strategy_in(folder, "admm", **settings)
    run.start(LocalGrid(sites_of(False), state=state))
    assert run.report.final_train
