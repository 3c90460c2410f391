"""A site's part in the information matrix of a trained model, for standard errors.

It is a second moment of the joined training rows, each of which the server weighs by
how much its loss bends at the model's score. The label's table is told these weights,
row by row; the others are told the sums of them behind their join keys. A second
weighting, by squared slopes of the loss, makes errors that are robust. The server
chooses the weights, and sums of words are exact: weights that are digits write single
rows into them. So they have a release of their own in a policy, and ``min-rows`` keeps
an honest server alone from sums that are a row's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.moments.shards import (
    JoinedShard,
    check_columns,
    tree_of_sums,
)
from client_apps.methods.registry import method_of
from client_apps.privacy.guard import check_rows
from client_apps.privacy.ledger_entries import note_scope
from client_apps.privacy.proposal_checks import (
    TRAINED,
    agree,
    check_begins,
    contradiction,
    rows_of_run,
)
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import MessageError
from tp_flower.features.encoder import SiteEncoder
from tp_flower.learning.models.local_model import Features, host_features
from tp_flower.methods.moments.columns import ColumnWords, TableColumns
from tp_flower.methods.moments.messages import (
    TRAIN_INFORMATION,
    InformationPart,
    InformationReply,
    InformationRequest,
    PaddedPart,
)
from tp_flower.methods.moments.settings import weightings_of
from tp_flower.privacy.plan import WEIGHTED_MOMENTS
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.packet import unpack_bits
from tp_flower.query.fragment import SURVIVAL

_INFORMED: Final = "information"  # entry: the request that was answered, by its digest
_SCOPE: Final = (
    "not covered: sums over all joined training rows of the products of two columns, "
    "each row weighted by its loss's derivatives at the model's score, and of times to "
    "an event means of the rows at risk, over stretches of time; what leaves of it is "
    "uniform words, of which the server reads these sums alone, by weights that "
    "it chooses"
)


@dataclass(frozen=True, eq=False)
class WeighedShard(JoinedShard):
    """The rows of a part with what the joined rows behind them weigh."""

    body: InformationPart

    @property
    def splitting(self) -> str:
        """The label's table: a joined row that is held out weighs 0 there."""
        return self.site.terms.proposal.label_table

    @cached_property
    def trained(self) -> IntArray:
        """The positions of the rows that were trained on."""
        bits = rows_of_run(self.site, self.number)[TRAINED]
        return np.flatnonzero(unpack_bits(bits, self.extracted.rows))

    def own_weights(self) -> IntArray:
        """Return the weights of the label's table, and 1 of others, (p, n)."""
        shape = (len(self.passes), self.extracted.rows)
        if not self.has_label:
            _refuse_any("weights", self.body.weights)
            return np.ones(shape, np.int64)
        weights = np.zeros(shape, np.int64)
        check_sizes(self.body, trained=len(self.trained), passes=len(self.passes))
        weights[:, self.trained] = required(self.body.weights, "weights")
        return weights

    @cached_property
    def shares(self) -> FloatArray | None:
        """The columns beside the features of the label's rows that train, (n, c).

        Of times to an event, those are shares of their weights by stretch of time, of
        as many rows as the policy asks for; else there are none. None of other tables.
        """
        if not self.site.fragment(self.number).numbers.keys() & SURVIVAL:
            _refuse_any("shares", self.body.shares)
            return np.zeros((len(self.trained), 0)) if self.has_label else None
        shares = required(self.body.shares, "shares")
        check_sizes(self.body, trained=len(self.trained))
        source = self.site.source(self.number)
        for share in shares:
            rows = int(np.count_nonzero(share))
            check_rows(source, rows, "the mean of the rows at risk")
        return shares.T

    def check_trained(self) -> None:
        """Refuse weights of rows that were not trained on."""
        is_weighed = np.any(self.rows.multiplicity, axis=0)
        if np.setdiff1d(np.flatnonzero(is_weighed), self.trained).size:
            raise MessageError(
                f"'incoming' has joined rows of part {self.number} that the run does "
                "not train on"
            )


def _refuse_any(field: str, values: AnyArray | None) -> None:
    """Refuse numbers of rows that have none in this run."""
    if values is not None:
        raise contradiction(field, None, f"{len(values)} numbers of each row")


def information(site: Site, request: InformationRequest) -> InformationReply:
    """Add up the trained rows by join key, weighted and padded.

    Pads hide one answer: another request of the run is refused.
    """
    check_begins(site, TRAIN_INFORMATION)
    site.check_once(_INFORMED, "this run's weighted moments have left, and leave once")
    tree = tree_of_sums(site, request)
    passes = tuple(range(len(weightings_of(site.terms.settings))))
    shards = {
        number: WeighedShard(site, number, tree, passes, body)
        for number, body in site.each(request.parts)
    }
    for number, shard in site.each(shards):
        shard.check_trained()
        # how much each row weighs is for whoever allows a covariance
        shard.check_multiplicity(is_weighted=False, shares_rows=True)
        note_scope(site, number, WEIGHTED_MOMENTS, _SCOPE)
    parts = {
        part.number: _padded(shards[part.number], part.data.features, request.columns)
        for part in site.parts(method_of(site.family).state)
    }
    site.store.save(_INFORMED, Entry({}, {REQUEST: site.round.digest}))
    return InformationReply(parts=parts)


def _padded(
    shard: WeighedShard, features: Features, widths: Mapping[str, int]
) -> PaddedPart:
    """Return the padded sums of a part's encoded rows, of which the first train."""
    site = shard.site
    encoder: SiteEncoder = fitted_encoder(site, shard.number)
    encoded = host_features(features)[: len(shard.trained)]
    counted = shard.rows.select(shard.trained)
    for weights in counted.multiplicity:
        # a row that weighs 0 is in no sum; where none does, nothing is copied
        rows = slice(None) if weights.all() else np.flatnonzero(weights)
        weighed = TableColumns(encoded[rows])
        source = site.source(shard.number)
        check_columns(source, encoder, weighed, shards=len(shard.shards))
    columns = TableColumns(encoded, labels=shard.shares)
    agree("columns", columns.width, widths[shard.table])
    bits = shard.column_bits(counted.multiplicity.sum(axis=0), columns)
    sums, products = shard.padded(
        shard.summed(counted, ColumnWords(columns, bits), widths, {}),
        weightings_of(site.terms.settings),
        _without_noise,
    )
    return PaddedPart(
        features=encoder.encoder.width, bits=bits, sums=sums, products=products
    )


def _without_noise(_: tuple[str, str], block: AnyArray) -> AnyArray:
    """Return a block as it is."""
    return block
