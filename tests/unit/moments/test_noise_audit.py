"""An audit: how well a server that knows all other rows tells a row from zeros.

The exchange runs as sites run it, on two databases that differ in the victim's row.
Whatever event of the server's view is counted, its probabilities under both are a lower
bound on epsilon, by Clopper and Pearson's intervals.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from scipy.stats import beta

from tests.support.tables.random_joins import Joined
from tp_flower.methods.moments.exchange import Assembly, PassRows
from tp_flower.methods.moments.noise import (
    Norms,
    clip_columns,
    entry_deviations,
    noise_words,
)
from tp_flower.methods.moments.tree import Edge, JoinTree
from tp_flower.methods.moments.words import to_words
from tp_flower.privacy.accounting import noise_multiplier
from tp_flower.randomness import GRID_BITS, NoiseSource

EPSILON = 2.0
DELTA = 1e-5
DRAWS = 50_000
BITS = 20
PASSES = (0, 1)
NORMS = Norms.of({"victim": 2, "partner": 1}, "victim", 1.5)
PAIRS = (("victim", "victim"), ("victim", "partner"))
# joined rows of the victim's row, the first, in both passes
COUNTS = np.array([[3, 1, 0], [2, 1, 0]])


def joined_with(victim: list[float]) -> Joined:
    """Many rows of a key on both sides, the partner's pointing one way."""
    features = np.array([victim[:2], [0.3, -0.2], [1.0, 1.0]])
    squared = NORMS.squared["victim"] - 1.0
    labels = np.array([victim[2], 0.5, -1.0])
    columns = np.column_stack(
        [clip_columns(features, squared, BITS), labels, np.ones(3)]
    )
    partners = clip_columns(np.full((6, 1), 9.0), NORMS.squared["partner"], BITS)
    values = {"victim": columns, "partner": partners}
    return Joined(
        JoinTree(("victim", "partner"), [Edge("victim", "partner", 0, 0)]),
        {
            ("victim", 0): np.array([0, 1, 2]),
            ("partner", 0): np.array([0, 0, 0, 0, 0, 1]),
        },
        {
            name: to_words(block, np.full(block.shape[1], BITS))
            for name, block in values.items()
        },
        "partner",
        np.array([0, 0, 0, 1, 1, 0]),
    )


def deviations_of(pair: tuple[str, str], factor: float) -> np.ndarray:
    counts = COUNTS[:, :1]
    multiplier = noise_multiplier(EPSILON, DELTA)
    sigma = factor * multiplier * NORMS.sensitivity("victim", counts)
    shape = (4, 4 if pair[0] == pair[1] else 1)
    return sigma * entry_deviations(pair, "victim", shape, has_intercept=True)


def noise_of(pair, factor, source, draws: int) -> np.ndarray:
    deviations = deviations_of(pair, factor)
    tiled = np.broadcast_to(deviations, (draws, *deviations.shape))
    return noise_words(source, tiled, 2 * BITS, is_symmetric=pair[0] == pair[1])


def test_noise_at_the_site_is_noise_at_the_server():
    source = NoiseSource(bytes(32))
    joined = joined_with([9.0, 9.0, 1.0])
    for number in PASSES:
        rows = joined.count()
        sent = joined.sent(number, rows)
        noise = {pair: noise_of(pair, 1.0, source, 1)[0] for pair in PAIRS}
        victim = sent["victim"]
        products = {
            pair: block + noise.get(pair, np.uint64(0))
            for pair, block in victim.products.items()
        }
        sent["victim"] = replace(victim, products=products)
        of_pass = {name: PassRows.of(counted, number) for name, counted in rows.items()}
        noisy = Assembly(joined.tree, of_pass, sent).blocks()
        for pair, block in joined.exchanged(number).items():
            expected = noise.get(pair, np.zeros_like(block))
            sign = 1 if pair[0] == pair[1] else -1
            found = (noisy[pair] - block).view(np.int64)
            np.testing.assert_array_equal(found, sign * expected.view(np.int64))


def statistics(victim: list[float], factor: float, seed: int) -> Iterator[np.ndarray]:
    """Yield what a server may compute of its view, (draws,), each a way to attack."""
    source = NoiseSource(bytes([seed]) * 32)
    likelihood = np.zeros(DRAWS)
    off_grid = np.zeros(DRAWS)
    worlds = [joined_with(row) for row in ([0.0, 0.0, 0.0], [9.0, 9.0, 1.0], victim)]
    for number in PASSES:
        without, with_row, true = (world.exchanged(number) for world in worlds)
        for pair in PAIRS:
            deviations = deviations_of(pair, factor) * 4.0**BITS
            view = true[pair] + noise_of(pair, factor, source, DRAWS)
            beside = (view - without[pair]).view(np.int64)
            difference = (with_row[pair] - without[pair]).view(np.int64)
            is_read = deviations > 0.0
            if pair[0] == pair[1]:
                is_read &= np.triu(np.ones_like(deviations)) > 0.0
            assert not difference[deviations == 0.0].any()
            score = beside / np.where(is_read, deviations, np.inf) ** 2
            likelihood += (score * difference).sum(axis=(1, 2))
            grid = np.where(is_read, deviations, np.inf) * 2.0**-GRID_BITS
            places = beside / grid
            off_grid += np.abs(places - np.rint(places)).sum(axis=(1, 2))
    yield likelihood
    yield off_grid


def least_epsilon(factor: float) -> float:
    """The largest lower bound on epsilon that the draws prove."""
    tail = 1e-3 / 2
    bounds = [0.0]
    worlds = [
        statistics([0.0, 0.0, 0.0], factor, seed=1),
        statistics([9.0, 9.0, 1.0], factor, seed=2),
    ]
    for without, with_row in zip(*worlds, strict=True):
        both = np.concatenate([without, with_row])
        edges = np.quantile(both, np.linspace(0.002, 0.998, 200))
        for edge in edges:
            # in either order: the guarantee holds both ways
            for events in (
                (without > edge, with_row > edge),
                (with_row <= edge, without <= edge),
            ):
                rare, often = (int(np.count_nonzero(each)) for each in events)
                most = beta.ppf(1.0 - tail, rare + 1, max(DRAWS - rare, 1))
                least = beta.ppf(tail, often, DRAWS - often + 1) if often else 0.0
                if least > DELTA:
                    bounds.append(float(np.log((least - DELTA) / most)))
    return max(bounds)


def test_the_server_tells_a_row_from_zeros_no_better_than_epsilon_says():
    assert 0.5 * EPSILON < least_epsilon(1.0) < EPSILON


def test_the_audit_notices_noise_that_is_too_small():
    assert least_epsilon(0.5) > EPSILON


def test_the_audit_notices_noise_on_a_grid(monkeypatch):
    """What moments are beside the grid tells whose they are."""

    def on_grid(self, deviations):
        noise = deviations * self.with_gaussian(np.zeros(deviations.shape), 1.0)
        return np.rint(noise).astype(np.int64).view(np.uint64)

    monkeypatch.setattr(NoiseSource, "gaussian_words", on_grid)
    assert least_epsilon(1.0) > 3.0 * EPSILON
