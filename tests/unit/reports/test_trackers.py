"""Trackers see what the report says, and never stand in a run's way."""

import struct
import sys

import numpy as np
import pytest

from strategies.trackers import Tracker, Tracking
from tests.support.examples.explained import run_app
from tp_flower.errors import MappingError, SettingsError
from tp_flower.reports.records import RoundReport
from tp_flower.settings import Settings

FILES = ["report.json", "report.html"]
EPOCHS = {"num-epochs": 3, "progress": False, "validation-fraction": 0.1}


def expected_curves(report):
    """Return the curves that a report tells of: {name: [(epoch, value)]}."""
    curves = {}
    so_far = {}
    for item in report["history"]:
        for way in ("up", "down"):
            name = f"so-far/bytes-{way}"
            so_far[name] = so_far.get(name, 0) + sum(item[f"bytes-{way}"].values())
        so_far["so-far/rounds"] = item["round"]
        if item["epoch"] and item["train"]:
            values = {
                f"{part}/{name}": value
                for part in ("train", "test", "validation")
                for name, value in item[part].items()
            }
            residuals = item["residuals"]
            values |= {f"residual/{name}": residuals[name] for name in residuals}
            for name, value in {**values, **so_far}.items():
                curves.setdefault(name, []).append((item["epoch"], value))
    for part, metrics in report["final"].items():
        for name, value in metrics.items():
            curves[f"final/{part}/{name}"] = [(0, value)]
    return curves


def read_events(folder):
    from tensorboardX.proto.event_pb2 import Event

    curves = {}
    texts = {}
    for path in folder.glob("events.*"):
        data = path.read_bytes()
        while data:
            # length, checksum, event, checksum
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    point = (event.step, value.simple_value)
                    curves.setdefault(value.tag, []).append(point)
                else:
                    texts[value.tag] = value.tensor.string_val[0].decode()
    return curves, texts


def test_tensorboard_has_the_curves_of_the_report(tmp_path):
    pytest.importorskip("tensorboardX")
    report = run_app(tmp_path, track="tensorboard", **EPOCHS)
    curves, texts = read_events(tmp_path / "tensorboard")
    expected = expected_curves(report)
    assert len(expected["train/loss"]) == 3
    assert {name for name in curves if "seconds" not in name} == set(expected)
    for name, points in expected.items():
        # a float32 each
        assert np.array(curves[name]) == pytest.approx(np.array(points), rel=1e-6), name
    assert "| strategy | auto |" in texts["settings/text_summary"]
    assert str(tmp_path / "report.html") in texts["report/text_summary"]


@pytest.mark.parametrize("uri", ["", "elsewhere.db"], ids=["own file", "given"])
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_has_the_curves_of_the_report(tmp_path, monkeypatch, uri):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = f"sqlite:///{tmp_path / (uri or 'run/mlflow.db')}"
    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.chdir(tmp_path)
    report = run_app(tmp_path / "run", track="mlflow", **EPOCHS)
    client = tracking.MlflowClient(store)
    experiment = client.get_experiment_by_name("tp_flower")
    (run,) = client.search_runs([experiment.experiment_id])
    for name, points in expected_curves(report).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in history] == points
    assert run.info.status == "FINISHED"
    assert run.data.params["num-epochs"] == "3"
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == set(FILES)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_named_first(tmp_path, monkeypatch, name):
    for module in ("tensorboardX", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=rf'pip install .* -e ".\[{name}\]"'):
        run_app(tmp_path, track=name)
    assert not (tmp_path / "report.json").exists()


class Recorder(Tracker):
    def __init__(self, fails=False):
        self.logged = []
        self.ends = []
        self.fails = fails

    def log(self, values, epoch):
        if self.fails:
            raise ConnectionError("the server is gone")
        self.logged.append((epoch, values))

    def finish(self, values, files, *, is_ok):
        self.ends.append((values, [file.name for file in files], is_ok))


@pytest.fixture
def recorders(monkeypatch):
    made = [Recorder(fails=True), Recorder()]
    monkeypatch.setattr("strategies.trackers.open_trackers", lambda *_: list(made))
    return made


def test_a_tracker_that_fails_is_left_out(tmp_path, recorders, caplog):
    report = run_app(tmp_path, **EPOCHS)
    broken, works = recorders
    assert report["status"] == "completed"
    assert broken.logged == []
    assert broken.ends == []
    assert [epoch for epoch, _ in works.logged] == [1, 2, 3]
    assert [end[1:] for end in works.ends] == [(FILES, True)]
    warned = [each.message for each in caplog.records if "left out" in each.message]
    assert warned == ["Recorder is left out from here on: the server is gone"]


def test_a_run_that_fails_is_logged_as_one(tmp_path, recorders):
    with pytest.raises(MappingError):
        run_app(tmp_path, **{"max-joined-rows": 1})
    assert [end[1:] for end in recorders[1].ends] == [(FILES, False)]


def test_what_is_not_finite_is_left_out(tmp_path, recorders):
    with Tracking(Settings(), tmp_path) as tracking:
        tracking(RoundReport(1, 1, "a", {"loss": float("nan"), "auc": 0.5}))
    ((epoch, values),) = recorders[1].logged
    assert epoch == 1
    assert values["train/auc"] == 0.5
    assert "train/loss" not in values
