"""The Yelp Open Dataset in its official format becomes the papers' tables."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from scripts.data.prepare_yelp import COMPLIMENTS, WIDTH, main
from tests.support.datasets import prepared_once, run_prepared, table

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
KEPT = ["r0", "r2", "r4", "r6"]


def write_files(folder: Path) -> Path:
    folder.mkdir()
    files = {"business": BUSINESSES, "user": USERS, "review": REVIEWS}
    for name, rows in files.items():
        path = folder / f"yelp_academic_dataset_{name}.json"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


output = prepared_once(main, write_files)


def test_keeps_reviews_of_open_restaurants_and_their_users(output: Path) -> None:
    reviews = table(output, "reviews")
    assert reviews["review_id"].tolist() == KEPT
    assert reviews["stars"].tolist() == [1, 3, 5, 2]
    assert reviews["cool"].tolist() == [3, 1, -1, -3]
    restaurants = table(output, "restaurants").values.tolist()
    assert restaurants == [["b0", 3.5, 5], ["b2", 4.5, 7]]
    users = table(output, "users").sort_values("user_id")
    assert users["user_id"].tolist() == ["u0", "u1"]
    assert users["friends"].tolist() == [1, 3]
    assert users["compliment_photos"].tolist() == [10, 11]
    since = users["yelping_since"].astype(str).tolist()
    assert since == ["2010-02-03 04:05:06", "2011-02-03 04:05:06"]


def test_bags_of_words_have_the_width_of_the_embedding(output: Path) -> None:
    matrix = np.stack(table(output, "reviews")["embedding"].to_list())
    assert matrix.shape == (4, WIDTH)
    assert matrix.dtype == np.float32
    # "good pizza good wine" and "good wine" share good, twice, and wine
    np.testing.assert_allclose(matrix[0] @ matrix[3], (2 + 1) / np.sqrt(6 * 2))
    # an empty text has no words
    np.testing.assert_array_equal(matrix[2], 0.0)
    np.testing.assert_allclose(np.square(matrix).sum(axis=1), [1, 1, 0, 1], rtol=1e-6)


def test_embeddings_are_joined_by_id(tmp_path, capsys):
    folder = write_files(tmp_path / "yelp")
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(7, WIDTH)).astype(np.float32)
    ids = [f"r{k}" for k in range(7)]
    frame = pd.DataFrame({"review_id": ids, "embedding": list(vectors)})
    frame.sample(frac=1.0, random_state=1).to_parquet(tmp_path / "e.parquet")
    options = ["--embeddings", str(tmp_path / "e.parquet")]
    assert main([str(folder), str(tmp_path / "out"), *options]) == 0
    assert "joined: 4 rows" in capsys.readouterr().out
    written = table(tmp_path / "out", "reviews").sort_values("review_id")
    assert written["review_id"].tolist() == KEPT
    np.testing.assert_array_equal(
        np.stack(written["embedding"].to_list()), vectors[[0, 2, 4, 6]]
    )


def test_what_is_written_can_be_trained_on(output: Path) -> None:
    report = run_prepared(output, **{"test-fraction": 0.0})
    assert report.joined_rows_train == 4
    widths = {item.table: item.features for item in report.tables}
    # constant columns go: of the words only those that occur are left
    assert list(widths) == ["r", "b", "u"]
    assert widths["b"] == 2
    assert report.final_train["accuracy"] == 1.0


def test_other_files_are_refused(tmp_path, capsys):
    folder = write_files(tmp_path / "yelp")

    def refusal(*options: str) -> str:
        assert main([str(folder), str(tmp_path / "out"), *options]) == 2
        return capsys.readouterr().err

    path = tmp_path / "e.parquet"
    frame = pd.DataFrame({"review_id": ["r0"], "embedding": [np.zeros(WIDTH)]})
    frame.to_parquet(path)
    problem = f"has no embedding of {WIDTH} numbers for r2"
    assert problem in refusal("--embeddings", str(path))
    frame.rename(columns={"review_id": "id"}).to_parquet(path)
    assert "lacks review_id" in refusal("--embeddings", str(path))
    path = folder / "yelp_academic_dataset_user.json"
    path.write_text('{"user_id": "u0", "friends": ""}\n')
    # what takes the embeddings' place is said before anything else
    message = refusal()
    assert "no --embeddings: reviews get hashed bags of words" in message
    assert "user.json lacks yelping_since, review_count" in message
    path.write_text("[1, 2\n")
    assert "is not of one JSON object a line" in refusal()
    path.unlink()
    assert "has no yelp_academic_dataset_user.json" in refusal()
