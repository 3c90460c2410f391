"""A run that names a model larger than a site's memory: refused before it is made."""

import numpy as np
import pandas as pd
import pytest

from client_apps.operator import participant
from tests.support.federated import run_query, site_per_table, train
from tp_flower.errors import ModelError, SiteError
from tp_flower.learning.models.local_model import (
    ModelSpec,
    build_model,
    count_parameters,
)
from tp_flower.methods.boost import engine

ROWS = np.arange(60)
LEFT = pd.DataFrame({"k": ROWS, "x": ROWS % 7 * 1.0, "y": ROWS % 3 == 0})
RIGHT = pd.DataFrame({"k": ROWS, "z": ROWS % 11 * 1.0})
SQL = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
NUMBER = "SELECT a.x AS label, b.z FROM a JOIN b ON a.k = b.k"
NETWORKS = "tests.support.examples.networks"
FACTORY = f"{NETWORKS}:wide_network"
KINDS = f'\nmodels = ["linear", "mlp", "trees", "{FACTORY}"]'
WIDE = (("a", "x", "hash(1048576)"), ("b", "z", "hash(1048576)"))
SMALL = {
    "mlp": {"strategy": "admm", "model": "mlp", "hidden_sizes": (16,)},
    "linear": {"encoders": (("a", "x", "hash(64)"), ("b", "z", "hash(64)"))},
    "leaves": {"strategy": "boost", "leaves": 15, "trees_per_round": 10},
}
LARGE = {
    "mlp": {"strategy": "admm", "model": "mlp", "hidden_sizes": (16_000, 16_000)},
    "factory": {"strategy": "admm", "model": FACTORY},
    "linear": {"encoders": WIDE},
    "leaves": {"strategy": "boost", "leaves": 65_536, "trees_per_round": 100},
}


def made(*_):
    raise ModelError("it is made")


def ask_for(folder, monkeypatch, model, rules):
    """Ask two sites of these rules for a model; ModelError says that one is made."""
    settings = {"strategy": "cg", **model}
    monkeypatch.setattr(participant.local_model, "build_model", made)
    if settings["strategy"] == "boost":
        monkeypatch.setattr(participant.local_model, "build_model", build_model)
        monkeypatch.setattr("client_apps.methods.boost.rounds.grow", made)
    tables = {"a": LEFT, "b": RIGHT}
    sites = site_per_table(folder, tables, dict.fromkeys(tables, rules + KINDS))
    run_query(SQL, sites, device="cpu", **settings)


@pytest.mark.parametrize("kind", LARGE)
def test_a_model_beyond_the_policy_is_refused_before_it_is_made(
    tmp_path, monkeypatch, kind
):
    match = (
        r"\(most-parameters = 1000000\) refuses: the run asks for a model of [0-9]+ "
    )
    with pytest.raises(SiteError, match=match):
        ask_for(tmp_path, monkeypatch, LARGE[kind], "most-parameters = 1_000_000")


@pytest.mark.parametrize("kind", SMALL)
def test_a_smaller_one_is_made(tmp_path, monkeypatch, kind):
    with pytest.raises(Exception, match="it is made"):
        ask_for(tmp_path, monkeypatch, SMALL[kind], "most-parameters = 1_000_000")


@pytest.mark.parametrize("kind", LARGE)
def test_without_the_rule_it_is_made(tmp_path, monkeypatch, kind):
    with pytest.raises(Exception, match="it is made"):
        ask_for(tmp_path, monkeypatch, LARGE[kind], f"most-parameters = {10**12}")


SHOWN = "min-rows-per-parameter = 3\ncoefficients = true"
FITTED = {"strategy": "cg"}
SUMMED = {"strategy": "moments", "releases": "\nreleases.moments = 'clear'"}


def train_columns(folder, columns, rules, strategy="cg", releases=""):
    """Train on 60 rows, of which table b has so many columns under these rules."""
    b = "min-rows = 2\nmin-count = 1\n" + rules + KINDS + releases
    every = {"a": "min-rows = 2" + KINDS + releases, "b": b}
    encoders = (("b", "z", f"hash({columns})"),)
    sites = site_per_table(folder, {"a": LEFT, "b": RIGHT}, every)
    train(sites, NUMBER, strategy, encoders=encoders, test_fraction=0.0, num_epochs=0)


@pytest.mark.parametrize("shown", [FITTED, SUMMED], ids=["coefficients", "moments"])
def test_a_parameter_of_fewer_rows_than_the_policy_says_is_not_shown(tmp_path, shown):
    train_columns(tmp_path / "enough", 20, SHOWN, **shown)
    match = (
        r"\(min-rows-per-parameter = 3\) refuses: the run would show 21 parameters "
        "of a linear model of too few rows; each needs so many"
    )
    with pytest.raises(SiteError, match=match) as refusal:
        train_columns(tmp_path / "few", 21, SHOWN, **shown)
    assert "60" not in str(refusal.value)


def test_coefficients_that_are_not_shown_need_no_rows(tmp_path):
    train_columns(tmp_path, 21, SHOWN.replace("true", "false"), **FITTED)


@pytest.mark.parametrize("kind", ["linear", "centres", "mlp", f"{NETWORKS}:network"])
@pytest.mark.parametrize("intercept", [False, True])
def test_the_count_is_the_length_of_the_parameters(kind, intercept):
    spec = ModelSpec(kind, outputs=3, intercept=intercept, hidden_sizes=(5, 4))
    assert count_parameters(spec, 6) == len(build_model(spec, 6, "cpu").parameters)


def test_histograms_of_many_leaves_are_bounded():
    """LightGBM holds one for every leaf and column from the start: 2.1 GB of 16,000 x
    30.
    """
    assert engine.HISTOGRAM_MEGABYTES * 2**20 < 16_000 * 30 * 255 * 16
