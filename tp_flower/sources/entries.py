"""Entries of the tables file, parsed into dataclasses whose fields declare their types.

A message names the key and its place, what is allowed, and for a wrong value its type,
not its text, which may be a misplaced URI.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from tp_flower.errors import SourceError, closest

Text = Annotated[str, Meta(description="a string")]
Texts = Annotated[tuple[str, ...], Meta(description="a list of strings")]
Names = Annotated[Mapping[str, str], Meta(description="a table of strings")]
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
WholeNumber = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
Flag = Annotated[bool, Meta(description="true or false")]

MEMORY_PREFIX: Final = "memory:"
"""Prefix for tables that are data frames of this process instead of a file."""

TABLES_THERE: Final = "; its tables are "
DUCKDB_SAYS: Final = "; DuckDB says: "
FOR_OWNER: Final = "; for its owner: "
OWNER_ONLY: Final = (TABLES_THERE, DUCKDB_SAYS, FOR_OWNER)
"""What follows one of these in an error stays in the site's log."""

Entry = TypeVar("Entry")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def read(kind: type[Entry], entry: Mapping[str, object], where: str) -> Entry:
    """Return the dataclass of an entry; dashes in keys are underscores in fields."""
    hints = get_type_hints(kind, include_extras=True)
    refuse_unknown(entry, [name.replace("_", "-") for name in hints], where)
    values = {}
    for key, value in entry.items():
        name = key.replace("-", "_")
        try:
            values[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError:
            # only the type of the value may be shown
            raise SourceError(
                f"{key!r} of {where} must be {_description(hints[name])}, not "
                f"{form(value)}"
            ) from None
    return kind(**values)


def _description(hint: Any) -> str:
    """Return the words for a field's type, from its annotations."""
    metadata = [
        meta
        for part in (hint, *get_args(hint))
        for meta in getattr(part, "__metadata__", ())
    ]
    return next((meta.description for meta in metadata), "of another type")


def as_table(value: object, where: str) -> Mapping[str, object]:
    """Return a value that is a table of keys."""
    if not isinstance(value, dict):
        raise SourceError(f"{where} must be a table, not {form(value)}")
    return value


def quote_toml(text: str) -> str:
    r"""Return a text as TOML writes it, in one line.

    >>> print(quote_toml('a "b"\n'))
    "a \"b\"\n"
    """
    # JSON leaves this character alone
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def type_setting(column: str, kind: str = "VARCHAR") -> str:
    """Return what gives a column a type in the tables file, as it is written there.

    >>> print(type_setting("zip"), type_setting("zip code", "BIGINT"))
    types = { zip = "VARCHAR" } types = { "zip code" = "BIGINT" }
    """
    key = column if _BARE_KEY.fullmatch(column) else quote_toml(column)
    return f"types = {{ {key} = {quote_toml(kind)} }}"


def form(value: object) -> str:
    """Return a number, or the type of any other value."""
    if isinstance(value, int | float):
        return repr(value)
    return type(value).__name__


def refuse_unknown(
    entry: Mapping[str, object], allowed: Collection[str], where: str
) -> None:
    """Refuse a key that is not allowed."""
    for key in entry:
        if key not in allowed:
            raise SourceError(
                f"unknown key {key!r} in {where}{closest(key, allowed)}: "
                f"valid keys are {', '.join(allowed)}"
            )
