"""What ``supernode.sh --check`` tries of an owner's tables before a SuperNode starts.

Refused is what would stop every query of a table; a warning says what its owner may not
have meant.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from client_apps.data.key_files import read_allowed_keys
from client_apps.data.ledger import open_ledger
from client_apps.privacy.accounts import check_account
from tp_flower.errors import SourceError
from tp_flower.node_config import ALLOWED_KEYS
from tp_flower.sources.derived.accounts import read_tables
from tp_flower.sources.policy import Policy, has_name
from tp_flower.sources.shards import ShardSchema, ShardSource, describe, load_tables

_MODELS: Final = ("linear", "mlp", "trees", "centres")
_DIGEST: Final = re.compile("sha256:[0-9a-f]{64}")


def check_tables(tables: str, state: str, allowed_keys: str = "") -> Iterator[str]:
    """Yield a line for each shard of a tables file, and one for each warning.

    Raises TPFlowerError if a table cannot be read, has no policy and no other's SELECT
    reads it, has rules about columns or sites that do not exist, or would begin its
    account anew.
    """
    sources = load_tables(tables)
    ledger = open_ledger(state)
    names: Collection[str] | None = None
    if allowed_keys:
        names = read_allowed_keys(Path(allowed_keys)).values()
    read = read_tables(sources)
    for source in sources:
        if not source.has_policy and source.table not in read:
            source.check_policy()
        schema = describe(source)
        counts = f"{schema.rows:,} rows, {len(schema.columns)} columns"
        line = f"  {source.table} of {source.site}: {counts}"
        if not source.has_policy:
            yield f"{line}; without a policy it takes part in no run, 'sql' reads it"
            continue
        _check_names(source, schema, names)
        check_account(ledger, source, sources)
        yield line
        for warning in _warnings(source, schema):
            yield f"    warning: {warning}"


def _check_names(
    source: ShardSource, schema: ShardSchema, names: Collection[str] | None
) -> None:
    """Refuse rules about columns that the table lacks, or sites without a key."""
    policy = source.policy
    try:
        policy.check_names({**schema.columns, **schema.unread})
    except SourceError as error:
        raise SourceError(f"{source}: {error}") from None
    for name in policy.partners or ():
        if names is not None and name not in (*names, source.site):
            raise SourceError(
                f"{source}: 'partners' of its policy names {name!r}, to which "
                f"{ALLOWED_KEYS} gives no key; it has {', '.join(sorted(names))}"
            )


def _warnings(source: ShardSource, schema: ShardSchema) -> Iterator[str]:
    """Yield what a policy's owner may not have meant."""
    policy = source.policy
    if schema.rows < policy.min_rows:
        yield (
            f"min-rows = {policy.min_rows} is more than the table has: every query is "
            "refused"
        )
    if has_name(policy.partners or (), source.site):
        yield f"'partners' lists {source.site!r} itself, which always takes part"
    for name in policy.join_only:
        if has_name(policy.columns or (), name):
            yield f"no feature may read {name!r} of 'columns': it is in 'join-only'"
    yield from _unknown_values(policy)
    if (policy.most_scores or 0) > 1:
        yield (
            f"scores-per-rank = {policy.most_scores:g} is above 1: as many score "
            "vectors as the rows vary in directions tell the features"
        )


def _unknown_values(policy: Policy) -> Iterator[str]:
    """Yield the texts in a policy's lists that no run has."""
    for digest in policy.approved_runs or ():
        if not _DIGEST.fullmatch(digest):
            yield f"'approved-runs' has {digest!r}, which is no run's digest"
    for model in policy.models or ():
        if model not in _MODELS and ":" not in model:
            yield f"'models' has {model!r}, which is none of {', '.join(_MODELS)}"
