"""LEFT JOIN in the form that training needs: filters, keys, and tables without match.

After :func:`settle` a LEFT JOIN is nothing but an equality of keys that may fail: a row
without a match has no row of the missing table, which then adds nothing to its score.
What the SQL says beyond that is brought into that form, as any engine would plan it:

- a condition of ON over the joined table alone is a filter of that table;
- a condition of ON over a table on the left makes that table's key NULL where it does
  not hold, and NULL has no match;
- a condition of WHERE that is never true of a missing row makes the join INNER, and so
  does an equality with it in another join.

An expression over the missing table, say ``COALESCE(p.n, 0)``, is evaluated at the
table's sites, on rows that exist: where there is no match it is not 0, it is not there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tp_flower.errors import QueryError
from tp_flower.query.binding.conditions import Filter, Predicate
from tp_flower.query.binding.nulls import is_null_on_nulls, is_true_on_nulls
from tp_flower.query.binding.relations import Relation
from tp_flower.query.binding.scope import Local
from tp_flower.query.expressions import parse_expression, render

Condition = Filter | Predicate


@dataclass(frozen=True)
class Settled:
    """The conditions of a query in which every LEFT JOIN is an equality of keys.

    Attributes:
        predicates: The equalities of all joins; owned by a table in ``outer`` if they
            decide whether it has a match.
        filters: The conditions that a table's rows must meet.
        outer: The tables that stay LEFT JOINed.
    """

    predicates: tuple[Predicate, ...]
    filters: tuple[Local, ...]
    outer: frozenset[str]


def settle(
    conditions: Sequence[Condition],
    left_joined: Collection[str],
    relations: Mapping[str, Relation],
) -> Settled:
    """Return filters, equalities and the tables that stay LEFT JOINed.

    Args:
        conditions: All conditions of the query.
        left_joined: The aliases that LEFT JOIN attaches.
        relations: What each alias stands for.

    Raises:
        QueryError: A condition cannot be brought into that form; the message names it.
    """
    outer = _still_outer(conditions, frozenset(left_joined), relations)
    # an owner whose table always has a match owns nothing any more
    settled = [c if c.owner in outer else replace(c, owner=None) for c in conditions]
    for condition in settled:
        _check(condition, outer, relations)
    filters = [c for c in settled if isinstance(c, Filter)]
    own = [c.local for c in filters if c.owner in (None, c.local.table)]
    guards = [c for c in filters if c.owner not in (None, c.local.table)]
    predicates = [c for c in settled if isinstance(c, Predicate)]
    guarded = _with_guards(predicates, guards)
    return Settled(tuple(dict.fromkeys(guarded)), tuple(own), outer)


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
    """Return whether a condition never holds where the side's table has no match."""
    types = relations[side.table].types
    if isinstance(condition, Filter):
        return not is_true_on_nulls(side.sql, types)
    return is_null_on_nulls(side.sql, types)


def _check(
    condition: Condition, outer: frozenset[str], relations: Mapping[str, Relation]
) -> None:
    """Refuse a condition that a missing row may meet."""
    owner, tables = condition.owner, [side.table for side in condition.sides]
    if isinstance(condition, Predicate) and owner and owner not in tables:
        raise QueryError(
            f"condition {condition.text} in the LEFT JOIN of {owner} compares "
            f"{' and '.join(tables)}: only an equality with {owner} can decide what "
            "it matches"
        )
    for side in condition.sides:
        if side.table not in outer or side.table == owner:
            continue
        if isinstance(condition, Predicate):
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


def _with_guards(
    predicates: Sequence[Predicate], guards: Sequence[Filter]
) -> list[Predicate]:
    """Return the predicates, of which some compare NULL where a guard fails.

    Args:
        predicates: The equalities of all joins.
        guards: Conditions of a LEFT JOIN over a table on its left.

    Raises:
        QueryError: The LEFT JOIN does not compare a guard's table.
    """
    chosen: dict[Predicate, set[str]] = {}
    for guard in guards:
        table, owner = guard.local.table, guard.owner
        compared = [p for p in predicates if (p.owner, p.left.table) == (owner, table)]
        if not compared:
            raise QueryError(
                f"condition {guard.text} in the LEFT JOIN of {owner} is over {table}, "
                f"which that join does not compare with {owner}: add an equality "
                "between them, or put the condition into WHERE"
            )
        # one part of a key that is NULL is enough, whatever the order they came in
        first = min(compared, key=lambda p: (p.left.sql, p.right.sql))
        chosen.setdefault(first, set()).add(guard.local.sql)
    return [_guarded(p, sorted(chosen.get(p, ()))) for p in predicates]


def _guarded(predicate: Predicate, conditions: Sequence[str]) -> Predicate:
    """Return the predicate with a left key that is NULL unless the conditions hold."""
    if not conditions:
        return predicate
    left = predicate.left
    key = f"CASE WHEN {' AND '.join(conditions)} THEN {left.sql} END"
    tree = parse_expression(key, f"condition {predicate.text}")
    return replace(predicate, left=Local(left.table, render(tree, quote=True)))
