"""Partial answers at a site: what a shard's rows add to those of an earlier shard."""

from client_apps.data.run_store import Entry
from client_apps.handlers.setup import admit_part, key_guarantee
from client_apps.privacy import guard, ledger_entries
from client_apps.privacy.keys import take_secrets
from client_apps.privacy.ledger_entries import note
from client_apps.privacy.proposal_checks import (
    check_begins,
    check_extract,
    check_proposal,
)
from client_apps.privacy.sealed_pairs import check_sealed
from client_apps.privacy.sealed_partials import check_sealed_shards, seal_partials
from client_apps.rounds.site import EXTRACTED, REQUEST, Site
from tp_flower.errors import ProposalError, SiteError
from tp_flower.protocol.cutoff_messages import (
    PartialsReply,
    PartialsRequest,
    SealedPartials,
)
from tp_flower.protocol.messages import Action
from tp_flower.protocol.setup_messages import ExtractPart

_SEALED = "partials"


def seal_answers(site: Site, request: PartialsRequest) -> PartialsReply:
    """Reply with the sealed partial answers of parts whose keys an earlier shard has.

    Once in a run: two answers of other rows would tell how these differ.
    """
    site.check_once(_SEALED, "another request has already sealed this run's partials")
    if site.store.has(EXTRACTED) and not site.store.has(_SEALED):
        raise SiteError(
            "partial answers are sealed before the rows of a run are extracted"
        )
    site.keep_proposal(request.proposal, request.public_keys)
    take_secrets(site, request)
    check_proposal(site, request)
    check_begins(site, Action.PARTIALS)
    check_sealed(site, request.parts)
    check_sealed_shards(site, request.parts, with_partials=False)
    later = {overlap.later for overlap in site.terms.overlaps}
    if not later & request.parts.keys():
        raise ProposalError("the run takes no partial answers of a table of this site")
    for number, body in site.each(request.parts):
        check_extract(site, number, body)
        site.bind(number, body.shard, site.terms.fragments[number])
    guard.check_selections(site, request.parts)
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
