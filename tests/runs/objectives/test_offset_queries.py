"""``AS offset``: which item is the offset, what leaves the site, and what may."""

import json
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest

from client_apps.privacy.guard import check_fragment
from strategies.setup.leaks import leak_warnings
from tests.support import federated
from tests.support.examples.explained import explain, printed
from tests.support.examples.site_examples import check, fragment, policy_of, site_of
from tests.support.files import ROOT, case_table
from tp_flower.errors import PolicyError, QueryError, SiteError, SourceError
from tp_flower.query import Query, Unlabelled
from tp_flower.query.fragment import Fragment
from tp_flower.settings import PrivacySettings

# an offset leaves by the rules of a weight
CASES = case_table(ROOT / "tests/runs/training/test_weight_queries.py")
SCHEMAS = {
    "o": {"k": "INTEGER", "y": "DOUBLE", "offset": "DOUBLE", "x": "DOUBLE"},
    "p": {"k": "INTEGER", "z": "DOUBLE"},
}
JOINED = "FROM o JOIN p ON o.k = p.k"
GROUPED = "FROM (SELECT k, y, x + 1 AS offset FROM o) o JOIN p ON o.k = p.k"
STORE = federated.store()
SITES = federated.one_per_site(federated.whole(STORE))
SQL = f"SELECT o.qty AS label, o.day / 7.0 AS offset, c.age {federated.SOURCE}"


@pytest.mark.parametrize(
    ("items", "source", "offset", "features"),
    [
        # only an alias of the query makes an offset
        ("o.x AS Offset, p.z", JOINED, '"x"', ["z"]),
        ('o.x AS "OFFSET", p.z', JOINED, '"x"', ["z"]),
        ("o.offset AS offset, p.z", JOINED, '"offset"', ["z"]),
        ("o.offset, p.z", JOINED, None, ["offset", "z"]),
        ("o.*", JOINED, None, ["offset", "x"]),
        ("o.offset", GROUPED, None, ["offset"]),
        ("o.offset AS offset, p.z", GROUPED, '"x" + 1', ["z"]),
        # which may be a feature too, and which a star leaves out
        ("LN(o.x) AS offset, o.x AS exposure", JOINED, 'LN("x")', ["exposure"]),
        ("LN(o.x) AS offset, *", JOINED, 'LN("x")', ["offset", "z"]),
    ],
)
def test_which_item_is_the_offset(items, source, offset, features):
    query = Query.from_sql(f"SELECT o.y AS label, {items} {source}")
    # rendering keeps what is the offset
    assert Query.from_sql(query.to_sql()).statement == query.statement
    for bound in (
        query.bind(SCHEMAS),
        query.bind(SCHEMAS, Unlabelled("o", keeps=("offset",))),
    ):
        assert bound.fragments_of("o")[0].offset == offset
        assert bound.fragments_of("p")[0].offset is None
        assert bool(bound.offset_sql) == bool(offset)
        assert [f.name for own in bound.fragments for f in own.features] == features
    dropped = query.bind(SCHEMAS, Unlabelled("o"))
    assert dropped.fragments_of("o")[0].offset is None


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ("o.x AS offset", "no features: SELECT more than the label"),
        ("o.x AS offset, o.k AS offset, p.z", "the query has 2 offsets, expected one"),
        ("p.z AS offset, o.x", "p.z belongs to table p, and the label to o"),
        ("o.x + p.z AS offset, o.x", "needs the values of 2 tables"),
        ("1 AS offset, o.x", "the offset 1 names no column"),
        ("o.y AS offset, o.x", r"the offset o.y is the label itself: the label leaks"),
        ("SUM(o.x) AS offset, o.x", "SUM"),
        ("SUM(o.x) OVER (PARTITION BY o.k) AS offset, o.x", "OVER|window"),
        ("o.gone AS offset, o.x", "gone"),
    ],
)
def test_what_is_no_offset(items, says):
    with pytest.raises(QueryError, match=says):
        Query.from_sql(f"SELECT o.y AS label, {items} {JOINED}").bind(SCHEMAS)


def test_an_offset_made_of_the_label_is_warned_of():
    query = f"SELECT o.y AS label, o.y * 2 AS offset, p.z {JOINED}"
    (warning,) = leak_warnings(Query.from_sql(query).bind(SCHEMAS))
    assert warning.startswith("the offset of o reads y, from which the label is made")


def test_on_the_wire():
    plain = Fragment("o", "o", label='"y"')
    assert "offset" not in plain.to_json()
    beside = Fragment("o", "o", offset='LN("x")', weight='"x"')
    wire = json.loads(json.dumps(beside.to_json()))
    assert Fragment.from_json(wire) == beside
    for hostile in ("(SELECT 1)", "y", "x); DROP TABLE t; --"):
        with pytest.raises(QueryError, match="offset"):
            Fragment("o", "o", offset=hostile).check(["x"])


@pytest.mark.parametrize(("text", "refused"), CASES["may_read"])
def test_an_offset_may_read_what_a_weight_may(tmp_path, text, refused):
    policy = policy_of(tmp_path, text)
    match = rf"\({refused}\) .*the offset reads column"
    with pytest.raises(PolicyError, match=match) if refused else nullcontext():
        check(policy, fragment(offset='"amount"'))


@pytest.mark.parametrize(("text", "may_leave"), CASES["may_leave"])
def test_offsets_leave_as_weights_do(tmp_path, text, may_leave):
    site, (source,) = site_of(tmp_path, text)
    match = r"releases.weights = never\) refuses: the run asks for weights; none may"
    with nullcontext() if may_leave else pytest.raises(PolicyError, match=match):
        check_fragment(site, source, fragment(offset='"amount"'))


def one_table(offset: object, kind: str = "") -> federated.Sites:
    values = pd.Series([0.5, 1.0, 2.0, 1.5] * 5)
    table = pd.DataFrame({"y": values * 3, "x": values, "o": values})
    if not kind:
        table.loc[3, "o"] = offset
    else:
        table["o"] = pd.Series([offset] * len(table)).astype(kind)
    return [{"t": [table]}]


@pytest.mark.parametrize(
    ("value", "item", "says"),
    [
        (None, "t.o", "the offset is NULL or NaN in 1 of 20 rows: leave them out"),
        (-1.0, "LN(t.o)", "the offset is NULL or NaN in 1 of 20 rows"),
        (0.0, "LN(t.o)", "infinite values.*such as WHERE exposure > 0 for LN"),
        (np.inf, "t.o", "'offset' has infinite values"),
    ],
)
def test_a_site_refuses_an_offset_that_no_score_can_have(value, item, says):
    sql = f"SELECT t.y AS label, {item} AS offset, t.x FROM t"
    with pytest.raises((SiteError, SourceError), match=says):
        federated.train(one_table(value), sql, "cg")


@pytest.mark.parametrize(
    ("value", "kind", "type_name"),
    [
        ("1.5x", "str", "VARCHAR"),
        (True, "bool", "BOOLEAN"),
        ("2020-01-01", "datetime64[us]", "TIMESTAMP"),
    ],
)
def test_an_offset_is_a_number(value, kind, type_name):
    sql = "SELECT t.y AS label, t.o AS offset, t.x FROM t"
    match = f"the offset is of type {type_name}; it must be a number: CAST it"
    with pytest.raises(Exception, match=match):
        federated.train(one_table(value, kind), sql, "cg")


def test_a_server_refuses_an_offset_that_is_no_number():
    def change(seen):
        for key in seen.arrays:
            if key[-1] == "offset":
                seen.arrays[key][0] = np.nan

    refusing = federated.on_replies("query.extract")(change)
    with pytest.raises(Exception, match="an offset that is no number"):
        federated.run_query(SQL, SITES, "cg", change=refusing, num_epochs=1)


def test_an_offset_made_of_a_private_labels_column_is_refused():
    privacy = PrivacySettings(
        labels="laplace", label_epsilon=1.0, label_range=(0.0, 9.0)
    )
    sql = f"SELECT o.qty AS label, o.qty / 2 AS offset, c.age {federated.SOURCE}"
    match = "the offset, which leaves without noise, reads column 'qty'"
    with pytest.raises(QueryError, match=match):
        federated.train(SITES, sql, "cg", task="regression", privacy=privacy)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("moments", {"num_epochs": 0}),
        ("coreset-ridge", {"num_epochs": 0}),
        ("cg", {"coreset_size": 20}),
    ],
)
def test_where_no_offset_is_added_it_is_refused(method, settings):
    match = r"no offset is added.*write \(o.qty\) - \(o.day / 7.0\) AS label"
    with pytest.raises(QueryError, match=match):
        federated.train(SITES, SQL, method, task="regression", **settings)


def test_a_model_per_site_takes_no_offset():
    sql = "SELECT t.y AS label, t.o AS offset, t.x FROM t"
    sites = [*one_table(1.0), *one_table(2.0)]
    with pytest.raises(QueryError, match="strategy 'personalised' adds up labels at"):
        federated.train(sites, sql, "personalised", task="regression")


def test_explain_and_the_ledger_name_the_offset():
    found = explain(SQL, SITES)
    assert found["offset"]["column"] == "o: o.day / 7.0"
    assert found["offset"]["min"] < found["offset"]["max"]
    (offset,) = (
        each for each in found["releases"] if each["carries"].startswith("the offset ")
    )
    assert offset["carries"] == "the offset of every row of o"
    assert (offset["message"], offset["to"]) == ("query.extract", "server")
    assert offset["protection"] == "nothing"
    text = " ".join(printed(found).split())
    assert 'offset of a joined row: "day" / 7.0' in text
    assert "have the offset o: o.day / 7.0 added, from " in text
    plain = explain(SQL.replace("o.day / 7.0 AS offset, ", ""), SITES)
    assert plain["offset"] is None
    assert not any("the offset" in each["carries"] for each in plain["releases"])
    finished = federated.run_query(SQL, SITES, "cg", num_epochs=1, device="cpu")
    totals = finished.report.privacy["totals"]
    uncovered = {own["table"]: own["uncovered"] for own in totals}
    assert "offsets" in uncovered["orders"]
    assert "offsets" not in uncovered["customers"]
    # of scores, sites are sent nothing that has the offset in it but derivatives
    sent = {
        key[-1] for seen in finished.seen if not seen.is_reply for key in seen.arrays
    }
    assert "offset" not in sent
