"""What databases' errors may say outside a site: no value, no secret.

The words of a driver quote values, users and addresses. What is told is put together
from the error's code and our own words; the server's words are added only where they
speak of names and syntax, and redacted.
"""

import re
import sqlite3
from typing import Any, Final

import psycopg
import pymysql
import sqlalchemy as sa

from tp_flower.sources.tables_file import DatabaseShard

# what a read can raise
DRIVER_ERRORS: Final = (
    sa.exc.SQLAlchemyError,
    psycopg.Error,
    pymysql.MySQLError,
    sqlite3.Error,
    OSError,
    ValueError,  # what a driver cannot turn into Python, dates of the year 0 for one
)

_LOGIN: Final = "user or password are wrong: check the 'uri'"
_DATABASE: Final = "the database does not exist: check the 'uri'"
_MISSING: Final = "the table does not exist: check 'table', with its schema"
_COLUMN: Final = "a column does not exist: check 'sql', 'order-by' and 'fingerprint'"
_DENIED: Final = "the user may not read it: grant SELECT, or name columns in 'sql'"
_SYNTAX: Final = "it does not understand the SQL: check 'sql' and 'fingerprint'"
_LOST: Final = "the connection was lost: is the server up, is it cut by a timeout?"
_TIMEOUT: Final = "it took too long: raise the database's limit for this user"
_REACH: Final = "it cannot be reached: check host and port, and that the server is up"
_FULL: Final = "it takes no more connections: try again later"
_READ_ONLY: Final = "it wants to write: a shard is only read"
_BUSY: Final = "it is busy or locked: try again later"
_DATA: Final = "it cannot compute with some value: convert the column in 'sql'"
PASSING: Final = (_LOST, _REACH, _FULL, _BUSY)
"""What may be over when the database is asked again."""

# these speak of names and syntax: the server's words help
_WORDY: Final = (_MISSING, _COLUMN, _SYNTAX)

# the longest prefix of the SQLSTATE decides
_PG_STATES: Final = {
    "28": _LOGIN,
    "3D000": _DATABASE,
    "42P01": _MISSING,
    "3F000": _MISSING,
    "42703": _COLUMN,
    "42501": _DENIED,
    "42": _SYNTAX,
    "57014": _TIMEOUT,
    "55P03": _TIMEOUT,
    "40": _BUSY,
    "57": _LOST,
    "08": _LOST,
    "53300": _FULL,
    "25006": _READ_ONLY,
    "22": _DATA,
    "21": _DATA,
}
_MY_CODES: Final = {
    1044: _DENIED,
    1045: _LOGIN,
    1698: _LOGIN,
    1049: _DATABASE,
    1146: _MISSING,
    1051: _MISSING,
    1054: _COLUMN,
    1142: _DENIED,
    1143: _DENIED,
    1370: _DENIED,
    1064: _SYNTAX,
    1305: _SYNTAX,
    1205: _TIMEOUT,
    1213: _BUSY,
    1969: _TIMEOUT,
    3024: _TIMEOUT,
    1040: _FULL,
    1203: _FULL,
    1792: _READ_ONLY,
    2002: _REACH,
    2003: _REACH,
    2005: _REACH,
    2006: _LOST,
    2013: _LOST,
    2014: _LOST,
    1690: _DATA,
    1264: _DATA,
    1292: _DATA,
    1365: _DATA,
}
# psycopg tells no code where there was no connection yet; SQLite never did
_PHRASES: Final = (
    (r"password authentication failed|no password supplied|no pg_hba", _LOGIN),
    (r"role .* does not exist", _LOGIN),
    (r"database .* does not exist", _DATABASE),
    (r"too many (clients|connections)|connection slots", _FULL),
    (r"timeout expired|Connection refused|could not translate|resolve", _REACH),
    (r"connection failed|invalid port|No route|Network is unreachable", _REACH),
    (r"connection (is|was) (lost|closed)|server closed the connection|terminat", _LOST),
    (r"no such table", _MISSING),
    (r"no such column", _COLUMN),
    (r"syntax error|incomplete input|no such function|unrecognized token", _SYNTAX),
    (r"unable to open database file", "the file does not exist or may not be read"),
    (r"file is not a database|malformed", "the file is no SQLite database"),
    (r"locked", _BUSY),
    (r"readonly|read-only", _READ_ONLY),
    (r"overflow|Could not decode", _DATA),
)


def safe_words(error: BaseException, database: DatabaseShard) -> str:
    """Return what went wrong and what to do, without a value or a secret."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig else error
    if isinstance(cause, sa.exc.NoSuchTableError):
        return _MISSING
    reason = _reason(cause)
    if reason in _WORDY:
        words = " ".join(str(_first_line(cause)).split())[:300]
        return f"{reason} ({database.url.redact(words)})"
    code = _code(cause)
    kind = type(cause).__name__
    return reason or f"it answers with {kind}{f' {code}' if code else ''}"


def _code(cause: BaseException) -> str:
    if isinstance(cause, psycopg.Error):
        return cause.sqlstate or ""
    if isinstance(cause, pymysql.MySQLError) and cause.args:
        return str(cause.args[0]) if isinstance(cause.args[0], int) else ""
    return ""


def _reason(cause: BaseException) -> str:
    code = _code(cause)
    if isinstance(cause, psycopg.Error) and code:
        matches = [state for state in _PG_STATES if code.startswith(state)]
        return _PG_STATES[max(matches, key=len)] if matches else ""
    if isinstance(cause, pymysql.MySQLError):
        # an InterfaceError has no text: the connection is gone
        return _MY_CODES.get(int(code or 0), _LOST if code in ("", "0") else "")
    if isinstance(cause, psycopg.DataError | ValueError):
        return _DATA
    text = str(cause)
    return next((words for phrase, words in _PHRASES if re.search(phrase, text)), "")


def _first_line(cause: Any) -> str:
    """The server's words without the place and the statement that follow them."""
    if isinstance(cause, psycopg.Error):
        return cause.diag.message_primary or ""
    if isinstance(cause, pymysql.MySQLError):
        # MySQL quotes the statement from where it fails, literals and all
        return str(cause.args[-1]).partition(" near ")[0]
    return str(cause).partition("\n")[0]
