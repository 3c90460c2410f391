"""What one message of ADMM costs a site: a fresh process that answers it, step by step.

The message is the last one of a short run over the flights, at a real site with all
tables. In deployment Flower also unpacks the app for every message.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import recorddict_to_proto

from client_apps.app import app
from scripts.bench.deployment.one_site import ROOT, write_flights
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tp_flower.protocol import Action
from tp_flower.query import Query
from tp_flower.sources.flights import FLIGHTS_SQL

EPOCHS = 2
PROCESS = """
import json, sys, time
from pathlib import Path

given = json.loads(Path(sys.argv[1]).read_text())
import flwr.supernode.cli.flwr_clientapp
from flwr.app import Context, Message, RecordDict
from flwr.cli.install import install_from_fab
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
from flwr.supercore.task_identity import TaskIdentity

spent = {"start of the process, with Flower": time.time() - float(sys.argv[2])}
clock = time.perf_counter

def timed(name, function):
    def run(*arguments):
        started = clock()
        try:
            return function(*arguments)
        finally:
            spent[name] = spent.get(name, 0.0) + clock() - started
    return run

fab = Path(given["fab"]).read_bytes()
timed("unpacking the app", install_from_fab)(fab, Path(given["home"]), True)
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
request = recorddict_from_proto(Proto.FromString(bytes.fromhex(given["request"])))

def import_app():
    import client_apps.app
    client_apps.app.answer_of(given["action"])
    return client_apps.app.app

app = timed("import of the app", import_app)()
from client_apps.rounds.site import Site
from client_apps.data.database import Changes
from client_apps.data.run_store import SiteStore

SiteStore.last = timed("reading state", SiteStore.last)
Site._fixed = timed("reading state", Site._fixed)
Changes._commit = timed("writing state", Changes._commit)
context = Context(1, given["node"], given["config"], RecordDict(), {})
message = Message(request, given["node"], given["action"])
started = clock()
app(message, context)
inner = spent["reading state"] + spent["writing state"]
spent["computing"] = clock() - started - inner
print(json.dumps(spent))
"""


class _Timed(InProcessGrid):
    """Have messages of ADMM answered in processes of their own first."""

    def __init__(self, folder: Path) -> None:
        tables = {"one": write_flights(folder / "flights")}
        super().__init__(app, tables, state=folder / "states")
        self._folder, self.seconds = folder, dict[str, float]()
        (folder / "app.fab").write_bytes(build_fab_from_disk(ROOT))

    def _deliver(self, message: Message) -> Message:
        if message.metadata.message_type == Action.ADMM:
            self.seconds = self._elsewhere(message)
        return super()._deliver(message)

    def _elsewhere(self, message: Message) -> dict[str, float]:
        node = message.metadata.dst_node_id
        given = {
            "node": node,
            "config": dict(self.contexts[node].node_config),
            "action": message.metadata.message_type,
            "request": _hex(message.content),
            "fab": str(self._folder / "app.fab"),
            "home": str(self._folder / "home"),
        }
        path = self._folder / "message.json"
        path.write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-c", PROCESS, str(path), str(time.time())]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def message_seconds(folder: Path) -> dict[str, float]:
    """Return what a fresh process spends on a message, in seconds, by step."""
    grid = _Timed(folder)
    TablePuppetADMM(Query.from_sql(FLIGHTS_SQL), num_epochs=EPOCHS).start(grid)
    return grid.seconds


def _hex(record: RecordDict) -> str:
    data: bytes = recorddict_to_proto(record).SerializeToString()
    return data.hex()
