"""Whole runs under a policy with a unit of privacy: the bound, and what is reported.

The sites are real ones. People have 1 to 66 claims each, and at most a few of them may
take part.
"""

import msgspec
import numpy as np
import pandas as pd
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    RandomizedResponseDpEvent,
)
from dp_accounting.pld import PLDAccountant

from strategies import Explain
from strategies.inference.predict import Evaluate
from strategies.report_page.costs import privacy_totals
from tests.support.federated import Run, WatchedGrid, run_query, write_site
from tests.support.federated import train as train_on
from tests.support.files import case_table
from tests.support.predicted import scored, train
from tp_flower.errors import BudgetError, SiteError
from tp_flower.methods.personalised.sites import EMBEDDING_BOUND
from tp_flower.privacy.epsilons import KINDS
from tp_flower.privacy.mechanisms import Mechanism
from tp_flower.query import Query
from tp_flower.reports.blocks import Record
from tp_flower.settings import PrivacySettings

CASES = case_table(__file__)
DELTA = 1e-5
# of so many, noisy labels of one row each are all alike once in 10^11 runs
PEOPLE = 48
SIZES = np.linspace(1, 66, PEOPLE).astype(int)
SOURCE = "FROM claims c JOIN people p ON c.person = p.id"
SQL = f"SELECT c.amount > 0 AS label, c.day, c.fee, p.age {SOURCE}"
NUMBERS_SQL = SQL.replace("c.amount > 0 AS label", "c.amount AS label")
COVERED = {"labels": "randomised-response", "label_epsilon": 0.5, "predictions": 2.0}
LINEAR = {"num_epochs": 2, "device": "cpu"}


def claims() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    person = rng.permutation(np.repeat(np.arange(PEOPLE), SIZES))
    amount = rng.normal(size=len(person))
    day = rng.integers(1, 29, len(person))
    fee = rng.normal(size=len(person)) + amount
    return pd.DataFrame({"person": person, "amount": amount, "day": day, "fee": fee})


def people() -> pd.DataFrame:
    return pd.DataFrame({"id": np.arange(PEOPLE), "age": np.arange(PEOPLE) + 20.0})


def per_person(rows: int, more: str = "") -> str:
    return f'privacy-unit = "person"\nrows-per-unit = {rows}\n{more}'


def sites(folder, policy: str = "") -> dict:
    policies = {"claims": policy} if policy else {}
    insurer = write_site(folder / "insurer", {"claims": claims()}, policies)
    registry = write_site(folder / "registry", {"people": people()})
    return {"insurer": insurer, "registry": registry}


def private(features: str = "statistics", **more: object) -> PrivacySettings:
    return PrivacySettings(features=features, epsilon=1.0, delta=DELTA, **more)


PRIVATE = {**LINEAR, "privacy": private()}


def releases_of(finished: Run, table: str = "claims") -> list[dict]:
    return [release for release in finished.releases if release["table"] == table]


def total_of(finished: Run, table: str = "claims") -> dict:
    totals = finished.report.privacy["totals"]
    (total,) = [total for total in totals if total["table"] == table]
    return total


def composed(lines: list[dict], row_rates: int) -> float:
    """Epsilon of a person's releases, by dp-accounting's distributions of losses."""
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    for line in lines:
        cost = line["release"]["mechanism"]
        if cost is None:
            continue
        mechanism = msgspec.convert(cost, Mechanism)
        uses = line.get("used", 1)
        if cost["kind"] == "pure":
            event = RandomizedResponseDpEvent(2 / (1 + np.exp(mechanism.epsilon)), 2)
            accountant.compose(event, row_rates)
        else:
            # removing is half of what this relation supposes
            event = GaussianDpEvent(2 * mechanism.noise_multiplier)
            accountant.compose(event, mechanism.count * uses)
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize(("rows", "strategy", "features", "settings"), CASES["runs"])
def test_the_epsilon_of_a_run_is_the_persons(
    tmp_path, rows, strategy, features, settings
):
    how = {**LINEAR, **settings, "privacy": private(features, **COVERED)}
    finished = run_query(SQL, sites(tmp_path, per_person(rows)), strategy, **how)
    taking_part = np.minimum(SIZES, rows).sum()
    assert finished.sizes == {0: taking_part, 1: PEOPLE}
    releases = releases_of(finished)
    total = total_of(finished)
    assert total["per"] == "person"
    (labels,) = [release for release in releases if release["what"] == "labels"]
    assert labels["mechanism"]["count"] == rows
    lines = [line for line in finished.lines if line["release"] in releases]
    for subject, most in (("models", 1.0), ("scores", 2.0), ("labels", 0.5 * rows)):
        own = [line for line in lines if line["release"]["what"] in KINDS[subject]]
        assert composed(own, rows) * 0.99 <= total[subject] <= most + 1e-6
    assert total["features"] == "none: the encoder is fitted to the rows without noise"
    assert total_of(finished, "people")["per"] == "row"
    for release in releases:
        unit = release["unit"].removeprefix("the label of ")
        assert unit.startswith("a person of claims")
        assert unit.endswith(f"at most {rows} rows")
    title = privacy_totals(Record(finished.report.privacy)).title
    assert title == "Epsilon per person or row, and what is not covered"


def test_a_policy_without_a_unit_leaves_a_run_as_it_was(tmp_path):
    """All rows take part, and every epsilon is a row's."""
    how = {**LINEAR, "privacy": private(**COVERED)}
    finished = run_query(SQL, sites(tmp_path, "min-rows = 2"), **how)
    assert finished.sizes == {0: SIZES.sum(), 1: PEOPLE}
    assert {release["per"] for release in releases_of(finished)} == {"row"}
    assert [plan.unit_norm for plan in finished.plans.values()] == [1.0, 1.0]


def test_a_unit_of_one_row_each_costs_and_trains_as_rows_do(tmp_path):
    """A reduction: as many units as rows, without noise."""
    how = {
        **LINEAR,
        "privacy": PrivacySettings(
            features="statistics", noise_multiplier=1e-9, clip=0.3
        ),
    }
    unit = 'privacy-unit = ["person", "amount"]\nrows-per-unit = 1'
    runs = [
        run_query(NUMBERS_SQL, sites(tmp_path / str(n), policy), **how)
        for n, policy in enumerate([unit, "min-rows = 2"])
    ]
    by_unit, by_row = (finished.theta for finished in runs)
    for table, theta in by_unit.items():
        np.testing.assert_allclose(theta, by_row[table], rtol=1e-5, atol=1e-7)


def test_the_same_rows_take_part_in_every_run(tmp_path):
    """Their labels, which leave in the clear, say which rows they are."""
    sql = NUMBERS_SQL
    rows = sites(tmp_path, per_person(3))
    labels = [
        run_query(one, rows, state=tmp_path / "state", **LINEAR)
        .arrays("query.extract", replies=True)[0, "label-values"]
        .tolist()
        for one in (sql, sql, sql.replace("c.day, c.fee", "c.fee * 2 AS twice"))
    ]
    assert labels[0] == labels[1] == labels[2]
    assert len(labels[0]) == np.minimum(SIZES, 3).sum()


def test_explain_and_predictions_see_the_same_rows(tmp_path):
    rows = sites(tmp_path, per_person(3))
    count = np.minimum(SIZES, 3).sum()
    model = train(tmp_path / "state", rows, SQL, **LINEAR)
    with WatchedGrid(rows, state=tmp_path / "state") as grid:
        train_on(grid, SQL, Explain, mode="explain")
    (insurer, _) = grid.sent("query.extract", replies=True)
    assert insurer.header["parts"][0]["rows"] == count
    strategy = model.predict(
        rows, privacy=PrivacySettings(predictions=2.0, delta=DELTA)
    )
    assert len(scored(strategy.predictions)) == count
    releases = [line["release"] for line in strategy.ledgers["insurer"]]
    (scores,) = [release for release in releases if release["what"] == "scores"]
    assert scores["mechanism"]["count"] == 3
    evaluation = Evaluate(Query.from_sql(SQL), model.manifest, mode="evaluate")
    extracted = [
        seen.header["parts"][0]["rows"]
        for seen in model.start(evaluation, rows)
        if seen.is_reply and seen.action == "query.extract"
    ]
    assert extracted == [count, PEOPLE]


def test_a_table_in_two_roles_pays_for_both(tmp_path):
    """In each of them the person has the same rows."""
    sql = "SELECT c.amount AS label, c.fee, d.fee AS f FROM claims c "
    sql += "JOIN claims d ON c.person = d.person"
    finished = run_query(
        sql, {"insurer": sites(tmp_path, per_person(3))["insurer"]}, **PRIVATE
    )
    sizes = finished.sizes
    assert sizes[0] == sizes[1] == np.minimum(SIZES, 3).sum()
    costs = [release["mechanism"] for release in releases_of(finished)]
    assert len([cost for cost in costs if cost]) == 4
    single = run_query(SQL, sites(tmp_path / "b", per_person(3)), **PRIVATE)
    one = total_of(single)["models"]
    both = total_of(finished)["models"]
    assert one == pytest.approx(1.0, rel=1e-3)
    assert 1.3 < both < 2.0


def test_groups_of_a_person_are_the_persons(tmp_path):
    """They cost what rows do; groups of several people are refused."""
    groups = "(SELECT person, AVG(fee) AS mean FROM claims GROUP BY {})"
    sql = "SELECT p.age AS label, c.mean FROM people p JOIN {} c ON p.id = c.person"
    rows = sites(tmp_path, per_person(3))
    finished = run_query(sql.format(groups.format("person")), rows, **PRIVATE)
    (of_group,), (of_row,) = (
        [own for own in releases_of(finished, table) if own["what"] == "gram"]
        for table in ("claims", "people")
    )
    assert of_group["mechanism"] == of_row["mechanism"]
    assert "groups" not in of_group["scope"]
    by_day = "(SELECT day, AVG(fee) AS mean FROM claims GROUP BY day)"
    of_day = sql.replace("c.person", "c.day")
    match = r"privacy-unit\) refuses.*GROUP BY person as well, or group nothing"
    with pytest.raises(SiteError, match=match):
        run_query(of_day.format(by_day), rows, **PRIVATE)
    # both remedies that the error names
    run_query(
        of_day.format(by_day.replace("BY day", "BY day, person")), rows, **PRIVATE
    )
    run_query(of_day.format("claims").replace("c.mean", "c.fee"), rows, **PRIVATE)


def test_the_two_ways_of_counting_do_not_share_a_budget(tmp_path):
    """What was paid per row says nothing of what a person has spent."""
    clear = """epsilon = 9.0
releases = { labels = "clear", scores = "clear", statistics = "clear" }
"""
    state = tmp_path / "state"
    run_query(SQL, sites(tmp_path, clear), state=state, **PRIVATE)
    for _ in range(2):
        match = "claims has spent epsilon per row, and its policy counts per person"
        with pytest.raises((SiteError, BudgetError), match=match):
            run_query(
                SQL, sites(tmp_path, per_person(3, clear)), state=state, **PRIVATE
            )
    fresh = per_person(3, f'budget-name = "by person"\n{clear}')
    for _ in range(2):
        run_query(SQL, sites(tmp_path, fresh), state=state, **PRIVATE)


def test_summaries_of_sites_have_the_noise_of_a_person(tmp_path, monkeypatch):
    """All rows of a person may lie at the bound, in one direction."""
    bounds = []

    def summary(mean, bound, rows, multiplier, noise):
        assert multiplier > 0
        assert rows > 0
        assert noise is not None
        bounds.append(bound)
        return mean

    monkeypatch.setattr("tp_flower.methods.personalised.sites.noisy_mean", summary)
    clear = "releases = { models = 'clear' }"
    policies = {"a": per_person(3, clear), "b": f"min-rows = 2\n{clear}"}
    rows = {
        name: write_site(tmp_path / name, {"claims": claims()}, {"claims": policy})
        for name, policy in policies.items()
    }
    sql = "SELECT c.amount AS label, c.day, c.fee FROM claims c"
    with WatchedGrid(rows) as grid:
        ledgers = train_on(
            grid,
            sql,
            "personalised",
            graph="data",
            graph_epsilon=1.0,
            device="cpu",
            num_epochs=1,
        ).ledgers
    assert sorted(bounds) == [EMBEDDING_BOUND, 3 * EMBEDDING_BOUND]
    releases = [line["release"] for own in ledgers.values() for line in own]
    told = [(r["per"], r["mechanism"]) for r in releases if r["what"] == "summaries"]
    (first, costs), (second, same) = told
    assert {first, second} == {"person", "row"}
    assert costs == same
