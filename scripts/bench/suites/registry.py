"""All suites of the benchmark by name.

A suite is a function that returns an `Outcome`. To add one, write
``scripts/bench/suites/NAME.py`` with ``measure_NAME() -> Outcome`` and a line in
`SUITES`. One that needs something of the user's takes the `Options`, and raises
`SkippedSuite` where it is not there.
"""

from collections.abc import Callable, Mapping

from scripts.bench.movielens import has_movielens, measure_movielens
from scripts.bench.runs import Options, Outcome, SkippedSuite
from scripts.bench.suites.bytes import measure_bytes
from scripts.bench.suites.centralized import measure_centralized
from scripts.bench.suites.convergence import measure_convergence
from scripts.bench.suites.coreset import measure_coreset
from scripts.bench.suites.encode import measure_encode
from scripts.bench.suites.gpu import measure_gpu
from scripts.bench.suites.methods import measure_methods
from scripts.bench.suites.micro import measure_micro
from scripts.bench.suites.personal import measure_personal
from scripts.bench.suites.privacy import measure_privacy
from scripts.bench.suites.rounds import measure_rounds, measure_simulation
from scripts.bench.suites.scale import measure_linearity, measure_paper_scale
from scripts.bench.suites.speed import measure_speed

Suite = Callable[[Options], Outcome]


def alone(measure: Callable[[], Outcome]) -> Suite:
    """Return the suite of a function that needs nothing of the user's."""
    return lambda _: measure()


def _movielens(options: Options) -> Outcome:
    folder = options.movielens
    if folder is None or not has_movielens(folder):
        where = folder or "no folder given with --movielens"
        raise SkippedSuite(f"no ml-100k ({where})")
    return measure_movielens(folder)


def _gpu(options: Options) -> Outcome:
    if options.paper_scale is None:
        raise SkippedSuite("no folder given with --paper-scale")
    return measure_gpu(options.paper_scale, options.factor)


def _paper_scale(options: Options) -> Outcome:
    if options.paper_scale is None:
        raise SkippedSuite("no folder given with --paper-scale")
    return measure_paper_scale(options.factor, options.paper_scale)


SUITES: Mapping[str, Suite] = {
    "methods": measure_methods,
    "convergence": alone(measure_convergence),
    "bytes": lambda options: measure_bytes(options.movielens),
    "speed": alone(measure_speed),
    "centralized": alone(measure_centralized),
    "coreset": lambda options: measure_coreset(options.vertical),
    "encode": alone(measure_encode),
    "privacy": alone(measure_privacy),
    "movielens": _movielens,
    "gpu": _gpu,
    "personal": alone(measure_personal),
    "micro": alone(measure_micro),
    "rounds": alone(measure_rounds),
    "simulation": alone(measure_simulation),
    "linearity": alone(measure_linearity),
    "paper-scale": _paper_scale,
}
