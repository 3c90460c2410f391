"""Which part of a fragment a database computes, and what is left for the site.

A fragment's filters and expressions run in the database where they can be translated
(:mod:`tp_flower.databases.translation`); the others, and the columns that they need,
are left.
A sub-query runs in the database as a whole or not at all: what it groups by and its
aggregates are computed there, and what it makes of them is a small matter for the site.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sqlglot import exp

from tp_flower.databases import dialects
from tp_flower.databases.translation import NotTranslatedError, Translator
from tp_flower.databases.types import arrow_type, decimal_digits, named
from tp_flower.query.aggregates import AGGREGATES, parse_aggregate
from tp_flower.query.expressions import parse_expression, render, shorten
from tp_flower.query.fragment import Feature, Fragment, SubQuery
from tp_flower.sources.sql_text import quote_name

MEAN_DIGITS: Final = 18  # DuckDB sums decimals of more digits in another way

_ORDERED: Final = frozenset(
    ("integer", "unsigned", "decimal", "double", "date", "timestamp", "instant")
)
_SUMMABLE: Final = frozenset(("integer", "decimal", "double"))
# 0.0 and -0.0 are one group here and two there
_GROUPABLE: Final = _ORDERED - {"double"} | {"text", "boolean"}


@dataclass(frozen=True)
class Item:
    """A column that the database computes.

    Attributes:
        name: its name in the result.
        sql: its expression in the database's SQL.
        type: the DuckDB type of its values.
        shown: what it is in the query, for messages.
    """

    name: str
    sql: exp.Expr
    type: str
    shown: str = ""


@dataclass(frozen=True)
class Plan:
    """What a database is asked for, and what is left to do.

    Attributes:
        fragment: what is left, over the relation ``shard``.
        columns: the table's columns that the statement names, for whatever purpose.
        kept: those of them that are handed out as they are.
        items: computed from each row, handed out beside ``kept``.
        filters: conditions that rows must meet.
        groups: what is grouped by; empty where nothing is.
        arguments: of the aggregates, from each row.
        aggregates: over ``groups``, each of a column of ``arguments``.
        outputs: DuckDB's columns over what the database hands out, where it groups.
        having: DuckDB's conditions over it.
        pushed: what the database computes, in words.
    """

    fragment: Fragment
    columns: tuple[str, ...]
    kept: tuple[str, ...]
    items: tuple[Item, ...] = ()
    filters: tuple[exp.Expr, ...] = ()
    groups: tuple[Item, ...] = ()
    arguments: tuple[Item, ...] = ()
    aggregates: tuple[Item, ...] = ()
    outputs: tuple[Feature, ...] = ()
    having: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()


def plan(translator: Translator, fragment: Fragment) -> Plan:
    """Divide a checked fragment between a database and the site."""
    if fragment.subquery is None:
        return _plan_rows(translator, fragment)
    try:
        return _plan_groups(translator, fragment, fragment.subquery)
    except NotTranslatedError:
        return _plan_base(translator, fragment, fragment.subquery)


class _Names:
    """New names for columns that no column of the table has."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {name.lower() for name in taken}

    def new(self, kind: str, number: int) -> str:
        name = f"{kind} {number}"
        while name in self._taken:
            name += "_"
        return name


def _plan_rows(translator: Translator, fragment: Fragment) -> Plan:
    names = _Names(translator.columns)
    items: list[Item] = []
    pushed: list[str] = []

    def push(sql: str, what: str) -> str:
        tree = parse_expression(sql, what)
        item = None
        if not isinstance(tree.unnest(), exp.Column):
            name = names.new("pushed", len(items))
            item = _item(translator, tree, name, f"{what}, {shorten(sql)},")
        if item is None:
            return sql
        items.append(item)
        pushed.append(f"{what}: {shorten(sql)}")
        return quote_name(item.name)

    filters, kept_filters = _split(translator, fragment.filters)
    left = replace(
        fragment,
        features=tuple(
            Feature(f.name, push(f.sql, f"feature {f.name}")) for f in fragment.features
        ),
        keys=tuple(
            tuple(push(sql, f"join key {index}") for sql in key)
            for index, key in enumerate(fragment.keys)
        ),
        label=None if fragment.label is None else push(fragment.label, "label"),
        weight=None if fragment.weight is None else push(fragment.weight, "weight"),
        filters=kept_filters,
    )
    own = {item.name for item in items}
    kept = [name for name in _columns_of(_pieces(left)) if name not in own]
    trees = [item.sql for item in items] + [tree for _, tree in filters]
    return Plan(
        fragment=left,
        columns=_in_order(translator, [*kept, *_names_in(trees)]),
        kept=_in_order(translator, kept),
        items=tuple(items),
        filters=tuple(tree for _, tree in filters),
        pushed=(*(f"filter: {shorten(sql)}" for sql, _ in filters), *pushed),
    )


def _plan_base(translator: Translator, fragment: Fragment, subquery: SubQuery) -> Plan:
    """Fetch the rows that a sub-query needs: the site groups them."""
    filters, kept_filters = _split(translator, subquery.filters)
    left = replace(subquery, filters=kept_filters)
    kept = _columns_of(
        [*(c.sql for c in left.columns), *left.filters, *left.groups, *left.having]
    )
    trees = [tree for _, tree in filters]
    return Plan(
        fragment=replace(fragment, subquery=left),
        columns=_in_order(translator, [*kept, *_names_in(trees)]),
        kept=_in_order(translator, kept),
        filters=tuple(trees),
        pushed=tuple(f"filter: {shorten(sql)}" for sql, _ in filters),
    )


def _plan_groups(
    translator: Translator, fragment: Fragment, subquery: SubQuery
) -> Plan:
    """Group in the database.

    Raises:
        NotTranslatedError: a filter, a group or an aggregate has to stay at the site.
    """
    names = _Names(subquery.names)
    filters = [
        translator.condition(parse_expression(sql, "filter"))
        for sql in subquery.filters
    ]
    group_trees = [parse_expression(sql, "group") for sql in subquery.groups]
    groups = [
        _group(translator, tree, names.new("group", number))
        for number, tree in enumerate(group_trees)
    ]
    replaced: dict[exp.Expr, str] = {
        tree.unnest(): item.name for tree, item in zip(group_trees, groups, strict=True)
    }
    arguments: list[Item] = []
    aggregates: list[Item] = []

    def name_of(node: exp.Expr) -> str | None:
        if node.unnest() in replaced:
            return replaced[node.unnest()]
        if type(node) not in AGGREGATES and not isinstance(node, exp.Filter):
            return None
        number = len(aggregates)
        argument, aggregate = _aggregate(
            translator,
            node,
            (names.new("argument", number), names.new("aggregate", number)),
        )
        arguments.append(argument)
        aggregates.append(aggregate)
        replaced[node] = aggregate.name
        return aggregate.name

    outputs = tuple(
        Feature(column.name, _over_results(column.sql, name_of))
        for column in subquery.columns
    )
    having = tuple(_over_results(sql, name_of) for sql in subquery.having)
    trees = [*filters, *(item.sql for item in (*groups, *arguments))]
    return Plan(
        fragment=replace(fragment, subquery=None),
        columns=_in_order(translator, _names_in(trees)),
        kept=(),
        filters=tuple(filters),
        groups=tuple(groups),
        arguments=tuple(arguments),
        aggregates=tuple(aggregates),
        outputs=outputs,
        having=having,
        pushed=(
            *(f"filter: {shorten(sql)}" for sql in subquery.filters),
            f"sub-query: GROUP BY {shorten(', '.join(subquery.groups))}",
        ),
    )


def _over_results(sql: str, name_of: Callable[[exp.Expr], str | None]) -> str:
    """Return an expression over the columns that the database hands out."""

    def over(node: exp.Expr) -> exp.Expr:
        name = name_of(node)
        return node if name is None else named(name)

    return render(parse_aggregate(sql, "sub-query").transform(over), quote=True)


def _group(translator: Translator, tree: exp.Expr, name: str) -> Item:
    kind, family = translator.type(tree), translator.family(tree)
    if family not in _GROUPABLE:
        raise NotTranslatedError(f"GROUP BY of type {kind}")
    value = translator.translate(tree)
    if family == "text":
        value = dialects.bytewise(value, translator.dialect)
    return Item(name, value, kind, f"group {shorten(render(tree))}")


def _aggregate(
    translator: Translator, tree: exp.Expr, names: tuple[str, str]
) -> tuple[Item, Item]:
    """Return an aggregate's argument for each row, and the aggregate over them."""
    argument_name, name = names
    condition = None
    kind, shown = translator.type(tree), f"aggregate {shorten(render(tree))}"
    if isinstance(tree, exp.Filter):
        condition = translator.condition(tree.expression.this)
        tree = tree.this
    make, argument = _form(translator, tree)
    translator.need_exact([argument])
    value = translator.translate(argument)
    if make is dialects.count_distinct and translator.family(argument) == "text":
        value = dialects.bytewise(value, translator.dialect)
    if condition is not None:
        value = exp.Case(ifs=[exp.If(this=condition, true=value)])
    digits = decimal_digits(translator.type(argument))
    whole = make(named(argument_name), digits[1] if digits else 0, translator.dialect)
    return Item(argument_name, value, ""), Item(name, whole, kind, shown)


def _form(
    translator: Translator, tree: exp.Expr
) -> tuple[dialects.Aggregate, exp.Expr]:
    """Return how an aggregate is written, and its argument.

    Raises:
        NotTranslatedError: databases compute it in another way, or not at all.
    """
    if isinstance(tree, exp.Count):
        return _count_form(translator, tree)
    known = _AGGREGATES.get(type(tree))
    if known is None:
        raise NotTranslatedError(tree.sql("duckdb"))
    make, accepted = known
    family = translator.family(tree.this)
    digits = decimal_digits(translator.type(tree.this))
    too_long = make is dialects.mean and digits and digits[0] > MEAN_DIGITS
    # SQLite makes NULL of inf - inf
    is_odd = translator.dialect == "sqlite" and family == "double"
    if (
        family not in accepted
        or too_long
        or (is_odd and make in (dialects.total, dialects.mean))
    ):
        raise NotTranslatedError(tree.sql("duckdb"))
    return make, tree.this


def _count_form(
    translator: Translator, tree: exp.Count
) -> tuple[dialects.Aggregate, exp.Expr]:
    argument = tree.this
    if argument is None or isinstance(argument, exp.Star):
        return dialects.count, exp.Literal.number(1)
    if not isinstance(argument, exp.Distinct):
        return dialects.count, argument
    (value,) = argument.expressions
    if translator.family(value) not in _GROUPABLE:
        raise NotTranslatedError(tree.sql("duckdb"))
    return dialects.count_distinct, value


_AGGREGATES: Final[dict[type[exp.Expr], tuple[dialects.Aggregate, Collection[str]]]] = {
    exp.Sum: (dialects.total, _SUMMABLE),
    exp.Avg: (dialects.mean, _SUMMABLE),
    exp.Min: (dialects.least, _ORDERED),
    exp.Max: (dialects.greatest, _ORDERED),
}


def _item(translator: Translator, tree: exp.Expr, name: str, shown: str) -> Item | None:
    """Return an expression as a column of the result, None if it has to stay."""
    try:
        kind = translator.type(tree)
        translator.need_exact([tree])
        value = translator.translate(tree)
    except NotTranslatedError:
        return None
    return Item(name, value, kind, shown) if arrow_type(kind) else None


def _split(
    translator: Translator, filters: Sequence[str]
) -> tuple[list[tuple[str, exp.Expr]], tuple[str, ...]]:
    """Return the filters that the database applies, translated, and the others."""
    pushed, kept = [], []
    for sql in filters:
        try:
            condition = translator.condition(parse_expression(sql, "filter"))
        except NotTranslatedError:
            kept.append(sql)
        else:
            pushed.append((sql, condition))
    return pushed, tuple(kept)


def _pieces(fragment: Fragment) -> Iterator[str]:
    """Yield the expressions of a fragment."""
    yield from (feature.sql for feature in fragment.features)
    yield from (sql for key in fragment.keys for sql in key)
    yield from (sql for sql in (fragment.label, fragment.weight) if sql is not None)
    yield from fragment.filters


def _columns_of(pieces: Iterable[str]) -> list[str]:
    return _names_in([parse_aggregate(sql, "an expression") for sql in pieces])


def _names_in(trees: Iterable[exp.Expr]) -> list[str]:
    return [column.name for tree in trees for column in tree.find_all(exp.Column)]


def _in_order(translator: Translator, names: Collection[str]) -> tuple[str, ...]:
    """Return columns once each, in the table's order."""
    return tuple(name for name in translator.columns if name in names)
