"""Quoting for DuckDB."""

import re


def quote_name(name: str) -> str:
    """Quote an identifier for DuckDB.

    >>> quote_name('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Quote a string literal for DuckDB.

    >>> quote_text("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def quote_path(path: str) -> str:
    """Quote the path of one file, which a reader would take for a pattern.

    >>> quote_path("a[1]*.csv")
    "'a[[]1][*].csv'"
    """
    return quote_text(re.sub(r"[*?\[]", r"[\g<0>]", path))
