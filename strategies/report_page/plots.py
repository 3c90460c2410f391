"""Drawings in SVG: lines over an axis, bars from zero.

Colours, strokes and fonts are classes of the style sheet, so that a drawing follows
the reader's light or dark mode. At 380 pixels (a phone), a unit is a pixel.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import NamedTuple

from markupsafe import Markup

from tp_flower.reports.blocks import STYLES, Cells, Figure, Table

TICKS = 5  # approximate number of ticks on an axis
LONGEST_LABEL = 12

_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Scale:
    """One axis from low to high > low, with its ticks and their labels, ascending."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    measure: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Return where a value lies: 0 at the start of the axis, 1 at its end."""
        start = self.measure(self.low)
        end = self.measure(self.high)
        return (self.measure(value) - start) / (end - start)


FitScale = Callable[[Iterable[float]], Scale]
"""Makes an axis for any number of values, even for none."""


def linear_axis(values: Iterable[float]) -> Scale:
    """Return an axis whose ends are ticks.

    >>> [label for _, label in linear_axis([0.31, 0.49]).ticks]
    ['0.30', '0.35', '0.40', '0.45', '0.50']
    """
    numbers = list(values) or [0.0]
    low = min(numbers)
    high = max(numbers)
    # a difference this small is rounding
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.05 * abs(low) or 0.5
        low = low - margin
        high = high + margin
    step = nice_step((high - low) / TICKS)
    first = math.floor(low / float(step) + 1e-9)
    ticks = _multiples(
        first, max(math.ceil(high / float(step) - 1e-9), first + 1), step
    )
    return Scale(ticks[0][0], ticks[-1][0], ticks)


def axis_from_zero(values: Iterable[float]) -> Scale:
    """Return an axis that includes zero.

    >>> axis_from_zero([3.0, 4.2]).low, axis_from_zero([-0.2, 1.0]).low
    (0.0, -0.25)
    """
    return linear_axis([0.0, *(list(values) or [1.0])])


def whole_number_axis(values: Iterable[float]) -> Scale:
    """Return an axis of whole numbers that ends at the values, not at ticks.

    >>> whole_number_axis([1, 2, 12]).ticks[:2], whole_number_axis([1, 2, 12]).high
    (((2.0, '2'), (4.0, '4')), 12.0)
    >>> one = whole_number_axis([3])
    >>> one.low, one.high, one.ticks
    (2.5, 3.5, ((3.0, '3'),))
    """
    numbers = list(values) or [1.0]
    low = float(min(numbers))
    high = float(max(numbers))
    step = max(nice_step((high - low) / (TICKS + 1)), Decimal(1))
    # 2.5 is not a whole number
    step = Decimal(int(step if step == int(step) else 2 * step))
    first = math.ceil(low / float(step))
    last = math.floor(high / float(step))
    margin = 0.0 if low < high else 0.5
    return Scale(low - margin, high + margin, _multiples(first, last, step))


def log_axis(values: Iterable[float]) -> Scale:
    """Return a logarithmic axis; values that are not positive are not on it.

    >>> [label for _, label in log_axis([1e-5, 0.2]).ticks]
    ['10⁻⁵', '10⁻⁴', '10⁻³', '0.01', '0.1', '1']
    >>> [label for _, label in log_axis([2.0, 30.0]).ticks]
    ['2', '5', '10', '20', '50']
    """
    positive = [value for value in values if value > 0] or [1.0]
    low = min(positive)
    high = max(positive)
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
    # the axis extends past the last tick if some decade has no tick
    ticks = tuple((mark, _log_label(mark)) for mark in marks)
    return Scale(marks[0], max(marks[-1], high), ticks, math.log10)


def nice_step(least: float) -> Decimal:
    """Return the smallest step of 1, 2, 2.5 or 5 times a power of ten that is enough.

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
    """Return the ticks at multiples of a step, with their labels."""
    ticks = [n * step for n in range(first, last + 1)]
    labels = [f"{tick:,f}" for tick in ticks]
    if max(map(len, labels), default=0) > LONGEST_LABEL:
        labels = [f"{float(tick):.6g}" for tick in ticks]
    return tuple(zip(map(float, ticks), labels, strict=True))


def _log_label(mark: float) -> str:
    """Return the label of a tick on a logarithmic axis."""
    if 0.01 <= mark < 1e5:
        return f"{mark:,g}"
    digits, exponent = f"{mark:.0e}".split("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return power if digits == "1" else f"{digits}·{power}"


Point = tuple[float, float]

WIDTH = 380.0
HEIGHT = 236.0
TOP = 26.0
BOTTOM = 40.0
GAP = 8.0
LABEL_HEIGHT = 13.0
CHARACTER_WIDTH = 6.3  # approximate width of a character of a label
FEW_POINTS = 40
MOST_POINTS = 400  # of a line, a tenth of a pixel apart
BAR_ROW = 31.0
FARTHEST = 30.0
"""An estimate beyond it, whose exponential no axis needs to show."""

# Markup.format escapes its arguments
_SVG = Markup(
    '<svg viewBox="0 0 {:g} {:g}" class="plot" role="img" aria-label="{}">{}</svg>'
)
_GROUP = Markup('<g class="s{}">{}</g>')
_LINE = Markup('<line class="{}" x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}"/>')
_TEXT = Markup('<text class="{}" x="{:.2f}" y="{:.2f}">{}</text>')
_NAME = Markup('<text class="{}" x="{:.2f}" y="{:.2f}"><title>{}</title>{}</text>')
_SERIES = Markup(
    '<g class="s{0}" data-name="{1}"><polyline class="line d{0}" points="{2}"/>{3}</g>'
)
_DOT = Markup(
    '<circle class="{}" cx="{:.2f}" cy="{:.2f}" r="{:.2f}" data-x="{!r}" '
    'data-y="{!r}"><title>{}</title></circle>'
)
_BAR = Markup(
    '<rect class="bar" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="9" data-name="{}" '
    'data-value="{!r}"><title>{}</title></rect>'
)


def _drawing(summary: str, height: float, parts: Sequence[Markup]) -> Markup:
    """Return a plot with a description of its content for readers who cannot see it."""
    return _SVG.format(WIDTH, height, summary, Markup("").join(parts))


def text_width(words: str) -> float:
    """Return the approximate width of a label."""
    return CHARACTER_WIDTH * len(words)


def shorten(words: str, width: float) -> str:
    """Return a label cut to approximately this width.

    >>> shorten("a_very_long_name", 63)
    'a_very_lo…'
    """
    characters = max(int(width / CHARACTER_WIDTH), 1)
    if len(words) <= characters:
        return words
    return f"{words[: characters - 1]}…"


@dataclass(frozen=True)
class Axis:
    """One axis of a plot: its title with the unit, its scale, its values for people."""

    title: str
    fit: FitScale
    format: Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One line: points (x, y) in order of x, and a label at its end.

    ``intervals`` are the ends (low, high) of each point's interval, if it has one.
    """

    name: str
    points: Sequence[Point]
    label: str = ""
    intervals: Sequence[Point] = ()


def line_figure(
    title: str, x: Axis, y: Axis, lines: Sequence[Series], note: str = ""
) -> Figure | None:
    """Return the plot of some lines, or None if none of them has a point.

    A line whose points have intervals has at most ``MOST_POINTS``.
    """
    thinned = [replace(line, points=thin(line.points)) for line in lines if line.points]
    if not thinned:
        return None
    ends = " ".join(_ends(x, y, line) for line in thinned)
    return Figure(
        title=title,
        svg=_Canvas.fit(x, y, thinned).draw(
            f"{title}. {y.title} over {x.title}. {ends}", thinned
        ),
        table=_line_data(title, x, y, thinned),
        legend=tuple(line.name for line in thinned) if len(thinned) > 1 else (),
        note=note,
    )


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """Return evenly spaced points, the first and the last among them.

    >>> len(thin([(n, n) for n in range(1000)])), thin([(1, 2), (3, 4)])
    (400, [(1, 2), (3, 4)])
    """
    if len(points) <= MOST_POINTS:
        return points
    stride = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(n * stride)] for n in range(MOST_POINTS)]


def _ends(x: Axis, y: Axis, line: Series) -> str:
    (x0, y0), (x1, y1) = line.points[0], line.points[-1]
    end = f"{y.format(y1)} at {x.format(x1)}."
    if len(line.points) == 1:
        return f"{line.name}: {end}"
    return f"{line.name}: from {y.format(y0)} at {x.format(x0)} to {end}"


def _line_data(title: str, x: Axis, y: Axis, lines: Sequence[Series]) -> Table:
    """Return the points of a line plot as a table."""
    columns = []
    heads = [x.title]
    for line in lines:
        heads.append(line.name)
        columns.append(dict(line.points))
        if line.intervals:
            heads += ["low", "high"]
            positions = [position for position, _ in line.points]
            columns += [
                dict(zip(positions, ends, strict=True))
                for ends in zip(*line.intervals, strict=True)
            ]
    rows = [
        (
            x.format(position),
            *(y.format(c[position]) if position in c else "" for c in columns),
        )
        for position in sorted({position for column in columns for position in column})
    ]
    return Table(title, tuple(heads), rows, words=frozenset())


@dataclass(frozen=True)
class _Canvas:
    """The axes of a plot, between the margins that their labels need."""

    x: Axis
    y: Axis
    across: Scale
    upwards: Scale
    left: float
    right: float

    @classmethod
    def fit(cls, x: Axis, y: Axis, lines: Sequence[Series]) -> "_Canvas":
        """Return the canvas that fits all lines and labels."""
        across = x.fit([position for line in lines for position, _ in line.points])
        upwards = y.fit(
            [
                *(value for line in lines for _, value in line.points),
                *(end for line in lines for ends in line.intervals for end in ends),
            ]
        )
        left = max(text_width(label) for _, label in upwards.ticks) + GAP
        # the labels at the lines' ends are bold
        ends = max(1.15 * text_width(line.label) for line in lines)
        gap = GAP if ends else 2 * GAP
        return cls(x, y, across, upwards, left, WIDTH - ends - gap)

    def at(self, point: Point) -> Point:
        x = self.left + self.across.at(point[0]) * (self.right - self.left)
        y = HEIGHT - BOTTOM - self.upwards.at(point[1]) * (HEIGHT - BOTTOM - TOP)
        return x, y

    def draw(self, summary: str, lines: Sequence[Series]) -> Markup:
        elements = [self._line(n % STYLES + 1, line) for n, line in enumerate(lines)]
        return _drawing(
            summary, HEIGHT, [*self._axes(), *elements, *self._end_labels(lines)]
        )

    def _axes(self) -> list[Markup]:
        """Return the axes, with ticks, grid and titles."""
        base = HEIGHT - BOTTOM
        middle = min((self.left + self.right) / 2, WIDTH - text_width(self.x.title) / 2)
        parts = [
            _TEXT.format("axis", 0, 11, shorten(self.y.title, WIDTH)),
            _TEXT.format("axis middle", middle, HEIGHT - 5, self.x.title),
        ]
        for value, label in self.upwards.ticks:
            _, y = self.at((self.across.low, value))
            parts.append(_LINE.format("grid", self.left, y, self.right, y))
            parts.append(_TEXT.format("tick end", self.left - 5, y + 4, label))
        for value, label in self.across.ticks:
            x, _ = self.at((value, self.upwards.low))
            parts.append(_LINE.format("mark", x, base, x, base + 4))
            parts.append(_TEXT.format("tick middle", x, base + 16, label))
        return [*parts, _LINE.format("base", self.left, base, self.right, base)]

    def _line(self, style: int, line: Series) -> Markup:
        """Return a line with its points' tooltips."""
        look, radius = (
            ("dot", 2.6) if len(line.points) <= FEW_POINTS else ("dot hidden", 4.0)
        )
        dots = []
        path = []
        for point in line.points:
            x, y = self.at(point)
            position = self.x.format(point[0])
            value = self.y.format(point[1])
            tip = f"{line.name}, {self.x.title} {position}: {value}"
            dots.append(_DOT.format(look, x, y, radius, *point, tip))
            path.append(f"{x:.2f},{y:.2f}")
        marks = [*self._intervals(line), *dots]
        return _SERIES.format(style, line.name, " ".join(path), Markup("").join(marks))

    def _intervals(self, line: Series) -> Iterator[Markup]:
        """Yield the intervals of a line's points, if they have some."""
        if line.intervals:
            for (at, _), ends in zip(line.points, line.intervals, strict=True):
                (x, low), (_, high) = (self.at((at, end)) for end in ends)
                yield _LINE.format("reach", x, low, x, high)

    def _end_labels(self, lines: Sequence[Series]) -> list[Markup]:
        """Return the labels at the ends of the lines, spread so that none overlap."""
        ends = [
            (self.at(line.points[-1]), n) for n, line in enumerate(lines) if line.label
        ]
        ends.sort(key=lambda end: end[0][1])
        heights = [y for (_, y), _ in ends]
        labels = []
        for ((x, _), n), y in zip(
            ends, spread(heights, LABEL_HEIGHT, HEIGHT - BOTTOM), strict=True
        ):
            label = _TEXT.format("label", x + 6, y + 4, lines[n].label)
            labels.append(_GROUP.format(n % STYLES + 1, label))
        return labels


def spread(heights: Sequence[float], gap: float, most: float) -> list[float]:
    """Return the heights, moved to be at least a gap apart, in the same order.

    >>> spread([10.0, 12.0, 50.0], 13.0, 200.0)
    [10.0, 23.0, 50.0]
    >>> spread([95.0, 99.0], 13.0, 100.0)
    [87.0, 100.0]
    """
    down = accumulate(heights, lambda last, height: max(height, last + gap))
    up = accumulate(
        reversed(list(down)),
        lambda below, height: min(height, below - gap),
        initial=most + gap,
    )
    return list(up)[:0:-1]


Bars = Sequence[tuple[str, Sequence[float]]]
"""Names of bars, each with its parts: 0 or more where there are several."""


def bar_figure(
    title: str,
    bars: Bars,
    format_value: Callable[[float], str],
    parts: tuple[str, ...] = ("value",),
    note: str = "",
) -> Figure | None:
    """Return the plot of some bars, or None if there are none, or only zeros."""
    if not any(value for _, values in bars for value in values):
        return None
    is_stacked = len(parts) > 1
    head = ("", *parts, "all") if is_stacked else ("", *parts)
    rows = [
        (name, *map(format_value, (*values, sum(values))[: len(head) - 1]))
        for name, values in bars
    ]
    words = (", ".join(map(" ".join, zip(head, row, strict=True))) for row in rows)
    return Figure(
        title=title,
        svg=_draw_bars(f"{title}.{';'.join(words)}", bars, rows, head),
        table=Table(title, head, rows),
        legend=parts if is_stacked else (),
        are_lines=False,
        note=note,
    )


def _draw_bars(summary: str, bars: Bars, rows: Sequence[Cells], head: Cells) -> Markup:
    """Return bars below each other from a common zero, labelled with their amounts."""
    ends = [end for _, values in bars for end in (min(values), sum(values), 0.0)]
    zero = -min(ends)
    unit = WIDTH / (max(ends) - min(ends))
    elements = []
    for n, ((name, values), row) in enumerate(zip(bars, rows, strict=True)):
        top = BAR_ROW * n
        short = shorten(name, WIDTH - text_width(row[-1]) - 16)
        elements.append(_NAME.format("name", 0, top + 12, name, short))
        elements.append(_TEXT.format("amount end", WIDTH, top + 12, row[-1]))
        for k, (start, end) in enumerate(pairwise(accumulate(values, initial=zero))):
            left = min(start, end) * unit
            width = abs(end - start) * unit
            tip = f"{name}, {head[k + 1]}: {row[k + 1]}"
            bar = _BAR.format(left, top + 17, width, name, values[k], tip)
            elements.append(_GROUP.format(k + 1, bar))
        if zero:
            x = zero * unit
            elements.append(_LINE.format("mark", x, top + 14, x, top + 29))
    return _drawing(summary, BAR_ROW * len(bars), elements)


class Interval(NamedTuple):
    """An estimate between the ends of its interval."""

    name: str
    value: float
    low: float
    high: float


def interval_figure(
    title: str, intervals: Sequence[Interval], ratio: str = ""
) -> Figure | None:
    """Return a forest plot, or None without intervals.

    With a ``ratio``, the estimates' exponentials are shown, on a logarithmic axis.
    """
    if not intervals:
        return None
    if ratio:
        intervals = [
            Interval(name, *(math.exp(min(number, FARTHEST)) for number in numbers))
            for name, *numbers in intervals
        ]
    neutral = 1.0 if ratio else 0.0
    ends = [end for each in intervals for end in each[2:]]
    scale = (log_axis if ratio else linear_axis)([*ends, neutral])
    head = ("", ratio or "value", "low", "high")
    rows = [(each.name, *(f"{n:.4g}" for n in each[1:])) for each in intervals]
    words = (f"{name} {value} ({low} to {high})" for name, value, low, high in rows)
    return Figure(
        title=title,
        svg=_draw_intervals(f"{title}. {'; '.join(words)}", intervals, scale, neutral),
        table=Table(title, head, rows),
        are_lines=False,
        note=f"As {ratio}s, on a logarithmic axis." if ratio else "",
    )


def _draw_intervals(
    summary: str, intervals: Sequence[Interval], scale: Scale, neutral: float
) -> Markup:
    """Return intervals below each other, with a line where nothing has an effect."""
    height = BAR_ROW * len(intervals)
    at_neutral = WIDTH * scale.at(neutral)
    elements = [_LINE.format("grid", at_neutral, 0, at_neutral, height + 6)]
    for n, each in enumerate(intervals):
        top = BAR_ROW * n
        amount = f"{each.value:.3g} ({each.low:.3g} to {each.high:.3g})"
        short = shorten(each.name, WIDTH - text_width(amount) - 16)
        elements.append(_NAME.format("name", 0, top + 12, each.name, short))
        elements.append(_TEXT.format("amount end", WIDTH, top + 12, amount))
        left, middle, right = (
            WIDTH * min(max(scale.at(end), 0.0), 1.0)
            for end in (each.low, each.value, each.high)
        )
        line = _LINE.format("base", left, top + 21, right, top + 21)
        tip = f"{each.name}: {amount}"
        dot = _DOT.format("dot", middle, top + 21, 4.0, each.value, each.high, tip)
        elements += [line, _GROUP.format(1, dot)]
    for value, label in scale.ticks:
        x = WIDTH * scale.at(value)
        width = text_width(label)
        middle = min(max(x, width / 2), WIDTH - width / 2)
        elements.append(_TEXT.format("tick middle", middle, height + 18, label))
    return _drawing(summary, height + 24, elements)
