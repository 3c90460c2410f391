"""Write the data of the coreset paper as vertical partitions, a table per party.

    python scripts/data/prepare_vertical.py FOLDER OUTPUT [--parties 3]

FOLDER has YearPredictionMSD.txt, as it is or as YearPredictionMSD.txt.zip (UCI: 515,345
lines of a year and 90 numbers of timbre), or kc_house_data.csv (21,613 sales of houses
with 18 features), or both; each is written to a folder of its own in OUTPUT. The first
party has the label. A tenth of the rows is held out, as in the paper (which took the
last 51,630 of YearPredictionMSD; here they are drawn).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from scripts.data.run_files import (
    DataError,
    check_columns,
    script,
    write_dataset,
)

PARTIES = 3
KEY = "record"
TIMBRES = 90
HOUSE_FEATURES = (
    *("bedrooms", "bathrooms", "sqft_living", "sqft_lot", "floors", "waterfront"),
    *("view", "condition", "grade", "sqft_above", "sqft_basement", "yr_built"),
    *("yr_renovated", "zipcode", "lat", "long", "sqft_living15", "sqft_lot15"),
)
SETTINGS = {
    "task": "regression",
    "test-fraction": 0.1,
    "strategy": "coreset-ridge",
    "l2": 0.1,
}


@dataclass(frozen=True)
class Source:
    """An official file of a data set, with the question that its label answers.

    ``read`` gives label and features, in the order of the paper.
    """

    title: str
    question: str
    files: Sequence[str]
    read: Callable[[Path], pd.DataFrame]


def read_songs(path: Path) -> pd.DataFrame:
    """Return the lines of YearPredictionMSD, which has no header."""
    rows = pd.read_csv(path, header=None).select_dtypes("number")
    if rows.shape[1] != 1 + TIMBRES:
        raise DataError(
            f"{path.name} has {rows.shape[1]} columns of numbers, not {1 + TIMBRES}: "
            "a year and features, separated by commas, without a header"
        )
    return rows.set_axis(["year", *(f"timbre_{k + 1}" for k in range(TIMBRES))], axis=1)


def read_houses(path: Path) -> pd.DataFrame:
    """Return price and features of KC House."""
    rows = pd.read_csv(path)
    columns = ["price", *HOUSE_FEATURES]
    check_columns(path, list(rows), columns)
    return rows[columns]


SOURCES = {
    "year-prediction": Source(
        "YearPredictionMSD, year",
        "In which year was a song released?",
        ("YearPredictionMSD.txt", "YearPredictionMSD.txt.zip"),
        read_songs,
    ),
    "kc-house": Source(
        "KC House, price",
        "For how much is a house sold?",
        ("kc_house_data.csv",),
        read_houses,
    ),
}


def prepare(options: argparse.Namespace) -> None:
    """Read the official files and write OUTPUT."""
    paths = {
        name: path
        for name, source in SOURCES.items()
        for file in source.files
        if (path := options.folder / file).is_file()
    }
    if not paths:
        names = ", ".join(file for source in SOURCES.values() for file in source.files)
        raise DataError(f"{options.folder} has none of the files {names}")
    for name, path in paths.items():
        source, output = SOURCES[name], options.output / name
        try:
            rows = source.read(path)
        except (ValueError, OSError) as error:
            raise DataError(f"{path.name} cannot be read: {error}") from error
        output.mkdir(exist_ok=True)
        tables = [f"party_{number + 1}" for number in range(options.parties)]
        sql = write_parties(rows, tables, output)
        write_dataset(output, source.title, source.question, sql, SETTINGS, tables)


def write_parties(rows: pd.DataFrame, tables: Sequence[str], folder: Path) -> str:
    """Write a table per party, the first with the label; return SQL that joins them."""
    label, *names = rows.columns
    if not 1 < len(tables) <= len(names):
        raise DataError(f"{len(tables)} parties cannot share {len(names)} features")
    rows.insert(0, KEY, np.arange(len(rows)))
    items, joins = [f"t1.{label} AS label"], ["FROM party_1 AS t1"]
    parts = np.array_split(names, len(tables))
    for place, (table, part) in enumerate(zip(tables, parts, strict=True), start=1):
        columns = [KEY, label, *part] if place == 1 else [KEY, *part]
        rows[columns].to_parquet(folder / f"{table}.parquet", index=False)
        items.append(", ".join(f"t{place}.{name}" for name in part))
        if place > 1:
            joins.append(f"JOIN {table} AS t{place} ON t1.{KEY} = t{place}.{KEY}")
    select = ",\n    ".join(items)
    return "\n".join([f"SELECT {select}", *joins])


main = script(__doc__, prepare, "official files", {"parties": (int, PARTIES, "tables")})

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
