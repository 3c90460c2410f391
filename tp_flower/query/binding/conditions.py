"""The conditions of ON, USING and WHERE: filters of one table, or equalities of two."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.binding.scope import Local, Scope
from tp_flower.query.expressions import as_filter, parse_expression
from tp_flower.query.pieces import local_sql
from tp_flower.query.statement import JoinClause, Statement


@dataclass(frozen=True)
class Filter:
    """A condition over one table.

    Attributes:
        local: The table and the condition.
        text: As written, for messages.
        owner: The alias whose LEFT JOIN it is a condition of; None elsewhere.
    """

    local: Local
    text: str = field(compare=False)
    owner: str | None = None

    @property
    def sides(self) -> tuple[Local, ...]:
        """The expressions it consists of."""
        return (self.local,)


@dataclass(frozen=True)
class Predicate:
    """An equality between expressions of two tables.

    Attributes:
        left: Of the table that comes first in the query.
        right: Of the other table.
        text: As written, for messages.
        owner: The alias whose LEFT JOIN it is a condition of; None elsewhere.
    """

    left: Local
    right: Local
    text: str = field(compare=False)
    owner: str | None = None

    @property
    def sides(self) -> tuple[Local, ...]:
        """The expressions that are compared."""
        return self.left, self.right


def bind_conditions(
    statement: Statement, scope: Scope
) -> tuple[list[Filter | Predicate], Scope]:
    """Return all conditions, and the scope that the SELECT list and WHERE see.

    ON sees the tables joined so far. USING takes its column from the left side, as
    DuckDB does, and from then on the bare name means that column.

    Raises:
        QueryError: A column is unknown or ambiguous, or a condition is neither a
            filter of one table nor an equality between two.
    """
    bound: list[Filter | Predicate] = []
    merged: dict[str, str] = {}
    order = list(scope.columns)
    for number, join in enumerate(statement.joins, 1):
        visible = {alias: scope.columns[alias] for alias in order[: number + 1]}
        local = Scope(visible, merged, scope.aliases)
        owner = join.alias if join.is_left else None
        for name in join.using:
            predicate = _bind_using(join, name, local)
            merged = {**merged, name.lower(): predicate.left.table}
            bound.append(_facing(predicate, order))
        bound += [_bind(text, local, owner, order) for text in join.on]
    whole = Scope(scope.columns, merged, scope.aliases)
    bound += [_bind(text, whole, None, order) for text in statement.where]
    return bound, whole


def _bind_using(join: JoinClause, name: str, scope: Scope) -> Predicate:
    """Return the predicate of one USING column."""
    what = f"join of {join.alias} USING ({name})"
    before = {a: names for a, names in scope.columns.items() if a != join.alias}
    column = exp.column(exp.to_identifier(name, quoted=True))
    left = Scope(before, scope.merged, scope.aliases).table_of(column, what)
    own = exp.column(column.this.copy(), table=exp.to_identifier(join.alias, True))
    right = scope.table_of(own, what)
    return Predicate(
        Local(left, local_sql(column, scope.columns[left], what)),
        Local(right, local_sql(column, scope.columns[right], what)),
        f"{left}.{name} = {right}.{name}",
        join.alias if join.is_left else None,
    )


def _bind(
    text: str, scope: Scope, owner: str | None, order: Sequence[str]
) -> Predicate | Filter:
    """Return a condition as a filter of one table or a join predicate of two."""
    what = f"condition {text}"
    tree = parse_expression(text, what)
    tables = scope.tables(tree, what)
    if not tables:
        raise QueryError(
            f"{what} names no column: a filter needs one, and a join an equality "
            "between columns of two tables"
        )
    if len(tables) == 1:
        return Filter(scope.local(as_filter(tree), what), text, owner)
    if isinstance(tree, exp.EQ):
        sides = scope.tables(tree.left, what), scope.tables(tree.right, what)
        if len(sides[0]) == len(sides[1]) == 1:
            left, right = scope.local(tree.left, what), scope.local(tree.right, what)
            return _facing(Predicate(left, right, text, owner), order)
    raise QueryError(
        f"{what} needs the values of {len(tables)} tables ({', '.join(tables)}): "
        "only an equality between expressions of two tables can join them"
    )


def _facing(predicate: Predicate, order: Sequence[str]) -> Predicate:
    """Return the predicate with the table that comes first on the left."""
    left, right = predicate.sides
    if order.index(left.table) <= order.index(right.table):
        return predicate
    return Predicate(right, left, predicate.text, predicate.owner)
