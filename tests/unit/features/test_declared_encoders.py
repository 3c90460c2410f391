"""Encoders made of declared ranges and categories: what they write and release."""

import json
from collections.abc import Mapping

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples.encoding_example import categorical, encoder_of, numeric
from tests.support.federated import (
    SOURCE,
    Run,
    one_per_site,
    run,
    run_query,
    sharded,
    store,
    store_sql,
    whole,
)
from tests.support.peers.hostile import HostileGrid
from tests.support.peers.hostile import train as train_hostile
from tp_flower.errors import SchemaError, SiteError
from tp_flower.features.spec import DeclaredRange, number_categories
from tp_flower.settings import PrivacySettings

DECLARED = (
    ("o", "day", "range(1, 28)"),
    ("o", "online", "categories(true, false)"),
    ("c", "age", "range(18, 60) indicator"),
    ("c", "region", "categories(US, UK)"),
    ("i", "price", "range(0, 8)"),
    ("i", "weight", "range(0, 10) missing=zero"),
)
ALL_COLUMNS = "o.day, o.online, c.age, c.region, i.price, i.weight"
NAMES = {
    "o": ("day", "online=1.0", "online=0.0"),
    "c": ("age", "age is missing", "region=US", "region=UK"),
    "i": ("price", "weight"),
}
FREE = (
    ("o", "price", "range(-3, 3)"),
    ("o", "day", "cyclic(7)"),
    ("c", "age", "range(0, 200) indicator"),
    ("c", "kind", "categories(k0, k1)"),
)


# --- values ------------------------------------------------------------------


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=20),
)
def test_a_range_is_the_place_between_its_ends(
    low: float, width: float, values: list[float | None]
) -> None:
    high = low + width
    columns = {"x": numeric(*values)}
    encoded = encoder_of(columns, x=f"range({low!r}, {high!r})").transform(columns)
    values_or_nan = np.array([np.nan if v is None else v for v in values])
    # missing values stand in the middle
    inside = np.where(
        np.isnan(values_or_nan), (low + high) / 2, np.clip(values_or_nan, low, high)
    )
    expected = 2 * (inside - low) / width - 1
    np.testing.assert_allclose(encoded[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert (np.abs(encoded) <= 1).all()


def test_missing_values_of_a_range() -> None:
    columns = {"x": numeric(-10, 10, None)}
    zero = encoder_of(columns, x="range(-10, 30) missing=zero indicator")
    expected = [[-1, 0], [0, 0], [-0.5, 1]]
    np.testing.assert_array_equal(zero.transform(columns), expected)
    # zero lies outside of this range
    outside = encoder_of(columns, x="range(10, 30) missing=zero").transform(columns)
    np.testing.assert_array_equal(outside, [[-1], [-1], [-1]])


def test_times_and_booleans_in_a_range() -> None:
    day = 86400.0
    columns = {"x": numeric(0, 10 * day, None)}
    spec = "range(1970-01-01, 1970-01-05)"
    encoded = encoder_of(columns, kinds={"x": "time"}, x=spec).transform(columns)
    np.testing.assert_array_equal(encoded, [[-1], [1], [0]])
    columns = {"x": numeric(0, 1, None)}
    encoded = encoder_of(columns, kinds={"x": "boolean"}, x="range(0, 1)")
    np.testing.assert_array_equal(encoded.transform(columns), [[-1], [1], [0]])
    assert DeclaredRange.parse("2013-01-01T00:00+01:00, 2014-01-01").low % day == 82800


def test_categories_by_hand() -> None:
    columns = {"c": categorical("UA", None, "B, 6", "DL", "A\u030a")}
    # a text is compared in Unicode's NFC, as everywhere
    encoder = encoder_of(columns, c='categories("B, 6", \u00c5, UA) indicator')
    names = ("c=B, 6", "c=\u00c5", "c=UA", "c is missing")
    assert encoder.encoder.feature_names == names
    columns = {"c": categorical("UA", None, "B, 6", "DL", "\u00c5")}
    expected = [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    np.testing.assert_array_equal(encoder.transform(columns), expected)
    assert encoder.feature_names(columns) == names
    assert encoder.keys == {}


def test_categories_of_numbers() -> None:
    assert number_categories(("1", "2.50", "true")) == ("1.0", "2.5", "1.0")
    columns = {"x": numeric(2.5, 1, None, 7, -0.0)}
    encoder = encoder_of(columns, x="categories(1, 2.50, 0)")
    expected = [[0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]
    np.testing.assert_array_equal(encoder.transform(columns), expected)
    with pytest.raises(SchemaError, match="'x' is not numeric"):
        encoder.transform({"x": categorical("1")})


def test_no_value_decides_what_is_encoded() -> None:
    """Also constant, unknown and missing values have their columns."""
    specs = {"x": "range(0, 1) indicator", "c": "categories(a) indicator"}
    for values in ((None, None), (0.5, 0.5)):
        columns = {"x": numeric(*values), "c": categorical("z", "z")}
        encoder = encoder_of(columns, **specs).encoder
        assert (encoder.dropped, encoder.fitted) == ((), ())
        assert encoder.feature_names == ("x", "x is missing", "c=a", "c is missing")
    fitted = encoder_of(columns, c="categories(a)").encoder
    assert (fitted.dropped, fitted.fitted) == (("x",), ("x",))


# --- in a run -------------------------------------------------------------------------


def statistics_of(finished: Run) -> list[Mapping]:
    """What sites replied of each part's features; there are no arrays."""
    replies = [
        seen
        for seen in finished.seen
        if seen.action == "query.statistics" and seen.is_reply
    ]
    assert not any(reply.arrays for reply in replies)
    return [part for reply in replies for part in reply.header["parts"]]


def ledger_kinds(finished: Run) -> set[str]:
    ledger = finished.strategy.report.privacy["ledger"]
    return {line["release"]["what"] for lines in ledger.values() for line in lines}


@pytest.fixture(scope="module")
def finished() -> Run:
    sites = one_per_site(sharded(store()))
    return run("squared", sites, num_epochs=2, encoders=DECLARED, test_fraction=0.0)


def test_nothing_of_a_value_leaves_for_encoders(finished: Run) -> None:
    parts = statistics_of(finished)
    assert len(parts) == 7
    features = [facts for part in parts for facts in part["statistics"]]
    assert all(facts.keys() == {"name", "kind"} for facts in features)
    assert ledger_kinds(finished) & {"statistics", "keys"} == {"keys"}
    encoders = finished.strategy.training_problem.encoders
    assert {
        table: encoder.feature_names for table, encoder in encoders.items()
    } == NAMES
    # other rows, other values: the very same replies, and the same encoders
    others = store(seed=1)
    others["customers"] = others["customers"].assign(region="FR", age=50.0)
    shards = one_per_site(sharded(others))
    again = run("squared", shards, num_epochs=1, encoders=DECLARED)
    assert statistics_of(again) == parts
    assert again.strategy.training_problem.encoders == encoders


def test_the_encoding_is_that_of_the_materialised_join(finished: Run) -> None:
    frames = store()
    with duckdb.connect() as connection:
        for name, frame in frames.items():
            connection.register(name, frame)
        joined = connection.sql(f"SELECT {ALL_COLUMNS} {SOURCE}").df()
    expected = np.column_stack(
        [
            in_range(joined["day"], 1, 28),
            joined["online"] == True,  # noqa: E712
            joined["online"] == False,  # noqa: E712
            in_range(joined["age"].fillna(39), 18, 60),
            joined["age"].isna(),
            joined["region"] == "US",
            joined["region"] == "UK",
            in_range(joined["price"], 0, 8),
            in_range(joined["weight"].fillna(0), 0, 10),
        ]
    ).astype(np.float32)
    train = finished.strategy.training_problem.train
    encoded = np.column_stack(
        [finished.features[name][train.tables[name].row_of] for name in NAMES]
    )
    assert encoded.shape == expected.shape == (train.joined_rows, 9)
    # the join has no order; features are rounded to be put in one
    np.testing.assert_allclose(in_order(encoded), in_order(expected), atol=1e-5)


def in_range(values: pd.Series, low: float, high: float) -> pd.Series:
    return 2 * (values.clip(low, high) - low) / (high - low) - 1


def in_order(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.round(4).T)]


def test_of_other_tables_statistics_leave_as_before() -> None:
    shards = one_per_site(whole(store()))
    mixed = run("squared", shards, num_epochs=1, encoders=DECLARED[2:4])
    assert {name: encoder.fitted for name, encoder in encoders_of(mixed).items()} == {
        "o": ("day", "online"),
        "c": (),
        "i": ("price", "weight"),
    }
    ledger = mixed.strategy.report.privacy["ledger"]
    tables = [
        line["release"]["table"]
        for lines in ledger.values()
        for line in lines
        if line["release"]["what"] == "statistics"
    ]
    assert sorted(tables) == ["items", "orders"]


def encoders_of(finished: Run) -> Mapping:
    return finished.strategy.training_problem.encoders


def test_a_guarantee_takes_no_declared_encoder_for_granted() -> None:
    privacy = PrivacySettings(features="statistics", epsilon=1.0)
    shards = one_per_site(whole(store()))
    encoders = DECLARED[:4]
    settings = {"num_epochs": 1, "privacy": privacy, "encoders": encoders}
    finished = run("squared", shards, **settings)
    ledger = finished.strategy.report.privacy["ledger"]
    takes_encoder = {
        line["release"]["table"]: "whose statistics are" in line["release"]["scope"]
        for lines in ledger.values()
        for line in lines
        if line["release"]["what"] == "gram"
    }
    assert takes_encoder == {"orders": False, "customers": False, "items": True}


def test_a_column_that_is_all_null_at_its_source_fits() -> None:
    """Its type there says nothing: a data frame's is an integer."""
    frames = store()
    customers = frames["customers"]
    empty = customers.iloc[:4].assign(region=None, age=None)
    shards = whole(frames) | {"customers": [empty, customers.iloc[4:]]}
    for region in ("categories(US, UK)", "hash(4)"):
        encoders = (*DECLARED[:3], ("c", "region", region), *DECLARED[4:])
        finished = run("squared", one_per_site(shards), num_epochs=1, encoders=encoders)
        features = [
            facts["kind"]
            for part in statistics_of(finished)
            for facts in part["statistics"]
            if facts["name"] == "region"
        ]
        assert sorted(features) == ["", "text"]
        ages = finished.features["c"][:4, :2]
        # not in the order of the source, but all alike: the middle, and missing
        assert (ages == [0, 1]).all(axis=1).sum() >= 3


def test_a_filter_cannot_ask_whether_a_value_is_missing() -> None:
    sql = store_sql("squared") + " WHERE c.region IS NULL"
    shards = one_per_site(whole(store()))
    settings = {"task": "regression", "num_epochs": 1, "test_fraction": 0.0}
    finished = run_query(sql, shards, encoders=DECLARED, **settings)
    features = [
        facts for part in statistics_of(finished) for facts in part["statistics"]
    ]
    assert {"name": "region", "kind": "text"} in features
    assert encoders_of(finished)["c"].feature_names == NAMES["c"]


def test_vectors_leave_their_length_alone() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"v": list(rng.normal(size=(20, 3))), "y": rng.normal(size=20)}
    )
    frame["k"] = np.arange(20)
    other = pd.DataFrame({"k": np.arange(20), "x": rng.normal(size=20)})
    sql = "SELECT a.y AS label, a.v, b.x FROM a JOIN b ON a.k = b.k"
    shards = {"a": [frame.iloc[:9], frame.iloc[9:]], "b": [other]}
    finished = run_query(
        sql,
        one_per_site(shards),
        task="regression",
        num_epochs=1,
        encoders=(("b", "x", "range(-3, 3)"),),
    )
    features = [
        facts for part in statistics_of(finished) for facts in part["statistics"]
    ]
    vector = {"name": "v", "kind": "vector", "width": 3}
    assert features == [vector, vector, {"name": "x", "kind": "number"}]
    assert encoders_of(finished)["a"].feature_names == ("v[0]", "v[1]", "v[2]")


# --- policies -------------------------------------------------------------------------

OTHERS = 'labels = "clear", models = "clear", scores = "clear"'


@pytest.mark.parametrize(
    "rules",
    ["releases = { statistics = 'never' }", f"epsilon = 1\nreleases={{{OTHERS}}}"],
)
def test_where_no_statistics_may_leave_declared_encoders_do(tmp_path, rules) -> None:
    policies = {"orders": rules, "customers": rules}
    strategy = train_hostile(HostileGrid(tmp_path, policies=policies), encoders=FREE)
    ledger = strategy.report.privacy["ledger"]
    assert not any(
        line["release"]["what"] == "statistics"
        for lines in ledger.values()
        for line in lines
    )


@pytest.mark.parametrize(
    ("left_out", "match"),
    [
        (
            0,
            r"encoder standard missing=mean of o\.price .* 'o\.price=<enc.*range",
        ),
        (3, r"encoder one-hot\(256\) .* of c\.kind .* 'c\.kind=<encod.*categories"),
    ],
)
def test_the_refusal_says_what_to_write_instead(tmp_path, left_out, match) -> None:
    rules = "releases = { statistics = 'never' }"
    grid = HostileGrid(tmp_path, policies={"orders": rules, "customers": rules})
    encoders = FREE[:left_out] + FREE[left_out + 1 :]
    with pytest.raises(SiteError, match=rf"releases\.statistics = never\).*{match}"):
        train_hostile(grid, encoders=encoders)


def test_a_server_cannot_ask_for_more(tmp_path) -> None:
    """Encoders that were declared in the query's setting may change on their way."""

    def fitted(action, _, packet):
        if action == "query.statistics":
            header = json.loads(json.dumps(packet.header))
            for part in header["parts"]:
                specs = part["encoders"]["specs"]
                specs[next(iter(specs))] = "standard"
            yield "fitted", type(packet)(header, packet.arrays)

    rules = "releases = { statistics = 'never' }"
    policies = {"orders": rules, "customers": rules}
    grid = HostileGrid(tmp_path, fitted, policies=policies)
    train_hostile(grid, encoders=FREE)
    assert len(grid.answers) == 3
    for answer in grid.answers:
        answer.check_nothing_left()
        assert "releases.statistics = never" in answer.error
