"""Values that a setting may have: words, ranges of numbers, forms of text, lists.

Each kind finds what is wrong with a value, in words for the user, and describes what
it allows, for the reference page.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Find = Callable[[Any], str | None]
"""Returns what is wrong with a value; None if nothing is."""


@dataclass(frozen=True)
class OneOf:
    """A word out of a list.

    >>> OneOf(("cpu", "cuda")).problem("gpu")
    "'gpu' is not one of cpu, cuda"
    """

    words: tuple[str, ...]

    def problem(self, value: str) -> str | None:
        """Return what is wrong with a string, None if nothing is."""
        if value in self.words:
            return None
        return f"{value!r} is not one of {', '.join(self.words)}"

    def __str__(self) -> str:
        return ", ".join(f'"{word}"' for word in self.words)


@dataclass(frozen=True)
class Range:
    """An interval of numbers, open or closed at the lower end, open at the upper.

    >>> print(Range(0, 1, includes_low=False))
    above 0 and below 1
    """

    low: float
    high: float = math.inf
    includes_low: bool = True

    def problem(self, value: float) -> str | None:
        """Return what is wrong with a number, None if nothing is."""
        is_above = value >= self.low if self.includes_low else value > self.low
        if is_above and value < self.high:
            return None
        return f"{value!r} is out of range: it must be {self}"

    def __str__(self) -> str:
        low = f"{'at least' if self.includes_low else 'above'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and below {self.high:g}"


@dataclass(frozen=True)
class Text:
    """A string of a certain form.

    Attributes:
        form: of the string, for the reference page.
        problem: returns what is wrong with a string.
    """

    form: str
    problem: Find

    def __str__(self) -> str:
        return self.form


@dataclass(frozen=True)
class ListOf:
    """A tuple in Python, a string in the run config.

    Attributes:
        form: of the string, for the reference page.
        problem: returns what is wrong with any value.
        parse: returns the tuple that a string stands for, and anything that is no
            string unchanged; raises ValueError.
        render: returns the string that ``parse`` reads back.
    """

    form: str
    problem: Find
    parse: Callable[[object], object]
    render: Callable[[Any], str]

    def __str__(self) -> str:
        return self.form


Allowed = OneOf | Range | Text | ListOf
