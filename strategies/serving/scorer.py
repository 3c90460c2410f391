"""A scorer that stays: an HTTP server, and a session with the sites that is reopened.

The rounds are in the calling thread, requests are read in others. When a session ends
because a site is gone, requests fail at once, with its name, until the next session is
open.
"""

import math
import re
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Final

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from strategies.commands import simulate
from strategies.inference import manifest as manifests
from strategies.run.grid import InProcessGrid
from strategies.run.sites import no_host
from strategies.serving.http_server import Address, ScorerServer
from strategies.serving.metrics import Metrics
from strategies.serving.request_queue import OPENING, RequestQueue
from strategies.serving.serve import MOST_SITE_SECONDS, Serve
from tp_flower.errors import (
    SchemaError,
    SettingsError,
    TPFlowerError,
    UnavailableError,
)
from tp_flower.files import home_folder
from tp_flower.protocol.fields import Document
from tp_flower.query import Query
from tp_flower.settings import Settings
from tp_flower.sources.shards import hosted_shards

FIRST_PAUSE: Final = 0.5  # seconds before a session is opened again; they double
LONGEST_PAUSE: Final = 60.0
_NODE: Final = re.compile(r"\bnode (\d+)\b")


class Scorer:
    """Sessions with the sites, one after the other, which answer requests.

    Attributes:
        requests: that wait for a session.
        metrics: of requests and rounds.
    """

    def __init__(
        self,
        settings: Settings,
        refresh_seconds: float = 0.0,
        states: Collection[Path] = (),
    ) -> None:
        """Prepare a scorer of a saved model.

        Args:
            settings: of the runs, with the model and, if another, the query.
            refresh_seconds: after which the rows are read anew; 0 for never.
            states: folders of the state of sites that let this process read it; those
                of a grid in this process are known.

        Raises:
            TPFlowerError: there is no such model, the query cannot be read, or scores
                are to have noise.
        """
        if settings.privacy.covers_predictions:
            raise SettingsError(
                "privacy.predictions: noise that is drawn for each request averages "
                "out, and sites draw it once in a run: predict all rows at once"
            )
        self.manifest = manifests.resolve(home_folder(), settings.model_name)
        sql = settings.sql if settings.sql.strip() else self.manifest.query
        self._query = Query.from_sql(sql, needs_label=False)
        # to find the sites; those that are there may read their rows for longer
        self._settings = settings.with_fields(
            site_timeout=min(settings.site_timeout, MOST_SITE_SECONDS),
            wait_seconds=min(settings.wait_seconds, MOST_SITE_SECONDS),
        )
        self._reading_seconds = settings.site_timeout
        self._refresh_seconds = refresh_seconds or math.inf
        self._states = states
        self._sites: dict[int, str] = {}
        self._ended: Serve | None = None
        self._problem = OPENING
        self.requests = RequestQueue()
        self.metrics = Metrics()

    def run(self, grid: Grid, announce: Callable[[str], None]) -> None:
        """Answer requests by the sites of a grid, until the queue is closed."""
        pause = FIRST_PAUSE
        states = self._states
        if isinstance(grid, InProcessGrid):
            states = grid.state_folders
        while not self.requests.is_closed:
            session = Serve(
                self._query,
                self.manifest,
                self.requests,
                self._settings,
                self.metrics.count_round,
            )
            session.lasts_seconds = self._refresh_seconds
            session.states = states
            try:
                session.start(grid, timeout=self._reading_seconds)
                self._ended = session
                pause = FIRST_PAUSE
            except TPFlowerError as error:
                if session.was_open:
                    pause = FIRST_PAUSE
                self._ended = None
                self._sites |= session.inventory.site_names
                self._problem = self._name_sites(error)
                self.requests.fail(self._problem)
                announce(f"no session with the sites: {self._problem}")
                self.requests.wait_closed(pause)
                pause = min(2.0 * pause, LONGEST_PAUSE)
        self.requests.fail("the scorer is ending")

    def report(self) -> Document:
        """Return the content of `report.json`, about the last session.

        Raises:
            UnavailableError: there was none in the end.
        """
        if self._ended is None:
            raise UnavailableError(
                f"the scorer was ended without a session: {self._problem}"
            )
        return self._ended.report()

    def _name_sites(self, error: TPFlowerError) -> str:
        """Return an error's text with the sites that it is about."""
        text = _NODE.sub(self._site_of, str(error))
        if not isinstance(error, SchemaError):
            return text
        hosts = {
            f"{part.name!r} was at {part.site!r}"
            for table in self.manifest.tables
            for part in table.parts
            if no_host(part.name) in text
        }
        return f"{text} ({', '.join(sorted(hosts))})" if hosts else text

    def _site_of(self, node: re.Match[str]) -> str:
        """Return the site of a node that sessions have had, or the node."""
        number = int(node[1])
        return f"site {self._sites[number]!r}" if number in self._sites else node[0]


@contextmanager
def listening(scorer: Scorer, address: Address) -> Iterator[ScorerServer]:
    """Listen for requests inside the context."""
    server = ScorerServer(
        address, scorer.requests, scorer.metrics, str(scorer.manifest.model)
    )
    thread = Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        scorer.requests.close()
        server.shutdown()
        server.server_close()


def serve(
    scorer: Scorer, grid: Grid, address: Address, announce: Callable[[str], None]
) -> None:
    """Answer requests at an address, until the process is interrupted or terminated."""
    with (
        _closed_by_signals(scorer.requests),
        listening(scorer, address) as server,
    ):
        announce(
            f"Serving {scorer.manifest.model} at {address.scheme}://{address.host}:"
            f"{server.server_port}/predict; end with Ctrl-C"
        )
        scorer.run(grid, announce)


def serve_here(
    settings: Settings,
    client_app: ClientApp,
    address: Address,
    refresh_seconds: float,
    announce: Callable[[str], None],
) -> None:
    """Serve a model by sites in this process."""
    scorer = Scorer(settings, refresh_seconds)
    _check_sites_are_named(scorer, settings)
    with simulate(client_app, settings, None) as grid:
        serve(scorer, grid, address, announce)


def _check_sites_are_named(scorer: Scorer, settings: Settings) -> None:
    """Refuse a model of other tables than the built-in ones if no file names sites."""
    if settings.tables:
        return
    manifest = scorer.manifest
    trained = {part.name for table in manifest.tables for part in table.parts}
    built_in = {shard.table for shard in hosted_shards({}, {})}
    if missing := sorted(trained - built_in):
        raise SettingsError(
            f"tables: no file names the sites of {', '.join(map(repr, missing))}, and "
            "without one they are those of the built-in flights: write the run file, "
            f"as in tp-flower serve {manifest.model.name} my-run.toml, or --set "
            "tables=FILE"
        )


@contextmanager
def _closed_by_signals(requests: RequestQueue) -> Iterator[None]:
    """Close a queue in place of ending the process at once, inside the context."""
    if current_thread() is not main_thread():
        # no other thread hears of signals
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(n, lambda *_: requests.close()) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
