"""NaN is NULL to all that reads a shard: to filters, aggregates, keys and labels
alike.
"""

import math

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.database_tables import fill, source_of, url_of
from tests.support.tables.fragments import features, plain_features
from tests.support.tables.sources import file_source
from tp_flower.extraction.extract import extract
from tp_flower.query import Fragment, SubQuery
from tp_flower.sources.shards import describe, load_tables, register_frames, release

# of finite values, DuckDB takes k <= 5 for true by the file's greatest value, and of a
# column without NULL isnan(k) for false
FINITE = [0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 5.0, math.nan, math.nan, None]
NUMBERS = {
    "finite": FINITE,
    "without-null": FINITE[:-1],
    "infinite": [*FINITE, math.inf, -math.inf],
}
FILTERS = [
    '"k" <= 5',
    '"k" < 6',
    '"k" > 1',
    '"k" >= 6',
    'NOT ("k" > 5)',
    '"k" BETWEEN 0 AND 5',
    '"k" <> 3',
    'NOT ISNAN("k")',
    'ISNAN("k")',
    'NOT "k" IS NULL',
    '"k" IS NULL',
    'ISFINITE("k")',
    'COALESCE("k", 1) = 1',
    '"k" IN (1, 2)',
    '"k" * 2 <= 5',
    '"f" <= 5',
    'NOT ISNAN("f")',
]


@pytest.fixture(params=NUMBERS)
def numbers(request):
    return NUMBERS[request.param]


@pytest.fixture(
    params=["parquet", "csv", "frame", "arrow-frame", "duckdb", "postgresql"]
)
def source(request, numbers, tmp_path):
    table = pa.table(
        {"k": pa.array(numbers, pa.float64()), "f": pa.array(numbers, pa.float32())}
    )
    token = None
    if request.param == "parquet":
        pq.write_table(table, tmp_path / "t.parquet")
        actual = file_source(tmp_path / "t.parquet", "table")
    elif request.param == "csv":
        texts = ["" if number is None else str(number) for number in numbers]
        lines = ["k,f", *(f"{text},{text}" for text in texts)]
        (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
        types = {"k": "DOUBLE", "f": "FLOAT"}
        actual = file_source(tmp_path / "t.csv", "table", nulls=("",), types=types)
    elif request.param == "duckdb":
        with duckdb.connect(str(tmp_path / "t.duckdb")) as connection:
            connection.register("numbers", table)
            connection.execute("CREATE TABLE t AS FROM numbers")
        actual = file_source(tmp_path / "t.duckdb", "table", relation=("t",))
    elif request.param == "postgresql":
        columns = {"k": "double precision", "f": "real"}
        url = url_of("postgresql", request, tmp_path)
        name = fill(url, "numbers", columns, [(n, n) for n in numbers])
        actual = source_of(url, name)
    else:
        mapper = pd.ArrowDtype if request.param == "arrow-frame" else None
        frame = table.to_pandas(types_mapper=mapper)
        token = register_frames({"table": frame}, site="here")
        (actual,) = load_tables(f"memory:{token}")
    yield actual
    if token is not None:
        release(token)


def rows_in_duckdb(numbers, sql: str) -> list:
    """DuckDB's answer over a table that has NULL in place of NaN."""
    texts = ["NULL" if n is None or math.isnan(n) else f"'{n}'" for n in numbers]
    rows = ", ".join(f"({text}::DOUBLE, {text}::FLOAT)" for text in texts)
    return duckdb.execute(f"SELECT {sql.format(f'(VALUES {rows}) t(k, f)')}").fetchall()


@pytest.mark.cases(
    "*frame-*", "postgresql-*", "parquet-infinite", "csv-without-null", "duckdb-finite"
)
def test_filters_take_nan_for_null(source, numbers):
    for condition in FILTERS:
        fragment = Fragment("t", "table", filters=(condition,))
        expected = rows_in_duckdb(numbers, f"count(*) FROM {{}} WHERE {condition}")
        assert [(extract(source, fragment).rows,)] == expected, condition


def test_keys_take_nan_for_null(source, numbers):
    keys = (('"k"',), ('"f"',), ('"k"', '"f"'), ('"k" + 1',), ('"k" - "k"',))
    shard = extract(source, Fragment("t", "table", keys=keys))
    missing = sum(n is None or math.isnan(n) for n in numbers)
    infinite = sum(n is not None and math.isinf(n) for n in numbers)
    absent = [int((key.codes < 0).sum()) for key in shard.keys]
    # infinity less infinity is NaN, which the query makes
    assert absent == [missing] * 4 + [missing + infinite]


def test_groups_take_nan_for_null(source, numbers):
    columns = features(k='"k"', n="COUNT(*)", m='COUNT("f")')
    subquery = SubQuery(columns, groups=('"k"',))
    wanted = Fragment("t", "table", plain_features("n", "m"), subquery=subquery)
    shard = extract(source, wanted)
    counts = zip(*(shard.column(name).values.tolist() for name in "nm"), strict=True)
    expected = rows_in_duckdb(numbers, "count(*), count(f) FROM {} GROUP BY k")
    assert sorted(counts) == sorted(expected)


def test_a_column_of_nan_has_no_values(tmp_path):
    table = pa.table({"k": [1, 2], "x": [math.nan, math.nan]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert describe(file_source(tmp_path / "t.parquet")).all_null == ("x",)
