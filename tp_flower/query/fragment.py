"""The part of a query that one table's sites run, and the site's check of it.

The server is not trusted with a site's database: a fragment is a list of small
expressions, its *pieces*, over the bare, quoted columns of one table, and
:meth:`Fragment.check` runs at the site before any of them reaches DuckDB.

A fragment with a sub-query runs that first::

    JOIN (SELECT customer, AVG(amount) AS mean FROM payments GROUP BY customer) p ON ...

Its pieces are then over the sub-query's columns ``customer`` and ``mean``. Without
grouping, a sub-query does not survive binding: its expressions replace its columns.

A site's policy is about the columns of its table: :func:`reads` traces the pieces
outside a sub-query, which name the sub-query's columns, back to the table's columns.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import QueryError, closest
from tp_flower.query import expressions
from tp_flower.query.cutoffs import CUTOFF, Cutoffs, is_reserved, key_column


class Role(StrEnum):
    """The purpose of a piece."""

    FEATURE = "feature"
    LABEL = "label"
    WEIGHT = "weight"
    FILTER = "filter"
    KEY = "join key"
    GROUP = "group"
    HAVING = "having"
    INNER = "sub-query column"


class Piece(NamedTuple):
    """One expression of a fragment, and its name for messages."""

    role: Role
    element: str
    sql: str

    def parse(self) -> exp.Expr:
        """Return the checked tree; a condition keeps its meaning between two ANDs."""
        is_inner = self.role in (Role.INNER, Role.HAVING)
        tree = expressions.parse_expression(self.sql, self.element, aggregates=is_inner)
        if self.role in (Role.FILTER, Role.HAVING):
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
        return local_sql(tree, columns, self.element)


Change = Callable[[Piece], str]


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """A named expression: an input of a table's model, or a column of a sub-query."""

    name: str
    sql: str


@dataclass(frozen=True)
class SubQuery:
    """A SELECT over one table; its expressions are over that table's columns.

    Attributes:
        columns: output names, with expressions that may contain aggregates.
        groups: the expressions that rows are grouped by, at least one at a site;
            aliases, ordinals, ALL and DISTINCT are resolved. With cutoffs, the keys.
        cutoffs: of a LATERAL sub-query, which has a row for each pair of a key and a
            cutoff; filters and columns may name the cutoff.
        last: with cutoffs, ORDER BY ... DESC LIMIT 1: the row in place of aggregates.
    """

    columns: tuple[Feature, ...]
    filters: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    having: tuple[str, ...] = ()
    cutoffs: Cutoffs | None = None
    last: tuple[str, ...] = ()

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
    def least_rows(self) -> int:
        """How many rows each group has at least, by HAVING COUNT(*) >= n; or 1."""
        counts = [re.fullmatch(r"COUNT\(\*\) >= (\d+)", sql) for sql in self.having]
        return max((int(count[1]) for count in counts if count), default=1)

    def to_sql(self, relation: str, pairs: str = "cutoffs") -> str:
        """Return the sub-query in DuckDB's SQL over a relation, as FROM writes it.

        With the cutoffs of a table, ``pairs`` is the relation of its keys and cutoffs.

        >>> mean = Feature("mean", 'AVG("amount")')
        >>> SubQuery((mean,), groups=('"customer"',)).to_sql("shard")
        'SELECT AVG("amount") AS "mean" FROM shard GROUP BY "customer"'
        """
        items = ", ".join(f"{c.sql} AS {quote_name(c.name)}" for c in self.columns)
        having = ""
        if self.having:
            having = f" HAVING {' AND '.join(self.having)}"
        if self.cutoffs is not None:
            names = ", ".join(f"pairs.{quote_name(name)}" for name in self.pair_names)
            rows = f"{relation}{self._where_pair}"
            if self.last:
                # in a SELECT of its own, where no item has the name of a column
                rows = f"(SELECT * FROM {rows}{self._last})"
            return (
                f"SELECT {names}, answer.* FROM {self._pairs(relation) or pairs} AS "
                f"pairs, LATERAL (SELECT {items} FROM {rows}{having}) AS answer"
            )
        where = ""
        if self.filters:
            where = f" WHERE {' AND '.join(self.filters)}"
        groups = ""
        if self.groups:
            groups = f" GROUP BY {', '.join(self.groups)}"
        return f"SELECT {items} FROM {relation}{where}{groups}{having}"

    @property
    def _where_pair(self) -> str:
        """The condition on the table's rows that belong to a pair."""
        names = map(quote_name, self.pair_names)
        equal = (
            f"{key} = pairs.{name}"
            for key, name in zip(self.groups, names, strict=False)
        )
        return f" WHERE {' AND '.join((*equal, *self.filters))}"

    @property
    def _last(self) -> str:
        """The clause that keeps the last row; of equal times, that of greatest values.

        Which row comes last does then not depend on the order in which they are read.
        """
        if not self.last:
            return ""
        order = dict.fromkeys((*self.last, *(column.sql for column in self.columns)))
        return f" ORDER BY {', '.join(f'{sql} DESC' for sql in order)} LIMIT 1"

    def _pairs(self, relation: str) -> str:
        """Return the pairs of keys and points of a grid for FROM; "" without a grid."""
        if self.cutoffs is None or self.cutoffs.grid is None:
            return ""
        keys = [
            f"{sql} AS {quote_name(key_column(number))}"
            for number, sql in enumerate(self.groups)
        ]
        where = f" WHERE {' AND '.join(self.filters)}" if self.filters else ""
        return (
            f"(SELECT DISTINCT {', '.join((*keys, quote_name(CUTOFF)))} FROM "
            f"{relation}, ({self.cutoffs.grid.points()}) AS points{where})"
        )

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
        if not self.columns or not (self.groups or self.cutoffs):
            raise QueryError(
                f"{where}: a sub-query needs a column and an expression to group by"
            )
        if self.cutoffs is not None:
            self.cutoffs.check()
            if own := next(filter(is_reserved, columns), None):
                raise QueryError(f"{where}: its column {own!r} has a cutoff's name")
            columns = (*columns, CUTOFF)
        elif self.last:
            raise QueryError(f"{where}: a sub-query has no last row without cutoffs")
        _check_names(self.columns, f"{where}: sub-query column")
        checked = self.map(_make_check(columns, where))
        groups = _parse_named(checked.groups, f"{where}: group")
        _parse_named(checked.last, f"{where}: ORDER BY")
        _check_grouped(checked, groups, where)
        return checked


@dataclass(frozen=True)
class Fragment:
    """The part of a query that one table answers alone.

    Attributes:
        table: the alias in the query, by which everything refers to the table.
        keys: join keys, each a tuple of expressions (a composite key has several).
        filters: conditions on rows, each safe between two ANDs.
    """

    table: str
    name: str
    features: tuple[Feature, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    label: str | None = None
    filters: tuple[str, ...] = ()
    subquery: SubQuery | None = None
    weight: str | None = None

    @property
    def all_groups(self) -> "Fragment":
        """The fragment that yields every group of the sub-query and nothing else.

        It includes the groups that HAVING or a later filter removes, because these may
        be parts of groups that span shards.
        """
        if self.subquery is None:
            raise ValueError(f"table {self.table!r} has no GROUP BY")
        bare = SubQuery(
            columns=(Feature("rows", "COUNT(*)"),),
            filters=self.subquery.filters_of_rows,
            groups=self.subquery.groups,
        )
        if not bare.groups:
            raise QueryError(
                f"table {self.table!r} is in several shards, and its sub-query "
                "compares no key: compare one whose rows are all in one shard"
            )
        return Fragment(self.table, self.name, subquery=bare)

    def map(self, change: Change) -> "Fragment":
        """Return the fragment with every piece outside the sub-query changed."""
        label = self.label
        if label is not None:
            label = change(Piece(Role.LABEL, f"the {Role.LABEL}", label))
        weight = self.weight
        if weight is not None:
            weight = change(Piece(Role.WEIGHT, f"the {Role.WEIGHT}", weight))
        return replace(
            self,
            features=_map_features(Role.FEATURE, "feature {!r}", self.features, change),
            label=label,
            weight=weight,
            filters=_map_texts(Role.FILTER, "filter {}", self.filters, change),
            keys=tuple(
                _map_texts(Role.KEY, f"join key {number}", key, change)
                for number, key in enumerate(self.keys)
            ),
        )

    def pieces(self) -> list[Piece]:
        """Return all pieces outside the sub-query."""
        return _list_pieces(self.map)

    def to_json(self) -> dict[str, object]:
        """Return the fragment as plain JSON types, without a None of later fields."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        if self.weight is None:
            del data["weight"]
        if self.subquery is not None and self.subquery.cutoffs is None:
            del data["subquery"]["cutoffs"], data["subquery"]["last"]
        return data

    @classmethod
    def from_json(cls, data: object) -> "Fragment":
        """Return the fragment that :meth:`to_json` wrote, or refuse another form."""
        try:
            fragment = msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise QueryError(f"malformed fragment: {error}") from error
        # msgspec does not require the fields of a dataclass that have defaults
        fragment = replace(
            fragment, subquery=fragment.subquery and replace(fragment.subquery)
        )
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
    return lambda piece: piece._replace(element=f"{where}: {piece.element}").check(
        columns
    )


def _check_names(features: Sequence[Feature], element: str) -> None:
    names = [feature.name for feature in features]
    if reserved := next(filter(is_reserved, names), None):
        raise QueryError(
            f"{element} is called {reserved!r}, the name of a cutoff's key"
        )
    if "" in names or len({name.lower() for name in names}) != len(names):
        raise QueryError(f"{element} names must differ and not be empty, got {names}")


def check_no_cutoffs(fragments: Iterable[Fragment]) -> None:
    """Refuse noise on what a LATERAL sub-query yields.

    A row of its table is in an answer for every later cutoff: how far all of them
    together move with one row has no bound.
    """
    for fragment in fragments:
        if fragment.subquery is not None and fragment.subquery.cutoffs is not None:
            raise QueryError(
                f"table {fragment.table!r}: a row of {fragment.name} is in its answers "
                "for all later cutoffs, so that no epsilon holds: train without noise "
                "on features and scores, or leave it out"
            )


def spell(name: str, columns: Collection[str]) -> str | None:
    """Return the column that ``name`` matches regardless of case.

    >>> spell("ORIGIN", ["Origin", "dest"])
    'Origin'
    """
    if name in columns:
        return name
    return next((c for c in columns if c.lower() == name.lower()), None)


def local_sql(tree: exp.Expr, columns: Collection[str], element: str) -> str:
    """Return ``tree`` over bare, quoted columns, in the table's own spelling."""
    tree = tree.copy()
    for column in list(tree.find_all(exp.Column)):
        spelling = spell(column.name, columns)
        if spelling is None:
            raise QueryError(
                f"{element} is refused: no column {column.name!r}"
                f"{closest(column.name, columns)}; columns: {', '.join(columns)}"
            )
        column.set("table", None)
        column.set("this", exp.Identifier(this=spelling, quoted=True))
    return expressions.render(tree, quote=True)


@dataclass(frozen=True)
class Read:
    """One column of the base table that a piece reads.

    A column of a sub-query is read as ``INNER``, and by each outer piece that uses it.

    Attributes:
        is_plain: whether the piece is the column itself, except for its type and, for a
            text, its case and surrounding spaces: it is no condition on its values.
        is_bare: whether it is plain and keeps the type: it fails on no value.
    """

    role: Role
    element: str
    column: str
    is_plain: bool
    is_bare: bool


def reads(fragment: Fragment) -> Iterator[Read]:
    """Yield every column read by a fragment, which may not be checked yet.

    A name outside a sub-query that is not one of its columns yields nothing:
    :meth:`Fragment.check` refuses it.
    """
    subquery = fragment.subquery
    inner: dict[str, tuple[Read, ...]] = {}
    columns = iter(subquery.columns if subquery else ())
    keys = iter(subquery.pair_names if subquery else ())
    has_cutoffs = subquery is not None and subquery.cutoffs is not None
    for piece in subquery.pieces() if subquery else ():
        # the cutoffs are another table's
        piece_reads = tuple(
            r for r in _reads_of(piece) if not (has_cutoffs and is_reserved(r.column))
        )
        yield from piece_reads
        if piece.role is Role.INNER:
            inner[next(columns).name.lower()] = piece_reads
        elif piece.role is Role.GROUP:
            inner[next(keys, "").lower()] = piece_reads
    for piece in fragment.pieces():
        for read in _reads_of(piece):
            if subquery is None:
                yield read
            for origin in inner.get(read.column.lower(), ()):
                is_plain = read.is_plain and origin.is_plain
                is_bare = read.is_bare and origin.is_bare
                yield Read(read.role, read.element, origin.column, is_plain, is_bare)


def reads_of_pairs(fragment: Fragment) -> Iterator[Read]:
    """Yield what a LATERAL sub-query tells of its keys and cutoff, as values.

    Their values are those of the table around it: a feature, label, weight or filter
    that is made of them is made of that table's columns. Join keys, and the conditions
    on the sub-query's own rows, compare them.
    """
    subquery = fragment.subquery
    if subquery is None or subquery.cutoffs is None:
        return
    inner = {}
    for column in subquery.columns:
        piece = Piece(Role.INNER, f"column {column.name!r}", column.sql)
        inner[column.name.lower()] = tuple(_reads_of(piece))
    for piece in replace(fragment, keys=()).pieces():
        for read in _reads_of(piece):
            for origin in inner.get(read.column.lower(), (read,)):
                if is_reserved(name := origin.column.lower()):
                    yield Read(read.role, read.element, name, False, False)


@lru_cache(maxsize=4096)
def _reads_of(piece: Piece) -> tuple[Read, ...]:
    """Return what a piece reads; shards of a table, and checks, repeat the same."""
    tree = piece.parse()
    is_plain = _is_plain(tree)
    is_bare = is_plain and tree.find(exp.Cast) is None
    names = dict.fromkeys(column.name for column in tree.find_all(exp.Column))
    return tuple(
        Read(piece.role, piece.element, name, is_plain, is_bare) for name in names
    )


def _is_plain(tree: exp.Expr) -> bool:
    """Return whether an expression is a column, except for type, case and spaces."""
    while not isinstance(tree, exp.Column):
        if type(tree) is exp.Cast:
            # a truth value would be a condition on the column
            keeps_column = not tree.to.is_type(exp.DType.BOOLEAN)
        else:
            keeps_column = type(tree) in (exp.Paren, exp.Lower, exp.Upper, exp.Trim)
            keeps_column = keeps_column and {k for k, v in tree.args.items() if v} == {
                "this"
            }
        if not keeps_column:
            return False
        tree = tree.this
    return True
