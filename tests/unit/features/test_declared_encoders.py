"""Encoders made of declared ranges and categories: what they write and release."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples.encoding_example import categorical, encoder_of, numeric
from tests.support.federated import (
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


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=20),
    st.sampled_from(["", " missing=zero"]),
)
def test_a_range_is_the_place_between_its_ends(low, width, values, missing):
    high = low + width
    columns = {"x": numeric(*values)}
    spec = f"range({low!r}, {high!r}){missing}"
    encoded = encoder_of(columns, x=spec).transform(columns)
    # missing values stand in the middle, or where zero is, or at the end next to it
    filled = np.clip(0.0, low, high) if missing else (low + high) / 2
    inside = [filled if v is None else np.clip(v, low, high) for v in values]
    expected = 2 * (np.array(inside) - low) / width - 1
    np.testing.assert_allclose(encoded[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert (np.abs(encoded) <= 1).all()


def test_declared_ends_and_categories():
    summer = DeclaredRange.parse("2013-01-01T00:00+01:00, 2014-01-01")
    assert summer.low % 86_400 == 82_800
    assert number_categories(("1", "2.50", "true")) == ("1.0", "2.5", "1.0")
    encoder = encoder_of({"x": numeric(1)}, x="categories(1)")
    with pytest.raises(SchemaError, match="'x' is not numeric"):
        encoder.transform({"x": categorical("1")})
    columns = {"c": categorical("a")}
    encoder = encoder_of(columns, c="categories(b, a)")
    assert encoder.feature_names(columns) == ("c=b", "c=a")
    assert encoder.keys == {}


def test_no_value_decides_what_is_encoded():
    """Also constant, unknown and missing values have their columns."""
    specs = {"x": "range(0, 1) indicator", "c": "categories(a) indicator"}
    for values in ((None, None), (0.5, 0.5)):
        columns = {"x": numeric(*values), "c": categorical("z", "z")}
        encoder = encoder_of(columns, **specs).encoder
        assert (encoder.dropped, encoder.fitted) == ((), ())
        assert encoder.feature_names == ("x", "x is missing", "c=a", "c is missing")
    fitted = encoder_of(columns, c="categories(a)").encoder
    assert (fitted.dropped, fitted.fitted) == (("x",), ("x",))


def statistics_of(finished):
    """What sites replied of each part's features; there are no arrays."""
    replies = finished.sent("query.statistics", replies=True)
    assert not any(reply.arrays for reply in replies)
    return [part for reply in replies for part in reply.header["parts"]]


def features_of(finished):
    return [facts for part in statistics_of(finished) for facts in part["statistics"]]


def released(report, what):
    """The releases of a kind in the ledgers of a run."""
    ledgers = report.privacy["ledger"].values()
    releases = [line["release"] for lines in ledgers for line in lines]
    return [release for release in releases if release["what"] == what]


def test_nothing_of_a_value_leaves_for_encoders():
    sites = one_per_site(sharded(store()))
    finished = run("squared", sites, num_epochs=1, encoders=DECLARED)
    parts = statistics_of(finished)
    assert len(parts) == 7
    assert all(facts.keys() == {"name", "kind"} for facts in features_of(finished))
    assert released(finished.strategy.report, "keys")
    assert not released(finished.strategy.report, "statistics")
    encoders = finished.strategy.training_problem.encoders
    names = {table: encoder.feature_names for table, encoder in encoders.items()}
    assert names == NAMES
    # other rows, other values: the very same replies, and the same encoders
    others = store(seed=1)
    others["customers"] = others["customers"].assign(region="FR", age=50.0)
    shards = one_per_site(sharded(others))
    again = run("squared", shards, num_epochs=1, encoders=DECLARED)
    assert statistics_of(again) == parts
    assert again.strategy.training_problem.encoders == encoders


def test_statistics_of_other_tables_leave_as_before():
    privacy = PrivacySettings(features="statistics", epsilon=1.0)
    shards = one_per_site(whole(store()))
    settings = {"num_epochs": 1, "privacy": privacy, "encoders": DECLARED[:4]}
    finished = run("squared", shards, **settings)
    encoders = finished.strategy.training_problem.encoders
    fitted = {name: encoder.fitted for name, encoder in encoders.items()}
    assert fitted == {"o": (), "c": (), "i": ("price", "weight")}
    report = finished.strategy.report
    assert [line["table"] for line in released(report, "statistics")] == ["items"]
    # a guarantee takes no declared encoder for granted
    takes_encoder = {
        line["table"]: "whose statistics are" in line["scope"]
        for line in released(report, "gram")
    }
    assert takes_encoder == {"orders": False, "customers": False, "items": True}


@pytest.mark.parametrize("region", ["categories(US, UK)", "hash(4)"])
def test_a_column_that_is_all_null_at_its_source_fits(region):
    """Its type there says nothing: a data frame's is an integer."""
    frames = store()
    customers = frames["customers"]
    empty = customers.iloc[:4].assign(region=None, age=None)
    shards = one_per_site(whole(frames) | {"customers": [empty, customers.iloc[4:]]})
    encoders = (*DECLARED[:3], ("c", "region", region), *DECLARED[4:])
    finished = run("squared", shards, num_epochs=1, encoders=encoders)
    features = features_of(finished)
    assert sorted(f["kind"] for f in features if f["name"] == "region") == ["", "text"]
    ages = finished.features["c"][:4, :2]
    # not in the order of the source, but all alike: the middle, and missing
    assert (ages == [0, 1]).all(axis=1).sum() >= 3


def test_a_filter_cannot_ask_whether_a_value_is_missing():
    sql = store_sql("squared") + " WHERE c.region IS NULL"
    settings = {"task": "regression", "num_epochs": 1, "test_fraction": 0.0}
    shards = one_per_site(whole(store()))
    finished = run_query(sql, shards, encoders=DECLARED, **settings)
    assert {"name": "region", "kind": "text"} in features_of(finished)
    encoder = finished.strategy.training_problem.encoders["c"]
    assert encoder.feature_names == NAMES["c"]


def test_vectors_leave_their_length_alone():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"v": list(rng.normal(size=(20, 3))), "k": np.arange(20)})
    frame["y"] = rng.normal(size=20)
    other = pd.DataFrame({"k": np.arange(20), "x": rng.normal(size=20)})
    shards = one_per_site({"a": [frame.iloc[:9], frame.iloc[9:]], "b": [other]})
    sql = "SELECT a.y AS label, a.v, b.x FROM a JOIN b ON a.k = b.k"
    encoders = (("b", "x", "range(-3, 3)"),)
    settings = {"task": "regression", "num_epochs": 1, "encoders": encoders}
    finished = run_query(sql, shards, **settings)
    vector = {"name": "v", "kind": "vector", "width": 3}
    assert features_of(finished) == [vector, vector, {"name": "x", "kind": "number"}]
    names = finished.strategy.training_problem.encoders["a"].feature_names
    assert names == ("v[0]", "v[1]", "v[2]")


OTHERS = 'labels = "clear", models = "clear", scores = "clear"'
NEVER = dict.fromkeys(("orders", "customers"), "releases = { statistics = 'never' }")
BUDGET = dict.fromkeys(NEVER, f"epsilon = 1\nreleases={{{OTHERS}}}")


@pytest.mark.parametrize("policies", [NEVER, BUDGET])
def test_where_no_statistics_may_leave_declared_encoders_do(tmp_path, policies):
    finished = train_hostile(HostileGrid(tmp_path, policies=policies), encoders=FREE)
    assert not released(finished.report, "statistics")


PRICE = r"encoder standard missing=mean of o\.price .* 'o\.price=<enc.*range"
KIND = r"encoder one-hot\(256\) .* of c\.kind .* 'c\.kind=<encod.*categories"


@pytest.mark.parametrize(("encoders", "match"), [(FREE[1:], PRICE), (FREE[:-1], KIND)])
def test_the_refusal_says_what_to_write_instead(tmp_path, encoders, match):
    grid = HostileGrid(tmp_path, policies=NEVER)
    with pytest.raises(SiteError, match=rf"releases\.statistics = never\).*{match}"):
        train_hostile(grid, encoders=encoders)


def test_a_server_cannot_ask_for_more(tmp_path):
    """Encoders that were declared in the query's setting may change on their way."""

    def fitted(action, _, packet):
        if action == "query.statistics":
            header = json.loads(json.dumps(packet.header))
            for part in header["parts"]:
                specs = part["encoders"]["specs"]
                specs[next(iter(specs))] = "standard"
            yield "fitted", type(packet)(header, packet.arrays)

    grid = HostileGrid(tmp_path, fitted, policies=NEVER)
    train_hostile(grid, encoders=FREE)
    assert len(grid.answers) == 3
    for answer in grid.answers:
        answer.check_nothing_left()
        assert "releases.statistics = never" in answer.error
