"""Statistics with noise: their sensitivity, their noise, and what is made of them."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.encoding_example import (
    HASHER,
    Columns,
    categorical,
    choice_of,
    encoder_of,
    kind_of,
    numeric,
    statistics_of,
    vectors,
)
from tp_flower.encoding.columns import FeatureColumn, VectorColumn
from tp_flower.encoding.encoder import SiteEncoder
from tp_flower.encoding.fitting import fit
from tp_flower.encoding.noisy_statistics import (
    NoisyShard,
    estimate_table,
    noisy_from_wire,
    noisy_to_wire,
)
from tp_flower.encoding.private_statistics import (
    Noise,
    NoisyFeature,
    exact_feature,
    private_statistics,
    rare_threshold,
)
from tp_flower.encoding.ranges import Limits, choose_ranges
from tp_flower.encoding.row_sums import FeaturePlan, plan_features, sensitivity
from tp_flower.encoding.spec import EncoderSpec
from tp_flower.encoding.statistics import ColumnStatistics, Sample
from tp_flower.errors import SchemaError, SettingsError
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.privacy.noise import NoiseSource

KEY = bytes(32)
EPSILON, DELTA = 1.0, 1e-5
DAYS = Limits.parse("2013-01-01..2013-12-31")
RANGES = {
    "x": Limits(-3.0, 5.0),
    "t": DAYS,
    "b": Limits(0.0, 1.0),
    "s": Limits(0.0, 20.0),
}
KINDS = {"x": "number", "t": "time", "b": "boolean", "s": "text", "v": "vector"}
SPECS = {
    "x": (
        *("standard", "standard indicator", "min-max", "min-max missing=zero"),
        *("bins(4)", "bins(3) missing=zero indicator", "none", "none missing=zero"),
        *("cyclic(4)", "cyclic(4) indicator", "one-hot", "hash(4) indicator"),
    ),
    "t": ("standard", "min-max", "cyclic(month)", "bins(5) indicator"),
    "b": ("standard", "min-max indicator", "one-hot missing=zero", "none"),
    "s": ("one-hot", "one-hot(2) indicator", "length", "hash(8)"),
    "v": ("none", "none indicator"),
}


def noise_of(multiplier: float, chance: float = 1e-6, key: bytes = KEY) -> Noise:
    return Noise(multiplier, chance, NoiseSource(key))


def plans_of(columns: Columns, kinds: Mapping[str, str] | None = None, **specs: str):
    choice = choice_of(columns, **specs)
    kinds = {n: (kinds or {}).get(n, kind_of(own)) for n, own in columns.items()}
    return plan_features(choice, kinds, RANGES)


def released(
    plans: Sequence[FeaturePlan], columns: Columns, noise: Noise, **sample: object
) -> dict[str, NoisyFeature]:
    own = Sample(HASHER, **sample)
    return private_statistics(plans, columns.__getitem__, own, "t", noise)


def arrived(
    columns: Columns, noise: Noise, kinds: Mapping[str, str] | None = None, **specs: str
) -> NoisyShard:
    """A shard's noisy statistics, as they arrive at the server."""
    plans = plans_of(columns, kinds, **specs)
    facts, arrays = noisy_to_wire(released(plans, columns, noise))
    facts = json.loads(json.dumps(facts, allow_nan=False))
    choice = choice_of(columns, **specs)
    plans, features = noisy_from_wire(facts, arrays, choice, RANGES)
    rows = max(column.rows for column in columns.values())
    return NoisyShard(plans, features, rows, noise.multiplier * sensitivity(plans))


def noisy_encoder(
    *shards: Columns,
    multiplier: float = 0.0,
    kinds: Mapping[str, str] | None = None,
    **specs: str,
) -> SiteEncoder:
    noise = noise_of(multiplier)
    found = [arrived(shard, noise, kinds, **specs) for shard in shards]
    return fit("t", estimate_table(found)).at_site(HASHER)


# --- sensitivity ------------------------------------------------------------------

anything = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([-np.inf, np.inf])
values_of = {
    "x": anything,
    "t": st.none() | st.floats(DAYS.low - 1e8, DAYS.high + 1e8),
    "b": st.none() | st.sampled_from([0.0, 1.0]),
    "s": st.none() | st.text("ab", max_size=30),
    "v": st.none() | st.tuples(st.floats(-9, 9), st.floats(-9, 9)),
}
rows_of = st.tuples(*values_of.values())
specs_of = st.fixed_dictionaries(
    {name: st.sampled_from(listed) for name, listed in SPECS.items()}
)


def columns_of(rows: Sequence[tuple]) -> dict[str, FeatureColumn]:
    x, t, b, s, v = zip(*rows, strict=True)
    makers = (numeric, numeric, numeric, categorical, vectors)
    return {
        name: make(*own)
        for name, make, own in zip(KINDS, makers, (x, t, b, s, v), strict=True)
    }


def exact_vector(plans: Sequence[FeaturePlan], columns: Columns) -> dict:
    """All that is summed, by name: what noise would be added to."""
    found = {}
    for plan in plans:
        own = exact_feature(plan, columns[plan.name])
        found |= {(plan.name, k): value for k, value in enumerate(own.sums)}
        texts = own.texts.to_pylist()
        found |= {(plan.name, t): n for t, n in zip(texts, own.counts, strict=True)}
    return found


def distance(a: dict, b: dict) -> float:
    return math.hypot(*(a.get(key, 0.0) - b.get(key, 0.0) for key in {*a, *b}))


@given(st.lists(rows_of, min_size=2, max_size=6), rows_of, specs_of)
def test_no_row_changes_the_sums_by_more_than_the_sensitivity(
    rows: list[tuple], other: tuple, specs: dict[str, str]
) -> None:
    plans = plans_of(columns_of(rows), KINDS, **specs)
    bound = sensitivity(plans)
    whole = exact_vector(plans, columns_of(rows))
    without = exact_vector(plans, columns_of(rows[1:]))
    changed = exact_vector(plans, columns_of([other, *rows[1:]]))
    assert distance(whole, without) <= bound * (1 + 1e-12)
    # a row with other values is one row gone, and one more
    assert distance(whole, changed) <= 2 * bound * (1 + 1e-12)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(finite, finite, st.floats(allow_nan=False))
def test_every_value_has_a_place_in_any_range(a: float, b: float, value: float) -> None:
    """Else a server could declare a range that tells where a value is."""
    try:
        limits = Limits.parse(f"{min(a, b)!r}..{max(a, b)!r}")
    except ValueError:
        return
    plan = FeaturePlan("x", "number", EncoderSpec("standard", missing="mean"), limits)
    (row,) = plan.contributions(np.array([value]))
    assert np.linalg.norm(row) <= math.sqrt(1.25)


@pytest.mark.parametrize("text", ["0..5e-324", "0..1e-310", "-1.7e308..1.7e308"])
def test_ranges_without_places_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not run from low to high"):
        Limits.parse(text)


@pytest.mark.parametrize("place", [-1e9, -3.0, 5.0, np.inf])
def test_the_sensitivity_is_attained(place: float) -> None:
    columns = {
        "x": numeric(place, 1),
        "b": numeric(1, 0),
        "s": categorical("a", "b"),
    }
    plans = plans_of(columns, KINDS)
    assert sensitivity(plans) ** 2 == pytest.approx(1.25 + 1 + 1)
    without = {name: own.take(slice(1, 2)) for name, own in columns.items()}
    found = distance(exact_vector(plans, columns), exact_vector(plans, without))
    assert found == pytest.approx(sensitivity(plans))


def test_what_needs_no_statistic_has_no_sums() -> None:
    columns = {"x": numeric(1, 2), "s": categorical("a", "b"), "v": vectors((1, 2))}
    plans = plans_of(columns, x="bins(4) missing=zero", s="hash(4)")
    assert [plan.sums for plan in plans] == [(), (), ()]
    assert sensitivity(plans) == 0
    found = released(plans, columns, noise_of(5.0))
    assert not any(own.sums.size or own.hashes.size for own in found.values())


# --- noise ------------------------------------------------------------------------


def test_sums_and_counts_have_the_noise_that_was_planned() -> None:
    columns = {"x": numeric(*range(5)), "s": categorical(*"aaabb")}
    plans = plans_of(columns)
    multiplier, draws = 2.0, 800
    exact = released(plans, columns, noise_of(0.0))
    source = Noise(multiplier, 0.49, NoiseSource(KEY))
    sums, counts = [], []
    for _ in range(draws):
        found = released(plans, columns, source)
        sums.append(found["x"].sums - exact["x"].sums)
        counts.append(len(found["s"].counts))
    expected = multiplier * sensitivity(plans)
    spread = np.std(sums, axis=0)
    # the deviation of a measured deviation is 1 / sqrt(2 draws) of it
    np.testing.assert_allclose(spread, expected, rtol=4 / math.sqrt(2 * draws))
    np.testing.assert_allclose(np.mean(sums, axis=0), 0, atol=4 * expected / 28)
    # a count c is listed with probability P(c + noise >= threshold)
    least = rare_threshold(expected, 0.49, listed=1)
    rate = [1 - _normal((least - count) / expected) for count in (3, 2)]
    assert np.mean(counts) == pytest.approx(sum(rate), abs=4 * 0.71 / math.sqrt(draws))


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


@pytest.mark.parametrize("listed", [1, 3])
@pytest.mark.parametrize("deviation", [0.3, 20.0])
def test_a_category_of_one_row_shows_with_its_chance(
    deviation: float, listed: int
) -> None:
    chance, draws = 0.01, 10**6
    noisy = NoiseSource(KEY).with_gaussian(np.ones(draws), deviation)
    rate = np.mean(noisy >= rare_threshold(deviation, chance, listed))
    expected = chance / listed
    assert rate == pytest.approx(expected, abs=4 * math.sqrt(expected / draws))


def test_listed_counts_are_noisy_and_above_the_threshold_and_min_count() -> None:
    texts = [f"c{k}" for k in range(200) for _ in range(k)]
    columns = {"s": categorical(*texts)}
    plans = plans_of(columns)
    deviation = 10.0 * sensitivity(plans)
    found = released(plans, columns, noise_of(10.0))["s"]
    least = rare_threshold(deviation, 1e-6, listed=1)
    assert (found.counts >= least).all()
    assert 200 - least == pytest.approx(len(found.counts), abs=15)
    assert not (found.counts == np.rint(found.counts)).any()
    few = released(plans, columns, noise_of(10.0), min_count=150)["s"]
    assert (few.counts >= 150).all()
    assert len(few.counts) < len(found.counts)


def test_another_draw_has_other_noise() -> None:
    columns = {"x": numeric(1, 2, 3)}
    plans = plans_of(columns)
    noise = Noise(1.0, 1e-6, NoiseSource())
    one, other = (released(plans, columns, noise)["x"].sums for _ in range(2))
    assert (one != other).all()


# --- what an adversary learns ------------------------------------------------------


def test_an_outlier_shows_in_clear_statistics_and_not_in_noisy_ones() -> None:
    """Who knows all other rows guesses whether one more is there, and its value."""
    others = {"x": numeric(*np.linspace(-2, 0, 40))}
    whole = {"x": numeric(*np.linspace(-2, 0, 40), 5.0)}
    choice = choice_of(others)
    clear = [statistics_of(choice, own)["x"].moments for own in (others, whole)]
    assert clear[0] != clear[1]
    plans = plans_of(others)
    multiplier = noise_multiplier(EPSILON, DELTA)
    noise = Noise(multiplier, 1e-6, NoiseSource(KEY))
    exact = [released(plans, own, noise_of(0.0))["x"].sums for own in (others, whole)]
    direction = exact[1] - exact[0]
    draws = 3000
    told = np.array(
        [
            [released(plans, own, noise)["x"].sums @ direction for _ in range(draws)]
            for own in (others, whole)
        ]
    )
    # the best guess of all: on which side of the middle
    middle = direction @ (exact[0] + exact[1]) / 2
    right = 0.5 * np.mean(told[0] < middle) + 0.5 * np.mean(told[1] >= middle)
    most = 1 - (1 - DELTA) / (1 + math.exp(EPSILON))
    assert right <= most
    closed = _normal(np.linalg.norm(direction) / (2 * multiplier * sensitivity(plans)))
    assert right == pytest.approx(closed, abs=4 * 0.5 / math.sqrt(2 * draws))


def test_a_category_that_only_one_row_has_shows_in_clear_statistics_alone() -> None:
    others, whole = ["a"] * 90, ["a"] * 90 + ["rare"]
    choice = choice_of({"s": categorical(*whole)})
    clear = [
        statistics_of(choice, {"s": categorical(*own)})["s"].categories
        for own in (others, whole)
    ]
    assert [len(own.hashes) for own in clear] == [1, 2]
    columns = {"s": categorical(*whole)}
    plans = plans_of(columns)
    noise = Noise(noise_multiplier(EPSILON, DELTA), 1e-6, NoiseSource(KEY))
    listed = [released(plans, columns, noise)["s"].hashes for _ in range(500)]
    common = clear[0].hashes
    assert all(len(own) <= 1 and np.isin(own, common).all() for own in listed)
    # what 90 rows have is listed still
    assert np.mean([len(own) for own in listed]) > 0.99


# --- without noise ----------------------------------------------------------------

WHOLE = {
    "x": numeric(1, None, -2.5, 4, 4, 0.25, None, -3),
    "t": numeric(*np.linspace(DAYS.low, DAYS.high, 8)),
    "b": numeric(1, 0, 0, None, 1, 0, 0, 0),
    "s": categorical("a", "bb", None, "a", "c", "bb", "bb", "dddd"),
    "v": vectors((1, 2), None, (0, 1), None, None, (4, 4), (5, 5), (6, 6)),
}
CUTS = {"one": [8], "two": [3, 5], "with an empty one": [4, 0, 4]}


def cut(columns: Columns, sizes: Sequence[int]) -> list[dict[str, FeatureColumn]]:
    ends = np.cumsum([0, *sizes])
    spans = [slice(a, b) for a, b in pairwise(ends)]
    return [{n: own.take(span) for n, own in columns.items()} for span in spans]


def close(found: object, expected: object) -> bool:
    """Compare JSON, numbers up to rounding."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            close(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, list):
        pairs = zip(found, expected, strict=True)
        return len(found) == len(expected) and all(close(*pair) for pair in pairs)
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    return found == expected


@pytest.mark.parametrize("cuts", CUTS.values(), ids=list(CUTS))
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        (name, spec)
        for name, specs in SPECS.items()
        for spec in specs
        # a declared range takes the place of the one that rows have
        if not spec.startswith(("min-max", "bins"))
    ],
)
def test_without_noise_encoders_are_those_of_clear_statistics(
    name: str, spec: str, cuts: Sequence[int]
) -> None:
    shards = cut({name: WHOLE[name]}, cuts)
    found = noisy_encoder(*shards, kinds=KINDS, **{name: spec})
    expected = encoder_of(*shards, kinds=KINDS, **{name: spec})
    assert close(found.encoder.to_json(), expected.encoder.to_json())


@pytest.mark.parametrize("spec", ["min-max", "bins(4)", "min-max missing=zero"])
def test_a_declared_range_is_that_of_rows_at_its_ends(spec: str) -> None:
    columns = {"x": numeric(-3, 5, None, 1, 0)}
    found = noisy_encoder(columns, x=spec).encoder.to_json()
    assert close(found, encoder_of(columns, x=spec).encoder.to_json())


def test_constant_and_empty_features_are_dropped_without_noise() -> None:
    columns = {"x": numeric(3.3, 3.3, None), "b": numeric(1, 1, 1)}
    assert noisy_encoder(columns, kinds=KINDS).encoder.dropped == ("x", "b")
    no_vectors = VectorColumn(np.zeros((2, 0), np.float32))
    nothing = {"x": numeric(None, None), "v": no_vectors}
    assert noisy_encoder(nothing).encoder.dropped == ("x", "v")


# --- with noise -------------------------------------------------------------------


def test_estimates_are_right_up_to_their_noise() -> None:
    rng = np.random.default_rng(0)
    count, missing = 20_000, 4_000
    x = rng.normal(1.0, 0.8, count)
    x[:missing] = np.nan
    b = (rng.random(count) < 0.3).astype(float)
    s = rng.choice(["a", "b", "c"], count, p=[0.6, 0.3, 0.1])
    columns = {"x": numeric(*x), "b": numeric(*b), "s": categorical(*s)}
    multiplier = noise_multiplier(EPSILON, DELTA)
    shard = arrived(columns, noise_of(multiplier), KINDS, x="standard indicator")
    found = estimate_table([shard])
    # noise of 4 deviations, in units of half the range
    error = 4 * shard.deviation / (count - missing)
    clear = statistics_of(choice_of(columns), columns, b="boolean")
    assert found["x"].count == pytest.approx(count - missing, abs=4 * shard.deviation)
    for name, half in (("x", 4.0), ("b", 0.5)):
        own, exact = found[name].moments, clear[name].moments
        assert own.mean == pytest.approx(exact.mean, abs=3 * half * error)
        assert own.scale**2 == pytest.approx(exact.scale**2, abs=6 * half**2 * error)
    counts, exact = found["s"].categories.counts, clear["s"].categories.counts
    np.testing.assert_allclose(counts, exact, atol=5 * shard.deviation)
    # no row has another category, which noise must not make up
    assert counts.sum() == found["s"].count == count


def test_spread_that_noise_hides_is_the_noise() -> None:
    """Of a range far too wide, no scale is near 0 by chance."""
    columns = {"x": numeric(*[1.0] * 100)}
    for key in range(20):
        noise = noise_of(3.0, key=bytes([key] * 32))
        shard = arrived(columns, noise)
        scale = estimate_table([shard])["x"].moments.scale
        assert scale >= 4.0 * math.sqrt(shard.deviation / 100) * 0.99


@given(
    specs_of,
    st.lists(rows_of, min_size=1, max_size=5),
    st.sampled_from([0.5, 5.0, 500.0]),
    st.binary(min_size=32, max_size=32),
)
def test_whatever_the_noise_rows_can_be_encoded(
    specs: dict[str, str], rows: list[tuple], multiplier: float, key: bytes
) -> None:
    columns = columns_of(rows)
    columns["x"] = numeric(*np.clip(columns["x"].values, -1e6, 1e6))
    shards = [
        arrived(own, noise_of(multiplier, 0.4, key), KINDS, **specs)
        for own in (columns, columns)
    ]
    merged = estimate_table(shards)
    for own in merged.values():
        _check_possible(own)
    encoder = fit("t", merged).at_site(HASHER)
    assert np.isfinite(encoder.transform(columns)).all()


def _check_possible(own: ColumnStatistics) -> None:
    assert 0 <= own.count <= own.rows
    if own.moments is not None:
        assert own.moments.m2 >= 0
        assert math.isfinite(own.moments.mean)
    if own.categories is not None:
        assert (own.categories.counts >= 1).all()


def test_of_noise_alone_the_declared_range_is_left() -> None:
    columns = {"x": numeric(4.9, 5), "b": numeric(1, 1)}
    for key in range(20):
        shard = arrived(columns, noise_of(1e4, key=bytes([key] * 32)), KINDS)
        found = estimate_table([shard])
        assert found["x"].moments.mean == pytest.approx(1.0, abs=0.05)
        assert found["b"].moments.mean == pytest.approx(0.5, abs=0.01)
        assert found["x"].moments.scale == pytest.approx(4 / math.sqrt(3), rel=0.01)


def test_few_rows_that_may_all_be_missing_are_not_taken_for_missing() -> None:
    columns = {"x": numeric(1, 2, 3)}
    for key in range(20):
        shard = arrived(columns, noise_of(5.0, key=bytes([key] * 32)))
        assert estimate_table([shard])["x"].count == 3


# --- ranges and refusals ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "match"),
    [
        ("y", "standard", r"t\.y: it needs a range in privacy.ranges, as in"),
        ("y", "bins(4) missing=zero", r"t\.y: it needs a range"),
        ("x", "robust", "encoder robust missing=median takes quantiles"),
        ("x", "quantile-bins(4)", "takes quantiles, which do not leave with noise"),
        ("x", "standard missing=median", "use standard, min-max or bins, and missing="),
        ("z", "length", "the length of its texts needs a range"),
        ("u", "standard", r"t\.u: it is a time: its range must be of dates such as"),
        ("w", "standard", r"t\.w: it is a number: its range must be of numbers"),
    ],
)
def test_features_without_private_statistics_are_refused(
    name: str, spec: str, match: str
) -> None:
    kinds = {"y": "number", "x": "number", "z": "text", "u": "time", "w": "number"}
    choice = choice_of({name: numeric(1)}, **{name: spec})
    ranges = {**RANGES, "u": Limits(0.0, 1.0), "w": DAYS}
    with pytest.raises(SettingsError, match=match):
        plan_features(choice, {name: kinds[name]}, ranges)


def test_all_features_without_a_range_are_listed() -> None:
    names = ("y", "x", "z")
    choice = choice_of({name: numeric(1) for name in names})
    with pytest.raises(SettingsError, match=r"(?s)t\.y: it needs.*t\.z: it needs"):
        plan_features(choice, dict.fromkeys(names, "number"), RANGES)


def test_ranges_are_of_the_querys_features() -> None:
    features = {"f": ["Month", "x"], "p": ["x"]}
    found = choose_ranges([("F", "month", "1..12")], features)
    assert found == {"f": {"Month": Limits(1.0, 12.0)}, "p": {}}
    with pytest.raises(SettingsError, match=r"names table 'q'; the query has f, p"):
        choose_ranges([("q", "x", "1..2")], features)
    with pytest.raises(SettingsError, match=r"privacy\.ranges names column 'y' of tab"):
        choose_ranges([("p", "y", "1..2")], features)


FOUND = arrived(
    {"x": numeric(1, 2, None), "s": categorical("a", "b", "b")}, noise_of(0.0)
)
CHOICE = choice_of({"x": numeric(1), "s": categorical("a")})


def test_shards_of_different_kinds_are_refused() -> None:
    other = arrived(
        {"x": categorical("a"), "s": categorical("a")}, noise_of(0.0), x="one-hot"
    )
    with pytest.raises(SchemaError, match="'x' is a number in one shard and a text"):
        estimate_table([FOUND, other])
    short, long = (
        arrived({"v": vectors((1,) * n, width=n)}, noise_of(0.0)) for n in (2, 3)
    )
    with pytest.raises(SchemaError, match="vectors of different lengths"):
        estimate_table([short, long])
    with pytest.raises(ValueError, match="no statistics to merge"):
        estimate_table([])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda facts, _: facts.pop(), "statistics of 1 features, not of 2"),
        (lambda facts, _: facts[0].update(kind="blob"), "'x': kind must be one of num"),
        (lambda _, arrays: arrays.pop("feature-0-sums"), "'x': no usable array sums"),
        (
            lambda _, arrays: arrays.update({"feature-0-sums": np.zeros(2)}),
            "'x': sums that are not 3 finite numbers",
        ),
        (
            lambda _, arrays: arrays["feature-0-sums"].put(0, np.nan),
            "'x': sums that are not 3 finite numbers",
        ),
        (
            lambda _, arrays: arrays["feature-1-category-counts"].put(0, -1.0),
            "'s': counts of categories that are not above 0",
        ),
        (
            lambda _, arrays: arrays["feature-1-category-counts"].put(0, np.inf),
            "'s': counts of categories that are not above 0",
        ),
        (
            lambda _, arrays: arrays["feature-1-category-hashes"].fill(7),
            "'s': categories that are not distinct and in order",
        ),
        (
            lambda _, arrays: arrays.update({"feature-1-category-counts": np.ones(1)}),
            "'s': 2 categories with 1 counts",
        ),
    ],
)
def test_what_no_site_sends_is_refused(change, match: str) -> None:
    facts, arrays = noisy_to_wire(FOUND.features)
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(facts, arrays)
    with pytest.raises(SchemaError, match=match):
        noisy_from_wire(facts, arrays, CHOICE, RANGES)
