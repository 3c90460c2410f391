"""Numbers and dates that are written as texts, in SQL for DuckDB.

A number may have a currency or percent sign at its ends, and a mark or space between
groups of three digits: '$1,234.50' is 1234.5, '5%' is 5.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Final

from msgspec import Meta

from tp_flower.duckdb_engine import quote_text

ENCODINGS: Final = "utf-8|utf-16|latin-1"  # those that DuckDB has
_SPACES: Final = r"\s\x{a0}\x{202f}"
_ENDS: Final = rf"^([-+]?)[{_SPACES}\p{{Sc}}]*|[{_SPACES}\p{{Sc}}%]+$"
_NUMBER: Final = re.compile(
    r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT\d?|REAL|DOUBLE|(DECIMAL|NUMERIC)\b.*",
    re.IGNORECASE,
)
_TIME: Final = re.compile(r"DATE|(TIMESTAMP|DATETIME)\b.*", re.IGNORECASE)
_DATES: Final = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y-%m-%d")
_CLOCKS: Final = ("", " %H:%M", " %H:%M:%S")


@dataclass(frozen=True)
class TextFormat:
    """How a source writes its texts, and a CSV file its lines; "" is detected.

    ``dates`` is a format of strptime for texts that are dates.
    """

    decimal: Annotated[str, Meta(pattern="^[.,]$", description='"." or ","')] = "."
    delimiter: Annotated[str, Meta(max_length=4, description="1 to 4 characters")] = ""
    encoding: Annotated[
        str, Meta(pattern=f"^({ENCODINGS})$", description=ENCODINGS)
    ] = "utf-8"
    dates: Annotated[
        str, Meta(pattern="%", description='a format such as "%d.%m.%Y"')
    ] = ""

    @property
    def csv_options(self) -> dict[str, str]:
        """The options of ``read_csv``."""
        options = {"encoding": self.encoding, "decimal_separator": self.decimal}
        if self.delimiter:
            options["delim"] = self.delimiter
        return {name: quote_text(value) for name, value in options.items()}

    def alternatives(self) -> Iterator[tuple[str, str, "TextFormat"]]:
        """Yield the types that a text column may have, with the option each needs."""
        yield "DOUBLE", "", self
        yield "DOUBLE", 'decimal = ",", ', TextFormat(decimal=",")
        for clock, day in product(_CLOCKS, _DATES):
            kind = "TIMESTAMP" if clock else "DATE"
            yield kind, f'dates = "{day}{clock}", ', TextFormat(dates=day + clock)

    def read(self, text: str, kind: str, *, is_strict: bool = False) -> str:
        """Return the SQL of a text as a type; what is not of it is NULL, or an error.

        >>> TextFormat(dates="%d.%m.%Y").read("x", "DATE")
        "TRY_CAST(try_strptime(x, '%d.%m.%Y') AS DATE)"
        """
        if _NUMBER.fullmatch(kind):
            mark = "." if self.decimal == "," else ","
            text = f"regexp_replace({text}, '{_ENDS}', '\\1', 'g')"
            text = (
                f"regexp_replace({text}, '[{mark}''{_SPACES}](\\d{{3}})\\b', '\\1', "
                "'g')"
            )
            text = f"replace({text}, ',', '.')" if self.decimal == "," else text
        elif _TIME.fullmatch(kind) and self.dates:
            function = "try_strptime"
            if is_strict:
                function = "strptime"
            text = f"{function}({text}, {quote_text(self.dates)})"
        return f"{'CAST' if is_strict else 'TRY_CAST'}({text} AS {kind})"


DETECTED: Final = TextFormat()


def null_for_missing(text: str, nulls: Sequence[str]) -> str:
    """Return the SQL of a text that is NULL where it stands for a missing value."""
    listed = ", ".join(map(quote_text, nulls))
    if nulls:
        return f"CASE WHEN {text} NOT IN ({listed}) THEN {text} END"
    return text
