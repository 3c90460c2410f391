import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tp_flower.features import statistics
from tp_flower.features.statistics import merge_quantiles, summarise

numbers = st.integers(-5, 5).map(float) | st.floats(-1e300, 1e300)
shards = st.lists(st.lists(numbers, max_size=40), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def _five_points(monkeypatch):
    """So few points that small shards are summarised."""
    monkeypatch.setattr(statistics, "MOST_POINTS", 5)


@given(shards, st.integers(1, 4), st.floats(0, 1))
def test_ranks_and_quantiles_are_within_the_bound(members, min_count, p):
    parts = [summarise(np.array(shard, float), min_count) for shard in members]
    merged = merge_quantiles(parts)
    everything = np.array([value for shard in members for value in shard])
    stated = sum(max(-(-len(shard) // 5), 2 * min_count - 1) / 2 for shard in members)
    assert merged.rank_error <= stated
    for x in everything:
        at_most = merged.weights[merged.values <= x].sum()
        below = merged.weights[merged.values < x].sum()
        assert abs((everything <= x).sum() - at_most) <= merged.rank_error
        assert abs((everything < x).sum() - below) <= merged.rank_error
    for shard, part in zip(members, parts, strict=True):
        assert set(part.values) <= set(shard)
        assert (part.weights >= min_count).all()
        assert part.count == (len(shard) if len(shard) >= min_count else 0)
        assert len(part.values) <= 5
    if not merged.count:
        return
    actual, rank = merged.quantile(p), p * (merged.count - 1)
    # interpolation may round the value by half a unit in the last place
    slack = abs(actual) * 1e-15
    at_most = (everything <= actual + slack).sum()
    assert at_most >= np.floor(rank) + 1 - merged.rank_error
    below = (everything < actual - slack).sum()
    assert below < np.ceil(rank) + 1 + merged.rank_error


@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=6), st.floats(0, 1))
def test_small_shards_have_exact_quantiles(members, p):
    merged = merge_quantiles([summarise(np.array(shard, float)) for shard in members])
    everything = [value for shard in members for value in shard]
    assert merged.rank_error == 0
    if everything:
        assert merged.quantile(p) == pytest.approx(
            np.quantile(np.array(everything) / 2, p) * 2, rel=1e-9, abs=1e-9
        )


@given(shards)
@example([[0.0] * 7])  # groups of equal values differ in size
def test_merging_is_order_free(members):
    parts = [summarise(np.array(shard, float)) for shard in members]
    merged = merge_quantiles(parts)
    stepwise = parts[-1]
    for part in reversed(parts[:-1]):
        stepwise = merge_quantiles([stepwise, part])
    np.testing.assert_array_equal(merged.values, stepwise.values)
    np.testing.assert_array_equal(merged.weights, stepwise.weights)
    assert merged.rank_error == stepwise.rank_error


def test_too_few_values_stay_at_home():
    summary = summarise(np.array([1.0, 2.0]), min_count=3)
    assert (summary.count, summary.rank_error) == (0, 2)
    with pytest.raises(ValueError, match="without points has no quantiles"):
        summary.quantile(0.5)
