"""Bind LATERAL sub-queries: where their pairs of keys and cutoffs come from.

The pairs are those of the table around a sub-query if one site has all rows of both.
Elsewhere its sites seal them for those of the sub-query's table, or they are of a grid:
the table around then compares the last point of the grid at or before its cutoff in
place of the cutoff.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from sqlglot import exp

from tp_flower.errors import QueryError
from tp_flower.query.cutoffs import (
    CUTOFF,
    SEALED_TYPES,
    CutoffGrid,
    Cutoffs,
    key_column,
)
from tp_flower.query.expressions import parse_expression
from tp_flower.query.fragment import Fragment, spell
from tp_flower.query.lateral import Correlation, name_of_key
from tp_flower.query.parsing import DerivedTable, Statement, Table
from tp_flower.query.relations import Relation, Schema, bind_table, type_on_nulls
from tp_flower.query.scope import Scope, TableSchema

_OF_NO_ROW: Final = (exp.Count, exp.CountIf, exp.Coalesce, exp.Case, exp.If, exp.Is)


def bind_tables(
    statement: Statement,
    schemas: Mapping[str, Schema],
    grid: CutoffGrid | None,
    *,
    are_sealed: bool = False,
) -> tuple[Statement, dict[str, Relation]]:
    """Return the relations by alias, and the query with its cutoffs on the grid.

    Cutoffs that ``are_sealed`` stay what they are.
    """
    is_set = grid is not None or are_sealed
    relations: dict[str, Relation] = {}
    joins = list(statement.joins)
    for number, table in enumerate(statement.tables):
        correlation = correlation_of(table)
        if correlation is None:
            relations[table.alias] = bind_table(table, schemas)
            continue
        around = _table_around(table.alias, correlation, relations)
        types = _pair_types(around, correlation, relations[around])
        relation = bind_table(table, schemas, Cutoffs(around), types)
        if _are_at_one_site(relation, relations[around], schemas, is_set=is_set):
            pass
        elif are_sealed:
            _check_sealed_type(table.alias, correlation, types[CUTOFF])
            cutoffs = Cutoffs(around, sealed=True)
            relation = bind_table(table, schemas, cutoffs, types)
        else:
            grid_there = _grid_of(table.alias, correlation, types[CUTOFF], grid)
            point = grid_there.last_point(correlation.cutoff)
            correlation = replace(correlation, cutoff=point)
            types = {**types, CUTOFF: grid_there.type}
            relation = bind_table(table, schemas, Cutoffs(grid=grid_there), types)
            on = correlation.equalities(table.alias)
            joins[number - 1] = replace(joins[number - 1], on=on)
        relations[table.alias] = relation
    return replace(statement, joins=tuple(joins)), relations


def correlation_of(table: Table) -> Correlation | None:
    """Return what a LATERAL sub-query compares with; None for another table."""
    return table.branches[0].correlation if isinstance(table, DerivedTable) else None


def _table_around(
    alias: str, correlation: Correlation, relations: Mapping[str, Relation]
) -> str:
    """Return the alias of the table whose rows a sub-query is compared with."""
    around = spell(correlation.table, tuple(relations))
    if around is None or relations[around].pair_types:
        raise QueryError(
            f"LATERAL sub-query {alias!r} is compared with {correlation.table!r}; it "
            "must be a table before it in FROM that is not LATERAL itself: "
            f"{', '.join(a for a, r in relations.items() if not r.pair_types)}"
        )
    return around


def _pair_types(
    around: str, correlation: Correlation, relation: Relation
) -> dict[str, str]:
    """Return the types of the keys and the cutoff in the table around."""
    scope = Scope({around: relation.columns})
    names = [key_column(number) for number in range(len(correlation.keys))]
    values = [*(outer for _, outer in correlation.keys), correlation.cutoff]
    types = {}
    for name, sql in zip((*names, CUTOFF), values, strict=True):
        element = f"condition on {sql}"
        local = scope.local(parse_expression(sql, element), element)
        types[name] = type_on_nulls(local.sql, relation.types)
    return types


def _are_at_one_site(
    lateral: Relation,
    around: Relation,
    schemas: Mapping[str, Schema],
    *,
    is_set: bool,
) -> bool:
    """Return whether one site has both.

    Of unknown places they are one, unless it ``is_set`` what is done elsewhere.
    """
    hosted = [schemas[branch.name] for r in (lateral, around) for branch in r.branches]
    places = [s.places for s in hosted if isinstance(s, TableSchema) and s.places]
    if len(places) < len(hosted):
        return not is_set
    return len(frozenset().union(*places)) == 1


def _grid_of(
    alias: str, correlation: Correlation, cutoff_type: str, grid: CutoffGrid | None
) -> CutoffGrid:
    """Return the grid with points of the cutoff's type."""
    cutoff = correlation.cutoff
    if grid is None:
        raise QueryError(
            f"LATERAL sub-query {alias!r} looks back from {cutoff}, of another site: "
            "set cutoff-grid to the times that are looked back from in its place, such "
            'as cutoff-grid = "1 month from 2015-01-01 to 2020-12-31", or, where its '
            'owner has written releases.cutoffs = "partner", sealed-cutoffs = true'
        )
    if not cutoff_type.startswith(("DATE", "TIMESTAMP")):
        raise QueryError(
            f"LATERAL sub-query {alias!r} looks back from {cutoff}, of type "
            f"{cutoff_type}: cutoff-grid takes a DATE or a TIMESTAMP"
        )
    if not correlation.looks_back:
        raise QueryError(
            f"LATERAL sub-query {alias!r} is not bounded by {cutoff}: with cutoff-grid "
            f"a condition such as t < {cutoff} keeps the rows before it"
        )
    return replace(grid, type="DATE" if cutoff_type == "DATE" else "TIMESTAMP")


def _check_sealed_type(alias: str, correlation: Correlation, cutoff_type: str) -> None:
    """Refuse a cutoff whose values are no whole numbers of 64 bits."""
    if cutoff_type not in SEALED_TYPES:
        column = correlation.cutoff.rpartition(".")[2].strip('"')
        remedy = ""
        if cutoff_type == "VARCHAR":
            remedy = (
                "; let the owner of its table give it a type in the tables file, "
                f'types = {{ {json.dumps(column)} = "DATE" }}'
            )
        raise QueryError(
            f"LATERAL sub-query {alias!r} looks back from {correlation.cutoff}, of "
            f"type {cutoff_type}: sealed-cutoffs takes a DATE, a TIMESTAMP or a whole "
            f"number{remedy}"
        )


def pair_names(fragment: Fragment, key: int) -> list[str]:
    """Return the columns of its pairs that a LATERAL sub-query's join key compares.

    QueryError if it compares anything else, or not all of them.
    """
    trees = [parse_expression(sql, "join key") for sql in fragment.keys[key]]
    names = [tree.name for tree in trees if isinstance(tree, exp.Column)]
    subquery = fragment.subquery
    if subquery is None or sorted(names) != sorted(subquery.pair_names):
        raise QueryError(
            f"the join of LATERAL sub-query {fragment.table!r} compares "
            f"{', '.join(fragment.keys[key])} with the table around it, and not its "
            "keys and its cutoff"
        )
    return names


def features_of_no_row(fragment: Fragment) -> list[str]:
    """Return which features SQL has for a key without rows, such as a COUNT, 0.

    They are those of a sub-query that looks back, or of one that compares keys alone,
    which is joined as one with GROUP BY: neither has a row for such a key, unless it
    has one for all (:func:`tp_flower.extraction.empty_answers.answered_key`).
    """
    subquery = fragment.subquery
    if subquery is None or subquery.last or subquery.having:
        return []
    sources = subquery.sources
    if subquery.cutoffs is None and name_of_key(fragment.table, 1) not in sources:
        return []
    features = []
    for feature in fragment.features:
        tree = parse_expression(feature.sql, "feature")
        columns = [sources.get(c.name, "NULL") for c in tree.find_all(exp.Column)]
        values = [parse_expression(c, "column", aggregates=True) for c in columns]
        if any(each.find(*_OF_NO_ROW) for each in (tree, *values)):
            features.append(feature.name)
    return features


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
