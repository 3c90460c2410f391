"""Write the Yelp Open Dataset in the schema of the TablePuppet papers, ready to run.

    python scripts/data/prepare_yelp.py FOLDER OUTPUT [--embeddings FILE]

FOLDER has the official yelp_academic_dataset_business.json, _review.json and _user.json
(https://www.yelp.com/dataset): one object a line. Only reviews of open restaurants are
kept; the label is their stars, 1 to 5. FILE is Parquet with an embedding of 768 numbers
per review, columns ``review_id`` and ``embedding``. Without it, hashed bags of words of
the same width take their place. Memory does not grow with the reviews.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.feature_extraction.text import HashingVectorizer

from scripts.data.run_files import (
    DataError,
    check_columns,
    find_file,
    script,
    write_batches,
    write_dataset,
)
from tp_flower.duckdb_engine import quote_text

HERE = Path(__file__).parent
WIDTH = 768
BATCH_ROWS = 4096
TABLES = ("reviews", "restaurants", "users")

COMPLIMENTS = (
    *("hot", "more", "profile", "cute", "list", "note", "plain", "cool", "funny"),
    *("writer", "photos"),
)
FILES = {
    "business": "business_id VARCHAR, categories VARCHAR, stars DOUBLE, "
    "review_count BIGINT, is_open INTEGER",
    "user": "user_id VARCHAR, yelping_since TIMESTAMP, friends VARCHAR, "
    "review_count BIGINT, useful BIGINT, funny BIGINT, cool BIGINT, fans BIGINT, "
    "average_stars DOUBLE, "
    + ", ".join(f"compliment_{name} BIGINT" for name in COMPLIMENTS),
    "review": "review_id VARCHAR, user_id VARCHAR, business_id VARCHAR, text VARCHAR, "
    "stars INTEGER, useful BIGINT, funny BIGINT, cool BIGINT",
}
"""The columns that are used of each file."""

SQL = """
SELECT r.stars AS label, r.useful, r.funny, r.cool, r.embedding, b.*, u.*
FROM reviews AS r
JOIN restaurants AS b ON r.business_id = b.business_id
JOIN users AS u ON r.user_id = u.user_id
"""


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
        for name, definition in FILES.items():
            path = find_file(options.folder, f"yelp_academic_dataset_{name}.json")
            _open(connection, path, name, definition)
        connection.execute((HERE / "yelp.sql").read_text(encoding="utf-8"))
        for table in TABLES[1:]:
            connection.table(table).write_parquet(str(output / f"{table}.parquet"))
        write_batches(
            output / "reviews.parquet",
            _reviews(connection, options.embeddings),
            "no review is of an open restaurant",
        )
    settings = {"task": "classification", "test-fraction": 0.15}
    question = "How many stars does a review give?"
    write_dataset(output, "Yelp", question, SQL, settings, TABLES)


def _open(
    connection: duckdb.DuckDBPyConnection, path: Path, name: str, definition: str
) -> None:
    """Make view ``raw_<name>`` of an official file, whose keys are checked."""
    columns = dict(column.split() for column in definition.split(","))
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
    """Yield the reviews with a vector of each, batch by batch."""
    reviews = connection.table("reviews")
    columns = reviews.columns[:-1]
    if path is not None:
        embeddings = connection.read_parquet(str(path))
        check_columns(path, embeddings.columns, ("review_id", "embedding"))
        embeddings = embeddings.project("review_id, embedding")
        reviews = reviews.join(embeddings, "review_id", how="left")
    for batch in reviews.to_arrow_reader(BATCH_ROWS):
        if path is None:
            vectors = hashed_words(batch["text"], WIDTH)
        else:
            widths = pc.fill_null(pc.list_value_length(batch["embedding"]), 0)
            wrong = pc.filter(batch["review_id"], pc.not_equal(widths, WIDTH))
            if len(wrong):
                raise DataError(
                    f"{path} has no embedding of {WIDTH} numbers for {wrong[0]}"
                )
            values = pc.list_flatten(batch["embedding"]).cast(pa.float32())
            vectors = pa.FixedSizeListArray.from_arrays(values, WIDTH)
        yield batch.select(columns).append_column("embedding", vectors)


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


main = script(
    __doc__,
    prepare,
    "official files",
    {"embeddings": (Path, None, "of reviews: Parquet")},
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
