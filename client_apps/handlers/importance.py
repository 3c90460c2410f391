"""How much each trained row of a part matters, and what of that the server needs.

For a regression these are leverages (:mod:`tp_flower.coresets.leverage`), of a
table's encoded columns, beside the intercept and the label at the label table; for
k-means the terms of the table's own clusters. Of a table in several shards both take a
sum over the shards: of their Gram matrices, or of their clusters' costs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from client_apps.data.run_store import Entry
from client_apps.handlers.training_rows import IntArray, read_multiplicity
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray, blocks
from tp_flower.coresets.gram_checks import is_gram
from tp_flower.coresets.leverage import (
    CLUSTERS,
    REGRESSION,
    augmented,
    leverage_total,
    leverages,
    penalised,
    weighted_gram,
    whitening,
)
from tp_flower.errors import SiteError
from tp_flower.features.encoder import SiteEncoder, TableEncoder
from tp_flower.protocol import (
    AnyArray,
    DrawPart,
    MeasuredPart,
    MeasurePart,
    check_sizes,
    parse,
    required,
    unpack_bits,
)

MOST_CLASSES: Final = 1000
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
    from tp_flower.coresets.cluster_importance import cluster_shard, kmeans_total

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
    from tp_flower.coresets.cluster_importance import ShardClusters, kmeans_scores

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
    """Return the label of rows as numbers or classes, (n,), and how many classes.

    Raises:
        SiteError: the part has no label, or one of another class.
    """
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
    is_text = label.kind == "text"
    classes = parse(
        order["classes"], "classes", lambda own: _classes(own, is_text=is_text)
    )
    places = {name: place for place, name in enumerate(classes)}
    known, codes = np.unique(values, return_inverse=True)
    names: list[Any] = known.tolist()
    if is_text:
        names = [label.categories[int(value)] for value in names]
    if not places.keys() >= set(names):
        raise SiteError("malformed request: 'classes' lacks classes of the label")
    found = np.array([places[name] for name in names], np.float64)
    return found[codes], len(classes)


def _classes(own: Any, *, is_text: bool) -> list[Any]:
    kinds = (str,) if is_text else (int, float)
    if len(own) > MOST_CLASSES or not all(type(name) in kinds for name in own):
        raise ValueError(own)
    return list(own)
