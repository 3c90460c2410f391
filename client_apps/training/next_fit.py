"""The next fit of a search at a site: counted, under the terms of its candidate.

The site counts the fits itself. What follows from their number, it derives: the fold,
the settings that requests are compared with, and the keys of masks and seals. It keeps
the extracted rows, and the encoders for as long as the fits are of one fold and encode
alike; models and the state of training it forgets.
"""

from typing import Final

from client_apps.handlers.encoding import forget_encoder
from client_apps.privacy.keys import own_node
from client_apps.privacy.proposal_checks import agree, check_begins, forget_fold
from client_apps.privacy.score_limits import rule_of
from client_apps.rounds.site import EXTRACTED, Site
from client_apps.rounds.transaction import STOPPED
from tp_flower.errors import MessageError, PolicyError
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import NextReply, NextRequest
from tp_flower.terms.fits import share_encoders

_LIMITED: Final = (
    "the table's policy limits how many score vectors of table {!r} may leave "
    "(scores-per-rank), and a search releases them in every fit: train its candidates "
    "one by one"
)


def next_fit(site: Site, request: NextRequest) -> NextReply:
    """Begin the next fit of a search; reply that the site is ready for it.

    Raises:
        ProposalError: the run is no search, has no such fit, or trains by another
            candidate in it.
        PolicyError: a table's policy counts score vectors.
    """
    check_begins(site, Action.NEXT)
    if not site.store.has(EXTRACTED):
        raise MessageError("a search trains on rows, and none have been extracted")
    last = site.terms
    agree("fit", site.fit + 1, request.fit)
    node = own_node(site)
    parts = last.proposal.parts.items()
    numbers = [number for number, part in parts if part.node == node]
    for number in numbers:
        source = site.source(number)
        if rule_of(site, source) is not None:
            site.changes.part = number
            raise PolicyError(_LIMITED.format(source.table))
    site.store.drop(STOPPED)
    begins_fold = not share_encoders(last, last.of_fit(request.fit, request.candidate))
    site.count_fit(request.fit, request.candidate, begins_fold=begins_fold)
    if begins_fold:
        for number in numbers:
            site.forget_part(number)
            forget_encoder(site, number)
            forget_fold(site, number)
    return NextReply()
