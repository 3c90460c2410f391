"""Made-up motor races: wide categories whose strength changes with the season."""

from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from scripts.bench.datasets import Dataset
from tp_flower.arrays import FloatArray, IntArray

DRIVERS, CONSTRUCTORS, CIRCUITS = 850, 210, 77
SEASONS: Final = range(1950, 2024)
STARTERS: Final = 22
NATIONS: Final = [f"n{number}" for number in range(42)]
SQL: Final = """
SELECT r.position <= 3 AS label, r.grid,
  d.ref, d.nationality, d.birth, c.ref, c.nationality,
  s.year, s.round, x.ref, x.country, x.alt
FROM results r JOIN drivers d ON r.driver = d.id
JOIN constructors c ON r.constructor = c.id
JOIN races s ON r.race = s.id JOIN circuits x ON s.circuit = x.id"""


class Field(NamedTuple):
    """Drivers or constructors: first season, the one after the last, and skill."""

    first: IntArray
    end: IntArray
    skill: FloatArray

    def active(self, year: int) -> IntArray:
        """Return who takes part in a season."""
        return np.flatnonzero((self.first <= year) & (year < self.end))


def races(seed: int, first: int = SEASONS[0]) -> Dataset:
    """Return the races from a season on: is a driver among the first three?"""
    draw = np.random.default_rng(seed)
    drivers, constructors = _drivers(draw), _constructors(draw)
    calendar: list[tuple[int, int, int, int]] = []
    results: list[pd.DataFrame] = []
    for year in SEASONS:
        _race(draw, year, drivers, constructors, calendar, results)
    tables = {"results": pd.concat(results, ignore_index=True)}
    tables["drivers"] = _named(draw, "d", DRIVERS, NATIONS)
    tables["drivers"]["birth"] = drivers.first - 24 + draw.integers(-4, 5, DRIVERS)
    tables["constructors"] = _named(draw, "c", CONSTRUCTORS, NATIONS[:24])
    tables["races"] = pd.DataFrame(calendar, columns=["id", "year", "round", "circuit"])
    circuits = _named(draw, "x", CIRCUITS, NATIONS).rename(
        columns={"nationality": "country"}
    )
    tables["circuits"] = circuits.assign(alt=draw.gamma(1, 200, CIRCUITS))
    late = tables["races"].id[tables["races"].year >= first]
    is_late = tables["results"].race.isin(late)
    tables["results"] = tables["results"][is_late].reset_index(drop=True)
    seasons = SEASONS.stop - first
    settings: dict[str, str | float] = {
        "task": "classification",
        "max-categories": 2000,
    }
    title = f"Like formula 1, {seasons} seasons"
    return Dataset(f"races-{seasons}", title, "auc", SQL, settings, tables)


def _drivers(draw: np.random.Generator) -> Field:
    """Return drivers, of whom the better ones stay longer."""
    first = draw.integers(SEASONS[0], 2022, DRIVERS)
    seasons = 1 + draw.geometric(0.25, DRIVERS)
    skill = 0.8 * draw.normal(size=DRIVERS)
    seasons = seasons + np.maximum(0, (3 * skill)).astype(int)
    return Field(first, first + seasons, skill)


def _constructors(draw: np.random.Generator) -> Field:
    """Return constructors, of which six take part in every season."""
    first = np.concatenate(
        [draw.integers(SEASONS[0], 2010, CONSTRUCTORS - 6), [SEASONS[0]] * 6]
    )
    seasons = np.concatenate([1 + draw.geometric(0.2, CONSTRUCTORS - 6), [80] * 6])
    return Field(first, first + seasons, 0.9 * draw.normal(size=CONSTRUCTORS))


def _race(
    draw: np.random.Generator,
    year: int,
    drivers: Field,
    constructors: Field,
    calendar: list[tuple[int, int, int, int]],
    results: list[pd.DataFrame],
) -> None:
    """Add a season's races and results: a car's strength differs every year."""
    entrants, teams = drivers.active(year), constructors.active(year)
    if len(entrants) < STARTERS:
        absent = np.setdiff1d(np.arange(DRIVERS), entrants)
        others = draw.choice(absent, STARTERS - len(entrants), replace=False)
        entrants = np.concatenate([entrants, others])
    # the better drivers find the better cars
    wishes = 0.3 * np.outer(drivers.skill[entrants], constructors.skill[teams])
    seat = np.argmax(wishes + draw.gumbel(size=wishes.shape), axis=1)
    car = constructors.skill[teams] + 0.7 * draw.normal(size=len(teams))
    strength = drivers.skill[entrants] + car[seat]
    for number in range(int(np.interp(year, [SEASONS[0], SEASONS[-1]], [8, 22]))):
        race = len(calendar)
        calendar.append((race, year, number + 1, int(draw.integers(CIRCUITS))))
        starters = draw.choice(len(entrants), STARTERS, replace=False)
        qualifying = strength[starters] + 0.8 * draw.normal(size=STARTERS)
        grid = _places(qualifying)
        finish = strength[starters] - 0.08 * grid + 1.2 * draw.gumbel(size=STARTERS)
        columns = {
            "race": race,
            "driver": entrants[starters],
            "constructor": teams[seat[starters]],
        }
        columns |= {"grid": grid, "position": _places(finish)}
        results.append(pd.DataFrame(columns))


def _places(values: FloatArray) -> IntArray:
    """Return the place of each value, 1 for the highest."""
    order: IntArray = np.argsort(np.argsort(-values))
    return order + 1


def _named(
    draw: np.random.Generator, prefix: str, count: int, nations: list[str]
) -> pd.DataFrame:
    """Return rows with a name and a nation each."""
    names = [f"{prefix}{number}" for number in range(count)]
    nation = draw.choice(nations, count)
    return pd.DataFrame({"id": range(count), "ref": names, "nationality": nation})
