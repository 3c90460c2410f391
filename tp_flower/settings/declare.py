"""Declarations of settings.

A group of settings is a frozen dataclass; a setting is a field of it, whose default is
made by :func:`setting` and carries all that there is to say: one sentence for the user,
the allowed values, and who reads it. Checks, the run config in ``pyproject.toml`` and
the reference page are made from these declarations.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tp_flower.methods import METHODS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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


_Value = TypeVar("_Value")
_METADATA: Final = "setting"
_TYPE_NAMES: Final[Mapping[object, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}


@dataclass(frozen=True)
class Readers:
    """Who reads a setting, and what happens where it is set and nobody does.

    Attributes:
        strategies: that read it; empty for all.
        modes: in which it is read; empty for all.
        switch: another setting of the group (its field); while that one has its
            default, nobody reads this one.
        refusal: why a value other than the default is refused where nobody reads it,
            with ``{strategy}``, ``{mode}`` and ``{value}`` filled in; "" ignores it.
    """

    strategies: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    switch: str = ""
    refusal: str = ""

    def include(self, strategy: str, mode: str) -> bool:
        """Return whether a run of the strategy, in the mode, reads the setting."""
        return (not self.strategies or strategy in self.strategies) and (
            not self.modes or mode in self.modes
        )


EVERYONE: Final = Readers()


def of_families(*families: str) -> tuple[str, ...]:
    """Return the strategies of families of methods.

    >>> of_families("admm")
    ('admm', 'vfl-admm')
    """
    return tuple(name for name, method in METHODS.items() if method.family in families)


@dataclass(frozen=True)
class Setting:
    """A declared setting.

    Attributes:
        key: of the run config.
        field: of the group's dataclass.
        type: of the field.
        default: of the field.
        doc: what the setting is, for the user.
        allowed: values; None for all of the type.
        readers: who reads it.
    """

    key: str
    field: str
    type: object
    default: Any
    doc: str
    allowed: Allowed | None
    readers: Readers

    def parse(self, value: object) -> object:
        """Return the field's value for one of the run config.

        Raises:
            ValueError: a string is not of the setting's form.
        """
        return self.allowed.parse(value) if isinstance(self.allowed, ListOf) else value

    def render(self, value: Any) -> object:
        """Return the run config's value for one of the field."""
        if isinstance(self.allowed, ListOf):
            return self.allowed.render(value)
        return value

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a field's value, None if nothing is."""
        if isinstance(self.allowed, ListOf):
            return self.allowed.problem(value)
        if not has_type(value, self.type):
            return f"{value!r} is not {_TYPE_NAMES[self.type]}"
        return None if self.allowed is None else self.allowed.problem(value)


def setting(
    default: _Value,
    doc: str,
    allowed: Allowed | None = None,
    read_by: Readers = EVERYONE,
) -> _Value:
    """Declare a setting: a field of a group's dataclass.

    Args:
        default: also of the run config.
        doc: what the setting is, for the user; ends with a full stop.
        allowed: values; None for all of the field's type.
        read_by: strategies and modes that read it.
    """
    metadata = {_METADATA: (doc, allowed, read_by)}
    return field(default=default, metadata=metadata)


@cache
def declared(group: type["DataclassInstance"], prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings of a group, in the order of their declarations.

    Args:
        group: a dataclass.
        prefix: of the keys.
    """
    return tuple(
        Setting(
            prefix + entry.name.replace("_", "-"),
            entry.name,
            entry.type,
            entry.default,
            *entry.metadata[_METADATA],
        )
        for entry in fields(group)
        if _METADATA in entry.metadata
    )


def value_problems(
    declarations: Iterable[Setting], values: Mapping[str, object]
) -> dict[str, str]:
    """Return what is wrong with single values, by field; fields may be missing."""
    by_field = {item.field: item for item in declarations}
    problems = {
        name: by_field[name].problem(value)
        for name, value in values.items()
        if name in by_field
    }
    return {name: problem for name, problem in problems.items() if problem}


def has_type(value: object, expected: object) -> bool:
    """Return whether a value fits; bool is no number, NaN and infinity are none."""
    if expected is bool or expected is str:
        return type(value) is expected
    if isinstance(value, bool):
        return False
    if expected is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)


def store_floats(settings: "DataclassInstance") -> None:
    """Store an int in a float's field as a float, in a frozen dataclass."""
    for entry in fields(settings):
        if entry.type is float:
            number = float(getattr(settings, entry.name))
            object.__setattr__(settings, entry.name, number)
