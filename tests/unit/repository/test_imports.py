"""Imports of a site's process: in deployment every message starts one."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from numpy.testing import assert_array_equal

from client_apps.app import app, handler_of, places
from strategies import Personalised, TablePuppetADMM, TablePuppetSGD
from strategies.run.grid import InProcessGrid
from tests.support.federated import store, store_sql, train
from tests.support.files import ROOT
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.personalised.messages import TRAIN_PERSONAL
from tp_flower.methods.sgd.messages import TRAIN_SGD
from tp_flower.protocol.messages import ACTIONS, Action
from tp_flower.protocol.packet import Packet, unpack

PROCESS = """
import json, sys
from pathlib import Path
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
from flwr.supercore.task_identity import TaskIdentity

message = json.loads(Path(sys.argv[1]).read_text())
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, message["run"], 1
request, state = (
    recorddict_from_proto(Proto.FromString(bytes.fromhex(message[name])))
    for name in ("request", "state")
)
context = Context(message["run"], message["node"], message["config"], state, {})
before = set(sys.modules)
from client_apps.app import app

reply = app(Message(request, message["node"], message["action"]), context)
imported = sorted(set(sys.modules) - before)
content = recorddict_to_proto(reply.content).SerializeToString().hex()
Path(sys.argv[2]).write_text(json.dumps({"imported": imported, "reply": content}))
"""
HEAVY = {
    "duckdb",
    "jinja2",
    "matplotlib",
    "opacus",
    "pandas",
    "psycopg",
    "pyarrow",
    "pymysql",
    "ray",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "sqlalchemy",
    "sqlglot",
    "torch",
}
OURS = {
    "client_apps.privacy.guard",
    "client_apps.training.prepare",
    "client_apps.handlers.setup",
    "client_apps.data.saved_models",
    "client_apps.data.tables",
    "tp_flower.sources.databases",
    "scripts.data",
    "tp_flower.features.encoder",
    "tp_flower.settings",
    "tp_flower.extraction",
    "tp_flower.query",
    "tp_flower.sources.shards",
}


class _OtherProcess(InProcessGrid):
    """Have one message of a type answered in a fresh process, before this one does."""

    def __init__(self, action: Action, folder: Path) -> None:
        sites = {name: {name: frame} for name, frame in store().items()}
        super().__init__(app, sites, state=folder / "state")
        self.action = action
        self.folder = folder
        self.imported: set[str] = set()

    def _deliver(self, message):
        is_first = message.metadata.message_type == self.action and not self.imported
        if is_first:
            self.elsewhere = self._answer_elsewhere(message)
        reply = super()._deliver(message)
        if is_first:
            self.here = unpack(reply.content)
        return reply

    def _answer_elsewhere(self, message) -> Packet:
        context = self.contexts[message.metadata.dst_node_id]
        sent = {
            "run": context.run_id,
            "node": context.node_id,
            "config": dict(context.node_config),
            "action": self.action,
            "request": _hex(message.content),
            "state": _hex(context.state),
        }
        request = self.folder / "request.json"
        reply = self.folder / "reply.json"
        request.write_text(json.dumps(sent))
        command = [sys.executable, "-c", PROCESS, str(request), str(reply)]
        subprocess.run(command, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
        answered = json.loads(reply.read_text())
        self.imported = set(answered["imported"])
        content = RecordDictProto.FromString(bytes.fromhex(answered["reply"]))
        return unpack(recorddict_from_proto(content))


def _hex(record) -> str:
    return recorddict_to_proto(record).SerializeToString().hex()


@pytest.mark.parametrize(
    ("method", "action", "handler"),
    [
        (TablePuppetADMM, TRAIN_ADMM, "admm"),
        (TablePuppetSGD, TRAIN_SGD, "sgd"),
        (Personalised, TRAIN_PERSONAL, "personalised.rounds"),
    ],
    ids=["admm", "sgd", "personalised"],
)
def test_a_round_of_training_imports_nothing_heavy(method, action, handler, tmp_path):
    grid = _OtherProcess(action, tmp_path)
    sql = store_sql("squared")
    settings = {}
    if method is Personalised:
        sql = "SELECT qty AS label, day FROM orders"
        settings = {"graph": "data"}
    train(grid, sql, method, num_epochs=1, **settings)
    elsewhere = grid.elsewhere.arrays
    here = grid.here.arrays
    assert elsewhere
    for key in {*elsewhere, *here}:
        assert_array_equal(elsewhere[key], here[key])
    assert f"client_apps.methods.{handler}" in grid.imported
    assert not {name.split(".")[0] for name in grid.imported} & HEAVY
    assert not grid.imported & OURS


def test_every_action_has_a_function_of_a_site_and_a_request():
    assert set(places()) == set(ACTIONS.values()), (
        "give it a line in ANSWERS of app.py, or in its method's room of registry.py"
    )
    for action in {*ACTIONS.values()} - {Action.SESSION}:
        parameters = inspect.signature(handler_of(action)).parameters
        assert list(parameters) == ["site", "request"]
