"""Attacks on single rows by a server that has every message of a real run.

The game: somebody tells the server all rows of a shard but one, and two records, of
which the shard holds one. The server takes what the other rows explain out of what the
shard has sent, and says which record is nearer to the rest: the best guess there is
against Gaussian noise. Without a mechanism it is right nearly always. With one it is
right as often as Gaussian noise of the plan's deviation lets it be:

    Phi(||a - b|| / (2 deviation)),    a, b  what the two records add to all releases

which is at most Phi(sqrt(uses) / multiplier), as a and b are within the clip.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

import numpy as np
import pytest
from scipy.special import ndtr

from tests.support.examples.fits import with_ones
from tests.support.federated import Run, one_per_site, pieces, run, store, whole
from tp_flower.privacy.mechanisms import ClippedNoise
from tp_flower.privacy.plan import GRADIENTS, GRAM, MOMENTS, SCORES
from tp_flower.privacy.sealed_sums import joined_gram
from tp_flower.privacy.statistics_update import StatisticsPlan
from tp_flower.randomness import NoiseSource
from tp_flower.settings import PrivacySettings

SHARDS = 6
SHARD_ROWS = 120
EPOCHS = 2
RUNS = 3
SEED = 20
BATCH_ROWS = 100
TABLE = "o"
STRATEGY = {GRADIENTS: "sgd", GRAM: "admm", MOMENTS: "admm", SCORES: "admm"}
# what leaves a shard as its table's other shards may come to know it
CLEAR = PrivacySettings(scores="clear", unions="clear")
# noise that leaves something to be guessed, and noise that leaves nothing
STATISTICS = replace(CLEAR, features="statistics", noise_multiplier=1.0)
SOME = {
    GRADIENTS: replace(CLEAR, features="dp-sgd", noise_multiplier=1.5),
    GRAM: STATISTICS,
    MOMENTS: STATISTICS,
    SCORES: replace(CLEAR, predictions=8.0),
}
NO_STATISTICS = replace(CLEAR, features="statistics", epsilon=0.02)
MUCH = {
    GRADIENTS: replace(CLEAR, features="dp-sgd", epsilon=0.02),
    GRAM: NO_STATISTICS,
    MOMENTS: NO_STATISTICS,
    SCORES: replace(CLEAR, predictions=0.02),
}
each_release = pytest.mark.parametrize("what", STRATEGY)


@dataclass(frozen=True)
class Part:
    """What the server knows of a shard, and is told of its rows."""

    number: int
    records: np.ndarray  # encoded rows, (n, d), trained ones first
    decoys: np.ndarray  # for each row another record, (n, d)
    multiplicity: np.ndarray  # G of the trained rows


@dataclass(frozen=True)
class Release:
    """One message of a shard, of k rows."""

    rows: np.ndarray  # (k,), those that it was made from
    left: np.ndarray  # of it without what all those rows explain, (k, m)
    records: np.ndarray  # what each row explains if the record is right, (k, m)
    decoys: np.ndarray  # and if the decoy is, (k, m)
    deviation: float = 0.0  # of the noise
    multiplier: float = 0.0  # that over the clip


@dataclass(frozen=True)
class Guesses:
    """How the game went: the share of the rows whose record was told from the decoy."""

    right: float
    expected: float  # what the noise of the plan makes of it
    bound: float  # what the plan's multiplier allows at most
    error: float  # standard error over shards: all rows of one share its noise


@cache
def trained(strategy: str, privacy: PrivacySettings, number: int) -> Run:
    """One of several runs, with noise of its own that is the same in every test."""
    keys = count((SEED + number) << 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "client_apps.rounds.site.NoiseSource",
            lambda _: NoiseSource(next(keys).to_bytes(32, "big")),
        )
        frames = store(SHARDS * SHARD_ROWS, 40)
        cuts = [SHARD_ROWS * shard for shard in range(1, SHARDS)]
        shards = {**whole(frames), "orders": pieces(frames["orders"], *cuts)}
        return run(
            "squared",
            one_per_site(shards),
            strategy,
            num_epochs=EPOCHS,
            batch_size=BATCH_ROWS,
            privacy=privacy,
        )


def parts(finished: Run) -> Iterator[Part]:
    """Yield the shards of the attacked table."""
    rng = np.random.default_rng(0)
    table = finished.problem.tables[TABLE]
    multiplicity = finished.problem.train.tables[TABLE].multiplicity
    everyone = finished.features[TABLE]
    for part, own in zip(table.parts, table.rows, strict=True):
        yield Part(
            number=part.number,
            records=everyone[own.slice],
            decoys=everyone[rng.integers(0, len(everyone), own.total)],
            multiplicity=multiplicity[own.trained_slice],
        )


def arrays_of(
    finished: Run, part: Part, name: str, *, is_reply: bool
) -> Iterator[np.ndarray]:
    for seen in finished.seen:
        if seen.is_reply == is_reply and (part.number, name) in seen.arrays:
            yield seen.arrays[part.number, name]


def exchanges(finished: Run, part: Part, asked: str, sent: str) -> Iterator[tuple]:
    """Yield (header, array asked with, array sent in reply) of a part, in order."""
    pending: tuple = ()
    for seen in finished.seen:
        if not seen.is_reply and (part.number, asked) in seen.arrays:
            pending = (seen.header, seen.arrays[part.number, asked])
        elif seen.is_reply and (part.number, sent) in seen.arrays and pending:
            yield (*pending, seen.arrays[part.number, sent])
            pending = ()


def clipped(rows: np.ndarray, clip: float) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1.0, clip / np.maximum(norms, 1e-300))


def clipping(plan: ClippedNoise | None) -> tuple[float, dict[str, float]]:
    if plan is None:
        return np.inf, {}
    return plan.clip, noise_of(plan.noise_multiplier, plan.noise_multiplier * plan.clip)


def noise_of(multiplier: float, deviation: float) -> dict[str, float]:
    return {"multiplier": multiplier, "deviation": deviation}


def weights_of(
    part: Part, records: np.ndarray, plan: StatisticsPlan | None
) -> np.ndarray:
    """G, or as much of it as leaves G ||[x, 1]||^2 within the plan's radius, (k,)."""
    if plan is None:
        return part.multiplicity
    squares = (with_ones(records) ** 2).sum(axis=1)
    return np.minimum(part.multiplicity, plan.radius**2 / squares)


def of_sum(
    part: Part,
    rows: np.ndarray,
    sent: np.ndarray,
    added: Callable[[np.ndarray], np.ndarray],
    **noise: float,
) -> Release:
    """A release that is a sum over rows of what each of them adds, (k, m)."""
    records = added(part.records[rows])
    decoys = added(part.decoys[rows])
    left = sent.ravel() - records.sum(axis=0)
    return Release(rows, np.tile(left, (len(rows), 1)), records, decoys, **noise)


def gradients(finished: Run, part: Part) -> Iterator[Release]:
    """Of the batches of SGD: sums of Y_k [x_k, 1]; the server has made Y."""
    clip, noise = clipping(finished.plans[part.number].gradients)
    start, rows = (
        next(arrays_of(finished, part, name, is_reply=False))
        for name in ("batch-start", "batch-rows")
    )
    for header, messages, sent in exchanges(finished, part, "messages", "share"):
        batch = rows[start[header["batch"]] : start[header["batch"] + 1]]

        def added(records: np.ndarray, messages: np.ndarray = messages) -> np.ndarray:
            return clipped(with_ones(records) * messages.astype(float), clip)

        yield of_sum(part, batch, header["batch-rows"] * sent[:-1], added, **noise)


def grams(finished: Run, part: Part) -> Iterator[Release]:
    """Of set-up: [X, 1]^T G [X, 1], as a vector with the matrix's norm."""
    plan = finished.plans[part.number].statistics
    noise = noise_of(plan.gram_multiplier, plan.gram_deviation) if plan else {}
    joined_rows = finished.problem.train.joined_rows
    share = next(arrays_of(finished, part, "share", is_reply=True))
    sent = joined_rows * joined_gram(share[:-1], part.records.shape[1] + 1)
    upper = np.triu_indices(len(sent))
    scale = np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))

    def added(records: np.ndarray) -> np.ndarray:
        wide = with_ones(records)
        matrices = wide[:, :, None] * wide[:, None, :]
        matrices *= weights_of(part, records, plan)[:, None, None]
        return matrices[:, upper[0], upper[1]] * scale

    yield of_sum(
        part, np.arange(len(part.multiplicity)), sent[upper] * scale, added, **noise
    )


def moments(finished: Run, part: Part) -> Iterator[Release]:
    """Of each epoch of ADMM: sums of G_k step_k [x_k, 1]; the server's steps."""
    plan = finished.plans[part.number].statistics
    noise = noise_of(plan.moments_multiplier, plan.moments_deviation) if plan else {}
    rows = np.arange(len(part.multiplicity))
    for header, step, sent in exchanges(finished, part, "step", "share"):
        # clip and noise are of kappa times the step
        scale = 1.0 if plan is None else header["fit"]["kappa"]
        goal = scale * step.astype(float)
        sums = scale * sent[:-1]

        def added(records: np.ndarray, goal: np.ndarray = goal) -> np.ndarray:
            weights = weights_of(part, records, plan)[:, None]
            if plan is not None:
                size = np.sqrt(weights) * np.abs(goal)
                weights = weights * np.minimum(1.0, plan.target_bound / size)
            return with_ones(records) * weights * goal

        yield of_sum(part, rows, sums, added, **noise)


def scores(finished: Run, part: Part) -> Iterator[Release]:
    """Of each epoch of ADMM: f(theta; x_k) of every row; theta follows from sums."""
    clip, noise = clipping(finished.plans[part.number].scores)
    rows = np.arange(len(part.records))
    left = arrays_of(finished, part, "scores", is_reply=True)
    for theta, sent in zip(finished.parameters[1:], left, strict=True):
        records, decoys = (
            clipped(with_ones(own) @ theta[TABLE][:, None], clip)
            for own in (part.records, part.decoys)
        )
        yield Release(rows, sent - records, records, decoys, **noise)


ATTACKS = {GRADIENTS: gradients, GRAM: grams, MOMENTS: moments, SCORES: scores}


def play(what: str, privacy: PrivacySettings) -> Guesses:
    """Guess all rows of the attacked table, in all runs."""
    # runs without noise are one another
    runs = [
        trained(STRATEGY[what], privacy, number)
        for number in range(1 if privacy == CLEAR else RUNS)
    ]
    games = [
        game(list(ATTACKS[what](finished, part)), len(part.records))
        for finished in runs
        for part in parts(finished)
    ]
    right, expected, bound = np.array(games).T
    return Guesses(
        right=right.mean(),
        expected=expected.mean(),
        bound=bound.max(),
        error=right.std(ddof=1) / np.sqrt(len(right)),
    )


def game(releases: list[Release], rows: int) -> tuple[float, float, float]:
    """Guess the rows of a shard; return the share of right ones, its mean and bound."""
    evidence = np.zeros(rows)
    distance = np.zeros(rows)
    uses = np.zeros(rows)
    for release in releases:
        apart = release.records - release.decoys
        nearer = ((release.left + apart) ** 2).sum(1) - (release.left**2).sum(1)
        np.add.at(evidence, release.rows, nearer)
        np.add.at(distance, release.rows, (apart**2).sum(1))
        np.add.at(uses, release.rows, 1)
    # decoys that add the same are no decoys
    told = distance > 1e-6 * distance.max()
    right = float((evidence[told] > 0).mean())
    if not releases[0].deviation:
        return right, 1.0, 1.0
    half = np.sqrt(distance[told]) / (2 * releases[0].deviation)
    bound = np.sqrt(uses.max()) / releases[0].multiplier
    return right, float(ndtr(half).mean()), float(ndtr(bound))


@each_release
def test_without_a_mechanism_the_server_tells_records_apart(what):
    assert play(what, CLEAR).right > 0.99


@pytest.mark.cases("gram", "scores")
@each_release
def test_with_noise_it_is_right_as_often_as_the_noise_lets_it(what):
    found = play(what, SOME[what])
    # enough noise and rows for the test to see something
    assert found.error < 0.04
    assert found.expected - 0.5 > 3 * found.error
    assert found.right == pytest.approx(found.expected, abs=4 * found.error)
    assert found.expected <= found.bound


@pytest.mark.cases("gram", "scores")
@each_release
def test_with_a_small_epsilon_it_guesses(what):
    found = play(what, MUCH[what])
    assert found.bound < 0.51
    assert found.error < 0.03
    assert found.right == pytest.approx(0.5, abs=4 * found.error)
