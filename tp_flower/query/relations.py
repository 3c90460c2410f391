"""Bind a table of FROM, which is a hosted table or a sub-query, to the sites' tables.

Names are resolved here: stars, aliases and ordinals in GROUP BY and HAVING, DISTINCT. A
relation has one branch per SELECT of a UNION ALL; every branch becomes its own
fragment. A branch without grouping or windows disappears: its expressions replace its
columns, so that its sites run one flat SELECT. One with windows keeps the columns that
the query uses: others need not be there when the model predicts.

A row of a LEFT JOIN without a match has NULL in every column of the missing side;
DuckDB evaluates expressions there. The expressions have passed the allow-list, types
from the sites are parsed, and the engine is in memory and locked.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import duckdb
from sqlglot import exp

from tp_flower.duckdb_engine import quote_name, safe_message, shared_cursor
from tp_flower.errors import QueryError, closest
from tp_flower.query import windows
from tp_flower.query.cutoffs import CUTOFF, Cutoffs
from tp_flower.query.expressions import has_aggregate, parse_expression, render, shorten
from tp_flower.query.fragment import (
    Feature,
    Fragment,
    Piece,
    Role,
    SubQuery,
    local_sql,
    named_columns,
    spell,
)
from tp_flower.query.parsing import Branch, Item, StarItem, Table, TableRef, item_name
from tp_flower.query.scope import Scope, TableSchema, star_columns


def typed_nulls(types: Mapping[str, str]) -> str:
    """Return a relation of one row, NULL in each of these columns.

    >>> typed_nulls({"x": "INT"})
    '(SELECT CAST(NULL AS INTEGER) AS "x")'
    """
    columns = ", ".join(
        f"CAST(NULL AS {_known_type(column, name)}) AS {quote_name(column)}"
        for column, name in types.items()
    )
    return f"(SELECT {columns or '1'})"


def output_types(select: str) -> dict[str, str]:
    """Return the DuckDB type of each column of a SELECT over typed NULLs."""
    return {str(name): str(kind) for name, kind, *_ in _rows(f"DESCRIBE {select}")}


def is_null_on_nulls(sql: str, types: Mapping[str, str]) -> bool:
    """Return whether an expression is NULL if all its columns are.

    >>> is_null_on_nulls('"x" + 1', {"x": "INT"})
    True
    >>> is_null_on_nulls('COALESCE("x", 1)', {"x": "INT"})
    False
    """
    return bool(_evaluate_on_nulls(f"({sql}) IS NULL", sql, types))


def is_true_on_nulls(sql: str, types: Mapping[str, str]) -> bool:
    """Return whether a condition keeps a row in which all its columns are NULL.

    >>> is_true_on_nulls('"x" > 1', {"x": "INT"})
    False
    >>> is_true_on_nulls('"x" IS NULL', {"x": "INT"})
    True
    """
    return bool(
        _evaluate_on_nulls(f"CASE WHEN {sql} THEN true ELSE false END", sql, types)
    )


def type_on_nulls(sql: str, types: Mapping[str, str]) -> str:
    """Return the DuckDB type of an expression.

    >>> type_on_nulls('"x" + 1', {"x": "INT"})
    'INTEGER'
    """
    (kind,) = output_types(
        f"SELECT {sql} AS value FROM {_nulls_of(sql, types)}"
    ).values()
    return kind


def _evaluate_on_nulls(test: str, sql: str, types: Mapping[str, str]) -> object:
    ((value,),) = _rows(f"SELECT {test} FROM {_nulls_of(sql, types)}")
    return value


def _nulls_of(sql: str, types: Mapping[str, str]) -> str:
    """Return the typed NULLs of the columns of an expression."""
    columns = parse_expression(sql, f"expression {shorten(sql)}").find_all(exp.Column)
    return typed_nulls({column.name: types[column.name] for column in columns})


def _known_type(column: str, name: str) -> str:
    """Return a column's type in DuckDB's spelling; QueryError for an unknown one."""
    try:
        return str(shared_cursor().type(name))
    except duckdb.Error as error:
        raise QueryError(
            f"column {column!r} has a type that DuckDB does not know: {shorten(name)}"
        ) from error


@lru_cache(maxsize=256)
def _rows(query: str) -> list[tuple[object, ...]]:
    """Return the rows of a query without tables; QueryError if types do not fit."""
    try:
        return shared_cursor().execute(query).fetchall()
    except duckdb.Error as error:
        raise QueryError(
            f"the query does not fit the columns' types: {safe_message(error)}"
        ) from error


Schema = Mapping[str, str]


def table_schemas(schemas: Mapping[str, Schema | None]) -> dict[str, TableSchema]:
    """Return the schemas by alias of which more than the types is known."""
    return {alias: s for alias, s in schemas.items() if isinstance(s, TableSchema)}


@dataclass(frozen=True)
class BoundBranch:
    """One SELECT over one hosted table, which may group its rows."""

    name: str
    schema: Schema
    select: SubQuery

    @property
    def used(self) -> Schema:
        """The columns that the SELECT names, and their types."""
        names = named_columns(self.select.pieces())
        return {name: kind for name, kind in self.schema.items() if name in names}

    def check_types(self) -> None:
        """Refuse an output that does not fit its columns' types, and name these."""
        for output in self.select.columns:
            names = named_columns([Piece(Role.INNER, output.name, output.sql)])
            if not names <= set(self.schema):
                continue
            nulls = typed_nulls({name: self.schema[name] for name in sorted(names)})
            try:
                output_types(f"SELECT {output.sql} FROM {nulls}")
            except QueryError as error:
                texts = [n for n in sorted(names) if self.schema[n] == "VARCHAR"]
                remedy = ""
                if texts:
                    remedy = (
                        f". {', '.join(map(repr, texts))} of {self.name!r} is a text: "
                        "CAST it in the query, or let its owner give it a type in the "
                        f"tables file, types = {{ {json.dumps(texts[0])} = "
                        '"DOUBLE" }, of numbers with a comma beside decimal = ","'
                    )
                raise QueryError(
                    f"table {self.name!r}, {shorten(output.sql)}: "
                    f"{str(error).removesuffix('.')}{remedy}"
                ) from error

    def fragment(self, outer: Fragment) -> Fragment:
        """Return the fragment for the table's sites, given the one over the outputs."""
        select = self.select
        if select.last or not (select.groups or select.cutoffs):
            # a star's columns of which none is used are not read
            select = _used_columns(select, outer)
        if select.groups or select.cutoffs or select.is_windowed:
            filters = tuple(dict.fromkeys(outer.filters))
            return replace(outer, name=self.name, filters=filters, subquery=select)
        outputs = {output.name: output.sql for output in self.select.columns}
        placed = outer.map(lambda piece: _inline(piece, outputs))
        filters = tuple(dict.fromkeys((*self.select.filters, *placed.filters)))
        return replace(placed, name=self.name, filters=filters)


def _used_columns(select: SubQuery, outer: Fragment) -> SubQuery:
    """Return a sub-query with the columns that a fragment over it names."""
    names = {name.lower() for name in named_columns(outer.pieces())}
    columns = tuple(column for column in select.columns if column.name.lower() in names)
    return replace(select, columns=columns or select.columns[:1])


@dataclass(frozen=True)
class Relation:
    """The SELECTs behind an alias.

    A plain table has a schema; a LATERAL sub-query the types of its keys and cutoff.
    """

    branches: tuple[BoundBranch, ...]
    schema: Schema | None = None
    pair_types: Schema = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self.branches[0].select.names

    @cached_property
    def types(self) -> Schema:
        """The DuckDB type of each column."""
        if self.schema is not None:
            return self.schema
        pairs = typed_nulls(self.pair_types)
        select = " UNION ALL ".join(
            branch.select.to_sql(typed_nulls(branch.used), pairs)
            for branch in self.branches
        )
        try:
            return output_types(select)
        except QueryError:
            for branch in self.branches:
                branch.check_types()
            raise


def _inline(piece: Piece, outputs: Mapping[str, str]) -> str:
    """Return an expression with the sub-query's outputs replaced by their SQL."""
    holder = exp.Paren(this=piece.parse())
    for column in list(holder.find_all(exp.Column)):
        tree = parse_expression(outputs[column.name], piece.element)
        is_plain = isinstance(tree, exp.Column | exp.Paren | exp.Func)
        if not (is_plain or column.parent is holder):
            tree = exp.Paren(this=tree)
        column.replace(tree)
    # parsed again: only an expression with one form may leave
    return render(
        piece._replace(sql=render(holder.this, quote=True, copy=False)).parse(),
        quote=True,
        copy=False,
    )


_TIMES = ("DATE", "TIME")  # the types of days and moments begin so
Named = tuple[str | None, str]  # an item's name, if it has one, and its expression


def bind_table(
    table: Table,
    schemas: Mapping[str, Schema],
    cutoffs: Cutoffs | None = None,
    pair_types: Schema | None = None,
) -> Relation:
    """Return the relation of a table of FROM, a LATERAL sub-query with its cutoffs."""
    if isinstance(table, TableRef):
        name = _hosted_name(table, schemas)
        outputs = tuple(Feature(c, quote_name(c)) for c in schemas[name])
        return Relation(
            (BoundBranch(name, schemas[name], SubQuery(outputs)),), schemas[name]
        )
    element = f"sub-query {table.alias!r}"
    branches: list[BoundBranch] = []
    for branch in table.branches:
        names = branches[0].select.names if branches else None
        branches.append(_Binder(branch, schemas, element).bind(names, cutoffs))
    return Relation(tuple(branches), pair_types=pair_types or {})


def _hosted_name(table: TableRef, schemas: Mapping[str, Schema]) -> str:
    """Return the hosted table that FROM names; QueryError if no site hosts it."""
    name = spell(table.name, tuple(schemas))
    if name is None:
        raise QueryError(
            f"no site hosts a table {table.name!r}{closest(table.name, tuple(schemas))}"
            f"; hosted tables: {', '.join(schemas) or 'none'}"
        )
    return name


class _Binder:
    """Resolves the names in one SELECT of a sub-query."""

    def __init__(
        self, branch: Branch, schemas: Mapping[str, Schema], element: str
    ) -> None:
        self._branch = branch
        self._element = element
        self._name = _hosted_name(branch.table, schemas)
        self._schema = schemas[self._name]
        plain = [item for item in branch.items if not isinstance(item, StarItem)]
        self._columns = tuple(self._schema)
        columns = {branch.table.alias: self._columns}
        if branch.correlation is not None:
            self._columns = (*self._columns, CUTOFF)
            columns = {branch.table.alias: tuple(self._schema), "": (CUTOFF,)}
        self._scope = Scope(
            columns,
            aliases=tuple(item.name for item in plain if item.name),
            schemas=table_schemas({branch.table.alias: self._schema}),
        )

    def bind(self, names: Sequence[str] | None, cutoffs: Cutoffs | None) -> BoundBranch:
        """Return the branch; ``names`` are the first branch's columns, None for it."""
        branch = self._branch
        items = [pair for item in branch.items for pair in self._item(item)]
        outputs = self._name_outputs(items, names)
        filters = tuple(self._local(text, Role.FILTER) for text in branch.where)
        groups = self._groups(items)
        having = tuple(self._having(text, items, groups) for text in branch.having)
        last = tuple(self._order(items))
        qualify = tuple(self._qualify(text, items) for text in branch.qualify)
        select = SubQuery(
            outputs, filters, groups, having, cutoffs, last, qualify=qualify
        )
        bound = BoundBranch(self._name, self._schema, select)
        if qualify and not select.partitions:
            raise QueryError(
                f"{self._element}: QUALIFY is for conditions on windows; write WHERE"
            )
        if not (groups or cutoffs or select.is_windowed):
            return bound
        bound = replace(bound, select=select.check(tuple(self._schema), self._element))
        if bound.select.is_windowed:
            self._check_windows(bound)
        return bound

    def _check_windows(self, bound: BoundBranch) -> None:
        """Refuse windows that look ahead in time, or that do not fit their columns."""
        trees = [piece.parse() for piece in bound.select.pieces()]
        windows.check_directions(
            trees,
            lambda sql: type_on_nulls(sql, self._schema).startswith(_TIMES),
            self._element,
        )
        output_types(bound.select.to_sql(typed_nulls(bound.used)))

    def _local(self, text: str, role: Role) -> str:
        """Return an expression over the table's bare columns."""
        element = f"{self._element}: {shorten(text)}"
        tree = Piece(role, element, text).parse()
        self._scope.tables(tree, element)
        return local_sql(tree, self._columns, element)

    def _order(self, items: Sequence[Named]) -> Iterator[str]:
        """Yield the expressions of ORDER BY, in which a bare name may be an item's."""
        by = self._branch.correlation
        for text in by.last if by else ():
            element = f"{self._element}: ORDER BY {text}"
            for column in parse_expression(text, element).find_all(exp.Column):
                aliased = None if column.table else self._find_alias(column.name, items)
                spelling = spell(column.name, tuple(self._schema))
                if aliased and spelling and aliased != quote_name(spelling):
                    raise QueryError(
                        f"{element}: {column.name!r} is a column and the name of "
                        f"{shorten(aliased)}: write "
                        f"{self._branch.table.alias}.{column.name} for the column"
                    )
            yield self._local(text, Role.FILTER)

    def _item(self, item: Item) -> list[Named]:
        """Return the outputs of an item of the SELECT list, several of a star."""
        if not isinstance(item, StarItem):
            sql = self._local(item.sql, Role.INNER)
            name = item_name(item)
            if item.name is None and name is not None:
                name = spell(name, tuple(self._schema))
            return [(name, sql)]
        return [
            (name, quote_name(name))
            for alias, name in star_columns(item, self._scope, self._element)
            if alias
        ]

    def _name_outputs(
        self, items: Sequence[Named], names: Sequence[str] | None
    ) -> tuple[Feature, ...]:
        """Return the outputs under the names of the sub-query's first SELECT."""
        if names is not None:
            if len(items) != len(names):
                raise QueryError(
                    f"{self._element}: its SELECTs have {len(names)} and {len(items)} "
                    "columns; UNION ALL takes as many of each"
                )
            return tuple(
                Feature(name, sql) for name, (_, sql) in zip(names, items, strict=True)
            )
        outputs = []
        for name, sql in items:
            if name is None:
                raise QueryError(
                    f"{self._element}: give {shorten(sql)} a name, ... AS name"
                )
            outputs.append(Feature(name, sql))
        lower = [output.name.lower() for output in outputs]
        for output in outputs:
            if lower.count(output.name.lower()) > 1:
                raise QueryError(
                    f"{self._element}: {lower.count(output.name.lower())} columns are "
                    f"called {output.name!r}: give each its own AS name"
                )
        return tuple(outputs)

    def _groups(self, items: Sequence[Named]) -> tuple[str, ...]:
        """Return the expressions of GROUP BY or DISTINCT; empty without either."""
        branch = self._branch
        element = self._element
        if branch.correlation is not None:
            return tuple(
                self._local(key, Role.GROUP) for key, _ in branch.correlation.keys
            )
        trees = [Piece(Role.INNER, element, sql).parse() for _, sql in items]
        aggregates = [tree for tree in trees if has_aggregate(tree)]
        is_grouped = bool(branch.groups or branch.is_grouped_by_all)
        if branch.qualify or any(map(windows.has_window, trees)):
            self._check_ungrouped(is_grouped=is_grouped)
        if branch.is_distinct and (is_grouped or aggregates):
            raise QueryError(f"{element}: write DISTINCT or GROUP BY, not both")
        if (aggregates or branch.having) and not is_grouped:
            cause = "HAVING"
            if aggregates:
                cause = shorten(render(aggregates[0]))
            raise QueryError(
                f"{element}: {cause} without GROUP BY is one row for a whole table: "
                "add GROUP BY and the columns to join on"
            )
        if branch.is_distinct or branch.is_grouped_by_all:
            groups = [
                sql
                for (_, sql), tree in zip(items, trees, strict=True)
                if not has_aggregate(tree) and tree.find(exp.Column)
            ]
            if not groups:
                raise QueryError(f"{element}: there is no column to group by")
            return tuple(dict.fromkeys(groups))
        return tuple(dict.fromkeys(self._group(text, items) for text in branch.groups))

    def _check_ungrouped(self, *, is_grouped: bool) -> None:
        """Refuse GROUP BY and DISTINCT beside windows."""
        if self._branch.is_distinct:
            raise QueryError(
                f"{self._element}: DISTINCT would compare rows after their windows; "
                "write QUALIFY ROW_NUMBER() OVER (PARTITION BY k ORDER BY day) = 1"
            )
        if is_grouped:
            raise QueryError(
                f"{self._element}: it has GROUP BY or windows, not both{windows.OWNER}"
            )

    def _group(self, text: str, items: Sequence[Named]) -> str:
        """Return an expression of GROUP BY, which may be an ordinal or an alias."""
        element = f"{self._element}: GROUP BY {text}"
        tree = parse_expression(text, element).unnest()
        if isinstance(tree, exp.Literal) and not tree.is_string:
            position = int(tree.name) if tree.is_int else 0
            if not 1 <= position <= len(items):
                raise QueryError(f"{element} is not a position from 1 to {len(items)}")
            return items[position - 1][1]
        if isinstance(tree, exp.Column) and not tree.table:
            aliased = self._find_alias(tree.name, items)
            if aliased and spell(tree.name, tuple(self._schema)) is None:
                return aliased
        return self._local(text, Role.GROUP)

    def _having(self, text: str, items: Sequence[Named], groups: Sequence[str]) -> str:
        """Return a condition of HAVING, with aliases replaced by their expressions.

        A name that is both a grouped column and another item's alias is refused,
        because engines interpret it differently.
        """
        element = f"{self._element}: HAVING {text}"
        holder = exp.Paren(this=parse_expression(text, element, aggregates=True))
        for column in list(holder.find_all(exp.Column)):
            aliased = self._find_alias(column.name, items)
            is_inside = column.find_ancestor(exp.AggFunc, exp.Filter) is not None
            if column.table or aliased is None or is_inside:
                continue
            spelling = spell(column.name, tuple(self._schema))
            if spelling is not None and quote_name(spelling) == aliased:
                continue
            if spelling is not None and quote_name(spelling) in groups:
                raise QueryError(
                    f"{element}: {column.name!r} is a column and the name of "
                    f"{shorten(aliased)}: give the expression another AS name"
                )
            column.replace(
                exp.Paren(this=parse_expression(aliased, element, aggregates=True))
            )
        return self._local(render(holder.this), Role.HAVING)

    def _qualify(self, text: str, items: Sequence[Named]) -> str:
        """Return a condition of QUALIFY, with aliases replaced by their expressions.

        A name that is both a column and another item's alias is refused, because
        engines interpret it differently.
        """
        element = f"{self._element}: QUALIFY {text}"
        holder = exp.Paren(this=Piece(Role.QUALIFY, element, text).parse())
        for column in list(holder.find_all(exp.Column)):
            aliased = self._find_alias(column.name, items)
            if column.table or aliased is None:
                continue
            spelling = spell(column.name, tuple(self._schema))
            if spelling is None:
                tree = Piece(Role.INNER, element, aliased).parse()
                column.replace(exp.Paren(this=tree))
            elif quote_name(spelling) != aliased:
                raise QueryError(
                    f"{element}: {column.name!r} is a column and the name of "
                    f"{shorten(aliased)}: give the expression another AS name"
                )
        return self._local(render(holder.this), Role.QUALIFY)

    def _find_alias(self, name: str, items: Sequence[Named]) -> str | None:
        lower = name.lower()
        return next(
            (sql for alias, sql in items if (alias or "").lower() == lower), None
        )
