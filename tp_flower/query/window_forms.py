"""The forms of window functions that may run, and why any other is refused.

A window's value is that of rows up to its own, in the order that OVER gives::

    AVG(points) OVER (PARTITION BY driver ORDER BY day ROWS BETWEEN 5 PRECEDING AND
        1 PRECEDING)

No window looks ahead: a model that is trained on values of later rows has nothing to
read them from when it predicts. So there is no LEAD and no frame with FOLLOWING, and
none without ORDER BY, which is an aggregate over the whole partition. The bounds of
frames and the distances of LAG are constants: DuckDB would take them from every row.
"""

import re

from sqlglot import exp

from tp_flower.query.allowed import AGGREGATES, WINDOW_FUNCTIONS

_SHORT_CALLS = (exp.Lag, exp.RowNumber, exp.Rank, exp.DenseRank)
"""Functions that read no frame."""
_VALUES = (exp.FirstValue, exp.LastValue, exp.NthValue)
_ARGUMENTS: dict[type[exp.Expr], frozenset[str]] = {
    exp.Lag: frozenset({"this", "offset", "default"}),
    exp.FirstValue: frozenset({"this"}),
    exp.LastValue: frozenset({"this"}),
    exp.NthValue: frozenset({"this", "offset"}),
}
_CLAUSES = frozenset({"this", "partition_by", "order", "spec", "over"})
_LISTED = (
    "ROW_NUMBER, RANK, DENSE_RANK, LAG(x, n, otherwise), FIRST_VALUE, LAST_VALUE, "
    "NTH_VALUE and the aggregates"
)
_FRAME_END = "let it end with CURRENT ROW or 1 PRECEDING"
_BOUNDS = (
    "a frame is ROWS BETWEEN 5 PRECEDING AND 1 PRECEDING, with whole numbers, or RANGE "
    "BETWEEN INTERVAL 30 DAY PRECEDING AND INTERVAL 1 DAY PRECEDING"
)
_LATER: dict[type[exp.Expr], str] = {
    exp.Lead: "LEAD looks ahead, at later rows: write LAG, which looks back",
    exp.PercentRank: "PERCENT_RANK counts later rows too: write RANK",
    exp.CumeDist: "CUME_DIST counts later rows too: write RANK",
    exp.Ntile: "NTILE counts later rows too: write ROW_NUMBER",
}
_INTERVAL = re.compile(r"\d+( [a-z]+( \d+ [a-z]+)*)?", re.IGNORECASE)


def function_of(window: exp.Window) -> exp.Expr:
    """Return the function before OVER, without its FILTER."""
    call: exp.Expr = window.this
    if isinstance(call, exp.Filter):
        call = call.this
    return call


def is_whole(window: exp.Window) -> bool:
    """Return whether a window is an aggregate over all rows of its partition."""
    is_plain = not (window.args.get("order") or window.args.get("spec"))
    return is_plain and type(function_of(window)) in AGGREGATES


def has_rows_frame(window: exp.Window) -> bool:
    """Return whether a window counts rows: which ones follows from their order."""
    spec = window.args.get("spec")
    return spec is not None and str(spec.args.get("kind")).upper() == "ROWS"


def why_refused_window_node(node: exp.Expr) -> str:
    """Return the reason to refuse one of ``WINDOW_NODES`` where windows may stand."""
    if isinstance(node, exp.Window):
        return _why_refused_window(node)
    parent = node.parent
    is_window = isinstance(parent, exp.Window)
    if isinstance(node, exp.WindowSpec):
        return _why_refused_frame(node) if is_window else "a frame stands in OVER"
    if isinstance(node, exp.Order):
        is_clause = is_window and node.arg_key == "order"
        return "" if is_clause else "ORDER BY stands in OVER, and nowhere else"
    if isinstance(node, exp.Ordered):
        if not isinstance(parent, exp.Order) or node.args.get("with_fill"):
            return "this form of ORDER BY is not supported"
        # a number would be read as the position of a column
        has_column = node.find(exp.Column) is not None
        return "" if has_column else "ORDER BY names no column"
    if not is_window or node.arg_key != "this":
        return f"{_name(node)} needs OVER (PARTITION BY ... ORDER BY ...)"
    return _why_refused_call(node)


def _name(call: exp.Expr) -> str:
    return call.sql_name() if isinstance(call, exp.Func) else call.key.upper()


def _why_refused_window(window: exp.Window) -> str:
    """Return the reason to refuse a window for its function, or what else it has."""
    call = window.this
    function = function_of(window)
    has_nulls = isinstance(call, exp.IgnoreNulls | exp.RespectNulls)
    # sqlglot puts it around ANY_VALUE, which ignores them
    if has_nulls and type(call.this) in WINDOW_FUNCTIONS:
        return "IGNORE NULLS is not supported: leave such rows out, WHERE x IS NOT NULL"
    if type(function) in _LATER:
        return _LATER[type(function)]
    if type(function) not in AGGREGATES | WINDOW_FUNCTIONS:
        inner = function.this if has_nulls else function
        return f"{_name(inner)} is no window function here; these are: {_LISTED}"
    return _why_refused_clauses(window, function)


def _why_refused_clauses(window: exp.Window, function: exp.Expr) -> str:
    """Return the reason to refuse a window for its place and clauses, or ""."""
    if window.find_ancestor(exp.Window, exp.Filter, *AGGREGATES) is not None:
        return "a window cannot stand inside another, or inside an aggregate"
    clauses = {key for key, value in window.args.items() if value}
    if clauses - _CLAUSES or window.args.get("over") != "OVER":
        return "this form of a window is not supported"
    if not all(part.find(exp.Column) for part in window.args.get("partition_by") or ()):
        return "PARTITION BY names no column"
    return _why_refused_order(window, function)


def _why_refused_order(window: exp.Window, function: exp.Expr) -> str:
    """Return the reason to refuse a function for its order and frame, or ""."""
    if not window.args.get("order") and not is_whole(window):
        return f"{_name(function)} has no ORDER BY in OVER, which says what comes first"
    if isinstance(function, _SHORT_CALLS) and window.args.get("spec"):
        return f"{_name(function)} takes no frame: leave it out"
    if isinstance(function, _VALUES) and not has_rows_frame(window):
        return (
            f"{_name(function)} is undefined among rows that come at the same place in "
            "the order: write ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
        )
    return ""


def _why_refused_call(call: exp.Expr) -> str:
    """Return the reason to refuse a window function by its arguments, or ""."""
    arguments = {key for key, value in call.args.items() if value}
    if arguments - _ARGUMENTS.get(type(call), frozenset()):
        return f"this form of {_name(call)} is not supported; supported: {_LISTED}"
    offset = call.args.get("offset")
    if offset is not None and not (_is_whole_number(offset) and int(offset.name) > 0):
        return f"{_name(call)} counts rows by a whole number, 1 or more"
    return ""


def _why_refused_frame(spec: exp.WindowSpec) -> str:
    """Return the reason to refuse a frame that is not of ``_BOUNDS``, or ""."""
    kind = str(spec.args.get("kind")).upper()
    if kind not in ("ROWS", "RANGE"):
        return f"{kind} is not supported: {_BOUNDS}"
    if spec.args.get("exclude"):
        return f"EXCLUDE is not supported: {_BOUNDS}"
    for bound, default in (("start", ""), ("end", "CURRENT ROW")):
        limit = spec.args.get(bound) or default
        side = str(spec.args.get(f"{bound}_side") or "").upper()
        if side == "FOLLOWING":
            return f"a frame that reaches FOLLOWING rows looks ahead: {_FRAME_END}"
        if isinstance(limit, str):
            allowed = {("CURRENT ROW", ""), ("UNBOUNDED", "PRECEDING")}
            is_bound = (limit.upper(), side) in allowed
        else:
            is_bound = side == "PRECEDING" and _is_distance(limit, kind)
        if not is_bound:
            return f"this frame is not supported: {_BOUNDS}"
    return ""


def _is_distance(bound: exp.Expr, kind: str) -> bool:
    """Return whether a bound is a constant, and not below 0."""
    if kind == "ROWS":
        return _is_whole_number(bound)
    if isinstance(bound, exp.Interval):
        count = bound.this.unnest()
        is_literal = isinstance(count, exp.Literal)
        return is_literal and _INTERVAL.fullmatch(count.name) is not None
    return isinstance(bound, exp.Literal) and not bound.is_string


def _is_whole_number(node: exp.Expr) -> bool:
    is_number = isinstance(node, exp.Literal) and not node.is_string
    return is_number and node.name.isdecimal()
