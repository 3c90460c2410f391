"""A run that predicts some of its rows at a time, as requests come.

The rows are extracted and joined once, as to predict them. Then every batch of requests
is a round of scores: of the rows that it names, under masks of its own. Each site
checks and counts a request like a query of its table.
"""

import math
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from flwr.serverapp.strategy import Result

from strategies.inference import manifest as manifests
from strategies.inference.predict import (
    PredictingStrategy,
    row_names,
    with_row_keys_of,
)
from strategies.inference.scoring import Joined
from strategies.ranks import asks_ranks
from strategies.run.exchange import Replies, Requests
from strategies.run.strategy import RoundListener
from strategies.serving.request_queue import (
    Prediction,
    RefusedError,
    RequestQueue,
    RowRequest,
    ServingError,
    TooLargeError,
)
from strategies.serving.row_keys import RowKeys
from strategies.setup.columns import Columns
from tp_flower.arrays import IntArray
from tp_flower.errors import (
    DivergedError,
    MissingSiteError,
    SettingsError,
    SiteError,
    StoppedError,
    TPFlowerError,
    UnavailableError,
)
from tp_flower.query import BoundQuery, Query
from tp_flower.reports.predictions import ROW, ROW_HASH
from tp_flower.reports.records import merge_last_epoch
from tp_flower.settings import Settings
from tp_flower.settings.run import SERVE

MOST_KEYS: Final = 1000
"""Keys of a round, and so of a request."""
MOST_PREDICTIONS: Final = 10_000
"""Joined rows of a request: a many-to-many join makes several of a row."""
MOST_SITE_SECONDS: Final = 10.0
"""To wait for a site: a request cannot wait as long as a training."""
LOOK_SECONDS: Final = 5.0
"""How often a session without requests looks whether all sites are there."""


class Serve(PredictingStrategy):
    """Predict the rows of a query with a saved model, as requests name them.

    Attributes:
        lasts_seconds: how long the session answers requests, once it is open.
        was_open: whether it has come to answer requests.
        states: folders of sites' state that this process may read. Requests name rows
            by the row keys which these have, else by their hashes.
    """

    name = SERVE
    goes_on_after = (DivergedError, SiteError)
    lasts_seconds = math.inf
    states: Collection[Path] = ()
    was_open = False

    def __init__(
        self,
        query: Query,
        manifest: manifests.Manifest,
        requests: RequestQueue,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        super().__init__(query, manifest, settings, on_round, **overrides)
        self._requests = requests

    def model_rounds(
        self, bound: BoundQuery, columns: Columns, missing: manifests.Missing
    ) -> Generator[Requests, Replies, Joined]:
        """Join the rows, then answer requests."""
        self._check_ranks()
        joined = yield from self.join_predicted(bound, columns, missing)
        keys = self._row_keys(joined)
        self._requests.open()
        self.was_open = True
        until = time.monotonic() + self.lasts_seconds
        while batch := self._take_batch(until):
            yield from self._answer(batch, joined, keys)
            # their records would grow without end
            merge_last_epoch(self.history)
        return joined

    def _run(self, *arguments: Any) -> Result:
        """Run rounds; if they fail, so do requests, before the sites are told."""
        try:
            return super()._run(*arguments)
        except TPFlowerError as error:
            self._requests.fail(str(error))
            raise

    def patience(self, timeout: float) -> float:
        """Return the seconds to wait for the sites: as long as a request can."""
        return min(timeout, MOST_SITE_SECONDS) if self.was_open else timeout

    def _take_batch(self, until: float) -> Sequence[RowRequest]:
        """Return the next requests, none at the end of the session.

        Raises:
            MissingSiteError: a site has gone while there were no requests.
        """
        began = time.perf_counter()
        batch: Sequence[RowRequest] = ()
        while not (batch or self._requests.is_closed or time.monotonic() >= until):
            self._check_present()
            batch = self._requests.take(
                min(until, time.monotonic() + LOOK_SECONDS), MOST_KEYS
            )
        self.idle_seconds += time.perf_counter() - began
        return batch

    def _check_present(self) -> None:
        # a grid of sessions knows who is silent
        silent_nodes: Callable[[], Iterable[int]]
        silent_nodes = getattr(self.session.grid, "silent_nodes", tuple)
        names = self.session.site_names
        if gone := [repr(names[node]) for node in silent_nodes() if node in names]:
            raise MissingSiteError(f"no sign of life from site {', '.join(gone)}")

    def _check_ranks(self) -> None:
        """Refuse tables whose scores may leave for rows of a high rank alone."""
        if not asks_ranks(self.inventory):
            return
        tables = sorted({s.table for s in self.inventory.shards if s.ranks})
        raise SettingsError(
            f"the policies of {', '.join(map(repr, tables))} let scores leave by the "
            "rank of their rows, and the rows of a request have none: predict, or ask "
            'the owners for scores-per-rank = "any" and cover = 0'
        )

    def _row_keys(self, joined: Joined) -> RowKeys:
        """Return the rows of the label table by their keys, or by their positions."""
        rows = np.arange(joined.extracted.table_rows[joined.bound.label_table])
        columns = pa.table({ROW: rows})
        if joined.extracted.row_hashes is not None:
            hashes = pa.table({ROW_HASH: row_names(joined.extracted, rows)})
            columns = with_row_keys_of(self.states, self.session.run, hashes)
            if len(columns.column_names) > 1:
                columns = columns.drop_columns([ROW_HASH])
        return RowKeys(columns, joined.label_rows)

    def _answer(
        self, batch: Sequence[RowRequest], joined: Joined, keys: RowKeys
    ) -> Generator[Requests, Replies, None]:
        """Answer requests; one that cannot be is told why, the others are answered."""
        answerable = list(_find(batch, keys))
        if not answerable:
            return
        every = [rows for _, by_key in answerable for rows in by_key]
        rows = np.unique(np.concatenate(every))
        try:
            predictions = yield from self._predict(rows, joined)
        except UnavailableError:
            raise
        except SiteError as error:
            for request, _ in answerable:
                request.fail(RefusedError.of(error))
            if isinstance(error, StoppedError):
                raise
            return
        for request, by_key in answerable:
            places = (np.searchsorted(rows, positions) for positions in by_key)
            request.answer.set_result(
                [[predictions[position] for position in at.tolist()] for at in places]
            )

    def _predict(
        self, rows: IntArray, joined: Joined
    ) -> Generator[Requests, Replies, list[Prediction]]:
        """Return the predictions of joined rows (m,), ascending and distinct."""
        if not len(rows):
            return []
        some = replace(joined, mapping=joined.mapping.select(rows))
        table = yield from self.predict_rows(some, joined)
        predictions: list[Prediction] = table.drop_columns([ROW_HASH]).to_pylist()
        return predictions


def _find(
    batch: Sequence[RowRequest], keys: RowKeys
) -> Iterator[tuple[RowRequest, list[IntArray]]]:
    """Yield requests with the positions of their joined rows, by key.

    Those that name rows which are not there, or too many, fail.
    """
    for request in batch:
        try:
            by_key = keys.joined_rows(request.keys)
            if (count := sum(map(len, by_key))) > MOST_PREDICTIONS:
                raise TooLargeError(
                    f"keys: they have {count} joined rows, and {MOST_PREDICTIONS} are "
                    "predicted at a time: send fewer"
                )
        except ServingError as error:
            request.fail(error)
        else:
            yield request, by_key
