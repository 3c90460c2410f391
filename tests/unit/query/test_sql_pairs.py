"""SQL pairs: queries and their plans, or what refuses them; answers equal DuckDB's.

A pair of tests/support/sql has a ``name``, the ``sql``, and either the ``plan`` (as
:func:`tests.support.joined.plan` writes it) or the ``error``. ``canonical`` is the
rendered query where it differs in more than layout, ``reference`` the SQL that DuckDB
is asked instead where our rule is another one than DuckDB's (texts in normal form C) or
columns have other names, and ``matched`` leaves out rows without a match on both sides.

The same check on random queries: what sites run, joined, is DuckDB's answer.
"""

import re
from collections import defaultdict

import duckdb
import pandas as pd
import pytest
from hypothesis import strategies as st

from tests.support import sql_pairs
from tests.support.examples.laws import law
from tests.support.files import case_table
from tests.support.joined import engine_rows, joined_rows, plan, result_names
from tests.support.reference.joins import engine_of
from tp_flower import errors
from tp_flower.errors import MappingError, QueryError
from tp_flower.query import BoundQuery, Fragment, Query
from tp_flower.sources.shards import load_tables, register_frames, release

CASES = case_table(__file__)
REFUSED = [pair for pair in sql_pairs.PAIRS if "error" in pair]
NUMBERS = st.none() | st.integers(0, 2)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        connection.execute(sql_pairs.SCRIPT)
        yield connection


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return {shards: sql_pairs.parquet_sources(folder, shards) for shards in (1, 2)}


def check_fragments(bound, schemas):
    """Assert that a plan passes the sites unchanged."""
    for fragment in bound.fragments:
        assert fragment.check(schemas[fragment.name]) == fragment
        assert Fragment.from_json(fragment.to_json()) == fragment


def test_names_tell_pairs_apart():
    assert len({pair["name"] for pair in sql_pairs.PAIRS}) == len(sql_pairs.PAIRS)
    assert len(sql_pairs.ACCEPTED) + len(REFUSED) == len(sql_pairs.PAIRS)


@sql_pairs.by_name(sql_pairs.ACCEPTED)
def test_pair(pair, database, sources):
    query = Query.from_sql(pair["sql"])
    bound = query.bind(sql_pairs.SCHEMAS)
    assert plan(bound) == pair["plan"]
    check_fragments(bound, sql_pairs.SCHEMAS)
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
    assert again == query
    assert again.to_sql() == canonical
    assert again.bind(sql_pairs.SCHEMAS) == bound
    if "reference" not in pair:
        assert engine_rows(database, canonical, names) == expected


@sql_pairs.by_name(REFUSED)
def test_refusal(pair, sources):
    kind = getattr(errors, pair.get("raises", "QueryError"))
    with pytest.raises(kind, match=pair["error"]):
        joined_rows(Query.from_sql(pair["sql"]).bind(sql_pairs.SCHEMAS), sources[1])


CONDITIONS = ["{0}.x = {1}.x", "{1}.y = {0}.x", "{0}.y = {1}.y", "{0}.x + 1 = {1}.y"]
FILTERS = """
{0}.x > 0; ({0}.x = 1 OR {0}.y IS NULL); NOT {0}.y = 2; {0}.x < 2; {0}.y IS NOT NULL;
COALESCE({0}.x, 1) = 1
""".strip().split(";")
# The only reasons for which a query made below is refused.
REFUSALS = re.compile(
    r"also keeps rows without a match|compares a\d and a\d|is not NULL there"
    r"|which that join does not compare|has no equality condition"
    r"|is not connected to"
)
NUMBERS_ONLY = {name: {"x": "INTEGER", "y": "INTEGER"} for name in "tu"}


@st.composite
def queries(draw) -> str:
    """A random tree of two to four aliases, joined in any way."""
    number = draw(st.integers(2, 4))
    tables = [draw(st.sampled_from(CASES["tables"])) for _ in range(number)]
    where = []
    sources = f"{tables[0]} AS a0"
    for right in range(1, number):
        left = draw(st.integers(0, right - 1))
        kinds = draw(st.lists(st.sampled_from(CONDITIONS), min_size=1, max_size=2))
        texts = [kind.format(f"a{left}", f"a{right}") for kind in kinds]
        join = draw(st.sampled_from(["JOIN", "LEFT JOIN", "LEFT JOIN", "CROSS JOIN"]))
        if join == "CROSS JOIN":
            where += texts
            sources += f" CROSS JOIN {tables[right]} AS a{right}"
            continue
        conditions = draw(st.lists(st.sampled_from(FILTERS), max_size=2))
        texts += [f.format(f"a{draw(st.integers(0, right))}") for f in conditions]
        sources += f" {join} {tables[right]} AS a{right} ON {' AND '.join(texts)}"
    filters = draw(st.lists(st.sampled_from(FILTERS), max_size=2))
    where += [f.format(f"a{draw(st.integers(0, number - 1))}") for f in filters]
    items = ", ".join(f"a{i}.x AS x{i}, a{i}.y * 2 AS y{i}" for i in range(number))
    clause = f" WHERE {' AND '.join(where)}" if where else ""
    return f"SELECT a0.y AS label, {items} FROM {sources}{clause}"


def bind_or_none(query: Query) -> BoundQuery | None:
    """The bound query; None if it is refused for one of the known reasons."""
    try:
        return query.bind(NUMBERS_ONLY)
    except QueryError as error:
        if REFUSALS.search(str(error)):
            return None
        raise


@law(30, 100, sql=queries(), t=ROWS, u=ROWS, cut=st.integers(1, 4))
def test_push_down_on_random_queries_and_rows(sql, t, u, cut):
    # A comma has the tables after it in reach of ON only in the outer scope,
    # so DuckDB runs the query with CROSS JOIN and tp_flower reads commas.
    ours = Query.from_sql(sql.replace(" CROSS JOIN", ","))
    assert Query.from_sql(ours.to_sql()) == ours
    bound = bind_or_none(ours)
    if bound is None:
        return
    check_fragments(bound, NUMBERS_ONLY)
    frames = {
        name: pd.DataFrame(rows, columns=["x", "y"], dtype="Int32")
        for name, rows in (("t", t), ("u", u))
    }
    # groups may cross shards: only what does not group can be split anywhere
    is_grouped = any(fragment.subquery is not None for fragment in bound.fragments)
    shards = {
        name: [frame] if is_grouped else [frame[:cut], frame[cut:]]
        for name, frame in frames.items()
    }
    with engine_of(frames) as connection:
        expected = engine_rows(connection, sql, result_names(bound))
    token = register_frames(shards, site="here")
    try:
        sources = defaultdict(list)
        for source in load_tables(f"memory:{token}"):
            sources[source.table].append(source)
        if expected:
            assert joined_rows(bound, sources) == expected
            return
        with pytest.raises(MappingError, match="the join has no rows"):
            joined_rows(bound, sources)
    finally:
        release(token)
