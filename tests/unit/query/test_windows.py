"""Windows that a site accepts from the server, or refuses, and what they read."""

from dataclasses import replace

import pytest

from tests.support.files import case_table
from tests.support.tables.fragments import features
from tp_flower.errors import PolicyError, QueryError
from tp_flower.query import Fragment, SubQuery
from tp_flower.query.fragment import Role
from tp_flower.query.reads import reads
from tp_flower.sources.policy import Policy
from tp_flower.terms.fragment_text import fragment_text

CASES = case_table(__file__)
COLUMNS = ("id", "kind", "amount", "paid")
MEAN = (
    'AVG("amount") FILTER(WHERE "id" > 1) OVER (PARTITION BY "kind" ORDER BY "paid" '
    "RANGE BETWEEN INTERVAL '30' DAY PRECEDING AND INTERVAL '1' DAY PRECEDING)"
)
LATEST = 'ROW_NUMBER() OVER (PARTITION BY "kind" ORDER BY "paid" DESC) = 1'
WINDOWED = Fragment(
    table="p",
    name="payments",
    features=features(mean='"mean"'),
    keys=(('"id"',),),
    filters=('"mean" > 1',),
    subquery=SubQuery(
        columns=features(id='"id"', mean=MEAN),
        filters=('"amount" > 0',),
        qualify=(LATEST,),
    ),
)


def changed(**pieces) -> Fragment:
    return replace(WINDOWED, subquery=replace(WINDOWED.subquery, **pieces))


def check_reads(fragment: Fragment, policy: Policy) -> None:
    for read in reads(fragment):
        policy.check_read(read)


def test_what_is_canonical_travels_and_passes_unchanged():
    assert Fragment.from_json(WINDOWED.to_json()) == WINDOWED
    assert WINDOWED.check(COLUMNS) == WINDOWED
    assert WINDOWED.subquery.is_windowed
    written = SubQuery(features(F="lag(AMOUNT,2) over(order by paid, ID) -- x"))
    assert written.check(COLUMNS, "t").columns == features(
        F='LAG("amount", 2) OVER (ORDER BY "paid", "id")'
    )


@CASES.each("refused", "sql", "reason")
def test_windows_that_are_refused(sql, reason):
    match = f"table 'p': column 'f' of the sub-query is refused: .*{reason}"
    with pytest.raises(QueryError, match=match):
        changed(columns=features(f=sql)).check(COLUMNS)


def test_windows_stand_in_columns_and_in_qualify_alone():
    window = 'rank() OVER (ORDER BY "paid")'
    message = "is refused: window functions are not supported; write it in a sub-query"
    for pieces in (
        {"features": features(f=window)},
        {"filters": (f"{window} = 1",)},
        {"keys": ((window,),)},
        {"label": window},
        {"weight": window},
    ):
        with pytest.raises(QueryError, match=message):
            replace(WINDOWED, **pieces).check(COLUMNS)
    for pieces in (
        {"filters": (f"{window} = 1",)},
        {"groups": (window,)},
        {"having": (f"{window} = 1",)},
    ):
        with pytest.raises(QueryError, match=message):
            changed(**pieces).check(COLUMNS)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({"groups": ('"kind"',)}, "has GROUP BY or windows, not both"),
        (
            {"columns": features(n="COUNT(*)")},
            "column 'n' of the sub-query needs GROUP",
        ),
        ({"having": ("COUNT(*) > 1",)}, "HAVING condition 0 of the sub-query needs"),
        ({"qualify": ("COUNT(*) > 1",)}, "aggregate functions are not supported"),
        (
            {"qualify": ('"id" > 1',), "columns": features(id='"id"')},
            "an expression to group by, or a window",
        ),
        ({"columns": ()}, "a sub-query needs a column"),
    ],
)
def test_windows_beside_groups_and_aggregates_are_refused(pieces, message):
    with pytest.raises(QueryError, match=f"table 'p': .*{message}"):
        changed(**pieces).check(COLUMNS)


def test_what_windows_partition_by_is_read_as_groups_are():
    """The rest by the column's own use: here a feature, a filter and QUALIFY."""
    roles = {
        name: {read.role for read in reads(WINDOWED) if read.column == name}
        for name in COLUMNS
    }
    values = {Role.INNER, Role.FEATURE, Role.FILTER}
    assert roles == {
        "id": {*values, Role.KEY},
        "kind": {Role.GROUP},
        "amount": values,
        "paid": {*values, Role.QUALIFY},
    }


@pytest.mark.parametrize(
    ("rules", "refusal"),
    [
        ({"columns": ("amount", "id", "kind")}, "'mean' .* reads column 'paid'"),
        (
            {"columns": ("amount", "id", "kind"), "filters": ("paid", "amount", "id")},
            "feature 'mean' reads column 'paid'; it may read amount, id, kind",
        ),
        ({"keys": ("id",)}, "reads column 'kind'; it may read id"),
        ({"join_only": ("paid",)}, "reads column 'paid'; it may only be a join key"),
        ({"columns": ("id", "amount", "paid")}, "reads column 'kind'"),
        ({"filters": ("amount",)}, "filter 0 .*reads column|QUALIFY .*reads column"),
        ({"expressions": False}, "in an expression"),
    ],
)
def test_policies_are_about_every_column_that_windows_read(rules, refusal):
    with pytest.raises(PolicyError, match=refusal):
        check_reads(WINDOWED, Policy(**rules))


def test_a_policy_that_allows_windows():
    """The columns to partition by need not be ones that features may read."""
    policy = Policy(columns=("amount", "paid", "id"), keys=("id",), join_only=("kind",))
    check_reads(WINDOWED, policy)
    in_an_expression = changed(
        columns=features(id='"id"', mean=MEAN.replace('"kind"', 'LEFT("kind", 1)'))
    )
    with pytest.raises(PolicyError, match=r"join-only.*'kind' in an expression"):
        check_reads(in_an_expression, policy)


def test_partitions_are_the_groups_that_shards_compare():
    lag = 'LAG("id") OVER (PARTITION BY "id", LOWER("kind") ORDER BY "paid")'
    both = changed(columns=features(id='"id"', mean=MEAN, lag=lag))
    assert both.subquery.partitions == (('"id"', 'LOWER("kind")'), ('"kind"',))
    groups = both.all_groups
    assert [group.subquery.groups for group in groups] == [*both.subquery.partitions]
    for group in groups:
        assert group.subquery.filters == ('"amount" > 0',)
        assert group.conditions == group.subquery.filters
        assert group.check(COLUMNS) == group
    alone = changed(columns=features(id='"id"', mean='RANK() OVER (ORDER BY "id")'))
    assert () in alone.subquery.partitions


def test_the_text_for_the_owner():
    lines = fragment_text(WINDOWED).splitlines()
    assert f'sub-query column "mean": {MEAN}' in lines
    assert f"sub-query QUALIFY: {LATEST}" in lines
