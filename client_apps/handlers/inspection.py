"""Inspection at a site: importances, shares, and metrics by group of a saved model.

The server tells the joined rows' scores and labels, and learns numbers about all rows.
Whatever it tells, they are rounded, of permutations that it does not know, and leave
once in a run.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from client_apps.data.run_store import Entry
from client_apps.data.saved_models import SavedModel
from client_apps.handlers.inference import by_key, key_values, load_model
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import check_rows, counts_evenly
from client_apps.privacy.proposal_checks import (
    SCORED,
    agree_in_rows,
    check_begins,
    check_named,
)
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import FloatArray, IntArray
from tp_flower.errors import MessageError, ModelError
from tp_flower.features.columns import NumericColumn, empty_column
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.grids import grid_of
from tp_flower.joins.mapping import TableRows
from tp_flower.learning.groups import (
    ROWS,
    count_cells,
    metrics_by_group,
    residual_metrics,
    shown_groups,
)
from tp_flower.learning.inspection import (
    InspectedTable,
    columns_by_feature,
    mean_shares,
    permuted_metrics,
)
from tp_flower.objectives import Objective, Target, family_named, make_objective
from tp_flower.objectives.target import LABEL
from tp_flower.protocol.codec import check_positions
from tp_flower.protocol.fields import MOST_OF_NAME
from tp_flower.protocol.inspection_messages import (
    MOST_GROUPS,
    InspectedPart,
    InspectPart,
    InspectReply,
    InspectRequest,
)
from tp_flower.protocol.messages import Action
from tp_flower.randomness import Stream, generator
from tp_flower.sources.policy import INSPECTION

DIGITS: Final = 5  # of each number that leaves
WITH_CURVES: Final = ("number", "boolean", "text")
NO_VALUE: Final = "(no value)"
NO_ROW: Final = "(no row)"
_INSPECTED: Final = "inspected-{}"
"""Entry of a part: the request that brought its numbers."""


def inspect(site: Site, request: InspectRequest) -> InspectReply:
    """Reply with the importances and the groups of the parts, which leave once."""
    check_begins(site, Action.INSPECT)
    check_named(site, request.model_name, request.model_version)
    return InspectReply(
        {
            number: _inspect_part(site, number, body, request)
            for number, body in site.each(request.parts)
        }
    )


def _inspect_part(
    site: Site, number: int, body: InspectPart, request: InspectRequest
) -> InspectedPart:
    """Return the numbers about a part's table, as its policy allows."""
    source = site.source(number)
    source.policy.check_release(INSPECTION, is_private=False)
    name = _INSPECTED.format(number)
    site.check_once(name, "a model is inspected once in a run")
    _check_rows(site, number, body)
    objective = _objective(body, request)
    part = InspectedPart()
    if site.terms.settings.importances and body.model_part is not None:
        part = _importances(site, number, body, request, objective)
    proposal = site.terms.proposal
    if proposal.split_table == proposal.parts[number].table:
        groups, metrics = _groups(site, number, body, objective)
        part = replace(part, groups=groups, group_metrics=metrics)
    site.store.save(name, Entry({}, {REQUEST: site.round.digest}))
    ledger_entries.note(site, number, ledger_entries.INSPECTION)
    return part


def _check_rows(site: Site, number: int, body: InspectPart) -> None:
    """Refuse other rows than were scored, too few, or one that counts for most."""
    source = site.source(number)
    extracted = site.extracted(number)
    check_positions(body.positions, "positions", extracted.rows)
    counts = _behind(site, number, body).multiplicity
    purpose = f"the inspection of table {extracted.table!r}"
    check_rows(source, int(np.count_nonzero(counts)), purpose)
    agree_in_rows(site, number, SCORED, counts > 0)
    if not counts_evenly(counts, source.policy.min_rows):
        check_rows(source, 1, f"{purpose}, in which one row counts for most,")


def _objective(body: InspectPart, request: InspectRequest) -> Objective:
    """Return the objective of the joined rows; MessageError where they have none."""
    try:
        family = family_named(request.loss)
    except ValueError as error:
        raise MessageError(f"'loss': {error}") from None
    classes = tuple(map(str, range(request.classes)))
    has_one_label = family.takes_label and family.label_names == (LABEL,)
    if request.classes not in family.class_counts or not has_one_label:
        raise MessageError(
            f"'loss' is {request.loss!r}, which is not one of a label with "
            f"{request.classes} classes"
        )
    if classes and not np.isin(body.labels, np.arange(len(classes))).all():
        raise MessageError(f"'labels' are not numbers of {len(classes)} classes")
    if body.weights is not None and body.weights.min(initial=1.0) <= 0.0:
        raise MessageError("'weights' are not all above 0")
    target = Target.of(body.labels, classes)
    if not len(target) or (why := family.refusal(target)):
        raise MessageError(f"'labels': {why if len(target) else 'there are none'}")
    objective = make_objective(request.loss, target, body.weights)
    if objective.outputs != body.scores.shape[1]:
        raise MessageError(f"'scores' are not {objective.outputs} of each row")
    return objective


def _importances(
    site: Site,
    number: int,
    body: InspectPart,
    request: InspectRequest,
    objective: Objective,
) -> InspectedPart:
    """Return the shares of a part's features, and metrics with values permuted."""
    settings = site.terms.settings
    saved, rows, table = _inspected_table(site, number, body, request)
    # nobody else is to know a permutation; a simulation is to be repeated
    rng = site.round.noise.generator()
    if site.is_simulated:
        rng = generator(settings.seed, Stream.PERMUTATIONS, number)
    metrics = permuted_metrics(
        table,
        body.scores,
        lambda scores: residual_metrics(objective, scores),
        settings.importances,
        rng,
    )
    grids, categories, curves = _curves(site, number, saved.encoder, rows, table)
    return InspectedPart(
        shares=rounded(mean_shares(table)),
        metrics=_all_rounded(metrics),
        grids=_all_rounded(grids),
        categories=categories,
        curves=_all_rounded(curves),
    )


def _curves(
    site: Site,
    number: int,
    encoder: SiteEncoder,
    rows: IntArray,
    table: InspectedTable,
) -> tuple[dict[str, FloatArray], dict[str, list[str]], dict[str, FloatArray]]:
    """Return values of the features, as numbers or texts, and their curves.

    By a feature's number. Vectors and times have none, nor have several outputs.
    """
    grids: dict[str, FloatArray] = {}
    categories: dict[str, list[str]] = {}
    curves: dict[str, FloatArray] = {}
    extracted = site.extracted(number)
    kinds = {info.name: info.kind for info in extracted.features}
    features = [feature.name for feature in site.fragment(number).features]
    for position, name in enumerate(features):
        has_curve = len(table.columns[position]) and kinds[name] in WITH_CURVES
        if not has_curve or table.added.shape[1] > 1:
            continue
        column = extracted.column(name).take(rows)
        grid = grid_of(column, site.source(number).min_count)
        if grid is None or not grid.column.rows:
            continue
        empty = dict.fromkeys(features, empty_column(grid.column.rows))
        encoded = encoder.transform({**empty, name: grid.column})
        key = str(position)
        if isinstance(grid.column, NumericColumn):
            grids[key] = grid.column.values
        else:
            categories[key] = [text[:MOST_OF_NAME] for text in grid.categories]
        curves[key] = table.change_to(position, encoded)[:, 0]
    return grids, categories, curves


def _inspected_table(
    site: Site, number: int, body: InspectPart, request: InspectRequest
) -> tuple[SavedModel, IntArray, InspectedTable]:
    """Return a part's saved model, and its joined rows, by their positions (n,)."""
    saved, model = load_model(site, number, body, request)
    if model.takes_regions:
        raise ModelError("the saved model reads the regions of another table")
    behind = _behind(site, number, body)
    is_joined = behind.multiplicity > 0
    rows = np.flatnonzero(is_joined)
    features = site.tables.encode(number, saved.encoder, rows)
    table = InspectedTable(
        model=model,
        features=features,
        columns=columns_by_feature(
            saved.encoder.encoder,
            [feature.name for feature in site.fragment(number).features],
        ),
        behind=behind.renumber(np.cumsum(is_joined) - 1, len(rows)),
        added=model.scores(features) + by_key(site, number, saved.effects, rows),
    )
    return saved, rows, table


def _behind(site: Site, number: int, body: InspectPart) -> TableRows:
    """Return which of a part's rows is behind each joined row that it is told of."""
    return TableRows(body.positions, site.extracted(number).rows)


def _groups(
    site: Site, number: int, body: InspectPart, objective: Objective
) -> tuple[list[str], dict[str, FloatArray]]:
    """Return the groups of the joined rows by a part's last key, and their metrics."""
    policy = site.source(number).policy
    behind = _behind(site, number, body)
    codes, names = _group_codes(site, number, behind)
    fewest = max(policy.min_cell, site.source(number).min_count)
    cells = count_cells(codes, len(names), behind, objective)
    place_of_group, group_names = shown_groups(cells, names, fewest, MOST_GROUPS)
    metrics = metrics_by_group(
        objective, body.scores, place_of_group[codes], len(group_names)
    )
    counts = metrics.pop(ROWS, np.zeros(0))
    return group_names, {ROWS: counts, **_all_rounded(metrics)}


def _group_codes(
    site: Site, number: int, behind: TableRows
) -> tuple[IntArray, list[str]]:
    """Return the group of each joined row, (N,), and the groups' names."""
    key = site.extracted(number).keys[-1]
    values = pc.cast(key_values(key), pa.string()).to_pylist()
    names = [*(str(value)[:MOST_OF_NAME] for value in values), NO_VALUE, NO_ROW]
    missing, absent = len(values), len(values) + 1
    of_rows = np.where(key.codes < 0, missing, key.codes).astype(np.int64)
    return behind.expand(of_rows, absent=absent), names


def _all_rounded(metrics: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    return {name: rounded(values) for name, values in metrics.items()}


def rounded(values: FloatArray) -> FloatArray:
    """Return values with a few digits each.

    >>> rounded(np.array([0.12345678, -1234567.0, 0.0, np.nan])).tolist()
    [0.12346, -1234600.0, 0.0, nan]
    """
    texts = (f"{value:.{DIGITS - 1}e}" for value in values.ravel())
    return np.array([float(text) for text in texts]).reshape(values.shape)
