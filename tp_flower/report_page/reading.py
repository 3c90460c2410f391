"""A report as it may be found in a file: what is absent, null or odd is nothing.

Reports of failed runs, of other versions and of other modes lack keys. The page shows
what there is, so every value is read through these functions.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

Report = Mapping[str, Any]
"""The content of a `report.json`."""


def number(value: object) -> float | None:
    """Return a finite number, or None.

    >>> number(3), number("3"), number(float("nan")), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def amount(value: object) -> float:
    """Return a number of at least 0; 0 for anything else.

    >>> amount(2.5), amount(None), amount(-1)
    (2.5, 0.0, 0.0)
    """
    return max(number(value) or 0.0, 0.0)


def text(value: object) -> str:
    """Return a text; "" for what is none.

    >>> text("a"), text(None), text(["a"])
    ('a', '', '')
    """
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> list[Any]:
    """Return a JSON list; an empty one for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def records(value: object) -> list[Mapping[str, Any]]:
    """Return the objects of a list; what is no object is left out."""
    return [item for item in items(value) if isinstance(item, Mapping)]


def texts(value: object) -> list[str]:
    """Return the texts of a list; what is no text is left out."""
    return [item for item in items(value) if isinstance(item, str)]


def numbers(value: object) -> Iterator[tuple[str, float]]:
    """Yield the names of an object that have a finite number, with it."""
    for name, item in mapping(value).items():
        if (found := number(item)) is not None:
            yield str(name), found


def total(value: object) -> float:
    """Return the sum of an object's numbers.

    >>> total({"f": 1, "p": 2.5, "q": None})
    3.5
    """
    return math.fsum(found for _, found in numbers(value))
