"""Write the Yelp Open Dataset in the schema of the TablePuppet papers, ready to run.

    python scripts/data/prepare_yelp.py FOLDER OUTPUT [--embeddings FILE]

FOLDER has the official yelp_academic_dataset_business.json, _review.json and _user.json
(https://www.yelp.com/dataset): one object a line. Only reviews of open restaurants are
kept; the label is their stars, 1 to 5. FILE has an embedding of 768 numbers per review:
Parquet with columns ``review_id`` and ``embedding``, or .npy with a row per line of the
review file. Without it, hashed bags of words of the same width take their place. Memory
does not grow with the reviews.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scripts.data.bag_of_words import hashed_words, to_vectors
from scripts.data.run_files import (
    DataError,
    check_columns,
    one_row,
    parser_of,
    run_script,
    write_batches,
    write_dataset,
)
from tp_flower.duckdb_engine import quote_text

WIDTH = 768
BATCH_ROWS = 4096
TEST_FRACTION = 0.15
TABLES = ("reviews", "restaurants", "users")

COMPLIMENTS = (
    *("hot", "more", "profile", "cute", "list", "note", "plain", "cool", "funny"),
    *("writer", "photos"),
)
FILES: Mapping[str, Mapping[str, str]] = {
    "business": {
        **dict.fromkeys(("business_id", "categories"), "VARCHAR"),
        "stars": "DOUBLE",
        "review_count": "BIGINT",
        "is_open": "INTEGER",
    },
    "user": {
        "user_id": "VARCHAR",
        "yelping_since": "TIMESTAMP",
        "friends": "VARCHAR",
        **dict.fromkeys(("review_count", "useful", "funny", "cool", "fans"), "BIGINT"),
        "average_stars": "DOUBLE",
        **{f"compliment_{name}": "BIGINT" for name in COMPLIMENTS},
    },
    "review": {
        **dict.fromkeys(("review_id", "user_id", "business_id", "text"), "VARCHAR"),
        "stars": "INTEGER",
        **dict.fromkeys(("useful", "funny", "cool"), "BIGINT"),
    },
}
"""The columns that are used of each file."""

_ACTIVITY = ", ".join(
    ["u.fans", "u.average_stars", *(f"u.compliment_{name}" for name in COMPLIMENTS)]
)
SQL = f"""
SELECT r.stars AS label,
    r.useful, r.funny, r.cool, r.embedding,
    b.stars, b.review_count,
    u.review_count, u.yelping_since, u.useful, u.funny, u.cool, u.friends,
    {_ACTIVITY}
FROM reviews AS r
JOIN restaurants AS b ON r.business_id = b.business_id
JOIN users AS u ON r.user_id = u.user_id
"""


RESTAURANTS = """
    SELECT business_id, stars, review_count FROM raw_business
    WHERE contains(lower(categories), 'restaurants') AND is_open = 1"""
USERS = f"""
    SELECT user_id, review_count, yelping_since, useful, funny, cool,
        len(string_split(friends, ',')) AS friends, fans, average_stars,
        {", ".join(f"compliment_{name}" for name in COMPLIMENTS)}
    FROM raw_user SEMI JOIN (
        SELECT user_id FROM raw_review SEMI JOIN restaurants USING (business_id)
    ) USING (user_id)"""
COLUMNS = (
    *("review_id", "user_id", "business_id", "stars"),
    *("useful", "funny", "cool"),
)
REVIEWS = f"""
    SELECT {", ".join(COLUMNS)}, text, line
    FROM (SELECT *, row_number() OVER () - 1 AS line FROM raw_review)
    SEMI JOIN restaurants USING (business_id)"""


def main(arguments: Sequence[str]) -> int:
    """Write the tables and the files to train on them; return the exit status."""
    parser = parser_of(
        __doc__, FOLDER="with the official files", OUTPUT="folder to write to"
    )
    parser.add_argument(
        "--embeddings", type=Path, metavar="FILE", help="of reviews: .parquet or .npy"
    )
    return run_script(prepare, parser.parse_args(arguments))


def prepare(options: argparse.Namespace) -> None:
    """Read the official files and write OUTPUT."""
    output: Path = options.output
    if options.embeddings is None:
        print(
            "NOTE: no --embeddings: reviews get hashed bags of words, "
            f"{WIDTH} wide, in place of the papers' text embeddings",
            file=sys.stderr,
        )
    with closing(duckdb.connect()) as connection:
        # what does not fit into memory goes there
        spill = quote_text(str(output / "spilled"))
        connection.execute(f"SET temp_directory = {spill}")
        for name, columns in FILES.items():
            _open(connection, options.folder, name, columns)
        for table, select in (("restaurants", RESTAURANTS), ("users", USERS)):
            path = str(output / f"{table}.parquet")
            connection.sql(select).write_parquet(path)
            connection.read_parquet(path).create_view(table)
        write_batches(
            output / "reviews.parquet",
            _reviews(connection, options.embeddings),
            "no review is of an open restaurant",
        )
    write_dataset(
        output,
        "Yelp",
        "How many stars does a review give?",
        SQL,
        {"task": "classification", "test-fraction": TEST_FRACTION},
        TABLES,
    )


def _open(
    connection: duckdb.DuckDBPyConnection,
    folder: Path,
    name: str,
    columns: Mapping[str, str],
) -> None:
    """Make view ``raw_<name>`` of an official file, whose keys are checked."""
    path = folder / f"yelp_academic_dataset_{name}.json"
    if not path.is_file():
        message = f"{path} is missing: it comes with the Yelp Open Dataset"
        raise DataError(message)
    read = f"read_json({quote_text(str(path))}, format = 'newline_delimited'"
    try:
        keys = connection.sql(f"FROM {read}, sample_size = 1000)").columns
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not of one JSON object a line: {reason}") from error
    check_columns(path, keys, columns)
    types = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    connection.execute(f"CREATE VIEW raw_{name} AS FROM {read}, columns = {{{types}}})")


def _reviews(
    connection: duckdb.DuckDBPyConnection, path: Path | None
) -> Iterator[pa.RecordBatch]:
    """Yield the reviews with a vector of each, batch by batch.

    Raises:
        DataError: the embeddings are not of these reviews, or of another width.
    """
    select, matrix = REVIEWS, None
    if path is not None and path.suffix == ".npy":
        # row k is of line k of the review file
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        (lines,) = one_row(connection, "SELECT count(*) FROM raw_review")
        if matrix.shape != (lines, WIDTH):
            message = (
                f"{path} has shape {matrix.shape}: it must be ({lines}, {WIDTH}), "
                "a row per line of the review file"
            )
            raise DataError(message)
    elif path is not None:
        embeddings = connection.read_parquet(str(path))
        check_columns(path, embeddings.columns, ("review_id", "embedding"))
        embeddings.create_view("embeddings")
        select = (
            f"SELECT r.*, e.embedding FROM ({REVIEWS}) AS r "
            "LEFT JOIN embeddings AS e USING (review_id)"
        )
    for batch in connection.sql(select).to_arrow_reader(BATCH_ROWS):
        rows = batch.select([name for name in batch.schema.names if name in COLUMNS])
        if matrix is not None:
            vectors = to_vectors(matrix[np.asarray(batch["line"])].astype(np.float32))
        elif path is None:
            vectors = hashed_words(batch["text"], WIDTH)
        else:
            vectors = _checked(batch, path)
        yield rows.append_column("embedding", vectors)


def _checked(batch: pa.RecordBatch, path: Path) -> pa.Array:
    """Return the embeddings of joined reviews; none may be missing or too short."""
    widths = pc.fill_null(pc.list_value_length(batch["embedding"]), 0)
    wrong = pc.filter(batch["review_id"], pc.not_equal(widths, WIDTH))
    if len(wrong):
        raise DataError(f"{path} has no embedding of {WIDTH} numbers for {wrong[0]}")
    values = np.asarray(pc.list_flatten(batch["embedding"]), np.float32)
    return to_vectors(values.reshape(len(batch), WIDTH))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
