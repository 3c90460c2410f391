"""MIMIC-III in its official format becomes the papers' tables."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import skew

from scripts.data.prepare_mimic import FUNCTIONS, ITEMS, PERIODS, main
from tests.support.prepared import run_prepared, table

HEADERS = {
    "PATIENTS": "ROW_ID SUBJECT_ID GENDER DOB DOD DOD_HOSP DOD_SSN EXPIRE_FLAG",
    "ADMISSIONS": "ROW_ID SUBJECT_ID HADM_ID ADMITTIME DISCHTIME DEATHTIME "
    "ADMISSION_TYPE ADMISSION_LOCATION DISCHARGE_LOCATION INSURANCE LANGUAGE RELIGION "
    "MARITAL_STATUS ETHNICITY EDREGTIME EDOUTTIME DIAGNOSIS HOSPITAL_EXPIRE_FLAG "
    "HAS_CHARTEVENTS_DATA",
    "ICUSTAYS": "ROW_ID SUBJECT_ID HADM_ID ICUSTAY_ID DBSOURCE FIRST_CAREUNIT "
    "LAST_CAREUNIT FIRST_WARDID LAST_WARDID INTIME OUTTIME LOS",
    "DIAGNOSES_ICD": "ROW_ID SUBJECT_ID HADM_ID SEQ_NUM ICD9_CODE",
    "CHARTEVENTS": "ROW_ID SUBJECT_ID HADM_ID ICUSTAY_ID ITEMID CHARTTIME STORETIME "
    "CGID VALUE VALUENUM VALUEUOM WARNING ERROR RESULTSTATUS STOPPED",
}
START = "2150-03-01 00:00:00"


def at(hour: float) -> str:
    """So many hours after the start of every stay."""
    day, rest = divmod(hour, 24)
    return f"2150-03-{int(day) + 1:02d} {int(rest):02d}:{int(rest % 1 * 60):02d}:00"


def patient(number: int, gender: str, born: str = "2100-01-01 00:00:00") -> dict:
    return {"SUBJECT_ID": number, "GENDER": gender, "DOB": born, "EXPIRE_FLAG": 0}


def admission(number: int, death: str = "", ethnicity: str = "WHITE") -> dict:
    # the official file quotes texts, some of which have commas
    return {
        "SUBJECT_ID": number % 100,
        "HADM_ID": number,
        "DEATHTIME": death,
        "ETHNICITY": ethnicity,
        "DIAGNOSIS": 'PNEUMONIA, "R/O"',
    }


def stay(number: int, days: float, ward: int = 7) -> dict:
    return {
        "SUBJECT_ID": number % 100,
        "HADM_ID": 100 + number % 100,
        "ICUSTAY_ID": number,
        "DBSOURCE": "metavision",
        "LAST_CAREUNIT": "MICU",
        "FIRST_CAREUNIT": "MICU",
        "FIRST_WARDID": 7,
        "LAST_WARDID": ward,
        "INTIME": START,
        "OUTTIME": at(24 * days),
        "LOS": days,
    }


def event(stay: int, item: int, hour: float, value: object, error: str = "") -> dict:
    number = value if isinstance(value, int | float) else ""
    return {
        "ICUSTAY_ID": stay,
        "ITEMID": item,
        "CHARTTIME": at(hour),
        "VALUE": value,
        "VALUENUM": number,
        "ERROR": error,
    }


PATIENTS = [
    patient(1, "M"),
    patient(2, "F", "1850-01-01 00:00:00"),
    patient(3, "M"),
    patient(4, "F", "2149-01-01 00:00:00"),
    patient(5, "M"),
]
ADMISSIONS = [
    admission(101),
    # dies 33.5 hours after the stay begins
    admission(102, at(33.5), "ASIAN, OTHER"),
    admission(103),
    admission(104),
    admission(105),
]
# 3 is moved to another ward, 4 is a child, 5 comes back in one admission
STAYS = [stay(201, 0.5), stay(202, 1.5), stay(203, 1.0, ward=9), stay(204, 1.0)]
STAYS += [stay(205, 1.0), stay(305, 1.0)]
PULSE = [(0.5, 80), (2.0, 90), (6.5, 120), (7.0, 100), (11.0, 70), (13.0, 999)]
EVENTS = [
    *(event(201, 220045, hour, value) for hour, value in PULSE),
    # Fahrenheit and Celsius, an error, an item of no variable, another stay
    event(201, 223761, 1.0, 98.6),
    event(201, 223762, 3.0, 39.0),
    event(201, 223762, 4.0, 55.0, error="1"),
    event(201, 226253, 2.0, 1.0),
    event(203, 220045, 2.0, 60),
    event(202, 223951, 6.25, "Normal <3 Seconds"),
    event(202, 223951, 8.0, "Abnormal >3 Seconds"),
    event(202, 223835, 6.0, 50),
]
CODES = [(101, "4019"), (101, "V100"), (102, "4019"), (104, "")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "mimic")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes, once: its SQL is large."""
    folder = tmp_path_factory.mktemp("mimic")
    assert main([str(write_files(folder / "in")), str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def events(output: Path) -> pd.DataFrame:
    return table(output, "events").set_index(["icustay_id", "hour"])


def write_files(place: Path) -> Path:
    place.mkdir()
    diagnoses = [{"HADM_ID": number, "ICD9_CODE": code} for number, code in CODES]
    files = {
        "PATIENTS": PATIENTS,
        "ADMISSIONS": ADMISSIONS,
        "ICUSTAYS": STAYS,
        "DIAGNOSES_ICD": diagnoses,
        "CHARTEVENTS": EVENTS,
    }
    for name, rows in files.items():
        write_csv(place, name, rows)
    return place


def write_csv(place: Path, name: str, rows: list[dict]) -> None:
    # the largest one packed, as it is handed out
    packed = name == "CHARTEVENTS"
    path = place / f"{name}.csv{'.gz' if packed else ''}"
    with gzip.open(path, "wt") if packed else path.open("w") as file:
        columns = HEADERS[name].split()
        writer = csv.DictWriter(file, columns, "", quoting=csv.QUOTE_NONNUMERIC)
        writer.writeheader()
        writer.writerows({"ROW_ID": k, **row} for k, row in enumerate(rows))


def test_hours_and_labels(output: Path, events: pd.DataFrame) -> None:
    # 201 lasts 12 hours; 202 lasts 36, but the patient dies after 33.5; its first value
    # is after 6 hours
    hours = [(201, hour) for hour in range(5, 13)]
    assert list(events.index) == hours + [(202, hour) for hour in range(7, 34)]
    label = events["label"]
    assert not label[201].any()
    # from 9 to 33.5 it is more than a day, from 10 it is less
    assert label[202].to_dict() == {hour: hour >= 10 for hour in range(7, 34)}
    stays = table(output, "stays")
    assert stays["icustay_id"].tolist() == [201, 202]
    assert stays["age"].tolist() == [pytest.approx(50.16, abs=0.01), 90.0]


def expected(hour: int, period: str) -> list[float]:
    """The functions of the pulse until an hour, the obvious way."""
    seen = [(t, x) for t, x in PULSE if t <= hour]
    start, stop = seen[0][0], seen[-1][0]
    kind, _, percent = period.partition("_")
    span = (stop - start) * (int(percent) / 100 if percent else 1.0)
    inside = {
        "all": lambda _: True,
        "first": lambda t: t <= start + span + 1e-6,
        "last": lambda t: t >= stop - span - 1e-6,
    }[kind]
    x = np.array([value for t, value in seen if inside(t)], float)
    skewness = skew(x) if x.std() > 0 else 0.0
    return [x.min(), x.max(), x.mean(), x.std(), skewness, len(x)]


@pytest.mark.parametrize("period", list(PERIODS))
def test_functions_of_a_variable(events: pd.DataFrame, period: str) -> None:
    names = [f"heart_rate_{period}_{function}" for function in FUNCTIONS]
    for hour in range(5, 13):
        found = events.loc[(201, hour), names].to_numpy(float)
        np.testing.assert_allclose(found, expected(hour, period), rtol=1e-6, atol=1e-6)


def test_units_and_what_is_no_value(events: pd.DataFrame) -> None:
    first = events.loc[(201, 5)]
    assert first["temperature_all_least"] == pytest.approx(37.0)
    assert first["temperature_all_largest"] == pytest.approx(39.0)
    assert first["temperature_all_count"] == 2.0
    second = events.loc[(202, 9)]
    assert second["capillary_refill_all_mean"] == 0.5
    assert events.loc[(202, 7), "capillary_refill_all_mean"] == 0.0
    assert second["inspired_oxygen_all_mean"] == 0.5
    # never measured
    assert np.isnan(second["heart_rate_all_mean"])
    assert events.shape[1] == 1 + len(ITEMS) * len(PERIODS) * len(FUNCTIONS) == 1 + 714


@pytest.mark.slow
def test_the_chunks_do_not_matter(
    events: pd.DataFrame,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(folder), str(tmp_path), "--stays", "3"]) == 0
    assert "joined: 35 rows" in capsys.readouterr().out
    parts = table(tmp_path, "events").set_index(["icustay_id", "hour"])
    pd.testing.assert_frame_equal(parts, events)


def test_what_is_written_can_be_trained_on(output: Path) -> None:
    diagnoses = table(output, "diagnoses").set_index("hadm_id").sort_index()
    assert diagnoses.columns.tolist() == ["diagnosis_4019", "diagnosis_V100"]
    assert diagnoses.values.tolist() == [[True, True], [True, False], [False, False]]
    assert table(output, "admissions")["ethnicity"].tolist()[1] == "ASIAN, OTHER"
    assert len(table(output, "patients")) == 5
    report = run_prepared(output, **{"test-fraction": 0.0})
    assert report.joined_rows_train == 35
    assert [item.table for item in report.tables] == list("espad")
    assert report.final_train["auc"] > 0.95


def test_other_files_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "ADMISSIONS.csv"
    whole = path.read_text()
    path.write_text(whole.replace("DEATHTIME", "DIED"))
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "ADMISSIONS.csv lacks deathtime; it has row_id" in capsys.readouterr().err
    path.write_text(whole.replace(at(33.5), "tomorrow"))
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "tomorrow" in capsys.readouterr().err
    path.unlink()
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "has no ADMISSIONS.csv or ADMISSIONS.csv.gz" in capsys.readouterr().err
    path.write_text(whole)
    write_csv(folder, "CHARTEVENTS", [])
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "no stay has an event" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "out"), "--stays", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
