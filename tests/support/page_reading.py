"""What is on a report's page, read from its HTML, and on a console."""

import io
import re
from collections import defaultdict
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

from rich.console import Console, RenderableType

VOID = {"meta", "br", "hr", "img", "input", "link", "source", "wbr"}
Points = dict[str, list[tuple[float, float]]]


@dataclass
class Figure:
    """One plot: its drawing, the words around it and the cells of its table."""

    title: str = ""
    svg: ET.Element | None = None
    cells: list[list[str]] = field(default_factory=list)

    @property
    def points(self) -> Points:
        """By line, the values that its points stand for."""
        found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for line in self._all("g", "data-name"):
            for dot in line.iter("circle"):
                pair = float(dot.attrib["data-x"]), float(dot.attrib["data-y"])
                found[line.attrib["data-name"]].append(pair)
        return dict(found)

    @property
    def bars(self) -> dict[str, list[float]]:
        """By bar, the values of its parts."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for bar in self._all("rect", "data-name"):
            found[bar.attrib["data-name"]].append(float(bar.attrib["data-value"]))
        return dict(found)

    def _all(self, tag, key):
        return [own for own in self.svg.iter(tag) if key in own.attrib]


def console_text(view: RenderableType, width: int = 100) -> str:
    """What a console of this width shows of a view."""
    text = io.StringIO()
    Console(file=text, width=width).print(view)
    return text.getvalue()


class Page(HTMLParser):
    """A parsed page; raises where tags are not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.figures: dict[str, Figure] = {}
        self._figure: Figure | None = None
        self.feed(html)
        self.close()
        assert self.open == []
        # in the order of the page, so figure n has drawing n
        plots = re.findall(r'(?s)<svg viewBox="[^"]*" class="plot".*?</svg>', html)
        assert len(plots) == len(self.figures)
        for figure, text in zip(self.figures.values(), plots, strict=True):
            figure.svg = ET.fromstring(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "figure":
            self._figure = Figure()
        if tag == "tr" and self._figure is not None:
            self._figure.cells.append([])

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "figure":
            assert self._figure.title not in self.figures
            self.figures[self._figure.title] = self._figure
            self._figure = None

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)
        if self._figure is not None and self.open[-1] == "h3":
            self._figure.title += data
        if self._figure is not None and self.open[-1] in {"td", "th"}:
            self._figure.cells[-1].append(data)
