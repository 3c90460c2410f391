"""The joined rows of what tables say: which row of each table is behind each of them.

Notation:
    n  rows of a table     N  joined rows     R  regions
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import duckdb
import numpy as np

from tp_flower.export.runner.rows import Array, Json, quote_name
from tp_flower.export.runner.trees import NO_BIN

_NO_ROWS = "(no rows)"
"""The key of a table's answer about no rows, in place of a canonical text."""


_NULL_KEY = "(null of {})"
"""The key of a row of a table that is NULL."""


class JoinedParts:
    """The joined rows, in the order of the label's table, then of the others.

    Attributes:
        about: `model.json`.
        partials: by part, arrays of its rows, among them those of its keys.
    """

    def __init__(self, about: Json, partials: Mapping[str, Mapping[str, Any]]) -> None:
        self.about = about
        self.partials = partials

    @cached_property
    def rows(self) -> dict[str, Array]:
        """By table the row behind each joined row, (N,), -1 for none."""
        steps = self.about["steps"]
        columns: dict[str, dict[str, Array]] = {}
        for step in steps:
            table = step["table"]
            columns[table] = {"row": np.arange(self._count(table))}
            for key in range(step["keys"]):
                columns[table][f"key{key}"] = self._key(table, key)
        for table, key, other, other_key, with_nulls in self._answered:
            keys = columns[table][f"key{key}"]
            if not with_nulls:
                keys = keys.copy()
                keys[keys == _NULL_KEY.format(table)] = None
            columns[table][f"key{key} of {other}"] = _answered(
                keys, columns[other][f"key{other_key}"]
            )
        with duckdb.connect() as connection:
            for step in steps:
                connection.register("(said)", columns[step["table"]])
                name = quote_name(step["table"])
                connection.execute(
                    f'CREATE TEMP TABLE {name} AS SELECT * FROM "(said)"'
                )
            items = [
                f"coalesce({quote_name(step['table'])}.row, -1)::BIGINT AS r{number}"
                for number, step in enumerate(steps)
            ]
            fetched = connection.execute(
                f"SELECT {', '.join(items)} FROM {self._clauses()} ORDER BY ALL"
            ).fetchnumpy()
        return {step["table"]: fetched[f"r{n}"] for n, step in enumerate(steps)}

    def _clauses(self) -> str:
        """Return what FROM says: the label's table, and the joins in their order."""
        first, *others = self.about["steps"]
        clauses = [quote_name(first["table"])]
        for step in others:
            kind = "LEFT JOIN" if step["outer"] else "JOIN"
            on = " AND ".join(
                f"{self._side(left, left_key, right)} = "
                f"{self._side(right, right_key, left)}"
                for left, left_key, right, right_key in step["on"]
            )
            clauses.append(f"{kind} {quote_name(step['table'])} ON {on}")
        return " ".join(clauses)

    def _side(self, table: str, key: int, other: str) -> str:
        """Return a table's side of its join with another."""
        column = f"key{key}"
        if any([table, key, other] == each[:3] for each in self._answered):
            column = f"{column} of {other}"
        return f"{quote_name(table)}.{quote_name(column)}"

    @property
    def _answered(self) -> list[list[Any]]:
        """The joins with a table that answers for keys it lacks.

        Of each a table and its key, those of the answers, and whether of NULL, too.
        """
        return [each for step in self.about["steps"] for each in step["answered"]]

    def parts_of(self, table: str) -> list[str]:
        """Return the parts of a table, in the order of its shards."""
        return [part["part"] for part in self._entries(table)]

    def names_of(self, table: str) -> list[str]:
        """Return the names of the arrays that all parts of a table have."""
        first, *others = self.parts_of(table)
        return [
            name
            for name in self.partials[first]
            if all(name in self.partials[part] for part in others)
        ]

    def stacked(self, table: str, name: str) -> Array:
        """Return an array of a table's rows, shard after shard, (n, ..).

        Where a shard knows fewer regions, its last one stands for the others.
        """
        arrays = [
            np.asarray(self.partials[part][name]) for part in self.parts_of(table)
        ]
        if name == "regions":
            first = [each["first-region"] for each in self._entries(table)]
            arrays = [a + start for a, start in zip(arrays, first, strict=True)]
        if name == "scores":
            most = max(array.shape[1] for array in arrays)
            arrays = [
                np.pad(a, ((0, 0), (0, most - a.shape[1]), (0, 0)), mode="edge")
                for a in arrays
            ]
        return np.concatenate(arrays)

    def gather(self, table: str, name: str, absent: float = 0) -> Array:
        """Return an array of a table's rows on the joined rows, (N, ..).

        It is ``absent`` where a joined row has no row of the table.
        """
        values = self.stacked(table, name)
        filler = np.full((1, *values.shape[1:]), absent).astype(values.dtype)
        gathered: Array = np.concatenate([values, filler])[self.rows[table]]
        return gathered

    @cached_property
    def regions(self) -> Array:
        """The region of each joined row that the scores of other tables read, (N,)."""
        if not self.about["divided"]:
            return np.zeros(len(self.rows[self.about["label-table"]]), np.int64)
        return self.gather(self.about["divided"], "regions", NO_BIN)

    def scores_of(self, table: str) -> Array:
        """Return the scores of a table's rows on the joined rows, (N, w).

        They are 0 where a joined row has no row of the table.
        """
        scores = self.stacked(table, "scores")
        # the last is of rows in no region, and of regions that no tree names
        region = np.minimum(self.regions, scores.shape[1] - 1)
        with_none = np.concatenate([scores, np.zeros((1, *scores.shape[1:]))])
        gathered: Array = with_none[self.rows[table], region]
        return gathered

    def wanted(self, part: Json) -> Array:
        """Return in which regions a part's rows are joined rows, bool (n, R)."""
        start = 0
        for name in self.parts_of(part["table"]):
            if name == part["part"]:
                break
            start += int(self.partials[name]["rows"])
        count = int(self.partials[part["part"]]["rows"])
        wanted = np.zeros((count, part["regions"]), np.bool_)
        rows = self.rows[part["table"]]
        is_own = (rows >= start) & (rows < start + count)
        region = np.minimum(self.regions[is_own], part["regions"] - 1)
        wanted[rows[is_own] - start, region] = True
        return wanted

    def _entries(self, table: str) -> list[Json]:
        return [part for part in self.about["parts"] if part["table"] == table]

    def _count(self, table: str) -> int:
        return sum(int(self.partials[name]["rows"]) for name in self.parts_of(table))

    def _key(self, table: str, key: int) -> Array:
        """Return the canonical texts of a table's key, (n,), None for NULL."""
        columns = []
        *others, _ = self.parts_of(table)
        for name in self.parts_of(table):
            texts = self.partials[name][f"key{key}.texts"].astype(object)
            if name in others:
                # the last part has the answer about no rows
                texts[texts == _NO_ROWS] = None
            with_null = np.append(texts, np.array([None], object))
            columns.append(with_null[self.partials[name][f"key{key}.codes"]])
        return np.concatenate(columns)


def _answered(keys: Array, answers: Array) -> Array:
    """Return keys (n,), those that no answer has as that of the answer about none."""
    null = np.array(None, object)
    is_key = np.not_equal(keys, null)
    texts = answers[np.not_equal(answers, null)].astype(str)
    answered = keys.copy()
    lacking = is_key.copy()
    lacking[is_key] = ~np.isin(keys[is_key].astype(str), texts)
    answered[lacking] = _NO_ROWS
    return answered
