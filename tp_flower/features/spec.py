"""The spec of a feature's encoder.

It is written ``<kind>[(argument)] [missing=<rule>] [<option> ..]``.

A spec is what a user asks for; what it leaves out is chosen by the feature's kind of
value (number, boolean, time, text or vector), which its site knows.

Encoders that need no statistics (``range``, ``categories``, ``hash``, ``cyclic``, and
``none`` of vectors) are made from their argument alone.

>>> str(EncoderSpec.parse("one-hot(20)  indicator"))
'one-hot(20) indicator'
"""

import math
import re
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Self

import numpy as np

from tp_flower.errors import SchemaError

NUMERIC: Final = ("number", "boolean", "time")
KINDS: Final = (*NUMERIC, "text", "vector")
TIME_PARTS: Final[Mapping[str, int]] = {
    "hour": 24,
    "minute": 60,
    "month": 12,
    "weekday": 7,
    "day-of-year": 366,
}
"""Parts of a time, and the number of their values in a cycle."""

MOST_COLUMNS: Final = 1 << 20
_NARROWEST: Final = sys.float_info.min
_COMMAS: Final = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
_CATEGORY: Final = re.compile(r'(?P<bare>[^"()]+)|"(?P<quoted>(?:[^"]|"")*)"')
_BOOLEANS: Final = {"false": 0.0, "true": 1.0}


@dataclass(frozen=True)
class DeclaredRange:
    """The smallest and the largest value that a feature may have.

    Both are finite, ``low`` below ``high``; times are in seconds since 1970 (UTC).
    """

    low: float
    high: float
    is_time: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read two numbers, or two ISO dates or times (UTC unless they say otherwise).

        >>> DeclaredRange.parse("-0.5, 12")
        DeclaredRange(low=-0.5, high=12.0, is_time=False)
        >>> DeclaredRange.parse("1970-01-01, 1970-01-02T12:00")
        DeclaredRange(low=0.0, high=129600.0, is_time=True)
        """
        ends = [end.strip() for end in text.split(",")]
        for read, is_time in ((float, False), (_seconds, True)):
            try:
                low, high = (read(end) for end in ends)
            except ValueError:
                continue
            # even in a tiny range every value must have a place
            if not (math.isfinite(high - low) and high / 2 - low / 2 > _NARROWEST):
                raise ValueError(f"({text}) does not run from low to high")
            return cls(low, high, is_time)
        raise ValueError(
            f"({text}) is not a range: write two numbers, as in "
            "range(1, 12), or two dates, as in range(1950-01-01, 2013-12-31)"
        )


def parse_categories(text: str) -> tuple[str, ...]:
    """Read a list of texts; texts with commas, quotes or parentheses are quoted.

    >>> parse_categories('AA, "B6", "Smith, J."')
    ('AA', 'B6', 'Smith, J.')
    """
    categories = []
    for item in _COMMAS.split(text):
        form = _CATEGORY.fullmatch(item.strip())
        if form is None:
            raise ValueError(
                f"({text}) is not a list of categories, as in categories(AA, UA): a "
                "text with a comma, quote or parenthesis stands in double quotes"
            )
        category = form["bare"] or form["quoted"].replace('""', '"')
        # the form in which texts of tables are compared
        categories.append(unicodedata.normalize("NFC", category))
    if len(set(categories)) != len(categories):
        raise ValueError(f"({text}) names a category twice")
    return tuple(categories)


def number_categories(categories: tuple[str, ...]) -> tuple[str, ...]:
    """Return categories that are numbers or booleans as the texts of numbers.

    >>> number_categories(("1", "2.50", "true"))
    ('1.0', '2.5', '1.0')
    """
    values = [_number(category) for category in categories]
    return tuple((np.array(values) + 0.0).astype("U32").tolist())


def _number(text: str) -> float:
    """Return a finite number, or a boolean as one; ValueError for another text."""
    try:
        value = _BOOLEANS.get(text.lower())
        value = float(text) if value is None else value
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if not moment.tzinfo:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


class Need(StrEnum):
    """A statistic that an encoder is fitted to."""

    MOMENTS = "moments"
    RANGE = "range"
    CATEGORIES = "categories"


@dataclass(frozen=True)
class _Rule:
    """The kinds of values that an encoder accepts, and the rules that go with it.

    The first rule for missing values is the default; ``needs`` are the statistics that
    it is fitted to; ``argument`` is the property of a spec that reads it, "" for none.
    """

    fits: tuple[str, ...]
    missing: tuple[str, ...]
    needs: tuple[Need, ...] = ()
    argument: str = ""


CODES: Final = "codes"
APART: Final = "apart"
"""For trees alone: an encoder by codes of categories, and missing values as such."""
LEVELS: Final = "levels"
CATEGORY: Final = "category"
"""A missing value is a category like any other."""
_MEAN_FIRST: Final = ("mean", "zero")
_RULES: Final[Mapping[str, _Rule]] = {
    "standard": _Rule(NUMERIC, (*_MEAN_FIRST, APART), (Need.MOMENTS,)),
    "min-max": _Rule(NUMERIC, _MEAN_FIRST, (Need.RANGE,)),
    "bins": _Rule(NUMERIC, _MEAN_FIRST, (Need.RANGE,), "columns"),
    "cyclic": _Rule(("number", "time"), ("zero",), argument="cycle"),
    "range": _Rule(NUMERIC, ("middle", "zero"), argument="range"),
    "categories": _Rule(
        ("number", "boolean", "text"), ("zero",), argument="categories"
    ),
    "one-hot": _Rule(
        (*NUMERIC, "text"), (CATEGORY, "zero"), (Need.CATEGORIES,), "columns"
    ),
    LEVELS: _Rule(("number",), _MEAN_FIRST, (Need.MOMENTS, Need.CATEGORIES), "columns"),
    CODES: _Rule((*NUMERIC, "text"), (APART,), (Need.CATEGORIES,), "columns"),
    "hash": _Rule((*NUMERIC, "text"), ("zero",), argument="columns"),
    "length": _Rule(("text",), _MEAN_FIRST, (Need.MOMENTS,)),
    "none": _Rule((*NUMERIC, "vector"), _MEAN_FIRST, (Need.MOMENTS,)),
}
ENCODERS: Final = tuple(_RULES)
DEFAULTS: Final[Mapping[str, str]] = {
    "number": f"{LEVELS}(32)",
    **dict.fromkeys(("boolean", "time"), "standard"),
    "text": "one-hot",
    "vector": "none",
}
"""By kind of value, the default encoder."""
TREE_DEFAULTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(NUMERIC, f"standard missing={APART}"),
    "text": CODES,
    "vector": "none",
}
"""By kind of value, the default encoder of trees."""
DECLARED_ENCODERS: Final = {
    "number": "range(<low>, <high>), categories(<a>, <b>), hash(<columns>) or "
    "cyclic(<period>)",
    "boolean": "range(0, 1)",
    "time": "range(<first day>, <last day>), as in range(1950-01-01, 2013-12-31), "
    "cyclic(<part>), as in cyclic(month), or hash(<columns>)",
    "text": "categories(<a>, <b>) or hash(<columns>)",
}
"""By kind of value, the encoders that need no statistics, for messages."""

_FORM: Final = re.compile(
    r"(?P<kind>[a-z-]+)\s*"
    r'(?:\((?P<argument>(?:[^()"]|"[^"]*")*)\))?(?P<rest>[^()"]*)'
)
_MISSING: Final = "missing="
OPTIONS: Final = ("indicator", "squared", "present")
_SQUARED: Final = ("standard", "min-max", "range", "none")


@dataclass(frozen=True)
class EncoderSpec:
    """The encoder of one feature.

    The argument depends on the kind: the number of encoded columns (one-hot, hash) or
    bins, the period or part of a time (cyclic), or the declaration (range, categories);
    it is "" for other kinds, and for a one-hot with the run's ``max-categories``.
    ``missing`` is the rule for missing values, "" for the default. Options add columns:
    ``squared`` that of the number's square, ``indicator`` one that is 1 where the value
    is missing, ``present`` one that is 1 where it is not; with the last, a constant
    feature keeps its columns.
    """

    kind: str
    argument: str = ""
    missing: str = ""
    indicator: bool = False
    squared: bool = False
    present: bool = False

    def __post_init__(self) -> None:
        if (rule := _RULES.get(self.kind)) is None:
            raise ValueError(
                f"{self.kind!r} is not an encoder: use one of {', '.join(ENCODERS)}"
            )
        if rule.argument and not self._is_open:
            getattr(self, rule.argument)
        elif self.argument:
            raise ValueError(f"{self.kind} takes no argument, not ({self.argument})")
        if self.missing and self.missing not in rule.missing:
            raise ValueError(
                f"missing={self.missing} does not go with {self.kind}: "
                f"it must be {' or '.join(rule.missing)}"
            )
        if self.squared and (self.kind not in _SQUARED or self.missing == APART):
            raise ValueError(
                f"squared does not go with {self.kind}: it is for {', '.join(_SQUARED)}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a spec."""
        form = _FORM.fullmatch(text.strip())
        if form is None:
            raise ValueError(
                f"{text!r} is not of the form <encoder>[(argument)] "
                f"[missing=<rule>] [indicator]; encoders: {', '.join(ENCODERS)}"
            )
        missing, options = _parse_options(form["rest"].split())
        argument = (form["argument"] or "").strip()
        return cls(form["kind"], argument, missing, **dict.fromkeys(options, True))

    def __str__(self) -> str:
        argument = f"({self.argument})" if self.argument else ""
        missing = ""
        if self.missing:
            missing = f" {_MISSING}{self.missing}"
        options = (f" {name}" for name in OPTIONS if getattr(self, name))
        return f"{self.kind}{argument}{missing}{''.join(options)}"

    @property
    def _is_open(self) -> bool:
        return self.kind in ("one-hot", CODES) and not self.argument

    @property
    def is_for_trees(self) -> bool:
        """Whether no other model can read what it encodes."""
        return self.kind == CODES or self.missing == APART

    @property
    def counts_missing(self) -> bool:
        """Whether a missing value is counted as a category."""
        return self.missing == CATEGORY or (
            self.kind == LEVELS and self.missing == "mean"
        )

    @property
    def columns(self) -> int:
        """Number of encoded columns or bins."""
        number = 0
        if self.argument.isdecimal():
            number = int(self.argument)
        if not 2 <= number <= MOST_COLUMNS:
            raise ValueError(
                f"{self.kind} needs a whole number from 2 to {MOST_COLUMNS}, "
                f"as in {self.kind}(16), not ({self.argument})"
            )
        return number

    @property
    def cycle(self) -> float | str:
        """A period above 0, or a part of a time."""
        if self.argument in TIME_PARTS:
            return self.argument
        try:
            period = float(self.argument)
        except ValueError:
            period = math.nan
        if not 0 < period < math.inf:
            raise ValueError(
                f"{self.kind} needs a period above 0 or one of "
                f"{', '.join(TIME_PARTS)}, as in cyclic(12), not ({self.argument})"
            )
        return int(period) if period.is_integer() else period

    @property
    def range(self) -> DeclaredRange:
        """The range that a ``range`` declares."""
        return DeclaredRange.parse(self.argument)

    @property
    def categories(self) -> tuple[str, ...]:
        """The texts that a ``categories`` declares."""
        return parse_categories(self.argument)

    def needs_of(self, kind: str) -> frozenset[Need]:
        """Return the statistics that the encoder of a kind of value is fitted to."""
        if kind == "vector" and self.kind == "none":
            return frozenset()
        needs = frozenset(_RULES[self.kind].needs)
        if self.kind == "none" and self.present and self.missing == "zero":
            return frozenset()
        if self.missing == "mean":
            return needs | {Need.MOMENTS}
        return needs

    def for_kind(self, kind: str, max_categories: int) -> Self:
        """Return the spec, completed for a feature's kind of value."""
        rule = _RULES[self.kind]
        if kind not in rule.fits:
            fitting = [
                name
                for name, other in _RULES.items()
                if kind in other.fits and name != CODES
            ]
            raise SchemaError(
                f"encoder {self} does not fit a {kind}: use {', '.join(fitting)}"
            )
        if self.kind == "cyclic" and self.argument in TIME_PARTS and kind != "time":
            raise SchemaError(
                f"encoder {self} needs a time: give a {kind} a period, as in cyclic(12)"
            )
        self._check_declared(kind)
        if kind == "vector":
            if self.missing not in ("", "zero"):
                raise SchemaError(
                    f"missing={self.missing} does not fit a vector: it must be zero"
                )
            return replace(self, missing="zero")
        argument = str(max_categories) if self._is_open else self.argument
        return replace(self, argument=argument, missing=self.missing or rule.missing[0])

    def _check_declared(self, kind: str) -> None:
        """Refuse a declared range or categories of another kind than the column's."""
        if self.kind == "range" and self.range.is_time != (kind == "time"):
            ends = "dates, as in range(1950-01-01, 2013-12-31)"
            expected = "numbers, as in range(1, 12)"
            if kind == "time":
                expected = ends
            raise SchemaError(f"encoder {self} does not fit a {kind}: write {expected}")
        if self.kind == "categories" and kind != "text":
            try:
                numbers = number_categories(self.categories)
            except ValueError as error:
                raise SchemaError(
                    f"encoder {self} does not fit a {kind}: {error}"
                ) from None
            if len(set(numbers)) != len(numbers):
                raise SchemaError(f"encoder {self} names a number twice")


def _parse_options(words: list[str]) -> tuple[str, list[str]]:
    """Return the treatment of missing values, and the columns that are added."""
    missing = ""
    options: list[str] = []
    for word in words:
        if word in OPTIONS and word not in options:
            options.append(word)
        elif word.startswith(_MISSING) and word != _MISSING and not missing:
            missing = word.removeprefix(_MISSING)
        else:
            raise ValueError(
                f"{word!r} is not an option, or given twice: options are "
                "missing=<mean, category, middle or zero> and "
                f"{', '.join(OPTIONS)}"
            )
    return missing, options
