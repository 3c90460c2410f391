"""Quoting for DuckDB."""


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
