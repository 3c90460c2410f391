"""Keys and partial answers that the shards of a LATERAL sub-query's table seal.

Rows of one key may be in several shards. A shard seals the keyed hashes of its keys for
each later one, which seals in turn what its own rows add to the answers about those
keys that both have. The first shard that has a key makes its answer; to the server the
others have no rows of it.

**Guarantee.** Keys of seals and hashes are derived from the keys of the two sites in
this run, and from its proposal, as those of cutoffs (``privacy/sealed_pairs.py``): the
server learns lengths, rounded up, and can leave a text out, which ends the run. A later
shard learns which of its keys the earlier one has, and of any other key that it guesses
whether that one has it. An earlier shard learns, for each key that both have and each
cutoff, the values of the later shard's partial columns
(:mod:`tp_flower.extraction.partials`); where these are of a single row, they tell that
row, and cutoffs at which a count changes tell the times of rows. It may send keys that
it guesses for its own, and is told the same of these. Of other keys neither is told
anything. Answers, too, a site may make up, as it may rows.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from client_apps.privacy.keys import PAIR_FROM, PAIR_TO
from client_apps.privacy.proposal_checks import agree
from client_apps.privacy.sealed_pairs import open_pairs
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError, QueryError, SiteError
from tp_flower.extraction.sealed_pairs import TEXT, KeyedPairs, read_own_keys
from tp_flower.extraction.shard_partials import (
    KeyedPartials,
    ShardPartials,
    are_among,
    hash_partials,
    merge_partials,
    read_partials,
)
from tp_flower.keyed_hash import KeyedHasher, order_of_hashes
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.protocol.codec import decode, encode, parse
from tp_flower.protocol.cutoff_messages import (
    KeysOfPart,
    PartialsOfPart,
    ShardKeys,
    ShardPartialAnswers,
)
from tp_flower.protocol.packet import bytes_of, packet_of
from tp_flower.protocol.setup_messages import ExtractPart
from tp_flower.query.cutoffs import SEALED_TYPES
from tp_flower.query.lateral_tables import pair_names
from tp_flower.sources.shards import ShardSource
from tp_flower.terms.groups import compared_keys
from tp_flower.terms.partials import Overlap

_PURPOSE: Final = "partials {} v1"
Bodies = Mapping[int, ExtractPart]


def seal_keys(
    site: Site, number: int, source: ShardSource
) -> Iterator[tuple[str, AnyArray]]:
    """Yield a part's keys, by name, sealed for each later shard of its table."""
    keys, kinds = _own_keys(site, number, source)
    for overlap in site.terms.overlaps:
        if overlap.earlier != number:
            continue
        hashes = _hasher(site, overlap, number).tag_texts(keys[TEXT])
        hashes = hashes[order_of_hashes(hashes)]
        body = KeysOfPart(kinds=kinds, hashes=hashes)
        text = bytes_of(encode(ShardKeys({number: body})))
        seal = _seal(site, overlap, number, is_sender=True)
        name = overlap.name
        yield name, seal.seal(text, f"keys {name}", number, site.round.digest)


def seal_partials(
    site: Site, number: int, source: ShardSource, bodies: Bodies
) -> Iterator[tuple[str, AnyArray]]:
    """Yield a part's partial answers, by name, sealed for each earlier shard."""
    keys, kinds = _own_keys(site, number, source)
    partials = _own_partials(site, number, source, bodies)
    for overlap, texts in _keys_of_others(site, number, keys, kinds, bodies).items():
        keyed = hash_partials(
            partials.of_keys(texts), kinds, _hasher(site, overlap, number)
        )
        body = PartialsOfPart(
            type=keyed.pairs.type,
            kinds=kinds,
            types=list(keyed.types),
            texts=list(keyed.texts),
            hashes=keyed.pairs.hashes,
            cutoffs=keyed.pairs.cutoffs,
            words=keyed.words,
            present=keyed.present.astype(np.uint8),
        )
        text = bytes_of(encode(ShardPartialAnswers({number: body})))
        seal = _seal(site, overlap, number, is_sender=True)
        name = overlap.name
        yield name, seal.seal(text, f"partials {name}", number, site.round.digest)


def merged_answers(
    site: Site, number: int, source: ShardSource, bodies: Bodies
) -> pa.Table:
    """Return the pairs that a part answers about, beside its answers.

    They are about its own keys that no earlier shard has.
    """
    keys, kinds = _own_keys(site, number, source)
    partials = _own_partials(site, number, source, bodies)
    elsewhere = _keys_of_others(site, number, keys, kinds, bodies).values()
    is_own = np.ones(len(keys), np.bool_)
    for texts in elsewhere:
        is_own &= ~pa.compute.is_in(keys[TEXT], value_set=texts).to_numpy()
    keys = keys.filter(pa.array(is_own))
    others = [
        (_open_partials(site, overlap, bodies, len(partials.types), kinds), hasher)
        for overlap in site.terms.overlaps
        if overlap.earlier == number
        for hasher in [_hasher(site, overlap, number)]
    ]
    table = site.terms.proposal.parts[number].table
    own = partials.of_keys(keys[TEXT].combine_chunks())
    try:
        return merge_partials(table, own, keys, others)
    except QueryError as error:
        raise SiteError(f"partial answers of table {table!r}: {error}") from None


def check_sealed_shards(site: Site, bodies: Bodies, *, with_partials: bool) -> None:
    """Refuse other sealed keys and partial answers than this site's parts take."""
    for number, body in bodies.items():
        overlaps = site.terms.overlaps
        keys = [each.name for each in overlaps if each.later == number]
        agree("sealed keys", sorted(keys), sorted(body.sealed_keys))
        answers = [each.name for each in overlaps if each.earlier == number]
        expected = sorted(answers) if with_partials else []
        agree("sealed partials", expected, sorted(body.sealed_partials))


def _own_keys(site: Site, number: int, source: ShardSource) -> tuple[pa.Table, str]:
    """Return the distinct keys of a part with their texts, and the kinds of values."""
    fragment = site.terms.fragments[number]
    names = _names(site, number)
    return read_own_keys(source, fragment, names, site.tables.order_key)


def _names(site: Site, number: int) -> list[str]:
    """Return the columns of a part's pairs, in the order in which a join has them."""
    fragment = site.terms.fragments[number]
    for join in site.terms.proposal.joins:
        if fragment.table in (join.left, join.right):
            other = join.right if join.left == fragment.table else join.left
            key, _ = compared_keys(site.terms.proposal, fragment.table, other)
            return pair_names(fragment, key)
    raise SiteError(f"LATERAL sub-query {fragment.table!r} is not joined")


def _own_partials(
    site: Site, number: int, source: ShardSource, bodies: Bodies
) -> ShardPartials:
    fragment = site.terms.fragments[number]
    cutoffs = fragment.subquery and fragment.subquery.cutoffs
    pairs = None
    if cutoffs and cutoffs.sealed:
        pairs = open_pairs(site, number, source, bodies)
    names = _names(site, number)
    return read_partials(source, fragment, names, pairs, site.tables.order_key)


def _keys_of_others(
    site: Site, number: int, keys: pa.Table, kinds: str, bodies: Bodies
) -> dict[Overlap, pa.Array]:
    """Return which of a part's keys an earlier shard has first, by their texts."""
    is_free = np.ones(len(keys), np.bool_)
    found = {}
    for overlap in site.terms.overlaps:
        if overlap.later != number:
            continue
        body = _open_keys(site, overlap, bodies)
        if len(keys) and len(body.hashes) and body.kinds != kinds:
            raise SiteError(
                f"the keys of table {site.terms.proposal.parts[number].table!r} differ "
                f"in type between its shards: {body.kinds} and {kinds}; CAST them in "
                "the query"
            )
        hashes = _hasher(site, overlap, number).tag_texts(keys[TEXT])
        is_there = are_among(hashes, body.hashes) & is_free
        is_free &= ~is_there
        found[overlap] = keys[TEXT].combine_chunks().filter(pa.array(is_there))
    return found


def _open_keys(site: Site, overlap: Overlap, bodies: Bodies) -> KeysOfPart:
    """Return the keys that an earlier shard has sealed for a later one, here."""
    sealed = bodies[overlap.later].sealed_keys[overlap.name]
    text = _open(site, overlap, overlap.earlier, "keys", sealed)
    try:
        packet = parse(text, "keys", packet_of)
        return decode(ShardKeys, packet).parts[overlap.earlier]
    except (KeyError, MessageError) as error:
        raise _refused(site, overlap.earlier, "keys", error) from None


def _open_partials(
    site: Site, overlap: Overlap, bodies: Bodies, columns: int, kinds: str
) -> KeyedPartials:
    """Return the partial answers that a later shard has sealed for an earlier one."""
    sealed = bodies[overlap.earlier].sealed_partials[overlap.name]
    text = _open(site, overlap, overlap.later, "partials", sealed)
    try:
        packet = parse(text, "partials", packet_of)
        body = decode(ShardPartialAnswers, packet).parts[overlap.later]
        if body.type not in SEALED_TYPES:
            raise QueryError(f"their cutoffs are of type {body.type}")
        pairs = KeyedPairs(body.hashes, body.cutoffs, body.type, kinds)
        return KeyedPartials(
            pairs,
            tuple(body.types),
            body.words,
            body.present.astype(np.bool_),
            tuple(body.texts),
        ).check(columns)
    except (KeyError, MessageError, QueryError) as error:
        raise _refused(site, overlap.later, "partial answers", error) from None


def _open(
    site: Site, overlap: Overlap, sender: int, document: str, sealed: AnyArray
) -> bytes:
    """Return the text of a document that a part has sealed for another one, here."""
    recipient = overlap.later if sender == overlap.earlier else overlap.earlier
    seal = _seal(site, overlap, recipient, is_sender=False)
    try:
        return seal.open(sealed, f"{document} {overlap.name}", sender)
    except SiteError:
        part = site.terms.proposal.parts[sender]
        raise SiteError(
            f"the sealed {document} of table {part.table!r} cannot be opened: site "
            f"{part.site!r} has not sealed them for this site, in this run and for "
            "this sub-query"
        ) from None


def _refused(site: Site, number: int, document: str, error: Exception) -> SiteError:
    part = site.terms.proposal.parts[number]
    return SiteError(
        f"the {document} that site {part.site!r} has sealed of table {part.table!r} "
        f"are refused: {error}"
    )


def _seal(site: Site, overlap: Overlap, number: int, *, is_sender: bool) -> ShardSeal:
    """Return the seal of what a part here sends the overlap's other one, or gets."""
    name = PAIR_TO if is_sender else PAIR_FROM
    secret = KeyedHasher(site.group_key(name.format(_node(site, overlap, number))))
    key = secret.purpose(_PURPOSE.format(f"seal {overlap.name}")).secret
    return ShardSeal(key, site.run, "", ())


def _hasher(site: Site, overlap: Overlap, number: int) -> KeyedHasher:
    """Return the hash of keys between two shards, of which a part here is one."""
    name = PAIR_TO if number == overlap.earlier else PAIR_FROM
    secret = KeyedHasher(site.group_key(name.format(_node(site, overlap, number))))
    return secret.purpose(_PURPOSE.format(f"keys {overlap.name}"))


def _node(site: Site, overlap: Overlap, number: int) -> str:
    """Return the node of the other part of an overlap."""
    other = overlap.later if number == overlap.earlier else overlap.earlier
    return site.terms.proposal.parts[other].node
