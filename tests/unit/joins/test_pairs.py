"""Pairs of rows and regions, against loops; masks of pairs, on tiny rings of words."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from tp_flower.joins.mapping import TableRows
from tp_flower.joins.pairs import NO_REGION, pair_rows
from tp_flower.privacy.score_masks import NO_MASK, FixedPoint, JoinMask, ScoreMasks


@given(number=st.integers(0, 2**32 - 1), has_test=st.booleans())
def test_pairs_are_the_distinct_ones_by_shard_those_to_train_on_first(number, has_test):
    rng = default_rng(number)
    count = int(rng.integers(1, 12))
    ends = sorted({*rng.integers(0, count + 1, 2).tolist(), count})
    joined, held_out = (
        TableRows(rng.integers(-1, count, n).astype(np.int32), count)
        for n in rng.integers(0, 30, 2)
    )
    regions = [
        rng.choice([0, 1, 2, NO_REGION], len(each.row_of)).astype(np.uint8)
        for each in (joined, held_out)
    ]
    pairs = pair_rows(joined, held_out if has_test else None, tuple(regions), ends)
    seen = list(zip(pairs.rows.tolist(), pairs.regions.tolist(), strict=True))
    trained, tested = (
        {
            (row, region)
            for row, region in zip(each.row_of, own, strict=True)
            if row >= 0
        }
        for each, own in zip((joined, held_out), regions, strict=True)
    )
    if not has_test:
        tested = set()
    shard = [sum(row >= end for end in ends) for row, _ in trained | tested]
    ordered = sorted(
        (sum(pair[0] >= end for end in ends), pair not in trained, pair)
        for pair in trained | tested
    )
    assert len(shard) == len(seen)
    assert seen == [pair for _, _, pair in ordered]
    assert pairs.is_trained.tolist() == [pair in trained for pair in seen]
    assert pairs.is_tested.tolist() == [pair in tested for pair in seen]
    for rows, of_pairs, own in zip(
        (joined, held_out), (pairs.train, pairs.test), regions, strict=True
    ):
        if of_pairs is None:
            continue
        for row, pair, region in zip(rows.row_of, of_pairs.row_of, own, strict=True):
            assert (seen[pair] == (row, region)) if row >= 0 else pair == -1


def test_masks_cancel_where_key_and_region_are_equal_and_nowhere_else():
    rng = default_rng(0)
    tags = rng.integers(0, 2**63, (5, 2)).astype(np.uint64)
    codes = np.array([0, 1, 2, 3, 4, NO_MASK], np.int32)
    point = FixedPoint(bits=8, tables=2)
    first, second = (
        ScoreMasks(point, (JoinMask("g", b"key", tags, codes, is_positive),))
        for is_positive in (True, False)
    )
    # every row with every region, each side in an order of its own
    rows, regions = (each.ravel() for each in np.indices((6, 3)))
    order = rng.permutation(len(rows))
    zeros = np.zeros((len(rows), 5))
    own = first.split(rows, regions.astype(np.uint8)).words(zeros, slice(None), "n")
    other = second.split(rows[order], regions[order].astype(np.uint8)).words(
        zeros, slice(None), "n"
    )
    for place, (row, region) in enumerate(
        zip(rows[order], regions[order], strict=True)
    ):
        same = 3 * row + region
        assert not (own[same] + other[place]).any()
        others = np.delete(own, same, axis=0)[: -3 if row < 5 else None]
        if row < 5:
            assert ((others + other[place]) != 0).all()
    # five outputs take two blocks: no block of a pair is one of another pair
    masks = own[:15].reshape(-1, 5)
    assert len(np.unique(masks[:, [0, 4]])) == 30
    assert not own[15:].any()
