"""Expressions: what DuckDB runs is what was written, or it is refused by name."""

from functools import partial

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from tests.support.files import case_table
from tests.support.sql_pairs import ACCEPTED
from tp_flower.errors import QueryError
from tp_flower.query.expressions import (
    AGGREGATE_NODES,
    ALLOWED_FUNCTIONS,
    ALLOWED_NODES,
    MAX_EXPRESSION_CHARACTERS,
    check_expression,
    parse_expression,
    parse_statements,
    render,
)

CASES = case_table(__file__)
PIECES = [piece.strip() for piece in CASES["accepted"].split(";")]
parse = partial(parse_expression, element="feature 'f'")
LONG = [
    ("x + " * MAX_EXPRESSION_CHARACTERS + "1", "characters, at most 20000"),
    ("(" * 3000 + "x" + ")" * 3000, "nested too deeply"),
]


@pytest.fixture(scope="module")
def database():
    with duckdb.connect() as connection:
        columns = "i, x, s, ts, d, b, n"
        connection.execute(
            f"CREATE TABLE t AS FROM (VALUES {CASES['rows']}) t({columns})"
        )
        yield connection


@pytest.mark.parametrize("text", PIECES)
def test_a_rendered_expression_is_a_fixed_point_with_the_same_values(database, text):
    rendered = render(parse(text), quote=True)
    assert render(parse(rendered), quote=True) == rendered
    query = "SELECT typeof({0}), ({0}) FROM t"
    expected = database.execute(query.format(text)).fetchall()
    assert database.execute(query.format(rendered)).fetchall() == expected


def test_everything_that_is_allowed_was_run():
    trees = [parse_statements(f"SELECT {piece}")[0].expressions[0] for piece in PIECES]
    trees += [parse(piece) for piece in PIECES]
    nodes = [node for tree in trees for node in tree.walk()]
    assert {type(node) for node in nodes} >= ALLOWED_NODES
    names = {node.name.lower() for node in nodes if isinstance(node, exp.Anonymous)}
    assert names == ALLOWED_FUNCTIONS
    # every accepted pair runs in DuckDB and is compared with its answer
    trees = [tree for pair in ACCEPTED for tree in parse_statements(pair["sql"])]
    assert {type(node) for tree in trees for node in tree.walk()} >= AGGREGATE_NODES
    assert exp.AnyValue not in AGGREGATE_NODES


@pytest.mark.parametrize("text", CASES["not_allowed"].split(";"))
def test_functions_that_are_not_allowed(text):
    name = text.split("(")[0].strip(' \n"')
    message = f"feature 'f' is refused: .*function '{name}' is not among"
    with pytest.raises(QueryError, match=message):
        parse(text)


@pytest.mark.parametrize("aggregates", [False, True])
@pytest.mark.parametrize(("text", "reason"), CASES["refused"] + LONG)
def test_refused(aggregates, text, reason):
    with pytest.raises(QueryError, match=f"feature 'f' is refused: .*({reason})"):
        parse(text, aggregates=aggregates)


@pytest.mark.parametrize(
    "text", ["sum(x)", "count(*)", "any_value(x)", "sum(x) FILTER (WHERE x > 1)"]
)
def test_aggregates_outside_of_sub_queries(text):
    with pytest.raises(QueryError, match="aggregate functions are not supported: "):
        parse(text)


@CASES.each("aggregates", "text", "reason")
def test_refused_aggregates(text, reason):
    with pytest.raises(QueryError, match=f"column 'f' is refused: .*{reason}"):
        parse_expression(text, "column 'f'", aggregates=True)


def test_a_condition_belongs_to_a_filter():
    with pytest.raises(QueryError, match="WHERE is allowed only inside FILTER"):
        check_expression(exp.Where(this=exp.column("x")), "column 'f'", aggregates=True)


@pytest.mark.parametrize("aggregates", [False, True])
@settings(max_examples=300)
@given(
    st.one_of(
        st.text(max_size=30),
        st.lists(st.sampled_from(CASES["tokens"].split()), max_size=12).map(" ".join),
    )
)
def test_anything_is_refused_or_has_one_form(aggregates, text):
    try:
        once = render(parse(text, aggregates=aggregates), quote=True)
    except QueryError:
        return
    assert render(parse(once, aggregates=aggregates), quote=True) == once
