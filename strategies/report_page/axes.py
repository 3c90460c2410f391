"""Axes: from values to shares of a length, with ticks at round numbers."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal

TICKS = 5
"""Ticks of an axis, about."""

LONGEST_LABEL = 12

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Scale:
    """One axis from low to high > low, with its ticks and their labels, ascending.

    Attributes:
        measure: the quantity drawn in proportion: the value, or its logarithm.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    measure: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Return where a value lies: 0 at the start of the axis, 1 at its end."""
        start, end = self.measure(self.low), self.measure(self.high)
        return (self.measure(value) - start) / (end - start)


FitScale = Callable[[Iterable[float]], Scale]
"""Makes the axis of any number of values, none included."""


def linear(values: Iterable[float]) -> Scale:
    """Return an axis whose ends are ticks.

    >>> [label for _, label in linear([0.31, 0.49]).ticks]
    ['0.30', '0.35', '0.40', '0.45', '0.50']
    """
    numbers = list(values) or [0.0]
    low, high = min(numbers), max(numbers)
    # so near that their difference is rounding
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.05 * abs(low) or 0.5
        low, high = low - margin, high + margin
    step = nice_step((high - low) / TICKS)
    first = math.floor(low / float(step) + 1e-9)
    last = max(math.ceil(high / float(step) - 1e-9), first + 1)
    ticks = _multiples(first, last, step)
    return Scale(ticks[0][0], ticks[-1][0], ticks)


def from_zero(values: Iterable[float]) -> Scale:
    """Return an axis that has zero on it.

    >>> from_zero([3.0, 4.2]).low, from_zero([-0.2, 1.0]).low
    (0.0, -0.25)
    """
    return linear([0.0, *(list(values) or [1.0])])


def whole(values: Iterable[float]) -> Scale:
    """Return an axis of whole numbers that ends at the values, not at ticks.

    >>> whole([1, 2, 12]).ticks[:2], whole([1, 2, 12]).high
    (((2.0, '2'), (4.0, '4')), 12.0)
    >>> whole([3]).low, whole([3]).high, whole([3]).ticks
    (2.5, 3.5, ((3.0, '3'),))
    """
    numbers = list(values) or [1.0]
    low, high = float(min(numbers)), float(max(numbers))
    step = max(nice_step((high - low) / (TICKS + 1)), Decimal(1))
    # 2.5 is no whole number
    step *= 1 if step == int(step) else 2
    first, last = math.ceil(low / float(step)), math.floor(high / float(step))
    margin = 0.0 if low < high else 0.5
    return Scale(low - margin, high + margin, _multiples(first, last, step))


def logarithmic(values: Iterable[float]) -> Scale:
    """Return a logarithmic axis; values that are not positive are not on it.

    >>> [label for _, label in logarithmic([1e-5, 0.2]).ticks]
    ['10⁻⁵', '10⁻⁴', '10⁻³', '0.01', '0.1', '1']
    >>> [label for _, label in logarithmic([2.0, 30.0]).ticks]
    ['2', '5', '10', '20', '50']
    """
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    first = math.floor(math.log10(low) + 1e-9)
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    if high < 100 * low:
        steps = [float(f"{n}e{k}") for k in range(first, last + 1) for n in (1, 2, 5)]
        start = max(mark for mark in steps if mark <= low * (1 + 1e-9))
        end = min(mark for mark in steps if mark >= high * (1 - 1e-9) and mark > start)
        marks = [mark for mark in steps if start <= mark <= end]
    else:
        stride = math.ceil((last - first) / (TICKS + 2))
        marks = [float(f"1e{k}") for k in range(first, last + 1, stride)]
    # the axis reaches over the last tick where not every decade has one
    ticks = tuple((mark, _log_label(mark)) for mark in marks)
    return Scale(marks[0], max(marks[-1], high), ticks, math.log10)


def nice_step(least: float) -> Decimal:
    """Return the least step of 1, 2, 2.5 or 5 times a power of ten that is no smaller.

    >>> [str(nice_step(least)) for least in (0.036, 0.21, 1.0)]
    ['0.05', '0.25', '1']
    """
    if least <= 0:
        return Decimal(1)
    exponent = math.floor(math.log10(least))
    steps = (Decimal(digits).scaleb(exponent) for digits in ("1", "2", "2.5", "5"))
    enough = (step for step in steps if float(step) >= least * (1 - 1e-9))
    return next(enough, Decimal(1).scaleb(exponent + 1))


def _multiples(first: int, last: int, step: Decimal) -> tuple[tuple[float, str], ...]:
    """Return multiples of a step, which are exact, with their labels."""
    ticks = [n * step for n in range(first, last + 1)]
    labels = [f"{tick:,f}" for tick in ticks]
    if max(map(len, labels), default=0) > LONGEST_LABEL:
        labels = [f"{float(tick):.6g}" for tick in ticks]
    return tuple(zip(map(float, ticks), labels, strict=True))


def _log_label(mark: float) -> str:
    if 0.01 <= mark < 1e5:
        return f"{mark:,g}"
    digits, exponent = f"{mark:.0e}".split("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return power if digits == "1" else f"{digits}·{power}"
