"""Axes: from values to shares of a length, with ticks at round numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

TICKS = 5
"""How many ticks an axis has, about."""

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Scale:
    """One axis.

    Attributes:
        low: value at the start of the axis.
        high: value at its end, > ``low``.
        ticks: the values that are marked, ascending, with their labels.
        measure: what is drawn in proportion: the value itself, or its logarithm.
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
"""Makes the axis of some values; of none or one, too."""


def linear(values: Iterable[float]) -> Scale:
    """Return an axis whose ends are ticks.

    >>> linear([0.31, 0.49]).low, linear([0.31, 0.49]).high
    (0.3, 0.5)
    >>> [label for _, label in linear([0.31, 0.49]).ticks]
    ['0.30', '0.35', '0.40', '0.45', '0.50']
    """
    low, high = _range(values)
    step = nice_step((high - low) / TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _steps(first, max(last, first + 1), step)


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
    found = list(values) or [1.0]
    low, high = float(min(found)), float(max(found))
    step = max(nice_step((high - low) / (TICKS + 1)), 1.0)
    # 2.5 is no whole number
    step *= 1 if step == int(step) else 2
    first, last = math.ceil(low / step), math.floor(high / step)
    ticks = tuple((n * step, f"{n * step:,.0f}") for n in range(first, last + 1))
    return (
        Scale(low, high, ticks) if low < high else Scale(low - 0.5, high + 0.5, ticks)
    )


def logarithmic(values: Iterable[float]) -> Scale:
    """Return a logarithmic axis; values that are not positive are not on it.

    >>> [label for _, label in logarithmic([1e-5, 0.2]).ticks]
    ['10⁻⁵', '10⁻⁴', '10⁻³', '0.01', '0.1', '1']
    >>> [label for _, label in logarithmic([2.0, 30.0]).ticks]
    ['2', '5', '10', '20', '50']
    """
    found = [value for value in values if value > 0] or [1.0]
    low, high = math.log10(min(found)), math.log10(max(found))
    first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    last = max(last, first + 1)
    if high - low < 2:
        marks = _between(
            [m * 10.0**e for e in range(first, last) for m in (1, 2, 5)] + [10.0**last],
            min(found),
            max(found),
        )
    else:
        step = math.ceil((last - first) / (TICKS + 2))
        marks = [10.0**e for e in range(first, last + 1, step)]
    # the axis reaches over the last tick where not every decade has one
    return Scale(
        marks[0],
        max(marks[-1], *found),
        tuple((mark, _log_label(mark)) for mark in marks),
        math.log10,
    )


def nice_step(least: float) -> float:
    """Return the least step of 1, 2, 2.5 or 5 times a power of ten that is no smaller.

    >>> nice_step(0.036), nice_step(3), nice_step(1.0)
    (0.05, 5.0, 1.0)
    """
    if least <= 0:
        return 1.0
    exponent = math.floor(math.log10(least))
    for digits in (1, 2, 2.5, 5, 10):
        step = float(f"{digits}e{exponent}")
        if step >= least * (1 - 1e-9):
            return step
    return float(f"1e{exponent + 1}")


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the largest value, apart from each other."""
    found = list(values) or [0.0]
    low, high = min(found), max(found)
    # so near that their difference is rounding
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.05 * abs(low) or 0.5
        return low - margin, high + margin
    return low, high


def _steps(first: int, last: int, step: float) -> Scale:
    """Return the axis from one multiple of a step to another."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    # 2.5 has one digit more than 2 or 5
    if round(step * 10**decimals, 6) % 1:
        decimals += 1
    # a multiple has rounding errors that its text has not
    ticks = [float(f"{n * step:.{min(decimals, 15)}f}") for n in range(first, last + 1)]
    if decimals > 15 or abs(ticks[-1]) >= 1e7:
        ticks = [n * step for n in range(first, last + 1)]
        labels = [f"{tick:.3g}" for tick in ticks]
    else:
        labels = [f"{tick:,.{decimals}f}" for tick in ticks]
    return Scale(ticks[0], ticks[-1], tuple(zip(ticks, labels, strict=True)))


def _between(marks: Sequence[float], low: float, high: float) -> list[float]:
    """Return the marks around some values: the last one below, up to one above."""
    below = [n for n, mark in enumerate(marks) if mark <= low * (1 + 1e-9)]
    above = [n for n, mark in enumerate(marks) if mark >= high * (1 - 1e-9)]
    first, last = below[-1], above[0]
    return list(marks[first : max(last, first + 1) + 1])


def _log_label(mark: float) -> str:
    if 0.01 <= mark < 1e5:
        return f"{mark:,.0f}" if mark >= 1 else f"{mark:g}"
    exponent = math.floor(math.log10(mark) + 1e-9)
    digits = f"{mark / 10.0**exponent:.3g}"
    power = f"10{exponent}".replace(
        str(exponent), str(exponent).translate(_SUPERSCRIPTS)
    )
    return power if digits == "1" else f"{digits}·{power}"
