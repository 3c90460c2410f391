"""Encoders made of declared ranges and categories: what they write and release."""

import json

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose

from client_apps.handlers import encoding
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
from tests.support.files import case_table
from tests.support.peers.hostile import HostileGrid
from tests.support.peers.hostile import train as train_hostile
from tests.support.peers.hostile_runs import check_all_refused
from tp_flower.errors import SchemaError, SiteError
from tp_flower.features.spec import DeclaredRange, number_categories
from tp_flower.features.statistics_codec import to_wire
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
DECLARED = tuple(map(tuple, CASES["declared"]))
COLUMNS = CASES["columns"]
FREE = tuple(map(tuple, CASES["free"]))
OTHERS = 'labels = "clear", models = "clear", scores = "clear"'
NEVER = dict.fromkeys(("orders", "customers"), "releases = { statistics = 'never' }")
BUDGET = dict.fromkeys(NEVER, f"epsilon = 1\nreleases={{{OTHERS}}}")
PRICE = r"encoder levels\(32\) missing=mean of o\.price .* 'o\.price=<enc.*range"
KIND = r"encoder one-hot\(256\) .* of c\.kind .* 'c\.kind=<encod.*categories"


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=20),
    st.sampled_from(["", " missing=zero"]),
)
def test_a_range_is_the_place_between_its_ends(low, width, values, missing):
    high = low + width
    columns = {"x": numeric(*values)}
    encoder = encoder_of(columns, x=f"range({low!r}, {high!r}){missing}")
    encoded = encoder.transform(columns)
    # missing values stand in the middle, or where zero is, or at the end next to it
    filled = np.clip(0.0, low, high) if missing else (low + high) / 2
    inside = [filled if v is None else np.clip(v, low, high) for v in values]
    expected = 2 * (np.array(inside) - low) / width - 1
    assert_allclose(encoded[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert (np.abs(encoded) <= 1).all()


def test_declared_ends_and_categories():
    year = DeclaredRange.parse("2013-01-01T00:00+01:00, 2014-01-01")
    assert year.low % 86_400 == 82_800
    assert number_categories(("1", "2.50", "true")) == ("1.0", "2.5", "1.0")
    encoder = encoder_of({"x": numeric(1)}, x="categories(1)")
    with pytest.raises(SchemaError, match="'x' is not numeric"):
        encoder.transform({"x": categorical("1")})
    encoder = encoder_of({"c": categorical("a")}, c="categories(b, a)")
    assert encoder.encoder.feature_names == ("c=b", "c=a")
    assert encoder.keys == {}


def test_no_value_decides_what_is_encoded():
    """Also constant, unknown and missing values have their columns."""
    specs = {"x": "range(0, 1) indicator", "c": "categories(a) indicator"}
    for values in ((None, None), (0.5, 0.5)):
        columns = {"x": numeric(*values), "c": categorical("z", "z")}
        encoder = encoder_of(columns, **specs).encoder
        assert encoder.dropped == ()
        assert encoder.fitted == ()
        assert encoder.feature_names == ("x", "x is missing", "c=a", "c is missing")
    fitted = encoder_of(columns, c="categories(a)").encoder
    assert fitted.dropped == ("x",)
    assert fitted.fitted == ("x",)


@pytest.fixture
def sealed(monkeypatch):
    """What shards have sealed for each other, of each feature; there are no arrays."""
    statistics = []

    def noted(columns):
        sent = to_wire(columns)
        statistics.append([without_none(item) for item in sent.statistics])
        assert not sent.category_hashes
        return sent

    monkeypatch.setattr(encoding, "to_wire", noted)
    return statistics


def without_none(item):
    facts = msgspec.structs.asdict(item)
    return {name: value for name, value in facts.items() if value is not None}


def trained(frames):
    """A run over shards of the store, with declared encoders."""
    shards = one_per_site(sharded(frames))
    return run("squared", shards, num_epochs=1, encoders=DECLARED)


def encoders_of(finished):
    return finished.strategy.training_problem.encoders


def read_by_server(finished):
    """All that the replies about encoders tell the server."""
    replies = finished.sent("query.statistics", replies=True)
    replies += finished.sent("query.fit", replies=True)
    lengths = [sorted(map(len, reply.arrays.values())) for reply in replies]
    return [reply.header["parts"] for reply in replies], lengths


def released(report, what):
    """The releases of a kind in the ledgers of a run."""
    ledgers = report.privacy["ledger"].values()
    releases = [line["release"] for lines in ledgers for line in lines]
    return [release for release in releases if release["what"] == what]


def test_nothing_of_a_value_leaves_for_encoders(sealed):
    finished = trained(store())
    assert len(sealed) == 7
    assert all(facts.keys() == {"name", "kind"} for part in sealed for facts in part)
    assert released(finished.strategy.report, "keys")
    assert not released(finished.strategy.report, "statistics")
    encoders = encoders_of(finished)
    assert {name: columns.features for name, columns in encoders.items()} == COLUMNS
    # other rows, other values: the very same replies, and the same encoders
    others = store(seed=1)
    others["customers"] = others["customers"].assign(region="FR", age=50.0)
    again = trained(others)
    assert read_by_server(again) == read_by_server(finished)
    assert sealed[:7] == sealed[7:]
    assert encoders_of(again) == encoders


@pytest.mark.parametrize("items", [whole, sharded])
def test_a_guarantee_takes_the_encoders_that_read_rows_for_granted(items):
    privacy = PrivacySettings(features="statistics", epsilon=1.0)
    shards = one_per_site({**whole(store()), "items": items(store())["items"]})
    finished = run(
        "squared", shards, num_epochs=1, privacy=privacy, encoders=DECLARED[:4]
    )
    encoders = encoders_of(finished).items()
    fitted = {name: columns.is_fitted for name, columns in encoders}
    assert fitted == {"o": False, "c": False, "i": True}
    report = finished.strategy.report
    # of a table in one shard no statistics leave
    tables = [line["table"] for line in released(report, "statistics")]
    assert tables == (["items"] * 2 if items is sharded else [])
    # a guarantee takes no declared encoder for granted
    takes_encoder = {
        line["table"]: "whose statistics are" in line["scope"]
        for line in released(report, "gram")
    }
    assert takes_encoder == {"orders": False, "customers": False, "items": True}


@pytest.mark.parametrize("region", ["categories(US, UK)", "hash(4)"])
def test_a_column_that_is_all_null_at_its_source_fits(region, sealed):
    """Its type there says nothing: a data frame's is an integer."""
    frames = store()
    customers = frames["customers"]
    empty = customers.iloc[:4].assign(region=None, age=None)
    shards = one_per_site(whole(frames) | {"customers": [empty, customers.iloc[4:]]})
    encoders = (*DECLARED[:3], ("c", "region", region), *DECLARED[4:])
    finished = run("squared", shards, num_epochs=1, encoders=encoders)
    features = [facts for part in sealed for facts in part]
    assert sorted(f["kind"] for f in features if f["name"] == "region") == ["", "text"]
    # not in the order of the source, but all alike: the middle, and missing
    assert (finished.features["c"][:4, :2] == [0, 1]).all(axis=1).sum() >= 3


def test_a_filter_cannot_ask_whether_a_value_is_missing(sealed):
    sql = store_sql("squared") + " WHERE c.region IS NULL"
    shards = one_per_site(sharded(store()))
    finished = run_query(
        sql,
        shards,
        encoders=DECLARED,
        task="regression",
        num_epochs=1,
        test_fraction=0.0,
    )
    facts = [part for part in sealed if part[-1]["name"] == "region"]
    assert [part[-1] for part in facts] == [{"name": "region", "kind": "text"}] * 2
    assert encoders_of(finished)["c"].features == COLUMNS["c"]


def test_vectors_leave_their_length_alone(sealed):
    rng = default_rng(0)
    frame = pd.DataFrame({"v": list(rng.normal(size=(20, 3))), "k": np.arange(20)})
    frame["y"] = rng.normal(size=20)
    other = pd.DataFrame({"k": np.arange(20), "x": rng.normal(size=20)})
    shards = one_per_site({"a": [frame.iloc[:9], frame.iloc[9:]], "b": [other]})
    sql = "SELECT a.y AS label, a.v, b.x FROM a JOIN b ON a.k = b.k"
    encoders = (("b", "x", "range(-3, 3)"),)
    finished = run_query(
        sql, shards, task="regression", num_epochs=1, encoders=encoders
    )
    vector = {"name": "v", "kind": "vector", "width": 3}
    assert sealed == [[vector], [vector]]
    assert encoders_of(finished)["a"].names == ("v[0]", "v[1]", "v[2]")


@pytest.mark.parametrize("policies", [NEVER, BUDGET])
def test_where_no_statistics_may_leave_declared_encoders_do(tmp_path, policies):
    finished = train_hostile(HostileGrid(tmp_path, policies=policies), encoders=FREE)
    assert not released(finished.report, "statistics")


@pytest.mark.parametrize(
    ("policies", "encoders", "match"),
    [(BUDGET, FREE[1:], PRICE), (NEVER, FREE[:-1], KIND)],
)
def test_the_refusal_says_what_to_write_instead(tmp_path, policies, encoders, match):
    """Of a table in one shard with a budget, and of one in two."""
    grid = HostileGrid(tmp_path, policies=policies)
    with pytest.raises(SiteError, match=rf"releases\.statistics = never\).*{match}"):
        train_hostile(grid, encoders=encoders)


def test_a_table_in_one_shard_fits_its_encoder_without_a_release(tmp_path):
    finished = train_hostile(HostileGrid(tmp_path, policies=NEVER), encoders=FREE[1:])
    assert finished.training_problem.encoders["o"].is_fitted
    assert not released(finished.report, "statistics")


def test_a_server_cannot_ask_for_more(tmp_path):
    """Encoders that were declared in the query's setting may change on their way."""

    def fitted(action, _, packet):
        if action == "query.statistics":
            header = json.loads(json.dumps(packet.header))
            for part in header["parts"]:
                specs = part["encoders"]["specs"]
                specs[next(iter(specs))] = "standard"
            yield "fitted", type(packet)(header, packet.arrays)

    grid = HostileGrid(tmp_path, fitted, policies=BUDGET)
    train_hostile(grid, encoders=FREE)
    assert len(grid.answers) == 3
    check_all_refused(grid.answers, r"releases\.statistics = never")
