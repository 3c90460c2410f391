"""Drawing a coreset at a site, in three rounds: measure, draw, weigh.

``measure`` brings the sum of the importance of a part's rows; ``draw`` row numbers,
drawn in proportion to it; ``weigh`` the importance of the rows of the sample, under
masks that cancel in the sum over all parts. The entries that a round saves for the next
one never change, so that a round that is answered again is answered alike.

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
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import DRAWN, MASKED, SENSITIVITIES, Shard
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray, blocks
from tp_flower.coresets.importance import (
    CLUSTERS,
    REGRESSION,
    ShardClusters,
    augmented,
    cluster_shard,
    is_gram,
    kmeans_scores,
    kmeans_total,
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
from tp_flower.protocol.codec import check_sizes, parse, required
from tp_flower.protocol.coreset_messages import (
    MOST_SAMPLED,
    DrawnPart,
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
)
from tp_flower.protocol.packet import row_numbers, unpack_bits
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import LABELS, MODELS, ROWS, SCORES

LARGEST_PENALTY: Final = 1e100
MASKS: Final = "coreset masks"
_COLUMNS: Final = "second moments of the shard's columns, the label's too"
_SUMS: Final = (
    "what the sensitivities of the table's rows sum to",
    f"{_COLUMNS}, or the cost of its clusters",
)
"""What a shard measures where it is its whole table, and where the table has others."""
TOLERANCE: Final = 1e-3
"""By which rounding may take a row's share of its own direction beyond all of it."""
_BLOCK_VALUES: Final = 1 << 21


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


def measure(site: Site, request: MeasureRequest) -> MeasureReply:
    """Reply with the sum of the importance of each part's trained rows.

    Of a table in several shards with the terms of that sum: a shard's Gram matrix, or
    the cost of its clusters.
    """
    parts: dict[int, MeasuredPart] = {}
    entries: dict[str, Entry] = {}
    releases: list[Release] = []
    for number, body in site.each(request.parts):
        entry, parts[number] = _measure(site, number, body, request)
        entries[f"measured-{number}"] = entry
        shard = Shard.of(site, number, site.source(number))
        releases.append(shard.uncovered(SENSITIVITIES, _SUMS[body.is_shard]))
    _save(site, entries, releases)
    return MeasureReply(parts)


def _measure(
    site: Site, number: int, body: MeasurePart, request: MeasureRequest
) -> tuple[Entry, MeasuredPart]:
    """Return the entry that the rows' scores are computed from, and the reply."""
    guard, source, extracted = Guard(site), site.source(number), site.extracted(number)
    kinds = [SCORES]
    kinds += [MODELS] if body.is_shard else []
    kinds += [LABELS] if body.label is not None else []
    guard.check_plan(source, kinds)
    positions = np.flatnonzero(unpack_bits(body.trained, extracted.rows))
    masses = np.ones(len(positions))
    if body.multiplicity is not None or body.masses is not None:
        check_sizes(body, trained=len(positions))
        weights = read_multiplicity(body.multiplicity, body.masses, request.joined_rows)
        masses = weights.astype(np.float64)
    about = f"the sensitivities of table {extracted.table!r}"
    guard.check_rows(source, len(positions), about)
    table_encoder = parse(body.encoder, "encoder", TableEncoder.from_json)
    encoder = table_encoder.at_site(site.hasher())
    features = site.tables.encode(number, encoder, positions)
    if request.sensitivities == CLUSTERS:
        rng = site.noise.generator()
        return _measure_clusters(
            cluster_shard(features, masses, request.clusters, rng),
            is_shard=body.is_shard,
        )
    label, classes = None, 0
    if body.label is not None:
        label, classes = _label(site, number, body.label, positions)
    entry, reply = _measure_columns(_Columns(features, label, classes), masses, body)
    arrays = {**entry.arrays, "own": positions}
    return Entry(arrays, {**entry.meta, "encoder": encoder.to_json()}), reply


def _measure_clusters(
    clusters: ShardClusters, *, is_shard: bool
) -> tuple[Entry, MeasuredPart]:
    names = ("labels", "distances", "masses", "centres")
    arrays = {name: getattr(clusters, name) for name in names}
    cost, used = clusters.cost, clusters.used
    reply = MeasuredPart(total=kmeans_total(cost, cost, used))
    if is_shard:
        reply = MeasuredPart(cost=cost, clusters=used)
    return Entry(arrays, {"of": CLUSTERS}), reply


def _measure_columns(
    columns: "_Columns", masses: FloatArray, body: MeasurePart
) -> tuple[Entry, MeasuredPart]:
    penalty = required(body.penalty, "penalty")
    if penalty > LARGEST_PENALTY:
        raise SiteError(
            f"malformed request: 'penalty' is {penalty:g}; allowed: at most "
            f"{LARGEST_PENALTY:g}"
        )
    gram = np.zeros((columns.width, columns.width))
    for block, rows in columns.blocks():
        gram += weighted_gram(rows, masses[block])
    if not is_gram(gram):
        raise SiteError("a feature or the label is too large for a sum of its squares")
    arrays = {"masses": masses, "gram": gram}
    if columns.label is not None:
        arrays["label"] = columns.label
    meta = {"of": REGRESSION, "classes": columns.classes, "penalty": penalty}
    features = int(columns.features.shape[1])
    total = leverage_total(gram, whitening(penalised(gram, features, penalty)))
    reply = MeasuredPart(gram=gram) if body.is_shard else MeasuredPart(total=total)
    return Entry(arrays, meta), reply


@dataclass(frozen=True)
class _Columns:
    """The columns that scores are of, a block of rows at a time.

    Attributes:
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
            label = None if self.label is None else self.label[block, None]
            if label is not None and self.classes:
                label = label == np.arange(self.classes)
            has_intercept = label is not None
            yield block, augmented(self.features[block], label, intercept=has_intercept)

    @property
    def width(self) -> int:
        """How many there are, p."""
        of_label = 0 if self.label is None else 1 + (self.classes or 1)
        return int(self.features.shape[1]) + of_label


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


def draw(site: Site, request: DrawRequest) -> DrawReply:
    """Reply with rows drawn in proportion to the importance of their joined rows."""
    parts: dict[int, DrawnPart] = {}
    entries: dict[str, Entry] = {}
    releases: list[Release] = []
    for number, body in site.each(request.parts):
        measured = _load(site, "measured", number)
        if measured.meta["of"] == CLUSTERS:
            scores = body.scale * _cluster_scores(measured, body.cost)
        else:
            scores = body.scale * _leverages(site, number, measured, body.gram)
        mass = measured.arrays["masses"] * scores
        drawn = _computed(draw_rows, mass, body.count, site.noise.generator())
        parts[number] = DrawnPart(drawn.astype(np.uint32))
        entries[f"drawn-{number}"] = Entry({"scores": scores}, {})
        shard = Shard.of(site, number, site.source(number))
        releases.append(shard.uncovered(DRAWN))
    _save(site, entries, releases)
    return DrawReply(parts)


def _cluster_scores(measured: Entry, whole_cost: float | None) -> FloatArray:
    """Return the scores (n,), by the cost of the clusters of all shards."""
    names = ("labels", "distances", "masses", "centres")
    clusters = ShardClusters(*(measured.arrays[name] for name in names))
    cost = clusters.cost if whole_cost is None else whole_cost
    if cost < clusters.cost * (1.0 - TOLERANCE):
        raise SiteError(
            "malformed request: 'cost' is no sum over shards of which this is one"
        )
    return kmeans_scores(clusters, cost)


def _leverages(
    site: Site, number: int, measured: Entry, whole_gram: AnyArray | None
) -> FloatArray:
    """Return the scores (n,), by the sum of the Gram matrices of all shards."""
    gram = measured.arrays["gram"]
    if whole_gram is not None:
        if whole_gram.shape != gram.shape:
            raise SiteError(
                f"malformed request: array 'gram' has shape {whole_gram.shape}; "
                f"allowed: {gram.shape}"
            )
        gram = whole_gram
        if not is_gram(gram):
            raise SiteError("malformed request: array 'gram' is no Gram matrix")
    encoder = SiteEncoder.from_json(measured.meta["encoder"])
    features = site.tables.encode(number, encoder, measured.arrays["own"])
    label, classes = measured.arrays.get("label"), int(measured.meta["classes"])
    width, penalty = int(features.shape[1]), float(measured.meta["penalty"])
    basis = whitening(penalised(gram, width, penalty))
    scores = np.zeros(len(features))
    for block, rows in _Columns(features, label, classes).blocks():
        scores[block] = leverages(rows, basis)
    if (measured.arrays["masses"] * scores).max(initial=0.0) > 1.0 + TOLERANCE:
        raise SiteError(
            "malformed request: array 'gram' is no sum over shards of which this is one"
        )
    return scores


def weigh(site: Site, request: WeighRequest) -> WeighReply:
    """Reply with the masked importance of the sample's rows; 0 of those elsewhere.

    Its entries are forgotten: the next sample of a run is measured anew.
    """
    if request.summed > MOST_PARTS:
        raise SiteError(
            f"malformed request: 'summed' is {request.summed}; at most {MOST_PARTS}"
        )
    secret = site.hasher().purpose(MASKS).secret
    # all parts are asked in one round, and a round is answered once
    context = f"round {site.round.number}".encode()
    parts: dict[int, WeighedPart] = {}
    releases: list[Release] = []
    for number, body in site.each(request.parts):
        scores = _load(site, "drawn", number).arrays["scores"]
        if body.place >= request.summed:
            raise SiteError(
                f"malformed request: 'place' is {body.place}, of {request.summed} parts"
            )
        sampled = _sampled_scores(body.rows, scores)
        masks = pair_masks(secret, body.place, request.summed, len(sampled), context)
        fixed = _computed(to_fixed, sampled, request.joined_rows)
        parts[number] = WeighedPart(fixed + masks)
        shard = Shard.of(site, number, site.source(number))
        releases.append(shard.uncovered(MASKED))
    for number in parts:
        site.round.forget(f"measured-{number}", f"drawn-{number}")
    site.ledger.note(site.store.run, releases)
    return WeighReply(parts)


def _sampled_scores(rows: AnyArray, scores: FloatArray) -> FloatArray:
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
    sampled: FloatArray = np.append(scores, 0.0)[rows]
    return sampled


def _save(site: Site, entries: Mapping[str, Entry], releases: list[Release]) -> None:
    """Save the entries of the next round, and note the releases of this one."""
    for name, entry in entries.items():
        site.store.save(name, entry)
    site.ledger.note(site.store.run, releases)


def _load(site: Site, state: str, number: int) -> Entry:
    if not site.store.has(f"{state}-{number}"):
        raise SiteError(
            f"malformed request: no rows have been {state} at this point of the run"
        )
    return site.store.load(f"{state}-{number}")


def _computed(function: Callable[..., Any], *arguments: Any) -> AnyArray:
    """Call a function with numbers of the server's, which may not allow it."""
    try:
        array: AnyArray = function(*arguments)
    except ValueError as error:
        raise SiteError(f"malformed request: {error}") from None
    return array
