"""What all groups of settings check in the same way: type, choice and range."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TYPE_NAMES: Mapping[object, str] = {
    str: "a string",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}


@dataclass(frozen=True)
class Range:
    """An interval of numbers, open or closed at the lower end, open at the upper.

    >>> print(Range(0, 1, includes_low=False))
    above 0 and below 1
    """

    low: float
    high: float = math.inf
    includes_low: bool = True

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low
        return above and value < self.high

    def __str__(self) -> str:
        low = f"{'at least' if self.includes_low else 'above'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and below {self.high:g}"


def store_floats(settings: "DataclassInstance") -> None:
    """Store numbers that were given as int for a float as floats, in a frozen one."""
    for own in fields(settings):
        if own.type is float:
            object.__setattr__(settings, own.name, float(getattr(settings, own.name)))


def has_type(value: object, expected: object) -> bool:
    """Tell whether the value fits; bool is no number, NaN and infinity are none."""
    if expected is bool or expected is str:
        return type(value) is expected
    if isinstance(value, bool):
        return False
    if expected is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)


def plain_problem(
    value: object,
    expected: object,
    choices: Sequence[str] | None = None,
    allowed: Range | None = None,
) -> str | None:
    """Return what is wrong with a value of a plain type, None if nothing is."""
    if not has_type(value, expected):
        return f"{value!r} is not {_TYPE_NAMES[expected]}"
    if choices is not None and value not in choices:
        return f"{value!r} is not one of {', '.join(choices)}"
    if allowed is not None and value not in allowed:  # type: ignore[operator]
        return f"{value!r} is out of range: it must be {allowed}"
    return None
