"""Drawing a coreset at a site, in three rounds: measure, draw, weigh.

``measure`` returns the total importance of a participant's rows; ``draw`` the numbers
of rows drawn in proportion to their importance; ``weigh`` the importance of the rows in
the sample, under masks that cancel in the sum over all participants. Entries that one
round saves for the next never change, so that a repeated message gets an equal reply.

An honest server states the number of participants in the sum: a participant that it
claims is the only one adds no mask.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.handlers.encoding import fitted_encoder
from client_apps.handlers.training_rows import read_multiplicity
from client_apps.operator.masks import Masked
from client_apps.privacy.guard import check_plan, check_rows
from client_apps.privacy.ledger_entries import note_scope
from client_apps.privacy.proposal_checks import (
    TRAINED,
    agree,
    agree_in_rows,
    check_begins,
    contradiction,
)
from client_apps.privacy.score_limits import (
    EncodedPart,
    check_limit,
    rule_of,
    score_limit,
)
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, FloatArray, IntArray, blocks
from tp_flower.errors import MessageError, OfRowsError, SiteError
from tp_flower.features.sparse import EncodedRows, dense
from tp_flower.learning.solvers import gram
from tp_flower.methods.coreset import importance, messages
from tp_flower.methods.coreset.messages import TRAIN_MEASURE
from tp_flower.methods.coreset.sampling import draw_rows
from tp_flower.methods.coreset.settings import CoresetSettings
from tp_flower.privacy.key_agreement import fixed_point_masks, to_fixed
from tp_flower.protocol.codec import check_sizes, parse, required
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.training_messages import MOST_SAMPLED
from tp_flower.sources.policy import LABELS, MODELS, SCORES

MASKS: Final = "coreset masks"
_COLUMNS: Final = "second moments of the shard's columns, the label's too"
SENSITIVITIES = "sensitivities"
DRAWN = "drawn-rows"
MASKED = "masked-sensitivities"
_SUMS: Final = (
    "not covered: the sum of the sensitivities of the table's rows",
    f"not covered: {_COLUMNS}, or the cost of its clusters",
)
"""The measures of a shard that is its whole table, and of one among several."""
_DRAWN_ROWS: Final = "not covered: which rows were drawn, the sensitive ones more often"
_MASKED_SUMS: Final = (
    "masked (ChaCha20, no differential privacy): of a sampled joined row the server "
    "learns the sum of all tables' sensitivities, not a table's own"
)
TOLERANCE: Final = 1e-3  # rounding: a row's share of its direction may exceed 1
_BLOCK_VALUES: Final = 1 << 21
_CLUSTER_ARRAYS: Final = ("labels", "distances", "multiplicity", "centres")


def measure(site: Site, request: messages.MeasureRequest) -> messages.MeasureReply:
    """Reply with the total importance of each participant's trained rows.

    If the table has several shards, the reply has what the total is computed from: a
    shard's Gram matrix, or the cost of its clusters.
    """
    check_begins(site, TRAIN_MEASURE)
    proposed = site.terms.settings.of(CoresetSettings)
    agree("clusters", proposed.clusters, request.clusters)
    parts: dict[int, messages.MeasuredPart] = {}
    for number, body in site.each(request.parts):
        entry, parts[number] = _measure(site, number, body, request)
        site.store.save(f"measured-{number}", entry)
        note_scope(site, number, SENSITIVITIES, _SUMS[body.is_shard])
    return messages.MeasureReply(parts)


def _measure(
    site: Site,
    number: int,
    body: messages.MeasurePart,
    request: messages.MeasureRequest,
) -> tuple[Entry, messages.MeasuredPart]:
    """Return a part's sensitivities, to store, and the reply about them."""
    source = site.source(number)
    extracted = site.extracted(number)
    agree("is a shard", site.terms.shards_of(number) is not None, body.is_shard)
    kinds = [SCORES]
    kinds += [MODELS] if body.is_shard else []
    kinds += [LABELS] if body.label is not None else []
    # of the sensitivities the server reads sums over joined rows, and totals
    check_plan(source, kinds, is_masked=True)
    is_trained = unpack_bits(body.trained, extracted.rows)
    positions = np.flatnonzero(is_trained)
    weights: FloatArray = np.ones(len(positions))
    if body.multiplicity is not None or body.masses is not None:
        check_sizes(body, trained=len(positions))
        multiplicity = read_multiplicity(
            body.multiplicity, body.masses, request.joined_rows
        )
        weights = multiplicity.astype(np.float64)
    check_rows(
        source, len(positions), f"the sensitivities of table {extracted.table!r}"
    )
    agree_in_rows(site, number, TRAINED, is_trained)
    features = site.tables.encode(
        number, fitted_encoder(site, number, body.encoder), positions
    )
    if request.sensitivities == importance.CLUSTERS:
        rng = site.round.noise.generator()
        clusters = importance.cluster_shard(
            dense(features), weights, request.clusters, rng
        )
        entry, reply = _measure_clusters(clusters, is_shard=body.is_shard)
    else:
        label = None
        classes = 0
        if body.label is not None:
            label, classes = _label(site, number, body.label.get("classes"), positions)
        columns = _Columns(features, label, classes)
        entry, reply = _measure_columns(columns, weights, body)
    return Entry({**entry.arrays, "positions": positions}, entry.meta), reply


def _measure_clusters(
    clusters: importance.ShardClusters, *, is_shard: bool
) -> tuple[Entry, messages.MeasuredPart]:
    """Return the stored entry of clusters, and the reply; shards' costs are summed."""
    arrays = {name: getattr(clusters, name) for name in _CLUSTER_ARRAYS}
    cost = clusters.cost
    count = clusters.used
    if is_shard:
        reply = messages.MeasuredPart(cost=cost, clusters=count)
    else:
        total = importance.kmeans_total(cost, cost, count)
        reply = messages.MeasuredPart(total=total)
    return Entry(arrays, {"of": importance.CLUSTERS}), reply


def _measure_columns(
    columns: "_Columns", weights: FloatArray, body: messages.MeasurePart
) -> tuple[Entry, messages.MeasuredPart]:
    """Return the entry of the columns' second moments, and the reply about them."""
    penalty = required(body.penalty, "penalty")
    matrix = np.zeros((columns.width, columns.width))
    for block, rows in columns.blocks():
        matrix += gram(rows, weights[block])
    if not importance.is_gram(matrix):
        raise SiteError("a feature or the label is too large to be squared")
    arrays = {"multiplicity": weights, "gram": matrix}
    if columns.label is not None:
        arrays["label"] = columns.label
    meta = {"of": importance.REGRESSION, "classes": columns.classes, "penalty": penalty}
    features = int(columns.features.shape[1])
    total = importance.leverage_total(
        matrix, importance.whitening(importance.add_penalty(matrix, features, penalty))
    )
    if body.is_shard:
        reply = messages.MeasuredPart(gram=matrix)
    else:
        reply = messages.MeasuredPart(total=total)
    return Entry(arrays, meta), reply


@dataclass(frozen=True)
class _Columns:
    """The columns that define the scores, a block of rows at a time.

    The label (n,) is None if another table has it; ``classes`` is 0 for numbers.
    """

    features: EncodedRows
    label: FloatArray | None
    classes: int

    def blocks(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield blocks of the rows' columns (k, p), each with the slice of its rows."""
        width = self.features.shape[1] + self.classes + 2
        for block in blocks(len(self.features), max(_BLOCK_VALUES // width, 1)):
            label = None
            if self.label is not None:
                label = self.label[block, None]
            if label is not None and self.classes:
                label = label == np.arange(self.classes)
            has_label = label is not None
            rows = dense(self.features[block])
            yield block, importance.augment(rows, label, intercept=has_label)

    @property
    def width(self) -> int:
        """The number of columns, p."""
        of_label = 0
        if self.label is not None:
            of_label = 1 + (self.classes or 1)
        return int(self.features.shape[1]) + of_label


def _label(
    site: Site, number: int, classes: Sequence[Any] | None, rows: IntArray
) -> tuple[FloatArray, int]:
    """Return the labels of rows, numbers or classes (n,), and the class count."""
    label = site.extracted(number).label
    if label is None:
        raise MessageError("the part has no label")
    values = label.values[rows]
    if not np.isfinite(values).all():
        raise MessageError("some training rows have no label")
    if classes is None:
        # without rows, a column of a text file may have any type
        if label.kind == "text" and len(label.values):
            raise MessageError("the label is text: 'classes' is missing")
        return values, 0
    numbers = parse(classes, "classes", label.positions_in)[rows]
    if np.isnan(numbers).any():
        raise MessageError("'classes' lacks classes of the label")
    return numbers, len(classes)


def draw(site: Site, request: messages.DrawRequest) -> messages.DrawReply:
    """Reply with rows drawn in proportion to the importance of their joined rows."""
    parts: dict[int, messages.DrawnPart] = {}
    for number, body in site.each(request.parts):
        measured = _load(site, "measured", number)
        size = site.terms.settings.training_sample
        if body.count > size:
            # the frequencies of many draws tell each row's sensitivity
            raise contradiction("count", size, body.count)
        if measured.meta["of"] == importance.CLUSTERS:
            clusters = importance.ShardClusters(
                *(measured.arrays[n] for n in _CLUSTER_ARRAYS)
            )
            cost = clusters.cost if body.cost is None else body.cost  # of all shards
            if cost < clusters.cost * (1.0 - TOLERANCE):
                raise OfRowsError("'cost' is below the cost of this shard alone")
            scores = body.scale * importance.kmeans_scores(clusters, cost)
        else:
            scores = body.scale * _leverages(site, number, measured, body.gram)
        mass = measured.arrays["multiplicity"] * scores
        sample = _compute(draw_rows, mass, body.count, site.round.noise.generator())
        parts[number] = messages.DrawnPart(sample.astype(np.uint32))
        site.store.save(f"drawn-{number}", Entry({"scores": scores}, {}))
        note_scope(site, number, DRAWN, _DRAWN_ROWS)
    return messages.DrawReply(parts)


def _leverages(
    site: Site, number: int, measured: Entry, whole_gram: AnyArray | None
) -> FloatArray:
    """Return the scores (n,), given the sum of the Gram matrices of all shards."""
    matrix = measured.arrays["gram"]
    if whole_gram is not None:
        if whole_gram.shape != matrix.shape:
            raise MessageError(
                f"array 'gram' has shape {whole_gram.shape}; allowed: {matrix.shape}"
            )
        matrix = whole_gram
        if not importance.is_gram(matrix):
            raise MessageError("array 'gram' is not a Gram matrix")
    encoder = fitted_encoder(site, number)
    features = site.tables.encode(number, encoder, measured.arrays["positions"])
    label = measured.arrays.get("label")
    classes = int(measured.meta["classes"])
    width = int(features.shape[1])
    penalty = float(measured.meta["penalty"])
    basis = importance.whitening(importance.add_penalty(matrix, width, penalty))
    scores = np.zeros(len(features))
    for block, rows in _Columns(features, label, classes).blocks():
        scores[block] = importance.leverages(rows, basis)
    if (measured.arrays["multiplicity"] * scores).max(initial=0.0) > 1.0 + TOLERANCE:
        raise OfRowsError("array 'gram' is not a sum that includes this shard")
    return scores


def weigh(site: Site, request: messages.WeighRequest) -> messages.WeighReply:
    """Reply with the masked importance of the sample's rows; 0 for other shards' rows.

    The saved entries are dropped: the run's next sample is measured anew.
    """
    secret = site.hasher().purpose(MASKS).secret
    # all participants are in one message, and a message is answered once
    context = f"round {site.round.number}".encode()
    parts: dict[int, messages.WeighedPart] = {}
    for number, body in site.each(request.parts):
        sampled = _sampled_scores(
            body.rows, _load(site, "drawn", number).arrays["scores"]
        )
        check_summed(site, number, request.summed, body.place)
        terms = body.place, request.summed, len(sampled)
        masks = _compute(fixed_point_masks, secret, *terms, context)
        fixed = _compute(to_fixed, sampled, request.joined_rows)
        parts[number] = messages.WeighedPart(fixed + masks)
        name = f"sensitivities of {context.decode()}"
        site.masked.append(Masked(number, name, parts[number].masked))
        note_scope(site, number, MASKED, _MASKED_SUMS)
        _count_scores(site, number)
        for state in ("measured", "drawn"):
            site.store.drop(f"{state}-{number}")
    return messages.WeighReply(parts)


def _count_scores(site: Site, number: int) -> None:
    """Count a part's sensitivities as score vectors.

    They too are computed from the features of its rows.
    """
    # before any site has stated how much its rows vary
    site.source(number).policy.check_cover(site.fragment(number).table, 0)
    if rule_of(site, site.source(number)) is None:
        return
    positions = _load(site, "measured", number).arrays["positions"]
    encoder = fitted_encoder(site, number)
    features = site.tables.encode(number, encoder, positions)
    limit = score_limit(site, number, EncodedPart(encoder.encoder, features, positions))
    check_limit(site, limit, 1)
    if limit is not None:
        site.scored[number, limit] += 1


def check_summed(site: Site, number: int, summed: int, position: int) -> None:
    """Refuse sensitivities whose masks cancel over other parts than the run's."""
    numbers = sorted(site.terms.proposal.parts)
    agree("summed", len(numbers), summed)
    agree("place", numbers.index(number), position)


def _sampled_scores(rows: AnyArray, scores: FloatArray) -> FloatArray:
    """Return the scores (k,) of rows (k,); 0 where a row is -1, another shard's."""
    if len(rows) > MOST_SAMPLED or rows.max(initial=-1) >= len(scores):
        raise MessageError(
            f"array 'rows' must hold at most {MOST_SAMPLED} numbers "
            f"from -1 to {len(scores) - 1}"
        )
    return np.append(scores, 0.0)[rows]


def _load(site: Site, state: str, number: int) -> Entry:
    if not site.store.has(f"{state}-{number}"):
        raise MessageError(f"no rows have been {state} at this point of the run")
    return site.store.load(f"{state}-{number}")


def _compute(function: Callable[..., Any], *arguments: Any) -> AnyArray:
    """Call a function with numbers from the server, which may be out of its range."""
    try:
        array: AnyArray = function(*arguments)
    except ValueError as error:
        raise MessageError(f"{error}") from None
    return array
