"""Coresets: draw the joined rows to train on, and weight them (DIS).

Three rounds, as in the paper: ``measure`` brings the total importance of every
participant's rows; ``draw`` tells each participant how many rows to draw, and brings
their numbers; ``weigh`` tells it which of its rows are in the sample, and brings each
joined row's score summed over all participants. The distribution of the sample is in
:mod:`tp_flower.methods.coreset.sampling`. A uniform sample takes no round.

A participant's total is bounded by what the server knows (the columns of its encoding,
or the number of clusters). A larger total is capped: its site is told to scale its
scores down accordingly, and is named in the report. A sum of scores that no rows can
have stops the run. Within these bounds a dishonest site can have its rows drawn more
often, and can distort a weight by at most total / (m T / N), the uniform share's.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, Algorithms 1-3.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from strategies.run.exchange import Part, PartArrays, Replies, Requests, ask
from strategies.run.replies import array_of, refuse
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables, TableLayout
from strategies.setup.problem import PartRows
from strategies.training.row_drawing import RowDrawing, RowSample
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import ReplyError, SettingsError
from tp_flower.joins.mapping import NO_ROW, TableRows
from tp_flower.methods.coreset import importance as sensitivities
from tp_flower.methods.coreset import messages as coreset_messages
from tp_flower.methods.coreset import sampling
from tp_flower.methods.coreset.messages import TRAIN_DRAW, TRAIN_MEASURE, TRAIN_WEIGH
from tp_flower.methods.coreset.sampling import Sample
from tp_flower.methods.coreset.settings import CoresetSettings
from tp_flower.privacy.key_agreement import MOST_PARTS, from_fixed
from tp_flower.protocol.fields import LARGEST, Document
from tp_flower.protocol.messages import Action
from tp_flower.randomness import Stream, generator
from tp_flower.settings import Settings
from tp_flower.settings.training import IMPORTANCE, UNIFORM

MOST_PER_ROW: Final = {sensitivities.REGRESSION: 1.0, sensitivities.CLUSTERS: 8.0}
"""Bound on a row's score times the weight of its joined rows: a leverage is at most 1,
and the terms of k-means are alpha, alpha and 2 alpha with alpha = 2."""
TOLERANCE: Final = 1e-2
ROUNDING: Final = 1e-6  # how much a total may exceed its bound, of the bound


@dataclass(frozen=True)
class Party:
    """A participant that draws rows: its total importance, as reported, and the bound.

    ``cost`` is the cost of the clusters of all shards of its table, ``gram`` the second
    moments of their columns.
    """

    part: Part
    rows: PartRows
    total: float
    most: float
    cost: float | None = None
    gram: FloatArray | None = None

    @property
    def scale(self) -> float:
        """The factor on its scores: 1 if its total is within the bound."""
        if self.total <= self.most * (1.0 + ROUNDING):
            return 1.0
        # a site without rows has nothing to draw from
        return max(self.most / self.total, np.finfo(np.float64).tiny)

    @property
    def capped(self) -> float:
        """The sum of its scaled scores."""
        return min(self.total, self.most)

    def __str__(self) -> str:
        """Describe a total that exceeds its bound, for the report."""
        part = self.part
        return f"{part.table} at {part.site}: {self.total:g} of at most {self.most:g}"


@dataclass(frozen=True)
class CoresetSample:
    """A sample of the joined training rows.

    By table, if rows were drawn by importance: the ``totals`` that the sites report,
    and the ``shares`` of the draws that follow from them; the rest are uniform.
    """

    kind: str
    sample: Sample
    joined_rows: int
    totals: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    capped: tuple[str, ...] = ()

    @property
    def rows(self) -> IntArray:
        """The positions of the distinct rows among the training rows, (k,)."""
        return self.sample.joined

    @property
    def weights(self) -> FloatArray:
        """Their weights, (k,)."""
        return self.sample.weights

    def report_entries(self) -> Document:
        """Return the report's entries about the sample, by name."""
        return {"coreset": self._summary()}

    def _summary(self) -> Document:
        """Return the size of the sample, its weights and the shares of the tables."""
        weights = self.weights
        return {
            "kind": self.kind,
            "size": self.sample.size,
            "distinct-rows": len(self.sample.joined),
            "joined-rows": self.joined_rows,
            "effective-rows": self.sample.effective_rows,
            "largest-weight": float(weights.max() / weights.mean()),
            "totals": dict(self.totals),
            "shares": dict(self.shares),
            "uniform-share": 1.0 - sum(self.shares.values()),
            "capped": list(self.capped),
        }


class CoresetDrawing(RowDrawing):
    """Draw a coreset by importance or, without any round, uniformly."""

    @property
    def messages(self) -> tuple[Action, ...]:
        """The messages that it takes, a round each."""
        if self.settings.coreset_kind == UNIFORM:
            return ()
        return TRAIN_MEASURE, TRAIN_DRAW, TRAIN_WEIGH

    def draw(
        self, joined: JoinedTables, encoders: Mapping[str, TableEncoding]
    ) -> Generator[Requests, Replies, RowSample]:
        """Draw the rows."""
        if self.settings.coreset_kind == UNIFORM:
            return self.stand_in(joined)
        return (yield from draw_coreset(joined, encoders, self.settings))

    def stand_in(self, joined: JoinedTables) -> RowSample:
        """Return as many rows that are drawn uniformly."""
        rng = generator(self.settings.seed, Stream.DRAW)
        rows = joined.train.joined_rows
        weights = joined.weighting.train_rows
        size = self.settings.training_sample
        sample = sampling.uniform_sample(rows, size, weights, rng)
        return CoresetSample(UNIFORM, sample, rows)


def draw_coreset(
    joined: JoinedTables,
    encoders: Mapping[str, TableEncoding],
    settings: Settings,
) -> Generator[Requests, Replies, CoresetSample]:
    """Draw rows of the joined training rows by importance."""
    if (shards := len(joined.parts)) > MOST_PARTS:
        raise SettingsError(
            f"coreset-kind is {IMPORTANCE!r}, which sums the masked numbers of at most "
            f"{MOST_PARTS} shards; the query has {shards}: use {UNIFORM!r}"
        )
    # rows without a label are clustered
    has_label = joined.target.has_label
    importance = sensitivities.REGRESSION if has_label else sensitivities.CLUSTERS
    rng = generator(settings.seed, Stream.DRAW)
    parties = yield from _measure(joined, encoders, importance, settings)
    draws = yield from _draw(joined, parties, settings.training_sample, rng)
    distinct_draws = np.unique(draws)
    scores = yield from _weigh(joined, parties, distinct_draws)
    check_scores(joined, distinct_draws, scores, MOST_PER_ROW[importance])
    rows = joined.train.joined_rows
    uniform = float(len(joined.layouts))
    total = sum(party.capped for party in parties) + uniform
    totals: defaultdict[str, float] = defaultdict(float)
    shares: defaultdict[str, float] = defaultdict(float)
    for party in parties:
        totals[party.part.table] += party.total
        shares[party.part.table] += party.capped / total
    return CoresetSample(
        IMPORTANCE,
        sampling.weigh_sample(draws, scores + uniform / rows, total),
        rows,
        totals,
        shares,
        tuple(str(party) for party in parties if party.scale < 1.0),
    )


def _measure(
    joined: JoinedTables,
    encoders: Mapping[str, TableEncoding],
    importance: str,
    settings: Settings,
) -> Generator[Requests, Replies, list[Party]]:
    """Ask the sites for the sensitivities of their rows; return the parties."""
    label_table = joined.bound.label_table
    rows = joined.train.joined_rows
    # the objective's penalty, N l2, is added to a table's second moments
    penalty = settings.l2 * rows
    bodies: dict[int, coreset_messages.MeasurePart] = {}
    for table, layout in joined.layouts.items():
        has_label = importance == sensitivities.REGRESSION and table == label_table
        label = _label_classes(joined) if has_label else None
        encoder = encoders[table].sealed
        for number, arrays in measured_rows(layout).items():
            bodies[number] = coreset_messages.MeasurePart(
                encoder=encoder,
                is_shard=len(layout.parts) > 1,
                penalty=penalty if importance == sensitivities.REGRESSION else None,
                label=label,
                **arrays,
            )
    clusters = settings.of(CoresetSettings).clusters
    request = coreset_messages.MeasureRequest(
        sensitivities=importance,
        clusters=clusters,
        joined_rows=rows,
        parts=bodies,
    )
    replies = yield ask(request, joined.parts)
    parties: list[Party] = []
    for table, layout in joined.layouts.items():
        if importance == sensitivities.REGRESSION:
            added = 0
            if table == label_table:
                added = 1 + max(len(joined.labels.classes), 1)
            columns = encoders[table].columns.width, added
            parties += _parties_of_columns(layout, replies, columns, penalty)
        else:
            parties += _parties_of_clusters(layout, replies, clusters)
    return parties


def measured_rows(layout: TableLayout) -> PartArrays:
    """Return the fields with the rows to measure, and their weights.

    Weights that are all 1, as if no row is joined twice, are left out.
    """
    by_part: PartArrays = {}
    for number, fields in layout.set_up_fields().items():
        by_part[number] = {"trained": fields["trained"]}
        for name in ("multiplicity", "masses"):
            if name in fields and (fields[name] != 1).any():
                by_part[number][name] = fields[name]
    return by_part


def _label_classes(joined: JoinedTables) -> Document:
    """Return the label's classes as the label table's site stores them."""
    if not joined.labels.classes:
        return {"classes": None}
    columns = joined.extracted.label_columns(joined.bound.label_table)
    if columns[0][1].kind == "text":
        return {"classes": list(joined.labels.classes)}
    values = np.concatenate([column.values for _, column in columns])
    return {"classes": np.unique(values).tolist()}


def _parties_of_columns(
    layout: TableLayout, replies: Replies, columns: tuple[int, int], penalty: float
) -> list[Party]:
    """Return a table's parties, whose leverages sum to at most its columns."""
    parts = layout.parts
    width = sum(columns)
    bounds = [float(min(width, rows.trained)) for rows in layout.rows]
    if len(parts) == 1:
        return [_whole_table(layout, replies, bounds[0])]
    grams = [array_of(replies, part, "gram", (width, width)) for part in parts]
    for part, gram in zip(parts, grams, strict=True):
        if not sensitivities.is_gram(gram):
            raise refuse(part, "an impossible matrix of second moments")
    summed_gram: FloatArray = np.sum(grams, axis=0)
    basis = sensitivities.whitening(
        sensitivities.add_penalty(summed_gram, columns[0], penalty)
    )
    totals = [
        max(sensitivities.leverage_total(gram, basis), 0.0) if rows.trained else 0.0
        for rows, gram in zip(layout.rows, grams, strict=True)
    ]
    return [
        Party(*fields, gram=summed_gram)
        for fields in zip(parts, layout.rows, totals, bounds, strict=True)
    ]


def _parties_of_clusters(
    layout: TableLayout, replies: Replies, clusters: int
) -> list[Party]:
    """Return a table's parties, whose sensitivities sum to at most a bound."""
    parts = layout.parts
    cluster_counts = [min(clusters, rows.trained) for rows in layout.rows]
    caps = [
        sensitivities.kmeans_total(1.0, 1.0, count) if count else 0.0
        for count in cluster_counts
    ]
    if len(parts) == 1:
        return [_whole_table(layout, replies, caps[0])]
    costs = []
    counts = []
    for part in parts:
        body = replies.body(part, coreset_messages.MeasuredPart)
        if body.cost is None or body.clusters is None:
            raise refuse(part, "no cost of its clusters")
        costs.append(body.cost)
        counts.append(body.clusters)
    total_cost = sum(costs)
    if total_cost > LARGEST:
        raise refuse(parts[int(np.argmax(costs))], "clusters of an absurdly large cost")
    totals = [
        sensitivities.kmeans_total(cost, total_cost, count) if count else 0.0
        for cost, count in zip(costs, counts, strict=True)
    ]
    return [
        Party(*fields, cost=total_cost)
        for fields in zip(parts, layout.rows, totals, caps, strict=True)
    ]


def _whole_table(layout: TableLayout, replies: Replies, most: float) -> Party:
    """Return the party of a table in one shard."""
    (part,), (rows,) = layout.parts, layout.rows
    total = replies.body(part, coreset_messages.MeasuredPart).total
    if total is None:
        raise refuse(part, "no sum of its sensitivities")
    return Party(part, rows, total, most)


def _draw(
    joined: JoinedTables, parties: list[Party], size: int, rng: np.random.Generator
) -> Generator[Requests, Replies, IntArray]:
    """Return the joined rows that are drawn, (m,)."""
    totals = [party.capped for party in parties]
    counts = sampling.party_counts(
        np.array([*totals, float(len(joined.layouts))]), size, rng
    )
    weights = joined.weighting.train_rows
    bodies = {
        party.part.number: coreset_messages.DrawPart(
            count=int(count), scale=party.scale, cost=party.cost, gram=party.gram
        )
        for party, count in zip(parties, counts, strict=False)
    }
    replies = yield ask(coreset_messages.DrawRequest(bodies), joined.parts)
    draws = [
        sampling.draw_uniform(int(counts[-1]), joined.train.joined_rows, weights, rng)
    ]
    for party, count in zip(parties, counts, strict=False):
        part = party.part
        trained = party.rows.trained
        positions = array_of(replies, part, "drawn", (int(count),)).astype(np.int64)
        if positions.max(initial=0) >= max(trained, 1):
            raise refuse(part, f"drawn row numbers beyond its {trained} rows")
        table = joined.train.tables[part.table]
        draws.append(
            sampling.draw_joined(table, positions + party.rows.start, weights, rng)
        )
    return np.concatenate(draws)


def _weigh(
    joined: JoinedTables, parties: list[Party], draws: IntArray
) -> Generator[Requests, Replies, FloatArray]:
    """Return each joined row's scores summed over all participants, (k,)."""
    rows = joined.train.joined_rows
    selection = joined.train.select(draws)
    bodies: dict[int, coreset_messages.WeighPart] = {}
    for position, party in enumerate(parties):
        table_rows = selection.tables[party.part.table]
        bodies[party.part.number] = coreset_messages.WeighPart(
            place=position, rows=own_rows(table_rows, party.rows)
        )
    request = coreset_messages.WeighRequest(
        joined_rows=rows, summed=len(parties), parts=bodies
    )
    replies = yield ask(request, joined.parts)
    total = np.zeros(len(draws), np.uint64)
    for party in parties:
        total += array_of(replies, party.part, "masked", (len(draws),))
    return from_fixed(total, rows)


def own_rows(table: TableRows, rows: PartRows) -> npt.NDArray[np.int32]:
    """Return the participant's trained row behind each joined row; -1 for none.

    >>> part = PartRows(start=2, trained=3, total=4, tested=np.zeros(4, bool))
    >>> own_rows(TableRows(np.array([1, 2, 4, 5, -1], np.int32), 6), part).tolist()
    [-1, 0, 2, -1, -1]
    """
    numbers = np.full(table.rows, NO_ROW, np.int32)
    numbers[rows.trained_slice] = np.arange(rows.trained)
    return table.expand(numbers, absent=NO_ROW)


def check_scores(
    joined: JoinedTables, draws: IntArray, scores: FloatArray, most: float
) -> None:
    """Refuse sums of scores that the tables' rows cannot have.

    A row's score is at most ``most`` divided by the weight of its joined rows.
    """
    bound = np.zeros(len(draws))
    weights = joined.weighting.train
    selection = joined.train.select(draws)
    for name, rows in joined.train.tables.items():
        masses = rows.multiplicity if weights is None else weights.multiplicity[name]
        inverse = most / np.maximum(masses, np.finfo(np.float32).tiny)
        bound += selection.tables[name].expand(inverse)
    if count := int(np.count_nonzero(scores > bound * (1.0 + TOLERANCE))):
        sites = ", ".join(dict.fromkeys(part.site for part in joined.parts))
        raise ReplyError(
            f"the sensitivities of {count} of {len(draws)} drawn rows sum to more "
            f"than is possible: one of the sites {sites} sent wrong ones. Use "
            "coreset-kind = 'uniform', which needs no sensitivities"
        )
