"""The columns of a table that each piece of a fragment reads, and their role.

A site's policy is about the columns of its table; the pieces outside a sub-query name
the sub-query's columns, and are followed to what these are made of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlglot import exp

from tp_flower.query.expressions import parse_aggregate, parse_expression
from tp_flower.query.fragment import Fragment, Parser, SubQuery


class Role(StrEnum):
    """The purpose for which a column is read."""

    FEATURE = "feature"
    LABEL = "label"
    WEIGHT = "weight"
    FILTER = "filter"
    KEY = "join key"
    GROUP = "group"
    INNER = "sub-query column"


@dataclass(frozen=True)
class Read:
    """One column that a piece reads.

    Attributes:
        role: its purpose. A column of a sub-query is read as ``INNER``, and again by
            each piece outside that uses it.
        what: the piece, for messages.
        column: of the base table, as the piece spells it.
        is_plain: whether the piece is the column itself, but for its type and, of a
            text, its case and the spaces around it: no condition on its values.
        is_bare: whether it is plain and keeps the type: it fails on no value.
    """

    role: Role
    what: str
    column: str
    is_plain: bool
    is_bare: bool


def reads(fragment: Fragment) -> Iterator[Read]:
    """Yield every read of a column by a fragment, which may not be checked yet.

    A name outside a sub-query that is none of its columns yields nothing:
    :meth:`Fragment.check` refuses it.
    """
    inner: Mapping[str, list[Read]] | None = None
    if fragment.subquery is not None:
        yield from _inner_reads(fragment.subquery)
        inner = {
            name.lower(): list(_piece(Role.INNER, what, sql, parse_aggregate))
            for name, what, sql in _columns(fragment.subquery)
        }
    for role, what, sql in _outer_pieces(fragment):
        for read in _piece(role, what, sql, parse_expression):
            if inner is None:
                yield read
                continue
            for origin in inner.get(read.column.lower(), ()):
                is_plain = read.is_plain and origin.is_plain
                is_bare = read.is_bare and origin.is_bare
                yield Read(role, what, origin.column, is_plain, is_bare)


def _outer_pieces(fragment: Fragment) -> Iterator[tuple[Role, str, str]]:
    for feature in fragment.features:
        yield Role.FEATURE, f"feature {feature.name!r}", feature.sql
    if fragment.label is not None:
        yield Role.LABEL, "the label", fragment.label
    if fragment.weight is not None:
        yield Role.WEIGHT, "the weight", fragment.weight
    for number, sql in enumerate(fragment.filters):
        yield Role.FILTER, f"filter {number}", sql
    for number, parts in enumerate(fragment.keys):
        for sql in parts:
            yield Role.KEY, f"join key {number}", sql


def _inner_reads(subquery: SubQuery) -> Iterator[Read]:
    for number, sql in enumerate(subquery.filters):
        what = f"filter {number} of the sub-query"
        yield from _piece(Role.FILTER, what, sql, parse_expression)
    for number, sql in enumerate(subquery.having):
        what = f"HAVING condition {number} of the sub-query"
        yield from _piece(Role.FILTER, what, sql, parse_aggregate)
    for number, sql in enumerate(subquery.groups):
        what = f"group {number} of the sub-query"
        yield from _piece(Role.GROUP, what, sql, parse_expression)
    for _, what, sql in _columns(subquery):
        yield from _piece(Role.INNER, what, sql, parse_aggregate)


def _columns(subquery: SubQuery) -> Iterator[tuple[str, str, str]]:
    for column in subquery.columns:
        yield column.name, f"column {column.name!r} of the sub-query", column.sql


def _piece(role: Role, what: str, sql: str, parse: Parser) -> Iterator[Read]:
    tree = parse(sql, what)
    is_plain = _is_plain(tree)
    is_bare = is_plain and tree.find(exp.Cast) is None
    for name in dict.fromkeys(column.name for column in tree.find_all(exp.Column)):
        yield Read(role, what, name, is_plain, is_bare)


def _is_plain(tree: exp.Expr) -> bool:
    """Return whether an expression is a column, but for its type, case and spaces."""
    while not isinstance(tree, exp.Column):
        if type(tree) is exp.Cast:
            # a truth value would be a condition on the column
            is_kept = not tree.to.is_type(exp.DType.BOOLEAN)
        else:
            is_kept = type(tree) in (exp.Paren, exp.Lower, exp.Upper, exp.Trim)
            is_kept = is_kept and {k for k, v in tree.args.items() if v} == {"this"}
        if not is_kept:
            return False
        tree = tree.this
    return True
