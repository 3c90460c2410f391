"""All suites of the benchmark by name, in the order of the results page.

To add one, write ``measure_NAME(options) -> Outcome`` in a module here, and its entry.
One that needs data of the user's raises `SkippedSuite` where they are not there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.bench.harness import Options, Outcome
from scripts.bench.suites.bytes import measure_bytes
from scripts.bench.suites.convergence import measure_convergence, measure_movielens
from scripts.bench.suites.coreset import measure_coreset
from scripts.bench.suites.encode import measure_encode
from scripts.bench.suites.materialised import measure_centralized, measure_speed
from scripts.bench.suites.methods import measure_methods
from scripts.bench.suites.micro import measure_micro
from scripts.bench.suites.personal import CODE_NAMES, Z_STEP, measure_personal
from scripts.bench.suites.privacy import measure_labels, measure_privacy
from scripts.bench.suites.rounds import measure_rounds, measure_simulation
from scripts.bench.suites.scale import (
    measure_gpu,
    measure_linearity,
    measure_paper_scale,
)


@dataclass(frozen=True)
class Suite:
    """A suite of the benchmark.

    Attributes:
        measure: runs it.
        title: on the results page.
        shown: figures without a limit that the page has besides, if there are such;
            without limits and without these it has the first ones.
    """

    measure: Callable[[Options], Outcome]
    title: str
    shown: Sequence[str] = ()


SUITES: Mapping[str, Suite] = {
    "methods": Suite(measure_methods, "The cost of a good model"),
    "convergence": Suite(
        measure_convergence, "How close to the centralised optimum, on flights"
    ),
    "bytes": Suite(
        measure_bytes, "Bytes of an epoch, against the least that it could send"
    ),
    "speed": Suite(
        measure_speed,
        "Ten epochs on flights with set-up, against the way without tp_flower",
        tuple(
            f"{way}: {figure}"
            for way in (
                "ten epochs",
                "DuckDB + dense + scikit-learn",
                "DuckDB + CSR + scikit-learn",
            )
            for figure in ("seconds", "peak-mib")
        ),
    ),
    "centralized": Suite(
        measure_centralized,
        "To a good model, against training on the materialised join; the store has "
        "2 million joined rows, 12.5 per item, of 54 features (narrow: 22)",
        (
            "flights: tp-flower: seconds",
            "flights: join, CSR, L-BFGS: seconds",
            "store: tp-flower: seconds",
            "store: tp-flower: peak-mib",
            "store: join, dense, SGD: seconds",
            "store: join, dense, scikit-learn: peak-mib",
            "narrow store: time over the least without tp_flower",
            "narrow store: memory over the least without tp_flower",
        ),
    ),
    "coreset": Suite(
        measure_coreset,
        "Coresets: ridge regression and k-means on a few thousand of the joined rows, "
        "by importance (C) and uniform (U), mean of 20 samples",
    ),
    "encode": Suite(
        measure_encode,
        "A site encodes a CSV shard",
        (
            "rows",
            "a site: seconds",
            "a site: peak memory, MiB",
            "DuckDB's scan into numpy: seconds",
            "DuckDB's scan into numpy: peak memory, MiB",
        ),
    ),
    "privacy": Suite(
        measure_privacy,
        "Private models on flights; [PRIVACY.md](../PRIVACY.md) has more, and what "
        "epsilon does not cover",
        (
            "ADMM, private statistics, no privacy: test AUC",
            "ADMM, private statistics, eps 1: test AUC",
            "ADMM, private statistics, eps 8: test AUC",
            "ADMM, DP-SGD, eps 1: test AUC",
            "SGD, DP-SGD, eps 1: test AUC",
        ),
    ),
    "labels": Suite(measure_labels, "Noise on labels, test metrics by the true labels"),
    "movielens": Suite(
        measure_movielens,
        "MovieLens-100K, against the authors' published code",
        ("times faster than published",),
    ),
    "rounds": Suite(
        measure_rounds,
        "Rounds of SGD",
        (
            "rounds per second, 2 sites",
            "rounds per second, 8 sites",
            "rounds per epoch without staleness",
        ),
    ),
    "simulation": Suite(measure_simulation, "Rounds of SGD in Flower's simulation"),
    "personal": Suite(
        measure_personal,
        "Personal models: updates of ten sites with 1,000 coefficients, whose order "
        "has a meaning (steps) or none, until the test loss is within 0.5 % of where "
        "float32 ends; Z-steps over a graph",
        (
            *(
                f"{name}, {code}: bytes to the test loss over float32's"
                for name in ("steps", "no order")
                for code in CODE_NAMES
            ),
            *(
                f"{Z_STEP}, p = {norm}, {kind}: one core, seconds"
                for norm in ("1", "inf")
                for kind in ("cold", "warm")
            ),
        ),
    ),
    "micro": Suite(measure_micro, "The parts that take the time"),
    "linearity": Suite(measure_linearity, "How cost grows with the joined rows"),
    "paper-scale": Suite(
        measure_paper_scale,
        "Tables of the papers' sizes (`--paper-scale DIR`)",
        (
            "yelp, factor 1: joined-rows",
            "yelp, factor 1: set-up-seconds",
            "yelp, factor 1: epoch-seconds",
            "yelp, factor 1: floor-seconds",
        ),
    ),
    "gpu": Suite(measure_gpu, "With a GPU, at the papers' sizes (`--paper-scale DIR`)"),
}

README_FIGURES: Sequence[tuple[str, str, str]] = (
    (
        "flights, 10 epochs of ADMM and set-up: time over DuckDB and scikit-learn",
        "speed",
        "10 epochs over DuckDB + encoding + scikit-learn, time",
    ),
    ("the same: peak memory", "speed", "the same, peak memory"),
    (
        "store, 2 million joined rows: time over the fastest way with a join",
        "centralized",
        "store: time over the least without tp_flower",
    ),
    (
        "flights, ADMM: epochs to 0.1 % of the optimum on the joined table",
        "convergence",
        "classification, ADMM: epochs to 0.1% of the optimum",
    ),
    (
        "bytes that an epoch sends up, over one number per row",
        "bytes",
        "join-only ADMM, an epoch's bytes up over the floor",
    ),
    (
        "flights, test AUC lost at epsilon 1 (features of a table)",
        "privacy",
        "ADMM, private statistics: AUC lost at epsilon 1",
    ),
    (
        "flights, ridge on 2,000 of 217,338 rows: loss over that of all rows",
        "coreset",
        "Flights, minutes late, Central: C(2000) over all rows",
    ),
    (
        "a site encodes a CSV of 1M x 60: peak memory over DuckDB and numpy's",
        "encode",
        "a site's peak memory over DuckDB + numpy's",
    ),
    (
        "time of an epoch by joined rows: slope, log over log",
        "linearity",
        "store, epoch: slope of log time over log rows",
    ),
)
"""Rows of the README's table: what it says, the suite, and the figure's name."""
