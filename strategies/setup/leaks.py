"""Warnings of label leaks: features that read its columns, or the future of a row.

Near-perfect metrics tell of others. A label has a time if its table has a column of
times; rows of another table that are aggregated whenever they were, and LATERAL
sub-queries without a bound, may tell what came after it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from strategies.setup.columns import Columns, reading_warnings
from strategies.setup.extract import Extracted
from tp_flower.arrays import FloatArray
from tp_flower.duckdb_engine import quote_name
from tp_flower.extraction.select_plan import kind_of
from tp_flower.heads import Contribution
from tp_flower.objectives import EVENT, Target
from tp_flower.query import BoundQuery, Fragment, Query
from tp_flower.query.cutoffs import CUTOFF
from tp_flower.query.fragment import Role
from tp_flower.query.lateral_tables import correlation_of
from tp_flower.query.reads import reads

PERFECT: Final = 0.9999  # R2 or AUC of held-out rows
METRICS: Final = {"r2": "R²", "auc": "AUC", "concordance": "concordance"}
LEAST_ROWS, LEAST_CLASS_ROWS = 3, 10  # fewer may be told apart by chance
MOST_NAMES: Final = 5
_CONDITIONS: Final = frozenset((Role.FILTER, Role.GROUP, Role.KEY))


@dataclass(frozen=True)
class Leak:
    """A feature or a join key that reads columns from which the label is made.

    ``reader`` names it for people, ``table`` is the alias that has it.
    """

    reader: str
    table: str
    columns: tuple[str, ...]
    is_key: bool


def find_leaks(bound: BoundQuery) -> list[Leak]:
    """Return what reads the label's columns: features, the offset and joins.

    Features are those of any alias of the label's table: an aggregate over it has the
    label of every row in it. Without a label there are none.
    """
    of_label = {
        (fragment.name.lower(), read.column.lower())
        for fragment in bound.fragments_of(bound.label_table)
        for read in reads(fragment)
        if read.role in (Role.LABEL, Role.EVENT)
    }
    columns_of: dict[tuple[str, str, bool], dict[str, None]] = {}
    for fragment in bound.fragments:
        # the last keys may only name rows, or hold them out
        joined = replace(
            fragment, keys=fragment.keys[: bound.joined_keys(fragment.table)]
        )
        for read in reads(joined):
            if (fragment.name.lower(), read.column.lower()) not in of_label:
                continue
            is_key = read.role is Role.KEY and fragment.table == bound.label_table
            if is_key or read.role in (Role.FEATURE, Role.OFFSET):
                if is_key:
                    reader = _reader_of(bound, fragment.table, read.element)
                else:
                    reader = read.element
                columns_of.setdefault((reader, fragment.table, is_key), {})[
                    read.column
                ] = None
    return [
        Leak(reader, table, tuple(columns), is_key)
        for (reader, table, is_key), columns in columns_of.items()
    ]


def _reader_of(bound: BoundQuery, table: str, element: str) -> str:
    """Return the joins that compare a key of a table."""
    number = int(element.removeprefix("join key "))
    texts = [
        join.text
        for join in bound.joins
        if (table, number) in ((join.left, join.left_key), (join.right, join.right_key))
    ]
    return f"the join {' and '.join(texts)}"


def query_warnings(query: Query, bound: BoundQuery, columns: Columns) -> Iterator[str]:
    """Yield which parts of a query may mislead, once its columns are known."""
    for problem in columns.unread if query.has_stars else ():
        yield f"{problem}; * leaves it out"
    yield from reading_warnings(bound, columns)
    yield from leak_warnings(bound)
    yield from future_warnings(query, bound, columns)


def leak_warnings(bound: BoundQuery) -> Iterator[str]:
    """Yield warnings of what reads the label's columns, and of joins on them."""
    leaks = find_leaks(bound)
    for is_key in (False, True):
        chosen = [leak for leak in leaks if leak.is_key == is_key]
        if not chosen:
            continue
        readers = ", ".join(_name(leak) for leak in chosen[:MOST_NAMES])
        more = ""
        if len(chosen) > MOST_NAMES:
            more = f" and {len(chosen) - MOST_NAMES} more"
        columns = ", ".join(dict.fromkeys(c for leak in chosen for c in leak.columns))
        verb = "reads" if len(chosen) == 1 else "read"
        if is_key:
            consequence = "rows that it joins tell the label, and so do their columns"
        else:
            consequence = (
                "where that is not known before the label is, it tells the label"
            )
        yield (
            f"{readers}{more} {verb} {columns}, from which the label is made: "
            f"{consequence}, and test metrics flatter. Leave it out of the query then"
        )


def _name(leak: Leak) -> str:
    if leak.is_key:
        return leak.reader
    return f"{leak.reader} of {leak.table}"


def nearly_perfect(metrics: Mapping[str, float], target: Target) -> str:
    """Return the nearly perfect metric of predictions of a target, or "".

    >>> nearly_perfect({"r2": 0.99995}, Target.of(np.arange(5.0)))
    'R² 0.99995'
    """
    if (events := target.column(EVENT)) is not None:
        is_enough = int(np.count_nonzero(events)) >= LEAST_CLASS_ROWS
    elif target.classes:
        rows = np.sort(target.class_counts)
        # any classes but one could be told apart by chance
        is_enough = bool(rows[-2] >= LEAST_CLASS_ROWS)
    else:
        is_enough = len(target) >= LEAST_ROWS
    for metric, name in METRICS.items():
        if is_enough and metrics.get(metric, 0.0) > PERFECT:
            return f"{name} {metrics[metric]:.6g}"
    return ""


def perfect_warning(score: str, rows: str, bound: BoundQuery, suspects: str) -> str:
    """Return the warning of a nearly perfect score; it names the columns to look at."""
    if leaks := find_leaks(bound):
        suspects = ", ".join(_name(leak) for leak in leaks[:MOST_NAMES])
    return (
        f"{score} on {rows} is nearly perfect: either the label follows exactly from "
        f"the features, or one of them is made from the label. Look first at {suspects}"
    )


def feature_sizes(
    columns: Mapping[str, int], coefficients: FloatArray
) -> dict[str, float]:
    """Return the size of each feature's largest coefficient.

    ``coefficients`` (d, d_c) are of the encoded columns.

    >>> coefficients = np.array([[1.0], [0.5], [-3.0]])
    >>> feature_sizes({"age": 1, "same": 0, "region": 2}, coefficients)
    {'age': 1.0, 'region': 3.0}
    """
    names = [name for name, count in columns.items() for _ in range(count)]
    sizes: dict[str, float] = {}
    for name, size in zip(
        names, np.abs(coefficients).max(axis=1).tolist(), strict=False
    ):
        sizes[name] = max(size, sizes.get(name, 0.0))
    return sizes


def suspects_of(
    contributions: Mapping[str, Contribution],
    features: Mapping[str, Mapping[str, int]],
    coefficients: Mapping[str, FloatArray],
) -> str:
    """Return the feature of the table with the largest share, or the table's features.

    ``features`` are the numbers of their encoded columns, 0 of constant ones,
    ``coefficients`` (d [+ 1], d_c) those that sites show, both by table.

    >>> of_o = {"o": Contribution(np.zeros(1), 0.9)}
    >>> suspects_of(of_o, {"o": {"day": 1, "paid": 1, "same": 0}}, {})
    'the features of o (day, paid), which has 90 % of the variance of the scores'
    >>> coefficients = {"o": np.array([[0.1], [2.0], [9.0]])}
    >>> suspects_of(of_o, {"o": {"day": 1, "paid": 1}}, coefficients)
    "feature 'paid' of o, which has 90 % of the variance of the scores"
    """
    features_used = {
        t: [name for name, count in of_t.items() if count]
        for t, of_t in features.items()
    }
    shares = {
        table: contribution.share
        for table, contribution in contributions.items()
        if features_used.get(table) and contribution.share is not None
    }
    if not shares:
        return "the features of the query"
    table = max(shares, key=lambda name: shares[name])
    names = features_used[table]
    if table in coefficients:
        sizes = feature_sizes(features[table], coefficients[table])
        names = [max(sizes, key=lambda name: sizes[name])]
    share = f"which has {100 * shares[table]:.0f} % of the variance of the scores"
    if len(names) == 1:
        return f"feature {names[0]!r} of {table}, {share}"
    listed = ", ".join(names[:MOST_NAMES]) + (
        ", ..." if len(names) > MOST_NAMES else ""
    )
    return f"the features of {table} ({listed}), {share}"


def future_warnings(query: Query, bound: BoundQuery, columns: Columns) -> Iterator[str]:
    """Yield what the query reads of the time after a row's own."""
    correlations = {
        table.alias: correlation
        for table in query.statement.tables
        if (correlation := correlation_of(table)) is not None
    }
    for alias, correlation in correlations.items():
        (fragment,) = bound.fragments_of(alias)
        cutoff = correlation.cutoff
        if not correlation.looks_back:
            yield (
                f"LATERAL sub-query {alias!r} is not bounded by {cutoff}: it may read "
                f"later rows of {fragment.name}; t < {cutoff} keeps those before"
            )
        elif not correlation.last and (included := _at_cutoff(fragment)):
            yield (
                f"LATERAL sub-query {alias!r} counts rows of {fragment.name} at the "
                f"time of {cutoff} itself ({included}): if they come about with the "
                "row that is predicted, they tell its label; write < in place of <="
            )
    label_times = _times_of(bound, bound.label_table, columns)
    for fragment in bound.fragments if label_times else ():
        if times := _whenever(fragment, bound, columns):
            when = f"{bound.label_table}.{label_times[0]}"
            yield (
                f"table {fragment.table!r} aggregates all rows of {fragment.name}, "
                f"whenever they were ({', '.join(times)}): those after {when} tell its "
                f"future; LEFT JOIN LATERAL (SELECT ... WHERE t < {when}) takes those "
                "before it"
            )


def cutoff_warnings(bound: BoundQuery, extracted: Extracted) -> Iterator[str]:
    """Yield how many rows look back from a time that is not on the grid of cutoffs."""
    for join in bound.joins:
        (fragment, *_) = bound.fragments_of(join.right)
        cutoffs = fragment.subquery and fragment.subquery.cutoffs
        grid = cutoffs and cutoffs.grid
        if not grid:
            continue
        codes = [key.codes for key in extracted.keys[join.left, join.left_key]]
        off = sum(int(np.count_nonzero(each < 0)) for each in codes)
        if off:
            rows = sum(map(len, codes))
            yield (
                f"{off} of {rows} rows of table {join.left!r} have no row of "
                f"{join.right!r}: their cutoff is not within cutoff-grid, from "
                f"{grid.first} to {grid.last}, or a compared value is NULL"
            )


def _at_cutoff(fragment: Fragment) -> str:
    """Return a condition that keeps rows at the cutoff itself; "" without one."""
    subquery = fragment.subquery
    cutoff = quote_name(CUTOFF)
    for sql in subquery.filters if subquery else ():
        if sql.endswith((f"<= {cutoff}", f"AND {cutoff}")) or sql.startswith(
            f"{cutoff} >="
        ):
            return sql.replace(cutoff, "cutoff")
    return ""


def _times_of(bound: BoundQuery, table: str, columns: Columns) -> list[str]:
    """Return the columns of times of the tables behind an alias."""
    if not table:
        return []
    schemas = [columns.schemas[f.name] for f in bound.fragments_of(table)]
    times = [n for schema in schemas for n in schema if kind_of(schema[n]) == "time"]
    return list(dict.fromkeys(times))


def _whenever(fragment: Fragment, bound: BoundQuery, columns: Columns) -> list[str]:
    """Return the times that a sub-query which aggregates rows does not look at."""
    subquery = fragment.subquery
    if subquery is None or not subquery.groups or subquery.cutoffs is not None:
        return []
    if not fragment.features:
        return []
    times = _times_of(bound, fragment.table, columns)
    compared = {
        read.column.lower() for read in reads(fragment) if read.role in _CONDITIONS
    }
    return [] if compared & {time.lower() for time in times} else times
