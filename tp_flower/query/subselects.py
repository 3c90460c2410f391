"""A sub-query in FROM: one SELECT over one table, or several put together by UNION ALL.

What would need rows of two tables, of several sites at once, or an order of rows is
refused by name.
"""

from collections.abc import Iterator

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.aggregates import ALLOWED_NODES
from tp_flower.query.expressions import DIALECT, shorten
from tp_flower.query.select_parts import (
    canonical,
    check_clauses,
    parse_conditions,
    parse_items,
    parse_ref,
)
from tp_flower.query.statement import Branch, DerivedTable

_CLAUSES = {"expressions", "from_", "where", "group", "having", "distinct"}
_NO_ORDER = "rows of a table that several sites hold have no order"
_ADVICE = {
    "joins": "it reads one table; join in the query itself",
    "order": _NO_ORDER,
    "limit": _NO_ORDER,
    "offset": _NO_ORDER,
    "with_": "write the sub-query in its place",
}


def parse_derived(source: exp.Subquery) -> DerivedTable:
    """Return a sub-query of FROM.

    Raises:
        QueryError: It has no alias, or holds anything but SELECTs over one table each.
    """
    shown = shorten(source.sql(DIALECT))
    if not source.alias:
        raise QueryError(f"give the sub-query an alias, (...) AS t: {shown}")
    odd = {key for key, value in source.args.items() if value} - {"this", "alias"}
    if odd or source.args["alias"].args.get("columns"):
        raise QueryError(f"only an alias is supported after a sub-query: {shown}")
    what = f"sub-query {source.alias!r}"
    branches = tuple(_parse_branch(tree, what) for tree in _selects(source.this, what))
    return DerivedTable(source.alias, branches)


def _selects(tree: exp.Expr, what: str) -> Iterator[exp.Select]:
    """Yield the SELECTs that UNION ALL puts together, from left to right."""
    waiting = [tree]
    while waiting:
        tree = waiting.pop()
        if isinstance(tree, exp.Select):
            yield tree
        elif isinstance(tree, exp.SetOperation):
            _check_union(tree, what)
            waiting += [tree.expression, tree.this]
        elif isinstance(tree, exp.Subquery) and _given(tree) == {"this"}:
            waiting.append(tree.this)
        else:
            raise QueryError(
                f"{what} is not a SELECT over one table: {shorten(tree.sql(DIALECT))}"
            )


def _given(tree: exp.Expr) -> set[str]:
    return {key for key, value in tree.args.items() if value}


def _check_union(union: exp.SetOperation, what: str) -> None:
    """Refuse all but a UNION ALL by position."""
    if not isinstance(union, exp.Union):
        raise QueryError(f"{union.key.upper()} is not supported in {what}")
    if union.args.get("distinct"):
        raise QueryError(
            f"UNION is not supported in {what}: equal rows of different sites cannot "
            "be found; write UNION ALL"
        )
    if union.args.get("by_name"):
        raise QueryError(
            f"UNION ALL BY NAME is not supported in {what}: write UNION ALL, and the "
            "columns in the same order"
        )
    check_clauses(union, {"this", "expression"}, what, _ADVICE)


def _parse_branch(select: exp.Select, what: str) -> Branch:
    """Return one SELECT over one table."""
    source = select.args.get("from_")
    if source is None:
        raise QueryError(f"{what} has no FROM: {shorten(select.sql(DIALECT))}")
    check_clauses(select, _CLAUSES, what, _ADVICE)
    if isinstance(source.this, exp.Subquery):
        raise QueryError(
            f"{what} reads another sub-query: {shorten(source.this.sql(DIALECT))}; "
            "write one SELECT over the table itself"
        )
    if not select.expressions:
        raise QueryError(f"{what} selects nothing: {shorten(select.sql(DIALECT))}")
    where, having = select.args.get("where"), select.args.get("having")
    distinct = select.args.get("distinct")
    if distinct is not None and distinct.args.get("on"):
        raise QueryError(f"DISTINCT ON is not supported in {what}: {_NO_ORDER}")
    groups, is_all = _parse_groups(select.args.get("group"), what)
    more = ALLOWED_NODES
    return Branch(
        table=parse_ref(source.this),
        items=parse_items(select.expressions, more),
        where=parse_conditions(where.this, f"{what}: WHERE") if where else (),
        groups=groups,
        having=parse_conditions(having.this, f"{what}: HAVING", more) if having else (),
        is_distinct=distinct is not None,
        is_grouped_by_all=is_all,
    )


def _parse_groups(group: exp.Group | None, what: str) -> tuple[tuple[str, ...], bool]:
    """Return the expressions of GROUP BY, and whether it says ALL."""
    if group is None:
        return (), False
    if _given(group) == {"all"}:
        return (), True
    special = (exp.Rollup, exp.Cube, exp.GroupingSets, exp.Tuple)
    odd = [tree for tree in group.expressions if isinstance(tree, special)]
    if odd or _given(group) != {"expressions"}:
        raise QueryError(
            f"{what}: GROUP BY takes expressions or ALL, not "
            f"{shorten(group.sql(DIALECT))}"
        )
    return tuple(canonical(tree, f"{what}: group") for tree in group.expressions), False
