"""Inspection of a saved model: importances and shares of features, metrics by group.

After the joined rows are scored, the sites of the tables in question are told their
scores and labels, in the order of their own rows, and reply with numbers about all
rows. So the server learns no score of a table alone, and no group of a row; a site
learns the scores and the labels of the rows that its own are joined into.

The entries of a report::

    importances  {repeats, items: [{table, feature, site, share, falls: {metric: [mean,
                 deviation]}, curve: [{value, score}]}]}    the first of a table's
                 items, feature "", is the table itself; a fall is by how much the
                 metric is worse with the values permuted; a curve is the mean score if
                 all rows have the value of the feature
    groups       {by, items: [{group, site, rows, <metric>: value, ..}]}

Of a table in several shards, values change places in each shard alone, and groups are
those of each: ``site`` is whose joined rows an item is about, "" for all of them.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from strategies.inference.manifest import Manifest, model_parts
from strategies.inference.scoring import Joined
from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import refuse
from strategies.run.sites import Inventory
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import SettingsError
from tp_flower.learning.groups import OF_GROUPS
from tp_flower.objectives import LABEL, Objective, family_of
from tp_flower.protocol.inspection_messages import (
    InspectedPart,
    InspectPart,
    InspectRequest,
)
from tp_flower.reports.inspection import GROUPS, IMPORTANCES, rises
from tp_flower.settings import Settings

NO_SUM: Final = "importances: the scores of model {} are not a sum of its tables': {}"


def check_inspection(manifest: Manifest, settings: Settings) -> None:
    """Refuse to inspect a model that has no label, or no scores of single tables.

    Raises:
        SettingsError: the setting, and what the model has instead.
    """
    if not settings.inspects:
        return
    family = family_of(manifest.loss, len(manifest.classes))
    if not family.takes_label or family.label_names != (LABEL,):
        name = "importances" if settings.importances else "metrics-by"
        raise SettingsError(
            f"{name}: model {manifest.model} has the loss {manifest.loss!r}, and a "
            "model is inspected by a label of one number or class"
        )
    if not settings.importances:
        return
    beside = {
        "the scores of another model, which it was boosted from": manifest.start,
        "factors of keys": manifest.multiplied,
        "trees on the bins of all tables": manifest.trees,
        f"trees that read the regions of table {manifest.divided!r}": manifest.divided,
        f"the head {manifest.head!r}": not manifest.scorer.is_linear,
    }
    if reasons := [reason for reason, is_there in beside.items() if is_there]:
        raise SettingsError(NO_SUM.format(manifest.model, f"it has {reasons[0]}"))


@dataclass(frozen=True)
class _InspectedShard:
    """A shard that is inspected.

    Attributes:
        part: of the run.
        rows: (m,), the joined rows that it is told of, in the order of its own rows: so
            it does not see the order of the joined ones.
        positions: (m,), its row behind each; -1 for none.
        site: for the report; "" if the table has no other shard.
        is_permuted: whether values of its rows change places.
        is_grouped: whether it has the column that rows are grouped by.
    """

    part: Part
    rows: IntArray
    positions: IntArray
    site: str
    is_permuted: bool
    is_grouped: bool


def inspect(
    joined: Joined,
    manifest: Manifest,
    objective: Objective,
    scores: FloatArray,
    settings: Settings,
    inventory: Inventory,
) -> Generator[Requests, Replies, dict[str, object]]:
    """Ask the tables' sites, and return the entries of the report; {} for none.

    Args:
        joined: the joined rows, N of them.
        manifest: of the model.
        objective: of the joined rows.
        scores: (N, d_c), without their offset.
        settings: of the run.
        inventory: of the sites.
    """
    if not settings.inspects:
        return {}
    shards = list(_shards(joined, manifest, settings))
    labels, scores_told = _told(joined, objective, scores)
    model_part_of = model_parts(manifest, joined.extracted.all_parts, inventory)
    bodies = {}
    for shard in shards:
        model_part = model_part_of[shard.part.number]
        weights = objective.weights
        bodies[shard.part.number] = InspectPart(
            model_part=model_part.number if shard.is_permuted else None,
            digest=model_part.digest if shard.is_permuted else None,
            positions=shard.positions.astype(np.int32),
            scores=scores_told[shard.rows],
            labels=labels[shard.rows],
            weights=None if weights is None else weights[shard.rows],
        )
    request = InspectRequest(
        model_name=manifest.name,
        model_version=manifest.model_version,
        device=settings.device,
        loss=manifest.loss,
        classes=len(manifest.classes),
        parts=bodies,
    )
    replies = yield ask(request, [shard.part for shard in shards])
    items: list[dict[str, object]] = []
    groups: list[dict[str, object]] = []
    for shard in shards:
        if shard.is_permuted:
            items += _items(joined, shard, replies, objective, scores)
        if shard.is_grouped:
            groups += _groups(shard, replies, objective.metrics(scores))
    entries: dict[str, object] = {}
    if settings.importances:
        entries[IMPORTANCES] = {"repeats": settings.importances, "items": items}
    if settings.metrics_by:
        entries[GROUPS] = {"by": settings.metrics_by, "items": groups}
    return entries


def _shards(
    joined: Joined, manifest: Manifest, settings: Settings
) -> Iterator[_InspectedShard]:
    """Yield the shards that are inspected, in the order of the query's tables.

    Raises:
        SettingsError: there are none.
    """
    count = 0
    for table, parts in joined.extracted.parts.items():
        has_features = manifest.table(table).encoded.width > 0
        is_permuted = bool(settings.importances) and has_features
        is_grouped = table == joined.bound.split_table
        if not (is_permuted or is_grouped):
            continue
        of_table = joined.mapping.tables[table]
        positions = of_table.expand(np.arange(of_table.rows), absent=-1)
        by_row = np.argsort(positions, kind="stable")
        for part, span in joined.extracted.shards_of(table):
            if not of_table.is_joined[span].any():
                continue
            site = ""
            rows = by_row
            if len(parts) > 1:
                site = part.site
                # joined rows without a row of the table are no shard's
                first, last = np.searchsorted(
                    positions[by_row], (span.start, span.stop)
                )
                rows = by_row[first:last]
            part_positions = np.where(
                positions[rows] < 0, -1, positions[rows] - span.start
            )
            count += 1
            yield _InspectedShard(
                part, rows, part_positions, site, is_permuted, is_grouped
            )
    if not count:
        raise SettingsError("importances: no table of the model has features")


def _told(
    joined: Joined, objective: Objective, scores: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the labels (N,) and the scores (N, d_c) that sites are told.

    A loss of residuals needs the residuals alone: they stand for the labels, of a
    model that says 0.
    """
    offset = joined.offset
    if offset is not None:
        scores = scores + offset[:, None]
    labels = objective.target.numbers
    if objective.is_of_residuals:
        return labels - scores[:, 0], np.zeros_like(scores)
    return labels, scores


def _items(
    joined: Joined,
    shard: _InspectedShard,
    replies: Replies,
    objective: Objective,
    scores: FloatArray,
) -> Iterator[dict[str, object]]:
    """Yield the entries of a table and of its features, in one shard."""
    part = shard.part
    fragment = joined.bound.fragments_of(part.table)[0]
    names = ["", *(feature.name for feature in fragment.features)]
    body = replies.body(part, InspectedPart)
    shape = len(names), 2
    metrics = objective.select(shard.rows).metrics(scores[shard.rows])
    permuted = _known(part, body.metrics, metrics, shape)
    shares = body.shares
    if shares is None or shares.shape != shape[:1]:
        raise refuse(part, f"no shares of its {len(names) - 1} features")
    if "loss" in permuted and objective.has_constant_hessian:
        permuted |= _explained(permuted["loss"], metrics)
    mean_score = float(scores[shard.rows, 0].mean())
    if (offset := joined.offset) is not None:
        mean_score += float(offset[shard.rows].mean())
    for number, name in enumerate(names):
        falls = {}
        for metric, values in permuted.items():
            mean, deviation = values[number].tolist()
            fall = mean - metrics[metric]
            falls[metric] = [-fall if rises(metric) else fall, deviation]
        yield {
            "table": part.table,
            "feature": name,
            "site": shard.site,
            "share": float(shares[number]),
            "falls": falls,
            "curve": _curve(part, body, number - 1, mean_score),
        }


def _curve(
    part: Part, body: InspectedPart, feature: int, mean_score: float
) -> list[dict[str, object]]:
    """Return the partial dependence on a feature; [] where there is none."""
    key = str(feature)
    if key not in body.curves:
        return []
    values: Sequence[object] = body.categories.get(key, ())
    if key in body.grids:
        values = body.grids[key].tolist()
    curve = body.curves[key]
    if len(values) != len(curve):
        raise refuse(part, f"a curve of {len(curve)} points for {len(values)} values")
    scores = (mean_score + curve).tolist()
    return [{"value": v, "score": s} for v, s in zip(values, scores, strict=True)]


def _explained(
    half_mse: FloatArray, metrics: Mapping[str, float]
) -> dict[str, FloatArray]:
    """Return R2, linear in the squared loss, whose sites do not know the variance.

    The model's own R2 tells it.
    """
    if metrics["r2"] >= 1.0:
        return {}
    scale = (1.0 - metrics["r2"]) / metrics["loss"]
    mean, deviation = half_mse.T
    return {"r2": np.column_stack([1.0 - scale * mean, scale * deviation])}


def _groups(
    shard: _InspectedShard, replies: Replies, metrics: Mapping[str, float]
) -> Iterator[dict[str, object]]:
    """Yield the entries of the groups in one shard."""
    body = replies.body(shard.part, InspectedPart)
    names = (*metrics, *OF_GROUPS)
    values = _known(shard.part, body.group_metrics, names, (len(body.groups),))
    for number, group in enumerate(body.groups):
        numbers = {name: float(of[number]) for name, of in values.items()}
        yield {"group": group, "site": shard.site, **numbers}


def _known(
    part: Part,
    arrays: Mapping[str, FloatArray],
    names: Sequence[str] | Mapping[str, float],
    shape: tuple[int, ...],
) -> dict[str, FloatArray]:
    """Return a part's metrics; refuse those of another name or shape."""
    for name, values in arrays.items():
        if name not in names or values.shape != shape:
            raise refuse(part, f"a metric {name!r} that it was not asked for")
    return {name: arrays[name] for name in names if name in arrays}
