"""What one table's sites are told to run, and the check a site puts it through.

The server is not trusted with a site's database: a fragment is a list of small
expressions over the columns of one table, and :meth:`Fragment.check` runs at the
site before any of them reaches DuckDB.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.expressions import as_filter, closest, parse_expression, render, shorten

_FIELDS = ("table", "name", "features", "keys", "label", "filters")


@dataclass(frozen=True)
class Feature:
    """One input of a table's model: its name and its expression over the table."""

    name: str
    sql: str


@dataclass(frozen=True)
class Fragment:
    """The part of a query that one table answers alone.

    Expressions are over the bare, quoted columns of the table, without alias.

    Attributes:
        table: The alias in the query, by which everything refers to the table.
        name: The table's name at the sites.
        features: The features in the order of the SELECT list.
        keys: Join keys, each a tuple of expressions (a composite key has several).
        label: The label's expression, at the label table only.
        filters: Conditions, each safe between two ANDs, that rows must meet.
    """

    table: str
    name: str
    features: tuple[Feature, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    label: str | None = None
    filters: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fragment as plain JSON types."""
        return {
            "table": self.table,
            "name": self.name,
            "features": [[feature.name, feature.sql] for feature in self.features],
            "keys": [list(key) for key in self.keys],
            "label": self.label,
            "filters": list(self.filters),
        }

    @classmethod
    def from_json(cls, data: object) -> "Fragment":
        """Return the fragment that :meth:`to_json` wrote.

        Raises:
            QueryError: A field is missing, unknown, or of another form.
        """
        if not isinstance(data, Mapping) or set(data) != set(_FIELDS):
            got = ", ".join(map(str, data)) if isinstance(data, Mapping) else data
            raise QueryError(
                f"a fragment has the fields {', '.join(_FIELDS)}; got {got}"
            )
        label = data["label"]
        return cls(
            table=_text(data["table"], "table"),
            name=_text(data["name"], "name"),
            features=tuple(_feature(pair) for pair in _list(data, "features")),
            keys=tuple(_key(key) for key in _list(data, "keys")),
            label=None if label is None else _text(label, "label"),
            filters=tuple(_text(text, "filters") for text in _list(data, "filters")),
        )

    def check(self, columns: Collection[str]) -> "Fragment":
        """Return the fragment re-rendered from parsed, allowed expressions.

        Runs at the site, on what came over the wire, before anything is executed.

        Args:
            columns: The columns of the site's table.

        Raises:
            QueryError: A piece does not parse, holds anything but an expression
                over these columns, or uses a function outside the allow-list;
                the message names the piece.
        """
        _check_names(self)
        where = f"table {self.table!r}"
        features = tuple(
            Feature(f.name, _checked(f.sql, f"{where}: feature {f.name!r}", columns))
            for f in self.features
        )
        keys = tuple(
            tuple(_checked(sql, f"{where}: key {index}", columns) for sql in key)
            for index, key in enumerate(self.keys)
        )
        label = self.label
        if label is not None:
            label = _checked(label, f"{where}: label", columns)
        filters = tuple(
            _checked(sql, f"{where}: filter {index}", columns, condition=True)
            for index, sql in enumerate(self.filters)
        )
        return Fragment(self.table, self.name, features, keys, label, filters)


def spell(name: str, columns: Collection[str]) -> str | None:
    """Return the column that DuckDB means by ``name``, whatever its case.

    >>> spell("ORIGIN", ["Origin", "dest"])
    'Origin'
    """
    if name in columns:
        return name
    return next((c for c in columns if c.lower() == name.lower()), None)


def local_sql(tree: exp.Expr, columns: Collection[str], what: str) -> str:
    """Return ``tree`` over bare, quoted columns, in the table's own spelling.

    Raises:
        QueryError: A column is not one of ``columns``.
    """
    tree = tree.copy()
    for column in list(tree.find_all(exp.Column)):
        spelled = spell(column.name, columns)
        if spelled is None:
            raise QueryError(
                f"{what} is refused: no column {column.name!r}"
                f"{closest(column.name, columns)}; columns: {', '.join(columns)}"
            )
        column.set("table", None)
        column.set("this", exp.Identifier(this=spelled, quoted=True))
    return render(tree, quote=True)


def _checked(
    sql: str, what: str, columns: Collection[str], *, condition: bool = False
) -> str:
    """Return one piece from the wire, rendered from its checked tree."""
    tree = parse_expression(sql, what)
    qualified = next((c for c in tree.find_all(exp.Column) if c.table), None)
    if qualified is not None:
        raise QueryError(
            f"{what} is refused: only columns of the table itself, without prefix: "
            f"{shorten(render(qualified))}"
        )
    return local_sql(as_filter(tree) if condition else tree, columns, what)


def _check_names(fragment: Fragment) -> None:
    """Refuse feature names that are empty or equal, and keys without parts."""
    names = [feature.name.lower() for feature in fragment.features]
    if "" in names or len(set(names)) != len(names):
        raise QueryError(
            f"table {fragment.table!r}: feature names must differ and not be empty, "
            f"got {[feature.name for feature in fragment.features]}"
        )
    if not all(fragment.keys):
        raise QueryError(f"table {fragment.table!r}: a join key has no expression")


def _text(value: object, field: str) -> str:
    """Return ``value`` if it is a text."""
    if not isinstance(value, str):
        raise QueryError(f"fragment: {field!r} must hold texts, got {value!r}")
    return value


def _list(data: Mapping[str, Any], field: str) -> list[Any]:
    """Return the list in a field."""
    value = data[field]
    if not isinstance(value, list):
        raise QueryError(f"fragment: {field!r} must be a list, got {value!r}")
    return value


def _feature(pair: object) -> Feature:
    """Return the feature written as ``[name, sql]``."""
    if not isinstance(pair, list) or len(pair) != 2:
        raise QueryError(f"fragment: a feature must be [name, sql], got {pair!r}")
    return Feature(_text(pair[0], "features"), _text(pair[1], "features"))


def _key(parts: object) -> tuple[str, ...]:
    """Return the key written as a list of expressions."""
    if not isinstance(parts, list):
        raise QueryError(f"fragment: a key must be a list, got {parts!r}")
    return tuple(_text(part, "keys") for part in parts)
