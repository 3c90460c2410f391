"""Queries that would hold a site's machine, or tell of a row by the time that they
take.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.support.database_tables import fill, source_of, url_of
from tests.support.federated import run_query, write_site
from tests.support.files import case_table
from tp_flower.errors import QueryError, SiteError, SourceError
from tp_flower.query.expressions import parse_expression
from tp_flower.sources.policy import Policy
from tp_flower.sources.shards import describe

CASES = case_table(__file__)
CLEAR = "releases = { scores = 'clear' }"
ROWS = np.arange(20_000)
LONG = pd.DataFrame(
    {
        "k": ROWS,
        "y": ROWS % 2 == 0,
        "x": [chr(97 + n % 26) * 400 for n in ROWS],
        "w": [chr(97 + n % 25) * 400 for n in ROWS],
    }
)


@pytest.mark.parametrize("text", CASES["of-rows"])
def test_a_pattern_that_a_row_would_choose_is_refused(text):
    """60 of them in one expression told a bit of a row, by the seconds of the reply."""
    match = (
        "a pattern is a text in quotes, such as 'a%', and not made of columns; to "
        "compare"
    )
    for whole in (text, f"CASE WHEN a > 1 THEN {text} END"):
        with pytest.raises(QueryError, match=match):
            parse_expression(whole, "feature")


@pytest.mark.parametrize("text", CASES["constant"])
def test_a_constant_pattern_is_not_refused(text):
    assert parse_expression(text, "feature")


def test_a_query_that_takes_too_long_is_ended_and_counted(tmp_path):
    """Allowed expressions over many rows: 120,000 edit distances of long texts."""
    # no two are alike, which DuckDB would work out once
    slow = ", ".join(
        f"LEVENSHTEIN(SUBSTR(a.x, {n + 1}), a.w) AS f{n}" for n in range(6)
    )
    site = write_site(tmp_path / "s", {"a": LONG}, {"a": f"query-seconds = 3\n{CLEAR}"})
    match = (
        r"\(query-seconds = 3\) refuses: the query of table 'a' takes longer; ask for "
        r"fewer"
    )
    sql = f"SELECT a.y AS label, {slow} FROM a"
    with pytest.raises(SiteError, match=match) as refused:
        run_query(sql, [site])
    assert "aaa" not in str(refused.value)
    # simpler expressions, and fewer rows
    simple = "SELECT a.y AS label, LENGTH(a.x) + a.k AS f FROM a"
    for quick in (simple, f"{sql} WHERE a.k < 20"):
        run_query(quick, [site], num_epochs=1)


@pytest.mark.parametrize(("kind", "sql"), CASES["slow"])
def test_a_database_ends_a_statement_that_takes_too_long(kind, sql, request, tmp_path):
    url = url_of(kind, request, tmp_path)
    fill(url, "t", {"a": "INTEGER"}, [(1,)])
    source = source_of(url, "", sql=sql)
    match = (
        "it took too long: raise 'query-seconds' in the table's policy, or the "
        "database's"
    )
    with pytest.raises(SourceError, match=match):
        describe(replace(source, policy=Policy(query_seconds=1)))
