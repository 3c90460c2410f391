from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

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
from tests.support.files import case_table
from tp_flower.errors import MessageError, SchemaError
from tp_flower.features import statistics, statistics_codec
from tp_flower.features.columns import nearly_numbers
from tp_flower.features.fitting import fit
from tp_flower.features.statistics import (
    CountedRows,
    category_purpose,
    count_categories,
    feature_statistics,
    merge,
    merge_categories,
    merge_tables,
    short_hashes,
)
from tp_flower.features.statistics_codec import from_wire, to_wire
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.protocol.packet import Packet

CASES = case_table(__file__)
MAGNITUDE = 1e6  # of the test values; tolerances below are relative to it
values = st.lists(st.none() | st.floats(-MAGNITUDE, MAGNITUDE), max_size=20)
COLUMNS = {
    "x": numeric(1, 3, None, 2),
    "c": categorical("a", "b", "a", None),
    "v": vectors((1, 2), None, None, None),
}
CHOICE = choice_of(COLUMNS, x="min-max")


def refused(match):
    """Expect columns to be refused, with such a text."""
    return pytest.raises(SchemaError, match=match)


@given(st.lists(values, min_size=1, max_size=4))
def test_merged_statistics_of_any_sharding_are_those_of_the_whole(shards):
    columns = [{"x": numeric(*shard)} for shard in shards]
    choice = choice_of(columns[0], x="min-max")
    merged = merge([statistics_of(choice, shard)["x"] for shard in columns])
    everything = [value for shard in shards for value in shard]
    present = np.array([value for value in everything if value is not None])
    assert merged.rows == len(everything)
    assert merged.count == present.size
    if not present.size:
        return
    assert merged.low == present.min()
    assert merged.high == present.max()
    assert merged.mean == pytest.approx(present.mean(), abs=1e-9 * MAGNITUDE)
    assert merged.deviation == pytest.approx(present.std(), rel=1e-9, abs=1e-7)


def test_only_what_is_needed_is_computed():
    choice = choice_of(COLUMNS, x="hash(4)", c="length")
    x, c, v = statistics_of(choice, COLUMNS).values()
    assert np.isnan([x.mean, x.m2, x.low, x.high, c.low, c.high, v.mean]).all()
    assert not any(len(each.categories.counts) for each in (x, c, v))
    assert x.rows == 0
    assert x.count == 0
    assert x.is_declared is True
    assert c.count == 3
    assert c.mean == 1.0
    assert c.m2 == 0.0
    assert v.width == 2
    assert v.count == 0


@pytest.mark.parametrize(
    ("column", "spec", "message"),
    [
        (numeric(0.0, 1e200), "standard", "feature 'x': some values are too large"),
        (numeric(-1e308, 1e308), "min-max missing=zero", "are too large to scale"),
        (categorical("a"), "min-max", r"encoder of t\.x: .* does not fit a text"),
    ],
)
def test_refuses_values_and_encoders(column, spec, message):
    with refused(message):
        statistics_of(choice_of({"x": column}, x=spec), {"x": column})


def test_refuses_to_merge_columns_that_differ():
    columns = numeric(1), categorical("a"), vectors((1, 2)), vectors((1,), width=1)
    shards = [{"x": column} for column in columns]
    number, text, vector, short = (statistics_of(choice_of(s), s) for s in shards)
    with refused("'x' is a number in one shard and a text in"):
        merge_tables([number, text])
    with refused("'x' is a vector of 2 in one shard and a ve"):
        merge_tables([vector, short])


def hashes(*rows):
    return np.array(rows, np.uint64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("number", "key", "value", "message"),
    [
        *CASES["impossible"],
        *((*place, None, message) for *place, message in CASES["missing"]),
        (1, "category-hashes", hashes((1, 1), (1, 1)), "not distinct and in order"),
        (1, "category-hashes", hashes((2, 1), (1, 2)), "not distinct and in order"),
        (1, "category-hashes", hashes(*[(0, 0)] * 9), "'c': 9 hashes, at most 8"),
        (1, "category-counts", np.array([3, 1]), "add up to more than 3 values"),
        (1, "category-counts", np.full(2, 2**62), "add up to more than 3 values"),
    ],
)
def test_refuses_facts_that_cannot_be(number, key, value, message, monkeypatch):
    monkeypatch.setattr(statistics_codec, "MOST_CATEGORIES", 8)
    counted = CountedRows(HASHER)
    statistics = {
        name: feature_statistics(CHOICE, name, kind_of(column), column, counted)
        for name, column in COLUMNS.items()
    }
    packet = packet_of(to_wire(statistics))
    if "-" not in key:
        packet.header["parts"][0]["statistics"][number][key] = value
    elif value is None:
        del packet.arrays[0, f"{key}/{number}"]
    else:
        packet.arrays[0, f"{key}/{number}"] = value
        if len(value) > 2:
            packet.arrays[0, f"category-counts/{number}"] = np.ones(9, np.int64)
            packet.arrays[0, f"category-ties/{number}"] = np.ones(9, np.uint32)
    with pytest.raises((SchemaError, MessageError), match=message):
        from_wire(received(packet), CHOICE, 4)


def test_refuses_another_number_of_features():
    with refused("statistics of 0 features, expected 3"):
        from_wire(received(Packet({"parts": [{"id": 0, "statistics": []}]})), CHOICE, 4)


NAMES = [*"abcdefgh"]


def names_by_hash(hasher):
    listed = short_hashes(pa.array(NAMES), hasher)
    return {row.tobytes(): name for row, name in zip(listed, NAMES, strict=True)}


BY_HASH = names_by_hash(HASHER)
shards = st.lists(
    st.lists(st.none() | st.sampled_from(NAMES), max_size=20), min_size=1, max_size=4
)


def counted(shard, min_count=1, hasher=HASHER):
    return count_categories(categorical(*shard), hasher, CountedRows(hasher, min_count))


def named(actual):
    keys = [BY_HASH[hashes.tobytes()] for hashes in actual.hashes]
    return dict(zip(keys, actual.counts.tolist(), strict=True))


@given(shards, st.integers(1, 3))
def test_merged_counts_are_those_of_the_union(members, min_count):
    expected: Counter[str] = Counter()
    for shard in members:
        counts = Counter(value for value in shard if value is not None)
        expected += Counter({k: v for k, v in counts.items() if v >= min_count})
    parts = [counted(shard, min_count) for shard in members]
    merged = merge_categories(parts)
    assert named(merged) == expected
    assert merged.hashes.tolist() == sorted(merged.hashes.tolist())
    assert named(merge_categories([*parts[1:], parts[0]])) == expected


@given(shards, st.integers(1, 4), st.integers(1, 3))
def test_cut_lists_give_the_exact_most_frequent_or_none(members, number, most):
    full = merge_categories([counted(shard) for shard in members])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "MOST_CATEGORIES", most)
        parts = [counted(shard) for shard in members]
    assert all(len(part.hashes) <= most for part in parts)
    cut = merge_categories(parts)
    exact = full.hashes[full.most_frequent(number)]
    try:
        actual = cut.hashes[cut.most_frequent(number)]
    except SchemaError:
        assert cut.tail
        return
    assert {h.tobytes() for h in actual} == {h.tobytes() for h in exact}
    if cut.tail == 0:
        assert_array_equal(actual, exact)


def test_a_long_tail_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_CATEGORIES", 2)
    first = counted("aaaaabbbbcd")
    second = counted("aaaabbbbefgh")
    merged = merge_categories([first, second])
    assert named(merged) == {"a": 9, "b": 8}
    assert merged.tail == 2
    assert BY_HASH[merged.hashes[merged.most_frequent(1)[0]].tobytes()] == "a"
    merged.most_frequent(2)
    with refused(r"more than 2 different values in a shard"):
        merged.most_frequent(3)


def test_all_different_values_are_not_listed(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_CATEGORIES", 3)
    actual = counted("abcd")
    assert len(actual.hashes) == 0
    assert actual.tail == 1
    with refused(r"encode it with hash\(k\) or length"):
        actual.most_frequent(1)


def test_purposes_differ():
    pairs = [("a", "b/c"), ("a/b", "c"), ("a", "b"), ("A", "b")]
    assert len({category_purpose(*pair) for pair in pairs}) == len(pairs)


@given(
    shards,
    st.integers(0, 2**32),
    st.sampled_from(["standard", "min-max", "one-hot(4)"]),
)
def test_a_row_counts_as_often_as_it_is_joined(members, seed, spec):
    """The encoder is the one of the joined table, which repeats the row."""
    names = [name for shard in members for name in shard]
    counts = default_rng(seed).integers(0, 4, len(names))
    values = [None if name is None else NAMES.index(name) for name in names]
    columns = {"x": numeric(*values), "c": categorical(*names)}
    joined = {
        name: column.take(np.repeat(np.arange(len(names)), counts))
        for name, column in columns.items()
    }
    choice = choice_of(columns, x=spec)
    rows = CountedRows(HASHER, rows=counts > 0, counts=counts[counts > 0])
    # a row is in three joined rows at most
    most = 3 * len(names)
    one = fit("t", statistics_of(choice, columns, rows, most))
    other = fit("t", statistics_of(choice, joined, CountedRows(HASHER), most))
    assert one.feature_names == other.feature_names
    encoded, expected = (
        each.for_site(HASHER).transform(columns) for each in (one, other)
    )
    assert_allclose(encoded, expected, rtol=1e-5, atol=1e-5)


@given(shards, st.integers(1, 4))
def test_ties_fall_alike_whatever_the_key(members, number):
    merged = merge_categories([counted(shard) for shard in members])
    names = [*named(merged)]
    chosen = {names[place] for place in merged.most_frequent(number)}
    other = KeyedHasher(bytes(32))
    again = merge_categories([counted(shard, hasher=other) for shard in members])
    by_hash = names_by_hash(other)
    frequent = again.hashes[again.most_frequent(number)]
    assert {by_hash[hashes.tobytes()] for hashes in frequent} == chosen


@pytest.mark.parametrize(
    ("values", "rows", "columns"),
    [
        ([0, 1, 2], 300, 4),  # a slope, and a column per number
        ([0, 1, 2, None], 400, 5),
        ([0, 1, 2], 297, 1),  # too few rows of each
        ([0, 1], 1000, 1),
        ([0, 1, 2.5], 1000, 1),
        (range(33), 4950, 1),
        (range(32), 4800, 33),
    ],
)
def test_few_whole_numbers_have_a_column_each(values, rows, columns):
    column = {"x": numeric(*values)}
    counts = np.full(len(values), rows // len(values))
    counted_rows = CountedRows(HASHER, counts=counts)
    facts = statistics_of(choice_of(column), column, counted_rows, most=rows)
    assert fit("t", facts).width == columns


@pytest.mark.parametrize(
    ("texts", "is_nearly"),
    [
        (["1", "2.5", "-3e4", " 7 "] * 10 + ["oops"], True),
        (["2013-01-31"] * 30 + ["31.1.2013", "soon"], True),
        (["$1,234.50", "5 %"] * 20, True),
        (["1", "2"] * 20, False),  # text on purpose, such as postcodes
        (["1", "a"] * 20, False),
        ([None], False),
    ],
)
def test_texts_that_are_nearly_all_numbers(texts, is_nearly):
    assert nearly_numbers(categorical(*texts)) == is_nearly
