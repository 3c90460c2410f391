"""The conditions of ON, USING and WHERE: filters of one table, or equalities of two.

After :func:`settle` a LEFT JOIN is nothing but an equality of keys that may fail: a row
without a match has no row of the missing table, which then adds nothing to its score.
Everything else in the SQL is brought into that form, as any engine would plan it:

- a condition of ON over the joined table alone is a filter of that table;
- a condition of ON over a table on the left makes that table's key NULL unless it
  holds, and NULL has no match;
- a condition of WHERE that is never true for a missing row makes the join INNER, and so
  does an equality with it in another join.

An expression over the missing table, say ``COALESCE(p.n, 0)``, is evaluated at the
table's sites, on rows that exist: without a match it is not 0, it is absent.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.expressions import parenthesise, parse_expression, render
from tp_flower.query.fragment import local_sql, spell
from tp_flower.query.parsing import JoinClause, Statement
from tp_flower.query.relations import (
    Relation,
    is_null_on_nulls,
    is_true_on_nulls,
    type_on_nulls,
)
from tp_flower.query.scope import Local, Scope


@dataclass(frozen=True)
class Condition:
    """A filter of one table, or an equality between expressions of two.

    ``sides`` has the filter, or the two expressions, first that of the table which
    comes first in the query. ``owner`` is the alias whose LEFT JOIN has the condition.
    """

    sides: tuple[Local, ...]
    text: str = field(compare=False)
    owner: str | None = None

    @property
    def is_filter(self) -> bool:
        """Whether it is over a single table."""
        return len(self.sides) == 1

    @property
    def left(self) -> Local:
        """The filter, or the left side of the equality."""
        return self.sides[0]

    @property
    def right(self) -> Local:
        """The right side of the equality."""
        return self.sides[1]


def bind_conditions(
    statement: Statement, scope: Scope
) -> tuple[list[Condition], Scope]:
    """Return all conditions, and the scope for the SELECT list and WHERE.

    ON sees the tables joined so far. USING takes its column from the left side, as
    DuckDB does, and from then on the bare name means that column. NATURAL is USING with
    the columns of both sides.
    """
    bound: list[Condition] = []
    merged: dict[str, str] = {}
    order = list(scope.columns)
    for number, join in enumerate(statement.joins, 1):
        visible = {alias: scope.columns[alias] for alias in order[: number + 1]}
        local = replace(scope, columns=visible, merged=merged)
        owner = join.alias if join.is_left else None
        for name in _shared_columns(join, local) if join.is_natural else join.using:
            equality = _bind_using(join, name, local)
            merged = {**merged, name.lower(): equality.left.table}
            bound.append(equality)
        bound += [_bind(text, local, owner) for text in join.on]
    full_scope = replace(scope, merged=merged)
    bound += [_bind(text, full_scope, None) for text in statement.where]
    return bound, full_scope


def _shared_columns(join: JoinClause, scope: Scope) -> list[str]:
    """Return the columns that a NATURAL join compares."""
    left = [
        name for a, names in scope.columns.items() if a != join.alias for name in names
    ]
    shared = [name for name in scope.columns[join.alias] if spell(name, left)]
    if not shared:
        raise QueryError(
            f"NATURAL join of {join.alias}: no column is of both sides; write ON"
        )
    return shared


def _bind_using(join: JoinClause, name: str, scope: Scope) -> Condition:
    """Return the equality of one USING column; the joined table comes last."""
    element = f"join of {join.alias} USING ({name})"
    left_columns = {a: names for a, names in scope.columns.items() if a != join.alias}
    column = exp.column(exp.to_identifier(name, quoted=True))
    left = replace(scope, columns=left_columns).table_of(column, element)
    joined = exp.to_identifier(join.alias, quoted=True)
    right = scope.table_of(exp.column(column.this.copy(), table=joined), element)
    sides = (
        Local(left, local_sql(column, scope.columns[left], element)),
        Local(right, local_sql(column, scope.columns[right], element)),
    )
    owner = join.alias if join.is_left else None
    return Condition(sides, f"{left}.{name} = {right}.{name}", owner)


def _bind(text: str, scope: Scope, owner: str | None) -> Condition:
    """Return a filter of one table, or an equality between two."""
    element = f"condition {text}"
    tree = parse_expression(text, element)
    tables = scope.tables(tree, element)
    if not tables:
        raise QueryError(
            f"{element} names no column: a filter needs one, and a join an equality "
            "between columns of two tables"
        )
    if len(tables) == 1:
        return Condition((scope.local(parenthesise(tree), element),), text, owner)
    if isinstance(tree, exp.EQ):
        parts = (tree.left, tree.right)
        if all(len(scope.tables(part, element)) == 1 for part in parts):
            order = list(scope.columns).index
            sides = (scope.local(part, element) for part in parts)
            return Condition(
                tuple(sorted(sides, key=lambda side: order(side.table))), text, owner
            )
    raise QueryError(
        f"{element} needs the values of {len(tables)} tables ({', '.join(tables)}): "
        "only an equality between expressions of two tables can join them, such as "
        "date_trunc('day', a.t) = date_trunc('day', b.t); for OR join a table twice"
    )


@dataclass(frozen=True)
class Settled:
    """The conditions of a query; every LEFT JOIN (in ``outer``) is an equality."""

    predicates: tuple[Condition, ...]
    filters: tuple[Local, ...]
    outer: frozenset[str]


def settle(
    conditions: Sequence[Condition],
    left_joined: Collection[str],
    relations: Mapping[str, Relation],
) -> Settled:
    """Return filters, equalities and the tables that stay LEFT JOINed, or refuse."""
    outer = _still_outer(conditions, frozenset(left_joined), relations)
    # an owner whose table always has a match no longer owns anything
    settled = [c if c.owner in outer else replace(c, owner=None) for c in conditions]
    for condition in settled:
        _check(condition, outer, relations)
    filters = [c for c in settled if c.is_filter]
    local = [c.left for c in filters if c.owner in (None, c.left.table)]
    guards = [c for c in filters if c.owner not in (None, c.left.table)]
    predicates = [c for c in settled if not c.is_filter]
    return Settled(
        tuple(dict.fromkeys(_guard_keys(predicates, guards))), tuple(local), outer
    )


def cast_text_to_uuid(
    predicate: Condition, relations: Mapping[str, Relation]
) -> Condition:
    """Return an equality of a UUID and a text with the text cast to UUID.

    DuckDB does the same.

    A UUID has many spellings as a text, in upper case or in braces. A text that is none
    fails at its site.
    """
    if not any(_may_be_uuid(side, relations) for side in predicate.sides):
        return predicate
    types = [
        type_on_nulls(side.sql, relations[side.table].types) for side in predicate.sides
    ]
    if set(types) != {"UUID", "VARCHAR"}:
        return predicate
    sides = tuple(
        replace(side, sql=f"CAST({side.sql} AS UUID)") if kind == "VARCHAR" else side
        for side, kind in zip(predicate.sides, types, strict=True)
    )
    return replace(predicate, sides=sides)


def _may_be_uuid(side: Local, relations: Mapping[str, Relation]) -> bool:
    """Return whether an expression reads a UUID or makes one; few queries have any."""
    columns = parse_expression(side.sql, "join key").find_all(exp.Column)
    types = relations[side.table].types
    return "UUID" in side.sql.upper() or any(
        types[c.name].upper() == "UUID" for c in columns
    )


def _still_outer(
    conditions: Sequence[Condition],
    outer: frozenset[str],
    relations: Mapping[str, Relation],
) -> frozenset[str]:
    """Return the tables that no condition outside their own ON makes INNER."""
    while True:
        free = [c for c in conditions if c.owner not in outer]
        inner = {
            side.table
            for condition in free
            for side in condition.sides
            if side.table in outer and _rejects(condition, side, relations)
        }
        if not inner:
            return outer
        outer -= inner


def _rejects(
    condition: Condition, side: Local, relations: Mapping[str, Relation]
) -> bool:
    """Return whether a condition never holds if the side's table has no match."""
    types = relations[side.table].types
    if condition.is_filter:
        return not is_true_on_nulls(side.sql, types)
    return is_null_on_nulls(side.sql, types)


def _check(
    condition: Condition, outer: frozenset[str], relations: Mapping[str, Relation]
) -> None:
    """Refuse a condition that may hold for a missing row."""
    owner = condition.owner
    tables = [side.table for side in condition.sides]
    if not condition.is_filter and owner and owner not in tables:
        raise QueryError(
            f"condition {condition.text} in the LEFT JOIN of {owner} compares "
            f"{' and '.join(tables)}: only an equality with {owner} can decide what it "
            "matches"
        )
    for side in condition.sides:
        if side.table not in outer or side.table == owner:
            continue
        if not condition.is_filter:
            if not _rejects(condition, side, relations):
                raise QueryError(
                    f"condition {condition.text} has a value where {side.table} has no "
                    f"match, because {side.sql} is not NULL there: compare the columns "
                    f"themselves, or join {side.table} with JOIN"
                )
        elif owner is None:
            raise QueryError(
                f"condition {condition.text} also keeps rows without a match in "
                f"{side.table}, which are not at any site: put it into ON to filter "
                f"{side.table} before the join, or join {side.table} with JOIN"
            )


def _guard_keys(
    predicates: Sequence[Condition], guards: Sequence[Condition]
) -> list[Condition]:
    """Return the predicates, with keys that are NULL unless the guards in ON hold."""
    guards_of: dict[Condition, set[str]] = {}
    for guard in guards:
        table = guard.left.table
        owner = guard.owner
        compared = [p for p in predicates if (p.owner, p.left.table) == (owner, table)]
        if not compared:
            raise QueryError(
                f"condition {guard.text} in the LEFT JOIN of {owner} is over {table}, "
                f"which that join does not compare with {owner}: add an equality "
                "between them, or put the condition into WHERE"
            )
        # one NULL part of a key suffices, whatever the order of the parts
        first = min(compared, key=lambda p: (p.left.sql, p.right.sql))
        guards_of.setdefault(first, set()).add(guard.left.sql)
    return [_guard_key(p, sorted(guards_of.get(p, ()))) for p in predicates]


def _guard_key(predicate: Condition, conditions: Sequence[str]) -> Condition:
    """Return the predicate with a left key that is NULL unless the conditions hold."""
    if not conditions:
        return predicate
    left = predicate.left
    key = f"CASE WHEN {' AND '.join(conditions)} THEN {left.sql} END"
    tree = parse_expression(key, f"condition {predicate.text}")
    return replace(
        predicate, sides=(Local(left.table, render(tree, quote=True)), predicate.right)
    )
