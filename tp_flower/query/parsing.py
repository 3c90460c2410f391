"""From SQL to a statement: its clauses, checked before any schema is known.

Every clause, kind of join or form of table that this module does not know is refused by
name, so that no part of the operator's SQL is ever silently ignored. A sub-query in
FROM is one SELECT over one table, or several joined by UNION ALL: anything that would
need rows of two tables or sites at once, or an order of rows, is refused. Every piece
of the result is text that was checked and rendered, and that parses back to itself.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeGuard

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query import fragment
from tp_flower.query.cutoffs import is_reserved
from tp_flower.query.expressions import (
    DIALECT,
    canonical_text,
    check_expression,
    clauses_of,
    conjuncts,
    parse_expression,
    parse_statements,
    render,
    shorten,
)
from tp_flower.query.fragment import Role
from tp_flower.query.lateral import Correlation, take_correlation
from tp_flower.query.rewriting import rewrite

LABEL = str(Role.LABEL)
WEIGHT = str(Role.WEIGHT)
OFFSET = str(Role.OFFSET)
BESIDE_LABEL = tuple(map(str, fragment.BESIDE_LABEL))
"""What a query may name of each row with AS, besides its label."""
TIME = "time"
EVENT = str(Role.EVENT)
SURVIVAL = tuple(map(str, fragment.SURVIVAL))
"""What it may name besides a label that is the time of an event."""
EVERY_COLUMN = "*"


@dataclass(frozen=True)
class TableRef:
    """A table of the query: its alias, unique in the query, and its name."""

    alias: str
    name: str


@dataclass(frozen=True)
class SelectItem:
    """One item of the SELECT list: the name given with AS, if any, and its SQL.

    The ``mark`` of survival times says what else than a feature it is: their names
    alone do not tell.
    """

    name: str | None
    sql: str
    mark: str = ""


@dataclass(frozen=True)
class StarItem:
    """``*``, or ``t.*``, in the SELECT list; EXCLUDE lists columns as SQL."""

    table: str | None = None
    exclude: tuple[str, ...] = ()


Item = SelectItem | StarItem


@dataclass(frozen=True)
class Branch:
    """One SELECT over one table: a sub-query, or a part of its UNION ALL."""

    table: TableRef
    items: tuple[Item, ...]
    where: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    having: tuple[str, ...] = ()
    qualify: tuple[str, ...] = ()
    is_distinct: bool = False
    is_grouped_by_all: bool = False
    correlation: Correlation | None = None


@dataclass(frozen=True)
class DerivedTable:
    """A sub-query in FROM: its alias, and the SELECTs that UNION ALL joins."""

    alias: str
    branches: tuple[Branch, ...]


Table = TableRef | DerivedTable


@dataclass(frozen=True)
class JoinClause:
    """The join of a table: ON, USING, NATURAL, or a comma with none of them."""

    alias: str
    on: tuple[str, ...] = ()
    using: tuple[str, ...] = ()
    is_left: bool = False
    is_natural: bool = False


@dataclass(frozen=True)
class Statement:
    """A query in parts, each in DuckDB's SQL and checked on its own.

    Attributes:
        items: at most one is the label, one the weight, and one the offset; if the
            label is a time, one is its event, and one may be its entry, or its strata.
        joins: one clause per table after the first, in the same order.
        sql: the whole query in canonical SQL, which parses to the same parts.
        absent: tables ("" is every one) and columns that they must not have, because
            a merged sub-query has another of that name beside a star.
    """

    tables: tuple[Table, ...]
    items: tuple[Item, ...]
    joins: tuple[JoinClause, ...]
    where: tuple[str, ...]
    sql: str = field(compare=False)
    absent: tuple[tuple[str, str], ...] = field(default=(), compare=False)


def item_name(item: SelectItem) -> str | None:
    """Return the name an item has in the result: its alias, or its column's name.

    >>> item_name(SelectItem(None, "f.dest")), item_name(SelectItem(None, "x + 1"))
    ('dest', None)
    """
    return _column_name(item.sql) if item.name is None else item.name


@lru_cache(maxsize=1024)
def _column_name(sql: str) -> str | None:
    """Return the name of the column that an item is, which is asked again and again."""
    tree = parse_expression(sql, "SELECT item", aggregates=True, windows=True)
    tree = tree.unnest()
    return tree.name if isinstance(tree, exp.Column) else None


def compared_columns(statement: Statement) -> set[str]:
    """Return the lower-case columns that joins and groups may compare; "*" for all."""
    branches = [
        branch
        for table in statement.tables
        if isinstance(table, DerivedTable)
        for branch in table.branches
    ]
    items = [item for branch in branches for item in branch.items]
    pieces = [item.sql for item in items if isinstance(item, SelectItem)]
    for branch in branches:
        pieces += [*branch.where, *branch.groups, *branch.having, *branch.qualify]
    for join in statement.joins:
        pieces += [*join.on, *join.using]
    pieces += statement.where
    names = {
        column.name.lower()
        for piece in pieces
        for column in parse_expression(
            piece, "condition", aggregates=True, windows=True
        ).find_all(exp.Column)
    }
    has_any = any(join.is_natural for join in statement.joins)
    has_any |= any(isinstance(item, StarItem) for item in items)
    return names | {EVERY_COLUMN} if has_any else names


def is_label(item: Item) -> TypeGuard[SelectItem]:
    """Return whether an item is the label, by its name or as the time of an event."""
    return isinstance(item, SelectItem) and mark_of(item) == LABEL


def is_number(
    item: Item, names: Collection[str] = (*BESIDE_LABEL, *SURVIVAL)
) -> TypeGuard[SelectItem]:
    """Return whether an item is a number of joined rows: only by ``AS weight``, say.

    A column of that name is a feature: many tables have one.

    >>> is_number(SelectItem("Weight", "p.w")), is_number(SelectItem(None, "p.weight"))
    (True, False)
    """
    return isinstance(item, SelectItem) and mark_of(item) in {*names} - {LABEL}


def mark_of(item: SelectItem) -> str:
    """Return what else than a feature an item is: label, weight, offset; or "".

    >>> mark_of(SelectItem(None, "t.label")), mark_of(SelectItem("OFFSET", "LN(t.d)"))
    ('label', 'offset')
    """
    if item.mark:
        return item.mark
    if (item_name(item) or "").lower() == LABEL:
        return LABEL
    name = (item.name or "").lower()
    return name if name in BESIDE_LABEL else ""


def mark_survival(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return a SELECT list whose times of events are marked, if it names some.

    ``AS time`` and ``AS event`` together stand in place of ``AS label``; beside a label
    they are features. The time is the label then, and the others are numbers.

    >>> time, event = SelectItem("time", "s.days"), SelectItem("event", "s.died")
    >>> [mark_of(item) for item in mark_survival([time, event])]
    ['label', 'event']
    """
    named = {item.name.lower(): item for item in _selected(items) if item.name}
    if any(map(is_label, items)) or not {TIME, EVENT} <= named.keys():
        return tuple(items)
    marks = {TIME: LABEL, **dict(zip(SURVIVAL, SURVIVAL, strict=True))}
    return tuple(
        replace(item, mark=marks.get((item.name or "").lower(), ""))
        if isinstance(item, SelectItem)
        else item
        for item in items
    )


def _selected(items: Iterable[Item]) -> Iterator[SelectItem]:
    return (item for item in items if isinstance(item, SelectItem))


_CLAUSE_NAMES = {
    "with_": "WITH (a common table expression)",
    "group": "GROUP BY",
    "windows": "WINDOW",
    "order": "ORDER BY",
    "sample": "USING SAMPLE",
    "locks": "FOR UPDATE",
}
_AGGREGATE_FIRST = (
    "aggregate one table at a time, JOIN (SELECT k, ... FROM t GROUP BY k) AS a"
)
_ADVICE = {
    "group": _AGGREGATE_FIRST,
    "having": _AGGREGATE_FIRST,
    "distinct": "every row of the result is one example; "
    "JOIN (SELECT DISTINCT ... FROM t) AS a makes one table's rows distinct",
    "order": "the rows of the result have no order; leave it out",
    "limit": "for fewer rows add a condition, such as WHERE o.id % 10 = 0",
    "qualify": "it stands in a sub-query over one table, JOIN (SELECT ... FROM t "
    "QUALIFY ...) AS a",
}
_JOIN_ADVICE = {
    "RIGHT": "write the table whose rows all stay first in FROM, and LEFT JOIN the "
    "others",
    "FULL": "a row without the label trains nothing; LEFT JOIN the others to the "
    "label's table",
    "CROSS": "tables are joined by equal keys; write JOIN ... ON a.k = b.k",
    "SEMI": "write WHERE a.k IN (SELECT k FROM b)",
}
_BRANCH_CLAUSES = {
    *("expressions", "from_", "where", "group", "having", "distinct"),
    "qualify",
}
_NO_ORDER = "rows of a table that several sites hold have no order"
_BRANCH_ADVICE = {
    "joins": "it reads one table; join in the query itself",
    "order": _NO_ORDER,
    "limit": _NO_ORDER,
    "offset": _NO_ORDER,
    "with_": "write the sub-query in its place",
}


def parse_statement(
    sql: str, *, needs_label: bool = True, needs_features: bool = True
) -> Statement:
    """Return the parts of a query: one SELECT from tables joined by INNER and LEFT."""
    select = _parse_select(sql)
    sources = [select.args["from_"].this]
    sources += [join.this for join in select.args.get("joins") or ()]
    tables = list(map(_parse_table, sources))
    _check_aliases(tables)
    items = mark_survival([_parse_item(tree) for tree in select.expressions])
    _check_items(items, needs_label=needs_label, needs_features=needs_features)
    joins = select.args.get("joins") or ()
    return Statement(
        tables=tuple(tables),
        items=items,
        joins=tuple(map(_parse_join, joins, tables[1:])),
        where=_conditions(select.args.get("where"), "WHERE"),
        sql=render(select, copy=False),
        absent=tuple(select.meta.get("absent", ())),
    )


def _parse_select(sql: str) -> exp.Select:
    """Return the one SELECT in ``sql``; QueryError for unsupported clauses."""
    statements = parse_statements(sql)
    if len(statements) != 1:
        raise QueryError(f"expected one SELECT statement, got {len(statements)}")
    select = statements[0]
    if isinstance(select, exp.SetOperation):
        raise QueryError(
            f"{select.key.upper()} is not supported: write one SELECT; the parts of "
            "one table are FROM (SELECT ... UNION ALL SELECT ...) AS t"
        )
    if not isinstance(select, exp.Select):
        raise QueryError(f"expected a SELECT statement, got: {shorten(sql)}")
    if select.args.get("from_") is None:
        raise QueryError("the query has no FROM: name the tables to train on")
    rewrite(select)
    for column in select.find_all(exp.Column):
        if is_reserved(column.name):
            raise QueryError(
                f"column {column.name!r} has a name that only sites give: select the "
                "column that a LATERAL sub-query is compared with from its own table"
            )
    _check_clauses(
        select, {"expressions", "from_", "joins", "where"}, "the query", _ADVICE
    )
    return select


def _check_clauses(
    tree: exp.Expr, allowed: Collection[str], where: str, advice: Mapping[str, str]
) -> None:
    """Refuse every clause of a SELECT or set operation that is not in ``allowed``."""
    for clause in (key for key, value in tree.args.items() if value):
        if clause not in allowed:
            name = _CLAUSE_NAMES.get(clause, clause.strip("_").upper())
            instead = ""
            if clause in advice:
                instead = f": {advice[clause]}"
            raise QueryError(f"{name} is not supported in {where}{instead}")


def _check_aliases(tables: Sequence[Table]) -> None:
    """Refuse two tables with the same name."""
    aliases: set[str] = set()
    for table in tables:
        if table.alias.lower() in aliases:
            raise QueryError(
                f"two tables are called {table.alias!r}: give each its own alias"
            )
        aliases.add(table.alias.lower())


def _check_items(
    items: Sequence[Item], *, needs_label: bool, needs_features: bool
) -> None:
    """Refuse a SELECT list without a required label or feature.

    A star may bring either: then only the columns can tell.
    """
    if not items:
        raise QueryError("the SELECT list is empty: name a label and features")
    labels = [item.sql for item in items if is_label(item)]
    if len(labels) > 1:
        raise QueryError(
            f"the query has {len(labels)} labels, expected one: {', '.join(labels)}"
        )
    numbers = [item for item in items if is_number(item)]
    for name in (*BESIDE_LABEL, *SURVIVAL):
        named = [item.sql for item in numbers if mark_of(item) == name]
        if len(named) > 1:
            several = f"{name}s" if name in BESIDE_LABEL else f"columns AS {name}"
            raise QueryError(
                f"the query has {len(named)} {several}, expected one at most: "
                f"{', '.join(named)}"
            )
    if any(isinstance(item, StarItem) for item in items):
        return
    if needs_label and not labels:
        raise QueryError(
            "the query has no label: write the value to predict as `... AS label`"
        )
    if needs_features and len(items) == len(labels) + len(numbers):
        raise QueryError("the query has no features: SELECT more than the label")


@dataclass(frozen=True)
class _InWords:
    """A piece of SQL as messages quote it; most pieces are in none."""

    tree: exp.Expr
    element: str = ""
    comments: bool = True

    def __str__(self) -> str:
        return self.element + shorten(self.tree.sql(DIALECT, comments=self.comments))


def _parse_table(source: exp.Expr) -> Table:
    """Return a table of FROM."""
    if isinstance(source, exp.Subquery):
        return _parse_derived(source)
    if isinstance(source, exp.Lateral):
        return _parse_lateral(source)
    return _parse_ref(source)


def _parse_lateral(source: exp.Lateral) -> DerivedTable:
    """Return a LATERAL sub-query."""
    sql = _InWords(source)
    if not source.alias or not isinstance(source.this, exp.Subquery):
        raise QueryError(f"write LATERAL (SELECT ...) AS t: {sql}")
    query = source.this.this.copy()
    correlation = take_correlation(query, source.alias)
    branch = _parse_branch(query, f"LATERAL sub-query {source.alias!r}")
    return DerivedTable(source.alias, (replace(branch, correlation=correlation),))


def _parse_ref(source: exp.Expr) -> TableRef:
    """Return a plain table; refuse anything else that FROM may hold."""
    sql = _InWords(source)
    if not isinstance(source, exp.Table) or not isinstance(source.this, exp.Identifier):
        raise QueryError(
            f"only plain tables and sub-queries are supported in FROM: {sql}"
        )
    if source.args.get("db"):
        raise QueryError(f"write the bare name of the table, not {sql}")
    if source.args.get("joins"):
        raise QueryError(f"write one join after the other, not nested: {sql}")
    alias = source.args.get("alias")
    if clauses_of(source) - {"this", "alias"} or (
        alias is not None and alias.args.get("columns")
    ):
        raise QueryError(f"only plain tables are supported in FROM: {sql}")
    return TableRef(alias=source.alias_or_name, name=source.name)


def _parse_derived(source: exp.Subquery) -> DerivedTable:
    """Return a sub-query of FROM, which needs an alias; refuse any other clause."""
    sql = _InWords(source)
    if not source.alias:
        raise QueryError(f"give the sub-query an alias, (...) AS t: {sql}")
    if clauses_of(source) - {"this", "alias"} or source.args["alias"].args.get(
        "columns"
    ):
        raise QueryError(f"only an alias is supported after a sub-query: {sql}")
    element = f"sub-query {source.alias!r}"
    branches = tuple(
        _parse_branch(tree, element) for tree in _selects(source.this, element)
    )
    return DerivedTable(source.alias, branches)


def _selects(tree: exp.Expr, element: str) -> Iterator[exp.Select]:
    """Yield the SELECTs that UNION ALL joins, from left to right."""
    pending = [tree]
    while pending:
        tree = pending.pop()
        if isinstance(tree, exp.Select):
            yield tree
        elif isinstance(tree, exp.SetOperation):
            _check_union(tree, element)
            pending += [tree.expression, tree.this]
        elif isinstance(tree, exp.Subquery) and clauses_of(tree) == {"this"}:
            pending.append(tree.this)
        else:
            raise QueryError(
                f"{element} is not a SELECT over one table: "
                f"{shorten(tree.sql(DIALECT))}"
            )


def _check_union(union: exp.SetOperation, element: str) -> None:
    """Refuse every set operation except UNION ALL by position."""
    if not isinstance(union, exp.Union):
        raise QueryError(f"{union.key.upper()} is not supported in {element}")
    if union.args.get("distinct"):
        raise QueryError(
            f"UNION is not supported in {element}: equal rows of different sites "
            "cannot be found; write UNION ALL"
        )
    if union.args.get("by_name"):
        raise QueryError(
            f"UNION ALL BY NAME is not supported in {element}: write UNION ALL, and "
            "the columns in the same order"
        )
    _check_clauses(union, {"this", "expression"}, element, _BRANCH_ADVICE)


def _parse_branch(select: exp.Select, element: str) -> Branch:
    """Return one SELECT of a sub-query, which reads one table."""
    source = select.args.get("from_")
    if source is None:
        raise QueryError(f"{element} has no FROM: {shorten(select.sql(DIALECT))}")
    _check_clauses(select, _BRANCH_CLAUSES, element, _BRANCH_ADVICE)
    if isinstance(source.this, exp.Subquery):
        raise QueryError(
            f"{element} reads another sub-query: {shorten(source.this.sql(DIALECT))}; "
            "write one SELECT over the table itself; HAVING filters groups"
        )
    if not select.expressions:
        raise QueryError(f"{element} selects nothing: {shorten(select.sql(DIALECT))}")
    distinct = select.args.get("distinct")
    if distinct is not None and distinct.args.get("on"):
        raise QueryError(f"DISTINCT ON is not supported in {element}: {_NO_ORDER}")
    groups, is_all = _parse_groups(select.args.get("group"), element)
    return Branch(
        table=_parse_ref(source.this),
        items=tuple(_parse_item(tree, is_inner=True) for tree in select.expressions),
        where=_conditions(select.args.get("where"), f"{element}: WHERE"),
        groups=groups,
        having=_conditions(
            select.args.get("having"), f"{element}: HAVING", aggregates=True
        ),
        qualify=_conditions(
            select.args.get("qualify"), f"{element}: QUALIFY", windows=True
        ),
        is_distinct=distinct is not None,
        is_grouped_by_all=is_all,
    )


def _parse_groups(
    group: exp.Group | None, element: str
) -> tuple[tuple[str, ...], bool]:
    """Return the expressions of GROUP BY, and whether it is GROUP BY ALL."""
    if group is None:
        return (), False
    if clauses_of(group) == {"all"}:
        return (), True
    unsupported_kinds = (exp.Rollup, exp.Cube, exp.GroupingSets, exp.Tuple)
    unsupported = [
        tree for tree in group.expressions if isinstance(tree, unsupported_kinds)
    ]
    if unsupported or clauses_of(group) != {"expressions"}:
        raise QueryError(
            f"{element}: GROUP BY takes expressions or ALL, not "
            f"{shorten(group.sql(DIALECT))}"
        )
    keys = tuple(_canonical(tree, f"{element}: group") for tree in group.expressions)
    return keys, False


def _parse_item(tree: exp.Expr, *, is_inner: bool = False) -> Item:
    """Return an item of the SELECT list: a star, or an expression and its name.

    One of a sub-query may have aggregates and windows.
    """
    star = tree.this if isinstance(tree, exp.Column) else tree
    if isinstance(star, exp.Star):
        return _parse_star(star, tree)
    name = None
    value = tree
    if isinstance(tree, exp.Alias):
        name = tree.alias
        value = tree.this
    return SelectItem(
        name, _canonical(value, "SELECT item", aggregates=is_inner, windows=is_inner)
    )


def _parse_star(star: exp.Star, tree: exp.Expr) -> StarItem:
    """Return a star; refuse any option but EXCLUDE."""
    sql = _InWords(tree, comments=False)
    if clauses_of(star) - {"except_"}:
        raise QueryError(f"only EXCLUDE (...) is supported after a star: {sql}")
    if tree is not star and tree.args.get("db"):
        raise QueryError(f"write a star as table.*: {sql}")
    excluded = [_canonical(c, "EXCLUDE") for c in star.args.get("except_") or ()]
    table = tree.table if isinstance(tree, exp.Column) else None
    return StarItem(table, tuple(excluded))


def _conditions(
    clause: exp.Expr | None,
    element: str,
    *,
    aggregates: bool = False,
    windows: bool = False,
) -> tuple[str, ...]:
    """Return the conjuncts of a clause, each checked and rendered."""
    if clause is None:
        return ()
    clauses = exp.Where | exp.Having | exp.Qualify
    tree = clause.this if isinstance(clause, clauses) else clause
    return tuple(
        _canonical(
            part, f"{element}: condition", aggregates=aggregates, windows=windows
        )
        for part in conjuncts(tree)
    )


def _canonical(
    tree: exp.Expr, element: str, *, aggregates: bool = False, windows: bool = False
) -> str:
    """Return a checked expression as DuckDB SQL that parses back to itself."""
    words = _InWords(tree, f"{element} ", comments=False)
    check_expression(tree, words, aggregates=aggregates, windows=windows)
    text = render(tree)
    return canonical_text(text, words, aggregates=aggregates, windows=windows)


def _parse_join(join: exp.Join, table: Table) -> JoinClause:
    """Return a join's conditions; refuse all but INNER and LEFT joins with one."""
    alias = join.this.alias_or_name
    if isinstance(table, DerivedTable) and (by := table.branches[0].correlation):
        # aggregates have a row whatever they find, unless HAVING leaves it out
        has_row = not (by.last or table.branches[0].having)
        return _join_lateral(join, alias, by, has_row=has_row)
    is_natural = join.method == "NATURAL"
    method = "" if is_natural else join.method
    words = [word for word in (method, join.side, join.kind) if word]
    kind = " ".join(words).upper()
    if kind not in ("", "INNER", "LEFT", "LEFT OUTER"):
        advice = [_JOIN_ADVICE[word] for word in words if word in _JOIN_ADVICE]
        advice.append("only INNER and LEFT joins are")
        raise QueryError(f"{kind} JOIN of {alias} is not supported: {advice[0]}")
    on = join.args.get("on")
    using = tuple(column.name for column in join.args.get("using") or ())
    # sqlglot gives a comma's join no other arguments, not even empty ones
    is_comma = join.args.keys() == {"this"}
    has_condition = on is not None or bool(using)
    if not (has_condition or is_comma or is_natural):
        raise QueryError(f"join of {alias} has no equality condition: add ON or USING")
    return JoinClause(
        alias=alias,
        on=_conditions(on, f"join of {alias}"),
        using=using,
        is_left=kind.startswith("LEFT"),
        is_natural=is_natural,
    )


def _join_lateral(
    join: exp.Join, alias: str, by: Correlation, *, has_row: bool
) -> JoinClause:
    """Return the join of a LATERAL sub-query with the table that it looks back from.

    ``has_row``: whether it has a row for each pair of keys and cutoff.
    """
    on = join.args.get("on")
    words = {word for word in (join.method, join.side, join.kind) if word}
    if not words <= {"LEFT", "INNER", "CROSS"} or not (on is None or on == exp.true()):
        raise QueryError(f"write LEFT JOIN LATERAL (...) AS {alias} ON TRUE")
    return JoinClause(alias, by.equalities(alias), is_left="LEFT" in words or has_row)
