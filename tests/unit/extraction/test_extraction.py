import datetime as dt
import hashlib
import hmac
import unicodedata
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from itertools import chain, pairwise
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.cmac import CMAC
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tests.support.files import case_table
from tests.support.joined import parquet_of, run
from tests.support.tables.fragments import features as named_features
from tp_flower import keyed_hash
from tp_flower.errors import QueryError, SourceError
from tp_flower.extraction.extract import _numbered, extract, open_extracted
from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
from tp_flower.extraction.select_plan import kind_of
from tp_flower.features.columns import CategoricalColumn
from tp_flower.keyed_hash import KeyedHasher, order_of_hashes
from tp_flower.query import Fragment, SubQuery
from tp_flower.sources.shards import scan

# each example opens DuckDB several times
few = settings(max_examples=25)
CASES = case_table(__file__)
SIGNED = ["TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"]
OTHERS = ["FLOAT", "DOUBLE", "DECIMAL(9,0)", "DECIMAL(12,4)", "DECIMAL(38,9)"]
NUMBERS = [*SIGNED, *(f"U{kind}" for kind in SIGNED), *OTHERS]
SECRET = bytes(range(32))
HASHER = KeyedHasher(SECRET)
# DuckDB takes no other texts from a data frame
texts = st.text(max_size=3).filter(lambda t: "\x00" not in t and t.isprintable())
PAYMENTS = pd.DataFrame({"c": [2, None, 1, 2, None], "x": [1.0, 2.0, 3.0, 5.0, 8.0]})
WANTS = CASES["wants"]
REFUSED = [(part, *case) for part in WANTS for case in CASES["refused"][part]]


def fragment(features=(), keys=(), label=None, filters=()) -> Fragment:
    named = named_features(**dict(features))
    return Fragment("t", "table", named, tuple(keys), label, tuple(filters))


def of_sql(tmp_path, sql: str, wanted: Fragment) -> ExtractedShard:
    return extract(parquet_of(tmp_path, sql), wanted)


def hash_of_rows(key: ExtractedKey) -> list[tuple[int, int] | None]:
    hashed = key.hashed(HASHER)
    hashes = [tuple(pair) for pair in hashed.hashes.tolist()]
    return [None if code < 0 else hashes[code] for code in hashed.codes.tolist()]


def hash_of(tmp_path, value: str) -> tuple[int, int] | None:
    wanted = fragment(keys=[('"k"',)])
    (actual,) = hash_of_rows(of_sql(tmp_path, f"SELECT {value} AS k", wanted).keys[0])
    return actual


def contents(shard: ExtractedShard) -> dict:
    """Everything in a shard, as lists."""
    label = shard.label
    return {
        "table": (shard.table, shard.rows, shard.features),
        "columns": [rows_in(shard.column(info.name)) for info in shard.features],
        "keys": [(k.codes.tolist(), k.texts.to_pylist(), k.kind) for k in shard.keys],
        "label": label and (label.kind, label.categories, str(label.values.tolist())),
    }


def rows_in(column) -> list:
    if isinstance(column, CategoricalColumn):
        return [column.texts[c].as_py() if c >= 0 else None for c in column.codes]
    return [str(row) for row in column.values.tolist()]


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
    assert shard.table == "t"
    assert shard.rows == 3
    assert shard.groups is None
    kinds = {"twice": "number", "flag": "boolean", "day": "time", "c": "text"}
    assert {info.name: info.kind for info in shard.features} == kinds
    values = [[3, np.nan, 6], [1, 0, 1], [86400, np.nan, -86400]]
    for name, expected in zip(kinds, values, strict=False):
        assert_array_equal(shard.column(name).values, expected)
        assert shard.column(name).values.dtype == np.float64
    assert shard.column("c").texts.to_pylist() == ["A", "B"]
    assert shard.column("c").codes.tolist() == [1, -1, 0]
    assert shard.label.kind == "text"
    assert shard.label.categories == ("no", "yes")
    assert shard.label.codes.tolist() == [0, 1, -1]
    first, second = shard.keys
    assert first.kind == "number"
    assert second.kind == "number+text"
    assert first.codes[0] == first.codes[2] != first.codes[1]
    assert second.codes[1] == -1
    assert len(first.texts) == len(second.texts) == 2
    for codes in (first.codes, shard.column("c").codes, shard.label.codes):
        assert codes.dtype == np.int32
    rows = run(FRAME, fragment())
    assert rows.rows == 4
    assert rows.keys == ()
    assert rows.label is None
    assert rows.features == ()


def test_label_kinds():
    for sql, kind, values in (
        ('"x"', "number", [1.5, np.nan, 3, 4]),
        ('"x" > 2', "boolean", [0, np.nan, 1, 1]),
        ('"day"', "time", [86400, np.nan, -86400, 0]),
        ('"y"', "text", [0, 1, np.nan, 0]),
    ):
        label = run(FRAME, fragment(label=sql)).label
        assert label.kind == kind
        assert label.values.dtype == np.float64
        assert_array_equal(label.values, values)


def test_many_rows_and_texts_keep_the_order_of_the_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("tp_flower.extraction.extract.MOST_ROWS", 1000)
    # more rows than DuckDB hands to one thread at a time
    number = default_rng(0).permutation(300_000)
    texts = np.char.add((number % 5_000).astype(str), "é")
    frame = pd.DataFrame({"k": number // 2, "x": number, "c": texts})
    wanted = fragment({"x": '"x"', "c": '"c"'}, [('"k"',)], filters=['"x" > 9'])
    shard = run(frame, wanted, tmp_path)
    x, column, (key,) = shard.column("x").values, shard.column("c"), shard.keys
    assert_array_equal(x, number[number > 9])
    categories = np.array(column.texts.to_pylist())
    assert (categories == np.unique(texts)).all()
    assert (categories[column.codes] == texts[number > 9]).all()
    keys = [f"number{len(k)}:{k}" for k in map(str, (x // 2).astype(int))]
    assert key.texts.take(key.codes).to_pylist() == keys


EQUAL = [
    ["100", *(f"CAST(100 AS {kind})" for kind in NUMBERS)],
    ["0", "-0.0::DOUBLE", *(f"CAST(0 AS {kind})" for kind in NUMBERS)],
    *CASES["equal"],
]


def test_equal_values_agree_and_others_do_not(tmp_path):
    hashes = [[hash_of(tmp_path, value) for value in values] for values in EQUAL]
    for values, group in zip(EQUAL, hashes, strict=True):
        assert len(set(group)) == 1, values
        assert (group[0] is None) == ("NULL::INTEGER" in values)
    assert len({group[0] for group in hashes}) == len(EQUAL)


def assert_equal_where(values, hashes):
    pairs = list(zip(values, hashes, strict=True))
    for value, actual in pairs:
        for other, hashed in pairs:
            assert (value == other) == (actual == hashed)


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
    whole = [value for value in values if value == int(value) and abs(value) < 2**62]
    hashes = []
    for column in (np.array(values, float), np.array(whole, np.int64)):
        shard = run(pd.DataFrame({"k": column}), fragment(keys=[('"k"',)]))
        hashes += hash_of_rows(shard.keys[0])
    assert_equal_where([*values, *whole], hashes)


@few
@given(st.lists(st.tuples(texts, texts), max_size=6))
@example([("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", "")])
def test_text_pairs_agree_exactly_when_they_are_equal(pairs):
    frame = pd.DataFrame(pairs, columns=["p", "q"], dtype="str")
    hashes = hash_of_rows(run(frame, fragment(keys=[('"p"', '"q"')])).keys[0])
    normal = [tuple(unicodedata.normalize("NFC", part) for part in p) for p in pairs]
    assert_equal_where(normal, hashes)


rows = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.none() | st.integers(0, 3),
            "c": st.none() | st.sampled_from(["", "a", "\u00e9"]),
            "x": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        }
    ),
    max_size=6,
)


@few
@given(rows, st.sampled_from([None, '"c"', '"x"']))
def test_columns_in_files_are_those_in_memory(tmp_path_factory, members, label):
    frame = pd.DataFrame(members, columns=["k", "c", "x"])
    frame = frame.astype({"k": "Int64", "c": "str", "x": float})
    features = {"c": '"c"', "x/../1": '"x"', "k": '"k"'}
    wanted = fragment(features, [('"k"',), ('"c"', '"k"')], label)
    folder = tmp_path_factory.mktemp("kept")
    assert contents(run(frame, wanted, folder)) == contents(run(frame, wanted))
    assert contents(open_extracted(folder)) == contents(run(frame, wanted))


def test_blocks_are_the_rows_of_the_columns(tmp_path, monkeypatch):
    monkeypatch.setattr("tp_flower.extraction.extract.MOST_ROWS", 7)
    rng = default_rng(0)
    texts = [None if n % 5 == 0 else f"t{n % 7}" for n in range(50)]
    numbers = np.where(rng.random(50) < 0.2, np.nan, rng.random(50))
    vectors = [None if n % 11 == 0 else [n / 4, -n] for n in range(50)]
    frame = pd.DataFrame({"x": numbers, "c": texts, "v": vectors})
    wanted = fragment({name: f'"{name}"' for name in "xcv"})
    every = np.arange(50)
    runs = np.concatenate([every[::3], every[1::2]])
    for folder in (None, tmp_path):
        shard = run(frame, wanted, folder)
        assert shard.contents.starts == [*range(0, 50, 7), 50]
        assert_array_equal(shard.column("x").values, frame["x"])
        assert rows_in(shard.column("c")) == texts
        vectors = [[np.nan] * 2 if v is None else v for v in frame["v"]]
        assert_array_equal(shard.column("v").values, vectors)
        for rows in (None, every, runs, runs[:1], runs[:0]):
            for size in (1, 4, 7, 50, 99):
                blocks = list(shard.blocks(rows, size))
                for name in "xcv":
                    whole = shard.column(name).take(every if rows is None else rows)
                    parts = [rows_in(block[name]) for block in blocks]
                    assert list(chain(*parts)) == rows_in(whole)
        lists = [block["c"].texts for block in shard.blocks(None, 9)]
        assert all(each is lists[0] for each in lists)


@pytest.mark.parametrize(("width", "rows"), [(1, 1 << 16), (64, 1 << 13), (512, 1024)])
def test_batches_are_of_one_size_in_bytes(tmp_path, width, rows):
    columns = {f"x{number}": f"i + {number}" for number in range(width)}
    shard = of_sql(tmp_path, f"SELECT i FROM range({rows + 1}) t(i)", fragment(columns))
    assert shard.contents.starts == [0, rows, rows + 1]


def test_file_that_is_cut_short(tmp_path):
    run(FRAME, WANTED, tmp_path)
    path = tmp_path / "rows.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="Arrow file"):
        open_extracted(tmp_path).column("twice")


@CASES.each("vectors", "kind")
def test_vectors(tmp_path, kind):
    values = f"(NULL), ([1, 2]::{kind}), (NULL), ([NULL, -4]::{kind})"
    sql = f"SELECT CAST(v AS {kind}) AS v FROM (VALUES {values}) t(v)"
    shard = of_sql(tmp_path, sql, fragment({"e": '"v"'}))
    assert [(f.name, f.kind, f.width) for f in shard.features] == [("e", "vector", 2)]
    none = [np.nan, np.nan]
    rows = shard.column("e").values
    assert rows.dtype == np.float32
    assert_array_equal(rows, [none, [1, 2], none, [np.nan, -4]])
    empty = of_sql(tmp_path, f"SELECT NULL::{kind} AS v", fragment({"e": '"v"'}))
    assert "[2]" in kind or empty.column("e").values.shape == (1, 0)


def grouped(**changed) -> Fragment:
    columns = named_features(c='"c"', total='SUM("x")')
    subquery = SubQuery(columns, groups=('"c"',))
    whole = fragment({"total": '"total"'}, [('"c"',)], filters=['"total" > 3'])
    return replace(whole, subquery=replace(subquery, **changed))


def test_subquery_runs_first():
    shard = run(PAYMENTS, grouped())
    assert sorted(shard.column("total").values.tolist()) == [6, 10]
    key = shard.keys[0]
    groups = shard.groups
    assert sorted(key.codes.tolist()) == [-1, 0]
    assert sorted(groups.texts.to_pylist()) == ["null", "number1:2"]
    assert sorted(groups.codes.tolist()) == [0, 1]
    assert run(PAYMENTS, grouped(having=('SUM("x") > 7',))).rows == 1


def test_order_of_groups_is_that_of_their_contents_and_the_key_of_the_site():
    numbers = default_rng(3).integers(0, 9_000, 50_000)
    frame = pd.DataFrame({"c": numbers, "x": numbers % 7 * 1.0})
    first, again = (contents(run(frame, grouped())) for _ in range(2))
    shuffled = frame.sample(frac=1, random_state=1)
    assert first == again == contents(run(shuffled, grouped()))
    # it tells nothing of the contents
    frame = pd.DataFrame({"c": np.arange(200), "x": np.arange(4.0, 204.0)})
    first, second, again = (
        run(frame, grouped(), order_key=key).column("total").values
        for key in (b"a" * 32, b"b" * 32, b"a" * 32)
    )
    assert first.tolist() == again.tolist()
    assert sorted(first) == sorted(second) == frame["x"].tolist()
    for one, other in ((first, second), (first, frame["x"]), (second, frame["x"])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.3


def keys_in_order(shard: ExtractedShard) -> list[str]:
    key = shard.keys[0]
    return [key.texts[int(code)].as_py() for code in key.codes]


def test_orders_of_two_queries_do_not_tell_a_value_together():
    """A row whose condition is true would be where a query of nothing but 1 has it."""
    frame = pd.DataFrame({"c": np.arange(400), "x": np.arange(4.0, 404.0)})
    orders = []
    for sql in ('CASE WHEN "total" > 100 THEN 1 ELSE 0 END', "1"):
        whole = grouped()
        wanted = replace(whole, features=named_features(f=sql))
        orders.append(keys_in_order(run(frame, wanted, order_key=b"a" * 32)))
    are_true = [name for name in orders[0] if int(name.split(":")[1]) > 96]
    places = [orders[1].index(name) for name in are_true]
    assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.3


@pytest.mark.usefixtures("unordered")
def test_equal_rows_are_not_side_by_side():
    """They would tell that rows of one key have one value."""
    frame = pd.DataFrame({"c": np.repeat(np.arange(200), 2), "x": 1.0})
    wanted = fragment({"x": '"x"'}, [('"c"',)])
    order = keys_in_order(run(frame, wanted, order_key=b"a" * 32))
    assert sum(one == other for one, other in pairwise(order)) < 8


@pytest.fixture
def unordered(monkeypatch):
    """Data frames as a database without an order gives its rows."""

    def scanned(source, wanted):
        @contextmanager
        def opened():
            with scan(source, wanted) as actual:
                yield replace(actual, needs_sort=True)

        return opened()

    monkeypatch.setattr("tp_flower.extraction.unit_rows.scan", scanned)


@pytest.mark.usefixtures("unordered")
def test_rows_without_an_order_are_sorted():
    wanted = fragment({"twice": '"x" * 2', "c": '"c"'}, [('"k"',)])
    shuffled = FRAME.iloc[[2, 0, 3, 1]]
    assert contents(run(FRAME, wanted)) == contents(run(shuffled, wanted))


@pytest.mark.usefixtures("unordered")
@pytest.mark.parametrize("features", [{}, {"same": "1"}, {"x": '"x"'}])
def test_order_of_rows_does_not_depend_on_the_label(features):
    """Rows of one label side by side would tell what noise on labels hides."""
    x = default_rng(5).permutation(1000)
    frame = pd.DataFrame({"x": x, "y": x % 2})
    label, other = (
        run(frame, fragment(features, label=sql)).label.values
        for sql in ('"y"', '1 - "y"')
    )
    assert_array_equal(other, 1 - label)
    assert np.count_nonzero(np.diff(label)) == pytest.approx(500, abs=5 * np.sqrt(250))


def test_hashes_are_the_tags_of_the_texts():
    frame = pd.DataFrame({"k": [*range(50), None], "c": "x"})
    (key,) = run(frame, fragment(keys=[('"c"', '"k"')])).keys
    hashed = key.hashed(HASHER)
    tags = HASHER.tag_texts(key.texts)
    pairs = [tuple(pair) for pair in hashed.hashes.tolist()]
    assert hashed.hashes.dtype == np.uint64
    assert pairs == sorted(set(pairs))
    assert set(pairs) == set(map(tuple, tags.tolist()))
    assert key.codes[-1] == hashed.codes[-1] == -1
    for code, sent in zip(key.codes[:-1], hashed.codes, strict=False):
        assert tuple(tags[code].tolist()) == pairs[sent]


def test_types_of_python_values():
    values = {"decimal": Decimal("1.5"), "date": dt.date(1970, 1, 2), "whole": 3}
    frame = pd.DataFrame([values, {}], dtype=object)
    frame["whole"] = frame["whole"].astype("Int64")
    shard = run(frame, fragment({name: f'"{name}"' for name in frame}))
    for name, value in (("decimal", 1.5), ("date", 86400), ("whole", 3)):
        assert_array_equal(shard.column(name).values, [value, np.nan])
    frame = pd.DataFrame({"x": [1.0, np.inf]})  # infinite, but filtered out
    shard = run(frame, fragment({"x": '"x"'}, filters=['"x" < 9']))
    assert shard.column("x").values.tolist() == [1.0]


@pytest.mark.parametrize(("part", "value", "match"), REFUSED)
def test_refused_values(tmp_path, part, value, match):
    sql = f"SELECT {value} AS v FROM range(3) t(i)"
    wanted = fragment(**WANTS[part])
    with pytest.raises(SourceError, match=match):
        of_sql(tmp_path, sql, wanted)


@pytest.mark.parametrize("expression", ['"z"', "(SELECT 1 FROM 'x.csv')"])
def test_fragment_is_checked_before_it_runs(expression):
    with pytest.raises(QueryError, match=r"no column 'z'|sub-queries"):
        run(FRAME, fragment({"f": expression}))


def test_kinds_of_types():
    for kind, types in {"number": NUMBERS, **CASES["kinds"]}.items():
        for name in types:
            assert (name, kind_of(name) or "none") == (name, kind)


def hmac_of(text):
    return hmac.digest(SECRET, text.encode(), hashlib.sha256)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8),
    st.booleans(),
)
def test_hash_equals_hmac_sha256(texts, are_few):
    with patch.object(keyed_hash, "FEW_TEXTS", 8 * are_few):
        hashes = HASHER.hash_texts(pa.array(texts, pa.string()))
    expected = [np.frombuffer(hmac_of(text), ">u8") for text in texts]
    assert hashes.dtype == np.uint64
    assert np.array_equal(hashes, np.array(expected).reshape(-1, 4))


def cmac_of(text):
    """The library's, of which this is the same over arrays."""
    cmac = CMAC(AES(SECRET))
    cmac.update(text.encode())
    return cmac.finalize()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40)))
@example(["", "a" * 15, "a" * 16, "a" * 17, "é" * 8, "a" * 32, "a" * 33])
def test_tag_equals_aes_cmac(texts):
    whole = pa.array(["before", *texts], pa.string())
    with patch.object(keyed_hash, "_TEXTS_AT_ONCE", 3):
        for array in (whole[1:], pa.chunked_array([whole[1:3], whole[3:]])):
            tags = HASHER.tag_texts(array)
            assert tags.dtype == np.uint64
            sent = [tag.tobytes() for tag in tags.astype(">u8")]
            assert sent == [cmac_of(text) for text in texts]


def test_order_of_hashes_looks_at_their_second_halves():
    hashes = np.random.default_rng(1).integers(0, 5, (50, 2)).astype(np.uint64)
    assert hashes[order_of_hashes(hashes)].tolist() == sorted(hashes.tolist())


def test_order_is_kept_over_many_texts():
    texts = [str(i) for i in range(300_000)]
    hashes = HASHER.hash_texts(pa.array(texts))
    tags = HASHER.tag_texts(pa.array(texts))
    for place in (0, 150_000, 299_999):
        assert hashes[place].astype(">u8").tobytes() == hmac_of(texts[place])
        assert tags[place].astype(">u8").tobytes() == cmac_of(texts[place])


def test_purposes_and_secrets_give_unrelated_hashes():
    text = pa.array(["a"])
    purposes = [HASHER.purpose(name) for name in "xy"]
    hashers = [HASHER, *purposes, KeyedHasher(bytes(32))]
    assert len({hasher.hash_texts(text).tobytes() for hasher in hashers}) == 4
    assert len({hasher.tag_texts(text).tobytes() for hasher in hashers}) == 4
    assert HASHER.purpose("x") == purposes[0]


def test_secret_is_not_shown_and_has_one_length():
    assert "0" not in repr(HASHER)
    with pytest.raises(ValueError, match="has 3 bytes, not 32"):
        KeyedHasher(b"abc")


def test_texts_that_all_differ_are_numbered_without_those_that_are_null():
    positions, texts = _numbered(pa.array(["b", None, "a"]))
    assert positions.to_pylist() == [0, None, 1]
    assert texts.to_pylist() == ["b", "a"]
