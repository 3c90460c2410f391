"""Joining: from hashed join keys to the table mapping.

The server knows only hashed join keys and row positions; it joins those and keeps, per
table, :class:`TableRows`. Tables are joined one after the other. A step counts its rows
before it builds anything: a join that multiplies rows is stopped by its fan-out.

The joined rows are in the order of the label table's rows, then of the rows of the
other tables in the order of joining.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from tp_flower.arrays import BoolArray
from tp_flower.errors import MappingError
from tp_flower.extraction.extracted import KeyColumn
from tp_flower.joins.mapping import (
    RowNumbers,
    TableMapping,
    TableRows,
    number_type,
)
from tp_flower.joins.matching import (
    NULL,
    Codes,
    KeyNumbering,
    Match,
    Sides,
    join_rows,
    match_rows,
)
from tp_flower.query import Join

SideCodes = tuple[Codes, Codes]
"""Of a join's left and right key, by row."""


def join_codes(
    join: Join,
    left: Sequence[KeyColumn],
    right: Sequence[KeyColumn],
    answering: str = "",
) -> SideCodes:
    """Return the codes of both sides, equal if both hash halves are; -1 is NULL.

    Keys that an ``answering`` table lacks have the code of its last row.
    """
    check_kinds(join, left, right, answering)
    codes = _codes([*left, *right])
    of_left = np.concatenate(codes[: len(left)])
    of_right = np.concatenate(codes[len(left) :])
    if answering == join.right:
        return _with_answer(of_left, of_right), of_right
    if answering == join.left:
        return of_left, _with_answer(of_right, of_left)
    return of_left, of_right


def _with_answer(codes: Codes, answers: Codes) -> Codes:
    """Return the codes of keys, those that no answer has as that of the last answer.

    >>> _with_answer(np.array([5, -1, 7, 6]), np.array([7, 8])).tolist()
    [8, -1, 7, 8]
    """
    is_lacking = (codes >= 0) & ~np.isin(codes, answers)
    return np.where(is_lacking, answers[-1], codes).astype(np.int32)


def number_keys(keys: Sequence[Sequence[KeyColumn]]) -> Codes:
    """Return a number of the keys of each row of a table, shard after shard, (n,).

    Rows of equal keys have equal numbers, from 0 on; NULL where any of them is.

    Args:
        keys: by key, those of all shards.
    """
    none = np.zeros(0, np.int32)
    codes = [np.concatenate(_codes(columns)) for columns in keys]
    return KeyNumbering([("", none, of_rows) for of_rows in codes]).of_new


def _codes(keys: Sequence[KeyColumn]) -> list[Codes]:
    """Return the codes of each shard's rows, equal if both hash halves are."""
    hashes = np.concatenate([key.hashes for key in keys])
    # the extra last entry is for NULL
    lookup = np.append(_dense(hashes), np.int32(NULL))
    codes = []
    offset = 0
    for key in keys:
        codes.append(
            lookup.take(np.where(key.codes < 0, len(hashes), key.codes + offset))
        )
        offset += len(key.hashes)
    return codes


def _dense(hashes: npt.NDArray[np.uint64]) -> Codes:
    """Return (k,) int32 from 0, equal where rows of the hashes (k, 2) are equal."""
    # every shard's hashes are sorted by the first half: this merges them
    order = np.argsort(hashes[:, 0], kind="stable")
    sorted_hashes = hashes[order]
    differs = sorted_hashes[1:] != sorted_hashes[:-1]
    if (differs[:, 1] & ~differs[:, 0]).any():
        # equal first halves of different hashes occur once in 2**64 pairs
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        sorted_hashes = hashes[order]
        differs = sorted_hashes[1:] != sorted_hashes[:-1]
    codes = np.zeros(len(hashes), dtype=np.int32)
    codes[order[1:]] = np.cumsum(differs.any(axis=1), dtype=np.int32)
    return codes


def check_kinds(
    join: Join,
    left: Sequence[KeyColumn],
    right: Sequence[KeyColumn],
    answering: str,
) -> None:
    """Refuse a join whose keys differ in type."""
    kinds = {
        side: sorted(
            {
                key.kind
                for key in keys
                # the answer about no rows is no value
                if len(key.hashes) > int(side == answering and key is keys[-1])
            }
        )
        for side, keys in ((join.left, left), (join.right, right))
    }
    # a shard without values has no type that could differ
    distinct = {kind for kinds_of in kinds.values() for kind in kinds_of}
    if len(distinct) > 1:
        advice = "; cast one side in the query"
        if distinct == {"number", "uuid"}:
            advice = "; no number is a UUID: join by other columns"
        elif any("uuid" in kind.split("+") for kind in distinct):
            advice = "; cast texts to UUID in the query"
        elif distinct == {"number", "text"}:
            advice = (
                "; cast the text in the query, as in CAST(k AS BIGINT): as a text, "
                "007 is not 7"
            )
        raise MappingError(
            f"the keys of the join {join.text} differ in type: "
            + ", ".join(f"{side}: {' or '.join(kind)}" for side, kind in kinds.items())
            + advice
        )


# by table and number, of its shards
Keys = Mapping[tuple[str, int], Sequence[KeyColumn]]


@dataclass(frozen=True)
class RepeatedKeys:
    """Keys of several rows in a table whose other keys name one row each.

    Of ``keys`` distinct ones ``repeated`` have from 2 to ``most`` rows, which is why
    the join has ``more_rows`` more than with one row of each.
    """

    table: str
    keys: int
    repeated: int
    most: int
    more_rows: int


@dataclass(frozen=True)
class JoinStep:
    """One table joined to those before it.

    The fan-out is the number of joined rows that each previous one becomes. Of the
    joined rows before, ``unmatched_before`` match no row of the table, and
    ``unmatched_rows`` of its rows match none of them; ``lost_label_rows`` rows of the
    label table are in no joined row any more. Of the first and the last of these counts
    ``keyless_before`` and ``lost_keyless_rows`` have no key, which is NULL. ``advice``
    says what may be wrong with keys. ``repeated_keys`` are of either side, if it looks
    like a table with a row per key.
    """

    table: str
    rows: int
    on: str = ""
    is_outer: bool = False
    rows_before: int = 0
    fan_out_min: int = 1
    fan_out_median: float = 1.0
    fan_out_max: int = 1
    unmatched_before: int = 0
    unmatched_rows: int = 0
    lost_label_rows: int = 0
    keyless_before: int = 0
    lost_keyless_rows: int = 0
    advice: str = ""
    repeated_keys: tuple[RepeatedKeys, ...] = ()

    def __str__(self) -> str:
        if not self.on:
            return f"{self.table}: {self.rows} rows"
        return (
            f"{self.table} on {self.on}: {self.rows_before} rows become {self.rows} "
            f"(fan-out min {self.fan_out_min}, median {self.fan_out_median:g}, max "
            f"{self.fan_out_max})"
        )


JOINED_ROW: Final = 54.0
"""Bytes that the server takes for a joined row at its peak, besides row numbers."""
# of the keys of a table that looks as if each named one row
MOST_REPEATED: Final = 0.25
MOST_UNMATCHED: Final = 0.01
"""Of the rows with a key, from where on it is said in which form texts must agree."""


def repeated_keys(
    table: str, match: Match, predicates: Sequence[tuple[Join, SideCodes]]
) -> Iterator[RepeatedKeys]:
    """Yield the repeated keys of a new table, or of the one that it is joined to.

    The latter has several rows per row of the new table, unless this one has several of
    most keys.
    """
    more_rows = match.repeated_rows
    if more_rows and _names_rows(match.key_rows):
        yield _count_repeated(table, match.key_rows, more_rows)
    if len(predicates) > 1 or not 2 * np.count_nonzero(match.key_rows > 1) > len(
        match.key_rows
    ):
        return
    join, (left, right) = predicates[0]
    other, codes, others = (
        (join.right, right, left) if join.left == table else (join.left, left, right)
    )
    size = int(max(left.max(initial=NULL), right.max(initial=NULL))) + 1
    rows = np.bincount(codes[codes >= 0], minlength=size)
    partners = np.bincount(others[others >= 0], minlength=size)
    more_rows = int((np.maximum(rows - 1, 0) * partners).sum())
    if more_rows and _names_rows(rows[rows > 0]):
        yield _count_repeated(other, rows[rows > 0], more_rows)


def _names_rows(key_rows: npt.NDArray[np.int64]) -> bool:
    """Whether most keys, with these numbers of rows, name one row each."""
    return int(np.count_nonzero(key_rows > 1)) <= MOST_REPEATED * len(key_rows)


def _count_repeated(
    table: str, key_rows: npt.NDArray[np.int64], more_rows: int
) -> RepeatedKeys:
    repeated = int(np.count_nonzero(key_rows > 1))
    return RepeatedKeys(table, len(key_rows), repeated, int(key_rows.max()), more_rows)


def sides_of(table: str, predicates: Sequence[tuple[Join, SideCodes]]) -> Sides:
    """Return the codes of both sides of the predicates that join a new ``table``."""
    return [
        (join.right, right, left) if join.left == table else (join.left, left, right)
        for join, (left, right) in predicates
    ]


def describe_step(
    table: str, on: str, match: Match, lost: tuple[int, int], *, is_outer: bool
) -> JoinStep:
    """Return the record of joining a table, with its row counts.

    ``lost`` are rows of the label table, and those of them without a key.
    """
    least, median, most = match.fan_outs(is_outer=is_outer)
    return JoinStep(
        table=table,
        rows=match.inner_rows + is_outer * match.unmatched_before,
        on=on,
        is_outer=is_outer,
        rows_before=match.rows,
        fan_out_min=least,
        fan_out_median=median,
        fan_out_max=most,
        unmatched_before=match.unmatched_before,
        unmatched_rows=match.unmatched_rows,
        lost_label_rows=lost[0],
        keyless_before=match.keyless_before,
        lost_keyless_rows=lost[1],
    )


@dataclass(frozen=True)
class RowLimits:
    """How many joined rows there may be, and how many bytes they may take in memory."""

    rows: float = math.inf
    memory: float = math.inf

    def are_mapped(self, rows: int) -> bool:
        """Return whether so many rows take more memory, and are kept in files."""
        return rows * JOINED_ROW > self.memory


def build_mapping(  # noqa: PLR0913 - the query's joins, and limits on its rows
    joins: Sequence[Join],
    keys: Keys,
    rows: Mapping[str, int],
    label_table: str,
    outer: Collection[str] = (),
    limits: RowLimits = RowLimits(),
    sampled: BoolArray | None = None,
    filters: Mapping[str, str] = MappingProxyType({}),
    answering: Mapping[int, str] = MappingProxyType({}),
) -> tuple[TableMapping, tuple[JoinStep, ...]]:
    """Join the hashed keys; return the mapping, and a record of each step, in order.

    Joining starts at the label table and continues with the first table in the order of
    the query that is joined to those before; a LEFT JOINed table waits for all tables
    before it. Any number of predicates may tie a table to the others. NULL keys, and
    keys of rows that a LEFT JOIN did not find, match nothing. Of the label table's
    rows, (n,), those that are not ``sampled`` take no part. ``filters`` says by table
    which conditions have removed rows of it, for messages. ``answering`` are by join
    the tables whose last row is joined where no other is.

    Raises:
        MappingError: the two sides of a join hash different types, a step would make
            more rows than the ``limits`` allow, or the join has no rows.
    """
    order = join_order(joins, list(rows), label_table, outer)
    sides = [
        (
            join,
            keys[join.left, join.left_key],
            keys[join.right, join.right_key],
            answering.get(number, ""),
        )
        for number, join in enumerate(joins)
    ]
    for side in sides:
        check_kinds(*side)
    count = rows[label_table]
    start: RowNumbers = np.arange(count, dtype=number_type(count))
    if sampled is not None:
        start = start[sampled]
    joined: dict[str, RowNumbers] = {label_table: start}
    steps = [JoinStep(label_table, len(joined[label_table]))]
    for table, numbers in order[1:]:
        # of one step at a time: codes, and what matches, are as long as the tables
        predicates = [(joins[number], join_codes(*sides[number])) for number in numbers]
        match = match_rows(sides_of(table, predicates), joined)
        on = " AND ".join(joins[number].text for number in numbers)
        is_outer = table in outer
        lost = (0, 0) if is_outer else match.lost_rows(label_table, count)
        step = describe_step(table, on, match, lost, is_outer=is_outer)
        repeated = tuple(repeated_keys(table, match, predicates))
        advice = _advice_on_form(step, joins, keys, filters)
        steps.append(replace(step, advice=advice, repeated_keys=repeated))
        if step.rows > limits.rows:
            raise MappingError(
                f"the join multiplies rows: {steps[-1]}; max-joined-rows allows "
                f"{limits.rows}. Before it: {'; '.join(map(str, steps[:-1]))}. "
                f"Aggregate {table} in a sub-query (GROUP BY its join key), add a "
                "predicate to its ON, or raise max-joined-rows"
            )
        joined = join_rows(
            match,
            table,
            step.rows,
            is_outer=is_outer,
            is_mapped=limits.are_mapped(step.rows),
        )
        del predicates, match
    if not steps[-1].rows:
        sizes = ", ".join(f"{step.table}: {step.rows}" for step in steps)
        hint = why_unmatched(
            next(step for step in steps if not step.rows), joins, keys, filters
        )
        raise MappingError(
            f"the join has no rows; rows left after each step: {sizes}{hint}"
        )
    tables = {table: TableRows(joined[table], count) for table, count in rows.items()}
    return TableMapping(tables), tuple(steps)


def label_rows(steps: Sequence[JoinStep]) -> dict[str, object]:
    """Return the report's counts of label rows: all, joined, and lost by each step."""
    lost: list[dict[str, object]] = []
    for step in steps:
        if not step.lost_label_rows:
            continue
        entry = {"step": f"{step.table} on {step.on}", "rows": step.lost_label_rows}
        others = {"keyless": step.lost_keyless_rows, "advice": step.advice}
        lost.append(entry | {name: value for name, value in others.items() if value})
    return {
        "rows": steps[0].rows,
        "joined": steps[0].rows - sum(step.lost_label_rows for step in steps),
        "lost": lost,
    }


def why_unmatched(
    step: JoinStep, joins: Sequence[Join], keys: Keys, filters: Mapping[str, str]
) -> str:
    """Return why keys of a step may not match, by filters or types; else ""."""
    reason = filters.get(step.table) or _advice_on_texts(step, joins, keys)
    return f"; {reason}" if reason else ""


def _advice_on_texts(step: JoinStep, joins: Sequence[Join], keys: Keys) -> str:
    """Return what to do about keys of a step that are texts; "" if none are."""
    for join in joins:
        columns = keys[join.left, join.left_key]
        if join.text in step.on and any("text" in column.kind for column in columns):
            return (
                f"keys of {join.text} are texts, which must agree in case, spaces "
                "and leading zeros: try LOWER(TRIM(...)) on both sides, or "
                "CAST(... AS BIGINT) where they are numbers"
            )
    return ""


def _advice_on_form(
    step: JoinStep, joins: Sequence[Join], keys: Keys, filters: Mapping[str, str]
) -> str:
    """Return what to do about texts of which some with a key find none; else "".

    Where most find none a warning says so. Rows before a cutoff may well be none.
    """
    unmatched = step.unmatched_before - step.keyless_before
    keyed = step.rows_before - step.keyless_before
    lacks_some = unmatched > MOST_UNMATCHED * keyed
    lacks_most = 2 * step.unmatched_before > step.rows_before
    is_timed = any(
        key.kind == "time"
        for join in joins
        if join.text in step.on
        for key in keys[join.left, join.left_key]
    )
    if step.table in filters or is_timed or lacks_most or not lacks_some:
        return ""
    return _advice_on_texts(step, joins, keys)


def join_order(
    joins: Sequence[Join], tables: Sequence[str], first: str, outer: Collection[str]
) -> list[tuple[str, list[int]]]:
    """Return (table, its predicates), every table after one that it is joined to."""
    order: list[tuple[str, list[int]]] = [(first, [])]
    joined = {first}
    remaining = [table for table in tables if table != first]
    while remaining:
        for table in remaining:
            if table in outer and not joined.issuperset(tables[: tables.index(table)]):
                continue
            predicates = [
                number
                for number, join in enumerate(joins)
                if table in (join.left, join.right)
                and {join.left, join.right} <= joined | {table}
            ]
            if predicates:
                break
        else:
            raise MappingError(f"tables {remaining} are not joined to {sorted(joined)}")
        order.append((table, predicates))
        joined.add(table)
        remaining.remove(table)
    return order
