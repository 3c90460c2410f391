"""Resolve columns to tables, as DuckDB would; expand ``*`` and ``t.*``.

sqlglot's own ``qualify`` does not fit: it turns a column of USING into a COALESCE over
two tables, expands aliases of the SELECT list, folds the case of names, and gives the
same message for an ambiguous column as for an unknown one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError, SchemaError, closest
from tp_flower.query.expressions import parse_expression
from tp_flower.query.fragment import local_sql, spell
from tp_flower.query.parsing import (
    LABEL,
    Item,
    SelectItem,
    StarItem,
    is_label,
    is_number,
    mark_of,
)


@dataclass(frozen=True)
class Local:
    """An expression over one table: the alias, and SQL over its bare columns."""

    table: str
    sql: str


class TableSchema(dict[str, str]):
    """The types of a table's columns, by name.

    A star leaves out the ``unlisted``; ``unread`` says why others, by their names in
    lower case, cannot be read. ``places`` are the nodes and sites of its shards. The
    names are not listed in messages if its owner ``approves_runs``: whoever asks for a
    run reads these.
    """

    unlisted: frozenset[str] = frozenset()
    unread: Mapping[str, str] = MappingProxyType({})
    places: frozenset[tuple[int, str]] = frozenset()
    approves_runs: bool = False


@dataclass(frozen=True)
class Scope:
    """The columns that an expression can name, by alias in FROM order.

    Attributes:
        merged: lower-case USING column -> alias of the table it is taken from.
        aliases: names given in the SELECT list, for hints only.
        schemas: those of the aliases that are tables.
    """

    columns: Mapping[str, Sequence[str]]
    merged: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    schemas: Mapping[str, TableSchema] = field(default_factory=dict)

    def table_of(self, column: exp.Column, element: str) -> str:
        """Return the alias of the table that ``column`` belongs to."""
        if column.table:
            alias = self.alias_of(column.table, element)
            names = self.columns[alias]
            if spell(column.name, names) is None:
                self._check_readable([alias], column.name, element)
                raise QueryError(
                    f"{element}: table {alias!r} has no column {column.name!r}"
                    f"{self._columns_text(alias, column.name)}"
                )
            return alias
        if column.name.lower() in self.merged:
            return self.merged[column.name.lower()]
        owners = [a for a, names in self.columns.items() if spell(column.name, names)]
        if len(owners) > 1:
            raise QueryError(
                f"{element}: column {column.name!r} is ambiguous: "
                f"write {' or '.join(f'{owner}.{column.name}' for owner in owners)}"
            )
        if not owners:
            self._check_readable(self.columns, column.name, element)
            hint = ""
            if column.this.quoted:
                hint = "; a text stands in single quotes"
            raise QueryError(f"{element}: {self._unknown(column.name)}{hint}")
        return owners[0]

    def _check_readable(
        self, aliases: Iterable[str], column: str, element: str
    ) -> None:
        for alias in aliases:
            schema = self.schemas.get(alias)
            if schema is not None and column.lower() in schema.unread:
                raise SchemaError(f"{element}: {schema.unread[column.lower()]}")

    def _columns_text(self, alias: str, column: str) -> str:
        """Return the end of the message that a table has no such column."""
        if alias in self._unlisted_aliases:
            return "; its owner, who approves runs (approved-runs), says which it has"
        names = self.columns[alias]
        listed = ", ".join(names) or "none (policy)"
        return f"{closest(column, names)}; columns: {listed}"

    @property
    def _unlisted_aliases(self) -> set[str]:
        """The tables of which messages do not list the columns."""
        return {alias for alias, s in self.schemas.items() if s.approves_runs}

    def tables(self, tree: exp.Expr, element: str) -> list[str]:
        """Return the aliases of the tables in ``tree``, in order of appearance."""
        columns = tree.find_all(exp.Column, bfs=False)
        return list(dict.fromkeys(self.table_of(column, element) for column in columns))

    def local(self, tree: exp.Expr, element: str) -> Local:
        """Return an expression that is known to be over one table."""
        table = self.tables(tree, element)[0]
        return Local(table, local_sql(tree, self.columns[table], element))

    def alias_of(self, name: str, element: str) -> str:
        """Return the alias that ``name`` spells."""
        alias = spell(name, tuple(self.columns))
        if alias is None:
            raise QueryError(
                f"{element}: no table is called {name!r} "
                f"here{closest(name, tuple(self.columns))}; tables: "
                f"{', '.join(self.columns)}"
            )
        return alias

    def _unknown(self, name: str) -> str:
        """Return the text about a column that no table has."""
        if name.lower() in (alias.lower() for alias in self.aliases):
            return (
                f"{name!r} is a name of the SELECT list, not a column: repeat its "
                "expression"
            )
        listed = self.columns.keys() - self._unlisted_aliases
        columns = (self.columns[alias] for alias in self.columns if alias in listed)
        names = list(dict.fromkeys(chain.from_iterable(columns)))
        return (
            f"no table has a column {name!r}{closest(name, names)}; "
            f"tables: {', '.join(self.columns)}"
        )


Column = tuple[str, str | None]  # the alias of a table, the name of a column


def expand_stars(
    items: Sequence[Item],
    scope: Scope,
    keys: Collection[Local],
    *,
    needs_label: bool = True,
) -> tuple[SelectItem, ...]:
    """Return the SELECT list without stars.

    A star stands for the columns of its tables except those that a join key, the label,
    the weight or another number of rows uses, those that a policy keeps from features,
    and those that it EXCLUDEs. A column called ``label`` from a star is the label, if
    no other item is; one called ``weight`` or ``offset`` is a feature.
    """
    stars = [star_columns(i, scope) if isinstance(i, StarItem) else [] for i in items]
    selected = [item for item in items if is_label(item)]
    starred = _starred_labels(stars, selected)
    labels = selected or starred
    if needs_label and not labels:
        raise QueryError(
            "the query has no label: write the value to predict as `... AS label`"
        )
    hidden = _columns_of([*labels, *filter(is_number, items)], keys, scope)
    hidden |= {
        (alias, name) for alias, s in scope.schemas.items() for name in s.unlisted
    }
    expanded: list[SelectItem] = []
    for item, columns in zip(items, stars, strict=True):
        if isinstance(item, SelectItem):
            expanded.append(item)
            continue
        features = [_item(*column) for column in columns if column not in hidden]
        if not features:
            star = "*" if item.table is None else f"{item.table}.*"
            tables = ", ".join(_tables_of(item, scope))
            raise QueryError(
                f"{star} selects no column: all of {tables} are join keys, label, "
                "weight, offset or EXCLUDEd, or kept from features by a policy"
            )
        expanded += features
    if not selected:
        expanded += labels
    return tuple(expanded)


def _starred_labels(
    stars: Iterable[Iterable[tuple[str, str]]], selected: Sequence[SelectItem]
) -> list[SelectItem]:
    """Return the column called ``label`` of stars; refuse several, or one too many.

    Beside a ``selected`` label it is a feature, but not beside the time of an event.
    """
    named = [each for each in chain.from_iterable(stars) if each[1].lower() == LABEL]
    names = ", ".join(f"{alias}.{name}" for alias, name in named)
    if named and any(item.mark for item in selected):
        raise QueryError(
            f"the query has a label, {names}, and the time of an event: EXCLUDE the "
            "label, or name the time otherwise"
        )
    if len(named) > 1 and not selected:
        raise QueryError(f"the query has {len(named)} labels, expected one: {names}")
    return [_item(*each) for each in named]


def star_columns(
    star: StarItem, scope: Scope, element: str = ""
) -> list[tuple[str, str]]:
    """Return alias and name of the columns of a star's tables that it does not EXCLUDE.

    They are in the order of the tables, and of the columns in each.
    """
    tables = _tables_of(star, scope, element)
    excluded = set[Column]()
    for sql in star.exclude:
        column = parse_expression(sql, "EXCLUDE")
        if not isinstance(column, exp.Column):
            raise QueryError(f"EXCLUDE takes columns, not {sql}")
        named = [a for a in tables if column.table.lower() in ("", a.lower())]
        spellings = {(a, spell(column.name, scope.columns[a])) for a in named}
        if all(name is None for _, name in spellings):
            names = list(chain.from_iterable(scope.columns[a] for a in named))
            raise QueryError(
                f"EXCLUDE ({sql}): the star has no such "
                f"column{closest(column.name, names)}"
            )
        excluded |= spellings
    return [(a, n) for a in tables for n in scope.columns[a] if (a, n) not in excluded]


def _tables_of(star: StarItem, scope: Scope, element: str = "") -> list[str]:
    if star.table is None:
        return list(scope.columns)
    return [scope.alias_of(star.table, element or f"{star.table}.*")]


def _columns_of(
    items: Sequence[SelectItem], keys: Collection[Local], scope: Scope
) -> set[Column]:
    """Return the columns that label, weight, offset and keys use."""
    columns = set[Column]()
    for key in keys:
        tree = parse_expression(key.sql, "join key")
        columns |= {(key.table, column.name) for column in tree.find_all(exp.Column)}
    for item in items:
        element = f"the {mark_of(item) or LABEL} {item.sql}"
        for column in parse_expression(item.sql, element).find_all(exp.Column):
            alias = scope.table_of(column, element)
            columns.add((alias, spell(column.name, scope.columns[alias])))
    return columns


def _item(alias: str, name: str) -> SelectItem:
    return SelectItem(None, f"{quote_name(alias)}.{quote_name(name)}")
