"""The coreset paper's data in their official formats become a table per party."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scripts.data.prepare_vertical import HOUSE_FEATURES, TIMBRES, main
from tests.support.datasets import run_prepared, table

ROWS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Songs as UCI has them, without a header, and houses."""
    folder = tmp_path / "official"
    folder.mkdir()
    rng = np.random.default_rng(0)
    songs = pd.DataFrame(rng.normal(scale=100.0, size=(ROWS, TIMBRES)).round(5))
    songs.insert(0, "year", 1990 + (songs[0] / 20).round().astype(int))
    # packed, as it is downloaded
    songs.to_csv(folder / "YearPredictionMSD.txt.zip", header=False, index=False)
    houses = pd.DataFrame(rng.integers(1, 9, (ROWS, 18)), columns=list(HOUSE_FEATURES))
    houses.insert(0, "price", rng.integers(10**5, 10**6, ROWS).astype(float))
    houses.insert(0, "date", "20141013T000000")
    houses.insert(0, "id", np.arange(ROWS) + 7_000_000_000)
    houses.to_csv(folder / "kc_house_data.csv", index=False)
    return folder


def test_three_parties_share_the_features_in_order(folder, tmp_path):
    assert main([str(folder), str(tmp_path)]) == 0

    def parties(name: str) -> list[pd.DataFrame]:
        return [table(tmp_path / name, f"party_{k}") for k in (1, 2, 3)]

    years, sales = parties("year-prediction"), parties("kc-house")
    widths = [frame.shape[1] for frame in years]
    assert widths == [32, 31, 31]  # the record; the first has the year, too
    whole = pd.read_csv(folder / "YearPredictionMSD.txt.zip", header=None)
    parts = [frame.drop(columns="record") for frame in years]
    np.testing.assert_array_equal(pd.concat(parts, axis=1), whole)
    assert [frame.shape[1] for frame in sales] == [8, 7, 7]
    assert list(sales[0])[:3] == ["record", "price", "bedrooms"]


def test_what_is_written_trains_on_a_coreset(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main([str(folder), str(output), "--parties", "2"]) == 0
    assert table(output / "kc-house", "party_2").shape == (ROWS, 10)
    report = run_prepared(
        output / "year-prediction", **{"num-epochs": 0, "coreset-size": 30}
    )
    assert report.chosen["coreset"]["size"] == 30
    assert [item.features for item in report.tables] == [45, 45]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("YearPredictionMSD.txt", "2001,1.5,2\n", "has 3 columns of numbers, not 91"),
        ("kc_house_data.csv", "id,date\n1,2\n", "lacks price, bedrooms"),
        ("kc_house_data.csv", "", "cannot be read"),
        ("other.csv", "", "has none of the files YearPredictionMSD.txt,"),
        (None, "", "19 parties cannot share 18 features"),
    ],
    ids=["years", "houses", "empty", "none", "parties"],
)
def test_other_files_are_refused(folder, tmp_path, capsys, file, text, problem):
    if file:
        folder = tmp_path
        (folder / file).write_text(text, encoding="utf-8")
    assert main([str(folder), str(tmp_path / "out"), "--parties", "19"]) == 2
    assert problem in capsys.readouterr().err
