"""The bin numbers of a site's rows, which leave once if its tables' policies say so.

They are made of the encoded rows that take part, after training. Their edges stay here,
and are saved with the model, which needs the bins of the rows that it scores.
"""

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.registry import method_of
from client_apps.operator.participant import PAIR_ROWS, Participant
from client_apps.privacy import ledger_entries
from client_apps.privacy.proposal_checks import agree, check_begins, check_bins
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import IntArray
from tp_flower.errors import MessageError
from tp_flower.features.bins import LEAST_ROWS, Binning, categorical, fit_binning
from tp_flower.learning.models.local_model import host_features
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import BinnedPart, BinsReply, BinsRequest

_BINS = "bins-{}"
"""Entry of a part: its binning, and the request that brought it."""


def bins(site: Site, request: BinsRequest) -> BinsReply:
    """Reply with the bin numbers of the parts' rows, which leave once."""
    check_begins(site, Action.BINS)
    method = method_of(site.family)
    participants = {part.number: part for part in site.parts(method.state)}
    if unknown := sorted(request.parts.keys() - participants.keys()):
        raise MessageError(f"part {unknown[0]} is not in training here")
    return BinsReply(
        {
            number: _bin_part(site, participants[number], body.bins)
            for number, body in site.each(request.parts)
        }
    )


def _bin_part(site: Site, part: Participant[object], most: int) -> BinnedPart:
    """Return the bin numbers of a part's rows, and keep their edges."""
    number = part.number
    name = _BINS.format(number)
    site.check_once(name, "this run's bin numbers have left, and leave once")
    # by default as many as the policies of all the table's shards name
    agree("bins", site.terms.settings.most_bins or most, most)
    check_bins(site, number, most)
    part.releaser.check_clear("bin numbers")
    encoder = fitted_encoder(site, number).encoder
    data = part.data
    rows = host_features(data.features)
    binning = fit_binning(
        encoder,
        rows[_distinct(site, number, len(data.multiplicity))],
        most,
        max(LEAST_ROWS, site.source(number).min_count),
        is_shard=site.terms.shards_of(number) is not None,
    )
    site.store.save(name, Entry(binning.arrays, {REQUEST: site.round.digest}))
    ledger_entries.note_bins(site, number, Action.BINS, most)
    return BinnedPart(
        categorical=categorical(encoder), numbers=binning.apply(encoder, rows)
    )


def _distinct(site: Site, number: int, trained: int) -> IntArray:
    """Return a position of each trained row, of which there may be pairs instead."""
    pairs = site.store.load(f"part-{number}").arrays.get(PAIR_ROWS)
    if pairs is None:
        return np.arange(trained)
    _, first = np.unique(pairs[:trained], return_index=True)
    return np.asarray(first, np.int64)


def binning_of(site: Site, number: int) -> Binning | None:
    """Return the binning by which a part's rows have left; None if none has."""
    name = _BINS.format(number)
    if not site.store.has(name):
        return None
    return Binning.read(site.store.load(name).arrays)
