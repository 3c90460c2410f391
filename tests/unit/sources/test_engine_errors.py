"""What leaves a site of DuckDB's errors: no value of the data."""

import re

import duckdb
import pandas as pd
import pytest

from tests.support.files import case_table
from tp_flower.duckdb_engine import safe_message

CASES = case_table(__file__)
SECRETS = ["se'c\"ret\n\nLINE 1: secret\n^^ to INT32", "2024-13-45", "98765"]


@pytest.mark.parametrize("value", SECRETS)
@CASES.each("values", "expression", "message")
def test_values_are_left_out(expression, message, value):
    with duckdb.connect() as connection:
        connection.register("t", pd.DataFrame({"a": [value]}))
        with pytest.raises(duckdb.Error) as caught:
            connection.execute(f"SELECT {expression} FROM t").fetchall()
    text = safe_message(caught.value)
    assert re.match(message, text)
    for piece in ("se'c", "secret", "ret", "2024", "98765", "9000", "100"):
        assert piece not in text


@CASES.each("names", "sql", "start")
def test_names_and_types_are_kept(sql, start):
    with duckdb.connect() as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('secret-a', 'secret (b)')")
        connection.execute("CREATE TABLE t (a mood, b DATE, price DOUBLE)")
        with pytest.raises(duckdb.Error) as caught:
            connection.execute(sql)
    text = safe_message(caught.value)
    assert text.startswith(start)
    for piece in ("secret", "\n", "Candidate functions"):
        assert piece not in text


@CASES.each("folders", "column", "pattern")
def test_files_of_a_folder_that_differ_are_named(tmp_path, column, pattern):
    with duckdb.connect() as connection:
        for file, text in (("a", "1.5 AS price"), ("b", f"'secret' AS {column}")):
            sql = f"COPY (SELECT {text}) TO '{tmp_path}/{file}.parquet'"
            connection.execute(sql.replace("1.5", "1.5::DOUBLE"))
        with pytest.raises(duckdb.Error) as caught:
            connection.sql(f"SELECT sum(price) FROM '{tmp_path}/*.parquet'").fetchall()
    message = safe_message(caught.value)
    assert re.search(pattern, message)
    assert "b.parquet" in message
    assert "secret" not in message
