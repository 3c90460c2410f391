"""What stands under an alias of the query: a hosted table, or a sub-query over some.

A relation has one branch per SELECT that UNION ALL puts together; every branch becomes
a fragment of its own. A branch that does not group disappears: its expressions take the
place of its columns, so that its sites run one flat SELECT.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sqlglot import exp

from tp_flower.duckdb_engine import quote_name
from tp_flower.query.aggregates import parse_aggregate
from tp_flower.query.binding.nulls import output_types, typed_nulls
from tp_flower.query.expressions import as_filter, parse_expression, render, shorten
from tp_flower.query.fragment import Fragment
from tp_flower.query.pieces import Feature
from tp_flower.query.subquery import SubQuery

Schema = Mapping[str, str]


@dataclass(frozen=True)
class BoundBranch:
    """One SELECT over one hosted table.

    Attributes:
        name: The table's name at the sites.
        schema: Its columns and their DuckDB types.
        outputs: What it selects; over the columns of the table.
        filters: Its WHERE; empty if there is a sub-query, which then has them.
        subquery: The SELECT itself, if it groups.
    """

    name: str
    schema: Schema
    outputs: tuple[Feature, ...]
    filters: tuple[str, ...] = ()
    subquery: SubQuery | None = None

    @property
    def used(self) -> Schema:
        """The columns that the SELECT names, and their types."""
        pieces = [output.sql for output in self.outputs]
        if self.subquery is not None:
            pieces += [*self.subquery.groups, *self.subquery.having]
            pieces += self.subquery.filters
        trees = [parse_aggregate(sql, "sub-query") for sql in pieces]
        named = {c.name for tree in trees for c in tree.find_all(exp.Column)}
        return {name: kind for name, kind in self.schema.items() if name in named}

    def to_sql(self, relation: str) -> str:
        """Return the SELECT over a relation that stands for the table."""
        if self.subquery is not None:
            return self.subquery.to_sql(relation)
        items = ", ".join(f"{o.sql} AS {quote_name(o.name)}" for o in self.outputs)
        return f"SELECT {items} FROM {relation}"

    def fragment(self, outer: Fragment) -> Fragment:
        """Return what the table's sites run.

        Args:
            outer: The fragment over the outputs; its name does not matter.
        """
        if self.subquery is not None:
            place = _same
        else:
            place = self._inline
        filters = (_between_ands(place(sql)) for sql in outer.filters)
        return Fragment(
            table=outer.table,
            name=self.name,
            features=tuple(Feature(f.name, place(f.sql)) for f in outer.features),
            keys=tuple(tuple(map(place, key)) for key in outer.keys),
            label=None if outer.label is None else place(outer.label),
            weight=None if outer.weight is None else place(outer.weight),
            filters=tuple(dict.fromkeys((*self.filters, *filters))),
            subquery=self.subquery,
        )

    def _inline(self, sql: str) -> str:
        """Return an expression over the outputs as one over the table's columns."""
        return inline(sql, {output.name: output.sql for output in self.outputs})


@dataclass(frozen=True)
class Relation:
    """What an alias of the query stands for.

    Attributes:
        branches: One per SELECT, with the same names of outputs.
        schema: The columns and their types, where it is a plain table.
    """

    branches: tuple[BoundBranch, ...]
    schema: Schema | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(output.name for output in self.branches[0].outputs)

    @cached_property
    def types(self) -> Schema:
        """The DuckDB type of each column."""
        if self.schema is not None:
            return self.schema
        return output_types(
            " UNION ALL ".join(
                branch.to_sql(typed_nulls(branch.used)) for branch in self.branches
            )
        )


def inline(sql: str, outputs: Mapping[str, str]) -> str:
    """Return ``sql`` with each column replaced by the expression it stands for.

    >>> inline('"double" > 3', {"double": '"x" * 2'})
    '("x" * 2) > 3'
    """
    what = f"expression {shorten(sql)}"
    holder = exp.Paren(this=parse_expression(sql, what))
    for column in list(holder.find_all(exp.Column)):
        tree = parse_expression(outputs[column.name], what)
        is_plain = isinstance(tree, exp.Column | exp.Paren | exp.Func)
        is_alone = column.parent is holder
        column.replace(tree if is_plain or is_alone else exp.Paren(this=tree))
    # parsed once more: only an expression with one form may leave
    return render(parse_expression(render(holder.this, quote=True), what), quote=True)


def _between_ands(sql: str) -> str:
    """Return a condition that keeps its meaning between two ANDs."""
    tree = parse_expression(sql, f"condition {shorten(sql)}")
    return render(as_filter(tree), quote=True)


def _same(sql: str) -> str:
    return sql
