"""The address of a database, which never shows its secrets.

A tables file gives it as a URI, in which ``${NAME}`` stands for a variable of the
site's environment, or names a file that holds the URI.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

import sqlalchemy as sa

from tp_flower.errors import SourceError

Dialect = Literal["postgresql", "mysql", "sqlite"]

SUPPORTED: Final = (
    "postgresql://user:password@host/database",
    "mysql://user:password@host/database",
    "mariadb://user:password@host/database",
    "sqlite:///path/of/file.db",
)
HIDDEN: Final = "***"

_DIALECTS: Final[dict[str, tuple[Dialect, str]]] = {
    "postgresql": ("postgresql", "psycopg"),
    "postgres": ("postgresql", "psycopg"),
    "mysql": ("mysql", "pymysql"),
    "mariadb": ("mysql", "pymysql"),
    "sqlite": ("sqlite", "pysqlite"),
}
_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")
_PARTS: Final = re.compile(r"([^:/]+://)([^@]*@)?([^?]*)(\?.*)?", re.DOTALL)


@dataclass(frozen=True, repr=False)
class DatabaseUrl:
    """Where a database is, and how to log in.

    Attributes:
        url: SQLAlchemy's form; its own text shows more than may be seen.
        secrets: every text that no output may hold.
        name: the kind of database as the tables file calls it.
    """

    url: sa.URL = field(repr=False)
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    name: str = ""

    @property
    def dialect(self) -> Dialect:
        """The SQL that the database speaks."""
        return _DIALECTS[self.name][0]

    def __str__(self) -> str:
        """The address without user, password and options, for messages."""
        url = self.url
        user = f"{HIDDEN}@" if url.username or url.password else ""
        port = f":{url.port}" if url.port else ""
        query = f"?{HIDDEN}" if url.query else ""
        place = f"{user}{url.host or ''}{port}/{url.database or ''}"
        return f"{self.name}://{self._hide_variables(place)}{query}"

    def __repr__(self) -> str:
        return f"DatabaseUrl({str(self)!r})"

    def redact(self, text: str) -> str:
        """Return a text of a driver or server, with every secret hidden.

        The user's name is one too.
        """
        hidden = {*self.secrets, self.url.username or ""} - {""}
        # the longest first: one may be a part of another
        for secret in sorted(hidden, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    def _hide_variables(self, place: str) -> str:
        """Hide what came from the environment, where the URI says host or database."""
        for secret in sorted(self.secrets - {""}, key=len, reverse=True):
            place = place.replace(secret, HIDDEN)
        return place


def parse_url(
    text: str, environment: Mapping[str, str], folder: Path, where: str
) -> DatabaseUrl:
    """Return the address that a URI gives.

    A variable in the user, the password or an option is taken as it is, whatever
    characters it holds: it needs no percent-encoding.

    Args:
        text: the URI; ``${NAME}`` stands for a variable.
        environment: the variables.
        folder: what the path of an SQLite file is relative to.
        where: what the URI belongs to, for messages.

    Raises:
        SourceError: a variable is not set, the URI is none, an @ of the password is
            not encoded, or the database is of a kind that is not supported. No message
            quotes the URI.
    """
    expanded, values = _expand(text, environment, where)
    try:
        url = sa.make_url(expanded)
    except (sa.exc.ArgumentError, ValueError):
        url = None
    if url is None:
        raise SourceError(
            f"the 'uri' of {where} is not the URI of a database: "
            f"expected for instance {SUPPORTED[0]}, with @ : / of a user or password "
            "as %40 %3A %2F"
        )
    # what follows the first @ of a password would pass for the host, and be shown
    if "@" in f"{url.host}{url.database}" and not url.drivername.startswith("sqlite"):
        raise SourceError(
            f"the 'uri' of {where} has an @ too many: write @ : / of a user or "
            "password as %40 %3A %2F, or put the password into a variable of its own, "
            "user:${PASSWORD}@host, which takes it as it is"
        )
    backend, _, driver = url.drivername.partition("+")
    if backend not in _DIALECTS or driver not in ("", _DIALECTS[backend][1]):
        hint = get_close_matches(backend, _DIALECTS, n=1)
        meant = f" (did you mean {hint[0]!r}?)" if hint and driver == "" else ""
        raise SourceError(
            f"the 'uri' of {where} is of a kind that is not supported{meant}: "
            f"use {', '.join(SUPPORTED)}"
        )
    dialect, known_driver = _DIALECTS[backend]
    if dialect == "sqlite":
        url = _sqlite_file(url, folder, where)
    elif not url.host and "host" not in url.query:
        raise SourceError(f"the 'uri' of {where} names no host")
    url = url.set(drivername=f"{dialect}+{known_driver}")
    return DatabaseUrl(url, frozenset(_secrets(url, values)), backend)


def _expand(
    text: str, environment: Mapping[str, str], where: str
) -> tuple[str, list[str]]:
    """Return the URI with its variables' values, and these values."""
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environment:
            raise SourceError(
                f"the 'uri' of {where} needs the environment variable {name!r}, "
                "which is not set where the site runs (a SuperLink or SuperNode that "
                "is up already keeps the environment it was started with)"
            )
        values.append(environment[name])
        return environment[name]

    def quoted_value(match: re.Match[str]) -> str:
        return quote(value(match), safe="")

    parts = _PARTS.fullmatch(text)
    # a variable before the first :// holds a whole URI
    pieces = parts.groups(default="") if parts else (text,)
    # user and options are unquoted later on, host and database are not
    expanded = "".join(
        _VARIABLE.sub(replacement, piece)
        for piece, replacement in zip(
            pieces, (value, quoted_value, value, quoted_value), strict=False
        )
    )
    return expanded, values


def _sqlite_file(url: sa.URL, folder: Path, where: str) -> sa.URL:
    if not url.database or url.database == ":memory:" or url.query or url.host:
        raise SourceError(
            f"the 'uri' of {where} names no file: expected {SUPPORTED[-1]}, "
            "relative to the tables file, or sqlite:////absolute/path, without options"
        )
    return url.set(database=str(folder / Path(url.database).expanduser()))


def _secrets(url: sa.URL, values: list[str]) -> set[str]:
    found = {*values, str(url.password or "")}
    for option in url.query.values():
        found |= {option} if isinstance(option, str) else set(option)
    found |= {quote(secret, safe="") for secret in found}
    found |= {quote(secret) for secret in found}
    return found - {""}
