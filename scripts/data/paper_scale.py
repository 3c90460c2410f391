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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tp_flower.arrays import FloatArray
from tp_flower.features.columns import Float32Array

BLOCK_ROWS: Final = 1 << 14
LEAST_ROWS: Final = 40
"""Of a table, however small the factor is."""
HIDDEN: Final = 16
"""Directions in which the vectors vary most, as embeddings do."""
SIGNAL: Final = 1.5
"""Deviation of the scores that the vectors lead to; the noise's is 1.28."""

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PaperTable:
    """A table beside the largest.

    Attributes:
        rows: at factor 1.
        numbers: how many features it has, all of them numbers.
        parents: the tables that its rows name.
    """

    rows: int
    numbers: int
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperScale:
    """Tables of one of the papers' data sets.

    Attributes:
        table: the largest, whose rows have vector and label.
        rows: of it, at factor 1.
        width: of its vectors.
        classes: 1 to as many are the labels; 0 and 1 where there are two.
        parents: the tables that its rows name.
        others: by name, each after those that name it.
    """

    table: str
    rows: int
    width: int
    classes: int
    parents: tuple[str, ...]
    others: Mapping[str, PaperTable]

    @property
    def sql(self) -> str:
        """The query that joins all of them."""
        named = [(self.table, parent) for parent in self.parents]
        for name, other in self.others.items():
            named += [(name, parent) for parent in other.parents]
        features = [f"{self.table}.vector"]
        for name, other in self.others.items():
            features += [f"{name}.x{place}" for place in range(other.numbers)]
        joins = [
            f"JOIN {parent} ON {child}.{parent}_id = {parent}.{parent}_id"
            for child, parent in named
        ]
        return (
            f"SELECT {self.table}.label AS label,\n    {', '.join(features)}\n"
            f"FROM {self.table}\n" + "\n".join(joins)
        )

    def rows_of(self, table: str, factor: float) -> int:
        """Return the rows of a table."""
        rows = self.rows if table == self.table else self.others[table].rows
        return max(round(rows * factor), LEAST_ROWS)


PAPER_SCALES: Final[Mapping[str, PaperScale]] = {
    "yelp": PaperScale(
        "reviews",
        rows=3_200_000,
        width=768,
        classes=5,
        parents=("users", "businesses"),
        others={
            "users": PaperTable(1_200_000, 4),
            "businesses": PaperTable(35_000, 3),
        },
    ),
    "mimic": PaperScale(
        "events",
        rows=2_900_000,
        width=700,
        classes=2,
        parents=("stays",),
        others={
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
    """Write the tables of a data set; return the tables file that names them.

    Args:
        name: of one of ``PAPER_SCALES``.
        folder: made if need be; at factor 1 the files take 10 GB.
        factor: of the rows of every table, > 0.
        seed: equal seeds make equal files.

    Raises:
        ValueError: there is no such data set, or the factor is not above 0.
    """
    if name not in PAPER_SCALES:
        raise ValueError(f"{name!r} is none of {', '.join(PAPER_SCALES)}")
    if not 0.0 < factor < float("inf"):
        raise ValueError(f"the factor must be above 0, not {factor:g}")
    scale = PAPER_SCALES[name]
    folder.mkdir(parents=True, exist_ok=True)
    # a data set of its own: not a draw of the run, so it does not take its generator
    draw = np.random.default_rng([seed, scale.width])
    effects: dict[str, FloatArray] = {}
    # a table after those that its rows name
    for table in reversed(list(scale.others)):
        effects[table] = _write_other(scale, table, folder, factor, draw, effects)
    _write_largest(scale, folder, factor, draw, effects)
    return _write_tables(scale, folder)


def _write_other(
    scale: PaperScale,
    table: str,
    folder: Path,
    factor: float,
    draw: np.random.Generator,
    effects: Mapping[str, FloatArray],
) -> FloatArray:
    """Write a table of numbers; return what each row adds to the scores (n, k)."""
    own, rows = scale.others[table], scale.rows_of(table, factor)
    numbers = draw.standard_normal((rows, own.numbers))
    effect = numbers @ draw.normal(0.0, 0.3, (own.numbers, scale.classes))
    columns: dict[str, npt.NDArray[Any]] = {
        f"{table}_id": np.arange(rows, dtype=np.int32)
    }
    for parent in own.parents:
        keys = _keys(rows, len(effects[parent]), draw)
        effect += effects[parent][keys]
        columns[f"{parent}_id"] = keys
    for place in range(own.numbers):
        columns[f"x{place}"] = numbers[:, place]
    pq.write_table(pa.table(columns), folder / f"{table}.parquet")
    return effect


def _write_largest(
    scale: PaperScale,
    folder: Path,
    factor: float,
    draw: np.random.Generator,
    effects: Mapping[str, FloatArray],
) -> None:
    rows = scale.rows_of(scale.table, factor)
    keys = {
        f"{parent}_id": _keys(rows, len(effects[parent]), draw)
        for parent in scale.parents
    }
    schema = pa.schema(
        [
            pa.field("label", pa.int8()),
            *(pa.field(name, pa.int32()) for name in keys),
            pa.field("vector", pa.list_(pa.float32())),
        ]
    )
    # numbers without order: neither a dictionary nor compression makes them smaller
    with pq.ParquetWriter(
        folder / f"{scale.table}.parquet",
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    ) as writer:
        for span, vectors, scores in _vectors(scale, rows, draw):
            own = {name: array[span] for name, array in keys.items()}
            added = [effects[name][own[f"{name}_id"]] for name in scale.parents]
            label = _labels(scale.classes, sum(added, scores), draw)
            offsets = np.arange(len(vectors) + 1, dtype=np.int32) * scale.width
            lists = pa.ListArray.from_arrays(offsets, vectors.ravel())
            batch = pa.table({"label": label, **own, "vector": lists}, schema)
            writer.write_table(batch, row_group_size=BLOCK_ROWS)


def _vectors(
    scale: PaperScale, rows: int, draw: np.random.Generator
) -> Iterator[tuple[slice, Float32Array, FloatArray]]:
    """Yield some rows at a time: their place, vectors (b, d) and scores (b, k)."""
    directions = draw.standard_normal((HIDDEN, scale.width), dtype=np.float32)
    directions /= np.float32(np.sqrt(HIDDEN))
    hidden_weights = draw.standard_normal((HIDDEN, scale.classes))
    hidden_weights *= SIGNAL / np.sqrt(HIDDEN)
    for start in range(0, rows, BLOCK_ROWS):
        span = slice(start, min(start + BLOCK_ROWS, rows))
        count = span.stop - span.start
        hidden = draw.standard_normal((count, HIDDEN), dtype=np.float32)
        vectors = draw.standard_normal((count, scale.width), dtype=np.float32)
        vectors *= np.float32(0.5)
        vectors += hidden @ directions
        yield span, vectors, hidden @ hidden_weights


def _labels(
    classes: int, scores: FloatArray, draw: np.random.Generator
) -> npt.NDArray[np.int8]:
    """Draw labels by softmax: the largest score after Gumbel noise."""
    chosen: npt.NDArray[np.intp] = np.argmax(
        scores + draw.gumbel(size=scores.shape), axis=1
    )
    return (chosen + (classes > 2)).astype(np.int8)


def _keys(rows: int, parents: int, draw: np.random.Generator) -> IntArray:
    """Draw the parent of every row: some far more often than others, all once."""
    keys = (parents * draw.random(rows) ** 2).astype(np.int32)
    every = min(rows, parents)
    keys[:every] = draw.permutation(parents)[:every]
    draw.shuffle(keys)
    return keys


def _write_tables(scale: PaperScale, folder: Path) -> Path:
    path = folder / "tables.toml"
    entries = [
        f'[tables.{table}]\npath = "{table}.parquet"\nsite = "{table}"\n'
        for table in (scale.table, *scale.others)
    ]
    path.write_text("\n".join(entries), encoding="utf-8")
    return path
