"""Do intervals of 95 % hold the truth? The share of made-up joins in which they do.

Every run makes three tables anew, each at an organisation of its own: visits with the
label, the people who made them, and regions by a LEFT JOIN, some of which lack. Sizes
and values are random, the coefficients are known, in the unit of the columns; of a
category they are differences from the first one. A cell is 500 runs of one loss and one
kind of errors; a run without an interval counts as one that has missed.

Where the label's variance is not the family's, robust errors have to hold the truth,
and those of the model must not: otherwise the cell shows nothing. So must clustered
errors, and not robust ones, where the visits of a person share an effect that is in no
table. With an epsilon on
the values of visits, intervals count the noise, and are of the coefficients without the
ridge against it; beside them, what the model's own coefficients hold within 1.96 of the
deviations that noise alone gives them.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

import numpy as np
import pandas as pd
from scipy import special

from scripts.bench.harness import Options, Outcome, train
from tp_flower.arrays import FloatArray
from tp_flower.methods.moments.settings import CLUSTERED, ROBUST
from tp_flower.objectives.comparison import CONFIDENCE
from tp_flower.settings import Settings
from tp_flower.sources.shards import MEMORY_PREFIX, register_frames, release

RUNS: Final = 500
MOST_OFF: Final = 0.02
"""A share of 500 runs is off by 0.01 on average; the coefficients' mean by less."""
MISSED: Final = 0.93
"""What the coefficient that covers least covers at most, if the variance is another."""
INTERCEPT: Final = 0.2
EFFECTS: Final[Mapping[str, float]] = {
    "x": 0.6,
    "kind[1]": 0.5,
    "kind[2]": -0.4,
    "age": 0.5,
    "segment": 0.4,
    "density": -0.5,
}
"""Coefficients; the kinds', q and r, are differences from the kind p."""
COLUMNS: Final = {"kind[1]": "kind=q", "kind[2]": "kind=r", "segment": "segment=b"}
"""What the columns of categories are called in a report."""
SQL: Final = """SELECT v.y AS label, {offset}v.x, v.kind, p.age, p.segment, r.density
FROM visits AS v JOIN people AS p ON v.pid = p.pid
LEFT JOIN regions AS r ON p.rid = r.rid"""
ENCODERS: Final = (
    "v.x={number}; v.kind=categories({kinds}); p.age={number}; "
    "p.segment=categories(b); r.density={number} missing=zero"
)
NOISE_ALONE: Final = ", noise alone"
DISPERSION: Final = 0.7
SHAPE: Final = 2.0
DEVIATION: Final = 0.5
Draw = Callable[[np.random.Generator, FloatArray, FloatArray], FloatArray]
Share = Callable[[np.random.Generator, int], FloatArray]


@dataclass(frozen=True)
class Cell:
    """Runs of one loss, with labels that are drawn by their scores and x, (n,) each.

    Attributes:
        name: of the row; cells whose names begin alike, up to a comma, have the same
            joins.
        rows: of the visits, at least and at most.
        people: of their table, at least and at most.
        share: draws what the scores of a person's visits have in common, of so many
            people, (n,); None for nothing.
        is_exact: whether the errors count what there is.
        settings: of the run, besides its encoders.
    """

    name: str
    draw: Draw
    settings: Mapping[str, Any]
    rows: tuple[int, int] = (300, 1000)
    people: tuple[int, int] = (40, 200)
    share: Share | None = None
    offset: str = ""
    kinds: str = "p, q, r"
    number: str = "none"
    is_exact: bool = True

    def generator(self, number: int) -> np.random.Generator:
        """Return what a run draws its tables by."""
        begins = self.name.partition(",")[0].encode()
        return np.random.default_rng([number, zlib.crc32(begins)])

    def run_settings(self) -> Settings:
        """Return the settings of a run."""
        encoders = ENCODERS.format(kinds=self.kinds, number=self.number)
        fixed = {"l2": 0.0, "test-fraction": 0.0, "encoders": encoders}
        return Settings.from_run_config({**fixed, **self.settings})


def _squared(
    generator: np.random.Generator, score: FloatArray, _: FloatArray
) -> FloatArray:
    noise: FloatArray = DEVIATION * generator.normal(size=len(score))
    return score + noise


def _uneven(
    generator: np.random.Generator, score: FloatArray, x: FloatArray
) -> FloatArray:
    noise: FloatArray = (0.2 + 1.5 * x**2) * generator.normal(size=len(score))
    return score + noise


def _logistic(
    generator: np.random.Generator, score: FloatArray, _: FloatArray
) -> FloatArray:
    is_one = generator.random(len(score)) < 1.0 / (1.0 + np.exp(-score))
    return is_one.astype(np.float64)


def _poisson(
    generator: np.random.Generator, score: FloatArray, _: FloatArray
) -> FloatArray:
    return generator.poisson(np.exp(score)).astype(np.float64)


def _gamma(
    generator: np.random.Generator, score: FloatArray, _: FloatArray
) -> FloatArray:
    return generator.gamma(SHAPE, np.exp(score) / SHAPE)


def _counts(
    generator: np.random.Generator, score: FloatArray, _: FloatArray
) -> FloatArray:
    """Return counts whose variance is m + DISPERSION m^2."""
    shape = 1.0 / DISPERSION
    means = generator.gamma(shape, np.exp(score) / shape)
    return generator.poisson(means).astype(np.float64)


def _normal_share(generator: np.random.Generator, people: int) -> FloatArray:
    return DEVIATION * generator.normal(size=people)


def _frailty(generator: np.random.Generator, people: int) -> FloatArray:
    """Return logarithms of factors of the mean 1: so coefficients are of all people."""
    return np.log(generator.gamma(SHAPE, 1.0 / SHAPE, people))


def _cg(loss: str, errors: str = "model") -> dict[str, Any]:
    cluster = {"cluster": "p"} if errors == CLUSTERED else {}
    return {"strategy": "cg", "loss": loss, "standard-errors": errors, **cluster}


def _noisy(epsilon: float) -> dict[str, Any]:
    return {
        **MOMENTS,
        "private-tables": "v",
        "privacy.features": "statistics",
        "privacy.epsilon": epsilon,
        "privacy.label-range": "-4, 4",
    }


MOMENTS: Final = {"strategy": "moments", "task": "regression"}
TREATED: Final = "q, r"
"""Kinds that are declared where there are no differences in the report."""
RANGE: Final = "range(-1, 1)"
CELLS: Final = (
    Cell("logistic", _logistic, _cg("logistic")),
    Cell("poisson with an offset", _poisson, _cg("poisson"), offset="LN(v.days)"),
    Cell("gamma", _gamma, _cg("gamma")),
    Cell("negative-binomial", _counts, _cg(f"negative-binomial({DISPERSION})")),
    Cell("squared", _squared, _cg("squared")),
    Cell("poisson of overdispersed counts", _counts, _cg("poisson"), is_exact=False),
    Cell("poisson of overdispersed counts, robust", _counts, _cg("poisson", "robust")),
    Cell("squared, variance by x", _uneven, _cg("squared"), is_exact=False),
    Cell("squared, variance by x, robust", _uneven, _cg("squared", "robust")),
    *(
        Cell(
            f"{loss}, alike within people, {errors}",
            draw,
            _cg(loss, errors),
            people=(100, 200),
            share=share,
            is_exact=errors == CLUSTERED,
        )
        for loss, draw, share, errors in (
            ("squared", _squared, _normal_share, ROBUST),
            ("squared", _squared, _normal_share, CLUSTERED),
            ("poisson", _poisson, _frailty, CLUSTERED),
        )
    ),
    Cell("squared by moments", _squared, MOMENTS, kinds=TREATED),
    *(
        Cell(
            f"squared by moments, epsilon {epsilon:g}{beside}",
            _squared,
            _noisy(epsilon),
            rows,
            kinds=TREATED,
            number=RANGE,
            is_exact=not beside,
        )
        for epsilon, rows, beside in (
            (4.0, (500, 1000), ""),
            (1.0, (2000, 4000), ""),
            (1.0, (2000, 4000), NOISE_ALONE),
        )
    ),
)


@dataclass
class Coverage:
    """In how many runs the intervals of a cell have held the truth.

    Attributes:
        held: by coefficient, the runs.
        without: runs that have no interval.
    """

    runs: int
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EFFECTS, 0))
    without: int = 0

    def record(self) -> dict[str, float]:
        """Return the shares as the row of a table."""
        shares = [held / self.runs for held in self.held.values()]
        return {
            "runs": self.runs,
            "share": float(np.mean(shares)),
            **dict(zip(self.held, shares, strict=True)),
            "without": self.without,
        }


def measure_coverage(_: Options) -> Outcome:
    """Return the share of intervals that hold the truth, cell by cell."""
    outcome = Outcome()
    context = get_context("spawn")
    with ProcessPoolExecutor(mp_context=context, initializer=_silence) as pool:
        for cell in CELLS:
            found = pool.map(partial(intervals, cell), range(RUNS), chunksize=10)
            record = covered(found).record()
            outcome.facts[cell.name] = record
            print(f"  {cell.name}: {record}", flush=True)
            _check(outcome, cell, record)
    return outcome


def _silence() -> None:
    """Keep the log of a process's runs, and the warnings in it, off the console."""
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _check(outcome: Outcome, cell: Cell, record: Mapping[str, float]) -> None:
    if cell.is_exact:
        off = abs(record["share"] - CONFIDENCE)
        outcome.check(f"{cell.name}: off 95 %", off, MOST_OFF, "%")
    else:
        least = min(record[name] for name in EFFECTS)
        outcome.check(f"{cell.name}: least share", least, MISSED, "%")


def covered(found: Iterator[Mapping[str, tuple[float, float]]]) -> Coverage:
    """Return how many of some runs' intervals hold the truth."""
    coverage = Coverage(0)
    for ends in found:
        coverage.runs += 1
        coverage.without += not ends
        for name, (low, high) in ends.items():
            coverage.held[name] += bool(low <= EFFECTS[name] <= high)
    return coverage


def intervals(cell: Cell, number: int) -> dict[str, tuple[float, float]]:
    """Return the intervals of a run by coefficient; {} where it has none."""
    generator = cell.generator(number)
    offset = f'{cell.offset} AS "offset", ' if cell.offset else ""
    with _shown(make_tables(generator, cell)) as sites:
        strategy = train(SQL.format(offset=offset), cell.run_settings(), sites)
    report: Any = strategy.report
    entries = [entry for table in report.coefficients.values() for entry in table]
    by_column = {entry["feature"]: entry for entry in entries}
    for entry in report.sections.get("inference", {}).get("contrasts", ()):
        by_column[entry["column"].partition(".")[2]] = entry
    found = {name: by_column[COLUMNS.get(name, name)] for name in EFFECTS}
    if cell.name.endswith(NOISE_ALONE):
        reach = special.ndtri(0.5 + 0.5 * CONFIDENCE)
        return {
            name: (
                entry["value"] - reach * entry["noise"],
                entry["value"] + reach * entry["noise"],
            )
            for name, entry in found.items()
        }
    if not all("low" in entry for entry in found.values()):
        return {}
    return {name: (entry["low"], entry["high"]) for name, entry in found.items()}


def make_tables(
    generator: np.random.Generator, cell: Cell
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the three organisations' tables of a run."""
    fewest, most = cell.people
    people, regions = generator.integers((fewest, 6), (most + 1, 16))
    rows = int(generator.integers(*cell.rows, endpoint=True))
    region = pd.DataFrame(
        {"rid": range(regions), "density": generator.uniform(-1.0, 1.0, regions)}
    )
    person = pd.DataFrame(
        {
            "pid": range(people),
            # three regions are in no table
            "rid": generator.integers(regions + 3, size=people),
            "age": generator.uniform(-1.0, 1.0, people),
            "segment": generator.choice(["a", "b"], people),
        }
    )
    visit = pd.DataFrame(
        {
            # two people, too
            "pid": generator.integers(people + 2, size=rows),
            "x": generator.uniform(-1.0, 1.0, rows),
            "kind": generator.choice(["p", "q", "r"], rows),
            "days": generator.integers(1, 31, size=rows),
        }
    )
    score = scores(visit, person, region)
    if cell.offset:
        score += np.log(visit["days"].to_numpy(np.float64))
    if cell.share is not None:
        score += cell.share(generator, people + 2)[visit["pid"]]
    visit["y"] = cell.draw(generator, score, visit["x"].to_numpy())
    return {
        "clinic": {"visits": visit},
        "registry": {"people": person},
        "office": {"regions": region},
    }


def scores(
    visit: pd.DataFrame, person: pd.DataFrame, region: pd.DataFrame
) -> FloatArray:
    """Return the true score of every visit, (n,)."""
    density = region["density"].reindex(person["rid"]).fillna(0.0).to_numpy()
    of_person = (
        EFFECTS["age"] * person["age"]
        + EFFECTS["segment"] * (person["segment"] == "b")
        + EFFECTS["density"] * density
    )
    kinds = {"p": 0.0, "q": EFFECTS["kind[1]"], "r": EFFECTS["kind[2]"]}
    own = INTERCEPT + EFFECTS["x"] * visit["x"] + visit["kind"].map(kinds)
    found: FloatArray = (
        own.to_numpy() + of_person.reindex(visit["pid"]).fillna(0.0).to_numpy()
    )
    return found


@contextmanager
def _shown(
    sites: Mapping[str, Mapping[str, pd.DataFrame]],
) -> Iterator[dict[str, str]]:
    """Yield the sites of some tables whose coefficients they show."""
    tokens = {name: register_frames(frames, name) for name, frames in sites.items()}
    try:
        yield {name: MEMORY_PREFIX + token for name, token in tokens.items()}
    finally:
        for token in tokens.values():
            release(token)
