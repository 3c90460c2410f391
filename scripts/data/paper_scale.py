"""Made-up tables of the size of Yelp in the TablePuppet papers (journal, Table 7).

Reviews with an embedding of 768 numbers and one to five stars, users and businesses:
3.2 million joined rows, 775 features. A review names its user and its business by their
number, so that the reviews are the joined rows. Stars follow a softmax model of all
tables' features, which a linear model can find.

Reviews are written block by block: memory holds a block of vectors, and of the other
tables a few numbers per row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.data.run_files import write_tables
from tp_flower.arrays import FloatArray
from tp_flower.sources.policy import OPEN

SQL: Final = """
SELECT reviews.label AS label, reviews.vector,
    users.x0, users.x1, users.x2, users.x3,
    businesses.x0, businesses.x1, businesses.x2
FROM reviews
JOIN users ON reviews.users_id = users.users_id
JOIN businesses ON reviews.businesses_id = businesses.businesses_id
"""
ROWS: Final = {"reviews": 3_200_000, "users": 1_200_000, "businesses": 35_000}
"""At factor 1."""
LEAST_ROWS: Final = 40
"""Of a table, however small the factor is."""
NUMBERS: Final = {"users": 4, "businesses": 3}
"""Features of the tables that a review names."""
WIDTH: Final = 768
STARS: Final = 5
BLOCK_ROWS: Final = 1 << 14
HIDDEN: Final = 16
"""Directions in which the vectors vary most, as embeddings do."""
SIGNAL: Final = 1.5
"""Deviation of the scores that the vectors lead to; the noise's is 1.28."""


def rows_of(table: str, factor: float) -> int:
    """Return the rows of a table."""
    return max(round(ROWS[table] * factor), LEAST_ROWS)


def write_paper_scale(folder: Path, factor: float = 1.0, seed: int = 0) -> Path:
    """Write the tables; return the tables file.

    At factor 1 the files take 10 GB; equal seeds make equal files.
    """
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"the factor must be above 0, not {factor:g}")
    folder.mkdir(parents=True, exist_ok=True)
    # a data set of its own: not a draw of the run, so it does not take its generator
    draw = np.random.default_rng([seed, WIDTH])
    effects: dict[str, FloatArray] = {}  # of its rows on the stars, (rows, stars)
    for name in ("businesses", "users"):
        numbers = draw.standard_normal((rows_of(name, factor), NUMBERS[name]))
        columns = {
            f"{name}_id": np.arange(len(numbers), dtype=np.int32),
            **{f"x{place}": column for place, column in enumerate(numbers.T)},
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        effects[name] = numbers @ draw.normal(0.0, 0.3, (NUMBERS[name], STARS))
    _write_reviews(folder, rows_of("reviews", factor), draw, effects)
    return write_tables(
        folder, {name: [(f"{name}.parquet", name)] for name in ROWS}, OPEN
    )


def _write_reviews(
    folder: Path,
    rows: int,
    draw: np.random.Generator,
    effects: Mapping[str, FloatArray],
) -> None:
    """Write the reviews, some rows at a time.

    Stars are drawn by softmax: the largest score after Gumbel noise.
    """
    keys = {name: _draw_key(rows, len(effects[name]), draw) for name in NUMBERS}
    directions = draw.standard_normal((HIDDEN, WIDTH), dtype=np.float32)
    directions /= np.float32(np.sqrt(HIDDEN))
    hidden_weights = draw.standard_normal((HIDDEN, STARS)) * (SIGNAL / np.sqrt(HIDDEN))
    ids = {f"{name}_id": pa.int32() for name in keys}
    schema = pa.schema({"label": pa.int8(), **ids, "vector": pa.list_(pa.float32())})
    path = folder / "reviews.parquet"
    # numbers without order: neither a dictionary nor compression makes them smaller
    with pq.ParquetWriter(
        path, schema, compression="none", use_dictionary=False, write_statistics=False
    ) as writer:
        for start in range(0, rows, BLOCK_ROWS):
            block = {
                name: key[start : start + BLOCK_ROWS] for name, key in keys.items()
            }
            count = len(block["users"])
            hidden = draw.standard_normal((count, HIDDEN), dtype=np.float32)
            vectors = draw.standard_normal((count, WIDTH), dtype=np.float32)
            vectors *= np.float32(0.5)
            vectors += hidden @ directions
            scores = hidden @ hidden_weights
            scores += sum(effects[name][key] for name, key in block.items())
            stars = 1 + np.argmax(scores + draw.gumbel(size=scores.shape), axis=1)
            offsets = np.arange(count + 1, dtype=np.int32) * WIDTH
            vector = pa.ListArray.from_arrays(offsets, vectors.ravel())
            columns = [stars.astype(np.int8), *block.values(), vector]
            writer.write_table(pa.table(columns, schema), row_group_size=BLOCK_ROWS)


def _draw_key(
    rows: int, parents: int, draw: np.random.Generator
) -> npt.NDArray[np.int32]:
    """Draw a parent for each row: some far more often than others, all once."""
    key = (parents * draw.random(rows) ** 2).astype(np.int32)
    every = min(rows, parents)
    key[:every] = draw.permutation(parents)[:every]
    draw.shuffle(key)
    return key
