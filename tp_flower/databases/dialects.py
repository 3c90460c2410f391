"""How the databases write what DuckDB means: pieces of SQL that give equal values.

Every function takes and returns sqlglot trees; none of them holds DuckDB's own SQL.
"""

from collections.abc import Callable
from typing import Final, Literal

from sqlglot import exp

from tp_flower.databases.url import Dialect

Part = Literal[
    "year", "quarter", "month", "day", "hour", "minute", "doy", "dow", "isodow"
]
PARTS: Final[frozenset[str]] = frozenset(
    ("year", "quarter", "month", "day", "hour", "minute", "doy", "dow", "isodow")
)

# sqlglot's names
_GENERATORS: Final[dict[Dialect, str]] = {
    "postgresql": "postgres",
    "mysql": "mysql",
    "sqlite": "sqlite",
}
_MYSQL_PARTS: Final = {
    "year": "YEAR",
    "quarter": "QUARTER",
    "month": "MONTH",
    "day": "DAYOFMONTH",
    "hour": "HOUR",
    "minute": "MINUTE",
    "doy": "DAYOFYEAR",
    "dow": "DAYOFWEEK",
    "isodow": "WEEKDAY",
}
# MySQL's days of the week start elsewhere
_MYSQL_SHIFT: Final = {"dow": -1, "isodow": 1}
_TIME_TYPES: Final = {
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "instant": "TIMESTAMPTZ",
}


def render(tree: exp.Expr, dialect: Dialect) -> str:
    """Return a tree as a database's SQL."""
    return tree.sql(_GENERATORS[dialect], comments=False)


def quote(name: str, dialect: Dialect) -> str:
    """Return a quoted name."""
    return render(exp.to_identifier(name, quoted=True), dialect)


def number(text: str | int) -> exp.Expr:
    """Return a number as it is written."""
    return exp.Literal.number(text)


def text_literal(text: str, dialect: Dialect) -> exp.Expr | None:
    r"""Return a text as it is written; None where its meaning depends on settings.

    A backslash is itself under MySQL's NO_BACKSLASH_ESCAPES alone, and sqlglot writes
    control characters with one; '' is NULL under MariaDB's EMPTY_STRING_IS_NULL.

    >>> text_literal("it's", "mysql").sql(), text_literal("a\nb", "mysql")
    ("'it''s'", None)
    """
    literal = exp.Literal.string(text)
    if "\\" in text or "\0" in text or "\\" in render(literal, dialect):
        return None
    if not text and dialect == "mysql":
        return exp.Anonymous(this="SPACE", expressions=[number(0)])
    return literal


def as_double(value: exp.Expr, dialect: Dialect) -> exp.Expr:
    """Return a number in double precision."""
    if dialect == "mysql":
        # old servers have no CAST for it
        return exp.Paren(this=exp.Add(this=inner(value), expression=number("0e0")))
    return exp.cast(value, "DOUBLE")


def bytewise(text: exp.Expr, dialect: Dialect) -> exp.Expr:
    """Return a text that is compared and grouped by its bytes.

    MariaDB's own comparison ignores case and spaces at the end.
    """
    if dialect == "mysql":
        return exp.cast(_mysql_text(text), exp.DataType.build("BINARY"))
    name = exp.to_identifier("C", quoted=True)
    if dialect == "sqlite":
        name = exp.to_identifier("BINARY")
    return exp.Paren(this=exp.Collate(this=inner(text), expression=name))


def text_of_bytes(value: exp.Expr, dialect: Dialect) -> exp.Expr:
    """Return the text that :func:`bytewise` turned into what is compared."""
    return _mysql_text(value) if dialect == "mysql" else value


def _mysql_text(value: exp.Expr) -> exp.Expr:
    kind = exp.DataType(
        this=exp.DType.CHARACTER_SET, kind=exp.Var(this="utf8mb4"), nested=False
    )
    return exp.Cast(this=value, to=kind)


def inner(value: exp.Expr) -> exp.Expr:
    """Return a value that may stand beside any operator."""
    closed = (exp.Column, exp.Literal, exp.Paren, exp.Cast, exp.Func, exp.Null)
    is_closed = isinstance(value, closed) and not isinstance(value, exp.Connector)
    return value if is_closed else exp.Paren(this=value)


def divide(dividend: exp.Expr, divisor: exp.Expr) -> exp.Expr:
    """Return a quotient of two doubles; sqlglot shall not add casts of its own."""
    return exp.Div(this=inner(dividend), expression=inner(divisor), typed=True)


def time_literal(text: str, family: str, dialect: Dialect) -> exp.Expr:
    """Return a date or a time that DuckDB wrote."""
    literal = exp.Literal.string(text)
    if dialect == "mysql" and family != "date":
        kind = exp.DataType.build("DATETIME(6)", dialect="mysql")
        return exp.Cast(this=literal, to=kind)
    return exp.cast(literal, _TIME_TYPES[family])


def date_part(part: str, value: exp.Expr, dialect: Dialect) -> exp.Expr:
    """Return a part of a date or time as an integer."""
    if dialect == "mysql":
        found: exp.Expr = exp.Anonymous(this=_MYSQL_PARTS[part], expressions=[value])
        shift = _MYSQL_SHIFT.get(part, 0)
        if shift:
            found = exp.Add(this=found, expression=inner(number(shift)))
        return exp.Paren(this=found) if shift else found
    extracted = exp.Extract(this=exp.Var(this=part.upper()), expression=value)
    whole = exp.cast(extracted, "BIGINT")
    if part != "year":
        return whole
    # PostgreSQL knows no year 0: what is -1 there is 0 in DuckDB
    before = exp.LT(this=whole.copy(), expression=number(0))
    shifted = exp.Add(this=whole.copy(), expression=number(1))
    return exp.Case(ifs=[exp.If(this=before, true=shifted)], default=whole)


Aggregate = Callable[[exp.Expr, int, Dialect], exp.Expr]


def count(value: exp.Expr, _scale: int, _dialect: Dialect) -> exp.Expr:
    """Return the number of values."""
    return exp.Count(this=value)


def count_distinct(value: exp.Expr, _scale: int, _dialect: Dialect) -> exp.Expr:
    """Return the number of different values."""
    return exp.Count(this=exp.Distinct(expressions=[value]))


def total(value: exp.Expr, _scale: int, _dialect: Dialect) -> exp.Expr:
    """Return the sum."""
    return exp.Sum(this=value)


def least(value: exp.Expr, _scale: int, _dialect: Dialect) -> exp.Expr:
    """Return the smallest value."""
    return exp.Min(this=value)


def greatest(value: exp.Expr, _scale: int, _dialect: Dialect) -> exp.Expr:
    """Return the largest value."""
    return exp.Max(this=value)


def mean(value: exp.Expr, scale: int, dialect: Dialect) -> exp.Expr:
    """Return the mean in double precision, rounded as DuckDB rounds it.

    Args:
        value: the numbers.
        scale: their decimal places; DuckDB divides the sum of the numbers without
            their point by count * 10^scale.
        dialect: the database.
    """
    summed: exp.Expr = exp.Sum(this=value)
    counted: exp.Expr = exp.Count(this=value.copy())
    divisor = as_double(exp.Nullif(this=counted, expression=number(0)), dialect)
    if scale:
        factor = number("1" + "0" * scale)
        summed = exp.Mul(this=summed, expression=factor)
        divisor = exp.Mul(this=divisor, expression=as_double(factor.copy(), dialect))
    return divide(as_double(summed, dialect), divisor)
