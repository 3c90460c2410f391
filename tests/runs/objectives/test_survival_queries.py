"""``AS time`` and ``AS event``: which items they are, and what leaves the site."""

import json
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest

from client_apps.privacy.guard import check_fragment
from tests.support import federated
from tests.support.examples.explained import explain, printed
from tests.support.examples.site_examples import check, fragment, policy_of, site_of
from tp_flower.errors import PolicyError, QueryError, SettingsError, SiteError
from tp_flower.query import Query, Unlabelled
from tp_flower.query.fragment import Fragment
from tp_flower.settings import PrivacySettings

SCHEMAS = {
    "o": {"k": "INTEGER", "y": "DOUBLE", "e": "DOUBLE", "x": "DOUBLE"},
    "p": {"k": "INTEGER", "z": "DOUBLE"},
    "q": {"k": "INTEGER", "label": "DOUBLE", "x": "DOUBLE"},
}
JOINED = "FROM o JOIN p ON o.k = p.k"
TWO = "o.y AS time, o.e > 0 AS event"
STORE = federated.store()
STORE["orders"]["rank"] = STORE["orders"]["qty"].rank()
SITES = federated.one_per_site(federated.whole(STORE))
SQL = f"""SELECT o.rank AS time, o.online AS event, o.day % 2 AS strata,
o.rank - 9.5 AS entry, c.age {federated.SOURCE}"""


@pytest.mark.parametrize(
    ("items", "fields", "features"),
    [
        (f"{TWO}, p.z", {"label": '"y"', "event": '"e" > 0'}, ["z"]),
        ("o.e AS EVENT, o.y AS Time, o.x", {"label": '"y"', "event": '"e"'}, ["x"]),
        (
            f"{TWO}, o.x AS entry, o.k AS strata, p.z",
            {"entry": '"x"', "strata": '"k"'},
            ["z"],
        ),
        # only both together, and no label beside them
        (
            "o.y AS label, o.x AS time, p.z AS event",
            {"label": '"y"', "event": None},
            ["time", "event"],
        ),
        ("o.y AS label, o.x AS entry", {"entry": None}, ["entry"]),
        ("o.y AS label, o.x AS time", {"label": '"y"', "event": None}, ["time"]),
        (f"{TWO}, o.*", {"label": '"y"'}, ["x"]),
        # a number of rows beside them
        (f"{TWO}, o.x AS weight, o.x AS offset, p.z", {"offset": '"x"'}, ["z"]),
    ],
)
def test_which_items_are_times_and_events(items, fields, features):
    query = Query.from_sql(f"SELECT {items} {JOINED}")
    # rendering keeps what they are
    assert Query.from_sql(query.to_sql()).statement == query.statement
    bound = query.bind(SCHEMAS)
    own, other = bound.fragments
    for name, sql in fields.items():
        assert getattr(own, name) == sql
        assert getattr(other, name) is None
    assert [f.name for each in bound.fragments for f in each.features] == features
    assert bound.names_event == (own.event is not None)
    assert bound.label_table == "o"
    dropped = query.bind(SCHEMAS, Unlabelled("o"))
    assert not dropped.names_event
    assert dropped.fragments_of("o")[0].label is None
    assert [f.name for each in dropped.fragments for f in each.features] == features


@pytest.mark.parametrize(
    ("items", "source", "says"),
    [
        (TWO, JOINED, "no features: SELECT more than the label"),
        ("o.y AS time, o.x", JOINED, "the query has no label"),
        ("o.e AS event, o.x", JOINED, "the query has no label"),
        (f"{TWO}, o.k AS event, p.z", JOINED, "2 columns AS event, expected one"),
        (f"{TWO}, o.k AS time, p.z", JOINED, "the query has 2 labels, expected one"),
        ("o.y AS time, p.z AS event, o.x", JOINED, "event p.z belongs to table p, and"),
        (f"{TWO}, p.z AS strata, o.x", JOINED, "strata p.z belongs to table p, and"),
        ("o.y AS time, true AS event, o.x", JOINED, "the event TRUE names no column"),
        (f"{TWO}, o.e > 0 AS again", JOINED, "'again' is the label itself"),
        (
            "p.z AS time, p.z > 1 AS event, o.x",
            "FROM o LEFT JOIN p ON o.k = p.k",
            "the label p.z belongs to table p, which is LEFT JOINed",
        ),
        (
            "q.x AS time, q.x > 0 AS event, q.*",
            "FROM q",
            "the query has a label, q.label, and the time of an event: EXCLUDE",
        ),
    ],
)
def test_what_are_no_times_and_events(items, source, says):
    with pytest.raises(QueryError, match=says):
        Query.from_sql(f"SELECT {items} {source}").bind(SCHEMAS)


def test_on_the_wire():
    plain = Fragment("o", "o", label='"y"')
    assert not plain.to_json().keys() & {"event", "entry", "strata"}
    beside = Fragment("o", "o", label='"y"', event='"e"', entry='"x"', strata='"k"')
    wire = json.loads(json.dumps(beside.to_json()))
    assert Fragment.from_json(wire) == beside
    with pytest.raises(QueryError, match="event"):
        Fragment("o", "o", event="(SELECT 1)").check(["x"])


@pytest.mark.parametrize("name", ["event", "entry", "strata"])
@pytest.mark.parametrize(
    ("rules", "is_refused"),
    [
        ("labels = ['amount']", False),
        ("labels = ['day']", True),
        # no weight may read more than a label, and no event more than a label
        ("labels = ['day']\nweights = ['amount']", True),
        ("weights = ['day']", False),
    ],
)
def test_an_event_may_read_what_a_label_may(tmp_path, name, rules, is_refused):
    policy = policy_of(tmp_path, rules)
    match = rf"\(labels\) .*the {name} reads column"
    refused = pytest.raises(PolicyError, match=match)
    with refused if is_refused else nullcontext():
        check(policy, fragment(**{name: '"amount"'}))


@pytest.mark.parametrize(
    ("releases", "may_leave"),
    [
        ("[tables.t.policy.releases]\nlabels = 'clear'", True),
        ("epsilon = 1.0\n[tables.t.policy.releases]\nlabels = 'private'", False),
        ("[tables.t.policy.releases]\nlabels = 'never'", False),
        ("[tables.t.policy.releases]\nlabels = 'clear'\nweights = 'never'", True),
    ],
)
def test_events_leave_as_labels_do(tmp_path, releases, may_leave):
    site, (source,) = site_of(tmp_path, releases)
    match = r"\(releases.labels = \w+\) refuses"
    with nullcontext() if may_leave else pytest.raises(PolicyError, match=match):
        check_fragment(site, source, fragment(event='"amount"'))


@pytest.mark.parametrize(
    ("method", "settings", "match"),
    [
        ("admm", {}, "strategy 'admm' does not train by 'cox'; cg, gd, boost do"),
        ("sgd", {}, "strategy 'sgd' does not train by 'cox'"),
        ("moments", {"num_epochs": 0}, "strategy 'moments' does not train by 'cox'"),
        ("coreset-ridge", {"num_epochs": 0}, "'coreset-ridge' does not train by"),
        ("cg", {"coreset_size": 20}, "coreset-size: loss 'cox' compares each row"),
        ("cg", {"task": "classification"}, "'classification' is for classes, not"),
        (
            "gd",
            {"privacy": PrivacySettings(features="dp-sgd")},
            "privacy.features: loss 'cox' compares rows with each other",
        ),
        (
            "cg",
            {"privacy": PrivacySettings("laplace", 1.0, label_range=(0.0, 9.0))},
            "privacy.labels: loss 'cox' is not corrected for noise on labels",
        ),
    ],
)
def test_what_times_do_not_go_with_is_refused_before_any_row_is_read(
    method, settings, match
):
    with pytest.raises(SettingsError, match=match):
        federated.train(SITES, SQL, method, **settings)


def test_a_model_per_site_takes_no_times():
    sql = "SELECT o.rank AS time, o.online AS event, o.day FROM orders o"
    with pytest.raises(SettingsError, match="'personalised' does not train by 'cox'"):
        federated.train(SITES, sql, "personalised")


def one_table(**columns: object) -> federated.Sites:
    values = np.arange(1.0, 21.0)
    table = pd.DataFrame({"y": values, "e": values % 2, "x": values % 3, "s": 1.0})
    for name, value in columns.items():
        table.loc[3, name] = value
    return [{"t": [table]}]


@pytest.mark.parametrize(
    ("columns", "items", "says"),
    [
        ({"y": None}, "", r"the time is NULL in 1 rows: .* WHERE t.y IS NOT NULL"),
        ({"e": None}, "", 'the event is NULL in 1 rows: .* WHERE "e" IS NOT NULL'),
        ({"s": None}, "t.s AS strata,", "the strata is NULL in 1 rows"),
        ({"y": -2.0}, "", "a time is negative, -2: filter these rows in the query"),
        ({"e": 7.0}, "", r"an event is 7, neither 0 nor 1: .*\(status = 2\) AS event"),
        ({}, "t.y AS entry,", "the entry is not before the time in 20 joined rows"),
        ({"y": 1e19}, "", "the time reaches 1e[+]19, beyond 1e[+]18: divide it"),
    ],
)
def test_times_that_nobody_can_have_are_refused(columns, items, says):
    sql = f"SELECT t.y AS time, t.e AS event, {items} t.x FROM t"
    with pytest.raises(QueryError, match=says):
        federated.train(one_table(**columns), sql, "cg", test_fraction=0.0)


@pytest.mark.parametrize(
    ("event", "items", "says"),
    [
        ("t.y > 99", "", "all 20 joined training rows are censored"),
        ("t.y = 7", "", "one of the 20 joined training rows has an event, no other"),
        ("t.e", "t.y AS strata,", "no two of the 20 joined training rows can be"),
        ("t.y > 19 OR t.y = 30", "", "one of the 20 joined training rows has an event"),
    ],
)
def test_times_that_teach_nothing_are_refused(event, items, says):
    sql = f"SELECT t.y AS time, {event} AS event, {items} t.x FROM t"
    with pytest.raises(QueryError, match=says):
        federated.train(one_table(), sql, "cg", test_fraction=0.0)


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        (
            "cg",
            {"privacy": PrivacySettings("laplace", 1.0, label_range=(0.0, 9.0))},
            "its label is the time of an event, for which there is no noise",
        ),
        (
            "moments",
            {"num_epochs": 0, "task": "regression"},
            "the event would leave, and its label stays",
        ),
    ],
)
def test_a_site_refuses_an_event_that_would_tell_its_label(
    monkeypatch, method, settings, says
):
    """Whatever the server has left unchecked."""
    monkeypatch.setattr(
        "strategies.training.join_method.check_numbers", lambda *_: None
    )
    with pytest.raises(SiteError, match=says):
        federated.train(SITES, SQL, method, **settings)


def test_explain_and_the_ledger_name_times_and_events():
    found = explain(SQL, SITES)
    assert found["loss"] == "cox"
    online = int(federated.store()["orders"]["online"].sum())
    assert 0 < found["events"]["train"] < found["events"]["total"] <= 3 * online
    carried = {each["carries"]: each for each in found["releases"]}
    (text,) = (text for text in carried if text.startswith("whether the label of each"))
    assert carried[text]["message"] == "query.extract"
    assert carried[text]["protection"] == "nothing"
    shown = " ".join(printed(found).split())
    assert f"{found['events']['total']} joined rows have an event, " in shown
    assert "survival, by loss cox, because the query has AS time and AS event" in shown
    finished = federated.run_query(SQL, SITES, "cg", num_epochs=1, device="cpu")
    entries = json.dumps(finished.report.privacy["ledger"])
    assert "the labels leave in the clear: the times, and of each the " in entries
    assert "the entry and the event and the strata" in entries
    sent = {
        key[-1] for seen in finished.seen if not seen.is_reply for key in seen.arrays
    }
    assert not sent & {"event", "entry", "strata"}


def test_held_out_rows_without_an_event_are_warned_of():
    """The split is the same, whatever the events: three of the training rows' alone."""
    sql = "SELECT t.y AS time, t.e AS event, t.x FROM t"
    plain = federated.train(one_table(), sql, "cg", test_fraction=0.3)
    kept = plain.training_problem.objective.target.numbers[:3]
    (table,) = one_table()[0]["t"]
    table["e"] = table["y"].isin(kept)
    run = federated.train([{"t": [table]}], sql, "cg", test_fraction=0.3)
    words = "no row that tests has an event: their loss is 0 and their concordance none"
    assert any(words in text for text in run.report.warnings)
    assert not any("has an event" in text for text in plain.report.warnings)


def test_robust_errors_are_refused_and_the_model_trains_with_others():
    """The information of a partial likelihood is no sum over rows."""
    sql = "SELECT t.y AS time, t.e AS event, t.x FROM t"
    how = {"test_fraction": 0.0, "l2": 0.0}
    with pytest.raises(QueryError, match="none that are 'robust': write 'model'"):
        federated.train(one_table(), sql, "cg", standard_errors="robust", **how)
    how["standard_errors"] = "model"
    assert federated.train(one_table(), sql, "cg", **how).report.status == "completed"
