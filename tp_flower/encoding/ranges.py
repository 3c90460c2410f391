"""Ranges of features that an operator declares, without having looked at the data.

Private statistics are of values clipped to such a range. The run config says them in
one string, ``f.month=1..12; p.built=1950-01-01..2013-12-31``, with tables and columns
named as in ``encoders``.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from tp_flower.encoding.choice import (
    Entry,
    entries_problem,
    find_column,
    parse_entries,
)

EXAMPLE: Final = '"f.month=1..12; p.built=1950-01-01..2013-12-31"'
_BETWEEN: Final = ".."
_NARROWEST: Final = sys.float_info.min


@dataclass(frozen=True)
class Limits:
    """Between which values a feature is taken to be.

    Attributes:
        low: finite; seconds since 1970 (UTC) of a time.
        high: finite, above ``low``.
        is_time: whether they were given as dates.
    """

    low: float
    high: float
    is_time: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read two numbers, or two ISO dates or times (UTC where they do not say).

        >>> Limits.parse("-0.5 .. 12")
        Limits(low=-0.5, high=12.0, is_time=False)
        >>> Limits.parse("1970-01-01..1970-01-02T12:00")
        Limits(low=0.0, high=129600.0, is_time=True)

        Raises:
            ValueError: it is neither, or the first is not below the second.
        """
        ends = [end.strip() for end in text.split(_BETWEEN, 1)]
        for read, is_time in ((float, False), (_seconds, True)):
            try:
                low, high = (read(end) for end in ends)
            except ValueError:
                continue
            # also in a range of next to nothing every value must have a place
            if not (math.isfinite(high - low) and high / 2 - low / 2 > _NARROWEST):
                raise ValueError(f"{text.strip()!r} does not run from low to high")
            return cls(low, high, is_time)
        raise ValueError(
            f"{text.strip()!r} is not <low>{_BETWEEN}<high>: two numbers, or two dates "
            "such as 1950-01-01"
        )


def parse_ranges(text: str) -> tuple[Entry, ...]:
    """Read the setting ``privacy.ranges``; "" is no entry.

    >>> parse_ranges("f.month = 1..12; p.seats=0..500")
    (('f', 'month', '1..12'), ('p', 'seats', '0..500'))

    Raises:
        ValueError: it is not a list of entries.
    """
    try:
        return parse_entries(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a list of <table>.<column>=<low>..<high>, as in {EXAMPLE}"
        ) from None


def ranges_problem(entries: object) -> str | None:
    """Return what is wrong with entries, None if nothing is."""
    return entries_problem(entries, "range", Limits.parse)


def choose_ranges(
    entries: Sequence[Entry], features: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Limits]]:
    """Return the declared limits by table and feature.

    Args:
        entries: of the settings.
        features: names of the features by alias of their table.

    Raises:
        SettingsError: an entry names a table or a column that the query does not have.
    """
    chosen: dict[str, dict[str, Limits]] = {table: {} for table in features}
    for table, column, text in entries:
        alias, name = find_column("privacy.ranges", table, column, features)
        chosen[alias][name] = Limits.parse(text)
    return chosen


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return zoned.timestamp()
