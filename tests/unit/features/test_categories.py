from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples.encoding_example import categorical
from tp_flower.errors import SchemaError
from tp_flower.features import statistics
from tp_flower.features.statistics import (
    category_purpose,
    count_categories,
    merge_categories,
    short_hashes,
)
from tp_flower.keyed_hash import KeyedHasher

HASHER = KeyedHasher(bytes(32))
NAMES = [*"abcdefgh"]
BY_HASH = {
    hashes.tobytes(): name
    for name, hashes in zip(NAMES, short_hashes(pa.array(NAMES), HASHER), strict=True)
}
shards = st.lists(
    st.lists(st.none() | st.sampled_from(NAMES), max_size=20), min_size=1, max_size=4
)


def counted(shard, min_count=1):
    return count_categories(categorical(*shard), HASHER, min_count)


def named(actual):
    keys = [BY_HASH[hashes.tobytes()] for hashes in actual.hashes]
    return dict(zip(keys, actual.counts.tolist(), strict=True))


@settings(deadline=None)
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
    again = merge_categories([*parts[1:], parts[0]])
    assert named(again) == expected


@settings(deadline=None)
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
        np.testing.assert_array_equal(actual, exact)


def test_a_long_tail_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_CATEGORIES", 2)
    first = counted("aaaaabbbbcd")
    second = counted("aaaabbbbefgh")
    merged = merge_categories([first, second])
    assert (named(merged), merged.tail) == ({"a": 9, "b": 8}, 2)
    chosen = merged.most_frequent(1)
    assert BY_HASH[merged.hashes[chosen[0]].tobytes()] == "a"
    merged.most_frequent(2)
    with pytest.raises(SchemaError, match=r"more than 2 different values in a shard"):
        merged.most_frequent(3)


def test_all_different_values_are_not_listed(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_CATEGORIES", 3)
    actual = counted("abcd")
    assert (len(actual.hashes), actual.tail) == (0, 1)
    with pytest.raises(SchemaError, match=r"encode it with hash\(k\) or length"):
        actual.most_frequent(1)


def test_purposes_differ():
    pairs = [("a", "b/c"), ("a/b", "c"), ("a", "b"), ("A", "b")]
    assert len({category_purpose(*pair) for pair in pairs}) == len(pairs)
