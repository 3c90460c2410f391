"""Whole runs over keys, filters and labels whose values have other spellings, or are
NaN.
"""

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.database_tables import fill, url_of
from tests.support.federated import run_query
from tests.support.policies import OPEN
from tests.support.servers import uri
from tp_flower.errors import TPFlowerError

SQL = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
LABELS = "CAST(i * 7 % 11 AS DOUBLE) AS y, CAST(i AS DOUBLE) AS x"
UUID_OF = (
    "CAST('cfcd2084-95d5-4fef-86e7-' || lpad(CAST({} AS VARCHAR), 12, 'a') AS UUID)"
)


def parquet(folder, table: str, sql: str) -> str:
    """Write rows of a query, where `i` counts from 0; return the table's entry."""
    duckdb.execute(f"COPY ({sql}) TO '{folder}/{table}.parquet' (FORMAT parquet)")
    return f"path = '{table}.parquet'\n"


def sixty(key: str) -> str:
    return f"SELECT {key.format('i % 6')} AS k, {LABELS} FROM range(60) t(i)"


def six(key: str) -> str:
    return f"SELECT {key.format('i')} AS k, CAST(i AS DOUBLE) AS z FROM range(6) t(i)"


def site(folder, site_name: str, entries: dict[str, str]) -> str:
    """Return a tables file of a site, of entries by table."""
    text = "".join(
        f"[tables.{table.split('-')[0]}]\n{entry}site = '{site_name}'\n{OPEN}"
        for table, entry in entries.items()
    )
    file = folder / f"{site_name}.toml"
    file.write_text(text)
    return str(file)


def joined_rows(sites, sql: str = SQL) -> int:
    run = run_query(sql, sites, "cg", test_fraction=0.0, num_epochs=2)
    return run.problem.train.joined_rows


def two_sites(folder, a: str, b: str) -> list[str]:
    return [site(folder, "A", {"a": a}), site(folder, "B", {"b": b})]


DECIMALS = "CAST(({}) * 0.05 AS DECIMAL({}))"
STEP = "CAST('0.00000000000000000000000001' AS DECIMAL(38,26))"
TINY = f"CAST(0.00001 + ({{}}) * {STEP} AS DECIMAL(38,26))"
NANOSECONDS = "make_timestamp_ns(1700000000000000000 + ({}))"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (DECIMALS.format("{}", "2,2"), DECIMALS.format("{}", "4,2")),
        (
            DECIMALS.format("{}", "2,2"),
            f"CAST({DECIMALS.format('{}', '2,2')} AS DOUBLE)",
        ),
        (TINY, TINY),
        (NANOSECONDS, NANOSECONDS),
        (UUID_OF, UUID_OF),
        (UUID_OF, f"upper(CAST({UUID_OF} AS VARCHAR))"),
        (f"'{{{{' || upper(CAST({UUID_OF} AS VARCHAR)) || '}}}}'", UUID_OF),
    ],
)
def test_keys_join_as_in_duckdb(left, right, tmp_path):
    a = parquet(tmp_path, "a", sixty(left))
    b = parquet(tmp_path, "b", six(right))
    join = f"FROM '{tmp_path}/a.parquet' a JOIN '{tmp_path}/b.parquet' b ON a.k = b.k"
    assert duckdb.execute(f"SELECT count(*) {join}").fetchall() == [(60,)]
    assert joined_rows(two_sites(tmp_path, a, b)) == 60


def test_rows_of_a_left_join_find_decimals_of_another_precision(tmp_path):
    a = parquet(tmp_path, "a", sixty(DECIMALS.format("{}", "2,2")))
    b = parquet(tmp_path, "b", six(DECIMALS.format("{}", "4,2")))
    sql = SQL.replace("JOIN", "LEFT JOIN")
    run = run_query(
        sql, two_sites(tmp_path, a, b), "cg", test_fraction=0.0, num_epochs=1
    )
    last = run.report.join_steps[-1]
    assert (last.rows, last.unmatched_before) == (60, 0)


@pytest.mark.parametrize("zone", [None, "Europe/Paris"])
def test_frames_of_nanoseconds(zone):
    times = pd.to_datetime(1_700_000_000_000_000_000 + pd.RangeIndex(20))
    times = times.tz_localize(zone)
    number = np.arange(400)
    a = pd.DataFrame({"k": times.repeat(20), "x": number, "y": number % 7})
    b = pd.DataFrame({"k": times, "z": range(20)})
    assert a["k"].dt.nanosecond.max() == 19
    assert joined_rows([{"a": [a]}, {"b": [b]}]) == 400


def test_text_that_is_no_uuid_is_refused(tmp_path):
    a = parquet(tmp_path, "a", sixty(UUID_OF))
    b = parquet(tmp_path, "b", six("'secret'"))
    sites = two_sites(tmp_path, a, b)
    with pytest.raises(
        TPFlowerError, match=r'CAST\("k" AS UUID\), fails on some value'
    ) as caught:
        joined_rows(sites)
    assert "secret" not in str(caught.value)


def test_shards_of_uuids_and_of_texts_are_refused_until_types_says(tmp_path):
    a = parquet(tmp_path, "a", sixty(UUID_OF))
    parquet(tmp_path, "b", six(UUID_OF))
    (tmp_path / "b.csv").write_text("k,z\n00000000-0000-0000-0000-00000000000A,9\n")
    entries = {"A": {"a": a}, "B": {"b": "path = 'b.parquet'\n"}}
    first = [site(tmp_path, name, entry) for name, entry in entries.items()]
    other = "path = 'b.csv'\n"
    with pytest.raises(
        TPFlowerError, match=r"column 'k' is UUID .* VARCHAR .* \(types = "
    ):
        joined_rows([*first, site(tmp_path, "C", {"b": other})])
    other += "types = { k = 'UUID' }\n"
    assert joined_rows([*first, site(tmp_path, "C", {"b": other})]) == 60


UUIDS = [str(row[0]) for row in duckdb.execute(six(UUID_OF)).fetchall()]
TEXTS = [text.upper() for text in UUIDS]
"""Upper-case text in one database, UUIDs in the other."""
BELOW_ONE = [f"0.{5 * n:02}" for n in range(6)]


@pytest.mark.parametrize(
    ("kind", "declared", "keys", "other"),
    [
        ("postgresql", "varchar(40)", TEXTS, UUID_OF),
        ("mariadb", "varchar(40)", TEXTS, UUID_OF),
        ("sqlite", "varchar(40)", TEXTS, UUID_OF),
        ("postgresql", "uuid", UUIDS, UUID_OF),
        ("mariadb", "uuid", UUIDS, UUID_OF),
        ("postgresql", "numeric(2,2)", BELOW_ONE, DECIMALS.format("{}", "4,2")),
        ("mariadb", "decimal(2,2)", BELOW_ONE, DECIMALS.format("{}", "4,2")),
    ],
)
def test_keys_of_databases(kind, declared, keys, other, request, tmp_path):
    url = url_of(kind, request, tmp_path)
    rows = [(key, number) for number, key in enumerate(keys)]
    name = fill(url, "b", {"k": declared, "z": "integer"}, rows)
    b = f"uri = '{uri(url)}'\ntable = '{name}'\n"
    a = parquet(tmp_path, "a", sixty(other))
    assert joined_rows(two_sites(tmp_path, a, b)) == 60


def rates(digits: str, first: int) -> str:
    rate = f"CAST((i % 10) * 0.01 AS DECIMAL({digits}))"
    return (
        f"SELECT {rate} AS rate, CAST({first} + i AS DOUBLE) AS v FROM range(20) t(i)"
    )


def shards_of_two_precisions(folder) -> list[str]:
    labels = f"SELECT (i % 10) * 0.01::DOUBLE AS rate, {LABELS} FROM range(50) t(i)"
    return [
        site(folder, "A", {"a": parquet(folder, "a", labels)}),
        site(folder, "S1", {"s-1": parquet(folder, "s-1", rates("2,2", 0))}),
        site(folder, "S2", {"s-2": parquet(folder, "s-2", rates("4,2", 100))}),
    ]


def test_shards_whose_decimals_have_other_precisions(tmp_path):
    sites = shards_of_two_precisions(tmp_path)
    sql = "SELECT a.y AS label, a.x, s.v FROM a JOIN s ON a.rate = s.rate"
    assert joined_rows(sites, sql) == 200
    groups = "(SELECT rate, COUNT(*) AS n FROM s GROUP BY rate) g ON a.rate = g.rate"
    with pytest.raises(TPFlowerError, match="10 of 10 groups have rows at several"):
        joined_rows(sites, f"SELECT a.y AS label, a.x, g.n FROM a JOIN {groups}")


def with_nan(folder) -> list[str]:
    """Parquet as pyarrow writes it: its least and greatest values leave NaN out."""
    i = np.arange(60)
    nan = np.nan
    a = {
        "k": np.where(i % 4 == 0, nan, i % 6),
        "l": i % 5,
        "x": i.astype(float),
        "y": i[::-1].astype(float),
        "w": np.where(i % 7 == 0, nan, i * 7 % 11),
    }
    b = {"k": [0.0, 1, 2, 3, 4, 5, nan, nan], "l": [0, 1, 2, 3, 4, 9, 9, 9]}
    b["z"] = i[:8].astype(float)
    for name, columns in {"a": a, "b": b}.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return two_sites(folder, "path = 'a.parquet'\n", "path = 'b.parquet'\n")


def test_nan_keys_in_parquet_match_nothing(tmp_path):
    assert joined_rows(with_nan(tmp_path)) == 45


@pytest.mark.parametrize(
    "condition",
    ["a.k <= 5", "a.k < 6", "a.k BETWEEN 0 AND 5", "NOT a.k > 5", "a.k IS NOT NULL"],
)
def test_filters_take_nan_in_parquet_for_null(condition, tmp_path):
    sql = f"SELECT a.y AS label, a.x FROM a WHERE {condition}"
    assert joined_rows(with_nan(tmp_path)[:1], sql) == 45


@pytest.mark.parametrize(
    "condition", ["a.w IS NOT NULL", "NOT isnan(a.w)", "isfinite(a.w)"]
)
def test_nan_labels_in_parquet_are_filtered_out(condition, tmp_path):
    sites = with_nan(tmp_path)
    sql = "SELECT a.w AS label, a.x, b.z FROM a JOIN b ON a.l = b.l"
    with pytest.raises(
        TPFlowerError, match=r"the label is NULL in 9 rows: .*IS NOT NULL"
    ):
        joined_rows(sites, sql)
    assert joined_rows(sites, f"{sql} WHERE {condition}") == 51


def test_uuids_and_texts_of_one_sub_query_are_refused_with_the_cast_to_write(tmp_path):
    text = f"CAST({UUID_OF} AS VARCHAR)"
    sites = [
        site(tmp_path, "A", {"a": parquet(tmp_path, "a", sixty(text))}),
        site(tmp_path, "B", {"b": parquet(tmp_path, "b", six(UUID_OF))}),
        site(tmp_path, "C", {"c": parquet(tmp_path, "c", six(f"upper({text})"))}),
    ]
    both = "(SELECT k, z FROM b UNION ALL SELECT k, z FROM c) u"
    sql = f"SELECT a.y AS label, a.x, u.z FROM a JOIN {both} ON a.k = "
    with pytest.raises(
        TPFlowerError, match=r"differ in type: .*; cast texts to UUID in the query"
    ):
        joined_rows(sites, f"{sql}u.k")
    assert joined_rows(sites, f"{sql}CAST(u.k AS UUID)") == 120


def test_no_cast_is_advised_where_a_number_is_compared_with_a_uuid(tmp_path):
    sites = [
        site(tmp_path, "A", {"a": parquet(tmp_path, "a", sixty(UUID_OF))}),
        site(tmp_path, "B", {"b": parquet(tmp_path, "b", six("i"))}),
    ]
    sql = "SELECT a.y AS label, a.x, b.z FROM a JOIN b ON a.k = b.k"
    with pytest.raises(TPFlowerError, match="number; no number is a UUID: join by"):
        joined_rows(sites, sql)
