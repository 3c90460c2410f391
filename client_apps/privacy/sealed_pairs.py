"""Keys and cutoffs that sites seal for the LATERAL sub-queries of others.

The sites of the table around a sub-query seal the distinct pairs of its rows, key by
keyed hash and cutoff as it is, for every node that has a part of the sub-query's table.
The server relays them with the request for the rows.

**Guarantee.** Key of the seal and key of the hashes are derived from the keys of the
two sites in this run, and from its proposal: nobody else has them, not the other sites
either, if the public keys are those of the sites (``privacy/keys.py``). The recipient
states which part of which run it takes them for: the server can leave them out, and the
run ends, but neither change them nor bring others. It learns their length, rounded up.
The recipient learns at which cutoffs each key has rows. It recognises its own keys, and
others that it guesses, for it has the key of the hashes; the hashes of the rest are new
in every run. It cannot tell whether what it is sent are cutoffs of rows: a site may
make pairs up, as it may rows.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from client_apps.privacy.keys import PAIR_FROM, PAIR_TO
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError, QueryError, SiteError
from tp_flower.extraction.pairs import merge_pairs
from tp_flower.extraction.sealed_pairs import (
    MOST_PAIRS,
    KeyedPairs,
    hash_pairs,
    match_pairs,
    read_key_texts,
    read_own_keys,
)
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.protocol.codec import decode, encode, parse
from tp_flower.protocol.cutoff_messages import CutoffPairs, PairsOfPart
from tp_flower.protocol.packet import bytes_of, packet_of
from tp_flower.protocol.setup_messages import ExtractPart
from tp_flower.query.cutoffs import SEALED_TYPES
from tp_flower.query.lateral_tables import pair_names
from tp_flower.sources.shards import ShardSource
from tp_flower.terms.cutoffs import SealedPairs
from tp_flower.terms.groups import compared_keys

_PURPOSE: Final = "cutoffs {} v1"


def seal_pairs(
    site: Site, source: ShardSource, pairs: SealedPairs
) -> Iterator[tuple[str, AnyArray]]:
    """Yield a part's pairs, by node and name, sealed for each node that takes them."""
    fragment = site.terms.fragments[pairs.part]
    order_key = site.tables.order_key
    texts = read_key_texts(source, fragment, pairs.key, pairs.cutoff, order_key)
    for node in site.terms.recipients[pairs]:
        seal, hasher = _seal_and_hasher(site, PAIR_TO.format(node), pairs)
        keyed = hash_pairs(*texts, hasher)
        body = PairsOfPart(
            type=keyed.type,
            kinds=keyed.kinds,
            hashes=keyed.hashes,
            cutoffs=keyed.cutoffs,
        )
        text = bytes_of(encode(CutoffPairs({pairs.part: body})))
        sealed = seal.seal(text, pairs.name, pairs.part, site.round.digest)
        yield pairs.name_for(node), sealed


def check_sealed(site: Site, bodies: Mapping[int, ExtractPart]) -> None:
    """Refuse other sealed pairs than those that this site's parts take, or fewer."""
    taken = {pairs.name for n in bodies for pairs in site.terms.sealed_pairs.get(n, ())}
    names = (name for body in bodies.values() for name in body.cutoffs)
    agree("cutoffs", sorted(taken), sorted(names))


def open_pairs(
    site: Site, number: int, source: ShardSource, bodies: Mapping[int, ExtractPart]
) -> pa.Table:
    """Return the pairs of a part's own keys, of those that other sites have sealed."""
    sealed = {
        name: array for body in bodies.values() for name, array in body.cutoffs.items()
    }
    fragment = site.terms.fragments[number]
    cutoffs = fragment.subquery and fragment.subquery.cutoffs
    around = cutoffs.table if cutoffs else ""
    key, _ = compared_keys(site.terms.proposal, fragment.table, around)
    names = pair_names(fragment, key)
    own_keys, kinds = read_own_keys(source, fragment, names, site.tables.order_key)
    tables = []
    total = 0
    for pairs in site.terms.sealed_pairs[number]:
        keyed, hasher = _open(site, pairs, sealed[pairs.name])
        total += len(keyed.cutoffs)
        if len(own_keys) and len(keyed.cutoffs) and keyed.kinds != kinds:
            raise SiteError(
                f"the keys of LATERAL sub-query {fragment.table!r} differ in type from "
                f"those of table {around!r}: {kinds} and {keyed.kinds}; cast one side "
                "in the query"
            )
        if total > MOST_PAIRS:
            raise SiteError(
                f"LATERAL sub-query {fragment.table!r} is sent more than {MOST_PAIRS} "
                "pairs of a key and a cutoff by all sites together"
            )
        tables.append(match_pairs(own_keys, keyed, hasher))
    return merge_pairs(tables, around)


def _open(
    site: Site, pairs: SealedPairs, sealed: AnyArray
) -> tuple[KeyedPairs, KeyedHasher]:
    """Return the pairs that another site has sealed, and the hash of their keys."""
    part = site.terms.proposal.parts[pairs.part]
    seal, hasher = _seal_and_hasher(site, PAIR_FROM.format(part.node), pairs)
    try:
        text = seal.open(sealed, pairs.name, pairs.part)
    except SiteError:
        raise SiteError(
            f"the cutoffs of table {part.table!r} cannot be opened: site {part.site!r} "
            "has not sealed them for this site, in this run and for this sub-query"
        ) from None
    try:
        packet = parse(text, "cutoffs", packet_of)
        body = decode(CutoffPairs, packet).parts[pairs.part]
        if body.type not in SEALED_TYPES:
            raise QueryError(f"they are of type {body.type}")
        keyed = KeyedPairs(body.hashes, body.cutoffs, body.type, body.kinds).check()
    except (KeyError, MessageError, QueryError) as error:
        raise SiteError(
            f"the cutoffs that site {part.site!r} has sealed of table {part.table!r} "
            f"are refused: {error}"
        ) from None
    return keyed, hasher


def _seal_and_hasher(
    site: Site, group: str, pairs: SealedPairs
) -> tuple[ShardSeal, KeyedHasher]:
    """Return the seal of pairs between two sites, and the hash of the keys in them."""
    keys = KeyedHasher(site.group_key(group))
    seal = ShardSeal(keys.purpose(_PURPOSE.format("seal")).secret, site.run, "", ())
    return seal, keys.purpose(_PURPOSE.format(f"keys {pairs.name}"))
