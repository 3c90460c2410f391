"""Personal models: how short updates get, and how long a Z-step takes.

Ten sites on a ring train logistic models of 1,000 coefficients. Each round, every site
sends one update; the codes are compared by the bytes that they take until the test loss
is within half a percent of what float32 ends with. The coefficients of one problem are
steps, as of neighbouring positions of a signal; those of the other have no order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from scripts.bench.harness import Options, Outcome
from scripts.bench.suites.micro import best_seconds
from tp_flower.arrays import FloatArray
from tp_flower.objectives.logistic import sigmoid
from tp_flower.personalised import z_step
from tp_flower.personalised.graph import SimilarityGraph
from tp_flower.personalised.update_codec import decode_update, encode_update

SITES = 10
ROWS = 400
SIZE = 1000
STEPS = 20
ROUNDS = 60
L2 = 1e-2
PENALTY = 0.02
WITHIN = 1.005

GAMMA = 0.003
CODES = 16
MEANT = f"Eq. 7, {CODES} codes"

Z_SITES, Z_EDGES, Z_SIZE, Z_GROUPS = 2000, 10_000, 100, 20
Z_SECONDS = 2.0
Z_TOLERANCE = 1e-5
Z_PENALTY = 0.5
Z_REPEATS = 3
Z_STEP = f"Z-step, {Z_SITES:,} sites, {Z_EDGES:,} edges, d = {Z_SIZE}"

Send = Callable[[FloatArray, int], tuple[FloatArray, float]]
"""From an update and the rounds before to what arrives, and its bytes."""


def measure_personal(_: Options) -> Outcome:
    """Measure the codes on both problems, and the Z-step."""
    outcome = Outcome()
    for name, is_ordered in (("steps", True), ("no order", False)):
        _measure_codes(name, Problem.draw(is_ordered), outcome)
    _measure_z_step(outcome)
    return outcome


@dataclass(frozen=True)
class Problem:
    """Logistic regression at every site, tied along a ring.

    Attributes:
        features: (sites, rows, d); the second half of the rows is held out.
        labels: (sites, rows), 0 or 1.
        graph: of the sites.
    """

    features: FloatArray
    labels: FloatArray
    graph: SimilarityGraph

    @classmethod
    def draw(cls, is_ordered: bool) -> "Problem":
        """Draw two kinds of sites, half of each, that differ a little."""
        draw = np.random.default_rng(0)
        # as many different values, in one order or in none
        order = np.arange(SIZE) if is_ordered else draw.permutation(SIZE)
        base, apart = np.repeat(draw.normal(size=(2, STEPS)), SIZE // STEPS, axis=1)
        steps = base + 0.2 * np.outer(np.arange(SITES) % 2, apart)
        models = 3.0 * steps[:, order] / np.linalg.norm(base)
        features = draw.normal(size=(SITES, 2 * ROWS, SIZE))
        chance = sigmoid(_products(features, models))
        labels = (draw.random(chance.shape) < chance).astype(np.float64)
        places = np.arange(SITES)
        pairs = np.column_stack([places, np.roll(places, 1)])
        graph = SimilarityGraph.from_pairs([str(place) for place in places], pairs)
        return cls(features, labels, graph)

    def gradients(self, models: FloatArray) -> FloatArray:
        """Return every site's gradient of its training loss, (sites, d)."""
        features = self.features[:, :ROWS]
        chance = sigmoid(_products(features, models))
        residuals = (chance - self.labels[:, :ROWS]) / ROWS
        return _products(features.transpose(0, 2, 1), residuals) + L2 * models

    def loss(self, models: FloatArray, rows: slice) -> float:
        """Return the mean loss of the sites' rows."""
        scores = _products(self.features[:, rows], models)
        losses = np.logaddexp(0.0, scores) - self.labels[:, rows] * scores
        return float(losses.mean())

    def objective(self, models: FloatArray) -> float:
        """Return what is minimised."""
        ridge = 0.5 * L2 * float((models**2).sum()) / SITES
        edges = z_step.edge_norms(
            self.graph.incidence @ models, z_step.EdgeNorm.TWO
        ).sum()
        return self.loss(models, slice(ROWS)) + ridge + PENALTY * float(edges)

    def rate(self) -> float:
        """Return the step size: one over the curvature of the mean loss."""
        most = max(
            float(np.linalg.eigvalsh(rows @ rows.T)[-1])
            for rows in self.features[:, :ROWS]
        )
        return SITES / (0.25 * most / ROWS + L2)


def run(problem: Problem, send: Send) -> tuple[float, FloatArray, FloatArray]:
    """Take proximal gradient steps with what arrives of the gradients.

    Returns the last objective; by round the mean test loss, and the bytes until then.
    """
    rate = problem.rate()
    step = z_step.ZStep(problem.graph, z_step.EdgeNorm.TWO)
    models, pull = np.zeros((SITES, SIZE)), None
    test, sent = np.zeros(ROUNDS), np.zeros(ROUNDS)
    for at in range(ROUNDS):
        updates = [send(gradient, at) for gradient in problem.gradients(models)]
        arrived = np.array([update for update, _ in updates])
        solution = step.solve(models - rate / SITES * arrived, rate * PENALTY, pull)
        models, pull = solution.models, solution.pull
        test[at] = problem.loss(models, slice(ROWS, None))
        sent[at] = sum(size for _, size in updates)
    return problem.objective(models), test, np.cumsum(sent)


def bytes_to(goal: float, test: FloatArray, sent: FloatArray) -> float:
    """Return the bytes until the test loss is reached; infinite if it is not."""
    reached = np.flatnonzero(test <= goal)
    return float(sent[reached[0]]) if len(reached) else float("inf")


def _products(matrices: FloatArray, vectors: FloatArray) -> FloatArray:
    """Return every site's matrix times its vector."""
    products: FloatArray = (matrices @ vectors[:, :, None])[:, :, 0]
    return products


CODINGS: Mapping[str, tuple[float, int]] = {
    "Eq. 7": (GAMMA, 0),
    f"{CODES} codes": (0.0, CODES),
    MEANT: (GAMMA, CODES),
}
"""Gamma, and the number of codes, by name."""


def plain(update: FloatArray, _: int) -> tuple[FloatArray, float]:
    """Return the update in float32."""
    return update.astype(np.float32).astype(np.float64), 4.0 * SIZE


def encoded(
    gamma: float, entries: int, update: FloatArray, rounds_before: int
) -> tuple[FloatArray, float]:
    """Return the communication-efficient update, as the server decodes it."""
    penalty = z_step.penalty_of_round(gamma, rounds_before, ROUNDS)
    code = encode_update(z_step.piecewise_update(update, penalty), entries)
    return decode_update(code, len(update)), float(len(code))


def _measure_codes(name: str, problem: Problem, outcome: Outcome) -> None:
    runs = {"float32": run(problem, plain)}
    for code, coding in CODINGS.items():
        runs[code] = run(problem, partial(encoded, *coding))
    objective, test, sent = runs["float32"]
    goal = WITHIN * float(test[-1])
    needed = {code: bytes_to(goal, *curves) for code, (_, *curves) in runs.items()}
    for code, size in needed.items():
        title = f"{name}, {code}: bytes to the test loss over float32's"
        outcome.facts[title] = size / needed["float32"]
    reached, _, sizes = runs[MEANT]
    of = f"{name}, {MEANT}"
    outcome.check(f"{of}: bytes over float32's", sizes[-1] / sent[-1], 0.25)
    worse = reached / objective - 1.0
    outcome.check(f"{of}: final objective worse by", worse, 0.005, "%")


def _measure_z_step(outcome: Outcome) -> None:
    """Measure Z-steps of sites in groups, cold and after a small move.

    Threads of BLAS that wait for each other count as busy: one does not wait.
    """
    draw = np.random.default_rng(2)
    step = z_step.ZStep(_large_graph(draw), z_step.EdgeNorm.TWO, tolerance=Z_TOLERANCE)
    group = draw.integers(0, Z_GROUPS, Z_SITES)
    targets = draw.normal(size=(Z_GROUPS, Z_SIZE))[group]
    targets += 0.3 * draw.normal(size=targets.shape)
    moved = targets + 0.01 * draw.normal(size=targets.shape)
    first = step.solve(targets, Z_PENALTY)  # makes the factors
    for kind, points, pull in (("cold", targets, None), ("warm", moved, first.pull)):
        solve = partial(step.solve, points, Z_PENALTY, pull)
        with threadpool_limits(1):
            (seconds,) = best_seconds(solve, repeats=Z_REPEATS)
        title = f"{Z_STEP}, p = 2, {kind}: one core"
        outcome.check(title, seconds, Z_SECONDS, "s")


def _large_graph(draw: np.random.Generator) -> SimilarityGraph:
    names = [str(place) for place in range(Z_SITES)]
    pairs = draw.integers(0, Z_SITES, (2 * Z_EDGES, 2))
    graph = SimilarityGraph.from_pairs(names, pairs)
    chosen = np.sort(draw.choice(len(graph.edges), Z_EDGES, replace=False))
    return SimilarityGraph.from_pairs(names, graph.edges[chosen])
