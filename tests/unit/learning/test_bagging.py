"""Trees that shards show each other: their average, and what is not trees."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tp_flower.errors import ModelError
from tp_flower.methods.boost.bagging import ShardTrees, average, shown_trees
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.trees import TreeModel, grow, sum_of_trees

GROWTH = Growth(trees=3, leaves=6, rate=0.5, least_rows=5)
ROWS = 200


def grown(rng, outputs=1):
    """Return features with codes, missing values and integers, and trees of them."""
    features = rng.normal(size=(ROWS, 3)).astype(np.float32)
    features[:, 1] = rng.integers(0, 15, ROWS)
    features[:, 2] = rng.integers(0, 5, ROWS)
    features[rng.random((ROWS, 3)) < 0.1] = -np.inf
    effects = 9.0 * rng.normal(size=(15, outputs))
    gradient = effects[features[:, 1].clip(0).astype(int)] + rng.normal(
        size=(ROWS, outputs)
    )
    model = TreeModel(outputs)
    model.start([1])
    # each row is in 20 joined rows: sets of a few rows are enough
    hessian = np.full((ROWS, outputs), 20.0)
    text, values = grow(model, features, 20.0 * gradient, hessian, 20 * ROWS, GROWTH)
    return features, text, values


def values_of(text, features, outputs=1):
    return sum_of_trees([(1.0, text.tobytes().decode())], features, outputs)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3]))
def test_the_average_is_that_of_the_values(seed, outputs):
    rng = default_rng(seed)
    features, first, values = grown(rng, outputs)
    _, second, _ = grown(rng, outputs)
    nothing = np.zeros(0, np.uint8)
    assert np.array_equal(
        values_of(average([shown_trees(first, 9.0)], 3, outputs), features, outputs),
        values,
    )
    shown = [
        shown_trees(first, 3.0),
        shown_trees(nothing, 5.0),
        shown_trees(second, 1.0),
    ]
    actual = values_of(average(shown, 3, outputs), features, outputs)
    expected = (3.0 * values + values_of(second, features, outputs)) / 4.0
    assert_allclose(actual, expected, atol=1e-12)
    assert not len(average([shown_trees(nothing, 0.0)], 3, outputs))


def test_ranges_and_counts_stay_at_the_shard():
    features, text, _ = grown(default_rng(0))
    known = features[:, 0][np.isfinite(features[:, 0])]
    assert f"feature_infos=[{known.min():.6f}"[:20] in text.tobytes().decode()
    shown = msgspec.msgpack.decode(shown_trees(text, 9.0))
    assert set(shown) == {"joined_rows", "trees"}
    for tree in shown["trees"]:
        values, columns, _, thresholds, *others = tree
        # kinds of splits, their children on both sides, sets of categories
        assert len(values) == len(columns) + 1
        assert len(others) == 5
        cut = [
            at for at, column in zip(thresholds, columns, strict=True) if column == 0
        ]
        assert all(known.min() < at < known.max() or at == np.inf for at in cut)


def changed(**fields):
    """Return shown trees and another one, with other fields."""
    _, text, _ = grown(default_rng(1))
    trees = msgspec.msgpack.decode(shown_trees(text, 9.0), type=ShardTrees)
    first = next(tree for tree in trees.trees if tree.cat_boundaries)
    fields = {
        name: change(list(getattr(first, name))) for name, change in fields.items()
    }
    first = msgspec.structs.replace(first, **fields)
    return msgspec.msgpack.encode(ShardTrees(9.0, [first, *trees.trees]))


@pytest.mark.parametrize(
    "fields",
    [
        {"left_child": lambda nodes: [0, *nodes[1:]]},  # its own child
        {"left_child": lambda nodes: nodes[::-1]},
        {"right_child": lambda nodes: [*nodes[:-1], 5000]},
        {"right_child": lambda nodes: [*nodes[:-1], nodes[0]]},  # one of two parents
        {"split_feature": lambda columns: [3, *columns[1:]]},
        {"split_feature": lambda columns: [-1, *columns[1:]]},
        {"split_feature": lambda columns: columns[1:]},
        {"decision_type": lambda kinds: [16, *kinds[1:]]},
        {"threshold": lambda _: [np.nan] * 5},
        {"threshold": lambda values: [99.0] * len(values)},  # sets that there are not
        {"leaf_value": lambda values: [np.inf, *values[1:]]},
        {"leaf_value": lambda _: []},
        {"cat_threshold": lambda bits: bits[1:]},
        {"cat_boundaries": lambda places: [1, *places[1:]]},
        {"cat_boundaries": lambda places: [*places[:-1], 1 << 31]},
        {"cat_boundaries": lambda places: [0, 0, *places[1:]]},
    ],
)
def test_what_is_not_a_tree_is_refused(fields):
    assert len(average([changed()], 3, 1))
    with pytest.raises(ModelError, match="malformed trees"):
        average([changed(**fields)], 3, 1)


@pytest.mark.parametrize("text", [b"", b"tree", msgspec.msgpack.encode({"trees": []})])
def test_other_bytes_and_numbers_of_trees_are_refused(text):
    with pytest.raises(ModelError, match="malformed trees"):
        average([text], 3, 1)
    with pytest.raises(ModelError, match="malformed trees"):
        average([changed()], 3, 3)
