"""The rows of a person that may take part: how many, which ones, and whose they are."""

import math
from dataclasses import replace

import duckdb
import numpy as np
import pandas as pd
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tests.support.database_tables import fill, source_of, url_of
from tests.support.joined import parquet_of
from tests.support.tables.fragments import features, plain_features
from tests.support.tables.sources import file_source, write_frame
from tp_flower.errors import PolicyError, SourceError
from tp_flower.extraction.extract import extract, open_extracted
from tp_flower.query import Fragment, SubQuery
from tp_flower.sources.policy import Policy
from tp_flower.sources.shards import ShardSource

KEY = b"\1" * 32
OTHER = b"\2" * 32


def claims() -> pd.DataFrame:
    """Thirty people with 1 to 66 rows each, in no order."""
    sizes = np.linspace(1, 66, 30).astype(int)
    frame = pd.DataFrame({"person": np.repeat(np.arange(30), sizes)})
    frame["amount"] = np.arange(len(frame), dtype=float)
    frame["day"] = default_rng(0).integers(1, 29, len(frame))
    return frame.sample(frac=1.0, random_state=0).reset_index(drop=True)


def fragment(*names: str, **pieces) -> Fragment:
    return Fragment("c", "claims", plain_features(*names), **pieces)


AMOUNTS = fragment("amount", "person")


def bounded(source: ShardSource, rows: int, *unit: str) -> ShardSource:
    return replace(
        source, policy=replace(source.policy, privacy_unit=unit, rows_per_unit=rows)
    )


def parquet(folder, frame: pd.DataFrame, rows: int, *unit: str) -> ShardSource:
    path = folder / "claims.parquet"
    duckdb.from_df(frame).write_parquet(str(path))
    return bounded(file_source(path, "claims"), rows, *unit)


def of_sql(folder, sql: str, rows: int, *unit: str) -> ShardSource:
    return bounded(parquet_of(folder, sql, "claims"), rows, *unit)


@pytest.fixture
def source(tmp_path) -> ShardSource:
    """Claims, of which five of a person may take part."""
    return parquet(tmp_path, claims(), 5, "person")


def extracted(source, wanted=AMOUNTS, key=KEY):
    return extract(source, wanted, order_key=key)


def values(shard, name: str) -> list:
    return shard.column(name).values.tolist()


def drawn(source, key=KEY, wanted=AMOUNTS) -> list:
    return values(extracted(source, wanted, key), "amount")


@pytest.mark.parametrize("rows", [1, 5, 20, 66])
def test_of_every_person_there_are_as_many_rows_as_allowed(tmp_path, rows):
    frame = claims()
    shard = extracted(parquet(tmp_path, frame, rows, "person"))
    assert shard.units is not None
    people = np.array(values(shard, "person"))
    counts = frame["person"].value_counts()
    for person in range(30):
        own = people == person
        assert own.sum() == min(counts[person], rows)
        assert len(np.unique(shard.units[own])) == 1
    assert len(np.unique(shard.units)) == 30
    # in the table's own order
    order = [frame["amount"].tolist().index(one) for one in values(shard, "amount")]
    assert order == sorted(order)


def test_without_a_unit_every_row_is_there(tmp_path):
    frame = claims()
    source = replace(parquet(tmp_path, frame, 1, "person"), policy=Policy())
    shard = extracted(source)
    assert shard.units is None
    assert values(shard, "amount") == frame["amount"].tolist()


def test_which_rows_follows_from_the_key_and_from_nothing_that_is_asked(source):
    first = drawn(source)
    assert first == drawn(source)
    assert set(first) != set(drawn(source, OTHER))
    for wanted in (
        fragment("amount"),
        fragment("amount", "day", label='"day" * 2', keys=(('"person"',),)),
        fragment("amount", weight='"day"', filters=("true",)),
    ):
        assert drawn(source, wanted=wanted) == first
    # filters choose among the drawn rows, and bring no other
    halves = [
        drawn(source, wanted=fragment("amount", filters=(condition,)))
        for condition in ('"day" < 9', '"day" >= 9')
    ]
    assert sorted(halves[0] + halves[1]) == sorted(first)


def test_a_smaller_bound_takes_of_the_same_rows(tmp_path):
    one, five = (
        set(drawn(parquet(tmp_path, claims(), rows, "person"))) for rows in (1, 5)
    )
    assert one < five


def test_another_persons_rows_change_nothing(tmp_path):
    """So a person's going changes their own rows alone, as the bounds assume."""
    frame = claims()
    whole = set(drawn(parquet(tmp_path, frame, 3, "person")))
    left = set(drawn(parquet(tmp_path, frame[frame["person"] != 17], 3, "person")))
    assert left == whole - set(frame["amount"][frame["person"] == 17])


def test_every_row_is_drawn_as_often_as_any_other(tmp_path):
    """Equal rows, too: they do not stand or fall together."""
    frame = pd.DataFrame({"person": 1, "kind": ["a"] * 8 + ["b"] * 8})
    source = parquet(tmp_path, frame, 4, "person")
    kinds = []
    for number in range(60):
        key = number.to_bytes(32, "big")
        label = extract(source, fragment(label='"kind"'), order_key=key).label
        kinds.append(label.codes.sum() if len(label.categories) == 2 else -1)
    # of 4 among 8 and 8, two of each on average; all alike in 8 % of the draws
    assert kinds.count(-1) < 15
    mixed = [own for own in kinds if own > 0]
    assert abs(np.mean(mixed) - 2.0) < 5 * 0.9 / math.sqrt(len(mixed))


def test_the_rows_are_the_same_from_the_cache(source, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    written = extract(source, AMOUNTS, folder, KEY)
    again = open_extracted(folder)
    assert values(written, "amount") == values(again, "amount") == drawn(source)
    assert_array_equal(written.units, again.units)
    assert again.contents.units.name == "person"
    assert again.contents.units.width == 5


def test_rows_without_a_unit_are_one_unit(tmp_path):
    # NaN is no other unit than NULL
    rows = "(NULL, 0), (1.0, 1), (NULL, 2), ('nan'::DOUBLE, 3), (1.0, 4), (NULL, 5)"
    sql = f"SELECT * FROM (VALUES {rows}) AS t(person, amount)"
    amounts = drawn(of_sql(tmp_path, sql, 2, "person"), wanted=fragment("amount"))
    assert len(set(amounts) - {1.0, 4.0}) == 2
    assert {1.0, 4.0} < set(amounts)


def test_several_columns_name_a_unit_and_spellings_of_a_text_are_one(tmp_path):
    frame = pd.DataFrame(
        {
            # composed and decomposed
            "name": ["Ren\u00e9", "Rene\u0301", "Ren\u00e9", "Ann", "Ann"],
            "born": [1990, 1990, 1991, 1990, 1990],
            "amount": [0.0, 1.0, 2.0, 3.0, 4.0],
        }
    )
    source = parquet(tmp_path, frame, 1, "NAME", "born")
    amounts = drawn(source, wanted=fragment("amount"))
    assert len(amounts) == 3
    assert 2.0 in amounts


@pytest.mark.parametrize("kind", ["csv", "duckdb", "parquet", "sqlite"])
def test_every_source_is_bounded(tmp_path, request, kind):
    frame = claims()
    if kind == "sqlite":
        url = url_of("sqlite", request, tmp_path)
        types = {"person": "INTEGER", "amount": "DOUBLE", "day": "INTEGER"}
        rows = [tuple(own) for own in frame.to_numpy().tolist()]
        source = source_of(url, fill(url, "claims", types, rows))
    else:
        path = tmp_path / f"claims.{kind}"
        write_frame(frame, path, "claims")
        relation = ("claims",) if kind == "duckdb" else None
        source = file_source(path, "claims", relation=relation)
    source = bounded(source, 5, "person")
    shard = extracted(source)
    expected = np.minimum(frame["person"].value_counts(), 5)
    counts = pd.Series(values(shard, "person")).value_counts()
    assert counts.to_dict() == expected.to_dict()
    # a filter, which a database would apply by itself, brings no other rows
    few = drawn(source, wanted=fragment("amount", filters=('"day" < 9',)))
    assert set(few) < set(values(shard, "amount"))


def test_columns_of_any_name_and_type_are_left_alone(tmp_path):
    names = '1 AS place, 2 AS turn, 3 AS copy, 4 AS content, 5 AS "unit"'
    others = "[1, 2] AS list, {'a': 1} AS struct, 'x'::BLOB AS b"
    source = of_sql(tmp_path, f"SELECT {names}, {others} FROM range(4)", 3, "unit")
    wanted = fragment("place", "turn", "copy", "content", "unit")
    shard = extracted(source, wanted)
    assert [values(shard, name) for name in ("turn", "unit")] == [[2] * 3, [5] * 3]


def grouped(*groups: str, **pieces) -> Fragment:
    columns = features(n="COUNT(*)", mean='AVG("amount")')
    subquery = SubQuery(columns, groups=tuple(f'"{name}"' for name in groups))
    return fragment("n", "mean", subquery=subquery, **pieces)


def test_groups_of_a_unit_are_made_of_its_drawn_rows(source):
    plain = extracted(source)
    rows = pd.DataFrame({n: values(plain, n) for n in ("person", "amount")})
    expected = rows.groupby("person")["amount"].agg(["size", "mean"])
    shard = extracted(source, grouped("PERSON"))
    groups = zip(values(shard, "n"), values(shard, "mean"), strict=True)
    assert sorted(groups) == sorted(map(tuple, expected.to_numpy().tolist()))
    assert sorted(shard.units) == list(range(30))


def test_finer_groups_of_a_unit_count_as_its_rows(source):
    shard = extracted(source, grouped("day", "person"))
    counts = np.bincount(shard.units)
    assert len(counts) == 30
    assert counts.max() <= 5
    assert sum(values(shard, "n")) == np.minimum(np.linspace(1, 66, 30) // 1, 5).sum()
    (every,) = grouped("day", "person").all_groups
    bare = extracted(source, every)
    assert bare.rows == shard.rows


def test_groups_of_several_units_are_refused(source):
    match = (
        r"policy \(privacy-unit\) refuses: the sub-query of table 'c' groups rows of "
        "different units; GROUP BY person as well"
    )
    for wanted in (grouped("day"), *grouped("day").all_groups):
        with pytest.raises(PolicyError, match=match):
            extracted(source, wanted)


def test_a_unit_is_of_a_type_that_can_be_compared(tmp_path):
    source = of_sql(tmp_path, "SELECT [1] AS b, 1 AS amount", 1, "b")
    with pytest.raises(
        SourceError, match=r"'b' is of type INTEGER\[\], which cannot be used"
    ):
        extract(source, fragment("amount"))
