"""A table's trees against those that LightGBM grows on the joined table."""

import sys

import lightgbm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.random import default_rng
from numpy.testing import assert_allclose

from tests.support.reference.families import Family
from tests.support.tables.mappings import one_to_one
from tp_flower.arrays import MISSING
from tp_flower.errors import ModelError
from tp_flower.features.sparse import SparseRows
from tp_flower.joins.mapping import TableRows
from tp_flower.joins.pairs import pair_rows
from tp_flower.learning.models.local_model import pair_features
from tp_flower.methods.boost.bagging import average, shown_trees
from tp_flower.methods.boost.boosting import (
    SHRINK,
    Boosting,
    add_direction,
    move_scores,
    step_along,
)
from tp_flower.methods.boost.linear import RidgeFit
from tp_flower.methods.boost.messages import Growth
from tp_flower.methods.boost.trees import Forest, TreeModel, fit_before_trees, grow

GROWTH = Growth(trees=1, leaves=5, rate=1.0, least_rows=50)


def grown_by_lightgbm(joined, gradient, hessian, *, categories="auto", **options):
    """One tree on the joined table, with the rest of LightGBM's defaults."""
    options |= {"objective": "none", "num_leaves": 5, "learning_rate": 1.0}
    options |= {"min_data_in_leaf": 0, "verbosity": -1}
    data = lightgbm.Dataset(joined, categorical_feature=categories, params=options)
    booster = lightgbm.Booster(options, data)
    booster.update(fobj=lambda *_: (gradient[:, 0], hessian[:, 0]))
    return booster


def test_conservation_of_the_sums_over_joined_rows():
    rng = default_rng(0)
    rows = TableRows(rng.integers(-1, 6, 50), 6)
    numbers = rng.normal(size=(50, 2))
    sums = rows.segment_sum(numbers).sum(axis=0)
    assert_allclose(sums, numbers[rows.row_of >= 0].sum(axis=0))


@pytest.mark.parametrize("has_regions", [False, True], ids=["rows", "pairs"])
@pytest.mark.parametrize("name", ["squared", "logistic"])
# one random example in 400 has two splits of equal gain, to 32 bits: always the same
# examples
@settings(max_examples=15, derandomize=True)
@given(number=st.integers(0, 2**32 - 1))
def test_a_tree_is_that_of_the_joined_table_with_the_columns_of_the_table(
    name, has_regions, number
):
    """With regions, also of the region that each joined row is in."""
    rng = default_rng(number)
    count = 300
    total = 3000
    loss = Family(name, 2 if name == "logistic" else 0)
    # the same bins: each value of a column is one
    features = rng.integers(0, 9, (count, 3)).astype(np.float32)
    features[rng.random((count, 3)) < 0.1] = MISSING
    rows = TableRows(
        np.append(np.arange(count), rng.integers(0, count, total - count)), count
    )
    if has_regions:
        region = rng.integers(0, 5, total).astype(np.uint8)
        pairs = pair_rows(rows, None, (region, region), [count])
        features, rows = pair_features(features, pairs.rows, pairs.regions), pairs.train
        assert count < rows.rows < total
        assert_allclose(features[rows.row_of, -1], region)
    weights = rng.uniform(0.5, 1.5, total)
    labels = rng.integers(0, 2, total).astype(float)
    scores = rng.normal(size=(total, 1))
    gradient = weights[:, None] * loss.on(labels).gradient(scores)
    hessian = weights[:, None] * loss.on(labels).hessian(scores)
    model = TreeModel(1)
    sums = rows.segment_sum(gradient), rows.segment_sum(hessian)
    text, values = grow(model, features, *sums, total, GROWTH)
    joined = np.where(features <= MISSING, np.nan, features)[rows.row_of]
    slow = grown_by_lightgbm(
        joined,
        gradient,
        hessian,
        min_data_in_bin=1,
        min_sum_hessian_in_leaf=50 * hessian.mean(),
    )
    expected = slow.predict(joined, raw_score=True)
    assert_allclose(values[rows.row_of, 0], expected, atol=1e-6)
    for key in ("split_feature", "leaf_value", "threshold"):
        mine, theirs = (
            next(line for line in each.splitlines() if line.startswith(f"{key}="))
            for each in (text.tobytes().decode(), slow.model_to_string())
        )
        # of two splits of almost equal gain either may be the first: then leaves have
        # other numbers
        numbers = [
            sorted(map(float, line.partition("=")[2].split()))
            for line in (mine, theirs)
        ]
        assert_allclose(*numbers, atol=1e-6)


# a category has 150 joined rows, and 40: fewer than a set of categories has, and enough
# for one
@pytest.mark.parametrize("total", [9000, 2400])
# one random example in 400 has two splits of equal gain, to 32 bits: always the same
# examples
@settings(max_examples=15, derandomize=True)
@given(number=st.integers(0, 2**32 - 1))
def test_rare_categories_count_by_their_joined_rows(total, number):
    rng = default_rng(number)
    # five rows each: too few for LightGBM, which has enough of the joined ones
    features = (np.arange(300) % 60)[:, None].astype(np.float32)
    rows = TableRows(np.arange(total) % 300, 300)
    gradient = (
        rng.normal(size=(total, 1)) + rng.normal(size=60)[np.arange(total) % 60, None]
    )
    hessian = np.ones((total, 1))
    model = TreeModel(1)
    model.start([0])
    sums = rows.segment_sum(gradient), rows.segment_sum(hessian)
    _, values = grow(model, features, *sums, float(total), GROWTH)
    joined = features[rows.row_of]
    slow = grown_by_lightgbm(
        joined, gradient, hessian, categories=[0], min_sum_hessian_in_leaf=50.0
    )
    assert len(np.unique(values.round(9))) == 5
    expected = slow.predict(joined, raw_score=True)
    assert_allclose(values[rows.row_of, 0], expected, atol=1e-6)


def test_trees_of_a_round_follow_the_quadratic_model():
    rng = default_rng(1)
    features = rng.integers(0, 9, (60, 2)).astype(np.float32)
    gradient = rng.normal(size=(60, 1))
    hessian = rng.uniform(1.0, 2.0, (60, 1))
    model = TreeModel(1)
    growth = Growth(trees=3, leaves=4, rate=0.5, least_rows=2)
    _, together = grow(model, features, gradient, hessian, 60.0, growth)
    total = np.zeros((60, 1))
    one = replace(growth, trees=1)
    for _ in range(3):
        moved = gradient + hessian * total
        total += grow(model, features, moved, hessian, 60.0, one)[1]
    assert_allclose(together, total, atol=1e-6)


def test_categories_are_sorted_and_missing_values_have_a_side():
    codes = np.repeat(np.arange(40, dtype=np.float32), 120)
    wanted = np.where(codes % 2 == 0, 1.0, -1.0)
    codes[:120], wanted[:120] = MISSING, 5.0
    model = TreeModel(1)
    hessian = np.ones((4800, 1))
    model.start([0])
    growth = Growth(trees=40, leaves=4, rate=0.5, least_rows=20)
    text, values = grow(
        model, codes[:, None], -wanted[:, None], hessian, 4800.0, growth
    )
    assert_allclose(values[120:, 0], wanted[120:], atol=0.05)
    assert_allclose(values[:120, 0], wanted[:120], atol=0.5)
    model.add(0.5, text)
    model.add(0.0, text)
    assert_allclose(model.scores(codes[:, None]), 0.5 * values, atol=1e-6)


def test_rows_are_in_the_leaves_of_their_values_though_columns_exclude_each_other():
    rng = default_rng(2)
    features = np.zeros((20_000, 2), np.float32)
    # but for two rows, which have both
    features[:4000, 0], features[3998:7998, 1] = 1.0, 1.0
    gradient = rng.normal(size=(20_000, 1)) - features @ [[3.0], [-2.0]]
    model = TreeModel(1)
    hessian = np.ones((20_000, 1))
    growth = Growth(trees=2, leaves=31, rate=1.0, least_rows=1)
    text, values = grow(model, features, gradient, hessian, 20_000.0, growth)
    model.add(1.0, text)
    assert_allclose(values, model.scores(features), atol=1e-9)
    assert len(np.unique(values.round(9))) == 4


def test_a_table_without_columns_or_rows_adds_nothing():
    model = TreeModel(2)
    for rows, columns, trained in ((5, 0, 5), (5, 2, 0)):
        features = np.ones((rows, columns), np.float32)
        sums = np.ones((trained, 2))
        text, values = grow(model, features, sums, sums, 1.0, GROWTH)
        assert not values.any()
        model.add(1.0, text)
        assert not model.scores(features).any()


def test_bytes_that_are_no_trees_are_refused():
    model = TreeModel(1)
    for damaged in (np.arange(9, dtype=np.uint8), Forest((), ((1.0, "x"),)).bytes()):
        model.parameters = damaged
        with pytest.raises(ModelError, match="malformed trees"):
            model.scores(np.ones((1, 1), np.float32))


@pytest.mark.parametrize(
    ("name", "classes"), [("squared", 0), ("logistic", 2), ("softmax", 3)]
)
def test_the_step_is_a_share_of_the_best(name, classes):
    rng = default_rng(3)
    family = Family(name, classes)
    labels = rng.integers(0, classes or 5, 300).astype(float)
    weights = rng.uniform(0.5, 1.5, 300)
    weights /= weights.mean()
    loss = family.on(labels, weights)
    rows = one_to_one(300, loss.vectors)
    rows.fill("scores", loss.base_score)
    boosting = Boosting(rows, loss)
    start = rows.whole("scores").copy()
    gradient, hessian = boosting.derivatives(["t"])["t"]
    slow = loss.gradient(start) * weights[:, None]
    assert_allclose(gradient, slow)
    change = loss.gradient(start + 1e-5) - loss.gradient(start - 1e-5)
    assert (hessian is None) == (name == "squared")
    if name == "logistic":
        assert_allclose(hessian, change / 2e-5 * weights[:, None], rtol=1e-4)
    # long enough that no step is cut
    fit = 1000.0 * -gradient
    for directions in (
        [fit],
        [fit, 0.3 * fit + 9.0 * rng.normal(size=fit.shape), -fit],
    ):
        names = [str(number) for number in range(len(directions))]
        for each, direction in zip(names, directions, strict=True):
            assert add_direction(rows, each, np.asarray, {"t": direction})
        lengths = boosting.lengths(names)
        assert (lengths >= 0.0).all()
        assert (lengths < 1.0).all()
        best = lengths / SHRINK

        def value(lengths, directions=directions):
            return loss.value(move_scores(start, lengths, directions))

        for place in range(len(directions)):
            for change in (-1e-4, 1e-4):
                other = best.copy()
                other[place] = max(other[place] + change, 0.0)
                assert value(best) <= value(other) + 1e-9


def test_a_step_is_at_most_one():
    labels = np.array([0.0, 2.0])
    loss = Family("squared").on(labels)
    rows = one_to_one(2, loss.vectors)
    rows.fill("scores", np.array([1.0]))
    rows.fill("direction", 0.1 * (labels[:, None] - 1.0))
    assert Boosting(rows, loss).lengths(["direction"]) == [1.0]
    step_along(rows, np.array([0.5]), ["direction"])
    assert rows.whole("scores").tolist() == [[0.95], [1.05]]


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(
        ModelError, match=r'lightgbm is not installed: .* -e "\.\[boost\]"'
    ):
        TreeModel(1).start([])


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
def test_shap_values_are_lightgbms_and_add_up_to_the_score(outputs, is_sparse):
    rng = default_rng(2)
    rows = rng.integers(0, 4, (400, 5)).astype(np.float32)
    if not is_sparse:
        rows[rng.random(rows.shape) < 0.1] = MISSING
    model = TreeModel(outputs)
    growth = replace(GROWTH, trees=3, least_rows=5)
    gradient = rng.normal(size=(400, outputs)) + rows[:, :1] * np.arange(outputs)
    hessian = np.ones_like(gradient)
    features = rows
    if is_sparse:
        matrix = np.tile(np.arange(5, dtype=np.int32), (400, 1))
        features = SparseRows(rows, matrix, 5)
    text, values = grow(model, features, gradient, hessian, 400.0, growth)
    model.add(0.5, text)
    # a linear model before trees adds what its columns add
    linear, fitted = fit_before_trees(
        model, features, gradient, hessian, np.ones(400), RidgeFit(5)
    )
    model.add(2.0, linear)
    columns = [np.array([3, 1]), np.array([0]), np.array([2, 4])]
    parts = model.contributions(features, columns)
    rest = sum(parts) - (0.5 * values + 2.0 * fitted)
    assert_allclose(rest, np.broadcast_to(rest[0], rest.shape), atol=1e-6)
    seen = np.where(rows <= MISSING, np.nan, rows)
    booster = lightgbm.Booster(model_str=text.tobytes().decode())
    by_column = booster.predict(seen, pred_contrib=True).reshape(400, outputs, 6)
    alone = TreeModel(outputs)
    alone.add(0.5, text)
    for part, each in zip(alone.contributions(features, columns), columns, strict=True):
        assert np.abs(part).max() > 0.01
        assert_allclose(part, 0.5 * by_column[..., each].sum(axis=-1), atol=1e-9)


def test_trees_that_shards_have_merged_have_no_shap_values():
    """They lack the counts of rows that SHAP weighs paths by."""
    rng = default_rng(2)
    rows = rng.normal(size=(60, 2)).astype(np.float32)
    growth = replace(GROWTH, least_rows=5)
    model = TreeModel(1)
    text, _ = grow(model, rows, rows[:, :1].astype(float), np.ones((60, 1)), 60, growth)
    model.add(1.0, average([shown_trees(text, 60.0)], 2, 1))
    assert model.contributions(rows, [np.array([0])]) == [None]
