"""A made-up formula-1 database with three tasks, in the folder format of RelBench.

Skills of drivers drift, cars are better in some years than in others and fail more
often in some; drivers change teams, come and retire. A driver's results, qualifyings
and standings tell these, none of the rows of a driver or a circuit does.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

FIRST = pd.Timestamp("1990-01-01")
STEP = pd.Timedelta(days=30)
TEAMS, PER_TEAM, CIRCUITS = 11, 2, 24
TABLES = {
    "drivers": {"pkey": "driverId"},
    "constructors": {"pkey": "constructorId"},
    "circuits": {"pkey": "circuitId"},
    "races": {
        "pkey": "raceId",
        "time_col": "date",
        "fkeys": {"circuitId": "circuits"},
    },
    "results": {
        "pkey": "resultId",
        "time_col": "date",
        "fkeys": {
            "raceId": "races",
            "driverId": "drivers",
            "constructorId": "constructors",
        },
    },
    "qualifying": {
        "pkey": "qualifyId",
        "time_col": "date",
        "fkeys": {
            "raceId": "races",
            "driverId": "drivers",
            "constructorId": "constructors",
        },
    },
    "standings": {
        "pkey": "standingId",
        "time_col": "date",
        "fkeys": {"raceId": "races", "driverId": "drivers"},
    },
    "constructor_standings": {
        "pkey": "standingId",
        "time_col": "date",
        "fkeys": {"raceId": "races", "constructorId": "constructors"},
    },
}
TASKS = {
    "driver-dnf": ("binary_classification", "drivers", "did_not_finish", "max"),
    "driver-top3": ("binary_classification", "drivers", "qualifying", "max"),
    "driver-position": ("regression", "drivers", "position", "mean"),
    "circuit-dnf": ("regression", "circuits", "not_finished", "sum"),
}
"""Kind, entity, target; how the events of the next 30 days are aggregated."""

POINTS = np.array([25, 18, 15, 12, 10, 8, 6, 4, 2, 1])


def write_formula_one(
    folder: Path, seasons: int, races: int = 17, seed: int = 0
) -> None:
    """Write db/, tasks/ and the manifests; a season has ``races`` races."""
    tables = make_tables(seasons, races, np.random.default_rng(seed))
    (folder / "db").mkdir(parents=True)
    for name, frame in tables.items():
        frame.to_parquet(folder / "db" / f"{name}.parquet")
    _write_manifest(folder, {"name": "formula-one", "tables": TABLES})
    for name, (kind, entity, *_) in TASKS.items():
        _write_task(folder / "tasks" / name, kind, entity, labels_of(tables, name))


def make_tables(
    seasons: int, races: int, rng: np.random.Generator
) -> dict[str, pd.DataFrame]:
    """Return all tables, of races in the same 24 circuits."""
    calendar = _calendar(seasons, races, rng)
    seats = _seats(seasons, rng)
    drivers = 1 + max(int(each.max()) for each in seats)
    starts = _starts(calendar, seats, drivers, rng)
    place = np.arange(CIRCUITS)
    born = FIRST - pd.to_timedelta(rng.integers(20, 36, drivers) * 365, unit="D")
    nations = rng.choice(["GB", "DE", "IT", "FR", "BR", "FI"], drivers)
    return {
        "drivers": pd.DataFrame(
            {"driverId": np.arange(drivers), "dob": born, "nationality": nations}
        ),
        "constructors": pd.DataFrame(
            {
                "constructorId": np.arange(TEAMS),
                "nationality": rng.choice(["GB", "DE", "IT"], TEAMS),
            }
        ),
        "circuits": pd.DataFrame(
            {"circuitId": place, "alt": rng.gamma(2.0, 100.0, CIRCUITS).round()}
        ),
        "races": calendar[["raceId", "circuitId", "year", "round", "date"]],
        **_of_starts(starts),
    }


def _calendar(seasons: int, races: int, rng: np.random.Generator) -> pd.DataFrame:
    """Return the races, two or three weeks apart from March on."""
    year = np.repeat(np.arange(seasons), races)
    number = np.tile(np.arange(races), seasons)
    day = 365 * year + 70 + 15 * number + rng.integers(0, 5, len(year))
    return pd.DataFrame(
        {
            "raceId": np.arange(len(year)),
            "circuitId": rng.integers(0, CIRCUITS, len(year)),
            "year": FIRST.year + year,
            "round": number + 1,
            "date": FIRST + pd.to_timedelta(day, unit="D"),
        }
    )


def _seats(seasons: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the drivers of all seats by season: a fifth are new, some swap teams."""
    seats = [np.arange(TEAMS * PER_TEAM)]
    for _ in range(seasons - 1):
        own = seats[-1].copy()
        swapped = rng.choice(len(own), 6, replace=False)
        own[swapped] = own[rng.permutation(swapped)]
        newcomers = rng.choice(len(own), len(own) // 5, replace=False)
        own[newcomers] = 1 + max(map(np.max, seats)) + np.arange(len(newcomers))
        seats.append(own)
    return seats


def _starts(
    calendar: pd.DataFrame,
    seats: list[np.ndarray],
    drivers: int,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """Return who started in each race, with the grid, the position and the reason."""
    skill, car = rng.normal(0, 1, drivers), rng.normal(0, 1.3, TEAMS)
    failing, rash = rng.normal(-1.6, 0.8, TEAMS), rng.normal(0, 0.5, drivers)
    liking = rng.normal(0, 0.3, (drivers, CIRCUITS))
    team = np.repeat(np.arange(TEAMS), PER_TEAM)
    rows = []
    for race in calendar.itertuples():
        if race.round == 1:
            car = 0.7 * car + rng.normal(0, 0.9, TEAMS)
            failing = -1.6 + 0.6 * (failing + 1.6) + rng.normal(0, 0.6, TEAMS)
        skill += rng.normal(0, 0.08, drivers)
        car += rng.normal(0, 0.08, TEAMS)
        who = seats[race.year - FIRST.year]
        pace = skill[who] + car[team] + liking[who, race.circuitId]
        grid = _ranks(pace + rng.normal(0, 0.7, len(who)))
        race_pace = pace - 0.08 * grid + rng.normal(0, 0.9, len(who))
        chance = 1 / (1 + np.exp(-failing[team] - rash[who]))
        is_out = rng.random(len(who)) < chance
        own = {
            "driverId": who,
            "constructorId": team,
            "raceId": race.raceId,
            "date": race.date,
            "grid": grid,
            "position": _ranks(race_pace - 100 * is_out),
            "is_out": is_out,
        }
        rows.append(pd.DataFrame(own))
    return pd.concat(rows, ignore_index=True)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the place of each value, the greatest first, from 1."""
    return 1 + np.argsort(np.argsort(-values))


def _of_starts(starts: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the results, the qualifyings and both standings, of all starts."""
    ids = np.arange(len(starts))
    points = np.append(POINTS, np.zeros(TEAMS * PER_TEAM))[starts["position"] - 1]
    starts = starts.assign(points=np.where(starts["is_out"], 0, points))
    keys = ["raceId", "driverId", "constructorId", "date"]
    results = starts[[*keys, "grid", "position", "points"]].assign(
        resultId=ids, status=np.where(starts["is_out"], "out", "finished")
    )
    qualifying = starts[keys].assign(qualifyId=ids, position=starts["grid"])
    # on the day before
    qualifying["date"] -= pd.Timedelta(days=1)
    return {
        "results": results,
        "qualifying": qualifying,
        "standings": _standings(starts, "driverId"),
        "constructor_standings": _standings(starts, "constructorId"),
    }


def _standings(starts: pd.DataFrame, key: str) -> pd.DataFrame:
    """Return points and place of a season so far, after each race."""
    races = starts.groupby([key, "raceId", "date"], as_index=False)["points"].sum()
    races = races.sort_values(["raceId", key], ignore_index=True)
    year = races["date"].dt.year
    races["points"] = races.groupby([races[key], year])["points"].cumsum()
    places = races.groupby("raceId")["points"].rank(ascending=False, method="min")
    return races.assign(position=places, standingId=np.arange(len(races)))


def labels_of(tables: Mapping[str, pd.DataFrame], task: str) -> pd.DataFrame:
    """Return the labels of the 30 days after each cutoff, of entities with events."""
    _, entity, target, how = TASKS[task]
    rows = tables["qualifying" if task == "driver-top3" else "results"]
    rows = rows.merge(tables["races"][["raceId", "circuitId"]])
    values = {
        "driver-top3": rows["position"] <= 3,
        "driver-position": rows["position"].astype(float),
    }.get(task, rows.get("status", rows["position"]) == "out")
    number = (rows["date"] - FIRST - pd.Timedelta(days=1)) // STEP
    key = TABLES[entity]["pkey"]
    frame = pd.DataFrame(
        {"date": FIRST + number * STEP, key: rows[key], target: values}
    )
    labels = frame.groupby(["date", key], as_index=False)[target].agg(how)
    return labels.astype({target: int}) if values.dtype == bool else labels


def _write_task(folder: Path, kind: str, entity: str, labels: pd.DataFrame) -> None:
    """Write the labels of the first 70 % of all cutoffs to train on, and so on."""
    folder.mkdir(parents=True)
    times = np.sort(labels["date"].unique())
    ends = times[[len(times) * 7 // 10, len(times) * 85 // 100]]
    part = np.searchsorted(ends, labels["date"].to_numpy(), side="right")
    for number, split in enumerate(("train", "val", "test")):
        labels[part == number].to_parquet(folder / f"{split}.parquet")
    date, key, target = labels.columns
    task = {
        "task_type": kind,
        "entity_table": entity,
        "entity_col": key,
        "time_col": date,
        "target_col": target,
    }
    _write_manifest(folder, task)


def _write_manifest(folder: Path, content: Mapping[str, object]) -> None:
    text = yaml.safe_dump(dict(content), sort_keys=False)
    (folder / "manifest.yaml").write_text(text)
