"""The entries of the tables file: each is read with the type that it must have.

A message tells the key and where it stands, and of a wrong value what it is, without
its text: it may be a URI in the wrong place.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from tp_flower.errors import SourceError

Entry = Mapping[str, object]

MEMORY_PREFIX: Final = "memory:"
"""Begins what names tables that are data frames of this process, not a file."""


def form(value: object) -> str:
    """Return what a value is, without a text."""
    return repr(value) if isinstance(value, int | float) else type(value).__name__


def text(entry: Entry, key: str, where: str) -> str:
    """Return a text, "" if the key is not there.

    Raises:
        SourceError: it is something else.
    """
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise SourceError(f"{key!r} of {where} must be a string, not {form(value)}")
    return value


def texts(
    entry: Entry, key: str, where: str, default: tuple[str, ...]
) -> tuple[str, ...]:
    """Return a list of texts.

    Raises:
        SourceError: it is something else.
    """
    value = entry.get(key, list(default))
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SourceError(
            f"{key!r} of {where} must be a list of strings, not {form(value)}"
        )
    return tuple(value)


def count(entry: Entry, key: str, where: str, default: int) -> int:
    """Return a whole number, at least 1.

    Raises:
        SourceError: it is something else.
    """
    value = entry.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SourceError(
            f"{key!r} of {where} must be a whole number of at least 1, not {value!r}"
        )
    return value


def flag(entry: Entry, key: str, where: str, *, default: bool = True) -> bool:
    """Return a truth value.

    Raises:
        SourceError: it is something else.
    """
    value = entry.get(key, default)
    if not isinstance(value, bool):
        raise SourceError(f"{key!r} of {where} must be true or false, not {value!r}")
    return value


def refuse_unknown(entry: Entry, allowed: Sequence[str], where: str) -> None:
    """Refuse a key that is not allowed.

    Raises:
        SourceError: names it, the closest one and all that are allowed.
    """
    for key in entry:
        if key not in allowed:
            close = get_close_matches(key, allowed, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise SourceError(
                f"unknown key {key!r} in {where}{hint}: "
                f"valid keys are {', '.join(allowed)}"
            )
