import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples.encoding_example import (
    HASHER,
    categorical,
    choice_of,
    kind_of,
    numeric,
    packet_of,
    received,
    statistics_of,
    vectors,
)
from tp_flower.errors import MessageError, SchemaError
from tp_flower.features.statistics import (
    CountedRows,
    feature_statistics,
    merge,
    merge_tables,
)
from tp_flower.features.statistics_codec import from_wire, to_wire
from tp_flower.protocol.packet import Packet

MAGNITUDE = 1e6  # of the test values; tolerances below are relative to it
values = st.lists(st.none() | st.floats(-MAGNITUDE, MAGNITUDE), max_size=20)
COLUMNS = {
    "x": numeric(1, 3, None, 2),
    "c": categorical("a", "b", "a", None),
    "v": vectors((1, 2), None, None, None),
}
CHOICE = choice_of(COLUMNS, x="min-max missing=median")


@given(st.lists(values, min_size=1, max_size=4))
def test_merged_statistics_of_any_sharding_are_those_of_the_whole(shards):
    columns = [{"x": numeric(*shard)} for shard in shards]
    choice = choice_of(columns[0], x="min-max")
    merged = merge([statistics_of(choice, shard)["x"] for shard in columns])
    everything = [value for shard in shards for value in shard]
    present = np.array([value for value in everything if value is not None])
    assert (merged.rows, merged.count) == (len(everything), present.size)
    if not present.size:
        return
    assert (merged.low, merged.high) == (present.min(), present.max())
    assert merged.mean == pytest.approx(present.mean(), abs=1e-9 * MAGNITUDE)
    assert merged.deviation == pytest.approx(present.std(), rel=1e-9, abs=1e-7)


def test_only_what_is_needed_is_computed():
    actual = statistics_of(choice_of(COLUMNS, x="hash(4)", c="length"), COLUMNS)
    x, c, v = actual.values()
    assert np.isnan([x.mean, x.m2, x.low, x.high, c.low, c.high, v.mean]).all()
    for each in (x, c, v):
        assert not len(each.quantiles.values) + len(each.categories.counts)
    assert (x.rows, x.count, x.is_declared) == (0, 0, True)
    assert (c.count, c.mean, c.m2) == (3, 1.0, 0.0)
    assert (v.width, v.count) == (2, 0)


def test_texts_do_not_travel():
    columns = {"c": categorical("secret", "b")}
    actual = feature_statistics(
        choice_of(columns), "c", "text", columns["c"], CountedRows(HASHER)
    )
    packet = packet_of(to_wire({"c": actual}))
    assert "secret" not in repr(packet)
    assert {key: array.dtype.name for key, array in packet.arrays.items()} == {
        (0, "category-hashes/0"): "uint64",
        (0, "category-counts/0"): "int64",
    }


@pytest.mark.parametrize(
    ("column", "spec", "message"),
    [
        (numeric(0.0, 1e200), "standard", "feature 'x': some values are too large"),
        (numeric(-1e308, 1e308), "min-max missing=zero", "are too large to scale"),
        (categorical("a"), "robust", r"encoder of t\.x: .* does not fit a text"),
    ],
)
def test_refuses_values_and_encoders(column, spec, message):
    with pytest.raises(SchemaError, match=message):
        statistics_of(choice_of({"x": column}, x=spec), {"x": column})


def test_refuses_to_merge_columns_that_differ():
    columns = numeric(1), categorical("a"), vectors((1, 2)), vectors((1,), width=1)
    shards = [{"x": column} for column in columns]
    number, text, vector, short = (statistics_of(choice_of(s), s) for s in shards)
    with pytest.raises(SchemaError, match="'x' is a number in one shard and a text in"):
        merge_tables([number, text])
    with pytest.raises(SchemaError, match="'x' is a vector of 2 in one shard and a ve"):
        merge_tables([vector, short])


def hashes(*rows):
    return np.array(rows, np.uint64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("number", "key", "value", "message"),
    [
        (0, "kind", "money", "'x': kind must be one of number, boolean"),
        (0, "kind", "vector", r"encoder of t\.x: .* does not fit a vector"),
        (0, "rows", 5, "'x': rows must be a whole number from 0 to 4"),
        (0, "rows", None, "'x': rows must be a whole number from 0 to 4"),
        (0, "count", 5, "'x': count must be a whole number from 0 to 4"),
        (0, "low", None, "'x': it has no low"),
        (0, "high", 0.5, "'x': low and high do not span a range"),
        (1, "tail", 2, "'c': categories of no more than tail = 2 rows"),
        (1, "name", "x", "no statistics of feature 'c' in its place"),
        (2, "width", 1 << 21, "'v': width must be a whole number from 0 to 1048576"),
        (0, "quantile-values", None, "'x': no usable array of points"),
        (0, "quantile-weights", None, "'x': no usable array of weights"),
        (0, "quantile-values", np.array([2.0, 1, 3]), "'x': .* without order"),
        (0, "quantile-values", np.zeros(1001), "'x': 1001 points, more than 1000"),
        (0, "quantile-weights", np.array([1, 2, 1]), "counts that are not of 3 values"),
        (0, "quantile-weights", np.full(3, 2**62), "counts that are not of 3 values"),
        (1, "category-hashes", hashes((1, 1), (1, 1)), "not distinct and in order"),
        (1, "category-hashes", hashes((2, 1), (1, 2)), "not distinct and in order"),
        (1, "category-counts", np.array([3, 1]), "counts that are not of 3 values"),
    ],
)
def test_refuses_facts_that_cannot_be(number, key, value, message):
    counted = CountedRows(HASHER)
    packet = packet_of(
        to_wire(
            {
                name: feature_statistics(CHOICE, name, kind_of(column), column, counted)
                for name, column in COLUMNS.items()
            }
        )
    )
    if "-" not in key:
        packet.header["parts"][0]["statistics"][number][key] = value
    elif value is None:
        del packet.arrays[0, f"{key}/{number}"]
    else:
        packet.arrays[0, f"{key}/{number}"] = value
        if len(value) > 1000:
            packet.arrays[0, f"quantile-weights/{number}"] = np.ones(1001, np.int64)
    with pytest.raises((SchemaError, MessageError), match=message):
        from_wire(received(packet), CHOICE, 4)


def test_refuses_another_number_of_features():
    packet = Packet({"parts": [{"id": 0, "statistics": []}]})
    with pytest.raises(SchemaError, match="statistics of 0 features, not of 3"):
        from_wire(received(packet), CHOICE, 4)
