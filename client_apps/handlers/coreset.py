"""What a site does to draw a coreset: measure, draw, weigh (three rounds).

``measure`` brings what the sensitivities of a part's rows sum to; ``draw`` row numbers,
drawn in proportion to them; ``weigh`` the sensitivities of the rows of the sample,
under masks that cancel in the sum over all parts. What a site keeps of a round for the
next one never changes, so that a round that is answered again is answered alike.

An honest server says of how many parts it sums: a part that is told that it is alone
adds no mask.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from client_apps.data.run_store import Entry
from client_apps.handlers.training_rows import IntArray, read_multiplicity
from client_apps.operator.participant import Part
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Shard
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray, blocks
from tp_flower.coresets.importance import (
    CLUSTERS,
    REGRESSION,
    augmented,
    is_gram,
    leverage_total,
    leverages,
    penalised,
    weighted_gram,
    whitening,
)
from tp_flower.coresets.sampling import draw_rows
from tp_flower.coresets.solvers import nearest, weighted_kmeans
from tp_flower.errors import SiteError
from tp_flower.features.encoder import SiteEncoder, TableEncoder
from tp_flower.learning.models.local_model import on_host
from tp_flower.privacy.key_agreement import MOST_PARTS, pair_masks, to_fixed
from tp_flower.privacy.mechanisms import Release
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol import (
    DrawnPart,
    DrawPart,
    DrawReply,
    DrawRequest,
    MeasuredPart,
    MeasurePart,
    MeasureReply,
    MeasureRequest,
    RowsReply,
    RowsRequest,
    SampledRows,
    WeighedPart,
    WeighReply,
    WeighRequest,
    check_sizes,
    parse,
    required,
    row_numbers,
    unpack_bits,
)
from tp_flower.protocol.coreset_messages import MOST_SAMPLED
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import LABELS, MODELS, ROWS, SCORES


def rows(site: Site, request: RowsRequest) -> RowsReply:
    """Reply with the sampled rows of every part, or with their local clusters."""
    return RowsReply({p.number: _sampled(site, p, request) for p in site.parts()})


def _sampled(site: Site, part: Part, request: RowsRequest) -> SampledRows:
    plan, data = part.outgoing.plan, part.shard.data
    if plan.allows(SAMPLED_ROWS):
        # the policy may have changed since the run was planned
        site.source(part.number).policy.check_release(ROWS, is_private=False)
        features = np.asarray(on_host(data.trained), np.float64)
        return SampledRows(rows=row_numbers(features))
    if plan.allows(CENTRES):
        return _clusters(part, request)
    raise SiteError(
        f"table {part.table}: its rows are not to leave in this run: it was not "
        "planned so"
    )


def _clusters(part: Part, request: RowsRequest) -> SampledRows:
    """Return the centres (k, d) of a part's sampled rows, and each row's centre (n,).

    A part without sampled rows has no centre.
    """
    data = part.shard.data
    points = np.asarray(on_host(data.trained), np.float64)
    masses = np.asarray(data.multiplicity, np.float64)
    if not len(points):
        return SampledRows(centres=points, nearest=np.zeros(0, np.uint32))
    rng = generator(request.seed, Stream.LOCAL_FIT, 0, part.number)
    centres = weighted_kmeans(points, masses, request.clusters, rng)
    labels, _ = nearest(points, centres)
    return SampledRows(centres=centres, nearest=labels.astype(np.uint32))


LARGEST_PENALTY: Final = 1e100
TOLERANCE: Final = 1e-3
"""By which rounding may take a row's share of its own direction beyond all of it."""
_BLOCK_VALUES: Final = 1 << 21


@dataclass(frozen=True)
class TrainedRows:
    """The rows of a part that joined training rows come from.

    Attributes:
        own: (n,), their positions.
        masses: G^w, (n,), what their joined rows weigh.
    """

    own: IntArray
    masses: FloatArray


@dataclass(frozen=True)
class Measured:
    """A part whose rows were measured.

    Attributes:
        kept: what the rows' scores are computed from; it has their ``masses``.
        of_table: what leaves of a whole table.
        of_shard: what leaves of one of several shards.
    """

    kept: Entry
    of_table: MeasuredPart
    of_shard: MeasuredPart


@dataclass(frozen=True)
class _Columns:
    """The columns that scores are of, a block of rows at a time.

    Attributes:
        features: (n, d), encoded.
        label: (n,), numbers or classes; None where the label is another table's.
        classes: how many; 0 of numbers.
    """

    features: npt.NDArray[np.float32]
    label: FloatArray | None
    classes: int

    def blocks(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield the columns (k, p) of some rows at a time, and which rows."""
        width = self.features.shape[1] + self.classes + 2
        for block in blocks(len(self.features), max(_BLOCK_VALUES // width, 1)):
            label = None
            if self.label is not None:
                label = self._label(self.label[block])
            has_intercept = self.label is not None
            yield block, augmented(self.features[block], label, intercept=has_intercept)

    def _label(self, values: FloatArray) -> FloatArray:
        if not self.classes:
            return values[:, None]
        one_hot: FloatArray = values[:, None] == np.arange(self.classes)
        return one_hot

    @property
    def width(self) -> int:
        """How many there are, p."""
        own = 0 if self.label is None else 1 + (self.classes or 1)
        return int(self.features.shape[1]) + own


def trained_rows(
    site: Site, number: int, body: MeasurePart, joined_rows: int
) -> TrainedRows:
    """Return the rows that a request names, and what their joined rows weigh.

    Raises:
        SiteError: a row is in no joined row, or in more than there are.
    """
    mask = unpack_bits(body.trained, site.extracted(number).rows)
    own = np.flatnonzero(mask)
    if body.multiplicity is None and body.masses is None:
        return TrainedRows(own, np.ones(len(own)))
    check_sizes(body, trained=len(own))
    masses = read_multiplicity(body.multiplicity, body.masses, joined_rows)
    return TrainedRows(own, masses.astype(np.float64))


def measured_columns(
    site: Site, number: int, body: MeasurePart, rows: TrainedRows
) -> Measured:
    """Return a part's second moments, and what its leverages sum to."""
    penalty = required(body.penalty, "penalty")
    if penalty > LARGEST_PENALTY:
        raise SiteError(
            f"malformed request: 'penalty' is {penalty:g}; allowed: at most "
            f"{LARGEST_PENALTY:g}"
        )
    table_encoder = parse(body.encoder, "encoder", TableEncoder.from_json)
    encoder = table_encoder.at_site(site.hasher())
    label, classes = None, 0
    if body.label is not None:
        label, classes = _label(site, number, body.label, rows.own)
    columns = _Columns(site.tables.encode(number, encoder, rows.own), label, classes)
    gram = np.zeros((columns.width, columns.width))
    for block, own in columns.blocks():
        gram += weighted_gram(own, rows.masses[block])
    if not is_gram(gram):
        raise SiteError("a feature or the label is too large for a sum of its squares")
    meta = {
        "of": REGRESSION,
        "encoder": encoder.to_json(),
        "classes": classes,
        "penalty": penalty,
    }
    arrays = {"own": rows.own, "masses": rows.masses, "gram": gram}
    if label is not None:
        arrays["label"] = label
    features = int(columns.features.shape[1])
    total = leverage_total(gram, whitening(penalised(gram, features, penalty)))
    return Measured(
        Entry(arrays, meta), MeasuredPart(total=total), MeasuredPart(gram=gram)
    )


def measured_clusters(
    site: Site, number: int, body: MeasurePart, rows: TrainedRows, clusters: int
) -> Measured:
    """Return a part's rows in clusters, and what those cost."""
    from tp_flower.coresets.importance import cluster_shard, kmeans_total

    table_encoder = parse(body.encoder, "encoder", TableEncoder.from_json)
    encoder = table_encoder.at_site(site.hasher())
    features = site.tables.encode(number, encoder, rows.own)
    rng = site.noise.generator()
    found = cluster_shard(features, rows.masses, clusters, rng)
    arrays = {
        "masses": found.masses,
        "labels": found.labels,
        "distances": found.distances,
        "centres": found.centres,
    }
    total = kmeans_total(found.cost, found.cost, found.used)
    return Measured(
        Entry(arrays, {"of": CLUSTERS}),
        MeasuredPart(total=total),
        MeasuredPart(cost=found.cost, clusters=found.used),
    )


def scored(site: Site, number: int, kept: Entry, body: DrawPart) -> FloatArray:
    """Return how much each row matters, (n,).

    Args:
        site: that has the rows.
        number: of the part.
        kept: when it was measured.
        body: may have the cost of the clusters of all shards, or the sum of their Gram
            matrices.

    Raises:
        SiteError: what comes of all shards is none that this one is in.
    """
    if kept.meta["of"] == CLUSTERS:
        return _cluster_scores(kept, body.cost)
    return _leverages(site, number, kept, body.gram)


def _cluster_scores(kept: Entry, whole_cost: float | None) -> FloatArray:
    from tp_flower.coresets.importance import ShardClusters, kmeans_scores

    arrays = kept.arrays
    names = ("labels", "distances", "masses", "centres")
    own = ShardClusters(*(arrays[name] for name in names))
    cost = own.cost if whole_cost is None else whole_cost
    if cost < own.cost * (1.0 - TOLERANCE):
        raise SiteError(
            "malformed request: 'cost' is no sum over shards of which this is one"
        )
    return kmeans_scores(own, cost)


def _leverages(
    site: Site, number: int, kept: Entry, whole_gram: AnyArray | None
) -> FloatArray:
    gram = kept.arrays["gram"]
    if whole_gram is not None:
        if whole_gram.shape != gram.shape:
            raise SiteError(
                f"malformed request: array 'gram' has shape {whole_gram.shape}; "
                f"allowed: {gram.shape}"
            )
        gram = whole_gram
        if not is_gram(gram):
            raise SiteError("malformed request: array 'gram' is no Gram matrix")
    encoder = SiteEncoder.from_json(kept.meta["encoder"])
    features = site.tables.encode(number, encoder, kept.arrays["own"])
    label, classes = kept.arrays.get("label"), int(kept.meta["classes"])
    width, penalty = int(features.shape[1]), float(kept.meta["penalty"])
    basis = whitening(penalised(gram, width, penalty))
    scores = np.zeros(len(features))
    for block, own in _Columns(features, label, classes).blocks():
        scores[block] = leverages(own, basis)
    if (kept.arrays["masses"] * scores).max(initial=0.0) > 1.0 + TOLERANCE:
        raise SiteError(
            "malformed request: array 'gram' is no sum over shards of which this is one"
        )
    return scores


def _label(
    site: Site, number: int, order: Mapping[str, Any], rows: IntArray
) -> tuple[FloatArray, int]:
    """Return the label of rows as numbers or classes, (n,), and how many classes."""
    label = site.extracted(number).label
    if label is None:
        raise SiteError("malformed request: the part has no label")
    values = label.values[rows]
    if not np.isfinite(values).all():
        raise SiteError("malformed request: rows without a label are to be trained on")
    if order.get("classes") is None:
        if label.kind == "text":
            raise SiteError("malformed request: the label is text, and needs classes")
        return values, 0
    numbers = parse(order["classes"], "classes", label.positions_in)[rows]
    if np.isnan(numbers).any():
        raise SiteError("malformed request: 'classes' lacks classes of the label")
    return numbers, len(order["classes"])


MASKS: Final = "coreset masks"


def measure(site: Site, request: MeasureRequest) -> MeasureReply:
    """Reply with what the sensitivities of each part's trained rows sum to.

    Of a table in several shards with what it takes to know that: a shard's Gram matrix,
    or the cost of its clusters.
    """
    parts: dict[int, MeasuredPart] = {}
    kept: dict[str, Entry] = {}
    noted: list[Release] = []
    for number, body in site.each(request.parts):
        measured = _measure_part(site, number, body, request)
        kept[_measured(number)] = measured.kept
        parts[number] = measured.of_shard if body.is_shard else measured.of_table
        shard = Shard.of(site, number, site.source(number))
        noted.append(ledger_entries.measured(shard, is_shard=body.is_shard))
    _keep(site, kept, noted)
    return MeasureReply(parts)


def _measure_part(
    site: Site, number: int, body: MeasurePart, request: MeasureRequest
) -> Measured:
    guard, source = Guard(site), site.source(number)
    table = site.extracted(number).table
    kinds = [SCORES]
    kinds += [MODELS] if body.is_shard else []
    kinds += [LABELS] if body.label is not None else []
    guard.check_plan(source, kinds)
    rows = trained_rows(site, number, body, request.joined_rows)
    guard.check_rows(source, len(rows.own), f"the sensitivities of table {table!r}")
    if request.sensitivities == CLUSTERS:
        return measured_clusters(site, number, body, rows, request.clusters)
    return measured_columns(site, number, body, rows)


def draw(site: Site, request: DrawRequest) -> DrawReply:
    """Reply with rows drawn in proportion to what their joined rows are worth."""
    parts: dict[int, DrawnPart] = {}
    kept: dict[str, Entry] = {}
    noted: list[Release] = []
    for number, body in site.each(request.parts):
        measured = _kept(site, _measured(number), "measured")
        scores = body.scale * scored(site, number, measured, body)
        mass = measured.arrays["masses"] * scores
        drawn = _made(draw_rows, mass, body.count, site.noise.generator())
        parts[number] = DrawnPart(drawn.astype(np.uint32))
        kept[_drawn(number)] = Entry({"scores": scores}, {})
        noted.append(ledger_entries.drawn(Shard.of(site, number, site.source(number))))
    _keep(site, kept, noted)
    return DrawReply(parts)


def weigh(site: Site, request: WeighRequest) -> WeighReply:
    """Reply with the masked sensitivities of the sample's rows; 0 of those elsewhere.

    What was kept for it is forgotten: the next sample of a run is measured anew.
    """
    if request.summed > MOST_PARTS:
        raise SiteError(
            f"malformed request: 'summed' is {request.summed}; at most {MOST_PARTS}"
        )
    secret = site.hasher().purpose(MASKS).secret
    # all parts are asked in one round, and a round is answered once
    context = f"round {site.round.number}".encode()
    parts: dict[int, WeighedPart] = {}
    noted: list[Release] = []
    for number, body in site.each(request.parts):
        scores = _kept(site, _drawn(number), "drawn").arrays["scores"]
        if body.place >= request.summed:
            raise SiteError(
                f"malformed request: 'place' is {body.place}, of {request.summed} parts"
            )
        own = _own_scores(body.rows, scores)
        masks = pair_masks(secret, body.place, request.summed, len(own), context)
        fixed = _made(to_fixed, own, request.joined_rows)
        parts[number] = WeighedPart(fixed + masks)
        noted.append(
            ledger_entries.weighed(Shard.of(site, number, site.source(number)))
        )
    for number in parts:
        site.round.forget(_measured(number), _drawn(number))
    _keep(site, {}, noted)
    return WeighReply(parts)


def _keep(site: Site, kept: Mapping[str, Entry], noted: list[Release]) -> None:
    """Keep what the next round needs, and note what leaves."""
    for name, entry in kept.items():
        site.store.save(name, entry)
    site.ledger.note(site.store.run, noted)


def _own_scores(rows: AnyArray, scores: FloatArray) -> FloatArray:
    """Return the scores (k,) of rows (k,); 0 where a row is -1, another part's."""
    if rows.size and rows.max() >= len(scores):
        raise SiteError(
            "malformed request: array 'rows' must hold numbers from -1 to "
            f"{len(scores) - 1}"
        )
    if len(rows) > MOST_SAMPLED:
        raise SiteError(
            f"malformed request: array 'rows' has {len(rows)} rows; a sample has at "
            f"most {MOST_SAMPLED}"
        )
    own: FloatArray = np.append(scores, 0.0)[rows]
    return own


def _made(make: Callable[..., Any], *given: Any) -> AnyArray:
    """Return what is made of numbers, some of which the server has chosen."""
    try:
        made: AnyArray = make(*given)
    except ValueError as error:
        raise SiteError(f"malformed request: {error}") from None
    return made


def _kept(site: Site, name: str, what: str) -> Entry:
    if not site.store.has(name):
        raise SiteError(
            f"malformed request: no rows have been {what} at this point of the run"
        )
    return site.store.load(name)


def _measured(number: int) -> str:
    return f"measured-{number}"


def _drawn(number: int) -> str:
    return f"drawn-{number}"
