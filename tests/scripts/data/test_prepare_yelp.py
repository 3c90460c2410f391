"""The Yelp Open Dataset in its official format becomes the papers' tables."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scripts.data.prepare_yelp import COMPLIMENTS, WIDTH, main
from tests.support.prepared import run_prepared, table

CATEGORIES = ("Restaurants, Pizza", "Hair Salons", "Fast Food, restaurants", None)
# b0 and b2 are open restaurants, b4 is one that has closed
BUSINESSES = [
    {
        "business_id": f"b{k}",
        "name": 'A "B"',
        "stars": 3.5 + k / 2,
        "review_count": 5 + k,
        "is_open": int(k != 4),
        "attributes": {"ByAppointmentOnly": "True"} if k else None,
        "categories": CATEGORIES[k % 4],
    }
    for k in range(5)
]
USERS = [
    {
        "user_id": f"u{k}",
        "review_count": 3 * k,
        "yelping_since": f"201{k}-02-03 04:05:06",
        "useful": k,
        "funny": 1 - k,
        "cool": k * k,
        "elite": "2015,2016",
        "fans": k,
        "average_stars": 4.0 - k,
        "friends": ["None", "a, b, c", "a, b"][k],
        **{f"compliment_{name}": k + n for n, name in enumerate(COMPLIMENTS)},
    }
    for k in range(3)
]
# u2 has only been to a hair salon; one review has a line break and a quote
REVIEWS = [
    {
        "review_id": f"r{k}",
        "user_id": f"u{user}",
        "business_id": f"b{business}",
        "stars": float(1 + k % 5),
        "useful": k,
        "funny": k % 2,
        "cool": 3 - k,
        "text": text,
        "date": "2018-07-07 22:09:11",
    }
    for k, (user, business, text) in enumerate(
        [
            (0, 0, "Good pizza, good wine"),
            (1, 1, "x"),
            (1, 2, 'So "so"\nreally'),
            (2, 1, "x"),
            (0, 2, ""),
            (1, 4, "x"),
            (1, 0, "GOOD wine"),
        ]
    )
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "yelp"
    place.mkdir()
    files = {"business": BUSINESSES, "user": USERS, "review": REVIEWS}
    for name, rows in files.items():
        path = place / f"yelp_academic_dataset_{name}.json"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


KEPT = ["r0", "r2", "r4", "r6"]


def test_keeps_reviews_of_open_restaurants_and_their_users(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main([str(folder), str(output)]) == 0
    shown = capsys.readouterr()
    assert "joined: 4 rows" in shown.out
    assert "no --embeddings: reviews get hashed bags of words" in shown.err
    kept = table(output, "reviews")
    assert kept["review_id"].tolist() == KEPT
    assert kept["stars"].tolist() == [1, 3, 5, 2]
    assert kept["cool"].tolist() == [3, 1, -1, -3]
    assert table(output, "restaurants").values.tolist() == [
        ["b0", 3.5, 5],
        ["b2", 4.5, 7],
    ]
    known = table(output, "users").sort_values("user_id")
    assert known["user_id"].tolist() == ["u0", "u1"]
    assert known["friends"].tolist() == [1, 3]
    assert known["compliment_photos"].tolist() == [10, 11]
    assert known["yelping_since"].astype(str).tolist() == [
        "2010-02-03 04:05:06",
        "2011-02-03 04:05:06",
    ]


def test_bags_of_words_have_the_width_of_the_embedding(
    folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    main([str(folder), str(output)])
    matrix = np.stack(table(output, "reviews")["embedding"].to_list())
    assert matrix.shape == (4, WIDTH)
    assert matrix.dtype == np.float32
    # "good pizza good wine" and "good wine" share good, twice, and wine
    np.testing.assert_allclose(matrix[0] @ matrix[3], (2 + 1) / np.sqrt(6 * 2))
    # an empty text has no words
    np.testing.assert_array_equal(matrix[2], 0.0)
    np.testing.assert_allclose(np.square(matrix).sum(axis=1), [1, 1, 0, 1], rtol=1e-6)


def test_embeddings_are_joined_by_id(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(7, WIDTH)).astype(np.float32)
    ids = [f"r{k}" for k in range(7)]
    frame = pd.DataFrame({"review_id": ids, "embedding": list(vectors)})
    frame.sample(frac=1.0, random_state=1).to_parquet(tmp_path / "e.parquet")
    options = ["--embeddings", str(tmp_path / "e.parquet")]
    assert main([str(folder), str(tmp_path / "out"), *options]) == 0
    written = table(tmp_path / "out", "reviews").sort_values("review_id")
    assert written["review_id"].tolist() == KEPT
    np.testing.assert_array_equal(
        np.stack(written["embedding"].to_list()), vectors[[0, 2, 4, 6]]
    )


def test_what_is_written_can_be_trained_on(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    main([str(folder), str(output)])
    report = run_prepared(output, **{"test-fraction": 0.0})
    assert report.joined_rows_train == 4
    widths = {item.table: item.features for item in report.tables}
    # constant columns go: of the words only those that occur are left
    assert list(widths) == ["r", "b", "u"]
    assert widths["b"] == 2
    assert report.final_train["accuracy"] == 1.0


def test_wrong_embeddings_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.DataFrame({"review_id": ["r0"], "embedding": [np.zeros(WIDTH)]})
    frame.to_parquet(tmp_path / "few.parquet")
    frame.rename(columns={"review_id": "id"}).to_parquet(tmp_path / "named.parquet")
    problems = {
        "few.parquet": f"has no embedding of {WIDTH} numbers for r2",
        "named.parquet": "lacks review_id",
    }
    for name, problem in problems.items():
        options = ["--embeddings", str(tmp_path / name)]
        assert main([str(folder), str(tmp_path / "out"), *options]) == 2
        assert problem in capsys.readouterr().err


def test_other_files_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "yelp_academic_dataset_user.json"
    path.write_text('{"user_id": "u0", "friends": ""}\n')
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "user.json lacks yelping_since, review_count" in capsys.readouterr().err
    path.write_text("[1, 2\n")
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "is not of one JSON object a line" in capsys.readouterr().err
    path.unlink()
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "user.json is missing" in capsys.readouterr().err
