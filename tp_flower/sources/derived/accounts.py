"""Whose account a table's releases are charged to: that of the rows behind it.

A derived table has the rows of others, so what leaves of it tells of theirs. Where such
tables have rules of their own, one account counts for all of them: quotas, and how
often scores may leave. An epsilon is of a table's own rows or units, of which one row
of another table may be in many: no account adds these up, so a table with a budget
shares its rows with no other that takes part.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from tp_flower.errors import SourceError
from tp_flower.sources.policy import ACCOUNT_DIGITS, ACCOUNT_PREFIX
from tp_flower.sources.tables_file import ShardSource


def source_id(source: ShardSource) -> str:
    """Return the identifier of a shard's rows in the ledger and for noisy labels.

    It is a hash of their location, regardless of the table's name or how they are read;
    for rows that move, a hash of the policy's ``budget-name``, or the account that it
    names; for derived rows, of the rows that they are made of, whatever the SELECT.
    Data frames get a new one in every grid.
    """
    if account := named_account(source.policy.budget_name):
        return account
    if source.policy.budget_name:
        return _digest(["named", source.policy.budget_name])
    if source.derived is None:
        return _place_id(source)
    ids = sorted({source_id(shard) for shard in read_shards(source)})
    return ids[0] if len(ids) == 1 else _digest(["derived", *ids])


def account_name(identifier: str) -> str:
    """Return the ``budget-name`` by which rows are counted in an account so far."""
    return f"{ACCOUNT_PREFIX}{identifier}"


def named_account(budget_name: str) -> str:
    """Return the identifier that a ``budget-name`` names; "" for any other name.

    >>> named_account(account_name("5a")), named_account("payments")
    ('5a', '')
    """
    if not budget_name.startswith(ACCOUNT_PREFIX):
        return ""
    return budget_name.removeprefix(ACCOUNT_PREFIX)


def _place_id(source: ShardSource) -> str:
    """Return the identifier of the location of rows that are not derived."""
    if source.database is not None:
        return _digest(["database", str(source.database)])
    if source.path is not None:
        return _digest(["path", os.path.realpath(source.path), source.relation])
    return _digest(["frame", source.token, source.table, source.index])


def _digest(location: list[object]) -> str:
    return hashlib.sha256(json.dumps(location).encode()).hexdigest()[:ACCOUNT_DIGITS]


def read_shards(source: ShardSource) -> Iterator[ShardSource]:
    """Yield the shards that a SELECT reads, in the order of its tables."""
    if source.derived is not None:
        for shards in source.derived.tables.values():
            yield from shards


def read_tables(sources: Iterable[ShardSource]) -> set[str]:
    """Return the tables that the SELECTs of other tables read."""
    return {
        shard.table
        for source in sources
        for shard in read_shards(source)
        if shard.table != source.table
    }


def stored_shards(source: ShardSource) -> Iterator[ShardSource]:
    """Yield the shards of files, frames and databases that a shard's rows come from."""
    if source.derived is None:
        yield source
    for shard in read_shards(source):
        yield from stored_shards(shard)


def share_rows(one: ShardSource, other: ShardSource) -> bool:
    """Return whether two shards have rows in common, as they are or derived."""
    behind = {
        identifier
        for shard in stored_shards(one)
        for identifier in (source_id(shard), _place_id(shard))
    }
    return any(
        not behind.isdisjoint((source_id(shard), _place_id(shard)))
        for shard in stored_shards(other)
    )


def check_shared_rows(sources: Sequence[ShardSource]) -> None:
    """Refuse derived tables whose releases the policies of others would not count.

    A table without a policy takes part in nothing, and its rows are free to be read.
    """
    for source, other in permutations(sources, 2):
        if (
            source.derived is not None
            and source.site == other.site
            and source.has_policy
            and other.has_policy
            and share_rows(source, other)
        ):
            _check_account(source, other)


def _check_account(source: ShardSource, other: ShardSource) -> None:
    """Refuse policies of a derived table and another of its rows that do not fit."""
    both = f"tables {source.table!r} ('sql') and {other.table!r} have rows in common"
    free = (
        f"leave out the policy of {other.table!r}: a table without one takes part in "
        "no run, and 'sql' of others may read it"
    )
    if source.table == other.table:
        free = "leave one shard of the table with these rows"
    for table in (source, other):
        if table.policy.epsilon is not None or table.policy.privacy_unit:
            rule = "privacy-unit" if table.policy.epsilon is None else "epsilon"
            raise SourceError(
                f"{both}, and {rule} of {table.table!r} does not count what leaves of "
                f"the other: {free}"
            )
    if other.policy.is_open:
        return
    if source.policy.is_open:
        raise SourceError(
            f"{both}, and the policy of {source.table!r} is open, so that it lets "
            f"leave what that of {other.table!r} does not: write its rules, or {free}"
        )
    if source_id(source) != source_id(other):
        raise SourceError(
            f"{both}, and queries and scores of each would be counted without the "
            f"other's: write the same 'budget-name' into both policies, or {free}. "
            "`tp-flower account` has the names of the accounts so far"
        )
