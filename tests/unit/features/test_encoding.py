import json
import re
from collections import Counter
from unittest.mock import Mock

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import sklearn.preprocessing as sk
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tests.support.examples.encoding_example import (
    HASHER,
    categorical,
    choice_of,
    encoder_of,
    names_with_texts,
    numeric,
    statistics_of,
    vectors,
)
from tests.support.files import ROOT, case_table, text_of
from tp_flower.errors import SchemaError
from tp_flower.features.columns import (
    CategoricalColumn,
    NumericColumn,
    cycle_of,
    number_texts,
    text_lengths,
)
from tp_flower.features.encoder import SiteEncoder, TableEncoder
from tp_flower.features.encodings import ABSENT, OTHER
from tp_flower.features.fitting import fit
from tp_flower.features.sparse import SparseRows, dense
from tp_flower.features.spec import ENCODERS, TIME_PARTS, EncoderSpec
from tp_flower.features.statistics import CountedRows, category_purpose, short_hashes
from tp_flower.keyed_hash import KeyedHasher, hex_texts

CASES = case_table(__file__)
TEXTS = """
one-hot(2); one-hot(3); one-hot(9); one-hot(3) missing=zero indicator; hash(3); length;
length missing=zero indicator; categories(b, "", ccc) indicator; codes; codes(2)
"""
NUMBER_SPECS, TEXT_SPECS = (
    [spec.strip() for spec in specs.split(";")] for specs in (CASES["numbers"], TEXTS)
)
TIES = KeyedHasher(bytes(32)).purpose("ties")
SCALES = ("standard", "min-max")
SAVED = encoder_of({"c": categorical("a", "b")}).to_json()
# sums of such numbers are exact, so that what is constant is so in any order
numbers = st.none() | st.integers(-40, 40).map(lambda n: n / 4)
texts = st.none() | st.sampled_from(["", "b", "ä", "ccc", OTHER])
pairs = st.none() | st.tuples(st.floats(-9, 9, width=32), st.just(float("nan")))
rows = st.lists(
    st.tuples(numbers, texts, pairs, st.integers(0, 2)), min_size=1, max_size=30
)


def refused(match):
    """Expect columns or encoders to be refused, with such a text."""
    return pytest.raises(SchemaError, match=match)


def test_every_encoder_is_tried_and_described():
    tried = {EncoderSpec.parse(spec).kind for spec in (*NUMBER_SPECS, *TEXT_SPECS)}
    assert tried == set(ENCODERS), "add a spec of it to NUMBERS or TEXTS"
    page = text_of(ROOT / "docs/reference/encoders.md")
    missing = [kind for kind in ENCODERS if f"`{kind}" not in page]
    assert not missing, "docs/reference/encoders.md has no row of them"


def columns_of(x, c, v):
    return {"x": x, "c": c, "v": v}


def table(members):
    x, c, v = ([row[place] for row in members] for place in range(3))
    return columns_of(numeric(*x), categorical(*c), vectors(*v))


def is_mean_at_an_edge(members, spec: str) -> bool:
    """Whether a missing number is in one of two bins, as the mean is rounded."""
    numbers = [row[0] for row in members if row[0] is not None]
    is_filled = len(numbers) < len(members) and "missing=zero" not in spec
    if not (spec.startswith("bins(") and is_filled and len(set(numbers)) > 1):
        return False
    bins = int(re.search(r"\d+", spec)[0])
    place = bins * (np.mean(numbers) - min(numbers)) / (max(numbers) - min(numbers))
    return abs(place - round(place)) < 1e-6


@given(rows, st.sampled_from(NUMBER_SPECS), st.sampled_from(TEXT_SPECS), st.booleans())
def test_encoding_of_any_sharding_is_that_of_the_whole(members, x, c, is_indicated):
    assume(not is_mean_at_an_edge(members, x))
    members.sort(key=lambda row: row[3])
    shards = [table([m for m in members if m[3] == shard]) for shard in range(3)]
    specs = {"x": x, "c": c, "v": "none indicator" if is_indicated else "none"}
    whole = encoder_of(table(members), **specs)
    merged = encoder_of(*shards, **specs)
    backwards = encoder_of(*shards[::-1], **specs)
    assert merged.encoder.feature_names == whole.encoder.feature_names
    assert merged.encoder.dropped == whole.encoder.dropped
    expected = whole.transform(table(members))
    for encoder in (merged, backwards):
        encoded = np.concatenate([encoder.transform(shard) for shard in shards])
        assert_allclose(encoded, expected, rtol=1e-6, atol=1e-6)
    # an encoder that was saved or sent encodes the same to the last bit
    loaded = SiteEncoder.from_json(through_json(whole))
    received = TableEncoder.from_json(through_json(whole.encoder))
    assert loaded == whole
    assert received == whole.encoder
    for encoder in (loaded, received.for_site(HASHER)):
        assert encoder.transform(table(members)).tobytes() == expected.tobytes()


@given(rows, st.sampled_from(NUMBER_SPECS), st.sampled_from(TEXT_SPECS))
def test_sparse_rows_hold_what_dense_rows_hold(members, x, c):
    columns = table(members)
    encoder = encoder_of(columns, x=x, c=c, v="none indicator")
    described = encoder.encoder
    sparse = SparseRows.empty(len(members), described.stored, described.width)
    encoder.write(columns, sparse)
    assert sparse.shape == (len(members), described.width)
    # but for the sign of zeros
    assert np.array_equal(dense(sparse), encoder.transform(columns))
    assert described.stored <= described.width


@pytest.mark.parametrize(
    ("spec", "stored"),
    [("one-hot(9)", 1), ("hash(9)", 1), ("hash(9) indicator", 2), ("length", 1)],
)
def test_a_one_hot_encoding_stores_one_value(spec, stored):
    texts = categorical("a", "bb", "ccc", "d", None)
    assert encoder_of({"c": texts}, c=spec).encoder.stored == stored


def through_json(encoder):
    return json.loads(json.dumps(encoder.to_json(), allow_nan=False))


def test_a_key_is_in_the_sites_copy_alone():
    columns = {"c": categorical("secret", "b"), "x": numeric(1, 2)}
    encoder = encoder_of(columns, c="hash(4)")
    key = HASHER.purpose(category_purpose("t", "c")).secret.hex()
    assert key in json.dumps(encoder.to_json())
    sent = json.dumps(encoder_of(columns).encoder.to_json())
    assert key not in sent
    assert "secret" not in sent
    assert key not in repr(encoder)
    assert HASHER.secret.hex() not in json.dumps(encoder.to_json())


@given(
    st.lists(numbers, min_size=2, max_size=30),
    st.sampled_from(["mean", "zero"]),
    st.sampled_from(SCALES),
)
def test_scaling_equals_scikit_learn(values, missing, kind):
    columns = {"x": numeric(*values)}
    encoder = encoder_of(columns, x=f"{kind} missing={missing}")
    present = np.array([v for v in values if v is not None])
    if len(set(present)) < 2:
        assert encoder.encoder.dropped == ("x",)
        return
    scalers = (sk.StandardScaler, sk.MinMaxScaler)
    scaler = dict(zip(SCALES, scalers, strict=True))[kind]().fit(present[:, None])
    fills = {"mean": present.mean(), "zero": 0.0}
    filled = np.array([fills[missing] if v is None else v for v in values])[:, None]
    assert_allclose(encoder.transform(columns), scaler.transform(filled), 1e-6, 1e-6)


DAY = 86400.0
DATES = numeric(0, DAY, 40 * DAY)  # in January, January and February
HOURS, MONTHS = (f"sin {part} of x, cos {part} of x" for part in ("hour", "month"))
ONE = "x, x is missing"
ENDS = "-1 0; 1 0; 0 1"
JANUARY, FEBRUARY = (f"{np.sin(a)} {np.cos(a)}" for a in (np.pi / 6, np.pi / 3))


@pytest.mark.parametrize(
    ("column", "kind", "spec", "names", "expected"),
    [
        (
            numeric(0, 3, 6, 15, None),
            "number",
            "cyclic(12)",
            "sin x, cos x",
            "0 1; 1 0; 0 -1; 1 0; 0 0",
        ),
        (
            numeric(0, 6 * 3600, 40 * DAY + 18 * 3600 + 1.5, None),
            "time",
            "cyclic(hour)",
            HOURS,
            "0 1; 1 0; -1 0; 0 0",
        ),
        (DATES, "time", "cyclic(hour)", HOURS, "0 1; 0 1; 0 1"),
        (DATES, "time", "cyclic(month)", MONTHS, f"{JANUARY}; {JANUARY}; {FEBRUARY}"),
        (
            categorical("a", "abc", None),
            "text",
            "length indicator",
            "length of x, x is missing",
            ENDS,
        ),
        (
            vectors((1, 2), None, (3, float("nan"))),
            "vector",
            "none indicator",
            "x[0], x[1], x is missing",
            "1 2 0; 0 0 1; 3 0 0",
        ),
        (
            numeric(0, 10 * DAY, None),
            "time",
            "range(1970-01-01, 1970-01-05) indicator",
            ONE,
            ENDS,
        ),
        (numeric(0, 1, None), "boolean", "range(0, 1) indicator", ONE, ENDS),
        # a text is compared in Unicode's NFC, as everywhere
        (
            categorical("UA", None, "B, 6", "DL", "\u00c5"),
            "text",
            'categories("B, 6", A\u030a, UA) indicator',
            "x=B, 6, x=\u00c5, x=UA, x is missing",
            "0 0 1 0; 0 0 0 1; 1 0 0 0; 0 0 0 0; 0 1 0 0",
        ),
        (
            numeric(2.5, 1, None, 7),
            "number",
            "categories(1, 2.50)",
            "x=1.0, x=2.5",
            "0 1; 1 0; 0 0; 0 0",
        ),
        # no value but one, once the missing one is filled: its indicator stays
        (numeric(1, None), "number", "standard indicator", "x is missing", "0; 1"),
        # nothing is missing: there is nothing to indicate
        (numeric(1, 3), "number", "standard indicator", "x", "-1; 1"),
        (
            numeric(1, None, 3),
            "number",
            "none missing=zero squared present",
            "x, x squared, x is present",
            "1 1 1; 0 0 0; 3 9 1",
        ),
        (
            numeric(0, None, 40),
            "number",
            "range(0, 20) squared present",
            "x, x squared, x is present",
            "-1 1 1; 0 0 0; 1 1 1",
        ),
        # a constant stays beside what says where it is
        (
            categorical("a", None, "a"),
            "text",
            "categories(a) present",
            "x=a, x is present",
            "1 1; 0 0; 1 1",
        ),
    ],
)
def test_encodings_by_hand(column, kind, spec, names, expected):
    columns = {"x": column}
    encoder = encoder_of(columns, kinds={"x": kind}, x=spec)
    assert ", ".join(encoder.encoder.feature_names) == names
    rows = np.array([row.split() for row in expected.split(";")], float)
    assert_allclose(encoder.transform(columns), rows, rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.integers(-99, 99), min_size=9, max_size=30, unique=True),
    st.integers(2, 4),
)
def test_bins_equal_scikit_learn(values, bins):
    columns = {"x": numeric(*values)}
    data = np.array(values, float)[:, None]
    reference = sk.KBinsDiscretizer(
        bins, encode="onehot-dense", strategy="uniform", subsample=None
    )
    reference.fit(data)
    encoder = encoder_of(columns, x=f"bins({bins})")
    for each in (data, np.array([[-1000], [1000]])):
        encoded = encoder.transform({"x": NumericColumn(each[:, 0].astype(float))})
        assert_array_equal(encoded, reference.transform(each))


def _hashes(names):
    key = HASHER.purpose(category_purpose("t", "c"))
    return hex_texts(short_hashes(pa.array(names), key)).to_pylist()


@given(st.lists(texts, min_size=1, max_size=30), st.integers(2, 9))
def test_rare_categories_share_a_column(values, most):
    columns = {"c": categorical(*values)}
    encoder = encoder_of(columns, most=most)
    # a missing value is a category, the last of those that are as frequent
    counts = Counter(values)
    if len(counts) < 2:
        assert encoder.encoder.dropped == ("c",)
        return
    texts = [name for name in counts if name is not None]
    hashes = dict(zip(texts, _hashes(texts), strict=True)) | {None: "f" * 32}
    numbers = short_hashes(pa.array(texts), TIES)[:, 0].astype(np.uint32)
    ties = dict(zip(texts, numbers, strict=True))
    ranked = sorted(counts, key=lambda name: (-counts[name], ties.get(name, np.inf)))
    frequent = ranked if len(ranked) <= most else ranked[: most - 1]
    frequent = sorted(frequent, key=lambda name: hashes[name])
    has_other = len(frequent) < len(ranked)
    shown = [ABSENT if name is None else name for name in frequent]
    names = [f"c={name}" for name in [*shown, *[OTHER] * has_other]]
    assert list(names_with_texts(encoder, columns)) == names
    short = encoder.encoder.feature_names[: len(frequent)]
    for name in short:
        assert ABSENT in name or (name[2], len(name)) == ("#", 11)
    for value, row in zip(values, encoder.transform(columns), strict=True):
        expected = [float(value == name) for name in frequent]
        expected += [float(value not in frequent)] if has_other else []
        assert row.tolist() == expected
    unseen = encoder.transform({"c": categorical("new")})[0]
    assert unseen.tolist() == [0.0] * len(frequent) + [1.0] * has_other


@given(st.lists(texts, min_size=1, max_size=20), st.integers(2, 5))
def test_hashing_is_the_hash_modulo_k(values, buckets):
    columns = {"c": categorical(*values)}
    encoder = encoder_of(columns, c=f"hash({buckets})")
    for value, got in zip(values, encoder.transform(columns), strict=True):
        expected = [0.0] * buckets
        if value is not None:
            (digits,) = _hashes([value])
            sign = -1.0 if int(digits[16:], 16) % 2 else 1.0
            expected[int(digits[:16], 16) % buckets] = sign
        assert got.tolist() == expected


@pytest.mark.parametrize("value", [0.1, 1.7e9 + 1e-6, -3e150, 0.0])
@pytest.mark.parametrize(
    "spec", [s for s in NUMBER_SPECS if EncoderSpec.parse(s).needs_of("number")]
)
def test_constant_column_is_dropped_however_it_is_sharded(value, spec):
    shards = [{"x": numeric(*[value] * n)} for n in (3, 7, 11)]
    assert encoder_of(*shards, x=spec).encoder.dropped == ("x",)


def test_column_without_values_fits_any_kind():
    """As in a CSV shard where a number column is empty, and so read as text."""
    first = columns_of(numeric(1, 3), numeric(None, None), categorical(None, None))
    second = columns_of(categorical(None), categorical("a"), vectors((4,), width=1))
    third = columns_of(numeric(None), categorical("b"), numeric(None))
    encoder = encoder_of(first, second, third, x="standard", c="one-hot(9)", v="none")
    names = names_with_texts(encoder, {**first, "c": categorical("a", "b")})
    assert sorted(names) == ["c=(missing)", "c=a", "c=b", "v[0]", "x"]
    by_name = dict(zip(names, encoder.transform(first)[0].tolist(), strict=True))
    assert by_name == {"x": -1, "c=a": 0, "c=b": 0, "c=(missing)": 1, "v[0]": 0}
    by_name = dict(zip(names, encoder.transform(second)[0].tolist(), strict=True))
    assert by_name == {"x": 0, "c=a": 1, "c=b": 0, "c=(missing)": 0, "v[0]": 4}
    empty = columns_of(numeric(None), categorical(None), vectors(None))
    encoder = encoder_of(empty, x="standard indicator")
    assert encoder.encoder.dropped == ("x", "c", "v")
    assert encoder.transform(empty).shape == (1, 0)
    encoder = fit("t", {}).for_site(HASHER)
    assert encoder.transform({}, out=np.empty((3, 0), np.float32)).shape == (3, 0)


def test_rare_values_and_rows_left_out_do_not_count():
    columns = {"c": categorical("a", "a", "a", "b", "b", "z")}
    rare = statistics_of(choice_of(columns), columns, CountedRows(HASHER, min_count=2))
    assert sorted(rare["c"].categories.counts) == [2, 3]
    encoder = fit("t", rare).for_site(HASHER)
    assert encoder.encoder.feature_names[-1] == f"c={OTHER}"
    assert encoder.transform(columns)[-1].tolist() == [0, 0, 1]
    columns = {"x": numeric(1, 3, 100)}
    train = CountedRows(HASHER, rows=np.array([True, True, False]))
    trained = statistics_of(choice_of(columns), columns, train)
    encoder = fit("t", trained).for_site(HASHER)
    rows = encoder.transform({"x": columns["x"].take(np.array([1, 0, 1]))})
    assert rows[:, 0].tolist() == [1, -1, 1]
    assert encoder.transform(columns)[2].tolist() == [98]


def test_blocks_do_not_show(monkeypatch):
    # blocks of 256 rows
    monkeypatch.setattr("tp_flower.features.encoder.BLOCK_VALUES", 1)
    values = np.arange(1000.0)
    columns = {"x": NumericColumn(values)}
    out = np.full((1000, 1), 7, np.float32)
    encoder = encoder_of(columns)
    assert encoder.transform(columns, out=out) is out
    assert_allclose(out[:, 0], (values - values.mean()) / values.std(), rtol=1e-6)
    backwards = encoder.transform({"x": NumericColumn(values[::-1])})
    assert_array_equal(backwards, out[::-1])


def test_texts_that_blocks_share_are_hashed_once(monkeypatch):
    spy = Mock(wraps=short_hashes)
    whole = categorical("a", "b", "a", "b")
    encoder = encoder_of({"c": whole})
    monkeypatch.setattr("tp_flower.features.encoder.short_hashes", spy)
    blocks = [{"c": whole.take(slice(k, k + 2))} for k in (0, 2)]
    parts = [encoder.transform(block) for block in blocks]
    assert [len(call.args[0]) for call in spy.mock_calls] == [2]
    assert_array_equal(np.concatenate(parts), encoder.transform({"c": whole}))
    other = CategoricalColumn(np.zeros(1, np.int32), ("b",))
    assert_array_equal(encoder.transform({"c": other})[0], parts[0][1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"version": 1}, "encoder has version 1, expected 2"),
        *(
            ({"version": 2, **broken}, "malformed encoder")
            for broken in CASES["broken"]
        ),
    ],
)
def test_refuses_malformed_encoders(data, message):
    with refused(message):
        TableEncoder.from_json(data)
    with refused(message):
        SiteEncoder.from_json({**SAVED, "encoder": data})


def test_refuses_encoders_without_usable_keys():
    with refused("no key for the categories of 'c'"):
        SiteEncoder.from_json({**SAVED, "keys": {}})
    with refused("malformed encoder of a site") as error:
        SiteEncoder.from_json({**SAVED, "keys": {"c": "abcd"}})
    assert "abcd" not in str(error.value)


@pytest.mark.parametrize(
    ("fitted", "column", "message"),
    [
        (numeric(1, 2), {"y": numeric(1)}, "'x' is not among the shard's: y"),
        (numeric(1, 2), {"x": categorical("a")}, "'x' is not numeric"),
        (categorical("a", "b"), {"x": numeric(1)}, "'x' is not categorical"),
        (vectors((1, 2)), {"x": numeric(1)}, "'x' is not a vector"),
        (vectors((1, 2)), {"x": vectors((1,), width=1)}, r"of length 1 .* expected 2"),
    ],
)
def test_refuses_columns_that_do_not_fit(fitted, column, message):
    with refused(message):
        encoder_of({"x": fitted}).transform(column)


def test_refuses_values_and_outputs_that_do_not_fit():
    columns = {"x": numeric(1, 2, 3)}
    with pytest.raises(ValueError, match=r"out must be float32 \(3, 1\)"):
        encoder_of(columns).transform(columns, out=np.empty((2, 1), np.float32))
    with refused(r"'x' of table 't': .* too large .* standa"):
        encoder_of({"x": numeric(0, 1e40)}, x="none")


SQL_PARTS = {part: part for part in ("hour", "minute", "month")}
SQL_PARTS |= {"weekday": "dayofweek", "day-of-year": "dayofyear"}


@given(st.lists(st.integers(-(10**11), 10**11), min_size=1, max_size=20))
def test_parts_of_a_time_are_those_of_sql(seconds):
    given_list = ", ".join(map(str, seconds))
    for part, name in SQL_PARTS.items():
        expected = duckdb.sql(
            f"SELECT date_part('{name}', make_timestamp(s * 1000000)) AS part "
            f"FROM (SELECT unnest([{given_list}]::BIGINT[]) AS s)"
        ).fetchnumpy()["part"]
        place, period = cycle_of(part)
        assert_array_equal(place(np.array(seconds, float)), expected)
        assert period == TIME_PARTS[part]
    assert SQL_PARTS.keys() == TIME_PARTS.keys()


@pytest.mark.parametrize("argument", [*TIME_PARTS, 12, 0.5])
def test_what_is_missing_has_no_place(argument):
    place, _ = cycle_of(argument)
    assert np.isnan(place(np.array([np.nan, 3601.5]))).tolist() == [True, False]


@given(st.lists(st.none() | st.text(), max_size=8))
def test_lengths_are_characters(texts):
    expected = [np.nan if text is None else len(text) for text in texts]
    assert_array_equal(text_lengths(categorical(*texts)).values, expected)


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_have_one_text_each(numbers):
    column = number_texts(numeric(*numbers))
    texts = column.texts.to_pylist()
    read_back = np.append([float(text) for text in texts], np.nan)
    assert_array_equal(read_back[column.codes], numeric(*numbers).values)
    assert len(set(texts)) == len({x for x in numbers if x is not None})
