"""The batch plan against loops over joined rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import joins as slow
from tp_flower.joins.batches import plan_batches
from tp_flower.joins.mapping import TableMapping, TableRows


@st.composite
def plans(draw):
    """(mapping of two tables, plan)."""
    total = draw(st.integers(1, 25))
    tables = {}
    for name in ("a", "b"):
        rows = draw(st.integers(1, 8))
        # -1: a joined row without a row of the table
        numbers = st.integers(-1, rows - 1)
        row_of = draw(st.lists(numbers, min_size=total, max_size=total))
        tables[name] = TableRows(np.array(row_of, np.int32), rows)
    mapping = TableMapping(tables)
    size, seed = draw(st.integers(1, total)), draw(st.integers(0, 99))
    return mapping, plan_batches(mapping, size, np.random.default_rng(seed)), size


@settings(deadline=None)
@given(plans())
def test_batches_partition_the_joined_rows(drawn):
    mapping, plan, size = drawn
    total = mapping.joined_rows
    assert plan.batches == -(-total // size)
    assert sorted(plan.order.tolist()) == list(range(total))
    sizes = [len(plan.order[plan.slice(batch)]) for batch in range(plan.batches)]
    assert sum(sizes) == total
    assert set(sizes[:-1]) <= {size}
    assert 1 <= sizes[-1] <= size


@settings(deadline=None)
@given(plans())
def test_tables_see_the_distinct_rows_of_each_batch(drawn):
    mapping, plan, _ = drawn
    for name, rows in mapping.tables.items():
        for batch in range(plan.batches):
            joined = plan.order[plan.slice(batch)]
            distinct = sorted({int(rows.row_of[row]) for row in joined} - {-1})
            assert plan.tables[name].of(batch).tolist() == distinct
            slots = plan.tables[name].slots[plan.slice(batch)]
            found = [distinct[slot] if slot >= 0 else -1 for slot in slots]
            assert found == rows.row_of[joined].tolist()


@settings(deadline=None)
@given(plans(), st.integers(1, 3), st.integers(0, 99))
def test_scores_and_segment_sums_are_those_of_loops(drawn, outputs, seed):
    mapping, plan, _ = drawn
    rng = np.random.default_rng(seed)
    base, zero = rng.normal(size=outputs), np.zeros((1, outputs))
    local = {
        name: rng.normal(size=(rows.rows, outputs))
        for name, rows in mapping.tables.items()
    }
    for batch in range(plan.batches):
        joined = plan.order[plan.slice(batch)]
        own = {name: local[name][plan.tables[name].of(batch)] for name in local}
        scores = plan.sum_scores(batch, base, own)
        derivatives = rng.normal(size=scores.shape)
        for position, row in enumerate(joined):
            expected = base.copy()
            for name, rows in mapping.tables.items():
                if rows.row_of[row] >= 0:
                    expected = expected + local[name][rows.row_of[row]]
            np.testing.assert_allclose(scores[position], expected, atol=1e-12)
        for name, rows in mapping.tables.items():
            sums = slow.segment_sum(rows.row_of[joined], rows.rows, derivatives)
            found = plan.segment_sum(name, batch, derivatives)
            wanted = [sums[row] for row in plan.tables[name].of(batch)]
            wanted = np.reshape(wanted, (-1, outputs))
            np.testing.assert_allclose(found, wanted, atol=1e-12)
            # the adjoint of looking the batch's rows up
            slots = plan.tables[name].slots[plan.slice(batch)]
            looked_up = np.array(
                slow.expand(slots, own[name] if len(own[name]) else zero)
            )
            left = float((looked_up * derivatives).sum())
            assert left == pytest.approx(float((own[name] * found).sum()), abs=1e-10)


def test_the_seed_decides_the_plan():
    mapping = TableMapping({"a": TableRows(np.arange(50, dtype=np.int32), 50)})
    first, again, other = (
        plan_batches(mapping, 8, np.random.default_rng(seed)).order
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
