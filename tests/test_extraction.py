import datetime as dt
import unicodedata
from decimal import Decimal

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tp_flower.canonical import kind_of
from tp_flower.encoding import CategoricalColumn, NumericColumn
from tp_flower.errors import QueryError, SourceError
from tp_flower.extraction import ExtractedShard, KeyColumn, extract
from tp_flower.fragment import Feature, Fragment
from tp_flower.sources import ShardSource, load_tables, register_frames, release

# each example opens DuckDB several times
few = settings(max_examples=25, deadline=None)

INTEGERS = (
    "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT",
    "UINTEGER", "UBIGINT", "UHUGEINT",
)  # fmt: skip
NUMBERS = (
    *INTEGERS,
    "FLOAT",
    "DOUBLE",
    "DECIMAL(9,0)",
    "DECIMAL(12,4)",
    "DECIMAL(38,9)",
)


def fragment(features=(), keys=(), label=None, filters=()) -> Fragment:
    named = tuple(Feature(name, sql) for name, sql in dict(features).items())
    return Fragment("t", "table", named, tuple(keys), label, tuple(filters))


def run(frame: pd.DataFrame, wanted: Fragment) -> ExtractedShard:
    token = register_frames({"table": frame}, site="here")
    try:
        (source,) = load_tables(f"memory:{token}")
        return extract(source, wanted)
    finally:
        release(token)


def of_sql(tmp_path, sql: str, wanted: Fragment) -> ExtractedShard:
    """Run a fragment on the rows of a query, with exactly its types."""
    path = tmp_path / "t.parquet"
    duckdb.execute(f"COPY ({sql}) TO '{path}' (FORMAT parquet)")
    return extract(ShardSource("table", "here", 0, str(path)), wanted)


def hash_of_rows(key: KeyColumn) -> list[tuple[int, int] | None]:
    hashes = [tuple(pair) for pair in key.hashes.tolist()]
    return [None if code < 0 else hashes[code] for code in key.codes.tolist()]


def hash_of(tmp_path, value: str) -> tuple[int, int] | None:
    """The hash of one SQL value as a key."""
    wanted = fragment(keys=[('"k"',)])
    (found,) = hash_of_rows(of_sql(tmp_path, f"SELECT {value} AS k", wanted).keys[0])
    return found


def assert_equal(a: ExtractedShard, b: ExtractedShard) -> None:
    arrays, meta = a.to_arrays()
    others, other_meta = b.to_arrays()
    assert meta == other_meta
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert array.dtype == others[name].dtype
        np.testing.assert_array_equal(array, others[name])


# all of it at once, on rows a reader can check


FRAME = pd.DataFrame(
    {
        "k": [7, 5, 7, 9],
        "c": ["b", None, "a", "b"],
        "x": [1.5, np.nan, 3.0, 4.0],
        "flag": [True, False, True, True],
        "day": pd.to_datetime(["1970-01-02", None, "1969-12-31", "1970-01-01"]),
        "y": ["no", "yes", None, "no"],
    }
)
WANTED = fragment(
    features={"twice": '"x" * 2', "flag": '"flag"', "day": '"day"', "c": 'upper("c")'},
    keys=[('"k"',), ('"k"', '"c"')],
    label='"y"',
    filters=['"k" < 9'],
)


def test_extraction_by_hand():
    shard = run(FRAME, WANTED)
    assert (shard.table, shard.rows) == ("t", 3)
    assert list(shard.columns) == ["twice", "flag", "day", "c"]
    np.testing.assert_array_equal(shard.columns["twice"].values, [3, np.nan, 6])
    np.testing.assert_array_equal(shard.columns["flag"].values, [1, 0, 1])
    np.testing.assert_array_equal(shard.columns["day"].values, [86400, np.nan, -86400])
    assert shard.columns["c"].categories == ("A", "B")
    assert shard.columns["c"].codes.tolist() == [1, -1, 0]
    assert (shard.label.kind, shard.label.categories) == ("text", ("no", "yes"))
    assert shard.label.codes.tolist() == [0, 1, -1]
    first, second = shard.keys
    assert (first.kind, second.kind) == ("number", "number+text")
    assert first.codes[0] == first.codes[2] != first.codes[1]
    assert second.codes[1] == -1
    assert len(first.hashes) == len(second.hashes) == 2


def test_dtypes():
    shard = run(FRAME, WANTED)
    assert shard.keys[0].codes.dtype == shard.columns["c"].codes.dtype == np.int32
    assert shard.keys[0].hashes.dtype == np.uint64
    assert shard.columns["flag"].values.dtype == np.float64
    assert shard.label.values.dtype == np.float64
    assert shard.label.codes.dtype == np.int32


@pytest.mark.parametrize(
    ("label", "kind", "values"),
    [
        ('"x"', "number", [1.5, np.nan, 3, 4]),
        ('"x" > 2', "boolean", [0, np.nan, 1, 1]),
        ('"day"', "time", [86400, np.nan, -86400, 0]),
        ('"y"', "text", [0, 1, np.nan, 0]),
    ],
)
def test_label_kinds(label, kind, values):
    found = run(FRAME, fragment(label=label)).label
    assert found.kind == kind
    np.testing.assert_array_equal(found.values, values)


def test_nothing_but_rows():
    shard = run(FRAME, fragment())
    assert (shard.rows, shard.keys, shard.label, shard.columns) == (4, (), None, {})


def test_no_rows_after_the_filters():
    shard = run(
        FRAME, fragment({"x": '"x"', "c": '"c"'}, [('"k"',)], filters=['"k" > 9'])
    )
    assert shard.rows == 0
    assert shard.columns["x"].values.shape == shard.keys[0].codes.shape == (0,)
    assert shard.columns["c"].categories == ()
    assert shard.keys[0].hashes.shape == (0, 2)


def test_rows_keep_the_order_of_the_shard():
    # more rows than DuckDB hands to one thread at a time
    number = np.random.default_rng(0).permutation(300_000)
    frame = pd.DataFrame({"k": number // 2, "x": number, "c": (number % 7).astype(str)})
    shard = run(
        frame, fragment({"x": '"x"', "c": '"c"'}, [('"k"',)], filters=['"x" > 9'])
    )
    expected = number[number > 9]
    np.testing.assert_array_equal(shard.columns["x"].values, expected)
    names = np.array(shard.columns["c"].categories)[shard.columns["c"].codes]
    np.testing.assert_array_equal(names.astype(int), expected % 7)
    _, together = np.unique(shard.keys[0].codes, return_inverse=True)
    smallest = np.full(together.max() + 1, number.size)
    np.minimum.at(smallest, together, expected // 2)
    np.testing.assert_array_equal(smallest[together], expected // 2)


def test_hashes_are_distinct_and_sorted():
    shard = run(pd.DataFrame({"k": range(1000)}), fragment(keys=[('"k"',)]))
    pairs = [tuple(pair) for pair in shard.keys[0].hashes.tolist()]
    assert pairs == sorted(set(pairs))
    assert sorted(shard.keys[0].codes.tolist()) == list(range(1000))


# equal keys have equal hashes


@pytest.mark.parametrize("kind", NUMBERS)
def test_equal_numbers_agree_whatever_their_type(tmp_path, kind):
    assert hash_of(tmp_path, f"CAST(100 AS {kind})") == hash_of(tmp_path, "100")
    assert hash_of(tmp_path, f"CAST(0 AS {kind})") == hash_of(tmp_path, "0")


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ("1.10::DECIMAL(5,2)", "1.1::DOUBLE"),
        ("-0.5::DECIMAL(9,8)", "-0.5::FLOAT"),
        ("-0.0::DOUBLE", "0"),
        ("0.00001::DECIMAL(9,6)", "1e-5::DOUBLE"),
        ("0.000012::DECIMAL(9,6)", "0.0000120::DECIMAL(9,7)"),
        ("9007199254740992", "9007199254740992::DOUBLE"),
        ("1e22::DOUBLE", "10000000000000000000000.0::DECIMAL(38,1)"),
        ("DATE '2024-02-29'", "TIMESTAMP '2024-02-29 00:00:00'"),
        ("TIMESTAMPTZ '2024-02-29 01:00:00+01'", "TIMESTAMP '2024-02-29'"),
        ("TIMESTAMP_S '2024-02-29 12:00:01'", "TIMESTAMP_NS '2024-02-29 12:00:01'"),
        ("'\u00e9'", "'e\u0301'"),
        ("'a'::ENUM('b','a')", "'a'"),
    ],
)
def test_equal_values_agree(tmp_path, value, other):
    found = hash_of(tmp_path, value)
    assert found is not None
    assert found == hash_of(tmp_path, other)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ("'1'", "1"),
        ("'true'", "true"),
        ("1", "true"),
        ("0", "DATE '1970-01-01'"),
        ("'01'", "'1'"),
        ("'a'", "'A'"),
        ("'a'", "'a '"),
        ("1e22::DOUBLE", "10000000000000000000001::DECIMAL(38,0)"),
        ("9007199254740993", "9007199254740992::DOUBLE"),
        ("0.1::FLOAT", "0.1::DOUBLE"),  # as for SQL's =
        ("10", "100"),
        ("1.5", "15"),
    ],
)
def test_different_values_differ(tmp_path, value, other):
    assert hash_of(tmp_path, value) != hash_of(tmp_path, other)


@pytest.mark.parametrize("value", ["NULL::INTEGER", "NULL::VARCHAR", "'nan'::DOUBLE"])
def test_missing_key_has_no_hash(tmp_path, value):
    assert hash_of(tmp_path, value) is None


def test_equal_texts_in_two_normal_forms_are_one_value():
    texts = ["\u00e9", unicodedata.normalize("NFD", "\u00e9")]
    shard = run(pd.DataFrame({"k": texts}), fragment({"c": '"k"'}, [('"k"',)]))
    assert shard.keys[0].codes.tolist() == [0, 0]
    assert shard.columns["c"].categories == ("\u00e9",)


def test_composite_keys_do_not_run_together(tmp_path):
    values = "('a', 'bc'), ('ab', 'c'), ('', 'abc'), ('a', NULL)"
    rows = f"SELECT * FROM (VALUES {values}) v(p, q)"
    shard = of_sql(tmp_path, rows, fragment(keys=[('"p"', '"q"'), ('"q"', '"p"')]))
    *hashes, last = hash_of_rows(shard.keys[0])
    assert len(set(hashes)) == 3
    assert last is None
    assert not set(hashes) & set(hash_of_rows(shard.keys[1]))


@few
@given(
    st.lists(
        st.integers(-(2**53), 2**53)
        | st.floats(allow_infinity=False, allow_nan=False, width=32)
        | st.integers(-999, 999).map(lambda n: n / 8),
        min_size=1,
        max_size=8,
    )
)
def test_number_hashes_agree_exactly_when_the_numbers_do(values):
    doubles = pd.DataFrame({"k": np.array(values, float)})
    key = run(doubles, fragment(keys=[('"k"',)])).keys[0]
    whole = [value for value in values if value == int(value) and abs(value) < 2**62]
    integers = pd.DataFrame({"k": np.array(whole, np.int64)})
    other = run(integers, fragment(keys=[('"k"',)])).keys[0]
    listed = list(zip(values, hash_of_rows(key), strict=True))
    listed += zip(whole, hash_of_rows(other), strict=True)
    for value, found in listed:
        for second, hashed in listed:
            assert (value == second) == (found == hashed)


@few
@given(st.lists(st.decimals(-99999, 99999, places=6), min_size=1, max_size=5))
def test_decimals_agree_with_doubles(values):
    exact = pd.DataFrame({"k": pd.Series(values, dtype=object)})
    rounded = pd.DataFrame({"k": [float(value) for value in values]})
    wanted = fragment(keys=[('CAST("k" AS DECIMAL(18, 6))',), ('"k"',)])
    first = hash_of_rows(run(exact, wanted).keys[0])
    assert first == hash_of_rows(run(rounded, wanted).keys[1])
    # equal decimals only: 0.1 is not Decimal's float
    assert len(set(first)) == len(set(values))


@few
@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=6))
def test_text_pairs_agree_exactly_when_they_are_equal(pairs):
    def usable(text: str) -> bool:
        return "\x00" not in text and text.isprintable()

    pairs = [pair for pair in pairs if all(map(usable, pair))]
    frame = pd.DataFrame(
        {"p": pd.Series([p for p, _ in pairs], dtype="str"),
         "q": pd.Series([q for _, q in pairs], dtype="str")}
    )  # fmt: skip
    hashes = hash_of_rows(run(frame, fragment(keys=[('"p"', '"q"')])).keys[0])
    normal = [tuple(unicodedata.normalize("NFC", part) for part in p) for p in pairs]
    for pair, found in zip(normal, hashes, strict=True):
        for other, hashed in zip(normal, hashes, strict=True):
            assert (pair == other) == (found == hashed)


# files


rows = st.lists(
    st.tuples(
        st.none() | st.integers(0, 3),
        st.none() | st.sampled_from(["", "a", "\u00e9"]),
        st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=6,
)


@few
@given(rows, st.sampled_from([None, '"c"', '"x"']))
def test_save_and_load_is_the_identity(tmp_path_factory, members, label):
    frame = pd.DataFrame(
        {
            "k": pd.array([row[0] for row in members], "Int64"),
            "c": pd.Series([row[1] for row in members], dtype="str"),
            "x": pd.Series([row[2] for row in members], dtype=float),
        }
    )
    features = {"c": '"c"', "x/../1": '"x"', "k": '"k"'}
    shard = run(frame, fragment(features, [('"k"',), ('"c"', '"k"')], label))
    folder = tmp_path_factory.mktemp("saved") / "shard"
    shard.save(folder)
    assert_equal(ExtractedShard.load(folder), shard)
    assert_equal(ExtractedShard.from_arrays(*shard.to_arrays()), shard)


def test_loaded_columns_are_memory_maps(tmp_path):
    run(FRAME, WANTED).save(tmp_path)
    columns = ExtractedShard.load(tmp_path).columns
    assert isinstance(columns["twice"], NumericColumn)
    assert isinstance(columns["c"], CategoricalColumn)
    assert isinstance(columns["twice"].values, np.memmap)


def test_two_runs_agree():
    assert_equal(run(FRAME, WANTED), run(FRAME, WANTED))


# refusals


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_feature(value):
    frame = pd.DataFrame({"x": [1.0, value]})
    match = "table 'table' at site 'here' .*: 'size' has infinite values"
    with pytest.raises(SourceError, match=match):
        run(frame, fragment({"size": '"x"'}))


def test_infinite_label(tmp_path):
    with pytest.raises(SourceError, match="'label' has infinite values"):
        of_sql(tmp_path, "SELECT DATE 'infinity' AS d", fragment(label='"d"'))


def test_infinite_values_that_are_filtered_out_do_no_harm():
    frame = pd.DataFrame({"x": [1.0, np.inf]})
    shard = run(frame, fragment({"x": '"x"'}, filters=['"x" < 9']))
    assert shard.columns["x"].values.tolist() == [1.0]


@pytest.mark.parametrize("kind", ["INTERVAL", "BLOB", "INTEGER[]", "TIME"])
def test_type_without_use(tmp_path, kind):
    sql = f"SELECT CAST(NULL AS {kind}) AS x"
    with pytest.raises(SourceError, match=r"'f' is of type .* cannot be used: CAST it"):
        of_sql(tmp_path, sql, fragment({"f": '"x"'}))
    with pytest.raises(SourceError, match="'join key \"x\"' is of type"):
        of_sql(tmp_path, sql, fragment(keys=[('"x"',)]))


def test_expression_that_fails_on_the_values():
    frame = pd.DataFrame({"x": ["1", "one"]})
    with pytest.raises(SourceError, match=r"table 'table' at site 'here'.*Conversion"):
        run(frame, fragment({"f": 'CAST("x" AS INTEGER)'}))


def test_fragment_is_checked_before_it_runs(tmp_path):
    with pytest.raises(QueryError, match="no column 'z'"):
        run(FRAME, fragment({"f": '"z"'}))
    with pytest.raises(QueryError):
        run(FRAME, fragment({"f": f"(SELECT 1 FROM '{tmp_path}/x.csv')"}))


@pytest.mark.parametrize(
    ("duckdb_type", "kind"),
    [
        *((name, "number") for name in NUMBERS),
        ("DECIMAL(18,3)[]", None),
        ("BOOLEAN", "boolean"),
        ("TIMESTAMP WITH TIME ZONE", "time"),
        ("TIMESTAMP_NS", "time"),
        ("TIME", None),
        ("INTERVAL", None),
        ("ENUM('a', 'b')", "text"),
        ("ENUM('a')[]", None),
        ("STRUCT(a INTEGER)", None),
        ("BLOB", None),
    ],
)
def test_kind_of(duckdb_type, kind):
    assert kind_of(duckdb_type) == kind


def test_types_of_python_values():
    frame = pd.DataFrame(
        {
            "decimal": pd.Series([Decimal("1.5"), None], dtype=object),
            "date": pd.Series([dt.date(1970, 1, 2), None], dtype=object),
            "whole": pd.array([3, None], "Int64"),
        }
    )
    features = {name: f'"{name}"' for name in frame}
    columns = run(frame, fragment(features)).columns
    np.testing.assert_array_equal(columns["decimal"].values, [1.5, np.nan])
    np.testing.assert_array_equal(columns["date"].values, [86400, np.nan])
    np.testing.assert_array_equal(columns["whole"].values, [3, np.nan])
