"""Cutoffs at a site: those of its rows, sealed for LATERAL sub-queries elsewhere.

The table around such a sub-query is read as for the rows that the run extracts next,
under the same checks, and what is sealed is of these rows.
"""

from collections.abc import Mapping, Sequence

from client_apps.data.run_store import Entry
from client_apps.handlers.partials import readers_of
from client_apps.handlers.setup import (
    admit_part,
    begin_sealing,
    bind_parts,
    key_guarantee,
    read_part,
)
from client_apps.privacy import guard, ledger_entries
from client_apps.privacy.ledger_entries import note
from client_apps.privacy.proposal_checks import agree
from client_apps.privacy.sealed_pairs import seal_pairs
from client_apps.privacy.sealed_partials import seal_keys
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import AnyArray
from tp_flower.errors import ProposalError
from tp_flower.protocol.cutoff_messages import CutoffsReply, CutoffsRequest, SealedPart
from tp_flower.protocol.messages import Action
from tp_flower.protocol.setup_messages import ExtractPart
from tp_flower.terms.cutoffs import SealedPairs

_SEALED = "cutoffs"


def seal_cutoffs(site: Site, request: CutoffsRequest) -> CutoffsReply:
    """Reply with the sealed cutoffs of the parts around LATERAL sub-queries.

    And with the sealed keys of shards that may have rows of one key.
    """
    begin_sealing(site, request, _SEALED, "cutoffs", Action.CUTOFFS)
    for body in request.parts.values():
        agree("cutoffs", [], [*body.cutoffs, *body.sealed_keys, *body.sealed_partials])
    taken = _taken(site, request.parts)
    earlier = {overlap.earlier for overlap in site.terms.overlaps}
    told = {*taken, *(earlier & request.parts.keys())}
    if not told:
        raise ProposalError("the run takes no cutoffs of a table of this site")
    bind_parts(site, request.parts)
    parts = {
        number: SealedPart(
            _seal_pairs(site, number, request.parts, taken.get(number, ())),
            _seal_keys(site, number, body) if number in earlier else {},
        )
        for number, body in site.each(request.parts)
        if number in told
    }
    site.store.save(_SEALED, Entry({}, {REQUEST: site.round.digest}))
    return CutoffsReply(parts)


def _taken(
    site: Site, bodies: Mapping[int, ExtractPart]
) -> dict[int, list[SealedPairs]]:
    """Return by part of this site the pairs of its rows that other parts take."""
    taken: dict[int, list[SealedPairs]] = {}
    for pairs in site.terms.recipients:
        if pairs.part in bodies:
            taken.setdefault(pairs.part, []).append(pairs)
    return taken


def _seal_keys(site: Site, number: int, body: ExtractPart) -> dict[str, AnyArray]:
    """Return a part's keys, sealed for later shards, as its policy allows."""
    guard.check_partials(site, number)
    source, _, _ = admit_part(site, number, body)
    readers = readers_of(site, number, later=True)
    note(site, number, ledger_entries.SHARD_KEYS, readers, key_guarantee(site))
    return dict(seal_keys(site, number, source))


def _seal_pairs(
    site: Site,
    number: int,
    bodies: Mapping[int, ExtractPart],
    taken: Sequence[SealedPairs],
) -> dict[str, AnyArray]:
    """Return the sealed pairs of a part's rows, as its policy allows."""
    if not taken:
        return {}
    guard.check_cutoffs(site, number, taken)
    source, _, _ = read_part(site, number, bodies)
    readers_and_cutoffs = _readers_and_cutoffs(site, taken)
    guarantee = key_guarantee(site)
    note(site, number, ledger_entries.CUTOFFS, *readers_and_cutoffs, guarantee)
    sealed: dict[str, AnyArray] = {}
    for pairs in taken:
        sealed.update(seal_pairs(site, source, pairs))
    return sealed


def _readers_and_cutoffs(site: Site, taken: Sequence[SealedPairs]) -> tuple[str, str]:
    """Return the sites that pairs are sealed for, and the cutoffs that they read."""
    terms = site.terms
    parts = terms.proposal.parts
    sites: dict[str, None] = {}
    cutoffs: dict[str, None] = {}
    for pairs in taken:
        cutoffs[terms.fragments[pairs.part].keys[pairs.key][pairs.cutoff]] = None
        for number, pairs_of_part in terms.sealed_pairs.items():
            if pairs in pairs_of_part:
                sites[repr(parts[number].site)] = None
    return ", ".join(sorted(sites)), ", ".join(cutoffs)
