"""Sub-queries with GROUP BY over sharded tables: no group may cross shards."""

import re

import pandas as pd
import pytest
from msgspec.structs import replace

from client_apps.privacy.ledger_entries import GROUP_SCOPE, group_cost
from strategies.report_page.costs import privacy_totals
from strategies.run.exchange import Part, Replies
from strategies.setup.extract import check_groups
from tests.support import federated
from tests.support.federated import WatchedGrid
from tp_flower.errors import QueryError, ReplyError
from tp_flower.privacy.mechanisms import BASE_ROW_SCOPE, Gaussian
from tp_flower.protocol.proposal import Proposal, ProposedPart
from tp_flower.protocol.setup_messages import ExtractedPart
from tp_flower.query import Fragment
from tp_flower.query.fragment import SubQuery
from tp_flower.reports.blocks import Record
from tp_flower.settings import PrivacySettings
from tp_flower.terms.groups import grouped_parts

CUSTOMERS = pd.DataFrame(
    {"id": [1, 2, 3, 4, 5, 6], "y": [1.0, 2.0, 4.0, 3.0, 6.0, 5.0]}
)
SQL = """SELECT c.y AS label, p.mean, p.n FROM customers c JOIN (
    SELECT customer, AVG(amount) AS mean, COUNT(*) AS n FROM payments{where}
    GROUP BY customer{having}) p ON c.id = p.customer"""


def payments(*customers):
    amounts = [10.0 * place for place in range(1, len(customers) + 1)]
    return pd.DataFrame({"customer": customers, "amount": amounts})


def train(sql, sites, **settings):
    """Train; a query that is refused reaches no training."""
    grid = WatchedGrid([{"customers": CUSTOMERS}, *sites])
    try:
        return federated.train(grid, sql, test_fraction=0.0, **settings)
    except QueryError:
        assert not [seen for seen in grid.seen if seen.action.startswith("train.")]
        raise


def run(shards, where="", having="", **settings):
    sites = [{"payments": shard} for shard in shards]
    return train(SQL.format(where=where, having=having), sites, **settings)


def test_groups_within_shards_are_the_groups_of_the_whole():
    shards = [payments(1, 2, 2, None), payments(3, 4, 4, 4, 5, 6)]
    split = run(shards)
    unsplit = run([pd.concat(shards, ignore_index=True)])
    assert split.report.joined_rows_train == 6
    assert split.report.final_train == pytest.approx(unsplit.report.final_train)


@pytest.mark.parametrize(
    ("shards", "crossing", "groups"),
    [
        ([[1, 2, 3], [3, 4]], 1, 4),
        ([[1, 2, 3], [3, 2, 2]], 2, 3),
        ([[1, 2], [3, 4], [5, 1]], 1, 5),
        ([[1, None], [2, None]], 1, 3),
    ],
)
def test_group_that_crosses_shards_is_refused_with_the_count(shards, crossing, groups):
    match = (
        rf"sub-query 'p' aggregates groups that cross shards: {crossing} of {groups} "
        r"groups have rows at several of the sites 'site-1', 'site-2'"
    )
    with pytest.raises(QueryError, match=match):
        run([payments(*own) for own in shards])


def test_shards_of_one_site_are_grouped_once_its_owner_makes_one_table_of_them(
    tmp_path,
):
    """What the message says to write trains, as all rows in one shard do."""
    halves = [payments(1, 2, 3), payments(3, 4, 5)]
    file = federated.write_site(tmp_path, {"payments": halves[0]})
    halves[1].to_csv(tmp_path / "more.csv", index=False)
    entry = "[[tables.{0}.shards]]\npath = '{1}.csv'\nsite = 'bank'\n"
    shards = "".join(entry.format("payments", name) for name in ("payments", "more"))
    file.write_text(f"tables.payments.policy = 'open'\n{shards}")
    sql = SQL.format(where="", having="")
    with pytest.raises(QueryError, match="cross shards: 1 of 5 groups") as refused:
        federated.train({"shop": {"customers": [CUSTOMERS]}, "bank": file}, sql)
    said = re.search(
        r"(\[tables.all_payments\]) with (sql = \".*\"): write (.*) in the",
        str(refused.value),
    )
    head, statement, name = said.groups()
    file.write_text(
        f"{file.read_text()}{head}\n{statement}\nsite = 'bank'\npolicy = 'open'\n"
    )
    sql = sql.replace("payments", name)
    sites = {"shop": {"customers": [CUSTOMERS]}, "bank": file}
    found = federated.train(sites, sql, test_fraction=0.0)
    whole = {"all_payments": pd.concat(halves, ignore_index=True)}
    expected = train(sql, [whole])
    assert found.report.joined_rows_train == expected.report.joined_rows_train
    assert found.report.final_train == pytest.approx(expected.report.final_train)


def test_the_remedy_of_groups_at_several_sites_is_one_that_helps():
    with pytest.raises(QueryError, match="LATERAL sub-query that compares a time"):
        run([payments(1, 2), payments(2, 3)])


def test_having_does_not_hide_a_group_that_crosses():
    with pytest.raises(QueryError, match="1 of 4 groups have rows at several"):
        run([payments(1, 2, 2, 3), payments(3, 4, 4)], having=" HAVING COUNT(*) > 1")


def test_filter_of_the_sub_query_can_keep_groups_apart():
    shards = [payments(1, 2, 3), payments(3, 4, 5)]
    strategy = run(shards, where=" WHERE NOT (customer = 3 AND amount < 15)")
    assert strategy.report.joined_rows_train == 5


def test_two_branches_of_a_union_group_on_their_own():
    sql = """SELECT c.y AS label, p.n FROM customers c JOIN (
        SELECT customer, COUNT(*) AS n FROM old GROUP BY customer UNION ALL
        SELECT customer, COUNT(*) AS n FROM new GROUP BY customer) p
        ON c.id = p.customer"""
    tables = {"old": payments(1, 2, 2, 3), "new": payments(3, 3, 3, 4, 4)}
    assert train(sql, [tables]).report.joined_rows_train == 5


def test_two_equal_branches_of_a_union_are_not_one_crossing():
    branch = "SELECT customer, COUNT(*) AS n FROM payments GROUP BY customer"
    sql = f"""SELECT c.y AS label, p.n FROM customers c
        JOIN ({branch} UNION ALL {branch}) p ON c.id = p.customer"""
    apart = [{"payments": payments(1, 2, 2)}, {"payments": payments(3)}]
    assert train(sql, apart).report.joined_rows_train == 6
    with pytest.raises(QueryError, match="1 of 2 groups have rows at several"):
        train(sql, [{"payments": payments(1, 2, 2)}, {"payments": payments(2)}])


def test_groups_are_sent_only_where_there_are_several_shards():
    sub = SubQuery((), groups=('"k"',))
    grouped = Fragment("p", "t", subquery=sub)
    plain = Fragment("q", "t")
    at = [("2", grouped), ("3", grouped), ("3", plain)]
    parts = {
        n: ProposedPart(
            table=of.table, site="s", node=node, shard=0, fragment=of.to_json()
        )
        for n, (node, of) in enumerate(at)
    }
    run = Proposal(query="", parts=parts, joins=[], outer=[], settings={})
    assert grouped_parts(run) == [[0, 1]]
    assert grouped_parts(replace(run, parts={0: parts[0], 2: parts[2]})) == []


def test_site_that_sends_no_groups():
    parts = [Part(0, "p", "a", 2, 0), Part(1, "p", "b", 3, 0)]
    sent = ExtractedPart(rows=0, keys=[], engine="DuckDB", pushed=[])
    with pytest.raises(ReplyError, match=r"site 'a' .* sent no 'group_hashes'"):
        check_groups([parts], Replies({}, {0: sent, 1: sent}), {})


def test_all_groups_of_a_table_without_any():
    with pytest.raises(ValueError, match="'t' has no GROUP BY"):
        _ = Fragment("t", "t").all_groups


def test_a_row_below_groups_costs_what_two_of_them_do():
    """It leaves one group and enters another."""
    assert group_cost(Gaussian(3.0, 5)) == (Gaussian(1.5, 5), BASE_ROW_SCOPE)
    sampled = Gaussian(3.0, 5, 0.5)
    assert group_cost(sampled) == (sampled, GROUP_SCOPE)
    settings = PrivacySettings(features="statistics", epsilon=8.0, delta=1e-4)
    report = run([payments(*range(1, 7))], privacy=settings).report
    multipliers = {}
    lines = [line for own in report.privacy["ledger"].values() for line in own]
    for release in (line["release"] for line in lines):
        if release["what"] == "gram":
            is_grouped = release["table"] == "payments"
            assert (BASE_ROW_SCOPE in release["scope"]) == is_grouped
            multipliers[release["table"]] = release["mechanism"]["noise_multiplier"]
    assert multipliers["payments"] == pytest.approx(multipliers["customers"] / 2.0)
    note = privacy_totals(Record(report.privacy)).note
    assert f"Of payments, {BASE_ROW_SCOPE}: so the epsilon is above privacy" in note
