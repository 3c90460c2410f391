"""The columns that a query needs from a table, and the filters that a database applies.

A database supplies columns and applies filters ``column <op> constant``, where <op> is
=, <>, <, <=, >, >=, IS NULL, IN, BETWEEN or the negation of one. A filter is pushed
down only if the database's answer equals DuckDB's for every value of the column:

* integers and decimals are compared exactly, in SQLite only integers;
* doubles are compared with constants of at most 15 digits, which survive exactly;
* texts are compared by their bytes, and only for equality: each database sorts them by
  its own rules;
* constants are dates and times if DuckDB reads them as such; SQLite has none.

The site's DuckDB evaluates all other filters and all expressions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import duckdb
from sqlglot import exp

from tp_flower.query import expressions
from tp_flower.query.expressions import parse_expression, shorten
from tp_flower.query.fragment import Fragment
from tp_flower.sources.databases.columns import (
    DatabaseColumn,
    column_named,
    decimal_digits,
)
from tp_flower.sources.databases.session import Dialect
from tp_flower.sources.shards import column_types

# a DECIMAL of more digits is rounded twice on its way to a double
EXACT_DIGITS: Final = 15
MYSQL_MAX_SCALE: Final = 30

_KINDS: Final = {
    **dict.fromkeys(("TINYINT", "SMALLINT", "INTEGER", "BIGINT"), "integer"),
    **dict.fromkeys(("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"), "integer"),
    "DOUBLE": "double",
    "BOOLEAN": "boolean",
    "VARCHAR": "text",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMP WITH TIME ZONE": "instant",
}
_NUMBERS: Final = frozenset(("integer", "decimal", "double"))
_TIME_NAMES: Final = {
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "instant": "TIMESTAMPTZ",
}
# the columns that a constant may be compared with, by the constant's own type
_TIME_CONSTANTS: Final = {
    "text": frozenset(_TIME_NAMES),
    "date": frozenset(_TIME_NAMES),
    "timestamp": frozenset(("timestamp", "instant")),
    "instant": frozenset(("instant",)),
}
_PLAIN_NUMBER: Final = re.compile(r"\d+(\.\d+)?|\.\d+")
_PLAIN_TIME: Final = re.compile(
    r"([1-9]\d{3}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d+)?)?)(?:\+00)?"
)
_EQUALITIES: Final = (exp.EQ, exp.NEQ, exp.In)
_COMPARISONS: Final = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)


@dataclass(frozen=True)
class Selection:
    """The columns and rows that a site reads from a table.

    The database applies the filters that ``pushed`` describes; the site evaluates the
    rest, ``fragment``, over the relation ``shard``.
    """

    fragment: Fragment
    columns: tuple[str, ...]
    filters: tuple[exp.Expr, ...] = ()
    pushed: tuple[str, ...] = ()


def select(
    pushdown: "FilterPushdown", fragment: Fragment, *, has_filters: bool = True
) -> Selection:
    """Divide a checked fragment between a database and the site.

    If it has a sub-query, that one's filters are over the table's rows, and its own are
    over the sub-query's.
    """
    translated: list[exp.Expr] = []
    pushed: list[str] = []
    remaining: list[str] = []
    subquery = fragment.subquery
    whatever_cutoff = subquery.filters_of_rows if subquery else fragment.filters
    for sql in (subquery or fragment).filters:
        condition = None
        if has_filters and sql in whatever_cutoff:
            condition = pushdown.condition(parse_expression(sql, "filter"))
        if condition is None:
            remaining.append(sql)
        else:
            translated.append(condition)
            pushed.append(f"filter: {shorten(sql)}")
    if subquery is None:
        rest = replace(fragment, filters=tuple(remaining))
    else:
        rest = replace(fragment, subquery=replace(subquery, filters=tuple(remaining)))
    required = column_names(piece.parse() for piece in (rest.subquery or rest).pieces())
    columns = tuple(name for name in pushdown.columns if name in required)
    return Selection(rest, columns, tuple(translated), tuple(pushed))


def column_names(trees: Iterable[exp.Expr]) -> frozenset[str]:
    """Return the names of the columns in some expressions."""
    return frozenset(
        column.name for tree in trees for column in tree.find_all(exp.Column)
    )


@dataclass(frozen=True)
class FilterPushdown:
    """Translates filters over a table's columns to SQL; DuckDB evaluates constants."""

    dialect: Dialect
    columns: Mapping[str, DatabaseColumn]
    connection: duckdb.DuckDBPyConnection

    def condition(self, tree: exp.Expr) -> exp.Expr | None:
        """Return a filter in the database's SQL, None if the site must apply it."""
        tree = tree.unnest()
        if isinstance(tree, exp.Not):
            negated = self.condition(tree.this)
            if negated is None:
                return None
            return exp.Not(this=exp.Paren(this=negated))
        if isinstance(tree, exp.Is):
            if not self._kind(tree.this) or not isinstance(tree.expression, exp.Null):
                return None
            return exp.Is(
                this=column_named(tree.this.unnest().name), expression=exp.Null()
            )
        translated = tree.copy()
        constants = _constants(translated)
        operands = self._operands(translated, constants)
        if operands is None:
            return None
        for node, operand in zip((translated.this, *constants), operands, strict=True):
            node.replace(operand)
        return translated

    def _kind(self, tree: exp.Expr) -> str:
        """Return the kind of a column's values; "" if nothing may be pushed down."""
        column = self.columns.get(tree.unnest().name)
        if not isinstance(tree.unnest(), exp.Column) or column is None:
            return ""
        digits = decimal_digits(column.type)
        too_fine = self.dialect == "mysql" and digits and digits[1] > MYSQL_MAX_SCALE
        if not column.is_exact or too_fine:
            return ""
        if digits:
            return "decimal"
        return _KINDS.get(column.type, "")

    def _operands(
        self, tree: exp.Expr, constants: Sequence[exp.Expr]
    ) -> list[exp.Expr] | None:
        """Return a comparison's operands in the dialect; None if they may differ."""
        kind = self._kind(tree.this) if constants else ""
        value: exp.Expr = column_named(tree.this.unnest().name) if kind else exp.Null()
        translated: list[exp.Expr | None]
        if kind == "text" and isinstance(tree, _EQUALITIES):
            value = self._bytewise(value)
            translated = [self._text(constant) for constant in constants]
        elif kind in _NUMBERS:
            translated = [self._number(constant, kind) for constant in constants]
        elif kind in _TIME_NAMES and self.dialect != "sqlite":
            translated = [self._time(constant, kind) for constant in constants]
        else:
            return None
        operands = [constant for constant in translated if constant is not None]
        if len(operands) != len(constants):
            return None
        return [value, *operands]

    def _text(self, tree: exp.Expr) -> exp.Expr | None:
        r"""Return a text constant; None if its meaning depends on settings.

        A backslash stands for itself only under MySQL's NO_BACKSLASH_ESCAPES, and
        sqlglot writes control characters with one; '' is NULL under MariaDB's
        EMPTY_STRING_IS_NULL.
        """
        literal: exp.Expr = tree.unnest()
        if not isinstance(literal, exp.Literal) or not literal.is_string:
            return None
        text = literal.name
        if "\\" in text or "\0" in text or "\\" in render(literal, self.dialect):
            return None
        if not text and self.dialect == "mysql":
            literal = exp.Anonymous(this="SPACE", expressions=[exp.Literal.number(0)])
        return self._bytewise(literal)

    def _bytewise(self, text: exp.Expr) -> exp.Expr:
        """Return a text to be compared by its bytes, with case and trailing spaces."""
        if self.dialect == "mysql":
            utf8 = exp.DataType(
                this=exp.DType.CHARACTER_SET, kind=exp.Var(this="utf8mb4"), nested=False
            )
            return exp.cast(exp.Cast(this=text, to=utf8), exp.DataType.build("BINARY"))
        is_sqlite = self.dialect == "sqlite"
        name = exp.to_identifier("BINARY" if is_sqlite else "C", quoted=not is_sqlite)
        return exp.Paren(this=exp.Collate(this=text, expression=name))

    def _number(self, tree: exp.Expr, kind: str) -> exp.Expr | None:
        """Return a number that both engines read as the same value; None for others."""
        constant = tree.unnest()
        is_negative = isinstance(constant, exp.Neg)
        digits = constant.this.unnest() if is_negative else constant
        if not isinstance(digits, exp.Literal) or digits.is_string:
            return None
        text = digits.name
        is_exact = len(text.replace(".", "")) <= EXACT_DIGITS
        # SQLite has no decimals: it would compare in double precision
        is_odd = self.dialect == "sqlite" and kind == "integer" and "." in text
        if not _PLAIN_NUMBER.fullmatch(text) or not is_exact or is_odd:
            return None
        number: exp.Expr = exp.Literal.number(text)
        number = exp.Paren(this=exp.Neg(this=number)) if is_negative else number
        if kind != "double":
            return number
        if self.dialect == "mysql":
            # old servers have no CAST for it
            return exp.Paren(
                this=exp.Add(this=number, expression=exp.Literal.number("0e0"))
            )
        return exp.cast(number, "DOUBLE")

    def _time(self, tree: exp.Expr, kind: str) -> exp.Expr | None:
        """Return a date or time in the dialect; None if it may differ from DuckDB's."""
        constant = tree.unnest()
        literal = constant.this.unnest() if type(constant) is exp.Cast else constant
        if not isinstance(literal, exp.Literal) or not literal.is_string:
            return None
        sql = expressions.render(constant)
        cast = f"CAST({sql} AS {_TIME_NAMES[kind]})"
        try:
            kinds = column_types(self.connection, f"SELECT {sql} AS value")
            rendered = self.connection.execute(
                f"SELECT CAST({cast} AS VARCHAR)"
            ).fetchall()[0][0]
        except duckdb.Error:
            # the site's DuckDB reports what is wrong with it
            return None
        match = _PLAIN_TIME.fullmatch(str(rendered))
        if match is None or kind not in _TIME_CONSTANTS.get(
            _KINDS.get(kinds["value"], ""), ()
        ):
            return None
        time = exp.Literal.string(match[1])
        if self.dialect == "mysql" and kind != "date":
            return exp.Cast(this=time, to=exp.DataType.build("DATETIME(6)", "mysql"))
        return exp.cast(time, _TIME_NAMES[kind])


def _constants(tree: exp.Expr) -> list[exp.Expr]:
    """Return the constants on a condition's right side; [] for an unknown form."""
    if isinstance(tree, exp.In):
        return list(tree.expressions)
    if isinstance(tree, exp.Between):
        return [tree.args["low"], tree.args["high"]]
    if not isinstance(tree, _COMPARISONS):
        return []
    return [tree.expression]


def render(tree: exp.Expr, dialect: Dialect) -> str:
    """Return a tree as a database's SQL."""
    return tree.sql("postgres" if dialect == "postgresql" else dialect, comments=False)


def quote(name: str, dialect: Dialect) -> str:
    """Return a quoted name."""
    return render(exp.to_identifier(name, quoted=True), dialect)
