"""What an exported model's server has: the manifest, as a runner combines tables by it.

The parts of the tables are their sites' to export; see
``client_apps/data/exported_models.py``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from strategies.inference.manifest import Manifest, ModelPart, ModelTable, resolve
from strategies.inference.model_card import model_card
from tp_flower.errors import ModelError
from tp_flower.export.archive import (
    CARD_FILE,
    FORMAT,
    JOINT_FILE,
    MODEL_FILE,
    VERSION,
    npz_bytes,
)
from tp_flower.export.parts import HostedColumns, PartName, json_bytes
from tp_flower.heads import Sum
from tp_flower.joins.joining import join_order
from tp_flower.learning.tree_arrays import TreeArrays
from tp_flower.model_names import ModelVersion
from tp_flower.objectives import Response
from tp_flower.objectives.survival import SurvivalResponse
from tp_flower.protocol.fields import CLEAR
from tp_flower.query import BoundQuery, Query, Unlabelled
from tp_flower.query.fragment import Role
from tp_flower.reports.predictions import class_values
from tp_flower.sources.tables_file import DEFAULT_NULLS
from tp_flower.terms.cutoffs import answered_nulls, answering_joins

INSTEAD: Final = "predict with predict(), which needs no export"


@dataclass(frozen=True)
class Exported:
    """What the server exports of a model, and what the sites have of it.

    Attributes:
        content: files of the archive, by path.
        parts: names and columns of the model's parts, in the order of its tables.
    """

    model: ModelVersion
    content: Mapping[str, bytes]
    parts: tuple[tuple[PartName, HostedColumns], ...]


def exported(home: Path, text: str) -> Exported:
    """Return what a saved model's manifest below a home is in an archive.

    Raises:
        ModelError: there is no such model, or it cannot be exported, and why.
    """
    manifest = resolve(home, text)
    _check(manifest)
    named = list(_named_parts(manifest))
    content = {
        MODEL_FILE: json_bytes(_about(manifest, named)),
        CARD_FILE: model_card(manifest, [name.name for name, _, _ in named]).encode(),
    }
    if manifest.trees:
        trees = TreeArrays()
        trees.add(manifest.trees)
        content[JOINT_FILE] = npz_bytes(trees.arrays)
    parts = tuple((name, _columns(table, part)) for name, table, part in named)
    return Exported(manifest.model, content, parts)


def _check(manifest: Manifest) -> None:
    """Refuse what a runner cannot combine."""
    model = manifest.model
    if manifest.start:
        raise ModelError(
            f"model {model} adds to the scores of {manifest.start}, and cannot be "
            f"exported: train one model, without boost-from, or {INSTEAD}"
        )
    if manifest.head != Sum.name:
        raise ModelError(
            f"model {model} has the head {manifest.head!r}, and only a sum can be "
            f"exported: {INSTEAD}"
        )
    if not manifest.response.link:
        raise ModelError(
            f"model {model} has the loss {manifest.loss!r}, whose predictions no "
            f"runner knows: {INSTEAD}"
        )


def _about(
    manifest: Manifest, named: list[tuple[PartName, ModelTable, ModelPart]]
) -> dict[str, Any]:
    """Return the content of `model.json`."""
    response = manifest.response
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": str(manifest.model),
        "created": manifest.created,
        "query": manifest.query,
        "label": manifest.label,
        "label-table": manifest.label_table,
        "loss": manifest.loss,
        "link": response.link,
        "classes": list(manifest.classes),
        "class-values": class_values(response).to_pylist() if response.classes else [],
        "survival": _survival(response),
        "base": list(manifest.base_score),
        "steps": _steps(manifest),
        "divided": manifest.divided,
        "factors": [table.table for table in manifest.multiplied],
        "bins": _bins(manifest),
        "parts": [
            {
                "part": name.name,
                "number": name.number,
                "table": table.table,
                "site": name.site,
                "first-region": part.first_region,
            }
            for name, table, part in named
        ],
    }


def _steps(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the tables in the order in which they are joined, and by which keys."""
    bound = _bound(manifest)
    answered = _answered(manifest, bound)
    steps = []
    order = join_order(bound.joins, bound.tables, bound.label_table, bound.outer)
    for table, numbers in order:
        joins = (bound.joins[number] for number in numbers)
        step = {
            "table": table,
            "outer": table in bound.outer,
            "keys": bound.joined_keys(table),
            "on": [
                [join.left, join.left_key, join.right, join.right_key] for join in joins
            ],
            "answered": [answered[n] for n in numbers if n in answered],
        }
        steps.append(step)
    return steps


def _answered(manifest: Manifest, bound: BoundQuery) -> dict[int, list[object]]:
    """Return the joins with a table that answers for keys it lacks, and both sides.

    The answering side is the last, and whether it answers for NULL, too.
    """
    settings = manifest.settings
    has_noise = settings.get("privacy.features", CLEAR) != CLEAR
    if has_noise or settings.get("privacy.predictions"):
        return {}
    fragments = {table: bound.fragments_of(table)[0] for table in bound.tables}
    answered: dict[int, list[object]] = {}
    answering = answering_joins(bound.joins, bound.outer, fragments)
    nulls = answered_nulls(bound.joins, answering, fragments)
    for number, table in answering.items():
        join = bound.joins[number]
        side: tuple[str, int] = (join.left, join.left_key)
        answer: tuple[str, int] = (join.right, join.right_key)
        if table == join.left:
            side, answer = answer, side
        other, key = side
        answered[number] = [*side, *answer, key in nulls.get(other, ())]
    return answered


def _bound(manifest: Manifest) -> BoundQuery:
    """Return the model's query as predictions bind it, over the training's columns."""
    columns = {
        name: dict(types)
        for table in manifest.tables
        for name, types in table.columns.items()
    }
    query = Query.from_sql(manifest.query, needs_label=False)
    settings = manifest.settings
    query = query.on_grid(str(settings.get("cutoff-grid", "")))
    query = query.sealing_cutoffs(is_set=bool(settings.get("sealed-cutoffs")))
    return query.bind(columns, Unlabelled(manifest.label_table, keeps=(Role.OFFSET,)))


def _survival(response: Response) -> list[list[float]]:
    """Return times, and the baseline's cumulative hazard at each."""
    if not (isinstance(response, SurvivalResponse) and response.has_survival):
        return []
    (baseline,) = response.baselines
    return [[time, baseline.hazard(time)] for time in response.times]


def _bins(manifest: Manifest) -> dict[str, Any] | None:
    """Return the tables whose bins trees read, and how the scores count beside them."""
    if not manifest.trees:
        return None
    trees = TreeArrays()
    _, count = trees.add(manifest.trees)
    return {
        "tables": [table.table for table in manifest.tables if table.bins],
        "share": manifest.tables_share,
        "trees": count,
    }


def _named_parts(
    manifest: Manifest,
) -> Iterator[tuple[PartName, ModelTable, ModelPart]]:
    """Yield the model's parts with their names: the alias, and the site if needed."""
    for table in manifest.tables:
        sites = Counter(part.site for part in table.parts)
        for part in table.parts:
            name = table.table
            if len(table.parts) > 1:
                name = f"{name}@{part.site}"
            if sites[part.site] > 1:
                name = f"{name}.{part.number}"
            yield PartName(name, part.number, part.site), table, part


def _columns(table: ModelTable, part: ModelPart) -> HostedColumns:
    """Return the columns of the hosted table that a part is of."""
    return HostedColumns(
        table.columns[part.name], table.formats.get(part.name, {}), DEFAULT_NULLS
    )
