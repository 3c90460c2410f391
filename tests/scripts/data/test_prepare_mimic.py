"""MIMIC-III in its official format becomes the papers' tables."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import skew

from scripts.data.prepare_mimic import main
from tests.support.datasets import prepared_once, run_prepared, table
from tests.support.files import ROOT, case_table

PERIODS = ["all", *(f"{end}_{p}" for end in ("first", "last") for p in (10, 25, 50))]
FUNCTIONS = ["least", "largest", "mean", "deviation", "skewness", "count"]
PULSE = [(0.5, 80), (2.0, 90), (6.5, 120), (7.0, 100), (11.0, 70), (13.0, 999)]
START = pd.Timestamp("2150-03-01")


def at(hour: float) -> str:
    """So many hours after the start of every stay."""
    return str(START + pd.Timedelta(hours=hour))


EVENTS = pd.DataFrame(
    [
        *((201, 220045, hour, value, "") for hour, value in PULSE),
        # Fahrenheit and Celsius, an error, an item of no variable, another stay
        (201, 223761, 1.0, 98.6, ""),
        (201, 223762, 3.0, 39.0, ""),
        (201, 223762, 4.0, 55.0, "1"),
        (201, 226253, 2.0, 1.0, ""),
        (203, 220045, 2.0, 60, ""),
        (202, 223951, 6.25, "Normal <3 Seconds", ""),
        (202, 223951, 8.0, "Abnormal >3 Seconds", ""),
        (202, 223835, 6.0, 50, ""),
    ],
    columns=["ICUSTAY_ID", "ITEMID", "CHARTTIME", "VALUE", "ERROR"],
)
EVENTS["CHARTTIME"] = EVENTS["CHARTTIME"].map(at)
EVENTS["VALUENUM"] = pd.to_numeric(EVENTS["VALUE"], errors="coerce")


def write_files(folder: Path, events: pd.DataFrame = EVENTS) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in case_table(__file__)["files"].items():
        (folder / f"{name}.csv").write_text(text)
    # the largest one packed, as it is handed out
    events.to_csv(folder / "CHARTEVENTS.csv.gz", index=False, quoting=csv.QUOTE_ALL)
    return folder


output = prepared_once(main, write_files)


@pytest.fixture(scope="module")
def events(output: Path) -> pd.DataFrame:
    return table(output, "events").set_index(["icustay_id", "hour"])


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


def test_functions_of_a_variable(events: pd.DataFrame) -> None:
    for hour, period in product(range(5, 13), PERIODS):
        names = [f"heart_rate_{period}_{function}" for function in FUNCTIONS]
        row = events.loc[(201, hour), names].to_numpy(float)
        np.testing.assert_allclose(row, expected(hour, period), rtol=1e-6, atol=1e-6)


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
    items = pd.read_csv(ROOT / "scripts" / "data" / "mimic_items.csv")
    columns = product(items["variable"].unique(), PERIODS, FUNCTIONS)
    assert set(events) == {"label", *map("_".join, columns)}
    assert events.shape[1] == 1 + 714


@pytest.mark.slow
def test_the_chunks_do_not_matter(events: pd.DataFrame, tmp_path: Path) -> None:
    folder, output = write_files(tmp_path / "mimic"), tmp_path / "out"
    assert main([str(folder), str(output), "--stays", "3"]) == 0
    parts = table(output, "events").set_index(["icustay_id", "hour"])
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


def test_other_files_are_refused(tmp_path, capsys):
    folder = write_files(tmp_path / "mimic")

    def refusal(*options: str) -> str:
        assert main([str(folder), str(tmp_path / "out"), *options]) == 2
        return capsys.readouterr().err

    path = folder / "ADMISSIONS.csv"
    whole = path.read_text()
    path.write_text(whole.replace("DEATHTIME", "DIED"))
    assert "ADMISSIONS.csv lacks deathtime; it has subject_id" in refusal()
    path.write_text(whole.replace(at(33.5), "tomorrow"))
    assert "tomorrow" in refusal()
    path.unlink()
    assert "has no ADMISSIONS.csv or ADMISSIONS.csv.gz" in refusal()
    write_files(folder, EVENTS[:0])
    assert "no stay has an event" in refusal()
    assert "at least 1" in refusal("--stays", "0")
