"""The part of a query that one table's sites run, and the site's check of it.

The server is not trusted with a site's database: a fragment is a list of small
expressions, its *pieces*, over the bare, quoted columns of one table, and
:meth:`Fragment.check` runs at the site before any of them reaches DuckDB.

A fragment with a sub-query runs that first::

    JOIN (SELECT customer, AVG(amount) AS mean FROM payments GROUP BY customer) p ON ...

Its pieces are then over the sub-query's columns ``customer`` and ``mean``. Without
grouping or windows, a sub-query does not survive binding: its expressions replace its
columns. Windows it does, because what is outside applies after them.

A site's policy is about the columns of its table:
:func:`tp_flower.query.reads.reads` traces the pieces outside a sub-query, which name
the sub-query's columns, back to the table's columns.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError, closest
from tp_flower.query import expressions, windows
from tp_flower.query.cutoffs import (
    CUTOFF,
    PAIRS,
    Cutoffs,
    is_reserved,
    key_column,
)


class Role(StrEnum):
    """The purpose of a piece."""

    FEATURE = "feature"
    LABEL = "label"
    WEIGHT = "weight"
    OFFSET = "offset"
    EVENT = "event"
    ENTRY = "entry"
    STRATA = "strata"
    FILTER = "filter"
    KEY = "join key"
    GROUP = "group"
    HAVING = "having"
    QUALIFY = "qualify"
    INNER = "sub-query column"


SURVIVAL: Final = (Role.EVENT, Role.ENTRY, Role.STRATA)
"""The fields of a fragment that belong to its label, where that is the time of an
event."""
BESIDE_LABEL: Final = (Role.WEIGHT, Role.OFFSET)
"""Those that go with any label."""
NUMBERS: Final = (*BESIDE_LABEL, *SURVIVAL)
"""The fields of a fragment that are numbers of its rows; a query names them with AS."""


class Piece(NamedTuple):
    """One expression of a fragment, and its name for messages."""

    role: Role
    element: str
    sql: str

    def parse(self) -> exp.Expr:
        """Return the checked tree; a condition keeps its meaning between two ANDs."""
        tree = expressions.parse_expression(
            self.sql,
            self.element,
            aggregates=self.role in (Role.INNER, Role.HAVING),
            windows=self.role in (Role.INNER, Role.QUALIFY),
        )
        if self.role in (Role.FILTER, Role.HAVING, Role.QUALIFY):
            return expressions.parenthesise(tree)
        return tree

    def check(self, columns: Collection[str]) -> str:
        """Return a piece from the wire, rendered from its checked tree."""
        tree = self.parse()
        qualified = next((c for c in tree.find_all(exp.Column) if c.table), None)
        if qualified is not None:
            raise QueryError(
                f"{self.element} is refused: only columns of the table itself, without "
                f"prefix: {expressions.shorten(expressions.render(qualified))}"
            )
        return local_sql(tree, columns, self.element, copy=False)


Change = Callable[[Piece], str]


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """A named expression: an input of a table's model, or a column of a sub-query."""

    name: str
    sql: str


@dataclass(frozen=True)
class SubQuery:
    """A SELECT over one table; its expressions are over that table's columns.

    At a site its rows are groups, or rows of the table with windows over others.

    Attributes:
        columns: output names, with expressions that may contain aggregates, or windows.
        groups: the expressions that rows are grouped by, none beside windows; aliases,
            ordinals, ALL and DISTINCT are resolved. With cutoffs, the keys.
        cutoffs: of a LATERAL sub-query, which has a row for each pair of a key and a
            cutoff; filters and columns may name the cutoff.
        last: with cutoffs, ORDER BY ... DESC LIMIT 1: the row in place of aggregates.
        qualify: conditions that may contain windows.
    """

    columns: tuple[Feature, ...]
    filters: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    having: tuple[str, ...] = ()
    cutoffs: Cutoffs | None = None
    last: tuple[str, ...] = ()
    qualify: tuple[str, ...] = ()

    @property
    def is_windowed(self) -> bool:
        """Whether its rows are those of the table, with windows."""
        return not (self.groups or self.cutoffs) and bool(self.partitions)

    @property
    def partitions(self) -> tuple[tuple[str, ...], ...]:
        """The expressions of each different PARTITION BY; () of a window without."""
        return _partitions_of(tuple(self.pieces()))

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions on its rows."""
        return (*self.filters, *self.having, *self.qualify)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the output columns."""
        return (*self.pair_names, *(column.name for column in self.columns))

    @property
    def sources(self) -> dict[str, str]:
        """The expressions behind the columns, by name; the cutoff has none."""
        keys = zip(self.pair_names, self.groups, strict=False)
        return {**dict(keys), **{column.name: column.sql for column in self.columns}}

    @property
    def pair_names(self) -> tuple[str, ...]:
        """The names of the columns of the pairs: keys and cutoff."""
        if self.cutoffs is None:
            return ()
        return (*(key_column(number) for number in range(len(self.groups))), CUTOFF)

    @property
    def filters_of_rows(self) -> tuple[str, ...]:
        """The filters that a row meets or not whatever the cutoff is."""
        return tuple(sql for sql in self.filters if quote_name(CUTOFF) not in sql)

    @property
    def has_sealed_cutoffs(self) -> bool:
        """Whether its pairs come sealed from another site."""
        return self.cutoffs is not None and self.cutoffs.sealed

    @property
    def least_rows(self) -> int:
        """How many rows each group has at least, by HAVING COUNT(*) >= n; or 1."""
        counts = [re.fullmatch(r"COUNT\(\*\) >= (\d+)", sql) for sql in self.having]
        return max((int(count[1]) for count in counts if count), default=1)

    def to_sql(self, relation: str, pairs: str = PAIRS) -> str:
        """Return the sub-query in DuckDB's SQL over a relation, as FROM writes it.

        With the cutoffs of a table, ``pairs`` is the relation of its keys and cutoffs.

        >>> mean = Feature("mean", 'AVG("amount")')
        >>> SubQuery((mean,), groups=('"customer"',)).to_sql("shard")
        'SELECT AVG("amount") AS "mean" FROM shard GROUP BY "customer"'
        """
        if self.cutoffs is not None and self.cutoffs.grid is not None:
            points = f"({self.cutoffs.grid.points()}) AS points"
            return self._on_grid(f"{relation}, {points}")
        if self.cutoffs is not None:
            names = ", ".join(f"pairs.{quote_name(name)}" for name in self.pair_names)
            return (
                f"SELECT {names}, answer.* FROM {pairs} AS pairs, "
                f"LATERAL ({self.answer_sql(relation)}) AS answer"
            )
        items = ", ".join(f"{c.sql} AS {quote_name(c.name)}" for c in self.columns)
        groups = f" GROUP BY {', '.join(self.groups)}" if self.groups else ""
        having = f" HAVING {' AND '.join(self.having)}" if self.having else ""
        qualify = f" QUALIFY {' AND '.join(self.qualify)}" if self.qualify else ""
        rows = f"{relation}{where_sql(self.filters)}"
        return f"SELECT {items} FROM {rows}{groups}{having}{qualify}"

    def answer_sql(self, relation: str) -> str:
        """Return the SELECT of the answer for one pair of keys and cutoff."""
        equal = [
            f"{key} = pairs.{quote_name(name)}"
            for key, name in zip(self.groups, self.pair_names, strict=False)
        ]
        answer = replace(self, groups=(), cutoffs=None, last=())
        filters = (*equal, *self.filters)
        if not self.last:
            return replace(answer, filters=filters).to_sql(relation)
        # in a SELECT of its own, where no item has the name of a column
        rows = f"SELECT * FROM {relation}{where_sql(filters)}"
        last = f"({rows} ORDER BY {' DESC, '.join(self.order)} DESC LIMIT 1)"
        return replace(answer, filters=()).to_sql(last)

    @property
    def order(self) -> tuple[str, ...]:
        """What rows are sorted by: the last first, of equal times the greatest values.

        Which row it is then does not depend on the order in which they are read. A
        number is left out: it would be the position of a column.
        """
        inner = (Piece(Role.INNER, f"column {c.name!r}", c.sql) for c in self.columns)
        named = (piece.sql for piece in inner if named_columns([piece]))
        return tuple(dict.fromkeys((*self.last, *named)))

    def _on_grid(self, relation: str) -> str:
        """Return the SQL over a relation of all rows beside all points of the grid.

        A row is at all points at which the conditions take it: the answers are groups.
        """
        groups = (*self.groups, quote_name(CUTOFF))
        columns = (*map(Feature, self.pair_names, groups), *self.columns)
        if not self.last:
            grouped = replace(self, columns=columns, groups=groups, cutoffs=None)
            return grouped.to_sql(relation)
        order = f"{' DESC, '.join(self.order)} DESC"
        turn = f"PARTITION BY {', '.join(groups)} ORDER BY {order}"
        rows = f"SELECT * FROM {relation}{where_sql(self.filters)}"
        last = f"({rows} QUALIFY row_number() OVER ({turn}) = 1)"
        return SubQuery(columns).to_sql(last)

    def map(self, change: Change) -> "SubQuery":
        """Return the sub-query with every piece changed."""
        inner = "of the sub-query"
        return replace(
            self,
            filters=_map_texts(
                Role.FILTER, f"filter {{}} {inner}", self.filters, change
            ),
            groups=_map_texts(Role.GROUP, f"group {{}} {inner}", self.groups, change),
            having=_map_texts(
                Role.HAVING, f"HAVING condition {{}} {inner}", self.having, change
            ),
            last=_map_texts(Role.FILTER, f"ORDER BY {{}} {inner}", self.last, change),
            columns=_map_features(
                Role.INNER, f"column {{!r}} {inner}", self.columns, change
            ),
            qualify=_map_texts(
                Role.QUALIFY, f"QUALIFY condition {{}} {inner}", self.qualify, change
            ),
        )

    def pieces(self) -> list[Piece]:
        """Return all pieces."""
        return _list_pieces(self.map)

    def check(self, columns: Collection[str], where: str) -> "SubQuery":
        """Return the sub-query re-rendered from parsed, allowed expressions.

        A QueryError names the piece that is not an expression over these columns, uses
        a function or aggregate outside the allow-lists, or a column that is not grouped
        by.
        """
        needs = (
            f"{where}: a sub-query needs a column and an expression to group by, or a "
            "window"
        )
        if not self.columns:
            raise QueryError(needs)
        if self.cutoffs is not None:
            self.cutoffs.check()
            if reserved := next(filter(is_reserved, columns), None):
                raise QueryError(
                    f"{where}: its column {reserved!r} has a cutoff's name"
                )
            columns = (*columns, CUTOFF)
        elif self.last:
            raise QueryError(f"{where}: a sub-query has no last row without cutoffs")
        _check_names(self.columns, f"{where}: sub-query column")
        checked = self.map(_make_check(columns, where))
        if not (self.groups or self.cutoffs or checked.is_windowed):
            raise QueryError(needs)
        if checked.is_windowed:
            _check_ungrouped(checked, where)
        else:
            _check_groups(checked, where)
        return checked


def where_sql(filters: Sequence[str]) -> str:
    """Return the WHERE of some conditions, "" without any."""
    return f" WHERE {' AND '.join(filters)}" if filters else ""


def _check_ungrouped(subquery: SubQuery, where: str) -> None:
    """Refuse what needs groups beside windows."""
    aggregated = [
        piece.element
        for piece in subquery.pieces()
        if piece.role is Role.HAVING or expressions.has_aggregate(piece.parse())
    ]
    if aggregated:
        raise QueryError(f"{where}: {aggregated[0]} needs GROUP BY")


def _check_groups(subquery: SubQuery, where: str) -> None:
    """Refuse columns that are not grouped by, and windows over groups."""
    trees = _parse_named(subquery.groups, f"{where}: group")
    _parse_named(subquery.last, f"{where}: ORDER BY")
    if subquery.qualify or subquery.partitions:
        raise QueryError(
            f"{where}: a sub-query has GROUP BY or windows, not both{windows.OWNER}"
        )
    _check_grouped(subquery, trees, where)


@dataclass(frozen=True)
class Fragment:
    """The part of a query that one table answers alone.

    Attributes:
        table: the alias in the query, by which everything refers to the table.
        keys: join keys, each a tuple of expressions (a composite key has several).
        label: what is to be predicted; the time, where it is that of an event.
        filters: conditions on rows, each safe between two ANDs.
        event: whether a row's label is the time of an event, or that of its end.
        entry: from when on a row is observed.
        strata: rows of different numbers have different baselines.
    """

    table: str
    name: str
    features: tuple[Feature, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    label: str | None = None
    filters: tuple[str, ...] = ()
    subquery: SubQuery | None = None
    weight: str | None = None
    offset: str | None = None
    event: str | None = None
    entry: str | None = None
    strata: str | None = None

    @property
    def numbers(self) -> dict[Role, str]:
        """The numbers of its rows that leave besides the label, by their roles."""
        return {
            role: sql for role in NUMBERS if (sql := getattr(self, role)) is not None
        }

    @property
    def conditions(self) -> tuple[str, ...]:
        """The conditions on its rows, those of the sub-query among them."""
        return (*(self.subquery.conditions if self.subquery else ()), *self.filters)

    @property
    def all_groups(self) -> tuple["Fragment", ...]:
        """The fragments that yield every group of the sub-query and nothing else.

        Of windows, these are their partitions; each different PARTITION BY has its own
        fragment. They include the groups that HAVING, QUALIFY or a later filter
        removes, because these may be parts of groups that span shards.
        """
        if self.subquery is None:
            raise ValueError(f"table {self.table!r} has no GROUP BY")
        bare = SubQuery(
            columns=(Feature("rows", "COUNT(*)"),),
            filters=self.subquery.filters_of_rows,
        )
        every = self.subquery.partitions or (self.subquery.groups,)
        if () in every:
            cutoffs = self.subquery.cutoffs
            partial_answers = ""
            if cutoffs is not None and cutoffs.makes_pairs:
                partial_answers = (
                    ", or, if each shard is at a site of its own, set "
                    "sealed-partials = true"
                )
            raise QueryError(
                f"table {self.table!r} is in several shards, and its sub-query "
                "compares no key: compare one whose rows are all in one shard"
                f"{partial_answers}"
            )
        return tuple(
            Fragment(self.table, self.name, subquery=replace(bare, groups=groups))
            for groups in every
        )

    def map(self, change: Change) -> "Fragment":
        """Return the fragment with every piece outside the sub-query changed."""
        label = self.label
        if label is not None:
            label = change(Piece(Role.LABEL, f"the {Role.LABEL}", label))
        numbers: dict[str, Any] = {
            role: change(Piece(role, f"the {role}", sql))
            for role, sql in self.numbers.items()
        }
        return replace(
            self,
            features=_map_features(Role.FEATURE, "feature {!r}", self.features, change),
            label=label,
            filters=_map_texts(Role.FILTER, "filter {}", self.filters, change),
            keys=tuple(
                _map_texts(Role.KEY, f"join key {number}", key, change)
                for number, key in enumerate(self.keys)
            ),
            **numbers,
        )

    def pieces(self) -> list[Piece]:
        """Return all pieces outside the sub-query."""
        return _list_pieces(self.map)

    def to_json(self) -> dict[str, object]:
        """Return the fragment as plain JSON types.

        It is without a None or an empty text of later fields, as that of models that
        were saved before there were any.
        """
        data = msgspec.json.decode(msgspec.json.encode(self), type=dict[str, Any])
        for role in NUMBERS:
            if role not in self.numbers:
                del data[role]
        if self.subquery is not None and self.subquery.cutoffs is None:
            del data["subquery"]["cutoffs"], data["subquery"]["last"]
        elif self.subquery is not None and not self.subquery.has_sealed_cutoffs:
            del data["subquery"]["cutoffs"]["sealed"]
        if self.subquery is not None and not self.subquery.qualify:
            del data["subquery"]["qualify"]
        return data

    @classmethod
    def from_json(cls, data: object) -> "Fragment":
        """Return the fragment that :meth:`to_json` wrote, or refuse another form."""
        try:
            fragment = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise QueryError(f"malformed fragment: {error}") from error
        # msgspec does not require the fields of a dataclass that have defaults
        if (subquery := fragment.subquery) is not None:
            cutoffs = subquery.cutoffs and replace(subquery.cutoffs)
            subquery = replace(subquery, cutoffs=cutoffs)
        fragment = replace(fragment, subquery=subquery)
        if (canonical := fragment.to_json()) != data:
            raise QueryError(
                f"malformed fragment: expected the fields and lengths of {canonical}; "
                f"got {data}"
            )
        return fragment

    def check(self, columns: Collection[str]) -> "Fragment":
        """Return the fragment re-rendered from parsed, allowed expressions.

        Runs at the site, on input from the network, before anything is executed. A
        QueryError names the piece that does not parse, contains anything but an
        expression over these columns, or uses a function outside the allow-list.
        """
        where = f"table {self.table!r}"
        if not all(self.keys):
            raise QueryError(f"{where}: a join key has no expression")
        _check_names(self.features, f"{where}: feature")
        if (subquery := self.subquery) is not None:
            subquery = subquery.check(columns, where)
            columns = subquery.names
        return replace(self.map(_make_check(columns, where)), subquery=subquery)


def _parse_named(pieces: Sequence[str], element: str) -> list[exp.Expr]:
    """Return the trees of expressions that each name a column.

    A number would be read as the position of a column.
    """
    trees = [expressions.parse_expression(sql, element) for sql in pieces]
    for tree in trees:
        if tree.find(exp.Column) is None:
            raise QueryError(f"{element} {tree.sql()} names no column")
    return trees


def _check_grouped(subquery: SubQuery, groups: Sequence[exp.Expr], where: str) -> None:
    """Refuse columns that are neither grouped by nor in an aggregate.

    With cutoffs the sub-query has one group: all of its columns are aggregates, or,
    of the last row, none.
    """
    grouped = [exp.column(CUTOFF, quoted=True)] if subquery.cutoffs else groups
    for sql in (*(column.sql for column in subquery.columns), *subquery.having):
        element = f"{where}: sub-query expression {expressions.shorten(sql)}"
        tree = expressions.parse_expression(sql, element, aggregates=True)
        has_aggregate = expressions.has_aggregate(tree)
        if subquery.cutoffs is not None and has_aggregate == bool(subquery.last):
            raise QueryError(
                f"{element} is refused: a LATERAL sub-query aggregates rows, or "
                "takes the last one, ORDER BY ... DESC LIMIT 1"
            )
        if subquery.last:
            continue
        ungrouped = expressions.ungrouped_column(tree, grouped)
        if ungrouped is not None:
            raise QueryError(
                f"{element} is refused: column {ungrouped.name!r} is neither in "
                "GROUP BY nor in an aggregate"
            )


def _map_texts(
    role: Role, element: str, pieces: Sequence[str], change: Change
) -> tuple[str, ...]:
    return tuple(
        change(Piece(role, element.format(number), sql))
        for number, sql in enumerate(pieces)
    )


def _map_features(
    role: Role, element: str, features: Sequence[Feature], change: Change
) -> tuple[Feature, ...]:
    return tuple(
        Feature(f.name, change(Piece(role, element.format(f.name), f.sql)))
        for f in features
    )


def _list_pieces(mapping: Callable[[Change], object]) -> list[Piece]:
    """Return the expressions that a mapping visits, unchanged."""
    result: list[Piece] = []

    def unchanged(piece: Piece) -> str:
        result.append(piece)
        return piece.sql

    mapping(unchanged)
    return result


def _make_check(columns: Collection[str], where: str) -> Change:
    names = tuple(columns)
    return lambda piece: _checked(
        piece._replace(element=f"{where}: {piece.element}"), names
    )


@lru_cache(maxsize=4096)
def _checked(piece: Piece, columns: tuple[str, ...]) -> str:
    """Return a piece from the wire, rendered; a table's shards repeat the same ones."""
    return piece.check(columns)


def _check_names(features: Sequence[Feature], element: str) -> None:
    names = [feature.name for feature in features]
    if reserved := next(filter(is_reserved, names), None):
        raise QueryError(
            f"{element} is called {reserved!r}, the name of a cutoff's key"
        )
    if "" in names or len({name.lower() for name in names}) != len(names):
        raise QueryError(f"{element} names must differ and not be empty, got {names}")


def named_columns(pieces: Iterable[Piece]) -> set[str]:
    """Return the names of the columns that some pieces read."""
    return {c.name for p in pieces for c in p.parse().find_all(exp.Column)}


def spell(name: str, columns: Collection[str]) -> str | None:
    """Return the column that ``name`` matches regardless of case.

    >>> spell("ORIGIN", ["Origin", "dest"])
    'Origin'
    """
    if name in columns:
        return name
    return next((c for c in columns if c.lower() == name.lower()), None)


def local_sql(
    tree: exp.Expr, columns: Collection[str], element: str, *, copy: bool = True
) -> str:
    """Return ``tree`` over bare, quoted columns, in the table's own spelling.

    Without a ``copy`` of it, it is not to be used again.
    """
    tree = tree.copy() if copy else tree
    for column in list(tree.find_all(exp.Column)):
        spelling = spell(column.name, columns)
        if spelling is None:
            raise QueryError(
                f"{element} is refused: no column {column.name!r}"
                f"{closest(column.name, columns)}; columns: {', '.join(columns)}"
            )
        column.set("table", None)
        column.set("this", exp.Identifier(this=spelling, quoted=True))
    return expressions.render(tree, quote=True, copy=False)


@lru_cache(maxsize=1024)
def _partitions_of(pieces: tuple[Piece, ...]) -> tuple[tuple[str, ...], ...]:
    """Return what windows in a sub-query's pieces partition by."""
    return windows.partitions_of(
        piece.parse() for piece in pieces if piece.role in (Role.INNER, Role.QUALIFY)
    )
