"""Accounts that would begin anew, because a table's rows are named otherwise.

A ledger counts by the identifier of rows (``source_id``): of a derived table by the
tables that its SELECT reads, of another by its place. An owner who writes a second
table into the SELECT, or moves a file, so begins an account of which nothing is spent:
budgets, quotas and score vectors would be allowed a second time, of the same persons.
So a query of such a table reads nothing until its policy's ``budget-name`` names an
account: the one so far, or, knowingly, a new one.
"""

from collections.abc import Iterable

from client_apps.data.ledger import Ledger, RoundLedger
from tp_flower.errors import PolicyError
from tp_flower.sources.derived.accounts import (
    account_name,
    named_account,
    source_id,
    stored_shards,
)
from tp_flower.sources.entries import FOR_OWNER
from tp_flower.sources.shards import ShardSource


def earlier_accounts(
    ledger: Ledger | RoundLedger,
    source: ShardSource,
    shards: Iterable[ShardSource],
    after: str = "",
) -> list[str]:
    """Return the accounts of a shard's table in which no shard is counted now.

    The latest is the last. ``shards`` are all of the site. Of the accounts, only those
    that begin after the last query of the account ``after``.
    """
    counted = {
        source_id(shard)
        for shard in shards
        if (shard.table, shard.site) == (source.table, source.site)
    }
    accounts = ledger.accounts(source.table, source.site, after)
    return [name for name in accounts if name not in counted]


def check_account(
    ledger: Ledger | RoundLedger, source: ShardSource, shards: Iterable[ShardSource]
) -> None:
    """Refuse to read a shard whose account would begin anew without its owner's word.

    ``shards`` are all of the site. An open policy counts nothing, and data frames are
    of a process, which identifies them anew.
    """
    policy = source.policy
    if any(shard.token is not None for shard in stored_shards(source)):
        return
    named = named_account(policy.budget_name)
    if policy.is_open or (policy.budget_name and not named):
        return
    if named and ledger.queries(named):
        return
    earlier = earlier_accounts(ledger, source, shards, after=source_id(source))
    if earlier:
        raise PolicyError(
            f"the account of table {source.table!r} would begin anew: what has left of "
            "its rows is counted by another name, and nothing is read of them"
            f"{FOR_OWNER}{_change(source)}. Write into its policy budget-name = "
            f'"{account_name(earlier[-1])}" to go on with the account so far, or a '
            "name of your own to begin a new one, of which nothing is spent"
        )


def _change(source: ShardSource) -> str:
    """Return what has changed in a shard's entry, as far as it shows."""
    if source.policy.budget_name:
        return f"the ledger has no account {source.policy.budget_name!r}"
    if source.derived is not None:
        return f"the SELECT of {source.table!r} reads other tables than before"
    return f"the rows of {source.table!r} are at another place than before"
