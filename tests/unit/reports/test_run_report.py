"""The report's section on privacy adds up, and a malformed account is refused."""

import msgspec
import pytest

from strategies.disclosures import Disclosure, privacy_report
from strategies.report_page.costs import privacy_totals
from tests.support.examples.planned import release
from tp_flower.errors import ReplyError
from tp_flower.privacy import mechanisms
from tp_flower.privacy.accounting import epsilon
from tp_flower.reports.blocks import Record
from tp_flower.settings import PrivacySettings

SETTINGS = PrivacySettings(delta=1e-6)


def released(what, mechanism, source="s1"):
    """A release as a site reports it."""
    made = release(what, mechanism, source, table="t")
    return {"release": msgspec.to_builtins(made)}


def report(accounts, *, is_complete=True):
    messages = [Disclosure("train.admm", "server", "scores", "nothing")]
    return privacy_report(messages, {"a": accounts}, SETTINGS, is_complete=is_complete)


MODEL = {**released("model", mechanisms.Gaussian(4.0, 2)), "limit": 9, "used": 3}
LABELS = released("labels", mechanisms.PureDp(0.5))
SCORES = released("scores", None)


@pytest.mark.parametrize(("is_complete", "uses"), [(True, 3), (False, 9)])
def test_a_total_composes_what_was_used_or_else_what_was_planned(is_complete, uses):
    accounts = [MODEL, LABELS, SCORES]
    content = report(accounts, is_complete=is_complete)
    assert content["messages"][0]["protection"] == "nothing"
    assert content["ledger"] == {"a": accounts}
    assert content["adversary"] == "server"
    (total,) = content["totals"]
    spent = [mechanisms.Gaussian(4.0, 2 * uses), mechanisms.PureDp(0.5)]
    assert total["models"] == epsilon(spent[:1], 1e-6)
    assert total["labels"] == 0.5
    assert total["features"] == "none: no noise covers scores"
    assert total["uncovered"] == ["scores"]
    assert total["site"] == "a"
    assert total["table"] == "t"
    assert total["delta"] == 1e-6


def test_without_noise_a_table_says_how_each_release_left():
    """One with noise is enough for epsilons, of any kind."""
    masked, labels = released("scores", None), released("labels", None)
    masked["release"]["scope"] = mechanisms.SCORE_SUMS
    labels["release"]["scope"] = "not covered: it leaves in the clear"
    table = privacy_totals(Record(report([masked, labels, masked])))
    assert table.title == "What left the sites, without noise"
    assert table.rows == [("t at a", "labels", "a score of each row")]
    assert table.note.startswith("No noise was asked for")
    for covered in (LABELS, released("second-moments", mechanisms.Gaussian(4.0))):
        table = privacy_totals(Record(report([masked, covered])))
        assert table.title.startswith("Epsilon per row")
        assert "No noise" not in table.note
    assert privacy_totals(Record({})).rows == []


def test_rows_of_different_sources_have_totals_of_their_own():
    other = released("labels", mechanisms.PureDp(2.0), "s2")
    totals = report([LABELS, other])["totals"]
    labels = {total["source"]: total["labels"] for total in totals}
    assert labels == {"s1": 0.5, "s2": 2.0}


@pytest.mark.parametrize(
    "account",
    [
        {},
        {"release": {"table": "t"}},
        {"release": None},
        {**MODEL, "used": "many"},
        {"release": {**LABELS["release"], "mechanism": {"kind": "pure"}}},
    ],
)
def test_a_malformed_account_is_refused_in_the_name_of_its_site(account):
    with pytest.raises(ReplyError, match="site 'a' sent a malformed ledger"):
        report([account])
