"""The noise on second moments covers what a row, or a unit, adds to them."""

import numpy as np
import pytest

from strategies.methods.moments.noise import NoiseEffect
from tp_flower.errors import SettingsError, SiteError
from tp_flower.methods.moments.noise import (
    LabelUnit,
    Norms,
    clip_columns,
    entry_deviations,
    noise_words,
)
from tp_flower.methods.moments.solve import Solution
from tp_flower.methods.moments.words import to_words
from tp_flower.randomness import GRID_BITS, NoiseSource
from tp_flower.reports.console import epoch_line
from tp_flower.reports.records import RoundReport
from tp_flower.splits import TEST, TRAIN

TABLES = ("label", "own", "other")
FEATURES = {"label": 2, "own": 3, "other": 1}
PASSES = 2


def norms() -> Norms:
    return Norms.of(FEATURES, "label", 1.5)


def drawn_rows(rng: np.random.Generator, rows: int, width: int, squared: float):
    """Rows of any direction, most of them as long as they may be."""
    values = rng.normal(size=(rows, width))
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return values * np.sqrt(squared) * rng.choice([1.0, 1.0, 0.4], size=(rows, 1))


def moved(columns, joined, table, rows) -> float:
    """How far the moments move if some rows of a table are zeros, in units of sigma."""
    total = 0.0
    for of_pass in joined:
        matrices = []
        for are_zeros in (False, True):
            values = {name: columns[name].copy() for name in TABLES}
            if are_zeros:
                width = columns[table].shape[1] - (table == "label")
                values[table][rows, :width] = 0.0
            blocks = [values[name][of_pass[name]] for name in TABLES]
            matrices.append(
                {
                    (first, second): left.T @ right
                    for first, left in zip(TABLES, blocks, strict=True)
                    for second, right in zip(TABLES, blocks, strict=True)
                    if table == first
                }
            )
        for pair, block in matrices[0].items():
            difference = block - matrices[1][pair]
            deviations = entry_deviations(
                pair, table, block.shape, has_intercept=table == "label"
            )
            # noise of the own block is drawn once for each pair of columns
            counted = np.triu(np.ones(block.shape)) if pair[0] == pair[1] else 1.0
            is_noisy = deviations > 0.0
            assert not difference[~is_noisy].any()
            scaled = np.divide(
                difference, deviations, out=np.zeros_like(block), where=is_noisy
            )
            total += float((counted * scaled**2).sum())
    return float(np.sqrt(total))


def draw(rng: np.random.Generator, rows: int = 6, joined_rows: int = 30):
    squared = norms().squared
    columns = {}
    for name in TABLES:
        width = FEATURES[name] + (name == "label")
        columns[name] = drawn_rows(rng, rows, width, squared[name])
    columns["label"] = np.hstack([columns["label"], np.ones((rows, 1))])
    joined = [
        {name: rng.integers(rows, size=joined_rows) for name in TABLES}
        for _ in range(PASSES)
    ]
    counts = {
        name: np.stack([np.bincount(of[name], minlength=rows) for of in joined])
        for name in TABLES
    }
    return columns, joined, counts


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("rows_per_unit", [1, 3])
def test_no_unit_moves_the_moments_beyond_the_sensitivity(table, rows_per_unit):
    rng = np.random.default_rng(0)
    closest = 0.0
    for _ in range(200):
        columns, joined, counts = draw(rng)
        bound = norms().sensitivity(table, counts[table], rows_per_unit)
        rows = rng.choice(6, size=rows_per_unit, replace=False)
        distance = moved(columns, joined, table, rows)
        assert distance <= bound * (1 + 1e-9)
        closest = max(closest, distance / bound)
    assert closest > 0.3


@pytest.mark.parametrize("table", TABLES)
def test_a_row_can_move_them_as_far(table):
    """All joined rows have this row, and all others' rows point one way."""
    columns, _, _ = draw(np.random.default_rng(1))
    for name, values in columns.items():
        width = values.shape[1] - (name == "label")
        values[:, :width] = 0.0
        values[:, 0] = np.sqrt(norms().squared[name])
    joined = [{name: np.zeros(count, np.int64) for name in TABLES} for count in (4, 3)]
    counts = np.array([[4], [3]])
    bound = norms().sensitivity(table, counts)
    assert moved(columns, joined, table, [0]) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("pair", "table", "has_intercept"),
    [
        (("own", "own"), "own", False),
        (("label", "label"), "label", True),
        (("label", "own"), "label", True),
        (("label", "own"), "own", False),
    ],
)
def test_noise_has_the_deviations_that_it_says(pair, table, has_intercept):
    source = NoiseSource(bytes(32))
    deviations = 5.0 * entry_deviations(
        pair, table, (3, 3), has_intercept=has_intercept
    )
    bits, draws, is_own = 9, 4000, pair[0] == pair[1]
    words = np.stack(
        [
            noise_words(source, deviations, bits, is_symmetric=is_own)
            for _ in range(draws)
        ]
    )
    noise = words.view(np.int64) / 2.0**bits
    spread = noise.std(axis=0)
    # the deviation of a deviation is 1 / sqrt(2 n) of it
    np.testing.assert_allclose(spread, deviations, rtol=5 / np.sqrt(2 * draws))
    assert np.abs(noise.mean(axis=0)).max() < 5 * 5.0 / np.sqrt(draws)
    correlation = np.corrcoef(noise[:, 0, 1], noise[:, 1, 0])[0, 1]
    assert correlation == pytest.approx(float(is_own), abs=5 / np.sqrt(draws))


@pytest.mark.parametrize("bits", [3, 20, 44])
def test_noise_covers_the_last_bits_of_moments(bits):
    """Were noise on a grid, what moments are beside it would leave as it is."""
    source = NoiseSource(bytes(32))
    deviations = np.full((100, 100), 5.3)
    words = noise_words(source, deviations, bits, is_symmetric=False)
    grid = max(5.3 * 2.0 ** (bits - GRID_BITS), 1.0)
    nearest = np.rint(words.view(np.int64) / grid)
    beside = words.view(np.int64) / grid - nearest
    # uniform between grid points, whose rounding is that of whole words
    expected = np.sqrt(1.0 - 1.0 / grid**2) / np.sqrt(12.0)
    assert beside.std() == pytest.approx(expected, abs=0.01)
    for bit in range(int(np.log2(grid)) + 1):
        assert np.mean(words >> np.uint64(bit) & 1) == pytest.approx(0.5, abs=0.03)


def test_noise_beyond_words_is_refused():
    """Its words would all be the least number, which covers nothing."""
    with pytest.raises(SiteError, match="no room for the noise"):
        noise_words(NoiseSource(bytes(32)), np.ones((2, 2)), 63, is_symmetric=True)


def test_nothing_is_added_to_sums_of_others():
    assert not entry_deviations(
        ("label", "other"), "own", (3, 1), has_intercept=False
    ).any()


@pytest.mark.parametrize(
    ("bits", "norm"), [(2, 2.0), (6, 2.0), (20, 2.0), (-3, 2.0), (1, 1.0), (40, 1e-12)]
)
def test_words_are_no_longer_than_their_norm(bits, norm):
    """Whatever bits a server tells, and whatever clip it proposes."""
    rng = np.random.default_rng(abs(bits))
    rows = rng.normal(size=(500, 7)) * rng.gamma(1.0, 3.0, size=(500, 1))
    rows[0] = np.nan
    rows[1] = np.inf
    # of many columns, such as a category's
    one_column = np.zeros((2, 300))
    one_column[0, 3] = one_column[1, 4] = 20.0
    for columns in (rows, one_column):
        clipped = clip_columns(columns, norm**2, bits)
        width = columns.shape[1]
        words = to_words(clipped, np.full(width, bits)).view(np.int64) / 2.0**bits
        assert np.linalg.norm(words, axis=1).max() <= norm


def test_bits_leave_room_for_noise_and_shards():
    shards = {"label": 1, "own": 9, "other": 2}
    bits = norms().bits(10**6, shards)
    for name, count in shards.items():
        largest = 10**6 * norms().squared[name]
        assert largest * 4.0 ** bits[name] <= 2.0**62 / max(count, 4)
        assert largest * 4.0 ** (bits[name] + 1) > 2.0**62 / max(count, 4)


def test_a_label_needs_a_range():
    with pytest.raises(SettingsError, match=r"privacy\.label-range: moments"):
        LabelUnit.of(())


def test_metrics_are_hidden_where_noise_outweighs_them():
    """Both ends of the loss are 0 where the noisy squares are negative."""
    coefficients = Solution(np.ones((1, 1)), np.ones(1))
    spread = {TRAIN: {"loss": (1.0, 1.9)}, TEST: {"loss": (0.0, 0.0)}}
    metrics = {TRAIN: {"loss": 1.5}, TEST: {"loss": 0.0, "r2": 1.0}}
    known = NoiseEffect(coefficients, spread).known(metrics)
    assert known[TRAIN] == {"loss": 1.5}
    assert np.isnan(list(known[TEST].values())).all()
    line = epoch_line([RoundReport(1, 1, "moments", known[TRAIN], known[TEST])], 1, 0.0)
    assert "train loss 1.5000" in line
    assert "test loss not known r2 not known" in line
