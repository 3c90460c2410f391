"""Whether a value of a CSV file leaves its column the type found for the first rows.

Reading is more lenient than detection: a BIGINT is read from '1.5' (as 2!), '007' and
'1_000', a TIME from a timestamp and a BOOLEAN from '1', all of which DuckDB's sniffer
takes for something else. So the values of such columns are checked as they are written.
The checks may turn down what the sniffer would accept, never the other way round.
"""

from collections.abc import Mapping
from typing import Final

INTEGERS: Final = ("BIGINT", "HUGEINT", "INTEGER", "SMALLINT", "TINYINT")
_TRUTHS: Final = "('true', 'false', 't', 'f', 'yes', 'no')"


def is_read_strictly(kind: str, dialect: Mapping[str, str]) -> bool:
    """Return whether reading a column takes no value that detection would not.

    Args:
        kind: the DuckDB type found for the first rows.
        dialect: the options of ``read_csv`` found there, written in SQL.
    """
    return kind.startswith("TIMESTAMP") or (kind == "DATE" and "dateformat" in dialect)


def converted(column: str, kind: str) -> str:
    """Return a value of the type, in SQL over its text, NULL where it cannot be one."""
    if kind in {"VARCHAR", "BOOLEAN"}:
        return column
    return f"TRY_CAST({column} AS {kind})"


def is_suspect(column: str, kind: str, dialect: Mapping[str, str]) -> str:
    """Return when a value that can be converted may rule its type out after all.

    Args:
        column: the column of texts, quoted.
        kind: the DuckDB type found for the first rows.
        dialect: the options of ``read_csv`` found there, written in SQL.
    """
    if kind == "VARCHAR":
        return _starts_with_quote(column) if dialect["quote"] == "''" else "false"
    if kind in INTEGERS:
        return f"CAST(TRY_CAST({column} AS {kind}) AS VARCHAR) <> {column}"
    if kind == "DOUBLE":
        return _odd_number(column)
    if kind == "BOOLEAN":
        return f"lower({column}) NOT IN {_TRUTHS}"
    if kind == "TIME":
        return f"{column} NOT LIKE '__:__%'"  # a date or a timestamp
    return "true"


def _starts_with_quote(column: str) -> str:
    """It may be the file's quote, of which the first rows had none."""
    double = f"({column} >= '\"' AND {column} < '#')"
    single = f"({column} >= '''' AND {column} < '(')"
    return f"{double} OR {single}"


def _odd_number(column: str) -> str:
    """It has blanks, a plus sign, leading zeros or underscores.

    Comparisons look at a text's first bytes alone: '00' <= x < '0:' begins with 0 and
    another digit, x < '-' with a blank or a plus.
    """
    return (
        f"{column} < '-' OR ({column} >= '00' AND {column} < '0:') "
        f"OR contains({column}, '_') OR ends_with({column}, ' ')"
    )
