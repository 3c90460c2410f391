"""The columns of a shard in a database, from the server's own description of them."""

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from sqlglot import exp

from tp_flower.errors import SourceError
from tp_flower.sources.entries import type_setting

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
        read: the expression over the quoted column that the database evaluates.
        arrives: DuckDB type of its values, to be cast to ``type``.
        is_exact: whether filters over ``read`` have the same meaning in the database as
            in DuckDB, so that the database may apply them.
        unread: why no query can read it, and what to write instead; "" if queries can.
    """

    name: str
    type: str
    read: exp.Expr
    arrives: str
    is_exact: bool = True
    unread: str = ""

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
        return cls(name, duckdb_type, read or column_named(name), duckdb_type, is_exact)

    @property
    def is_readable(self) -> bool:
        """Whether DuckDB can represent its values."""
        return not self.why_unread

    @property
    def why_unread(self) -> str:
        """Why no query can read it, and what to write instead; "" if queries can."""
        if self.unread or arrow_type(self.arrives) is not None:
            return self.unread
        return (
            f"is of type {self.type}, which cannot be used: convert it in 'sql' to a "
            "number, a text, a date, a timestamp or a boolean"
        )


def absent_column(name: str) -> DatabaseColumn:
    """Return a column that the database lacks; filters over it are the site's."""
    return DatabaseColumn.of(name, '"NULL"', exp.null(), is_exact=False)


def column_named(name: str) -> exp.Column:
    """Return the column of this name."""
    return exp.column(exp.to_identifier(name, quoted=True))


def arrow_type(duckdb_type: str) -> pa.DataType | None:
    """Return the Arrow type in which values of a DuckDB type travel, None if none.

    >>> arrow_type("DECIMAL(10,2)")
    Decimal128Type(decimal128(10, 2))
    """
    digits = decimal_digits(duckdb_type)
    if digits:
        return pa.decimal128(*digits)
    return _ARROW.get(duckdb_type)


def decimal_digits(duckdb_type: str) -> tuple[int, int] | None:
    """Return precision and scale of a DECIMAL, None for another type."""
    if not duckdb_type.startswith("DECIMAL("):
        return None
    precision, scale = duckdb_type.removeprefix("DECIMAL(").removesuffix(")").split(",")
    return int(precision), int(scale)


def to_arrow(
    rows: Sequence[Sequence[Any]], columns: Sequence[DatabaseColumn], where: str
) -> pa.Table:
    """Return rows of a driver, in the order of the columns, as an Arrow table."""
    values = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    return pa.table(
        [_arrow_array(held, c, where) for c, held in zip(columns, values, strict=True)],
        names=[column.name for column in columns],
    )


def _arrow_array(values: Sequence[Any], column: DatabaseColumn, where: str) -> pa.Array:
    """Return a column's values in its type; SourceError for a value of another."""
    # the driver's errors quote the value
    with suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
        if column.arrives == "BOOLEAN":
            return _flags(values)
        return pa.array(values, arrow_type(column.arrives))
    is_flag = column.arrives == "BOOLEAN"
    typed = ""
    if is_flag:
        typed = f", or read it as a number, {type_setting(column.name, 'BIGINT')}"
    raise SourceError(
        f"{where}: column {column.name!r} holds a value that is not {column.arrives}: "
        f"convert it in 'sql'{typed}"
    )


def _flags(values: Sequence[Any]) -> pa.Array:
    """MySQL and SQLite store truth values as numbers; 2 is not one."""
    if type(next((v for v in values if v is not None), None)) is not int:
        return pa.array(values, pa.bool_())
    numbers = pa.array(values, pa.int8())
    flags = numbers.cast(pa.bool_())
    if not flags.cast(pa.int8()).equals(numbers):
        raise ValueError("neither 0 nor 1")
    return flags


OneRow = Callable[[exp.Expr], Sequence[Any]]
"""Runs SELECT items over the shard's rows; returns its one row."""

_UNSIGNED_FLAG = 32
_BINARY_CHARSET = 63

_FILE: Final = Path(__file__).with_name("types.toml")
_TYPES: Final = {
    table: {code: kind for kind, codes in types.items() for code in codes}
    for table, types in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}
_PG_TYPES = _TYPES["postgresql"]
_PG_UNUSABLE = _TYPES["postgresql-unusable"]
_MY_INTEGERS = _TYPES["mysql-integers"]
_MY_TIMES = _TYPES["mysql-times"]
_MY_TEXTS = _TYPES["mysql-texts"]
_MY_OTHERS = _TYPES["mysql-others"]
_PG_MONEY = 790
_PG_NUMERIC = 1700
_PG_UUID = 2950
_PG_FLOATS: Final = (700, 701)
# smallint, integer, bigint, real, double precision, numeric
_PG_ARRAYS: Final = (1005, 1007, 1016, 1021, 1022, 1231)


def postgresql_columns(fields: Sequence[Any], one_row: OneRow) -> list[DatabaseColumn]:
    """Return the columns in PostgreSQL; undeclared NUMERIC digits take a query."""
    columns = [_postgresql_column(field) for field in fields]
    unbounded = [
        column.name
        for column, field in zip(columns, fields, strict=True)
        if field.type_code == _PG_NUMERIC and not _declared_digits(field)
    ]
    if unbounded:
        digits = _numeric_digits(unbounded, one_row)
        columns = [digits.get(column.name, column) for column in columns]
    return columns


def _postgresql_column(field: Any) -> DatabaseColumn:
    """Return how a PostgreSQL column is read, by the code of its type."""
    code = field.type_code
    name = field.name
    if code == _PG_NUMERIC:
        precision, scale = _declared_digits(field) or (MAX_DIGITS, 0)
        return _numeric(name, f"DECIMAL({precision},{scale})")
    if code == _PG_MONEY:
        # its texts have a currency sign
        number = exp.cast(exp.cast(column_named(name), "DECIMAL"), "DOUBLE")
        return DatabaseColumn.of(name, "DOUBLE", number, is_exact=False)
    if code in _PG_FLOATS:
        kind = _PG_TYPES[code]
        return DatabaseColumn.of(name, kind, _null_for_nan(name, kind))
    if code in _PG_TYPES:
        return DatabaseColumn.of(name, _PG_TYPES[code])
    if code in _PG_UNUSABLE:
        return DatabaseColumn.of(name, _PG_UNUSABLE[code], is_exact=False)
    if code in _PG_ARRAYS:
        read = exp.cast(column_named(name), "DOUBLE[]")
        return DatabaseColumn.of(name, "DOUBLE[]", read, is_exact=False)
    # character(n), enumerations, json, xml, inet, ...: as text
    kind = "UUID" if code == _PG_UUID else "VARCHAR"
    text = exp.cast(column_named(name), "TEXT")
    return DatabaseColumn(name, kind, text, "VARCHAR", is_exact=kind == "VARCHAR")


def _declared_digits(field: Any) -> tuple[int, int] | None:
    precision = field.precision
    scale = field.scale
    if precision is None or not 0 <= scale <= precision <= MAX_DIGITS:
        return None
    return precision, scale


def _numeric(name: str, kind: str) -> DatabaseColumn:
    return DatabaseColumn.of(name, kind, _null_for_nan(name, "DECIMAL"))


def _null_for_nan(name: str, kind: str) -> exp.Expr:
    """NaN is a missing value, also to the filters that the database applies."""
    nan = exp.cast(exp.Literal.string("NaN"), kind)
    return exp.Nullif(this=column_named(name), expression=nan)


def _numeric_digits(names: Sequence[str], one_row: OneRow) -> dict[str, DatabaseColumn]:
    """Scan all values for the numbers of digits before and after the point."""
    items: list[exp.Expr] = []
    for name in names:
        value = _numeric(name, "").read
        items += [
            exp.Max(this=exp.func("SCALE", value.copy())),
            exp.Max(this=exp.func("TRUNC", exp.Abs(this=value.copy()))),
        ]
    values = one_row(exp.select(*items))
    columns = {}
    for index, name in enumerate(names):
        scale, largest = values[2 * index : 2 * index + 2]
        integer_digits = len(str(largest or 0).partition(".")[0])
        scale = int(scale or 0)
        if str(largest).lower() == "infinity" or integer_digits + scale > MAX_DIGITS:
            # more digits than DuckDB supports
            read = exp.cast(_numeric(name, "").read, "DOUBLE")
            columns[name] = DatabaseColumn.of(name, "DOUBLE", read, is_exact=False)
        else:
            columns[name] = _numeric(name, f"DECIMAL({MAX_DIGITS},{scale})")
    return columns


def mysql_column(field: Any) -> DatabaseColumn:
    """Return a column in MySQL or MariaDB, from pymysql's description of it."""
    code = field.type_code
    name = field.name
    other = _MY_OTHERS.get(field.type_code)
    is_unsigned = bool(field.flags & _UNSIGNED_FLAG)
    if code in _MY_INTEGERS or other == "BIT":
        return _mysql_integer(field, is_unsigned)
    if other == "YEAR":
        return DatabaseColumn.of(name, "SMALLINT")
    if other == "DECIMAL":
        # the length counts the point and the sign
        precision = field.length - (field.scale > 0) - (not is_unsigned)
        digits = min(precision, MAX_DIGITS), min(field.scale, MAX_DIGITS)
        return DatabaseColumn.of(name, "DECIMAL({},{})".format(*digits))
    if other == "DOUBLE":
        return DatabaseColumn.of(name, "DOUBLE")
    if other == "FLOAT":
        # otherwise it would arrive with six digits
        double = exp.Add(this=column_named(name), expression=exp.Literal.number("0e0"))
        return DatabaseColumn.of(name, "FLOAT", double)
    if code in _MY_TIMES:
        return DatabaseColumn.of(name, _MY_TIMES[code], _null_for_zero_date(name))
    if code in _MY_TEXTS and field.charsetnr != _BINARY_CHARSET:
        return DatabaseColumn.of(name, "VARCHAR")
    kind = "TIME" if other == "TIME" else "BLOB"
    return DatabaseColumn(name, kind, column_named(name), "BLOB", is_exact=False)


def _mysql_integer(field: Any, is_unsigned: bool) -> DatabaseColumn:
    """Return how an integer, boolean or bit column of MySQL is read."""
    name = field.name
    is_flag = field.length == 1
    if field.type_code not in _MY_INTEGERS:
        number = exp.Add(this=column_named(name), expression=exp.Literal.number(0))
        kind = "BOOLEAN" if is_flag else "UBIGINT"
        return DatabaseColumn.of(name, kind, number, is_exact=False)
    kind = _MY_INTEGERS[field.type_code]
    if kind == "TINYINT" and is_flag:
        # it may hold numbers other than 0 and 1, which are refused when they are read
        return DatabaseColumn.of(name, "BOOLEAN", is_exact=False)
    return DatabaseColumn.of(name, f"U{kind}" if is_unsigned else kind)


def _null_for_zero_date(name: str) -> exp.Expr:
    """Return a date column with NULL where MySQL has a day or month of 0."""
    parts = [
        exp.GT(
            this=exp.Anonymous(this=part, expressions=[column_named(name)]),
            expression=exp.Literal.number(0),
        )
        for part in ("MONTH", "DAYOFMONTH")
    ]
    return exp.Case(ifs=[exp.If(this=exp.and_(*parts), true=column_named(name))])


def sqlite_columns(
    declared: Mapping[str, str],
    one_row: OneRow,
    names: Mapping[str, str],
    types: Collection[str],
) -> list[DatabaseColumn]:
    """Return the columns in SQLite, where any column may hold any value.

    ``one_row`` counts the kinds of values. A column without a single kind cannot be
    read, unless the tables file has its type: then its values are read as texts.
    ``names`` are the table's names of the columns, ``types`` those that the tables file
    has a type of.
    """
    items = [
        exp.func(
            "SUM", exp.EQ(this=exp.func("TYPEOF", column_named(name)), expression=kind)
        )
        for name in declared
        for kind in map(exp.Literal.string, _SQLITE_KINDS)
    ]
    counts = iter(one_row(exp.select(*items)))
    columns = []
    for name, kind in declared.items():
        held = {stored for stored in _SQLITE_KINDS if next(counts)}
        column = _sqlite_column(name, kind.upper(), held)
        if column is None and names[name] in types:
            text = exp.cast(column_named(name), "TEXT")
            column = DatabaseColumn.of(name, "VARCHAR", text, is_exact=False)
        columns.append(column or _mixed_column(name, kind, held, names[name]))
    return columns


def _mixed_column(
    name: str, declared: str, held: Collection[str], table_name: str
) -> DatabaseColumn:
    """Return a column whose values are not of one kind, or not of the declared one."""
    reason = (
        f"is declared as {declared or 'nothing'} and holds values of the kinds "
        f"{', '.join(sorted(held))}: name one type for all of them, "
        f"{type_setting(table_name)}, or convert it in 'sql'"
    )
    return DatabaseColumn(
        name, declared, column_named(name), "", is_exact=False, unread=reason
    )


_SQLITE_KINDS: Final = ("integer", "real", "text", "blob")
_SQLITE_DATES: Final = {
    "DATE": "DATE",
    "DATETIME": "TIMESTAMP",
    "TIMESTAMP": "TIMESTAMP",
}
_SQLITE_NUMBER: Final = re.compile(r"(?<!PO)INT|REAL|FLOAT|DOUBLE|\bNUM|DEC|BOOL")
_SQLITE_TEXT: Final = re.compile(r"CHAR|CLOB|TEXT|BLOB")


def _sqlite_column(name: str, declared: str, held: set[str]) -> DatabaseColumn | None:
    """Return a column's type from its values' kinds; None if they are mixed."""
    bare = re.sub(r"\s*\(.*", "", declared)
    numbers = {"integer", "real"}
    if held == {"text"} and bare in _SQLITE_DATES:
        kind = _SQLITE_DATES[bare]
        return DatabaseColumn(name, kind, column_named(name), "VARCHAR", is_exact=False)
    if held <= {"integer"} and bare in ("BOOLEAN", "BOOL"):
        return DatabaseColumn.of(name, "BOOLEAN", is_exact=False)
    if held == {"integer"}:
        return DatabaseColumn.of(name, "BIGINT")
    if held and held <= numbers:
        return DatabaseColumn.of(name, "DOUBLE", exp.cast(column_named(name), "DOUBLE"))
    is_text = bare not in _SQLITE_DATES and not _number_declared(bare)
    if held == {"text"} and is_text:
        return DatabaseColumn.of(name, "VARCHAR")
    if held == {"blob"}:
        return DatabaseColumn(name, "BLOB", column_named(name), "BLOB", is_exact=False)
    if not held:
        number = "BIGINT" if "INT" in bare else "DOUBLE"
        kind = _SQLITE_DATES.get(bare, "VARCHAR" if is_text else number)
        return DatabaseColumn.of(name, kind)
    return None


def _number_declared(bare: str) -> bool:
    """Return whether a declared type means numbers.

    SQLite takes any other word for a type of numbers, such as ENUM.

    Texts in a column of numbers are an accident, in one of an unknown type they are its
    values.
    """
    return not _SQLITE_TEXT.search(bare) and bool(_SQLITE_NUMBER.search(bare))


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse columns whose names DuckDB considers equal."""
    seen = set()
    for name in names:
        if name.lower() in seen:
            raise SourceError(
                f"{where}: two columns are called {name!r} (in upper or lower case): "
                "name each differently in 'sql'"
            )
        seen.add(name.lower())
