"""The coreset paper's data in their official formats become a table per party."""

import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scripts.data.prepare_vertical import (
    HOUSE_FEATURES,
    TIMBRES,
    main,
    vertical_datasets,
)
from tests.support.prepared import run_prepared, table

ROWS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Songs as UCI has them, without a header, and houses."""
    folder = tmp_path / "official"
    folder.mkdir()
    rng = np.random.default_rng(0)
    songs = pd.DataFrame(rng.normal(scale=100.0, size=(ROWS, TIMBRES)).round(5))
    songs.insert(0, "year", 1990 + (songs[0] / 20).round().astype(int))
    songs.to_csv(folder / "YearPredictionMSD.txt", header=False, index=False)
    houses = pd.DataFrame(rng.integers(1, 9, (ROWS, 18)), columns=list(HOUSE_FEATURES))
    houses.insert(0, "price", rng.integers(10**5, 10**6, ROWS).astype(float))
    houses.insert(0, "date", "20141013T000000")
    houses.insert(0, "id", np.arange(ROWS) + 7_000_000_000)
    houses.to_csv(folder / "kc_house_data.csv", index=False)
    return folder


def test_three_parties_share_the_features_in_order(folder: Path) -> None:
    years, sales = vertical_datasets(folder)
    widths = [frame.shape[1] for frame in years.tables.values()]
    assert widths == [32, 31, 31]  # the record; the first has the year, too
    whole = pd.read_csv(folder / "YearPredictionMSD.txt", header=None)
    parts = [frame.drop(columns="record") for frame in years.tables.values()]
    np.testing.assert_array_equal(pd.concat(parts, axis=1), whole)
    assert [frame.shape[1] for frame in sales.tables.values()] == [8, 7, 7]
    assert list(sales.tables["party_1"])[:3] == ["record", "price", "bedrooms"]


def test_the_archive_as_it_is_downloaded(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    with zipfile.ZipFile(packed / "YearPredictionMSD.txt.zip", "w") as archive:
        archive.write(folder / "YearPredictionMSD.txt", "YearPredictionMSD.txt")
    (found,) = vertical_datasets(packed)
    expected, _ = vertical_datasets(folder)
    for name, frame in expected.tables.items():
        pd.testing.assert_frame_equal(found.tables[name], frame)


def test_what_is_written_trains_on_a_coreset(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert main([str(folder), str(output), "--parties", "2"]) == 0
    assert table(output / "kc-house", "party_2").shape == (ROWS, 10)
    report = run_prepared(
        output / "year-prediction", **{"num-epochs": 0, "coreset-size": 30}
    )
    assert report.chosen["coreset"]["size"] == 30
    assert [own.features for own in report.tables] == [45, 45]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (
            "YearPredictionMSD.txt",
            "2001,1.5,2\n",
            "has 3 columns of numbers, not 91",
        ),
        ("kc_house_data.csv", "id,date\n1,2\n", "lacks price, bedrooms"),
        ("kc_house_data.csv", "", "cannot be read"),
        ("other.csv", "", "has none of the files YearPredictionMSD.txt,"),
    ],
    ids=["years", "houses", "empty", "none"],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, said: str
) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def test_too_many_parties_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), str(tmp_path / "out"), "--parties", "19"]) == 2
    assert "19 parties cannot share 18 features" in capsys.readouterr().err
