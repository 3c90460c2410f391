"""Write the tables of two hospitals and a lab, in OMOP's schema (v5.4), all made up.

    python make_data.py [PATIENTS]

A folder of Parquet files for each organisation. Of every table there are the columns
that the example reads. Each organisation numbers its people by itself (`person_id`);
what they share is `person_source_value`, here the number of a health card.

Who comes back within 30 days of a discharge depends on the past: on how often a person
came by the emergency room in the year before, on a weak heart, on the kidneys, and on
how far the illness of this stay has gone down, which only the last blood samples show.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

FOLDER = Path(__file__).resolve().parent
FIRST = np.datetime64("2021-01-01")
DAYS = 1095  # 2021 to 2023
INPATIENT, OUTPATIENT, EMERGENCY = 9201, 9202, 262
SHARES = {  # of the people who ever have it
    316139: 0.15,  # heart failure
    201826: 0.2,  # diabetes
    255573: 0.15,  # obstructive lung disease
    443392: 0.1,  # cancer
}
TESTS = {  # mean, change by acute illness, change by the kidneys, noise
    3016723: (1.0, 0.05, 0.3, 0.1),  # creatinine, mg/dL
    3020460: (30.0, 22.0, 0.0, 7.0),  # C-reactive protein, mg/L
    3000963: (13.5, -0.5, -0.4, 0.7),  # haemoglobin, g/dL
    3024561: (3.9, -0.2, 0.0, 0.25),  # albumin, g/dL
}
MOST_STAYS = 8


def make(folder: Path, patients: int = 2500) -> None:
    """Write the tables: three fifths of the patients are hospital A's."""
    random = np.random.default_rng(0)
    is_ill = random.random((patients, len(SHARES))) < [*SHARES.values()]
    people = pd.DataFrame(
        {
            "gender_concept_id": random.choice([8507, 8532], patients),
            "year_of_birth": random.integers(1930, 2003, patients),
            "card": [f"C{n:07}" for n in random.choice(10**7, patients, replace=False)],
            "kidneys": random.normal(size=patients),
            "heart": is_ill[:, 0],
        }
    )
    stays = draw_stays(random, people)
    visits = pd.concat([stays, draw_outpatients(random, patients)])
    samples = draw_samples(random, people, stays)
    conditions = draw_conditions(random, is_ill, stays)
    is_followed = stays["end"].between(365, DAYS - 31)
    cohort = stays[is_followed & (random.random(len(stays)) < 0.9)]
    split = patients * 3 // 5
    for site, members in (
        ("hospital-a", np.arange(split)),
        ("hospital-b", np.arange(split, patients)),
        ("lab", np.arange(patients)),
    ):
        numbers = pd.Series(random.permutation(len(members)) + 1, members)
        tables = {"person": person_table(people.loc[members], numbers)}
        if site == "lab":
            tables["measurement"] = measurement_table(samples, numbers)
        else:
            tables["visit_occurrence"] = visit_table(visits, numbers)
            tables["condition_occurrence"] = condition_table(conditions, numbers)
            tables["cohort"] = cohort_table(cohort, numbers)
        (folder / site).mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            table.to_parquet(folder / site / f"{name}.parquet", index=False)


def draw_stays(random: np.random.Generator, people: pd.DataFrame) -> pd.DataFrame:
    """Return the stays of all: who, when, how ill on arrival and at discharge."""
    who, start = np.arange(len(people)), random.integers(0, 800, len(people))
    starts = np.full((len(people), MOST_STAYS), -(10**6))  # by the emergency room
    stays = []
    for number in range(MOST_STAYS):
        size = len(who)
        kind = random.choice([INPATIENT, EMERGENCY], size, p=[0.6, 0.4])
        arrival, rest = random.normal(size=size), random.normal(size=size)
        end = start + 2 + random.poisson(np.exp(1.2 + 0.3 * arrival))
        rows = {"who": who, "start": start, "end": end, "kind": kind}
        stays.append(pd.DataFrame({**rows, "arrival": arrival, "rest": rest}))
        starts[who[kind == EMERGENCY], number] = start[kind == EMERGENCY]
        emergencies = (starts[who] >= (end - 365)[:, None]).sum(axis=1)
        logit = -2.9 + 1.1 * rest + 0.55 * emergencies + 0.9 * people["heart"][who]
        logit += 0.5 * people["kidneys"][who]
        logit += 0.015 * (1970 - people["year_of_birth"][who])
        is_back = random.random(size) < 1 / (1 + np.exp(-logit))
        wait = np.where(
            is_back, random.integers(1, 31, size), 31 + random.exponential(170, size)
        )
        start = end + wait.astype(int)
        comes = start < DAYS - 40
        who, start = who[comes], start[comes]
    return pd.concat(stays, ignore_index=True)


def draw_outpatients(random: np.random.Generator, patients: int) -> pd.DataFrame:
    """Return visits of a day, about three a year."""
    who = np.repeat(np.arange(patients), random.poisson(9.0, patients))
    day = random.integers(0, DAYS, len(who))
    return pd.DataFrame({"who": who, "start": day, "end": day, "kind": OUTPATIENT})


def draw_samples(
    random: np.random.Generator, people: pd.DataFrame, stays: pd.DataFrame
) -> pd.DataFrame:
    """Return blood samples: on arrival, on the day before discharge, and in between.

    ``illness`` is how ill the person was then.
    """
    arrival = stays[["who"]].assign(day=stays["start"], illness=stays["arrival"] + 1)
    rest = stays[["who"]].assign(day=stays["end"] - 1, illness=stays["rest"])
    who = np.repeat(np.arange(len(people)), random.poisson(6.0, len(people)))
    calm = pd.DataFrame({"who": who, "day": random.integers(0, DAYS, len(who))})
    samples = pd.concat([arrival, rest, calm.assign(illness=-1.0)], ignore_index=True)
    samples = samples[random.random(len(samples)) < 0.9]
    # of a person and a day one sample
    samples = samples.drop_duplicates(["who", "day"], keep="last")
    kidneys = people["kidneys"].to_numpy()[samples["who"]]
    tests = []
    for concept, (mean, acute, chronic, noise) in TESTS.items():
        value = mean + acute * samples["illness"] + chronic * kidneys
        value += noise * random.normal(size=len(samples))
        tests.append(
            samples[["who", "day"]].assign(
                concept=concept, value=value.clip(lower=0.1).round(2)
            )
        )
    table = pd.concat(tests)
    return table[random.random(len(table)) < 0.95]


def draw_conditions(
    random: np.random.Generator, is_ill: np.ndarray, stays: pd.DataFrame
) -> pd.DataFrame:
    """Return diagnoses: the chronic ones at some time, and again in later stays."""
    who, which = np.argwhere(is_ill).T
    first = pd.DataFrame(
        {"who": who, "which": which, "day": random.integers(-700, 700, len(who))}
    )
    again = stays[["who", "start"]].merge(first, on="who")
    again = again[(again["start"] > again["day"]) & (random.random(len(again)) < 0.8)]
    again = again.assign(day=again["start"])[["who", "which", "day"]]
    table = pd.concat([first, again], ignore_index=True)
    return table.assign(concept=np.array([*SHARES])[table["which"]])


def person_table(people: pd.DataFrame, numbers: pd.Series) -> pd.DataFrame:
    """Return OMOP's person."""
    return pd.DataFrame(
        {
            "person_id": numbers,
            "gender_concept_id": people["gender_concept_id"],
            "year_of_birth": people["year_of_birth"],
            "person_source_value": people["card"],
        }
    ).sort_values("person_id")


def visit_table(visits: pd.DataFrame, numbers: pd.Series) -> pd.DataFrame:
    """Return OMOP's visit_occurrence."""
    return rows_of(visits, numbers, "start").assign(
        visit_concept_id=lambda rows: rows.pop("kind"),
        visit_start_date=lambda rows: date(rows.pop("start")),
        visit_end_date=lambda rows: date(rows.pop("end")),
    )[["person_id", "visit_concept_id", "visit_start_date", "visit_end_date"]]


def condition_table(conditions: pd.DataFrame, numbers: pd.Series) -> pd.DataFrame:
    """Return OMOP's condition_occurrence."""
    rows = rows_of(conditions, numbers, "day")
    return pd.DataFrame(
        {
            "person_id": rows["person_id"],
            "condition_concept_id": rows["concept"],
            "condition_start_date": date(rows["day"]),
        }
    )


def measurement_table(samples: pd.DataFrame, numbers: pd.Series) -> pd.DataFrame:
    """Return OMOP's measurement."""
    rows = rows_of(samples, numbers, "day")
    return pd.DataFrame(
        {
            "person_id": rows["person_id"],
            "measurement_concept_id": rows["concept"],
            "measurement_date": date(rows["day"]),
            "value_as_number": rows["value"],
        }
    )


def cohort_table(cohort: pd.DataFrame, numbers: pd.Series) -> pd.DataFrame:
    """Return OMOP's cohort: the index date is that of a discharge."""
    rows = rows_of(cohort, numbers, "end")
    return pd.DataFrame(
        {
            "cohort_definition_id": 1,
            "subject_id": rows["person_id"],
            "cohort_start_date": date(rows["end"]),
            "cohort_end_date": date(rows["end"] + 30),
        }
    )


def rows_of(table: pd.DataFrame, numbers: pd.Series, time: str) -> pd.DataFrame:
    """Return the rows of an organisation's people, by its own numbers and by time."""
    rows = table[table["who"].isin(numbers.index)]
    rows = rows.assign(person_id=numbers.loc[rows["who"]].to_numpy())
    return rows.sort_values([time, "person_id"]).drop(columns="who")


def date(days: pd.Series) -> pd.Series:
    """Return days since the first as dates without a time."""
    dates = (FIRST + days.to_numpy()).astype("datetime64[D]").astype(object)
    return pd.Series(dates, days.index)


if __name__ == "__main__":
    make(FOLDER, *map(int, sys.argv[1:]))
