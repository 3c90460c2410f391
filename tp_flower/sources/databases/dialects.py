"""How the databases write what DuckDB means: pieces of SQL that give equal values.

Every function takes and returns sqlglot trees; none of them holds DuckDB's own SQL.
"""

from typing import Final

from sqlglot import exp

from tp_flower.sources.databases.session import Dialect

# sqlglot's names
_GENERATORS: Final[dict[Dialect, str]] = {
    "postgresql": "postgres",
    "mysql": "mysql",
    "sqlite": "sqlite",
}
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
    """Return a constant in double precision."""
    if dialect == "mysql":
        # old servers have no CAST for it
        return exp.Paren(this=exp.Add(this=value, expression=number("0e0")))
    return exp.cast(value, "DOUBLE")


def bytewise(text: exp.Expr, dialect: Dialect) -> exp.Expr:
    """Return a text that is compared by its bytes.

    MariaDB's own comparison ignores case and spaces at the end.
    """
    if dialect == "mysql":
        return exp.cast(_mysql_text(text), exp.DataType.build("BINARY"))
    name = exp.to_identifier("C", quoted=True)
    if dialect == "sqlite":
        name = exp.to_identifier("BINARY")
    return exp.Paren(this=exp.Collate(this=text, expression=name))


def _mysql_text(value: exp.Expr) -> exp.Expr:
    kind = exp.DataType(
        this=exp.DType.CHARACTER_SET, kind=exp.Var(this="utf8mb4"), nested=False
    )
    return exp.Cast(this=value, to=kind)


def time_literal(text: str, family: str, dialect: Dialect) -> exp.Expr:
    """Return a date or a time that DuckDB wrote."""
    literal = exp.Literal.string(text)
    if dialect == "mysql" and family != "date":
        kind = exp.DataType.build("DATETIME(6)", dialect="mysql")
        return exp.Cast(this=literal, to=kind)
    return exp.cast(literal, _TIME_TYPES[family])
