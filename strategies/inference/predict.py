"""Predict: the scores of the rows of a query, with a model that the sites have kept.

The rounds are those of extraction, then one of scores
(:mod:`strategies.inference.base`). The query needs no label. Where the label table's
site is to have the predictions, they are sent there (``deliver``), and the server
writes none.
"""

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from strategies.inference.base import (
    Joined,
    ModelStrategy,
    join_rows,
    model_fields,
    score_rows,
)
from strategies.inference.report import Delivered
from strategies.run.exchange import Part, Replies, Request, ask
from strategies.run.replies import refuse
from strategies.setup.extract import Extracted
from tp_flower.errors import SettingsError
from tp_flower.protocol import (
    DeliveredPart,
    DeliverPart,
    DeliverRequest,
    RowKeyColumns,
    pack_bits,
)
from tp_flower.query import BoundQuery
from tp_flower.reports.predictions import (
    RESERVED,
    ROW_HASH,
    IntArray,
    Outputs,
    Scored,
    hex_texts,
    prediction_table,
)
from tp_flower.settings import LABEL_SITE, PREDICT, Settings, columns_of

_FILE = re.compile(r"[a-z0-9][a-z0-9._/-]{0,255}")


@dataclass(frozen=True)
class _Predicted:
    """What the rounds found.

    Attributes:
        named: what names the rows, for the server's file.
        scored: the joined rows.
        delivered: what the label table's sites have written; None where the server is
            to write.
    """

    named: Mapping[str, pa.Array]
    scored: Scored
    delivered: tuple[Delivered, ...] | None


class Predict(ModelStrategy):
    """Predict the rows of a query with a saved model."""

    name = PREDICT
    _predicted: _Predicted | None = None

    def default_settings(self) -> Settings:
        """Return the defaults, in this mode."""
        return Settings(mode=PREDICT)

    def bind(self) -> BoundQuery:
        """Return the query, with what names its rows, and without its label."""
        return self.query.bind_features(
            self.schemas, self.manifest.label_table, columns_of(self.settings.row_key)
        )

    def model_rounds(self, bound: BoundQuery) -> Generator[Request, Replies, Joined]:
        """Score the joined rows; have them delivered where they are to be."""
        names = _column_names(self.settings)
        at_site = self.settings.predictions_at == LABEL_SITE
        row_key = RowKeyColumns(names, leaves=not at_site)
        joined = yield from join_rows(
            bound, self.missing, self.settings, self.inventory, row_key
        )
        scores = yield from score_rows(
            joined, self.manifest, self.settings, self.inventory
        )
        rows = joined.mapping.tables[bound.label_table].row_of.astype(np.int64)
        scored = Scored(rows, scores, joined.is_partial)
        delivered = None
        if at_site:
            delivered = yield from self._deliver(joined, scored, row_key)
        self._predicted = _Predicted(_named(joined.extracted, rows), scored, delivered)
        return joined

    @property
    def outputs(self) -> Outputs:
        """What the scores stand for."""
        return Outputs(self.manifest.loss, self.manifest.classes)

    @property
    def predictions(self) -> pa.Table | None:
        """The predictions; None where only the label table's sites are to have them.

        Raises:
            RuntimeError: before the rounds are done.
        """
        found = self._found
        if found.delivered is not None:
            return None
        return prediction_table(found.named, found.scored, self.outputs)

    @property
    def delivered(self) -> tuple[Delivered, ...]:
        """What sites have written."""
        return self._found.delivered or ()

    @property
    def _found(self) -> _Predicted:
        if self._predicted is None:
            raise RuntimeError("there are no predictions before the rounds are done")
        return self._predicted

    def _deliver(
        self, joined: Joined, scored: Scored, row_key: RowKeyColumns
    ) -> Generator[Request, Replies, tuple[Delivered, ...]]:
        """Send the label table's sites the scores of their joined rows."""
        outputs = self.outputs
        bodies: dict[int, DeliverPart] = {}
        parts = joined.extracted.parts[joined.bound.label_table]
        start = 0
        for part in parts:
            stop = start + joined.extracted.rows[part.number]
            own = slice(*np.searchsorted(scored.rows, [start, stop]))
            bodies[part.number] = DeliverPart(
                row_key=row_key if row_key.columns else None,
                rows=(scored.rows[own] - start).astype(np.int32),
                scores=np.ascontiguousarray(scored.scores[own]),
                partial=pack_bits(scored.is_partial[own]),
            )
            start = stop
        request = DeliverRequest(
            **model_fields(self.manifest),
            loss=outputs.loss,
            classes=list(outputs.classes),
            query=self.query.to_sql(),
            parts=bodies,
        )
        replies = yield ask(request, parts)
        return tuple(
            _delivered(replies, part, len(bodies[part.number].rows)) for part in parts
        )


def _column_names(settings: Settings) -> tuple[str, ...]:
    """Return what the columns of the row key are called in the predictions.

    Raises:
        SettingsError: two are called alike, or one as a column that is there anyway.
    """
    names = tuple(column.split(".")[-1] for column in columns_of(settings.row_key))
    if len({name.lower() for name in names}) < len(names):
        raise SettingsError(f"row-key names a column twice: {settings.row_key!r}")
    if taken := sorted(RESERVED & {name.lower() for name in names}):
        raise SettingsError(
            f"row-key: a column called {taken[0]!r} would be taken for one of the "
            "predictions: rename it in a sub-query"
        )
    return names


def _named(extracted: Extracted, rows: IntArray) -> dict[str, pa.Array]:
    """Return what names the joined rows at the server: a keyed hash, or a position."""
    if extracted.row_hashes is None:
        return {ROW_HASH: pa.array(rows)}
    return {ROW_HASH: hex_texts(extracted.row_hashes[rows])}


def _delivered(replies: Replies, part: Part, rows: int) -> Delivered:
    body = replies.body(part, DeliveredPart)
    if body.rows != rows:
        raise refuse(part, "another number of predictions than it was sent")
    if not _FILE.fullmatch(body.file):
        raise refuse(part, "no name of the file that it wrote")
    return Delivered(part.site, body.file, rows)
