"""LATERAL sub-queries: values of one table's rows up to a cutoff in another's.

::

    LEFT JOIN LATERAL (SELECT AVG(p.x) AS mean FROM p
                       WHERE p.k = o.k AND p.t < o.day) w ON TRUE
    ASOF LEFT JOIN p ON p.k = o.k AND p.t <= o.day
    (SELECT AVG(p.x) FROM p WHERE p.k = o.k AND p.t < o.day) AS mean

The second and the third are written as the first (``write_as_lateral``), and the first
is parsed: what it compares with the rows around it are *keys*, by equality, and one
*cutoff*, which stands for that table's time in all other conditions. Without a cutoff
it is an ordinary sub-query, grouped by its keys.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query import expressions
from tp_flower.query.allowed import AGGREGATES
from tp_flower.query.cutoffs import CUTOFF, key_column

_LATERAL_CLAUSES: Final = {"expressions", "from_", "where", "having", "order", "limit"}
_LAST_ROW: Final = "ORDER BY ... DESC LIMIT 1 takes the last row"
_BEFORE: Final = (exp.LT, exp.LTE)
_AFTER: Final = (exp.GT, exp.GTE)


_TIMES: Final = (
    *(exp.Column, exp.Identifier, exp.Paren, exp.Literal, exp.Var, exp.Interval),
    exp.TimeToUnix,
)
_LATER_TIMES: Final = frozenset((*_TIMES, exp.Add))
"""What makes of a column its own time or a later one: nothing is taken off or away."""
_EARLIER_TIMES: Final = frozenset(
    (*_TIMES, exp.Sub, exp.DateTrunc, exp.TimestampTrunc, exp.Cast, exp.DataType)
)
"""What makes of a column its own time or an earlier one."""


@dataclass(frozen=True)
class Correlation:
    """What a LATERAL sub-query compares with the rows of the table around it.

    Attributes:
        table: the alias of that table.
        keys: pairs of equal expressions, of the sub-query's table and of that one.
        cutoff: the column of that table for which conditions have ``(cutoff)``.
        last: ORDER BY ... DESC LIMIT 1.
        looks_back: whether some condition keeps only rows before the cutoff.
    """

    table: str
    keys: tuple[tuple[str, str], ...]
    cutoff: str
    last: tuple[str, ...] = ()
    looks_back: bool = True

    def describe(self, alias: str) -> str:
        """Return what is compared, in the words of the query."""
        keys = "".join(f", {inner} = {outer}" for inner, outer in self.keys)
        return f"{alias} looks back from {self.cutoff}{keys}"

    def equalities(self, alias: str) -> tuple[str, ...]:
        """Return the conditions that join the sub-query's pairs with the table."""
        names = [key_column(number) for number in range(len(self.keys))]
        pairs = [*zip(names, (outer for _, outer in self.keys), strict=True)]
        return tuple(
            expressions.render(
                exp.EQ(
                    this=exp.column(name, alias, quoted=True),
                    expression=operand(expressions.parse_expression(outer, "key")),
                )
            )
            for name, outer in (*pairs, (CUTOFF, self.cutoff))
        )


def write_as_lateral(select: exp.Select) -> None:
    """Write ASOF joins and correlated values of the SELECT list as LATERAL, in place.

    A LATERAL sub-query without a cutoff becomes one with GROUP BY.
    """
    for join in select.args.get("joins") or ():
        if join.method == "ASOF":
            _write_asof(join)
    _join_values(select)
    for join in select.args.get("joins") or ():
        if isinstance(join.this, exp.Lateral):
            _group_without_cutoff(join)


def operand(value: exp.Expr) -> exp.Expr:
    """Return a copy of an expression that keeps its meaning beside an operator."""
    if isinstance(value, exp.Column | exp.Literal):
        return value.copy()
    return exp.paren(value)


def _write_asof(join: exp.Join) -> None:
    """Write ``ASOF JOIN p ON p.k = o.k AND p.t <= o.day`` as the last row of p."""
    table = join.this
    name = table.alias_or_name.lower()
    on = join.args.get("on")
    conditions = list(expressions.conjuncts(on)) if on else []
    times = [
        sides[0]
        for c in conditions
        if isinstance(c, exp.Binary) and (sides := _earlier_and_later(c, name))
    ]
    if len(times) != 1 or not isinstance(table, exp.Table):
        raise QueryError(
            f"ASOF JOIN of {name}: write ON {name}.k = a.k AND {name}.t <= a.t, the "
            "columns with their tables, and one condition that its time is not later"
        )
    rows = exp.select(exp.column(exp.Star(), name)).from_(table.copy())
    rows = rows.where(*conditions).order_by(
        exp.Ordered(this=times[0].copy(), desc=True)
    )
    join.set("this", _lateral(rows.limit(1), table.alias_or_name))
    join.set("method", None)
    join.set("on", exp.true())


def _lateral(query: exp.Select, alias: str) -> exp.Lateral:
    return exp.Lateral(
        this=query.subquery(copy=False),
        alias=exp.TableAlias(this=exp.to_identifier(alias)),
    )


def _join_values(select: exp.Select) -> None:
    """Join the sub-queries that are values in the SELECT list, equal ones once."""
    joined: dict[str, tuple[str, exp.Select]] = {}
    numbers = count(1)
    for item in select.expressions:
        for value in list(item.find_all(exp.Subquery)):
            query = value.this
            if not _is_correlated(query):
                continue
            if len(query.expressions) != 1:
                raise QueryError(
                    "a sub-query in the SELECT list is one SELECT of one value: "
                    f"{expressions.shorten(value.sql(expressions.DIALECT))}"
                )
            output = query.expressions[0].unalias().copy()
            rest = query.copy()
            rest.set("expressions", [])
            key = rest.sql(expressions.DIALECT)
            if key not in joined:
                alias = f"values_{next(numbers)}"
                joined[key] = alias, rest
                join = exp.Join(this=_lateral(rest, alias), side="LEFT", on=exp.true())
                select.append("joins", join)
            alias, rest = joined[key]
            name = f"value_{len(rest.expressions) + 1}"
            rest.append("expressions", exp.alias_(output, name))
            value.replace(exp.column(name, alias))


def _is_correlated(query: exp.Expr) -> bool:
    """Return whether a SELECT over one table names columns of others."""
    source = query.args.get("from_") if isinstance(query, exp.Select) else None
    if source is None or not isinstance(source.this, exp.Table):
        return False
    return bool(_outer_columns(query, source.this.alias_or_name.lower()))


def name_of_key(alias: str, number: int) -> str:
    """Return the output of a sub-query that compares keys alone, counted from 1."""
    return f"{alias}_key_{number}"


def _group_without_cutoff(join: exp.Join) -> None:
    """Write a LATERAL sub-query that compares keys alone as one with GROUP BY."""
    query = join.this.this.this
    alias = join.this.alias
    parts = _split(query, alias)
    if parts.timed or parts.order or not parts.keys or query.args.get("group"):
        return
    query.set("where", None)
    query.where(*parts.own, copy=False)
    on = []
    for number, (inner, outer) in enumerate(parts.keys, 1):
        name = name_of_key(alias, number)
        query.append("expressions", exp.alias_(inner.copy(), name))
        query.group_by(inner.copy(), copy=False)
        on.append(exp.EQ(this=exp.column(name, alias), expression=operand(outer)))
    join.set("this", query.subquery(alias, copy=False))
    join.set("on", exp.and_(*on, copy=False))
    if not query.args.get("having"):
        # an aggregate of no row is a row, too
        join.set("side", "LEFT")
    join.set("kind", None)


@dataclass(frozen=True)
class _Parts:
    """A LATERAL sub-query in parts.

    Attributes:
        name: of its table.
        keys: the sides of its equalities with the rows around it, its own first.
        own: conditions on its own table alone.
        timed: all other conditions, and what its SELECT list reads of other tables.
        cutoffs: the columns of other tables, outside of the keys.
    """

    name: str
    keys: Sequence[tuple[exp.Expr, exp.Expr]]
    own: Sequence[exp.Expr]
    timed: Sequence[exp.Expr]
    order: Sequence[exp.Expr]
    cutoffs: Sequence[exp.Column]


def _split(query: exp.Expr, alias: str) -> _Parts:
    """Return the parts of a LATERAL sub-query; a bare column is its own table's."""
    source = query.args.get("from_") if isinstance(query, exp.Select) else None
    if source is None or not isinstance(source.this, exp.Table):
        raise QueryError(
            f"LATERAL sub-query {alias!r} is one SELECT over one table: "
            f"{expressions.shorten(query.sql(expressions.DIALECT))}"
        )
    name = source.this.alias_or_name.lower()
    where = query.args.get("where")
    keys, local, timed = [], [], []
    for condition in list(expressions.conjuncts(where.this)) if where else ():
        pair = _key_pair(condition, name)
        if not _outer_columns(condition, name):
            local.append(condition)
        elif pair is None:
            timed.append(condition)
        else:
            keys.append(pair)
    order = query.args.get("order")
    ordered = order.expressions if order else []
    others = [*query.expressions, *ordered, query.args.get("having")]
    timed_values = [tree for tree in others if tree and _outer_columns(tree, name)]
    cutoffs = [
        c for tree in (*timed, *timed_values) for c in _outer_columns(tree, name)
    ]
    return _Parts(name, keys, local, (*timed, *timed_values), ordered, cutoffs)


def _outer_columns(tree: exp.Expr, name: str) -> list[exp.Column]:
    """Return the columns that are not those of the sub-query's own table."""
    return [c for c in tree.find_all(exp.Column) if c.table.lower() not in ("", name)]


def _key_pair(condition: exp.Expr, name: str) -> tuple[exp.Expr, exp.Expr] | None:
    """Return the sides of an equality between the own table and another's."""
    if not isinstance(condition, exp.EQ):
        return None
    for inner, outer in (
        (condition.left, condition.right),
        (condition.right, condition.left),
    ):
        columns = list(outer.find_all(exp.Column))
        is_own = inner.find(exp.Column) and not _outer_columns(inner, name)
        if is_own and columns and _outer_columns(outer, name) == columns:
            return inner, outer
    return None


def take_correlation(query: exp.Select, alias: str) -> Correlation:
    """Take what a LATERAL sub-query compares with the rows around it out of it.

    Its WHERE keeps the conditions on its own table, and those with the cutoff.
    """
    element = f"LATERAL sub-query {alias!r}"
    parts = _split(query, alias)
    for clause in sorted(expressions.clauses_of(query) - _LATERAL_CLAUSES):
        raise QueryError(
            f"{clause.strip('_').upper()} is not supported in {element}: it aggregates "
            f"the rows before a time, or {_LAST_ROW}"
        )
    outer_keys = [c for _, outer in parts.keys for c in outer.find_all(exp.Column)]
    tables = {c.table.lower(): c.table for c in (*outer_keys, *parts.cutoffs)}
    cutoffs = {c.name.lower(): c.copy() for c in parts.cutoffs}
    if len(cutoffs) != 1 or len(tables) != 1:
        raise QueryError(
            f"{element} compares {len(cutoffs)} columns of {len(tables)} tables with a "
            "time of its rows: besides equal keys it has conditions on one time of one "
            f"table, such as {parts.name}.t < a.t, written with the table's name"
        )
    _check_aggregates(query, parts.name, element)
    last = tuple(_last_row(query, parts.order, element))
    looks_back = any(_keeps_past(condition, parts.name) for condition in parts.timed)
    for column in parts.cutoffs:
        column.replace(exp.column(CUTOFF, quoted=True))
    conditions = [c for c in parts.timed if c.find_ancestor(exp.Where)]
    for clause in ("where", "order", "limit"):
        query.set(clause, None)
    query.where(*parts.own, *conditions, copy=False)
    return Correlation(
        next(iter(tables.values())),
        tuple(
            (_text(inner, element, is_own=True), _text(outer, element))
            for inner, outer in parts.keys
        ),
        _text(next(iter(cutoffs.values())), element),
        last,
        looks_back,
    )


def _check_aggregates(query: exp.Select, name: str, element: str) -> None:
    """Refuse aggregates of the other table alone, which engines take for its own."""
    for item in query.expressions:
        for node in item.find_all(*AGGREGATES):
            columns = list(node.find_all(exp.Column))
            if columns and columns == _outer_columns(node, name):
                value = node.this.sql(expressions.DIALECT)
                raise QueryError(
                    f"{element}: {node.sql(expressions.DIALECT)} is of no column of "
                    f"{name}: write {value} in the SELECT list of the query, or an "
                    "aggregate of rows, such as COUNT(*)"
                )


def _text(tree: exp.Expr, element: str, *, is_own: bool = False) -> str:
    """Return a checked expression, without its table's name if it is the own one."""
    tree = tree.copy()
    for column in tree.find_all(exp.Column) if is_own else ():
        column.set("table", None)
    expressions.check_expression(tree, element, aggregates=False)
    return expressions.canonical_text(expressions.render(tree), element)


def _last_row(
    query: exp.Expr, order: Sequence[exp.Expr], element: str
) -> Iterator[str]:
    """Yield the expressions of ORDER BY ... DESC LIMIT 1; none without it."""
    limit = query.args.get("limit")
    if not order and limit is None:
        return
    is_one = limit is not None and limit.expression.sql() == "1"
    if not is_one or not order or not all(item.args.get("desc") for item in order):
        raise QueryError(f"{element}: {_LAST_ROW}; MIN(t) is the first time")
    if any(item.args.get("nulls_first") for item in order):
        raise QueryError(
            f"{element}: {_LAST_ROW}; NULLS FIRST takes a row without a time"
        )
    for item in order:
        yield _text(item.this, element)


def _earlier_and_later(
    condition: exp.Expr, name: str
) -> tuple[exp.Expr, exp.Expr] | None:
    """Return the sides of a condition that an own value is less than one around it."""
    if isinstance(condition, exp.Between):
        earlier, later = condition.this, condition.args["high"]
    elif isinstance(condition, (*_BEFORE, *_AFTER)):
        sides = (condition.left, condition.right)
        earlier, later = sides if isinstance(condition, _BEFORE) else sides[::-1]
    else:
        return None
    if not _outer_columns(later, name) or _outer_columns(earlier, name):
        return None
    return earlier, later


def _keeps_past(condition: exp.Expr, name: str) -> bool:
    """Return whether a condition keeps no row later than the cutoff, by its form."""
    sides = _earlier_and_later(condition, name)
    return (
        sides is not None
        and _is_made_of(sides[0], _LATER_TIMES)
        and _is_made_of(sides[1], _EARLIER_TIMES)
    )


def _is_made_of(tree: exp.Expr, nodes: Collection[type[exp.Expr]]) -> bool:
    """Return whether an expression has these nodes alone, and no negative number."""
    return all(
        type(node) in nodes and not (type(node) is exp.Literal and "-" in node.name)
        for node in tree.walk()
    )
