"""Cover: the other tables of a query that a table's scores hide in.

In a joined row the tables' scores are added up. A table hides in the sum only if others
vary, and the server, which chooses query and encoders, cannot be asked. So each shard
states whether its rows vary in ``LEAST_RANK`` directions, sealed under the key that the
run's sites share, and each site counts the tables whose shards have all stated so, none
of them at this site.

**Guarantee.** Without the key of the run the server forges no statement, changes none
and brings none of another run or shard; which shards there are is in the run's
proposal: it hides none. A site of the run can state what it likes about any shard: a
dummy table that varies is a site that sides with the server. That is for the owner's
``partners``.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from client_apps.privacy.keys import own_node, run_key
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import SiteError
from tp_flower.features.ranks import LEAST_RANK
from tp_flower.keyed_hash import RUN_GROUP, KeyedHasher
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.protocol.codec import parse
from tp_flower.protocol.proposal import ProposedPart
from tp_flower.protocol.rank_messages import CoverStatement

_DOCUMENT: Final = "cover"
_PURPOSE: Final = "cover statements v1"


def state_cover(site: Site, number: int, rank: int, rows: int) -> AnyArray:
    """Return a part's sealed statement about its rows."""
    statement = CoverStatement(site=run_key(site), rows=rows, varies=rank >= LEAST_RANK)
    text = msgspec.json.encode(statement)
    return _seal(site).seal(text, _DOCUMENT, number, site.round.digest)


def check_cover(site: Site, number: int, sealed: Mapping[str, AnyArray]) -> None:
    """Refuse scores of a part that too few tables of other sites hide.

    ``sealed`` are the statements that the server relays, by participant; which tables
    there are, in which shards, the site has from the run's proposal.
    """
    policy = site.source(number).policy
    proposal = site.terms.proposal
    if not policy.cover:
        return
    statements = _statements(site, sealed)
    table = proposal.parts[number].table
    this_node = own_node(site)
    sites_here = {
        part.site for part in proposal.parts.values() if part.node == this_node
    }
    covering = [
        name
        for name in proposal.tables
        if name != table
        and _covers(proposal.shards_of(name), sites_here, statements, site.public_keys)
    ]
    policy.check_cover(table, len(covering))


def _covers(
    shards: Mapping[int, ProposedPart],
    sites_here: Collection[str],
    statements: Mapping[int, CoverStatement],
    public_keys: Mapping[str, str],
) -> bool:
    """Return whether all shards of a table are at other sites, and vary.

    Each of those sites must have stated that its shard varies.
    """
    for number, part in shards.items():
        statement = statements.get(number)
        if statement is None or part.site in sites_here:
            return False
        if statement.site != public_keys[part.node]:
            return False
        # none of an empty shard's rows is joined
        if statement.rows and not statement.varies:
            return False
    return any(statements[number].rows for number in shards)


def _statements(
    site: Site, sealed: Mapping[str, AnyArray]
) -> dict[int, CoverStatement]:
    """Return the statements by participant.

    SiteError for one that no site of the run has made.
    """
    seal = _seal(site)
    statements = {}
    for name, content in sealed.items():
        part = parse(name, "cover", int)
        try:
            text = seal.open(content, _DOCUMENT, part)
        except SiteError:
            raise SiteError(
                f"the statement about part {part} cannot be opened: no site of this "
                "run has sealed it for this part"
            ) from None
        statements[part] = msgspec.json.decode(text, type=CoverStatement)
    return statements


def _seal(site: Site) -> ShardSeal:
    key = KeyedHasher(site.group_key(RUN_GROUP)).purpose(_PURPOSE).secret
    return ShardSeal(key, site.run, "", ())
