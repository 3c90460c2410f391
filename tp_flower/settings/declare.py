"""Declarations of settings.

A group of settings is a frozen dataclass; a setting is a field of it, whose default is
made by :func:`setting` and carries all that there is to say: one sentence for the user,
the allowed values, and who reads it. Checks, the run config in ``pyproject.toml`` and
the reference page are made from these declarations.

The run config calls a field by its name with dashes, after the group's ``prefix``, if
it has one. The ``readers`` of a group are those of its settings that name no others;
its ``may_change`` holds for all of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tp_flower.methods import METHODS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value")
_METADATA: Final = "setting"
_TYPE_NAMES: Final[Mapping[object, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}


@dataclass(frozen=True)
class OneOf:
    """A word out of a list.

    >>> OneOf(("cpu", "cuda")).problem("gpu")
    "'gpu' is not one of cpu, cuda"
    """

    words: tuple[str, ...]

    def problem(self, value: str) -> str | None:
        """Return the reason to refuse a string, None if there is none."""
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
        """Return the reason to refuse a number, None if there is none."""
        is_above = value >= self.low if self.includes_low else value > self.low
        if is_above and value < self.high:
            return None
        return f"{value!r} is out of range: it must be {self}"

    def __str__(self) -> str:
        low = f"{'at least' if self.includes_low else 'above'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and below {self.high:g}"


def _unchanged(value: object) -> object:
    return value


@dataclass(frozen=True)
class Form:
    """Values of a form of their own; those of a tuple are a string in the run config.

    Attributes:
        form: of the string, for the reference page.
        problem: returns the reason to refuse a field's value, None if there is none.
        parse: returns the field's value for one of the run config; raises ValueError.
        render: returns the string that ``parse`` reads back.
    """

    form: str
    problem: Callable[[Any], str | None]
    parse: Callable[[object], object] = _unchanged
    render: Callable[[Any], object] = _unchanged

    def __str__(self) -> str:
        return self.form


def list_parser(item: Callable[[str], object], kind: str) -> Callable[[object], object]:
    """Return the parser of a list with commas; another value than text stays as it is.

    Args:
        item: returns one of the list; raises ValueError.
        kind: of list, for the message.

    >>> list_parser(int, "a list of numbers")("3, 4")
    (3, 4)
    """

    def parse(value: object) -> object:
        # `-c hidden-sizes=16` sends an int
        text = str(value) if type(value) is int else value
        if not isinstance(text, str):
            return value
        try:
            return tuple(item(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            raise ValueError(f"{value!r} is not {kind}") from None

    return parse


@dataclass(frozen=True)
class Readers:
    """The runs that read a setting.

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
    """A declared setting: its key in the run config, and all that its field says."""

    key: str
    field: str
    type: object
    default: Any
    doc: str
    allowed: OneOf | Range | Form | None
    readers: Readers
    may_change: bool

    def parse(self, value: object) -> object:
        """Return the field's value for one of the run config; raise ValueError."""
        return self.allowed.parse(value) if isinstance(self.allowed, Form) else value

    def render(self, value: Any) -> object:
        """Return the run config's value for one of the field."""
        return self.allowed.render(value) if isinstance(self.allowed, Form) else value

    def problem(self, value: Any) -> str | None:
        """Return the reason to refuse a field's value, None if there is none."""
        if self.type in _TYPE_NAMES and not has_type(value, self.type):
            return f"{value!r} is not {_TYPE_NAMES[self.type]}"
        return None if self.allowed is None else self.allowed.problem(value)


def setting(
    default: _Value,
    doc: str,
    allowed: OneOf | Range | Form | None = None,
    read_by: Readers | None = None,
    *,
    may_change: bool = False,
) -> _Value:
    """Declare a setting: a field of a group's dataclass.

    Args:
        default: also of the run config.
        doc: for the user; ends with a full stop.
        allowed: values; None for all of the field's type.
        read_by: who reads it; None for the ``readers`` of the group, or everyone.
        may_change: whether a run may be resumed with another value.
    """
    return field(
        default=default, metadata={_METADATA: (doc, allowed, read_by, may_change)}
    )


def declared(group: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of a group, in the order of their declarations."""
    prefix, readers = getattr(group, "prefix", ""), getattr(group, "readers", EVERYONE)
    all_may_change = getattr(group, "may_change", False)
    settings = []
    for entry in fields(group):
        if _METADATA in entry.metadata:
            doc, allowed, read_by, may_change = entry.metadata[_METADATA]
            key = prefix + entry.name.replace("_", "-")
            of_field = (key, entry.name, entry.type, entry.default)
            of_use = (read_by or readers, may_change or all_may_change)
            settings.append(Setting(*of_field, doc, allowed, *of_use))
    return tuple(settings)


def parse_values(
    settings: Iterable[Setting], config: Mapping[str, object]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a run config by field, and what cannot be parsed of it."""
    values: dict[str, Any] = {}
    problems = []
    for item in settings:
        try:
            if item.key in config:
                values[item.field] = item.parse(config[item.key])
        except ValueError as error:
            problems.append(f"{item.key}: {error}")
    return values, problems


def value_problems(
    settings: Iterable[Setting], values: Mapping[str, object]
) -> dict[str, str]:
    """Return by field the reasons to refuse single values; fields may be missing."""
    return {
        item.field: f"{item.key}: {reason}"
        for item in settings
        if item.field in values and (reason := item.problem(values[item.field]))
    }


def render_values(settings: Iterable[Setting], group: object) -> dict[str, object]:
    """Return the run config of a group's values."""
    return {item.key: item.render(getattr(group, item.field)) for item in settings}


class Check(NamedTuple):
    """A combination of settings.

    Attributes:
        is_wrong: whether its settings contradict each other.
        text: names a setting, its value and what to set instead.
    """

    is_wrong: object
    text: str


def failed(checks: Iterable[Check]) -> list[str]:
    """Return the texts of the combinations that are there."""
    return [check.text for check in checks if check.is_wrong]


def has_type(value: object, expected: object) -> bool:
    """Return whether a value fits; bool is no number, NaN and infinity are none."""
    if expected is bool or expected is str:
        return type(value) is expected
    if isinstance(value, bool):
        return False
    if expected is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)


def store_floats(group: "DataclassInstance") -> None:
    """Store an int in a float's field as a float, in a frozen dataclass."""
    for entry in fields(group):
        if entry.type is float:
            object.__setattr__(group, entry.name, float(getattr(group, entry.name)))
