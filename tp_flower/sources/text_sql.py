"""Readings of texts in SQL for DuckDB.

A text fits a reading if DuckDB reads it, and if its numbers have the digits that the
format asks for: DuckDB would read '2-1-3' as a day of the year 2.
"""

import re
from typing import Final

from tp_flower.duckdb_engine import quote_text
from tp_flower.protocol.text_readings import BOOLEAN, TextReading

LIKE_A_DAY: Final = r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(\D.*)?"
"""A pattern of all texts that some format of a day may fit."""

_DIRECTIVES: Final = {
    **dict.fromkeys(("%d", "%m", "%H", "%I"), r"\d{1,2}"),
    **dict.fromkeys(("%y", "%M", "%S"), r"\d{2}"),
    "%Y": r"\d{4}",
    "%f": r"\d{1,6}",
    "%p": "[AaPp][Mm]",
}
_MICROSECONDS: Final = r"[ T]\d{1,2}:\d{2}(:\d{2}(\.\d{1,6})?)?"
_NANOSECONDS: Final = r"[ T]\d{1,2}:\d{2}(:\d{2}(\.\d{1,9})?)?"
_ZONE: Final = r" ?(Z|[+-]\d{2}(:?\d{2})?)"
_ISO_DAY: Final = r"\d{4}[-/]\d{1,2}[-/]\d{1,2}"
_ISO: Final = {
    "DATE": _ISO_DAY,
    "TIMESTAMP": rf"{_ISO_DAY}({_MICROSECONDS})?",
    "TIMESTAMP_NS": rf"{_ISO_DAY}({_NANOSECONDS})?",
    "TIMESTAMP WITH TIME ZONE": rf"{_ISO_DAY}({_MICROSECONDS}({_ZONE})?)?",
}


def read_text(text: str, reading: TextReading, *, is_strict: bool = False) -> str:
    """Return the SQL of a text as the type of a reading.

    A text that does not fit is NULL or, if the SQL ``is_strict``, an error.

    >>> read_text("x", TextReading("DATE", "%d.%m.%Y"))
    "TRY_CAST(try_strptime(trim(x), '%d.%m.%Y') AS DATE)"
    """
    cast = "CAST" if is_strict else "TRY_CAST"
    if reading.format:
        function = "strptime" if is_strict else "try_strptime"
        text = f"{function}(trim({text}), {quote_text(reading.format)})"
    elif reading.type == "TIMESTAMP WITH TIME ZONE":
        # DuckDB reads no zone behind a space
        text = rf"regexp_replace({text}, ' ([+-]\d{{2}}(:?\d{{2}})?)\s*$', '\1')"
    return f"{cast}({text} AS {reading.type})"


def text_fits(text: str, reading: TextReading) -> str:
    """Return the SQL of whether a text fits a reading."""
    if reading.type == BOOLEAN:
        return f"lower(trim({text})) IN ('true', 'false')"
    pattern = _pattern(reading.format) if reading.format else _ISO.get(reading.type, "")
    is_read = f"{read_text(text, reading)} IS NOT NULL"
    if not pattern:
        return is_read
    spaced = quote_text(rf"\s*{pattern}\s*")
    return f"(regexp_full_match({text}, {spaced}) AND {is_read})"


def _pattern(strptime_format: str) -> str:
    r"""Return the pattern of texts in a format; "" if it has names, as of months.

    >>> print(_pattern("%d.%m.%Y"))
    \d{1,2}\.\d{1,2}\.\d{4}
    """
    pieces = re.split(r"(%-?[A-Za-z])", strptime_format)
    directives = [piece for piece in pieces if piece.startswith("%")]
    if not set(directives) <= _DIRECTIVES.keys():
        return ""
    return "".join(_DIRECTIVES.get(piece) or re.escape(piece) for piece in pieces)
