"""The parts that a query and its sub-queries have in common: items, conditions, tables.

What comes out is text, checked and rendered again, that parses back to itself.
"""

from collections.abc import Collection, Mapping

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.aggregates import ALLOWED_NODES, check_aggregates
from tp_flower.query.expressions import (
    DIALECT,
    Nodes,
    check_expression,
    conjuncts,
    parse_expression,
    render,
    shorten,
)
from tp_flower.query.statement import Item, SelectItem, StarItem, TableRef

_CLAUSE_NAMES = {
    "with_": "WITH (a common table expression)",
    "distinct": "DISTINCT",
    "group": "GROUP BY",
    "having": "HAVING",
    "qualify": "QUALIFY",
    "windows": "WINDOW",
    "order": "ORDER BY",
    "limit": "LIMIT",
    "offset": "OFFSET",
    "sample": "USING SAMPLE",
    "into": "INTO",
    "locks": "FOR UPDATE",
}


def check_clauses(
    tree: exp.Expr, known: Collection[str], where: str, advice: Mapping[str, str]
) -> None:
    """Refuse every clause of a SELECT or set operation that is not in ``known``.

    Args:
        tree: What has the clauses.
        known: Their names in sqlglot.
        where: What the tree is, for messages.
        advice: What to write instead, by clause.

    Raises:
        QueryError: Names the first such clause.
    """
    for clause in (key for key, value in tree.args.items() if value):
        if clause not in known:
            name = _CLAUSE_NAMES.get(clause, clause.strip("_").upper())
            instead = f": {advice[clause]}" if clause in advice else ""
            raise QueryError(f"{name} is not supported in {where}{instead}")


def parse_ref(source: exp.Expr) -> TableRef:
    """Return a plain table; anything else that can stand in FROM is refused.

    Raises:
        QueryError: Shows what is refused.
    """
    shown = shorten(source.sql(DIALECT))
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise QueryError(
            f"only plain tables and sub-queries are supported in FROM: {shown}"
        )
    if source.args.get("db"):
        raise QueryError(f"write the bare name of the table, not {shown}")
    if source.args.get("joins"):
        raise QueryError(f"write one join after the other, not nested: {shown}")
    alias = source.args.get("alias")
    odd = {key for key, value in source.args.items() if value} - {"this", "alias"}
    if odd or (alias is not None and alias.args.get("columns")):
        raise QueryError(f"only plain tables are supported in FROM: {shown}")
    return TableRef(alias=source.alias_or_name, name=source.name)


def parse_items(trees: list[exp.Expr], more: Nodes = frozenset()) -> tuple[Item, ...]:
    """Return a SELECT list.

    Args:
        trees: The items.
        more: Types of nodes that are allowed besides the allow-list.

    Raises:
        QueryError: An item holds something that is not allowed.
    """
    return tuple(_parse_item(tree, more) for tree in trees)


def parse_conditions(
    tree: exp.Expr, what: str, more: Nodes = frozenset()
) -> tuple[str, ...]:
    """Return the conditions that ``tree`` joins by AND.

    Raises:
        QueryError: A condition holds something that is not allowed.
    """
    parts = conjuncts(tree)
    return tuple(canonical(part, f"{what}: condition", more) for part in parts)


def canonical(tree: exp.Expr, what: str, more: Nodes = frozenset()) -> str:
    """Return a checked expression as DuckDB SQL that parses back to itself.

    Raises:
        QueryError: It holds something that is not allowed.
    """
    what = f"{what} {shorten(tree.sql(DIALECT, comments=False))}"
    check_expression(tree, what, more)
    if more == ALLOWED_NODES:
        check_aggregates(tree, what)
    return render(parse_expression(render(tree), what, more))


def _parse_item(tree: exp.Expr, more: Nodes) -> Item:
    """Return one item of the SELECT list."""
    star = tree.this if isinstance(tree, exp.Column) else tree
    if isinstance(star, exp.Star):
        return _parse_star(star, tree)
    if isinstance(tree, exp.Alias):
        return SelectItem(tree.alias, canonical(tree.this, "SELECT item", more))
    return SelectItem(None, canonical(tree, "SELECT item", more))


def _parse_star(star: exp.Star, tree: exp.Expr) -> StarItem:
    """Return ``*`` or ``t.*``, with EXCLUDE or without."""
    shown = shorten(tree.sql(DIALECT, comments=False))
    if {key for key, value in star.args.items() if value} - {"except_"}:
        raise QueryError(f"only EXCLUDE (...) is supported after a star: {shown}")
    if tree is not star and tree.args.get("db"):
        raise QueryError(f"write a star as table.*: {shown}")
    excluded = [canonical(c, "EXCLUDE") for c in star.args.get("except_") or ()]
    table = tree.table if isinstance(tree, exp.Column) else None
    return StarItem(table, tuple(excluded))
