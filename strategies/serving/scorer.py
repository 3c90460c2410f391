"""A scorer that stays: an HTTP server, and a session with the sites that is reopened.

The rounds are in the calling thread, requests are read in others. When a session ends
because a site is gone, requests fail at once, with its name, until the next session is
open.
"""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Final

from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from strategies.commands import simulate
from strategies.inference import manifest as manifests
from strategies.run.sites import no_host
from strategies.serving.http_server import Address, ScorerServer
from strategies.serving.metrics import Metrics
from strategies.serving.request_queue import RequestQueue
from strategies.serving.serve import Serve
from tp_flower.errors import SchemaError, SettingsError, TPFlowerError
from tp_flower.files import home_folder
from tp_flower.query import Query
from tp_flower.settings import Settings

FIRST_PAUSE: Final = 0.5  # seconds before a session is opened again; they double
LONGEST_PAUSE: Final = 60.0
MOST_SITE_SECONDS: Final = 10.0
"""To wait for a site: a request cannot wait as long as a training."""


class Scorer:
    """Sessions with the sites, one after the other, which answer requests.

    Attributes:
        requests: that wait for a session.
        metrics: of requests and rounds.
    """

    def __init__(self, settings: Settings, refresh_seconds: float = 0.0) -> None:
        """Prepare a scorer of a saved model.

        Args:
            settings: of the runs, with the model and, if another, the query.
            refresh_seconds: after which the rows are read anew; 0 for never.

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
        self._settings = settings.with_fields(
            site_timeout=min(settings.site_timeout, MOST_SITE_SECONDS),
            wait_seconds=min(settings.wait_seconds, MOST_SITE_SECONDS),
        )
        self._refresh_seconds = refresh_seconds or math.inf
        self.requests = RequestQueue()
        self.metrics = Metrics()

    def run(self, grid: Grid, announce: Callable[[str], None]) -> None:
        """Answer requests by the sites of a grid, until the queue is closed."""
        pause = FIRST_PAUSE
        while not self.requests.is_closed:
            session = Serve(
                self._query,
                self.manifest,
                self.requests,
                self._settings,
                self.metrics.count_round,
            )
            session.lasts_seconds = self._refresh_seconds
            try:
                session.start(grid)
                pause = FIRST_PAUSE
            except TPFlowerError as error:
                if not self.requests.reason:
                    # the session was open
                    pause = FIRST_PAUSE
                reason = f"{error}{self._hosts_of_missing(error)}"
                self.requests.fail(reason)
                announce(f"no session with the sites: {reason}")
                self.requests.wait_closed(pause)
                pause = min(2.0 * pause, LONGEST_PAUSE)
        self.requests.fail("the scorer is ending")

    def _hosts_of_missing(self, error: TPFlowerError) -> str:
        """Return a hint naming the sites of tables that an error says nobody hosts."""
        if not isinstance(error, SchemaError):
            return ""
        hosts = {
            f"{part.name!r} was at {part.site!r}"
            for table in self.manifest.tables
            for part in table.parts
            if no_host(part.name) in str(error)
        }
        return f" ({', '.join(sorted(hosts))})" if hosts else ""


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
    settings: Settings,
    client_app: ClientApp,
    address: Address,
    refresh_seconds: float,
    announce: Callable[[str], None],
) -> None:
    """Serve a model by sites in this process, until it is interrupted or terminated."""
    scorer = Scorer(settings, refresh_seconds)
    with (
        _closed_by_signals(scorer.requests),
        simulate(client_app, settings, None) as grid,
        listening(scorer, address) as server,
    ):
        announce(
            f"Serving {scorer.manifest.model} at {address.scheme}://{address.host}:"
            f"{server.server_port}/predict; end with Ctrl-C"
        )
        scorer.run(grid, announce)


@contextmanager
def _closed_by_signals(requests: RequestQueue) -> Iterator[None]:
    """Close a queue in place of ending the process at once, inside the context."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(n, lambda *_: requests.close()) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
