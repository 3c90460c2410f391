"""The training set as SQL: parse a query, then bind it to the sites' tables.

::

    SELECT <label> AS label, <features>
    FROM a
    JOIN b ON a.k = b.k
    LEFT JOIN (SELECT k, AVG(x) AS mean FROM c GROUP BY k) d ON d.k = a.k
    WHERE ...

Every column is resolved to one table, as DuckDB would; then every piece over one table
is pushed down to it, equalities between two tables become joins, and an expression that
needs values of two tables at once is refused by name. The query itself is never run.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query import parsing
from tp_flower.query.conditions import (
    Condition,
    Settled,
    bind_conditions,
    cast_text_to_uuid,
    settle,
)
from tp_flower.query.cutoffs import CutoffGrid
from tp_flower.query.expressions import (
    parse_expression,
    parse_statements,
    render,
)
from tp_flower.query.fragment import Feature, Fragment, spell
from tp_flower.query.lateral_tables import bind_tables, correlation_of
from tp_flower.query.relations import Relation, Schema, is_null_on_nulls, table_schemas
from tp_flower.query.scope import Local, Scope, expand_stars

Bound = tuple[parsing.SelectItem, Local]  # an item, and its expression over one table


@dataclass(frozen=True)
class Join:
    """An equi-join of two tables: equal values of one key on each side.

    ``left`` comes first in the query; ``left_key`` and ``right_key`` are positions in
    the two fragments' ``keys``, which have the same number of parts.
    """

    left: str
    right: str
    left_key: int
    right_key: int
    text: str = ""


@dataclass(frozen=True)
class BoundQuery:
    """The fragments and joins of a query that training needs.

    Attributes:
        fragments: in FROM order; one per table, or one per SELECT of its UNION ALL,
            next to each other and with the same numbers of features and keys.
        joins: one per pair of tables with predicates, ordered by the right table,
            then the left, in FROM order; together they connect all tables.
        outer: LEFT JOINed tables, which may have no match for a joined row.
        filled: by such a table, the features that SQL has a value of without a match,
            as COALESCE has.
        split_table: the table whose last key decides which rows are held out; ""
            if none does.
        label_sql: the label as the query writes it; "" without one.
        offset_sql: the same of the offset, which is of the label's table.
        sql: the query.
    """

    fragments: tuple[Fragment, ...]
    joins: tuple[Join, ...]
    label_table: str
    outer: frozenset[str] = frozenset()
    split_table: str = ""
    label_sql: str = field(default="", compare=False)
    offset_sql: str = field(default="", compare=False)
    sql: str = field(default="", compare=False)
    filled: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @property
    def tables(self) -> tuple[str, ...]:
        """The aliases of the tables, in FROM order."""
        return tuple(dict.fromkeys(fragment.table for fragment in self.fragments))

    @property
    def names_event(self) -> bool:
        """Whether the label is the time of an event."""
        return any(fragment.event is not None for fragment in self.fragments)

    @property
    def weight_table(self) -> str | None:
        """Alias of the table that holds the weight, None if joined rows have none."""
        return next((f.table for f in self.fragments if f.weight is not None), None)

    def joined_keys(self, table: str) -> int:
        """Return how many of a table's keys joins compare: its first ones."""
        sides = [(join.left, join.left_key) for join in self.joins]
        sides += [(join.right, join.right_key) for join in self.joins]
        return 1 + max((key for name, key in sides if name == table), default=-1)

    def fragments_of(self, table: str) -> tuple[Fragment, ...]:
        """Return the fragments of a table; KeyError if the query has none."""
        fragments = tuple(f for f in self.fragments if f.table == table)
        if not fragments:
            raise KeyError(table)
        return fragments


@dataclass(frozen=True)
class Unlabelled:
    """A binding without the label, if there is one, say to predict rows.

    Joined rows follow ``table``, by default the query's first, instead of the label's;
    the columns of its ``row_key`` are its last keys, which no join uses. It ``keeps``
    some of the query's numbers.
    """

    table: str = ""
    row_key: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Query:
    """A query that was parsed and checked, but not yet bound to tables.

    Two queries are equal if their statements are, however they were written.

    >>> query = Query.from_sql("select x, y label from t where x>0")
    >>> query.to_sql()
    'SELECT x, y AS label FROM t WHERE x > 0'
    >>> query.bind({"t": {"x": "DOUBLE", "y": "DOUBLE"}}).fragments[0].filters
    ('"x" > 0',)
    """

    statement: parsing.Statement
    grid: CutoffGrid | None = None
    seals_cutoffs: bool = False

    @classmethod
    def from_sql(
        cls, sql: str, *, needs_label: bool = True, needs_features: bool = True
    ) -> "Query":
        """Return the query written in ``sql``, in DuckDB's dialect.

        Rows to be predicted have no label, and their query needs none. A QueryError
        names the part that is not supported.
        """
        return cls(
            parsing.parse_statement(
                sql, needs_label=needs_label, needs_features=needs_features
            )
        )

    def on_grid(self, text: str) -> "Query":
        """Return the query with a grid of cutoffs, the setting ``cutoff-grid``.

        LATERAL sub-queries look back from its points where they are at another site.
        """
        return replace(self, grid=CutoffGrid.parse(text) if text else None)

    def sealing_cutoffs(self, *, is_set: bool) -> "Query":
        """Return the query with or without the setting ``sealed-cutoffs``.

        LATERAL sub-queries look back from cutoffs that another site seals for theirs.
        """
        return replace(self, seals_cutoffs=is_set)

    def to_sql(self) -> str:
        """Return the canonical SQL, which parses to an equal query."""
        return self.statement.sql

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tables that sites must host, each once."""
        names: list[str] = []
        for table in self.statement.tables:
            if isinstance(table, parsing.TableRef):
                names.append(table.name)
            else:
                names += [branch.table.name for branch in table.branches]
        return tuple(dict.fromkeys(names))

    @property
    def compared(self) -> set[str]:
        """The columns, in lower case, that the query may join or group by; "*" for all.

        >>> query = "SELECT a.y AS label, b.x FROM a JOIN b ON a.K = b.l AND b.m > 0"
        >>> sorted(Query.from_sql(query).compared)
        ['k', 'l', 'm']
        """
        return parsing.compared_columns(self.statement)

    @property
    def has_stars(self) -> bool:
        """Whether the query selects the columns that its tables happen to have."""
        return any(isinstance(item, parsing.StarItem) for item in self.statement.items)

    @property
    def label(self) -> exp.Expr | None:
        """The label as an expression, or the time of an event; None without one."""
        for item in self.statement.items:
            if parsing.is_label(item):
                return parse_expression(item.sql, "the label").unnest()
        return None

    @property
    def names_event(self) -> bool:
        """Whether the label is the time of an event."""
        items = self.statement.items
        return any(parsing.is_number(item, (parsing.EVENT,)) for item in items)

    @property
    def trained_columns(self) -> list[exp.Column]:
        """The columns of the label, its event and the weight: predictions need none.

        >>> query = Query.from_sql("SELECT a.y > 2 AS label, w AS weight, a.x FROM a")
        >>> [(column.table, column.name) for column in query.trained_columns]
        [('a', 'y'), ('', 'w')]
        """
        names = {*parsing.BESIDE_LABEL, *parsing.SURVIVAL} - {parsing.OFFSET}
        trees = (
            parse_expression(item.sql, "SELECT item")
            for item in self.statement.items
            if parsing.is_label(item) or parsing.is_number(item, names)
        )
        return [column for tree in trees for column in tree.find_all(exp.Column)]

    def with_label(self, column: str, table: str) -> "Query":
        """Return a query that has no label with a column as its label.

        >>> query = Query.from_sql("SELECT x FROM t", needs_label=False)
        >>> query.with_label("y", "t").to_sql()
        'SELECT x, t.y AS label FROM t'
        """
        (tree,) = parse_statements(self.to_sql())
        label = exp.alias_(exp.column(column, table=table), parsing.LABEL)
        labelled = render(cast(exp.Select, tree).select(label))
        return replace(self, statement=parsing.parse_statement(labelled))

    def bind(
        self,
        schemas: Mapping[str, Schema],
        unlabelled: Unlabelled | None = None,
        split: Sequence[str] = (),
        setting: str = "test-split",
    ) -> BoundQuery:
        """Return the fragments and joins over tables with these columns.

        The columns of a ``split``, which a ``setting`` names, are together the last
        key of their table, which no join uses. Without a label, the query's own label
        is read only if the query has stars, which do not include the label's columns. A
        QueryError names an unknown or ambiguous table or column, an expression over two
        tables, a table that is not joined, or rows that no site has.

        >>> query = Query.from_sql("SELECT x FROM t", needs_label=False)
        >>> bound = query.bind({"t": {"x": "DOUBLE"}}, Unlabelled("t"))
        >>> bound.label_table, bound.fragments[0].label
        ('t', None)
        """
        statement = self.statement
        if unlabelled is not None:
            table = unlabelled.table or statement.tables[0].alias
            unlabelled = replace(unlabelled, table=table)
            statement = _drop_label(statement, unlabelled)
        statement, relations = bind_tables(
            statement, schemas, self.grid, are_sealed=self.seals_cutoffs
        )
        names = (
            item.name
            for item in statement.items
            if isinstance(item, parsing.SelectItem)
        )
        scope = Scope(
            columns={alias: relation.columns for alias, relation in relations.items()},
            aliases=tuple(name for name in names if name),
            schemas=table_schemas({alias: r.schema for alias, r in relations.items()}),
        )
        _check_absent(statement, scope)
        conditions, scope = bind_conditions(statement, scope)
        left_joined = [join.alias for join in statement.joins if join.is_left]
        settled = settle(conditions, left_joined, relations)
        _check_joined(statement, settled)
        predicates = [cast_text_to_uuid(p, relations) for p in settled.predicates]
        sides = {side for c in conditions if not c.is_filter for side in c.sides}
        items = expand_stars(statement.items, scope, sides, needs_label=not unlabelled)
        bound = [(item, _bind_item(item, scope)) for item in items]
        features = _bind_features(bound, scope)
        joins, keys = _make_joins(predicates, list(relations))
        joins = _describe_laterals(joins, self.statement)
        marked = [pair for pair in bound if _is_marked(pair[0])]
        if unlabelled is not None:
            keys.setdefault(unlabelled.table, []).extend(
                _row_key(unlabelled, scope, settled)
            )
            marked = [
                pair for pair in marked if parsing.is_number(pair[0], unlabelled.keeps)
            ]
        split_table = _add_split(split, setting, scope, keys)
        values = _marked_values(marked, settled.outer, relations)
        label_table = _label_table(values.get(parsing.LABEL), unlabelled)
        sql = {parsing.mark_of(item): item.sql for item, _ in marked}
        _check_label_table(values, sql, label_table)
        return BoundQuery(
            _make_fragments(relations, features, keys, values, settled),
            joins,
            label_table,
            settled.outer,
            split_table,
            sql.get(parsing.LABEL, ""),
            sql.get(parsing.OFFSET, ""),
            self.to_sql(),
            _filled(features, settled.outer, relations),
        )


def _filled(
    features: Mapping[str, Sequence[Feature]],
    outer: Iterable[str],
    relations: Mapping[str, Relation],
) -> dict[str, tuple[str, ...]]:
    """Return the features of LEFT JOINed tables with a value where all is NULL."""
    return {
        alias: tuple(
            feature.name
            for feature in features.get(alias, ())
            if not is_null_on_nulls(feature.sql, relations[alias].types)
        )
        for alias in outer
    }


def _label_table(label: Local | None, unlabelled: Unlabelled | None) -> str:
    """Return the table of the label, or of the rows that are predicted; "" for none."""
    if label is not None:
        return label.table
    if unlabelled is None:
        return ""
    return unlabelled.table


def _make_fragments(
    relations: Mapping[str, Relation],
    features: Mapping[str, Sequence[Feature]],
    keys: Mapping[str, Sequence[tuple[str, ...]]],
    values: Mapping[str, Local],
    settled: Settled,
) -> tuple[Fragment, ...]:
    """Return a fragment per table, or per SELECT of its UNION ALL.

    ``values`` are those that are no features, by the fragment's fields.
    """
    fragments = []
    for alias, relation in relations.items():
        filters = tuple(each.sql for each in settled.filters if each.table == alias)
        expressions: dict[str, Any] = {
            name: each.sql for name, each in values.items() if each.table == alias
        }
        for branch in relation.branches:
            fragment = Fragment(
                table=alias,
                name=branch.name,
                features=tuple(features.get(alias, ())),
                keys=tuple(keys.get(alias, ())),
                filters=filters,
                **expressions,
            )
            fragments.append(branch.fragment(fragment))
    return tuple(fragments)


def _check_absent(statement: parsing.Statement, scope: Scope) -> None:
    """Refuse columns of a sub-query that may be an outer table's."""
    for alias, name in statement.absent:
        tables = [scope.alias_of(alias, name)] if alias else scope.columns
        if owner := next((a for a in tables if spell(name, scope.columns[a])), None):
            raise QueryError(
                f"column {name!r} of a sub-query could be that of {owner}.*"
            )


def _drop_label(
    statement: parsing.Statement, unlabelled: Unlabelled
) -> parsing.Statement:
    """Return the statement for a prediction, without the label among its items."""
    aliases = [table.alias for table in statement.tables]
    if unlabelled.table not in aliases:
        raise QueryError(
            f"the rows of table {unlabelled.table!r} are to be predicted, but the "
            f"query has {', '.join(aliases)}: name the model of this query with "
            "model-name"
        )
    if any(isinstance(item, parsing.StarItem) for item in statement.items):
        return statement
    return replace(
        statement,
        items=tuple(
            item
            for item in statement.items
            if not _is_marked(item) or parsing.is_number(item, unlabelled.keeps)
        ),
    )


def _row_key(
    unlabelled: Unlabelled, scope: Scope, settled: Settled
) -> list[tuple[str]]:
    """Return the columns of row-key, which must be those of the predicted table."""
    table = unlabelled.table
    if table in settled.outer:
        raise QueryError(
            f"the rows of table {table!r} are to be predicted, but the query "
            f"LEFT JOINs it: join {table} with JOIN"
        )
    keys = []
    for column in unlabelled.row_key:
        element = f"row-key {column}"
        local = scope.local(parse_expression(column, element), element)
        if local.table != table:
            raise QueryError(
                f"{element} is a column of table {local.table!r}, but the rows of "
                f"{table!r} are predicted: name columns of {table}"
            )
        keys.append((local.sql,))
    return keys


def _add_split(
    columns: Sequence[str],
    setting: str,
    scope: Scope,
    keys: dict[str, list[tuple[str, ...]]],
) -> str:
    """Add the columns of a split to the keys of their table; return its name."""
    if not columns:
        return ""
    pieces = []
    for column in columns:
        element = f"{setting} {column}"
        pieces.append(scope.local(parse_expression(column, element), element))
    table, *others = dict.fromkeys(piece.table for piece in pieces)
    if others:
        raise QueryError(
            f"{setting} names columns of the tables {', '.join((table, *others))}: "
            "rows are held out by the columns of one table"
        )
    keys.setdefault(table, []).append(tuple(piece.sql for piece in pieces))
    return table


def _check_joined(statement: parsing.Statement, settled: Settled) -> None:
    """Refuse a table that no chain of predicates connects to the first one."""
    order = [table.alias for table in statement.tables]
    inner = [alias for alias in order if alias not in settled.outer]
    between = {
        (p.left.table, p.right.table) for p in settled.predicates if p.owner is None
    }
    joined = {order[0]}
    for _ in inner:
        joined |= {b for a, b in between if a in joined}
        joined |= {a for a, b in between if b in joined}
    owners = {p.owner for p in settled.predicates}
    for join in statement.joins:
        edges = [edge for edge in between if join.alias in edge]
        if join.on and not edges and join.alias not in owners:
            raise QueryError(
                f"join of {join.alias} has no equality condition: "
                f"ON {' AND '.join(join.on)} compares it with no other table"
            )
        if join.alias in inner and join.alias not in joined:
            raise QueryError(
                f"table {join.alias!r} is not connected to {sorted(joined)}: "
                "add an equality condition between them"
            )


def _make_joins(
    predicates: Sequence[Condition], order: Sequence[str]
) -> tuple[tuple[Join, ...], dict[str, list[tuple[str, ...]]]]:
    """Return one join per pair of tables, and the keys that they use per table."""
    pairs: dict[tuple[str, str], list[Condition]] = {}
    for predicate in predicates:
        pairs.setdefault((predicate.left.table, predicate.right.table), []).append(
            predicate
        )
    joins: list[Join] = []
    keys: dict[str, list[tuple[str, ...]]] = {}
    for left, right in sorted(
        pairs, key=lambda p: (order.index(p[1]), order.index(p[0]))
    ):
        # sorted, so that the order of the conditions does not matter and a composite
        # key to two tables is one key
        parts = sorted(pairs[left, right], key=lambda p: (p.left.sql, p.right.sql))
        text = " AND ".join(p.text for p in pairs[left, right])
        left_key = _index(keys.setdefault(left, []), tuple(p.left.sql for p in parts))
        right_key = _index(
            keys.setdefault(right, []), tuple(p.right.sql for p in parts)
        )
        joins.append(Join(left, right, left_key, right_key, text))
    return tuple(joins), keys


def _describe_laterals(
    joins: Sequence[Join], statement: parsing.Statement
) -> tuple[Join, ...]:
    """Return the joins, those of LATERAL sub-queries in the words of the query."""
    correlations = {t.alias: by for t in statement.tables if (by := correlation_of(t))}
    return tuple(
        replace(join, text=correlations[join.right].describe(join.right))
        if join.right in correlations
        else join
        for join in joins
    )


def _index(keys: list[tuple[str, ...]], key: tuple[str, ...]) -> int:
    """Return the position of ``key`` in ``keys``, adding it if it is new."""
    if key not in keys:
        keys.append(key)
    return keys.index(key)


def _is_marked(item: parsing.Item) -> bool:
    return parsing.is_label(item) or parsing.is_number(item)


def _marked_values(
    marked: Sequence[Bound],
    outer: Collection[str],
    relations: Mapping[str, Relation],
) -> dict[str, Local]:
    """Return label and numbers of rows by name; every joined row must have them."""
    by_name: dict[str, Local] = {}
    for item, local in marked:
        name = parsing.mark_of(item)
        if local.table in outer:
            # without HAVING the answer about no row is a row of an inner join, too
            having = ""
            if relations[local.table].pair_types:
                having = f"give {local.table} HAVING COUNT(*) > 0 and "
            raise QueryError(
                f"the {name} {item.sql} belongs to table {local.table}, which is LEFT "
                f"JOINed: rows without a match have no {name}; {having}join "
                f"{local.table} with JOIN"
            )
        by_name[name] = local
    return by_name


def _check_label_table(
    values: Mapping[str, Local], sql: Mapping[str, str], label_table: str
) -> None:
    """Refuse an offset, or an event beside a time, of another table than the label.

    Nor may the offset be the label itself.
    """
    if parsing.OFFSET in values and values[parsing.OFFSET] == values.get(parsing.LABEL):
        raise QueryError(
            f"the offset {sql[parsing.OFFSET]} is the label itself: the label leaks"
        )
    for name in (parsing.OFFSET, *parsing.SURVIVAL):
        if name not in values or values[name].table == label_table:
            continue
        label = "label"
        if parsing.EVENT in values:
            label = "time"
        instead = ""
        if name == parsing.OFFSET:
            instead = ", or leave 'AS offset' out: then it is a feature"
        raise QueryError(
            f"the {name} {sql[name]} belongs to table {values[name].table}, and the "
            f"{label} to {label_table}: it is a number of each row of the {label}'s "
            f"table. Let the owner of {label_table} add the column to it{instead}"
        )


def _bind_features(bound: Sequence[Bound], scope: Scope) -> dict[str, list[Feature]]:
    """Return the features by table; refuse one that is the label itself."""
    labels = [
        local
        for item, local in bound
        if parsing.mark_of(item) in (parsing.LABEL, parsing.EVENT)
    ]
    chosen = [pair for pair in bound if not _is_marked(pair[0])]
    features: dict[str, list[Feature]] = {}
    for (item, local), name in zip(chosen, _feature_names(chosen, scope), strict=True):
        if local in labels:
            raise QueryError(
                f"feature {name!r} is the label itself ({item.sql}): the label leaks"
            )
        features.setdefault(local.table, []).append(Feature(name, local.sql))
    return features


def _bind_item(item: parsing.SelectItem, scope: Scope) -> Local:
    """Return an item as an expression over the one table that it reads."""
    mark = parsing.mark_of(item)
    element = f"the {mark} {item.sql}" if mark else f"feature {item.sql}"
    tree = parse_expression(item.sql, element).unnest()
    tables = scope.tables(tree, element)
    if not tables:
        raise QueryError(f"{element} names no column: it is the same in every row")
    if len(tables) > 1:
        raise QueryError(
            f"{element} needs the values of {len(tables)} tables "
            f"({', '.join(tables)}): an expression must be over one "
            f"table{_instead_of_several(item)}"
        )
    return scope.local(tree, element)


def _instead_of_several(item: parsing.SelectItem) -> str:
    """Return what to write in place of a feature over several tables."""
    if _is_marked(item):
        return ""
    return "; select its columns by themselves, each is a feature of its table"


def _feature_names(bound: Sequence[Bound], scope: Scope) -> list[str]:
    """Return a name per feature; names that clash get their table's alias."""
    names = [_short_name(item, local, scope) for item, local in bound]
    counts = Counter(name.lower() for name in names)
    names = [
        name if counts[name.lower()] == 1 else f"{local.table}.{name}"
        for name, (_, local) in zip(names, bound, strict=True)
    ]
    for name, count in Counter(name.lower() for name in names).items():
        if count > 1:
            raise QueryError(
                f"{count} features are called {name!r}: give each its own AS name"
            )
    return names


def _short_name(item: parsing.SelectItem, local: Local, scope: Scope) -> str:
    """Return the alias of a feature, else its column's name, else its SQL."""
    name = parsing.item_name(item)
    if name is None:
        tree = parse_expression(item.sql, "feature")
        for column in tree.find_all(exp.Column):
            column.set("table", None)
        return render(tree)
    if item.name is not None:
        return name
    return spell(name, scope.columns[local.table]) or name
