"""Ranges and categories that the author of a run declares, in the text of an encoder.

They say what a column may hold, and are written without looking at the data: an encoder
made of them takes no statistics, and so tells nothing of any row. The forms are
``range(1, 12)``, ``range(1950-01-01, 2013-12-31)`` and ``categories(AA, "B6", UA)``.
"""

import math
import re
import sys
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

import numpy as np

_NARROWEST: Final = sys.float_info.min
_COMMAS: Final = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
_CATEGORY: Final = re.compile(r'(?P<bare>[^"()]+)|"(?P<quoted>(?:[^"]|"")*)"')
_BOOLEANS: Final = {"false": 0.0, "true": 1.0}


@dataclass(frozen=True)
class DeclaredRange:
    """The smallest and the largest value that a feature may have.

    Attributes:
        low: finite; seconds since 1970 (UTC) of a time.
        high: finite, above ``low``.
        is_time: whether the ends are dates or times.
    """

    low: float
    high: float
    is_time: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read two numbers, or two ISO dates or times (UTC unless they say otherwise).

        >>> DeclaredRange.parse("-0.5, 12")
        DeclaredRange(low=-0.5, high=12.0, is_time=False)
        >>> DeclaredRange.parse("1970-01-01, 1970-01-02T12:00")
        DeclaredRange(low=0.0, high=129600.0, is_time=True)

        Raises:
            ValueError: it is neither, or the first is not below the second.
        """
        ends = [end.strip() for end in text.split(",")]
        for read, is_time in ((float, False), (_seconds, True)):
            try:
                low, high = (read(end) for end in ends)
            except ValueError:
                continue
            # also in a range of next to nothing every value must have a place
            if not (math.isfinite(high - low) and high / 2 - low / 2 > _NARROWEST):
                raise ValueError(f"({text}) does not run from low to high")
            return cls(low, high, is_time)
        raise ValueError(
            f"({text}) is not a low and a high end: write two numbers, as in "
            "range(1, 12), or two dates, as in range(1950-01-01, 2013-12-31)"
        )

    @property
    def half_width(self) -> float:
        """Half the distance between the ends; above 0."""
        return self.high / 2 - self.low / 2

    @property
    def middle(self) -> float:
        """The value halfway between the ends."""
        return self.low + self.half_width


def parse_categories(text: str) -> tuple[str, ...]:
    """Read a list of texts; those with commas, quotes or parentheses are quoted.

    >>> parse_categories('AA, "B6", "Smith, J."')
    ('AA', 'B6', 'Smith, J.')

    Raises:
        ValueError: it is no such list, or names a text twice.
    """
    categories = []
    for item in _COMMAS.split(text):
        form = _CATEGORY.fullmatch(item.strip())
        if form is None:
            raise ValueError(
                f"({text}) is not a list of categories, as in categories(AA, UA): a "
                "text with a comma, quote or parenthesis stands in double quotes"
            )
        category = form["bare"] or form["quoted"].replace('""', '"')
        # the form in which texts of tables are compared
        categories.append(unicodedata.normalize("NFC", category))
    if len(set(categories)) != len(categories):
        raise ValueError(f"({text}) names a category twice")
    return tuple(categories)


def number_categories(categories: tuple[str, ...]) -> tuple[str, ...]:
    """Return categories of numbers or booleans as the texts that numbers have.

    >>> number_categories(("1", "2.50", "true"))
    ('1.0', '2.5', '1.0')

    Raises:
        ValueError: one is no finite number; names it.
    """
    values = [_number(category) for category in categories]
    return tuple((np.array(values) + 0.0).astype("U32").tolist())


def _number(text: str) -> float:
    try:
        value = _BOOLEANS.get(text.lower())
        value = float(text) if value is None else value
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return zoned.timestamp()
