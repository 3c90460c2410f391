"""MovieLens in its official formats becomes the papers' tables."""

import shutil
from pathlib import Path

import pytest

from scripts.data.prepare_movielens import main, read_movielens
from tests.support.datasets import FOLDER, is_absent, run_prepared, table
from tests.support.files import case_table

CASES = case_table(__file__)
SMALL = CASES["small"]
LARGE = CASES["large"]


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin-1")
    return folder


def packed(folder: Path, files: dict[str, str]) -> Path:
    write(folder / "whole" / "unpacked", {"README": "read me", **files})
    return Path(shutil.make_archive(str(folder / "archive"), "zip", folder / "whole"))


def test_a_movie_has_a_row_per_genre(tmp_path):
    small = read_movielens(write(tmp_path / "ml-100k", SMALL))
    large = read_movielens(packed(tmp_path, LARGE))
    comedies = [[10, 2001, "Comedy"], [10, 2001, "Romance"]]
    for frames, third in ((small, [20, 0, "unknown"]), (large, [20, 1995, "Crime"])):
        movies = frames["movies"].sort_values(["movie_id", "genre"])
        assert movies.fillna(0).values.tolist() == [*comedies, third]
    ratings = [[1, 10, 5, 881250949], [2, 10, 3, 891717742], [2, 20, 1, 878887116]]
    assert small["ratings"].values.tolist() == ratings
    users = [[1, 24, True, "technician"], [2, 53, False, "other"]]
    assert small["users"].values.tolist() == users
    # occupations are numbers without an order
    assert large["users"].values.tolist() == [[1, 24, True, "10"], [2, 56, False, "16"]]


# the only year of the small one is constant; its titles are the same words, the year
# apart, as the é is read
@pytest.mark.parametrize(("files", "years", "titles"), [(SMALL, 0, 1), (LARGE, 1, 2)])
def test_what_is_written_can_be_trained_on(tmp_path, files, years, titles, capsys):
    folder = write(tmp_path / "archive", files)
    output = tmp_path / "my output"
    assert main([str(folder), str(output)]) == 0
    assert "joined: 5 rows" in capsys.readouterr().out
    report = run_prepared(output, **{"test-fraction": 0.0})
    assert report.joined_rows_train == 5
    # time; year, title and three genres; age, sex and two occupations
    widths = {item.table: item.features for item in report.tables}
    assert widths == {"r": 1, "m": years + 32 + 3, "u": 4}
    words = table(output, "movies")["title_words"].map(tuple)
    assert words.nunique() == titles
    assert [sum(x * x for x in row) for row in words] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["message"])
def test_other_files_are_refused(tmp_path, case, capsys):
    merged = {name: text for name, text in {**SMALL, **case["files"]}.items() if text}
    assert main([str(write(tmp_path / "archive", merged)), str(tmp_path / "out")]) == 2
    assert case["message"] in capsys.readouterr().err


def test_other_archives_are_refused(tmp_path, capsys):
    other = packed(tmp_path, {"links.csv": "movieId,imdbId\n"})
    text = tmp_path / "a.txt"
    text.write_text("x")
    neither = "neither a folder nor a .zip"
    problems = {other: "is not MovieLens-100K or -1M", text: neither}
    for path, problem in {**problems, tmp_path / "none": neither}.items():
        assert main([str(path), str(tmp_path / "out")]) == 2
        assert problem in capsys.readouterr().err


@is_absent
def test_the_official_files_have_the_papers_sizes():
    frames = read_movielens(FOLDER)
    sizes = {name: len(frame) for name, frame in frames.items()}
    assert sizes == {"ratings": 100_000, "movies": 2_893, "users": 943}
    assert frames["movies"]["genre"].nunique() == 19
    assert frames["users"]["occupation"].nunique() == 21
