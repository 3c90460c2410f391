"""``AS weight``: which item is the weight, what leaves the site, and what may."""

import json
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa

from client_apps.handlers.training_rows import read_rows
from client_apps.privacy.guard import check_fragment
from tests.support import federated
from tests.support.database_tables import fill, source_of
from tests.support.examples.explained import explain, printed
from tests.support.examples.site_examples import (
    body,
    check,
    fragment,
    policy_of,
    site_of,
)
from tests.support.examples.store_runs import query
from tests.support.files import case_table
from tests.support.joined import run as extracted
from tests.support.tables.fragments import features
from tp_flower.errors import MessageError, PolicyError, QueryError, SiteError
from tp_flower.extraction.extract import extract
from tp_flower.protocol.packet import pack_bits
from tp_flower.query import Query
from tp_flower.query.fragment import Feature, Fragment, SubQuery
from tp_flower.sources.policy import WEIGHTS, Policy, Releases

CASES = case_table(__file__)
SCHEMAS = {
    "o": {"k": "INTEGER", "y": "DOUBLE", "w": "DOUBLE"},
    "p": {"k": "INTEGER", "weight": "DOUBLE", "x": "DOUBLE"},
}
JOINED = "FROM o JOIN p ON o.k = p.k"
GROUPED = "FROM o JOIN (SELECT k, AVG(x) AS weight FROM p GROUP BY k) p ON p.k = o.k"
SUBQUERY = SubQuery(
    columns=(Feature("x", 'MAX("x")'), Feature("n", "COUNT(*)")), groups=('"b"',)
)
SITES = federated.one_per_site(federated.whole(federated.store()))
SQL = query(weight="i.price")


@pytest.mark.parametrize(
    ("items", "source", "weight", "features"),
    [
        # only an alias of the query makes a weight
        ("p.weight AS Weight, p.x", JOINED, '"weight"', ["x"]),
        ("p.weight, p.x", JOINED, None, ["weight", "x"]),
        ("p.*", JOINED, None, ["weight", "x"]),
        ("p.weight", GROUPED, None, ["weight"]),
        ("o.w, p.weight AS weight", GROUPED, '"weight"', ["w"]),
        # which may be a feature too, and which a star leaves out
        ("p.weight AS weight, p.weight AS heavy", JOINED, '"weight"', ["heavy"]),
        ("p.weight * 2 AS weight, *", JOINED, '"weight" * 2', ["w", "x"]),
    ],
)
def test_which_item_is_the_weight(items, source, weight, features):
    query = Query.from_sql(f"SELECT o.y AS label, {items} {source}")
    # rendering keeps what is the weight
    assert Query.from_sql(query.to_sql()).statement == query.statement
    bound = query.bind(SCHEMAS)
    assert bound.weight_table == (weight and "p")
    assert bound.fragments_of("p")[0].weight == weight
    assert bound.fragments_of("o")[0].weight is None
    assert [f.name for own in bound.fragments for f in own.features] == features


def test_a_weight_alone_is_no_feature():
    with pytest.raises(QueryError, match="no features: SELECT more than the label"):
        Query.from_sql("SELECT o.y AS label, o.w AS weight FROM o").bind(SCHEMAS)


def test_on_the_wire():
    plain = Fragment("p", "p", label='"x"')
    assert "weight" not in plain.to_json()
    with_weight = Fragment("p", "p", weight='"x" + 1')
    wire = json.loads(json.dumps(with_weight.to_json()))
    assert Fragment.from_json(wire) == with_weight
    assert with_weight.check(["X"]).weight == '"X" + 1'
    for hostile in ("(SELECT 1)", "y", "x); DROP TABLE t; --"):
        with pytest.raises(QueryError, match="weight"):
            Fragment("p", "p", weight=hostile).check(["x"])
    with pytest.raises(QueryError, match=r"got `int` - at `\$.weight`"):
        Fragment.from_json({**plain.to_json(), "weight": 1})


@pytest.mark.parametrize(
    ("fragment", "expected"),
    [
        (Fragment("t", "t", weight='"x" * 2', label='"b"'), [0.0, 3.0, 11.0, np.nan]),
        (Fragment("t", "t", weight='"x" * 2', filters=('"x" < 4',)), [0.0, 3.0]),
        (Fragment("t", "t", weight='"b"'), [0.0, 1.0, 1.0, 1.0]),
        (Fragment("t", "t", weight='"x" * "n"', subquery=SUBQUERY), [0, 16.5]),
    ],
)
def test_a_database_computes_weights_as_a_site_does(tmp_path, fragment, expected):
    url = sa.make_url(f"sqlite:///{tmp_path}/shards.db")
    rows = [(1.5, 1), (0.0, 0), (5.5, 1), (None, 1)]
    name = fill(url, "t", {"x": "DOUBLE", "b": "INTEGER"}, rows)
    found = extract(source_of(url, name), fragment)
    assert found.contents.pushed == ('filter: "x" < 4',) * len(fragment.filters)
    np.testing.assert_array_equal(np.sort(found.weight), expected)
    frame = pd.DataFrame(rows, columns=["x", "b"]).astype({"b": bool})
    np.testing.assert_array_equal(np.sort(extracted(frame, fragment).weight), expected)


@pytest.mark.parametrize(("text", "refused"), CASES["may_read"])
def test_what_a_weight_may_read(tmp_path, text, refused):
    policy = policy_of(tmp_path, text)
    asked = fragment(weight='"amount"')
    match = rf"\({refused}\) .*the weight reads column"
    with pytest.raises(PolicyError, match=match) if refused else nullcontext():
        check(policy, asked)


def test_a_column_for_weights_is_no_feature(tmp_path):
    policy = policy_of(tmp_path, "columns = ['day']\nweights = ['amount']")
    assert policy.visible(["day", "amount", "salary"]) == ["day", "amount"]
    with pytest.raises(PolicyError, match="columns"):
        check(policy, fragment(features=features(a='"amount"')))


@pytest.mark.parametrize(("text", "may_leave"), CASES["may_leave"])
def test_weights_leave_as_labels_in_the_clear_do(tmp_path, text, may_leave):
    site, (source,) = site_of(tmp_path, text)
    check_fragment(site, source, fragment(label='"day"'))
    match = r"releases.weights = never\) refuses: the run asks for weights; none may"
    with nullcontext() if may_leave else pytest.raises(PolicyError, match=match):
        check_fragment(site, source, fragment(weight='"amount"'))


def test_there_is_no_noise_on_weights():
    assert Releases(labels="private").level(WEIGHTS) == "never"
    with pytest.raises(PolicyError, match="none may leave"):
        Policy(releases=Releases(weights="never")).check_release(
            WEIGHTS, is_private=True
        )


def test_explain_says_what_weighs_a_row():
    found = explain(SQL, SITES, row_weight="entity(c)")
    facts = found["row-weight"]
    assert (facts["column"], facts["entity"]) == ('i: "price"', "c")
    assert 0 < facts["min"] < 1 < facts["max"]
    assert facts["effective-rows"] < found["joined-rows"]["train"]
    carried = {each["carries"]: each for each in found["releases"]}
    (weight,) = (carried[text] for text in carried if text.startswith("the weight "))
    assert (weight["message"], weight["to"]) == ("query.extract", "server")
    assert weight["protection"] == "nothing"
    assert any("the total weight of their joined rows" in text for text in carried)
    text = " ".join(printed(found).split())
    assert 'weight of a joined row: "price"' in text
    words = 'Joined rows have the weight of i: "price". Each row of c counts once.'
    assert words in text
    plain = explain(SQL.replace("i.price AS weight, ", ""), SITES)
    assert plain["row-weight"] is None
    words = " ".join(each["carries"] for each in plain["releases"])
    assert "the weight of" not in words
    assert "total weight" not in words
    assert "which rows of the site are joined, and to how many rows" in words


def test_the_ledger_lists_weights_as_not_covered():
    finished = federated.run_query(SQL, SITES, num_epochs=1, device="cpu")
    totals = finished.report.privacy["totals"]
    uncovered = {own["table"]: own["uncovered"] for own in totals}
    assert "weights" in uncovered["items"]
    assert "weights" not in uncovered["orders"]


def weighted(*weights):
    """The rows of a part whose two rows are of nine joined rows that weigh so much."""
    arrays = {
        "trained": pack_bits(np.array([True, True])),
        "tested": pack_bits(np.zeros(2, bool)),
        "masses": np.array(weights, np.float32),
    }
    return read_rows(body(9, arrays), 2, is_private=False)


def test_a_site_refuses_weights_that_are_none_and_any_in_a_private_run():
    match = "'masses' must hold weights above 0 and at most 9"
    for weight in (0.0, -1.0, 9.1):
        with pytest.raises(MessageError, match=match):
            weighted(weight, 1.0)
    rows = weighted(0.5, 1.5)
    match = "its joined rows are weighted: clips and noise"
    with pytest.raises(SiteError, match=match):
        rows.check_accounted()
