from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.encoding_example import (
    HASHER,
    categorical,
    choice_of,
    kind_of,
    numeric,
    statistics_of,
    vectors,
)
from tp_flower.encoding.statistics import (
    ColumnStatistics,
    Moments,
    Range,
    Sample,
    feature_statistics,
    merge,
    merge_tables,
)
from tp_flower.encoding.statistics_wire import from_wire, to_wire
from tp_flower.errors import SchemaError

MAGNITUDE = 1e6  # of the test values; tolerances below are relative to it
values = st.lists(st.none() | st.floats(-MAGNITUDE, MAGNITUDE), max_size=20)
COLUMNS = {
    "x": numeric(1, 3, None, 2),
    "c": categorical("a", "b", "a", None),
    "v": vectors((1, 2), None, None, None),
}
CHOICE = choice_of(COLUMNS, x="min-max missing=median")


@given(st.lists(values, min_size=1, max_size=4))
def test_merged_statistics_of_any_sharding_are_those_of_the_whole(
    shards: list[list[float | None]],
) -> None:
    columns = [{"x": numeric(*own)} for own in shards]
    choice = choice_of(columns[0], x="min-max")
    merged = merge([statistics_of(choice, own)["x"] for own in columns])
    everything = [value for own in shards for value in own]
    present = np.array([value for value in everything if value is not None])
    assert (merged.rows, merged.count) == (len(everything), present.size)
    if not present.size:
        return
    assert merged.range == Range(present.min(), present.max())
    assert merged.moments is not None
    assert merged.moments.count == present.size
    assert merged.moments.mean == pytest.approx(present.mean(), abs=1e-9 * MAGNITUDE)
    assert merged.moments.scale == pytest.approx(present.std(), rel=1e-9, abs=1e-7)


def test_only_what_is_needed_is_computed() -> None:
    found = statistics_of(choice_of(COLUMNS, x="hash(4)", c="length"), COLUMNS)
    x, c, v = found.values()
    assert (x.moments, x.range, x.quantiles, x.categories) == (None,) * 4
    assert (x.rows, x.count, x.is_declared) == (0, 0, True)
    assert c.moments == Moments(3, 1.0, 0.0)
    assert c.categories is None
    assert (v.width, v.count, v.moments) == (2, 0, None)


def test_texts_do_not_travel() -> None:
    columns = {"c": categorical("secret", "b")}
    found = feature_statistics(
        choice_of(columns), "c", "text", columns["c"], Sample(HASHER)
    )
    facts, arrays = to_wire({"c": found})
    assert "secret" not in repr((facts, arrays))
    assert {key: array.dtype.name for key, array in arrays.items()} == {
        "feature-0-category-hashes": "uint64",
        "feature-0-category-counts": "int64",
    }


def test_refuses_values_too_large() -> None:
    columns = {"x": numeric(0.0, 1e200)}
    with pytest.raises(SchemaError, match="feature 'x': some values are too large"):
        statistics_of(choice_of(columns), columns)
    columns = {"x": numeric(-1e308, 1e308)}
    with pytest.raises(SchemaError, match="some values are too large to scale"):
        statistics_of(choice_of(columns, x="min-max missing=zero"), columns)


def test_refuses_an_encoder_that_does_not_fit() -> None:
    with pytest.raises(SchemaError, match=r"encoder of t\.c: .* does not fit a text"):
        statistics_of(choice_of(COLUMNS, c="robust"), COLUMNS)


def test_refuses_to_merge_kinds() -> None:
    shards = [{"x": numeric(1)}, {"x": categorical("a")}, {"x": vectors((1, 2))}]
    shards.append({"x": vectors((1,), width=1)})
    number, text, vector, short = (statistics_of(choice_of(s), s) for s in shards)
    with pytest.raises(SchemaError, match="'x' is a number in one shard and a text in"):
        merge_tables([number, text])
    with pytest.raises(SchemaError, match="'x' is a vector of 2 in one shard and a ve"):
        merge_tables([vector, short])


def test_refuses_to_merge_different_features() -> None:
    empty = ColumnStatistics("number", None, 0, 0)
    with pytest.raises(SchemaError, match="feature 'b' is missing in a shard"):
        merge_tables([{"a": empty, "b": empty}, {"a": empty}])
    with pytest.raises(SchemaError, match="feature 'b' is missing in a shard"):
        merge_tables([{"a": empty}, {"a": empty, "b": empty}])


def test_refuses_to_merge_nothing() -> None:
    with pytest.raises(ValueError, match="no statistics"):
        merge([])
    with pytest.raises(ValueError, match="no statistics"):
        merge_tables([])


# --- what a site may send -----------------------------------------------------------

Sent = tuple[list[dict[str, Any]], dict[str, npt.NDArray[Any]]]


def sent() -> Sent:
    found = {
        name: feature_statistics(CHOICE, name, kind_of(own), own, Sample(HASHER))
        for name, own in COLUMNS.items()
    }
    return to_wire(found)


@pytest.mark.parametrize(
    ("number", "key", "value", "message"),
    [
        (0, "kind", "money", "'x': kind must be one of number, boolean"),
        (0, "kind", ["number"], "'x': kind must be one of number, boolean"),
        (0, "kind", "vector", r"encoder of t\.x: .* does not fit a vector"),
        (0, "rows", 5, "'x': rows must be a whole number from 0 to 4"),
        (0, "rows", True, "'x': rows must be a whole number"),
        (0, "count", -1, "'x': count must be a whole number from 0 to 4"),
        (0, "count", 2.0, "'x': count must be a whole number"),
        (0, "low", float("nan"), "'x': low must be a finite number"),
        (0, "low", 10**400, "'x': low must be a finite number"),
        (0, "low", None, "'x': low must be a finite number"),
        (0, "high", False, "'x': high must be a finite number"),
        (0, "high", 0.5, "'x': low and high do not span a range"),
        (1, "tail", 2, "'c': categories of no more than tail = 2 rows"),
        (1, "tail", -1, "'c': tail must be a whole number"),
        (1, "name", "x", "no statistics of feature 'c' in its place"),
        (2, "width", -1, "'v': width must be a whole number from 0 to"),
    ],
)
def test_refuses_facts_that_cannot_be(
    number: int, key: str, value: object, message: str
) -> None:
    facts, arrays = sent()
    facts[number][key] = value
    with pytest.raises(SchemaError, match=message):
        from_wire(facts, arrays, CHOICE, 4)


def hashes(*rows: tuple[int, int]) -> npt.NDArray[np.uint64]:
    return np.array(rows, np.uint64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("0-quantile-values", None, "'x': no usable array quantile-values"),
        ("0-quantile-values", np.float64(1.0), "no usable array quantile-values"),
        ("0-quantile-values", np.zeros(3, np.float32), "no usable array"),
        ("0-quantile-values", np.zeros((3, 1)), "no usable array"),
        ("0-quantile-values", np.zeros(1001), "has 1001 entries, more than 1000"),
        ("0-quantile-values", np.zeros(2), "2 quantile points of 3 weights"),
        ("0-quantile-values", np.array([2.0, 1, 3]), "not finite and ascending"),
        ("0-quantile-values", np.array([1, 2, np.inf]), "not finite and ascending"),
        ("0-quantile-weights", np.array([1, 0, 1]), "counts that are not of 3 values"),
        ("0-quantile-weights", np.array([1, 2, 1]), "counts that are not of 3 values"),
        ("0-quantile-weights", np.full(3, 2**62), "counts that are not of 3 values"),
        ("1-category-hashes", hashes((1, 1)), "'c': 1 categories with 2 counts"),
        ("1-category-hashes", hashes((1, 1), (1, 1)), "not distinct and in order"),
        ("1-category-hashes", hashes((2, 1), (1, 2)), "not distinct and in order"),
        ("1-category-hashes", np.zeros((2, 4), np.uint64), "no usable array"),
        ("1-category-counts", np.array([3, 1]), "counts that are not of 3 values"),
        ("1-category-counts", np.array([0, 1]), "counts that are not of 3 values"),
    ],
)
def test_refuses_arrays_that_cannot_be(
    name: str, array: npt.NDArray[Any] | None, message: str
) -> None:
    facts, arrays = sent()
    if array is None:
        del arrays[f"feature-{name}"]
    else:
        arrays[f"feature-{name}"] = np.asarray(array)
    with pytest.raises(SchemaError, match=message):
        from_wire(facts, arrays, CHOICE, 4)


@pytest.mark.parametrize("facts", [None, [], {}, [3, 3, 3]])
def test_refuses_what_is_no_list_of_the_features(facts: object) -> None:
    with pytest.raises(SchemaError, match="statistics"):
        from_wire(facts, {}, CHOICE, 4)


def test_refuses_negative_squares() -> None:
    choice = choice_of({"x": COLUMNS["x"]})
    facts, arrays = to_wire(
        {"x": feature_statistics(choice, "x", "number", COLUMNS["x"], Sample(HASHER))}
    )
    facts[0]["m2"] = -1.0
    with pytest.raises(SchemaError, match="'x': m2 must be at least 0"):
        from_wire(facts, arrays, choice, 4)
