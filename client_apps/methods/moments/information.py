"""A site's part in the information matrix of a trained model, for standard errors.

It is a second moment of the joined training rows, each of which the server weighs by
how much its loss bends at the model's score. The label's table is told these weights,
row by row; the others are told the sums of them behind their join keys. A second
weighting, by squared slopes of the loss, makes errors that are robust. The server
chooses the weights, and sums of words are exact: weights that are digits write single
rows into them. So they have a release of their own in a policy, and ``min-rows`` keeps
an honest server alone from sums that are a row's.

For clustered errors the label's table is told the slopes themselves, and the sites add
up pairs of rows of a cluster (:mod:`tp_flower.methods.moments.clusters`). Of few
clusters these sums are the clusters' own, up to a rotation: so the label's site counts
clusters as its policy counts rows.
"""

import secrets
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
    check_weightings,
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
from tp_flower.errors import MessageError, PolicyError
from tp_flower.features.encoder import SiteEncoder
from tp_flower.learning.models.local_model import Features, host_features
from tp_flower.methods.moments.clusters import (
    ClusteredShard,
    ClusterRows,
    Members,
    NumberedRows,
    doubled,
    number_clusters,
)
from tp_flower.methods.moments.columns import ColumnWords, TableColumns
from tp_flower.methods.moments.exchange import Contribution, SummedShard
from tp_flower.methods.moments.messages import (
    TRAIN_INFORMATION,
    InformationPart,
    InformationReply,
    InformationRequest,
    PaddedPart,
)
from tp_flower.methods.moments.settings import (
    CLUSTERS,
    ErrorSettings,
    weightings_of,
)
from tp_flower.methods.moments.terms import cluster_edge
from tp_flower.objectives.survival.stretches import LEAST_ROWS
from tp_flower.privacy.plan import WEIGHTED_MOMENTS
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.packet import unpack_bits
from tp_flower.query.fragment import SURVIVAL
from tp_flower.terms.groups import table_group

_INFORMED: Final = "information"  # entry: the request that was answered, by its digest
_SCOPE: Final = (
    "not covered: sums over all joined training rows of the products of two columns, "
    "each row weighted by its loss's derivatives at the model's score, of several "
    "classes once for each two of them, or each pair of "
    "rows of a cluster by both; and of times to "
    "an event means of the rows at risk, over stretches of time, and sums over pairs "
    "of rows that leave in the same stretch; what leaves of it is "
    "uniform words, of which the server reads these sums alone, by weights that "
    "it chooses"
)


@dataclass(frozen=True, eq=False)
class WeighedShard(JoinedShard):
    """The rows of a part with what the joined rows behind them weigh.

    Attributes:
        names: of the weightings.
        cluster_count: of times to an event; 0 of others.
        coarser: bits that columns have less in sums over pairs of rows.
    """

    body: InformationPart
    largest_cluster: int
    names: tuple[str, ...]
    cluster_count: int
    coarser: int

    @property
    def splitting(self) -> str:
        """The label's table: a joined row that is held out weighs 0 there."""
        return self.site.terms.proposal.label_table

    @cached_property
    def trained(self) -> IntArray:
        """The positions of the rows that were trained on."""
        bits = rows_of_run(self.site, self.number)[TRAINED]
        return np.flatnonzero(unpack_bits(bits, self.extracted.rows))

    @cached_property
    def encoder(self) -> SiteEncoder:
        """The encoder of the table's features."""
        return fitted_encoder(self.site, self.number)

    def own_weights(self) -> IntArray:
        """Return the weights of the label's table, and 1 of others, (p, n)."""
        shape = (len(self.passes), self.extracted.rows)
        if not self.has_label:
            _refuse_any("weights", self.body.weights)
            return np.ones(shape, np.int64)
        weights = np.zeros(shape, np.int64)
        check_sizes(self.body, trained=len(self.trained), passes=len(self.passes))
        weights[:, self.trained] = required(self.body.weights, "weights")
        if self.has_clusters and np.any(weights[-1, self.trained] != 1):
            raise MessageError("'weights' of rows in clusters are 1 each")
        return weights

    @cached_property
    def has_clusters(self) -> bool:
        """Whether the last weighting is of sums over pairs of rows of a cluster."""
        return self.names[-1] == CLUSTERS

    @cached_property
    def clusters(self) -> ClusterRows | NumberedRows | None:
        """The clusters of the label's rows that train; None of other tables."""
        if not (self.has_clusters and self.has_label):
            _refuse_any("slopes", self.body.slopes)
            return None
        slopes = required(self.body.slopes, "slopes").astype(np.int64)
        secret = secrets.token_bytes(32)
        if len(self.shards) > 1:
            group = table_group(self.site.terms.proposal, self.table)
            secret = self.site.group_key(group)
        if self.cluster_count:
            return NumberedRows(secret, self._numbered(slopes))
        check_sizes(self.body, slopes=len(self.trained))
        settings = self.site.terms.settings
        edge = cluster_edge(self.tree, self.table, settings.of(ErrorSettings).cluster)
        return ClusterRows(edge, secret, slopes)

    def _numbered(self, slopes: IntArray) -> Members:
        """Return the members of clusters that are by their numbers."""
        if not self.has_times:
            raise contradiction("clusters", None, f"{self.cluster_count} of them")
        rows = required(self.body.members, "members").astype(np.int64)
        numbers = required(self.body.clusters, "clusters").astype(np.int64)
        for name, values, limit in (
            ("members", rows, len(self.trained)),
            ("clusters", numbers, self.cluster_count),
        ):
            if np.any(values >= limit):
                raise MessageError(f"{name!r} are numbers below {limit}")
        return Members(rows, numbers, slopes, self.cluster_count)

    def check_clusters(self, columns: int) -> None:
        """Refuse clusters that are few beside the policy, or beside all columns.

        And slopes whose sums over pairs might wrap around.
        """
        clusters = self.clusters
        if clusters is None:
            return
        source = self.site.source(self.number)
        if isinstance(clusters, NumberedRows):
            members = clusters.members
        else:
            codes = self.rows.edges[clusters.edge].codes[self.trained]
            members = Members.once(number_clusters(codes)[0], clusters.slopes)
        # a slope of 0 adds nothing
        counts = members.slopes != 0
        count = len(np.unique(members.numbers[counts]))
        if isinstance(clusters, NumberedRows):
            rows = len(np.unique(members.rows[counts]))
            check_rows(source, rows, f"the rows of table {self.table!r} in clusters")
        else:
            check_rows(source, count, f"the clusters of table {self.table!r}")
        if members.largest > self.largest_cluster:
            raise MessageError("'largest_cluster' is less than one of the site's")
        is_alone = len(self.shards) == 1 and source.policy.min_rows > 1
        if is_alone and count <= columns:
            raise PolicyError(
                f"the table's policy (min-rows = {source.policy.min_rows}) refuses: "
                f"of {columns} columns, sums over pairs of rows of {count} "
                "clusters, which are no more, tell those of each up to a rotation"
            )

    def check_weightings(self, columns: int) -> None:
        """Refuse rows so few that sums of all ``columns``, so often, may tell them."""
        check_weightings(
            self.site.source(self.number),
            len(self.trained),
            columns=columns,
            weightings=len(self.names),
            shards=len(self.shards),
            otherwise="fewer classes, or standard-errors = 'model' in place of others",
        )

    def contribution(
        self, summed: SummedShard, position: int, name: str
    ) -> tuple[tuple[str, ...], Contribution]:
        """Return what the part sends in a weighting, of pairs of rows in the last."""
        if name != CLUSTERS:
            return super().contribution(summed, position, name)
        label_table = self.site.terms.proposal.label_table
        clustered = ClusteredShard(summed, label_table, self.clusters, self.coarser)
        tables = doubled(self.tree, label_table).tables
        # a site that was told another one has pads of its own
        name = f"{name} {self.largest_cluster} {self.cluster_count} {self.coarser}"
        return tables, clustered.contribution(position, name)

    def squared_norms(self, counts: IntArray) -> FloatArray:
        """Return by how much a row's squares are in the largest sums, (n,).

        ``counts`` are the rows' weights, (p, n).
        """
        factors = np.ones(len(counts))
        if self.has_clusters:
            factors[-1] = self.largest_cluster / 4.0**self.coarser
        norms: FloatArray = factors @ counts
        return norms

    @cached_property
    def shares(self) -> FloatArray | None:
        """The columns beside the features of the label's rows that train, (n, c).

        Of times to an event, those are shares of their weights by stretch of time, of
        as many rows as the policy asks for; else there are none. None of other tables.
        """
        if not self.has_times:
            _refuse_any("shares", self.body.shares)
            return np.zeros((len(self.trained), 0)) if self.has_label else None
        shares = required(self.body.shares, "shares")
        check_sizes(self.body, trained=len(self.trained))
        source = self.site.source(self.number)
        most = max(len(self.trained) // LEAST_ROWS, 1)
        if len(self.shards) == 1 and len(shares) > most:
            raise MessageError(f"'shares' are of {most} stretches of time at most")
        for share in shares:
            rows = int(np.count_nonzero(share))
            check_rows(source, rows, "the mean of the rows at risk")
        return shares.T

    @property
    def has_times(self) -> bool:
        """Whether the label is a time to an event, of this table."""
        return bool(self.site.fragment(self.number).numbers.keys() & SURVIVAL)

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
    features = {}
    outputs = 1
    for part in site.parts(method_of(site.family).state):
        features[part.number] = part.data.features
        outputs = part.model.outputs
    names = weightings_of(
        site.terms.settings, outputs, has_clusters=request.clusters > 0
    )
    passes = tuple(range(len(names)))
    shards = {
        number: WeighedShard(
            site,
            number,
            tree,
            passes,
            body,
            request.largest_cluster,
            names,
            request.clusters,
            request.coarser,
        )
        for number, body in site.each(request.parts)
    }
    columns = sum(request.columns.values())
    for number, shard in site.each(shards):
        shard.check_trained()
        shard.check_clusters(columns)
        shard.check_weightings(columns)
        # how much each row weighs is for whoever allows a covariance
        shard.check_multiplicity(is_weighted=False, shares_rows=True)
        note_scope(site, number, WEIGHTED_MOMENTS, _SCOPE)
    parts = {
        number: _padded(shard, features[number], request.columns)
        for number, shard in site.each(shards)
    }
    site.store.save(_INFORMED, Entry({}, {REQUEST: site.round.digest}))
    return InformationReply(parts=parts)


def _padded(
    shard: WeighedShard, features: Features, widths: Mapping[str, int]
) -> PaddedPart:
    """Return the padded sums of a part's encoded rows, of which the first train."""
    site = shard.site
    encoded = host_features(features)[: len(shard.trained)]
    counted = shard.rows.select(shard.trained)
    source = site.source(shard.number)
    for weights in counted.multiplicity:
        # a row that weighs 0 is in no sum
        rows = int(np.count_nonzero(weights))
        source.policy.check_freedom(shard.encoder.encoder.width, rows)
    check_columns(
        source,
        shard.encoder,
        TableColumns(encoded),
        counted.multiplicity,
        shards=len(shard.shards),
    )
    columns = TableColumns(encoded, labels=shard.shares)
    agree("columns", columns.width, widths[shard.table])
    bits = shard.column_bits(shard.squared_norms(counted.multiplicity), columns)
    sums, products = shard.padded(
        shard.summed(counted, ColumnWords(columns, bits), widths, {}),
        shard.names,
        _without_noise,
    )
    return PaddedPart(
        features=shard.encoder.encoder.width, bits=bits, sums=sums, products=products
    )


def _without_noise(_: tuple[str, str], block: AnyArray) -> AnyArray:
    """Return a block as it is."""
    return block
