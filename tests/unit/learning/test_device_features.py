"""Torch models train on a device as on the CPU; copies are made once."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from client_apps.data import features as placement
from client_apps.data.run_store import IN_MEMORY, SiteStore
from tests.support.federated import one_per_site, run, sharded, store, whole
from tests.support.files import output_of
from tp_flower.errors import SettingsError
from tp_flower.learning.models import local_model, neural
from tp_flower.learning.models.neural import (
    FitBudget,
    as_tensor,
    fit_least_squares,
    torch_device,
)

skip = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device here"
)
cuda = pytest.param(local_model.CUDA, marks=[pytest.mark.gpu, skip])
each_device = pytest.mark.parametrize("device_name", ["cpu", cuda])
ROWS = 23
WIDTH = 4
OUTPUTS = 3
HIDDEN = "CUDA_VISIBLE_DEVICES hides it, .* client-resources-num-gpus is 0"


def pretend(monkeypatch, device_name: str) -> None:
    """Let code that asks for CUDA get this device, by the same way."""
    if device_name == local_model.CUDA:
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(neural, "torch_device", lambda _: torch.device("cpu"))


def matrix() -> np.ndarray:
    """Features as they are memory-mapped: read-only, float32."""
    rows = default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows.flags.writeable = False
    return rows


@each_device
@pytest.mark.parametrize("place", ["resident", "on the host"])
def test_torch_models_train_alike(device_name, place):
    placed = matrix()
    if place == "resident":
        placed = as_tensor(placed).to(device_name)
    assert_array_equal(local_model.host_features(placed), matrix())
    spec = local_model.ModelSpec(
        kind="mlp", outputs=OUTPUTS, intercept=True, hidden_sizes=(5,)
    )
    messages = default_rng(2).normal(size=(ROWS, OUTPUTS))
    counts = np.arange(1, ROWS + 1)
    budget = FitBudget(2, 12, batch_rows=6)
    results = []
    for features in (matrix(), placed):
        # the kernels of one device: their sums are in one order
        model = local_model.build_model(spec, WIDTH, device_name)
        model.pullback(features, messages)
        zero = np.zeros(len(model.penalised))
        penalised = model.penalised
        problem = local_model.FitProblem(
            features, counts, messages, 0.5, ROWS, 0.01, zero, penalised
        )
        fit_least_squares(model, problem, budget, default_rng(3))
        pulled = model.pullback(features, messages)
        results.append((model.parameters, model.scores(features), pulled))
    for one, other in zip(*results, strict=True):
        assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device_name", [cuda])
def test_no_step_of_a_fit_waits_for_the_gpu(device_name):
    device_rows = as_tensor(matrix()).to(device_name)
    model = local_model.build_model(
        local_model.ModelSpec(kind="mlp"), WIDTH, device_name
    )
    ones = np.ones(ROWS)
    zero = model.penalised
    problem = local_model.FitProblem(
        device_rows, ones, ones[:, None], 1.0, ROWS, 0.0, zero, zero
    )
    waits = []
    for steps in (8, 48):
        budget = FitBudget(passes=1, least_steps=steps, batch_rows=6)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with pytest.warns(UserWarning, match="synchroniz") as caught:
                fit_least_squares(model, problem, budget, default_rng(0))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(len(caught))
    # ten more passes: the permutation of each is all that may wait
    assert waits[1] - waits[0] <= 10


FRAMES = store(orders=40, customers=8)
RUNS = {
    "admm": {"local_epochs": 1},
    "admm, consensus": {"layout": sharded, "local_epochs": 1},
    "admm, one linear": {"models": "c=linear", "local_epochs": 1},
    "sgd": {"strategy": "sgd", "batch_size": 20},
    "sgd, shards": {"strategy": "sgd", "batch_size": 20, "layout": sharded},
}


@pytest.mark.cases(
    "admm, consensus-cpu", "admm, one linear-cpu", "sgd, shards-cpu", "*-cuda"
)
@each_device
@pytest.mark.parametrize("name", list(RUNS))
def test_runs_are_the_cpus_epoch_by_epoch(name, device_name, monkeypatch):
    how = {"num_epochs": 2, "model": "mlp", "hidden_sizes": (3,), **RUNS[name]}
    layout = how.pop("layout", whole)
    sites = one_per_site(layout(FRAMES))
    expected = run("logistic", sites, **how)
    pretend(monkeypatch, device_name)
    spy = Mock(wraps=neural.free_bytes)
    monkeypatch.setattr(neural, "free_bytes", spy)
    actual = run("logistic", sites, device="cuda", **how)
    # once per part of a torch model and process, whatever the number of messages
    tables = actual.strategy.training_problem.tables.values()
    copied = [table for table in tables if not table.is_linear]
    assert spy.call_count == sum(len(table.parts) for table in copied)
    assert not placement._COPIES
    # hundreds of float32 steps carry the last bits of another order of sums on
    loose = 100.0 if device_name == "cuda" else 1.0
    near = {"rtol": loose * 1e-4, "atol": loose * 1e-5}
    for one, other in zip(actual.parameters, expected.parameters, strict=True):
        for table in one:
            assert_allclose(one[table], other[table], **near)


def device_copy(run_id: int, monkeypatch, number: int = 0):
    pretend(monkeypatch, "cpu")
    site_store = SiteStore(IN_MEMORY, run_id, 5)
    return site_store, placement.move_to_device(
        site_store, number, matrix(), "cuda", "mlp"
    )


def test_copies_are_kept_by_run_node_and_part(monkeypatch):
    first, copy = device_copy(1, monkeypatch)
    assert isinstance(copy, torch.Tensor)
    assert device_copy(1, monkeypatch)[1] is copy
    second, other = device_copy(2, monkeypatch)
    assert other is not copy
    assert device_copy(1, monkeypatch, number=1)[1] is not copy
    placement.forget(first, 0)
    assert device_copy(1, monkeypatch)[1] is not copy
    placement.release(first)
    assert device_copy(2, monkeypatch)[1] is other
    placement.release(second)
    assert not placement._COPIES


def test_copies_of_a_dead_run_make_room(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    device_copy(1, monkeypatch)
    now[0] = placement.IDLE_SECONDS
    second, _ = device_copy(2, monkeypatch)
    assert len(placement._COPIES) == 2
    now[0] += 1.0
    third, _ = device_copy(3, monkeypatch)
    assert [key[0] for key in placement._COPIES] == [second.run, third.run]
    placement.release(second)
    placement.release(third)


def test_linear_features_and_those_of_a_full_gpu_stay(monkeypatch):
    pretend(monkeypatch, "cpu")
    site_store = SiteStore(IN_MEMORY, 1, 5)
    features = matrix()

    def placed(device, kind="mlp"):
        return placement.move_to_device(site_store, 0, features, device, kind)

    assert placed("cpu") is features
    assert placed("auto", "linear") is features
    assert placed("cuda", "linear") is features
    assert isinstance(placed("auto"), torch.Tensor)
    placement.release(site_store)
    room = placement.LEAST_BYTES + features.nbytes - 1
    monkeypatch.setattr(neural, "free_bytes", lambda _: room)
    assert placed("cuda") is features
    monkeypatch.setattr(neural, "free_bytes", lambda _: 10**8)
    text = "device is 'cuda', but only 0.1 GB of this site's GPU are free"
    with pytest.raises(SettingsError, match=text):
        placed("cuda")
    assert placed("auto") is features


def test_a_gpu_computes_in_full_precision():
    torch.set_float32_matmul_precision("high")
    try:
        torch_device("cuda")
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        (None, "can use; allowed there: 'cpu'"),
        ("0", "can use; allowed there: 'cpu'"),
        ("", HIDDEN),
        ("-1", HIDDEN),
    ],
)
def test_why_there_is_no_gpu(visible, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_model.resolve("auto") == "cpu"
    text = f"device is 'cuda', but this site has no CUDA device .*{reason}"
    with pytest.raises(SettingsError, match=text):
        local_model.resolve("cuda")
    # before training
    with pytest.raises(Exception, match=text):
        run("squared", one_per_site(whole(FRAMES)), device="cuda", model="mlp")


CODE = """
import sys
from contextlib import closing
from client_apps.app import app
from strategies import STRATEGIES
from scripts.data.make_store import STORE_SQL, make_store
from strategies.run.grid import InProcessGrid
from tp_flower.query import Query
frames = make_store(orders=60, items=5, customers=9, seed=0)
for name in ("admm", "sgd"):
    how = {"num_epochs": 1, "device": "auto"}
    with closing(InProcessGrid(app, {"shop": frames})) as grid:
        STRATEGIES[name](Query.from_sql(STORE_SQL), **how).start(grid)
print({"torch", "opacus"} & set(sys.modules))
"""


def test_linear_runs_without_a_gpu_never_import_torch():
    assert output_of(CODE).splitlines()[-1] == "set()"
