"""A query bound to the tables' columns: one fragment per table, and the joins.

Every column is resolved to one table, as DuckDB would; then what concerns one
table is pushed down to it, equalities between two tables become joins, and what
would need two tables' values at once is refused by name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.expressions import as_filter, closest, parse_expression, render
from tp_flower.fragment import Fragment
from tp_flower.pieces import Feature, local_sql, spell
from tp_flower.scope import Local, Scope
from tp_flower.statement import (
    JoinClause,
    SelectItem,
    Statement,
    TableRef,
    is_label,
    item_name,
)

Schema = Mapping[str, str]


@dataclass(frozen=True)
class Join:
    """An equi-join of two tables: equal values of one key on each side.

    Attributes:
        left: Alias of the table that comes first in the query.
        right: Alias of the other table.
        left_key: Index into the left fragment's ``keys``.
        right_key: Index into the right fragment's ``keys``; same number of parts.
        text: The predicate as written, for messages.
    """

    left: str
    right: str
    left_key: int
    right_key: int
    text: str = ""


@dataclass(frozen=True)
class BoundQuery:
    """All that training needs to know of a query.

    Attributes:
        fragments: One per table, in FROM order.
        joins: One per pair of tables with predicates, ordered by the right table,
            then the left, in FROM order; together they connect all tables.
        label_table: Alias of the table that holds the label.
    """

    fragments: tuple[Fragment, ...]
    joins: tuple[Join, ...]
    label_table: str

    @property
    def tables(self) -> tuple[str, ...]:
        """The aliases of the tables, in FROM order."""
        return tuple(fragment.table for fragment in self.fragments)

    def fragment(self, table: str) -> Fragment:
        """Return the fragment of a table.

        Raises:
            KeyError: The query has no table of this alias.
        """
        for fragment in self.fragments:
            if fragment.table == table:
                return fragment
        raise KeyError(table)


@dataclass(frozen=True)
class _Predicate:
    """An equality between expressions of two tables."""

    left: Local
    right: Local
    text: str = field(compare=False)

    def facing(self, order: Sequence[str]) -> "_Predicate":
        """Return the predicate with the table that comes first on the left."""
        if order.index(self.left.table) <= order.index(self.right.table):
            return self
        return _Predicate(self.right, self.left, self.text)


def bind_statement(statement: Statement, schemas: Mapping[str, Schema]) -> BoundQuery:
    """Return the fragments and joins of a query over tables with these columns.

    Args:
        statement: The query.
        schemas: Table name -> column -> DuckDB type.

    Raises:
        QueryError: A table or column is unknown or ambiguous, an expression needs
            two tables at once, or a table is not joined with the others.
    """
    names = [_hosted(table, schemas) for table in statement.tables]
    scope = Scope(
        columns={
            table.alias: tuple(schemas[name])
            for table, name in zip(statement.tables, names, strict=True)
        },
        aliases=tuple(item.name for item in statement.items if item.name),
    )
    predicates, filters, scope = _bind_conditions(statement, scope)
    order = [table.alias for table in statement.tables]
    predicates = list(dict.fromkeys(p.facing(order) for p in predicates))
    _check_joined(statement, predicates)
    joins, keys = _make_joins(predicates, order)
    label, features = _bind_items(statement.items, scope)
    fragments = tuple(
        Fragment(
            table=alias,
            name=name,
            features=tuple(features.get(alias, ())),
            keys=tuple(keys.get(alias, ())),
            label=label.sql if label.table == alias else None,
            filters=tuple(dict.fromkeys(f.sql for f in filters if f.table == alias)),
        )
        for alias, name in zip(order, names, strict=True)
    )
    return BoundQuery(fragments, joins, label.table)


def _hosted(table: TableRef, schemas: Mapping[str, Schema]) -> str:
    """Return the name under which the sites host a table."""
    name = spell(table.name, tuple(schemas))
    if name is None:
        raise QueryError(
            f"no site hosts a table {table.name!r}{closest(table.name, tuple(schemas))}"
            f"; hosted tables: {', '.join(schemas) or 'none'}"
        )
    return name


def _bind_conditions(
    statement: Statement, scope: Scope
) -> tuple[list[_Predicate], list[Local], Scope]:
    """Sort ON, USING and WHERE into predicates and filters.

    Returns:
        The predicates, the filters, and the scope of WHERE and SELECT, in which
        the columns of USING are merged.
    """
    predicates: list[_Predicate] = []
    filters: list[Local] = []
    merged: dict[str, str] = {}
    order = list(scope.columns)
    for position, join in enumerate(statement.joins, start=1):
        # ON sees the tables up to its own, as in SQL; later ones do not exist yet.
        visible = {alias: scope.columns[alias] for alias in order[: position + 1]}
        here = Scope(visible, dict(merged), scope.aliases)
        using = [_bind_using(join, name, here) for name in join.using]
        for name, predicate in zip(join.using, using, strict=True):
            merged.setdefault(name.lower(), predicate.left.table)
        predicates += using
        for text in join.on:
            _add(_bind_condition(text, here), predicates, filters)
    whole = Scope(scope.columns, merged, scope.aliases)
    for text in statement.where:
        _add(_bind_condition(text, whole), predicates, filters)
    return predicates, filters, whole


def _add(
    bound: _Predicate | Local, predicates: list[_Predicate], filters: list[Local]
) -> None:
    """Put a condition on the list of its kind."""
    if isinstance(bound, _Predicate):
        predicates.append(bound)
    else:
        filters.append(bound)


def _bind_using(join: JoinClause, name: str, scope: Scope) -> _Predicate:
    """Return the predicate of one USING column."""
    what = f"join of {join.alias} USING ({name})"
    before = {a: names for a, names in scope.columns.items() if a != join.alias}
    column = exp.column(exp.to_identifier(name, quoted=True))
    left = Scope(before, scope.merged, scope.aliases).table_of(column, what)
    own = exp.column(column.this.copy(), table=exp.to_identifier(join.alias, True))
    right = scope.table_of(own, what)
    return _Predicate(
        Local(left, local_sql(column, scope.columns[left], what)),
        Local(right, local_sql(column, scope.columns[right], what)),
        f"{left}.{name} = {right}.{name}",
    )


def _bind_condition(text: str, scope: Scope) -> _Predicate | Local:
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
        return scope.local(as_filter(tree), what)
    if isinstance(tree, exp.EQ):
        sides = scope.tables(tree.left, what), scope.tables(tree.right, what)
        if len(sides[0]) == len(sides[1]) == 1:
            left = scope.local(tree.left, what)
            return _Predicate(left, scope.local(tree.right, what), text)
    raise QueryError(
        f"{what} needs the values of {len(tables)} tables ({', '.join(tables)}): "
        "only an equality between expressions of two tables can join them"
    )


def _check_joined(statement: Statement, predicates: Sequence[_Predicate]) -> None:
    """Refuse a table that no chain of predicates connects to the first one."""
    joined = {statement.tables[0].alias}
    edges = {(p.left.table, p.right.table) for p in predicates}
    for _ in statement.tables:
        joined |= {b for a, b in edges if a in joined}
        joined |= {a for a, b in edges if b in joined}
    for join in statement.joins:
        alone = not any(join.alias in edge for edge in edges)
        if join.on and alone:
            raise QueryError(
                f"join of {join.alias} has no equality condition: "
                f"ON {' AND '.join(join.on)} compares it with no other table"
            )
        if join.alias not in joined:
            raise QueryError(
                f"table {join.alias!r} is not connected to {sorted(joined)}: "
                "add an equality condition between them"
            )


def _make_joins(
    predicates: Sequence[_Predicate], order: Sequence[str]
) -> tuple[tuple[Join, ...], dict[str, list[tuple[str, ...]]]]:
    """Return one join per pair of tables, and the keys that they use per table."""
    pairs: dict[tuple[str, str], list[_Predicate]] = {}
    for predicate in predicates:
        pair = predicate.left.table, predicate.right.table
        pairs.setdefault(pair, []).append(predicate)
    joins: list[Join] = []
    keys: dict[str, list[tuple[str, ...]]] = {}
    for left, right in sorted(
        pairs, key=lambda p: (order.index(p[1]), order.index(p[0]))
    ):
        # Sorted, so that the order of the conditions does not matter and the same
        # composite key towards two tables is one key.
        parts = sorted(pairs[left, right], key=lambda p: (p.left.sql, p.right.sql))
        text = " AND ".join(p.text for p in pairs[left, right])
        left_key = _index(keys.setdefault(left, []), tuple(p.left.sql for p in parts))
        right_key = _index(
            keys.setdefault(right, []), tuple(p.right.sql for p in parts)
        )
        joins.append(Join(left, right, left_key, right_key, text))
    return tuple(joins), keys


def _index(keys: list[tuple[str, ...]], key: tuple[str, ...]) -> int:
    """Return the place of ``key`` in ``keys``, where it is put if it is new."""
    if key not in keys:
        keys.append(key)
    return keys.index(key)


def _bind_items(
    items: Sequence[SelectItem], scope: Scope
) -> tuple[Local, dict[str, list[Feature]]]:
    """Return the label, and the features of each table."""
    bound = {item: _bind_item(item, scope) for item in items}
    label = next(bound[item] for item in items if is_label(item))
    chosen = [item for item in items if not is_label(item)]
    names = _feature_names(chosen, [bound[item] for item in chosen], scope)
    features: dict[str, list[Feature]] = {}
    for item, name in zip(chosen, names, strict=True):
        local = bound[item]
        if local == label:
            raise QueryError(
                f"feature {name!r} is the label itself ({item.sql}): the label leaks"
            )
        features.setdefault(local.table, []).append(Feature(name, local.sql))
    return label, features


def _bind_item(item: SelectItem, scope: Scope) -> Local:
    """Return the expression of a SELECT item over its one table."""
    what = f"the label {item.sql}" if is_label(item) else f"feature {item.sql}"
    tree = parse_expression(item.sql, what).unnest()
    tables = scope.tables(tree, what)
    if not tables:
        raise QueryError(f"{what} names no column: it is the same in every row")
    if len(tables) > 1:
        raise QueryError(
            f"{what} needs the values of {len(tables)} tables ({', '.join(tables)}): "
            "an expression must be over one table"
        )
    return scope.local(tree, what)


def _feature_names(
    items: Sequence[SelectItem], bound: Sequence[Local], scope: Scope
) -> list[str]:
    """Return a name per feature; names that clash get their table's alias."""
    names = [
        _own_name(item, local, scope) for item, local in zip(items, bound, strict=True)
    ]
    counts = Counter(name.lower() for name in names)
    names = [
        name if counts[name.lower()] == 1 else f"{local.table}.{name}"
        for name, local in zip(names, bound, strict=True)
    ]
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise QueryError(
                f"{count} features are called {name!r}: give each its own AS name"
            )
    return names


def _own_name(item: SelectItem, local: Local, scope: Scope) -> str:
    """Return the alias of a feature, else its column's name, else its SQL."""
    name = item_name(item)
    if name is None:
        tree = parse_expression(item.sql, "feature")
        for column in tree.find_all(exp.Column):
            column.set("table", None)
        return render(tree)
    if item.name is None:
        return spell(name, scope.columns[local.table]) or name
    return name
