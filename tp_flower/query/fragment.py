"""What one table's sites are told to run, and the check a site puts it through.

The server is not trusted with a site's database: a fragment is a list of small
expressions over the columns of one table, and :meth:`Fragment.check` runs at the
site before any of them reaches DuckDB.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tp_flower.errors import QueryError
from tp_flower.query.pieces import (
    Feature,
    as_text,
    check_condition,
    check_names,
    check_piece,
    features_in,
    fields_in,
    list_in,
    texts_in,
)
from tp_flower.query.subquery import SubQuery

__all__ = ["Feature", "Fragment", "SubQuery"]

_FIELDS = ("table", "name", "features", "keys", "label", "filters", "subquery")
_WEIGHT = "weight"
"""Of fragments that have one: those without stay what sites have kept of them."""


@dataclass(frozen=True)
class Fragment:
    """The part of a query that one table answers alone.

    Expressions are over the bare, quoted columns of the table, without alias; where
    there is a sub-query, over its output columns.

    Attributes:
        table: The alias in the query, by which everything refers to the table.
        name: The table's name at the sites.
        features: The features in the order of the SELECT list.
        keys: Join keys, each a tuple of expressions (a composite key has several).
        label: The label's expression, at the label table only.
        filters: Conditions, each safe between two ANDs, that rows must meet.
        subquery: What runs first, over the columns of the table itself.
        weight: The expression that joined rows weigh, at its table only.
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
        """What yields every group of the sub-query and nothing else.

        Also the groups that HAVING or a later filter leaves out: what is counted there
        may be a part of the group only.
        """
        if self.subquery is None:
            raise ValueError(f"table {self.table!r} is grouped by nothing")
        count = Feature("rows", "COUNT(*)")
        bare = replace(self.subquery, columns=(count,), having=())
        return Fragment(self.table, self.name, subquery=bare)

    def to_json(self) -> dict[str, Any]:
        """Return the fragment as plain JSON types."""
        return {
            "table": self.table,
            "name": self.name,
            "features": [[feature.name, feature.sql] for feature in self.features],
            "keys": [list(key) for key in self.keys],
            "label": self.label,
            "filters": list(self.filters),
            "subquery": None if self.subquery is None else self.subquery.to_json(),
            **({} if self.weight is None else {_WEIGHT: self.weight}),
        }

    @classmethod
    def from_json(cls, data: object) -> "Fragment":
        """Return the fragment that :meth:`to_json` wrote.

        Raises:
            QueryError: A field is missing, unknown, or of another form.
        """
        has_weight = isinstance(data, Mapping) and _WEIGHT in data
        fields = (*_FIELDS, _WEIGHT) if has_weight else _FIELDS
        data = fields_in(data, fields, "a fragment")
        label, subquery = data["label"], data["subquery"]
        return cls(
            table=as_text(data["table"], "table"),
            name=as_text(data["name"], "name"),
            features=features_in(data, "features"),
            keys=tuple(_key(key) for key in list_in(data, "keys")),
            label=None if label is None else as_text(label, "label"),
            filters=texts_in(data, "filters"),
            subquery=None if subquery is None else SubQuery.from_json(subquery),
            weight=as_text(data[_WEIGHT], _WEIGHT) if has_weight else None,
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
        where = f"table {self.table!r}"
        check_names(self.features, f"{where}: feature")
        if not all(self.keys):
            raise QueryError(f"{where}: a join key has no expression")
        subquery = self.subquery
        if subquery is not None:
            subquery = subquery.check(columns, where)
            columns = subquery.names
        label, weight = (
            None if sql is None else check_piece(sql, f"{where}: {what}", columns)
            for what, sql in (("label", self.label), (_WEIGHT, self.weight))
        )
        return Fragment(
            table=self.table,
            name=self.name,
            features=tuple(
                Feature(
                    f.name, check_piece(f.sql, f"{where}: feature {f.name!r}", columns)
                )
                for f in self.features
            ),
            keys=tuple(
                tuple(check_piece(sql, f"{where}: key {index}", columns) for sql in key)
                for index, key in enumerate(self.keys)
            ),
            label=label,
            filters=tuple(
                check_condition(sql, f"{where}: filter {index}", columns)
                for index, sql in enumerate(self.filters)
            ),
            subquery=subquery,
            weight=weight,
        )


def _key(parts: object) -> tuple[str, ...]:
    """Return the key written as a list of expressions."""
    if not isinstance(parts, list):
        raise QueryError(f"fragment: a key must be a list, got {parts!r}")
    return tuple(as_text(part, "keys") for part in parts)
