"""SQL expressions: parse one, check it against an allow-list, render it again.

An expression crosses two borders: the operator's query is cut into expressions, and a
site runs expressions that came over the wire. Both pass through here. Nothing is ever
pasted: what runs is rendered from a tree made only of the nodes below, and its text
must parse back to the same text, so that the checked tree and the executed text cannot
differ. The list holds functions of a single row only, but for the aggregates and
windows of a sub-query: no sub-queries, files, settings, clocks or random numbers, and
nothing that builds large values (``repeat``, ``lpad``, ``range``). Of the rest, the
length of a text is bounded before it runs: nested REPLACE multiplies. Patterns are
constants: a row that chose one would choose how long it takes.
"""

import math
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import pairwise

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, ParseError, SqlglotError

from tp_flower.errors import QueryError
from tp_flower.query.allowed import (
    AGGREGATE_NODES,
    AGGREGATES,
    ALLOWED_FUNCTIONS,
    ALLOWED_NODES,
    ALLOWED_TYPES,
    DISTANCES,
    INSTEAD,
    PATTERNS,
    WINDOW_NODES,
)
from tp_flower.query.window_forms import is_whole, why_refused_window_node

DIALECT = "duckdb"
MAX_EXPRESSION_CHARACTERS = 20_000
_MOST_TEXTS = 256
_MOST_CHARACTERS = 1 << 15
_MOST_DIGITS = 40  # of a number, a date or a truth value as a text
_Length = tuple[float, float]  # a bound: so many columns, so many characters

_LISTED = (
    "COUNT(*), COUNT(x), COUNT(DISTINCT x), SUM, AVG, MIN, MAX, STDDEV*, VARIANCE*, "
    "VAR_*, MEDIAN, QUANTILE_CONT(x, 0.5), BOOL_AND, BOOL_OR, each with FILTER (WHERE "
    "...) or without"
)
_AGGREGATED = "JOIN (SELECT k, AVG(x) AS mean FROM t GROUP BY k) AS a ON a.k = b.k"
_SUB_QUERIES = (
    "sub-queries are not supported here; for a value of each row write LEFT "
    f"{_AGGREGATED}; IN (SELECT ...) stands in WHERE, joined by AND"
)
_QUOTES = 'write names in double quotes, "name", not in backticks or [brackets]'
_JSON = (
    "a value within JSON is read by its owner, in the table's 'sql', such as "
    "CAST(meta ->> 'pos' AS BIGINT) AS pos"
)
_NO_AGGREGATES = "aggregate functions are not supported"
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
# why a node is refused, the most telling reason first
_REASONS: tuple[tuple[tuple[type[exp.Expr], ...], str], ...] = (
    ((exp.Query, exp.Exists), _SUB_QUERIES),
    ((exp.Array, exp.Bracket), _QUOTES),
    ((exp.AggFunc, exp.IgnoreNulls, exp.Filter, exp.WithinGroup), _NO_AGGREGATES),
    ((exp.Star, exp.Columns), "name the columns instead of *"),
    ((exp.Placeholder, exp.Parameter), "parameters are not supported"),
    ((exp.JSONExtract, exp.JSONExtractScalar, exp.JSONBExtract), _JSON),
    ((exp.Alias,), "an alias has no place here"),
)


def shorten(text: str, limit: int = 120) -> str:
    """Return ``text`` on one line, cut to ``limit`` characters for a message."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    return f"{line[: limit - 3]}..."


def explain(error: SqlglotError) -> str:
    """Return sqlglot's message about bad SQL, with its place, in one line."""
    if not isinstance(error, ParseError) or not error.errors:
        return shorten(str(error))
    first = error.errors[0]
    position = f"line {first['line']}, column {first['col']}"
    description = re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", str(first["description"]))
    # the place names the token
    description = re.sub(r" but got <Token .*>$", "", description)
    return f"{position}: {description} at {first['highlight']!r}"


def parse_statements(sql: str) -> list[exp.Expr]:
    """Parse ``sql`` into its statements."""
    try:
        tokens = sqlglot.tokenize(sql, read=DIALECT)
        statements = sqlglot.Dialect.get_or_raise(DIALECT).parser().parse(tokens, sql)
    except SqlglotError as error:
        hint = f"; {_QUOTES}" if "`" in sql or "[" in sql else ""
        raise QueryError(f"the SQL does not parse: {explain(error)}{hint}") from error
    except RecursionError as error:
        raise QueryError(f"nested too deeply: {shorten(sql)}") from error
    except (ValueError, AttributeError, TypeError) as error:
        # sqlglot fails on some malformed SQL, such as {AS: ,}: a site must answer it
        raise QueryError(f"the SQL cannot be read: {shorten(str(error))}") from error
    for one, other in pairwise(tokens):
        # sqlglot overlooks what is missing
        if one.token_type.name == other.token_type.name == "COMMA":
            position = f"line {other.line}, column {other.col}"
            raise QueryError(
                f"the SQL does not parse: {position}: nothing between two commas"
            )
    return [statement for statement in statements if statement is not None]


def render(tree: exp.Expr, *, quote: bool = False, copy: bool = True) -> str:
    """Return DuckDB SQL for ``tree``, with every identifier quoted on request.

    Rendering may change the tree; without a ``copy`` of it, it is not to be used again.
    """
    try:
        return tree.sql(
            DIALECT,
            identify=quote,
            comments=False,
            unsupported_level=ErrorLevel.RAISE,
            copy=copy,
        )
    except SqlglotError as error:
        raise QueryError(f"not expressible in DuckDB: {explain(error)}") from error
    except RecursionError as error:
        raise QueryError("an expression is nested too deeply") from error


def parse_expression(
    text: str, element: object, *, aggregates: bool = False, windows: bool = False
) -> exp.Expr:
    """Parse and check one expression in DuckDB's dialect; messages call it ``element``.

    It may have aggregates and windows only where the caller says so.

    >>> render(parse_expression("a.x>1 -- note", "filter"), quote=True)
    '"a"."x" > 1'
    >>> parse_expression("sum(x)/count(*)", "column", aggregates=True).sql()
    'SUM(x) / COUNT(*)'
    """
    return _checked(text, element, aggregates=aggregates, windows=windows)[0].copy()


def canonical_text(
    text: str, element: object, *, aggregates: bool = False, windows: bool = False
) -> str:
    """Return a checked expression as DuckDB SQL that parses back to itself.

    >>> canonical_text("a.x>1 -- note", "filter")
    'a.x > 1'
    """
    return _checked(text, element, aggregates=aggregates, windows=windows)[1]


def _checked(
    text: str, element: object, *, aggregates: bool, windows: bool
) -> tuple[exp.Expr, str]:
    try:
        return _checked_tree(text, aggregates=aggregates, windows=windows)
    except QueryError as error:
        raise QueryError(f"{element} is refused: {error}") from error


@lru_cache(maxsize=4096)
def _checked_tree(
    text: str, *, aggregates: bool, windows: bool
) -> tuple[exp.Expr, str]:
    """Return the tree of one expression, which nobody may change, and its text.

    Shards of a table repeat the same ones.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise QueryError(
            f"{len(text)} characters, at most {MAX_EXPRESSION_CHARACTERS} are accepted"
        )
    tree = _parse_select_item(text)
    _check_nodes(tree, aggregates=aggregates, windows=windows)
    rendered = render(tree, copy=False)
    # The result is the tree of the rendered text, not of the original text: invariant:
    # render(tree) parses to this very tree, and it was checked.
    tree = _parse_select_item(rendered)
    _check_nodes(tree, aggregates=aggregates, windows=windows)
    if render(tree) != rendered:
        raise QueryError("it has no unambiguous form in SQL")
    _check_lengths(tree)
    return tree, rendered


def _parse_select_item(text: str) -> exp.Expr:
    """Parse ``text`` where only an expression can stand: after SELECT."""
    statements = parse_statements(f"SELECT {text}")
    items = statements[0].expressions if len(statements) == 1 else []
    is_single = len(items) == 1 and isinstance(statements[0], exp.Select)
    if not is_single or clauses_of(statements[0]) != {"expressions"}:
        raise QueryError(f"not one expression: {shorten(text)}")
    tree: exp.Expr = items[0].pop()
    return tree


def clauses_of(tree: exp.Expr) -> set[str]:
    """Return sqlglot's names of the parts that ``tree`` has."""
    return {key for key, value in tree.args.items() if value}


def check_expression(
    tree: exp.Expr, element: object, *, aggregates: bool, windows: bool = False
) -> None:
    """Refuse every node of ``tree`` that is not on the allow-list."""
    try:
        _check_nodes(tree, aggregates=aggregates, windows=windows)
    except QueryError as error:
        raise QueryError(f"{element} is refused: {error}") from error


def _check_lengths(tree: exp.Expr) -> None:
    """Refuse an expression that may build a text far longer than those it reads."""
    lengths: dict[int, _Length] = {}
    # a node comes after its children
    for node in reversed(list(tree.walk(bfs=True))):
        parts = [lengths[id(child)] for child in node.iter_expressions()]
        length = lengths[id(node)] = _length(node, parts)
        if length[0] > _MOST_TEXTS or length[1] > _MOST_CHARACTERS:
            raise QueryError(
                f"it may build a text of more than {_MOST_TEXTS} times a column's, or "
                f"of {_MOST_CHARACTERS} characters: {shorten(node.sql(DIALECT))}"
            )


def _length(node: exp.Expr, parts: list[_Length]) -> _Length:
    """Bound the length of a node's value by those of its children's."""
    if isinstance(node, exp.Literal):
        return 0, len(node.name)
    if isinstance(node, exp.Column):
        return 1, _MOST_DIGITS
    if isinstance(node, exp.Concat | exp.ConcatWs | exp.DPipe):
        # the first of CONCAT_WS stands between the others
        between = parts[:1] * len(parts) if isinstance(node, exp.ConcatWs) else []
        every = [*parts, *between]
        return sum(part[0] for part in every), sum(part[1] for part in every)
    if isinstance(node, exp.Replace | exp.RegexpReplace) and len(parts) > 2:
        # a pattern may match before every character, and at the end
        ends = isinstance(node, exp.RegexpReplace)
        old = parts[0]
        new = parts[2]
        return _product((old[0], old[1] + ends), (new[0], max(new[1] + ends, 1)))
    if isinstance(node, exp.TimeToStr):
        return _product(parts[1], (0, _MOST_DIGITS))
    is_distance = isinstance(node, exp.Levenshtein) or (
        isinstance(node, exp.Anonymous) and node.name.lower() in DISTANCES
    )
    if is_distance and len(parts) > 1 and parts[:2] != [(1, _MOST_DIGITS)] * 2:
        return _product(*parts[:2])
    every = [*parts, (0, _MOST_DIGITS)]
    return max(part[0] for part in every), max(part[1] for part in every)


def _product(first: _Length, second: _Length) -> _Length:
    """Bound the product of two lengths; that of two columns has no bound."""
    if first[0] * second[0]:
        return math.inf, math.inf
    return first[0] * second[1] + first[1] * second[0], first[1] * second[1]


def _check_nodes(tree: exp.Expr, *, aggregates: bool, windows: bool) -> None:
    """Refuse an expression with a node that is not on the list."""
    for node in tree.walk(bfs=True):
        if windows and type(node) in WINDOW_NODES:
            reason = why_refused_window_node(node) or _why_refused_whole(node)
        elif type(node) in AGGREGATE_NODES and (
            aggregates or (windows and node.find_ancestor(exp.Window))
        ):
            reason = _why_refused_aggregate(node)
        else:
            reason = _why_refused(node)
        if aggregates and reason == _NO_AGGREGATES:
            reason = "it depends on the order of rows, or is not among those supported"
        if reason:
            raise QueryError(f"{reason}: {shorten(node.sql(DIALECT, comments=False))}")


def _why_refused(node: exp.Expr) -> str:
    """Return the reason to refuse a node by its type, or ""."""
    if isinstance(node, exp.Window):
        return f"window functions are not supported; {_instead_of_window(node)}"
    for types, reason in _REASONS:
        if isinstance(node, types):
            return reason
    name = node.sql_name() if isinstance(node, exp.Func) else node.key
    name = (node.name if isinstance(node, exp.Anonymous) else name).lower()
    if name in INSTEAD:
        return f"function {name!r} is not among those supported, write {INSTEAD[name]}"
    # The exact type: a subclass that a later sqlglot adds is not on the list.
    if type(node) not in ALLOWED_NODES:
        kind = "function" if isinstance(node, exp.Func) else "construct"
        # its name in SQL, if it has one, because the class name is sqlglot's own
        sql_name = re.match(r"\w+(?=\(|$)", node.sql(DIALECT))
        label = repr(sql_name[0].lower()) if sql_name else type(node).__name__
        return f"{kind} {label} is not among those supported"
    if isinstance(node, exp.Anonymous) and node.name.lower() not in ALLOWED_FUNCTIONS:
        return f"function {shorten(node.name, 40)!r} is not among those supported"
    if isinstance(node, exp.DataType) and node.this not in ALLOWED_TYPES:
        return "this type is not among those supported (numbers are DOUBLE or BIGINT)"
    return _why_refused_pattern(node) or _why_refused_form(node)


def _why_refused_whole(node: exp.Expr) -> str:
    """Return why an aggregate over a whole partition is refused, or ""."""
    if not isinstance(node, exp.Window) or not is_whole(node):
        return ""
    return f"a window without ORDER BY is an aggregate; {_grouped_instead(node)}"


def _instead_of_window(window: exp.Window) -> str:
    """Return what has the value of a window function, as far as anything has."""
    if is_whole(window):
        return _grouped_instead(window)
    if reason := why_refused_window_node(window):
        return reason
    call = render(_without_tables(window))
    return (
        f"write it in a sub-query over its table: w.value of (SELECT *, {call} AS "
        "value FROM its_table) AS w"
    )


def _grouped_instead(window: exp.Window) -> str:
    """Return the sub-query with GROUP BY that has an aggregate over a partition."""
    groups = window.args.get("partition_by") or ()
    if not groups:
        return (
            "one over all rows is the same for every row: leave it out, or write "
            f"{_AGGREGATED}"
        )
    keys = ", ".join(column.name or render(column) for column in groups)
    call = render(_without_tables(window.this))
    on = " AND ".join(
        f"w.{column.name or 'k'} = {'' if column.find(exp.Column).table else 'b.'}"
        f"{render(column)}"
        for column in groups
    )
    return (
        f"write w.value, with LEFT JOIN (SELECT {keys}, {call} AS value FROM "
        f"its_table GROUP BY {keys}) AS w ON {on}"
    )


def _without_tables(tree: exp.Expr) -> exp.Expr:
    """Return a copy of an expression whose columns have no table."""
    tree = tree.copy()
    for column in tree.find_all(exp.Column):
        column.set("table", None)
    return tree


def _why_refused_form(node: exp.Expr) -> str:
    """Return the reason to refuse a node by its arguments, or ""."""
    if isinstance(node, exp.Column):
        if node.args.get("join_mark"):
            return "outer join marks are not supported"
        if isinstance(node.this, exp.Star):
            return "name the columns instead of *"
        if node.args.get("db"):
            return "write a column as table.column"
    if isinstance(node, _COMPARISONS) and isinstance(node.parent, _COMPARISONS):
        return "write chained comparisons with AND or in parentheses"
    if isinstance(node, exp.Var) and not node.name.isidentifier():
        return "this name of a part or unit is not supported"
    if isinstance(node, exp.In) and (node.args.get("unnest") or node.args.get("field")):
        return "IN takes a list of values"
    return ""


def _why_refused_pattern(node: exp.Expr) -> str:
    """Return why a pattern, or a flag of its match, is refused, or an empty text."""
    parts = [
        node.args.get(key) for key in ("expression", "flag", "modifiers", "parameters")
    ]
    is_constant = not any(
        part.find(exp.Column) for part in parts if isinstance(part, exp.Expr)
    )
    if is_constant or not isinstance(node, PATTERNS):
        return ""
    return (
        "a pattern is a text in quotes, such as 'a%', and not made of columns; to "
        "compare columns write CONTAINS(x, y), STARTS_WITH(x, y) or x = y"
    )


def _why_refused_aggregate(node: exp.Expr) -> str:
    """Return why a node of ``AGGREGATE_NODES`` is refused, or an empty text."""
    parent = node.parent
    parts = clauses_of(node)
    if type(node) in AGGREGATES:
        return _why_refused_call(node, parts)
    if type(node) is exp.Filter:
        is_form = type(node.this) in AGGREGATES and type(node.expression) is exp.Where
        return "" if is_form else "FILTER (WHERE ...) follows an aggregate"
    if type(node) is exp.Where:
        is_form = type(parent) is exp.Filter
        return "" if is_form else "WHERE is allowed only inside FILTER"
    if type(node) is exp.Star:
        is_form = type(parent) is exp.Count and not parts
        return "" if is_form else "* is allowed only inside COUNT"
    if (
        type(parent) is exp.Count
        and parts == {"expressions"}
        and len(node.expressions) == 1
    ):
        return ""
    return "DISTINCT is allowed only in COUNT(DISTINCT x), with one expression"


def _why_refused_call(node: exp.Expr, parts: set[str]) -> str:
    """Return why an aggregate is nested in another or has unsupported arguments."""
    is_quantile = type(node) is exp.PercentileCont
    optional = {"big_int"}
    if is_quantile:
        optional.add("expression")
    if parts - optional != {"this"}:
        return f"this form of an aggregate is not supported; supported: {_LISTED}"
    if is_quantile and not _is_fraction(node.args.get("expression")):
        return "a quantile is a number from 0 to 1"
    parent = node.parent
    has_filter = isinstance(parent, exp.Filter) and parent.this is node
    call = parent if has_filter and parent is not None else node
    if isinstance(call.parent, exp.Window) and call.arg_key == "this":
        return ""
    if call.find_ancestor(exp.Filter, exp.Window, *AGGREGATES) is not None:
        return "an aggregate cannot stand inside another"
    return ""


def _is_fraction(node: object) -> bool:
    return (
        isinstance(node, exp.Literal)
        and not node.is_string
        and 0 <= float(node.name) <= 1
    )


def conjuncts(tree: exp.Expr) -> Iterator[exp.Expr]:
    """Yield the conditions that ``tree`` joins by AND, from left to right.

    >>> [render(part) for part in conjuncts(parse_expression("x AND (y AND z)", ""))]
    ['x', 'y', 'z']
    """
    inner = tree.unnest()
    if isinstance(inner, exp.And):
        yield from conjuncts(inner.left)
        yield from conjuncts(inner.right)
    else:
        yield inner


def parenthesise(tree: exp.Expr) -> exp.Expr:
    """Return a condition that keeps its meaning between two ANDs."""
    if isinstance(tree, exp.Or):
        return exp.Paren(this=tree)
    return tree


def has_aggregate(tree: exp.Expr) -> bool:
    """Return whether an aggregate stands anywhere in ``tree``, except in a window."""
    nodes = tree.walk(prune=lambda node: isinstance(node, exp.Window))
    return any(type(node) in AGGREGATES for node in nodes)


def ungrouped_column(tree: exp.Expr, groups: Collection[exp.Expr]) -> exp.Column | None:
    """Return a column that is neither in an aggregate nor in a group expression."""
    grouped = frozenset(group.unnest() for group in groups)
    pending = [tree]
    while pending:
        node = pending.pop()
        if type(node) in AGGREGATES or isinstance(node, exp.Filter) or node in grouped:
            continue
        if isinstance(node, exp.Column):
            return node
        pending.extend(node.iter_expressions())
    return None
