"""A saved model scores rows as the run did, also rows that it never saw."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng

from client_apps.data.saved_models import SavedModel
from client_apps.privacy.proposal_checks import check_named
from strategies import Explain, TablePuppetADMM, TablePuppetSGD
from tests.support import federated
from tests.support.federated import WatchedGrid
from tests.support.predicted import scores_of
from tp_flower.errors import ModelError, ProposalError
from tp_flower.model_names import ModelVersion
from tp_flower.settings import PrivacySettings

ROWS = 30
SQL = "SELECT o.qty AS label, o.price, c.age, c.kind FROM orders o JOIN c ON o.c = c.id"
ENCODERS = (("c", "kind", "one-hot(2) indicator"), ("o", "price", "bins(3)"))


def frames():
    price = default_rng(5).normal(size=ROWS)
    customer = np.arange(ROWS) % 6
    orders = pd.DataFrame({"c": customer, "price": price, "qty": price + customer})
    kinds = ["a", "b", "b", None, "c", "b"]
    people = pd.DataFrame({"id": range(6), "age": [20.0, 30, 41, 50, 66, 70]})
    return orders, people.assign(kind=kinds)


def train(folder, method, **settings):
    orders, people = frames()
    sites = [{"orders": orders}, {"c": [people[:4], people[4:]]}]
    grid = WatchedGrid(sites, state=folder)
    settings = {
        "test_fraction": 0.0,
        "validation_fraction": 0.0,
        "encoders": ENCODERS,
        **settings,
    }
    federated.train(grid, SQL, method, **settings)
    arrays = [item for seen in grid.seen for item in seen.arrays.items()]
    return {part: array for (part, name), array in arrays if name == "scores"}


def saved_parts(folder: Path) -> dict[int, SavedModel]:
    paths = sorted(folder.glob("*/models/*/*/part-*"))
    return {int(path.name[len("part-") :]): SavedModel.load(path) for path in paths}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (TablePuppetADMM, {"num_epochs": 3}),
        (TablePuppetADMM, {"num_epochs": 2, "lou": "consensus"}),
        (TablePuppetADMM, {"num_epochs": 2, "model": "mlp"}),
        (TablePuppetSGD, {"num_epochs": 2, "batch_size": 10}),
    ],
)
def test_saved_model_scores_as_the_run_did(tmp_path, method, settings):
    sent = train(tmp_path, method, privacy=PrivacySettings(scores="clear"), **settings)
    orders, people = frames()
    parts = saved_parts(tmp_path)
    assert sorted(parts) == [0, 1, 2]
    assert [part.table for part in parts.values()] == ["o", "c", "c"]
    for number, frame in enumerate([orders, people[:4], people[4:]]):
        assert scores_of(parts[number], frame) == pytest.approx(sent[number], abs=1e-5)


def test_saved_model_scores_what_it_never_saw_and_keeps_its_keys_to_the_site(tmp_path):
    train(tmp_path, Explain, mode="explain")
    assert not [*tmp_path.glob("*/models")]
    train(tmp_path, TablePuppetADMM, num_epochs=3)
    part = saved_parts(tmp_path)[1]
    _, people = frames()
    new = pd.DataFrame({"id": [9, 9, 9], "age": [41.0] * 3, "kind": ["new", "c", "b"]})
    scores = scores_of(part, new)
    # with one-hot(2) all but the most frequent category share "(other)"
    assert scores[0] == scores[1] != scores[2]
    assert scores[2] == pytest.approx(scores_of(part, people[2:3])[0])
    (folder,) = tmp_path.glob("*/models/*/*/part-1")
    assert folder.stat().st_mode & 0o077 == 0
    assert json.loads((folder / "model.json").read_text())["encoder"]["keys"]


def test_damaged_model_is_refused(tmp_path):
    train(tmp_path, TablePuppetADMM, num_epochs=1)
    (folder,) = tmp_path.glob("*/models/*/*/part-1")
    digest = SavedModel.load(folder).keep(folder)
    another = "its digest differs"
    for name, change, match in (
        ("model.json", lambda _: b"{", "is damaged"),
        ("model.json", lambda _: b"{}", "is damaged"),
        ("model.json", lambda _: b'{"version": 7}', "has version 7, expected 2"),
        ("model.json", lambda whole: whole + b" ", another),
        ("model.safetensors", lambda whole: whole + b" ", another),
        ("model.safetensors", lambda _: b"no", "is damaged"),
    ):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(change(whole))
        with pytest.raises(ModelError, match=match):
            SavedModel.load(folder, digest if match == another else "")
        (folder / name).write_bytes(whole)
    with pytest.raises(ModelError, match="there is no model in"):
        SavedModel.load(tmp_path)


def test_models_that_are_not_linear_show_no_coefficients(tmp_path):
    orders, _ = frames()
    policies = {"o": "coefficients = true\nreleases = { scores = 'clear' }"}
    path = federated.write_site(tmp_path, {"o": orders}, policies)
    sql = "SELECT qty AS label, price FROM o"
    strategy = federated.train({"shop": path}, sql, num_epochs=1, model="mlp")
    assert strategy.outcome.coefficients == {}


def test_a_model_that_starts_from_its_own_name_ends_its_lineage(tmp_path):
    train(tmp_path / "run", TablePuppetADMM, num_epochs=1)
    part = replace(saved_parts(tmp_path / "run")[0], start="grown")
    model = ModelVersion("grown", "20260101-000000-abcd")
    part.keep(model.folder(tmp_path) / "part-0")
    terms = SimpleNamespace(saved_model="grown")
    site = SimpleNamespace(terms=terms, state_folder=tmp_path)
    check_named(site, "grown", model.version)
    with pytest.raises(ProposalError, match="the request says 'other@"):
        check_named(site, "other", model.version)
