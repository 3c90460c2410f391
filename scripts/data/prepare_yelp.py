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
import pyarrow.parquet as pq

from scripts.data.bag_of_words import hashed_words, to_vectors
from scripts.data.run_files import (
    RUN_FILE,
    DataError,
    files_parser,
    one_row,
    print_commands,
    print_sizes,
    run_script,
    text_literal,
    write_run,
    write_tables,
)

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
        "stars": "DOUBLE",
        "useful": "BIGINT",
        "funny": "BIGINT",
        "cool": "BIGINT",
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


def main(arguments: Sequence[str]) -> int:
    """Write the tables and the files to train on them; return the exit status."""
    parser = files_parser(__doc__, "with the official files")
    parser.add_argument(
        "--embeddings", type=Path, metavar="FILE", help="of reviews: .parquet or .npy"
    )
    return run_script(parser, arguments, prepare)


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
        connection.execute(f"SET temp_directory = {text_literal(output / 'spilled')}")
        for name, columns in FILES.items():
            _open(connection, options.folder, name, columns)
        _copy(connection, RESTAURANTS, output / "restaurants.parquet")
        connection.execute(
            "CREATE VIEW restaurants AS "
            f"FROM read_parquet({text_literal(output / 'restaurants.parquet')})"
        )
        _copy(connection, USERS, output / "users.parquet")
        write_reviews(connection, output / "reviews.parquet", options.embeddings)
    write_tables(output, {table: [(f"{table}.parquet", table)] for table in TABLES})
    run = write_run(
        output / RUN_FILE,
        "How many stars does a review give?",
        SQL,
        {"task": "classification", "test-fraction": TEST_FRACTION},
    )
    print_sizes(output, TABLES, SQL)
    print_commands("Yelp", output, [run])


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
REVIEWS = """
    SELECT review_id, user_id, business_id, CAST(stars AS INTEGER) AS stars,
        useful, funny, cool, text, line
    FROM (SELECT *, row_number() OVER () - 1 AS line FROM raw_review)
    SEMI JOIN restaurants USING (business_id)"""


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
    read = f"read_json({text_literal(path)}, format = 'newline_delimited'"
    try:
        found = connection.sql(f"FROM {read}, sample_size = 1000)").columns
    except duckdb.Error as error:
        message = f"{path} is not of one JSON object a line: {_first_line(error)}"
        raise DataError(message) from error
    missing = [column for column in columns if column not in found]
    if missing:
        message = f"{path} lacks {', '.join(missing)}; it has {', '.join(found)}"
        raise DataError(message)
    types = ", ".join(f"{name}: '{kind}'" for name, kind in columns.items())
    connection.execute(f"CREATE VIEW raw_{name} AS FROM {read}, columns = {{{types}}})")


def _copy(connection: duckdb.DuckDBPyConnection, select: str, path: Path) -> None:
    connection.execute(f"COPY ({select}) TO {text_literal(path)} (FORMAT parquet)")


def write_reviews(
    connection: duckdb.DuckDBPyConnection, path: Path, embeddings: Path | None
) -> None:
    """Write the reviews with a vector of each, batch by batch.

    Raises:
        DataError: the embeddings are not of these reviews, or of another width.
    """
    if embeddings is None:
        vectors = _by_words(connection)
    elif embeddings.suffix == ".npy":
        vectors = _by_lines(connection, embeddings)
    else:
        vectors = _by_ids(connection, embeddings)
    writer = None
    for batch, embedding in vectors:
        rows = batch.drop_columns(["text", "line"])
        rows = rows.append_column("embedding", embedding)
        if writer is None:
            writer = pq.ParquetWriter(path, rows.schema)
        writer.write_batch(rows)
    if writer is None:
        message = "no review is of an open restaurant"
        raise DataError(message)
    writer.close()


Vectors = Iterator[tuple[pa.RecordBatch, pa.Array]]


def _by_words(connection: duckdb.DuckDBPyConnection) -> Vectors:
    for batch in _batches(connection, REVIEWS):
        yield batch, hashed_words(batch["text"], WIDTH)


def _by_lines(connection: duckdb.DuckDBPyConnection, path: Path) -> Vectors:
    """Take row k of the array for line k of the review file."""
    matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    (lines,) = one_row(connection, "SELECT count(*) FROM raw_review")
    if matrix.shape != (lines, WIDTH):
        message = (
            f"{path} has shape {matrix.shape}: it must be ({lines}, {WIDTH}), "
            "a row per line of the review file"
        )
        raise DataError(message)
    for batch in _batches(connection, REVIEWS):
        lines_of = np.asarray(batch["line"])
        yield batch, to_vectors(matrix[lines_of].astype(np.float32))


def _by_ids(connection: duckdb.DuckDBPyConnection, path: Path) -> Vectors:
    """Join the embeddings of a Parquet file by review id."""
    given = f"read_parquet({text_literal(path)})"
    found = connection.sql(f"FROM {given}").columns
    missing = [name for name in ("review_id", "embedding") if name not in found]
    if missing:
        message = f"{path} lacks {', '.join(missing)}; it has {', '.join(found)}"
        raise DataError(message)
    joined = (
        f"SELECT r.*, e.embedding FROM ({REVIEWS}) AS r "
        f"LEFT JOIN {given} AS e USING (review_id)"
    )
    for batch in _batches(connection, joined):
        widths = pc.fill_null(pc.list_value_length(batch["embedding"]), 0)
        wrong = pc.filter(batch["review_id"], pc.not_equal(widths, WIDTH))
        if len(wrong):
            message = f"{path} has no embedding of {WIDTH} numbers for {wrong[0]}"
            raise DataError(message)
        values = np.asarray(pc.list_flatten(batch["embedding"]), np.float32)
        matrix = values.reshape(len(batch), WIDTH)
        yield batch.drop_columns(["embedding"]), to_vectors(matrix)


def _batches(
    connection: duckdb.DuckDBPyConnection, select: str
) -> Iterator[pa.RecordBatch]:
    yield from connection.sql(select).to_arrow_reader(BATCH_ROWS)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
