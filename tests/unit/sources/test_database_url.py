"""Addresses of databases: their parts arrive, their secrets show nowhere."""

import sys
from pathlib import Path

import pytest

from tests.support.files import case_table
from tp_flower.errors import SourceError
from tp_flower.sources.databases.session import parse_url

CASES = case_table(__file__)
ENVIRONMENT = CASES["environment"]


def parse(text):
    return parse_url(text, ENVIRONMENT, Path("/site"), "shard 0 of table 't'")


@CASES.each("drivers", "text", "driver", "dialect")
def test_driver(text, driver, dialect):
    actual = parse(text)
    assert actual.url.drivername == driver
    assert actual.dialect == dialect


def test_variables_are_taken_as_they_are():
    text = "postgresql://${USER_NAME}:${PASSWORD}@${HOST}:5432/shop?x=${PASSWORD}"
    url = parse(text).url
    assert url.username == "anna@host"
    assert url.password == ENVIRONMENT["PASSWORD"]
    assert url.host == "db.example.org"
    assert url.port == 5432
    assert url.query["x"] == ENVIRONMENT["PASSWORD"]
    assert parse("postgresql://u:x${EMPTY}@h/d").url.password == "x"
    assert parse("${WHOLE}").url.password == "s3cret"


def test_characters_of_a_user_or_password_are_escaped_as_the_refusal_says():
    with pytest.raises(
        SourceError, match="write @ : / of a user or password as %40 %3A %2F"
    ):
        parse("postgresql://an@na:p@ss/w:rd@h/d")
    url = parse("postgresql://an%40na:p%40ss%2Fw%3Ard@h/d").url
    assert url.username == "an@na"
    assert url.password == "p@ss/w:rd"
    assert url.host == "h"


@CASES.each("printed", "text", "printed")
def test_text_without_secrets(text, printed):
    url = parse(text)
    assert str(url) == printed
    assert repr(url) == f"DatabaseUrl({printed!r})"


def test_words_of_a_driver_are_redacted():
    actual = parse("postgresql://anna:${PASSWORD}@h/d?sslpassword=k3y%20z")
    words = f"anna {ENVIRONMENT['PASSWORD']} p%40ss%2Fw%3Ard%2541%3F k3y z k3y%20z d"
    assert actual.redact(words) == "*** *** *** *** *** d"


@CASES.each("refused", "text", "match")
def test_refusals(text, match):
    match = f"'uri' of shard 0 of table 't'.*{match}"
    with pytest.raises(SourceError, match=match) as e:
        parse(text)
    assert "s3cret" not in str(e.value)
    assert e.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "package", "extra"),
    [
        ("postgres://h/d", "psycopg", "postgresql"),
        ("mariadb://h/d", "pymysql", "mysql"),
    ],
)
def test_a_missing_driver_is_named_with_its_extra(monkeypatch, text, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SourceError, match=rf'{package}.* -e "\.\[{extra}\]"'):
        parse(text)
    assert parse("sqlite:///f.db").dialect == "sqlite"
