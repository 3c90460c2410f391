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

from scripts.data.run_files import (
    DataError,
    check_columns,
    columns_of,
    one_row,
    run_script,
    write_batches,
    write_dataset,
)
from tp_flower.duckdb_engine import quote_text

TABLES = ("events", "stays", "patients", "admissions", "diagnoses")
TEST_FRACTION = 0.15
DIAGNOSES = 128
FIRST_HOUR = 5
WINDOW_HOURS = 24
LEAST_AGE = 18
OLDEST = 90
SLACK = 1e-6

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

ITEMS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "capillary_refill": {"refill": (115, 3348, 8377, 223951, 224308)},
    "diastolic_pressure": {"": (8368, 8440, 8441, 8555, 220051, 220180)},
    "inspired_oxygen": {"share": (190, 2981, 3420, 3422, 223835)},
    "coma_eye_opening": {"": (184, 220739)},
    "coma_motor_response": {"": (454, 223901)},
    "coma_total": {"": (198,)},
    "coma_verbal_response": {"": (723, 223900)},
    "glucose": {"": (807, 811, 1529, 3744, 3745, 220621, 225664, 226537)},
    "heart_rate": {"": (211, 220045)},
    "height": {"inch": (920, 1394, 226707), "": (226730,)},
    "mean_pressure": {"": (52, 443, 456, 6702, 220052, 220181, 225312)},
    "oxygen_saturation": {"percent": (646, 834, 220277)},
    "respiratory_rate": {"": (615, 618, 220210, 224690)},
    "systolic_pressure": {"": (51, 442, 455, 6701, 220050, 220179)},
    "temperature": {"fahrenheit": (678, 679, 223761), "": (676, 677, 223762)},
    "weight": {"pound": (226531,), "": (762, 763, 224639, 226512)},
    "ph": {"": (780, 1126, 3839, 220274, 223830)},
}
"""The vital signs by variable and unit: which CHARTEVENTS items measure them.

The 17 variables of the MIMIC-III benchmarks (Harutyunyan et al. 2019, "Multitask
learning and benchmarking with clinical time series data"), as far as CHARTEVENTS has
them, by the item ids of D_ITEMS for CareVue (below 200000) and MetaVision; "" is the
unit that is used.
"""

CONVERSIONS: Mapping[str, str] = {
    "": "number",
    # brisk or not: a text in the files
    "refill": (
        "CASE WHEN value IN ('Brisk', 'Normal <3 secs', 'Normal <3 Seconds') THEN 0.0 "
        "WHEN value IN ('Delayed', 'Abnormal >3 secs', 'Abnormal >3 Seconds') THEN 1.0 "
        "END"
    ),
    # in both units under the same item
    "share": "CASE WHEN number > 1.0 THEN number / 100.0 ELSE number END",
    "percent": "CASE WHEN number <= 1.0 THEN number * 100.0 ELSE number END",
    "inch": "number * 2.54",
    "fahrenheit": "(number - 32.0) * 5.0 / 9.0",
    "pound": "number * 0.45359237",
}
"""By unit, SQL over ``value`` (text) and ``number``."""

CONVERTED = "CASE {} END".format(
    " ".join(f"WHEN unit = '{unit}' THEN {sql}" for unit, sql in CONVERSIONS.items())
)
"""SQL for the value of an event in the unit that is used."""

ITEM_ROWS = ", ".join(
    f"({item}, '{variable}', '{unit}')"
    for variable, units in ITEMS.items()
    for unit, items in units.items()
    for item in items
)

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
    SELECT stay, variable, hour, {CONVERTED} AS x
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

FUNCTIONS: Mapping[str, str] = {
    "least": "min({x})",
    "largest": "max({x})",
    "mean": "avg({x})",
    "deviation": "stddev_pop({x})",
    # of the population, as the deviation; DuckDB's is that of a sample
    "skewness": "CASE WHEN count({x}) > 2 AND stddev_pop({x}) > 1e-6 THEN skewness({x})"
    " * (count({x}) - 2) / sqrt(count({x}) * (count({x}) - 1)) ELSE 0.0 END",
    "count": "count({x})",
}


def main(arguments: Sequence[str]) -> int:
    """Write the tables and the files to train on them; return the exit status."""
    options = {"stays": (int, 500, "read at a time")}
    return run_script(__doc__, prepare, arguments, "official files", options)


def prepare(options: argparse.Namespace) -> None:
    """Read the official files and write OUTPUT."""
    output: Path = options.output
    if options.stays < 1:
        raise DataError("--stays is the number of stays at a time: at least 1")
    with (
        tempfile.TemporaryDirectory(dir=output) as work,
        closing(duckdb.connect(f"{work}/work.duckdb")) as connection,
    ):
        for name, definition in FILES.items():
            _open(connection, options.folder, name, columns_of(definition))
        connection.execute(f"CREATE TABLE cohort AS {COHORT}")
        connection.execute(
            f"CREATE TABLE items AS FROM (VALUES {ITEM_ROWS}) AS items"
            "(item, variable, unit)"
        )
        connection.execute(f"CREATE TABLE measured AS {MEASURED}")
        selects = {
            "stays": "SELECT icustay_id, subject_id, hadm_id, dbsource, "
            "first_careunit, first_wardid, age FROM cohort",
            "patients": "SELECT subject_id, gender FROM PATIENTS",
            "admissions": "SELECT hadm_id, ethnicity FROM ADMISSIONS",
            "diagnoses": _diagnoses(connection),
        }
        for table, select in selects.items():
            connection.sql(select).write_parquet(str(output / f"{table}.parquet"))
        write_batches(
            output / "events.parquet",
            _events(connection, options.stays),
            f"no stay has an event and lasts {FIRST_HOUR} hours or more",
        )
    write_dataset(
        output,
        "MIMIC-III",
        f"Will the patient die within {WINDOW_HOURS} hours?",
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
    """Make a view of an official file, with its types; its header is checked."""
    paths = [folder / f"{name}{suffix}" for suffix in (".csv", ".csv.gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        message = f"{folder} has no {name}.csv or {name}.csv.gz of MIMIC-III"
        raise DataError(message)
    # blank values are missing ones, quoted or not
    read = (
        f"read_csv({quote_text(str(path))}, header = true, all_varchar = true, "
        "delim = ',', quote = '\"', escape = '\"', nullstr = '')"
    )
    header = connection.sql(f"FROM {read}").columns
    check_columns(path, [column.lower() for column in header], columns)
    items = ", ".join(f"CAST({c} AS {kind}) AS {c}" for c, kind in columns.items())
    connection.execute(f"CREATE VIEW {name} AS SELECT {items} FROM {read}")


def _diagnoses(connection: duckdb.DuckDBPyConnection) -> str:
    """Return SQL for a row per admission: which of the most frequent codes it has."""
    codes = connection.execute(
        "SELECT icd9_code FROM DIAGNOSES_ICD WHERE icd9_code IS NOT NULL "
        f"GROUP BY icd9_code ORDER BY count(*) DESC, icd9_code LIMIT {DIAGNOSES}"
    ).fetchall()
    flags = ", ".join(
        f"coalesce(bool_or(icd9_code = {quote_text(code)}), false) AS "
        f'"diagnosis_{code}"'
        for (code,) in codes
    )
    return f"SELECT hadm_id, {flags} FROM DIAGNOSES_ICD GROUP BY hadm_id"


def _events(
    connection: duckdb.DuckDBPyConnection, stays: int
) -> Iterator[pa.RecordBatch]:
    """Yield a row per hour and stay, so many stays at a time."""
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
    functions = ", ".join(
        f"{sql.format(x=f'CASE WHEN {condition} THEN x END')} AS {period}_{function}"
        for period, condition in PERIODS.items()
        for function, sql in FUNCTIONS.items()
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
        functions AS (
            SELECT stay, h, variable, {functions}
            FROM spans JOIN e USING (stay, variable) WHERE hour <= stop GROUP BY ALL)
        SELECT any_value(icustay_id) AS icustay_id, CAST(h AS INTEGER) AS hour,
            coalesce(any_value(lived) - h < {WINDOW_HOURS}, false) AS label, {features}
        FROM functions JOIN cohort ON stay = number
        GROUP BY stay, h ORDER BY stay, h"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
