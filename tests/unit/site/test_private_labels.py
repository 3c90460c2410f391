"""Labels at a site: moved into their domain, noised once, kept, and paid for."""

import logging
from contextlib import nullcontext
from unittest.mock import Mock, patch

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_array_equal

from client_apps.data.database import FILE
from client_apps.data.ledger import Ledger, open_ledger
from client_apps.privacy.guard import source_id
from client_apps.privacy.noisy_labels import released_label
from tests.support.examples.site_examples import (
    RESPONSE,
    bind,
    booleans,
    make_site,
    noise_of_known_keys,
    release,
    together,
)
from tests.support.federated import run_query, write_site
from tests.support.files import case_table
from tests.support.peers.faulty_grid import flipped, forget_processes, rows_in
from tp_flower import errors
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.privacy.label_mechanisms import LabelPlan
from tp_flower.privacy.mechanisms import PureDp
from tp_flower.query import Fragment
from tp_flower.settings import PrivacySettings

__all__ = ["noise_of_known_keys"]

CASES = case_table(__file__)
NAN = float("nan")
RANGE = LabelPlan("laplace", 100.0, limits=(0.0, 10.0))
CERTAIN = 100.0  # epsilon at which no class is ever changed
THIRDS = np.array([0, 1, NAN]).repeat(3000)


@pytest.fixture
def site(tmp_path):
    return make_site(tmp_path)


def name_of(run):
    """Of a run at the site, in its ledger."""
    return f"{run:032x}-1"


def spent(site):
    ledger = open_ledger(str(site.context.node_config["state-dir"]))
    return ledger.spent(source_id(site.shards[0]))


def kept_draws(folder):
    query = "SELECT name, data FROM entries WHERE run = 'labels'"
    return rows_in(folder / "state" / FILE, query)


def plan_of(*classes):
    return LabelPlan("laplace", 1.0, classes)


def response(*classes):
    return LabelPlan("randomised-response", CERTAIN, classes)


def number(*values):
    return LabelColumn("number", np.array(values, float))


def text(*codes, categories=("a",)):
    return LabelColumn("text", np.array(codes, float), categories)


def boolean(*values):
    return LabelColumn("boolean", np.array(values, float))


@pytest.mark.parametrize(
    ("label", "classes", "expected", "kind"),
    [
        (boolean(0, 1), (), [0, 1], "boolean"),
        (boolean(0, 1), ("true", "False"), [1, 0], "text"),
        (boolean(0, 1), ("0", "1"), [0, 1], "text"),
        (number(2.5, -1, 7), ("7", "-1", "2.50"), [2, 1, 0], "text"),
        (text(0, 1, 0, categories=("b", "d")), ("d", "a", "b"), [2, 0, 2], "text"),
    ],
)
def test_classes_are_numbered_as_listed(site, label, classes, expected, kind):
    column = release(site, label, response(*classes))
    assert column.values.tolist() == expected
    assert column.kind == kind
    assert column.categories == classes


def test_numbers_are_clipped_and_missing_ones_are_the_middle(site, caplog):
    label = number(*np.repeat([-5.0, 4.0, 1e6, NAN], 4000))
    with caplog.at_level(logging.WARNING, logger="flwr"):
        column = release(site, label, RANGE)
    assert column.kind == "number"
    assert column.categories == ()
    noise = column.values - np.repeat([0.0, 4.0, 10.0, 5.0], 4000)
    # epsilon 100 on a range of 10: scale 0.1
    assert noise.std() == pytest.approx(0.1 * np.sqrt(2), rel=0.05)
    assert abs(noise.reshape(4, -1).mean(axis=1)).max() < 0.012
    assert "label is NULL in 4000 rows" in caplog.text


@pytest.mark.parametrize(
    ("label", "plan"),
    [
        (text(*THIRDS, categories=("a", "other")), response("a", "b", "c")),
        (number(*(THIRDS + 5)), LabelPlan("laplace", CERTAIN, ("5", "7", "8"))),
    ],
)
def test_labels_without_a_place_become_any_class_alike(site, label, plan, caplog):
    with caplog.at_level(logging.WARNING, logger="flwr"):
        values = release(site, label, plan).values
    assert (values[:3000] == 0).all()
    for rows in (slice(3000, 6000), slice(6000, 9000)):
        counts = np.bincount(values[rows].astype(int), minlength=3)
        assert (np.abs(counts - 1000) < 5 * np.sqrt(3000 * 2 / 9)).all()
    # the operator is told, and nobody else
    assert "NULL or not in privacy.label-classes in 6000 rows" in caplog.text


def test_a_simulation_refuses_labels_without_a_place(site):
    bind(site)
    site.context.node_config["tables"] = ""
    for label, plan, match in (
        (boolean(0, NAN), RESPONSE, "in 1 rows: filter"),
        (number(0, NAN, NAN), RANGE, "is NULL in 2 rows"),
    ):
        with pytest.raises(errors.SiteError, match=match):
            released_label(site, 0, plan, label)
    assert not site.ledger.lines(site.store.run)


@pytest.mark.parametrize(
    ("label", "plan", "match"),
    [
        (number(1), RESPONSE, "number: its classes .* privacy.label-classes"),
        (text(0), RESPONSE, "label is of type text"),
        (text(0), RANGE, "label is text, but the run has privacy.label-range: CAST it"),
        (
            boolean(1),
            LabelPlan("laplace", 1.0, limits=(-60.0, 240.0)),
            "label is true or false: privacy.label-range must",
        ),
        (number(1), plan_of("a", "b"), r"type number, .*classes \(a, b\) are not dist"),
        (number(1), plan_of("1", "1.0"), "are not distinct values of that type"),
        (boolean(1), plan_of("yes", "no"), r"type boolean, .*classes \(yes, no\)"),
    ],
)
def test_plans_that_do_not_fit_the_type_are_refused(site, label, plan, match):
    with pytest.raises(errors.SettingsError, match=match):
        release(site, label, plan)
    # nor has a shard without rows anything to pay for
    column = release(site, boolean())
    assert column.kind == "boolean"
    assert len(column.values) == 0
    assert spent(site) == []


def test_labels_are_drawn_once_and_paid_for_once(tmp_path):
    # a run that was killed when it had paid, and before anybody was answered
    release(make_site(tmp_path, run=1))
    forget_processes()
    first = release(make_site(tmp_path, run=1))
    # another run, another process: nothing is in memory but the class itself
    second = release(make_site(tmp_path, run=2))
    assert_array_equal(first.values, second.values)
    site = make_site(tmp_path, run=3)
    assert spent(site) == [PureDp(1.0)]
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o077 == 0
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    # the later run has a line that says what left, and that costs nothing
    assert [line["event"] for line in site.ledger.lines(name_of(2))] == ["note"]
    (line,) = site.ledger.lines(name_of(1))
    assert line["event"] == "charge"
    assert line["release"]["what"] == "labels"
    assert "probability 0.7311" in line["release"]["scope"]
    # a site that writes nothing has them in its memory
    rows = [
        release(make_site(tmp_path, run, state=":memory:")).values for run in (1, 2)
    ]
    assert_array_equal(*rows)
    assert len(kept_draws(tmp_path)) == 1


OTHERS = {
    "another plan": {"plan": LabelPlan("randomised-response", 1.5)},
    "another mechanism": {"plan": LabelPlan("laplace", 1.0)},
    "another label": {"fragment": Fragment("o", "orders", label="qty > 4")},
    "another filter": {
        "fragment": Fragment("o", "orders", label="qty > 3", filters=("qty > 0",))
    },
    "other true labels": {"label": boolean(*(1.0 - booleans().values))},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_what_differs_is_drawn_anew_and_paid_for(site, other):
    first = release(site)
    second = release(site, **other)
    assert 0.2 < (first.values != second.values).mean() < 0.8
    total = sum(each.epsilon * each.count for each in spent(site))
    assert total == 1.0 + other.get("plan", RESPONSE).epsilon
    # and neither again
    again = release(site)
    assert_array_equal(again.values, first.values)
    # of what the labels do not depend on there is no other draw
    alike = Fragment("x", "orders", keys=(("qty",),), label="qty > 3")
    again = release(site, fragment=alike)
    assert_array_equal(again.values, first.values)
    assert sum(each.epsilon * each.count for each in spent(site)) == total


def test_a_lost_draw_is_paid_for_again_and_a_damaged_one_is_not_drawn(tmp_path):
    first = release(make_site(tmp_path, run=1))
    # labels whose payment is lost stand once in the report
    open_ledger(str(tmp_path / "state")).begin_anew()
    forget_processes()
    site = make_site(tmp_path, run=2)
    assert_array_equal(release(site).values, first.values)
    assert [line["event"] for line in site.ledger.lines(name_of(2))] == ["charge"]
    rows_in(tmp_path / "state" / FILE, "DELETE FROM entries WHERE run = 'labels'")
    assert (first.values != release(site).values).any()
    assert spent(site) == [PureDp(1.0, count=2)]
    ((name, data),) = kept_draws(tmp_path)
    query = "UPDATE entries SET data = ? WHERE run = 'labels' AND name = ?"
    rows_in(tmp_path / "state" / FILE, query, flipped(data), name)
    with pytest.raises(errors.SiteError, match=r"the stored labels .* are damaged"):
        release(site)


def test_a_table_whose_budget_is_spent_tells_no_more_labels(tmp_path):
    site = make_site(tmp_path, policy="epsilon = 2.5\ndelta = 1e-6")
    release(site)
    release(site, plan=LabelPlan("laplace", 1.5))
    with pytest.raises(
        errors.BudgetError, match=r"orders has spent epsilon 2.5 of 2.5"
    ):
        release(site, plan=LabelPlan("laplace", 0.1))
    # what is paid for may leave again
    release(site)


@CASES.each("levels", "policy", "level")
def test_labels_leave_as_the_policy_wants_it(tmp_path, policy, level):
    site = make_site(tmp_path, policy=policy)
    label = booleans()
    refused = pytest.raises(errors.PolicyError, match=rf"releases\.labels = {level}")
    if level == "clear":
        assert release(site, label, None) is label
        (line,) = site.ledger.lines(site.store.run)
        assert line["event"] == "note"
        assert line["release"]["mechanism"] is None
        assert line["release"]["scope"] == "the labels leave in the clear"
    else:
        with refused:
            release(site, label, None)
    with refused if level == "never" else nullcontext():
        release(site, label)


@pytest.mark.parametrize("place", ["_append", "_check"])
def test_a_crash_at_the_payment_leaves_nothing(tmp_path, site, place):
    killed = Mock(side_effect=KeyboardInterrupt)
    with patch.object(Ledger, place, killed), pytest.raises(KeyboardInterrupt):
        release(site)
    assert kept_draws(tmp_path) == []
    assert spent(site) == []
    first = release(site).values
    assert_array_equal(release(site).values, first)
    assert spent(site) == [PureDp(1.0)]


def test_two_runs_that_draw_at_once_do_not_both_tell(tmp_path):
    """The one that comes second is asked again, and finds the draw of the first."""
    first = make_site(tmp_path, 1)
    second = make_site(tmp_path, 2)
    refused = pytest.raises(errors.SiteError, match="another run has just drawn these")
    with refused as caught, together(second):
        bind(second)
        released_label(second, 0, RESPONSE, booleans())
        drawn = release(first).values
    assert errors.kind_of(caught.value) is errors.ErrorKind.TRANSIENT
    assert_array_equal(release(second).values, drawn)
    assert spent(first) == [PureDp(1.0)]


@pytest.mark.parametrize(
    "features",
    ["a.y + 1 AS double, b.z", "b.z, c.y AS other", "b.z, c.x + c.y AS both"],
)
def test_no_feature_reads_what_a_noisy_label_is_made_of(tmp_path, features):
    """Its scores would tell the label: of the same row, or of the table in another
    role.
    """
    frames = {
        "a": pd.DataFrame(
            {"id": range(40), "x": np.arange(40.0), "y": np.arange(40.0) % 7}
        ),
        "b": pd.DataFrame({"id": range(40), "z": np.arange(40.0) % 5}),
    }
    sites = {
        name: write_site(tmp_path / name, {name: frame})
        for name, frame in frames.items()
    }
    sql = (
        f"SELECT a.y > 3 AS label, {features} FROM a JOIN b ON a.id = b.id "
        "JOIN a c ON b.id = c.id"
    )
    privacy = PrivacySettings(labels="randomised-response", label_epsilon=1.0)
    match = "table a: its label leaves with noise only, but feature .* reads column 'y'"
    with pytest.raises(errors.SiteError, match=match):
        run_query(sql, sites, "cg", privacy=privacy)
