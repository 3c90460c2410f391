"""Trees that grow on sums over all shards, against trees of the shards' rows
together.
"""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tp_flower.arrays import MISSING
from tp_flower.errors import ModelError
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.pooling import (
    MOST_INTERVALS,
    ColumnSums,
    ShardSums,
    grow_pooled,
    shown_sums,
)
from tp_flower.methods.boost.trees import TreeModel, grow, sum_of_trees

GROWTH = Growth(trees=4, leaves=5, rate=0.5, least_rows=6)
LEAST = 6


def shards_of(rng, outputs, values):
    """Rows of one column, whose values all shards have often enough, and their
    derivatives.
    """
    column = np.concatenate([np.repeat(values, LEAST), rng.choice(values, 400)])
    for _ in range(3):
        gradient = rng.normal(size=(len(column), outputs)) + np.sin(column)[:, None] / 3
        hessian = rng.uniform(0.5, 1.5, gradient.shape)
        counts = rng.integers(1, 4, len(column))
        yield (
            rng.permutation(column)[:, None].astype(np.float32),
            gradient,
            hessian,
            counts,
        )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3]),
    st.sampled_from(["numbers", "with missing", "codes"]),
)
def test_of_shards_with_the_same_values_the_trees_are_those_of_all_rows(
    seed, outputs, kind
):
    rng = default_rng(seed)
    values = np.arange(12.0)
    if kind == "with missing":
        values[-1] = MISSING
    codes = [0] if kind == "codes" else []
    shards = list(shards_of(rng, outputs, values))
    shown = [shown_sums(rows, codes, *of, LEAST) for rows, *of in shards]
    text = grow_pooled(shown, codes, 1, outputs, GROWTH)
    rows, gradient, hessian, counts = map(np.concatenate, zip(*shards, strict=True))
    # as the rows of one shard, one for each value
    distinct, place = np.unique(rows, return_inverse=True)
    sums = np.zeros((2, len(distinct), outputs))
    np.add.at(sums[0], place.ravel(), gradient)
    np.add.at(sums[1], place.ravel(), hessian)
    model = TreeModel(outputs)
    model.start(codes)
    column = distinct[:, None].astype(np.float32)
    _, expected = grow(model, column, *sums, float(counts.sum()), GROWTH)
    pooled = sum_of_trees([(1.0, text.tobytes().decode())], column, outputs)
    assert_allclose(pooled, expected, atol=1e-9)


def test_labels_that_follow_the_shard_are_learned_from_the_columns():
    """Two normal distributions, one a shard: the log-odds rise by 1.6 per unit."""
    rng = default_rng(0)
    size = 20_000
    shown = []
    for mean, gradient in ((-0.8, 0.5), (0.8, -0.5)):
        rows = rng.normal(mean, 1.0, (size, 1)).astype(np.float32)
        sums = np.full((size, 1), gradient), np.full((size, 1), 0.25)
        shown.append(shown_sums(rows, [], *sums, np.ones(size), 20))
    growth = Growth(trees=30, leaves=15, rate=0.1, least_rows=20)
    text = grow_pooled(shown, [], 1, 1, growth)
    points = np.linspace(-1.0, 1.0, 21, dtype=np.float32)[:, None]
    actual = sum_of_trees([(1.0, text.tobytes().decode())], points, 1)[:, 0]
    # a Newton step from even odds goes to 2 tanh(0.8 x), and 30 trees most of the way
    expected = 2.0 * (1.0 - 0.9**30) * np.tanh(0.8 * points[:, 0])
    assert_allclose(actual, expected, atol=0.15)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.booleans())
def test_an_interval_has_so_many_joined_rows_and_all_of_a_value(seed, least, is_code):
    rng = default_rng(seed)
    count = int(rng.integers(1, 300))
    rows = rng.integers(0, rng.integers(1, 200), (count, 1)).astype(np.float32)
    rows[rng.random(count) < 0.1] = MISSING
    counts = rng.integers(1, 5, count) ** 2
    # the Hessian counts joined rows, the gradient sums the values
    values = np.where(rows <= MISSING, 0.0, rows)
    sums = counts[:, None] * values, counts[:, None].astype(float)
    document = msgspec.msgpack.decode(
        shown_sums(rows, [0] * is_code, *sums, counts, least), type=ShardSums
    )
    (column,) = document.columns
    assert column.is_valid(1, is_code=is_code)
    assert all(hessian >= least for (hessian,) in column.hessian)
    assert len(column.values) <= (200 if is_code else 2 * MOST_INTERVALS) + 1
    for value, (gradient,), (hessian,) in zip(
        column.values, column.gradient, column.hessian, strict=True
    ):
        if value is not None:
            assert value == pytest.approx(gradient / hessian)
    present = counts[rows[:, 0] > MISSING].sum()
    if not is_code and present >= least:
        # no row with a value is left out
        numbers = len(column.values) - (None in column.values)
        assert sum(hessian for (hessian,) in column.hessian[:numbers]) == pytest.approx(
            present
        )


def test_a_column_without_two_intervals_grows_nothing():
    rows = np.ones((5, 2), np.float32)
    sums = np.ones((5, 1))
    shown = [shown_sums(rows, [], sums, sums, np.ones(5), 20)]
    assert not len(grow_pooled(shown, [], 2, 1, GROWTH))
    assert not len(
        grow_pooled(
            [shown_sums(rows[:, :0], [], sums, sums, np.ones(5), 1)], [], 0, 1, GROWTH
        )
    )


GOOD = ColumnSums([1.0, 2.0, None], [1.5], [[1.0]] * 3, [[1.0]] * 3)


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"edges": []}, []),
        ({"edges": [3.0]}, []),
        ({"edges": [float("nan")]}, []),
        ({}, [0]),
        ({"values": [None, 2.0, None]}, []),
        ({"values": [2.0, 1.0, None]}, []),
        ({"gradient": [[1.0]] * 2}, []),
        ({"gradient": [[1.0, 2.0]] * 3}, []),
        ({"gradient": [[float("inf")]] * 3}, []),
        ({"hessian": [[0.0]] * 3}, []),
        ({"hessian": [[-1.0]] * 3}, []),
    ],
)
def test_what_are_no_sums_of_the_columns_is_refused(change, codes):
    def document(column):
        return msgspec.msgpack.encode(ShardSums(9.0, [column]))

    assert GOOD.is_valid(1, is_code=False)
    bad = document(msgspec.structs.replace(GOOD, **change))
    for shards in ([bad], [document(GOOD), bad]):
        with pytest.raises(ModelError, match="malformed sums of columns"):
            grow_pooled(shards, codes, 1, 1, GROWTH)


def test_other_bytes_or_columns_are_refused():
    good = msgspec.msgpack.encode(ShardSums(9.0, [GOOD]))
    for shards, columns in (([b"x"], 1), ([good], 2)):
        with pytest.raises(ModelError, match="malformed sums of columns"):
            grow_pooled(shards, [], columns, 1, GROWTH)
