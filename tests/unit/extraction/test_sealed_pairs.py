"""Pairs of a key and a cutoff, hashed at one site and matched at another."""

import numpy as np
import pyarrow as pa
import pytest

from tp_flower.extraction.sealed_pairs import (
    TEXT,
    KeyedPairs,
    hash_pairs,
    match_pairs,
)
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.query.cutoffs import CUTOFF

HASHER = KeyedHasher(bytes(range(32)))


def drawn_pairs(seed, rows=40):
    """Pairs in two chunks, many of them twice."""
    rng = np.random.default_rng(seed)
    texts = [f"number1:{key}" for key in rng.integers(0, 9, rows)]
    times = pa.array(rng.integers(-3, 4, rows) * 86_400_000_000, pa.timestamp("us"))
    pairs = pa.table({TEXT: texts, CUTOFF: times})
    return pa.concat_tables([pairs[: rows // 2], pairs[rows // 2 :]])


def numbers_of(times):
    return times.cast(pa.int64()).to_pylist()


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_hashed_pairs_are_distinct_and_sorted(rows):
    pairs = drawn_pairs(rows, rows)
    texts = pairs[TEXT].cast(pa.string())
    halves = HASHER.tag_texts(texts).tolist()
    triples = zip(halves, numbers_of(pairs[CUTOFF]), strict=True)
    expected = sorted({(*half, cutoff) for half, cutoff in triples})
    pairs = pairs.set_column(0, TEXT, texts)
    keyed = hash_pairs(pairs, "TIMESTAMP", "number", HASHER).check()
    columns = (*keyed.hashes.T.tolist(), keyed.cutoffs.tolist())
    assert list(zip(*columns, strict=True)) == expected


@pytest.mark.parametrize("own", [[], [3], [8, 5, 0, 7, 20]])
def test_matched_pairs_are_those_of_own_keys_sorted(own):
    pairs = drawn_pairs(1)
    keyed = hash_pairs(pairs, "TIMESTAMP", "number", HASHER)
    own_keys = pa.table(
        {
            TEXT: pa.array([f"number1:{key}" for key in own], pa.string()),
            "key": pa.array(own, pa.int64()),
        },
        metadata={"uuids": ""},
    )
    keys = [int(text.rpartition(":")[2]) for text in pairs[TEXT].to_pylist()]
    both = zip(keys, numbers_of(pairs[CUTOFF]), strict=True)
    expected = sorted({(key, cutoff) for key, cutoff in both if key in own})
    matched = match_pairs(own_keys, keyed, HASHER)
    found = zip(matched["key"].to_pylist(), numbers_of(matched[CUTOFF]), strict=True)
    assert list(found) == expected
    assert matched.schema.metadata == own_keys.schema.metadata


def test_without_keys_all_cutoffs_match():
    hashes = HASHER.tag_texts(pa.array([""])).repeat(2, axis=0)
    keyed = KeyedPairs(hashes, np.array([4, 9]), "BIGINT")
    matched = match_pairs(pa.table({TEXT: [""]}), keyed, HASHER)
    assert matched.to_pydict() == {CUTOFF: [4, 9]}
