"""A page of sections of tables, figures and texts: one HTML file without scripts.

The blocks are plain data, and the template turns them into HTML; nothing here reads a
report.
"""

import math
import tomllib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from tp_flower.privacy.epsilons import FEATURES, LABELS, MODELS, SCORES
from tp_flower.reports.console import format_count, format_value, name_table

Cells = tuple[str, ...]
TWO_TEXTS = frozenset({0, 1})

EPSILONS: Final = (MODELS, SCORES, LABELS)  # besides those of features
STYLES: Final = 8  # styles of lines and bars that a reader can tell apart
_FILE: Final = Path(__file__).with_name("page.toml")
_TEXTS: Final = tomllib.loads(_FILE.read_bytes().decode())
LIGHT = _TEXTS["light"]
DARK = _TEXTS["dark"]
_PAGE, _HEAD = "page", "head"  # templates
NOTES: Final[Mapping[str, str]] = _TEXTS["notes"]  # below titles of the page

STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}
@media print {{ :root {{ {LIGHT} }} }}
{_TEXTS["style"]}"""
_STYLE_HASH: Final = b64encode(sha256(STYLE.encode()).digest()).decode()
CONTENT_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'"
)
"""What a browser lets the page do: apply its own style sheet, and load, run and send
nothing."""


@dataclass(frozen=True)
class Table:
    """A table of texts; ``words`` are the columns whose cells are not numbers.

    A folded table, which has no note, is closed until the reader opens it. A table
    without rows is left out.
    """

    title: str
    head: Cells
    rows: Sequence[Cells]
    words: frozenset[int] = frozenset({0})
    note: str = ""
    is_folded: bool = False
    kind: ClassVar[str] = "table"

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Figure:
    """A drawing and its data; a legend names lines or bars of different styles."""

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
    """Lines of code; wrapped lines continue indented."""

    title: str
    lines: Sequence[str]
    kind: ClassVar[str] = "code"


Block = Table | Figure | Prose | Code
Blocks = Iterable[Block | None]  # None, or an empty table: what a report lacks


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
) -> Table:
    """Return the table of some records, a row each."""
    rows = [tuple(column.cell(item) for column in columns) for item in items]
    words = frozenset(n for n, column in enumerate(columns) if column.is_text)
    return Table(
        title, tuple(column.head for column in columns), rows, words, note, is_folded
    )


@dataclass(frozen=True)
class Record:
    """A JSON object whose values are read by type; values of other types are ignored.

    >>> record = Record({"n": -1, "x": float("nan"), "names": ["a", 3], "in": {"b": 2}})
    >>> record.number("n"), record.amount("n"), record.number("x"), record.text("n")
    (-1.0, 0.0, None, '')
    >>> record.texts("names"), record.at("in").numbers(), record.records("names")
    (['a'], {'b': 2.0}, [])
    """

    content: Mapping[str, Any]

    @classmethod
    def of(cls, value: object) -> "Record":
        """Return a JSON object; an empty one for anything else."""
        return cls(value if isinstance(value, Mapping) else {})

    def __bool__(self) -> bool:
        return bool(self.content)

    def get(self, key: str) -> object:
        """Return a value of any type."""
        return self.content.get(key)

    def number(self, key: str) -> float | None:
        """Return a finite number, or None."""
        return _number(self.get(key))

    def amount(self, key: str) -> float:
        """Return a number of at least 0; 0 for anything else."""
        return max(self.number(key) or 0.0, 0.0)

    def count(self, key: str) -> str:
        """Return a count for people; "-" for anything that is not a number."""
        number = self.number(key)
        if number is None:
            return "-"
        return format_count(round(number))

    def text(self, key: str) -> str:
        """Return a text; "" for anything else."""
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def texts(self, key: str) -> list[str]:
        """Return the texts of a list."""
        return [item for item in self.items(key) if isinstance(item, str)]

    def items(self, key: str) -> list[Any]:
        """Return a list; an empty one for anything else."""
        value = self.get(key)
        if not isinstance(value, list | tuple):
            return []
        return list(value)

    def at(self, key: str) -> "Record":
        """Return the object inside."""
        return Record.of(self.get(key))

    def records(self, key: str) -> list["Record"]:
        """Return the objects of a list."""
        return [Record(item) for item in self.items(key) if isinstance(item, Mapping)]

    def numbers(self) -> dict[str, float]:
        """Return the finite numbers, by key."""
        numbers = {str(key): _number(value) for key, value in self.content.items()}
        return {key: number for key, number in numbers.items() if number is not None}


def _number(value: object) -> float | None:
    """Return a finite number of a report, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def text_column(head: str, *keys: str, empty: str = "") -> Column:
    """Return the column of the first text, or list of texts, among some keys."""

    def cell(item: Record) -> str:
        joined_texts = (", ".join(dict.fromkeys(item.texts(key))) for key in keys)
        return next(filter(None, (*map(item.text, keys), *joined_texts)), empty)

    return Column(head, cell, is_text=True)


def count_column(head: str, key: str) -> Column:
    """Return the column of a count."""
    return Column(head, lambda item: item.count(key))


def table_titles(report: Record, aliases: Iterable[str]) -> dict[str, str]:
    """Return the titles of some aliases, in the order of the query's tables.

    >>> report = Record({"tables": [{"table": "f", "name": "flights"}]})
    >>> table_titles(report, ["a", "f"])
    {'f': 'f (flights)', 'a': 'a'}
    """
    titles = {
        item.text("table"): name_table(item.text("table"), item.text("name"))
        for item in report.records("tables")
    }
    present = set(aliases)
    unlisted = {alias: alias for alias in sorted(present - set(titles))}
    return {key: title for key, title in titles.items() if key in present} | unlisted


def count_text(count: float, noun: str) -> str:
    """Return a count with its noun.

    >>> count_text(1, "table"), count_text(1200, "site")
    ('1 table', '1,200 sites')
    """
    return f"{format_count(int(count))} {noun}{'' if count == 1 else 's'}"


def epsilon_table(
    title: str,
    totals: Sequence[Record],
    before: Sequence[Column],
    after: Sequence[Column],
) -> Table:
    """Return a table of epsilons between other columns, with a note on each kind.

    Those of models, scores and labels are left out where no row has one.
    """
    numbered = [
        name for name in EPSILONS if any(has_epsilon(total, name) for total in totals)
    ]
    columns = [
        Column(name, partial(_epsilon_cell, name)) for name in (FEATURES, *numbered)
    ]
    notes = why_no_epsilon(totals)
    if any(has_epsilon(total, FEATURES) for total in totals):
        notes.append(NOTES[FEATURES])
    notes += [NOTES[name] for name in numbered]
    return tabulate(title, totals, (*before, *columns, *after), " ".join(notes))


def why_no_epsilon(totals: Iterable[Record]) -> list[str]:
    """Return a sentence for each reason why features have no epsilon."""
    reasons = [total.text(FEATURES).partition(": ")[2] for total in totals]
    return [
        NOTES["none"].format(reason) for reason in dict.fromkeys(filter(None, reasons))
    ]


def has_epsilon(total: Record, name: str) -> bool:
    """Return whether there is an epsilon, maybe infinite."""
    return name in total.content and not isinstance(total.get(name), str)


def _epsilon_cell(name: str, total: Record) -> str:
    """Return a number, "none" or, where nothing of the kind left, "-"."""
    if not has_epsilon(total, name):
        return total.text(name).partition(":")[0] or "-"
    number = total.number(name)
    if number is None:
        return "no bound"
    return format_value(number)


def mechanism_text(release: Record) -> str:
    """Return the mechanism of a release with its figures.

    >>> content = {"kind": "gaussian", "noise_multiplier": 4.0, "count": 1}
    >>> mechanism_text(Record({"mechanism": content})), mechanism_text(Record({}))
    ('gaussian, noise multiplier 4', 'not covered')
    """
    mechanism = release.at("mechanism")
    if not mechanism:
        return "not covered"
    figures = [
        f"{key.replace('_', ' ')} {value:.4g}"
        for key, value in mechanism.numbers().items()
        if not (key in {"count", "sample_rate"} and value == 1)
    ]
    return ", ".join([mechanism.text("kind"), *figures])


def render_page(
    head: Mapping[str, object], contents: Mapping[str, Blocks], footer: str
) -> str:
    """Return a page of sections by title; every text in it is escaped.

    ``head`` has the values of the template's ``head``. Empty blocks and sections are
    left out.
    """
    filled = {title: [*filter(None, blocks)] for title, blocks in contents.items()}
    return (
        _templates()
        .get_template(_PAGE)
        .render(
            head=head,
            sections={title: blocks for title, blocks in filled.items() if blocks},
            footer=footer,
            policy=CONTENT_POLICY,
            style=STYLE,
            styles=STYLES,
        )
    )


def render_head(head: Mapping[str, object]) -> str:
    """Return the top of a page alone, without its style; every text is escaped."""
    content = _templates().get_template(_HEAD).render(head=head)
    return f"<div>\n{content}</div>"


@cache
def _templates() -> Environment:
    return Environment(
        loader=DictLoader({_PAGE: _TEXTS["template"], _HEAD: _TEXTS["head"]}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
