"""Declarations of settings.

A group of settings is a frozen dataclass. A setting is a field of it, whose default is
made by :func:`setting` and carries everything about it: one sentence for the user, the
allowed values, and who reads it. Checks, the run config in ``pyproject.toml`` and the
reference page are made from these declarations.

In the run config a field's name has dashes, after the group's ``prefix``, if it has
one. A group's ``readers`` are those of its settings that name no others; its
``may_change`` applies to all of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from tp_flower.errors import SettingsError

_Value = TypeVar("_Value")
_METADATA: Final = "setting"
AUTO: Final = "auto"
_TYPE_NAMES: Final[Mapping[object, str]] = {
    str: "a string",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
}


class UnusableSettingsError(SettingsError):
    """Settings that are refused, for one reason or several ``problems``."""

    def __init__(self, problems: list[str]) -> None:
        number = len(problems)
        head = "1 setting is"
        if number != 1:
            head = f"{number} settings are"
        super().__init__(f"{head} not usable:\n  - " + "\n  - ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class OneOf:
    """One word from a list, or from a registry that others may add to.

    >>> OneOf(("cpu", "cuda")).read("cpu")
    'cpu'
    """

    words: tuple[str, ...]
    registry: Callable[[], Sequence[str]] = tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """All the words."""
        return (*self.words, *self.registry())

    def read(self, value: str) -> str:
        """Return the word, or raise ValueError."""
        if value not in self.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}")
        return value

    def __str__(self) -> str:
        return ", ".join(f'"{word}"' for word in self.choices)


@dataclass(frozen=True)
class Range:
    """An interval of numbers, open or closed at either end.

    >>> print(Range(0, 1, includes_low=False))
    above 0 and below 1
    """

    low: float
    high: float = math.inf
    includes_low: bool = True
    includes_high: bool = False

    def read(self, value: float) -> float:
        """Return the number, or raise ValueError."""
        is_above = value >= self.low if self.includes_low else value > self.low
        is_below = value <= self.high if self.includes_high else value < self.high
        if not (is_above and is_below):
            raise ValueError(f"{value!r} is out of range: it must be {self}")
        return value

    def __str__(self) -> str:
        low = f"{'at least' if self.includes_low else 'above'} {self.low:g}"
        high = f"{'at most' if self.includes_high else 'below'} {self.high:g}"
        return low if self.high == math.inf else f"{low} and {high}"


def _render(value: object) -> object:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value


@dataclass(frozen=True)
class Form:
    """Values with a syntax of their own; a tuple is a string in the run config.

    ``read`` returns the field's value for a string or for such a value itself, or
    raises ValueError; ``form`` describes the string for the reference page.
    """

    form: str
    read: Callable[[Any], object]
    render: Callable[[Any], object] = _render

    def __str__(self) -> str:
        return self.form


def items_of(text: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list.

    >>> items_of("f.flight, f.time_hour")
    ('f.flight', 'f.time_hour')
    """
    if not text.strip():
        return ()
    return tuple(part.strip() for part in text.split(","))


def list_of(
    item: Callable[[Any], object],
    form: str,
    is_allowed: Callable[[Sequence[Any]], object],
) -> Callable[[object], object]:
    """Return a function that reads a comma-separated list, or a tuple, of items.

    ``item`` returns one of them, or raises ValueError; ``form`` is for the message.

    >>> list_of(int, "a list of numbers", any)("3, 4")
    (3, 4)
    """

    def read_list(value: object) -> object:
        # `-c hidden-sizes=16` passes an int
        items = items_of(str(value)) if type(value) in (int, str) else value
        with suppress(TypeError, ValueError):
            values = None
            if isinstance(items, tuple):
                values = tuple(map(item, items))
            if values is not None and is_allowed(values):
                return values
        raise ValueError(f"{value!r} is not {form}")

    return read_list


@dataclass(frozen=True)
class Readers:
    """The runs that read a setting.

    A setting ``of_methods`` is read where a method's rules say so, others by all. An
    empty tuple of modes means all of them. While the group's fields ``switches`` all
    have their defaults, nobody reads the setting. A value that differs from the default
    but that nobody reads is ignored, or refused for a reason, with ``{strategy}``,
    ``{mode}``, ``{value}`` and ``{instead}``, of the method's rules, filled in.
    """

    of_methods: bool = False
    modes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    refusal: str = ""


BY_METHOD: Final = Readers(of_methods=True)


@dataclass(frozen=True)
class Setting:
    """A declared setting: its key in the run config, and everything its field says."""

    key: str
    field: str
    type: object
    default: Any
    doc: str
    allowed: OneOf | Range | Form | None
    readers: Readers
    may_change: bool
    is_operational: bool

    def read(self, value: Any) -> object:
        """Return the field's value, given one from the run config or one of the field.

        A bool is not a number, nor are NaN and infinity; an int is converted if the
        field is a float. A value that is not allowed raises ValueError.
        """
        if self.type in _TYPE_NAMES and not _has_type(value, self.type):
            raise ValueError(f"{value!r} is not {_TYPE_NAMES[self.type]}")
        if self.allowed is not None:
            value = self.allowed.read(value)
        return float(value) if self.type is float else value

    def render(self, value: Any) -> object:
        """Return the run config's value, given one of the field."""
        if isinstance(self.allowed, Form):
            return self.allowed.render(value)
        return value


def setting(
    default: _Value,
    doc: str,
    allowed: OneOf | Range | Form | None = None,
    read_by: Readers | None = None,
    *,
    may_change: bool = False,
    is_operational: bool = False,
) -> _Value:
    """Declare a setting: a field of a group's dataclass.

    ``allowed`` None means all values of the field's type; a setting without readers has
    those of the group. It ``may_change`` when a run is resumed. One that may, or that
    ``is_operational``, is the operator's own: no site is asked anything else because of
    it, and it is no part of what owners approve. All others are.
    """
    declaration = (doc, allowed, read_by, may_change, is_operational or may_change)
    return field(default=default, metadata={_METADATA: declaration})


def declared(group: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of a group, in the order of their declarations."""
    prefix = getattr(group, "prefix", "")
    readers = getattr(group, "readers", Readers())
    all_may_change = getattr(group, "may_change", False)
    settings = []
    for entry in fields(group):
        if _METADATA in entry.metadata:
            doc, allowed, read_by, may_change, is_operational = entry.metadata[
                _METADATA
            ]
            key = prefix + entry.name.replace("_", "-")
            identity = (key, entry.name, entry.type, entry.default)
            is_operational = is_operational or all_may_change
            usage = (read_by or readers, may_change or all_may_change, is_operational)
            settings.append(Setting(*identity, doc, allowed, *usage))
    return tuple(settings)


def fields_of(
    settings: Iterable[Setting], config: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of a run config by field, unread."""
    return {item.field: config[item.key] for item in settings if item.key in config}


def read_values(
    settings: Iterable[Setting], values: Mapping[str, Any]
) -> tuple[dict[str, object], list[str]]:
    """Return values by field, without the refused ones, and their errors.

    A field that is missing has its default.
    """
    read: dict[str, object] = {}
    problems = []
    for item in settings:
        try:
            read[item.field] = item.read(values.get(item.field, item.default))
        except ValueError as error:
            problems.append(f"{item.key}: {error}")
    return read, problems


def store(group: object, values: Mapping[str, object]) -> None:
    """Store values, by field, in a frozen dataclass."""
    for name, value in values.items():
        object.__setattr__(group, name, value)


def render_values(settings: Iterable[Setting], group: object) -> dict[str, object]:
    """Return the run config of a group's values."""
    return {item.key: item.render(getattr(group, item.field)) for item in settings}


def _has_type(value: object, expected: object) -> bool:
    if expected is bool or expected is str or isinstance(value, bool):
        return type(value) is expected
    if expected is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and math.isfinite(value)
