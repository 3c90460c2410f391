"""Single kernels against the least that their arrays cost.

    python scripts/benchmark.py --suite micro

A kernel is measured beside its floor, in turns: what plain numpy takes to do the same,
or to copy what the kernel must read and write. Limits are twice what was measured, or
more: they tell of a kernel that has become another, not of a busy machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from scripts.bench.packing import measure_packing
from scripts.bench.runs import Check, Outcome
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins.joining import build_mapping
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.learning.admm import AndersonMixer, Point
from tp_flower.learning.losses import LogisticLoss, Loss, SoftmaxLoss, SquaredLoss
from tp_flower.learning.metrics import auc
from tp_flower.learning.models.local_model import LinearModel, moment
from tp_flower.learning.solvers import gram
from tp_flower.query import Join

ROWS = 400_000
USERS = 150_000
CLASSES = 5
FEATURES = 256
MEMORY = 5
RHO = 0.1
REPEATS = 7

FloatArray = npt.NDArray[np.float64]
Work = Callable[[], object]


@dataclass(frozen=True)
class Kernel:
    """What is measured, and against what.

    Attributes:
        name: for people.
        run: the kernel.
        floor: what it is compared with.
        floor_name: for people.
        most: of the ratio.
    """

    name: str
    run: Work
    floor: Work
    floor_name: str
    most: float


def measure_micro(rows: int = ROWS, repeats: int = REPEATS) -> Outcome:
    """Measure every kernel.

    Args:
        rows: joined rows.
        repeats: of each kernel; the fastest counts.
    """
    outcome = Outcome()
    draw = np.random.default_rng(0)
    for kernel in [
        *_mapping(rows, draw),
        *_row_kernels(rows, draw),
        *_prox_kernels(rows, draw),
        *_feature_kernels(rows // 8, draw),
        *_mixing(rows, draw),
    ]:
        own, floor = best_seconds(kernel.run, kernel.floor, repeats)
        outcome.facts[f"{kernel.name}, ms"] = 1000.0 * own
        outcome.checks.append(
            Check(f"{kernel.name} over {kernel.floor_name}", own / floor, kernel.most)
        )
    packing = measure_packing()
    outcome.checks += packing.checks
    outcome.facts |= packing.facts
    return outcome


def best_seconds(run: Work, floor: Work, repeats: int) -> tuple[float, float]:
    """Return the least processor seconds of both, taken in turns."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for work, seconds in zip((run, floor), spent, strict=True):
            started = time.process_time()
            work()
            seconds.append(time.process_time() - started)
    return min(spent[0]), min(spent[1])


def _mapping(rows: int, draw: np.random.Generator) -> list[Kernel]:
    """Two joins by hashed keys, against numpy's sort and search of the hashes."""
    sizes = {"u": USERS * rows // ROWS, "b": USERS * rows // ROWS // 30}
    keys: dict[tuple[str, int], list[KeyColumn]] = {}
    plain = []
    for number, (table, size) in enumerate(sizes.items()):
        hashes = draw.integers(0, 1 << 63, (size, 2), dtype=np.uint64)
        hashes = hashes[np.argsort(hashes[:, 0])]
        left = draw.integers(0, size, rows).astype(np.int32)
        right = draw.permutation(size).astype(np.int32)
        keys["r", number] = [KeyColumn(left, hashes, "number")]
        keys[table, 0] = [KeyColumn(right, hashes, "number")]
        plain.append((hashes[left, 0], hashes[right, 0]))
    joins = [Join("r", table, k, 0, f"r = {table}") for k, table in enumerate(sizes)]

    def sort_and_search() -> None:
        for left, right in plain:
            order = np.argsort(right)
            _ = order[np.searchsorted(right[order], left)]

    run = partial(build_mapping, joins, keys, {"r": rows, **sizes}, "r")
    name = "table mapping of two joins"
    return [Kernel(name, run, sort_and_search, "sort and search of hashes", 1.5)]


def _row_kernels(rows: int, draw: np.random.Generator) -> list[Kernel]:
    """From the rows of a table to the joined rows, and back."""
    users = USERS * rows // ROWS
    table = TableRows(draw.integers(0, users, rows).astype(np.int32), users)
    mapping = TableMapping({"u": table})
    joined, own = (draw.normal(size=(n, CLASSES)) for n in (rows, users))
    one, base = np.ascontiguousarray(joined[:, :1]), np.zeros(CLASSES)
    scores, positive = joined[:, 0].copy(), joined[:, 1] > 1.0
    copy = joined.copy
    return [
        Kernel(
            "segment sum, 5 outputs",
            lambda: table.segment_sum(joined),
            copy,
            "a copy",
            40.0,
        ),
        Kernel(
            "segment sum, 1 output",
            lambda: table.segment_sum(one),
            one.copy,
            "a copy",
            40.0,
        ),
        Kernel(
            "gather, 5 outputs",
            lambda: mapping.sum_scores(base, {"u": own}),
            copy,
            "a copy",
            40.0,
        ),
        Kernel(
            "area under the curve",
            lambda: auc(scores, positive),
            lambda: np.sort(scores),
            "a sort",
            6.0,
        ),
    ]


def _prox_kernels(rows: int, draw: np.random.Generator) -> list[Kernel]:
    """The z-update of each loss from where the epoch before ended."""
    cases: list[tuple[Loss, float]] = [
        (SquaredLoss(), 10.0),
        (LogisticLoss(), 30.0),
        (SoftmaxLoss(CLASSES), 60.0),
    ]
    kernels = []
    for loss, most in cases:
        labels = draw.integers(0, max(loss.outputs, 2), rows).astype(np.float64)
        centre = draw.normal(size=(rows, loss.outputs))
        start = loss.prox(centre, labels, RHO)
        moved = centre + 0.1 * draw.normal(size=centre.shape)
        run = partial(loss.prox, moved, labels, RHO, start)
        name, floor = f"z-update, {loss.name}", partial(np.exp, centre)
        kernels.append(Kernel(name, run, floor, "one exponential", most))
    return kernels


def _feature_kernels(rows: int, draw: np.random.Generator) -> list[Kernel]:
    """Products with float32 features, summed in float64."""
    features = draw.standard_normal((rows, FEATURES), dtype=np.float32)
    target = draw.normal(size=(rows, CLASSES))
    model = LinearModel(FEATURES, CLASSES, intercept=False)
    model.parameters = draw.normal(size=FEATURES * CLASSES)
    narrow = target.astype(np.float32), model.weights.astype(np.float32)
    count = draw.integers(1, 4, rows)

    def update() -> None:
        moment(features, target, intercept=False)
        model.scores(features)

    def two_passes() -> None:
        _ = features.T @ narrow[0]
        _ = features @ narrow[1]

    def plain_gram() -> FloatArray:
        wide = features.astype(np.float64)
        product: FloatArray = wide.T @ (wide * count[:, None])
        return product

    return [
        Kernel(
            "exact theta-update, float64 sums",
            update,
            two_passes,
            "two passes in float32",
            4.0,
        ),
        Kernel(
            "Gram matrix",
            lambda: gram(features, count, intercept=False),
            plain_gram,
            "X^T G X in one product",
            1.5,
        ),
    ]


def _mixing(rows: int, draw: np.random.Generator) -> list[Kernel]:
    """One mix with a full memory, against a copy of the memory."""
    users = USERS * rows // ROWS
    table = TableRows(draw.integers(0, users, rows).astype(np.int32), users)
    mixer = AndersonMixer(TableMapping({"u": table}), MEMORY, 2)

    def point() -> Point:
        scores, duals = draw.normal(size=(2, rows, CLASSES))
        return Point(scores, duals, {"u": draw.normal(size=(users, CLASSES))})

    points = [(point(), point()) for _ in range(MEMORY + 1)]
    for before, after in points:
        mixer.mix(RHO, before, after)
    # how duals and h_i changed, and their steps
    values = 2 * (rows + users) * CLASSES
    history = np.ones((MEMORY, values), np.float32)
    run = partial(mixer.mix, RHO, *points[0])
    return [Kernel("Anderson mixing", run, history.copy, "a copy of its memory", 12.0)]
