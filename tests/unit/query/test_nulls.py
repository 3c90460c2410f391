"""What is NULL where all columns are, by the types that the sites declare."""

import pytest

from tp_flower.errors import QueryError
from tp_flower.query import relations

TYPES = {
    "x": "INTEGER",
    "s": "VARCHAR",
    "d": "DATE",
    "b": "BOOLEAN",
    "v": "FLOAT[3]",
    "e": "ENUM('p', 'q')",
    'odd "name"': "DECIMAL(10,2)",
}
REJECTED = '''
"x" > 1; "s" = 'a' AND "x" IS NULL; NOT "b"; "b"; "s" LIKE '%'; LENGTH("s") = 0;
"d" + INTERVAL 1 DAY > '2020-01-01'; "x" IN (1, NULL); "odd ""name""" > 1; "e" = 'p';
"x" IS NOT NULL; "x" = 1 OR MONTH("d") = 2; "v" IS NOT NULL
'''
PASSED = """
"x" IS NULL; COALESCE("x", 1) = 1; ("x" > 1 OR "s" IS NULL); "x" IS DISTINCT FROM 1;
CASE WHEN "b" THEN false ELSE true END; CONCAT("s", 'a') = 'a'; true
"""
NULL_KEYS = '"x"; UPPER("s"); CASE WHEN "x" IS NULL THEN "s" END'
OTHER_KEYS = """COALESCE("s", ''); CONCAT("s", '-'); 1"""


@pytest.mark.parametrize(("texts", "is_true"), [(REJECTED, False), (PASSED, True)])
def test_conditions_on_a_missing_row(texts, is_true):
    for sql in texts.split(";"):
        assert relations.is_true_on_nulls(sql.strip(), TYPES) == is_true, sql


@pytest.mark.parametrize(("texts", "is_null"), [(NULL_KEYS, True), (OTHER_KEYS, False)])
def test_keys_of_a_missing_row(texts, is_null):
    for sql in texts.split(";"):
        assert relations.is_null_on_nulls(sql.strip(), TYPES) == is_null, sql


def test_types_of_aggregates():
    aggregates = 'COUNT(*) AS "n", AVG("x") AS "m", MAX("d") AS "last"'
    source = relations.typed_nulls(TYPES)
    select = f'SELECT "s" AS "s", {aggregates} FROM {source} GROUP BY "s"'
    expected = {"s": "VARCHAR", "n": "BIGINT", "m": "DOUBLE", "last": "DATE"}
    assert relations.output_types(select) == expected


@pytest.mark.parametrize(
    "kind", ["", "COLOUR", "INT) AS a, (SELECT 1", "INT; DROP TABLE t", "INT -- x"]
)
def test_a_type_that_is_none_is_refused(kind):
    with pytest.raises(QueryError, match="column 'x' has a type that DuckDB does not"):
        relations.is_null_on_nulls('"x"', {"x": kind})


@pytest.mark.parametrize(
    "sql", ['MONTH("s") = 1', '"x" + "d" > 1', "CAST('secret' AS INT) > \"x\""]
)
def test_what_does_not_fit_the_types_is_refused(sql):
    with pytest.raises(QueryError, match="does not fit the columns' types") as caught:
        relations.is_true_on_nulls(sql, TYPES)
    assert "secret" not in str(caught.value)


def test_the_engine_reads_no_file(tmp_path):
    (tmp_path / "x.csv").write_text("a\n1\n")
    with pytest.raises(QueryError, match="Permission Error"):
        relations.output_types(f"SELECT * FROM '{tmp_path}/x.csv'")
