"""What a database's columns are to DuckDB, and how they are read exactly.

A column has a type that its database declares. It becomes a DuckDB type, and an
expression that makes the database hand out values which fit it: PostgreSQL's NaN in
NUMERIC and MySQL's zero dates are NULL, FLOAT comes with all its digits.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from sqlglot import exp

from tp_flower.errors import SourceError

MAX_DIGITS: Final = 38  # of DuckDB's DECIMAL

_ARROW: Final[dict[str, pa.DataType]] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "HUGEINT": pa.decimal128(MAX_DIGITS, 0),
    "UTINYINT": pa.uint8(),
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "UUID": pa.string(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", tz="UTC"),
    "DOUBLE[]": pa.list_(pa.float64()),
    '"NULL"': pa.int32(),
}


@dataclass(frozen=True)
class DatabaseColumn:
    """A column of a shard in a database.

    Attributes:
        name: its name.
        type: its DuckDB type.
        read: what the database is asked for: an expression over the quoted column.
        arrives: DuckDB type of what comes, to be cast to ``type``.
        is_exact: whether filters over ``read`` mean to the database what they mean to
            DuckDB, so that the database may apply them.
    """

    name: str
    type: str
    read: exp.Expr
    arrives: str
    is_exact: bool = True

    @classmethod
    def of(
        cls,
        name: str,
        duckdb_type: str,
        read: exp.Expr | None = None,
        *,
        is_exact: bool = True,
    ) -> "DatabaseColumn":
        """Return a column that arrives in its own type."""
        return cls(name, duckdb_type, read or named(name), duckdb_type, is_exact)

    @property
    def is_readable(self) -> bool:
        """Whether its values can be brought to DuckDB."""
        return arrow_type(self.arrives) is not None


def named(name: str) -> exp.Column:
    """Return the column of this name."""
    return exp.column(exp.to_identifier(name, quoted=True))


def arrow_type(duckdb_type: str) -> pa.DataType | None:
    """Return the Arrow type in which values of a DuckDB type travel, None if none.

    >>> arrow_type("DECIMAL(10,2)")
    Decimal128Type(decimal128(10, 2))
    """
    digits = decimal_digits(duckdb_type)
    return pa.decimal128(*digits) if digits else _ARROW.get(duckdb_type)


def decimal_digits(duckdb_type: str) -> tuple[int, int] | None:
    """Return precision and scale of a DECIMAL, None of another type."""
    if not duckdb_type.startswith("DECIMAL("):
        return None
    precision, scale = duckdb_type.removeprefix("DECIMAL(").removesuffix(")").split(",")
    return int(precision), int(scale)


@dataclass(frozen=True)
class Arriving:
    """A column of what a database hands out.

    Attributes:
        name: its name.
        type: the DuckDB type in which its values arrive.
    """

    name: str
    type: str


def to_arrow(
    rows: Sequence[Sequence[Any]], columns: Sequence[Arriving], where: str
) -> pa.Table:
    """Return rows of a driver as an Arrow table.

    Args:
        rows: values in the order of the columns.
        columns: what they are.
        where: the shard, for messages.

    Raises:
        SourceError: a value does not fit its column's type; names the column.
    """
    values = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    return pa.table(
        [_fitting(own, c, where) for c, own in zip(columns, values, strict=True)],
        names=[column.name for column in columns],
    )


def _fitting(values: Sequence[Any], column: Arriving, where: str) -> pa.Array:
    # the words of what is raised here quote the value
    with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
        if column.type == "BOOLEAN":
            return _flags(values)
        return pa.array(values, arrow_type(column.type))
    raise SourceError(
        f"{where}: column {column.name!r} holds a value that is no {column.type}: "
        "convert it in 'sql', or name a type that fits, as "
        f'types = {{ {column.name} = "VARCHAR" }}'
    )


def _flags(values: Sequence[Any]) -> pa.Array:
    """MySQL and SQLite have numbers for truth values; 2 is none."""
    if type(next((v for v in values if v is not None), None)) is not int:
        return pa.array(values, pa.bool_())
    numbers = pa.array(values, pa.int8())
    flags = numbers.cast(pa.bool_())
    if not flags.cast(pa.int8()).equals(numbers):
        raise ValueError("neither 0 nor 1")
    return flags
