"""The batch plan against loops over joined rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reference import joins as slow
from tp_flower.joins.batches import plan_batches, poisson_batches
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.randomness import NoiseSource

KEY = bytes(range(32))


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
        tables[name] = TableRows(np.array(row_of, np.int32), rows)
    return TableMapping(tables)


@st.composite
def plans(draw):
    """(mapping of two tables, plan of a partition, batch size)."""
    mapping = draw(mappings())
    size = draw(st.integers(1, mapping.joined_rows))
    seed = draw(st.integers(0, 99))
    return mapping, plan_batches(mapping, size, np.random.default_rng(seed)), size


@st.composite
def poisson_plans(draw):
    """(mapping of two tables, plan of Poisson samples, None)."""
    mapping = draw(mappings())
    rate, steps = draw(st.floats(1e-3, 1.0)), draw(st.integers(1, 6))
    key = draw(st.binary(min_size=32, max_size=32))
    return mapping, poisson_batches(mapping, rate, steps, NoiseSource(key)), None


any_plan = st.one_of(plans(), poisson_plans())


@settings(deadline=None)
@given(any_plan)
def test_tables_see_the_distinct_rows_of_each_batch(drawn):
    mapping, plan, size = drawn
    total = mapping.joined_rows
    batches = [plan.order[plan.slice(batch)] for batch in range(plan.batches)]
    sizes = [len(batch) for batch in batches]
    if size is not None:
        # a partition, in batches of one size but for the last
        assert sorted(plan.order.tolist()) == list(range(total))
        assert sizes == [size] * (total // size) + [total % size] * (total % size > 0)
    for name, rows in mapping.tables.items():
        for batch, joined in enumerate(batches):
            assert set(joined.tolist()) <= set(range(total))
            # of a Poisson sample each row at most once
            assert size is not None or (np.diff(joined) > 0).all()
            distinct = sorted({int(rows.row_of[row]) for row in joined} - {-1})
            assert plan.tables[name].of(batch).tolist() == distinct
            slots = plan.tables[name].slots[plan.slice(batch)]
            actual = [distinct[slot] if slot >= 0 else -1 for slot in slots]
            assert actual == rows.row_of[joined].tolist()


@settings(deadline=None)
@given(any_plan, st.integers(1, 3), st.integers(0, 99))
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
        values = {name: local[name][plan.tables[name].of(batch)] for name in local}
        scores = plan.sum_scores(batch, base, values)
        derivatives = rng.normal(size=scores.shape)
        for position, row in enumerate(joined):
            expected = base.copy()
            for name, rows in mapping.tables.items():
                if rows.row_of[row] >= 0:
                    expected = expected + local[name][rows.row_of[row]]
            np.testing.assert_allclose(scores[position], expected, atol=1e-12)
        for name, rows in mapping.tables.items():
            actual = plan.segment_sum(name, batch, derivatives)
            sums = []
            if len(joined):
                sums = slow.segment_sum(rows.row_of[joined], rows.rows, derivatives)
            wanted = [sums[row] for row in plan.tables[name].of(batch)]
            wanted = np.reshape(wanted, (-1, outputs))
            np.testing.assert_allclose(actual, wanted, atol=1e-12)
            # the adjoint of looking the batch's rows up
            slots = plan.tables[name].slots[plan.slice(batch)]
            looked_up = np.vstack([values[name], zero])[slots]  # -1 takes the last one
            left = float((looked_up * derivatives).sum())
            right = float((values[name] * actual).sum())
            assert left == pytest.approx(right, abs=1e-10)


def identity(rows: int) -> TableMapping:
    return TableMapping({"a": TableRows(np.arange(rows, dtype=np.int32), rows)})


def test_the_seed_decides_the_plan():
    first, again, other = (
        plan_batches(identity(50), 8, np.random.default_rng(seed)).order.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("rate", [0.002, 0.05, 0.7])
def test_poisson_batches_have_each_row_with_the_rate_independently(rate):
    rows, steps = 400, 2500
    plan = poisson_batches(identity(rows), rate, steps, NoiseSource(KEY))
    assert plan.batches == steps
    taken = np.zeros((steps, rows))
    batch_of = np.repeat(np.arange(steps), np.diff(plan.start))
    taken[batch_of, plan.order] = 1
    # the sums over steps and over rows are binomial, and no two neighbours correlate
    spread = rate * (1 - rate)
    assert taken.mean() == pytest.approx(rate, abs=4 * (spread / taken.size) ** 0.5)
    for axis, draws in ((0, steps), (1, rows)):
        sums = taken.sum(axis=axis)
        error = 5 * draws * spread * (2 / len(sums)) ** 0.5
        # of the variance's own spread, allowing for the skew of rare draws
        assert sums.var() == pytest.approx(
            draws * spread, abs=error * (1 + 1 / (draws * rate)) ** 0.5
        )
    centred = taken - rate
    noise = 5 * spread / taken.size**0.5
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < noise
    assert abs((centred[1:] * centred[:-1]).mean()) < noise


def test_a_row_of_a_table_is_in_a_poisson_batch_with_its_inclusion_probability():
    """1 - (1 - r)^G, by which the accountants go."""
    multiplicity, rate, steps = np.array([1, 3, 20]), 0.05, 20_000
    row_of = np.repeat(np.arange(3), multiplicity).astype(np.int32)
    mapping = TableMapping({"a": TableRows(row_of, 3)})
    plan = poisson_batches(mapping, rate, steps, NoiseSource(KEY)).tables["a"]
    actual = np.bincount(plan.rows, minlength=3) / steps
    expected = 1 - (1 - rate) ** multiplicity
    error = np.sqrt(expected * (1 - expected) / steps)
    assert (abs(actual - expected) < 4 * error).all()


def test_poisson_batches_at_their_limits():
    plan = poisson_batches(identity(4), 1.0, 3, NoiseSource())
    assert plan.order.tolist() == [0, 1, 2, 3] * 3
    assert plan.start.tolist() == [0, 4, 8, 12]
    plan = poisson_batches(identity(3), 1e-300, 5, NoiseSource())
    assert plan.start.tolist() == [0] * 6
    assert plan.tables["a"].of(2).tolist() == []
    assert plan.sum_scores(2, np.zeros(1), {"a": np.zeros((0, 1))}).shape == (0, 1)
    for rate in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"rate is .*, allowed: above 0, at most"):
            poisson_batches(identity(3), rate, 1, NoiseSource())
