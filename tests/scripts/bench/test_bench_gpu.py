"""The benchmark of devices: its figures, and one small run of it."""

import json
import sys
from pathlib import Path

import pytest

from scripts.bench.suites import gpu
from scripts.bench.suites.gpu import LINEAR, METHODS, NO_GPU, measure_gpu, measure_one

FACTOR = 1e-4


def faked(monkeypatch, *, has_gpu: bool, loss: float) -> list[tuple[str, str]]:
    """Let the processes' figures be these; return which were asked for."""
    asked = []

    def run(script, argument):
        tables, name, epochs, method, device = argument
        assert Path(script).name == "gpu.py"
        assert (Path(tables).name, name, epochs) == ("tables.toml", "mimic", 3)
        asked.append((method, device))
        is_cpu = device == "cpu"
        return {
            "seconds per epoch": 6.0 if is_cpu else 1.5,
            "train loss": 0.5 if is_cpu else loss,
        }

    monkeypatch.setattr(gpu, "in_process_of_its_own", run)
    monkeypatch.setattr(gpu, "_name_of_gpu", lambda: "H")
    found = "cuda" if has_gpu else "cpu"
    monkeypatch.setattr(gpu, "resolve", lambda *_: found)
    return asked


def test_both_devices_are_compared(monkeypatch, tmp_path):
    asked = faked(monkeypatch, has_gpu=True, loss=0.5 + 1e-5)
    outcome = measure_gpu(tmp_path, FACTOR, "mimic", 3)
    assert asked == [(method, d) for method in METHODS for d in ("cpu", "cuda")]
    assert outcome.facts["gpu"] == "H"
    assert outcome.facts["sgd, cuda: seconds per epoch"] == 1.5
    assert outcome.facts["sgd: times as fast as on the CPU"] == 4.0
    assert len(outcome.checks) == len(LINEAR)
    assert [check.measured for check in outcome.checks] == [pytest.approx(2e-5)] * 2
    assert all(check.is_met for check in outcome.checks)
    faked(monkeypatch, has_gpu=True, loss=0.5 + 1e-3)
    checks = measure_gpu(tmp_path, FACTOR, "mimic", 3).checks
    assert not any(check.is_met for check in checks)


def test_without_a_gpu_the_cpu_is_measured_and_that_is_said(monkeypatch, tmp_path):
    asked = faked(monkeypatch, has_gpu=False, loss=0.5)
    outcome = measure_gpu(tmp_path, FACTOR, "mimic", 3)
    assert asked == [(method, "cpu") for method in METHODS]
    assert outcome.facts["gpu"] == NO_GPU
    assert not outcome.checks


def test_one_run(monkeypatch, tmp_path, capsys):
    tables = gpu._tables(tmp_path, FACTOR, "mimic")
    before = tables.stat().st_mtime_ns
    assert gpu._tables(tmp_path, FACTOR, "mimic") == tables
    assert tables.stat().st_mtime_ns == before
    argument = json.dumps([str(tables), "mimic", 2, "admm", "cpu"])
    monkeypatch.setattr(sys, "argv", ["gpu.py", argument])
    gpu.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["joined rows"] == 232
    assert found["train loss"] < 0.7
    assert found["seconds per epoch"] > found["of them at the server"] > 0
    again = measure_one(tables, "mimic", 2, "admm", "cpu")
    assert again["train loss"] == found["train loss"]
