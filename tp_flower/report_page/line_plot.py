"""Lines over an axis: how something went."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tp_flower.report_page.blocks import Figure, Table
from tp_flower.report_page.scales import FitScale, Scale
from tp_flower.report_page.svg import shorten, tag, text_width

Point = tuple[float, float]

# units of the drawing: at 380 px wide (a phone) a unit is a pixel
WIDTH, HEIGHT = 380.0, 236.0
TOP, BOTTOM, GAP = 26.0, 40.0, 8.0
LABEL_HEIGHT = 13.0
STYLES = 8
FEW_POINTS = 40
MOST_POINTS = 400
"""A line of more points is thinned: they would lie closer than a tenth of a pixel."""


@dataclass(frozen=True)
class Axis:
    """One axis of a plot.

    Attributes:
        title: what is measured, with its unit.
        fit: makes the scale of the values.
        say: a value as people read it.
    """

    title: str
    fit: FitScale
    say: Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        name: for the legend.
        points: (x, y), in order of x.
        label: said at its end.
    """

    name: str
    points: tuple[Point, ...]
    label: str = ""


def line_figure(
    title: str, x: Axis, y: Axis, lines: Sequence[Line], note: str = ""
) -> Figure | None:
    """Return the plot of some lines, or None if none of them has a point."""
    thinned = [Line(own.name, thin(own.points), own.label) for own in lines]
    shown = [own for own in thinned if own.points]
    if not shown:
        return None
    return Figure(
        title=title,
        svg=_Canvas.fit(x, y, shown).draw(title, shown),
        summary=f"{title}. {_summary(x, y, shown)}",
        table=_data(title, x, y, shown),
        legend=tuple(own.name for own in shown) if len(shown) > 1 else (),
        note=note,
    )


def thin(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return evenly spaced points, the first and the last among them.

    >>> len(thin([(n, n) for n in range(1000)])), thin([(1, 2), (3, 4)])
    (400, ((1, 2), (3, 4)))
    """
    if len(points) <= MOST_POINTS:
        return tuple(points)
    last = len(points) - 1
    kept = (round(n * last / (MOST_POINTS - 1)) for n in range(MOST_POINTS))
    return tuple(points[n] for n in kept)


@dataclass(frozen=True)
class _Canvas:
    """Where things are drawn: the axes, and the margins that their labels need."""

    x: Axis
    y: Axis
    across: Scale
    upwards: Scale
    left: float
    right: float

    @classmethod
    def fit(cls, x: Axis, y: Axis, lines: Sequence[Line]) -> "_Canvas":
        across = x.fit([point[0] for own in lines for point in own.points])
        upwards = y.fit([point[1] for own in lines for point in own.points])
        ticks = max(text_width(label) for _, label in upwards.ticks)
        # the labels at the ends are bold
        ends = max(1.15 * text_width(own.label) for own in lines)
        return cls(
            x, y, across, upwards, ticks + GAP, ends + (GAP if ends else 2 * GAP)
        )

    def at_x(self, value: float) -> float:
        return self.left + self.across.at(value) * (WIDTH - self.left - self.right)

    def at_y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.upwards.at(value) * (HEIGHT - BOTTOM - TOP)

    def draw(self, title: str, lines: Sequence[Line]) -> Markup:
        parts = [tag("desc", title), *self._grid(), *self._titles()]
        parts += [self._line(n, own) for n, own in enumerate(lines)]
        parts += self._end_labels(lines)
        return tag(
            "svg",
            *parts,
            viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
            class_="plot",
            role="img",
            aria_label=f"{title}. {_summary(self.x, self.y, lines)}",
        )

    def _grid(self) -> list[Markup]:
        end, base = WIDTH - self.right, HEIGHT - BOTTOM
        parts: list[Markup] = []
        for value, label in self.upwards.ticks:
            y = self.at_y(value)
            parts += [
                tag("line", class_="grid", x1=self.left, x2=end, y1=y, y2=y),
                tag("text", label, class_="tick end", x=self.left - 5, y=y + 4),
            ]
        for value, label in self.across.ticks:
            x = self.at_x(value)
            parts += [
                tag("line", class_="mark", x1=x, x2=x, y1=base, y2=base + 4),
                tag("text", label, class_="tick middle", x=x, y=base + 16),
            ]
        parts.append(tag("line", class_="base", x1=self.left, x2=end, y1=base, y2=base))
        return parts

    def _titles(self) -> list[Markup]:
        middle = (self.left + WIDTH - self.right) / 2
        return [
            tag("text", shorten(self.y.title, WIDTH), class_="axis", x=0.0, y=11.0),
            tag(
                "text",
                shorten(self.x.title, WIDTH),
                class_="axis middle",
                x=min(middle, WIDTH - text_width(self.x.title) / 2),
                y=HEIGHT - 5,
            ),
        ]

    def _line(self, position: int, own: Line) -> Markup:
        style = position % STYLES + 1
        placed = [(self.at_x(x), self.at_y(y)) for x, y in own.points]
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in placed)
        is_sparse = len(placed) <= FEW_POINTS
        dots = [
            tag(
                "circle",
                tag("title", f"{own.name}, {self._tip(point)}"),
                class_="dot" if is_sparse else "dot hidden",
                cx=cx,
                cy=cy,
                r=2.6 if is_sparse else 4.0,
                data_x=repr(point[0]),
                data_y=repr(point[1]),
            )
            for point, (cx, cy) in zip(own.points, placed, strict=True)
        ]
        return tag(
            "g",
            tag("polyline", class_=f"line d{style}", points=path),
            *dots,
            class_=f"series s{style}",
            data_name=own.name,
        )

    def _tip(self, point: Point) -> str:
        return f"{self.x.title} {self.x.say(point[0])}: {self.y.say(point[1])}"

    def _end_labels(self, lines: Sequence[Line]) -> list[Markup]:
        """Return what is said at the ends of the lines, one below the other."""
        ends = [
            (self.at_y(own.points[-1][1]), n)
            for n, own in enumerate(lines)
            if own.label
        ]
        parts = []
        heights = spread([y for y, _ in sorted(ends)], LABEL_HEIGHT, HEIGHT - BOTTOM)
        for (_, n), y in zip(sorted(ends), heights, strict=True):
            x = self.at_x(lines[n].points[-1][0]) + 6
            label = tag("text", lines[n].label, class_="label", x=x, y=y + 4)
            parts.append(tag("g", label, class_=f"s{n % STYLES + 1}"))
        return parts


def spread(heights: Sequence[float], gap: float, most: float) -> list[float]:
    """Return heights that are at least a gap apart, in the same ascending order.

    >>> spread([10.0, 12.0, 50.0], 13.0, 200.0)
    [10.0, 23.0, 50.0]
    >>> spread([95.0, 99.0], 13.0, 100.0)
    [87.0, 100.0]
    """
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for n in reversed(range(len(placed))):
        limit = most if n == len(placed) - 1 else placed[n + 1] - gap
        placed[n] = min(placed[n], limit)
    return placed


def _summary(x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Return where every line starts and ends, in words."""
    sentences = []
    for own in lines:
        (x0, y0), (x1, y1) = own.points[0], own.points[-1]
        end = f"{y.say(y1)} at {x.say(x1)}"
        start = f"from {y.say(y0)} at {x.say(x0)} to " if len(own.points) > 1 else ""
        sentences.append(f"{own.name}: {start}{end}.")
    return f"{y.title} over {x.title}. {' '.join(sentences)}"


def _data(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Table:
    """Return the points: a column per line where all have the same x."""
    columns = [[point[0] for point in own.points] for own in lines]
    if all(own == columns[0] for own in columns):
        rows = [
            (x.say(place), *(y.say(own.points[n][1]) for own in lines))
            for n, place in enumerate(columns[0])
        ]
        head = (x.title, *(own.name for own in lines))
        return Table(title, head, rows, words=frozenset())
    rows = [
        (own.name, x.say(place), y.say(value))
        for own in lines
        for place, value in own.points
    ]
    return Table(title, ("", x.title, y.title), rows)
