"""What a runner scores with plain numpy, against the models that it was made from."""

import lightgbm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.examples.encoding_example import (
    categorical,
    encoder_of,
    numeric,
    vectors,
)
from tests.support.files import case_table
from tp_flower.arrays import MISSING
from tp_flower.errors import ModelError
from tp_flower.export.onnx_graphs import onnx_bytes
from tp_flower.export.parts import encoder_facts
from tp_flower.export.runner.encoding import block_of, encode
from tp_flower.export.runner.scoring import score_rows
from tp_flower.export.runner.trees import bins_of, sum_of_trees
from tp_flower.features.bins import bin_columns, fit_binning
from tp_flower.features.columns import CategoricalColumn
from tp_flower.features.spec import TIME_PARTS
from tp_flower.learning.models.local_model import (
    ModelSpec,
    build_model,
    pair_features,
)
from tp_flower.learning.models.portable import portable_model
from tp_flower.learning.tree_arrays import TreeArrays
from tp_flower.methods.boost.linear import RidgeFit, fit_linear
from tp_flower.methods.boost.messages import TREES, Growth
from tp_flower.methods.boost.regions import UNDIVIDED, grow_regions
from tp_flower.methods.boost.trees import TreeModel, grow

CASES = case_table("tests/unit/features/test_encoding.py")
NUMBERS = [spec.strip() for spec in CASES["numbers"].split(";")]
TEXTS = (
    *("one-hot(2)", "one-hot(9)", "one-hot(3) missing=zero indicator", "hash(3)"),
    *("length", "length missing=zero indicator", "codes(2)"),
    'categories(b, "", ccc) indicator',
)
TIMES = [f"cyclic({part})" for part in TIME_PARTS]
numbers = st.none() | st.integers(-40, 40).map(lambda n: n / 4)
# from 1950 to 2100, in quarters of a second
seconds = st.none() | st.integers(-(10**9), 4 * 10**9).map(lambda n: n / 4)
texts = st.none() | st.sampled_from(["", "b", "ä", "ccc"])
pairs = st.none() | st.tuples(st.floats(-9, 9, width=32), st.just(float("nan")))
rows = st.lists(st.tuples(numbers, texts, pairs, seconds), min_size=1, max_size=20)


def as_read(column):
    """A feature's column as a runner reads it from DuckDB."""
    if isinstance(column, CategoricalColumn):
        return column.codes, np.array(column.texts.to_pylist(), str)
    return column.values


@given(rows, st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(TIMES))
def test_rows_are_encoded_to_the_same_bits(members, x, c, t):
    x_values, c_values, v_values, t_values = zip(*members, strict=True)
    table = {
        "x": numeric(*x_values),
        "c": categorical(*c_values),
        "v": vectors(*v_values),
        "t": numeric(*t_values),
    }
    specs = {"x": x, "c": c, "v": "none indicator", "t": t}
    encoder = encoder_of(table, kinds={"t": "time"}, **specs)
    facts = encoder_facts(encoder)
    encoded = encode(facts, {name: as_read(column) for name, column in table.items()})
    block = block_of(encoded, facts, np.arange(len(members)))
    assert block.tobytes() == encoder.transform(table).tobytes()


def missing_rows(rng, count=600):
    """Numbers, a code of 40 categories that is missing at times, and zeros."""
    values = rng.normal(size=(count, 4))
    values[:, 1] = rng.integers(0, 40, count)
    values[:, 2] = rng.integers(-1, 2, count) * 0.5
    values[rng.random(values.shape) < 0.15] = np.nan
    values[:5, 1] = [60, -1, 33, np.nan, 1e6]
    return values.astype(np.float32)


@pytest.mark.parametrize("is_zero_missing", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
def test_trees_are_read_as_lightgbm_reads_them(outputs, is_zero_missing):
    rng = default_rng(outputs)
    values = missing_rows(rng)
    label = (np.nan_to_num(values[:, 1]) % 3 + (values[:, 0] > 0)) % max(outputs, 2)
    options = {
        "objective": "multiclass" if outputs > 1 else "regression",
        "num_class": outputs,
        "zero_as_missing": is_zero_missing,
        "min_data_per_group": 5,
        "verbosity": -1,
        "num_leaves": 9,
        "num_threads": 1,
    }
    data = lightgbm.Dataset(values[:400], label[:400], categorical_feature=[1])
    booster = lightgbm.train(options, data, 7)
    trees = TreeArrays()
    span = trees.add(booster.model_to_string())
    assert trees.most_category(1) < 40
    assert trees.most_category(0) == -1
    scores = sum_of_trees(trees.arrays, span, values.T, outputs)
    expected = booster.predict(values, raw_score=True).reshape(-1, outputs)
    assert_allclose(scores, expected, rtol=1e-13, atol=1e-13)


def facts_of(portable, width, **facts):
    """A part of a model, with features that are encoded as they are."""
    encoder = [{"type": "vector", "name": "v", "width": width}]
    return {
        "encoder": encoder,
        "category-keys": {},
        "width": width,
        "bins": [],
        "sparse": False,
        "outputs": 1,
        "key-secrets": [],
        "regions": portable.regions,
        "divides": portable.divides,
        **portable.facts,
        "arrays": portable.arrays,
        **facts,
    }


def scores_of(part, features, wanted=None):
    rows = {"rows": len(features), "features": {"v": features}}
    return score_rows(part, rows, wanted)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kind", ["linear", "centres", "mlp"])
def test_a_model_of_plain_arrays_scores_as_it_does(kind, intercept):
    rng = default_rng(3)
    spec = ModelSpec(kind, 2, intercept, hidden_sizes=(5, 4), output_scale=2.5, seed=7)
    model = build_model(spec, 3, "cpu")
    if kind != "mlp":
        model.parameters = rng.normal(size=len(model.parameters))
    features = rng.normal(size=(50, 3)).astype(np.float32)
    portable = portable_model(spec, 3, model.parameters)
    found = scores_of(facts_of(portable, 3, outputs=2), features)["scores"][:, 0]
    # a network is trained and scored with float32
    tolerance = 1e-6 if kind == "mlp" else 1e-13
    assert_allclose(found, model.scores(features), rtol=tolerance, atol=tolerance)


def forest(rng, features, *, regions):
    """Trees of rows beside regions of another table, after a linear model."""
    gradient = rng.normal(size=(len(features), 1))
    gradient += (features[:, :1] > 0) * (regions[:, None] % 3 - 1.0)
    hessian = np.ones_like(gradient)
    model = TreeModel(1)
    model.start([1])
    counts = np.ones(len(features))
    plain = np.where(features <= MISSING, np.nan, features).astype(np.float32)
    line, _ = fit_linear(plain, gradient, hessian, counts, [1], RidgeFit(5))
    model.add(0.7, line)
    growth = Growth(trees=4, leaves=6, rate=0.5, least_rows=5)
    grown, _ = grow(model, features, gradient, hessian, len(features), growth)
    model.add(0.9, grown)
    model.read_regions(features.shape[1])
    model.binned.clear()
    paired = pair_features(features, np.arange(len(features)), regions)
    grown, _ = grow(model, paired, gradient, hessian, len(features), growth)
    model.add(1.1, grown)
    return model


def test_boosted_rounds_are_added_up_in_every_region():
    rng = default_rng(5)
    features = np.nan_to_num(missing_rows(rng)[5:], nan=MISSING)
    regions = rng.choice([0, 1, 4, 255], len(features)).astype(np.uint8)
    model = forest(rng, features, regions=regions)
    portable = portable_model(ModelSpec(TREES), 4, model.parameters)
    part = facts_of(portable, 4)
    rows = np.arange(len(features))
    said = scores_of(part, features)["scores"]
    none = portable.regions - 1
    for region in (0, 1, 4, 9, 255):
        paired = pair_features(features, rows, np.full(len(rows), region, np.uint8))
        expected = model.scores(paired)
        found = said[:, min(region, none)]
        assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    # a product of the two tables' columns tells regions apart
    assert np.abs(said[:, 0] - said[:, 1]).max() > 0.1
    wanted = np.zeros((len(rows), portable.regions), np.bool_)
    wanted[rows, np.minimum(regions, none)] = True
    some = scores_of(part, features, wanted)["scores"]
    assert_array_equal(some, said * wanted[..., None])


@pytest.mark.parametrize("is_divided", [True, False])
def test_rows_are_in_the_regions_of_their_table(is_divided):
    rng = default_rng(6)
    features = np.nan_to_num(missing_rows(rng), nan=MISSING)
    model = TreeModel(1)
    model.start([1])
    growth = Growth(trees=1, leaves=8, rate=1.0, least_rows=5)
    gradient = np.where(features[:, :1] > 0, 1.0, features[:, 3:] > 0)
    sums = gradient, np.ones_like(gradient)
    counts = np.ones(len(features))
    tree = grow_regions(features, (1,), sums, counts, growth, 40)
    grown, _ = grow(model, features, *sums, len(features), growth)
    model.add(1.0, grown)
    model.divide(tree if is_divided else UNDIVIDED)
    portable = portable_model(ModelSpec(TREES), 4, model.parameters)
    said = scores_of(facts_of(portable, 4), features)
    assert_array_equal(said["regions"], model.regions(features))
    assert (said["regions"].max() > 0) == is_divided
    assert_allclose(said["scores"][:, 0], model.scores(features), rtol=1e-12)


@given(st.integers(0, 100), st.sampled_from([4, 16]))
def test_bins_are_those_of_the_site(seed, most):
    rng = default_rng(seed)
    table = {
        "x": numeric(*rng.normal(size=60).round(1), None),
        "c": categorical(*rng.choice(["a", "b", "c"], 60), None),
        "k": categorical(*rng.choice([f"{n}" for n in range(30)], 60), None),
    }
    encoder = encoder_of(table, x="standard", c="one-hot(2)", k="codes")
    encoded = encoder.transform(table)
    binning = fit_binning(encoder.encoder, encoded, most)
    columns = [
        {"first": column.first, "size": column.size, "hot": column.is_hot}
        for column in bin_columns(encoder.encoder)
    ]
    found = bins_of(columns, binning.arrays, encoded)
    assert_array_equal(found, binning.apply(encoder.encoder, encoded))


@pytest.mark.parametrize(
    "text", ["tree\naverage_output\n\nTree=0\nleaf_value=1\n", "tree\n\nTree=0\nx=1\n"]
)
def test_other_texts_than_plain_trees_are_refused(text):
    with pytest.raises(ModelError, match="malformed trees"):
        TreeArrays().add(text)


def graph_scores(part, features, region=None):
    """The scores of features by the ONNX graph of a part."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    graph = onnx.load_from_string(onnx_bytes(part, part["arrays"]))
    if part["regions"] > 1:
        column = np.full((len(features), 1), region, np.float32)
        features = np.append(features, column, axis=1)
    (scores,) = ReferenceEvaluator(graph).run(None, {"features": features})
    return scores


@pytest.mark.parametrize("kind", ["linear", "centres", "mlp", TREES])
def test_an_onnx_graph_scores_as_the_runner(kind):
    rng = default_rng(8)
    features = missing_rows(rng, 90)[5:]
    # onnx's own evaluator takes a category of 0 for the end of a set
    features[:, 1] += 1.0
    features = np.nan_to_num(features, nan=MISSING)
    if kind == TREES:
        regions = rng.choice([1, 2, 4, 255], len(features)).astype(np.uint8)
        model = forest(rng, features, regions=regions)
        part = facts_of(portable_model(ModelSpec(TREES), 4, model.parameters), 4)
    else:
        features = np.maximum(features, -9.0)
        spec = ModelSpec(kind, 2, intercept=True, hidden_sizes=(5,), seed=7)
        model = build_model(spec, 4, "cpu")
        parameters = rng.normal(size=len(model.parameters))
        part = facts_of(portable_model(spec, 4, parameters), 4, outputs=2)
    said = scores_of(part, features)["scores"]
    for region in range(part["regions"]):
        number = np.nan if region == part["regions"] - 1 else region
        found = graph_scores(part, features, number)
        assert_allclose(found, said[:, region], rtol=1e-12, atol=1e-12)


def test_models_of_the_users_own_are_refused():
    with pytest.raises(ModelError, match=r"'my.module:make' cannot be exported"):
        portable_model(ModelSpec("my.module:make"), 2, np.zeros(3))
