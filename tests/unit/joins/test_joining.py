"""One table joined to those before it: against DuckDB's LEFT and INNER JOINs."""

from collections import Counter
from itertools import pairwise

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.joined import number_key
from tp_flower.errors import MappingError
from tp_flower.joins.joining import build_mapping
from tp_flower.query import Join

COLUMNS = ("a", "b")


@st.composite
def queries(draw):
    """(rows of every table, predicates, LEFT JOINed tables, label table)."""
    count = draw(st.integers(2, 4))
    value = st.sampled_from([0, 0, 1, 1, 2, None])
    tables = {
        f"t{n}": draw(st.lists(st.tuples(value, value), min_size=1, max_size=5))
        for n in range(count)
    }
    outer = {f"t{n}" for n in range(1, count) if draw(st.booleans())}
    predicates = []
    for number in range(1, count):
        table = f"t{number}"
        # an INNER JOIN on a nullable table would make it INNER as well
        allowed = [
            other
            for other in list(tables)[:number]
            if table in outer or other not in outer
        ]
        column = st.sampled_from(COLUMNS)
        predicates += draw(
            st.lists(
                st.tuples(st.just(table), st.sampled_from(allowed), column, column),
                min_size=1,
                max_size=3,
                unique=True,
            )
        )
    label = draw(st.sampled_from([table for table in tables if table not in outer]))
    return tables, predicates, outer, label


def build(tables, predicates, outer=(), label="t0", **limits):
    joins, keys = [], {}
    for table, rows in tables.items():
        for number, column in enumerate(zip(*rows, strict=True)):
            keys[table, number] = [number_key(column)]
    for table, other, own, theirs in predicates:
        sides = [(table, COLUMNS.index(own)), (other, COLUMNS.index(theirs))]
        sides.sort()
        (left, left_key), (right, right_key) = sides
        text = f"{table}.{own} = {other}.{theirs}"
        joins.append(Join(left, right, left_key, right_key, text=text))
    sizes = {table: len(rows) for table, rows in tables.items()}
    return build_mapping(joins, keys, sizes, label, outer, **limits)


def joined_by_duckdb(tables, predicates, outer):
    """Joined rows as tuples of row numbers, -1 where a LEFT JOIN found none."""
    source = "FROM t0"
    with duckdb.connect() as connection:
        for table, rows in tables.items():
            frame = pd.DataFrame(
                {
                    "position": range(len(rows)),
                    **{
                        name: pd.array([row[n] for row in rows], dtype="Int64")
                        for n, name in enumerate(COLUMNS)
                    },
                }
            )
            connection.register(table, frame)
            on = " AND ".join(
                f"{own[0]}.{own[2]} = {own[1]}.{own[3]}"
                for own in predicates
                if own[0] == table
            )
            if on:
                kind = "LEFT JOIN" if table in outer else "JOIN"
                source += f" {kind} {table} ON {on}"
        columns = ", ".join(f"coalesce({table}.position, -1)" for table in tables)
        return connection.execute(f"SELECT {columns} {source}").fetchall()


@settings(max_examples=150, deadline=None)
@given(queries())
def test_left_and_inner_joins_are_duckdbs(query):
    tables, predicates, outer, label = query
    expected = sorted(joined_by_duckdb(tables, predicates, outer))
    if not expected:
        with pytest.raises(MappingError, match="the join has no rows"):
            build(tables, predicates, outer, label)
        return
    mapping, steps = build(tables, predicates, outer, label)
    columns = [mapping.tables[table].row_of.tolist() for table in tables]
    assert sorted(zip(*columns, strict=True)) == expected
    assert all(rows.row_of.dtype == np.int32 for rows in mapping.tables.values())
    # the order: the label table's rows, then the tables' in the order of joining
    assert steps[0].table == label
    in_order = [mapping.tables[step.table].row_of.tolist() for step in steps]
    listed = list(zip(*in_order, strict=True))
    assert listed == sorted(listed)


@settings(max_examples=100, deadline=None)
@given(queries())
def test_the_last_step_says_what_it_did(query):
    tables, predicates, outer, label = query
    try:
        mapping, steps = build(tables, predicates, outer, label)
    except MappingError:
        return
    for before, after in pairwise(steps):
        assert after.rows_before == before.rows
        assert after.is_outer == (after.table in outer)
    last = steps[-1]
    others = [mapping.tables[step.table].row_of.tolist() for step in steps[:-1]]
    groups = Counter(zip(*others, strict=True))
    fan_out = [*groups.values(), *[0] * (last.rows_before - len(groups))]
    own = mapping.tables[last.table]
    assert last.rows == sum(fan_out)
    assert last.fan_out_min == min(fan_out)
    assert last.fan_out_median == np.median(fan_out)
    assert last.fan_out_max == max(fan_out)
    missing = int((own.row_of < 0).sum())
    assert last.unmatched_before == fan_out.count(0) + missing
    assert last.unmatched_rows == int((own.multiplicity == 0).sum())


LEFT = [("t1", "t0", "a", "a")]


def test_too_many_rows_are_refused_before_they_are_made():
    # 1000 * 1000 rows of one key, and three of them again: 3 * 10**12 would not fit
    many = [(1, 1)] * 100_000
    tables = {"t0": [(1, 1)] * 3, "t1": many, "t2": many}
    chain = [*LEFT, ("t2", "t1", "b", "b")]
    with pytest.raises(
        MappingError,
        match=r"the join multiplies rows: t2 on t2\.b = t1\.b: 300000 rows become "
        r"30000000000 \(fan-out min 100000, median 100000, max 100000\); "
        r"max-joined-rows allows 400000\. Before it: t0: 3 rows; t1 on t1\.a = t0\.a: "
        r"3 rows become 300000 \(.*\)\. Aggregate t2 in a sub-query .* or raise",
    ):
        build(tables, chain, max_joined_rows=400_000)


@pytest.mark.parametrize(
    ("left", "right"),
    [((1, None), (0, 1)), ((0, 1), (1, None)), ((1, None), (1, None))],
)
def test_a_key_of_two_columns_with_one_null_meets_nothing(left, right):
    """Nor the key whose codes are those of a neighbouring pair."""
    predicates = [("t1", "t0", "a", "a"), ("t1", "t0", "b", "b")]
    tables = {"t0": [left, (0, 0)], "t1": [right, (0, 0)]}
    mapping, _ = build(tables, predicates, outer={"t1"})
    assert mapping.tables["t1"].row_of.tolist() == [-1, 1]


def test_the_limit_itself_is_allowed():
    tables = {"t0": [(1, 0)] * 3, "t1": [(1, 0)] * 4}
    mapping, _ = build(tables, LEFT, max_joined_rows=12)
    assert mapping.joined_rows == 12
    with pytest.raises(MappingError, match=r"become 12 .*allows 11"):
        build(tables, LEFT, max_joined_rows=11)


def test_a_left_joined_table_waits_for_those_before_it():
    tables = {"t0": [(1, 1)], "t1": [(1, 1)], "t2": [(1, 1)]}
    predicates = [("t1", "t0", "a", "a"), ("t2", "t0", "b", "b")]
    _, steps = build(tables, predicates, {"t1"}, label="t2")
    assert [step.table for step in steps] == ["t2", "t0", "t1"]
