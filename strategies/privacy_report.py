"""What a run says of its privacy: what left, what covered it, and what it cost.

The `privacy` entry of `report.json`::

    adversary, delta    of the figures below: who sees every message of the run
    messages  [{message, to, carries, protection}]   every message, in plain words
    ledger    {site: [{release: {table, source, part, action, what, unit, neighbours,
               adversary, mechanism or null, scope, site}, limit, used, ...}]}
    totals    [{site, table, source, epsilon, delta, uncovered: [what, ...]}]

The ledger is each node's own account of the run. `mechanism` is the cost of one use,
`used` how often the most used key was used, `limit` how often it was planned. A total
composes all covered releases of a table's rows at one site; `uncovered` lists the
releases that no mechanism covers: the epsilon says nothing of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from strategies.disclosures import Release as Message
from tp_flower.errors import ReplyError
from tp_flower.methods import SERVER
from tp_flower.privacy.accounting import epsilon
from tp_flower.privacy.mechanisms import Mechanism, Release
from tp_flower.settings import PrivacySettings

Account = Mapping[str, Any]
"""One release of a site's ledger, with how it was used."""


def privacy_report(
    messages: Iterable[Message],
    ledgers: Mapping[str, Sequence[Account]],
    settings: PrivacySettings,
    *,
    is_complete: bool,
) -> dict[str, object]:
    """Return the `privacy` entry of a report.

    Args:
        messages: who learns what, in the order of the messages.
        ledgers: by site, its account of the run.
        settings: of the run; its delta is that of the totals.
        is_complete: whether the run has ended well: a run that failed counts what it
            had planned, as its sites do until they know better.

    Raises:
        ReplyError: an account is malformed.
    """
    totals = [
        total
        for site, accounts in ledgers.items()
        for total in _totals(site, accounts, settings, is_complete=is_complete)
    ]
    return {
        "adversary": SERVER,
        "delta": settings.delta,
        "messages": [dict(vars(message)) for message in messages],
        "ledger": ledgers,
        "totals": totals,
    }


def _totals(
    site: str,
    accounts: Sequence[Account],
    settings: PrivacySettings,
    *,
    is_complete: bool,
) -> list[dict[str, object]]:
    """Return the totals of one site, by source in the order of its account."""
    spent: dict[str, list[Mechanism]] = {}
    uncovered: dict[str, list[str]] = {}
    first: dict[str, Release] = {}
    for account in accounts:
        release, times = _read(site, account, is_complete=is_complete)
        first.setdefault(release.source, release)
        own = uncovered.setdefault(release.source, [])
        if release.mechanism is None:
            if release.what not in own:
                own.append(release.what)
            continue
        used = replace(release.mechanism, count=release.mechanism.count * times)
        spent.setdefault(release.source, []).append(used)
    return [
        {
            "site": release.site or site,
            "table": release.table,
            "source": source,
            "epsilon": epsilon(
                spent.get(source, []), settings.delta, settings.accountant
            ),
            "delta": settings.delta,
            "uncovered": uncovered[source],
        }
        for source, release in first.items()
    ]


def _read(site: str, account: Account, *, is_complete: bool) -> tuple[Release, int]:
    """Return a release and how often it counts; a charge counts once."""
    try:
        release = Release.from_json(account["release"])
        times = int(account.get("used" if is_complete else "limit", 1))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ReplyError(f"site {site!r} sent a malformed ledger") from None
    return release, times
