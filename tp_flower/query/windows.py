"""The windows of a sub-query: what they partition by, and an order without ties.

Rows that tie in a window's ORDER BY come in any order, by DuckDB's threads: which of
them ROW_NUMBER counts first, LAG reads or a frame of ROWS ends with would differ from
one run to the next. :func:`break_ties` lets a digest of the rows' contents decide, so
that a value depends on the rows alone: first that of the columns that windows read,
which are the same when the model predicts, then that of all other columns of the
sub-query. Rows that are equal in all of them are interchangeable. A digest has no
order of its own: a tie that a column broke, such as the label, could be learned.
RANGE frames and ranks take rows that tie together, and need no more order.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError
from tp_flower.query.expressions import render, shorten
from tp_flower.query.window_forms import function_of, has_rows_frame

_RANKS = (exp.Rank, exp.DenseRank, exp.RowNumber)
_ORDERED = (exp.Lag, exp.RowNumber, exp.FirstValue, exp.LastValue, exp.NthValue)
"""Functions whose value depends on the order of rows that tie."""
OWNER = ": let the table's owner compute one of them (`sql = ...` in the tables file)"
TIES = ("(tie)", "(second tie)")  # columns of digests, in no query's names


def windows_of(trees: Iterable[exp.Expr]) -> list[exp.Window]:
    """Return all windows."""
    return [window for tree in trees for window in tree.find_all(exp.Window)]


def has_window(tree: exp.Expr) -> bool:
    """Return whether a window stands anywhere in ``tree``."""
    return tree.find(exp.Window) is not None


def partitions_of(trees: Iterable[exp.Expr]) -> tuple[tuple[str, ...], ...]:
    """Return the expressions of each different PARTITION BY; () of one without."""
    parts = [window.args.get("partition_by") or () for window in windows_of(trees)]
    texts = [tuple(sorted({render(p, quote=True) for p in part})) for part in parts]
    return tuple(sorted(set(texts)))


def take_partitions(tree: exp.Expr) -> list[exp.Expr]:
    """Take the expressions of all PARTITION BY out of a tree, and return them."""
    taken: list[exp.Expr] = []
    for window in tree.find_all(exp.Window):
        taken += window.args.get("partition_by") or ()
        window.set("partition_by", None)
    return taken


def check_directions(
    trees: Iterable[exp.Expr], is_time: Callable[[str], bool], element: str
) -> None:
    """Refuse windows whose PRECEDING rows are later ones; ranks have no frame."""
    for window in windows_of(trees):
        for ordered in window.args["order"].expressions:
            time = render(ordered.this, quote=True)
            is_backwards = ordered.args.get("desc") and is_time(time)
            if is_backwards and not isinstance(function_of(window), _RANKS):
                raise QueryError(
                    f"{element}: {shorten(render(window))} looks ahead: with DESC, the "
                    f"rows that come before are later ones; write ORDER BY {time} "
                    "without DESC"
                )


def break_ties(tree: exp.Expr) -> exp.Expr:
    """Add the digests to every ORDER BY that may have ties, in place."""
    for window in windows_of([tree]):
        if isinstance(function_of(window), _ORDERED) or has_rows_frame(window):
            for name in TIES:
                digest = exp.column(exp.to_identifier(name, quoted=True))
                ordered = exp.Ordered(this=digest, nulls_first=False)
                window.args["order"].append("expressions", ordered)
    return tree


def with_digests(relation: str, trees: Sequence[exp.Expr]) -> str:
    """Return a relation with the two digests of the columns that the trees read."""
    inner = {c.name for w in windows_of(trees) for c in w.find_all(exp.Column)}
    every = {c.name for tree in trees for c in tree.find_all(exp.Column)}
    digests = [
        f"{_digest(names)} AS {quote_name(name)}"
        for name, names in zip(TIES, (inner, every - inner), strict=True)
    ]
    return f"(SELECT *, {', '.join(digests)} FROM {relation})"


def _digest(columns: Collection[str]) -> str:
    """Return the SQL of a number that equal values have, whatever their types."""
    texts = [f"CAST({quote_name(name)} AS VARCHAR)" for name in sorted(columns)]
    parts = [f"coalesce(strlen({text}) || ':' || {text}, 'null')" for text in texts]
    return f"md5_number({' || '.join(parts) or repr('')})"
