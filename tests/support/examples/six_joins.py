"""Six made-up joins, of the shapes of data sets that R's packages are shown on.

A birth weight study, motor policies, days of absence, costs of operations, homes beside
others of the same road, and times to a relapse: each over tables of several sites. R
reads the built joins from files, which this writes::

    python -m tests.support.examples.six_joins FOLDER
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.support.federated import pieces
from tests.support.reference.joins import engine_of
from tp_flower import api

ROWS = 600
LEVELS = 40
"""Rows of the tables in the middle."""


@dataclass(frozen=True)
class Example:
    """A query, its tables, and the settings that train it.

    Attributes:
        select: the label, and what stands beside it, as an offset.
        frames: the tables; the one with the label is the first.
    """

    loss: str
    select: str
    features: tuple[str, ...]
    source: str
    frames: Mapping[str, pd.DataFrame]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sql(self) -> str:
        """The query of the joined rows."""
        return f"SELECT {self.select}, {', '.join(self.features)} FROM {self.source}"

    def joined(self) -> pd.DataFrame:
        """Build the join; 0 where a LEFT JOIN finds no row, as the models have it."""
        with engine_of(self.frames) as engine:
            return engine.execute(self.sql).fetchdf().fillna(0.0)

    def sites(self, *, is_sharded: bool) -> dict[str, dict[str, pd.DataFrame]]:
        """Return a site for each table, or for each third of the label's."""
        first, *others = self.frames
        where = {name: {name: self.frames[name]} for name in others}
        count = len(self.frames[first])
        cuts = (count // 3, 2 * count // 3) if is_sharded else ()
        for number, piece in enumerate(pieces(self.frames[first], *cuts)):
            where[f"{first} {number}"] = {first: piece}
        return where

    def fit(self, *, is_sharded: bool, **settings: Any) -> api.FittedModel:
        """Train to the optimum, on columns in their own units."""
        encoders = "; ".join(f"{name}=none missing=zero" for name in self.features)
        asked = {"strategy": "cg", "loss": self.loss, "standard_errors": "model"}
        how = {"l2": 0.0, "test_fraction": 0.0, "encoders": encoders}
        sites = self.sites(is_sharded=is_sharded)
        return api.fit(self.sql, sites, **(how | (self.settings or asked) | settings))


@cache
def examples() -> dict[str, Example]:
    """Return the six by their names."""
    every = (_births, _policies, _absences, _costs, _homes, _relapses)
    return {
        make.__name__[1:]: make(np.random.default_rng([7, number]))
        for number, make in enumerate(every)
    }


def _score(frames: Mapping[str, pd.DataFrame], source: str, terms: str) -> np.ndarray:
    """Return a sum over the joined rows, in the order of the label's table."""
    first = source.split()[1]
    query = f"SELECT COALESCE({terms}, 0.0) AS score FROM {source} ORDER BY {first}.id"
    with engine_of(frames) as engine:
        return engine.execute(query).fetchdf()["score"].to_numpy(np.float64)


def _births(rng: np.random.Generator) -> Example:
    """Classes; mothers are of districts, of which some are in no table."""
    births = pd.DataFrame(
        {"id": range(ROWS), "mother": rng.integers(LEVELS, size=ROWS)}
    )
    births["weeks"] = rng.normal(size=ROWS)
    mothers = pd.DataFrame({"mid": range(LEVELS), "rid": rng.integers(8, size=LEVELS)})
    mothers["smokes"] = rng.integers(2, size=LEVELS)
    districts = pd.DataFrame({"rid": range(6), "density": rng.uniform(0, 2, 6)})
    frames = {"births": births, "mothers": mothers, "districts": districts}
    source = """births b JOIN mothers m ON b.mother = m.mid
        LEFT JOIN districts d ON m.rid = d.rid"""
    terms = "0.8 * m.smokes - 0.6 * b.weeks + 0.5 * COALESCE(d.density, 0) - 0.6"
    chances = 1.0 / (1.0 + np.exp(-_score(frames, source, terms)))
    births["low"] = (rng.random(ROWS) < chances).astype(int)
    features = ("b.weeks", "m.smokes", "d.density")
    return Example("logistic", "b.low AS label", features, source, frames)


def _policies(rng: np.random.Generator) -> Example:
    """Counts beside an exposure, which is between tables of ages, engines, towns."""
    policies = pd.DataFrame({"id": range(ROWS), "holders": rng.integers(1, 9, ROWS)})
    for key, count in (("age", 4), ("engine", 5), ("town", 12)):
        policies[key] = rng.integers(count, size=ROWS)
    frames = {
        "policies": policies,
        "ages": pd.DataFrame({"aid": range(4), "years": [-1.5, -0.6, 0.3, 1.4]}),
        "engines": pd.DataFrame({"eid": range(5), "litres": rng.uniform(-1, 1, 5)}),
        "towns": pd.DataFrame({"tid": range(12), "city": np.arange(12) % 2}),
    }
    source = """policies c JOIN ages a ON c.age = a.aid
        JOIN engines e ON c.engine = e.eid JOIN towns t ON c.town = t.tid"""
    terms = "LN(c.holders) - 0.9 - 0.25 * a.years + 0.4 * e.litres + 0.4 * t.city"
    policies["claims"] = rng.poisson(np.exp(_score(frames, source, terms)))
    select = 'c.claims AS label, LN(c.holders) AS "offset"'
    features = ("a.years", "e.litres", "t.city")
    return Example("poisson", select, features, source, frames)


def _absences(rng: np.random.Generator) -> Example:
    """Counts that scatter more, of pupils in forms, a snowflake of three levels."""
    absences = pd.DataFrame(
        {"id": range(ROWS), "pupil": rng.integers(LEVELS, size=ROWS)}
    )
    absences["sex"] = rng.integers(2, size=ROWS)
    pupils = pd.DataFrame({"pid": range(LEVELS), "form": rng.integers(8, size=LEVELS)})
    pupils["slow"] = rng.integers(2, size=LEVELS)
    forms = pd.DataFrame({"fid": range(8), "size": rng.uniform(-1, 1, 8)})
    frames = {"absences": absences, "pupils": pupils, "forms": forms}
    source = """absences s JOIN pupils p ON s.pupil = p.pid
        JOIN forms f ON p.form = f.fid"""
    terms = "0.9 + 0.4 * s.sex + 0.5 * p.slow - 0.5 * f.size"
    means = np.exp(_score(frames, source, terms))
    absences["days"] = rng.poisson(rng.gamma(1.3, means / 1.3))
    features = ("s.sex", "p.slow", "f.size")
    return Example("negative-binomial", "s.days AS label", features, source, frames)


def _costs(rng: np.random.Generator) -> Example:
    """Costs that weigh differently, of operations in hospitals of regions."""
    costs = pd.DataFrame({"id": range(ROWS), "hospital": rng.integers(25, size=ROWS)})
    costs["hours"] = rng.normal(size=ROWS)
    costs["w"] = 1.0 + np.arange(ROWS) % 3 / 2.0
    hospitals = pd.DataFrame({"hid": range(25), "rid": rng.integers(6, size=25)})
    hospitals["beds"] = rng.normal(size=25)
    regions = pd.DataFrame({"rid": range(4), "rural": [1.0, 2.0, 3.0, 2.0]})
    frames = {"costs": costs, "hospitals": hospitals, "regions": regions}
    source = """costs c JOIN hospitals h ON c.hospital = h.hid
        LEFT JOIN regions r ON h.rid = r.rid"""
    terms = "0.3 * c.hours - 0.2 * h.beds + 0.2 * COALESCE(r.rural, 0)"
    means = np.exp(_score(frames, source, terms))
    costs["price"] = rng.gamma(2.0 * costs["w"], means / (2.0 * costs["w"]))
    select = 'c.price AS label, c.w AS "weight"'
    features = ("c.hours", "h.beds", "r.rural")
    return Example("gamma", select, features, source, frames)


def _homes(rng: np.random.Generator) -> Example:
    """Prices, many-to-many: every home beside all others of its road."""
    homes = pd.DataFrame({"id": range(150), "road": rng.integers(12, size=150)})
    homes["rooms"] = rng.normal(size=150)
    homes["price"] = 0.3 * homes["rooms"] + rng.normal(size=150)
    others = pd.DataFrame({"road": rng.integers(14, size=90)})
    others["age"] = rng.normal(size=90)
    others["noise"] = 0.3 * others["age"] + rng.normal(size=90)
    source = "homes h JOIN others o ON h.road = o.road"
    frames = {"homes": homes, "others": others}
    features = ("h.rooms", "o.age", "o.noise")
    settings = {"strategy": "moments", "task": "regression"}
    return Example("squared", "h.price AS label", features, source, frames, settings)


def _relapses(rng: np.random.Generator) -> Example:
    """Times with ties, of two clinics and with weights; some patients have no stage."""
    operations = pd.DataFrame({"id": range(ROWS), "clinic": np.arange(ROWS) % 2})
    operations["hours"] = rng.normal(size=ROWS)
    operations["w"] = 1.0 + np.arange(ROWS) % 3 / 2.0
    patients = pd.DataFrame({"pid": range(ROWS), "sid": rng.integers(12, size=ROWS)})
    patients["age"] = rng.normal(size=ROWS)
    stages = pd.DataFrame({"sid": range(10), "depth": rng.uniform(0.5, 3.0, 10)})
    frames = {"operations": operations, "patients": patients, "stages": stages}
    source = """operations o JOIN patients p ON o.id = p.pid
        LEFT JOIN stages s ON p.sid = s.sid"""
    terms = "0.3 * o.hours + 0.4 * p.age + 0.25 * COALESCE(s.depth, 0)"
    times = rng.exponential(300.0 / np.exp(_score(frames, source, terms)))
    censored = rng.uniform(60.0, 400.0, ROWS)
    operations["days"] = 1.0 + np.floor(np.minimum(times, censored))
    operations["relapsed"] = (times <= censored).astype(int)
    select = """o.days AS time, o.relapsed AS event, o.clinic AS strata,
        o.w AS "weight" """.strip()
    features = ("o.hours", "p.age", "s.depth")
    return Example("cox", select, features, source, frames)


def _write(folder: Path) -> None:
    for name, example in examples().items():
        example.joined().to_csv(folder / f"{name}.csv", index=False)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
