"""Write MovieLens in the schema of the TablePuppet papers, ready to train on.

    python scripts/data/prepare_movielens.py FOLDER OUTPUT

FOLDER is MovieLens-100K or -1M: the official archive (.zip), or the folder that it
unpacks to. Ratings join users and movies, which have one row per genre, so that the
join is many-to-many. A movie's title is a hashed bag of words with the width of the
papers' embedding. The data may not be passed on: https://grouplens.org/datasets.
"""

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sklearn.feature_extraction.text import HashingVectorizer

from scripts.data.run_files import DataError, script, write_dataset
from tp_flower.duckdb_engine import quote_text

HERE = Path(__file__).parent
TABLES = ("ratings", "movies", "users")
TITLE_WIDTH = 32
TEST_FRACTION = 0.15

SQL = """
SELECT r.rating AS label, r.rated, m.year, m.genre, u.age, u.is_male, u.occupation
FROM ratings AS r
JOIN movies AS m ON r.movie_id = m.movie_id
JOIN users AS u ON r.user_id = u.user_id
"""
SQL_WITH_TITLES = SQL.replace("m.genre,", "m.genre, m.title_words,")

ARCHIVES = {
    "MovieLens-100K": ("movielens_100k.sql", ("u.data", "u.item", "u.user")),
    "MovieLens-1M": ("movielens_1m.sql", ("ratings.dat", "movies.dat", "users.dat")),
}
"""By archive, SQL for its tables, and the names of its files."""
USERS = "SELECT user_id, age, sex = 'M' AS is_male, occupation FROM raw_users"
PROBLEMS = {
    "a rating is not 1 to 5": "FROM ratings WHERE rating NOT BETWEEN 1 AND 5",
    "a sex is neither M nor F": "FROM raw_users WHERE sex NOT IN ('M', 'F')",
    "a rating's user is missing": "FROM ratings ANTI JOIN users USING (user_id)",
    "a rating's movie is missing": "FROM ratings ANTI JOIN raw_movies USING (movie_id)",
}
"""Rows that the official files do not have; others of the same shape do."""


def hashed_words(texts: pa.Array | pa.ChunkedArray, width: int) -> pa.Array:
    """Return how often each of ``width`` buckets of words occurs, of length 1 each.

    Words are runs of letters and digits, in small letters; a missing text is zeros.

    >>> vectors = hashed_words(pa.array(["Red red wine", None]), 4)
    >>> np.square(vectors.to_pylist()).sum(axis=1).round(6).tolist()
    [1.0, 0.0]
    """
    counter = HashingVectorizer(
        n_features=width, alternate_sign=False, token_pattern=r"[^\W_]+"
    )
    counts = counter.transform(pc.fill_null(texts, "").to_pylist())
    flat = pa.array(counts.toarray().astype(np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, width)


def prepare(options: argparse.Namespace) -> None:
    """Read the archive and write OUTPUT."""
    with _tables_of(options.folder) as connection:
        for table in TABLES:
            rows = connection.table(table).to_arrow_table()
            if table == "movies":
                words = hashed_words(rows["title"], TITLE_WIDTH)
                rows = rows.drop_columns(["title"]).append_column("title_words", words)
            pq.write_table(rows, options.output / f"{table}.parquet")
    settings = {"task": "regression", "test-fraction": TEST_FRACTION}
    question = "Which rating does a movie get?"
    sql = SQL_WITH_TITLES
    write_dataset(options.output, "MovieLens", question, sql, settings, TABLES)


def read_movielens(folder: Path) -> dict[str, pd.DataFrame]:
    """Return ratings, movies (a row per genre) and users."""
    with _tables_of(folder) as connection:
        frames = {table: connection.table(table).df() for table in TABLES}
    return {**frames, "movies": frames["movies"].drop(columns="title")}


@contextmanager
def _tables_of(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection that has the papers' tables; their rows are checked."""
    with (
        _official_files(folder) as (script_file, source),
        closing(duckdb.connect()) as connection,
    ):
        connection.execute(f"SET VARIABLE folder = {quote_text(str(source))}")
        connection.execute((HERE / script_file).read_text(encoding="utf-8"))
        connection.execute(f"CREATE TABLE users AS {USERS}")
        for problem, rows in PROBLEMS.items():
            if wrong := connection.execute(f"SELECT * {rows} LIMIT 1").fetchall():
                raise DataError(f"{folder} is not MovieLens: {problem}: {wrong[0]}")
        yield connection


@contextmanager
def _official_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the SQL file of a folder or .zip, and the folder that has its files."""
    with tempfile.TemporaryDirectory() as work:
        source = folder
        if zipfile.is_zipfile(folder):
            shutil.unpack_archive(folder, work, "zip")
            source = next(filter(Path.is_dir, Path(work).iterdir()), Path(work))
        elif not folder.is_dir():
            raise DataError(f"{folder} is neither a folder nor a .zip archive")
        lacks = []
        for name, (script_file, files) in ARCHIVES.items():
            missing = [file for file in files if not (source / file).is_file()]
            if not missing:
                yield script_file, source
                return
            lacks.append(f"{name} lacks {', '.join(missing)}")
    raise DataError(f"{folder} is not MovieLens-100K or -1M: {'; '.join(lacks)}")


main = script(__doc__, prepare, "the unpacked archive, or the .zip")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
