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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.parquet as pq

from scripts.data.bag_of_words import hashed_words
from scripts.data.run_files import (
    RUN_FILE,
    DataError,
    files_parser,
    print_commands,
    print_sizes,
    run_script,
    text_literal,
    write_run,
    write_tables,
)

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


@dataclass(frozen=True)
class File:
    """A file of an archive: its name and columns, separated by a text."""

    name: str
    separator: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Archive:
    """An official archive.

    Attributes:
        files: by table.
        views: the papers' tables, from those of the files.
    """

    files: Mapping[str, File]
    views: Mapping[str, str]


MOVIELENS_100K = Archive(
    {
        "raw_ratings": File("u.data", "\t", ("user_id", "movie_id", "rating", "rated")),
        "raw_movies": File(
            *("u.item", "|"),
            ("movie_id", "title", "released", "video", "url", *GENRES),
        ),
        "raw_users": File(
            *("u.user", "|"), ("user_id", "age", "sex", "occupation", "zip")
        ),
    },
    {
        "movies": """
            SELECT CAST(movie_id AS INTEGER) AS movie_id, title,
                CAST(nullif(right(released, 4), '') AS INTEGER) AS year, genre
            FROM (UNPIVOT raw_movies ON COLUMNS(* EXCLUDE (
                    movie_id, title, released, video, url)) INTO NAME genre VALUE flag)
            WHERE CAST(flag AS INTEGER) = 1""",
    },
)
MOVIELENS_1M = Archive(
    {
        "raw_ratings": File(
            "ratings.dat", "::", ("user_id", "movie_id", "rating", "rated")
        ),
        "raw_movies": File("movies.dat", "::", ("movie_id", "title", "genres")),
        "raw_users": File(
            *("users.dat", "::"), ("user_id", "sex", "age", "occupation", "zip")
        ),
    },
    {
        "movies": r"""
            SELECT CAST(movie_id AS INTEGER) AS movie_id,
                regexp_replace(title, ' \(\d{4}\)$', '') AS title,
                CAST(nullif(regexp_extract(title, '\((\d{4})\)$', 1), '') AS INTEGER)
                    AS year,
                unnest(string_split(genres, '|')) AS genre
            FROM raw_movies""",
    },
)
COMMON_VIEWS = {
    "ratings": """
        SELECT CAST(user_id AS INTEGER) AS user_id,
            CAST(movie_id AS INTEGER) AS movie_id,
            CAST(rating AS INTEGER) AS rating, CAST(rated AS BIGINT) AS rated
        FROM raw_ratings""",
    "users": """
        SELECT CAST(user_id AS INTEGER) AS user_id, CAST(age AS INTEGER) AS age,
            sex = 'M' AS is_male, occupation
        FROM raw_users""",
}
TABLES = ("ratings", "movies", "users")


def main(arguments: Sequence[str]) -> int:
    """Write the tables and the files to train on them; return the exit status."""
    parser = files_parser(__doc__, "the unpacked archive, or the .zip")
    return run_script(parser, arguments, prepare)


def prepare(options: argparse.Namespace) -> None:
    """Read the archive and write OUTPUT."""
    output: Path = options.output

    def write(connection: duckdb.DuckDBPyConnection) -> None:
        for table in TABLES:
            rows = connection.table(table).to_arrow_table()
            if table == "movies":
                words = hashed_words(rows["title"], TITLE_WIDTH)
                rows = rows.drop_columns(["title"]).append_column("title_words", words)
            pq.write_table(rows, output / f"{table}.parquet")

    _with_tables(options.folder, write)
    write_tables(output, {table: [(f"{table}.parquet", table)] for table in TABLES})
    run = write_run(
        output / RUN_FILE,
        "Which rating does a movie get?",
        SQL_WITH_TITLES,
        {"task": "regression", "test-fraction": TEST_FRACTION},
    )
    print_sizes(output, TABLES, SQL_WITH_TITLES)
    print_commands("MovieLens", output, [run])


def has_movielens(folder: Path | None) -> bool:
    """Whether the folder or archive is one of MovieLens."""
    if folder is None:
        return False
    try:
        _find_archive(_names_in(folder), folder)
    except (DataError, OSError):
        return False
    return True


def read_movielens(folder: Path) -> dict[str, pd.DataFrame]:
    """Return ratings, movies (a row per genre) and users.

    Raises:
        DataError: the folder or archive is not one of MovieLens.
        duckdb.Error: a file is not of the official format.
    """
    frames: dict[str, pd.DataFrame] = {}

    def read(connection: duckdb.DuckDBPyConnection) -> None:
        for table in TABLES:
            frames[table] = connection.table(table).df()
        frames["movies"] = frames["movies"].drop(columns="title")

    _with_tables(folder, read)
    return frames


def _with_tables(
    folder: Path, use: Callable[[duckdb.DuckDBPyConnection], None]
) -> None:
    """Call ``use`` with a connection that has the papers' tables."""
    names = _names_in(folder)
    archive = _find_archive(names, folder)
    with tempfile.TemporaryDirectory() as unpacked:
        source = folder
        if zipfile.is_zipfile(folder):
            source = Path(unpacked)
            with zipfile.ZipFile(folder) as packed:
                for file in archive.files.values():
                    (source / file.name).write_bytes(packed.read(names[file.name]))
        with closing(duckdb.connect()) as connection:
            for table, file in archive.files.items():
                _read_file(connection, table, source / file.name, file)
            for table, select in {**COMMON_VIEWS, **archive.views}.items():
                connection.execute(f"CREATE TABLE {table} AS {select}")
            _check_tables(connection, folder)
            use(connection)


def _names_in(folder: Path) -> dict[str, str]:
    """Return the paths of a folder's or an archive's files by their names."""
    if folder.is_dir():
        return {path.name: str(path) for path in folder.iterdir()}
    if not folder.exists():
        message = f"{folder} does not exist"
        raise DataError(message)
    if not zipfile.is_zipfile(folder):
        message = f"{folder} is neither a folder nor a .zip archive"
        raise DataError(message)
    with zipfile.ZipFile(folder) as packed:
        return {Path(name).name: name for name in packed.namelist()}


def _find_archive(names: Mapping[str, str], folder: Path) -> Archive:
    """Return which archive these files are of."""
    archives = {"MovieLens-100K": MOVIELENS_100K, "MovieLens-1M": MOVIELENS_1M}
    missing = {}
    for name, archive in archives.items():
        wanted = [file.name for file in archive.files.values()]
        missing[name] = [file for file in wanted if file not in names]
        if not missing[name]:
            return archive
    lacks = "; ".join(f"{name} lacks {', '.join(m)}" for name, m in missing.items())
    message = f"{folder} is not MovieLens-100K or -1M: {lacks}"
    raise DataError(message)


def _read_file(
    connection: duckdb.DuckDBPyConnection, table: str, path: Path, file: File
) -> None:
    """Read a file of texts; a line with other columns is an error that names it."""
    columns = ", ".join(f"{text_literal(name)}: 'VARCHAR'" for name in file.columns)
    try:
        connection.execute(
            f"CREATE TABLE {table} AS FROM read_csv({text_literal(path)}, "
            f"delim = {text_literal(file.separator)}, header = false, quote = '', "
            "escape = '', encoding = 'latin-1', auto_detect = false, "
            f"columns = {{{columns}}})"
        )
    except duckdb.Error as error:
        message = (
            f"{path.name} does not have the {len(file.columns)} columns "
            f"{', '.join(file.columns[:5])}{' ...' if len(file.columns) > 5 else ''} "
            f"separated by {file.separator!r}: {str(error).splitlines()[0]}"
        )
        raise DataError(message) from error


def _check_tables(connection: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Check what the schema promises; other files of the same shape fail here."""
    checks = {
        "a rating is not 1 to 5": "FROM ratings WHERE rating NOT BETWEEN 1 AND 5",
        "a sex is neither M nor F": "FROM raw_users WHERE sex NOT IN ('M', 'F')",
        "a rating's user is missing": "FROM ratings ANTI JOIN users USING (user_id)",
        "a rating's movie is missing": "FROM ratings ANTI JOIN raw_movies m "
        "ON ratings.movie_id = CAST(m.movie_id AS INTEGER)",
    }
    for problem, rows in checks.items():
        found = connection.execute(f"SELECT * {rows} LIMIT 1").fetchall()
        if found:
            message = f"{folder} is not MovieLens: {problem}: {found[0]}"
            raise DataError(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
