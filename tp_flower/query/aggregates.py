"""Aggregates of a sub-query: which ones, in which form, and over which groups.

An aggregate is allowed if its value depends on the rows of the group alone, not on
their order: ``FIRST``, ``ANY_VALUE``, ``LIST`` and the like are refused, and nothing
that DuckDB only approximates is in the list.
"""

from collections.abc import Collection

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.expressions import DIALECT, parse_expression, shorten

_SIMPLE: tuple[type[exp.Expr], ...] = (
    exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Stddev, exp.StddevPop, exp.StddevSamp,
    exp.Variance, exp.VariancePop, exp.Median, exp.LogicalAnd, exp.LogicalOr,
)  # fmt: skip
AGGREGATES: frozenset[type[exp.Expr]] = frozenset(
    (*_SIMPLE, exp.Count, exp.PercentileCont)
)
# nodes that only stand inside an aggregate
_PARTS: frozenset[type[exp.Expr]] = frozenset(
    (exp.Filter, exp.Where, exp.Distinct, exp.Star)
)
ALLOWED_NODES: frozenset[type[exp.Expr]] = AGGREGATES | _PARTS
_LISTED = (
    "COUNT(*), COUNT(x), COUNT(DISTINCT x), SUM, AVG, MIN, MAX, STDDEV*, VARIANCE*, "
    "VAR_*, MEDIAN, QUANTILE_CONT(x, 0.5), BOOL_AND, BOOL_OR, each with FILTER (WHERE "
    "...) or without"
)


def parse_aggregate(text: str, what: str) -> exp.Expr:
    """Parse and check an expression that may hold aggregates, as DuckDB writes it.

    Raises:
        QueryError: It is not exactly one expression, or holds something outside the
            allow-lists.

    >>> parse_aggregate("sum(x)/count(*)", "column").sql()
    'SUM(x) / COUNT(*)'
    """
    tree = parse_expression(text, what, ALLOWED_NODES)
    check_aggregates(tree, what)
    return tree


def has_aggregate(tree: exp.Expr) -> bool:
    """Return whether an aggregate stands anywhere in ``tree``."""
    return any(type(node) in AGGREGATES for node in tree.walk())


def check_aggregates(tree: exp.Expr, what: str) -> None:
    """Refuse an aggregate that is nested or of a form that is not on the list.

    Raises:
        QueryError: Names the aggregate and what is allowed.
    """
    for node in tree.walk():
        reason = _why_refused(node)
        if reason:
            shown = shorten(node.sql(DIALECT, comments=False))
            raise QueryError(f"{what} is refused: {reason}: {shown}")


def ungrouped_column(tree: exp.Expr, groups: Collection[exp.Expr]) -> exp.Column | None:
    """Return a column that is neither in an aggregate nor part of a group expression.

    Args:
        tree: An expression of the sub-query.
        groups: The expressions of its GROUP BY; columns spelled as in ``tree``.
    """
    wanted = frozenset(group.unnest() for group in groups)
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if type(node) in AGGREGATES or isinstance(node, exp.Filter) or node in wanted:
            continue
        if isinstance(node, exp.Column):
            return node
        waiting.extend(node.iter_expressions())
    return None


def _why_refused(node: exp.Expr) -> str:
    """Return why this node alone is refused, or an empty text."""
    kind, parent = type(node), node.parent
    if kind in AGGREGATES:
        return _why_refused_aggregate(node)
    if kind is exp.Filter:
        is_form = type(node.this) in AGGREGATES and type(node.expression) is exp.Where
        return "" if is_form else "FILTER (WHERE ...) follows an aggregate"
    if kind is exp.Where and type(parent) is not exp.Filter:
        return "WHERE stands inside FILTER alone"
    if kind is exp.Star and (type(parent) is not exp.Count or _given(node)):
        return "* stands inside COUNT alone"
    if kind is exp.Distinct and (type(parent) is not exp.Count or not _is_one(node)):
        return "DISTINCT stands in COUNT(DISTINCT x) alone, with one expression"
    return ""


def _why_refused_aggregate(node: exp.Expr) -> str:
    """Return why an aggregate is nested in another or has odd arguments."""
    given = _given(node) - {"big_int"}
    if is_quantile := type(node) is exp.PercentileCont:
        given -= {"expression"}
    if given != {"this"}:
        return f"this form of an aggregate is not supported; supported: {_LISTED}"
    if is_quantile and not _is_fraction(node.args.get("expression")):
        return "a quantile is a number from 0 to 1"
    parent = node.parent
    has_filter = isinstance(parent, exp.Filter) and parent.this is node
    whole = parent if has_filter and parent is not None else node
    if whole.find_ancestor(exp.Filter, *AGGREGATES) is not None:
        return "an aggregate cannot stand inside another"
    return ""


def _given(node: exp.Expr) -> set[str]:
    return {key for key, value in node.args.items() if value}


def _is_one(node: exp.Expr) -> bool:
    return _given(node) == {"expressions"} and len(node.expressions) == 1


def _is_fraction(node: object) -> bool:
    if not isinstance(node, exp.Literal) or node.is_string:
        return False
    return 0 <= float(node.name) <= 1
