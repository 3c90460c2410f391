"""The parts of a page: sections of tables, figures and texts, in plain data.

The template turns them into HTML; nothing here reads a report.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

Cells = tuple[str, ...]
TWO_TEXTS = frozenset({0, 1})


@dataclass(frozen=True)
class Table:
    """A table of texts; ``words`` are the columns whose cells are no numbers.

    A folded one, which has no note, is closed until the reader opens it.
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
    """A drawing and its data; the legend names lines or bars of several styles."""

    title: str
    svg: Markup
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
Blocks = Iterable[Block | None]
"""Blocks, with None for what a report lacks."""


@dataclass(frozen=True)
class Column:
    """One column of a table of records, with the text of a record's cell."""

    head: str
    cell: Callable[[Any], str]
    is_text: bool = False


def tabulate(
    title: str,
    items: Iterable[Any],
    columns: Sequence[Column],
    note: str = "",
    is_folded: bool = False,
) -> Table | None:
    """Return the table of some records, a row each; None if there are none."""
    rows = [tuple(column.cell(item) for column in columns) for item in items]
    head = tuple(column.head for column in columns)
    words = frozenset(n for n, column in enumerate(columns) if column.is_text)
    return Table(title, head, rows, words, note, is_folded) if rows else None
