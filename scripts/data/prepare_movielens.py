"""Write MovieLens in the schema of the TablePuppet papers, ready to train on.

    python scripts/data/prepare_movielens.py FOLDER OUTPUT

FOLDER is MovieLens-100K or -1M: the official archive (.zip), or the folder that it
unpacks to. Ratings join users and movies, which have one row per genre, so that the
join is many-to-many. A movie's title is a hashed bag of words with the width of the
papers' embedding. The data may not be passed on: https://grouplens.org/datasets.
"""

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import duckdb
import pandas as pd
import pyarrow.parquet as pq

from scripts.data.bag_of_words import hashed_words
from scripts.data.run_files import DataError, columns_of, run_script, write_dataset
from tp_flower.duckdb_engine import quote_text

TITLE_WIDTH = 32
TEST_FRACTION = 0.15

SQL = """
SELECT r.rating AS label, r.rated, m.year, m.genre, u.age, u.is_male, u.occupation
FROM ratings AS r
JOIN movies AS m ON r.movie_id = m.movie_id
JOIN users AS u ON r.user_id = u.user_id
"""
SQL_WITH_TITLES = SQL.replace("m.genre,", "m.genre, m.title_words,")

GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery"),
    *("Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
"""The flags of u.item, in their order."""


TABLES = ("ratings", "movies", "users")
RATINGS = "user_id INTEGER, movie_id INTEGER, rating INTEGER, rated BIGINT"
USERS = "SELECT user_id, age, sex = 'M' AS is_male, occupation FROM raw_users"


class File(NamedTuple):
    """A file of an archive: its name and columns, separated by a text."""

    name: str
    separator: str
    columns: str


class Archive(NamedTuple):
    """An official archive: files by table, and SQL for movies, a row per genre."""

    files: Mapping[str, File]
    movies: str


ARCHIVES = {
    "MovieLens-100K": Archive(
        {
            "ratings": File("u.data", "\t", RATINGS),
            "raw_movies": File(
                "u.item",
                "|",
                "movie_id INTEGER, title VARCHAR, released VARCHAR, video VARCHAR, "
                "url VARCHAR, " + ", ".join(f"{genre} INTEGER" for genre in GENRES),
            ),
            "raw_users": File(
                "u.user",
                "|",
                "user_id INTEGER, age INTEGER, sex VARCHAR, occupation VARCHAR, "
                "zip VARCHAR",
            ),
        },
        """
        SELECT movie_id, title,
            CAST(nullif(right(released, 4), '') AS INTEGER) AS year, genre
        FROM (UNPIVOT raw_movies ON COLUMNS(* EXCLUDE (
                movie_id, title, released, video, url)) INTO NAME genre VALUE flag)
        WHERE flag = 1""",
    ),
    "MovieLens-1M": Archive(
        {
            "ratings": File("ratings.dat", "::", RATINGS),
            "raw_movies": File(
                "movies.dat", "::", "movie_id INTEGER, title VARCHAR, genres VARCHAR"
            ),
            "raw_users": File(
                "users.dat",
                "::",
                "user_id INTEGER, sex VARCHAR, age INTEGER, occupation VARCHAR, "
                "zip VARCHAR",
            ),
        },
        r"""
        SELECT movie_id, regexp_replace(title, ' \(\d{4}\)$', '') AS title,
            CAST(nullif(regexp_extract(title, '\((\d{4})\)$', 1), '') AS INTEGER)
                AS year,
            unnest(string_split(genres, '|')) AS genre
        FROM raw_movies""",
    ),
}
PROBLEMS = {
    "a rating is not 1 to 5": "FROM ratings WHERE rating NOT BETWEEN 1 AND 5",
    "a sex is neither M nor F": "FROM raw_users WHERE sex NOT IN ('M', 'F')",
    "a rating's user is missing": "FROM ratings ANTI JOIN users USING (user_id)",
    "a rating's movie is missing": "FROM ratings ANTI JOIN raw_movies USING (movie_id)",
}
"""Rows that the official files do not have; others of the same shape do."""


def main(arguments: Sequence[str]) -> int:
    """Write the tables and the files to train on them; return the exit status."""
    return run_script(__doc__, prepare, arguments, "the unpacked archive, or the .zip")


def prepare(options: argparse.Namespace) -> None:
    """Read the archive and write OUTPUT."""
    with _tables_of(options.folder) as connection:
        for table in TABLES:
            rows = connection.table(table).to_arrow_table()
            if table == "movies":
                words = hashed_words(rows["title"], TITLE_WIDTH)
                rows = rows.drop_columns(["title"]).append_column("title_words", words)
            pq.write_table(rows, options.output / f"{table}.parquet")
    write_dataset(
        options.output,
        "MovieLens",
        "Which rating does a movie get?",
        SQL_WITH_TITLES,
        {"task": "regression", "test-fraction": TEST_FRACTION},
        TABLES,
    )


def has_movielens(folder: Path | None) -> bool:
    """Whether the folder or archive is one of MovieLens."""
    try:
        return folder is not None and bool(_find_archive(folder))
    except (DataError, OSError):
        return False


def read_movielens(folder: Path) -> dict[str, pd.DataFrame]:
    """Return ratings, movies (a row per genre) and users.

    Raises:
        DataError: the folder or archive is not one of MovieLens.
        duckdb.Error: a file is not of the official format.
    """
    with _tables_of(folder) as connection:
        frames: dict[str, pd.DataFrame] = {
            table: connection.table(table).df() for table in TABLES
        }
    return {**frames, "movies": frames["movies"].drop(columns="title")}


@contextmanager
def _tables_of(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection that has the papers' tables; their rows are checked."""
    archive, paths = _find_archive(folder)
    with (
        tempfile.TemporaryDirectory() as work,
        closing(duckdb.connect()) as connection,
    ):
        if zipfile.is_zipfile(folder):
            with zipfile.ZipFile(folder) as packed:
                paths = {
                    file.name: packed.extract(paths[file.name], work)
                    for file in archive.files.values()
                }
        for table, file in archive.files.items():
            _read_file(connection, table, paths[file.name], file)
        connection.execute(f"CREATE TABLE users AS {USERS}")
        connection.execute(f"CREATE TABLE movies AS {archive.movies}")
        for problem, rows in PROBLEMS.items():
            if wrong := connection.execute(f"SELECT * {rows} LIMIT 1").fetchall():
                raise DataError(f"{folder} is not MovieLens: {problem}: {wrong[0]}")
        yield connection


def _find_archive(folder: Path) -> tuple[Archive, dict[str, str]]:
    """Return which archive a folder or .zip is, and the paths of its files by name."""
    if folder.is_dir():
        paths = {path.name: str(path) for path in folder.iterdir()}
    elif not folder.exists():
        raise DataError(f"{folder} does not exist")
    elif not zipfile.is_zipfile(folder):
        raise DataError(f"{folder} is neither a folder nor a .zip archive")
    else:
        with zipfile.ZipFile(folder) as packed:
            paths = {Path(name).name: name for name in packed.namelist()}
    lacks = []
    for name, archive in ARCHIVES.items():
        names = [file.name for file in archive.files.values()]
        missing = [file for file in names if file not in paths]
        if not missing:
            return archive, paths
        lacks.append(f"{name} lacks {', '.join(missing)}")
    raise DataError(f"{folder} is not MovieLens-100K or -1M: {'; '.join(lacks)}")


def _read_file(
    connection: duckdb.DuckDBPyConnection, table: str, path: str, file: File
) -> None:
    """Read a file of texts; a line with other columns is an error that names it."""
    columns = columns_of(file.columns)
    types = ", ".join(f"{quote_text(name)}: '{columns[name]}'" for name in columns)
    try:
        connection.execute(
            f"CREATE TABLE {table} AS FROM read_csv({quote_text(path)}, "
            f"delim = {quote_text(file.separator)}, header = false, quote = '', "
            "escape = '', encoding = 'latin-1', auto_detect = false, "
            f"columns = {{{types}}})"
        )
    except duckdb.Error as error:
        first = ", ".join(list(columns)[:5])
        raise DataError(
            f"{file.name} does not have the {len(columns)} columns {first}"
            f"{' ...' if len(columns) > 5 else ''} separated by {file.separator!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
