"""A key's text depends on its value alone: compared with DuckDB's ``=`` over all pairs
of types.

Where the text differs from ``=`` on purpose, the table ``meant`` says so, and
docs/reference/queries.md explains it.
"""

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations_with_replacement, product

import duckdb
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.database_tables import KINDS, fill, source_of, url_of
from tests.support.files import case_table
from tests.support.joined import run as extract_frame
from tests.support.tables.sources import duckdb_file, file_source
from tp_flower.duckdb_engine import quote_name, quote_text
from tp_flower.errors import MappingError
from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.extraction.select_plan import (
    TypedColumn,
    canonical_text,
    comparable_sql,
    kind_of,
)
from tp_flower.joins.joining import join_codes
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.query import Fragment, Join
from tp_flower.sources.shards import ShardSource

CASES = case_table(__file__)
POOLS = CASES["pools"]
TYPES = CASES["types"]
COLUMNS = CASES["columns"]
FLOATS = ("FLOAT", "DOUBLE")
HASHER = KeyedHasher(bytes(range(32)))
Text = str | None


@pytest.fixture(scope="module")
def engine():
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def keys_of(columns: Iterable[str]) -> Fragment:
    return Fragment("t", "table", keys=tuple((column,) for column in columns))


def texts_of(shard: ExtractedShard) -> list[list[Text]]:
    """The canonical text of each row, per key."""
    return [
        [None if code < 0 else key.texts[code].as_py() for code in key.codes.tolist()]
        for key in shard.keys
    ]


def table_of(folder, sql: str) -> ShardSource:
    """Parquet has no HUGEINT and no unit of seconds."""
    return duckdb_file(folder / "t.duckdb", f"CREATE TABLE t AS {sql}")


def casts(kind: str) -> str:
    """A table of the kind's pool, a column per type; NULL where it cannot hold the
    value.
    """
    rows = ", ".join(f"({n}, {quote_text(t)})" for n, t in enumerate(POOLS[kind]))
    types = enumerate(TYPES[kind])
    columns = ", ".join(f"TRY_CAST(v AS {t}) AS c{n}" for n, t in types)
    return f"SELECT n, {columns} FROM (VALUES {rows}) pool(n, v) ORDER BY n"


def matches(left: Sequence[object], right: Sequence[object]) -> set[tuple[int, int]]:
    """The positions of equal values, of which None is none."""
    places: dict[object, list[int]] = {}
    for j, value in enumerate(right):
        places.setdefault(value, []).append(j)
    return {
        (i, j)
        for i, value in enumerate(left)
        if value is not None
        for j in places.get(value, ())
    }


@pytest.mark.parametrize("kind", POOLS)
def test_texts_are_equal_exactly_where_duckdb_says_so(kind, engine, tmp_path):
    pool = POOLS[kind]
    types = TYPES[kind]
    names = [f'"c{n}"' for n in range(len(types))]
    texts = texts_of(extract(table_of(tmp_path, casts(kind)), keys_of(names)))
    engine.execute(f"CREATE OR REPLACE TABLE pool AS {casts(kind)}")
    exact = [[None] * len(pool)] * len(types)
    if kind == "number":
        rows = engine.execute(f"SELECT {', '.join(names)} FROM pool").fetchall()
        exact = [[*map(exact_number, column)] for column in zip(*rows, strict=True)]
    for (a, left), (b, right) in combinations_with_replacement(enumerate(types), 2):
        # DuckDB fails where one value is not one of the other type
        sql = f"SELECT l.n, r.n FROM pool l, pool r WHERE TRY(l.c{a} = r.c{b})"
        of_duckdb = set(engine.execute(sql).fetchall())
        of_keys = matches(texts[a], texts[b])
        if kind == "number":
            assert of_keys == matches(exact[a], exact[b]), (left, right)
        differing = of_duckdb ^ of_keys
        if kind == "number":
            differing = {
                (i, j)
                for i, j in differing
                if not is_rounded((exact[a][i], exact[b][j]), left, right)
            }
        assert not differing, (left, right)
        assert of_keys, f"{left} and {right} have no value in common"


def exact_number(value: float | Decimal | None) -> Fraction | float | None:
    """The number that a value stands for: of a fraction in binary, the shortest decimal
    one.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and math.isinf(value):
        return value
    if isinstance(value, float) and not value.is_integer():
        return Fraction(repr(value))
    return Fraction(value)


def is_rounded(exact: Sequence[Fraction | float | None], left: str, right: str) -> bool:
    """Whether DuckDB compares something else: NaN, or exact numbers as rounded to
    binary.
    """
    if None in exact:
        return True
    if {left, right} == {"HUGEINT", "UHUGEINT"}:
        return True
    if (left in FLOATS) == (right in FLOATS):
        return False
    return "FLOAT" in (left, right) or any(digits_of(number) > 15 for number in exact)


def digits_of(number: Fraction | float | None) -> int:
    """The significant digits of a decimal number."""
    if not isinstance(number, Fraction):
        return 0
    return len(str(abs(number.numerator) * 10**400 // number.denominator).strip("0"))


@pytest.mark.parametrize(
    ("left", "right", "by_duckdb", "by_key"), CASES["meant"]["differences"]
)
def test_meant_differences(left, right, by_duckdb, by_key, engine, tmp_path):
    assert engine.execute(f"SELECT {left} = {right}").fetchall() == [(by_duckdb,)]
    source = table_of(tmp_path, f"SELECT {left} AS l, {right} AS r")
    keys = extract(source, keys_of(('"l"', '"r"'))).keys
    hashed = [key.hashed(HASHER) for key in keys]
    join = Join("l", "r", 0, 0, "l.k = r.k")
    if by_key == "refused":
        with pytest.raises(
            MappingError,
            match=r"l\.k = r\.k differ in type: l: .*; cast (one|the text)",
        ):
            join_codes(join, hashed[:1], hashed[1:])
        return
    (of_left,), (of_right,) = join_codes(join, hashed[:1], hashed[1:])
    assert (of_left == of_right >= 0) == by_key


decimals = st.integers(1, 38).flatmap(
    lambda digits: st.tuples(
        st.just(digits),
        st.integers(0, digits),
        st.integers(1 - 10**digits, 10**digits - 1),
    )
)
# many of few digits, so that values of different types are equal
small = st.tuples(st.integers(2, 38), st.integers(0, 38), st.integers(-20, 20)).map(
    lambda case: (case[0], min(case[:2]), case[2])
)


@settings(max_examples=60)
@given(
    st.lists(decimals | small, max_size=12),
    st.lists(
        st.floats(allow_nan=False) | st.integers(-99, 99).map(lambda n: n / 20),
        max_size=8,
    ),
    st.lists(st.integers(-(2**127), 2**128 - 1) | st.integers(-9, 9), max_size=8),
)
def test_a_text_is_that_of_the_exact_number(exact, floats, integers):
    typed = [(f"DECIMAL({p},{s})", Decimal(f"{n}E-{s}")) for p, s, n in exact]
    typed += [("HUGEINT" if n < 0 else "UHUGEINT", Decimal(n)) for n in integers]
    typed += [("DOUBLE", x) for x in floats]
    if not typed:
        return
    casts = [(f"CAST('{as_text(value)}' AS {kind})", kind) for kind, value in typed]
    texts = texts_in_duckdb(casts)
    numbers = [exact_number(value) for _, value in typed]
    for (text, number), (other, another) in product(
        zip(texts, numbers, strict=True), repeat=2
    ):
        assert (text == other) == (number == another)


def as_text(value: float | Decimal) -> str:
    return repr(value) if isinstance(value, float) else f"{value:f}"


def texts_in_duckdb(values: Sequence[tuple[str, str]]) -> list[Text]:
    columns = []
    selected = []
    for number, (sql, kind) in enumerate(values):
        column = TypedColumn(sql, kind, kind_of(kind))
        columns.append(f"{comparable_sql(column)} AS c{number}")
        part = TypedColumn(f"c{number}", kind, column.kind)
        selected.append(canonical_text([part], null_is_value=False))
    sql = f"SELECT {', '.join(selected)} FROM (SELECT {', '.join(columns)})"
    return list(duckdb.execute(sql).fetchall()[0])


@settings(max_examples=60)
@given(
    st.lists(st.integers(-(9 * 10**18), 9 * 10**18), min_size=1, max_size=9), st.data()
)
def test_nanoseconds_are_kept(nanoseconds, data):
    units = [data.draw(st.sampled_from([1, 10**3, 10**6, 10**9])) for _ in nanoseconds]
    whole = [n // unit * unit for n, unit in zip(nanoseconds, units, strict=True)]
    as_nanoseconds = [(f"make_timestamp_ns({n})", "TIMESTAMP_NS") for n in whole]
    as_microseconds = [(f"make_timestamp({n // 1000})", "TIMESTAMP") for n in whole]
    fine = texts_in_duckdb(as_nanoseconds)
    coarse = texts_in_duckdb(as_microseconds)
    for n, text, of_microseconds in zip(whole, fine, coarse, strict=True):
        assert (text == of_microseconds) == (n % 1000 == 0)
    assert len(set(fine)) == len(set(whole))


def test_keys_as_numbers_are_in_the_order_of_the_values(tmp_path):
    finite = ("1969-12-31 23:59:59.9", "2020-01-01 00:00:00.000000001")
    listed = ("-infinity", *finite, "infinity")
    times = ", ".join(f"(TIMESTAMP_NS '{time}')" for time in listed)
    source = table_of(tmp_path, f"FROM (VALUES {times}) t(k)")
    (key,) = extract(source, keys_of(['"k"'])).keys
    expected = [-math.inf, -100_000.0, 1577836800e6, math.inf]
    assert key.numbers()[key.codes].tolist() == expected


def typed_table() -> str:
    rows = zip(*(column["values"] for column in COLUMNS.values()), strict=True)
    listed = ", ".join(f"({', '.join(map(quote_text, row))})" for row in rows)
    casts = ", ".join(
        f"CAST({name} AS {c['type']}) AS {name}" for name, c in COLUMNS.items()
    )
    return f"SELECT {casts} FROM (VALUES {listed}) t({', '.join(COLUMNS)})"


def assert_same_texts(shard: ExtractedShard, names: Sequence[str], folder) -> None:
    source = table_of(folder, typed_table())
    expected = texts_of(extract(source, keys_of(map(quote_name, names))))
    for name, texts, others in zip(names, texts_of(shard), expected, strict=True):
        assert sorted(texts) == sorted(others), name


def keys_with_uuid(names: Iterable[str]) -> list[str]:
    """The columns as keys; a source without UUIDs has them as texts, which the query
    casts.
    """
    casts = {"code": 'CAST("code" AS UUID)'}
    return [casts.get(name, quote_name(name)) for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_databases(kind, request, tmp_path):
    url = url_of(kind, request, tmp_path)
    declared = {name: c[kind] for name, c in COLUMNS.items() if kind in c}
    values = {name: COLUMNS[name]["values"] for name in declared}
    values["flag"] = [v == "1" for v in values["flag"]]
    rows = list(zip(*values.values(), strict=True))
    table = fill(url, "keys", declared, rows)
    shard = extract(source_of(url, table), keys_of(keys_with_uuid(declared)))
    assert_same_texts(shard, list(declared), tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_texts_of_files(suffix, engine, tmp_path):
    path = tmp_path / f"t.{suffix}"
    # Parquet has no HUGEINT, and a CSV file no types: DuckDB reads many digits as a
    # DOUBLE
    left_out = {"parquet": {"huge"}, "csv": {"huge", "fine", "weight"}}[suffix]
    names = [name for name in COLUMNS if name not in left_out]
    sql = f"SELECT {', '.join(names)} FROM ({typed_table()})"
    engine.execute(f"COPY ({sql}) TO '{path}'")
    shard = extract(file_source(path), keys_of(keys_with_uuid(names)))
    assert_same_texts(shard, names, tmp_path)


@pytest.mark.parametrize("backend", ["numpy", "pyarrow"])
def test_texts_of_data_frames(backend, engine, tmp_path):
    # HUGEINT is no type of Arrow, and a UUID one of DuckDB's own
    names = [name for name in COLUMNS if name not in ("huge", "code")]
    sql = f"SELECT {', '.join(names)} FROM ({typed_table()})"
    table = engine.sql(sql).to_arrow_table()
    mapper = pd.ArrowDtype if backend == "pyarrow" else None
    frame = table.to_pandas(types_mapper=mapper, date_as_object=False)
    shard = extract_frame(frame, keys_of(map(quote_name, names)))
    assert_same_texts(shard, names, tmp_path)


@pytest.mark.parametrize("zone", [None, "Europe/Paris"])
def test_data_frames_of_nanoseconds(zone):
    times = pd.to_datetime(
        ["2020-01-01 00:00:00.123456789", "2020-01-01", None], format="ISO8601"
    )
    frame = pd.DataFrame({"k": times.as_unit("ns").tz_localize(zone)})
    (texts,) = texts_of(extract_frame(frame, keys_of(['"k"'])))
    seconds = 1577836800 - (3600 if zone else 0)
    assert texts == [f"time20:{seconds}123456.789", f"time16:{seconds}000000", None]
