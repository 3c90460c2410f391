"""The mapping against the joined table that DuckDB materialises."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.joined import map_rows, number_key
from tests.support.reference import joins as slow
from tp_flower.errors import MappingError
from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins.joining import JoinStep, build_mapping
from tp_flower.joins.mapping import TableMapping, TableRows, split_rows
from tp_flower.query import Join, Query
from tp_flower.sources.shards import describe, load_tables, register_frames, release

# each example opens DuckDB once per shard and key
few = settings(max_examples=40, deadline=None)


def mapping_of(shards, sql):
    """Extract every shard by itself, and build the mapping from the hashed keys."""
    token = register_frames({name: list(own) for name, own in shards.items()}, "here")
    try:
        sources = load_tables(f"memory:{token}")
        schemas = {source.table: describe(source).columns for source in sources}
        bound = Query.from_sql(sql).bind(schemas)
        extracted = {
            fragment.table: [
                extract(source, fragment)
                for source in sources
                if source.table == fragment.name
            ]
            for fragment in bound.fragments
        }
        return map_rows(bound, extracted)
    finally:
        release(token)


def positions(mapping: TableMapping, aliases) -> list[tuple[int, ...]]:
    columns = [mapping.tables[alias].row_of.tolist() for alias in aliases]
    return list(zip(*columns, strict=True))


# random schemas

KEY_COLUMNS = ("a", "b", "c")


def key_frame(rows, kinds) -> pd.DataFrame:
    """A table of key columns; None is NULL."""
    columns = {}
    for name, kind, values in zip(
        KEY_COLUMNS, kinds, zip(*rows, strict=True), strict=True
    ):
        if kind == "text":
            texts = [None if value is None else f"k{value}" for value in values]
            columns[name] = pd.array(texts, dtype="str")
        elif kind == "float":
            columns[name] = np.array(values, dtype=np.float64)
        else:
            columns[name] = pd.array(values, dtype="Int64")
    return pd.DataFrame({**columns, "x": np.arange(len(rows), dtype=np.float64)})


@st.composite
def databases(draw):
    """(shards by table, FROM clause): trees of 2 to 4 tables, and cycles in them."""
    count = draw(st.integers(2, 4))
    shape = draw(st.sampled_from(["star", "chain", "snowflake"]))
    # one kind per column everywhere: the columns of a join must agree
    kinds = ("integer", draw(st.sampled_from(["integer", "float"])), "text")
    # few values, mostly 0, so that most joins have some rows
    value = st.sampled_from([0, 0, 0, 1, 1, 2, None])
    row = st.tuples(value, value, value)
    shards = {}
    for table in range(count):
        rows = draw(st.lists(row, min_size=2, max_size=6))
        cut = draw(st.integers(0, len(rows) - 1))
        pieces = [rows[:cut], rows[cut:]] if cut else [rows]
        shards[f"t{table}"] = [key_frame(piece, kinds) for piece in pieces]

    def predicate(left: int, right: int) -> str:
        pairs = draw(
            st.lists(
                st.sampled_from(
                    [("a", "a"), ("b", "b"), ("c", "c"), ("a", "b"), ("b", "a")]
                ),
                min_size=1,
                max_size=draw(st.sampled_from([1, 1, 2])),
                unique=True,
            )
        )
        return " AND ".join(f"t{left}.{x} = t{right}.{y}" for x, y in pairs)

    source = "FROM t0"
    for table in range(1, count):
        parent = {"star": 0, "chain": table - 1}.get(shape)
        if parent is None:
            parent = draw(st.integers(0, table - 1))
        condition = predicate(parent, table)
        others = [other for other in range(table) if other != parent]
        if others and draw(st.booleans()):
            # closes a cycle
            condition += " AND " + predicate(draw(st.sampled_from(others)), table)
        source += f" JOIN t{table} ON {condition}"
    return shards, source


@few
@given(databases(), st.sampled_from(["t0", "t1"]))
def test_mapping_is_duckdbs_join_as_a_multiset(database, label):
    shards, source = database
    sql = f"SELECT 2 * {label}.x AS label, t0.x AS u, t1.x AS v {source}"
    aliases = {name: name for name in shards}
    expected = slow.joined_positions(shards, aliases, source)
    if not expected:
        with pytest.raises(MappingError, match="the join has no rows; rows left"):
            mapping_of(shards, sql)
        return
    mapping, steps = mapping_of(shards, sql)
    assert sorted(positions(mapping, aliases)) == expected
    assert mapping.joined_rows == len(expected)
    assert sorted(step.table for step in steps) == sorted(aliases)
    assert steps[-1].rows == len(expected)
    in_label_order = mapping.tables[label].row_of
    assert (np.diff(in_label_order) >= 0).all()
    for position, alias in enumerate(aliases):
        counts = [0] * mapping.tables[alias].rows
        for row in expected:
            counts[row[position]] += 1
        assert mapping.tables[alias].multiplicity.tolist() == counts


def table(*rows, kinds=("integer", "integer", "text")) -> pd.DataFrame:
    return key_frame(rows, kinds)


def test_many_to_many_by_hand():
    # t0 rows 0, 1 and t1 rows 0, 2 share a = 1: four joined rows; NULL meets nothing
    left = table((1, 0, 0), (1, 0, 0), (2, 0, 0), (None, 0, 0))
    right = table((1, 0, 0), (None, 0, 0), (1, 0, 0), (3, 0, 0))
    mapping, steps = mapping_of(
        {"t0": [left], "t1": [right]},
        "SELECT t0.x AS label, t1.x FROM t0 JOIN t1 ON t0.a = t1.a",
    )
    assert positions(mapping, ["t0", "t1"]) == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert mapping.tables["t0"].multiplicity.tolist() == [2, 2, 0, 0]
    assert mapping.tables["t1"].multiplicity.tolist() == [2, 0, 2, 0]
    assert steps == (
        JoinStep("t0", 4),
        # of t0 two rows meet nothing, of t1 two
        JoinStep("t1", 4, "t0.a = t1.a", False, 4, 0, 1.0, 2, 2, 2),
    )


def test_table_names_may_need_quotes():
    left = table((1, 0, 0), (2, 0, 0))
    mapping, _ = mapping_of(
        {"order": [left], "t1": [left]},
        'SELECT "group".x AS label, "a b".x FROM "order" "group" '
        'JOIN t1 "a b" ON "group".a = "a b".a',
    )
    assert positions(mapping, ["group", "a b"]) == [(0, 0), (1, 1)]


# keys without a site


JOIN = Join("l", "r", 0, 0, text="l.k = r.k")


def build(left, right, joins=(JOIN,)):
    keys = {("l", 0): left, ("r", 0): right}
    rows = {"l": sum(len(k.codes) for k in left), "r": sum(len(k.codes) for k in right)}
    return build_mapping(joins, keys, rows, "l")


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (
            [number_key([1])],
            [number_key([1], "text")],
            r"differ in type: l: number, r:",
        ),
        (
            [number_key([1]), number_key([3], "time")],
            [number_key([1])],
            "number or time",
        ),
    ],
)
def test_kinds_that_differ_are_refused(left, right, message):
    with pytest.raises(MappingError, match=rf"join l\.k = r\.k .*{message}"):
        build(left, right)


def test_a_shard_without_values_has_no_kind():
    mapping, _ = build(
        [number_key([1, 2]), number_key([None, None], "text")], [number_key([2, 1])]
    )
    assert positions(mapping, ["l", "r"]) == [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([5, 6], [[5, 7], [5, 6], [6, 5]]),
        # unsigned numbers of 64 bits
        ([2**64 - 1, 2**63], [[2**64 - 2, 2**63], [2**64 - 1, 2**63]]),
    ],
)
def test_equal_hashes_need_both_halves(left, right):
    sides = [
        KeyColumn(np.arange(len(rows), dtype=np.int32), np.array(rows, np.uint64), "n")
        for rows in ([left], right)
    ]
    mapping, _ = build(sides[:1], sides[1:])
    assert positions(mapping, ["l", "r"]) == [(0, 1)]


def test_unconnected_tables_are_refused():
    with pytest.raises(MappingError, match=r"tables \['r'\] are not joined to \['l'\]"):
        build([number_key([1])], [number_key([1])], joins=())


def test_one_table_maps_to_itself():
    mapping, steps = build_mapping([], {}, {"t": 3}, "t")
    assert mapping.tables["t"].row_of.tolist() == [0, 1, 2]
    assert steps == (JoinStep("t", 3),)


# laws of the two directions


@st.composite
def table_rows(draw):
    rows = draw(st.integers(1, 9))
    if draw(st.booleans()):
        numbers = draw(st.permutations(range(rows)))
        row_of = numbers[: draw(st.integers(1, rows))]
    else:
        row_of = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20))
    # -1: a joined row without a row of the table
    for place in draw(st.lists(st.integers(0, len(row_of)), max_size=4)):
        row_of = [*row_of[:place], -1, *row_of[place:]]
    return TableRows(np.array(row_of, np.int32), rows)


@given(table_rows(), st.integers(1, 3), st.integers(0, 2**32 - 1))
@example(TableRows(np.array([2, 0], np.int32), 3), 2, 0)
@example(TableRows(np.array([-1, -1], np.int32), 3), 2, 0)
@example(TableRows(np.array([-1, 0, 1, -1, -1, 2], np.int32), 3), 1, 0)
@settings(deadline=None)
def test_expand_and_segment_sum_are_adjoint(rows, outputs, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows.rows, outputs))
    y = rng.normal(size=(len(rows.row_of), outputs))
    left = float((rows.expand(x) * y).sum())
    right = float((x * rows.segment_sum(y)).sum())
    assert left == pytest.approx(right, abs=1e-10)
    np.testing.assert_array_equal(rows.expand(x), slow.expand(rows.row_of, x))
    np.testing.assert_allclose(
        rows.segment_sum(y), slow.segment_sum(rows.row_of, rows.rows, y), atol=1e-12
    )


@given(table_rows())
@settings(deadline=None)
def test_collapse_of_ones_is_the_multiplicity(rows):
    ones = np.ones((len(rows.row_of), 1))
    np.testing.assert_array_equal(rows.segment_sum(ones)[:, 0], rows.multiplicity)
    assert rows.multiplicity.sum() == np.count_nonzero(rows.row_of >= 0)
    assert rows.has_missing == (-1 in rows.row_of)
    assert rows.is_injective == (rows.multiplicity.max() <= 1)


def test_a_missing_row_adds_nothing_to_the_scores():
    mapping = TableMapping(
        {
            "l": TableRows(np.array([0, 1, 2], np.int32), 3),
            "r": TableRows(np.array([1, -1, 1], np.int32), 2),
        }
    )
    local = {"l": np.array([[1.0], [2.0], [3.0]]), "r": np.array([[10.0], [20.0]])}
    scores = mapping.sum_scores(np.array([0.5]), local)
    assert scores.ravel().tolist() == [21.5, 2.5, 23.5]


def test_select_keeps_the_chosen_joined_rows():
    rows = TableRows(np.array([0, 0, 1, 2], np.int32), 4)
    mapping = TableMapping({"l": rows})
    chosen = mapping.select(np.array([True, False, True, False]))
    assert chosen.tables["l"].row_of.tolist() == [0, 1]
    assert chosen.tables["l"].rows == 4
    assert mapping.joined_rows == 4
    assert chosen.joined_rows == 2


def test_tables_with_different_joined_rows_are_refused():
    with pytest.raises(MappingError, match=r"differ in their joined rows: .*'l': 1"):
        TableMapping(
            {
                "l": TableRows(np.zeros(1, np.int32), 1),
                "r": TableRows(np.zeros(2, np.int32), 1),
            }
        )


@pytest.mark.parametrize(("rows", "fraction", "held"), [(10, 0.2, 2), (7, 0.5, 4)])
def test_split_holds_out_a_share_of_the_rows(rows, fraction, held):
    first = split_rows(rows, fraction, np.random.default_rng(0))
    again = split_rows(rows, fraction, np.random.default_rng(0))
    other = split_rows(50, 0.5, np.random.default_rng(1))
    assert first.sum() == held
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(other, split_rows(50, 0.5, np.random.default_rng(0)))
