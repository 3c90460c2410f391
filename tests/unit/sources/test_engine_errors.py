"""What leaves a site of DuckDB's errors: no value of the data."""

import re

import duckdb
import pandas as pd
import pytest

from tp_flower.duckdb_engine import safe_message

SECRETS = ["se'c\"ret\n\nLINE 1: secret\n^^ to INT32", "2024-13-45", "98765"]


@pytest.mark.parametrize("value", SECRETS)
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("CAST(a AS INTEGER[])", r"Conversion Error"),
        ("CAST(a AS TINYINT)", r"Conversion Error"),
        ("CAST(a AS DATE)", r"Conversion Error"),
        ("CAST(a AS DECIMAL(4, 1))", r"Conversion Error \(to DECIMAL\(4,1\)\)"),
        ("CAST(a AS BOOLEAN)", r"Conversion Error \(to BOOL\)"),
        ("strptime(a, '%d.%m.%Y')", r"Invalid Input Error"),
        ("error(a)", r"Invalid Input Error"),
        ("CAST(length(a) + 1000 AS TINYINT)", r"Conversion Error \(out of range\)"),
        ("(length(a) + 9000000000000000) * 9000000", r"Out Of Range Error \(Overflow"),
    ],
)
def test_values_are_left_out(expression, message, value):
    with duckdb.connect() as connection:
        connection.register("t", pd.DataFrame({"a": [value]}))
        with pytest.raises(duckdb.Error) as caught:
            connection.execute(f"SELECT {expression} FROM t").fetchall()
    text = safe_message(caught.value)
    assert re.match(message, text)
    for piece in ("se'c", "secret", "ret", "2024", "98765", "9000", "100"):
        assert piece not in text


def test_names_and_types_are_kept():
    with duckdb.connect() as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('secret-a', 'secret (b)')")
        connection.execute("CREATE TABLE t (a mood, b DATE, price DOUBLE)")
        for sql, start in (
            (
                "SELECT prize FROM t",
                'Binder Error: Referenced column "prize" not found',
            ),
            ("SELECT a + b FROM t", "Binder Error: No function matches"),
            ("SELECT a FROM nowhere", "Catalog Error: Table with name nowhere"),
            ("SELECT FROM", "Parser Error"),
        ):
            with pytest.raises(duckdb.Error) as caught:
                connection.execute(sql)
            text = safe_message(caught.value)
            assert text.startswith(start)
            for piece in ("secret", "\n", "Candidate functions"):
                assert piece not in text


@pytest.mark.parametrize(
    ("column", "pattern"),
    [
        ("price", r"column \"price\" from type VARCHAR; to DOUBLE\)$"),
        ("cost", 'column "price" was read from .*a.parquet.* not be found in .*b.par'),
    ],
)
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
