"""Write MIMIC-III in the schema of the TablePuppet papers, ready to train on.

    python scripts/data/prepare_mimic.py FOLDER OUTPUT [--stays N]

FOLDER has the official CSV files (.csv or .csv.gz) of MIMIC-III v1.4 (physionet.org):
PATIENTS, ADMISSIONS, ICUSTAYS, DIAGNOSES_ICD, CHARTEVENTS. The task is decompensation
as in the MIMIC-III benchmarks (Harutyunyan et al. 2019): every hour of a stay in
intensive care from the fifth on, will the patient die within 24 hours? ``events`` has a
row per such hour: of 17 variables, the least, largest, mean, deviation, skewness and
number of values, over all the time since the first and over its first and last 10, 25
and 50 %: 714 features. Events are read once, as a stream; then N stays at a time (500)
are made into rows, so that memory does not grow with the file.

Stays are those of adults without a transfer, one per admission. Unlike in the papers'
table, the length of the stay and its end are no features, as they tell the label.
Diagnoses are those of the whole admission, which a hospital codes at its end.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.data.mimic_items import ITEMS, converted, items_select
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

TABLES = ("events", "stays", "patients", "admissions", "diagnoses")
TEST_FRACTION = 0.15
DIAGNOSES = 128
FIRST_HOUR = 5
WINDOW_HOURS = 24
LEAST_AGE = 18
OLDEST = 90
SLACK = 1e-6

FILES: Mapping[str, Mapping[str, str]] = {
    "PATIENTS": {"subject_id": "INTEGER", "gender": "VARCHAR", "dob": "TIMESTAMP"},
    "ADMISSIONS": {
        "hadm_id": "INTEGER",
        "deathtime": "TIMESTAMP",
        "ethnicity": "VARCHAR",
    },
    "ICUSTAYS": {
        **dict.fromkeys(("subject_id", "hadm_id", "icustay_id"), "INTEGER"),
        **dict.fromkeys(("dbsource", "first_careunit", "last_careunit"), "VARCHAR"),
        **dict.fromkeys(("first_wardid", "last_wardid"), "VARCHAR"),
        "intime": "TIMESTAMP",
        "los": "DOUBLE",
    },
    "DIAGNOSES_ICD": {"hadm_id": "INTEGER", "icd9_code": "VARCHAR"},
    "CHARTEVENTS": {
        "icustay_id": "INTEGER",
        "itemid": "INTEGER",
        "charttime": "TIMESTAMP",
        "value": "VARCHAR",
        "valuenum": "DOUBLE",
        "error": "INTEGER",
    },
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

# dates of birth of the oldest are moved to 300 years before, so that age is hidden
COHORT = f"""
    SELECT row_number() OVER (ORDER BY icustay_id) AS number, icustay_id,
        i.subject_id, i.hadm_id, dbsource, first_careunit, first_wardid,
        least(date_diff('day', dob, intime) / 365.25, {OLDEST}) AS age, intime,
        24.0 * los AS hours, date_diff('second', intime, deathtime) / 3600.0 AS lived
    FROM ICUSTAYS AS i JOIN ADMISSIONS AS a USING (hadm_id)
    JOIN PATIENTS AS p ON i.subject_id = p.subject_id
    WHERE first_careunit = last_careunit AND first_wardid = last_wardid
        AND date_diff('day', dob, intime) / 365.25 >= {LEAST_AGE} AND los IS NOT NULL
    QUALIFY count(*) OVER (PARTITION BY i.hadm_id) = 1"""

MEASURED = f"""
    SELECT stay, variable, hour, {converted()} AS x
    FROM (
        SELECT c.number AS stay, variable, unit, value, valuenum AS number, hours,
            date_diff('second', intime, charttime) / 3600.0 AS hour
        FROM CHARTEVENTS JOIN items ON itemid = item JOIN cohort AS c USING (icustay_id)
        WHERE error IS DISTINCT FROM 1)
    WHERE hour >= 0 AND hour <= hours AND x IS NOT NULL
    ORDER BY stay"""

PERIODS: Mapping[str, str] = {
    "all": "true",
    **{
        f"first_{p}": f"hour <= start + {p / 100} * (stop - start) + {SLACK}"
        for p in (10, 25, 50)
    },
    **{
        f"last_{p}": f"hour >= stop - {p / 100} * (stop - start) - {SLACK}"
        for p in (10, 25, 50)
    },
}
"""Of the time between a variable's first value and its last before the hour."""

# the third moment about the mean, from those about zero
_SKEWNESS = (
    "CASE WHEN {name}_deviation > 1e-6 THEN ({name}_cubes - 3 * {name}_mean * "
    "{name}_squares + 2 * {name}_mean ** 3) / {name}_deviation ** 3 ELSE 0.0 END"
)
MOMENTS: Mapping[str, str] = {
    "least": "min(x)",
    "largest": "max(x)",
    "mean": "avg(x)",
    "deviation": "stddev_pop(x)",
    "squares": "avg(x * x)",
    "cubes": "avg(x * x * x)",
    "count": "count(x)",
}
FUNCTIONS = ("least", "largest", "mean", "deviation", "skewness", "count")


def main(arguments: Sequence[str]) -> int:
    """Write the tables and the files to train on them; return the exit status."""
    parser = files_parser(__doc__, "with the official files")
    parser.add_argument(
        "--stays",
        type=int,
        default=500,
        metavar="N",
        help="read at a time (default: 500)",
    )
    return run_script(parser, arguments, prepare)


def prepare(options: argparse.Namespace) -> None:
    """Read the official files and write OUTPUT."""
    output: Path = options.output
    if options.stays < 1:
        raise DataError("--stays is the number of stays at a time: at least 1")
    with (
        tempfile.TemporaryDirectory(dir=output) as work,
        closing(duckdb.connect(f"{work}/work.duckdb")) as connection,
    ):
        for name, columns in FILES.items():
            _open(connection, options.folder, name, columns)
        connection.execute(f"CREATE TABLE cohort AS {COHORT}")
        connection.execute(f"CREATE TABLE items AS {items_select()}")
        connection.execute(f"CREATE TABLE measured AS {MEASURED}")
        selects = {
            "stays": "SELECT icustay_id, subject_id, hadm_id, dbsource, "
            "first_careunit, first_wardid, age FROM cohort",
            "patients": "SELECT subject_id, gender FROM PATIENTS",
            "admissions": "SELECT hadm_id, ethnicity FROM ADMISSIONS",
            "diagnoses": _diagnoses(connection),
        }
        for table, select in selects.items():
            path = text_literal(output / f"{table}.parquet")
            connection.execute(f"COPY ({select}) TO {path} (FORMAT parquet)")
        write_events(connection, output / "events.parquet", options.stays)
    write_tables(output, {table: [(f"{table}.parquet", table)] for table in TABLES})
    run = write_run(
        output / RUN_FILE,
        f"Will the patient die within {WINDOW_HOURS} hours?",
        SQL,
        {"task": "classification", "test-fraction": TEST_FRACTION},
    )
    print_sizes(output, TABLES, SQL)
    print_commands("MIMIC-III", output, [run])


def _open(
    connection: duckdb.DuckDBPyConnection,
    folder: Path,
    name: str,
    columns: Mapping[str, str],
) -> None:
    """Make a view of an official file, with its types; its header is checked."""
    paths = [folder / f"{name}{suffix}" for suffix in (".csv", ".csv.gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        message = f"{folder} has no {name}.csv or {name}.csv.gz of MIMIC-III"
        raise DataError(message)
    # blank values are missing ones, quoted or not
    read = (
        f"read_csv({text_literal(path)}, header = true, all_varchar = true, "
        "delim = ',', quote = '\"', escape = '\"', nullstr = '')"
    )
    found = [column.lower() for column in connection.sql(f"FROM {read}").columns]
    missing = [column for column in columns if column not in found]
    if missing:
        message = f"{path} lacks {', '.join(missing)}; it has {', '.join(found)}"
        raise DataError(message)
    items = ", ".join(f"CAST({c} AS {kind}) AS {c}" for c, kind in columns.items())
    connection.execute(f"CREATE VIEW {name} AS SELECT {items} FROM {read}")


def _diagnoses(connection: duckdb.DuckDBPyConnection) -> str:
    """Return SQL for a row per admission: which of the most frequent codes it has."""
    codes = connection.execute(
        "SELECT icd9_code FROM DIAGNOSES_ICD WHERE icd9_code IS NOT NULL "
        f"GROUP BY icd9_code ORDER BY count(*) DESC, icd9_code LIMIT {DIAGNOSES}"
    ).fetchall()
    flags = ", ".join(
        f"coalesce(bool_or(icd9_code = {text_literal(code)}), false) AS "
        f'"diagnosis_{code}"'
        for (code,) in codes
    )
    return f"SELECT hadm_id, {flags} FROM DIAGNOSES_ICD GROUP BY hadm_id"


def write_events(connection: duckdb.DuckDBPyConnection, path: Path, stays: int) -> None:
    """Write a row per hour and stay, so many stays at a time.

    Raises:
        DataError: no hour of a stay can be predicted.
    """
    writer = None
    for batch in _events(connection, stays):
        if writer is None:
            writer = pq.ParquetWriter(path, batch.schema)
        writer.write_batch(batch)
    if writer is None:
        message = f"no stay has an event and lasts {FIRST_HOUR} hours or more"
        raise DataError(message)
    writer.close()


def _events(
    connection: duckdb.DuckDBPyConnection, stays: int
) -> Iterator[pa.RecordBatch]:
    select = events_select()
    (last,) = one_row(connection, "SELECT max(number) FROM cohort")
    for first in range(1, last + 1, stays):
        chosen = f"BETWEEN {first} AND {first + stays - 1}"
        yield from connection.sql(
            select.format(measured=f"SELECT * FROM measured WHERE stay {chosen}")
        ).to_arrow_reader(4096)


def events_select() -> str:
    """Return SQL for rows of ``events`` from ``{measured}``.

    Hour h is predicted from the values until h. It is one of the stay and of the
    patient's life, and the stay has a value before it.
    """
    moments = ", ".join(
        f"{sql} FILTER ({condition}) AS {period}_{function}"
        for period, condition in PERIODS.items()
        for function, sql in MOMENTS.items()
    )
    skewness = ", ".join(
        f"{_SKEWNESS.format(name=period)} AS {period}_skewness" for period in PERIODS
    )
    features = ", ".join(
        f"CAST(max({period}_{function}) FILTER (variable = '{variable}') AS FLOAT) "
        f"AS {variable}_{period}_{function}"
        for variable in ITEMS
        for period in PERIODS
        for function in FUNCTIONS
    )
    return f"""
        WITH e AS ({{measured}}),
        hours AS (
            SELECT stay, unnest(range({FIRST_HOUR}, CAST(
                floor(least(hours, coalesce(lived, hours)) + {SLACK}) AS BIGINT) + 1)
                ) AS h
            FROM cohort JOIN (SELECT DISTINCT stay FROM e) ON stay = number),
        starts AS (SELECT stay, variable, min(hour) AS start FROM e GROUP BY ALL),
        spans AS (
            SELECT s.stay, h, s.variable, start, e.hour AS stop
            FROM (SELECT * FROM hours JOIN starts USING (stay) WHERE start < h) AS s
            ASOF JOIN e ON e.stay = s.stay AND e.variable = s.variable AND s.h >= e.hour
        ),
        moments AS (
            SELECT stay, h, variable, {moments}
            FROM spans JOIN e USING (stay, variable) WHERE hour <= stop GROUP BY ALL),
        functions AS (SELECT *, {skewness} FROM moments)
        SELECT any_value(icustay_id) AS icustay_id, CAST(h AS INTEGER) AS hour,
            coalesce(any_value(lived) - h < {WINDOW_HOURS}, false) AS label, {features}
        FROM functions JOIN cohort ON stay = number
        GROUP BY stay, h ORDER BY stay, h"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
