"""Made-up tables of the sizes in the TablePuppet papers (journal, Table 7).

``yelp``: reviews with an embedding of 768 numbers and one to five stars, users and
businesses: 3.2 million joined rows, 775 features, three tables. ``mimic``: hourly
events of 700 numbers and whether the patient is about to get worse, with stays,
admissions, diagnoses and patients: 2.9 million joined rows, 717 features, five tables.
Every table names the rows of others by their number, and every row finds its own, so
that the largest table's rows are the joined rows. Labels follow a softmax (logistic)
model of all tables' features, which a linear model can find.

Files are written block by block: memory holds a block of vectors, and of the other
tables a few numbers per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.data.run_files import write_tables
from tp_flower.arrays import FloatArray

BLOCK_ROWS: Final = 1 << 14
LEAST_ROWS: Final = 40
"""Of a table, however small the factor is."""
HIDDEN: Final = 16
"""Directions in which the vectors vary most, as embeddings do."""
SIGNAL: Final = 1.5
"""Deviation of the scores that the vectors lead to; the noise's is 1.28."""

Keys = Mapping[str, npt.NDArray[np.int32]]
"""By ``<parent>_id``, the parent's row of every row."""


@dataclass(frozen=True)
class PaperTable:
    """A table: its rows at factor 1, its features (all numbers), and its parents."""

    rows: int
    features: int
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperScale:
    """Tables of one of the papers' data sets.

    Attributes:
        table: the largest, whose rows have a vector of all features, and the label.
        classes: 1 to as many are the labels; 0 and 1 where there are two.
        tables: by name, each after those that name it.
    """

    table: str
    classes: int
    tables: Mapping[str, PaperTable]

    @property
    def sql(self) -> str:
        """The query that joins all of them."""
        features, joins = [f"{self.table}.vector"], []
        for name, table in self.tables.items():
            if name != self.table:
                features += [f"{name}.x{place}" for place in range(table.features)]
            for parent in table.parents:
                joins += [f"JOIN {parent} ON {name}.{parent}_id = {parent}.{parent}_id"]
        return (
            f"SELECT {self.table}.label AS label,\n    {', '.join(features)}\n"
            f"FROM {self.table}\n" + "\n".join(joins)
        )

    def rows_of(self, table: str, factor: float) -> int:
        """Return the rows of a table."""
        return max(round(self.tables[table].rows * factor), LEAST_ROWS)


PAPER_SCALES: Final[Mapping[str, PaperScale]] = {
    "yelp": PaperScale(
        "reviews",
        classes=5,
        tables={
            "reviews": PaperTable(3_200_000, 768, ("users", "businesses")),
            "users": PaperTable(1_200_000, 4),
            "businesses": PaperTable(35_000, 3),
        },
    ),
    "mimic": PaperScale(
        "events",
        classes=2,
        tables={
            "events": PaperTable(2_900_000, 700, ("stays",)),
            "stays": PaperTable(61_000, 5, ("admissions",)),
            "admissions": PaperTable(59_000, 4, ("patients", "diagnoses")),
            "patients": PaperTable(46_000, 4),
            "diagnoses": PaperTable(35_000, 4),
        },
    ),
}


def write_paper_scale(
    name: str, folder: Path, factor: float = 1.0, seed: int = 0
) -> Path:
    """Write the tables of one of `PAPER_SCALES`; return the tables file.

    At factor 1 the files take 10 GB; equal seeds make equal files.
    """
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"the factor must be above 0, not {factor:g}")
    scale = PAPER_SCALES[name]
    folder.mkdir(parents=True, exist_ok=True)
    # a data set of its own: not a draw of the run, so it does not take its generator
    draw = np.random.default_rng([seed, scale.tables[scale.table].features])
    effects: dict[str, FloatArray] = {}  # by `<table>_id`, (rows, classes)
    # a table after those that its rows name, the largest last
    for name, table in reversed(list(scale.tables.items())):
        path, rows = folder / f"{name}.parquet", scale.rows_of(name, factor)
        if name == scale.table:
            _write_largest(scale, path, rows, draw, effects)
            break
        numbers = draw.standard_normal((rows, table.features))
        effect = numbers @ draw.normal(0.0, 0.3, (table.features, scale.classes))
        keys = _draw_keys(table.parents, rows, effects, draw)
        columns = {
            f"{name}_id": np.arange(rows, dtype=np.int32),
            **keys,
            **{f"x{place}": numbers[:, place] for place in range(table.features)},
        }
        pq.write_table(pa.table(columns), path)
        effects[f"{name}_id"] = effect + _parents_effects(keys, effects)
    shards = {name: [(f"{name}.parquet", name)] for name in scale.tables}
    return write_tables(folder, shards)


def _write_largest(
    scale: PaperScale,
    path: Path,
    rows: int,
    draw: np.random.Generator,
    effects: Mapping[str, FloatArray],
) -> None:
    """Write the largest table, some rows at a time.

    Labels are drawn by softmax: the largest score after Gumbel noise.
    """
    width = scale.tables[scale.table].features
    keys = _draw_keys(scale.tables[scale.table].parents, rows, effects, draw)
    directions = draw.standard_normal((HIDDEN, width), dtype=np.float32)
    directions /= np.float32(np.sqrt(HIDDEN))
    hidden_weights = draw.standard_normal((HIDDEN, scale.classes))
    hidden_weights *= SIGNAL / np.sqrt(HIDDEN)
    names = {"label": pa.int8(), **dict.fromkeys(keys, pa.int32())}
    schema = pa.schema({**names, "vector": pa.list_(pa.float32())})
    # numbers without order: neither a dictionary nor compression makes them smaller
    with pq.ParquetWriter(
        path, schema, compression="none", use_dictionary=False, write_statistics=False
    ) as writer:
        for start in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - start)
            hidden = draw.standard_normal((count, HIDDEN), dtype=np.float32)
            vectors = draw.standard_normal((count, width), dtype=np.float32)
            vectors *= np.float32(0.5)
            vectors += hidden @ directions
            block = {name: key[start : start + count] for name, key in keys.items()}
            scores = hidden @ hidden_weights + _parents_effects(block, effects)
            label = np.argmax(scores + draw.gumbel(size=scores.shape), axis=1)
            offsets = np.arange(count + 1, dtype=np.int32) * width
            columns = {
                "label": (label + (scale.classes > 2)).astype(np.int8),
                **block,
                "vector": pa.ListArray.from_arrays(offsets, vectors.ravel()),
            }
            writer.write_table(pa.table(columns, schema), row_group_size=BLOCK_ROWS)


def _draw_keys(
    parents: tuple[str, ...],
    rows: int,
    effects: Mapping[str, FloatArray],
    draw: np.random.Generator,
) -> Keys:
    """Draw the parents of every row: some far more often than others, all once."""
    keys = {}
    for name in (f"{parent}_id" for parent in parents):
        count = len(effects[name])
        key = (count * draw.random(rows) ** 2).astype(np.int32)
        every = min(rows, count)
        key[:every] = draw.permutation(count)[:every]
        draw.shuffle(key)
        keys[name] = key
    return keys


def _parents_effects(
    keys: Keys, effects: Mapping[str, FloatArray]
) -> FloatArray | float:
    """Return what the parents of each row add to its scores (n, k)."""
    return sum((effects[name][key] for name, key in keys.items()), 0.0)
