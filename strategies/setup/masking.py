"""Terms of masked scores: their fixed point, and the rows that a join does not mask.

A site knows its sides of the joins from the run's proposal. The server names the rows
that a LEFT JOIN finds no partner for. A row of a table must have a partner in all its
joined rows or in none, or its mask would have to be there and not be there in one
message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from strategies.setup.extract import Extracted
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.heads import Head
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.privacy.score_masks import FixedPoint
from tp_flower.protocol.fields import CLEAR, MASKED
from tp_flower.protocol.packet import pack_bits
from tp_flower.protocol.training_messages import Masking
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings
from tp_flower.terms.groups import join_group


@dataclass(frozen=True)
class ScoreMasking:
    """The masks of a run's scores; without a fixed point they leave in the clear.

    Attributes:
        unmatched: by part and by group, the rows of the shard without a partner, or
            with the answer about no rows for one, a bit each.
    """

    point: FixedPoint | None = None
    unmatched: Mapping[int, dict[str, AnyArray]] = field(default_factory=dict)

    def read(self, words: AnyArray) -> AnyArray:
        """Return sums over the tables as numbers."""
        if self.point is None:
            return words
        return self.point.numbers(words)

    @property
    def terms(self) -> Masking | None:
        """The masking as sites are told it."""
        point = self.point
        if point is None:
            return None
        return Masking(point.bits, point.tables)


def check_masks(head: type[Head], settings: Settings) -> None:
    """Refuse to mask the vectors of a head that needs each table's.

    Raises:
        SettingsError: of masked ones the server reads their sums alone.
    """
    if settings.privacy.scores == MASKED and head.needs_tables:
        raise SettingsError(
            f"privacy.scores = {MASKED!r} shows the server sums over the tables alone, "
            f"and head {head.name!r} needs every table's vectors: set privacy.scores = "
            f"{CLEAR!r} if the policies allow it"
        )


def mask_scores(
    settings: Settings,
    tables: int,
    unit: float,
    find_unmatched: Callable[[], Mapping[int, dict[str, AnyArray]]],
) -> ScoreMasking:
    """Return the masks of scores whose size is about ``unit``, if any are wanted.

    ``find_unmatched`` returns the :func:`unmatched_rows` of all joined rows of a run.
    """
    if settings.privacy.scores != MASKED:
        return ScoreMasking()
    point = FixedPoint.for_scores(unit, tables)
    return ScoreMasking(point, find_unmatched())


def unmatched_rows(
    bound: BoundQuery, extracted: Extracted, mapping: TableMapping
) -> dict[int, dict[str, AnyArray]]:
    """Return by part and by group the rows without a partner, a bit each.

    ``mapping`` is of all joined rows whose scores are summed, over the tables' rows.

    Raises:
        QueryError: a LEFT JOIN finds partners for a row in some joined rows only.
    """
    unmatched: dict[int, dict[str, AnyArray]] = {}
    for number, join in enumerate(bound.joins):
        group = join_group(number)
        for table, other in ((join.left, join.right), (join.right, join.left)):
            is_alone = mapping.tables[other].is_absent
            if extracted.answering.get(number) == other:
                is_alone |= mapping.tables[other].is_last
            if not is_alone.any():
                continue
            alone = _rows_without_partner(
                mapping.tables[table], is_alone, (table, other, join.text)
            )
            for part, rows in extracted.shards_of(table):
                if alone[rows].any():
                    unmatched.setdefault(part.number, {})[group] = pack_bits(
                        alone[rows]
                    )
    return unmatched


def _rows_without_partner(
    rows: TableRows, is_alone: BoolArray, names: tuple[str, str, str]
) -> BoolArray:
    """Return which rows (n_i,) of a table have joined rows, of (N,), without another.

    ``names`` are those of both tables, and of their join, for the message.
    """
    table, other, text = names
    alone = rows.any_of(is_alone)
    matched = rows.any_of(~is_alone)
    if mixed := int(np.count_nonzero(alone & matched)):
        raise QueryError(
            f"the LEFT JOIN of {other} ON {text} and other tables finds partners for "
            f"{mixed} rows of {table} in some of their joined rows only: such scores "
            "cannot be masked. Join "
            f"{other} by one table, or allow privacy.scores = 'clear'"
        )
    return alone
