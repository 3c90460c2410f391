"""The allow-list of expressions, read from ``allowed.toml``, as sqlglot's types."""

import tomllib
from pathlib import Path

from sqlglot import exp

# sqlglot's nodes and types by name, and DuckDB's functions for which it has no node
_NAMES = tomllib.loads(Path(__file__).with_name("allowed.toml").read_text("utf-8"))
ALLOWED_NODES = frozenset(
    getattr(exp, n) for names in _NAMES["nodes"].values() for n in names
)
ALLOWED_FUNCTIONS = frozenset(_NAMES["functions"])
ALLOWED_TYPES = frozenset(exp.DType[name] for name in _NAMES["types"])
# Their value depends only on the rows of a group, not on their order, and DuckDB
# computes it exactly, unlike FIRST, ANY_VALUE, LIST and so on.
AGGREGATES = frozenset(getattr(exp, name) for name in _NAMES["aggregates"])
# allowed only inside an aggregate, unlike those before
AGGREGATE_NODES = AGGREGATES | {exp.Filter, exp.Where, exp.Distinct, exp.Star}
WINDOW_FUNCTIONS = frozenset(getattr(exp, name) for name in _NAMES["windows"])
# allowed only in a window, as are aggregates
WINDOW_NODES = WINDOW_FUNCTIONS | {
    *(exp.Window, exp.WindowSpec),
    *(exp.Order, exp.Ordered),
}
