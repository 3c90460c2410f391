"""Score readings: at how many rows site and server work out scores of other tables.

The entry `readings` of `privacy` in `report.json`, a record per table and site::

    table, site, others: [table], rows, most, single, average, frequent, left

A site is sent derivatives of the loss, summed by row. Of one joined row a derivative
tells the score, for the loss is known; less the own score, it is the sum of the
``others``' scores: at the ``single`` rows, of the ``rows`` that are trained on. They
are in one joined row, or in ``most``: in two where second derivatives are sent, too; of
batches, in so many that often one is in a batch alone. With a squared loss the
``average`` of such sums follows at all rows. The server adds masked scores up to sums
over the tables; averaged over the joined rows of a row, where these are many, they
estimate the row's own score: at the ``frequent`` rows, which are all where scores leave
in the clear.

Reference: PRIVACY.md has the figures of these attacks, which tests/adversary/scores
measure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from strategies.disclosures import Exposure
from strategies.run.exchange import Part
from strategies.setup.problem import PartRows
from tp_flower.joins.mapping import TableMapping
from tp_flower.objectives import Objective

FREQUENT: Final = 10
"""Joined rows, at least, of a row whose own score the server estimates from their sums.
"""


@dataclass(frozen=True)
class SentDerivatives:
    """The derivatives of the loss that sites are sent, up to an ``order``; 0 for none.

    ``batch_rows`` are the joined rows of a batch, 0 without batches.
    """

    order: int
    batch_rows: int = 0


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
    """The rows of a table at which its site or the server works out scores.

    The site works out those of the other tables, the server those of this table.

    Attributes:
        left: score vectors that a policy of the table lets it release; None without a
            limit.
    """

    table: str
    site: str
    others: Sequence[str]
    rows: int
    most: int
    single: int
    average: bool
    frequent: int
    left: int | None = None


def score_readings(
    exposure: Exposure,
    sent: SentDerivatives,
    objective: Objective,
    mapping: TableMapping,
    tables: Mapping[str, ShardedRows],
    left: Mapping[int, int],
) -> list[ScoreReading]:
    """Return the score readings of a run over joins; none if no derivative is sent.

    ``mapping`` is of the joined rows to train on; ``left`` has score vectors by part
    number.
    """
    if len(tables) < 2 or not sent.order:
        return []
    is_quadratic = objective.has_constant_hessian
    most = 1 if is_quadratic else sent.order
    if sent.batch_rows:
        # on average one or fewer of a row's joined rows are in a batch
        most = max(mapping.joined_rows // sent.batch_rows, 1)
    readings = []
    for name, table in tables.items():
        others = [other for other in tables if other != name]
        for part, rows in zip(table.parts, table.rows, strict=True):
            counts = mapping.tables[name].multiplicity[rows.trained_slice]
            frequent = counts >= FREQUENT if exposure.is_masked else counts > 0
            reading = ScoreReading(
                table=name,
                site=part.site,
                others=others,
                rows=rows.trained,
                most=most,
                single=int(np.count_nonzero(counts <= most)),
                average=is_quadratic,
                frequent=int(np.count_nonzero(frequent)),
                left=left.get(part.number),
            )
            readings.append(reading)
    return readings
