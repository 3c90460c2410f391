"""Joining against DuckDB's LEFT and INNER JOINs; the laws of mappings and batches."""

from collections import Counter
from itertools import chain, pairwise
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.joined import number_key
from tests.support.reference import joins as slow
from tests.support.tables.mappings import one_to_one, table_rows
from tp_flower.errors import MappingError
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins import matching
from tp_flower.joins.batches import plan_batches
from tp_flower.joins.joining import JoinStep, RowLimits, build_mapping
from tp_flower.joins.mapping import TableMapping, TableRows, number_type
from tp_flower.query import Join
from tp_flower.splits import split_rows

COLUMNS = ("a", "b")
NO_LIMITS = RowLimits()
LEFT = [("t1", "t0", "a", "a")]
JOIN = Join("l", "r", 0, 0, text="l.k = r.k")


@st.composite
def queries(draw):
    """(rows of every shard by table, predicates, LEFT JOINed tables, label table)."""
    count = draw(st.integers(2, 4))
    value = st.sampled_from([0, 0, 1, 1, 2, None])
    tables = {}
    for number in range(count):
        rows = draw(st.lists(st.tuples(value, value), min_size=1, max_size=6))
        cut = draw(st.integers(0, len(rows) - 1))
        tables[f"t{number}"] = [rows[:cut], rows[cut:]] if cut else [rows]
    outer = {f"t{n}" for n in range(1, count) if draw(st.booleans())}
    predicates = []
    for number in range(1, count):
        table = f"t{number}"
        # an INNER JOIN on a nullable table would make it INNER as well
        before = list(tables)[:number]
        allowed = [each for each in before if table in outer or each not in outer]
        column = st.sampled_from(COLUMNS)
        sides = st.tuples(st.just(table), st.sampled_from(allowed), column, column)
        predicates += draw(st.lists(sides, min_size=1, max_size=3, unique=True))
    label = draw(st.sampled_from([table for table in tables if table not in outer]))
    return tables, predicates, outer, label


def build(tables, predicates, outer=(), label="t0", limits=NO_LIMITS):
    joins = []
    sizes = {}
    keys = {(table, number): [] for table in tables for number in range(len(COLUMNS))}
    for table, shards in tables.items():
        sizes[table] = sum(map(len, shards))
        for rows in shards:
            for number, column in enumerate(zip(*rows, strict=True)):
                keys[table, number].append(number_key(column))
    for table, other, ours, theirs in predicates:
        sides = [(table, COLUMNS.index(ours)), (other, COLUMNS.index(theirs))]
        sides.sort()
        (left, left_key), (right, right_key) = sides
        text = f"{table}.{ours} = {other}.{theirs}"
        joins.append(Join(left, right, left_key, right_key, text=text))
    return build_mapping(joins, keys, sizes, label, outer, limits)


def joined_by_duckdb(tables, predicates, outer):
    """Joined rows as tuples of row numbers, -1 where a LEFT JOIN found none."""
    frames = {
        table: [pd.DataFrame(rows, columns=COLUMNS, dtype="Int64") for rows in shards]
        for table, shards in tables.items()
    }
    source = "FROM t0"
    for table in list(tables)[1:]:
        on = " AND ".join(
            f"{right}.{column} = {other}.{theirs}"
            for right, other, column, theirs in predicates
            if right == table
        )
        source += f" {'LEFT JOIN' if table in outer else 'JOIN'} {table} ON {on}"
    return slow.joined_positions(frames, {name: name for name in tables}, source)


@settings(max_examples=150)
@given(queries(), st.sampled_from([1, 2, 3, matching.PART_ROWS]))
def test_left_and_inner_joins_are_duckdbs(query, part_rows):
    """However many rows are matched and written at a time."""
    with patch.object(matching, "PART_ROWS", part_rows):
        check_joins(*query)


def check_joins(tables, predicates, outer, label):
    expected = joined_by_duckdb(tables, predicates, outer)
    if not expected:
        with pytest.raises(MappingError, match="the join has no rows; rows left"):
            build(tables, predicates, outer, label)
        return
    mapping, steps = build(tables, predicates, outer, label)
    columns = [rows_behind(mapping, table) for table in tables]
    assert sorted(zip(*columns, strict=True)) == expected
    assert mapping.joined_rows == len(expected)
    for rows, numbers in zip(mapping.tables.values(), columns, strict=True):
        assert rows.row_of.dtype == number_type(rows.rows)
        counts = [numbers.count(row) for row in range(rows.rows)]
        assert rows.multiplicity.tolist() == counts
    # the order: the label table's rows, then the tables' in the order of joining
    assert steps[0].table == label
    in_order = [rows_behind(mapping, step.table) for step in steps]
    listed = list(zip(*in_order, strict=True))
    assert listed == sorted(listed)
    check_steps(mapping, steps, outer)
    if len(steps) > 1:
        keyless = keyless_before(tables, predicates, outer, label, steps[-1].table)
        assert steps[-1].keyless_before == keyless


def keyless_before(tables, predicates, outer, label, last):
    """How many joined rows before the last step lack a key of it, one by one."""
    others = {name: shards for name, shards in tables.items() if name != last}
    of_last = [each for each in predicates if last in each[:2]]
    before, _ = build(
        others, [each for each in predicates if each not in of_last], outer, label
    )
    rows = {name: [*chain(*shards)] for name, shards in others.items()}
    sides = [
        (other, COLUMNS.index(theirs))
        if table == last
        else (table, COLUMNS.index(ours))
        for table, other, ours, theirs in of_last
    ]
    keys = zip(
        *(
            [
                None if row < 0 else rows[table][row][column]
                for row in rows_behind(before, table)
            ]
            for table, column in sides
        ),
        strict=True,
    )
    return sum(None in each for each in keys)


def rows_behind(mapping, table):
    """The rows of a table behind the joined rows."""
    return mapping.tables[table].row_of.tolist()


def check_steps(mapping, steps, outer):
    """Steps follow each other, and the last one counts what it did."""
    for before, after in pairwise(steps):
        assert after.rows_before == before.rows
        assert after.is_outer == (after.table in outer)
    last = steps[-1]
    others = [rows_behind(mapping, step.table) for step in steps[:-1]]
    groups = Counter(zip(*others, strict=True))
    fan_out = [*groups.values(), *[0] * (last.rows_before - len(groups))]
    rows = mapping.tables[last.table]
    assert last.rows == sum(fan_out)
    assert last.fan_out_min == min(fan_out)
    assert last.fan_out_median == np.median(fan_out)
    assert last.fan_out_max == max(fan_out)
    assert last.unmatched_before == fan_out.count(0) + int((rows.row_of < 0).sum())
    assert last.unmatched_rows == int((rows.multiplicity == 0).sum())


def test_many_to_many_by_hand():
    # t0 rows 0, 1 and t1 rows 0, 2 share a = 1: four joined rows; NULL meets nothing
    left = [(1, 0), (1, 0), (2, 0), (None, 0)]
    right = [(1, 0), (None, 0), (1, 0), (3, 0)]
    mapping, steps = build({"t0": [left], "t1": [right]}, LEFT)
    assert rows_behind(mapping, "t0") == [0, 0, 1, 1]
    assert rows_behind(mapping, "t1") == [0, 2, 0, 2]
    # of t0 two rows meet nothing, of t1 two
    step = JoinStep("t1", 4, "t1.a = t0.a", False, 4, 0, 1.0, 2, 2, 2, 2, 1, 1)
    assert steps == (JoinStep("t0", 4), step)
    mapping, steps = build_mapping([], {}, {"t": 3}, "t")
    assert rows_behind(mapping, "t") == [0, 1, 2]
    assert steps == (JoinStep("t", 3),)


def test_too_many_rows_are_refused_before_they_are_made():
    # 1000 * 1000 rows of one key, and three of them again: 3 * 10**12 would not fit
    many = [(1, 1)] * 100_000
    tables = {"t0": [[(1, 1)] * 3], "t1": [many], "t2": [many]}
    with pytest.raises(
        MappingError,
        match=r"the join multiplies rows: t2 on t2\.b = t1\.b: 300000 rows become "
        r"30000000000 \(fan-out min 100000, median 100000, max 100000\); "
        r"max-joined-rows allows 400000\. Before it: t0: 3 rows; t1 on t1\.a = t0\.a: "
        r"3 rows become 300000 \(.*\)\. Aggregate t2 in a sub-query .* or raise",
    ):
        build(tables, [*LEFT, ("t2", "t1", "b", "b")], limits=RowLimits(400_000))
    # the limit itself is allowed
    tables = {"t0": [[(1, 0)] * 3], "t1": [[(1, 0)] * 4]}
    assert build(tables, LEFT, limits=RowLimits(12))[0].joined_rows == 12
    with pytest.raises(MappingError, match=r"become 12 .*allows 11"):
        build(tables, LEFT, limits=RowLimits(11))


@pytest.mark.parametrize(
    ("left", "right"),
    [((1, None), (0, 1)), ((0, 1), (1, None)), ((1, None), (1, None))],
)
def test_a_key_of_two_columns_with_one_null_meets_nothing(left, right):
    """Nor the key whose codes are those of a neighbouring pair."""
    predicates = [("t1", "t0", "a", "a"), ("t1", "t0", "b", "b")]
    tables = {"t0": [[left, (0, 0)]], "t1": [[right, (0, 0)]]}
    mapping, _ = build(tables, predicates, outer={"t1"})
    assert rows_behind(mapping, "t1") == [-1, 1]


def test_a_left_joined_table_waits_for_those_before_it():
    tables = {name: [[(1, 1)]] for name in ("t0", "t1", "t2")}
    predicates = [("t1", "t0", "a", "a"), ("t2", "t0", "b", "b")]
    _, steps = build(tables, predicates, {"t1"}, label="t2")
    assert [step.table for step in steps] == ["t2", "t0", "t1"]


def join_keys(left, right, joins=(JOIN,)):
    """Rows of both tables, by joined row."""
    keys = {("l", 0): left, ("r", 0): right}
    rows = {name: sum(len(k.codes) for k in parts) for (name, _), parts in keys.items()}
    mapping, _ = build_mapping(joins, keys, rows, "l")
    return [rows_behind(mapping, name) for name in "lr"]


def test_keys_that_do_not_fit_are_refused():
    one = number_key([1])
    text = number_key([1], "text")
    for left, joins, message in (
        ([text], [JOIN], r"l\.k = r\.k differ in type: l: tex"),
        ([one, number_key([3], "time")], [JOIN], "l: number or time, r: number"),
        ([one], [], r"tables \['r'\] are not joined to \['l'\]"),
    ):
        with pytest.raises(MappingError, match=message):
            join_keys(left, [one], joins)
    # a shard without values has no kind
    left = [number_key([1, 2]), number_key([None, None], "text")]
    assert join_keys(left, [number_key([2, 1])]) == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([5, 6], [[5, 7], [5, 6], [6, 5]]),
        # unsigned numbers of 64 bits
        ([2**64 - 1, 2**63], [[2**64 - 2, 2**63], [2**64 - 1, 2**63]]),
    ],
)
def test_equal_hashes_need_both_halves(left, right):
    one, other = (
        KeyColumn(np.arange(len(rows), dtype=np.int32), np.array(rows, np.uint64), "n")
        for rows in ([left], right)
    )
    assert join_keys([one], [other]) == [[0], [1]]


@st.composite
def tables_of_rows(draw):
    rows = draw(st.integers(1, 9))
    if draw(st.booleans()):
        row_of = draw(st.permutations(range(rows)))[: draw(st.integers(1, rows))]
    else:
        row_of = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=20))
    # -1: a joined row without a row of the table
    for place in draw(st.lists(st.integers(0, len(row_of)), max_size=4)):
        row_of = [*row_of[:place], -1, *row_of[place:]]
    return table_rows(row_of, rows)


@given(tables_of_rows(), st.integers(1, 3), st.integers(0, 2**32 - 1))
@example(table_rows([2, 0], 3), 2, 0)
@example(table_rows([-1, -1], 3), 2, 0)
@example(table_rows([-1, 0, 1, -1, -1, 2], 3), 1, 0)
def test_expand_and_segment_sum_are_adjoint(rows, outputs, seed):
    rng = default_rng(seed)
    x = rng.normal(size=(rows.rows, outputs))
    y = rng.normal(size=(len(rows.row_of), outputs))
    left = float((rows.expand(x) * y).sum())
    right = float((x * rows.segment_sum(y)).sum())
    assert left == pytest.approx(right, abs=1e-10)
    assert_array_equal(rows.expand(x), slow.expand(rows.row_of, x))
    assert_allclose(
        rows.segment_sum(y), slow.segment_sum(rows.row_of, rows.rows, y), atol=1e-12
    )
    ones = np.ones((len(rows.row_of), 1))
    assert_array_equal(rows.segment_sum(ones)[:, 0], rows.multiplicity)
    assert rows.multiplicity.sum() == np.count_nonzero(rows.row_of >= 0)
    assert rows.has_missing == (-1 in rows.row_of) == rows.is_absent.any()
    assert rows.is_injective == (rows.multiplicity.max() <= 1)


@given(tables_of_rows(), st.integers(0, 2**32 - 1))
@example(table_rows([-1, -1], 3), 0)
def test_what_is_asked_about_each_row_is_that_of_loops(rows, seed):
    rng = default_rng(seed)
    joined = len(rows.row_of)
    values = rng.normal(size=joined)
    is_marked = rng.random(joined) < 0.5
    is_chosen = rng.random(rows.rows) < 0.5
    behind = [np.flatnonzero(rows.row_of == row) for row in range(rows.rows)]
    assert rows.any_of(is_marked).tolist() == [is_marked[of].any() for of in behind]
    low, high = rows.extremes(values)
    assert low.tolist() == [values[of].min(initial=np.inf) for of in behind]
    assert high.tolist() == [values[of].max(initial=-np.inf) for of in behind]
    chosen = [behind[row] for row in np.flatnonzero(is_chosen)]
    assert rows.by_row(is_chosen).tolist() == [row for of in chosen for row in of]
    numbers = rng.permutation(rows.rows).astype(np.int32)
    renumbered = rows.renumber(numbers, rows.rows)
    expected = [numbers[row] if row >= 0 else -1 for row in rows.row_of]
    assert renumbered.row_of.tolist() == expected
    assert renumbered.row_of.dtype == number_type(renumbered.rows)


def test_a_missing_row_adds_nothing_to_the_scores():
    tables = {"l": table_rows([0, 1, 2], 3), "r": table_rows([1, -1, 1], 2)}
    mapping = TableMapping(tables)
    local = {"l": np.array([[1.0], [2.0], [3.0]]), "r": np.array([[10.0], [20.0]])}
    assert mapping.expand(local).ravel().tolist() == [21.0, 2.0, 23.0]
    by_table = mapping.expand(local, by_table=True)
    assert by_table[:, :, 0].tolist() == [[1.0, 20.0], [2.0, 0.0], [3.0, 20.0]]
    means = {"r": np.array([0.5])}
    assert mapping.stand_in(means).ravel().tolist() == [0.0, 0.5, 0.0]
    stand_in = mapping.stand_in(means, by_table=True)
    assert stand_in[:, :, 0].tolist() == [[0.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
    chosen = mapping.select(np.array([True, False, True]))
    assert rows_behind(chosen, "l") == [0, 2]
    assert chosen.tables["l"].rows == 3
    assert mapping.joined_rows == 3
    assert chosen.joined_rows == 2
    with pytest.raises(MappingError, match=r"differ in their joined rows: .*'l': 1"):
        TableMapping({"l": table_rows([0], 1), "r": table_rows([0, 0], 1)})


@pytest.mark.parametrize(("rows", "fraction", "held"), [(10, 0.2, 2), (7, 0.5, 4)])
def test_split_holds_out_a_share_of_the_rows(rows, fraction, held):
    first = split_rows(rows, fraction, default_rng(0))
    again = split_rows(rows, fraction, default_rng(0))
    other = split_rows(50, 0.5, default_rng(1))
    assert first.sum() == held
    assert_array_equal(first, again)
    assert not np.array_equal(other, split_rows(50, 0.5, default_rng(0)))


@st.composite
def mappings(draw):
    """A mapping of two tables."""
    total = draw(st.integers(1, 25))
    tables = {}
    for name in ("a", "b"):
        rows = draw(st.integers(1, 8))
        # -1: a joined row without a row of the table
        numbers = st.integers(-1, rows - 1)
        row_of = draw(st.lists(numbers, min_size=total, max_size=total))
        tables[name] = table_rows(row_of, rows)
    return TableMapping(tables)


@st.composite
def plans(draw):
    """(mapping of two tables, plan of batches, batch size)."""
    mapping = draw(mappings())
    size = draw(st.integers(1, mapping.joined_rows))
    seed = draw(st.integers(0, 99))
    return mapping, plan_batches(mapping, size, default_rng(seed)), size


@given(plans())
def test_tables_see_the_distinct_rows_of_each_batch(drawn):
    mapping, plan, size = drawn
    total = mapping.joined_rows
    batches = [plan.order[plan.slice(batch)] for batch in range(plan.batches)]
    sizes = [len(batch) for batch in batches]
    # a partition, in batches of one size but for the last
    assert sorted(plan.order.tolist()) == list(range(total))
    assert sizes == [size] * (total // size) + [total % size] * (total % size > 0)
    for name, rows in mapping.tables.items():
        for batch, joined in enumerate(batches):
            distinct = sorted({int(rows.row_of[row]) for row in joined} - {-1})
            assert plan.tables[name].of(batch).tolist() == distinct
            slots = plan.tables[name].slots[plan.slice(batch)]
            actual = [distinct[slot] if slot >= 0 else -1 for slot in slots]
            assert actual == rows.row_of[joined].tolist()


@given(plans(), st.integers(1, 3), st.integers(0, 99))
def test_scores_and_segment_sums_are_those_of_loops(drawn, outputs, seed):
    mapping, plan, _ = drawn
    rng = default_rng(seed)
    zero = np.zeros((1, outputs))
    local = {
        name: rng.normal(size=(rows.rows, outputs))
        for name, rows in mapping.tables.items()
    }
    for batch in range(plan.batches):
        joined = plan.order[plan.slice(batch)]
        values = {name: local[name][plan.tables[name].of(batch)] for name in local}
        scores = plan.expand(batch, values)
        derivatives = rng.normal(size=scores.shape)
        for position, row in enumerate(joined):
            expected = np.zeros(outputs)
            for name, rows in mapping.tables.items():
                if rows.row_of[row] >= 0:
                    expected = expected + local[name][rows.row_of[row]]
            assert_allclose(scores[position], expected, atol=1e-12)
        for name, rows in mapping.tables.items():
            actual = plan.segment_sum(name, batch, derivatives)
            sums = slow.segment_sum(rows.row_of[joined], rows.rows, derivatives)
            wanted = [sums[row] for row in plan.tables[name].of(batch)]
            wanted = np.reshape(wanted, (-1, outputs))
            assert_allclose(actual, wanted, atol=1e-12)
            # the adjoint of looking the batch's rows up
            slots = plan.tables[name].slots[plan.slice(batch)]
            looked_up = np.vstack([values[name], zero])[slots]  # -1 takes the last one
            left = float((looked_up * derivatives).sum())
            right = float((values[name] * actual).sum())
            assert left == pytest.approx(right, abs=1e-10)


def test_the_seed_decides_the_plan():
    mapping = one_to_one(50).mapping
    first, again, other = (
        plan_batches(mapping, 8, default_rng(seed)).order.tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("rows", [127, 128, 254, 32_767, 40_000])
def test_row_numbers_keep_their_values_in_few_bytes(rows):
    numbers = np.array([0, rows - 1, -1, rows - 1])
    table = TableRows(numbers, rows)
    assert table.row_of.tolist() == numbers.tolist()
    assert table.row_of.itemsize == (1 if rows < 128 else 2 if rows < 2**15 else 4)
    counts = np.bincount(numbers[numbers >= 0], minlength=rows)
    assert table.multiplicity.tolist() == counts.tolist()
    sums = table.segment_sum(np.array([[1.0], [2.0], [4.0], [8.0]]))
    assert (sums[0, 0], sums[-1, 0], sums.sum()) == (1.0, 10.0, 11.0)
    local = np.arange(rows, dtype=float)[:, None]
    assert table.expand(local)[:, 0].tolist() == [0.0, rows - 1.0, 0.0, rows - 1.0]
