"""The allow-list of expressions, and what to write instead of functions that it lacks.

The names are in ``allowed.toml``; here they are sqlglot's types.
"""

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
INSTEAD = {
    **dict.fromkeys(("to_char", "format_date"), "strftime(x, '%Y-%m')"),
    **dict.fromkeys(
        ("to_date", "parse_date"), "CAST(x AS DATE), or try_strptime(x, '%d.%m.%Y')"
    ),
    "unix_timestamp": "epoch(x)",
    "julianday": "date_diff('day', y, x) for the days between two times",
    "isnull": "COALESCE(x, 0)",
    "safe_divide": "x / NULLIF(y, 0)",
    "any": "x IN (1, 2)",
    **dict.fromkeys(
        ("now", "current_date", "current_timestamp"), "a fixed day, DATE '2024-01-31'"
    ),
}
"""By the name of a function that is not on the list, what to write for it."""
PATTERNS = (
    *(exp.Like, exp.ILike, exp.SimilarTo, exp.Glob),
    *(
        exp.RegexpLike,
        exp.RegexpReplace,
        exp.RegexpExtract,
        exp.RegexpFullMatch,
        exp.Escape,
    ),
)
"""What matches a pattern, whose cost follows from the pattern: no row may choose it."""
DISTANCES = frozenset(("damerau_levenshtein", "jaro_similarity", "jaccard"))
"""Functions that take the product of the lengths of two texts, in time or memory."""
