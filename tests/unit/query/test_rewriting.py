"""SQL that people write: it has DuckDB's answer, or the how-to says what to write
instead.

The rows of the how-to are read, checked and run, and more queries are in the table of
cases: what is written, and the form in which it is read.
"""

import re

import duckdb
import pytest

from tests.support import sql_pairs
from tests.support.files import ROOT, case_table, text_of
from tests.support.joined import engine_rows, joined_rows, result_names
from tp_flower.errors import QueryError
from tp_flower.query import Query

CASES = case_table(__file__)
PAGE = text_of(ROOT / "docs/how-to/write-queries.md")
ROWS = [
    [" ".join(code.strip("`").split()) for code in re.findall(r"``.+?``|`[^`]+`", line)]
    for line in PAGE.splitlines()
    if re.match(r"\| `.*(SELECT|WITH)", line)
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return sql_pairs.parquet_sources(tmp_path_factory.mktemp("tables"))


def check_answer(sql, sources):
    query = Query.from_sql(sql)
    bound = query.bind(sql_pairs.SCHEMAS)
    with duckdb.connect() as database:
        database.execute(sql_pairs.SCRIPT)
        expected = engine_rows(database, sql, result_names(bound))
    assert expected
    assert joined_rows(bound, sources) == expected
    canonical = query.to_sql()
    assert Query.from_sql(canonical) == query
    assert Query.from_sql(canonical).to_sql() == canonical
    return canonical


WORKS, _, REFUSED = PAGE.partition("## What is refused")


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r[0] in WORKS] + CASES["read"], ids=str
)
def test_a_query_is_read_as_one_with_the_same_answer(row, sources):
    written, read = row
    assert check_answer(written, sources) == read


@pytest.mark.parametrize("row", [r for r in ROWS if r[0] in REFUSED], ids=str)
def test_a_refused_query_has_one_that_works(row, sources):
    with pytest.raises(QueryError):
        Query.from_sql(row[0]).bind(sql_pairs.SCHEMAS)
    check_answer(row[1], sources)
