"""Metrics of a model by groups of the joined rows, such as the regions of customers.

A group is told if it has enough rows, of each of two classes too. The others are pooled
with, if need be, the smallest of those that have: what is told of all groups but one
tells of that one.

Notation:
    N  joined rows        g  groups
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from tp_flower.arrays import FloatArray, IntArray, mean
from tp_flower.joins.mapping import TableRows
from tp_flower.objectives import Objective

OTHERS: Final = "(other)"
ROWS: Final = "rows"
OF_GROUPS: Final = (
    *(ROWS, "bias"),
    *("actual", "predicted", "chosen", "recall", "false_alarms"),
)
"""Metrics of a group besides the objective's."""
TWO: Final = 2


def count_cells(
    codes: IntArray, groups: int, behind: TableRows, objective: Objective
) -> IntArray:
    """Return how many rows each group has, (g, k): joined ones, and the table's own.

    Of two classes the joined rows of each are counted. A joined row without a row of
    the table counts as one.

    >>> from tp_flower.objectives import Target, make_objective
    >>> classes = make_objective("logistic", Target.of([0.0, 1.0, 1.0], ("a", "b")))
    >>> behind = TableRows(np.array([7, 7, -1]), rows=8)
    >>> count_cells(np.array([0, 0, 1]), 2, behind, classes).tolist()
    [[1, 1, 1], [0, 1, 1]]
    """
    target = objective.target
    classes = len(target.classes) if len(target.classes) == TWO else 1
    cells = classes * codes
    if classes == TWO:
        cells = cells + target.codes
    joined = np.bincount(cells, minlength=classes * groups).reshape(groups, classes)
    rows = behind.expand(np.arange(behind.rows))
    rows = np.where(behind.is_absent, -1 - np.arange(len(codes)), rows)
    _, first = np.unique(rows, return_index=True)
    of_table = np.bincount(codes[first], minlength=groups)
    return np.column_stack([joined, of_table])


def shown_groups(
    cells: IntArray, names: Sequence[str], fewest: int, most: int
) -> tuple[IntArray, list[str]]:
    """Return where each group is among those that are shown, (g,), and their names.

    Args:
        cells: (g, k), how many rows each group has, by what is counted.
        names: of the groups.
        fewest: rows of a group, of each count.
        most: groups to show, the largest ones, besides the pooled others.

    Groups are -1 that are not shown at all: where all together are too few.

    >>> cells = np.array([[4], [3], [1], [1], [0]])
    >>> shown_groups(cells, "abcde", fewest=2, most=9)
    (array([ 0,  1,  2,  2, -1]), ['a', 'b', '(other)'])
    >>> shown_groups(cells[:3], "abc", fewest=2, most=9)
    (array([0, 1, 1]), ['a', '(other)'])
    """
    order = np.argsort(-cells.sum(axis=1), kind="stable").tolist()
    large = [group for group in order if cells[group].min() >= fewest][:most]
    pooled = [group for group in order if group not in large and cells[group].any()]
    while pooled and large and cells[pooled].sum(axis=0).min() < fewest:
        pooled.append(large.pop())
    positions = np.full(len(names), -1, np.int64)
    positions[large] = np.arange(len(large))
    large_names = [names[group] for group in large]
    if pooled and cells[pooled].sum(axis=0).min() >= fewest:
        positions[pooled] = len(large)
        large_names.append(OTHERS)
    return positions, large_names


def metrics_by_group(
    objective: Objective, scores: FloatArray, codes: IntArray, groups: int
) -> dict[str, FloatArray]:
    """Return metrics of each group by name, (g,), its number of ``rows`` first.

    Args:
        objective: of the joined rows; of a loss of residuals, its labels are these.
        scores: (N, d_c).
        codes: (N,), the group of each row; -1 for none.
        groups: g.

    Besides the objective's these are the mean prediction less the label (``bias``). Of
    two classes they are ``actual`` and ``predicted``, the share of the second and its
    mean probability; ``chosen``, the share that it is predicted for; ``recall`` and
    ``false_alarms``, that share among the rows of the second and of the first class.
    """
    values: dict[str, FloatArray] = {}
    for group in range(groups):
        rows = np.flatnonzero(codes == group)
        of_group = objective.select(rows)
        for name, value in _metrics(of_group, scores[rows]):
            metric = values.setdefault(name, np.full(groups, np.nan))
            if np.isfinite(value):
                metric[group] = value
    return values


def _metrics(objective: Objective, scores: FloatArray) -> Iterator[tuple[str, float]]:
    """Yield the metrics of some rows."""
    yield ROWS, float(len(objective))
    for name, value in residual_metrics(objective, scores).items():
        yield name, value
    weights = objective.weights
    response = objective.response
    labels = objective.target.numbers
    if not response.classes:
        yield "bias", float(mean(response.predict(scores) - labels, weights))
    if len(response.classes) != TWO or objective.outputs > 1:
        return
    *_, chances = response.details(scores).values()
    chosen = response.predict(scores)
    actual = float(mean(labels, weights))
    predicted = float(mean(chances, weights))
    yield "actual", actual
    yield "predicted", predicted
    yield "bias", predicted - actual
    yield "chosen", float(mean(chosen, weights))
    for name, label in (("recall", 1.0), ("false_alarms", 0.0)):
        rows = labels == label
        if rows.any():
            own_weights = None if weights is None else weights[rows]
            yield name, float(mean(chosen[rows], own_weights))


def residual_metrics(objective: Objective, scores: FloatArray) -> Mapping[str, float]:
    """Return the metrics of scores, of a loss of residuals those that depend on them.

    Its labels may be residuals, whose variance is not the labels'.
    """
    metrics = objective.metrics(scores)
    if not objective.is_of_residuals:
        return metrics
    return {name: metrics[name] for name in metrics if name not in ("r2", "d2")}
