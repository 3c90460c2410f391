"""Bars from zero, one below the other: how something is made up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tp_flower.report_page.blocks import Figure, Table
from tp_flower.report_page.scales import Scale, from_zero
from tp_flower.report_page.svg import shorten, tag, text_width

WIDTH = 380.0
ROW, BAR, TOP, BOTTOM, MARGIN = 31.0, 9.0, 4.0, 40.0, 14.0


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        name: said above it.
        values: its parts, in the order of the plot's; 0 or more if there are several.
    """

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Measure:
    """What the bars measure.

    Attributes:
        title: of the axis, with the unit of its ticks.
        parts: names of what a bar is made of.
        say: a value as people read it.
        unit: of the axis, in units of the values.
    """

    title: str
    parts: tuple[str, ...]
    say: Callable[[float], str]
    unit: float = 1.0


def bar_figure(
    title: str, measure: Measure, bars: Sequence[Bar], note: str = ""
) -> Figure | None:
    """Return the plot of some bars, or None if there are none, or only zeros."""
    if not any(value for bar in bars for value in bar.values):
        return None
    spoken = [f"{bar.name}: {_said(measure, bar)}." for bar in bars]
    summary = f"{title}. {measure.title}. {' '.join(spoken)}"
    are_several = len(measure.parts) > 1
    sums = ("all",) if are_several else ()
    rows = [
        (bar.name, *map(measure.say, bar.values), *_sum_of(measure, bar))
        for bar in bars
    ]
    return Figure(
        title=title,
        svg=_draw(summary, measure, bars),
        summary=summary,
        table=Table(title, ("", *measure.parts, *sums), rows),
        legend=measure.parts if are_several else (),
        are_lines=False,
        note=note,
    )


def _said(measure: Measure, bar: Bar) -> str:
    named = zip(measure.parts, bar.values, strict=True)
    return ", ".join(f"{name} {measure.say(value)}" for name, value in named)


def _sum_of(measure: Measure, bar: Bar) -> tuple[str, ...]:
    return (measure.say(sum(bar.values)),) if len(measure.parts) > 1 else ()


def _draw(summary: str, measure: Measure, bars: Sequence[Bar]) -> Markup:
    ends = [
        end / measure.unit for bar in bars for end in (min(bar.values), sum(bar.values))
    ]
    scale = from_zero(ends)
    height = TOP + ROW * len(bars) + BOTTOM
    parts = _axis(measure, scale, height)
    for n, bar in enumerate(bars):
        parts += _bar(measure, scale, bar, TOP + ROW * n)
    return tag(
        "svg",
        tag("desc", summary),
        *parts,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        class_="plot",
        role="img",
        aria_label=summary,
    )


def _at(scale: Scale, value: float) -> float:
    return scale.at(value) * (WIDTH - MARGIN)


def _axis(measure: Measure, scale: Scale, height: float) -> list[Markup]:
    """Return the axis below the bars; names lie where lines across would be."""
    base = height - BOTTOM + 2
    ends = {"x1": 0.0, "x2": _at(scale, scale.high), "y1": base, "y2": base}
    parts = [tag("line", class_="base", **ends)]
    for n, (value, label) in enumerate(scale.ticks):
        x = _at(scale, value)
        # the outer labels keep inside the drawing
        side = "tick" if n == 0 else "tick middle"
        x_text = x if n == 0 else min(x, WIDTH - text_width(label) / 2)
        parts += [
            tag("line", class_="mark", x1=x, x2=x, y1=base, y2=base + 4),
            tag("text", label, class_=side, x=x_text, y=base + 16),
        ]
    parts.append(tag("text", measure.title, class_="axis", x=0.0, y=height - 4))
    return parts


def _zero(scale: Scale, top: float) -> list[Markup]:
    """Return what bars to the left and to the right start from, between the names."""
    if scale.low == 0:
        return []
    x = _at(scale, 0.0)
    return [tag("line", class_="mark", x1=x, x2=x, y1=top + 14, y2=top + 29)]


def _bar(measure: Measure, scale: Scale, bar: Bar, top: float) -> list[Markup]:
    amount = measure.say(sum(bar.values))
    name = shorten(bar.name, WIDTH - text_width(amount) - 16)
    parts = [
        tag("text", tag("title", bar.name), name, class_="name", x=0.0, y=top + 12),
        tag("text", amount, class_="amount end", x=WIDTH, y=top + 12),
    ]
    start = 0.0
    for n, (part, value) in enumerate(zip(measure.parts, bar.values, strict=True)):
        ends = (
            _at(scale, start / measure.unit),
            _at(scale, (start + value) / measure.unit),
        )
        said = f"{bar.name}, {part}: {measure.say(value)}"
        rectangle = tag(
            "rect",
            tag("title", said),
            class_="bar",
            x=min(ends),
            y=top + 17,
            width=abs(ends[1] - ends[0]),
            height=BAR,
            data_name=bar.name,
            data_value=repr(value),
        )
        parts.append(tag("g", rectangle, class_=f"s{n + 1}"))
        start += value
    return [*parts, *_zero(scale, top)]
