"""A server that wants more of one person than the policy's rows."""

from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from strategies import Explain
from tests.support.federated import (
    WatchedGrid,
    on_requests,
    run_query,
    train,
    write_site,
)
from tp_flower.errors import QueryError, SchemaError, SiteError
from tp_flower.protocol.packet import pack_bits
from tp_flower.settings import PrivacySettings

ROWS = 66
MOST = 4
LINEAR = {"num_epochs": 1, "device": "cpu"}
UNIT = f'privacy-unit = "person"\nrows-per-unit = {MOST}\n'
BUDGET = """epsilon = 4.0
epsilon-per-run = 4.0
releases = { labels = "clear", scores = "masked", statistics = "clear" }"""
SQL = """SELECT c.amount AS label, {feature} AS f, p.age
    FROM claims c JOIN people p ON c.person = p.id WHERE {condition}"""
WHOLE = {"feature": "c.day", "condition": "c.day >= 0"}
PLAIN = SQL.format(**WHOLE)


def sites(folder, policy: str = "") -> dict:
    """Person 0 has 66 claims, each with an amount of its own, and 20 others one."""
    claims = pd.DataFrame({"person": np.r_[np.zeros(ROWS, int), np.arange(1, 21)]})
    claims["amount"] = np.arange(len(claims)) + 0.5
    claims["day"] = np.arange(len(claims)) % 28
    people = pd.DataFrame({"id": np.arange(21), "age": np.arange(21) % 5 + 30.0})
    insurer = write_site(folder / "insurer", {"claims": claims}, {"claims": policy})
    registry = write_site(folder / "registry", {"people": people})
    return {"insurer": insurer, "registry": registry}


def labels(folder, policy, **query) -> set[float]:
    """The amounts that a run brings the server, in the clear."""
    sql = SQL.format(**{**WHOLE, **query})
    with WatchedGrid(sites(folder, policy), state=folder / "state") as grid:
        train(grid, sql, Explain, mode="explain")
    return set(grid.arrays("query.extract", replies=True)[0, "label-values"].tolist())


def test_filters_and_features_bring_no_further_row_over_all_runs(tmp_path):
    queries = [{"condition": f"c.day = {day}"} for day in range(0, 28, 4)]
    queries += [{"condition": "c.amount > 30"}, {"condition": "c.person = 0"}]
    queries += [{"feature": "c.day * 2"}, {"feature": "c.amount + c.person"}]
    seen: set[float] = set()
    for query in queries:
        # nobody may have a row on such a day
        with suppress(QueryError, SchemaError):
            seen |= labels(tmp_path, UNIT, **query)
    of_person = {amount for amount in seen if amount < ROWS}
    assert len(of_person) == MOST
    everything = labels(tmp_path / "without", "min-rows = 1")
    assert len({amount for amount in everything if amount < ROWS}) == ROWS


@pytest.mark.parametrize("name", ["trained", "tested"])
def test_masks_name_no_row_beyond_those_that_were_drawn(tmp_path, name):
    """The site reads as many bits as there are rows, all of them drawn."""

    @on_requests("train.prepare")
    def change(seen):
        if (0, name) in seen.arrays:
            seen.arrays[0, name] = pack_bits(np.ones(ROWS + 20, np.bool_))

    with pytest.raises(SiteError, match=f"not a mask of {20 + MOST} rows"):
        run_query(PLAIN, sites(tmp_path, UNIT), change=change, **LINEAR)


def test_a_message_has_no_word_on_units_or_bounds(tmp_path):
    """So a server cannot lower what a person costs, or name more rows of one."""
    privacy = PrivacySettings(features="statistics", epsilon=2.0, delta=1e-5)
    rows = sites(tmp_path, UNIT + BUDGET)
    for field in ("rows-per-unit", "privacy-unit", "units"):

        @on_requests("train.prepare")
        def change(seen, field=field):
            seen.header = {**seen.header, field: 1}

        with pytest.raises(SiteError, match=rf"{field}.*(not declared|none are)"):
            run_query(PLAIN, rows, change=change, privacy=privacy, **LINEAR)


def test_a_budget_is_the_persons_over_all_runs(tmp_path):
    """Noisy labels of a person with 4 rows cost four times a label's epsilon."""
    budget = BUDGET.replace('labels = "clear", ', "")
    rows = sites(tmp_path, UNIT + budget)
    how = {**LINEAR, "state": tmp_path / "state"}
    noisy = {"labels": "laplace", "label_range": "0, 100"}
    enough = PrivacySettings(features="statistics", label_epsilon=0.7, **noisy)
    totals = run_query(PLAIN, rows, privacy=enough, **how).report.privacy["totals"]
    (total,) = [total for total in totals if total["table"] == "claims"]
    assert total["labels"] == pytest.approx(4 * 0.7)
    assert total["models"] == pytest.approx(1.0, rel=1e-3)
    more = PrivacySettings(features="statistics", label_epsilon=1.1, **noisy)
    fresh = sites(tmp_path / "fresh", UNIT + budget)
    with pytest.raises(SiteError, match=r"claims has spent epsilon 0 of 4.*requested"):
        run_query(PLAIN, fresh, privacy=more, state=tmp_path / "other", **LINEAR)
