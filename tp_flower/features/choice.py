"""The encoder of each feature of a run: the settings, read and checked.

The run config says it in one string, ``flights.month=cyclic(12); planes.seats=none``,
and in keys ``encode.<table>.<column>``. A table is named by its alias in the query, a
column by its name among the query's features; names with ``. = ; "`` stand in double
quotes, as in SQL.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from tp_flower.errors import SchemaError, SettingsError
from tp_flower.features.spec import DEFAULTS, MOST_COLUMNS, TREE_DEFAULTS, EncoderSpec
from tp_flower.methods.method import METHODS

_Text = Annotated[str, msgspec.Meta(min_length=1)]
Entry = tuple[str, str, str]  # table, column and the text of a spec
KEY_PREFIX: Final = "encode."
_PIECES: Final = re.compile(r'(?:[^";]|"[^"]*")+')
_QUOTED: Final = r'"(?:[^"]|"")+"'
_PLAIN: Final = r'(?:[^"=;]|"[^"]*")*'
_ENTRY: Final = re.compile(
    rf'\s*(?P<table>{_QUOTED}|[^".=;]+)\.'
    rf'(?P<column>{_QUOTED}|\s*[^"=;\s][^"=;]*)\s*=(?P<spec>{_PLAIN}(?:={_PLAIN})?)'
)
_EXAMPLE: Final = '"flights.month=cyclic(12); planes.model=one-hot(20)"'


def parse_entries(text: str) -> tuple[Entry, ...]:
    """Read the setting ``encoders``; "" has no entries.

    >>> parse_entries('f.month = cyclic(12); p."a=b"=none')
    (('f', 'month', 'cyclic(12)'), ('p', 'a=b', 'none'))
    """
    if text.count('"') % 2:
        raise ValueError(f"{text!r} has an unmatched double quote")
    entries = []
    for piece in filter(str.strip, _PIECES.findall(text)):
        entry = _ENTRY.fullmatch(piece)
        if entry is None or not entry["table"].strip():
            raise ValueError(
                f"{piece.strip()!r} is not <table>.<column>=<encoder>, as in {_EXAMPLE}"
            )
        entries.append(
            (_unquote(entry["table"]), _unquote(entry["column"]), entry["spec"].strip())
        )
    return tuple(entries)


def render_entries(entries: Sequence[Entry]) -> str:
    """Return the text that ``parse_entries`` reads back."""
    return "; ".join(
        f"{_quote(table)}.{_quote(column)}={spec}" for table, column, spec in entries
    )


def entry_of_key(key: str, value: object) -> Entry:
    """Return the entry that a run config key ``encode.<table>.<column>`` makes."""
    table, _, column = key.removeprefix(KEY_PREFIX).partition(".")
    if not (table.strip() and column.strip()):
        raise ValueError(f"{key}: the key must be {KEY_PREFIX}<table>.<column>")
    if not isinstance(value, str):
        raise ValueError(f"{key}: {value!r} is not a string such as 'cyclic(12)'")  # noqa: TRY004
    return table.strip(), column.strip(), value.strip()


def read_entries(value: object) -> tuple[Entry, ...]:
    """Return the entries of a text, or of a tuple of texts and entries, each once."""
    entries: list[Entry] = []
    for item in value if isinstance(value, tuple) else (value,):
        entries += parse_entries(item) if isinstance(item, str) else (item,)
    try:
        msgspec.convert(entries, list[tuple[_Text, _Text, _Text]])
    except msgspec.ValidationError:
        raise ValueError(
            f"{value!r} is not a list of (table, column, encoder)"
        ) from None
    distinct: dict[tuple[str, str], tuple[EncoderSpec, Entry]] = {}
    for table, column, text in entries:
        feature = (table.lower(), column.lower())
        entry = (table, column, text)
        try:
            spec = EncoderSpec.parse(text)
        except ValueError as error:
            raise ValueError(f"{table}.{column}: {error}") from None
        if distinct.setdefault(feature, (spec, entry))[0] != spec:
            raise ValueError(f"{table}.{column} has two encoders: keep one")
    return tuple(entry for _, entry in distinct.values())


class TableChoice(msgspec.Struct, frozen=True):
    """The encoder of each feature of a table, chosen by the settings.

    The table is its alias in the query. The specs are given as texts, by feature in the
    query's order; None is the default, which is another ``for_trees``, and for numbers
    if rows are ``weighted``: how many joined rows have a number is not told by weights.
    ``max_categories`` applies to categories without a number of their own.
    """

    table: str
    specs: Mapping[str, str | None]
    max_categories: Annotated[int, msgspec.Meta(ge=2, le=MOST_COLUMNS)] = 256
    for_trees: bool = False
    weighted: bool = False

    def __post_init__(self) -> None:
        for text in self.specs.values():
            if text is not None:
                EncoderSpec.parse(text)

    def spec_for(self, feature: str, kind: str) -> EncoderSpec:
        """Return the full spec of a feature; SchemaError where none fits."""
        where = f"encoder of {self.table}.{feature}"
        if feature not in self.specs:
            raise SchemaError(f"{where}: there is no such feature")
        spec = EncoderSpec.parse(self.specs[feature] or self._defaults[kind])
        if spec.is_for_trees and not self.for_trees:
            growing = next(name for name, m in METHODS.items() if m.takes_codes)
            raise SchemaError(
                f"{where}: {spec} is for trees (strategy {growing!r}) alone"
            )
        try:
            return spec.for_kind(kind, self.max_categories)
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from None

    @property
    def _defaults(self) -> Mapping[str, str]:
        if self.for_trees:
            return TREE_DEFAULTS
        if self.weighted:
            return {**DEFAULTS, "number": "standard"}
        return DEFAULTS

    def is_declared(self, feature: str, kind: str) -> bool:
        """Return whether an encoder needs no statistics; kind "" is an unknown kind."""
        text = self.specs.get(feature) or self._defaults.get(kind)
        if feature not in self.specs or text is None:
            return False
        return not EncoderSpec.parse(text).needs_of(kind)


def choose_encoders(
    entries: Sequence[Entry],
    features: Mapping[str, Sequence[str]],
    max_categories: int = 256,
    *,
    for_trees: bool = False,
    weighted: bool = False,
) -> dict[str, TableChoice]:
    """Return the choice for the features of each table, by the table's alias."""
    chosen: dict[tuple[str, str], str] = {}
    for table, column, spec in entries:
        alias = _find(table, features, f"encoders names table {table!r}; the query has")
        where = f"encoders names column {column!r} of table {alias!r}, whose features"
        name = _find(column, features[alias], f"{where} are")
        chosen[alias, name] = str(EncoderSpec.parse(spec))
    return {
        table: TableChoice(
            table,
            {name: chosen.get((table, name)) for name in names},
            max_categories,
            for_trees,
            weighted,
        )
        for table, names in features.items()
    }


def _find(name: str, names: Mapping[str, object] | Sequence[str], message: str) -> str:
    # as in DuckDB, identifiers are compared without case
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    raise SettingsError(f"{message} {', '.join(names) or 'none'}")


def _unquote(name: str) -> str:
    name = name.strip()
    if name.startswith('"'):
        return name[1:-1].replace('""', '"')
    return name


def _quote(name: str) -> str:
    if re.fullmatch(r'[^".=;\s]+', name):
        return name
    return '"' + name.replace('"', '""') + '"'
