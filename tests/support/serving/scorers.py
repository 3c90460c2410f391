"""A scorer over HTTP in a test: its sites in this process, its rounds in a thread."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from ssl import SSLContext
from threading import Thread

import pyarrow as pa

from strategies.inference.manifest import write_manifest
from strategies.serving.http_server import Address
from strategies.serving.scorer import Scorer, listening
from tests.support.federated import WatchedGrid
from tests.support.predicted import Model, NamedSites
from tp_flower.files import home_folder
from tp_flower.model_names import MANIFEST_FILE
from tp_flower.reports.predictions import ROW_HASH
from tp_flower.settings import Settings

TOKEN = "0123456789abcdef" * 2
PATIENCE = 20.0


@dataclass
class Serving:
    """A scorer that listens; the messages of its sites are those of the grid."""

    scorer: Scorer
    grid: WatchedGrid
    port: int
    lines: list[str]
    context: SSLContext | None = None

    def ask(
        self, path="/predict", body=None, method="", **headers
    ) -> tuple[int, dict, object]:
        """Status, headers and body of an answer; JSON is read."""
        address = ("localhost", self.port)
        connection = HTTPConnection(*address, timeout=PATIENCE)
        if self.context is not None:
            connection = HTTPSConnection(
                *address, timeout=PATIENCE, context=self.context
            )
        headers = {"Authorization": f"Bearer {TOKEN}"} | headers
        if not isinstance(body, bytes | None):
            body = json.dumps(body).encode()
        with closing(connection):
            method = method or ("GET" if body is None else "POST")
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.headers["Content-Type"] == "application/json":
                content = json.loads(content)
            return answer.status, dict(answer.headers), content

    def predict(self, *keys) -> list[list[dict]]:
        """The predictions of some keys."""
        status, _, content = self.ask(body={"keys": list(keys)})
        assert status == 200, content
        return content["predictions"]

    def error(self, *keys) -> tuple[int, str]:
        """The status and the reason of a request for keys that fails."""
        status, _, content = self.ask(body={"keys": list(keys)})
        return status, content["error"]

    def wait(self, reason: str = "") -> None:
        """Wait until requests are answered, or fail for a reason with this text."""

        def is_so() -> bool:
            found = self.scorer.requests.reason
            return reason in found if reason else not found

        self.until(is_so)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.lines
            time.sleep(0.01)

    def rounds(self, action: str) -> int:
        """How many messages of an action the sites were sent."""
        return sum(s.action == action and not s.is_reply for s in self.grid.seen)


@contextmanager
def serving(
    model: Model,
    sites: NamedSites,
    *,
    certificate: Path | None = None,
    refresh: float = 0.0,
    **settings: object,
) -> Iterator[Serving]:
    """Serve a model until the end of the context."""
    name = model.manifest.model
    if not (name.folder(home_folder()) / MANIFEST_FILE).exists():
        write_manifest(home_folder(), model.manifest)
    run = Settings(mode="serve", model_name=str(name), device="cpu")
    scorer = Scorer(run.with_fields(**settings), refresh)
    lines = []
    address = Address("127.0.0.1", 0, TOKEN, certificate)
    with WatchedGrid(sites, state=model.state) as grid:
        thread = Thread(target=scorer.run, args=(grid, lines.append))
        with listening(scorer, address) as server:
            thread.start()
            try:
                yield Serving(scorer, grid, server.server_port, lines)
            finally:
                scorer.requests.close()
                thread.join(PATIENCE)
        assert not thread.is_alive()


def by_row(table: pa.Table) -> dict[object, list[dict]]:
    """Predictions of a run by the names of their rows, as a scorer has them."""
    predictions = {}
    for one in table.to_pylist():
        predictions.setdefault(one.pop(ROW_HASH), []).append(one)
    return predictions
