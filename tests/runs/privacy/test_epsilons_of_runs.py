"""An epsilon of features is nowhere to be read unless all that tells of them has noise.

Runs of the strategies at three sites with state on disk, under privacy settings, with
scores masked or in the clear: report, console, page, account and ledger say the same.
"""

import re

import msgspec
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant

from strategies.report_page.page import render, result_view
from tests.support.command_line import printed_by
from tests.support.federated import SOURCE, run_query, store, write_site
from tests.support.files import case_table
from tests.support.page_reading import Page, console_text
from tp_flower.privacy.epsilons import KINDS
from tp_flower.privacy.mechanisms import GIVEN_MESSAGES, Gaussian
from tp_flower.reports.records import report_dict
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
DELTA = 1e-5
SQL = f"SELECT o.qty > 3 AS label, o.day, c.age, c.region, i.price, i.weight {SOURCE}"
SITES = {"shop": "orders", "bank": "customers", "warehouse": "items"}
LEAVES_WITH_NOISE = "everything that depends on them leaves with noise"
OF_MODEL = "covers what a row adds to the model, not its features"
SUMS = "sums of scores tell of the features"
REASONS = {
    "masked": SUMS,
    "clear": "scores in the clear tell the features",
    "model": "no noise covers curvature",
    "encoder": "the encoder is fitted to the rows without noise",
}
OF_A_KIND = re.compile(
    r"(?:(models|scores|labels): |which by itself is |pure, )epsilon [\d.]+"
)
ANY = re.compile(r"(?<![.-])epsilon [\d.]+")  # but for names of settings


def check_cells(views, site, cells, privacy):
    """See an account have a table's epsilon, and a run that, or what left in place."""
    is_noisy = (
        privacy.covers_features or privacy.covers_labels or privacy.covers_predictions
    )
    for view in (f"account of {site}", f"page of {site}"):
        assert cells in views[view], view
    for view in ("console", "page"):
        assert (cells in views[view]) == is_noisy, view
        assert ("What left the sites, without noise" in views[view]) != is_noisy, view


@pytest.mark.parametrize("name", CASES["runs"])
def test_an_epsilon_stands_where_it_is_true_of_and_nowhere_else(tmp_path, name):
    strategy, privacy, more, reason = CASES["runs"][name]
    privacy = PrivacySettings(**privacy)
    settings = {"num_epochs": 2, "device": "cpu", "batch_size": 30}
    settings |= {"validation_fraction": 0.0, **more}
    if settings.pop("declared", False):
        settings["encoders"] = CASES["encoders"]
    sites, state = written(tmp_path), tmp_path / "state"
    finished = run_query(SQL, sites, strategy, state=state, privacy=privacy, **settings)
    content = report_dict(finished.report)
    totals = {total["table"]: total for total in content["privacy"]["totals"]}
    for table, total in totals.items():
        assert total["labels"] == (
            "" if table != "orders" else privacy.label_epsilon or "none"
        )
        for subject, amount in (
            ("models", privacy.covers_features and privacy.epsilon),
            ("scores", privacy.predictions),
        ):
            expected = pytest.approx(amount, rel=5e-3) if amount else total[subject]
            assert total[subject] == expected
            assert amount or total[subject] in ("none", "")
        if reason:
            assert total["features"] == f"none: {REASONS[reason]}"
        else:
            assert total["features"] == pytest.approx(
                composed(finished.lines, table), rel=1e-3
            )
    views = {
        "console": console_text(result_view(content), width=200),
        "page": Page(render(content)).text,
    }
    for site, table in SITES.items():
        at_site = ["--tables", sites[site], "--state-dir", state / site]
        page = tmp_path / f"{site}.html"
        views[f"account of {site}"] = printed_by("account", *at_site, "--page", page)
        views[f"page of {site}"] = Page(page.read_text()).text
        check_ledger(printed_by("account", "--export", *at_site[2:]), reason, privacy)
        cells = f"{table} at {site} {cell_of(totals[table])} "
        check_cells({view: words(views[view]) for view in views}, site, cells, privacy)
    no_epsilon = f"No epsilon of features: {REASONS.get(reason)}."
    for view, text in views.items():
        assert (no_epsilon in words(text)) == bool(reason)
        assert (LEAVES_WITH_NOISE in words(text)) != bool(reason)
        assert len(ANY.findall(text)) == len(OF_A_KIND.findall(text)), view


def test_a_feature_that_is_joined_on_is_told_by_its_keys(tmp_path):
    """In the table of that feature alone, whatever the alias that is joined by it."""
    privacy = PrivacySettings(features="statistics", predictions=4.0)
    encoders = CASES["encoders"] + "; j.item=range(0, 100)"
    sql = SQL.replace("i.weight FROM", "i.weight, j.item FROM")
    sql += " JOIN items j ON i.price = j.price"
    finished = run_query(
        sql,
        written(tmp_path),
        num_epochs=1,
        device="cpu",
        encoders=encoders,
        privacy=privacy,
    )
    for total in finished.report.privacy["totals"]:
        if total["table"] == "items":
            assert total["features"] == "none: keys tell features that are joined on"
        else:
            assert total["features"] > 4.0


def written(folder) -> dict:
    """A site for each table of the store, as files."""
    rows = store()
    return {s: write_site(folder / s, {t: rows[t]}, site=s) for s, t in SITES.items()}


def words(text: str) -> str:
    return " ".join(text.split())


def cell_of(total: dict) -> str:
    epsilon = total["features"]
    return f"{epsilon:.4f}" if isinstance(epsilon, float) else "none"


def composed(lines: list[dict], table: str) -> float:
    """Epsilon of what leaves about a row's features, by distributions of losses."""
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for line in lines:
        release = line["release"]
        is_of_features = release["table"] == table and release["what"] != "labels"
        if is_of_features and release["mechanism"]:
            cost = msgspec.convert(release["mechanism"], Gaussian)
            event = GaussianDpEvent(cost.noise_multiplier)
            accountant.compose(event, cost.count * line["used"])
    return float(accountant.get_epsilon(DELTA))


def check_ledger(text: str, reason: str, privacy: PrivacySettings) -> None:
    """A line about a model says that it is one, beside scores without noise."""
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    releases = [line["release"] for line in lines if "release" in line]
    assert releases
    for release in releases:
        about_models = release["what"] in KINDS["models"] and release["mechanism"]
        if about_models and not privacy.covers_predictions:
            for words_of_model in (OF_MODEL, GIVEN_MESSAGES):
                assert words_of_model in release["scope"]
        if "epsilon" in str(release):
            assert release["what"] == "labels"
    uncovered = {release["what"] for release in releases if not release["mechanism"]}
    if not reason:
        assert uncovered <= {"keys", "counts", "labels"}
