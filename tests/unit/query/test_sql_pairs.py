"""SQL pairs: queries and their plans, or what refuses them; answers equal DuckDB's.

A pair of tests/support/sql has a ``name``, the ``sql``, and either the ``plan`` (as
:func:`tests.support.joined.plan` writes it) or the ``error``. ``canonical`` is the
rendered query where it differs in more than layout, ``reference`` the SQL that DuckDB
is asked instead where our rule is another one than DuckDB's (texts in normal form C) or
columns have other names, and ``matched`` leaves out rows without a match on both sides.
"""

import duckdb
import pytest

from tests.support.joined import engine_rows, joined_rows, plan, result_names
from tests.support.sql_pairs import (
    ACCEPTED,
    PAIRS,
    SCHEMAS,
    SCRIPT,
    by_name,
    parquet_sources,
)
from tp_flower import errors
from tp_flower.query import Fragment, Query

REFUSED = [pair for pair in PAIRS if "error" in pair]


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        connection.execute(SCRIPT)
        yield connection


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return {shards: parquet_sources(folder, shards) for shards in (1, 2)}


def test_names_tell_pairs_apart():
    assert len({pair["name"] for pair in PAIRS}) == len(PAIRS)
    assert len(ACCEPTED) + len(REFUSED) == len(PAIRS)


@by_name(ACCEPTED)
def test_pair(pair, database, sources):
    query = Query.from_sql(pair["sql"])
    bound = query.bind(SCHEMAS)
    assert plan(bound) == pair["plan"]
    # the plan passes the sites unchanged
    for fragment in bound.fragments:
        assert fragment.check(SCHEMAS[fragment.name]) == fragment
        assert Fragment.from_json(fragment.to_json()) == fragment
    # the answer is that of DuckDB
    names = result_names(bound)
    expected = engine_rows(database, pair.get("reference", pair["sql"]), names)
    assert expected
    is_matched = pair.get("matched", False)
    assert joined_rows(bound, sources[1], matched=is_matched) == expected
    if all(fragment.subquery is None for fragment in bound.fragments):
        # groups may cross shards: only what does not group can be split anywhere
        assert joined_rows(bound, sources[2], matched=is_matched) == expected
    # the canonical SQL is the same query
    canonical = query.to_sql()
    if "canonical" in pair:
        assert canonical == " ".join(pair["canonical"].split())
    again = Query.from_sql(canonical)
    assert (again, again.to_sql(), again.bind(SCHEMAS)) == (query, canonical, bound)
    if "reference" not in pair:
        assert engine_rows(database, canonical, names) == expected


@by_name(REFUSED)
def test_refusal(pair, sources):
    kind = getattr(errors, pair.get("raises", "QueryError"))
    with pytest.raises(kind, match=pair["error"]):
        joined_rows(Query.from_sql(pair["sql"]).bind(SCHEMAS), sources[1])
