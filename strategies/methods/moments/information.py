"""Standard errors of a trained model: one round of weighted second moments.

The server knows the score of every joined row, and so how much its loss bends there. It
tells the label's table these weights, and reads the information matrix from padded sums
(:mod:`tp_flower.methods.moments.exchange`). The weights are of the label's rows, so
each of these may be in one joined row at most.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from strategies.methods.moments.assembly import (
    ALTERED,
    column_bits,
    common_bits,
    matrices,
)
from strategies.methods.moments.clusters import (
    FEW_CLUSTERS,
    ClusteredSlopes,
    MeatSums,
    check_clusters,
    clusters_of_join,
)
from strategies.methods.moments.join_counts import JoinCounts
from strategies.methods.moments.section import (
    feature_columns,
)
from strategies.run.exchange import Replies, Requests, ask
from strategies.setup.joined_rows import JoinedTables
from strategies.setup.problem import SCORES, TrainingProblem
from tp_flower.arrays import (
    AnyArray,
    BoolArray,
    FloatArray,
    IndexArray,
    IntArray,
)
from tp_flower.errors import QueryError, ReplyError
from tp_flower.methods.moments.inference import Inference
from tp_flower.methods.moments.messages import LARGEST_WEIGHT, InformationRequest
from tp_flower.methods.moments.reading.class_inference import infer_classes
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.settings import (
    CLUSTERED,
    CLUSTERS,
    MODEL,
    SQUARES,
    ErrorSettings,
    weightings_of,
)
from tp_flower.methods.moments.solve import JoinedMoments
from tp_flower.methods.moments.terms import cluster_edge, tree_of
from tp_flower.objectives.objective import Objective, RowClusters, RowInformation
from tp_flower.objectives.survival.stretches import LEAST_ROWS as LEAST_AT_RISK
from tp_flower.protocol.packet import unpack_bits
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings

NOT_CONVERGED: Final = (
    "No standard errors: training has not come to the optimum. Columns of very "
    "different size, or far from 0, come near it when they are encoded as 'standard'. "
    "Without l2, columns that tell some labels exactly, such as a category whose "
    "counts are all 0, have no finite coefficients: leave them out, or set l2 above 0."
)
NO_FREEDOM: Final = (
    "No standard errors: there are no more joined rows than coefficients, and nothing "
    "is left to estimate the dispersion by."
)
FEWER_CLUSTERS: Final = (
    "No standard errors: {} clusters are no more than {} columns, the intercept among "
    "them: use encoders of fewer columns, or a cluster of more keys."
)
FEW: Final = (
    "Of fewer than {} clusters, intervals hold the truth less often than they say, and "
    "p is too small."
)
NO_SCALE: Final = (
    "No standard errors: in fixed point, columns far from a mean of 0 and a deviation "
    "of 1 are too coarse for them. Encode these as 'standard': {}."
)
UNEVEN: Final = (
    "Rows have so different information that it is rounded to nothing in some, whose "
    "sums are off by {:.0%}: errors of what varies in these rows alone are rough."
)
FEW_LEAVE: Final = (
    "No standard errors: {} rows enter, leave or have an event between the first event "
    "and the last; sums over pairs of fewer than {} would be told."
)
FEW_TIMES: Final = (
    "No standard errors: events have so few times that {} columns, the intercept among "
    "them, would tell the rows of each: use encoders of fewer columns."
)
FEW_AT_RISK: Final = (
    "No standard errors: in a stratum fewer than {} rows are at risk, whose means "
    "would be told: merge it with another, or leave AS strata out."
)
COARSE: Final = 0.1
"""The step of a column's words, in its deviations: it adds 1e-3 to its variance."""
FAR: Final = 30.0
"""Deviations of a column's mean from 0: beyond it, coefficients were off by more than a
hundredth of their error where training ended, as one of 1000 was by two errors."""
SPAN: Final = 1e-9
"""The least variance beside the largest one that eigenvalues tell from 0."""
MOST_CLASSES: Final = 8
"""Of which there are 28 weightings."""
LEAST_SHARE: Final = 0.05
LEAST_ROWS: Final = 20
"""Of the training rows, those with the least weights, whose rounding is looked at."""
UNEVENNESS: Final = 0.02
"""The relative error of their sum: an error's is half of it."""
ROUNDING: Final = 1e-13
"""Of a mean square, which a variance of 0 may differ by."""


def check_information(joined: JoinedTables, settings: Settings) -> None:
    """Refuse joined rows, or a loss, of which there is no information matrix.

    Raises:
        QueryError: with what to do instead.
    """
    tree = tree_of(joined.extracted.proposal)
    table = joined.bound.label_table
    most = int(joined.mapping.tables[table].multiplicity.max(initial=0))
    if most > 1:
        raise QueryError(
            f"standard-errors: a row of the label's table {table!r} is in up to {most} "
            "joined rows, which are not independent: aggregate the tables behind it in "
            "sub-queries with GROUP BY, or leave standard-errors out; strategy "
            "'moments' has errors of least squares that take them for independent"
        )
    objective = joined.objective
    kind = settings.of(ErrorSettings).standard_errors
    if kind != MODEL and not objective.is_separable:
        raise QueryError(
            f"standard-errors: of loss {objective.name!r}, which compares rows with "
            f"each other, there are none that are {kind!r}: write {MODEL!r}"
        )
    if objective.outputs > 1:
        _check_classes(objective, kind)
    if kind == CLUSTERED:
        check_clusters(joined, tree, settings)


def _check_classes(objective: Objective, kind: str) -> None:
    """Refuse what there is not of several classes with a score each."""
    one = "or for one class against all others write (label = 'a class') AS label"
    if kind != MODEL:
        raise QueryError(
            f"standard-errors: of loss {objective.name!r}, whose rows have a slope for "
            f"each class, there are none that are {kind!r}: write {MODEL!r}, {one}"
        )
    if objective.outputs > MOST_CLASSES:
        raise QueryError(
            f"standard-errors: of {objective.outputs} classes there would be sums for "
            f"each two of them, and they are for {MOST_CLASSES} at most: merge rare "
            f"ones by CASE, {one}"
        )


@dataclass(frozen=True, eq=False)
class InformationRound:
    """The round after training that brings weighted second moments.

    Attributes:
        joined: the joined rows, trained on or held out.
        problem: the trained model's, with the scores of its rows.
    """

    joined: JoinedTables
    problem: TrainingProblem
    settings: Settings

    def run(self) -> Generator[Requests, Replies, tuple[Inference | None, str]]:
        """Ask for the weighted moments; return the inference, or none, and a note."""
        if note := self._refusal():
            return None, note
        rounded = self._told(self._row_weights / self._largest[:, None])
        if self._slopes is not None:
            rounded = np.vstack([rounded, self._is_trained.astype(np.uint32)])
        counts = self._counts(rounded)
        layout = self._layout(counts)
        replies = yield ask(self._request(rounded, counts, layout), self.joined.parts)
        bits_by_table = column_bits(counts, replies, layout)
        moments = self._moments(counts, replies, layout, bits_by_table)
        of_columns = np.concatenate([bits_by_table[name] for name in layout.columns])
        rough = self._rough(self._whole(moments), of_columns[layout.features])
        if rough.size:
            names = feature_columns(self.problem).names
            return None, NO_SCALE.format(", ".join(names[n] for n in rough))
        inference = self._infer(moments)
        if inference.freedom <= 0.0:
            return None, NO_FREEDOM
        return inference, self._caution()

    def _moments(
        self,
        counts: JoinCounts,
        replies: Replies,
        layout: ColumnLayout,
        bits: Mapping[str, IntArray],
    ) -> list[JoinedMoments]:
        """Return the moments of every weighting, those over pairs of rows last."""
        moments = []
        for position, matrix in matrices(counts, replies, layout, bits).items():
            found = layout.moments(matrix)
            if not found.are_of(int(counts.totals[position])):
                raise ReplyError(ALTERED)
            moments.append(found.scaled(self._largest[position] / LARGEST_WEIGHT))
        if (slopes := self._slopes) is not None:
            matrix = MeatSums(counts, slopes, layout).matrix(replies, bits)
            meat = layout.moments(matrix)
            if not meat.are_of(slopes.total):
                raise ReplyError(ALTERED)
            moments.append(meat.scaled(slopes.unit**2))
        return moments

    def _caution(self) -> str:
        """Return why errors are rough, or ""."""
        told = LARGEST_WEIGHT * self._row_weights / self._largest[:, None]
        uneven = max(map(unevenness, told[: self._of_information]))
        notes = [UNEVEN.format(uneven)] if uneven > UNEVENNESS else []
        if 0 < self.clusters < FEW_CLUSTERS:
            notes.append(FEW.format(FEW_CLUSTERS))
        return " ".join(notes)

    @cached_property
    def _largest(self) -> FloatArray:
        """The largest weight of a row in every weighting, (p,)."""
        largest: FloatArray = self._row_weights.max(axis=1)
        return largest

    @property
    def clusters(self) -> int:
        """The number of clusters that errors are for; 0 without any."""
        is_clustered = self.settings.of(ErrorSettings).standard_errors == CLUSTERED
        return self._slopes.clusters if is_clustered and self._slopes else 0

    def _refusal(self) -> str:
        """Return why there is nothing to ask for, or ""."""
        if not self._row_weights.any(axis=1).all():
            # the labels are told exactly
            return NOT_CONVERGED
        information = self._information
        if information.fewest < LEAST_AT_RISK:
            return FEW_AT_RISK.format(LEAST_AT_RISK)
        encoders = self.problem.encoders.values()
        columns = sum(encoder.width for encoder in encoders) + 1
        if 0 < self.clusters <= columns:
            return FEWER_CLUSTERS.format(self.clusters, columns)
        if information.clusters is not None:
            return self._few_members(information.clusters, columns)
        return ""

    @staticmethod
    def _few_members(clusters: RowClusters, columns: int) -> str:
        """Return why sums over pairs of rows would tell them, or ""."""
        rows = len(np.unique(clusters.rows))
        if rows < LEAST_AT_RISK:
            return FEW_LEAVE.format(rows, LEAST_AT_RISK)
        if clusters.count <= columns:
            return FEW_TIMES.format(columns)
        return ""

    def _request(
        self, rounded: AnyArray, counts: JoinCounts, layout: ColumnLayout
    ) -> InformationRequest:
        """Return the request for sums of rows that weigh so much, (p, n)."""
        table = self.problem.tables[self.joined.bound.label_table]
        shares = self._shares(rounded[0])
        beside = self._information.clusters
        parts = {}
        for part in self.joined.parts:
            of_rows: dict[str, AnyArray] = {}
            if part.table == table.name:
                trained = table.rows[table.parts.index(part)].trained_slice
                of_rows["weights"] = rounded[:, trained]
                if shares is not None:
                    of_rows["shares"] = shares[:, trained]
                if self._slopes is not None:
                    span = dict(self.joined.extracted.shards_of(part.table))[part]
                    of_rows |= self._slopes.told(span)
            bits = common_bits(counts, layout, part.table)
            parts[part.number] = counts.weighed_part(part, bits, of_rows)
        return InformationRequest(
            columns=dict(layout.columns),
            largest_cluster=counts.largest_cluster,
            coarser=counts.coarser,
            clusters=0 if beside is None else beside.count,
            parts=parts,
        )

    def _rough(self, moments: JoinedMoments, bits: IntArray) -> IndexArray:
        """Return the features whose words, or whose spectrum, are not exact enough."""
        features = moments.features
        squares = np.diag(moments.matrix)[features] / moments.joined_rows
        variances = np.diag(moments.covariance_of(features, features))
        varies = variances > ROUNDING * squares
        deviations = np.sqrt(np.where(varies, variances, np.inf))
        is_coarse = 2.0 ** -bits.astype(np.float64) > COARSE * deviations
        is_far = np.abs(moments.mean_features) > FAR * deviations
        least = variances[varies].min(initial=np.inf) + self.settings.l2
        # indicators are 0 or 1, and exact
        is_rough: BoolArray = (squares > 1.0) & (is_coarse | is_far)
        is_rough |= least < SPAN * variances
        return np.flatnonzero(is_rough)

    def _told(self, weights: FloatArray) -> npt.NDArray[np.uint32]:
        """Return weights (p, n) from 0 to 1 as whole numbers.

        Each is rounded up by the chance that makes it right on average, so that rows
        that weigh the same are not all wrong by the same.
        """
        chances = generator(self.settings.seed, Stream.ROUNDING).random(weights.shape)
        rounded = np.floor(LARGEST_WEIGHT * weights + chances)
        if self._information.beside is not None:
            # what weighs nothing has no shares
            rounded = np.maximum(rounded, weights > 0.0)
        return rounded.astype(np.uint32)

    @cached_property
    def _information(self) -> RowInformation:
        """What the training rows know of their scores."""
        scores = self.problem.rows.whole(SCORES)
        return self.problem.objective.information_by_rows(scores)

    def _shares(self, rounded: AnyArray) -> FloatArray | None:
        """Return what is beside the weights, in parts of those that are told, (c, n).

        A sum of columns that weigh so much, times their shares, is then exact.
        """
        beside = self._information.beside
        if beside is None:
            return None
        rows = self.problem.train.tables[self.joined.bound.label_table]
        largest = self._row_weights[0].max()
        sums = LARGEST_WEIGHT / largest * rows.segment_sum(beside)
        shares: FloatArray = (sums / np.maximum(rounded, 1)[:, None]).T
        return shares

    @cached_property
    def _row_weights(self) -> FloatArray:
        """The weights of the rows of the label's table that take part, (p, n)."""
        objective = self.problem.objective
        scores = self.problem.rows.whole(SCORES)
        of_joined = [self._information.weights]
        if SQUARES in self._weightings:
            slopes = objective.weigh(objective.gradient(scores)[:, 0])
            of_joined.append(slopes**2)
        rows = self.problem.train.tables[self.joined.bound.label_table]
        return rows.segment_sum(np.column_stack(of_joined)).T

    @property
    def _weightings(self) -> tuple[str, ...]:
        """By what the joined rows are weighed, once each."""
        is_within = self._information.clusters is not None
        outputs = self.problem.objective.outputs
        return weightings_of(self.settings, outputs, has_clusters=is_within)

    @property
    def _of_information(self) -> int:
        """How many of the weightings, the first, are of the information."""
        return max(math.comb(self.problem.objective.outputs, 2), 1)

    def _whole(self, moments: Sequence[JoinedMoments]) -> JoinedMoments:
        """Return the information of all scores together."""
        matrices_of = [each.matrix for each in moments[: self._of_information]]
        whole: FloatArray = np.sum(matrices_of, axis=0)
        return replace(moments[0], matrix=whole)

    @cached_property
    def _slopes(self) -> ClusteredSlopes | None:
        """What the label's rows tell of the loss, by cluster; None without clusters."""
        if CLUSTERS not in self._weightings:
            return None
        if self._information.clusters is not None:
            return self._within(self._information.clusters)
        objective = self.problem.objective
        scores = self.problem.rows.whole(SCORES)
        slopes = objective.weigh(objective.gradient(scores))
        rows = self.problem.train.tables[self.joined.bound.label_table]
        exact = self._of_table(rows.segment_sum(slopes).T)[0]
        is_trained = self._of_table(self._is_trained[None, :].astype(np.float64))[0] > 0
        tree = tree_of(self.joined.extracted.proposal)
        named = self.settings.of(ErrorSettings).cluster
        edge = cluster_edge(tree, self.joined.bound.label_table, named)
        clusters = clusters_of_join(self.joined, edge, is_trained, exact[is_trained])
        chances = generator(self.settings.seed, Stream.ROUNDING).random(len(exact))
        return ClusteredSlopes.of(
            self.joined, is_trained, clusters, chances[is_trained], is_of_join=True
        )

    def _within(self, clusters: RowClusters) -> ClusteredSlopes:
        """Return what an information says of the joined rows in clusters of its own."""
        rows = self.problem.train.tables[self.joined.bound.label_table]
        joined = len(self.problem.objective)
        numbers = np.arange(1.0, 1.0 + joined)
        numbers = self._of_table(rows.segment_sum(numbers[:, None]).T)[0]
        is_trained = numbers > 0.0
        # a row of the label's table is in one joined row
        places = np.empty(joined, np.int64)
        places[numbers[is_trained].astype(np.int64) - 1] = np.arange(joined)
        random = generator(self.settings.seed, Stream.ROUNDING)
        return ClusteredSlopes.of(
            self.joined,
            is_trained,
            replace(clusters, rows=places[clusters.rows]),
            random.random(len(clusters.rows)),
            is_of_join=False,
        )

    @cached_property
    def _is_trained(self) -> BoolArray:
        """Which rows of the label's table train, of those that take part, (n,)."""
        rows = self.problem.train.tables[self.joined.bound.label_table]
        return rows.is_joined

    def _of_table(self, values: FloatArray) -> FloatArray:
        """Return values (p, n) of the label's rows that take part, 0 of its others."""
        joined = self.joined
        table = self.problem.tables[joined.bound.label_table]
        placed = np.zeros((len(values), joined.extracted.table_rows[table.name]))
        fields = joined.layouts[table.name].fields
        spans = dict(joined.extracted.shards_of(table.name))
        for part, rows in zip(table.parts, table.rows, strict=True):
            of_part = placed[:, spans[part]]
            trained = unpack_bits(fields[part.number]["trained"], of_part.shape[1])
            of_part[:, trained] = values[:, rows.trained_slice]
        return placed

    def _counts(self, rounded: AnyArray) -> JoinCounts:
        """Return what the joined rows weigh, as the sites work it out."""
        weights = self._of_table(rounded.astype(np.float64)).astype(np.int64)
        beside = self._information.beside
        return JoinCounts.weighed(
            self.joined,
            tree_of(self.joined.extracted.proposal),
            weights,
            shares=0 if beside is None else beside.shape[1],
            largest_cluster=0 if self._slopes is None else self._slopes.largest,
        )

    def _layout(self, counts: JoinCounts) -> ColumnLayout:
        """Return where the tables' columns are in the moments."""
        tables = counts.tree.tables
        widths = {name: self.problem.encoders[name].width for name in tables}
        label_table = self.joined.bound.label_table
        return ColumnLayout(counts.columns(widths), label_table, counts.outputs)

    def _infer(self, moments: Sequence[JoinedMoments]) -> Inference:
        """Return what the moments say of the model's coefficients."""
        objective = self.problem.objective
        rows = len(objective)
        freedom, dispersion = np.inf, 1.0 / self._mean_weight
        if objective.outputs > 1:
            l2 = self.settings.l2 * rows
            return infer_classes(moments, objective.outputs, l2, dispersion)
        information, *beside = moments
        if not objective.dispersion_is_known:
            freedom = rows - information.spectrum.rank - 1.0
            scores = self.problem.rows.whole(SCORES)
            total = objective.weigh(objective.squared_residuals(scores)).sum()
            dispersion = float(total) / freedom if freedom > 0.0 else np.nan
        l2 = self.settings.l2 * rows / information.joined_rows
        if (scales := self._information.scales) is not None:
            information = information.without_intercept(scales, *beside)
            found = Inference.of(information, l2, dispersion, freedom)
            return found.without_intercept()
        found = Inference.of(information, l2, dispersion, freedom, *beside)
        return found.of_clusters(self.clusters, rows) if self.clusters else found

    @property
    def _mean_weight(self) -> float:
        """The mean of the query's weights of the training rows, which it divides."""
        joined = self.joined
        weights = joined.extracted.weights
        if weights is None:
            return 1.0
        rows = joined.mapping.tables[joined.bound.weight_table or ""]
        return float(rows.expand(weights)[~joined.is_test].mean())


def unevenness(weights: FloatArray) -> float:
    """Return the relative error of sums of the least of some weights (n,), rounded.

    It is of a twentieth of them or more, by the deviation of what rounding adds.

    >>> unevenness(np.full(1000, 0.25)) > 0.05 > unevenness(np.full(1000, 1e3 + 0.25))
    True
    """
    ascending = np.sort(weights[weights > 0.0])
    fractions = ascending % 1.0
    deviations = np.sqrt(np.cumsum(fractions * (1.0 - fractions)))
    errors = deviations / np.maximum(np.cumsum(ascending), 1e-300)
    first = max(math.ceil(LEAST_SHARE * len(errors)), LEAST_ROWS)
    return float(errors[first - 1 :].max(initial=0.0))
