"""Ways to read a column of texts: as numbers, truth values or times, or as texts.

A site lists the readings that fit all texts of a column, and the server chooses one for
all shards of the table; a saved model keeps it. A day has many formats, and two of them
may fit all texts: 01/02/2024 is a day in February or in January.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Final

import msgspec

TEXT: Final = "VARCHAR"
BOOLEAN: Final = "BOOLEAN"
ISO: Final = ""
"""The format of days that begin with the year, in four digits: 2024-02-01, 2024/2/1."""

DAY_FORMATS: Final = (
    *("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *(
        "%d/%m/%y",
        "%m/%d/%y",
        "%d.%m.%y",
        "%d-%m-%y",
        "%m-%d-%y",
        "%y-%m-%d",
        "%y/%m/%d",
    ),
)
"""In the order of preference; dots are never written between a month and its day."""

ISO_TYPES: Final = ("DATE", "TIMESTAMP", "TIMESTAMP_NS", "TIMESTAMP WITH TIME ZONE")
"""The types of times in ISO 8601, the first that fits first."""

MOST_CHARACTERS: Final = 256  # of a format, which an owner may have written

CLOCK_FORMATS: Final = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S.%f",
    " %I:%M %p",
    " %I:%M:%S %p",
)


class TextReading(
    msgspec.Struct,
    frozen=True,
    rename="kebab",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """One way to read all texts of a column.

    Attributes:
        type: the DuckDB type of the values.
        format: of strptime, for dates and timestamps; ``ISO``, and for other types, "".
    """

    type: Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Z_ ]{2,31}\Z")]
    format: Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)] = ISO

    @property
    def day_format(self) -> str:
        """The format without its clock, on which the shards of a table agree.

        >>> TextReading("TIMESTAMP", "%d/%m/%Y %H:%M").day_format
        '%d/%m/%Y'
        """
        return re.split(r"[ T]%[HI]", self.format, maxsplit=1)[0]


AS_TEXT: Final = TextReading(TEXT)
"""The reading that every column has."""


class TextColumn(
    msgspec.Struct,
    frozen=True,
    rename="kebab",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """The readings of a column of texts, besides its texts themselves.

    Attributes:
        readings: those that fit all texts, the best first.
        are_ambiguous: whether two of them are times that differ in some row.
        merge_texts: whether distinct texts are equal values by the first reading, as
            1.1 and 1.10 are one number.
    """

    readings: Annotated[list[TextReading], msgspec.Meta(max_length=64)] = []
    are_ambiguous: bool = False
    merge_texts: bool = False

    @property
    def best(self) -> TextReading:
        """The reading of a column that nothing else is known of."""
        return self.readings[0] if self.readings else AS_TEXT

    def as_type(self, kind: str) -> "TextColumn":
        """Return a column of times that the owner wants to be of a type."""
        typed = [TextReading(kind, reading.format) for reading in self.readings]
        return msgspec.structs.replace(self, readings=typed)


def is_time(duckdb_type: str) -> bool:
    """Whether a type is that of dates or timestamps."""
    return re.match("DATE|TIMESTAMP|DATETIME", duckdb_type, re.IGNORECASE) is not None


def time_readings(formats: Sequence[str] = ()) -> Iterator[TextReading]:
    """Yield the readings of texts as times, the best first.

    The owner's formats precede all others.
    """
    for listed in formats:
        yield _time_reading(listed)
    for kind in ISO_TYPES:
        yield TextReading(kind)
    for day, clock in product(DAY_FORMATS, CLOCK_FORMATS):
        yield _time_reading(day + clock)


def _time_reading(strptime_format: str) -> TextReading:
    has_clock = re.search("%[HIcX]", strptime_format) is not None
    return TextReading("TIMESTAMP" if has_clock else "DATE", strptime_format)
