"""Workers as actors of Ray: a run on them, whose actors are killed, and refusals."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.support.files import ROOT
from tp_flower.errors import SettingsError
from tp_flower.joins.ray_workers import (
    TOKEN_MODE,
    RayWorkers,
    connect,
    load_ray,
    open_workers,
)


@pytest.mark.cases
@pytest.mark.parametrize("workers", [2])
def test_a_run_on_ray_is_the_same_though_actors_are_killed(workers):
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.children.ray_run", str(workers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not child.returncode, child.stderr
    results = json.loads(child.stdout.splitlines()[-1])
    here, there = results["runs"]
    # one in the set-up, the other in an epoch
    assert there["generations"] == [1, 1]
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-12)
    assert there["metrics"] == pytest.approx(here["metrics"], rel=1e-12)
    assert results["kernel"]["sums"] == list(range(300))
    assert "scores" in results["kernel"]["error"]
    # workers end what they have started alone
    assert results["is-open"]
    # who has no token cannot have the workers run anything
    assert results["asks-for-token"]


def test_without_ray_the_setting_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"needs Ray, .*'flwr\[simulation\]'"):
        RayWorkers(2)
    with open_workers(0, lambda _: None) as workers:
        assert workers is None


def test_a_process_that_has_loaded_ray_without_a_token_is_refused(monkeypatch):
    """And one that has it in its environment is not, as in the run above."""
    loaded = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", loaded)
    monkeypatch.delenv(TOKEN_MODE, raising=False)
    with pytest.raises(SettingsError, match=f"set {TOKEN_MODE}=token in its env"):
        load_ray()
    monkeypatch.setenv(TOKEN_MODE, "token")
    assert load_ray() is loaded
    # Flower's simulation, or a script, has begun it as it wants it
    monkeypatch.delenv(TOKEN_MODE)
    loaded.is_initialized = lambda: True
    assert load_ray() is loaded


def test_a_cluster_that_does_not_answer_is_named():
    def refuse(**_: object) -> None:
        raise ConnectionError("ray client connection timeout")

    with pytest.raises(SettingsError, match="'ray://nowhere:1': there is no cluster"):
        connect(SimpleNamespace(init=refuse), "ray://nowhere:1")
