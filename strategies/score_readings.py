"""Score readings: at how many rows a site, and the server, work out scores of other tables.

The entry `readings` of `privacy` in `report.json`, a record per table and site::

    table, site, others: [table], rows, single, average, frequent, left

A site is sent derivatives of the loss, summed by row. Of one joined row a derivative tells the
score, for the loss is known; less the own score, it is the sum of the ``others``' scores: at the
``single`` rows, of the ``rows`` that are trained on. With a squared loss the ``average`` of such
sums follows at all rows. The server adds masked scores up to sums over the tables; averaged over
the joined rows of a row, where these are many, they estimate the row's own score: at the
``frequent`` rows, which are all where scores leave in the clear.

Reference: PRIVACY.md has the figures of these attacks, which tests/adversary/scores measure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from strategies.disclosures import Exposure
from strategies.run.exchange import Part
from strategies.setup.problem import PartRows
from tp_flower.joins.mapping import TableMapping
from tp_flower.losses import Loss
from tp_flower.protocol.messages import Action

FREQUENT: Final = 10
"""Joined rows, at least, of a row whose own score the server estimates from their sums."""
DERIVATIVES: Final[Collection[Action]] = (Action.ADMM, Action.DESCENT, Action.BOOST, Action.SGD)
"""The messages that bring sites derivatives."""


class ShardedRows(Protocol):
    """A table's parts, and the rows of each that take part."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The shards."""

    @property
    def rows(self) -> tuple[PartRows, ...]:
        """By part, the rows that take part."""


@dataclass(frozen=True)
class ScoreReading:
    """The rows of a table at which its site works out scores of the others, and the server its own.

    Attributes:
        left: score vectors that a policy of the table lets it release; None without a limit.
    """

    table: str
    site: str
    others: Sequence[str]
    rows: int
    single: int
    average: bool
    frequent: int
    left: int | None = None


def score_readings(
    exposure: Exposure,
    loss: Loss,
    mapping: TableMapping,
    tables: Mapping[str, ShardedRows],
    left: Mapping[int, int] | None = None,
) -> list[ScoreReading]:
    """Return the score readings of a run over joins; none where no derivatives are sent.

    ``mapping`` is of the joined rows to train on; ``left`` has score vectors by part number.
    """
    if len(tables) < 2 or not set(DERIVATIVES).intersection(exposure.messages):
        return []
    return list(_readings(exposure, loss, mapping, tables, left or {}))


def _readings(
    exposure: Exposure,
    loss: Loss,
    mapping: TableMapping,
    tables: Mapping[str, ShardedRows],
    left: Mapping[int, int],
) -> Iterable[ScoreReading]:
    # a batch has few joined rows, so that sooner or later a row is in it once
    is_single = Action.SGD in exposure.messages
    for name, table in tables.items():
        counts = mapping.tables[name].multiplicity
        for part, rows in zip(table.parts, table.rows, strict=True):
            of_part = counts[rows.trained_slice]
            yield ScoreReading(
                table=name,
                site=part.site,
                others=[other for other in tables if other != name],
                rows=rows.trained,
                single=rows.trained if is_single else int(np.count_nonzero(of_part == 1)),
                average=loss.is_regression,
                frequent=int(np.count_nonzero(of_part >= FREQUENT))
                if exposure.is_masked
                else rows.trained,
                left=left.get(part.number),
            )
