"""Single kernels against the least that their arrays cost.

A kernel is measured beside its floor, in turns: plain numpy doing the same, or copying
what the kernel must read and write. Limits are twice what was measured, or more: they
tell of a kernel that has become another, not of a busy machine.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from scripts.bench.harness import Options, Outcome
from tp_flower.arrays import FloatArray
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins.joining import build_mapping
from tp_flower.joins.mapping import TableMapping, TableRows
from tp_flower.learning.models.local_model import LinearModel, moment
from tp_flower.learning.solvers import gram
from tp_flower.objectives import Target, make_objective
from tp_flower.objectives.metrics import auc
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.query import Join

ROWS = 400_000
USERS = 150_000
CLASSES = 5
FEATURES = 256
RHO = 0.1
REPEATS = 7

PACKED_ARRAYS = 8
PACKED_ROWS = 500
PACK_SECONDS = 60e-6

Work = Callable[[], object]
Kernel = tuple[str, Work, str, Work, float]
"""Name, the kernel, name of its floor, the floor, and the most of their ratio."""


def measure_micro(_: Options, rows: int = ROWS, repeats: int = REPEATS) -> Outcome:
    """Measure every kernel on so many joined rows; the fastest repeat counts."""
    outcome = Outcome()
    for kernels in (_mapping, _row_kernels, _prox_kernels, _feature_kernels):
        for name, run, floor_name, floor, most in kernels(rows):
            seconds, least = best_seconds(run, floor, repeats=repeats)
            outcome.facts[f"{name}, ms"] = 1000.0 * seconds
            outcome.check(f"{name} over {floor_name}", seconds / least, most)
    _measure_packing(outcome, repeats)
    return outcome


def best_seconds(
    *works: Work,
    repeats: int,
    times: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> list[float]:
    """Return the least seconds of each, taken in turns."""
    least = [np.inf] * len(works)
    for _ in range(repeats):
        for number, work in enumerate(works):
            started = clock()
            for _ in range(times):
                work()
            least[number] = min(least[number], (clock() - started) / times)
    return least


def _mapping(rows: int) -> Iterator[Kernel]:
    """Two joins by hashed keys, against numpy's sort and search of the hashes."""
    draw = np.random.default_rng(0)
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
    floor = "sort and search of hashes"
    yield "table mapping of two joins", run, floor, sort_and_search, 1.5


def _row_kernels(rows: int) -> Iterator[Kernel]:
    """From the rows of a table to the joined rows, and back."""
    draw = np.random.default_rng(1)
    users = USERS * rows // ROWS
    table = TableRows(draw.integers(0, users, rows).astype(np.int32), users)
    mapping = TableMapping({"u": table})
    joined, local = (draw.normal(size=(n, CLASSES)) for n in (rows, users))
    one, base = np.ascontiguousarray(joined[:, :1]), np.zeros(CLASSES)
    scores, positive = joined[:, 0].copy(), joined[:, 1] > 1.0
    sums, copy = table.segment_sum, "a copy"
    gather = partial(mapping.sum_scores, base, {"u": local})
    yield "segment sum, 5 outputs", partial(sums, joined), copy, joined.copy, 40.0
    yield "segment sum, 1 output", partial(sums, one), copy, one.copy, 40.0
    yield "gather, 5 outputs", gather, copy, joined.copy, 40.0
    curve, sort = partial(auc, scores, positive), partial(np.sort, scores)
    yield "area under the curve", curve, "a sort", sort, 6.0


def _prox_kernels(rows: int) -> Iterator[Kernel]:
    """The z-update of each loss from where the epoch before ended."""
    draw = np.random.default_rng(2)
    cases = [("squared", 0, 10.0), ("logistic", 2, 30.0), ("softmax", CLASSES, 60.0)]
    for name, classes, most in cases:
        values = draw.integers(0, max(classes, 2), rows)
        target = Target.of(values, tuple(map(str, range(classes))))
        objective = make_objective(name, target)
        centre = draw.normal(size=(rows, objective.outputs))
        start = objective.prox(centre, RHO)
        moved = centre + 0.1 * draw.normal(size=centre.shape)
        run = partial(objective.prox, moved, RHO, start)
        floor = partial(np.exp, centre)
        yield f"z-update, {name}", run, "one exponential", floor, most


def _feature_kernels(rows: int) -> Iterator[Kernel]:
    """Products with float32 features, summed in float64, of an eighth of the rows."""
    draw = np.random.default_rng(3)
    rows //= 8
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

    name, floor = "exact theta-update, float64 sums", "two passes in float32"
    yield name, update, floor, two_passes, 4.0
    run = partial(gram, features, count, intercept=False)
    yield "Gram matrix", run, "X^T G X in one product", plain_gram, 1.5


def _measure_packing(outcome: Outcome, repeats: int) -> None:
    """Time packing and unpacking a small message."""
    draw = np.random.default_rng(0)
    small = Packet(
        {"batch": 1, "next-batch": 2, "evaluate": None, "momentum": 0.9},
        {
            (part, "messages"): draw.normal(size=(PACKED_ROWS, 1)).astype(np.float32)
            for part in range(PACKED_ARRAYS)
        },
    )
    (seconds,) = best_seconds(lambda: unpack(pack(small)), repeats=repeats, times=200)
    title = f"packing and unpacking {PACKED_ARRAYS} arrays of {PACKED_ROWS} rows"
    outcome.check(title, seconds, PACK_SECONDS, "s")
