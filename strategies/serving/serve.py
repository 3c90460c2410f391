"""A run that predicts some of its rows at a time, as requests come.

The rows are extracted and joined once, as to predict them. Then every batch of requests
is a round of scores: of the rows that it names, under masks of its own. Each site
checks and counts a request like a query of its table.
"""

import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from shutil import rmtree
from typing import Final

import numpy as np
import pyarrow as pa

from strategies.inference import manifest as manifests
from strategies.inference.predict import (
    PredictingStrategy,
    row_names,
    with_row_keys_of,
)
from strategies.inference.scoring import Joined
from strategies.ranks import asks_ranks
from strategies.run.exchange import Replies, Requests
from strategies.run.grid import InProcessGrid
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
    SettingsError,
    SiteError,
    StoppedError,
    UnavailableError,
)
from tp_flower.query import BoundQuery, Query
from tp_flower.reports.predictions import ROW, ROW_HASH, row_keys_folder
from tp_flower.settings import Settings
from tp_flower.settings.run import SERVE

MOST_KEYS: Final = 1000
"""Keys of a round, and so of a request."""
MOST_PREDICTIONS: Final = 10_000
"""Joined rows of a request: a many-to-many join makes several of a row."""


class Serve(PredictingStrategy):
    """Predict the rows of a query with a saved model, as requests name them."""

    name = SERVE
    goes_on_after = (DivergedError, SiteError)
    lasts_seconds = math.inf
    """How long the session answers requests, once it is open."""

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
        until = time.monotonic() + self.lasts_seconds
        while batch := self._requests.take(until, MOST_KEYS):
            yield from self._answer(batch, joined, keys)
            # their records would grow without end
            del self.history[:-1]
        return joined

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
        grid = self.session.grid
        if joined.extracted.row_hashes is not None:
            columns = pa.table({ROW_HASH: row_names(joined.extracted, rows)})
            if isinstance(grid, InProcessGrid):
                named = with_row_keys_of(grid, columns)
                if len(named.column_names) > 1:
                    columns = named.drop_columns([ROW_HASH])
                # nobody else needs them: the next session has hashes of its own
                for state in grid.state_folders:
                    rmtree(row_keys_folder(state, grid.run_name), ignore_errors=True)
        return RowKeys(columns, joined.label_rows)

    def _answer(
        self, batch: Sequence[RowRequest], joined: Joined, keys: RowKeys
    ) -> Generator[Requests, Replies, None]:
        """Answer requests; one that cannot be is told why, the others are answered."""
        found = list(_find(batch, keys))
        if not found:
            return
        every = [rows for _, by_key in found for rows in by_key]
        rows = np.unique(np.concatenate(every))
        try:
            predictions = yield from self._predict(rows, joined)
        except UnavailableError:
            raise
        except SiteError as error:
            for request, _ in found:
                request.fail(RefusedError(str(error)))
            if isinstance(error, StoppedError):
                raise
            return
        for request, by_key in found:
            places = (np.searchsorted(rows, positions) for positions in by_key)
            request.answer.set_result(
                [[predictions[place] for place in at.tolist()] for at in places]
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
