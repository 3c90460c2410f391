"""Importance sampling of joined rows against Algorithm 1 on the materialised join."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from tests.support.examples.coresets import regression_scores
from tests.support.tables.mappings import table_rows
from tp_flower.learning.solvers import gram
from tp_flower.methods.coreset import importance
from tp_flower.methods.coreset.sampling import (
    draw_joined,
    draw_rows,
    draw_uniform,
    party_counts,
    uniform_sample,
    weigh_sample,
)
from tp_flower.privacy.key_agreement import (
    LARGEST_BITS,
    MOST_PARTS,
    fixed_point_masks,
    from_fixed,
    ring_masks,
    to_fixed,
)

DRAWS = 200_000
both = pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
HARD = {
    "duplicated": lambda x: np.column_stack([x, x[:, :2]]),
    "constant": lambda x: np.column_stack([x, np.full(len(x), 7.0)]),
    "empty": lambda x: np.column_stack([x, np.zeros((len(x), 2))]),
    "combination": lambda x: np.column_stack([x, x @ [1.0, -2.0, 0.5]]),
    "scaled": lambda x: x * [1e-8, 1.0, 1e8],
}
RNG = default_rng(0)
ALONE = table_rows([0, -1], 2)
DRAWS_OF_TWO = np.array([0, 1, 1])
DIAGONAL = "finite values and a diagonal >= 0"
TOTALS = "finite, >= 0, not all 0"
LARGE = "too large to be summed"


class _Join:
    """60 joined rows of three tables, many-to-many, the third one LEFT JOINed."""

    def __init__(self, *, weighted=False):
        rng = default_rng(5)
        count = self.rows = 60
        self.weights = rng.gamma(1.0, size=count) if weighted else None
        self.row_weights = np.ones(count) if self.weights is None else self.weights
        sizes = (40, 12, 6)
        widths = (3, 4, 2)
        self.tables = [
            table_rows(rng.integers(low, size, count), size)
            for size, low in zip(sizes, (0, 0, -1), strict=True)
        ]
        self.columns = [
            rng.standard_t(2, size=(size, width)).astype(np.float32)
            for size, width in zip(sizes, widths, strict=True)
        ]
        labels = rng.normal(size=(sizes[0], 1))
        self.columns[0] = importance.augment(self.columns[0], labels, intercept=True)
        self.masses = [
            table.segment_sum(self.row_weights[:, None])[:, 0] for table in self.tables
        ]

    def expanded(self, place):
        """X_i of the joined rows, zero where there is no row."""
        return self.tables[place].expand(self.columns[place])

    @property
    def local_scores(self):
        """What each table computes of its rows."""
        pairs = zip(self.columns, self.masses, strict=True)
        return [regression_scores(rows, mass) for rows, mass in pairs]

    def exact(self):
        """The density of Algorithm 1 on the materialised join, by QR."""
        scores = np.full(self.rows, len(self.tables) / self.row_weights.sum())
        root = np.sqrt(self.row_weights)[:, None]
        for place in range(len(self.tables)):
            basis, _ = np.linalg.qr(root * self.expanded(place))
            scores += (basis**2).sum(axis=1) / self.row_weights
        density = self.row_weights * scores
        return scores, density / density.sum()

    def draw(self, size, rng):
        """The whole protocol, with every party in this process."""
        masses = [a * b for a, b in zip(self.local_scores, self.masses, strict=True)]
        totals = [*(mass.sum() for mass in masses), len(masses)]
        counts = party_counts(totals, size, rng)
        draws = [
            draw_joined(table, draw_rows(mass, count, rng), self.weights, rng)
            for table, mass, count in zip(self.tables, masses, counts[:-1], strict=True)
        ]
        rows = draw_uniform(counts[-1], self.rows, self.weights, rng)
        return np.concatenate([*draws, rows]), float(sum(totals))


@both
def test_scores_over_a_join_are_the_leverages_of_the_materialised_join(weighted):
    join = _Join(weighted=weighted)
    scores, _ = join.exact()
    uniform = len(join.tables) / join.row_weights.sum()
    local = join.local_scores
    pairs = zip(join.tables, local, strict=True)
    actual = sum(table.expand(of_rows) for table, of_rows in pairs)
    assert_allclose(actual + uniform, scores, rtol=1e-9)
    # their sums are the ranks, which the server knows a bound of
    pairs = zip(local, join.masses, strict=True)
    sums = [of_rows @ mass for of_rows, mass in pairs]
    assert_allclose(sums, [5, 4, 2], rtol=1e-9)


@both
def test_draws_follow_the_importance_distribution_of_the_materialised_join(weighted):
    join = _Join(weighted=weighted)
    _, density = join.exact()
    draws, _ = join.draw(DRAWS, default_rng(11))
    actual = np.bincount(draws, minlength=join.rows)
    assert stats.chisquare(actual, DRAWS * density).pvalue > 0.001
    # the test has the power to see a law that is slightly different
    other = 0.9 * density + 0.1 / join.rows
    assert stats.chisquare(actual, DRAWS * other).pvalue < 1e-6


@both
def test_weighted_costs_are_unbiased_for_50_random_parameters(weighted):
    join = _Join(weighted=weighted)
    scores, _ = join.exact()
    design = np.column_stack([join.expanded(place) for place in range(3)])
    rng = default_rng(2)
    parameters = rng.normal(size=(50, design.shape[1]))
    costs = (design @ parameters.T) ** 2  # (60, 50); the label is one of the columns
    repeats = 400
    actual = np.empty((repeats, 50))
    for repeat in range(repeats):
        draws, total = join.draw(40, rng)
        sample = weigh_sample(draws, scores[np.unique(draws)], total)
        actual[repeat] = sample.weights @ costs[sample.joined]
    error = actual.std(axis=0, ddof=1) / np.sqrt(repeats)
    # 50 correlated statistics: the limit of 3 is passed by chance one time in ten
    z = (actual.mean(axis=0) - join.row_weights @ costs) / error
    assert np.abs(z).max() < 3
    # and for the sum of the weights themselves
    assert abs(z).mean() < 1.5


@both
def test_the_penalty_is_as_many_more_joined_rows(weighted):
    join = _Join(weighted=weighted)
    penalty = 0.3
    rows, mass = join.columns[0], join.masses[0]  # three features, 1, the label
    root = np.sqrt(join.row_weights)[:, None] * join.expanded(0)
    basis, _ = np.linalg.qr(np.vstack([root, np.sqrt(penalty) * np.eye(5)[:3]]))
    reference = (basis[: join.rows] ** 2).sum(axis=1) / join.row_weights
    actual = regression_scores(rows, mass, features=3, penalty=penalty)
    assert_allclose(join.tables[0].expand(actual), reference, rtol=1e-9)
    clear = gram(rows, mass)
    total = importance.leverage_total(
        clear, importance.whitening(importance.add_penalty(clear, 3, penalty))
    )
    assert actual @ mass == pytest.approx(total)
    assert 2 < total < 5  # what is not penalised counts in full


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_shards_sum_to_the_unsplit_table(seed):
    rng = default_rng(seed)
    rows = rng.normal(size=(30, 4))
    masses = rng.integers(0, 4, 30)
    cut = int(rng.integers(0, 31))
    grams = [gram(rows[part], masses[part]) for part in (slice(cut), slice(cut, None))]
    basis = importance.whitening(grams[0] + grams[1])
    together = importance.leverages(rows, basis)
    assert_allclose(together, regression_scores(rows, masses), rtol=1e-6)
    totals = [importance.leverage_total(shard, basis) for shard in grams]
    expected = [together[:cut] @ masses[:cut], together[cut:] @ masses[cut:]]
    assert_allclose(totals, expected, atol=1e-9)


@pytest.mark.parametrize("kind", list(HARD))
def test_scores_of_hard_columns_are_those_of_the_space_they_span(kind):
    rng = default_rng(4)
    plain = importance.augment(rng.normal(size=(50, 3)), None, intercept=True)
    hard = importance.augment(HARD[kind](plain[:, :3]), None, intercept=True)
    masses = rng.integers(0, 4, 50)
    actual = regression_scores(hard, masses)
    expected = regression_scores(plain, masses)
    assert_allclose(actual, expected, rtol=1e-8)
    assert importance.whitening(gram(hard, masses)).shape[1] == 4
    # a copy in float32 is a copy
    values = rng.normal(size=(1000, 1))
    rows = np.column_stack([values, values.astype(np.float32)])
    assert importance.whitening(gram(rows, np.ones(1000))).shape == (2, 1)


@pytest.mark.parametrize("shape", [(3, 0), (3, 2), (0, 2), (4, 9)])
def test_scores_at_the_limits(shape):
    """Nothing scores where nothing is; more columns than rows score one."""
    rows = default_rng(0).normal(size=shape) * (shape != (3, 2))
    scores = regression_scores(rows, np.ones(shape[0]))
    assert_allclose(scores, np.full(shape[0], 1.0 * (shape == (4, 9))))


def test_rows_without_mass_are_never_drawn():
    rng = default_rng(0)
    mass = np.array([0.0, 3.0, 0.0, 1.0, 0.0])
    actual = np.bincount(draw_rows(mass, 40_000, rng), minlength=5)
    assert actual[[0, 2, 4]].tolist() == [0, 0, 0]
    assert stats.chisquare(actual[[1, 3]], [30_000, 10_000]).pvalue > 0.001
    assert draw_rows(np.zeros(0), 0, rng).tolist() == []


@both
def test_uniform_samples_are_distinct_unbiased_rows(weighted):
    weights = np.arange(1.0, 11.0) if weighted else None
    masses = np.ones(10) if weights is None else weights
    rng = default_rng(3)
    taken = np.zeros(10)
    for _ in range(4000):
        sample = uniform_sample(10, 3, weights, rng)
        assert len(set(sample.joined.tolist())) == 3 == sample.size
        assert_allclose(sample.weights, masses[sample.joined] * 10 / 3)
        taken[sample.joined] += 1
    # without replacement the counts vary less than a multinomial's
    assert np.abs(taken - 1200).max() < 4 * np.sqrt(4000 * 0.3 * 0.7)
    everything = uniform_sample(10, 99, weights, rng)
    assert everything.joined.tolist() == list(range(10))
    assert_array_equal(everything.weights, masses)


def test_masks_cancel_in_the_sum_of_all_parts_alone():
    secret = b"s" * 32
    scores = default_rng(0).random((4, 1000)) / 500
    masked = [
        to_fixed(scores[part], 500) + fixed_point_masks(secret, part, 4, 1000, b"run 1")
        for part in range(4)
    ]
    total = np.sum(masked, axis=0, dtype=np.uint64)
    assert_allclose(from_fixed(total, 500), scores.sum(axis=0), atol=4 / 500 * 2**-25)
    # what lacks a part is uniform over 64 bits: its top byte is, too
    for seen in (*masked, np.sum(masked[:3], axis=0, dtype=np.uint64)):
        top = np.bincount((seen >> np.uint64(60)).astype(np.intp), minlength=16)
        assert stats.chisquare(top).pvalue > 1e-4


def test_masks_of_a_ring_cancel_in_the_sum_of_all_parts():
    parts = MOST_PARTS + 44
    masks = [ring_masks(b"s" * 32, part, parts, 5, b"run 1") for part in range(parts)]
    assert not np.sum(masks, axis=0, dtype=np.uint64).any()
    # as independent as can be: no sum of fewer neighbours cancels
    for count in (1, 2, parts - 1):
        assert np.sum(masks[:count], axis=0, dtype=np.uint64).all()


def test_masks_differ_by_secret_context_and_part():
    cases = [(b"a", 0, b"x"), (b"b", 0, b"x"), (b"a", 1, b"x"), (b"a", 0, b"y")]
    actual = {fixed_point_masks(s, part, 3, 2, c).tobytes() for s, part, c in cases}
    assert len(actual) == len(cases)
    assert fixed_point_masks(b"a", 0, 3, 2, b"x").tobytes() in actual
    assert fixed_point_masks(b"a", 0, 1, 2, b"x").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("message", "function", "arguments"),
    [
        (DIAGONAL, importance.whitening, [np.array([[np.nan]])]),
        (DIAGONAL, importance.whitening, [np.array([[-1.0]])]),
        (r"expected \(2,\)", weigh_sample, [DRAWS_OF_TWO, np.ones(1), 1.0]),
        ("must be above 0", weigh_sample, [DRAWS_OF_TWO, np.eye(2)[0], 1.0]),
        *((TOTALS, party_counts, [np.array([x, 0]), 3, RNG]) for x in (0, -1, np.nan)),
        ("none has a weight above 0", draw_rows, [np.zeros(2), 1, RNG]),
        ("1 drawn rows are in no", draw_joined, [ALONE, np.arange(2), None, RNG]),
        (LARGE, to_fixed, [np.array([0.1, -1e-3]), 10]),
        (LARGE, to_fixed, [np.array([0.1, np.nan]), 10]),
        (LARGE, to_fixed, [np.array([2.0**LARGEST_BITS]), 10]),
        ("part 3 of 3", fixed_point_masks, [b"s", 3, 3, 1, b""]),
        ("part -1 of 2", fixed_point_masks, [b"s", -1, 2, 1, b""]),
        (
            f"0 of {MOST_PARTS + 1}",
            fixed_point_masks,
            [b"s", 0, MOST_PARTS + 1, 1, b""],
        ),
    ],
)
def test_refusals(message, function, arguments):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
