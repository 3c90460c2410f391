"""All suites of the benchmark by name, in the order of the results page.

To add one, write ``measure_NAME(options) -> Outcome`` in a module of
scripts/bench/suites, its line here, and its title in scripts/bench/results_page.toml.
One that needs data of the user's raises `SkippedSuite` where they are not there.
"""

from collections.abc import Callable, Mapping

from scripts.bench.harness import Options, Outcome
from scripts.bench.suites.boost import measure_boost
from scripts.bench.suites.bytes import measure_bytes
from scripts.bench.suites.cheap import measure_cheap
from scripts.bench.suites.convergence import (
    measure_convergence,
    measure_movielens,
    measure_optimum,
)
from scripts.bench.suites.coreset import measure_coreset
from scripts.bench.suites.coverage import measure_coverage
from scripts.bench.suites.encode import measure_encode
from scripts.bench.suites.joined import measure_joined
from scripts.bench.suites.materialised import measure_centralized, measure_speed
from scripts.bench.suites.memory import measure_memory
from scripts.bench.suites.methods import measure_methods
from scripts.bench.suites.moments import measure_moments
from scripts.bench.suites.privacy import measure_labels, measure_privacy
from scripts.bench.suites.scale import measure_linearity, measure_paper_scale
from scripts.bench.suites.windows import measure_windows

SUITES: Mapping[str, Callable[[Options], Outcome]] = {
    "methods": measure_methods,
    "convergence": measure_convergence,
    "optimum": measure_optimum,
    "boost": measure_boost,
    "joined": measure_joined,
    "bytes": measure_bytes,
    "speed": measure_speed,
    "centralized": measure_centralized,
    "cheap": measure_cheap,
    "coreset": measure_coreset,
    "encode": measure_encode,
    "memory": measure_memory,
    "windows": measure_windows,
    "privacy": measure_privacy,
    "moments": measure_moments,
    "coverage": measure_coverage,
    "labels": measure_labels,
    "movielens": measure_movielens,
    "linearity": measure_linearity,
    "paper-scale": measure_paper_scale,
}
