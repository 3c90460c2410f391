import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_flower.encoding import (
    OTHER,
    CategoricalColumn,
    CategoryStatistics,
    FeatureColumn,
    NumericColumn,
    NumericStatistics,
    TableEncoder,
    column_statistics,
    fit,
    merge,
    merge_tables,
    statistics_from_json,
)
from tp_flower.errors import SchemaError

MAGNITUDE = 1e6  # of the test values; tolerances below are relative to it


def numeric(*values: float | None) -> NumericColumn:
    return NumericColumn(np.array([np.nan if v is None else v for v in values], float))


def categorical(*values: str | None) -> CategoricalColumn:
    names = sorted({v for v in values if v is not None})
    codes = [-1 if v is None else names.index(v) for v in values]
    return CategoricalColumn(np.array(codes, np.int32), tuple(names))


rows = st.lists(
    st.tuples(
        st.none() | st.floats(-MAGNITUDE, MAGNITUDE),
        st.none() | st.sampled_from(["", "b", "ä", OTHER]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=30,
)
Row = tuple[float | None, str | None, int]


def table(members: list[Row]) -> dict[str, FeatureColumn]:
    return {
        "x": numeric(*[row[0] for row in members]),
        "c": categorical(*[row[1] for row in members]),
    }


def statistics_of(members: list[Row]):
    return {name: column_statistics(c) for name, c in table(members).items()}


def shards_of(members: list[Row]) -> list[list[Row]]:
    """Shards 0, 1, 2, one or two of which may be empty."""
    return [[row for row in members if row[2] == shard] for shard in range(3)]


@given(rows)
def test_merged_statistics_of_any_sharding_are_those_of_the_whole(members):
    whole = statistics_of(members)
    merged = merge_tables([statistics_of(shard) for shard in shards_of(members)])
    assert merged["c"] == whole["c"]
    assert merged["x"].count == whole["x"].count
    assert merged["x"].mean == pytest.approx(whole["x"].mean, abs=1e-9 * MAGNITUDE)
    assert merged["x"].m2 == pytest.approx(
        whole["x"].m2, rel=1e-9, abs=1e-12 * MAGNITUDE
    )


@given(rows)
def test_numeric_statistics_equal_numpy(members):
    values = np.array([row[0] for row in members if row[0] is not None])
    found = column_statistics(table(members)["x"])
    assert found.count == values.size
    if values.size:
        assert found.mean == pytest.approx(values.mean(), abs=1e-9 * MAGNITUDE)
        assert found.scale == pytest.approx(values.std(), rel=1e-9, abs=1e-7)


@given(rows, st.integers(2, 4))
def test_encoding_of_any_sharding_is_that_of_the_whole(members, max_categories):
    members = [(v and round(v), name, shard) for v, name, shard in members]
    members.sort(key=lambda row: row[2])
    shards = [shard for shard in shards_of(members) if shard]
    whole = fit(statistics_of(members), max_categories)
    merged = fit(merge_tables([statistics_of(s) for s in shards]), max_categories)
    assert merged.feature_names == whole.feature_names
    assert merged.dropped == whole.dropped
    parts = [merged.transform(table(shard)) for shard in shards]
    expected = whole.transform(table(members))
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-5)


@given(rows, st.integers(2, 4))
def test_encoding_equals_a_slow_reference(members, max_categories):
    columns = table(members)
    encoder = fit(statistics_of(members), max_categories)
    encoded = encoder.transform(columns)
    present = [row[0] for row in members if row[0] is not None]
    names = [row[1] for row in members if row[1] is not None]
    common = min(set(names), key=lambda n: (-names.count(n), n), default="")
    kept = [item.categories for item in encoder.encodings if item.name == "c"]
    for (value, name, _), got in zip(members, encoded, strict=True):
        expected = []
        if "x" not in encoder.dropped:
            mean, scale = np.mean(present), np.std(present)
            expected.append(0.0 if value is None else (value - mean) / scale)
        for categories in kept:
            filled = common if name is None else name
            expected += [float(filled == category) for category in categories]
            if len(set(names)) > max_categories:
                expected.append(float(filled not in categories))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_encoding_by_hand():
    columns = {"x": numeric(1, 3, None), "c": categorical("b", None, "b")}
    columns["d"] = categorical("q", "p", None)
    encoder = fit({name: column_statistics(c) for name, c in columns.items()})
    assert encoder.feature_names == ("x", "d=p", "d=q")
    assert encoder.dropped == ("c",)  # only "b", once the missing one is filled
    assert encoder.width == 3
    # x: mean 2, deviation 1; d: missing is "p", first of two equally frequent
    expected = [[-1, 0, 1], [1, 1, 0], [0, 1, 0]]
    np.testing.assert_array_equal(encoder.transform(columns), expected)


def test_rare_categories_share_a_column():
    column = categorical("c", "c", "b", "b", "a", "d", None)
    encoder = fit({"f": column_statistics(column)}, max_categories=3)
    assert encoder.feature_names == ("f=b", "f=c", f"f={OTHER}")
    shard = {"f": categorical("a", "b", None, "new")}
    expected = [[0, 0, 1], [1, 0, 0], [1, 0, 0], [0, 0, 1]]
    np.testing.assert_array_equal(encoder.transform(shard), expected)


def test_unseen_category_is_zeros_without_a_shared_column():
    encoder = fit({"f": column_statistics(categorical("a", "b"))})
    np.testing.assert_array_equal(
        encoder.transform({"f": categorical("new", "b")}), [[0, 0], [0, 1]]
    )


@pytest.mark.parametrize("value", [0.1, 1.7e9 + 1e-6, -3e200, 0.0])
def test_constant_column_is_dropped_however_it_is_sharded(value):
    shards = [column_statistics(numeric(*[value] * n)) for n in (3, 7, 11)]
    assert fit({"x": merge(shards)}).dropped == ("x",)


def test_empty_column_is_dropped():
    columns = {"x": numeric(None, None), "c": categorical(None, None)}
    encoder = fit({name: column_statistics(c) for name, c in columns.items()})
    assert encoder.dropped == ("x", "c")
    assert encoder.transform(columns).shape == (2, 0)


def test_rows_choose_what_counts_and_what_is_encoded():
    columns = {"x": numeric(1, 3, 100), "c": categorical("a", "b", "z")}
    train = np.array([True, True, False])
    encoder = fit({name: column_statistics(c, train) for name, c in columns.items()})
    assert encoder.feature_names == ("x", "c=a", "c=b")
    chosen = encoder.transform(columns, rows=np.array([1, 0, 1]))
    np.testing.assert_array_equal(chosen, [[1, 0, 1], [-1, 1, 0], [1, 0, 1]])
    np.testing.assert_array_equal(encoder.transform(columns)[2], [98, 0, 0])


def test_blocks_do_not_show(monkeypatch):
    monkeypatch.setattr("tp_flower.encoding.BLOCK_VALUES", 1)  # blocks of 256 rows
    values = np.arange(1000.0)
    column = NumericColumn(values)
    out = np.full((1000, 1), 7, np.float32)
    encoder = fit({"x": column_statistics(column)})
    assert encoder.transform({"x": column}, out=out) is out
    expected = (values - values.mean()) / values.std()
    np.testing.assert_allclose(out[:, 0], expected, rtol=1e-6)
    backwards = encoder.transform({"x": column}, rows=np.arange(1000)[::-1])
    np.testing.assert_array_equal(backwards, out[::-1])


@given(rows, st.integers(2, 4))
def test_json_round_trip(members, max_categories):
    found = statistics_of(members)
    for statistics in found.values():
        text = json.dumps(statistics.to_json(), allow_nan=False)
        assert statistics_from_json(json.loads(text)) == statistics
    encoder = fit(found, max_categories)
    assert TableEncoder.from_json(json.loads(json.dumps(encoder.to_json()))) == encoder


def test_refuses_another_version():
    with pytest.raises(SchemaError, match="encoder of version 99, expected 1"):
        TableEncoder.from_json({"version": 99})


def test_refuses_values_too_large():
    with pytest.raises(SchemaError, match=r"up to 1e\+200 are too large"):
        column_statistics(numeric(0.0, 1e200))


def test_column_without_values_fits_any_kind():
    """As in a CSV shard where a number column is empty, and so read as text."""
    shards = [{"x": numeric(1, 3), "c": numeric(None)}]
    shards.append({"x": categorical(None), "c": categorical("a", "b")})
    encoder = fit(
        merge_tables([{n: column_statistics(c) for n, c in s.items()} for s in shards])
    )
    assert encoder.feature_names == ("x", "c=a", "c=b")
    first = {"x": numeric(1), "c": numeric(None)}
    second = {"x": categorical(None), "c": categorical("b")}
    np.testing.assert_array_equal(encoder.transform(first), [[-1, 1, 0]])
    np.testing.assert_array_equal(encoder.transform(second), [[0, 0, 1]])


def test_refuses_to_merge_kinds():
    mixed = [{"x": NumericStatistics(1, 2.0)}, {"x": CategoryStatistics({"a": 1})}]
    with pytest.raises(SchemaError, match=r"feature 'x': .* numeric in one shard"):
        merge_tables(mixed)


def test_refuses_to_merge_different_features():
    a, both = {"a": NumericStatistics()}, {"a": NumericStatistics()}
    both["b"] = NumericStatistics()
    with pytest.raises(SchemaError, match="feature 'b' is missing in a shard"):
        merge_tables([both, a])
    with pytest.raises(SchemaError, match="feature 'b' is missing in a shard"):
        merge_tables([a, both])


def test_refuses_to_merge_nothing():
    with pytest.raises(ValueError, match="no statistics"):
        merge([])
    with pytest.raises(ValueError, match="no statistics"):
        merge_tables([])


def test_refuses_too_few_categories():
    with pytest.raises(ValueError, match="max_categories must be at least 2, not 1"):
        fit({}, max_categories=1)


def test_transform_refuses_what_does_not_fit():
    encoder = fit({"x": column_statistics(numeric(1, 2))})
    text = fit({"x": column_statistics(categorical("a", "b"))})
    with pytest.raises(SchemaError, match="'x' is not among the shard's: y"):
        encoder.transform({"y": numeric(1)})
    with pytest.raises(SchemaError, match="'x' is not numeric"):
        encoder.transform({"x": categorical("a")})
    with pytest.raises(SchemaError, match="'x' is not categorical"):
        text.transform({"x": numeric(1)})
    with pytest.raises(ValueError, match=r"out must be float32 \(1, 1\)"):
        encoder.transform({"x": numeric(1)}, out=np.empty((2, 1), np.float32))
