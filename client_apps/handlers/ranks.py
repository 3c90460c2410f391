"""Ranks at a site: the number of score vectors that may still leave, and a statement.

The number is for the server, which chooses the epochs by it; what a site lets leave
does not depend on it. The statement is for the sites that ask how much other tables
vary (``privacy/cover.py``). A run is told the rank of one choice of rows, and only
these may take part.
"""

import numpy as np

from client_apps.handlers.encoding import fitted_encoder
from client_apps.handlers.inference import saved_part
from client_apps.privacy import ledger_entries
from client_apps.privacy.cover import state_cover
from client_apps.privacy.guard import check_rows
from client_apps.privacy.proposal_checks import agree_in_rows, check_begins
from client_apps.privacy.score_limits import (
    RANKED,
    EncodedPart,
    encoded_rank,
    pays_for_scores,
    score_limit,
)
from client_apps.rounds.site import Site
from tp_flower.features.encoder import SiteEncoder
from tp_flower.model_names import ModelVersion
from tp_flower.protocol.codec import required
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.rank_messages import (
    RankedPart,
    RankPart,
    RankReply,
    RankRequest,
)


def rank(site: Site, request: RankRequest) -> RankReply:
    """Reply with the score vectors that are left, and with sealed statements."""
    check_begins(site, Action.RANK)
    return RankReply(
        {n: _rank_part(site, n, body, request) for n, body in site.each(request.parts)}
    )


def _rank_part(
    site: Site, number: int, body: RankPart, request: RankRequest
) -> RankedPart:
    """Return the number of score vectors a part may still send, and its rank."""
    source = site.source(number)
    extracted = site.extracted(number)
    is_ranked = unpack_bits(body.rows, extracted.rows)
    rows = np.flatnonzero(is_ranked)
    check_rows(source, len(rows), f"the rank of table {extracted.table!r}")
    # the ranks of two choices of rows would tell how these differ
    agree_in_rows(site, number, RANKED, is_ranked)
    encoder = _encoder(site, number, body, request)
    is_private = site.terms.privacy.covers_predictions
    features = site.tables.encode(number, encoder, rows, is_private=is_private)
    part = EncodedPart(encoder.encoder, features, rows)
    remaining = None
    limit = score_limit(site, number, part)
    if limit is not None and not pays_for_scores(source, has_noise=is_private):
        remaining = max(limit.allowed - site.ledger.scores_used(limit), 0)
        ledger_entries.note(site, number, ledger_entries.RANKS)
    if limit is None:
        value = encoded_rank(source, site.fragment(number), part)
    else:
        value = limit.rank
    return RankedPart(
        left=remaining, statement=state_cover(site, number, value, len(rows))
    )


def _encoder(
    site: Site, number: int, body: RankPart, request: RankRequest
) -> SiteEncoder:
    """Return the encoder of the run, or that of a saved model."""
    if body.model_part is None:
        return fitted_encoder(site, number, body.encoder)
    name = required(request.model_name, "model_name")
    version = request.model_version
    model = ModelVersion(name, required(version, "model_version"))
    return saved_part(
        site, number, model, body.model_part, required(body.digest, "digest")
    ).encoder
