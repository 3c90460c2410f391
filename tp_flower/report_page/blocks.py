"""What a page is made of: sections of tables, figures and texts, in plain data.

The template turns them into HTML; nothing here knows a report.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: what it lists.
        head: titles of the columns.
        rows: as long as ``head``, each.
        words: columns whose cells are words, not numbers, by position.
        note: said below it.
        is_folded: whether it is closed until the reader opens it.
    """

    title: str
    head: Cells
    rows: Sequence[Cells]
    words: frozenset[int] = frozenset({0})
    note: str = ""
    is_folded: bool = False
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Figure:
    """A drawing.

    Attributes:
        title: what is shown, with the unit.
        svg: the drawing.
        summary: the same in words, for those who do not see it.
        table: its data.
        legend: names of the lines or parts, in the order of their styles; none where
            there is only one.
        are_lines: whether these are lines, for the legend.
        note: said below the title.
    """

    title: str
    svg: Markup
    summary: str
    table: Table
    legend: Cells = ()
    are_lines: bool = True
    note: str = ""
    kind: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    text: str
    kind: ClassVar[str] = "prose"


@dataclass(frozen=True)
class Code:
    """Lines of code; each is wrapped with its continuation indented."""

    title: str
    lines: Sequence[str]
    kind: ClassVar[str] = "code"


Block = Table | Figure | Prose | Code


@dataclass(frozen=True)
class Section:
    """A part of the page; one without blocks is left out."""

    key: str
    title: str
    blocks: Sequence[Block]
