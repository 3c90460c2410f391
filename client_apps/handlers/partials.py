"""Partial answers at a site: what a shard's rows add to those of an earlier shard."""

from client_apps.data.run_store import Entry
from client_apps.handlers.setup import (
    admit_part,
    begin_sealing,
    bind_parts,
    key_guarantee,
)
from client_apps.privacy import guard, ledger_entries
from client_apps.privacy.ledger_entries import note
from client_apps.privacy.sealed_pairs import check_sealed
from client_apps.privacy.sealed_partials import check_sealed_shards, seal_partials
from client_apps.rounds.site import REQUEST, Site
from tp_flower.errors import ProposalError
from tp_flower.protocol.cutoff_messages import (
    PartialsReply,
    PartialsRequest,
    SealedPartials,
)
from tp_flower.protocol.messages import Action
from tp_flower.protocol.setup_messages import ExtractPart

_SEALED = "partials"


def seal_answers(site: Site, request: PartialsRequest) -> PartialsReply:
    """Reply with the partial answers of parts whose keys an earlier shard has."""
    begin_sealing(site, request, _SEALED, "partial answers", Action.PARTIALS)
    check_sealed(site, request.parts)
    check_sealed_shards(site, request.parts, with_partials=False)
    later = {overlap.later for overlap in site.terms.overlaps}
    if not later & request.parts.keys():
        raise ProposalError("the run takes no partial answers of a table of this site")
    bind_parts(site, request.parts)
    parts = {
        number: _seal_part(site, number, request.parts)
        for number, _ in site.each(request.parts)
        if number in later
    }
    site.store.save(_SEALED, Entry({}, {REQUEST: site.round.digest}))
    return PartialsReply(parts)


def _seal_part(
    site: Site, number: int, bodies: dict[int, ExtractPart]
) -> SealedPartials:
    """Return a part's sealed partial answers, as its policy allows."""
    guard.check_partials(site, number)
    source, _, _ = admit_part(site, number, bodies[number])
    readers = readers_of(site, number, later=False)
    note(site, number, ledger_entries.PARTIALS, readers, key_guarantee(site))
    return SealedPartials(dict(seal_partials(site, number, source, bodies)))


def readers_of(site: Site, number: int, *, later: bool) -> str:
    """Return the sites of the shards of a part's table after it, or before it."""
    parts = site.terms.proposal.parts
    others = [
        overlap.later if later else overlap.earlier
        for overlap in site.terms.overlaps
        if (overlap.earlier if later else overlap.later) == number
    ]
    return ", ".join(sorted({repr(parts[other].site) for other in others}))
