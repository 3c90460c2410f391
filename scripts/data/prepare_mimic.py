"""Write MIMIC-III in the schema of the TablePuppet papers, ready to train on.

    python scripts/data/prepare_mimic.py FOLDER OUTPUT [--stays N]

FOLDER has the official CSV files (.csv or .csv.gz) of MIMIC-III v1.4 (physionet.org):
PATIENTS, ADMISSIONS, ICUSTAYS, DIAGNOSES_ICD, CHARTEVENTS. The task is decompensation
as in the MIMIC-III benchmarks (Harutyunyan et al. 2019): every hour of a stay in
intensive care from the fifth on, will the patient die within 24 hours? ``events`` has a
row per such hour: of 17 variables, the least, largest, mean, deviation, skewness and
number of values, over all the time since the first and over its first and last 10, 25
and 50 %: 714 features. Events are read once, as a stream; then N stays at a time (500)
are made into rows, so that memory does not grow with the file. ``mimic.sql`` has the
definitions, and ``mimic_items.csv`` the vital signs: the variables of the benchmarks,
as far as CHARTEVENTS has them, by the item ids of D_ITEMS for CareVue (below 200000)
and MetaVision, with their unit where it is not the one that is used.

Stays are those of adults without a transfer, one per admission. Unlike in the papers'
table, the length of the stay and its end are no features, as they tell the label.
Diagnoses are those of the whole admission, which a hospital codes at its end.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa

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
TABLES = ("events", "stays", "patients", "admissions", "diagnoses")
BATCH_ROWS = 4096

FILES = {
    "PATIENTS": "subject_id INTEGER, gender VARCHAR, dob TIMESTAMP",
    "ADMISSIONS": "hadm_id INTEGER, deathtime TIMESTAMP, ethnicity VARCHAR",
    "ICUSTAYS": "subject_id INTEGER, hadm_id INTEGER, icustay_id INTEGER, "
    "dbsource VARCHAR, first_careunit VARCHAR, last_careunit VARCHAR, "
    "first_wardid VARCHAR, last_wardid VARCHAR, intime TIMESTAMP, los DOUBLE",
    "DIAGNOSES_ICD": "hadm_id INTEGER, icd9_code VARCHAR",
    "CHARTEVENTS": "icustay_id INTEGER, itemid INTEGER, charttime TIMESTAMP, "
    "value VARCHAR, valuenum DOUBLE, error INTEGER",
}
"""The columns that are used of each file."""

SQL = """
SELECT e.label AS label, e.*, s.*, p.*, a.*, d.*
FROM events AS e
JOIN stays AS s ON e.icustay_id = s.icustay_id
JOIN patients AS p ON s.subject_id = p.subject_id
JOIN admissions AS a ON s.hadm_id = a.hadm_id
JOIN diagnoses AS d ON s.hadm_id = d.hadm_id
"""


def prepare(options: argparse.Namespace) -> None:
    """Read the official files and write OUTPUT."""
    output: Path = options.output
    if options.stays < 1:
        raise DataError("--stays is the number of stays at a time: at least 1")
    with (
        tempfile.TemporaryDirectory(dir=output) as work,
        closing(duckdb.connect(f"{work}/work.duckdb")) as connection,
    ):
        connection.execute("CREATE SCHEMA official")
        for name, definition in FILES.items():
            path = find_file(options.folder, f"{name}.csv", f"{name}.csv.gz")
            _open(connection, path, name, definition)
        connection.read_csv(str(HERE / "mimic_items.csv")).create("items")
        connection.execute((HERE / "mimic.sql").read_text(encoding="utf-8"))
        for table in TABLES[1:]:
            connection.table(table).write_parquet(str(output / f"{table}.parquet"))
        write_batches(
            output / "events.parquet",
            _events(connection, options.stays),
            "no stay has an event and lasts 5 hours or more",
        )
    settings = {"task": "classification", "test-fraction": 0.15}
    question = "Will the patient die within 24 hours?"
    write_dataset(output, "MIMIC-III", question, SQL, settings, TABLES)


def _open(
    connection: duckdb.DuckDBPyConnection, path: Path, name: str, definition: str
) -> None:
    """Make a view of an official file, with its types; its header is checked."""
    columns = dict(column.split() for column in definition.split(","))
    # blank values are missing ones, quoted or not
    read = (
        f"read_csv({quote_text(str(path))}, header = true, all_varchar = true, "
        "delim = ',', quote = '\"', escape = '\"', nullstr = '')"
    )
    header = connection.sql(f"FROM {read}").columns
    check_columns(path, [column.lower() for column in header], columns)
    items = ", ".join(f"CAST({c} AS {kind}) AS {c}" for c, kind in columns.items())
    connection.execute(f"CREATE VIEW official.{name} AS SELECT {items} FROM {read}")


def _events(
    connection: duckdb.DuckDBPyConnection, stays: int
) -> Iterator[pa.RecordBatch]:
    """Yield a row per hour and stay, so many stays at a time."""
    for first in range(1, len(connection.table("cohort")) + 1, stays):
        connection.execute(f"SET VARIABLE first_stay = {first}")
        connection.execute(f"SET VARIABLE last_stay = {first + stays - 1}")
        yield from connection.sql("FROM events").to_arrow_reader(BATCH_ROWS)


main = script(
    __doc__, prepare, "official files", {"stays": (int, 500, "read at a time")}
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
