"""Write the database of each organisation: OMOP CDM v5.4 in SQLite, all of it made up.

    python make_databases.py

Of each table there are the columns that OMOP requires, and those that the example
reads. Every database numbers its people by itself (`person_id`); what they share is
`person_source_value`, here the number of a person's health card.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

FOLDER = Path(__file__).resolve().parent
MALE, FEMALE = 8507, 8532
# the last: emergency room, then inpatient
INPATIENT, OUTPATIENT, EMERGENCY = 9201, 9202, 262
HOSPITAL, LAB, REGISTRY = 32817, 32856, 32879  # from a health record, a lab, a registry
CONDITIONS = {  # the share that has it, and its part in the risk
    201826: (0.2, 0.3),  # type 2 diabetes
    316139: (0.15, 1.2),  # heart failure
    255573: (0.15, 0.8),  # obstructive lung disease
    320128: (0.4, 0.1),  # hypertension
    313217: (0.15, 0.3),  # atrial fibrillation
    46271022: (0.12, 0.5),  # chronic kidney disease
    317009: (0.1, 0.0),  # asthma
    440383: (0.2, 0.2),  # depression
    4182210: (0.1, 0.4),  # dementia
    443454: (0.1, 0.3),  # stroke
    443392: (0.12, 0.7),  # cancer
    433736: (0.3, 0.0),  # obesity
}
TESTS = {  # unit, mean, change by illness, noise
    3016723: (8840, 1.0, 0.2, 0.15),  # creatinine, mg/dL
    3020460: (8751, 30.0, 20.0, 10.0),  # C-reactive protein, mg/L
    3000963: (8713, 13.5, -0.9, 0.8),  # haemoglobin, g/dL
    3019550: (8753, 139.0, -1.0, 3.0),  # sodium, mmol/L
    3023103: (8753, 4.2, 0.1, 0.4),  # potassium, mmol/L
    3013682: (8840, 16.0, 4.0, 4.0),  # urea nitrogen, mg/dL
    3004501: (8840, 110.0, 10.0, 25.0),  # glucose, mg/dL
    3024561: (8713, 3.9, -0.2, 0.4),  # albumin, g/dL
    3000905: (8848, 8.5, 2.0, 2.0),  # leukocytes, 1000/uL
    3024929: (8848, 250.0, 0.0, 60.0),  # platelets, 1000/uL
}


def make(folder: Path, patients: tuple[int, int] = (1200, 800)) -> None:
    """Write the databases, with ``patients`` of both hospitals and some others."""
    random, count = np.random.default_rng(0), sum(patients) * 6 // 5
    cards = random.choice(10**6, count, replace=False)
    people = pd.DataFrame(
        {
            "person_id": np.arange(count),
            "gender_concept_id": random.choice([MALE, FEMALE], count),
            "year_of_birth": random.integers(1930, 2006, count),
            "race_concept_id": 0,  # not recorded
            "ethnicity_concept_id": 0,
            "person_source_value": [f"C{number:06}" for number in cards],
        }
    )
    conditions, (shares, risks) = (
        np.array(list(CONDITIONS)),
        np.transpose([*CONDITIONS.values()]),
    )
    is_ill = random.random((count, len(shares))) < shares
    risk = is_ill @ risks + 0.02 * (1970 - people["year_of_birth"].to_numpy())
    visits = draw_visits(random, risk)
    tests = draw_tests(random, visits)
    # up to three records of each condition that a person has
    person, which = np.repeat(
        np.argwhere(is_ill), random.integers(1, 4, is_ill.sum()), 0
    ).T
    diagnoses = pd.DataFrame(
        {"person_id": person, "condition_concept_id": conditions[which]}
    )
    diagnoses["condition_start_date"] = random.integers(-3650, 366, len(person))
    last = visits[visits["illness"].notna()].drop_duplicates("person_id", keep="last")
    deaths = last.rename(columns={"visit_end_date": "death_date"})[
        ["person_id", "death_date"]
    ]
    deaths = deaths.sample(frac=0.02, random_state=0)
    hospital = {"visit_occurrence": visits.drop(columns="illness"), "death": deaths}
    a, b = patients
    for site, rows, source, tables in (
        ("hospital-a", people[:a], HOSPITAL, hospital),
        ("hospital-b", people[a : a + b], HOSPITAL, hospital),
        ("lab", people, LAB, {"measurement": tests}),
        ("registry", people, REGISTRY, {"condition_occurrence": diagnoses}),
    ):
        numbers = random.permutation(len(rows)) + 1
        write(folder / site / "omop.db", rows.assign(number=numbers), source, tables)


def draw_visits(random: np.random.Generator, risk: np.ndarray) -> pd.DataFrame:
    """Return everybody's visits in 2024: one as an outpatient, and up to five stays."""
    people, start = np.arange(len(risk)), random.integers(0, 366, len(risk))
    columns = {"person_id": people, "visit_concept_id": OUTPATIENT}
    visits = [
        pd.DataFrame({**columns, "visit_start_date": start, "visit_end_date": start})
    ]
    start = random.integers(0, 350, len(risk))
    for earlier in range(5):
        size = len(people)
        kind = random.choice([INPATIENT, EMERGENCY], size, p=[0.6, 0.4])
        illness = random.normal(size=size)
        end = start + 1 + random.poisson(np.exp(1 + 0.3 * illness))
        columns = {
            "person_id": people,
            "visit_concept_id": kind,
            "visit_start_date": start,
        }
        visits.append(
            pd.DataFrame({**columns, "visit_end_date": end, "illness": illness})
        )
        logit = (
            risk[people]
            + 1.4 * illness
            + 0.6 * (kind == EMERGENCY)
            + 0.3 * earlier
            - 3.1
        )
        is_back = random.random(size) < 1 / (1 + np.exp(-logit))
        wait = np.where(
            is_back, random.integers(1, 31, size), random.integers(60, 200, size)
        )
        comes = (is_back | (random.random(size) < 0.15)) & (end + wait < 366)
        people, start = people[comes], (end + wait)[comes]
    table = pd.concat(visits)
    return table[table["visit_end_date"] < 366]


def draw_tests(random: np.random.Generator, visits: pd.DataFrame) -> pd.DataFrame:
    """Return the blood tests on admission, of most stays; some were not done."""
    sampled = visits[visits["illness"].notna() & (random.random(len(visits)) < 0.85)]
    tests = []
    for concept, (unit, mean, change, noise) in TESTS.items():
        rows = sampled[random.random(len(sampled)) < 0.95]
        value = mean + change * rows["illness"] + noise * random.normal(size=len(rows))
        table = pd.DataFrame(
            {"person_id": rows["person_id"], "measurement_concept_id": concept}
        )
        table["measurement_date"] = rows["visit_start_date"]
        table["value_as_number"] = value.clip(lower=0.1).round(2)
        tests.append(table.assign(unit_concept_id=unit))
    return pd.concat(tests).sort_values(["measurement_date", "person_id"])


def write(
    file: Path, people: pd.DataFrame, source: int, tables: dict[str, pd.DataFrame]
) -> None:
    """Write a database with these people's rows, each under its own ``number``."""
    file.unlink(missing_ok=True)
    numbers = people.set_index("person_id")["number"]
    with closing(sqlite3.connect(file)) as database:
        for name, table in {"person": people.drop(columns="number"), **tables}.items():
            rows = table[table["person_id"].isin(numbers.index)].copy()
            rows["person_id"] = rows["person_id"].map(numbers)
            dates = [column for column in rows if column.endswith("_date")]
            for column in dates:  # days since the beginning of 2024
                rows[column] = (
                    np.datetime64("2024-01-01") + rows[column].to_numpy()
                ).astype(str)
            if name != "person":
                rows[f"{name.split('_')[0]}_type_concept_id"] = source
            if name not in ("person", "death"):
                rows.insert(0, f"{name}_id", np.arange(len(rows)) + 1)
            rows.to_sql(name, database, index=False, dtype=dict.fromkeys(dates, "DATE"))


if __name__ == "__main__":
    make(FOLDER)
