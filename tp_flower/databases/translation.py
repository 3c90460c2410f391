"""An expression of a fragment in a database's SQL, where it means the same.

Only what gives the same value as DuckDB, for every value of its columns, is translated;
the site's DuckDB computes the rest. The types of all parts are asked of DuckDB: numbers
are brought to double precision exactly where DuckDB does so, text is compared by its
bytes, and constants are dates where DuckDB takes them for dates.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import duckdb
from sqlglot import exp

from tp_flower.databases import dialects
from tp_flower.databases.types import DatabaseColumn, decimal_digits
from tp_flower.databases.url import Dialect
from tp_flower.query.expressions import render
from tp_flower.sources.scan import column_types

# a DECIMAL of more digits is rounded twice on its way to a double
EXACT_DOUBLE_DIGITS: Final = 15
MYSQL_MAX_SCALE: Final = 30

EXACT: Final = frozenset(("integer", "decimal"))
NUMBERS: Final = EXACT | {"double"}
TIMES: Final = frozenset(("date", "timestamp", "instant"))

_FAMILIES: Final = {
    "TINYINT": "integer",
    "SMALLINT": "integer",
    "INTEGER": "integer",
    "BIGINT": "integer",
    "UTINYINT": "unsigned",
    "USMALLINT": "unsigned",
    "UINTEGER": "unsigned",
    "UBIGINT": "unsigned",
    "DOUBLE": "double",
    "BOOLEAN": "boolean",
    "VARCHAR": "text",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMP WITH TIME ZONE": "instant",
    '"NULL"': "null",
}
# what a constant's own type may be taken for
_TIME_CONSTANTS: Final = {
    "text": TIMES,
    "date": TIMES,
    "timestamp": frozenset(("timestamp", "instant")),
    "instant": frozenset(("instant",)),
}
_TIME_NAMES: Final = {
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "instant": "TIMESTAMPTZ",
}
_PLAIN_TIME: Final = re.compile(
    r"([1-9]\d{3}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d+)?)?)(?:\+00)?"
)


class NotTranslatedError(Exception):
    """The database may not compute an expression; the message says which part."""


def family_of(duckdb_type: str) -> str:
    """Return what kind of values a type has for a translation; "" for an unknown one.

    >>> family_of("DECIMAL(10,2)"), family_of("BIGINT"), family_of("FLOAT")
    ('decimal', 'integer', '')
    """
    return "decimal" if decimal_digits(duckdb_type) else _FAMILIES.get(duckdb_type, "")


@dataclass(frozen=True)
class Translator:
    """Translates expressions over one shard's columns.

    Attributes:
        dialect: the database's SQL.
        columns: the shard's columns, by name.
        connection: a locked DuckDB connection with the empty relation ``declared``,
            which has the columns' types.
        rules: how each kind of expression is translated.
    """

    dialect: Dialect
    columns: Mapping[str, DatabaseColumn]
    connection: duckdb.DuckDBPyConnection
    rules: Mapping[type[exp.Expr], "Rule"]
    _types: dict[str, str] = field(default_factory=dict)

    def translate(self, tree: exp.Expr) -> exp.Expr:
        """Return an expression in the database's SQL.

        Raises:
            NotTranslatedError: it may mean something else there.
        """
        if not self.family(tree):
            raise NotTranslatedError(f"{self.type(tree)}: {tree.sql('duckdb')}")
        rule = self.rules.get(type(tree))
        if rule is None:
            raise NotTranslatedError(tree.sql("duckdb"))
        return rule(self, tree)

    def type(self, tree: exp.Expr) -> str:
        """Return the DuckDB type of an expression."""
        sql = render(tree)
        if sql not in self._types:
            try:
                found = column_types(
                    self.connection, f"SELECT {sql} AS value FROM declared"
                )
            except duckdb.Error:
                # whatever it is, the site's DuckDB will say so
                raise NotTranslatedError(sql) from None
            self._types[sql] = found["value"]
        return self._types[sql]

    def family(self, tree: exp.Expr) -> str:
        """Return the kind of an expression's values."""
        return family_of(self.type(tree))

    def double(self, tree: exp.Expr) -> exp.Expr:
        """Return a number in double precision, as DuckDB converts it."""
        value, family = self.translate(tree), self.family(tree)
        if family in ("double", "null"):
            return value
        digits = decimal_digits(self.type(tree))
        if family not in EXACT or (digits and digits[0] > EXACT_DOUBLE_DIGITS):
            raise NotTranslatedError(f"to double: {tree.sql('duckdb')}")
        return dialects.as_double(value, self.dialect)

    def together(self, trees: Sequence[exp.Expr]) -> list[exp.Expr]:
        """Return values in the one type in which DuckDB compares them."""
        families = {self.family(tree) for tree in trees} - {"null"}
        if families <= EXACT | {"unsigned"}:
            self.need_exact(trees)
            return [self.translate(tree) for tree in trees]
        if families <= NUMBERS:
            return [self.double(tree) for tree in trees]
        if families == {"text"}:
            return [
                dialects.bytewise(self.translate(tree), self.dialect) for tree in trees
            ]
        if families == {"boolean"}:
            return [self.translate(tree) for tree in trees]
        return self._times(trees)

    def as_results(self, trees: Sequence[exp.Expr], whole: exp.Expr) -> list[exp.Expr]:
        """Return the branches of an expression in the type of the whole of it."""
        family = self.family(whole)
        if family == "double":
            return [self.double(tree) for tree in trees]
        accepted = EXACT if family in EXACT else {family}
        for tree in trees:
            if self.family(tree) not in accepted | {"null"}:
                raise NotTranslatedError(tree.sql("duckdb"))
        self.need_exact([whole])
        return [self.translate(tree) for tree in trees]

    def condition(self, tree: exp.Expr) -> exp.Expr:
        """Return a truth value."""
        if self.family(tree) not in ("boolean", "null"):
            raise NotTranslatedError(f"no truth value: {tree.sql('duckdb')}")
        return dialects.inner(self.translate(tree))

    def need_exact(self, trees: Sequence[exp.Expr]) -> None:
        """Refuse decimals that the database has not: SQLite none, MySQL few digits.

        Raises:
            NotTranslatedError: names the first.
        """
        for tree in trees:
            digits = decimal_digits(self.type(tree))
            too_fine = (
                self.dialect == "mysql" and digits and digits[1] > MYSQL_MAX_SCALE
            )
            if too_fine or (digits and self.dialect == "sqlite"):
                raise NotTranslatedError(f"decimal: {tree.sql('duckdb')}")

    def _times(self, trees: Sequence[exp.Expr]) -> list[exp.Expr]:
        """Return dates or times, constants among them, of one type."""
        values = {self.family(t) for t in trees if not is_constant(t)} - {"null"}
        if len(values) != 1 or not values <= TIMES or self.dialect == "sqlite":
            raise NotTranslatedError(" and ".join(t.sql("duckdb") for t in trees))
        (family,) = values
        return [
            self.time_constant(tree, family)
            if is_constant(tree)
            else self.translate(tree)
            for tree in trees
        ]

    def time_constant(self, tree: exp.Expr, family: str) -> exp.Expr:
        """Return a constant as a date or time of a family, as DuckDB reads it."""
        if family not in _TIME_CONSTANTS.get(self.family(tree), ()):
            raise NotTranslatedError(tree.sql("duckdb"))
        cast = f"CAST({render(tree)} AS {_TIME_NAMES[family]})"
        try:
            found = self.connection.execute(
                f"SELECT CAST({cast} AS VARCHAR)"
            ).fetchall()
        except duckdb.Error:
            raise NotTranslatedError(tree.sql("duckdb")) from None
        plain = _PLAIN_TIME.fullmatch(str(found[0][0]))
        if plain is None:
            raise NotTranslatedError(f"far away: {tree.sql('duckdb')}")
        return dialects.time_literal(plain[1], family, self.dialect)


def is_constant(tree: exp.Expr) -> bool:
    """Return whether an expression is a text, or one that is cast."""
    if isinstance(tree, exp.Paren | exp.Cast) and not isinstance(tree, exp.TryCast):
        return is_constant(tree.this)
    return isinstance(tree, exp.Literal) and tree.is_string


Rule = Callable[[Translator, exp.Expr], exp.Expr]
